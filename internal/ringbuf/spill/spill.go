// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/internal/diskfile"
	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// A Spill is a set of lanes on disk with one budget. All methods are safe for concurrent
// use.
type Spill[T any] struct {
	c     *core
	codec ringbuf.Codec[T]
}

// An Option gives [Open] a callback.
type Option interface{ apply(*core) }

type option func(*core)

func (o option) apply(c *core) { o(c) }

// WithState calls f after each change of state, with the state's error: one call at a time,
// in the order of the changes. The caller is a goroutine that writes, which may be the
// goroutine of a Put or a Flush, or one whose read failed. f must not block, and must not
// call any method of the Spill except Stats.
func WithState(f func(State, error)) Option { return option(func(c *core) { c.onState = f }) }

// WithDamage calls f for damage that a Lease finds, in the Lease's goroutine. Damage that
// Open finds is in its [Recovery].
func WithDamage(f func(Damage)) Option { return option(func(c *core) { c.onDamage = f }) }

// Open opens the spill in cfg.Dir, or creates it. It reads all held messages and reports
// the result in Recovery. That takes about a second per GB, more on a slow disk. If the
// structure of the file is damaged, Open makes a new file and keeps the old one.
//
// If the directory can be read but not written, the spill starts in the state [Failed]:
// messages can be leased, but not put. Otherwise Open fails, for example with [ErrLocked],
// and changes no held message.
//
// The codec must not be nil. A decoded value may point into the bytes that the codec was
// given, without a time limit.
func Open[T any](cfg Config, codec ringbuf.Codec[T], opts ...Option) (*Spill[T], Recovery, error) {
	c, rec, err := openCore(cfg, opts)
	if err != nil {
		return nil, rec, err
	}
	return &Spill[T]{c: c, codec: codec}, rec, nil
}

func openCore(cfg Config, opts []Option) (_ *core, rec Recovery, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, rec, err
	}
	cfg = cfg.withDefaults()
	if err := diskfile.MakeDir(cfg.Dir); err != nil {
		return nil, rec, fmt.Errorf("spill: open %s: %w", cfg.Dir, err)
	}
	dir, err := diskfile.LockDir(cfg.Dir)
	if errors.Is(err, diskfile.ErrLocked) {
		err = ErrLocked
	}
	if err != nil {
		return nil, rec, fmt.Errorf("spill: open %s: %w", cfg.Dir, err)
	}
	store, img, rec, readOnly, err := recoverDir(cfg)
	if err != nil {
		return nil, rec, fmt.Errorf("spill: open %s: %w", cfg.Dir, errors.Join(err, dir.Close()))
	}
	c := newCore(cfg, store, opts)
	c.dir = dir
	c.load(img)
	if readOnly != nil {
		c.state, c.err = Failed, &FailedError{Op: "open", Err: readOnly}
	}
	go c.run() // the goroutine ends with Close
	return c, rec, nil
}

func newCore(cfg Config, s store, opts []Option) *core {
	c := &core{
		cfg:       cfg,
		laneCount: max(1, int(cfg.LaneShare*float64(cfg.MaxCount))),
		laneBytes: int64(cfg.LaneShare * float64(cfg.MaxBytes)),
		store:     s,
		wake:      make(chan struct{}, 1),
		stopped:   make(chan struct{}),
		lanes:     map[string]*lane{},
	}
	for _, o := range opts {
		o.apply(c)
	}
	return c
}

// load fills the lanes from the image of the file.
func (c *core) load(m *image) {
	// Numbers of failed writes must not come again.
	c.commit = (m.commit>>20 + 1) << 20
	for name, i := range m.lanes {
		l := &lane{
			c: c, name: name, head: i.head, synced: i.head, tail: i.tail,
			count: i.count, held: i.count, bytes: i.bytes, oldest: time.Unix(0, i.oldest),
			reader: reader{seq: i.chunk, lost: i.lost},
		}
		c.lanes[name] = l
		c.count += l.count
		c.bytes += l.bytes
		c.weighLocked(l)
	}
}

