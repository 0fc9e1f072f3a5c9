// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// markPort is the port of a log: it knows what it was handed from Size and Ack, and
// how much is settled behind what is not.
type markPort struct {
	nopPort
	mu      sync.Mutex
	keys    int
	queue   []int // announced or settled, from the first that is not settled on
	settled map[int]bool
	most    int // the longest that queue was
	next    int // after all that was handed over
	demands []int
	passed  bool // an ack passed a message that was never announced
}

func newMarkPort(keys int) *markPort { return &markPort{keys: keys, settled: map[int]bool{}} }

func (p *markPort) Lane(m int) uint64 { return uint64(m % p.keys) }
func (p *markPort) Meta(m int) Meta   { return Meta{Body: fmt.Append(nil, m), Lag: -1} }

func (p *markPort) Size(m int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m >= p.next { // the passive shape asks for each offer
		p.hand(m)
	}
	return 1
}

func (p *markPort) hand(m int) {
	p.passed = p.passed || m != p.next
	p.next = m + 1
	p.queue = append(p.queue, m)
	p.most = max(p.most, len(p.queue))
}

func (p *markPort) Ack(m int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m >= p.next {
		p.hand(m)
	}
	p.settled[m] = true
	for len(p.queue) > 0 && p.settled[p.queue[0]] {
		p.queue = p.queue[1:]
	}
	return nil
}

func (p *markPort) Ahead() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.queue {
		if p.settled[m] {
			n++
		}
	}
	return n
}

func (p *markPort) Demand(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.demands = append(p.demands, n)
}

// marked is the low watermark, most the longest way that it was behind.
func (p *markPort) marked() (at, most, demand int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at, demand = p.next, -1
	if len(p.queue) > 0 {
		at = p.queue[0]
	}
	if len(p.demands) > 0 {
		demand = p.demands[len(p.demands)-1]
	}
	return at, p.most, demand
}

// markRig runs a source over a markPort; in is fed by its own goroutine.
type markRig struct {
	t    *testing.T
	g    *Guard
	s    *Source[int]
	port *markPort
	end  func()
}

