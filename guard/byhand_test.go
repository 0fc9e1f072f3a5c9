// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// byHand is Source.DeadLetterWaiting without the lock.
func (s *sim) byHand(n int) (done int) {
	chosen := s.failedWaiting()
	slices.SortFunc(chosen, func(a, b *item[int]) int { return cmp.Compare(a.id, b.id) })
	for done < n && len(chosen) > 0 {
		var some int
		chosen, some = s.deadLetterWaiting(chosen, n-done)
		done += some
	}
	return done
}

// byHandNext says what byHand should take: the oldest head first, one at a time.
func (s *sim) byHandNext(n int) (ids []uint64) {
	var lines [][]*item[int]
	for _, l := range s.lanes {
		if l.turn == 0 {
			lines = append(lines, l.front)
		}
	}
	if s.order() == OrderNone {
		s.items(func(it *item[int]) { lines = append(lines, []*item[int]{it}) })
	}
	for len(ids) < n {
		best := -1
		for i, line := range lines {
			if len(line) > 0 && line[0].tries > 0 && (line[0].phase == waiting || line[0].phase == retryWait) &&
				(best < 0 || line[0].id < lines[best][0].id) {
				best = i
			}
		}
		if best < 0 {
			break
		}
		ids = append(ids, lines[best][0].id)
		lines[best] = lines[best][1:]
		if s.blocksLane {
			lines[best] = nil
		}
	}
	return ids
}

// wornOut is a source that has failed for a while, the same for the same seed.
func wornOut(t *testing.T, seed uint64) *sim {
	random := rand.New(rand.NewPCG(seed, 3))
	order := []Order{OrderSource, OrderKey, OrderNone}[seed%3]
	p := Policy{Order: order, NoBreaker: random.IntN(3) == 0, Retry: Retry{Attempts: 2, Base: 100 * time.Millisecond}}
	if order != OrderSource {
		p.Workers = 1 + random.IntN(4)
	}
	s := newSim(t, p)
	s.blocksLane = random.IntN(4) == 0
	keys := 1 + random.IntN(20)
	for m := range 100 {
		var key uint64
		if order == OrderKey {
			key = uint64(random.IntN(keys))
		}
		s.put(s.now, m, key, 1)
	}
	var with []*item[int]
	for range 50 + random.IntN(200) {
		st := s.next(s.now)
		s.post()
		switch st.kind {
		case stepHandle:
			with = append(with, st.it)
		case stepAck:
			s.ackNow(st.it)
		default:
			s.now += time.Duration(random.IntN(500)) * time.Millisecond
		}
		if len(with) > 0 && random.IntN(4) > 0 {
			s.finish(with[0], []error{errBad, errBad, errBad, errRefused, Permanent(errBad), nil}[random.IntN(6)])
			with = with[1:]
		}
	}
	return s
}

