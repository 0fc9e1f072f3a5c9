// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/credit"
)

// faultyPort cannot describe message 0 while it is broken.
type faultyPort struct {
	testPort
	broken atomic.Bool
	fail   func()
}

func (p *faultyPort) Meta(m int) Meta {
	if m == 0 && p.broken.Load() {
		p.fail()
	}
	return p.testPort.Meta(m)
}

// A port that panics or exits when it is asked for a dead letter fails that write: the
// letter waits and Ready says so, the others are written, and nothing hangs at the end.
// What the writer never had keeps no credit.
func TestMetaThatDoesNotReturn(t *testing.T) {
	for name, c := range map[string]struct {
		fail func()
		says string
	}{
		"panic":  {func() { panic("no headers") }, "Port.Meta panicked: no headers"},
		"goexit": {runtime.Goexit, "Port.Meta called runtime.Goexit"},
	} {
		for why, mended := range map[Reason]bool{ReasonOperator: true, ReasonShutdown: false, ReasonRebalance: false} {
			bubble(t, name, func(t *testing.T) {
				g, err := New(Config{})
				if err != nil {
					t.Fatal(err)
				}
				port, letters := &faultyPort{fail: c.fail}, &testWriter{}
				port.broken.Store(true)
				s, err := Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, port, func(context.Context, int) error {
					return Permanent(errors.New("no such order"))
				})
				if err != nil {
					t.Fatal(err)
				}
				in, ended := make(chan int), make(chan error, 1)
				go func() { ended <- s.Run(t.Context(), in) }()
				in <- 0
				time.Sleep(time.Second)
				if err := g.Ready(); err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("ready: %v", err)
				}
				in <- 1
				in <- 2
				time.Sleep(time.Minute)
				if a := s.Account(); a.Settling != 1 || a.DeadLettered != 2 || a.Check() != nil {
					t.Errorf("while it fails: %+v", a)
				}
				port.broken.Store(!mended)
				time.Sleep(2 * writeMax)
				synctest.Wait()
				want := uint64(2)
				if mended {
					want = 3
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if rep := s.End(ctx, why); rep.Account.DeadLettered != want || rep.Clean() != (why != ReasonShutdown) {
					t.Errorf("mended %v, %v: %+v", mended, why, rep)
				}
				s.mu.Lock()
				if left := s.c.budget.Balance(credit.Permanent); left != float64(500-want) {
					t.Errorf("%d letters written, credits left: %v", want, left)
				}
				s.mu.Unlock()
				if _, err := g.Close(t.Context()); err != nil {
					t.Error(err)
				}
				if err := <-ended; !errors.Is(err, ErrClosed) {
					t.Error(err)
				}
			})
		}
	}
}

// A message that cannot be described says nothing about the writer: the letters of another
// source that is revoked are written, and do not go back.
func TestMetaThatFailsIsNoFailedWrite(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g := Must(New(Config{}))
		release := make(chan struct{})
		letters := &slowWriter{func() error { <-release; return nil }}
		odd := &faultyPort{fail: func() { panic("no headers") }}
		odd.broken.Store(true)
		open := func(name string, port Port[int]) (*Source[int], chan<- int) {
			s := Must(Open(g, SourceConfig{Name: name, DeadLetters: letters}, Limits{}, port, func(context.Context, int) error {
				return Permanent(errBad)
			}))
			in := make(chan int)
			go func() { _ = s.Run(t.Context(), in) }() // ends with the Guard
			return s, in
		}
		a, of := open("a", odd)
		of <- 0
		synctest.Wait()
		if g.Ready() == nil {
			t.Error("ready, and a message cannot be described")
		}
		b, of := open("b", &testPort{})
		of <- 1
		of <- 2
		synctest.Wait() // one is at the writer, and one waits for it
		ended := make(chan Report, 1)
		go func() { ended <- b.End(t.Context(), ReasonRebalance) }()
		synctest.Wait()
		close(release)
		if rep := <-ended; rep.Account.DeadLettered != 2 || rep.Returned != 0 {
			t.Errorf("of 2 letters %d are written and %d are back", rep.Account.DeadLettered, rep.Returned)
		}
		odd.broken.Store(false)
		elapse(writeMax)
		if n := a.Account().DeadLettered; n != 1 || g.Ready() != nil {
			t.Errorf("once it can be described %d letters are written, %v", n, g.Ready())
		}
		closeAll(t, g)
	})
}

