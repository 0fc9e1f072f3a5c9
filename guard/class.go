// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"io"
	"reflect"
)

// Class says whose fault an error is.
type Class uint8

// The classes.
const (
	// ClassUnknown: the error does not tell whose fault it is. This class is always
	// safe: the guard looks for other evidence before it dead-letters the message.
	ClassUnknown Class = iota

	// ClassDependency: something that the handler needs is down, slow or full.
	// The guard never dead-letters a message for such an error.
	ClassDependency

	// ClassMessage: the message cannot be handled as it is.
	ClassMessage
)

var classNames = [...]string{"unknown", "dependency", "message"}

// String is the class's word in logs.
func (c Class) String() string {
	if int(c) < len(classNames) {
		return classNames[c]
	}
	return fmt.Sprintf("Class(%d)", uint8(c))
}

// WithClassify replaces [Classify]; nil means Classify. The guard calls the function
// for each failed handler call, on a goroutine of its own and outside every lock. The
// function may call Classify for the errors that it does not know. It must return, and
// must be safe for concurrent use. If it panics or calls [runtime.Goexit], the class is
// ClassUnknown. It is not called for errors with a mark, such as [Unavailable].
func WithClassify(classify func(error) Class) Option {
	return func(g *Guard) { g.classify = classify }
}

// resultOf is [resultOf] with the class. The caller holds no lock.
func (g *Guard) resultOf(err error, stack []byte) result {
	r := resultOf(err, stack)
	r.class = g.classOf(err)
	return r
}

// classOf is the class of a handler's error: by its outermost mark, or else by the
// classifier. Both may run a user's code. So the caller holds no lock, and that code runs
// on a goroutine of its own, which is all that a Goexit ends.
func (g *Guard) classOf(err error) (c Class) {
	if err == nil {
		return ClassUnknown
	}
	aside(func() {
		e := evidenceOf(err)
		if e.mark == nil && g.classify != nil {
			c = g.classify(err)
			return
		}
		c = e.class()
	})
	if int(c) >= len(classNames) {
		return ClassUnknown
	}
	return c
}

// aside runs f on a goroutine of its own and waits for it. A panic in f is recovered,
// a Goexit ends that goroutine only.
func aside(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = recover() }()
		f()
	}()
	<-done
}

// Classify is the default classifier. It knows the errors of the standard library and
// of common clients (docs/errors.md has the table) by interface and by type name, so it
// links none of these clients. The first rule that fits decides:
//
//  1. The outermost mark: [Unavailable] and [Backoff] are ClassDependency, [Permanent]
//     is ClassMessage, [Ignore] is ClassUnknown.
//  2. A dependency's error anywhere in the tree: ClassDependency.
//  3. An error that could be the fault of either, anywhere in the tree: ClassUnknown.
//     Examples are [context.Canceled], a panic, a time-out behind [ErrTimeout], and an
//     HTTP 404 or 500.
//  4. A message's error anywhere in the tree: ClassMessage.
//  5. Otherwise: ClassUnknown. So is a tree of more than 256 errors, also a cyclic one,
//     and an error whose methods panic.
//
// [io.EOF] and [io.ErrUnexpectedEOF] by themselves are ClassUnknown: the end of a
// connection and the end of a truncated message look the same.
func Classify(err error) (c Class) {
	if err == nil {
		return ClassUnknown
	}
	defer func() {
		if recover() != nil {
			c = ClassUnknown
		}
	}()
	return evidenceOf(err).class()
}

// maxErrors bounds the walk through an error's tree.
const maxErrors = 256

// says is a set of the things that an error tells.
type says uint8

const (
	dependencySaid says = 1 << iota
	timeoutSaid         // as dependencySaid, unless the guard itself ended the call
	doubtSaid           // could be the fault of either: outweighs messageSaid
	messageSaid
)

// surroundings say what kind of error wraps an error.
type surroundings uint8

const (
	open surroundings = iota
	wire              // an error of a request: an EOF inside is the connection's
	conn              // an error of a connection: an unknown error inside is the dependency's
)

// evidence is the sum of what the errors of a tree tell.
type evidence struct {
	mark *markedError // the outermost mark
	said says
	ours bool // the tree has the guard's own timeout
	left int  // how many more errors the walk may visit; below 0 the tree was too large
}

func evidenceOf(err error) *evidence {
	e := &evidence{left: maxErrors}
	e.walk(err, open)
	return e
}

func (e *evidence) class() Class {
	switch {
	case e.mark != nil:
		return e.mark.class()
	case e.left < 0:
		return ClassUnknown
	case e.said&dependencySaid != 0, e.said&timeoutSaid != 0 && !e.ours:
		return ClassDependency
	case e.said == messageSaid && !e.ours:
		return ClassMessage
	default:
		return ClassUnknown
	}
}

// class is the class that the mark means. Only Unavailable is marked as a failure.
func (e *markedError) class() Class {
	switch e.outcome {
	case failure, backoff:
		return ClassDependency
	case permanent:
		return ClassMessage
	default:
		return ClassUnknown
	}
}

// walk collects what err and the errors that it wraps tell, outer ones first. It ends at
// the first mark.
//
//nolint:errorlint // it walks the tree itself
func (e *evidence) walk(err error, in surroundings) {
	for err != nil && e.mark == nil {
		if e.left--; e.left < 0 {
			return
		}
		switch t := err.(type) {
		case *markedError:
			e.mark = t
			return
		case *PanicError, *GoexitError:
			e.said |= doubtSaid // the value of a panic does not count
			return
		case interface{ As(target any) bool }:
			if t.As(&e.mark) && e.mark != nil {
				return
			}
		}
		said, around := look(err)
		e.ours = e.ours || err == ErrTimeout
		in = max(in, around)
		var inner error
		var all []error
		switch t := err.(type) {
		case interface{ Unwrap() error }:
			inner = t.Unwrap()
		case interface{ Unwrap() []error }:
			all = t.Unwrap()
		}
		if said == 0 && inner == nil && len(all) == 0 {
			said = leaf(err, in)
		}
		e.said |= said
		for _, one := range all {
			if e.mark == nil && one != nil {
				e.walk(one, in)
			}
		}
		err = inner
	}
}

// leaf is what an unknown error that wraps nothing tells by its surroundings.
func leaf(err error, in surroundings) says {
	if in == conn || in == wire && (err == io.EOF || err == io.ErrUnexpectedEOF) { //nolint:errorlint // the sentinels themselves
		return dependencySaid
	}
	return 0
}

// look is what err tells by itself, without the errors that it wraps.
func look(err error) (said says, around surroundings) {
	switch err { //nolint:errorlint // the sentinels themselves
	case context.DeadlineExceeded:
		return timeoutSaid, open
	case context.Canceled, errRevoked, ErrClosed:
		return doubtSaid, open
	case errHeld, io.ErrClosedPipe:
		return dependencySaid, open
	}
	t := reflect.TypeOf(err)
	if t == wrapError || t == wrapErrors || t == joinError {
		return 0, open
	}
	if r, ok := byType[nameOf(t)]; ok {
		if r.look != nil {
			r.said |= r.look(err)
		}
		return r.said, r.around
	}
	return byMethod(err), open
}
