// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package adaptertest

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Kills is a test of consumer processes that are killed one after another: in
// an outage of what the handler depends on, while they handle, and while they
// recover, in turns. Messages are the numbers from 0, written out as bodies.
type Kills struct {
	Kills int // how many processes are killed
	Each  int // how many messages are published before each starts
	Twice int // how many messages may be handled twice for each kill
	// Lanes is in how many lanes the adapter keeps order: message i is in lane i
	// modulo Lanes. 0 if it promises none.
	Lanes int
	// Args is what Suite.Child gets to know: an address, a queue.
	Args []string
	// Publish returns when the broker has the messages from to to-1.
	Publish func(from, to int)
	// Left is how many messages the broker still has to deliver, or may have to;
	// not 0 if it cannot be told right now. Those in the process's hands need
	// not be among them.
	Left func() int
}

// LosesNothing fails the test if a message is never handled, if more than Twice
// a kill are handled again, or if one is first handled before all that precede
// it in its lane.
func (k Kills) LosesNothing(t *testing.T) {
	t.Helper()
	b := k.run(t, false)
	t.Logf("%d kills, %d messages: %v", k.Kills, k.Kills*k.Each, b)
	if b.lost != 0 || b.disorder != 0 || b.twice > k.Kills*k.Twice {
		t.Errorf("want 0 lost, 0 out of order and at most %d handled twice", k.Kills*k.Twice)
	}
}

// CatchesMutant fails the test if a process that settles before it handles
// loses nothing, so that LosesNothing would prove nothing.
func (k Kills) CatchesMutant(t *testing.T) {
	t.Helper()
	b := k.run(t, true)
	t.Logf("the mutant, %d kills, %d messages: %v", k.Kills, k.Kills*k.Each, b)
	if b.lost == 0 {
		t.Error("a consumer that settles first lost nothing: the test without the mutant proves nothing")
	}
}

// run publishes, starts and kills, and returns the books when all is handled.
func (k Kills) run(t *testing.T, mutant bool) books {
	t.Helper()
	l := newLedger(t, k.Kills*k.Each, k.Lanes)
	o := orders{Ledger: l.path, Outage: filepath.Join(t.TempDir(), "outage"), Mutant: mutant, Args: k.Args}
	outage := func(on bool) {
		if on {
			if err := os.WriteFile(o.Outage, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		} else if err := os.Remove(o.Outage); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	for i := range k.Kills {
		const handling, recovery = 1, 2
		k.Publish(i*k.Each, (i+1)*k.Each)
		outage(i%3 != handling)
		before := l.size(t)
		kill := o.start(t)
		Eventually(t, "the process gets a message", func() bool { return l.size(t) > before })
		outage(i%3 != handling && i%3 != recovery)
		time.Sleep(time.Duration(20+rng.IntN(250)) * time.Millisecond)
		kill()
	}
	outage(false)
	kill := o.start(t)
	defer kill()
	// What is left may be everything, one message at a time; a minute in which
	// nothing is handled is too long.
	for size, since := int64(-1), time.Now(); ; time.Sleep(5 * time.Millisecond) {
		if now := l.size(t); now != size {
			size, since = now, time.Now()
		}
		idle := time.Since(since)
		if k.Left() == 0 {
			if b := l.audit(t); b.lost == 0 || idle > 2*time.Second {
				return b
			}
		}
		if idle > time.Minute {
			t.Fatalf("nothing is handled any more, and the broker has %d messages left: %v", k.Left(), l.audit(t))
		}
	}
}
