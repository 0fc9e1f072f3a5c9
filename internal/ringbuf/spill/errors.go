// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"errors"
	"fmt"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// Calls also return errors of the memory ring, with the same meaning: [ringbuf.ErrFull],
// [ringbuf.ErrEmpty], [ringbuf.ErrLeased], [ringbuf.ErrLeaseOver], [ringbuf.ErrClosed],
// [ringbuf.ErrDropped] and [ringbuf.ErrTooLarge].
var (
	// ErrNoSpace means that the disk, or the file's limit, has no space. It wraps
	// [ringbuf.ErrFull]: no message of the call is held. Put waits until there is space.
	ErrNoSpace = fmt.Errorf("spill: no space on the disk: %w", ringbuf.ErrFull)

	// ErrFailed means that a write or a sync failed. The spill takes no more messages until
	// the directory is opened again. Leases continue. [errors.As] to a [*FailedError] gives
	// the reason.
	ErrFailed = errors.New("spill: failed")

	// ErrLocked means that another process, or another Spill of this process, has the
	// directory.
	ErrLocked = errors.New("spill: directory locked")
)

// FailedError is an [ErrFailed] with its reason. It is the state of the Spill and not of
// one call: all later calls of Put return the same error.
type FailedError struct {
	Op  string // "open", "write" or "read"
	Err error  // the system's error
}

func (e *FailedError) Error() string { return fmt.Sprintf("spill: failed: %s: %v", e.Op, e.Err) }

// Unwrap returns ErrFailed and the cause.
func (e *FailedError) Unwrap() []error { return []error{ErrFailed, e.Err} }

// TooLargeError is a [ringbuf.ErrTooLarge] with the sizes of the message. Nothing was
// dropped: the caller still has the message.
type TooLargeError struct {
	Lane  string
	Size  int64 // bytes of the message in the file's format
	Limit int64 // the largest allowed Size
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("spill: message too large: %d bytes for lane %q, want at most %d", e.Size, e.Lane, e.Limit)
}

// Unwrap returns ringbuf.ErrTooLarge.
func (e *TooLargeError) Unwrap() error { return ringbuf.ErrTooLarge }

// DecodeError is an undamaged message that the [ringbuf.Codec] could not decode.
type DecodeError struct {
	Lane string
	Seq  uint64
	Data []byte // a copy of the encoded message
	Err  error  // the error of Decode
}

func (e *DecodeError) Error() string {
	return fmt.Sprintf("spill: decode: lane %q, message %d of %d bytes: %v", e.Lane, e.Seq, len(e.Data), e.Err)
}

// Unwrap returns the codec's own error.
func (e *DecodeError) Unwrap() error { return e.Err }

// Damage is a run of messages of one lane, or a part of the file, that cannot be read. Its
// remains are set aside. They are never delivered, and always reported.
type Damage struct {
	Lane   string `json:"lane"`   // "" if unknown
	First  uint64 `json:"first"`  // sequence number of the first message; 0 if unknown
	Last   uint64 `json:"last"`   // sequence number of the last message; 0 if unknown
	Offset int64  `json:"offset"` // position in the file; -1 if the file has nothing of it
	Page   int64  `json:"page"`   // the page of Offset; -1 if unknown
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
