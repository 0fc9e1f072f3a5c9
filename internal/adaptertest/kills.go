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

// Kills is a test of consumer processes that are killed one after another: in turn during
// an outage of the dependency, during handling, and during recovery. Messages are the
// numbers from 0, as text.
type Kills struct {
	Kills int // how many processes are killed
	Each  int // how many messages are published before each starts
	Twice int // how many messages may be handled twice for each kill
	// Lanes is the number of lanes in which the adapter keeps the order: message i is in
	// lane i modulo Lanes. 0 if it keeps no order.
	Lanes int
	// Args are passed to Suite.Child: an address, a queue.
	Args []string
	// Publish publishes the messages from to to-1, and returns when the broker has them.
	Publish func(from, to int)
	// Left returns how many messages the broker still has, or may still have, to deliver.
	// It returns a number above 0 if that is unknown now. Messages that the process holds
	// need not be counted.
	Left func() int
}

// LosesNothing fails the test if a message is never handled, if messages are handled again
// more than Kills*Twice times, or if a message is first handled before an earlier message of
// its lane.
func (k Kills) LosesNothing(t *testing.T) {
	t.Helper()
	b := k.run(t, false)
	t.Logf("%d kills, %d messages: %v", k.Kills, k.Kills*k.Each, b)
	if b.lost != 0 || b.disorder != 0 || b.twice > k.Kills*k.Twice {
		t.Errorf("want 0 lost, 0 out of order and at most %d handled twice", k.Kills*k.Twice)
	}
}

// CatchesMutant fails the test if a process that settles before it handles loses nothing:
// then LosesNothing would prove nothing.
func (k Kills) CatchesMutant(t *testing.T) {
	t.Helper()
	b := k.run(t, true)
	t.Logf("the mutant, %d kills, %d messages: %v", k.Kills, k.Kills*k.Each, b)
	if b.lost == 0 {
		t.Error("a consumer that settles first lost nothing: the test without the mutant proves nothing")
	}
}

// run publishes messages, and starts and kills processes. It returns the audit when the
// broker has no message left and all are handled. If some are lost, it returns after 2 s in
// which no process handles a message.
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
	// All messages may still be left, and are handled one at a time. A minute without a
	// handled message is too long.
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
