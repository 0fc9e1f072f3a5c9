// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// What internal/gossip carries; the limiter does not know it.
type section interface {
	Mark(to crdt.Replica) uint64
	Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) (_ []byte, upto uint64)
	Merge(c crdt.Contact, b []byte) error
	Gone(now time.Duration, peer crdt.Replica)
}

var _, _ section = (*Node)(nil), (*Set)(nil)

func pairOf(t testing.TB, cfg Config) (a, b *Node) {
	t.Helper()
	cfg.Roster = Roster{Members: []Member{{Name: "a"}, {Name: "b"}}}
	if cfg.Limit == (Limit{}) {
		cfg.Limit = Limit{Rate: 1000, Burst: 100}
	}
	nodes := [2]*Node{}
	for i, name := range []string{"a", "b"} {
		n, err := NewNode(crdt.Replica{Name: name, Incarnation: uint64(i + 1)}, cfg, 0)
		if err != nil {
			t.Fatal(err)
		}
		nodes[i] = n
	}
	return nodes[0], nodes[1]
}

// That a peer is there is a change of its own, or two idle incarnations would not write to
// each other before the first keep-alive, and mint nothing until then.
func TestExistenceIsAChange(t *testing.T) {
	a, b := pairOf(t, Config{})
	if before := a.Mark(b.self); before != 1 {
		t.Errorf("mark %d before they met, want 1", before)
	}
	packet, upto := a.Delta(time.Second, nil, b.self, 0, 1200)
	if len(packet) == 0 || upto != 1 || a.Mark(b.self) != 1 {
		t.Errorf("%d bytes up to %d, mark %d, want up to 1", len(packet), upto, a.Mark(b.self))
	}
	if e := a.row("k").entry(a.peer(b.self)); a.Mark(b.self) != 1 || e.change.Mark != 0 {
		t.Errorf("an entry is a change before there is anything to tell: %d, mark %d", e.change.Mark, a.Mark(b.self))
	}
}

// All entries are seen though they are dropped on the way.
func TestEntriesBearDrops(t *testing.T) {
	a, b := pairOf(t, Config{})
	p := a.peer(b.self)
	for _, key := range []string{"k1", "k2", "k3", "k4"} {
		a.row(key).entry(p).touch()
	}
	var seen []string
	for e := range p.entries {
		if seen = append(seen, e.row.name); len(seen)%2 == 0 {
			e.drop()
		}
	}
	var left []string
	for e := range p.entries {
		left = append(left, e.row.name)
	}
	if !slices.Equal(seen, []string{"k1", "k2", "k3", "k4"}) || !slices.Equal(left, []string{"k1", "k3"}) {
		t.Errorf("saw %v, left %v", seen, left)
	}
}

// say has from write to the other, and returns the packet and its error.
func say(now time.Duration, from, to *Node) ([]byte, error) {
	b, _ := from.Delta(now, nil, to.self, 0, 1200)
	return b, to.Merge(crdt.Contact{From: from.self, Now: now, Sent: now, Echo: now - ms}, b)
}

// books is all that a packet could have changed.
func (n *Node) books() string {
	var s strings.Builder
	fmt.Fprintln(&s, n.mintAt, n.series, len(n.rows), len(n.peers), n.voided)
	var keys []string
	for k := range n.rows {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		r := n.rows[k]
		fmt.Fprintln(&s, k, r.level, r.lent, r.held, r.sum)
		for _, e := range r.entries {
			if e != nil {
				fmt.Fprintln(&s, e.lent, e.borrowed, e.need, e.itsNeed, e.sent)
			}
		}
	}
	for _, p := range n.peers {
		fmt.Fprintln(&s, p.id, p.changes.Mark(), p.sent, p.heard, p.echo, p.lease, p.itsEpoch)
	}
	return s.String()
}

