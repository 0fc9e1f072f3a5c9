// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/storm"
)

// recount looks at all messages, and tells where a count of the machine differs.
func recount[M any](c *machine[M], now time.Duration) error {
	arrivals, calls, lucks := 0, 0, 0
	oldest, latest, fresh := now, 0, c.queued > 0
	bytes, noted := int64(0), int64(0)
	able, proof := false, false
	entered := func(e entry[M]) {
		arrivals++
		oldest = min(oldest, e.at)
		bytes += int64(e.size)
	}
	for _, it := range c.going {
		bytes += int64(it.size) + historyBytes(it)
		noted += historyBytes(it)
	}
	c.items(func(it *item[M]) {
		entered(it.entry)
		bytes += historyBytes(it)
		noted += historyBytes(it)
		calls++
		latest = max(latest, it.tries)
		fresh = fresh || it.tries == 0
		if it.tries > 0 && !it.decided() {
			lucks++
			able, proof = true, proof || it.lifeAtFailure >= c.life()
		}
	})
	for l := range c.ring.Lanes() {
		held, err := l.Snapshot(nil)
		if err != nil {
			return fmt.Errorf("snapshot: %w", err)
		}
		for _, e := range held {
			entered(e)
		}
	}
	untried, telling := 0, 0
	for _, l := range c.lanes {
		it := l.head()
		if it == nil || it.tries == 0 {
			untried++
		}
		if it == nil || it.tries == 0 || it.phase == processing {
			telling++
		}
	}
	if c.blocksLane && c.order() != OrderNone {
		fresh = untried > 0
	}
	for _, count := range []struct {
		what      string
		got, want int
	}{
		{"arrivals", members(&c.arrivals), arrivals},
		{"calls", members(&c.calls), calls},
		{"lucks", members(&c.failureLives), lucks},
		{"untried heads", c.untried, untried},
		{"telling heads", c.telling, telling},
	} {
		if count.got != count.want {
			return fmt.Errorf("%s: %d counted, %d there", count.what, count.got, count.want)
		}
	}
	if c.bytes != bytes || c.historyBytes != noted {
		return fmt.Errorf("%d bytes counted, %d of failures; %d and %d there", c.bytes, c.historyBytes, bytes, noted)
	}
	if got, want := c.reading(now), (storm.Reading{Attempts: latest, Age: now - oldest}); got != want {
		return fmt.Errorf("reading %+v, should be %+v", got, want)
	}
	if c.fresh() != fresh {
		return fmt.Errorf("fresh %t, should be %t", !fresh, fresh)
	}
	if c.failureLives.empty() == able || able && c.failureLives.most() >= int64(c.life()) != proof {
		return fmt.Errorf("one that can prove: %t, one for which nothing has succeeded: %t", able, proof)
	}
	return nil
}

func historyBytes[M any](it *item[M]) (n int64) {
	for _, a := range it.failures {
		n += int64(attemptBytes + len(a.words.Type) + len(a.words.Message) + len(a.stack))
	}
	return n
}

func members(r *ranks) (n int) {
	for p := r.first; p != 0; p = r.at(p).next {
		n += int(r.at(p).n)
	}
	return n
}

// A source in which calls, acks and letters end, or are given back, as they come.
func TestCountsAtTheEnd(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 7))
		s := newSim(t, Policy{Order: []Order{OrderSource, OrderKey, OrderNone}[seed%3], Workers: 1 + int(seed%3)})
		for m := range 50 {
			s.put(s.now, m, uint64(m%7), 1)
		}
		var with []*item[int]
		for range 80 {
			s.now += time.Duration(random.IntN(3000)) * time.Millisecond
			st := s.next(s.now)
			s.post()
			if st.kind == stepHandle {
				with = append(with, st.it)
			}
			if len(with) > 0 && random.IntN(3) > 0 {
				s.finish(with[0], []error{nil, errDown, errBad, Permanent(errBad)}[random.IntN(4)])
				with = with[1:]
			}
		}
		s.ended = true
		s.drain(s.now)
		for _, it := range with {
			s.abandon(it)
		}
		if !s.arrivals.empty() || !s.machine.calls.empty() || !s.failureLives.empty() {
			t.Fatalf("seed %d: %d, %d, %d are left", seed, members(&s.arrivals), members(&s.machine.calls), members(&s.failureLives))
		}
	}
}
