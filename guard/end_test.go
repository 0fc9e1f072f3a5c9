// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/credit"
)

// A passive source with a message on Ready that nobody takes: End waits for its whole context (for ever with Background).
func TestPassiveEndWithUntakenItem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := New(Config{})
		port := &testPort{}
		s, err := Open[int](g, SourceConfig{Name: "s"}, Limits{}, port, nil)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Offer(1)
		time.Sleep(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		start := time.Now()
		rep := s.End(ctx, ReasonShutdown)
		if took := time.Since(start); took > time.Second {
			t.Errorf("End took %v though no handler has anything: %+v", took, rep)
		}
		_, _ = g.Close(t.Context())
	})
}

// A second End (so also Guard.Close) ignores its context while a first one waits.
func TestSecondEndHeedsItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(*rig, context.Context, int) error { time.Sleep(time.Hour); return nil })
		r.send(0, 1)
		go r.s.End(context.Background(), ReasonRebalance)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		_, _ = r.g.Close(ctx)
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("Close with a context of 1s took %v", took)
		}
		time.Sleep(2 * time.Hour)
		if err := <-r.ended; err == nil {
			t.Error("no word of the end")
		}
		r.cancel()
	})
}

// The same for a function. While End waits, and after it, nothing is called again.
func TestSecondEndOfAFunc(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int64
		release := make(chan struct{})
		g, f := newFunc(t, Policy{Retry: Retry{Base: 10 * time.Second}}, func(_ context.Context, m int) error {
			calls.Add(1)
			if m == 0 {
				<-release
			}
			return errDown
		})
		results := make(chan error, 2)
		for m := range 2 {
			go func() { results <- f.Do(context.Background(), m) }()
		}
		synctest.Wait()
		first := make(chan Report, 1)
		go func() { first <- f.End(context.Background(), ReasonShutdown) }()
		time.Sleep(time.Minute)
		if err := <-results; !errors.Is(err, ErrClosed) || !errors.Is(err, errDown) {
			t.Error(err)
		}
		if len(first) > 0 || calls.Load() != 2 {
			t.Errorf("End returned: %v; %d calls", len(first) > 0, calls.Load())
		}
		late := time.AfterFunc(time.Hour, func() { close(release) })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		_, err := g.Close(ctx)
		if took := time.Since(start); took > 2*time.Second || err == nil {
			t.Errorf("Close with a context of 1s took %v: %v", took, err)
		}
		if rep := <-first; len(rep.Left) != 1 {
			t.Errorf("%+v", rep)
		}
		if late.Stop() {
			close(release)
		}
		if err := <-results; !errors.Is(err, ErrClosed) || calls.Load() != 2 {
			t.Errorf("%v, %d calls", err, calls.Load())
		}
	})
}

// Close waits without bound for a dead-letter writer that ignores its context.
func TestCloseWithBlockedWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := New(Config{})
		free := make(chan struct{})
		w := dlq.WriterFunc(func(context.Context, *dlq.Record) error { <-free; return nil })
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: w}, Limits{}, &testPort{}, func(context.Context, int) error { return Permanent(errDown) })
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int)
		go func() { _ = s.Run(context.Background(), in) }()
		in <- 1
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if _, err := g.Close(ctx); err == nil {
			t.Error("no word of the writer")
		}
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("Close with a context of 1s took %v", took)
		}
		close(free)
	})
}

// With EndsWithInput and workers, what is held is still handled after the input was closed.
func TestEndsWithInputStopsWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int64
		r := newRig(t, Policy{Order: OrderNone, Workers: 4}, Limits{EndsWithInput: true}, func(*rig, context.Context, int) error {
			calls.Add(1)
			time.Sleep(time.Second)
			return nil
		})
		r.send(0, 200)
		synctest.Wait()
		close(r.in)
		start := time.Now()
		if err := <-r.ended; err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("Run returned %v after its input was closed, and called the handler %d times", took, calls.Load())
		}
		r.ended <- nil
		r.close()
	})
}

type strictPort struct {
	testPort
	over  atomic.Bool
	after atomic.Int64
}

