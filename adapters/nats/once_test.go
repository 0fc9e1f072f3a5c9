// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/mark"
	"github.com/stormguard-mq/stormguard/internal/oncetest"
	"github.com/stormguard-mq/stormguard/once"
)

// onceLease is short, since a test waits for it, and longer than a busy machine is silent.
const onceLease = 3 * time.Second

func newOnce(t *testing.T, b *broker, cfg OnceConfig) *Once {
	t.Helper()
	js, err := jetstream.New(b.connect())
	if err != nil {
		t.Fatal(err)
	}
	o, err := NewOnce(js, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestOnce(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	oncetest.RunStore(t, func(*testing.T) oncetest.Place {
		cfg := OnceConfig{Bucket: fmt.Sprintf("once-%08x", rand.Uint32()), Lease: onceLease}
		return oncetest.Place{
			Open: func(t *testing.T) once.Store { return newOnce(t, b, cfg) },
			// Its connection is gone: it renews nothing, as a process that is dead.
			Crash: func(_ *testing.T, s once.Store) { s.(*Once).js.Conn().Close() },
		}
	})
}

// onceAsChild is the process that TestOnceKilled kills.
func onceAsChild(c oncetest.Child) (oncetest.ChildEffects, error) {
	nc, err := nats.Connect(c.Args[0], nats.MaxReconnects(-1), nats.Timeout(connectTimeout))
	if err != nil {
		return oncetest.ChildEffects{}, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return oncetest.ChildEffects{}, err
	}
	o, err := NewOnce(js, OnceConfig{Bucket: "once", Lease: time.Second}) // which each kill waits for
	if err != nil {
		return oncetest.ChildEffects{}, err
	}
	var opts []once.Option
	if c.Mode == "lookup" {
		opts = append(opts, once.WithLookup(c.Happened))
	}
	r, err := once.New(o, once.Config{}, opts...)
	return oncetest.ChildEffects{Effects: r}, err
}

func TestOnceKilled(t *testing.T) {
	t.Parallel()
	for mode, exact := range map[string]bool{"again": false, "lookup": true} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			oncetest.Kills{Mode: mode, Args: []string{newBroker(t).url()}, Exact: exact}.Holds(t)
		})
	}
}

// A claim is kept for as long as its effect runs, and a second delivery waits for it.
func TestOnceRenewed(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	cfg := OnceConfig{Bucket: "once", Lease: 3 * time.Second}
	r, err := once.New(newOnce(t, b, cfg), once.Config{})
	if err != nil {
		t.Fatal(err)
	}
	other := newOnce(t, b, cfg)
	waited, cancel := context.WithTimeout(t.Context(), 2*cfg.Lease)
	defer cancel()
	err = r.Do(t.Context(), "a", func(ctx context.Context) error {
		if _, _, err := other.Claim(waited, "ka", once.Ask{}); !errors.Is(err, once.ErrUnderway) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("another claims it meanwhile: %v", err)
		}
		return context.Cause(ctx)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A process that the server has not heard of for too long is told so before another one may
// have its key. What it finishes afterwards changes nothing.
func TestOnceLost(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	cfg := OnceConfig{Bucket: "once", Lease: 2 * time.Second}
	o, other := newOnce(t, b, cfg), newOnce(t, b, cfg)
	r, err := once.New(o, once.Config{})
	if err != nil {
		t.Fatal(err)
	}
	second, err := once.New(other, once.Config{})
	if err != nil {
		t.Fatal(err)
	}
	err = r.Do(t.Context(), "a", func(ctx context.Context) error {
		o.js.Conn().Close()
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), once.ErrLost) {
			t.Errorf("the effect's context ended by %v, want ErrLost", context.Cause(ctx))
		}
		if t.Context().Err() != nil {
			t.Error("the delivery's own context ended")
		}
		return second.Do(t.Context(), "a", func(context.Context) error { return nil })
	})
	if !errors.Is(err, once.ErrUnmarked) {
		t.Errorf("%v, want ErrUnmarked", err)
	}
	if err := second.Do(t.Context(), "a", nil); err != nil {
		t.Error(err)
	}
}

