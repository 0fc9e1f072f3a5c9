// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

import (
	"errors"
	"fmt"
)

var (
	// ErrFull means that the next message does not fit: the ring, or the lane's
	// share of it, is full.
	ErrFull = errors.New("ringbuf: full")

	// ErrEmpty means that the lane holds no message to lease.
	ErrEmpty = errors.New("ringbuf: lane empty")

	// ErrLeased means that another lease on the lane is still open.
	ErrLeased = errors.New("ringbuf: lane leased")

	// ErrLeaseOver means that the lease was already committed or released, or that its lane
	// was dropped. Nothing was changed.
	ErrLeaseOver = errors.New("ringbuf: lease over")

	// ErrClosed means that [Ring.Close] was called.
	ErrClosed = errors.New("ringbuf: ring closed")

	// ErrDropped means that the lane left its ring through [Ring.Drop] or
	// [Ring.DropEmpty]. [Ring.Lane] makes a new one under the same id.
	ErrDropped = errors.New("ringbuf: lane dropped")

	// ErrTooLarge means that a message can never fit. [errors.As] to a [*TooLargeError] gives
	// its size.
	ErrTooLarge = errors.New("ringbuf: message too large")
)

// TooLargeError describes the message of an [ErrTooLarge]. The message was not placed: the
// caller still has it.
type TooLargeError struct {
	Lane  uint64 // id of the lane
	Size  int64  // bytes of the message
	Limit int64  // bytes that the lane may hold
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("ringbuf: message too large: %d bytes for lane %d, want at most %d", e.Size, e.Lane, e.Limit)
}

// Unwrap makes errors.Is(err, ErrTooLarge) hold.
func (e *TooLargeError) Unwrap() error { return ErrTooLarge }

// DecodeError describes a held message that its [Codec] could not decode.
type DecodeError struct {
	Lane uint64 // id of the lane
	Data []byte // a copy of the encoding
	Err  error  // the error of Decode
}

func (e *DecodeError) Error() string {
	return fmt.Sprintf("ringbuf: decode: lane %d, message of %d bytes: %v", e.Lane, len(e.Data), e.Err)
}

// Unwrap returns the codec's own error.
func (e *DecodeError) Unwrap() error { return e.Err }

var errNoDst = errors.New("ringbuf: lease: dst has length 0, want at least 1")
