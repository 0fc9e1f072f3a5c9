// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

// A store keeps the chunks of lanes on disk. One goroutine at a time writes; any may read.
type store interface {
	// write makes a whole transaction durable, or changes nothing that is seen later. A
	// transaction without chunks must never need new space on the disk.
	//
	// The error is errNoRoom if there was no space for the chunks; the store is then
	// unchanged. After any other error the store must not be written to again.
	write(t *transaction) error

	// read appends chunks of a lane to dst, in order, from the first one that begins at
	// message seq or later, until they have about limit bytes.
	read(dst []stored, lane string, seq uint64, limit int) ([]stored, error)

	// lanes returns how many positions a transaction without chunks may have now.
	lanes() int

	// close closes the file. It writes nothing.
	close() error
}

// stored is a chunk that was read. seq is its first message according to its key.
type stored struct {
	seq  uint64
	data []byte
}

// A transaction is the content of one sync.
type transaction struct {
	chunks    []newChunk
	positions []position // positions of lanes after the chunks are added
	forget    []string   // empty lanes whose positions are deleted

	freed []int64 // set by write, for each of positions: the cost of the deleted drained chunks
}

type newChunk struct {
	name string
	seq  uint64
	data []byte
}