// An operator's letters are the oldest that have failed and wait; those of a lane come
// one after the other, as far as they were tried. What is left goes on.
func TestByHandIsOldestFirst(t *testing.T) {
	some, followed := 0, 0
	for seed := range uint64(1200) {
		s := wornOut(t, seed)
		n := []int{1, 3, 10, 1000}[seed/3%4]
		want := s.byHandNext(n)
		done := s.byHand(n)
		var got []uint64
		for _, it := range s.toWrite {
			got = append(got, it.id)
		}
		if done != len(want) || !slices.Equal(got, want) {
			t.Fatalf("seed %d: %d: %v, should be %v", seed, done, got, want)
		}
		if some += done; s.order() == OrderSource {
			followed += max(0, done-1)
		}
		if err := errors.Join(s.account().Check(), recount(s.machine, s.now), standing(s)); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	if some < 1200 || followed < 40 {
		t.Errorf("%d letters in all, %d behind a head", some, followed)
	}
}

// standing tells what is in a ready list and should not be, or should and is not.
func standing(s *sim) error {
	in := map[*lane[int]]int{}
	for _, l := range s.ready.items[s.ready.head:] {
		in[l]++
		if s.lanes[l.key] != l {
			return fmt.Errorf("lane %d is ready and forgotten", l.key)
		}
	}
	for key, l := range s.lanes {
		want := 1
		if l.parked || l.empty() {
			want = 0
		}
		if in[l] != want || l.queued != (want == 1) || l.empty() {
			return fmt.Errorf("lane %d stands %d times, queued %t, parked %t, empty %t", key, in[l], l.queued, l.parked, l.empty())
		}
	}
	for _, it := range s.again.items[s.again.head:] {
		if it.phase != waiting {
			return fmt.Errorf("message %d is ready, its phase is %d", it.id, it.phase)
		}
	}
	if s.order() == OrderNone && s.again.len() != s.count[waiting] {
		return fmt.Errorf("%d are ready, %d wait", s.again.len(), s.count[waiting])
	}
	return nil
}

// A step takes no more than a batch, and leaves out what does not wait any more.
func TestByHandInBatches(t *testing.T) {
	for _, order := range []Order{OrderKey, OrderNone} {
		s := failedHeads(t, order, 3*byHandBatch)
		chosen := s.failedWaiting()
		if len(chosen) != 3*byHandBatch {
			t.Fatalf("%d chosen", len(chosen))
		}
		slices.SortFunc(chosen, func(a, b *item[int]) int { return cmp.Compare(a.id, b.id) })
		chosen, done := s.deadLetterWaiting(chosen, 1<<30)
		if done != byHandBatch || len(chosen) != 2*byHandBatch || len(s.toWrite) != byHandBatch {
			t.Errorf("%d at once, %d left", done, len(chosen))
		}
		s.now += 3 * time.Hour // they are up again
		s.finish(s.next(s.now).it, nil)
		if _, done = s.deadLetterWaiting(chosen[:byHandBatch], 1<<30); done != byHandBatch-1 {
			t.Errorf("%d of %d, one of which was handled meanwhile", done, byHandBatch)
		}
		if chosen, done = s.deadLetterWaiting(chosen[byHandBatch:], 7); done != 7 || len(chosen) != byHandBatch-7 {
			t.Errorf("%d of 7, %d left", done, len(chosen))
		}
	}
}

// What stands behind an operator's letters is tried at once, though the breaker has been
// open for long: 80 adjacent poison messages are gone within seconds of one call, 200 of
// three.
func TestWhatIsBehindLettersByHandIsTriedAtOnce(t *testing.T) {
	for poison, most := range map[int]int{80: 1, 200: 3} {
		for _, after := range []time.Duration{20 * time.Second, 6 * time.Minute} {
			bubble(t, fmt.Sprint(poison, " after ", after), func(t *testing.T) {
				r := newRig(t, Policy{}, Limits{}, func(_ *rig, _ context.Context, m int) error {
					if m >= 10 && m < 10+poison {
						return errors.New("no such tenant")
					}
					return nil
				})
				r.send(0, 10+poison)
				sent := 10 + poison
				more := func(d time.Duration) {
					for end := time.Now().Add(d); time.Now().Before(end); sent++ {
						r.send(sent, sent+1)
						time.Sleep(time.Second)
					}
				}
				more(after)
				if a := r.check(); a.DeadLettered > 0 || a.Acked != 10 {
					t.Fatalf("%+v", a)
				}
				begun, calls := time.Now(), 0
				for r.check().DeadLettered < uint64(poison) && time.Since(begun) < time.Minute {
					if calls < most {
						calls++
						if n := r.s.DeadLetterWaiting(1000); n < 1+maxLook && calls*(1+maxLook) < poison {
							t.Errorf("call %d took %d", calls, n)
						}
					}
					more(3 * time.Second)
				}
				if took := time.Since(begun); took > 20*time.Second {
					t.Errorf("it took %v: %+v", took, r.check())
				} else {
					t.Log(took)
				}
				r.close()
			})
		}
	}
}

// So many messages took over ten seconds when each of them cost a look at all others.
// Heads that wait for their delay are not in the ready list, those that are up again are.
func TestByHandIsNotQuadratic(t *testing.T) {
	const n, limit = 128_000, 10 * time.Second // a quadratic one takes 45 s
	for _, order := range []Order{OrderKey, OrderNone} {
		for _, up := range []bool{false, true} {
			took := time.Hour
			for i := 0; i < 3 && took > limit; i++ {
				s, all := failedHeads(t, order, n), n
				if up {
					s.now += 3 * time.Hour
					s.next(s.now)
					all--
				}
				begun := time.Now()
				if done := s.byHand(n); done != all {
					t.Fatalf("%d of %d", done, all)
				}
				took = min(took, time.Since(begun))
			}
			if t.Logf("%s, %t: %v", order, up, took); took > limit {
				t.Errorf("more than %v", limit)
			}
		}
	}
}