func TestLoanOverTheWire(t *testing.T) {
	a, b := pairOf(t, Config{})
	now := 2 * time.Second
	for range 3 {
		for _, err := range []error{second(say(now, a, b)), second(say(now, b, a))} {
			if err != nil {
				t.Fatal(err)
			}
		}
		now += 10 * ms
	}
	if !b.Demand(now, "k", 80) || b.Serve(now, "k", 80) {
		t.Fatal("80 of a share of 50 were served")
	}
	for range 10 {
		b.Tick(now)
		_, err1 := say(now, b, a)
		a.Tick(now)
		_, err2 := say(now, a, b)
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		now += 10 * ms
	}
	if !b.Serve(now, "k", 80) {
		v, _ := b.View(now, "k")
		t.Fatalf("not lent: %+v", v)
	}
	v, _ := a.View(now, "k")
	if v.Lent == 0 {
		t.Fatal("the lender does not know of a loan")
	}
	b.Tick(now + 10*ms)
	if _, err := say(now+10*ms, b, a); err != nil {
		t.Fatal(err)
	}
	if after, _ := a.View(now+10*ms, "k"); after.Lent >= v.Lent {
		t.Errorf("%d out before it was reported used, %d after", v.Lent, after.Lent)
	}
}

func second(_ []byte, err error) error { return err }

// What was borrowed before a write-off is void with the first packet that tells of
// a new epoch, whatever else is in it.
func TestNewEpochVoids(t *testing.T) {
	a, b := pairOf(t, Config{})
	now := 2 * time.Second
	b.Demand(now, "k", 80)
	for range 6 {
		b.Tick(now)
		_, err1 := say(now, b, a)
		a.Tick(now)
		_, err2 := say(now, a, b)
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		now += 10 * ms
	}
	v, _ := b.View(now, "k")
	if v.Held == 0 {
		t.Fatal("nothing was lent")
	}
	header, _ := a.Delta(now, nil, b.self, a.Mark(b.self), 1200)
	header = append(header[:9:9], 1) // epoch 1
	header = binary.AppendUvarint(header, uint64(now/time.Microsecond))
	if err := b.Merge(crdt.Contact{From: a.self, Now: now, Sent: now, Echo: now}, header); err != nil {
		t.Fatal(err)
	}
	if after, _ := b.View(now, "k"); after.Held != 0 || after.Sums.Voided != v.Held {
		t.Errorf("%d held after a new epoch, of %d", after.Held, v.Held)
	}
	// A packet of the old epoch that comes late lends nothing again.
	old, _ := a.Delta(now, nil, b.self, 0, 1200)
	if err := b.Merge(crdt.Contact{From: a.self, Now: now, Sent: now + ms, Echo: now}, old); err != nil {
		t.Fatal(err)
	}
	if after, _ := b.View(now, "k"); after.Held != 0 {
		t.Errorf("%d held from an old epoch", after.Held)
	}
}

