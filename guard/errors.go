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

	// errHeld is what each [*HeldError] wraps.
	errHeld = errors.New("guard: source on hold")

	// ErrFull means that a window has no room for one more message. Nothing was
	// taken; offer it again after [Port.Demand] named room. While something moves,
	// room of less than half of the window is not told.
	ErrFull = errors.New("guard: window full")

	// ErrTimeout is the failure of a handler that returned an error after
	// [Policy.Timeout], joined with that error. Its context then ended with
	// [context.DeadlineExceeded].
	ErrTimeout = errors.New("guard: handler timeout")

	// ErrTakenBack is what [Port.Ack] returns for a message that its handler ignored
	// and that the adapter keeps, to hand it over again later: it is counted as
	// returned, and neither as ignored nor as an ack that failed. It keeps its attempts.
	// An adapter that gives [Ignore] of it to [Source.Done] also says that the program
	// did not have the message, which so tells nothing.
	ErrTakenBack = errors.New("guard: taken back by the adapter")

	// errRevoked is the [context.Cause] of a handler's context whose source was
	// taken away.
	errRevoked = errors.New("guard: source revoked")
)

// Must returns v, and panics with err if that is not nil: for the start of a program,
// where nothing can go on without v.
//
//	g := guard.Must(guard.New(guard.Config{Group: "orders"}))
func Must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// HeldError tells why a call was refused. A handler of a source
// that returns one, as from a [Func] that it calls, has not failed: the source waits
// for Until as after [Backoff], 30s at most, or 1s where a person has to clear the reason.
// A function that was called and refused a further try returns the error of its call instead.
type HeldError struct {
	Source string
	Reason Reason
	// Until is how long to wait before it is worth asking again; 0 means that
	// somebody has to clear the reason first.
	Until time.Duration
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("guard: source %s on hold: %s", e.Source, e.Reason)
}

// Unwrap returns what errors of all holds have in common.
func (*HeldError) Unwrap() error { return errHeld }

// heldPoll is how long a handler is left alone at most whose call was refused for a
// reason that somebody has to clear, and heldMost for any other: somebody may clear that,
// too, before its time.
const (
	heldPoll = time.Second
	heldMost = 30 * time.Second
)

// worthAsking is Until within those bounds. A breaker that may be probed now says 0:
// Retry.Base is enough then.
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
	Value any    // what was passed to panic
	Stack []byte // of the panicking goroutine
}

func (e *PanicError) Error() string { return fmt.Sprintf("guard: handler panicked: %v", e.Value) }

// Unwrap gives the panic's value when it was an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// GoexitError is the failure of a handler that called [runtime.Goexit].
type GoexitError struct {
	Stack []byte // of the exiting goroutine
}

func (*GoexitError) Error() string { return "guard: handler called runtime.Goexit" }

// Permanent marks a failure that no retry can mend: the message is
// dead-lettered now, also while the breaker is not closed, as far as the budget
// for permanent failures allows. It says nothing about the dependency's health.
// Permanent(nil) is nil.
func Permanent(err error) error { return mark(err, permanent, time.Time{}) }

// Backoff says that nothing is wrong with the message, but the dependency asked
// for time (an HTTP 429, a maintenance window): the source is held until then
// and the message is handled again without having cost an attempt. A time that
// has passed means Retry.Base; more than 1 h ahead is taken as 1 h.
// Backoff(nil, t) is nil.
func Backoff(err error, until time.Time) error { return mark(err, backoff, until) }

// Unavailable says that a dependency is down: a failure of [ClassDependency]. It
// counts in the breaker and is retried like any failure, but never dead-letters its
// message. Unavailable(nil) is nil.
func Unavailable(err error) error { return mark(err, failure, time.Time{}) }

// Ignore acks the message although the handler failed. Ignore(nil) is nil.
func Ignore(err error) error { return mark(err, ignore, time.Time{}) }

// outcome is what a handler's return means.
type outcome uint8

const (
	success outcome = iota
	failure
	permanent
	backoff
	ignore
	cancelled // the source was taken away under the handler: nobody's fault
)

// maxBackoff bounds what a handler or a limiter may ask for: a unit mistake must not
// stop a source for a year, nor "never" reach beyond the end of the clock.
const maxBackoff = time.Hour

// soon is d after now, or maxBackoff if that is less: d is a user's.
func soon(now, d time.Duration) time.Duration { return now + min(d, maxBackoff) }

type markedError struct {
	err   error
	word  outcome
	until time.Time
}

func (e *markedError) Error() string { return e.err.Error() }
func (e *markedError) Unwrap() error { return e.err }

func mark(err error, word outcome, until time.Time) error {
	if err == nil {
		return nil
	}
	return &markedError{err: err, word: word, until: until}
}

// sound makes sure that an error can be looked at: one whose methods panic, such as
// a nil pointer in an interface, becomes one that says so.
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

// classify finds the outermost mark: the code nearest the guard has the last
// word. A panic is a failure whatever it was called with. A [HeldError] without a mark
// is a guard's refusal and no outcome: it is a backoff for as long as that says.
func classify(err error) (outcome, time.Time) {
	if err == nil {
		return success, time.Time{}
	}
	if e, ok := find[*markedError](err); ok {
		return e.word, e.until
	}
	if e, ok := find[*HeldError](err); ok {
		return backoff, time.Now().Add(e.worthAsking())
	}
	return failure, time.Time{}
}

// result is how a handler call ended. It is read off the error before the source's
// lock is taken, since to look into an error is to run its author's code.
type result struct {
	word  outcome
	until time.Time // of a backoff
	class Class     // of a failure
	name  string    // of its message, see identity; empty if it has one
	known bool      // … which is that message for certain
	last  bool      // the broker will not deliver it again
	err   error
	words dlq.ErrorInfo // of err, if it is a failure or asks for time
	stack []byte        // of a panic or a Goexit

	rule *dlq.Rule // of the quarantine, about the failure's cause; nil for none

	panicked  bool // or called Goexit
	timedOut  bool
	takenBack bool // its adapter ignores the message, and no handler had it
}

// resultOf looks into err, nil for a success.
func resultOf(err error, stack []byte) result {
	r := result{err: err, stack: stack}
	if err == nil {
		return r
	}
	r.word, r.until = classify(err)
	if r.word == failure || r.word == permanent || r.word == backoff {
		r.words = dlq.DescribeError(err, nil)
	}
	switch {
	case errors.As(err, new(*PanicError)), errors.As(err, new(*GoexitError)):
		r.panicked = true
	case errors.Is(err, ErrTimeout):
		r.timedOut = true
	case r.word == ignore && errors.Is(err, ErrTakenBack):
		r.takenBack = true
	}
	return r
}

// find is [errors.AsType], but what a panic was called with is not looked at: also
// behind another error, as after a timeout.
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