// While the server is away no effect begins. One that happened meanwhile is not repeated.
func TestOnceAway(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	r, err := once.New(newOnce(t, b, OnceConfig{Bucket: "once", Lease: time.Minute}), once.Config{})
	if err != nil {
		t.Fatal(err)
	}
	calls := 0
	count := func(context.Context) error { calls++; return nil }
	if err := r.Do(t.Context(), "a", func(ctx context.Context) error { b.stop(); return count(ctx) }); !errors.Is(err, once.ErrUnmarked) {
		t.Fatalf("%v, want ErrUnmarked", err)
	}
	for _, key := range []string{"a", "b"} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if err := r.Do(ctx, key, count); err == nil {
			t.Errorf("%s is done while the server is away", key)
		}
		cancel()
	}
	if calls != 1 {
		t.Errorf("%d effects, want 1", calls)
	}
	b.start()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for r.Do(ctx, "b", count) != nil {
		if ctx.Err() != nil {
			t.Fatal("the server is back, and no effect runs")
		}
	}
	if err := r.Do(ctx, "a", count); err != nil || calls != 2 {
		t.Errorf("%v, %d effects, want 2", err, calls)
	}
}

func TestOnceUnsuitable(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	js, err := jetstream.New(b.connect())
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		cfg  jetstream.KeyValueConfig
		says string
	}{
		{jetstream.KeyValueConfig{Bucket: "short", TTL: time.Second}, "nats stream edit KV_short --max-age=7d"},
		{jetstream.KeyValueConfig{Bucket: "memory", Storage: jetstream.MemoryStorage}, "create it anew with file storage"},
		{jetstream.KeyValueConfig{Bucket: "narrow", MaxValueSize: 1024}, "its max message size is 1024, and for a mark it must be 17408 or more: nats stream edit KV_narrow --max-msg-size=17408"},
	} {
		if _, err := js.CreateKeyValue(t.Context(), tt.cfg); err != nil {
			t.Fatal(err)
		}
		o := newOnce(t, b, OnceConfig{Bucket: tt.cfg.Bucket})
		if _, _, err := o.Claim(t.Context(), "ka", once.Ask{}); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want ErrUnsuitable with %q", tt.cfg.Bucket, err, tt.says)
		}
	}
	if _, _, err := newOnce(t, b, OnceConfig{Bucket: "none", NoCreate: true}).Claim(t.Context(), "ka", once.Ask{}); !errors.Is(err, jetstream.ErrBucketNotFound) {
		t.Errorf("a bucket that does not exist: %v", err)
	}
	if _, err := NewOnce(js, OnceConfig{Bucket: "a b", Age: 1, MaxBytes: -1, Lease: 1, Replicas: 6}); err == nil {
		t.Error("a configuration that is all wrong is taken")
	} else if n := strings.Count(err.Error(), "OnceConfig."); n != 5 {
		t.Errorf("%d problems of 5 are named: %v", n, err)
	}
}

// A connection that is lost when the effect ends, and back before the lease is over, leaves
// nothing in doubt: neither an effect that has happened, nor one that has failed.
func TestOnceOverAShortDisconnect(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	cfg := OnceConfig{Bucket: "once", Lease: 30 * time.Second} // a busy machine may need seconds for the server
	doubt := once.Config{InDoubt: once.Refuse}
	r, err := once.New(newOnce(t, b, cfg), doubt)
	if err != nil {
		t.Fatal(err)
	}
	other, err := once.New(newOnce(t, b, cfg), doubt)
	if err != nil {
		t.Fatal(err)
	}
	ctx := adaptertest.Context(t)
	for key, result := range map[string]error{"happened": nil, "failed": errDown} {
		back := make(chan struct{})
		err := r.Do(ctx, key, func(context.Context) error {
			b.stop()
			time.AfterFunc(300*time.Millisecond, func() { b.start(); close(back) })
			return result
		})
		<-back
		if !errors.Is(err, result) {
			t.Errorf("%s: %v", key, err)
		}
		runs := 0
		adaptertest.Eventually(t, "the other process is connected again", func() bool {
			err = other.Do(ctx, key, func(context.Context) error { runs++; return nil })
			return !errors.Is(err, nats.ErrDisconnected)
		})
		if err != nil || (runs == 0) != (result == nil) {
			t.Errorf("%s: another process ran it %d times, %v", key, runs, err)
		}
	}
}

