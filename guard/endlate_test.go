// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// pairPort hangs in the first of two calls that follow each other.
type pairPort struct {
	testPort
	hangs   string
	release chan struct{}
	begun   atomic.Int64
}

func (p *pairPort) call(kind string) {
	p.begun.Add(1)
	if kind == p.hangs {
		<-p.release
	}
}

func (p *pairPort) Ack(m int) error {
	p.call("ack")
	return p.testPort.Ack(m)
}

func (p *pairPort) Ahead() int {
	p.call("ahead")
	return 0
}

func (p *pairPort) Size(int) int {
	p.call("size")
	return 1
}

func (p *pairPort) Lane(int) uint64 {
	p.call("lane")
	return 0
}

func (p *pairPort) Extend([]int) { p.call("extend") }

func (p *pairPort) Flush() error {
	p.call("flush")
	return nil
}

func (p *pairPort) Return(ms []int, why Reason) error {
	p.call("return")
	return p.testPort.Return(ms, why)
}

// Where one port call follows another, and the first hangs for longer than End waits, the
// second does not come.
func TestEndBetweenTwoPortCalls(t *testing.T) {
	wait := func(ctx context.Context, _ int) error { <-ctx.Done(); return ctx.Err() }
	for _, c := range []struct {
		hangs  string
		policy Policy
		limits Limits
		paused bool
		handle func(context.Context, int) error
	}{
		{hangs: "ack", policy: Policy{Order: OrderNone, Workers: 2}, handle: func(context.Context, int) error { return nil }},   // then Ahead
		{hangs: "size", policy: Policy{Order: OrderKey}, paused: true, handle: wait},                                            // then Lane
		{hangs: "extend", policy: Policy{Order: OrderNone, Workers: 2}, limits: Limits{AckWait: 2 * time.Second}, handle: wait}, // then Flush
		{hangs: "return", paused: true, handle: wait},                                                                           // then Flush
	} {
		bubble(t, c.hangs, func(t *testing.T) {
			g, err := New(Config{Policy: c.policy})
			if err != nil {
				t.Fatal(err)
			}
			port := &pairPort{hangs: c.hangs, release: make(chan struct{})}
			s, err := Open(g, SourceConfig{Name: "s"}, c.limits, port, c.handle)
			if err != nil {
				t.Fatal(err)
			}
			if c.paused {
				s.Pause(0)
			}
			in, ended := make(chan int, 1), make(chan error, 1)
			in <- 0
			go func() { ended <- s.Run(t.Context(), in) }()
			time.Sleep(time.Second)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if rep := s.End(ctx, ReasonShutdown); rep.Err == nil {
				t.Errorf("%+v", rep)
			}
			begun := port.begun.Load()
			close(port.release)
			if err := <-ended; !errors.Is(err, ErrClosed) {
				t.Error("Run:", err)
			}
			synctest.Wait()
			if n := port.begun.Load() - begun; n > 0 {
				t.Errorf("%d port calls after End had returned", n)
			}
			if err := s.Account().Check(); err != nil {
				t.Error(err)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