// Lane returns the lane with the given name, 1 to 255 bytes, and creates it if needed. A
// longer or empty name is a bug of the caller and panics. The name identifies the lane
// after a restart: it is the name of a source, or of a source and a key.
//
// Only about a thousand empty lanes are kept. A caller that keeps a lane must be ready for
// [ringbuf.ErrDropped], and call Lane again. After Close, Lane returns a closed lane.
func (s *Spill[T]) Lane(name string) *Lane[T] {
	if name == "" || len(name) > MaxName {
		panic(fmt.Sprintf("spill: lane: the name has %d bytes, want 1 to %d", len(name), MaxName))
	}
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	return &Lane[T]{l: s.c.laneLocked(name), codec: s.codec}
}

// Lanes yields the lanes that hold messages at the time of the call, in no order. No lock
// is held while the loop body runs.
func (s *Spill[T]) Lanes() iter.Seq[*Lane[T]] {
	return func(yield func(*Lane[T]) bool) {
		var all []*Lane[T]
		s.c.mu.Lock()
		for _, l := range s.c.lanes {
			if l.count > 0 {
				all = append(all, &Lane[T]{l: l, codec: s.codec})
			}
		}
		s.c.mu.Unlock()
		for _, l := range all {
			if !yield(l) {
				return
			}
		}
	}
}

// Stats is the content of a [Spill] at one instant, and its counters since Open.
type Stats struct {
	State   State
	Err     error  // the reason if State is NoSpace or Failed
	Count   int    // held messages: confirmed and not committed
	Pending int    // messages of unconfirmed Puts
	Drained int    // committed messages that a crash now would bring back
	Bytes   int64  // bytes that count for Config.MaxBytes
	Lanes   int    // lanes that hold messages
	Waiting int    // Puts that wait for room now
	Blocked uint64 // Puts that had to wait for room
	Refused uint64 // calls that ended with ringbuf.ErrFull or ringbuf.ErrTooLarge
	Damaged uint64 // messages that a Lease found damaged
	Writes  uint64 // transactions, each of which syncs twice
}

// Stats returns the statistics. It walks all lanes under the Spill's lock.
func (s *Spill[T]) Stats() Stats {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	st := Stats{
		State: c.state, Err: c.err, Drained: c.drained, Bytes: c.bytes,
		Waiting: len(c.queue), Blocked: c.blocked, Refused: c.refused, Damaged: c.damaged, Writes: c.writes,
	}
	for _, l := range c.lanes {
		st.Count += l.count
		if l.count > 0 {
			st.Lanes++
		}
	}
	for _, b := range []*batch{c.open, c.writing} {
		if b != nil {
			st.Pending += b.count
		}
	}
	return st
}

