// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"testing"
	"time"
)

// parkSim is the source of what was parked: each message has its own lane, its letters
// are parked so many times, and come back a delay later.
type parkSim struct {
	*sim
	t      *testing.T
	beside uint64
	back   time.Duration
	left   map[int]int             // times that a message is parked yet
	again  map[int]time.Duration   // when it comes back
	gone   map[int][]time.Duration // when its letters were written
}

func newParkSim(t *testing.T, back time.Duration) *parkSim {
	t.Helper()
	s := &parkSim{
		sim: newSim(t, Policy{Order: OrderKey, NoBreaker: true}), t: t, back: back,
		left: map[int]int{}, again: map[int]time.Duration{}, gone: map[int][]time.Duration{},
	}
	s.blocksLane = true
	s.machine.beside = func() uint64 { return s.beside }
	return s
}

// until runs the machine until an instant; handler may be nil: all fail.
func (s *parkSim) until(end time.Duration, handler func(m int) error) {
	s.t.Helper()
	for s.now < end {
		for m, at := range s.again {
			if at <= s.now {
				delete(s.again, m)
				s.put(s.now, m, uint64(m), 1)
			}
		}
		switch st := s.next(s.now); st.kind {
		case stepHandle:
			s.now += time.Millisecond
			err := errBad
			if handler != nil {
				err = handler(st.it.m)
			}
			r := failureOf(err)
			r.name, r.known = fmt.Sprint(st.it.m), true
			if st := s.done(s.now, st.it, r); st.kind == stepAck {
				s.ackNow(st.it)
			}
		case stepAck:
			s.ackNow(st.it)
		default:
			s.now += 5 * time.Millisecond
		}
		s.post()
		for len(s.letters) > 0 {
			it := s.letters[0]
			s.letters = s.letters[1:]
			s.gone[it.m] = append(s.gone[it.m], s.now)
			parks := s.left[it.m] > 0
			if parks {
				s.left[it.m]--
				s.again[it.m] = s.now + s.back
			}
			s.confirmed(s.now, it, parks)
		}
	}
}

// A guess that is parked is no dead letter: it puts the next one off by Patience and no
// more, for the same message at its next level and for others.
func TestAParkedGuessDoublesNothing(t *testing.T) {
	s := newParkSim(t, time.Second)
	from := s.now
	patience := s.policy.Retry.Patience
	s.left[0] = 3
	s.put(s.now, 0, 0, 1)
	s.until(from+2*time.Minute, nil)
	if n := len(s.gone[0]); n != 4 || s.guesses != 1 {
		t.Fatalf("%d letters at %v, %d guesses", n, s.gone[0], s.guesses)
	}
	last := from - s.back
	for i, at := range s.gone[0] {
		if wait := at - last; wait < patience || wait > s.back+patience+2*time.Second {
			t.Errorf("level %d: %s after the last, patience is %s", i, wait, patience)
		}
		last = at
	}
}

// In an outage what is parked by guesses goes one at a time.
func TestParkedGuessesKeepTheirDistance(t *testing.T) {
	s := newParkSim(t, time.Hour)
	for m := range 4 {
		s.left[m] = 1
		s.put(s.now, m, uint64(m), 1)
	}
	s.until(s.now+10*time.Minute, nil)
	var last time.Duration
	for range 4 {
		next := never
		for _, at := range s.gone {
			if at[0] > last {
				next = min(next, at[0])
			}
		}
		if next == never || last > 0 && next-last < s.policy.Retry.Patience {
			t.Errorf("parked at %v", s.gone)
		}
		last = next
	}
}

// What succeeds while a message is parked is a proof of life before its next call: it
// needs no guess if that was just now. If not, it is one proof of the two it takes.
func TestSuccessesWhileParkedAreAProof(t *testing.T) {
	for _, c := range []struct {
		name string
		age  time.Duration // of the last success when the message comes back
		more uint64        // successes beside, while it is parked
		soon bool
	}{
		{"nothing succeeds", 0, 0, false},
		{"a success just now", time.Second, 0, true},
		{"a success just now, and others", time.Second, 5, true},
		{"a success of long ago", 10 * time.Minute, 0, false},
		{"others, long ago", 0, 5, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newParkSim(t, time.Hour)
			s.left[0] = 1
			s.put(s.now, 0, 0, 1)
			s.until(s.now+time.Minute, nil)
			if len(s.gone[0]) != 1 {
				t.Fatalf("not parked: %v", s.gone)
			}
			s.beside += c.more
			back := s.again[0]
			if c.age > 0 {
				s.until(back-c.age, nil)
				s.put(s.now, 1, 1, 1)
			}
			s.until(back+3*time.Second, func(m int) error {
				if m == 1 {
					return nil
				}
				return errBad
			})
			if soon := len(s.gone[0]) == 2; soon != c.soon {
				t.Errorf("dead-lettered within 3s: %t", soon)
			}
			s.until(back+time.Minute, nil)
			if len(s.gone[0]) != 2 {
				t.Errorf("never dead-lettered: %v", s.gone)
			}
		})
	}
}

// What had succeeded before a message was parked proves nothing about it later.
func TestASuccessBeforeItWasParkedIsNoProof(t *testing.T) {
	s := newParkSim(t, time.Second)
	s.left[0] = 1
	s.put(s.now, 0, 0, 1)
	s.until(s.now+2*time.Second, nil)
	s.put(s.now, 1, 1, 1)
	s.until(s.now+4*time.Second, func(m int) error {
		if m == 1 {
			return nil
		}
		return errBad
	})
	if len(s.gone[0]) != 1 || s.guesses > 0 {
		t.Fatalf("not parked by proof: %v, %d guesses", s.gone, s.guesses)
	}
	back := s.gone[0][0] + s.back
	s.until(back+s.policy.Retry.Patience-time.Second, nil)
	if n := len(s.gone[0]); n != 1 || back-s.provedAt > proofFresh {
		t.Errorf("%d letters, the last success is %s old", n, back-s.provedAt)
	}
}

// What is remembered of parked messages is bounded, and makes room for others.
func TestParkedMessagesAreForgottenFirst(t *testing.T) {
	s := newParkSim(t, time.Hour)
	s.suspect("failed", suspect{tries: 1})
	for n := range 2 * maxSuspects {
		s.suspect(fmt.Sprint(n), suspect{parked: true})
	}
	if _, kept := s.suspects["failed"]; !kept || len(s.suspects) != maxSuspects {
		t.Errorf("%d remembered, the failed one too: %t", len(s.suspects), kept)
	}
	for n := range 2 * maxSuspects {
		s.suspect(fmt.Sprint("failed", n), suspect{tries: 1})
	}
	if len(s.suspects) != maxSuspects {
		t.Errorf("%d remembered", len(s.suspects))
	}
}
