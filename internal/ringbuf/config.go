// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

import (
	"errors"
	"fmt"
)

// What a zero [Config] means.
const (
	DefaultMaxCount = 65536    // messages
	DefaultMaxBytes = 64 << 20 // bytes
)

// Count and bytes in use share one word, so that both are taken in one step.
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

	// MaxBytes is how many bytes all lanes together may hold, leased ones
	// included: 1 to 1 TiB less one; 0 means [DefaultMaxBytes]. Bytes are what
	// the [Sizer] says or the [Codec] writes; spare room in buffers is not
	// counted, and is at most about as much again. Without either, only
	// messages are counted.
	MaxBytes int64

	// LaneShare is the part of MaxCount and of MaxBytes that one lane may fill,
	// above 0 and up to 1; 0 means 1. A lane may always hold one message, but no
	// message larger than the lane's bytes, and none of 4 GiB.
	LaneShare float64
}

// Validate reports every field that is out of range, or nil.
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

// A Sizer says how many bytes a message counts for in the budget. A Put calls it
// once or more for a message, never under a lock and possibly by many goroutines at
// once. A negative size counts as 0.
type Sizer[T any] func(T) int

// A Codec turns messages into bytes and back for [NewSlabRing]. Its methods are
// never called under a lock, and possibly by many goroutines at once.
type Codec[T any] interface {
	// Append adds the encoding of v to dst, like append, and returns the result.
	// It must leave what dst already holds unchanged.
	Append(dst []byte, v T) []byte

	// Decode reads what Append wrote for one message. It must not change src. A
	// value may point into src if it is not used after its lease is committed:
	// the memory is then reused.
	Decode(src []byte) (T, error)
}
