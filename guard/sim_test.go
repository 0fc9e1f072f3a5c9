// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/credit"
	"github.com/stormguard-mq/stormguard/internal/ringbuf"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// sim drives a machine on a simulated clock: no goroutine, no timer.
type sim struct {
	*machine[int]
	now     time.Duration
	scopes  *circuit.Scopes
	letters []*item[int] // with the dead-letter writer
	handled []int        // in order of success
	dead    []int
	acked   map[int]bool
	calls   int
	at99    time.Duration // when message 99 was handled

	log      bool  // the broker keeps a low watermark
	unmarked []int // with log: from the first that is not settled on
	gone     map[int]bool
	turn     uint64
}

// put is the machine's, and what a log's port learns from it.
func (s *sim) put(now time.Duration, m int, key uint64, size int) {
	s.machine.put(now, m, key, size, nil)
	if s.log {
		s.unmarked = append(s.unmarked, m)
	}
}

func (s *sim) settled(it *item[int], err error) {
	s.machine.settled(s.now, it, err)
	if !s.log {
		return
	}
	if s.gone == nil {
		s.gone = map[int]bool{}
	}
	s.gone[it.m] = true
	for len(s.unmarked) > 0 && s.gone[s.unmarked[0]] {
		s.unmarked = s.unmarked[1:]
	}
	ahead := 0
	for _, m := range s.unmarked {
		if s.gone[m] {
			ahead++
		}
	}
	s.turn++
	s.lookedAhead(s.turn, ahead)
}

func newSim(tb interface{ Fatalf(string, ...any) }, p Policy) *sim {
	if t, ok := tb.(*testing.T); ok && RaceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	if err := p.Validate(); err != nil {
		tb.Fatalf("%v", err)
	}
	p = p.withDefaults(Limits{})
	p.Breaker = p.Breaker.WithDefaults()
	scopes, err := circuit.NewScopes(circuit.ScopesConfig{Breaker: p.Breaker})
	if err != nil {
		tb.Fatalf("%v", err)
	}
	ring, err := ringbuf.NewRing[entry[int]](ringbuf.Config{MaxCount: maxWindow}, nil)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	detector, err := storm.NewDetector(p.Storm)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	budget, err := credit.New(p.Budget, p.stormRate())
	if err != nil {
		tb.Fatalf("%v", err)
	}
	s := &sim{scopes: scopes, acked: map[int]bool{}, now: time.Second}
	s.machine = &machine[int]{
		origin: time.Now(), policy: p, storm: detector, budget: budget, letters: true, rand: rand.New(rand.NewPCG(1, 2)),
		ring: ring, lanes: map[uint64]*lane[int]{}, writing: map[*item[int]]struct{}{},
		fast: func() uint64 { return 0 }, wasClosed: true, slowAfter: p.Breaker.Slow,
	}
	s.machine.letters = true
	if p.Order == OrderNone {
		s.bulk = ring.Lane(0)
	}
	if !p.NoBreaker {
		s.gate, err = scopes.Leaf("g", "s")
		if err != nil {
			tb.Fatalf("%v", err)
		}
		s.gate.Attach(s.successes.Load)
	}
	return s
}

// account is the machine's part of Source.Account.
func (s *sim) account() Account {
	c := s.machine
	return Account{
		Received: c.tally.Received, Processing: c.count[processing], Settling: c.count[settling],
		Waiting: c.queued + c.count[waiting], RetryWait: c.count[retryWait],
		Acked: c.tally.Acked, DeadLettered: c.tally.DeadLettered, Returned: c.tally.Returned,
	}
}

// post hands what was condemned to the writer.
func (s *sim) post() {
	s.letters = append(s.letters, s.toWrite...)
	s.toWrite = nil
}

// confirm confirms the oldest dead letter.
func (s *sim) confirm() {
	it := s.letters[0]
	s.letters = s.letters[1:]
	s.dead = append(s.dead, it.m)
	s.confirmed(s.now, it, false)
}

// finish gives the outcome of an attempt, and acks if told to.
func (s *sim) finish(it *item[int], err error) {
	st := s.done(s.now, it, failureOf(err))
	s.post()
	if st.kind == stepAck {
		s.ackNow(st.it)
	}
}

func (s *sim) ackNow(it *item[int]) {
	s.acked[it.m] = true
	s.settled(it, nil)
}

// run drives the machine with a handler until the instant end, or until there
// is nothing left to do. feed is asked for messages while there is room.
func (s *sim) run(end time.Duration, handler func(m int) (took time.Duration, err error), feed func(now time.Duration) (m int, ok bool)) {
	s.runKeyed(end, 0, handler, feed)
}

func (s *sim) runKeyed(end time.Duration, keys int, handler func(m int) (time.Duration, error), feed func(time.Duration) (int, bool)) {
	const quantum = 5 * time.Millisecond
	nextSweep := s.now
	for s.now < end {
		if s.now >= nextSweep {
			s.sweep(s.now, nil)
			s.scopes.Tick(s.now)
			nextSweep = s.now + stormEvery
		}
		for s.room() > 0 && feed != nil {
			m, ok := feed(s.now)
			if !ok {
				break
			}
			var key uint64
			if keys > 0 && s.order() == OrderKey {
				key = uint64(m % keys)
			}
			s.put(s.now, m, key, 1)
		}
		st := s.next(s.now)
		s.post()
		switch st.kind {
		case stepHandle:
			s.calls++
			took, err := handler(st.it.m)
			s.now += took
			if err == nil {
				s.handled = append(s.handled, st.it.m)
			}
			s.finish(st.it, err)
		case stepAck:
			s.ackNow(st.it)
		default:
			at := s.now + quantum
			if st.at > s.now {
				at = min(at, st.at)
			}
			s.now = at
		}
		for len(s.letters) > 0 {
			s.confirm()
		}
	}
}

// counter feeds n messages at a rate.
func counter(n int, every time.Duration) func(time.Duration) (int, bool) {
	i := -1
	var start time.Duration
	return func(now time.Duration) (int, bool) {
		if i < 0 {
			i, start = 0, now
		}
		if i >= n || now < start+time.Duration(i)*every {
			return 0, false
		}
		i++
		return i - 1, true
	}
}

// errDown and errBad are of unknown class, errRefused is a dependency's.
var (
	errDown    = errors.New("dial tcp: connection refused")
	errBad     = errors.New("bad")
	errRefused = &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
)

// failureOf is the result of a handler call.
func failureOf(err error) result {
	r := resultOf(err, nil)
	r.class = Classify(err)
	return r
}

func inOrder(t *testing.T, ms []int, key func(int) int) {
	t.Helper()
	last := map[int]int{}
	for _, m := range ms {
		k := key(m)
		if before, ok := last[k]; ok && before >= m {
			t.Fatalf("key %d: %d handled after %d", k, m, before)
		}
		last[k] = m
	}
}

func one(int) int { return 0 }