func newMarkRig(t *testing.T, p Policy, w dlq.Writer, n int, handler func(m int) error) *markRig {
	t.Helper()
	g, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	r := &markRig{t: t, g: g, port: newMarkPort(8)}
	r.s, err = Open(g, SourceConfig{Name: "s", Policy: &p, DeadLetters: w}, Limits{}, r.port, func(_ context.Context, m int) error { return handler(m) })
	if err != nil {
		t.Fatal(err)
	}
	in, stop := make(chan int), make(chan struct{})
	var feeding, running sync.WaitGroup
	feeding.Go(func() {
		for m := range n {
			select {
			case in <- m:
			case <-stop:
				return
			}
		}
	})
	running.Go(func() { _ = r.s.Run(t.Context(), in) })
	r.end = func() {
		if err := r.s.Account().Check(); err != nil {
			t.Error(err)
		}
		if r.port.passed {
			t.Error("handed over out of order")
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		close(stop)
		feeding.Wait()
		running.Wait()
	}
	return r
}

// stands expects that intake has stopped, and says why.
func (r *markRig) stands(window int) {
	r.t.Helper()
	synctest.Wait()
	st := r.s.State()
	at, most, demand := r.port.marked()
	if at != 0 || most > window || int(st.Account.Received) != window || demand != 0 {
		r.t.Errorf("%d received in a window of %d, marked %d, %d behind, demand %d", st.Account.Received, window, at, most, demand)
	}
	if st.Room != 0 || !slices.ContainsFunc(st.Holds, func(h Hold) bool {
		return h.Reason == ReasonBackpressure && strings.Contains(h.Detail, "settled behind")
	}) {
		r.t.Errorf("room %d, holds %+v", st.Room, st.Holds)
	}
}

func (r *markRig) through(n int) {
	r.t.Helper()
	synctest.Wait()
	if a := r.s.Account(); int(a.Acked+a.DeadLettered) != n {
		r.t.Errorf("%+v\n%+v", a, r.s.State().Holds)
	}
	if at, _, demand := r.port.marked(); at != n || demand == 0 {
		r.t.Errorf("marked %d of %d, demand %d", at, n, demand)
	}
}

var unordered = map[string]Policy{
	"none":            {Order: OrderNone},
	"none, 4 workers": {Order: OrderNone, Workers: 4},
	"key":             {Order: OrderKey},
	"key, 4 workers":  {Order: OrderKey, Workers: 4},
}

// One message that does not get done lets a window of others pass, and no more; once
// it is done all goes on.
func TestAheadIsBounded(t *testing.T) {
	for name, p := range unordered {
		bubble(t, name, func(t *testing.T) {
			const n, window = 5000, 20
			p.Window = window
			var well atomic.Bool
			r := newMarkRig(t, p, nil, n, func(m int) error {
				if m == 0 && !well.Load() {
					return errDown
				}
				return nil
			})
			time.Sleep(time.Minute)
			if p.Order == OrderNone { // of a key more stand behind it
				if a := r.s.Account(); a.Acked != window-1 || a.RetryWait != 1 {
					t.Errorf("%+v", a)
				}
			}
			r.stands(window)
			well.Store(true)
			time.Sleep(time.Minute)
			r.through(n)
			r.end()
		})
	}
}

// So does one whose dead letter cannot be written, in the default order too.
func TestAheadOfADeadLetter(t *testing.T) {
	policies := maps.Clone(unordered)
	policies["source"] = Policy{}
	for name, p := range policies {
		bubble(t, name, func(t *testing.T) {
			const n, window = 5000, 20
			p.Window = window
			w := &testWriter{err: errDown}
			r := newMarkRig(t, p, w, n, func(m int) error {
				if m == 0 {
					return Permanent(errors.New("hopeless"))
				}
				return nil
			})
			time.Sleep(time.Minute)
			r.stands(window)
			if st := r.s.State(); !slices.ContainsFunc(st.Holds, func(h Hold) bool { return h.Reason == ReasonDLQ }) {
				t.Errorf("%+v", st.Holds)
			}
			w.mu.Lock()
			w.err = nil
			w.mu.Unlock()
			time.Sleep(time.Minute)
			r.through(n)
			if b := w.bodies(); !slices.Equal(b, []string{"0"}) {
				t.Errorf("dead letters %v", b)
			}
			r.end()
		})
	}
}

// A full window of what is settled does not keep a poison message from its proof: a
// witness comes beyond it, at most farWitnesses do, and nobody has to guess.
func TestWitnessBeyondTheWindow(t *testing.T) {
	for name, p := range unordered {
		for _, window := range []int{4, 20} {
			bubble(t, fmt.Sprintf("%s, %d", name, window), func(t *testing.T) {
				const n = 2000
				p.Window = window
				p.Retry = Retry{Base: 500 * time.Millisecond, Max: 500 * time.Millisecond, Patience: time.Hour}
				w := &testWriter{}
				var last atomic.Int64
				begun := time.Now()
				r := newMarkRig(t, p, w, n, func(m int) error {
					if m == 0 {
						last.Store(int64(time.Since(begun)))
						return errDown
					}
					return nil
				})
				time.Sleep(time.Minute)
				r.through(n)
				_, most, _ := r.port.marked()
				if most > window+farWitnesses {
					t.Errorf("%d behind in a window of %d", most, window)
				}
				if b, took := w.bodies(), time.Duration(last.Load()); !slices.Equal(b, []string{"0"}) || took > 5*time.Second {
					t.Errorf("dead letters %v, after %s", b, took)
				}
				r.end()
			})
		}
	}
}

// The same in sequence, where what stands in front is a dead letter that cannot be
// written: the poison message behind it has no witness in the window.
func TestWitnessBehindALetter(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const n = 1000
		w := &testWriter{err: errDown}
		r := newMarkRig(t, Policy{Window: 3, Retry: Retry{Patience: time.Hour}}, w, n, func(m int) error {
			switch m {
			case 0:
				return Permanent(errors.New("hopeless"))
			case 2:
				return errDown
			}
			return nil
		})
		time.Sleep(time.Minute)
		if a := r.s.Account(); a.Settling != 2 || a.RetryWait > 0 {
			t.Errorf("%+v", a)
		}
		if _, most, _ := r.port.marked(); most > 6 {
			t.Errorf("%d behind in a window of 3", most)
		}
		w.mu.Lock()
		w.err = nil
		w.mu.Unlock()
		time.Sleep(time.Minute)
		r.through(n)
		r.end()
	})
}

