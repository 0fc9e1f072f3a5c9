// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"errors"
	"fmt"
)

var (
	// errArgument means that a call was refused because of an argument. The text names the
	// field, its value and the allowed range. Nothing was changed.
	errArgument = errors.New("crdt: argument")

	// ErrMalformed means that bytes are not a message of this type and version. The text
	// names the fault and its place. Nothing of the message was merged.
	ErrMalformed = errors.New("crdt: malformed message")

	// errOverflow means that a count would have left the range of its type.
	// Nothing was changed.
	errOverflow = errors.New("crdt: overflow")

	// errTwin means that a peer has a record under our name that we never wrote: two processes
	// share a [Replica], or one forgot its own records. Nothing of the message was merged.
	errTwin = errors.New("crdt: another process writes as this replica")

	// errRecordType means that an [OpLog] cannot carry the type: its memory is
	// not the same on every machine. The text names the field.
	errRecordType = errors.New("crdt: record type")

	// ErrFull means that an [OpLog] keeps as many records as it may, because a
	// peer has not acknowledged them. Nothing was changed.
	ErrFull = errors.New("crdt: log full")

	// ErrGap means that too many records would be held until missing earlier ones come.
	// Nothing of the message was merged; it comes again.
	ErrGap = errors.New("crdt: gap in log")
)

// formatError is the fault of a malformed message.
type formatError struct {
	Type   string // expected type of the message, such as "GCounter"
	Field  string // the field that was read
	Value  any    // the value found
	Want   string // the allowed values
	Offset int    // bytes before the field
}

func (e *formatError) Error() string {
	return fmt.Sprintf("crdt: malformed message: %s: %s at byte %d is %v, want %s", e.Type, e.Field, e.Offset, e.Value, e.Want)
}

// Unwrap makes errors.Is(err, ErrMalformed) hold.
func (e *formatError) Unwrap() error { return ErrMalformed }

func argument(field string, value any, want string) error {
	return fmt.Errorf("%w: %s is %v, want %s", errArgument, field, value, want)
}
