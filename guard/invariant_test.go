// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// A random run with invariants of its own: credits are neither minted nor lost,
// a probe that is out is with somebody, and once all is well everything is settled.
func TestCreditsAndProbes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
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
		next := 0
		dead := 0
		var running, acking []*item[int]
		down := false
		var looking []*item[int] // taken aside, with the book of then
		var books []*ruleBook
		post := func() {
			for _, it := range s.toWrite {
				if it.rule == nil { // what the quarantine condemns costs no credit
					dead++
				}
			}
			s.post()
		}
		look := func(i int) {
			it, book := looking[i], books[i]
			looking, books = slices.Delete(looking, i, i+1), slices.Delete(books, i, i+1)
			s.looked(s.now, it, book, quarantinedBy(book, it.m))
			post()
		}
		put := func() {
			key := uint64(0)
			if order == OrderKey {
				key = uint64(next) % 5
			}
			s.put(s.now, next, key, 1)
			next++
		}
		check := func() {
			if err := s.account().Check(); err != nil {
				t.Fatal(err)
			}
			if err := recount(s.machine, s.now); err != nil {
				t.Fatal(err)
			}
			if len(s.unmarked) > p.Window+farWitnesses {
				t.Fatalf("%d unmarked in a window of %d", len(s.unmarked), p.Window)
			}
			probing := 0
			if s.round.on {
				probing++
			}
			for _, it := range s.busy {
				if it.probe {
					probing++
				}
			}
			if got, want := s.budget.Spent(), uint64(dead); got != want {
				t.Fatalf("CREDITS: spent %d, dead %d", got, dead)
			}
			if s.gate != nil {
				if sn := s.gate.Breaker.Snapshot(s.now); sn.ProbesOut > 0 && probing == 0 {
					t.Fatalf("PROBE: %d out, nobody has one", sn.ProbesOut)
				}
			}
		}
		finish := func(it *item[int], err error) {
			st := s.done(s.now, it, failureOf(err))
			post()
			if st.kind == stepAck {
				acking = append(acking, st.it)
			}
		}
		version := uint64(0)
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				for range rapid.IntRange(1, 10).Draw(t, "n") {
					if s.room() > 0 {
						put()
					}
				}
			},
			"next": func(*rapid.T) {
				st := s.next(s.now)
				post()
				switch st.kind {
				case stepHandle:
					if r := quarantinedBy(s.book, st.it.m); r != nil {
						t.Fatalf("HANDLED: %d, though %v is in quarantine", st.it.m, r)
					}
					running = append(running, st.it)
				case stepAck:
					acking = append(acking, st.it)
				case stepLook:
					looking, books = append(looking, st.it), append(books, s.book)
				}
			},
			"look": func(t *rapid.T) {
				if len(looking) > 0 {
					look(rapid.IntRange(0, len(looking)-1).Draw(t, "i"))
				}
			},
			"quarantine": func(t *rapid.T) {
				version++ // also over an empty list, as the guard's
				rules := rapid.SliceOfNDistinct(rapid.IntRange(0, 6), 0, 3, rapid.ID[int]).Draw(t, "rules")
				s.heedRules(s.now, bookOf(version, rules...))
				post()
			},
			"many": func(t *rapid.T) { // as a loop does
				for range rapid.IntRange(1, 60).Draw(t, "n") {
					st := s.next(s.now)
					post()
					switch st.kind {
					case stepHandle:
						var err error
						if down || st.it.m%10 == 3 {
							err = errDown
						}
						s.now += time.Millisecond
						finish(st.it, err)
					case stepAck:
						s.settled(st.it, nil)
					case stepLook:
						looking, books = append(looking, st.it), append(books, s.book)
						look(len(looking) - 1)
					default:
						if st.at > s.now {
							s.now = min(st.at, s.now+time.Hour)
						} else {
							s.now += 10 * time.Millisecond
						}
					}
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
					err = Backoff(errDown, s.origin.Add(s.now+time.Second))
				case 2:
					err = mark(errDown, cancelled, time.Time{})
				case 3, 4, 5:
					err = errDown
				default:
					if down || it.m%10 == 3 {
						err = errDown
					}
				}
				finish(it, err)
			},
			"ack": func(*rapid.T) {
				if len(acking) > 0 {
					s.settled(acking[0], nil)
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
		// Liveness: all well from here on, traffic goes on, and within an hour everything from before is settled.
		for len(looking) > 0 {
			look(0)
		}
		for _, it := range running {
			finish(it, nil)
		}
		for _, it := range acking {
			s.settled(it, nil)
		}
		before := next
		end := s.now + time.Hour
		lastPut := s.now
		nextSweep := s.now
		s.budget.Grant(1000)
		for s.now < end && s.unsettled() > 0 {
			if s.now >= nextSweep {
				s.sweep(s.now, nil)
				s.scopes.Tick(s.now)
				nextSweep = s.now + stormEvery
			}
			if s.now-lastPut > 500*time.Millisecond && s.room() > 0 && next < before+200 {
				put()
				lastPut = s.now
			}
			st := s.next(s.now)
			post()
			switch st.kind {
			case stepHandle:
				s.now += time.Millisecond
				finish(st.it, nil)
				for _, it := range acking {
					s.settled(it, nil)
				}
				acking = acking[:0]
			case stepAck:
				s.settled(st.it, nil)
			case stepLook:
				looking, books = append(looking, st.it), append(books, s.book)
				look(0)
			default:
				at := s.now + 100*time.Millisecond
				if st.at > s.now {
					at = min(at, st.at)
				}
				s.now = at
			}
			for len(s.letters) > 0 {
				s.confirm()
			}
		}
		if s.unsettled() > 0 {
			t.Fatalf("WEDGE: %+v", s.account())
		}
	})
}
