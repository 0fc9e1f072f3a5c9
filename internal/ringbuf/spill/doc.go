// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package spill holds messages on disk, in order, until they are drained.
//
// A [Spill] has the lanes of the memory ring, with names: [Lane.Put] returns when its
// messages are synced, a [Lease] reads the oldest ones, and [Lease.Commit] gives them up.
// Lanes share one budget of messages and bytes. A full spill makes Put wait and
// [Lane.TryPut] refuse; nothing is ever dropped or overwritten to make room. One goroutine
// writes: all Puts that come while it syncs share the next sync.
//
// Start with [Open]. A message may be acked at its broker once its Put has returned, or
// the callback of its [Lane.Append] was called without an error. From then on this
// directory has the only copy.
//
// # Crash safety
//
// A Put that returned nil survives a crash of the process, of the machine and of its
// power. What was committed is leased again after a crash if its position was not synced:
// at most Config.CheckpointCount messages, or those of CheckpointDelay. [Spill.Flush]
// waits for the sync. A Put that failed, or whose context ended, may have been held all
// the same. So a message can come twice and is never lost: handlers must bear it.
//
// Messages have sequence numbers in their lane, so a missing one is seen as well as a
// damaged one. Open reads the whole file before bbolt gets to see it, and reports all
// damage in its [Recovery]: lane, sequence numbers, offset, page and reason. Damaged
// messages are copied to the folder "damaged" and passed over; the others keep their
// order. If the structure of the file is damaged, Open searches all of it for messages,
// makes a new file of those, and keeps the old one.
//
//	fault                             what happens
//	kill -9, power cut                confirmed messages are there; Open reports no damage
//	a write or sync fails (EIO)       state Failed: no intake until the next Open, drains go on
//	disk full (ENOSPC)                state NoSpace: Put waits, drains and their positions go on
//	file system read-only             Open gives a Failed spill, which can be drained
//	second process                    Open returns ErrLocked
//	any single bit wrong              named, or where nothing is held; no other message is lost
//	file cut short                    what is in front of the cut is found; the file is rebuilt
//	a page cannot be read             state Failed; Open fails until it can be read
//
// # Assumptions about disks
//
//   - A sync that succeeds has stored what was written before it, and it stays.
//   - A sector of 512 bytes is written wholly or not at all.
//   - A write changes no other bytes than its own.
//   - Room that was written once can be written again without new room. It is so on ext4,
//     XFS and tmpfs. Btrfs and ZFS copy on write: on a full one, positions may find no
//     room, and the spill then tries again each second.
//   - The directory is on a local disk whose locks and renames work.
//
// # Limitations
//
//   - bbolt syncs twice for each transaction, and copies pages of 16 KiB when they change.
//     A batch of one small message writes 48 KiB.
//   - bbolt has no checksums of pages. A damaged page that is not read again is noticed by
//     the next Open, and not before.
//   - bbolt maps the file to memory. A page that the disk cannot read is a fault; this
//     package makes it an error. A cold drain reads page by page.
//   - The file becomes shorter only when Open finds it empty. It can be as long as twice
//     MaxBytes and 16 MiB.
//   - Open takes time and memory bandwidth in proportion to what is held.
//   - A message larger than 4 KiB costs more than its size: up to four that lie side by
//     side are copied with each that is added.
//   - After both copies of a lane's position are lost, its drained messages that are still in
//     the file may come again.
//   - A write that was torn in the middle of a sector, against the assumption, is taken for
//     damage.
//   - Unix only: a directory cannot be locked elsewhere. On 32-bit machines MaxBytes is at
//     most 256 MiB.
//
// # File format
//
// The directory has spill.db, a file of bbolt with two buckets, and the folder damaged.
// "positions" has a lane's name as the key; "chunks" the length of the name, the name,
// and the sequence number of the first message, big-endian. All else is little-endian; a
// CRC is CRC32C.
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
//	              32  8      when, in nanoseconds since 1970
//	              40  1      length of the lane's name
//	              41  …      the name
//	               …  8·n    the table: length and CRC of each message
//	               …  …      the messages
package spill
