// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
)

// A chunk holds consecutive messages of one lane. It describes itself completely, so that
// it can be found in a file of which nothing else is readable. Little-endian:
//
//	offset  bytes
//	     0  4      "SGc1"
//	     4  4      CRC32C of bytes 8 to the end of the table
//	     8  4      size of the whole chunk
//	    12  4      number of messages n, at least 1
//	    16  8      sequence number of the first message, from 1
//	    24  8      number of the write that made it
//	    32  8      when the batch of the write began, in nanoseconds since 1970
//	    40  1      length of the lane's name
//	    41  …      the name
//	     …  8·n    the table: for each message its length and its CRC32C
//	     …  …      the messages
const (
	chunkMagic  = "SGc1"
	chunkHeader = 41
	recordCost  = 8
)

// A lane's position says which messages of the lane are held:
//
//	offset  bytes
//	     0  4      "SGp1"
//	     4  4      CRC32C of bytes 8 to the end
//	     8  8      head: sequence number of the oldest message that is not drained
//	    16  8      tail: sequence number that the next message gets
//	    24  8      number of the write that made it
//	    32  1      length of the lane's name
//	    33  …      the name
const (
	positionMagic  = "SGp1"
	positionHeader = 33
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// chunkOverhead is the size of a chunk without its records and their entries in the table.
func chunkOverhead(name string) int { return chunkHeader + len(name) }

// chunkCost is the cost of a chunk of size bytes, with its key and its element of a page.
func chunkCost(name string, size int) int64 { return int64(size + keySize(name) + 16) }

// appendChunk appends a chunk with the given messages, which lie one after the other in
// data.
func appendChunk(dst []byte, name string, first, commit uint64, when int64, lens []uint32, data []byte) []byte {
	at := len(dst)
	size := chunkOverhead(name) + recordCost*len(lens) + len(data)
	dst = append(dst, chunkMagic...)
	dst = append(dst, 0, 0, 0, 0)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(size))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(lens)))
	dst = binary.LittleEndian.AppendUint64(dst, first)
	dst = binary.LittleEndian.AppendUint64(dst, commit)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(when))
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	from := uint32(0)
	for _, n := range lens {
		dst = binary.LittleEndian.AppendUint32(dst, n)
		dst = binary.LittleEndian.AppendUint32(dst, checksum(data[from:from+n]))
		from += n
	}
	binary.LittleEndian.PutUint32(dst[at+4:], checksum(dst[at+8:]))
	return append(dst, data...)
}

// A chunk is a chunk that was read. Its parts point into the bytes from which it was read.
type chunk struct {
	name   string
	first  uint64
	commit uint64
	when   int64
	n      int
	size   int
	table  []byte
	data   []byte // data of all messages; shorter than the table says if the chunk is cut
}

var (
	errShort = errors.New("cut short")
	errMagic = errors.New("no chunk")
	errCRC   = errors.New("checksum of the header is wrong")
)

// parseChunk reads the chunk at the beginning of b. It ignores the bytes of b after the
// chunk. Messages at the end of the chunk may be missing.
func parseChunk(b []byte) (chunk, error) {
	if len(b) < chunkHeader {
		return chunk{}, errShort
	}
	if string(b[:4]) != chunkMagic {
		return chunk{}, errMagic
	}
	c := chunk{
		first:  binary.LittleEndian.Uint64(b[16:]),
		commit: binary.LittleEndian.Uint64(b[24:]),
		when:   int64(binary.LittleEndian.Uint64(b[32:])),
	}
	size, n := binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:])
	head := uint64(chunkHeader) + uint64(b[40])
	table := head + recordCost*uint64(n)
	if n == 0 || uint64(size) < table || size > math.MaxInt32 {
		return chunk{}, errCRC
	}
	if uint64(len(b)) < table {
		return chunk{}, errShort
	}
	if checksum(b[8:table]) != binary.LittleEndian.Uint32(b[4:]) {
		return chunk{}, errCRC
	}
	c.n, c.size = int(n), int(size)
	c.name = string(b[chunkHeader:head])
	c.table = b[head:table]
	c.data = b[table:min(uint64(len(b)), uint64(size))]
	sum := table
	for i := range c.n {
		sum += uint64(binary.LittleEndian.Uint32(c.table[recordCost*i:]))
	}
	if sum != uint64(size) || c.first == 0 || c.first+uint64(n) < c.first || c.name == "" {
		return chunk{}, errors.New("header contradicts itself")
	}
	return c, nil
}

