// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"context"
	"errors"
	"fmt"
)

// A Writer stores dead letters in a topic, a queue, a stream or an archive.
//
// Write returns nil only after the other side has confirmed the record, as durably as its
// settings promise. Only then does the caller settle the source. After an error the record
// may or may not be stored, and the caller may write it again. So Write must be idempotent
// by [Record.ID] if the broker has a way (a message id, a unique key), for as long as the
// broker remembers it. A record with an empty ID cannot be recognised as a duplicate: Write
// must store it each time.
//
// Write must return when ctx ends. It must not change r or keep it: the caller may trim r
// and call again. Several goroutines call a Writer at once.
//
// [ErrTooLarge], [ErrRefused] and [ErrPutOff] tell the caller what to do. After any other
// error the caller tries again later.
type Writer interface {
	Write(ctx context.Context, r *Record) error
}

// WriterFunc makes a function a [Writer].
type WriterFunc func(ctx context.Context, r *Record) error

// Write calls f.
func (f WriterFunc) Write(ctx context.Context, r *Record) error { return f(ctx, r) }

var (
	// ErrTooLarge means that the record exceeds a limit of the broker. The caller trims it
	// with [TrimFor] and tries once more. [errors.As] to a [*TooLargeError] gives the
	// sizes.
	ErrTooLarge = errors.New("dlq: record too large")

	// ErrRefused means that this record will never be accepted as it is: no such
	// destination, no permission, an encoding that the broker rejects. Another try does not
	// help until somebody changes something. The source must not be settled.
	ErrRefused = errors.New("dlq: record refused")

	// ErrPutOff means that the writer works but cannot take this record yet: for example,
	// it has no room to park the record. It is no failure: the caller keeps the message,
	// writes others, and offers the record again.
	ErrPutOff = errors.New("dlq: record put off")
)

// TooLargeError is an [ErrTooLarge] with the sizes.
type TooLargeError struct {
	// Size and Max are in bytes, as the broker or its client counts them; 0 if it does not
	// say.
	Size, Max int

	// Err is the client's own error; it may be nil.
	Err error
}

func (e *TooLargeError) Error() string {
	text := "dlq: record too large"
	if e.Size > 0 || e.Max > 0 {
		text = fmt.Sprintf("dlq: record too large: %d bytes, at most %d allowed", e.Size, e.Max)
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns ErrTooLarge, and Err if it is set.
func (e *TooLargeError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrTooLarge}
	}
	return []error{ErrTooLarge, e.Err}
}

// TrimFor trims r by the excess that err reports, and reports whether another try makes
// sense. It trims a little more than the excess, since sizes are estimates. If err gives no
// sizes, it drops everything that [Record.Trim] may drop. It returns false, and leaves r as
// it is, if err is not an [ErrTooLarge] or r has nothing left to drop. If the record is
// then still too large, its body or its original headers are the reason.
func TrimFor(r *Record, err error) bool {
	if !errors.Is(err, ErrTooLarge) {
		return false
	}
	size, target := r.Size(), 0
	var tooLarge *TooLargeError
	if errors.As(err, &tooLarge) && tooLarge.Max > 0 && tooLarge.Size > tooLarge.Max {
		target = size - (tooLarge.Size - tooLarge.Max) - trimSlack
	}
	r.Trim(target)
	return r.Size() < size
}
