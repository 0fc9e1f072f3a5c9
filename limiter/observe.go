// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"time"
)

// Observe is a gate that admits everything at once, and calls denied, which may be
// nil, with what the real one would not have admitted: a limit can be tried out
// before it is put in force. It asks the real one each time, and costs what that
// costs. denied is called from whoever asks, also at the same time: it must be safe
// for that and quick.
//
// What would have waited counts as denied. Refund does nothing, since nobody knows
// whether the admission was one of the real gate's.
func Observe(g Gate, denied func(n int)) Gate {
	if denied == nil {
		denied = func(int) {}
	}
	return &observed{gate: g, denied: denied}
}

type observed struct {
	gate   Gate
	denied func(int)
}

func (o *observed) Allow() bool { return o.AllowN(1) }

func (o *observed) AllowN(n int) bool {
	if !o.gate.AllowN(n) {
		o.denied(n)
	}
	return true
}

func (o *observed) Wait(ctx context.Context) error { return o.WaitN(ctx, 1) }

// WaitN fails only for a ctx that has ended.
func (o *observed) WaitN(ctx context.Context, n int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	o.AllowN(n)
	return nil
}

func (o *observed) Admit(now time.Duration) time.Duration {
	if o.gate.Admit(now) > 0 {
		o.denied(1)
	}
	return 0
}

func (*observed) Refund(int) {}

// Level is the real one's, except that there is nothing to wait for.
func (o *observed) Level() Level {
	l := o.gate.Level()
	l.Next = 0
	return l
}