// manyKeys makes a Once with more keys than nats.go buffers for a list.
func manyKeys(t *testing.T) (o *Once, keys int) {
	t.Helper()
	o = newOnce(t, newBroker(t), OnceConfig{Bucket: "once"})
	r, err := once.New(o, once.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for keys < 600 {
		if err := r.Do(adaptertest.Context(t), fmt.Sprint("k", keys), func(context.Context) error { return nil }); err != nil {
			t.Fatal(err)
		}
		keys++
	}
	return o, keys
}

// A list that breaks off is an error, and no shorter list.
func TestOnceListBreaksOff(t *testing.T) {
	t.Parallel()
	o, keys := manyKeys(t)
	n := 0
	for e, err := range o.List(adaptertest.Context(t), 'k') {
		if err != nil {
			return
		}
		if n++; n == 1 {
			o.js.Conn().Close()
		}
		_ = e
	}
	t.Errorf("%d of %d keys, and no error", n, keys)
}

// A list that its caller ends early leaves no goroutine of nats.go. It is not parallel: other
// tests list, too.
func TestOnceListEndsEarly(t *testing.T) {
	o, _ := manyKeys(t)
	stacks := make([]byte, 4<<20)
	blocked := func() bool { // nats.go has an entry, and no room for it
		for stack := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(stack, "[chan send") && strings.Contains(stack, "WatchFiltered.func1") {
				return true
			}
		}
		return false
	}
	for _, err := range o.List(adaptertest.Context(t), 'k') {
		if err != nil {
			t.Fatal(err)
		}
		adaptertest.Eventually(t, "the buffer is full", blocked)
		break
	}
	adaptertest.Eventually(t, "nothing is blocked", func() bool { return !blocked() })
}

// While a stream has no leader its writes are answered by nobody: what becomes of a claim is
// written when there is one again.
func TestOnceWithoutALeader(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	o := newOnce(t, b, OnceConfig{Bucket: "once"})
	ctx := adaptertest.Context(t)
	for i, away := range []error{jetstream.ErrNoStreamResponse, nats.ErrNoResponders, nats.ErrDisconnected, errDown} {
		claim, _, err := o.Claim(ctx, fmt.Sprint("k", i), once.Ask{})
		if err != nil {
			t.Fatal(err)
		}
		writes := 0
		err = claim.(*onceClaim).settle(ctx, func(context.Context, jetstream.KeyValue) error {
			if writes++; writes < 3 {
				return fmt.Errorf("nats: once: %w", away)
			}
			return nil
		})
		if passes := !errors.Is(away, errDown); passes && (err != nil || writes != 3) || !passes && (err == nil || writes != 1) {
			t.Errorf("%v: %v after %d writes", away, err, writes)
		}
	}
}

// A delivery whose context ends while its beginning is written has begun nothing: its key is
// not in doubt.
func TestOnceCancelledBeginning(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	o := newOnce(t, b, OnceConfig{Bucket: "once"})
	r, err := once.New(o, once.Config{InDoubt: once.Refuse})
	if err != nil {
		t.Fatal(err)
	}
	ctx := adaptertest.Context(t)
	if err := r.Do(ctx, "b", func(context.Context) error { return nil }); err != nil {
		t.Fatal(err)
	}
	kv, err := o.open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"ka", "kb"} { // a key that is new, and one that was done
		before, rev, _, err := o.read(ctx, kv, key)
		if err != nil {
			t.Fatal(err)
		}
		c := &onceClaim{o: o, key: key, owner: 7}
		if _, err := o.put(ctx, kv, key, mark.Record{State: mark.Begun, Owner: c.owner}, rev); err != nil {
			t.Fatal(err)
		}
		ended, cancel := context.WithCancel(ctx)
		cancel()
		c.unbegin(ended, kv, before, rev)
		if after, _, _, err := o.read(ctx, kv, key); err != nil || after.State != before.State || after.Owner != before.Owner {
			t.Errorf("%s: %+v, %v, was %+v", key, after, err, before)
		}
	}
	runs := 0
	for _, key := range []string{"a", "b"} {
		if err := r.Do(ctx, key, func(context.Context) error { runs++; return nil }); err != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
	if runs != 1 {
		t.Errorf("%d effects, want that of a", runs)
	}
	for i := range 200 { // by the way that a delivery takes
		key := fmt.Sprint("c", i)
		short, cancel := context.WithTimeout(ctx, time.Duration(i)*10*time.Microsecond)
		done := r.Do(short, key, func(context.Context) error { return nil })
		cancel()
		if err := r.Do(ctx, key, func(context.Context) error { return nil }); err != nil && !errors.Is(done, once.ErrUnmarked) {
			t.Errorf("%s: %v, after %v", key, err, done)
		}
	}
}
