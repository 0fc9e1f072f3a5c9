// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

import (
	"encoding/binary"
	"math/bits"
	"sync"
)

// The size of a chunk is a power of two. A lane's chunks grow from chunkMin to chunkIdle, and
// on to chunkMax in a lane that holds more: with fewer chunks the garbage collector has less
// work. A message larger than chunkMax gets its own chunk, which is later left to the garbage
// collector.
const (
	chunkMin     = 256
	chunkIdle    = 64 << 10 // largest chunk that an empty lane keeps
	chunkMax     = 4 << 20
	chunkClasses = 15 // chunkMax is the last class
	recordHeader = 4
)

func chunkClass(n int) int {
	return bits.Len(uint(max(n, chunkMin)-1)) - bits.Len(chunkMin-1)
}

// A chunk holds records. A record is its length plus one in 4 bytes, then the encoding. The
// chunk ends where fewer than 4 bytes are left, or where the 4 bytes are 0; the next record is
// in the next chunk. These 4 bytes are written before next is set, and neither changes while a
// later record is held. So a reader that knows the number of records needs no lock.
type chunk struct {
	data []byte
	next *chunk
}

// A place is the position of a record: a chunk and an offset in it.
type place struct {
	c   *chunk
	off int
}

// skip moves over the end of a chunk, and returns whether it did.
func (p *place) skip() bool {
	if len(p.c.data)-p.off >= recordHeader && binary.LittleEndian.Uint32(p.c.data[p.off:]) != 0 {
		return false
	}
	p.c, p.off = p.c.next, 0
	return true
}

// next returns the record at p, which must exist, and moves behind it.
func (p *place) next() []byte {
	for p.skip() {
	}
	from := p.off + recordHeader
	to := from + int(binary.LittleEndian.Uint32(p.c.data[p.off:])-1)
	p.off = to
	return p.c.data[from:to:to]
}

// A slab is the store of a lane: a list of chunks from head to tail. The lane's lock guards it,
// except for records under a lease.
type slab struct {
	head, tail place
	held       int64 // bytes of all records, headers not counted
}

func appendRecord[T any](s *slab, sp *spare[T], rec []byte) {
	size := recordHeader + len(rec)
	c := s.tail.c
	if c == nil || len(c.data)-s.tail.off < size {
		class := chunkClass(size)
		if c != nil {
			most := min(max(s.held/2, chunkIdle), chunkMax) // its class is at most held
			class = max(class, min(chunkClass(len(c.data))+1, chunkClass(int(most))))
		}
		var fresh *chunk
		if class < chunkClasses {
			if fresh = sp.getChunk(class); fresh == nil {
				fresh = &chunk{data: make([]byte, chunkMin<<class)}
			}
		} else {
			fresh = &chunk{data: make([]byte, size)}
		}
		if c == nil {
			s.head = place{c: fresh}
		} else {
			if len(c.data)-s.tail.off >= recordHeader {
				binary.LittleEndian.PutUint32(c.data[s.tail.off:], 0)
			}
			c.next = fresh
		}
		s.tail = place{c: fresh}
	}
	d := s.tail.c.data[s.tail.off:]
	binary.LittleEndian.PutUint32(d, uint32(len(rec)+1))
	copy(d[recordHeader:], rec)
	s.tail.off += size
	s.held += int64(len(rec))
}

// discardRecords frees the first n records and returns their bytes.
func discardRecords[T any](s *slab, sp *spare[T], n int) (bytes int64) {
	for range n {
		for old := s.head.c; s.head.skip(); old = s.head.c {
			sp.putChunk(old)
		}
		bytes += int64(len(s.head.next()))
	}
	s.held -= bytes
	return bytes
}

// rewindRecords makes an empty slab start again in its last chunk. That chunk is large only
// after a large batch; if it is larger than chunkIdle, it goes to sp.
func rewindRecords[T any](s *slab, sp *spare[T]) {
	for s.head.c != s.tail.c {
		old := s.head.c
		s.head.c = old.next
		sp.putChunk(old)
	}
	s.head.off, s.tail.off = 0, 0
	if s.tail.c != nil && len(s.tail.c.data) > chunkIdle {
		sp.putChunk(s.tail.c)
		s.head, s.tail = place{}, place{}
	}
}

// scratch has the buffers in which a Put encodes before it takes the lane's lock.
var scratch sync.Pool // of *[]byte

func getScratch() *[]byte {
	if p, ok := scratch.Get().(*[]byte); ok {
		return p
	}
	return new([]byte)
}

const scratchKeep = 1 << 20

func putScratch(p *[]byte, b []byte) {
	if cap(b) <= scratchKeep {
		*p = b[:0]
		scratch.Put(p)
	}
}
