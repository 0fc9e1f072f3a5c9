// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package spill holds messages on disk, in order, until they are drained.
//
// A [Spill] has named lanes, like the memory ring. [Lane.Put] returns when its messages are
// synced, a [Lease] reads the oldest ones, and [Lease.Commit] gives them up. Lanes share
// one budget of messages and bytes. If the spill is full, Put waits and [Lane.TryPut]
// returns an error; nothing is dropped or overwritten to make room. One goroutine at a time
// writes: all Puts that come during a sync share the next sync.
//
// Start with [Open]. A message may be acked at its broker after its Put has returned, or
// after the callback of its [Lane.Append] was called without an error. From then on this
// directory has the only copy.
//
// # Crash safety
//
// Messages of a Put that returned nil survive a crash of the process, of the machine and of
// its power. Committed messages are leased again after a crash if their position was not
// synced: at most Config.CheckpointCount messages, or those of CheckpointDelay.
// [Spill.Flush] waits for the sync. Messages of a Put that failed, or whose context ended,
// may be held all the same. So a message can come twice, but is never lost: handlers must
// tolerate duplicates.
//
// Messages have sequence numbers in their lane. So a missing message is noticed, like a
// damaged one. Open checks the whole file before bbolt reads it, and reports all damage in
// its [Recovery]: lane, sequence numbers, offset, page and reason. Damaged messages are
// copied to the folder "damaged" and skipped; the others keep their order. If the structure
// of the file is damaged, Open searches the whole file for messages, makes a new file of
// them, and keeps the old one.
//
//	fault                             what happens
//	kill -9, power cut                confirmed messages are there; Open reports no damage
//	a write or sync fails (EIO)       state Failed: no intake until the next Open, drains continue
//	disk full (ENOSPC)                state NoSpace: Put waits, drains and their positions continue
//	file system read-only             Open gives a Failed spill, which can be drained
//	second process                    Open returns ErrLocked
//	any single bit wrong              reported, or in an unused part; no other message is lost
//	file cut short                    messages before the cut are found; the file is rebuilt
//	a page cannot be read             state Failed; Open fails until it can be read
//
// # Assumptions about disks
//
//   - A successful sync has stored everything that was written before it, durably.
//   - A sector of 512 bytes is written completely or not at all.
//   - A write changes only its own bytes.
//   - Space that was written once can be written again without new space. This is true for
//     ext4, XFS and tmpfs. Btrfs and ZFS copy on write: on a full disk, positions may find
//     no space, and the spill then tries again each second.
//   - The directory is on a local disk whose locks and renames work.
//
// # Limitations
//
//   - bbolt syncs twice for each transaction, and copies pages of 16 KiB when they change.
//     A batch of one small message writes 48 KiB, up to 96 KiB in a large file.
//   - bbolt has no checksums of pages. If a damaged page is not read again, only the next
//     Open notices it.
//   - bbolt maps the file to memory. A page that the disk cannot read is a fault; this
//     package turns it into an error. A cold drain reads page by page.
//   - The file becomes shorter only when Open finds it empty. It can be as long as 2.5
//     times MaxBytes, plus 16 MiB, plus six times MaxBytes or [MaxMessage], whichever is less.
//   - Open takes time and memory bandwidth in proportion to the held bytes.
//   - A message larger than 4 KiB costs more than its size: up to four neighbours are
//     copied with each added message. They need consecutive pages. On a disk that stays full,
//     such messages may find none, though others were drained.
//   - If both copies of a lane's position are lost, drained messages of the lane that are
//     still in the file may come again.
//   - A write that was torn inside a sector, against the assumption, counts as damage.
//   - Unix only: a directory cannot be locked on other systems. On 32-bit machines MaxBytes
//     is at most 256 MiB.
//
// # File format
//
// The directory has spill.db, a file of bbolt with two buckets, and the folder damaged. A
// key of "positions" is a lane's name. A key of "chunks" is the length of the name, the
// name, and the sequence number of the first message, big-endian. Everything else is
// little-endian; a CRC is CRC32C.
//
//	position, offset  bytes
//	               0  4      "SGp1"
//	               4  4      CRC of bytes 8 to the end
//	               8  8      sequence number of the oldest message that is not drained
//	              16  8      sequence number that the next message gets
//	              24  8      number of the write that made it
//	              32  1      length of the lane's name
//	              33  …      the name
//
//	chunk, offset     bytes
//	               0  4      "SGc1"
//	               4  4      CRC of bytes 8 to the end of the table
//	               8  4      size of the chunk
//	              12  4      number of messages n
//	              16  8      sequence number of the first message, from 1
//	              24  8      number of the write that made it
//	              32  8      when the batch of the write began, in nanoseconds since 1970
//	              40  1      length of the lane's name
//	              41  …      the name
//	               …  8·n    the table: length and CRC of each message
//	               …  …      the messages
package spill
