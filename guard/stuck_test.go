// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// hookedPort is a port whose first call of a kind does something more: it waits.
type hookedPort struct {
	testPort
	hooks sync.Mutex
	first map[string]func()
	open  atomic.Int64 // calls under way
	begun atomic.Int64 // all calls
}

func (p *hookedPort) call(kind string, f func()) {
	p.hooks.Lock()
	hook := p.first[kind]
	delete(p.first, kind)
	p.hooks.Unlock()
	p.begun.Add(1)
	p.open.Add(1)
	if hook != nil {
		hook()
	}
	f()
	p.open.Add(-1)
}

func (p *hookedPort) Size(m int) (size int) {
	p.call("size", func() { size = p.testPort.Size(m) })
	return size
}

func (p *hookedPort) Ack(m int) (err error) {
	p.call("ack", func() { err = p.testPort.Ack(m) })
	return err
}

func (p *hookedPort) Flush() (err error) {
	p.call("flush", func() { err = p.testPort.Flush() })
	return err
}

func (p *hookedPort) Demand(n int) { p.call("demand", func() { p.testPort.Demand(n) }) }

// endSoon ends a source whose port hangs, and checks that it does not take for ever.
func endSoon(t *testing.T, s *Source[int]) Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	rep := s.End(ctx, ReasonShutdown)
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("End took %v", took)
	}
	if err := rep.Account.Check(); err != nil {
		t.Error(err)
	}
	if n := rep.Account.Unsettled(); n != len(rep.Left) {
		t.Errorf("%d unsettled: %+v", n, rep)
	}
	return rep
}

// leftSettling checks that a report names so many messages, all of them settling.
func leftSettling(t *testing.T, rep Report, n int) {
	t.Helper()
	if rep.Account.Settling != n || len(rep.Left) != n || rep.Clean() {
		t.Errorf("%+v, want %d left", rep, n)
	}
	for _, l := range rep.Left {
		if l.State != "settling" || l.Why != "it is not acked" {
			t.Errorf("%+v", l)
		}
	}
}