// What is refused has changed nothing, and says why.
func TestRefused(t *testing.T) {
	a, b := pairOf(t, Config{MaxKeys: 2})
	now := 2 * time.Second
	for range 4 {
		a.Take(now, "k", 90)
		_, err1 := say(now, a, b)
		_, err2 := say(now, b, a)
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		now += 20 * ms
		a.Tick(now)
		b.Tick(now)
	}
	good, _ := a.Delta(now, nil, b.self, 0, 1200)
	header, _ := a.Delta(now, nil, b.self, a.Mark(b.self), 1200)
	with := func(i int, x byte) []byte { c := slices.Clone(good); c[i] ^= x; return c }
	entry := func(parts byte, values ...uint64) []byte {
		c := append(slices.Clone(header), 1, 'k', parts)
		for _, v := range values {
			c = binary.AppendUvarint(c, v)
		}
		return c
	}
	newKeys := slices.Clone(header)
	for _, k := range "vwxyz" {
		newKeys = append(newKeys, 1, byte(k), hasLoan, 9, 9)
	}
	far := binary.AppendUvarint(slices.Clone(header[:10]), uint64(time.Hour/time.Microsecond))
	contact := crdt.Contact{From: a.self, Now: now, Sent: now, Echo: now - ms}
	other := func(f func(*crdt.Contact)) crdt.Contact { c := contact; f(&c); return c }
	for _, tt := range []struct {
		name string
		c    crdt.Contact
		b    []byte
		want error
	}{
		{"empty", contact, nil, errMalformed},
		{"version", contact, with(0, 2), errMalformed},
		{"config", contact, with(1, 1), errMismatch},
		{"another incarnation", contact, with(5, 4), errStale},
		{"cut off", contact, good[:len(good)-1], errMalformed},
		{"header cut off", contact, header[:7], errMalformed},
		{"a byte too many", contact, append(slices.Clone(good), 0), errMalformed},
		{"unknown part", contact, entry(8), errMalformed},
		{"series 0", contact, entry(hasLoan, 0, 5), errMalformed},
		{"need 0", contact, entry(hasNeed, 0), errMalformed},
		{"two bytes for 1", contact, append(entry(hasNeed), 0x81, 0), errMalformed},
		{"too large", contact, entry(hasNeed, 1<<62), errMalformed},
		{"a lease from the future", contact, far, errMalformed},
		{"a stamp from the future", other(func(c *crdt.Contact) { c.Echo = now + ms }), good, errMalformed},
		{"ourselves", other(func(c *crdt.Contact) { c.From = b.self }), good, errMalformed},
		{"no learner", other(func(c *crdt.Contact) { c.From.Name = "c" }), good, errMismatch},
		{"an earlier incarnation", other(func(c *crdt.Contact) { c.From.Incarnation = 0 }), good, errStale},
		{"too many keys", contact, newKeys, ErrTooManyKeys},
	} {
		before := b.books()
		if err := b.Merge(tt.c, tt.b); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
		if after := b.books(); after != before {
			t.Errorf("%s: refused, and changed\n%s to\n%s", tt.name, before, after)
		}
	}
	if err := b.Merge(contact, good); err != nil {
		t.Errorf("the good one: %v", err)
	}
	// More used than lent.
	e := b.rows["k"].with(b.peers["a"])
	if e == nil || e.lent.series == 0 {
		t.Fatal("nothing was lent")
	}
	if err := b.Merge(contact, entry(hasBorrowed, e.lent.series, uint64(e.lent.out), 1)); !errors.Is(err, errMalformed) {
		t.Errorf("more used than lent: %v", err)
	}
}

// A key for which a peer has no room is no hindrance to those that it knows: their
// leases are renewed and their tokens lent. When there is room, the key gets its part
// within a second and a bit, though nothing has changed about it since it was told.
func TestNoRoomForAKey(t *testing.T) {
	a, b := pairOf(t, Config{MaxKeys: 3})
	b.cfg.MaxKeys = 100
	nodes, upto := []*Node{a, b}, map[*Node]uint64{}
	now := 2 * time.Second
	got := map[string]int{} // by b
	run := func(d time.Duration, use func()) {
		t.Helper()
		for end := now + d; now < end; now += 10 * ms {
			use()
			for i, n := range nodes {
				other := nodes[1-i]
				packet, mark := n.Delta(now, nil, other.self, upto[n], 1200)
				if err := other.Merge(crdt.Contact{From: n.self, Now: now, Sent: now, Echo: now - 10*ms}, packet); err != nil {
					t.Fatalf("at %v: %v", now, err)
				}
				upto[n] = mark
			}
			for _, n := range nodes {
				n.Tick(now)
			}
		}
	}
	use := func(n *Node, keys ...string) {
		for _, key := range keys {
			for range 20 { // of 10/tick
				if n.Take(now, key, 1) && n == b {
					got[key]++
				}
			}
		}
	}
	run(time.Second, func() { use(b, "k") })
	// Until now b had all that either minted; the owner of the room keeps it for 3 s.
	clear(got)
	run(3*time.Second, func() { use(a, "x", "y"); use(b, "k", "z", "z1", "z2", "z3", "z4", "z5") })
	if got["k"] < 2900 {
		t.Errorf("%d of 3000 tokens of k, beside a key that is not known", got["k"])
	}
	if a.refused.Needs == 0 || a.rows["z"] != nil {
		t.Fatalf("z is known: %d needs refused", a.refused.Needs)
	}
	if got["z"] > 1600 {
		t.Errorf("%d tokens of z without a loan", got["z"])
	}
	run(2*time.Second, func() { use(b, "k", "z") })
	clear(got)
	run(time.Second, func() { use(b, "k", "z") })
	if got["z"] < 900 {
		t.Errorf("%d of 1000 tokens of z, when there was room", got["z"])
	}
}

