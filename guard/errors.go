// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// Errors to branch on.
var (
	// ErrClosed means that the Guard or the Source has ended.
	ErrClosed = errors.New("guard: closed")

	// errHeld is wrapped by each [*HeldError].
	errHeld = errors.New("guard: source on hold")

	// ErrFull means that a window has no room for one more message. The message was
	// not taken: offer it again after a [Port.Demand] above 0. While messages move,
	// that call comes only when half of the window is free.
	ErrFull = errors.New("guard: window full")

	// ErrTimeout is the failure of a handler that returned an error after
	// [Policy.Timeout], joined with that error. The handler's context had ended with
	// [context.DeadlineExceeded].
	ErrTimeout = errors.New("guard: handler timeout")

	// ErrTakenBack is returned by [Port.Ack] for a message that its handler ignored and
	// that the adapter keeps, to hand it over again later. The message counts as
	// returned, not as ignored and not as a failed ack. It keeps its attempts. In the
	// passive shape an adapter may pass [Ignore](ErrTakenBack) to [Source.Done]: then
	// the program did not have the message, and the outcome proves nothing.
	ErrTakenBack = errors.New("guard: taken back by the adapter")

	// errRevoked is the [context.Cause] of a handler's context after the broker took the
	// source away.
	errRevoked = errors.New("guard: source revoked")
)

// Must returns v, and panics if err is not nil. It is for the start of a program that
// cannot run without v.
//
//	g := guard.Must(guard.New(guard.Config{Group: "orders"}))
func Must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// HeldError tells why the guard refused a call. A handler of a source may return the
// HeldError of a [Func] that it calls. That is no failure: the source waits for Until as
// after [Backoff], at most 30s, or at most 1s if a person has to clear the reason. If a
// Func refuses only a retry, it returns the error of the call before instead.
type HeldError struct {
	Source string
	Reason Reason
	// Until is how long to wait before the next call. 0 means that somebody has to clear
	// the reason first, or, with ReasonBreaker, that a probe may be made now.
	Until time.Duration
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("guard: source %s on hold: %s", e.Source, e.Reason)
}

// Unwrap returns an error that all HeldErrors share.
func (*HeldError) Unwrap() error { return errHeld }

const (
	// heldPoll is the longest wait after a refusal whose reason a person has to clear.
	heldPoll = time.Second
	// heldMost is the longest wait after any other refusal: somebody may clear its reason
	// early.
	heldMost = 30 * time.Second
)

// worthAsking is Until, limited to heldMost, or to heldPoll for an operator's pause. It is
// heldPoll if Until is 0, except for a breaker that may be probed now: there it is 0, and
// the wait is Retry.Base.
func (e *HeldError) worthAsking() time.Duration {
	switch {
	case e.Reason == ReasonBreaker:
		return min(e.Until, heldMost)
	case e.Until <= 0:
		return heldPoll
	case e.Reason == ReasonOperator:
		return min(e.Until, heldPoll)
	}
	return min(e.Until, heldMost)
}

// PanicError is the failure of a handler that panicked.
type PanicError struct {
	Value any    // the argument of panic
	Stack []byte // of the panicking goroutine
}

func (e *PanicError) Error() string { return fmt.Sprintf("guard: handler panicked: %v", e.Value) }

// Unwrap returns the panic's value if it is an error, else nil.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// GoexitError is the failure of a handler that called [runtime.Goexit].
type GoexitError struct {
	Stack []byte // of the exiting goroutine
}

func (*GoexitError) Error() string { return "guard: handler called runtime.Goexit" }

// Permanent marks an error that no retry can repair. The message is dead-lettered at
// once, also while the breaker is not closed, if the budget for permanent failures
// allows it. Permanent says nothing about the dependency's health. Permanent(nil) is
// nil.
func Permanent(err error) error { return mark(err, permanent, time.Time{}) }

// Backoff marks an error as no fault of the message: the dependency asked for time (an
// HTTP 429, a maintenance window). The source is held until the given time. Then the
// message is handled again, and the call has cost no attempt. A time in the past means
// to wait Retry.Base; a time more than 1 h ahead counts as 1 h. Backoff(nil, t) is nil.
func Backoff(err error, until time.Time) error { return mark(err, backoff, until) }

// Unavailable marks an error of a dependency that is down: a failure of
// [ClassDependency]. It counts in the breaker and is retried like any failure, but
// never dead-letters its message. Unavailable(nil) is nil.
func Unavailable(err error) error { return mark(err, failure, time.Time{}) }

