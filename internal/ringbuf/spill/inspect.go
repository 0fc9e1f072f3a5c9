// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"slices"
	"strings"
)

// The format of a file of bbolt, version 2. bbolt trusts what it reads: a wrong byte makes
// it panic, even in a goroutine of its own, or read outside the file. So a file is
// inspected before bbolt reads it.
const (
	boltMagic      = 0xED0CDAED
	boltVersion    = 2
	boltHeader     = 16 // size of a page's header: id 8, flags 2, count 2, overflow 4
	boltElement    = 16 // size of an element; of a leaf: flags 4, pos 4, ksize 4, vsize 4; of a branch: pos 4, ksize 4, page 8
	boltBranch     = 0x01
	boltLeaf       = 0x02
	boltNoFreelist = math.MaxUint64
	boltMetaSize   = 64
	boltDepth      = 32
)

// order is the native byte order, because bbolt maps structs.
var order = binary.NativeEndian

type boltMeta struct {
	pageSize int64
	root     uint64 // page of the root bucket
	pages    uint64 // number of used pages: the file has at least as many
	txid     uint64
}

func parseMeta(b []byte) (boltMeta, error) {
	if len(b) < boltHeader+boltMetaSize {
		return boltMeta{}, errShort
	}
	b = b[boltHeader : boltHeader+boltMetaSize]
	h := fnv.New64a()
	_, _ = h.Write(b[:56])
	m := boltMeta{
		pageSize: int64(order.Uint32(b[8:])),
		root:     order.Uint64(b[16:]),
		pages:    order.Uint64(b[40:]),
		txid:     order.Uint64(b[48:]),
	}
	switch {
	case order.Uint32(b) != boltMagic || order.Uint32(b[4:]) != boltVersion:
		return m, errors.New("no meta page")
	case order.Uint64(b[56:]) != h.Sum64():
		return m, errors.New("checksum of the meta page is wrong")
	case m.pageSize < 1024 || m.pageSize > 1<<24 || m.pageSize&(m.pageSize-1) != 0:
		return m, fmt.Errorf("page size is %d", m.pageSize)
	case order.Uint64(b[32:]) != boltNoFreelist && m.txid > 1:
		return m, errors.New("has a list of free pages")
	}
	return m, nil
}

// broken is damage to the file's structure: bbolt must not read such a file.
type broken struct {
	page   int64
	offset int64
	reason string
}

func (b *broken) Error() string { return fmt.Sprintf("page %d: %s", b.page, b.reason) }

// A span is messages first to last.
type span struct{ first, last uint64 }

// laneImage is what was found of a lane in a file.
type laneImage struct {
	position

	placed bool   // the lane's position was found
	chunk  uint64 // first message of the lane's first chunk; tail if there is none
	oldest int64  // chunk.when of the first readable chunk
	count  int    // number of readable messages
	bytes  int64  // cost of all chunks of the lane
	lost   []span // unreadable messages

	next uint64  // first message that the next chunk should have
	bad  *Damage // a chunk with an unreadable header, whose end is therefore unknown
	torn piece   // the part of the file with bad
}

// image is what was found in a file.
type image struct {
	lanes    map[string]*laneImage
	commit   uint64 // highest number of a write
	damages  []Damage
	copies   []piece // for each of damages: the part to set aside
	pageSize int64
}

// A piece is a part of the file.
type piece struct{ off, size int64 }

func newImage() *image { return &image{lanes: map[string]*laneImage{}} }

func (m *image) lane(name string) *laneImage {
	l := m.lanes[name]
	if l == nil {
		l = &laneImage{position: position{name: name}}
		m.lanes[name] = l
	}
	return l
}

func (m *image) damage(d Damage, p piece) {
	m.damages = append(m.damages, d)
	m.copies = append(m.copies, p)
}

func (m *image) place(p position) {
	l := m.lane(p.name)
	l.position, l.placed, l.next, l.chunk = p, true, p.head, p.tail
	m.commit = max(m.commit, p.commit)
}

