// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"testing"
	"time"
)

// A message fails, another source of the scope succeeds, and the message fails again:
// that was the beginning of an outage. Long after, one call of the other source gets
// through, and the message fails once more. The two failures are no proof together.
// Where others succeed meanwhile they are, however seldom the message is called.
func TestProofBeforeAnOutageIsStale(t *testing.T) {
	for _, c := range []struct {
		name   string
		every  time.Duration // between successes elsewhere, 0 for an outage
		class  error
		letter bool
	}{
		{"outage", 0, errBad, false},
		{"seldom", 30 * time.Second, errBad, true},
		{"steady", time.Second, errBad, true},
	} {
		for _, noBreaker := range []bool{true, false} {
			start := time.Second // of the process: nothing here has ever succeeded
			if noBreaker {
				start = time.Hour
			}
			for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
				t.Run(fmt.Sprint(c.name, order, !noBreaker), func(t *testing.T) {
					s := newSim(t, Policy{Order: order, NoBreaker: noBreaker, Retry: Retry{Patience: 24 * time.Hour}})
					s.now = start
					elsewhere := uint64(0)
					s.beside = func() uint64 { return elsewhere }
					fails := 0
					first := func(int) (time.Duration, error) {
						fails++
						return time.Millisecond, c.class
					}
					s.run(s.now+time.Millisecond, first, counter(1, 0))
					elsewhere++
					from := s.now
					for s.now < from+10*time.Minute && len(s.dead) == 0 {
						if c.every > 0 {
							elsewhere++
						}
						s.run(s.now+max(c.every, time.Second), first, nil)
					}
					if (len(s.dead) > 0) != c.letter {
						t.Fatalf("dead %v, %d calls", s.dead, fails)
					}
					if c.letter {
						return
					}
					elsewhere++ // a pulse
					before := fails
					s.run(s.now+2*time.Minute, first, nil)
					if fails == before || len(s.dead) > 0 {
						t.Errorf("dead %v, %d calls after a pulse", s.dead, fails-before)
					}
					for range 2 { // proofs
						elsewhere++
						s.run(s.now+30*time.Second, first, nil)
					}
					if len(s.dead) == 0 {
						t.Errorf("not dead-lettered by fresh proofs, %d calls", fails)
					}
				})
			}
		}
	}
}

// What is remembered of a message over epochs remembers when it failed after a proof.
func TestProofOfAnotherEpochIsStale(t *testing.T) {
	for _, c := range []struct {
		ago   time.Duration
		after int
	}{{time.Second, 2}, {10 * time.Minute, 1}} {
		s := newSim(t, Policy{Retry: Retry{Patience: 24 * time.Hour}})
		elsewhere := uint64(1)
		s.beside = func() uint64 { return elsewhere }
		s.now, s.born = time.Hour, 1
		s.suspects = map[string]suspect{"0": {tries: 3, attempts: 3, after: 1, afterAt: s.now - c.ago, wordAt: s.now - c.ago}}
		for until := s.now + 5*time.Minute; c.ago > time.Minute && s.now < until; s.now += stormEvery {
			s.sweep(s.now, nil) // nothing succeeds
		}
		elsewhere++
		s.put(s.now, 0, 0, 1)
		st := s.next(s.now)
		r := failureOf(errBad)
		r.name, r.known = "0", true
		s.done(s.now, st.it, r)
		if st.it.after != c.after {
			t.Errorf("%v ago: %d failures after a proof, should be %d", c.ago, st.it.after, c.after)
		}
	}
}
