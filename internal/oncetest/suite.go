// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package oncetest is the conformance suite of the stores of package once, with the kill -9
// loop. Each store's tests run it against the real store.
package oncetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/once"
)

// patience limits each wait. It is no measure of speed: the machine may be busy.
const patience = 2 * time.Minute

// Effects is the method that every store has.
type Effects interface {
	Do(ctx context.Context, key string, effect func(context.Context) error) error
}

// Opener returns a handle like that of another process. For a store of a single process it
// returns the same handle. The handle is closed with the test.
type Opener func(t *testing.T) Effects

// Run runs the tests that every store passes. place returns an empty store.
func Run(t *testing.T, place func(t *testing.T) Opener) {
	for _, test := range []struct {
		name string
		run  func(context.Context, *testing.T, Opener)
	}{
		{"Once", runsOnce},
		{"Fails", failureRunsAgain},
		{"Panics", panicRunsAgain},
		{"Twins", twins},
		{"Waits", waits},
		{"WaitEnds", waitEnds},
		{"Cancelled", cancelled},
		{"Keys", keys},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			test.run(ctx, t, place(t))
		})
	}
}

// counter counts the calls of an effect, and the most calls at the same time.
type counter struct {
	calls, now, most atomic.Int64
}

func (c *counter) effect(context.Context) error {
	c.calls.Add(1)
	if n := c.now.Add(1); n > c.most.Load() {
		c.most.Store(n)
	}
	runtime.Gosched()
	c.now.Add(-1)
	return nil
}

func do(ctx context.Context, t *testing.T, e Effects, key string, effect func(context.Context) error) {
	t.Helper()
	if err := e.Do(ctx, key, effect); err != nil {
		t.Fatalf("%.40q: %v", key, err)
	}
}

func want(t *testing.T, c *counter, n int64) {
	t.Helper()
	if got := c.calls.Load(); got != n {
		t.Fatalf("the effect ran %d times, want %d", got, n)
	}
}

func runsOnce(ctx context.Context, t *testing.T, open Opener) {
	var a, b counter
	first, second := open(t), open(t)
	for range 3 {
		do(ctx, t, first, "a", a.effect)
		do(ctx, t, second, "a", a.effect)
		do(ctx, t, second, "b", b.effect)
		do(ctx, t, open(t), "b", b.effect)
	}
	want(t, &a, 1)
	want(t, &b, 1)
}

var errEffect = errors.New("the effect failed")

func failureRunsAgain(ctx context.Context, t *testing.T, open Opener) {
	var c counter
	e, other := open(t), open(t)
	for i := range 3 {
		err := []Effects{e, other}[i%2].Do(ctx, "a", func(ctx context.Context) error {
			_ = c.effect(ctx)
			return errEffect
		})
		if !errors.Is(err, errEffect) {
			t.Fatalf("%v, want the effect's error", err)
		}
	}
	want(t, &c, 3)
	do(ctx, t, other, "a", c.effect)
	do(ctx, t, e, "a", c.effect)
	want(t, &c, 4)
}

func panicRunsAgain(ctx context.Context, t *testing.T, open Opener) {
	var c counter
	e, other := open(t), open(t)
	func() {
		defer func() {
			if p := recover(); p != "effect" {
				t.Errorf("recovered %v, want the effect's panic", p)
			}
		}()
		_ = e.Do(ctx, "a", func(context.Context) error { panic("effect") })
	}()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = e.Do(ctx, "a", func(context.Context) error { runtime.Goexit(); return nil })
	}()
	<-ended
	do(ctx, t, other, "a", c.effect)
	do(ctx, t, e, "a", c.effect)
	want(t, &c, 1)
}