// add adds the next chunk of a lane, whose key says that it begins with message seq.
func (m *image) add(name string, seq uint64, v []byte, d Damage, p piece) {
	l := m.lane(name)
	if l.chunk == l.tail && l.count == 0 && l.bytes == 0 {
		l.chunk = seq
		if !l.placed {
			l.head, l.next = seq, seq
		}
	}
	l.bytes += chunkCost(name, len(v))
	m.settle(l, seq)
	if seq > l.next {
		m.lose(l, Damage{Lane: name, First: l.next, Last: seq - 1, Offset: -1, Page: -1, Reason: "missing"}, piece{})
	}
	d.Lane = name
	c, err := parseChunk(v)
	if err == nil && (c.name != name || c.first != seq) {
		err = fmt.Errorf("says that it is lane %q, message %d", c.name, c.first)
	}
	if err != nil {
		d.First, d.Reason = max(seq, l.head), err.Error()
		l.bad, l.torn, l.next = &d, p, max(l.next, seq+1)
		return
	}
	if l.oldest == 0 {
		l.oldest = c.when
	}
	m.commit = max(m.commit, c.commit)
	from := 0
	for i := range c.n {
		seq := c.first + uint64(i)
		_, next, err := c.record(i, from)
		from = next
		switch {
		case seq < l.head:
		case err == nil:
			l.count++
		default:
			d.First, d.Last, d.Reason = seq, seq, err.Error()
			m.lose(l, d, p)
		}
	}
	l.next = max(l.next, c.end())
}

// settle ends a chunk with an unreadable header before message next.
func (m *image) settle(l *laneImage, next uint64) {
	if d := l.bad; d != nil {
		l.bad = nil
		if d.Last = max(next, d.First+1) - 1; d.Last >= l.head {
			l.lost = append(l.lost, span{d.First, d.Last})
		}
		l.next = max(l.next, next)
		m.damage(*d, l.torn)
	}
}

func (m *image) lose(l *laneImage, d Damage, p piece) {
	l.lost = append(l.lost, span{d.First, d.Last})
	m.damage(d, p)
}

// finish checks the end of each lane.
func (m *image) finish() {
	names := make([]string, 0, len(m.lanes))
	for name := range m.lanes {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		l := m.lanes[name]
		m.settle(l, l.tail)
		if !l.placed {
			l.tail = l.next
			m.damage(Damage{Lane: name, Offset: -1, Page: -1, Reason: "position missing: what was drained of the lane may come again"}, piece{})
		}
		if l.next > l.tail && l.tail > 0 {
			m.damage(Damage{Lane: name, Offset: -1, Page: -1, Reason: fmt.Sprintf("position ends before message %d, and there are more", l.tail)}, piece{})
			l.tail = l.next
		}
		if l.next < l.tail {
			m.lose(l, Damage{Lane: name, First: l.next, Last: l.tail - 1, Offset: -1, Page: -1, Reason: "missing"}, piece{})
		}
		if l.bytes == 0 {
			l.chunk = l.tail
		}
	}
}

