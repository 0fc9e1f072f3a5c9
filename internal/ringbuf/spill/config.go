// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"
)

// Defaults of a [Config] field left at zero.
const (
	DefaultMaxCount        = 16 << 20
	DefaultMaxBytes        = 1 << 30
	DefaultBatchCount      = 1024
	DefaultBatchBytes      = 1 << 20
	DefaultCheckpointCount = 1024
	DefaultCheckpointDelay = 10 * time.Millisecond
)

const (
	// MaxMessage is the largest size of an encoded message, in bytes.
	MaxMessage = 16 << 20

	// MaxName is the longest name of a lane, in bytes.
	MaxName = 255

	maxDelay  = time.Minute
	leastRoom = 64 << 10
	is32bit   = strconv.IntSize == 32
)

// maxMaxBytes is the upper limit of MaxBytes. It keeps the file mappable, which may be
// twice as large as its content.
func maxMaxBytes() int64 {
	if is32bit {
		return 256 << 20
	}
	return 1 << 40
}

// Config limits a [Spill] and says when it syncs. Only Dir has no default.
type Config struct {
	// Dir is the directory of the spill. One process uses it at a time, and nothing else is
	// in it. It is created if its parent exists. It must be on a local disk. An empty Dir
	// is an error, so that nothing is written to a place that nobody chose.
	Dir string

	// MaxCount is the maximum number of messages in all lanes together, leased ones
	// included: 1 to 2147483647; 0 means [DefaultMaxCount].
	MaxCount int

	// MaxBytes is the maximum number of bytes in all lanes together, leased messages
	// included: 64 KiB to 1 TiB, or 256 MiB on 32-bit machines; 0 means [DefaultMaxBytes].
	// A message counts with its encoding and the bytes of the format. The file is larger:
	// by a tenth with large batches, up to 2.5 times as large with single messages of 3.5 KiB,
	// or with very many lanes.
	MaxBytes int64

	// LaneShare is the share of MaxCount and MaxBytes that one lane may fill, above 0 and
	// up to 1; 0 means 1. A lane may always hold one message.
	LaneShare float64

	// BatchCount is the maximum number of messages that are synced together, 1 to 1048576;
	// 0 means [DefaultBatchCount].
	BatchCount int

	// BatchBytes is the maximum size of a batch, 1 byte to 64 MiB; 0 means
	// [DefaultBatchBytes]. A larger message is a batch of its own. Up to two batches are in
	// memory at a time, and two buffers of up to twice that size.
	BatchBytes int64

	// BatchDelay is how long the first message of a batch waits for others, up to a minute.
	// 0 means no wait: a batch has the messages that came during the last sync.
	BatchDelay time.Duration

	// CheckpointCount is the number of committed messages after which the drained position
	// is synced, 1 to 1048576; 0 means [DefaultCheckpointCount].
	CheckpointCount int

	// CheckpointDelay is the longest time after which the drained position is synced, 1 ms
	// to a minute; 0 means [DefaultCheckpointDelay]. After a crash, messages that were
	// committed after the last sync are leased again.
	CheckpointDelay time.Duration
}

// Validate reports every field that is out of range, or nil. It does not touch the disk.
func (c Config) Validate() error {
	var errs []error
	wrong := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("spill: config: "+format, args...))
	}
	if c.Dir == "" {
		wrong("Dir is empty, want a directory")
	}
	if c.MaxCount < 0 || c.MaxCount > math.MaxInt32 {
		wrong("MaxCount is %d, want 1 to %d, or 0 for %d", c.MaxCount, math.MaxInt32, DefaultMaxCount)
	}
	if c.MaxBytes != 0 && (c.MaxBytes < leastRoom || c.MaxBytes > maxMaxBytes()) {
		wrong("MaxBytes is %d, want %d to %d, or 0 for %d", c.MaxBytes, leastRoom, maxMaxBytes(), defaultMaxBytes())
	}
	if c.LaneShare != 0 && !(c.LaneShare > 0 && c.LaneShare <= 1) {
		wrong("LaneShare is %v, want above 0 and up to 1, or 0 for 1", c.LaneShare)
	}
	if c.BatchCount < 0 || c.BatchCount > 1<<20 {
		wrong("BatchCount is %d, want 1 to %d, or 0 for %d", c.BatchCount, 1<<20, DefaultBatchCount)
	}
	if c.BatchBytes < 0 || c.BatchBytes > 64<<20 {
		wrong("BatchBytes is %d, want 1 to %d, or 0 for %d", c.BatchBytes, 64<<20, DefaultBatchBytes)
	}
	if c.BatchDelay < 0 || c.BatchDelay > maxDelay {
		wrong("BatchDelay is %v, want 0 to %v", c.BatchDelay, maxDelay)
	}
	if c.CheckpointCount < 0 || c.CheckpointCount > 1<<20 {
		wrong("CheckpointCount is %d, want 1 to %d, or 0 for %d", c.CheckpointCount, 1<<20, DefaultCheckpointCount)
	}
	if c.CheckpointDelay != 0 && (c.CheckpointDelay < time.Millisecond || c.CheckpointDelay > maxDelay) {
		wrong("CheckpointDelay is %v, want %v to %v, or 0 for %v", c.CheckpointDelay, time.Millisecond, maxDelay, DefaultCheckpointDelay)
	}
	return errors.Join(errs...)
}

func defaultMaxBytes() int64 { return min(DefaultMaxBytes, maxMaxBytes()) }

func (c Config) withDefaults() Config {
	if c.MaxCount == 0 {
		c.MaxCount = DefaultMaxCount
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = defaultMaxBytes()
	}
	if c.LaneShare == 0 {
		c.LaneShare = 1
	}
	if c.BatchCount == 0 {
		c.BatchCount = DefaultBatchCount
	}
	if c.BatchBytes == 0 {
		c.BatchBytes = DefaultBatchBytes
	}
	if c.CheckpointCount == 0 {
		c.CheckpointCount = DefaultCheckpointCount
	}
	if c.CheckpointDelay == 0 {
		c.CheckpointDelay = DefaultCheckpointDelay
	}
	return c
}