// twins makes many deliveries of few keys at the same time, through several handles. Each
// effect must run once.
func twins(ctx context.Context, t *testing.T, open Opener) {
	const handles, goroutines, rounds = 3, 4, 8
	var counters [rounds]counter
	var wg sync.WaitGroup
	errs := make(chan error, handles*goroutines)
	for range handles {
		e := open(t)
		for range goroutines {
			wg.Go(func() {
				for i := range rounds {
					if err := e.Do(ctx, fmt.Sprint("key", i), counters[i].effect); err != nil {
						errs <- err
						return
					}
				}
			})
		}
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	for i := range counters {
		want(t, &counters[i], 1)
	}
}

// blocked is an effect that waits while it runs.
type blocked struct {
	begun   chan struct{}
	proceed chan error
	ended   chan error
}

func block(ctx context.Context, t *testing.T, e Effects, key string) *blocked {
	t.Helper()
	b := &blocked{make(chan struct{}), make(chan error, 1), make(chan error, 1)}
	go func() {
		b.ended <- e.Do(ctx, key, func(context.Context) error {
			close(b.begun)
			return <-b.proceed
		})
	}()
	select {
	case <-b.begun:
	case err := <-b.ended:
		t.Fatal(err)
	}
	return b
}

// join waits for the end of an effect whose process is dead. The effect must fail.
func (b *blocked) join() {
	if err := <-b.ended; err == nil {
		panic("oncetest: an effect that fails succeeds")
	}
}

// waits checks that a second delivery waits for the first, and runs the effect only if the
// first fails.
func waits(ctx context.Context, t *testing.T, open Opener) {
	for name, outcome := range map[string]error{"succeeds": nil, "fails": errEffect} {
		e, other := open(t), open(t)
		b := block(ctx, t, e, name)
		var c counter
		second := make(chan error, 1)
		go func() {
			second <- other.Do(ctx, name, c.effect)
		}()
		do(ctx, t, other, name+" another key", c.effect) // another key does not wait
		select {
		case err := <-second:
			t.Fatalf("%s: the second delivery did not wait: %v", name, err)
		default:
		}
		b.proceed <- outcome
		if err := <-b.ended; !errors.Is(err, outcome) {
			t.Fatalf("%s: %v", name, err)
		}
		if err := <-second; err != nil {
			t.Fatalf("%s: second: %v", name, err)
		}
		if outcome == nil {
			want(t, &c, 1) // the effect of the other key
		} else {
			want(t, &c, 2)
		}
	}
}

// waitEnds checks that a wait ends with its context, and that Do does nothing if its
// context has already ended.
func waitEnds(ctx context.Context, t *testing.T, open Opener) {
	e, other := open(t), open(t)
	var c counter
	over, cancel := context.WithCancel(ctx)
	cancel()
	if err := e.Do(over, "over", c.effect); err == nil {
		t.Error("Do succeeds with a context that had ended")
	}
	b := block(ctx, t, e, "a")
	_, runner := e.(*once.Runner)
	// On a busy machine a short wait may end before the store has answered at all.
	for wait := 100 * time.Millisecond; ; wait *= 4 {
		short, cancel := context.WithTimeout(ctx, wait)
		err := other.Do(short, "a", c.effect)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, once.ErrUnderway) {
			t.Errorf("%v, want the end of the context", err)
		}
		var u *once.UnderwayError
		if !runner || errors.As(err, &u) && u.Key == "a" && u.Timeout() {
			break
		}
		if wait > 20*time.Second {
			t.Fatalf("%v, want an UnderwayError", err)
		}
	}
	want(t, &c, 0)
	b.proceed <- nil
	if err := <-b.ended; err != nil {
		t.Fatal(err)
	}
	do(ctx, t, other, "a", c.effect)
	want(t, &c, 0)
}

// cancelled checks that an effect is marked although its delivery was cancelled meanwhile.
func cancelled(ctx context.Context, t *testing.T, open Opener) {
	e, other := open(t), open(t)
	delivery, cancel := context.WithCancel(ctx)
	defer cancel()
	do(delivery, t, e, "a", func(context.Context) error { cancel(); return nil })
	var c counter
	do(ctx, t, other, "a", c.effect)
	want(t, &c, 0)
}

func keys(ctx context.Context, t *testing.T, open Opener) {
	e, other := open(t), open(t)
	for _, bad := range []string{"", strings.Repeat("x", once.MaxKey+1)} {
		err := e.Do(ctx, bad, func(context.Context) error { t.Error("it ran"); return nil })
		if !errors.Is(err, once.ErrKey) || !strings.Contains(err.Error(), fmt.Sprint(len(bad), " bytes: it must be 1 to 512")) {
			t.Errorf("%d bytes: %v", len(bad), err)
		}
	}
	var every []byte
	for i := range 256 {
		every = append(every, byte(i))
	}
	var c counter
	all := []string{
		"a", "A", "a.b", "a/b", ">", "*", "a b", "\x00", "a\x00", "\xff\xfe", "ключ", "$1", "'; --",
		string(every), strings.Repeat("x", once.MaxKey), strings.Repeat("x", once.MaxKey-1), string(bytes.Repeat([]byte{0xff}, once.MaxKey)),
	}
	for range 2 {
		for _, key := range all {
			do(ctx, t, e, key, c.effect)
			do(ctx, t, other, key, c.effect)
		}
	}
	want(t, &c, int64(len(all)))
}
