// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

import (
	"encoding/binary"
	"math/bits"
	"sync"
)

// Chunks come in powers of two. A lane's chunks grow from chunkMin to chunkIdle,
// and on to chunkMax in a lane that holds more than that: the fewer chunks there
// are, the less the garbage collector has to do. A message that needs more gets
// a chunk of its own, which is left to the garbage collector.
const (
	chunkMin     = 256
	chunkIdle    = 64 << 10 // the most that an empty lane keeps
	chunkMax     = 4 << 20
	chunkClasses = 15 // chunkMax is the last
	recordHeader = 4
)

func chunkClass(n int) int {
	return bits.Len(uint(max(n, chunkMin)-1)) - bits.Len(chunkMin-1)
}

// A chunk holds records: their length plus one in 4 bytes, then the encoding.
// Where fewer than 4 bytes are left, or the 4 bytes are 0, the next chunk goes
// on. That mark is written before next is set and neither changes while a
// record behind them is held, so a reader that knows how many records there are
// needs no lock.
type chunk struct {
	data []byte
	next *chunk
}

// A place is where the next record begins.
type place struct {
	c   *chunk
	off int
}

// skip moves over an end of chunk and reports whether it did.
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

// A slab is the store of a lane: a list of chunks from head to tail. Guarded by
// the lane's lock, but for records under a lease.
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

// rewindRecords makes an empty slab start over in its last chunk. Once nothing
// is held, that chunk is large only if a batch was.
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

// scratch is where a Put encodes before it takes the lane's lock.
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
