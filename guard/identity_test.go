// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// everyThird admits one of three.
type everyThird struct{ n int }

func (e *everyThird) Admit(time.Duration) time.Duration {
	if e.n++; e.n%3 == 0 {
		return 0
	}
	return time.Second
}

// Every message is in exactly one state at every step of a random run.
func TestAccountingIdentity(t *testing.T) {
	steps := 0
	run := func(t *rapid.T) {
		order := rapid.SampledFrom([]Order{OrderSource, OrderKey, OrderNone}).Draw(t, "order")
		p := Policy{
			Order: order, Window: rapid.IntRange(2, 40).Draw(t, "window"),
			NoBreaker: rapid.IntRange(0, 4).Draw(t, "nobreaker") == 0,
			Retry:     Retry{Attempts: rapid.IntRange(1, 6).Draw(t, "attempts")},
		}
		if order != OrderSource {
			p.Workers = rapid.IntRange(1, min(4, p.Window)).Draw(t, "workers")
		}
		s := newSim(t, p)
		s.log = rapid.Bool().Draw(t, "log")
		s.blocksLane = rapid.IntRange(0, 3).Draw(t, "in place") == 0
		if rapid.IntRange(0, 3).Draw(t, "paced") == 0 {
			s.letterPace = &everyThird{}
		}
		s.suspects = map[string]suspect{"3": {tries: 4, attempts: 4}, "4": {tries: 1, attempts: 1}, "13": {tries: 9}}
		next, in := 0, 0
		var running, acking []*item[int]
		succeeded := map[uint64][]int{}
		keyOf := func(m int) uint64 { return uint64(m) % 5 }
		laneOf := func(m int) uint64 {
			if order != OrderKey {
				return 0
			}
			return keyOf(m)
		}
		down := false
		check := func() {
			steps++
			if err := s.account().Check(); err != nil {
				t.Fatal(err)
			}
			if err := recount(s.machine, s.now); err != nil {
				t.Fatal(err)
			}
			if got := s.account().Unsettled(); got > p.Window {
				t.Fatalf("%d unsettled in a window of %d", got, p.Window)
			}
			if len(s.unmarked) > p.Window+farWitnesses {
				t.Fatalf("%d unmarked in a window of %d", len(s.unmarked), p.Window)
			}
			if len(running) != s.count[processing] {
				t.Fatalf("%d running, %d counted", len(running), s.count[processing])
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				for range rapid.IntRange(1, 10).Draw(t, "n") {
					if s.room() > 0 {
						s.put(s.now, next, laneOf(next), 1)
						next++
						in++
					}
				}
			},
			"next": func(t *rapid.T) {
				st := s.next(s.now)
				s.post()
				switch st.kind {
				case stepHandle:
					running = append(running, st.it)
				case stepAck:
					acking = append(acking, st.it)
				}
			},
			"adopt": func(t *rapid.T) {
				if s.quiet(s.now) {
					s.tally.Received++
					running = append(running, s.takeOver(s.now-time.Second, next, laneOf(next), 1))
					next++
					in++
				}
			},
			"done": func(t *rapid.T) {
				if len(running) == 0 {
					return
				}
				i := rapid.IntRange(0, len(running)-1).Draw(t, "i")
				it := running[i]
				running = append(running[:i], running[i+1:]...)
				var err error
				switch rapid.IntRange(0, 9).Draw(t, "outcome") {
				case 0:
					err = Permanent(errDown)
				case 1:
					err = Backoff(errDown, s.origin.Add(s.now+time.Duration(rapid.IntRange(-1, 5).Draw(t, "s"))*time.Second))
				case 2:
					err = Ignore(errDown)
				case 3, 4:
					err = errDown
				default:
					if down || it.m%10 == 3 {
						err = errDown
					}
				}
				if err == nil {
					succeeded[keyOf(it.m)] = append(succeeded[keyOf(it.m)], it.m)
				}
				r := failureOf(err)
				r.name, r.known = fmt.Sprint(it.m), true
				st := s.done(s.now, it, r)
				for _, c := range s.toWrite {
					guess := c.exhausted && s.now-c.exhaustedAt >= p.withDefaults(Limits{}).Retry.Patience
					if !c.permanent && !guess && c.after < proofs {
						t.Fatalf("message %d dead-lettered as %q without proof", c.m, c.verdict)
					}
				}
				s.post()
				if st.kind == stepAck {
					acking = append(acking, st.it)
				}
			},
			"ack": func(t *rapid.T) {
				if len(acking) > 0 {
					var err error
					if rapid.IntRange(0, 9).Draw(t, "ackfails") == 0 {
						err = errDown
					}
					s.settled(acking[0], err)
					acking = acking[1:]
				}
			},
			"confirm": func(*rapid.T) {
				if len(s.letters) > 0 {
					s.confirm()
				}
			},
			"time": func(t *rapid.T) {
				s.now += time.Duration(rapid.Int64Range(1, int64(20*time.Second)).Draw(t, "d"))
				s.sweep(s.now, nil)
				s.scopes.Tick(s.now)
			},
			"outage": func(*rapid.T) { down = !down },
			"pause":  func(t *rapid.T) { s.paused = rapid.Bool().Draw(t, "paused") },
			"force": func(t *rapid.T) {
				if s.gate == nil {
					return
				}
				if rapid.Bool().Draw(t, "open") {
					s.gate.Force(s.now, time.Second, causeOperator)
				} else {
					s.gate.ForceClosed(s.now, causeOperator)
				}
				s.notice(s.now)
			},
			"": func(*rapid.T) { check() },
		})
		for key, ms := range succeeded {
			if order == OrderNone {
				break
			}
			for i := 1; i < len(ms); i++ {
				if ms[i] <= ms[i-1] {
					t.Fatalf("key %d: %d succeeded after %d", key, ms[i], ms[i-1])
				}
			}
		}
		// The end: everything is given back or is with a handler, writer or ack.
		s.ended = true
		rest, _ := s.drain(s.now)
		a := s.account()
		if err := a.Check(); err != nil {
			t.Fatal(err)
		}
		if a.Waiting != 0 || a.RetryWait != 0 || uint64(len(rest)) > a.Returned {
			t.Fatalf("after the end: %+v, %d given back", a, len(rest))
		}
		seen := map[int]bool{}
		for _, m := range rest {
			if seen[m] || s.acked[m] {
				t.Fatalf("message %d given back twice or after its ack", m)
			}
			seen[m] = true
		}
	}
	for steps < 100_000 && !t.Failed() {
		rapid.Check(t, run)
	}
	t.Logf("%d steps", steps)
}
