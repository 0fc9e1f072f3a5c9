// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// Outcome is how a call of a [Handler] ended.
type Outcome uint8

// The outcomes of a call.
const (
	Running   Outcome = iota // the call has not ended
	Succeeded                // the handler returned nil
	Failed                   // the handler returned an error
	Unwound                  // the handler ended by a panic or a Goexit
)

var outcomeNames = [...]string{"running", "succeeded", "failed", "unwound"}

func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return "Outcome(" + strconv.Itoa(int(o)) + ")"
}

// Call is one call of a [Handler].
type Call struct {
	Seq        uint64 // number of the message; 0 if unknown
	Key        string
	Attempt    int // number of the call among those of this Seq, from 1, over all epochs
	Epoch, Tag uint64
	Start, End time.Time // End is zero while the call runs
	Outcome    Outcome
	Err        error // returned error
}

// A Step is what a [Handler] does for one call.
type Step func(ctx context.Context) error

// Succeed is the Step that does nothing.
func Succeed(context.Context) error { return nil }

// Fail is a Step that returns err.
func Fail(err error) Step { return func(context.Context) error { return err } }

// Panic is a Step that panics with v.
func Panic(v any) Step { return func(context.Context) error { panic(v) } }

// Goexit is the Step that calls [runtime.Goexit].
func Goexit(context.Context) error { runtime.Goexit(); return nil }

// Hang is the Step that waits for the end of its context and returns the cause.
func Hang(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }

// Deaf is a Step that ignores its context: it returns nil once release is closed.
func Deaf(release <-chan struct{}) Step {
	return func(context.Context) error { <-release; return nil }
}

// Slow is a Step that takes d and returns nil. If its context ends first, it returns the
// context's cause.
func Slow(d time.Duration) Step {
	return func(ctx context.Context) error { return pause(ctx, d) }
}

func pause(ctx context.Context, d time.Duration) error {
	done := time.NewTimer(d)
	defer done.Stop()
	select {
	case <-done.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ErrDown is the default error of a [Handler] whose dependency is down.
var ErrDown = errors.New("guardtest: connection refused")

// errPoison is the error of a [Handler] for a poison message.
var errPoison = errors.New("guardtest: cannot decode the message")

// Handler is a scripted handler that records and checks its calls. Methods set its
// behaviour, at any time and from any goroutine. The zero value always succeeds.
//
// For each call the handler checks, in this order, the steps of the message, poison, and
// the dependency. It keeps a record of every call (about 200 bytes) for its whole life.
//
// A message is known by a number: [Message.Seq], or for [Handler.Handle] the decimal
// number at the beginning of its body ([Body]).
type Handler struct {
	mu      sync.Mutex
	down    error
	delay   time.Duration
	poison  map[uint64]bool
	keys    map[string]bool
	steps   map[uint64][]Step
	calls   []Call
	count   map[uint64]int
	running int
}

// Body returns a body of at least size bytes for [Handler.Handle]: the number of the
// message, a space and filling.
func Body(n uint64, size int) []byte {
	body := strconv.AppendUint(make([]byte, 0, max(size, 20)), n, 10)
	if len(body) < size {
		body = append(body, ' ')
		body = append(body, bytes.Repeat([]byte{'x'}, size-len(body))...)
	}
	return body
}

// Number returns the number at the beginning of a body, 0 if there is none.
func Number(body []byte) uint64 {
	end := 0
	for end < len(body) && end < 19 && '0' <= body[end] && body[end] <= '9' {
		end++
	}
	n, err := strconv.ParseUint(string(body[:end]), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// Down makes the dependency fail every call with err; nil means [ErrDown].
func (h *Handler) Down(err error) {
	if err == nil {
		err = ErrDown
	}
	h.set(func() { h.down = err })
}

// Up makes the dependency work again, after Down.
func (h *Handler) Up() { h.set(func() { h.down = nil }) }

// Delay makes every call take d longer, unless its context ends.
func (h *Handler) Delay(d time.Duration) { h.set(func() { h.delay = d }) }

// Poison makes messages always fail, like messages that cannot be decoded.
func (h *Handler) Poison(seqs ...uint64) {
	h.set(func() {
		if h.poison == nil {
			h.poison = make(map[uint64]bool)
		}
		for _, seq := range seqs {
			h.poison[seq] = true
		}
	})
}

// PoisonKey makes all messages of these keys poison.
func (h *Handler) PoisonKey(keys ...string) {
	h.set(func() {
		if h.keys == nil {
			h.keys = make(map[string]bool)
		}
		for _, key := range keys {
			h.keys[key] = true
		}
	})
}

// On sets the steps of the next calls for one message: one step for each call.
func (h *Handler) On(seq uint64, steps ...Step) {
	h.set(func() {
		if h.steps == nil {
			h.steps = make(map[uint64][]Step)
		}
		h.steps[seq] = append(h.steps[seq], steps...)
	})
}

func (h *Handler) set(change func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change()
}

// Handle is the handler for adapters; see [Consumer].
func (h *Handler) Handle(ctx context.Context, key string, body []byte) error {
	return h.call(ctx, Call{Seq: Number(body), Key: key})
}

// HandleMessage is the handler for a [Broker].
func (h *Handler) HandleMessage(ctx context.Context, m *Message) error {
	return h.call(ctx, Call{Seq: m.Seq, Key: m.Key, Epoch: m.Epoch, Tag: m.Tag})
}

func (h *Handler) call(ctx context.Context, c Call) (err error) {
	c.Start = time.Now()
	h.mu.Lock()
	if h.count == nil {
		h.count = make(map[uint64]int)
	}
	h.count[c.Seq]++
	c.Attempt = h.count[c.Seq]
	at := len(h.calls)
	h.calls = append(h.calls, c)
	h.running++
	step := h.stepLocked(c)
	delay := h.delay
	h.mu.Unlock()

	outcome := Unwound
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.running--
		h.calls[at].End, h.calls[at].Outcome, h.calls[at].Err = time.Now(), outcome, err
	}()
	if delay > 0 {
		if err = pause(ctx, delay); err != nil {
			outcome = Failed
			return err
		}
	}
	err = step(ctx)
	outcome = Failed
	if err == nil {
		outcome = Succeeded
	}
	return err
}

func (h *Handler) stepLocked(c Call) Step {
	switch steps := h.steps[c.Seq]; {
	case len(steps) > 0:
		h.steps[c.Seq] = steps[1:]
		return steps[0]
	case h.poison[c.Seq], h.keys[c.Key]:
		return Fail(errPoison)
	case h.down != nil:
		return Fail(h.down)
	default:
		return Succeed
	}
}

// Calls returns copies of all calls, in the order of their start.
func (h *Handler) Calls() []Call {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.calls)
}

// CallsOf returns the calls for one message.
func (h *Handler) CallsOf(seq uint64) []Call {
	return slices.DeleteFunc(h.Calls(), func(c Call) bool { return c.Seq != seq })
}

// Len returns the number of calls.
func (h *Handler) Len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.calls)
}

