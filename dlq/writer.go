// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"context"
	"errors"
	"fmt"
)

// A Writer puts dead letters where they are kept: a topic, a queue, a stream
// or an archive.
//
// Write returns nil only when the other side has confirmed the record, as
// durably as its settings promise; only then does the caller settle the
// source. After an error the record may or may not be there, and the caller
// may write the same record again, so Write must be idempotent by
// [Record.ID] where the broker offers a way (a message id, a unique key)
// and within the window the broker keeps it for. A record whose ID is empty
// has no twin that could be recognised and must be written each time.
//
// Write must return when ctx ends. It must neither change nor keep r: the
// caller may trim it and call again. A Writer is called from several
// goroutines at once.
//
// [ErrTooLarge], [ErrRefused] and [ErrPutOff] tell the caller what to do about an error;
// any other error is worth another try later.
type Writer interface {
	Write(ctx context.Context, r *Record) error
}

// WriterFunc is a function as a [Writer].
type WriterFunc func(ctx context.Context, r *Record) error

// Write calls f.
func (f WriterFunc) Write(ctx context.Context, r *Record) error { return f(ctx, r) }

var (
	// ErrTooLarge means the record is over a limit of the broker. The caller
	// trims it, with [TrimFor], and tries once more. [errors.As] to a
	// [*TooLargeError] tells the sizes.
	ErrTooLarge = errors.New("dlq: record too large")

	// ErrRefused means this record will never be accepted as it is: no such
	// destination, no permission, an encoding the broker rejects. Trying again
	// does not help before somebody changes something; the source must not be
	// settled.
	ErrRefused = errors.New("dlq: record refused")

	// ErrPutOff means that the writer is well and does not take this record yet,
	// such as one to be parked for which there is no room. It is no failure: the
	// caller keeps the message, writes others, and offers the record again.
	ErrPutOff = errors.New("dlq: record put off")
)

// TooLargeError says by how much a record is too large.
type TooLargeError struct {
	// Size and Max are in bytes, as the broker or its client counts them; 0
	// where it does not say.
	Size, Max int

	// Err is the client's own error; may be nil.
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

// Unwrap makes errors.Is(err, ErrTooLarge) hold, and keeps Err reachable.
func (e *TooLargeError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrTooLarge}
	}
	return []error{ErrTooLarge, e.Err}
}

// TrimFor trims r as far as err, which must be an [ErrTooLarge], asks for and
// reports whether trying again makes sense. It asks for a little more than
// the error says, since sizes are estimates; where the error gives no sizes it
// drops everything that [Record.Trim] may drop. It reports false, and leaves
// r as it is, if err is another error or r has nothing left to drop. What is
// still too large after that is so because of its body or its original
// headers.
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
