// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
)

// rig is a source with everything around it, inside a bubble.
type rig struct {
	t       *testing.T
	g       *Guard
	s       *Source[int]
	port    *testPort
	letters *testWriter
	in      chan int
	ended   chan error
	cancel  context.CancelFunc

	mu      sync.Mutex
	calls   []int // every handler call
	handled []int // in order of success
}

func newRig(t *testing.T, p Policy, l Limits, handler func(r *rig, ctx context.Context, m int) error) *rig {
	t.Helper()
	g, err := New(Config{Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, g: g, port: &testPort{keys: 8}, letters: &testWriter{}, in: make(chan int), ended: make(chan error, 1)}
	r.s, err = Open(g, SourceConfig{Name: "s", Destination: "t", DeadLetters: r.letters}, l, r.port, func(ctx context.Context, m int) error {
		r.mu.Lock()
		r.calls = append(r.calls, m)
		r.mu.Unlock()
		err := handler(r, ctx, m)
		if err == nil {
			r.mu.Lock()
			r.handled = append(r.handled, m)
			r.mu.Unlock()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.cancel = cancel
	go func() { r.ended <- r.s.Run(ctx, r.in) }()
	return r
}

func (r *rig) send(from, to int) {
	for m := from; m < to; m++ {
		r.in <- m
	}
}

func (r *rig) check() Account {
	r.t.Helper()
	synctest.Wait()
	a := r.s.Account()
	if err := a.Check(); err != nil {
		r.t.Error(err)
	}
	return a
}

// close ends everything and checks that it ends clean.
func (r *rig) close() {
	r.t.Helper()
	if _, err := r.g.Close(r.t.Context()); err != nil {
		r.t.Error(err)
	}
	r.cancel()
	if err := <-r.ended; err != nil && !errors.Is(err, ErrClosed) && !errors.Is(err, context.Canceled) {
		r.t.Error(err)
	}
	if err := r.s.Account().Check(); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) done() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.handled)
}

func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func ok(*rig, context.Context, int) error { return nil }
