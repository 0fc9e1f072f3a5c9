// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"slices"
	"testing"
	"time"
)

// Below the number of nodes a limit is still reached, and shared: 5/s over ten
// nodes, all of which have more waiters than they can serve.
func TestSmallLimit(t *testing.T) {
	for _, lossy := range []float64{0, .35} {
		for seed := range uint64(5) {
			f := newFleet(t, 10, Limit{Rate: 5, Burst: 5}, seed)
			f.loss = lossy
			f.pass(4 * time.Second) // the fleet meets, and the bucket fills
			began := f.now
			for range 40 {
				for i := range f.nodes {
					f.wait(i)
				}
			}
			f.pass(began + 10*time.Second)
			t.Logf("seed %d, loss %.2f: %d in 10 s, by node %v", seed, lossy, f.admitted, f.by)
			if f.admitted < 53 || f.admitted > 55 || f.over > 0 {
				t.Errorf("seed %d, loss %.2f: %d admitted, %v over; want 53 to 55 and none", seed, lossy, f.admitted, f.over)
			}
			if most := slices.Max(f.by); most > 16 {
				t.Errorf("seed %d, loss %.2f: a node got %d, above three times its 5.4: %v", seed, lossy, most, f.by)
			}
		}
	}
}

// ownerOf is the node on which the key lives.
func (f *fleet) ownerOf() int { return f.cfg.Roster.owner("k", int64(f.limit.Burst)*micro) }

// While others wait, the owner has what it drew, also when a token came and the
// draw is late.
func TestOwnerDrawsToo(t *testing.T) {
	f := newFleet(t, 10, Limit{Rate: 5, Burst: 5}, 1)
	f.pass(4 * time.Second)
	owner := f.ownerOf()
	for range 20 {
		for i := range f.nodes {
			if i != owner {
				f.wait(i)
			}
		}
	}
	f.pass(f.now + time.Second)
	s := f.nodes[owner]
	r := f.key(s)
	if !r.drawing {
		t.Fatal("nobody needs anything")
	}
	s.advance(s.now + 300*ms)
	if s.take(r, micro) {
		t.Error("the owner took a token that others were to draw for")
	}
	if r.level < micro {
		t.Error("there was no token")
	}
}

// A token that nobody uses goes owner.
func TestIdleTokensGoToTheOwner(t *testing.T) {
	f := newFleet(t, 10, Limit{Rate: 5, Burst: 5}, 1)
	f.pass(4 * time.Second)
	away := (f.ownerOf() + 1) % 10
	s := f.nodes[away]
	for range 3 {
		s.advance(s.clock(f.now))
		s.demand(f.key(s), micro) // and never served
	}
	f.settleNode(away)
	f.pass(f.now + 200*ms)
	held := f.key(s).held
	if held < 3*micro {
		t.Fatalf("%d held of 3 that were asked for", held/micro)
	}
	s.Withdraw(s.clock(f.now), "k", 3)
	f.pass(f.now + 200*ms)
	if r := f.key(s); r.held != held {
		t.Errorf("%d held 200 ms later, of %d", r.held/micro, held/micro)
	}
	f.pass(f.now + 400*ms)
	if r := s.rows["k"]; r != nil && r.held != 0 {
		t.Errorf("%d held 600 ms later", r.held/micro)
	}
}
