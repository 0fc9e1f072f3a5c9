// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"path/filepath"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// readLimit is about how many bytes of a lane are read at a time.
const readLimit = 64 << 10

// A Lease is the right to the oldest messages of a lane. They stay in the lane, and in its
// budget, until Commit. A lane has one open lease at a time.
//
// A Lease is a small value. Copies are the same lease: the first Commit or Release ends it
// for all copies. The zero Lease is over.
type Lease[T any] struct {
	lane *lane
	id   uint64
	n    int
}

// Len returns the number of leased messages.
func (s Lease[T]) Len() int { return s.n }

// Lease copies the oldest messages into dst, at least one and at most len(dst), and returns
// the lease on them. Only messages of confirmed Puts are leased. It waits while the lane is
// empty or another lease is open. The error is that of ctx, even if ctx is done on entry,
// [ringbuf.ErrClosed], [ringbuf.ErrDropped], or an [ErrFailed] if the disk could not be
// read.
//
// Damaged messages are skipped, reported by [WithDamage] and counted in [Stats], and their
// remains are set aside. A lease ends before a message that the codec cannot decode. If
// that is the oldest message, the error is a [*DecodeError] and the lease is open on this
// single message: Commit(1) gives it up, Release keeps it.
func (l *Lane[T]) Lease(ctx context.Context, dst []T) (Lease[T], error) {
	for {
		if err := ctx.Err(); err != nil {
			return Lease[T]{}, err
		}
		s, changed, err := l.lease(dst)
		if changed == nil {
			return s, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
		l.l.c.mu.Lock()
		l.l.waiting--
		l.l.c.mu.Unlock()
	}
}

// TryLease is [Lane.Lease] without waiting for messages. It returns [ringbuf.ErrLeased]
// while another lease is open, and otherwise [ringbuf.ErrEmpty] if the lane is empty. It
// may wait for a read of the disk.
func (l *Lane[T]) TryLease(dst []T) (Lease[T], error) {
	s, changed, err := l.lease(dst)
	if changed != nil {
		l.l.c.mu.Lock()
		l.l.waiting--
		l.l.c.mu.Unlock()
	}
	return s, err
}

// lease leases, or returns a channel to wait for and counts the caller as waiting.
func (l *Lane[T]) lease(dst []T) (s Lease[T], changed <-chan struct{}, err error) {
	if len(dst) == 0 {
		return s, nil, errNoDst
	}
	for {
		recs, id, changed, err := l.l.take(len(dst))
		if err != nil || len(recs) == 0 {
			if changed != nil || err != nil {
				return s, changed, err
			}
			continue // all messages that were read are damaged
		}
		s = Lease[T]{lane: l.l, id: id, n: len(recs)}
		err = l.decode(&s, recs, dst)
		return s, nil, err
	}
}

func (l *Lane[T]) decode(s *Lease[T], recs []record, dst []T) error {
	done := false
	defer func() {
		if !done {
			s.Release() // the codec panicked
		}
	}()
	for i, rec := range recs {
		v, err := l.codec.Decode(rec.data)
		if err == nil {
			dst[i] = v
			continue
		}
		if s.n = i; i == 0 {
			s.n = 1
			err = decodeError(l.l.name, rec, err)
		} else {
			err = nil
		}
		done = true
		return err
	}
	done = true
	return nil
}

func decodeError(lane string, rec record, err error) error {
	return &DecodeError{Lane: lane, Seq: rec.seq, Data: bytes.Clone(rec.data), Err: err}
}

// Commit ends the lease, gives up its first n messages and leaves the others at the front
// of the lane, in the same order. The position is synced within Config.CheckpointCount and
// CheckpointDelay. After a crash before the sync, the messages are leased again.
// [Spill.Flush] waits for the sync. Only then is the room free again.
//
// A lease that is over returns [ringbuf.ErrLeaseOver], or [ringbuf.ErrClosed] after Close.
// An n outside 0 to Len returns another error, and the lease stays open. These errors
// change nothing. In the state [Failed] Commit works, but is not synced.
func (s Lease[T]) Commit(n int) error {
	if s.lane == nil {
		return ringbuf.ErrLeaseOver
	}
	if n < 0 || n > s.n {
		return fmt.Errorf("spill: commit: n is %d, want 0 to %d", n, s.n)
	}
	return s.lane.commit(s.id, n)
}

// Release ends the lease and leaves all its messages at the front of the lane, in the same
// order. It does nothing if the lease is over, so it may be deferred.
func (s Lease[T]) Release() { _ = s.Commit(0) }

func (l *lane) commit(id uint64, n int) error {
	c := l.c
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case l.err != nil:
		return l.err
	case !l.leased || l.lease != id || l.ends == nil:
		return ringbuf.ErrLeaseOver
	}
	l.giveUpLocked(n)
	l.leased, l.ends = false, nil
	l.tellLocked()
	return nil
}

