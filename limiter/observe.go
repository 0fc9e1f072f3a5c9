// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"time"
)

// Observe returns a gate that admits everything at once, so that a limit can be tried out
// before it is put in force. It asks g each time, and costs as much as g. It calls denied,
// which may be nil, with the number of tokens that g denied. denied runs on the caller's
// goroutine: it must be quick and safe for concurrent use.
//
// A call that would have waited counts as denied. Refund does nothing, since it is not known
// whether g had admitted the tokens.
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

// WaitN fails only if ctx has ended.
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

// Level is the observed gate's, with Next 0, since nothing waits.
func (o *observed) Level() Level {
	l := o.gate.Level()
	l.Next = 0
	return l
}
