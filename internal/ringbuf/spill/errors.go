// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"errors"
	"fmt"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// Besides these, calls return errors of the memory ring, which mean the same here:
// [ringbuf.ErrFull], [ringbuf.ErrEmpty], [ringbuf.ErrLeased], [ringbuf.ErrLeaseOver],
// [ringbuf.ErrClosed], [ringbuf.ErrDropped] and [ringbuf.ErrTooLarge].
var (
	// ErrNoSpace means that the disk has no room. It is a kind of [ringbuf.ErrFull]:
	// nothing of the call is held, and Put waits until there is room.
	ErrNoSpace = fmt.Errorf("spill: no space on the disk: %w", ringbuf.ErrFull)

	// ErrFailed means that a write or a sync failed, so that no more is taken in before
	// the directory is opened anew. Leases go on. [errors.As] to a [*FailedError] tells
	// what happened.
	ErrFailed = errors.New("spill: failed")

	// ErrLocked means that another process, or another Spill of this one, has the
	// directory.
	ErrLocked = errors.New("spill: directory locked")
)

// FailedError is what an [ErrFailed] is about. It is the state of the Spill and not of
// one call: all later calls of Put have the same.
type FailedError struct {
	Op  string // "open", "write" or "read"
	Err error  // what the system said
}

func (e *FailedError) Error() string { return fmt.Sprintf("spill: failed: %s: %v", e.Op, e.Err) }

// Unwrap makes errors.Is hold for ErrFailed and for the cause.
func (e *FailedError) Unwrap() []error { return []error{ErrFailed, e.Err} }

// TooLargeError is the message that a [ringbuf.ErrTooLarge] is about. Nothing was
// dropped: the caller still has it.
type TooLargeError struct {
	Lane  string
	Size  int64 // bytes of the message with what the format adds
	Limit int64 // bytes that it may have
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("spill: message too large: %d bytes for lane %q, want at most %d", e.Size, e.Lane, e.Limit)
}

// Unwrap makes errors.Is(err, ringbuf.ErrTooLarge) hold.
func (e *TooLargeError) Unwrap() error { return ringbuf.ErrTooLarge }

// DecodeError is an undamaged message that the [ringbuf.Codec] could not read back.
type DecodeError struct {
	Lane string
	Seq  uint64
	Data []byte // a copy of what the codec wrote
	Err  error  // what Decode returned
}

func (e *DecodeError) Error() string {
	return fmt.Sprintf("spill: decode: lane %q, message %d of %d bytes: %v", e.Lane, e.Seq, len(e.Data), e.Err)
}

// Unwrap gives the codec's own error.
func (e *DecodeError) Unwrap() error { return e.Err }

// Damage is a run of messages of one lane, or a part of the file, that cannot be read.
// What there was of it is set aside, never delivered and never forgotten silently.
type Damage struct {
	Lane   string `json:"lane"`   // "" if unknown
	First  uint64 `json:"first"`  // sequence number of the first message; 0 if unknown
	Last   uint64 `json:"last"`   // and of the last one
	Offset int64  `json:"offset"` // in the file; -1 if nothing of it is there
	Page   int64  `json:"page"`   // that Offset is in; -1 if unknown
	Reason string `json:"reason"` // what is wrong
	File   string `json:"file"`   // the copy that was set aside; "" if there was nothing to copy
}

func (d Damage) String() string {
	s := d.Reason
	if d.First != 0 || d.Last != 0 {
		s = fmt.Sprintf("lane %q, messages %d to %d: %s", d.Lane, d.First, d.Last, s)
	} else if d.Lane != "" {
		s = fmt.Sprintf("lane %q: %s", d.Lane, s)
	}
	if d.Offset >= 0 {
		s += fmt.Sprintf(" (offset %d, page %d)", d.Offset, d.Page)
	}
	return s
}

var errNoDst = errors.New("spill: lease: dst has length 0, want at least 1")