// giveUpLocked moves the lane's head past the first n leased messages.
func (l *lane) giveUpLocked(n int) {
	if n == 0 {
		return
	}
	l.c.advanceLocked(l, l.ends[n-1], n)
	if l.reader.trim(l.head); len(l.reader.chunks) > 0 && l.reader.chunks[0].err == nil {
		l.oldest = time.Unix(0, l.reader.chunks[0].c.when)
	}
}

// advanceLocked moves a lane's head past n committed messages.
func (c *core) advanceLocked(l *lane, head uint64, n int) {
	l.head = head
	l.count -= n
	c.drained += n
	if !l.dirty {
		if len(c.dirty) == 0 {
			c.since = time.Now()
			c.signal()
		}
		l.dirty = true
		c.dirty = append(c.dirty, l)
	}
	if c.drained >= c.cfg.CheckpointCount || len(c.queue) > 0 || c.state == NoSpace {
		c.signal()
	}
}

// record is an encoded message.
type record struct {
	seq  uint64
	data []byte
}

// take leases up to n messages. If it returns no message, no error and no channel, the
// caller calls it again.
func (l *lane) take(n int) (recs []record, id uint64, changed <-chan struct{}, err error) {
	c := l.c
	c.mu.Lock()
	switch {
	case l.err != nil:
		c.mu.Unlock()
		return nil, 0, nil, l.err
	case l.leased:
		err = ringbuf.ErrLeased
	case l.head == l.tail:
		err = ringbuf.ErrEmpty
	}
	if err != nil {
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		l.waiting++
		changed = l.changed
		c.mu.Unlock()
		return nil, 0, changed, err
	}
	l.leased, l.ends = true, nil
	l.lease++
	id = l.lease
	head, tail := l.head, l.tail
	c.mu.Unlock()

	l.reader.trim(head)
	recs, err = l.read(head, tail, n, math.MaxInt64)

	c.mu.Lock()
	if l.ends == nil {
		l.leased = false
		l.tellLocked()
	}
	c.mu.Unlock()
	return recs, id, nil, err
}

// read reads up to n messages from head on, and stops after limit bytes. The caller has set
// leased. read appends the messages' ends to l.ends.
func (l *lane) read(head, tail uint64, n int, limit int64) (recs []record, err error) {
	c := l.c
	recs, pos, lost, err := l.reader.take(c.store, l.name, head, tail, n, limit)
	for i := range lost {
		c.setAside(&lost[i])
	}

	c.mu.Lock()
	for _, d := range lost {
		gone := int(d.Last - d.First + 1)
		l.count -= gone
		l.held -= gone
		c.count -= gone
		c.damaged += uint64(gone)
	}
	switch {
	case err != nil && l.err == nil:
		c.setStateLocked(Failed, &FailedError{Op: "read", Err: err})
		err = &FailedError{Op: "read", Err: err}
		c.signal() // messages that were put but not written are refused
	case l.err != nil:
		recs, err = nil, l.err
	default:
		for _, r := range recs {
			l.ends = append(l.ends, r.seq+1)
		}
		switch {
		case len(l.ends) == 0:
			c.advanceLocked(l, pos, 0)
		case len(recs) < n: // damaged messages are given up together with the message before them
			l.ends[len(l.ends)-1] = max(l.ends[len(l.ends)-1], pos)
		}
	}
	c.mu.Unlock()
	if err != nil {
		c.tellState()
	}
	if c.onDamage != nil {
		for _, d := range lost {
			c.onDamage(d.Damage)
		}
	}
	return recs, err
}

// loss is damage that was found while reading, and the bytes that remain of it.
type loss struct {
	Damage

	data []byte
}

func (c *core) setAside(d *loss) {
	if len(d.data) == 0 || c.dir == nil {
		return
	}
	name := filepath.Join(damagedDir, fmt.Sprintf("%s-%d.chunk", plain(d.Lane), d.First))
	if err := keep(filepath.Join(c.cfg.Dir, name), d.data); err != nil {
		d.Reason += "; not set aside: " + err.Error()
		return
	}
	d.File = name
	_ = logDamage(c.cfg.Dir, []Damage{d.Damage}) // WithDamage reports the damage as well
}

