// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
)

// asOnly is an error whose mark only its As method finds.
type asOnly struct{ error }

func (e asOnly) As(target any) bool { return errors.As(e.error, target) }

// The outermost mark counts, wherever it stands, but not within a panic.
func TestClassify(t *testing.T) {
	panicked := &PanicError{Value: Permanent(errDown)}
	for _, c := range []struct {
		err  error
		want outcome
	}{
		{nil, success},
		{errDown, failure},
		{Permanent(errDown), permanent},
		{fmt.Errorf("order 7: %w", Permanent(errDown)), permanent},
		{Ignore(Permanent(errDown)), ignore},
		{errors.Join(errDown, nil, Ignore(errDown), Permanent(errDown)), ignore},
		{fmt.Errorf("%w: %w", ErrTimeout, Permanent(errDown)), permanent},
		{asOnly{Ignore(errDown)}, ignore},
		{asOnly{errDown}, failure},
		{panicked, failure},
		{fmt.Errorf("%w: %w", ErrTimeout, panicked), failure},
		{fmt.Errorf("in a worker: %w", panicked), failure},
		{Ignore(panicked), ignore},
		{errors.Join(panicked, Ignore(errDown)), ignore},
		{fmt.Errorf("%w: %w", ErrTimeout, &PanicError{Value: (*brokenError)(nil)}), failure},
		{&PanicError{Value: "text"}, failure},
	} {
		if got, _ := classify(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}

// A handler that panics after its timeout has failed, whatever it panicked with.
func TestPanicAfterTheTimeout(t *testing.T) {
	for name, value := range map[string]any{
		"permanent": Permanent(errDown), "ignore": Ignore(errDown), "broken": (*brokenError)(nil), "text": "late",
	} {
		for _, p := range []Policy{{Timeout: time.Second}, {Timeout: time.Second, Order: OrderKey, Workers: 2}} {
			bubble(t, fmt.Sprint(name, p.Workers), func(t *testing.T) {
				calls := 0
				r := newRig(t, p, Limits{}, func(_ *rig, ctx context.Context, _ int) error {
					if calls++; calls == 1 {
						<-ctx.Done()
						panic(value)
					}
					return nil
				})
				r.send(0, 1)
				time.Sleep(time.Minute)
				if a, st := r.check(), r.s.State(); a.Acked != 1 || st.Tally.Panics != 1 || st.Tally.Retries != 1 || st.Tally.Ignored != 0 {
					t.Errorf("%+v, %+v", a, st.Tally)
				}
				r.close()
			})
		}
	}
}