// inspect reads a whole file and passes each chunk to visit, if that is not nil. The error
// is a *broken, or an error of reading. The image has damage that is harmless for bbolt.
func inspect(r io.ReaderAt, size int64, visit func(lane string, seq uint64, data []byte)) (*image, error) {
	m, meta, err := newestMeta(r, size)
	if err != nil {
		return nil, err
	}
	w := walker{r: r, meta: meta, seen: make([]uint64, meta.pages/64+1)}
	buckets := map[string][]byte{}
	err = w.tree(meta.root, func(e entry) error {
		if e.flags != 1 || len(e.value) < 16 {
			return e.broken("no bucket")
		}
		buckets[string(e.key)] = bytes.Clone(e.value)
		w.inline[string(e.key)] = e.off
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(buckets) != 2 || buckets[positionBucket] == nil || buckets[chunkBucket] == nil {
		return nil, &broken{int64(meta.root), int64(meta.root) * meta.pageSize, "not the buckets of a spill"}
	}
	m.pageSize = meta.pageSize
	err = w.bucket(positionBucket, buckets[positionBucket], func(e entry) error {
		p, n, err := parsePosition(e.value)
		if err == nil && (p.name != string(e.key) || n != len(e.value)) {
			err = fmt.Errorf("is that of lane %q", p.name)
		}
		if err != nil {
			m.damage(Damage{Lane: string(e.key), Offset: e.off, Page: e.page, Reason: err.Error()}, piece{e.off, int64(len(e.value))})
		} else {
			m.place(p)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = w.bucket(chunkBucket, buckets[chunkBucket], func(e entry) error {
		name, seq, ok := parseKey(e.key)
		if !ok || seq == 0 {
			return e.broken("key of a chunk is none")
		}
		// The key has no checksum: only a chunk that contradicts the key shows that the key
		// is wrong.
		if c, err := parseChunk(e.value); err == nil && (c.first != seq || c.name != string(name)) {
			return e.broken("key of a chunk is wrong")
		}
		if visit != nil {
			visit(string(name), seq, e.value)
		}
		m.add(string(name), seq, e.value, Damage{Offset: e.off, Page: e.page}, piece{e.off, int64(len(e.value))})
		return nil
	})
	if err != nil {
		return nil, err
	}
	m.finish()
	return m, nil
}

// newestMeta requires both meta pages. A write of a meta page is never torn, as it is
// shorter than a sector. So a wrong meta page was damaged later, and may have been the
// newest.
func newestMeta(r io.ReaderAt, size int64) (*image, boltMeta, error) {
	buf := make([]byte, boltHeader+boltMetaSize)
	read := func(off int64) (boltMeta, error) {
		if _, err := r.ReadAt(buf, off); err != nil {
			if errors.Is(err, io.EOF) {
				err = errShort
			}
			return boltMeta{}, err
		}
		return parseMeta(buf)
	}
	m0, err := read(0)
	if err != nil {
		return nil, m0, &broken{0, 0, err.Error()}
	}
	m1, err := read(m0.pageSize)
	if err != nil {
		return nil, m1, &broken{1, m0.pageSize, err.Error()}
	}
	m := m0
	if m1.txid > m0.txid {
		m = m1
	}
	if m1.pageSize != m0.pageSize || m.pages > uint64(size/m.pageSize) {
		return nil, m, &broken{int64(m.pages), size, fmt.Sprintf("file ends after %d bytes, want %d pages of %d", size, m.pages, m.pageSize)}
	}
	return newImage(), m, nil
}

// A walker visits the pages of a file. Each page may occur once.
type walker struct {
	r      io.ReaderAt
	meta   boltMeta
	seen   []uint64 // a bit for each page
	inline map[string]int64
	bufs   [boltDepth][]byte
}

// An entry is a key and value of a leaf.
type entry struct {
	key, value []byte // valid until the next entry
	flags      uint32
	page, off  int64 // off is the offset of value in the file
}

func (e *entry) broken(reason string) error { return &broken{e.page, e.off, reason} }

func (w *walker) tree(root uint64, visit func(entry) error) error {
	if w.inline == nil {
		w.inline = map[string]int64{}
	}
	return w.page(root, nil, nil, 0, visit)
}

// bucket visits the entries of a bucket, which may be inside its parent's page.
func (w *walker) bucket(name string, v []byte, visit func(entry) error) error {
	if root := order.Uint64(v); root != 0 {
		return w.tree(root, visit)
	}
	off := w.inline[name]
	return w.leaf(v[16:], off/w.meta.pageSize, off+16, nil, nil, visit)
}

func (w *walker) page(id uint64, low, high []byte, depth int, visit func(entry) error) error {
	bad := func(format string, args ...any) error {
		return &broken{int64(id), int64(id) * w.meta.pageSize, fmt.Sprintf(format, args...)}
	}
	if id < 2 || id >= w.meta.pages || depth == boltDepth {
		return bad("is not in the file, or too deep")
	}
	off := int64(id) * w.meta.pageSize
	buf := grown(&w.bufs[depth], int(w.meta.pageSize))
	if _, err := w.r.ReadAt(buf, off); err != nil {
		return bad("%v", err)
	}
	more := uint64(order.Uint32(buf[12:]))
	if order.Uint64(buf) != id || more >= w.meta.pages-id {
		return bad("is page %d with %d more", order.Uint64(buf), more)
	}
	for i := id; i <= id+more; i++ {
		if w.seen[i/64]&(1<<(i%64)) != 0 {
			return bad("is in the tree twice")
		}
		w.seen[i/64] |= 1 << (i % 64)
	}
	if more > 0 {
		if more >= math.MaxInt32/uint64(w.meta.pageSize) {
			return bad("is too large")
		}
		buf = grown(&w.bufs[depth], int(more+1)*int(w.meta.pageSize))
		if _, err := w.r.ReadAt(buf, off); err != nil {
			return bad("%v", err)
		}
	}
	switch order.Uint16(buf[8:]) {
	case boltLeaf:
		return w.leaf(buf, int64(id), off, low, high, visit)
	case boltBranch:
	default:
		return bad("is neither leaf nor branch")
	}
	n := int(order.Uint16(buf[10:]))
	if n == 0 || boltHeader+n*boltElement > len(buf) {
		return bad("has %d elements", n)
	}
	type child struct {
		key []byte
		id  uint64
	}
	children := make([]child, n)
	for i := range n {
		at := boltHeader + i*boltElement
		pos, ksize := uint64(at)+uint64(order.Uint32(buf[at:])), uint64(order.Uint32(buf[at+4:]))
		if pos < uint64(boltHeader+n*boltElement) || pos+ksize > uint64(len(buf)) {
			return bad("key %d is outside", i)
		}
		children[i] = child{bytes.Clone(buf[pos : pos+ksize]), order.Uint64(buf[at+8:])}
		if i > 0 && bytes.Compare(children[i-1].key, children[i].key) >= 0 ||
			i == 0 && low != nil && bytes.Compare(low, children[i].key) > 0 ||
			high != nil && bytes.Compare(children[i].key, high) >= 0 {
			return bad("key %d is out of order", i)
		}
	}
	for i, c := range children {
		end := high
		if i+1 < n {
			end = children[i+1].key
		}
		if err := w.page(c.id, c.key, end, depth+1, visit); err != nil {
			return err
		}
	}
	return nil
}

func (w *walker) leaf(buf []byte, id, off int64, low, high []byte, visit func(entry) error) error {
	bad := func(format string, args ...any) error { return &broken{id, off, fmt.Sprintf(format, args...)} }
	if len(buf) < boltHeader || order.Uint16(buf[8:]) != boltLeaf {
		return bad("is no leaf")
	}
	n := int(order.Uint16(buf[10:]))
	if boltHeader+n*boltElement > len(buf) {
		return bad("has %d elements", n)
	}
	var last []byte
	for i := range n {
		at := boltHeader + i*boltElement
		pos := uint64(at) + uint64(order.Uint32(buf[at+4:]))
		ksize, vsize := uint64(order.Uint32(buf[at+8:])), uint64(order.Uint32(buf[at+12:]))
		if pos < uint64(boltHeader+n*boltElement) || pos+ksize+vsize > uint64(len(buf)) {
			return bad("element %d is outside", i)
		}
		e := entry{flags: order.Uint32(buf[at:]), page: id, off: off + int64(pos+ksize)}
		e.key, e.value = buf[pos:pos+ksize], buf[pos+ksize:pos+ksize+vsize]
		if i > 0 && bytes.Compare(last, e.key) >= 0 || i == 0 && low != nil && bytes.Compare(low, e.key) > 0 ||
			high != nil && bytes.Compare(e.key, high) >= 0 {
			return bad("key %d is out of order", i)
		}
		last = e.key
		if err := visit(e); err != nil {
			return err
		}
	}
	return nil
}

func grown(b *[]byte, n int) []byte {
	if cap(*b) < n {
		*b = make([]byte, n)
	}
	return (*b)[:n]
}

// found is a chunk that was found somewhere in a file.
type found struct {
	off   int64
	name  string
	first uint64
	end   uint64
	size  int // bytes of the chunk that are in the file
	bad   int // number of unreadable messages
	write uint64
}

const scanBlock = 1 << 20

// salvage finds chunks and positions anywhere in the file, even if the pages around them
// are damaged, and takes the newest of each. It returns the chunks that hold something, in
// order.
func salvage(r io.ReaderAt, size int64) ([]position, []found, error) {
	places := map[string]position{}
	lanes := map[string][]found{}
	buf := make([]byte, scanBlock+chunkHeader)
	var skip int64
	for at := int64(0); at < size; at += scanBlock {
		n, err := r.ReadAt(buf, at)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, nil, err
		}
		block := buf[:n]
		for i := 0; ; i++ {
			k := bytes.Index(block[i:], []byte("SG"))
			if i += k; k < 0 || i >= scanBlock {
				break
			}
			off := at + int64(i)
			if off < skip || i+4 > len(block) {
				continue
			}
			var length int
			switch string(block[i : i+4]) {
			case chunkMagic:
				f, err := findChunk(r, off, size)
				if err != nil {
					return nil, nil, err
				}
				if f.size > 0 {
					lanes[f.name] = append(lanes[f.name], f)
				}
				length = f.size
			case positionMagic:
				v := make([]byte, min(positionHeader+MaxName, size-off))
				if _, err := r.ReadAt(v, off); err != nil {
					return nil, nil, err
				}
				p, n, err := parsePosition(v)
				if err == nil && p.commit >= places[p.name].commit {
					places[p.name] = p
				}
				length = n
				if err != nil {
					length = 0
				}
			}
			skip = max(skip, off+int64(length))
		}
	}
	var chunks []found
	for name, fs := range lanes {
		chunks = append(chunks, newest(fs, places[name].head)...)
	}
	slices.SortFunc(chunks, func(a, b found) int {
		return bytes.Compare(newKey(a.name, a.first), newKey(b.name, b.first))
	})
	ps := make([]position, 0, len(places))
	for _, p := range places {
		ps = append(ps, p)
	}
	slices.SortFunc(ps, func(a, b position) int { return strings.Compare(a.name, b.name) })
	return ps, chunks, nil
}

// findChunk reads the chunk at off; a size of 0 means that there is none.
func findChunk(r io.ReaderAt, off, size int64) (found, error) {
	head := make([]byte, min(chunkHeader, size-off))
	if _, err := r.ReadAt(head, off); err != nil || len(head) < chunkHeader {
		return found{}, err
	}
	want := int64(binary.LittleEndian.Uint32(head[8:]))
	if want < chunkHeader || want > MaxMessage+1<<20 {
		return found{}, nil
	}
	v := make([]byte, min(want, size-off))
	if _, err := r.ReadAt(v, off); err != nil {
		return found{}, err
	}
	c, err := parseChunk(v)
	if err != nil {
		return found{}, nil //nolint:nilerr // it is no chunk
	}
	f := found{off: off, name: c.name, first: c.first, end: c.end(), size: len(v), write: c.commit}
	from := 0
	for i := range c.n {
		_, next, err := c.record(i, from)
		if from = next; err != nil {
			f.bad++
		}
	}
	return f, nil
}

// newest returns the newest chunks that are not drained. Of chunks with common messages it
// keeps only the one that was written last: bbolt copies a page when it changes, and the
// old copy stays until its place is needed.
func newest(fs []found, head uint64) []found {
	slices.SortFunc(fs, func(a, b found) int {
		switch {
		case a.first != b.first:
			return cmp.Compare(a.first, b.first)
		case a.write != b.write:
			return cmp.Compare(b.write, a.write)
		default:
			return a.bad - b.bad
		}
	})
	var kept []found
next:
	for _, f := range fs {
		if f.end <= head {
			continue
		}
		for len(kept) > 0 && kept[len(kept)-1].end > f.first {
			if kept[len(kept)-1].write >= f.write {
				continue next
			}
			kept = kept[:len(kept)-1]
		}
		kept = append(kept, f)
	}
	return kept
}