// What waits for a credit has successes to earn it, though the window is full.
func TestCreditBeyondTheWindow(t *testing.T) {
	for name, p := range unordered {
		bubble(t, name, func(t *testing.T) {
			const n = 400
			p.Window = 6
			p.Retry = Retry{Base: 10 * time.Millisecond, Max: 100 * time.Millisecond, Patience: time.Hour}
			p.Budget = dlq.BudgetConfig{Balance: 1, FreeEvery: 24 * time.Hour}
			w := &testWriter{}
			r := newMarkRig(t, p, w, n, func(m int) error {
				if m%40 == 0 {
					return errDown
				}
				return nil
			})
			time.Sleep(5 * time.Minute)
			r.through(n)
			if b := w.bodies(); len(b) != n/40 {
				t.Errorf("dead letters %v", b)
			}
			if _, most, _ := r.port.marked(); most > p.Window+farWitnesses {
				t.Errorf("%d behind in a window of %d", most, p.Window)
			}
			r.end()
		})
	}
}

// Letters that are put off until the breaker has closed do not keep it from its probe.
func TestProbeBeyondTheWindow(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		bubble(t, order.String(), func(t *testing.T) {
			const n = 100
			var r *markRig
			var ready atomic.Bool
			w := &testWriter{says: func(*dlq.Record) error {
				if !ready.Load() || !r.s.c.gate.Closed() {
					return dlq.ErrPutOff
				}
				return nil
			}}
			r = newMarkRig(t, Policy{Order: order, Window: 5, Retry: Retry{Patience: time.Hour}}, w, n, func(m int) error {
				if m == 0 {
					return Permanent(errors.New("hopeless"))
				}
				return nil
			})
			time.Sleep(time.Minute)
			r.stands(5)
			if err := r.s.ForceOpen(time.Second); err != nil {
				t.Fatal(err)
			}
			ready.Store(true)
			time.Sleep(time.Minute)
			r.through(n)
			r.end()
		})
	}
}

// The passive shape is refused room in the same way, and gets it back.
func TestAheadIsBoundedPassive(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const n, window = 500, 20
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		port := newMarkPort(1)
		s, err := Open(g, SourceConfig{Name: "s", Policy: &Policy{Window: window}}, Limits{}, port, nil)
		if err != nil {
			t.Fatal(err)
		}
		var well atomic.Bool
		var user sync.WaitGroup
		user.Go(func() {
			for item := range s.Ready() {
				if item.Msg == 0 && !well.Load() {
					s.Done(item.Token, errDown)
				} else {
					s.Done(item.Token, nil)
				}
			}
		})
		offered := 0
		offer := func(tries int) {
			for range tries {
				if offered == n || errors.Is(s.Offer(offered), ErrFull) {
					time.Sleep(20 * time.Millisecond)
					continue
				}
				offered++
			}
		}
		offer(1000)
		if at, most, demand := port.marked(); offered != window || at != 0 || most > window+1 || demand != 0 {
			t.Errorf("%d offered, marked %d, %d behind, demand %d", offered, at, most, demand)
		}
		well.Store(true)
		time.Sleep(time.Minute)
		offer(5000)
		synctest.Wait()
		if at, _, demand := port.marked(); offered != n || at != n || demand == 0 {
			t.Errorf("%d offered, marked %d, demand %d", offered, at, demand)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		user.Wait()
	})
}

