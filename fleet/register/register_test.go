// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package register_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/registertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func memory(*testing.T) registertest.Place {
	m := new(register.Memory)
	return registertest.Place{
		Open:  func(*testing.T) register.Register { return m },
		Break: func(*testing.T) { m.SetAway(errors.New("away")) },
		Mend:  func(*testing.T) { m.SetAway(nil) },
	}
}

func file(t *testing.T) registertest.Place {
	folder := filepath.Join(t.TempDir(), "fleet")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	return registertest.Place{
		Open: func(t *testing.T) register.Register {
			f, err := register.NewFile(filepath.Join(folder, "register"))
			if err != nil {
				t.Fatal(err)
			}
			return f
		},
		// The disk is unmounted.
		Break: func(t *testing.T) { rename(t, folder, folder+".away") },
		Mend:  func(t *testing.T) { rename(t, folder+".away", folder) },
	}
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func TestMemory(t *testing.T) {
	t.Parallel()
	registertest.Run(t, memory)
	t.Run("Away", func(t *testing.T) {
		t.Parallel()
		registertest.Fault(t, memory(t))
	})
}

func TestFile(t *testing.T) {
	t.Parallel()
	registertest.Run(t, file)
	t.Run("Away", func(t *testing.T) {
		t.Parallel()
		registertest.Fault(t, file(t))
	})
}

// A file that somebody else wrote is neither read nor written over.
func TestFileMalformed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "register")
	f, err := register.NewFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, content := range []string{"", "rate: 100\n", "stormguard-register/2 1\nx", "stormguard-register/1 x\nx", "stormguard-register/1 1\n", "stormguard-register/1 0\nx"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if n, doc, err := f.Read(t.Context()); !errors.Is(err, register.ErrMalformed) {
			t.Errorf("%q reads as %d, %q, %v; want ErrMalformed", content, n, doc, err)
		}
		if err := f.CompareAndSet(t.Context(), 1, []byte("x")); !errors.Is(err, register.ErrMalformed) {
			t.Errorf("%q can be written over: %v", content, err)
		}
	}
}

// A register that was wiped counts as away until it is as far as it was.
func TestWatchNeverGoesBack(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "register")
	f, err := register.NewFile(path)
	if err != nil {
		t.Fatal(err)
	}
	write := func(number uint64) {
		t.Helper()
		if err := f.CompareAndSet(t.Context(), number, fmt.Append(nil, "number ", number)); err != nil {
			t.Fatal(err)
		}
	}
	write(1)
	write(2)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events := make(chan register.Event)
	done := make(chan error, 1)
	go func() {
		done <- f.Watch(ctx, func(e register.Event) {
			select {
			case events <- e:
			case <-ctx.Done():
			}
		})
	}()
	next := func() (e register.Event) {
		t.Helper()
		select {
		case e = <-events:
		case <-time.After(time.Minute):
			t.Fatal("the watch says nothing for a minute")
		}
		return e
	}
	if e := next(); e.Number != 2 {
		t.Fatalf("first event %+v, want number 2", e)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if e := next(); e.Err == nil {
		t.Fatalf("after it was wiped: %+v, want an error", e)
	}
	write(1)
	select {
	case e := <-events:
		t.Fatalf("after number 1 was written anew: %+v, want silence", e)
	case <-time.After(300 * time.Millisecond):
	}
	write(2)
	if e := next(); e.Number != 2 || e.Err != nil {
		t.Fatalf("after number 2 was written anew: %+v", e)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Watch returned %v", err)
	}
}

// late is a register behind a slow network: a write goes on when its caller has given
// up.
type late struct {
	register.Memory

	delay  time.Duration
	sent   func() // nil, or called when a write is on its way
	writes sync.WaitGroup
}

func (l *late) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	document = bytes.Clone(document)
	answer, delay := make(chan error, 1), l.delay+rand.N(5*time.Millisecond)
	l.writes.Go(func() {
		time.Sleep(delay)
		answer <- l.Memory.CompareAndSet(context.WithoutCancel(ctx), number, document)
	})
	if l.sent != nil {
		l.sent()
	}
	if err := ctx.Err(); err != nil { // given up first, also if the answer is there by now
		return fmt.Errorf("%w: %w", register.ErrUnknown, err)
	}
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", register.ErrUnknown, ctx.Err())
	}
}

// What arrives late happens or does not, and after Settle never again.
func TestLate(t *testing.T) {
	t.Parallel()
	registertest.Run(t, func(t *testing.T) registertest.Place {
		l := new(late)
		t.Cleanup(l.writes.Wait)
		return registertest.Place{Open: func(*testing.T) register.Register { return l }}
	})

	l := new(late)
	over, cancel := context.WithCancel(t.Context())
	l.delay, l.sent = 20*time.Millisecond, cancel
	if err := l.CompareAndSet(over, 1, []byte("late")); !errors.Is(err, register.ErrUnknown) {
		t.Fatalf("got %v, want ErrUnknown", err)
	}
	l.sent, l.delay = nil, 0
	n, document, err := register.Settle(t.Context(), l, 1, []byte("noop"))
	if n != 1 || err != nil {
		t.Fatalf("Settle: number %d, %v", n, err)
	}
	l.writes.Wait()
	if n, now, err := l.Read(t.Context()); n != 1 || !bytes.Equal(now, document) || err != nil {
		t.Errorf("settled as %q, and then %d, %q, %v", document, n, now, err)
	}
}

// deposed answers one Read with what was the newest before.
type deposed struct {
	register.Memory
	stale bool
}

func (d *deposed) Read(ctx context.Context) (uint64, []byte, error) {
	if d.stale {
		d.stale = false
		return 1, []byte("one"), nil
	}
	return d.Memory.Read(ctx)
}

// A server that is behind answers Settle's first read: what is written is written.
func TestSettleReadsAgain(t *testing.T) {
	d := new(deposed)
	for n, s := range []string{"one", "two", "mine"} {
		if err := d.CompareAndSet(t.Context(), uint64(n+1), []byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	d.stale = true
	if n, doc, err := register.Settle(t.Context(), d, 3, []byte("noop")); n != 3 || string(doc) != "mine" || err != nil {
		t.Errorf("number %d, %q, %v", n, doc, err)
	}
}
