// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

import (
	"errors"
	"fmt"
)

// The defaults of [Config].
const (
	DefaultMaxCount = 65536    // messages
	DefaultMaxBytes = 64 << 20 // bytes
)

// Count and bytes in use share one word, so that one atomic step takes both.
const (
	bytesBits = 40
	maxBytes  = 1<<bytesBits - 1
	maxCount  = 1<<(64-bytesBits) - 1
)

// Config bounds a [Ring]. The zero value is valid and means the defaults.
type Config struct {
	// MaxCount is how many messages all lanes together may hold, leased ones
	// included: 1 to 16777215; 0 means [DefaultMaxCount].
	MaxCount int

	// MaxBytes is how many bytes all lanes together may hold, leased ones included: 1 to
	// 1 TiB less one; 0 means [DefaultMaxBytes]. The bytes of a message are those that the
	// [Sizer] returns or the [Codec] writes; without either, bytes are not counted. Unused
	// room in buffers is not counted, and is at most about as much again.
	MaxBytes int64

	// LaneShare is the part of MaxCount and of MaxBytes that one lane may fill, above 0 and
	// up to 1; 0 means 1. A lane may always hold one message, but no message larger than the
	// lane's bytes, and none of 4 GiB.
	LaneShare float64
}

// Validate returns an error that names every field out of range, or nil.
func (c Config) Validate() error {
	var errs []error
	if c.MaxCount < 0 || c.MaxCount > maxCount {
		errs = append(errs, fmt.Errorf("ringbuf: config: MaxCount is %d, want 1 to %d, or 0 for %d", c.MaxCount, maxCount, DefaultMaxCount))
	}
	if c.MaxBytes < 0 || c.MaxBytes > maxBytes {
		errs = append(errs, fmt.Errorf("ringbuf: config: MaxBytes is %d, want 1 to %d, or 0 for %d", c.MaxBytes, int64(maxBytes), DefaultMaxBytes))
	}
	if c.LaneShare != 0 && !(c.LaneShare > 0 && c.LaneShare <= 1) {
		errs = append(errs, fmt.Errorf("ringbuf: config: LaneShare is %v, want above 0 and up to 1, or 0 for 1", c.LaneShare))
	}
	return errors.Join(errs...)
}

func (c Config) withDefaults() Config {
	if c.MaxCount == 0 {
		c.MaxCount = DefaultMaxCount
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = DefaultMaxBytes
	}
	if c.LaneShare == 0 {
		c.LaneShare = 1
	}
	return c
}

// A Sizer returns how many bytes a message counts for in the budget. A Put calls it once or
// more for each message, never under a lock. Many goroutines may call it at once. A negative
// size counts as 0.
type Sizer[T any] func(T) int

// A Codec turns messages into bytes and back for [NewSlabRing]. Its methods are never called
// under a lock. Many goroutines may call them at once.
type Codec[T any] interface {
	// Append adds the encoding of v to dst, like append, and returns the result. It must not
	// change the bytes that dst already has.
	Append(dst []byte, v T) []byte

	// Decode reads the bytes that Append wrote for one message. It must not change src. The
	// value may point into src, but must then not be used after its lease is committed: the
	// memory is reused.
	Decode(src []byte) (T, error)
}