// What is full of what is settled takes no more than Policy.Window unsettled ones, and
// gives its room back as soon as nothing is unsettled, whatever the port said last.
func TestAheadAlone(t *testing.T) {
	s := newSim(t, Policy{Order: OrderNone, Window: 4})
	s.lookedAhead(7, 4)
	if s.room() != 4 {
		t.Errorf("room %d with nothing unsettled", s.room())
	}
	s.put(s.now, 0, 0, 1)
	if s.room() != 0 {
		t.Errorf("room %d", s.room())
	}
	s.lookedAhead(6, 0) // an older look
	if s.room() != 0 {
		t.Errorf("room %d after an older look", s.room())
	}
	s.lookedAhead(8, 0)
	if s.room() != 3 {
		t.Errorf("room %d", s.room())
	}
	for m := 1; m < 4; m++ {
		s.put(s.now, m, 0, 1)
	}
	s.lookedAhead(9, 1)
	for range 4 {
		s.finish(s.next(s.now).it, errDown)
	}
	if s.fresh() || s.room() != 0 {
		t.Errorf("room %d, %d unsettled", s.room(), s.unsettled())
	}
}

// Beyond the window comes one at a time, one for each time that a message fails, and
// no more than farWitnesses.
func TestOneMore(t *testing.T) {
	s := newSim(t, Policy{Order: OrderNone, Window: 4})
	want := func(what string, room int) {
		t.Helper()
		if s.room() != room {
			t.Errorf("%s: room %d", what, s.room())
		}
	}
	fails := func() {
		s.now += 20 * time.Second
		s.finish(s.next(s.now).it, errDown)
	}
	s.put(s.now, 0, 0, 1)
	s.lookedAhead(1, 3)
	want("it has not failed", 0)
	fails()
	want("it has failed", 1)
	s.put(s.now, 1, 0, 1)
	want("another is here", 0)
	s.finish(s.next(s.now).it, nil)
	s.lookedAhead(2, 4)
	want("that has succeeded", 0)
	fails()
	want("it has failed again", 1)
	s.lookedAhead(3, 4+farWitnesses-2)
	want("one below the bound", 1)
	s.lookedAhead(4, 4+farWitnesses-1)
	want("at the bound", 0)
	s.lookedAhead(5, 3)
	s.machine.letters = false
	want("nothing can be dead-lettered", 0)
}

// Room that came between the look at the input and the sleep is seen.
func TestRoomBeforeTheSleep(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		s.demanded = 1
		l := &loop[int]{s: s, ctx: t.Context(), in: make(chan int), timer: stoppedTimer(), workers: true}
		awake := make(chan bool, 1)
		go func() { awake <- l.block(0, 0, false) }()
		synctest.Wait()
		select {
		case again := <-awake:
			if !again {
				t.Error("the loop ends")
			}
		default:
			t.Error("the loop sleeps and does not want what it has room for")
			s.nudge()
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// With a log and any window poison and an outage come to the same end as without: all
// that is healthy is handled, and poison is dead-lettered.
func TestPoisonAndOutageInALog(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		for _, window := range []int{2, 3, 10, 64} {
			for _, log := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %d, log %t", order, window, log), func(t *testing.T) {
					const n = 2000
					s := newSim(t, Policy{Order: order, Window: window})
					s.log = log
					down := func() bool { return s.now > 5*time.Second && s.now < 40*time.Second }
					for end := s.now; s.now < time.Hour && len(s.acked) < n; end += time.Minute {
						s.runKeyed(end, 5, func(m int) (time.Duration, error) {
							if m%100 == 7 || down() {
								return time.Millisecond, errDown
							}
							return time.Millisecond, nil
						}, counterFrom(s, n))
						if len(s.unmarked) > window+farWitnesses {
							t.Fatalf("%d unmarked", len(s.unmarked))
						}
					}
					wrong := slices.DeleteFunc(slices.Clone(s.dead), func(m int) bool { return m%100 == 7 })
					t.Logf("%d acked, dead %v, after %s", len(s.acked), s.dead, s.now)
					if len(s.acked) < n || len(wrong) > 2 || len(s.dead) < n/100 {
						t.Errorf("%d acked, dead %v, %+v", len(s.acked), s.dead, s.account())
					}
				})
			}
		}
	}
}

// counterFrom feeds what was not fed yet of n messages, 200 a second.
func counterFrom(s *sim, n int) func(time.Duration) (int, bool) {
	return func(now time.Duration) (int, bool) {
		m := int(s.tally.Received)
		return m, m < n && now >= time.Second+time.Duration(m)*5*time.Millisecond
	}
}