// trim drops chunks before message head.
func (r *reader) trim(head uint64) {
	for len(r.chunks) > 0 {
		k := r.chunks[0]
		if k.err == nil && k.c.end() > head || k.err != nil && (len(r.chunks) == 1 || r.chunks[1].seq > head) {
			return
		}
		r.chunks = r.chunks[1:]
	}
}

// take reads up to n messages from head on, skips damaged ones, and returns its position
// after that. lost has the damage that was not known before. It stops after limit bytes.
func (r *reader) take(s store, lane string, head, tail uint64, n int, limit int64) (recs []record, pos uint64, lost []loss, err error) {
	p := pass{r: r, store: s, lane: lane, pos: head, tail: tail, n: n, limit: limit, more: true}
	for i := 0; !p.full() && p.pos < tail; {
		last := i+1 >= len(r.chunks)
		if i == len(r.chunks) || r.chunks[i].err != nil && last {
			if p.more && len(p.recs) > 0 && i < len(r.chunks) {
				break // the next chunk shows where the damage ends; that can wait
			}
			if p.more {
				if err := p.fill(); err != nil {
					return nil, p.pos, p.lost, err
				}
				continue
			}
		}
		if i == len(r.chunks) {
			p.lose(tail-1, nil, "missing")
			break
		}
		if p.read(i) {
			i++
		}
	}
	return p.recs, p.pos, p.lost, nil
}

// pass is one run of reader.take.
type pass struct {
	r     *reader
	store store
	lane  string
	tail  uint64
	more  bool // there may be more chunks after those of r

	n     int   // maximum number of messages
	limit int64 // bytes left to read

	pos  uint64 // sequence number of the next message
	recs []record
	lost []loss
}

// fill reads chunks after those that the reader has.
func (p *pass) fill() error {
	got, err := p.store.read(nil, p.lane, p.r.seq, readLimit)
	if err != nil {
		return err
	}
	p.more = false
	for _, g := range got {
		if g.seq >= p.tail {
			break // the chunk is from a failed write
		}
		p.more = true
		k := readChunk{seq: g.seq}
		if k.c, k.err = parseChunk(g.data); k.err == nil && (k.c.name != p.lane || k.c.first != g.seq) {
			k.err = fmt.Errorf("says that it is lane %q, message %d", k.c.name, k.c.first)
		}
		if k.err != nil {
			k.c = chunk{data: g.data}
			p.r.seq = g.seq + 1
		} else {
			p.r.seq = k.c.end()
			k.froms = k.c.offsets()
		}
		p.r.chunks = append(p.r.chunks, k)
	}
	return nil
}

// lose skips the messages up to last, and records them as lost.
func (p *pass) lose(last uint64, data []byte, reason string) {
	first := p.pos
	p.pos = last + 1
	for _, k := range p.r.lost {
		if k.first <= first && last <= k.last {
			return
		}
	}
	p.r.lost = append(p.r.lost, span{first, last})
	p.lost = append(p.lost, loss{Damage{Lane: p.lane, First: first, Last: last, Offset: -1, Page: -1, Reason: reason}, data})
}

func (p *pass) full() bool { return len(p.recs) == p.n || p.limit <= 0 }

// read reads messages of chunk i until the pass is full, and reports whether the chunk has
// ended.
func (p *pass) read(i int) bool {
	k := &p.r.chunks[i]
	if k.seq > p.pos {
		p.lose(k.seq-1, nil, "missing")
	}
	if k.err != nil {
		end := p.tail
		if i+1 < len(p.r.chunks) {
			end = p.r.chunks[i+1].seq
		}
		if end > p.pos {
			p.lose(end-1, k.c.data, k.err.Error())
		}
		return true
	}
	for ; p.pos < k.c.end(); p.pos++ {
		if p.full() || p.pos >= p.tail {
			return false
		}
		at := int(p.pos - k.c.first)
		rec, _, err := k.c.record(at, k.froms[at])
		if err != nil {
			p.lose(p.pos, rec, err.Error())
			p.pos-- // the loop goes on
			continue
		}
		p.recs = append(p.recs, record{p.pos, rec})
		p.limit -= int64(len(rec))
	}
	return true
}
