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

	// ErrLeaseOver means that the lease was committed or released before, or
	// that its lane was dropped. Nothing was changed.
	ErrLeaseOver = errors.New("ringbuf: lease over")

	// ErrClosed means that [Ring.Close] was called.
	ErrClosed = errors.New("ringbuf: ring closed")

	// ErrDropped means that the lane left its ring through [Ring.Drop] or
	// [Ring.DropEmpty]. [Ring.Lane] makes a new one under the same id.
	ErrDropped = errors.New("ringbuf: lane dropped")

	// ErrTooLarge means that a message can never fit. [errors.As] to a
	// [*TooLargeError] tells its size.
	ErrTooLarge = errors.New("ringbuf: message too large")
)

// TooLargeError is the message that an [ErrTooLarge] is about. Nothing was
// dropped: the caller still has it.
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

// DecodeError is a held message that its [Codec] could not read back.
type DecodeError struct {
	Lane uint64 // id of the lane
	Data []byte // a copy of what the codec wrote
	Err  error  // what Decode returned
}

func (e *DecodeError) Error() string {
	return fmt.Sprintf("ringbuf: decode: lane %d, message of %d bytes: %v", e.Lane, len(e.Data), e.Err)
}

// Unwrap gives the codec's own error.
func (e *DecodeError) Unwrap() error { return e.Err }

var errNoDst = errors.New("ringbuf: lease: dst has length 0, want at least 1")