// Flush waits until all earlier puts and commits are synced. The error is that of ctx, an
// [ErrFailed], an [ErrNoSpace] if the disk has no space even for drained positions, or
// [ringbuf.ErrClosed].
func (s *Spill[T]) Flush(ctx context.Context) error {
	c := s.c
	if err := ctx.Err(); err != nil {
		return err
	}
	f := &flush{done: make(chan struct{})}
	c.mu.Lock()
	switch {
	case c.closing:
		c.mu.Unlock()
		return ringbuf.ErrClosed
	case c.state == Failed:
		err := c.err
		c.mu.Unlock()
		return err
	}
	c.flushes = append(c.flushes, f)
	c.mu.Unlock()
	if ctx.Done() == nil {
		c.help()
	} else {
		c.signal()
	}
	select {
	case <-f.done:
		return f.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close ends the spill. Messages whose Put waits for its sync, and committed positions, are
// still synced. Puts that wait for room, Leases that wait, and all later calls return
// [ringbuf.ErrClosed]. Open leases are over. Close waits for the disk, but for no caller.
// The error is that of closing the file, or an [ErrFailed] or [ErrNoSpace] if committed
// positions could not be synced. Close may be called again.
func (s *Spill[T]) Close() error { return s.c.close() }

func (c *core) close() error {
	c.mu.Lock()
	if c.closing {
		c.mu.Unlock()
		<-c.stopped
		return nil
	}
	c.closing = true
	for _, l := range c.lanes {
		l.err = ringbuf.ErrClosed
		l.tellLocked()
	}
	c.wakePutsLocked()
	c.signal()
	c.mu.Unlock()
	<-c.stopped
	c.mu.Lock()
	var err error
	if c.drained > 0 {
		err = c.err
	}
	c.state, c.err = Closed, ringbuf.ErrClosed
	c.mu.Unlock()
	err = errors.Join(err, c.store.close())
	if c.dir != nil {
		err = errors.Join(err, c.dir.Close())
	}
	return err
}

// A Lane is one ordered queue of a [Spill]. Several goroutines may put and lease. Only the
// messages of one Put keep their order, so for order there should be one producer.
type Lane[T any] struct {
	l     *lane
	codec ringbuf.Codec[T]
}

// Name returns the lane's name.
func (l *Lane[T]) Name() string { return l.l.name }

// Len returns the number of held messages: confirmed and not committed, leased ones
// included.
func (l *Lane[T]) Len() int {
	l.l.c.mu.Lock()
	defer l.l.c.mu.Unlock()
	return l.l.count
}

// LaneStats is the content of a [Lane] at one instant.
type LaneStats struct {
	Count   int       // as [Lane.Len]
	Pending int       // messages of unconfirmed Puts
	Bytes   int64     // bytes of Config.MaxBytes that the lane uses
	Oldest  time.Time // about the wall time at which the oldest message came, or earlier; zero if Count is 0
}

// Empty reports whether no message is held or pending.
func (s LaneStats) Empty() bool { return s.Count == 0 && s.Pending == 0 }

// Stats returns the lane's statistics.
func (l *Lane[T]) Stats() LaneStats {
	c := l.l.c
	c.mu.Lock()
	defer c.mu.Unlock()
	st := LaneStats{Count: l.l.count, Bytes: l.l.bytes}
	if st.Count > 0 {
		st.Oldest = l.l.oldest
	}
	for _, b := range []*batch{c.open, c.writing} {
		if b != nil && b.of[l.l] != nil {
			st.Pending += b.of[l.l].count
		}
	}
	return st
}

// Put appends vs to the lane, in order, and returns when they are synced: they then survive
// a crash of the process, of the machine and of its power. Put waits while the spill or the
// lane's share is full, and while the disk has no space. It returns the number of synced
// messages. If that is less than all, the error is that of ctx, an [ErrFailed],
// [ringbuf.ErrTooLarge], [ringbuf.ErrClosed] or [ringbuf.ErrDropped]. Messages of other
// callers may come between those of one Put.
//
// If ctx is done on entry, Put places nothing. If ctx ends during a sync, or after an
// ErrFailed, more messages may be held than Put returns. Such a message may be handled
// twice, and is never lost.
//
// Waiting Puts are served oldest first. If the context cannot end and BatchDelay is 0, Put
// syncs in its own goroutine unless another goroutine is the writer; that is faster.
func (l *Lane[T]) Put(ctx context.Context, vs ...T) (n int, err error) {
	return l.put(ctx, true, vs)
}

// TryPut is [Lane.Put] without waiting for room. It places as many of vs as fit and returns
// [ringbuf.ErrFull] if the next one does not fit, or [ErrNoSpace] if the disk is full. It
// waits for the sync.
func (l *Lane[T]) TryPut(vs ...T) (n int, err error) {
	return l.put(context.Background(), false, vs)
}

func (l *Lane[T]) put(ctx context.Context, wait bool, vs []T) (n int, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	e := encodings.Get().(*encoding) //nolint:forcetypeassert // New makes nothing else
	defer e.free()
	for n < len(vs) {
		_, tooLarge := encode(e, l, vs[n:])
		r := request{lane: l.l, lens: e.lens, data: e.data, wait: wait}
		r.inline = ctx.Done() == nil && l.l.c.cfg.BatchDelay == 0
		placed, err := l.l.c.put(ctx, r)
		if n += placed; err != nil {
			return n, err
		}
		if tooLarge != nil {
			return n, tooLarge
		}
	}
	return n, nil
}

// Append places vs like [Lane.TryPut], but all or none, and does not wait for the sync. The
// goroutine that writes calls done: with nil once vs are synced, or with an error. Nothing
// is confirmed before. done must not block, and must not call Close. The calls of done come
// in the order of the calls of Append.
//
// If Append itself fails, done is not called. [ringbuf.ErrFull] may also mean that the disk
// is too slow: a batch is being written, and the next one is full. If a batch fails, everything
// that was appended after it fails as well, so the caller can append all of it again in order.
func (l *Lane[T]) Append(done func(error), vs ...T) error {
	e := encodings.Get().(*encoding) //nolint:forcetypeassert // New makes nothing else
	defer e.free()
	if len(vs) == 0 {
		return errors.New("spill: append: there are no messages, want at least 1")
	}
	k, err := encode(e, l, vs)
	if err == nil && k < len(vs) {
		err = l.l.tooLarge(int64(len(e.data)))
	}
	if err != nil {
		return err
	}
	n, _, _, err := l.l.c.place(request{lane: l.l, lens: e.lens, data: e.data, all: true, done: done}, nil)
	if n > 0 {
		return nil
	}
	l.l.c.refuse()
	return err
}

// encoding is a buffer in which messages are encoded before a lock is taken.
type encoding struct {
	data []byte
	lens []uint32
}

var encodings = sync.Pool{New: func() any { return new(encoding) }}

func (e *encoding) free() {
	if cap(e.data) <= 4<<20 {
		encodings.Put(e)
	}
}

// encodeMax is about how many bytes are encoded at a time.
const encodeMax = 32 << 20

// encode encodes the first messages of vs. It stops at a message that can never fit, with
// an error.
func encode[T any](e *encoding, l *Lane[T], vs []T) (n int, err error) {
	e.data, e.lens = e.data[:0], e.lens[:0]
	limit := min(l.l.c.cfg.MaxBytes, MaxMessage)
	for _, v := range vs {
		from := len(e.data)
		if from > encodeMax {
			break
		}
		e.data = l.codec.Append(e.data, v)
		size := len(e.data) - from
		if size > math.MaxInt32 || messageCost(l.l.name, size) > limit {
			e.data = e.data[:from]
			return n, l.l.tooLarge(messageCost(l.l.name, size))
		}
		e.lens = append(e.lens, uint32(size))
		n++
	}
	return n, nil
}

func (l *lane) tooLarge(size int64) error {
	l.c.mu.Lock()
	l.c.refused++
	l.c.mu.Unlock()
	return &TooLargeError{Lane: l.name, Size: size, Limit: min(l.c.cfg.MaxBytes, MaxMessage)}
}

func (c *core) refuse() {
	c.mu.Lock()
	c.refused++
	c.mu.Unlock()
}

// put places messages and waits until they are synced.
func (c *core) put(ctx context.Context, r request) (n int, err error) {
	var w *waiter
	defer func() {
		if w != nil {
			c.leave(w)
		}
	}()
	for len(r.lens) > 0 {
		k, b, why, err := c.place(r, w)
		if k > 0 {
			if w != nil { // the next Put may place while this one waits for its sync
				c.leave(w)
				w = nil
			}
			if r.inline {
				c.help()
			}
			select {
			case <-b.done:
			case <-ctx.Done():
				return n, ctx.Err()
			}
			if b.err == nil {
				n += k
				for _, size := range r.lens[:k] {
					r.data = r.data[size:]
				}
				r.lens = r.lens[k:]
				continue
			}
			why, err = noRoom, b.err
			if !errors.Is(err, ErrNoSpace) {
				return n, err
			}
		}
		if why == fits {
			return n, err
		}
		if !r.wait && why != busy {
			c.refuse()
			return n, err
		}
		if w == nil {
			c.mu.Lock()
			w = c.enterLocked(r.lane, why == noLane)
			if why != busy {
				c.blocked++
			}
			c.mu.Unlock()
		}
		select {
		case <-w.ch:
		case <-ctx.Done():
			return n, ctx.Err()
		}
	}
	return n, nil
}