// Ignore marks an error to be ignored: the guard acks the message although its handler
// failed. Ignore(nil) is nil.
func Ignore(err error) error { return mark(err, ignore, time.Time{}) }

// outcome is the meaning of a handler's return.
type outcome uint8

const (
	success outcome = iota
	failure
	permanent
	backoff
	ignore
	cancelled // the source or the caller ended the call, or no call was made: no failure
)

// maxBackoff bounds the wait that a handler or a limiter may ask for. A mistaken unit must
// not stop a source for a year, and a very long wait must not overflow the clock.
const maxBackoff = time.Hour

// soon is now plus d, which comes from a user: more than maxBackoff counts as maxBackoff.
func soon(now, d time.Duration) time.Duration { return now + min(d, maxBackoff) }

type markedError struct {
	err     error
	outcome outcome
	until   time.Time
}

func (e *markedError) Error() string { return e.err.Error() }
func (e *markedError) Unwrap() error { return e.err }

func mark(err error, word outcome, until time.Time) error {
	if err == nil {
		return nil
	}
	return &markedError{err: err, outcome: word, until: until}
}

// sound returns an error whose methods are safe to call. If those of err panic, as with
// a nil pointer in an interface, it returns an error that says so.
func sound(err error) (safe error) {
	defer func() {
		if v := recover(); v != nil {
			safe = fmt.Errorf("guard: an error of type %T, whose methods panic: %v", err, v)
		}
	}()
	resultOf(err, nil)
	_ = err.Error()
	return err
}

// classify finds the outermost mark: the code nearest to the guard decides. A panic is a
// failure, whatever its value is. A [HeldError] without a mark is a refusal of a guard,
// not an outcome: it counts as a backoff for its worthAsking time.
func classify(err error) (outcome, time.Time) {
	if err == nil {
		return success, time.Time{}
	}
	if e, ok := find[*markedError](err); ok {
		return e.outcome, e.until
	}
	if e, ok := find[*HeldError](err); ok {
		return backoff, time.Now().Add(e.worthAsking())
	}
	return failure, time.Time{}
}

// result is how a handler call ended. It is made from the error before the source's lock
// is taken: the error's methods are the user's code.
type result struct {
	outcome outcome
	until   time.Time // end of the backoff
	class   Class     // class of the failure
	name    string    // the message's name, see identity; empty if the item has a name already
	known   bool      // name belongs to this message for certain
	last    bool      // the broker will not deliver the message again
	err     error
	words   dlq.ErrorInfo // describes err of a failure or a backoff
	stack   []byte        // stack of a panic or a Goexit

	rule *dlq.Rule // the quarantine's rule about the failure's cause; nil for none

	panicked  bool // the handler panicked or called Goexit
	timedOut  bool
	takenBack bool // the adapter keeps the message (ErrTakenBack), and no handler had it
}

// resultOf makes the result of err; a nil err is a success.
func resultOf(err error, stack []byte) result {
	r := result{err: err, stack: stack}
	if err == nil {
		return r
	}
	r.outcome, r.until = classify(err)
	if r.outcome == failure || r.outcome == permanent || r.outcome == backoff {
		r.words = dlq.DescribeError(err, nil)
	}
	switch {
	case errors.As(err, new(*PanicError)), errors.As(err, new(*GoexitError)):
		r.panicked = true
	case errors.Is(err, ErrTimeout):
		r.timedOut = true
	case r.outcome == ignore && errors.Is(err, ErrTakenBack):
		r.takenBack = true
	}
	return r
}

// find is [errors.AsType], but never looks at the value of a panic, also if the
// [PanicError] is wrapped, as after a timeout.
//
//nolint:errorlint,gocritic // it walks the tree itself; E may be a PanicError
func find[E error](err error) (found E, ok bool) {
	for {
		switch e := err.(type) {
		case E:
			return e, true
		case *PanicError:
			return found, false
		case interface{ As(target any) bool }:
			if e.As(&found) {
				return found, true
			}
		}
		switch e := err.(type) {
		case interface{ Unwrap() error }:
			err = e.Unwrap()
		case interface{ Unwrap() []error }:
			for _, inner := range e.Unwrap() {
				if found, ok = find[E](inner); ok {
					return found, true
				}
			}
			return found, false
		default:
			return found, false
		}
	}
}