// end returns the sequence number after the last message.
func (c *chunk) end() uint64 { return c.first + uint64(c.n) }

// record returns message i, which begins at offset from of data, and the offset of the next
// message.
func (c *chunk) record(i, from int) (rec []byte, next int, err error) {
	n := int(binary.LittleEndian.Uint32(c.table[recordCost*i:]))
	next = from + n
	if next > len(c.data) {
		return nil, next, errShort
	}
	rec = c.data[from:next:next]
	if checksum(rec) != binary.LittleEndian.Uint32(c.table[recordCost*i+4:]) {
		return rec, next, errors.New("checksum is wrong")
	}
	return rec, next, nil
}

// A position says which messages of a lane are held: from head to before tail.
type position struct {
	name       string
	head, tail uint64
	commit     uint64
	moved      bool // the head was elsewhere when it was last written; not stored
}

func newPosition(p position) []byte {
	dst := append(make([]byte, 0, positionHeader+len(p.name)), positionMagic...)
	dst = append(dst, 0, 0, 0, 0)
	dst = binary.LittleEndian.AppendUint64(dst, p.head)
	dst = binary.LittleEndian.AppendUint64(dst, p.tail)
	dst = binary.LittleEndian.AppendUint64(dst, p.commit)
	dst = append(dst, byte(len(p.name)))
	dst = append(dst, p.name...)
	binary.LittleEndian.PutUint32(dst[4:], checksum(dst[8:]))
	return dst
}

// parsePosition reads the position at the beginning of b, and returns its length.
func parsePosition(b []byte) (p position, size int, err error) {
	if len(b) < positionHeader {
		return position{}, 0, errShort
	}
	if string(b[:4]) != positionMagic {
		return position{}, 0, errors.New("no position")
	}
	size = positionHeader + int(b[32])
	if len(b) < size {
		return position{}, 0, errShort
	}
	if checksum(b[8:size]) != binary.LittleEndian.Uint32(b[4:]) {
		return position{}, 0, errors.New("checksum of the position is wrong")
	}
	p = position{
		head:   binary.LittleEndian.Uint64(b[8:]),
		tail:   binary.LittleEndian.Uint64(b[16:]),
		commit: binary.LittleEndian.Uint64(b[24:]),
		name:   string(b[positionHeader:size]),
	}
	if p.name == "" || p.head == 0 || p.tail < p.head {
		return position{}, 0, fmt.Errorf("position contradicts itself: head %d, tail %d", p.head, p.tail)
	}
	return p, size, nil
}

// Keys sort by lane, then by sequence number; no lane's keys are a prefix of another's.
func keySize(name string) int { return 1 + len(name) + 8 }

func newKey(name string, seq uint64) []byte {
	return appendKey(make([]byte, 0, keySize(name)), name, seq)
}

func appendKey(dst []byte, name string, seq uint64) []byte {
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	return binary.BigEndian.AppendUint64(dst, seq)
}

func parseKey(k []byte) (name []byte, seq uint64, ok bool) {
	if len(k) < 10 || int(k[0]) != len(k)-9 {
		return nil, 0, false
	}
	return k[1 : len(k)-8], binary.BigEndian.Uint64(k[len(k)-8:]), true
}

// offsets returns the offset in data of each message.
func (c *chunk) offsets() []int {
	at := make([]int, c.n)
	from := 0
	for i := range at {
		at[i] = from
		from += int(binary.LittleEndian.Uint32(c.table[recordCost*i:]))
	}
	return at
}
