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

// What a zero field of a [Config] means.
const (
	DefaultMaxCount        = 16 << 20
	DefaultMaxBytes        = 1 << 30
	DefaultBatchCount      = 1024
	DefaultBatchBytes      = 1 << 20
	DefaultCheckpointCount = 1024
	DefaultCheckpointDelay = 10 * time.Millisecond
)

const (
	// MaxMessage is the most bytes that one encoded message may have.
	MaxMessage = 16 << 20

	// MaxName is the most bytes that the name of a lane may have.
	MaxName = 255

	maxDelay  = time.Minute
	leastRoom = 64 << 10
	is32bit   = strconv.IntSize == 32
)

// maxMaxBytes keeps the file mappable: it may be twice as large as what it holds.
func maxMaxBytes() int64 {
	if is32bit {
		return 256 << 20
	}
	return 1 << 40
}

// Config bounds a [Spill] and says when it syncs. Only Dir has no default.
type Config struct {
	// Dir is the directory that the spill owns: one process at a time, nothing else in
	// it. It is created if its parent exists. It must be on a local disk. Unset is an
	// error: nothing is ever written to a place that nobody chose.
	Dir string

	// MaxCount is how many messages all lanes together may hold, leased ones included:
	// 1 to 2147483647; 0 means [DefaultMaxCount].
	MaxCount int

	// MaxBytes is how many bytes all lanes together may hold, leased ones included:
	// 64 KiB to 1 TiB, or 256 MiB on 32-bit machines; 0 means [DefaultMaxBytes]. A
	// message counts with its encoding and what the format adds. The file is larger: by
	// a few per cent with one lane, up to twice as large with very many.
	MaxBytes int64

	// LaneShare is the part of MaxCount and of MaxBytes that one lane may fill, above 0
	// and up to 1; 0 means 1. A lane may always hold one message.
	LaneShare float64

	// BatchCount ends a batch: so many messages are synced together at most, 1 to
	// 1048576; 0 means [DefaultBatchCount].
	BatchCount int

	// BatchBytes ends a batch as well, 1 to 64 MiB; 0 means [DefaultBatchBytes]. A larger
	// message is a batch of its own. Up to two batches are in memory at a time.
	BatchBytes int64

	// BatchDelay is how long the first message of a batch waits for others, up to a
	// minute. 0 means not at all: a batch is what came while the last one was synced.
	BatchDelay time.Duration

	// CheckpointCount is after how many committed messages the drained position is
	// synced, 1 to 1048576; 0 means [DefaultCheckpointCount].
	CheckpointCount int

	// CheckpointDelay is after how long it is synced at the latest, 1 ms to a minute; 0
	// means [DefaultCheckpointDelay]. After a crash, what was committed since is leased
	// again.
	CheckpointDelay time.Duration
}

// Validate reports every field that is out of range, or nil. It does not look at the
// disk.
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