func (p *strictPort) Size(int) int {
	if p.over.Load() {
		p.after.Add(1)
	}
	return 1
}

func (p *strictPort) Meta(m int) Meta {
	if p.over.Load() {
		p.after.Add(1)
	}
	return p.testPort.Meta(m)
}

// "None comes after Source.End returned": Size and Meta do, from a handler that was left behind, and from Offer.
func TestNoPortCallAfterEnd(t *testing.T) {
	for _, p := range []Policy{{}, {Order: OrderNone, Workers: 2}} {
		bubble(t, p.Order.String(), func(t *testing.T) {
			g, _ := New(Config{Policy: p})
			port := &strictPort{}
			s, err := Open(g, SourceConfig{Name: "s"}, Limits{MaxDeliver: 5}, port, func(context.Context, int) error {
				time.Sleep(time.Hour)
				return errors.New("late")
			})
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int)
			ended := make(chan error, 1)
			go func() { ended <- s.Run(context.Background(), in) }()
			in <- 1
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			s.End(ctx, ReasonRebalance)
			port.over.Store(true)
			if err := <-ended; err == nil {
				t.Error("no word of the end")
			}
			if n := port.after.Load(); n > 0 {
				t.Errorf("%d port calls after End returned", n)
			}
			_, _ = g.Close(t.Context())
		})
	}
	bubble(t, "offer", func(t *testing.T) {
		g, _ := New(Config{})
		port := &strictPort{}
		s, err := Open[int](g, SourceConfig{Name: "s"}, Limits{}, port, nil)
		if err != nil {
			t.Fatal(err)
		}
		s.End(t.Context(), ReasonShutdown)
		port.over.Store(true)
		if err := s.Offer(1); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if n := port.after.Load(); n > 0 {
			t.Errorf("%d port calls after End returned", n)
		}
		_, _ = g.Close(t.Context())
	})
}

// End from inside a handler, from inside a Port call, Close from inside a Writer: all with a context that ends.
func TestEndFromInside(t *testing.T) {
	bubble(t, "handler", func(t *testing.T) {
		var took atomic.Int64
		r := newRig(t, Policy{}, Limits{}, func(r *rig, _ context.Context, _ int) error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			start := time.Now()
			r.s.End(ctx, ReasonShutdown)
			took.Store(int64(time.Since(start)))
			return nil
		})
		r.send(0, 1)
		time.Sleep(time.Minute)
		if took := time.Duration(took.Load()); took == 0 || took > 2*time.Second {
			t.Errorf("took %v", took)
		}
		r.close()
	})
	bubble(t, "handler and Close", func(t *testing.T) {
		start := time.Now()
		r := newRig(t, Policy{}, Limits{}, func(r *rig, _ context.Context, _ int) error {
			r.s.End(context.Background(), ReasonShutdown)
			return nil
		})
		r.send(0, 1)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		closed := make(chan struct{})
		go func() {
			_, _ = r.g.Close(ctx)
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(time.Hour):
			t.Errorf("Close with a context of 1s has not returned after %v", time.Since(start))
			r.s.abandonHung() // to end the test
			<-closed
		}
		if err := <-r.ended; err == nil {
			t.Error("no word of the end")
		}
		r.cancel()
	})
	bubble(t, "writer", func(t *testing.T) {
		g, _ := New(Config{})
		var took atomic.Int64
		release := make(chan struct{})
		w := dlq.WriterFunc(func(ctx context.Context, _ *dlq.Record) error {
			done := make(chan struct{})
			c, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			start := time.Now()
			go func() {
				_, _ = g.Close(c)
				took.Store(int64(time.Since(start)))
				close(done)
			}()
			select {
			case <-done:
			case <-release:
			}
			return nil
		})
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: w}, Limits{}, &testPort{}, func(context.Context, int) error { return Permanent(errDown) })
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int)
		go func() { _ = s.Run(context.Background(), in) }()
		in <- 1
		time.Sleep(time.Minute)
		if took.Load() == 0 {
			t.Error("Close from a writer has not returned after a minute")
		}
		close(release)
		synctest.Wait()
	})
}