// Running returns the number of calls that have not ended.
func (h *Handler) Running() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.running
}

// Successes returns how often each message succeeded.
func (h *Handler) Successes() map[uint64]int {
	out := make(map[uint64]int)
	for _, c := range h.Calls() {
		if c.Outcome == Succeeded {
			out[c.Seq]++
		}
	}
	return out
}

// Done returns how many messages have succeeded at least once.
func (h *Handler) Done() int { return len(h.Successes()) }

// Duplicates returns the number of successes after the first of each message.
// At-least-once delivery allows them; the test has to judge them.
func (h *Handler) Duplicates() int {
	n := 0
	for _, times := range h.Successes() {
		n += times - 1
	}
	return n
}

// OutOfOrder returns how many successes came after the success of a later delivery in the
// same sequence. A sequence is an epoch, with [guard.OrderKey] a key in an epoch. With
// [guard.OrderNone] the result is 0. Calls without a Tag are judged by the first success
// of each Seq.
func (h *Handler) OutOfOrder(order guard.Order) int {
	bad, _ := h.disordered(order)
	return len(bad)
}

// overtakers returns how many messages succeeded before a message in front of them.
func (h *Handler) overtakers(order guard.Order) int {
	_, n := h.disordered(order)
	return n
}

// CheckOrder returns an error for the first success that came out of order, or nil.
func (h *Handler) CheckOrder(order guard.Order) error {
	bad, _ := h.disordered(order)
	if len(bad) == 0 {
		return nil
	}
	c := bad[0]
	return fmt.Errorf("guardtest: order %s: message %d (key %q, epoch %d, tag %d) succeeded after a later one; %d out of order in all",
		order, c.Seq, c.Key, c.Epoch, c.Tag, len(bad))
}

// disordered returns the successes that came after the success of a later delivery, and the
// number of those later deliveries.
func (h *Handler) disordered(order guard.Order) (bad []Call, overtakers int) {
	if order == guard.OrderNone {
		return nil, 0
	}
	type sequence struct {
		epoch uint64
		key   string
	}
	// One call of a sequence runs at a time, so calls succeed in the order of their start.
	calls := slices.DeleteFunc(h.Calls(), func(c Call) bool { return c.Outcome != Succeeded })
	last := make(map[sequence]uint64)
	overtook := make(map[sequence]uint64) // latest delivery of each sequence that overtook another
	seen := make(map[uint64]bool)
	for _, c := range calls {
		at, in := c.Tag, sequence{epoch: c.Epoch}
		if order == guard.OrderKey {
			in.key = c.Key
		}
		if at == 0 {
			if at = c.Seq; seen[c.Seq] {
				continue
			}
			seen[c.Seq] = true
		}
		if at == 0 {
			continue // unknown
		}
		if at < last[in] {
			bad = append(bad, c)
			if overtook[in] != last[in] {
				overtook[in] = last[in]
				overtakers++
			}
		}
		last[in] = max(last[in], at)
	}
	return bad, overtakers
}

// CheckNothingLost returns an error if one of the messages 1 to published is lost: it has
// not succeeded and is not in dead, the numbers of the dead letters.
func (h *Handler) CheckNothingLost(published uint64, dead ...uint64) error {
	done := h.Successes()
	for _, seq := range dead {
		done[seq]++
	}
	var lost []uint64
	for seq := uint64(1); seq <= published; seq++ {
		if done[seq] == 0 {
			lost = append(lost, seq)
		}
	}
	if len(lost) == 0 {
		return nil
	}
	return fmt.Errorf("guardtest: %d of %d messages lost: %v", len(lost), published, lost[:min(len(lost), 10)])
}

// CheckOverlap returns an error if two calls of one sequence ran at the same time.
func (h *Handler) CheckOverlap(order guard.Order) error {
	if order == guard.OrderNone {
		return nil
	}
	until := make(map[string]Call)
	calls := h.Calls()
	slices.SortStableFunc(calls, func(a, b Call) int { return cmp.Or(a.Start.Compare(b.Start), a.End.Compare(b.End)) })
	for _, c := range calls {
		key := ""
		if order == guard.OrderKey {
			key = c.Key
		}
		if p, ok := until[key]; ok && p.Epoch == c.Epoch && (p.End.IsZero() || p.End.After(c.Start)) {
			return fmt.Errorf("guardtest: order %s: messages %d and %d were handled at the same time", order, p.Seq, c.Seq)
		}
		until[key] = c
	}
	return nil
}
