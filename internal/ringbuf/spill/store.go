// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

// A store keeps the chunks of lanes on disk. One goroutine writes; any may read.
type store interface {
	// write makes all of a transaction durable, or changes nothing that is seen later.
	// One without chunks must never need room that the disk has to give.
	//
	// The error is errNoRoom if there was none for the chunks, and the store is as it
	// was. After any other the store must not be written to again.
	write(t *transaction) error

	// read copies chunks of a lane, in order, from the first one that begins at message
	// seq or later, until they have about limit bytes.
	read(dst []stored, lane string, seq uint64, limit int) ([]stored, error)

	// lanes is how many positions a transaction without chunks may have now.
	lanes() int

	// size is how long the file is.
	size() int64

	// close gives the file back. It writes nothing.
	close() error
}

// stored is a chunk as it was read, with the message that its key says it begins with.
type stored struct {
	seq  uint64
	data []byte
}

// A transaction is what one sync makes durable.
type transaction struct {
	chunks    []newChunk
	positions []position // what holds after the chunks are added
	forget    []string   // lanes that hold nothing and are no longer known

	freed []int64 // set by write: what the chunks cost that are drained, for each of positions
}

type newChunk struct {
	name string
	seq  uint64
	data []byte
}