// An Ack that does not return keeps End no longer than its context and a little more,
// and the report names the message, whoever acks it.
func TestEndWithAnAckThatHangs(t *testing.T) {
	for name, p := range map[string]Policy{"closed path": {}, "workers": {Order: OrderNone, Workers: 2}, "passive": {}} {
		bubble(t, name, func(t *testing.T) {
			g, err := New(Config{Policy: p})
			if err != nil {
				t.Fatal(err)
			}
			release, ended := make(chan struct{}), make(chan error, 1)
			port := &hookedPort{first: map[string]func(){"ack": func() { <-release }}}
			handler := func(context.Context, int) error { return nil }
			if name == "passive" {
				handler = nil
			}
			s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, port, handler)
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 1)
			if name == "passive" {
				if err := s.Offer(0); err != nil {
					t.Fatal(err)
				}
				go func() {
					s.Done((<-s.Ready()).Token, nil)
					ended <- nil
				}()
			} else {
				in <- 0
				go func() { ended <- s.Run(t.Context(), in) }()
			}
			time.Sleep(time.Second)
			rep := endSoon(t, s)
			leftSettling(t, rep, 1)
			if name == "closed path" && len(rep.Left) == 1 && (rep.Left[0].Age < 1600*time.Millisecond || rep.Left[0].Age > 3*time.Second) {
				t.Errorf("it is %v old", rep.Left[0].Age)
			}
			close(release)
			if err := <-ended; err != nil && !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
			synctest.Wait()
			if a := s.Account(); a.Acked != 1 || a.Check() != nil {
				t.Errorf("%+v", a)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// The same where nobody is left to ack but End: letters that are confirmed after Run
// has returned. One that is confirmed when End has given up is named too.
func TestEndWithALateLetterWhoseAckHangs(t *testing.T) {
	for _, letters := range []int{1, 2} {
		bubble(t, "", func(t *testing.T) {
			g, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			release, confirm := make(chan struct{}), make(chan struct{})
			port := &hookedPort{first: map[string]func(){"ack": func() { <-release }}}
			w := dlq.WriterFunc(func(context.Context, *dlq.Record) error { <-confirm; return nil })
			s, err := Open(g, SourceConfig{Name: "s", DeadLetters: w}, Limits{EndsWithInput: true}, port, func(context.Context, int) error {
				return Permanent(errDown)
			})
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, letters)
			for m := range letters {
				in <- m
			}
			time.AfterFunc(time.Second, func() { close(in) })
			if err := s.Run(t.Context(), in); err != nil {
				t.Error(err)
			}
			for i := range letters { // the second when End's context is over
				time.AfterFunc(time.Duration(50+150*i)*time.Millisecond, func() { confirm <- struct{}{} })
			}
			rep := endSoon(t, s)
			leftSettling(t, rep, letters)
			close(release)
			synctest.Wait()
			if a := s.Account(); a.DeadLettered != 1 || int(a.Returned) != letters-1 || a.Check() != nil {
				t.Errorf("%+v", a)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// What End acks by itself is flushed as often as anything.
func TestEndFlushesLateAcks(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		const letters = 3*flushEvery + 1
		confirm := make(chan struct{})
		w := dlq.WriterFunc(func(context.Context, *dlq.Record) error { <-confirm; return nil })
		port := &coalescing{}
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: w}, Limits{EndsWithInput: true}, port, func(context.Context, int) error {
			return Permanent(errDown)
		})
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int, letters)
		for m := range letters {
			in <- m
		}
		time.AfterFunc(time.Minute, func() { close(in) })
		if err := s.Run(t.Context(), in); err != nil {
			t.Error(err)
		}
		close(confirm)
		rep := s.End(t.Context(), ReasonShutdown)
		if !rep.Clean() || rep.Account.DeadLettered != letters || port.most != flushEvery || port.due != 0 {
			t.Errorf("%+v; at most %d acks coalesced, %d never sent", rep, port.most, port.due)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// End waits for an ack that is decided and has not begun: Done, on the user's own
// goroutine, decides and then acks.
func TestEndWaitsForAnAckThatIsDecided(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Offer(0); err != nil {
			t.Fatal(err)
		}
		item := <-s.Ready()
		synctest.Wait()
		s.mu.Lock() // the first half of Done
		it := s.passive[item.Token.id]
		delete(s.passive, item.Token.id)
		st := s.c.done(g.now(), it, result{})
		s.unlock(g.now())
		reports := make(chan Report, 1)
		go func() { reports <- s.End(t.Context(), ReasonShutdown) }()
		synctest.Wait()
		if len(reports) > 0 {
			t.Error("End did not wait")
		}
		s.settle(st.it)
		if rep := <-reports; !rep.Clean() || rep.Account.Acked != 1 {
			t.Errorf("%+v", rep)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Every port call is announced: End waits for one that is under way, and none begins
// after it has returned, though it waits for no loop any more.
func TestEndWaitsForPortCalls(t *testing.T) {
	quick := func(context.Context, int) error { return nil }
	for _, c := range []struct {
		name, kind string
		policy     Policy
		limits     Limits
		limiter    Limiter
		handler    func(context.Context, int) error // nil: passive
		paused     bool
	}{
		{name: "intake", kind: "size", handler: quick, paused: true},
		{name: "intake of a batch", kind: "size", handler: quick, paused: true, limits: Limits{AckWait: time.Minute}},
		{name: "demand", kind: "demand", handler: quick},
		{name: "flush", kind: "flush", handler: quick},
		{name: "flush off the closed path", kind: "flush", handler: quick, limiter: always{}},
		{name: "flush of workers", kind: "flush", handler: quick, policy: Policy{Order: OrderNone, Workers: 2}},
		{name: "the last flush", kind: "flush", handler: func(context.Context, int) error { time.Sleep(1200 * time.Millisecond); return nil }},
		{name: "demand, passive", kind: "demand"},
		{name: "flush, passive", kind: "flush"},
	} {
		for _, returns := range []time.Duration{1700 * time.Millisecond, 10 * time.Second} {
			bubble(t, c.name+" "+returns.String(), func(t *testing.T) {
				start := time.Now()
				g, err := New(Config{Policy: c.policy})
				if err != nil {
					t.Fatal(err)
				}
				port := &hookedPort{first: map[string]func(){c.kind: func() { time.Sleep(time.Until(start.Add(returns))) }}}
				s, err := Open(g, SourceConfig{Name: "s", Limiter: c.limiter}, c.limits, port, c.handler)
				if err != nil {
					t.Fatal(err)
				}
				if c.paused {
					s.Pause(0)
				}
				in, ended := make(chan int, 1), make(chan error, 1)
				if c.handler == nil {
					go func() {
						s.Done((<-s.Ready()).Token, nil)
						ended <- nil
					}()
					synctest.Wait() // it is there before the pump waits for a port
					if err := s.Offer(0); err != nil {
						t.Fatal(err)
					}
				} else {
					in <- 0
					go func() { ended <- s.Run(t.Context(), in) }()
				}
				time.Sleep(time.Second)
				rep := endSoon(t, s)
				begun := port.begun.Load()
				late := returns > 2*time.Second
				if n := port.open.Load(); (n > 0) != late || (rep.Err != nil) != late {
					t.Errorf("End returned beside %d port calls: %+v", n, rep)
				}
				time.Sleep(time.Minute)
				if err := <-ended; err != nil && !errors.Is(err, ErrClosed) {
					t.Error(err)
				}
				if n := port.begun.Load() - begun; n > 0 || port.open.Load() > 0 {
					t.Errorf("%d port calls after End had returned", n)
				}
				if a := s.Account(); a.Check() != nil || a.Unsettled() > 0 || a.Received != 1 {
					t.Errorf("%+v", a)
				}
				if _, err := g.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
	}
}