// A loan comes back also of a key for which the borrower has no room any more: it filled
// its lender's cap for ever.
func TestNoRoomForALoan(t *testing.T) {
	a, b := pairOf(t, Config{MaxKeys: 1})
	f := forger{self: b.self, sent: 2 * time.Second}
	now := 2 * time.Second
	a.Take(now, "x", 1)
	if err := f.lend(a, now, "k", 5); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		now += 10 * ms
		a.Take(now, "x", 1)
		a.Tick(now)
	}
	if r := a.rows["k"]; r == nil || r.held != 0 || r.sum.Returned != 5*micro {
		t.Errorf("the loan did not come back: %+v", r)
	}
}

// What is left of a loan when a whole token was spent goes back, however little: else the key
// is never idle, and both nodes step it and renew its lease for ever.
func TestCrumbsOfAnIdleKeyGoBack(t *testing.T) {
	a, b := pairOf(t, Config{})
	now := time.Duration(0)
	run := func(until time.Duration) {
		t.Helper()
		for ; now < until; now += 10 * ms {
			_, err1 := say(now, a, b)
			_, err2 := say(now, b, a)
			if err := errors.Join(err1, err2); err != nil && now > 0 {
				t.Fatal(err)
			}
			a.Tick(now)
			b.Tick(now)
		}
	}
	run(2 * time.Second)
	r := b.row("k")
	r.update(now, b.mintAt)
	e := r.entry(b.peer(a.self))
	e.lend(micro + crumb/2)
	e.touch()
	if _, err := say(now, b, a); err != nil {
		t.Fatal(err)
	}
	if !a.Take(now, "k", 1) || a.rows["k"].held != crumb/2 {
		t.Fatalf("held: %+v", a.rows["k"])
	}
	run(30 * time.Second)
	if held, lent := a.rows["k"].held, b.rows["k"].lent; held+lent > 0 {
		t.Errorf("%d are held, %d lent after 28 s", held, lent)
	}
}