// keylessPort cannot find the key of each third message.
type keylessPort struct{ testPort }

func (p *keylessPort) Lane(m int) uint64 {
	if m%3 == 0 {
		panic("no header")
	}
	return uint64(m)
}

// A message for which the function that chooses the key panics is handled as others are, in a
// hold too, and one line says so.
func TestLaneThatPanics(t *testing.T) {
	for _, workers := range []int{1, 2} {
		bubble(t, "", func(t *testing.T) {
			var text strings.Builder
			g, err := New(Config{Policy: Policy{Order: OrderKey, Workers: workers}}, WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
			if err != nil {
				t.Fatal(err)
			}
			var down atomic.Bool
			var mu sync.Mutex
			var handled []int
			s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, Port[int](&keylessPort{}), func(_ context.Context, m int) error {
				if down.Load() {
					return Unavailable(errDown)
				}
				mu.Lock()
				defer mu.Unlock()
				handled = append(handled, m)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int)
			go func() { _ = s.Run(t.Context(), in) }()
			for m := range 10 {
				in <- m
			}
			down.Store(true)
			for m := range 10 {
				in <- 10 + m
			}
			time.Sleep(5 * time.Second)
			down.Store(false)
			time.Sleep(time.Minute)
			mu.Lock()
			defer mu.Unlock()
			var lane []int
			for _, m := range handled {
				if m%3 == 0 {
					lane = append(lane, m)
				}
			}
			if len(handled) != 20 || !slices.Equal(lane, []int{0, 3, 6, 9, 12, 15, 18}) {
				t.Errorf("handled %v", handled)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
			if said := text.String(); strings.Count(said, "the key of a message cannot be found") != 1 {
				t.Errorf("the log says %s", said)
			}
		})
	}
}

// stuckPort does not describe message 1 until it is released.
type stuckPort struct {
	testPort
	release chan struct{}
}

func (p *stuckPort) Meta(m int) Meta {
	if m == 1 {
		<-p.release
	}
	return p.testPort.Meta(m)
}

// A port that hangs when it is asked for a dead letter is said, and the letter is written once the
// port answers.
func TestMetaThatHangs(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var log lockedLog
		g, err := New(Config{}, WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		if err != nil {
			t.Fatal(err)
		}
		port, letters := &stuckPort{release: make(chan struct{})}, &testWriter{}
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, port, func(_ context.Context, m int) error {
			if m == 1 {
				return Permanent(errors.New("no such order"))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		in, ended := make(chan int), make(chan error, 1)
		go func() { ended <- s.Run(t.Context(), in) }()
		in <- 0
		in <- 1
		time.Sleep(writeLate - time.Second)
		if err := g.Ready(); err != nil || log.text() != "" {
			t.Errorf("early: %v\n%s", err, log.text())
		}
		time.Sleep(10 * time.Minute)
		if err := g.Ready(); !errors.Is(err, errMetaLate) {
			t.Errorf("ready: %v", err)
		}
		if n := strings.Count(log.text(), errMetaLate.Error()); n != 1 || strings.Count(log.text(), "level=WARN") != 1 {
			t.Errorf("%d lines:\n%s", n, log.text())
		}
		if !slices.ContainsFunc(s.State().Holds, func(h Hold) bool { return h.Reason == ReasonDLQ }) {
			t.Errorf("%+v", s.State().Holds)
		}
		// Now the writer fails: that is said, too.
		var healed atomic.Bool
		letters.says = func(*dlq.Record) error {
			if healed.Load() {
				return nil
			}
			return errDown
		}
		close(port.release)
		synctest.Wait()
		if n := strings.Count(log.text(), errDown.Error()); n != 1 || strings.Count(log.text(), "level=WARN") != 2 {
			t.Errorf("%d lines of the writer:\n%s", n, log.text())
		}
		healed.Store(true)
		time.Sleep(2 * writeMax)
		if a := s.Account(); a.DeadLettered != 1 || a.Check() != nil || g.Ready() != nil {
			t.Errorf("%+v, ready: %v", a, g.Ready())
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-ended; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}