// blockPort blocks in one of its calls.
type blockPort struct {
	testPort
	ack, ret, flush, demand, extend chan struct{}
}

func wait(c chan struct{}) {
	if c != nil {
		<-c
	}
}

func (p *blockPort) Ack(m int) error { wait(p.ack); return p.testPort.Ack(m) }

func (p *blockPort) Return(m []int, r Reason) error { wait(p.ret); return p.testPort.Return(m, r) }

func (p *blockPort) Flush() error { wait(p.flush); return nil }

func (p *blockPort) Demand(int) { wait(p.demand) }

func (p *blockPort) Extend([]int) { wait(p.extend) }

// Close with a port call that blocks.
func TestCloseWithBlockedPort(t *testing.T) {
	for name, block := range map[string]func(p *blockPort, c chan struct{}){
		"ack":    func(p *blockPort, c chan struct{}) { p.ack = c },
		"return": func(p *blockPort, c chan struct{}) { p.ret = c },
		"flush":  func(p *blockPort, c chan struct{}) { p.flush = c },
		"demand": func(p *blockPort, c chan struct{}) { p.demand = c },
		"extend": func(p *blockPort, c chan struct{}) { p.extend = c },
	} {
		for _, passive := range []bool{false, true} {
			n := name
			if passive {
				n += " passive"
			}
			bubble(t, n, func(t *testing.T) {
				g, _ := New(Config{})
				p := &blockPort{}
				c := make(chan struct{})
				block(p, c)
				h := func(context.Context, int) error { time.Sleep(2 * time.Second); return nil }
				if passive {
					h = nil
				}
				s, err := Open(g, SourceConfig{Name: "s"}, Limits{AckWait: time.Second}, p, h)
				if err != nil {
					t.Fatal(err)
				}
				in := make(chan int, 10)
				for m := range 5 {
					in <- m
				}
				var user sync.WaitGroup
				if passive {
					for m := range 5 {
						_ = s.Offer(m)
					}
					user.Go(func() {
						n := 0
						for it := range s.Ready() {
							if n++; n < 3 {
								go s.Done(it.Token, nil)
							}
						}
					})
				} else {
					user.Go(func() { _ = s.Run(context.Background(), in) })
				}
				time.Sleep(3 * time.Second)
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				closed := make(chan struct{})
				go func() {
					_, _ = g.Close(ctx)
					close(closed)
				}()
				select {
				case <-closed:
				case <-time.After(time.Hour):
					t.Error("Close with a context of 1s has not returned after an hour")
				}
				close(c)
				<-closed
				user.Wait()
				if err := s.Account().Check(); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

type busyPort struct {
	testPort
	took     atomic.Int64
	inflight atomic.Int64
}

func (p *busyPort) Ack(m int) error {
	p.inflight.Add(1)
	defer p.inflight.Add(-1)
	time.Sleep(time.Duration(p.took.Load()))
	return p.testPort.Ack(m)
}

// A handler outlives End's context and lastCall, and returns while End acks confirmed dead letters: its own ack begins, and
// End returns in the middle of it, with a message in Settling and a clean report.
func TestEndReturnsDuringAck(t *testing.T) {
	g, _ := New(Config{})
	port := &busyPort{}
	letters := make(chan struct{})
	w := dlq.WriterFunc(func(context.Context, *dlq.Record) error { <-letters; return nil })
	s, err := Open(g, SourceConfig{Name: "s", DeadLetters: w}, Limits{}, port, func(_ context.Context, m int) error {
		if m < 4 {
			return Permanent(errDown)
		}
		time.Sleep(700 * time.Millisecond)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	in := make(chan int)
	ended := make(chan error, 1)
	go func() { ended <- s.Run(context.Background(), in) }()
	for m := range 5 {
		in <- m
	}
	time.Sleep(50 * time.Millisecond)
	port.took.Store(int64(150 * time.Millisecond))
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	close(letters)
	time.Sleep(50 * time.Millisecond)
	rep := s.End(ctx, ReasonShutdown)
	if n := port.inflight.Load(); n != 0 || rep.Account.Settling != 0 && rep.Clean() {
		t.Errorf("End returned with %d port calls under way: %+v", n, rep)
	}
	if err := <-ended; !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	_, _ = g.Close(context.Background())
}

// The first End has no deadline and its Return blocks: Close's context does not bound it.
func TestSecondEndBoundsPortCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := New(Config{})
		c := make(chan struct{})
		p := &blockPort{ret: c}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, p, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		s.Pause(0)
		in := make(chan int)
		ended := make(chan error, 1)
		go func() { ended <- s.Run(context.Background(), in) }()
		in <- 1
		go s.End(context.Background(), ReasonRebalance)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		closed := make(chan struct{})
		go func() {
			_, _ = g.Close(ctx)
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(time.Hour):
			t.Error("Close with a context of 1s has not returned after an hour")
		}
		close(c)
		<-closed
		if err := <-ended; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

// A letter that is put off does not keep End waiting: its message goes back to the broker,
// and the credit to the budget, unless a write of it failed before.
func TestEndGivesBackWhatIsPutOff(t *testing.T) {
	for _, passive := range []bool{false, true} {
		for _, fails := range []int{0, 1} {
			synctest.Test(t, func(t *testing.T) {
				g := Must(New(Config{}))
				w := &testWriter{fail: fails, says: func(*dlq.Record) error { return dlq.ErrPutOff }}
				port := &testPort{}
				handler := func(context.Context, int) error { return Permanent(errDown) }
				if passive {
					handler = nil
				}
				s := Must(Open(g, SourceConfig{Name: "s", DeadLetters: w}, Limits{}, port, handler))
				balance := func() float64 {
					s.mu.Lock()
					defer s.mu.Unlock()
					return s.c.budget.Balance(credit.Permanent)
				}
				full := balance()
				in := make(chan int, 3)
				for m := range 3 {
					if passive {
						_ = s.Offer(m)
						s.Done((<-s.Ready()).Token, Permanent(errDown))
					} else {
						in <- m
					}
				}
				if !passive {
					go func() { _ = s.Run(t.Context(), in) }()
				}
				time.Sleep(time.Minute)
				if a := s.Account(); a.Settling != 3 || balance() != full-3 {
					t.Fatalf("%+v, %v of %v credits", a, balance(), full)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				start := time.Now()
				rep := s.End(ctx, ReasonRebalance)
				if took := time.Since(start); took > 2*putOffMax || !rep.Clean() || rep.Returned != 3 || rep.Account.Unsettled() != 0 {
					t.Errorf("End took %v: %+v", took, rep)
				}
				if got := balance(); got != full-float64(fails) {
					t.Errorf("%v of %v credits, %d writes failed", got, full, fails)
				}
				if err := s.Account().Check(); err != nil {
					t.Error(err)
				}
				_, _ = g.Close(t.Context())
			})
		}
	}
}

// A letter that cannot be written keeps no revoke waiting, and so no consumer group: its
// message is the next owner's. A shutdown tries until its context ends.
func TestEndWhileLettersFail(t *testing.T) {
	for name, err := range map[string]error{"down": errDown, "refused": dlq.ErrRefused} {
		for _, why := range []Reason{ReasonRebalance, ReasonShutdown} {
			bubble(t, name+"/"+why.String(), func(t *testing.T) {
				g := Must(New(Config{}))
				s := Must(Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{err: err}}, Limits{}, &testPort{}, func(context.Context, int) error { return Permanent(errBad) }))
				in := make(chan int, 100)
				for m := range 100 {
					in <- m
				}
				go func() { _ = s.Run(t.Context(), in) }()
				time.Sleep(time.Minute)
				ctx, cancel := context.WithTimeout(t.Context(), 55*time.Second)
				defer cancel()
				start := time.Now()
				rep := s.End(ctx, why)
				took := time.Since(start)
				if why == ReasonRebalance && (took > 0 || rep.Returned != 100 || rep.Account.Unsettled() != 0) ||
					why == ReasonShutdown && (took != 55*time.Second || len(rep.Left) != 100) {
					t.Errorf("End took %v: %+v", took, rep.Account)
				}
				if err := s.Account().Check(); err != nil {
					t.Error(err)
				}
				_, _ = g.Close(t.Context())
			})
		}
	}
}

// While writes hang, a revoke waits for the one that is under way, if it is its own source's:
// the other letters go back untried.
func TestEndWhileWritesHang(t *testing.T) {
	for name, failed := range map[string]bool{"first": false, "again": true} {
		bubble(t, name, func(t *testing.T) {
			p := newPartlyDown(t, errDown)
			p.hangs = writeTimeout
			a := p.open("a")
			for m := range 3 {
				a <- m
			}
			most := writeTimeout
			if failed {
				time.Sleep(writeTimeout + time.Microsecond)
				p.open("b") <- 10
				time.Sleep(writeSlow / 2) // its letter is at the writer
				most = 0
			}
			start := time.Now()
			rep := p.g.Source("a").End(t.Context(), ReasonRebalance)
			if took := time.Since(start); took > most || rep.Returned != 3 || rep.Account.Unsettled() != 0 {
				t.Errorf("End took %v: %+v", took, rep)
			}
			p.mended.Store(true)
			time.Sleep(2 * writeTimeout)
			_, _ = p.g.Close(t.Context())
		})
	}
}

// A revoke waits for a slow write of its source and not for those behind it, also when the
// writer has taken another source's letter since.
func TestEndBehindASlowWrite(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const slow = 10 * time.Second
		p := newPartlyDown(t, errDown)
		p.says = func(r *dlq.Record) error {
			if r.Body[0] == '2' {
				time.Sleep(slow)
			}
			return nil
		}
		a := p.open("a")
		for m := range 3 {
			a <- 2000 + m
		}
		elapse(writeSlow + time.Microsecond)
		p.open("b") <- 1000
		if synctest.Wait(); len(p.bodies()) != 1 {
			t.Errorf("beside a slow write %q are written", p.bodies())
		}
		start := time.Now()
		rep := p.g.Source("a").End(t.Context(), ReasonRebalance)
		if took := time.Since(start); took > slow || rep.Returned != 2 || rep.Account.DeadLettered != 1 {
			t.Errorf("End took %v: %+v", took, rep)
		}
		closeAll(t, p.g)
	})
}

// While writes hang, sources that are revoked at once wait for one write and not for one each.
func TestEndsWhileWritesHang(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := newPartlyDown(t, errDown)
		p.hangs = writeTimeout
		for m := range 4 {
			p.open(fmt.Sprint(m)) <- m
		}
		time.Sleep(time.Second)
		start := time.Now()
		var ends sync.WaitGroup
		for _, s := range p.g.Sources() {
			ends.Go(func() {
				if rep := s.End(t.Context(), ReasonRebalance); rep.Returned != 1 {
					t.Errorf("%+v", rep)
				}
			})
		}
		ends.Wait()
		if took := time.Since(start); took > writeTimeout {
			t.Errorf("they took %v", took)
		}
		_, _ = p.g.Close(t.Context())
	})
}

// endsItself is an error that ends its source while the guard reads it.
type endsItself struct{ end func() }

func (e *endsItself) Error() string { return "down" }

func (e *endsItself) Is(err error) bool {
	if err == dlq.ErrRefused {
		e.end()
	}
	return false
}

// A source that is revoked between a failed write and what is made of it has its letter back
// at once.
func TestEndBesideAFailedWrite(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := newPartlyDown(t, nil)
		var s Control
		var once sync.Once
		ended := make(chan time.Duration, 1)
		p.why = &endsItself{func() {
			once.Do(func() {
				start := time.Now()
				go func() {
					s.End(t.Context(), ReasonRebalance)
					ended <- time.Since(start)
				}()
				time.Sleep(time.Microsecond)
			})
		}}
		in := p.open("a")
		s = p.g.Source("a")
		in <- 7
		if took := <-ended; took > time.Millisecond {
			t.Errorf("End took %v", took)
		}
		_, _ = p.g.Close(t.Context())
	})
}
