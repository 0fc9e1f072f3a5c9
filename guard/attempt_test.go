// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"
)

type someKey struct{}

// A handler sees which attempt of its message it is, whatever it has wrapped its context
// in: on the closed path, in a retry, after a Backoff, with workers, and in a Func.
func TestAttempt(t *testing.T) {
	if n := Attempt(context.WithValue(t.Context(), someKey{}, 1)); n != 0 {
		t.Errorf("%d outside a handler", n)
	}
	for name, p := range map[string]Policy{"loop": {}, "workers": {Order: OrderKey, Workers: 2}} {
		bubble(t, name, func(t *testing.T) {
			var seen []int
			r := newRig(t, p, Limits{}, func(_ *rig, ctx context.Context, m int) error {
				if m != 3 {
					if n := Attempt(ctx); n != 1 {
						t.Errorf("message %d: attempt %d", m, n)
					}
					return nil
				}
				ctx, cancel := context.WithCancel(context.WithValue(ctx, someKey{}, 1))
				defer cancel()
				if ctx.Value(someKey{}) != 1 {
					t.Error("another value is lost")
				}
				seen = append(seen, Attempt(ctx))
				switch len(seen) {
				case 1, 3:
					return errDown
				case 2:
					return Backoff(errDown, time.Now().Add(time.Second))
				}
				return nil
			})
			r.send(0, 6)
			elapse(time.Minute)
			if !slices.Equal(seen, []int{1, 2, 2, 3}) {
				t.Errorf("%v", seen)
			}
			r.close()
		})
	}
	bubble(t, "func", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		var seen []int
		f, err := Protect(g, SourceConfig{Name: "f"}, func(ctx context.Context, _ int) error {
			if seen = append(seen, Attempt(ctx)); len(seen) < 3 {
				return errDown
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Do(t.Context(), 1); err != nil || !slices.Equal(seen, []int{1, 2, 3}) {
			t.Errorf("%v, %v", seen, err)
		}
		closeAll(t, g)
	})
}

// Must hands on what went well, and panics with the error of what did not.
func TestMust(t *testing.T) {
	g := Must(New(Config{}))
	closeAll(t, g)
	defer func() {
		if err, ok := recover().(error); !ok || !errors.Is(err, errDown) {
			t.Errorf("%v", err)
		}
	}()
	Must(0, errDown)
	t.Error("no panic")
}