// A packet never exceeds its room, and what does not fit follows.
func TestRoom(t *testing.T) {
	a, b := pairOf(t, Config{})
	now := 2 * time.Second
	if err := second(say(now, b, a)); err != nil {
		t.Fatal(err)
	}
	now += ms
	for i := range 200 {
		a.Take(now, fmt.Sprintf("a key of some length %03d", i), 90)
	}
	a.Tick(now)
	since, seen := uint64(0), 0
	for n := 0; since < a.Mark(b.self); n++ {
		p, upto := a.Delta(now, make([]byte, 5, 2000), b.self, since, 300)
		if len(p) > 305 {
			t.Fatalf("%d bytes in a room of 300", len(p)-5)
		}
		if upto <= since || n > 200 {
			t.Fatalf("no progress from %d: %d", since, upto)
		}
		since = upto
		if err := b.Merge(crdt.Contact{From: a.self, Now: now, Sent: now + time.Duration(n), Echo: now - 2*ms}, p[5:]); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range b.rows {
		if e := r.with(b.peers["a"]); e != nil && e.itsNeed > 0 {
			seen++
		}
	}
	if seen != 200 {
		t.Errorf("%d of 200 needs arrived", seen)
	}
	if a.Mark(crdt.Replica{Name: "c"}) != 0 || a.Mark(crdt.Replica{Name: "b", Incarnation: 9}) != 1 {
		t.Error("there is something to tell to who is no learner, or nothing to a new incarnation")
	}
	if p, upto := a.Delta(now, nil, b.self, since, 10); len(p) != 0 || upto != since {
		t.Errorf("%d bytes up to %d in no room", len(p), upto)
	}
}

// Packets in any order, any number of times, come to the same.
func TestMergeCommutes(t *testing.T) {
	a, _ := pairOf(t, Config{})
	now := 2 * time.Second
	_, b := pairOf(t, Config{})
	if err := second(say(now, b, a)); err != nil {
		t.Fatal(err)
	}
	type packet struct {
		c crdt.Contact
		b []byte
	}
	var all []packet
	for i := range 5 {
		now += 25 * ms
		a.peers["b"].echo = now
		if i == 2 {
			a.row("k").entry(a.peers["b"]).itsNeed = 30 * micro
		}
		a.Take(now, "k", 1)
		a.Take(now, "other", 5<<i)
		a.Tick(now)
		p, _ := a.Delta(now, nil, b.self, 0, 1200)
		all = append(all, packet{crdt.Contact{From: a.self, Now: now, Sent: now, Echo: ms}, p})
	}
	var want []string
	for seed := range 200 {
		_, b := pairOf(t, Config{})
		b.advance(now)
		order := slices.Concat(all, all)
		if seed > 0 {
			for i := range order {
				j := (i*7 + seed*13) % len(order)
				order[i], order[j] = order[j], order[i]
			}
		}
		for _, p := range order {
			p.c.Now = now
			if err := b.Merge(p.c, p.b); err != nil {
				t.Fatal(err)
			}
		}
		e := b.rows["k"].with(b.peers["a"])
		got := []string{fmt.Sprint(e.borrowed.series, e.borrowed.out, e.held(), e.itsNeed, b.rows["k"].held), fmt.Sprint(b.rows["other"].with(b.peers["a"]).itsNeed)}
		if want == nil {
			want = got
			if e.borrowed.out == 0 {
				t.Fatal("nothing was lent")
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("order %d: %v, want %v", seed, got, want)
		}
	}
}

func FuzzMerge(f *testing.F) {
	a, b := pairOf(f, Config{MaxKeys: 50})
	now := 2 * time.Second
	for range 5 {
		for _, n := range []*Node{a, b} {
			n.Take(now, "k of "+n.self.Name, 60)
			n.Take(now, "k", 10)
			n.Tick(now)
		}
		for _, err := range []error{second(say(now, a, b)), second(say(now, b, a))} {
			if err != nil {
				f.Fatal(err)
			}
		}
		now += 20 * ms
	}
	p, _ := a.Delta(now, nil, b.self, 0, 1200)
	f.Add(p[9:], int64(0))
	f.Add([]byte{}, int64(-5))
	f.Fuzz(func(t *testing.T, body []byte, sent int64) {
		_, b := pairOf(t, Config{MaxKeys: 50})
		b.Take(now, "k", 60)
		b.advance(now)
		packet := append(slices.Clone(p[:9]), body...) // a header that is accepted
		before := b.books()
		c := crdt.Contact{From: a.self, Now: now, Sent: time.Duration(sent), Echo: now - ms}
		if err := b.Merge(c, packet); err != nil {
			if after := b.books(); after != before {
				t.Fatalf("%v, and changed\n%s to\n%s", err, before, after)
			}
			return
		}
		for range 3 {
			r := b.rows["k"]
			if r.level < 0 || r.level+r.lent > r.cap || r.held < 0 {
				t.Fatalf("level %d, lent %d of %d, held %d", r.level, r.lent, r.cap, r.held)
			}
			again := b.books()
			if err := b.Merge(c, packet); err == nil && b.books() != again {
				t.Fatalf("merged twice changes\n%s to\n%s", again, b.books())
			}
			if out, _ := b.Delta(now, nil, a.self, 0, 1200); len(out) > 1200 {
				t.Fatalf("%d bytes", len(out))
			}
			b.Tick(now)
			_ = b.Merge(c, packet) // it may name what was lent just now
		}
	})
}
