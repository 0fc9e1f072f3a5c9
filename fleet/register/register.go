// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package register

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/internal/registers"
)

// MaxDocument is the largest size of a document: 64 KiB.
const MaxDocument = 64 << 10

var (
	// ErrConflict means that the newest number is not one less than the number to write. Nothing
	// was written, and this attempt never will be. [errors.As] to a [*ConflictError] gives the
	// newest number.
	ErrConflict = errors.New("register: conflict")

	// ErrUnknown means that the document may have been written, or may be written later if its
	// number is free then. Read shows whether it was; [Settle] makes the outcome final.
	ErrUnknown = errors.New("register: outcome unknown")

	// ErrDocument means a number of 0, or a document of a size outside 1 to
	// [MaxDocument] bytes. Nothing was written.
	ErrDocument = errors.New("register: document")

	// ErrMalformed means that the store has a value that this package cannot read: it is damaged,
	// of a later version, or of another program.
	ErrMalformed = errors.New("register: malformed")
)

// ConflictError is an [ErrConflict] with the newest number, 0 if there is none. That number was the
// newest at some moment during the call.
type ConflictError struct{ Newest uint64 }

// Error has the newest number.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("register: conflict: the newest document is number %d", e.Newest)
}

// Is reports whether target is [ErrConflict].
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// Register is a compare-and-set register of one numbered document. All methods are safe for
// concurrent use, also by many processes.
//
// Each method returns when its context ends, even if the store does not answer.
type Register interface {
	// Read returns the newest document and its number; 0 and nil if there is none. It sees all
	// writes that were confirmed before the call began, unless the driver's doc says otherwise: an
	// old leader of a store may not know yet that it was replaced. It costs some round trips. The
	// caller owns the document.
	Read(ctx context.Context) (number uint64, document []byte, err error)

	// CompareAndSet writes document as number, if the newest number is number-1. nil means that the
	// document is written, as safely as the store keeps anything. Otherwise the error is
	//
	//   - [ErrConflict], with the newest number: not written, and never will be;
	//   - [ErrUnknown]: written, or not, or not yet;
	//   - [ErrDocument]: refused before it was sent;
	//   - any other: not written, and never will be.
	//
	// It tries once, or not at all if ctx has ended before. It costs some round trips, and the
	// store's write to disk.
	CompareAndSet(ctx context.Context, number uint64, document []byte) error

	// Watch calls on with the newest document: first at once, then after each change, and when the
	// store is back after it was away. Numbers never fall. A number may be skipped when the next
	// one follows soon. When the store goes away, Watch calls on once, with the error, and goes on
	// trying. A store whose number fell counts as away.
	//
	// Watch returns only when ctx ends, with its error. It calls on from one goroutine at a time,
	// and never after it has returned. A slow on delays only its own Watch.
	Watch(ctx context.Context, on func(Event)) error
}

// An Event is what [Register.Watch] reports.
type Event struct {
	// Number is the number of the newest document; 0 if there is none. It is unset with Err.
	Number uint64
	// Document is the newest document; nil if there is none. The callee may keep it, and must not
	// change it.
	Document []byte
	// Err is why the store is away; nil if it is not. The document of the previous event is still
	// the newest known one.
	Err error
}

// Check returns an [ErrDocument] if a number or a document cannot be written. It is for authors of
// drivers.
func Check(number uint64, document []byte) error {
	if number == 0 {
		return fmt.Errorf("%w: number 0: it must be at least 1", ErrDocument)
	}
	if n := len(document); n < 1 || n > MaxDocument {
		return fmt.Errorf("%w: %d bytes: it must be 1 to %d", ErrDocument, n, MaxDocument)
	}
	return nil
}

// Settle makes the outcome of an unknown write of number final. If number is free, Settle takes it:
// it writes noop, a document that means the same as the one before it. So the unknown write cannot
// happen later. It returns the newest document and its number, which is at least number.
//
// If the returned number is number, the caller compares the document with its own. If it is higher,
// somebody has built upon number. Then the caller looks for its id in the newest document, if
// documents carry the ids of their predecessors.
//
// Settle tries until ctx ends; then the outcome is still unknown. number must have been one above
// the newest when it was written. If Read returns less than that, an outdated server has answered,
// and Settle reads again.
func Settle(ctx context.Context, r Register, number uint64, noop []byte) (newest uint64, document []byte, err error) {
	for {
		newest, document, err = r.Read(ctx)
		if err == nil && newest >= number {
			return newest, document, nil
		}
		switch {
		case err != nil:
		case newest+1 < number: // an outdated server answered
			err = fmt.Errorf("register: the newest document read is %d, number %d was to follow it", newest, number)
		default:
			err = r.CompareAndSet(ctx, number, noop)
		}
		if errors.Is(err, ErrDocument) || errors.Is(err, ErrMalformed) {
			return 0, nil, err
		}
		if err != nil && !errors.Is(err, ErrConflict) && !registers.Sleep(ctx, settleEvery) {
			return 0, nil, errors.Join(ctx.Err(), err)
		}
	}
}

// settleEvery is the pause after a try that failed.
const settleEvery = 50 * time.Millisecond
