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

// A Spill is a set of lanes on disk with one budget. All its methods may be called by many
// goroutines at once.
type Spill[T any] struct {
	c     *core
	codec ringbuf.Codec[T]
}

// An Option hands a collaborator to [Open].
type Option interface{ apply(*core) }

type option func(*core)

func (o option) apply(c *core) { o(c) }

// WithState has f called after each change of state, with the state's error: one call at a
// time, in the order of the changes. It is called by a goroutine that writes, which may be
// that of a Put or a Flush, or by one whose reading fails; it must not block, nor call any
// method of the Spill but Stats.
func WithState(f func(State, error)) Option { return option(func(c *core) { c.onState = f }) }

// WithDamage has f called for damage that a Lease finds, in its goroutine. What Open finds
// is in its [Recovery].
func WithDamage(f func(Damage)) Option { return option(func(c *core) { c.onDamage = f }) }

// Open opens the spill in cfg.Dir, and makes it if there is none. It reads all that is
// held, and says what it found; that takes a second for each GB or so, more from a slow
// disk. It makes a new file if the structure of the old one is damaged, which it keeps.
//
// If the directory cannot be written to but what is there can be read, the spill is in
// the state [Failed] from the beginning: messages can be leased, and none put. Otherwise
// it fails, as with [ErrLocked], and has changed nothing that is held.
//
// The codec must not be nil. A value that it decodes may point into what it is given, for
// as long as it likes.
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
	go c.run() // ends with Close
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
		fileSize:  s.size(),
	}
	for _, o := range opts {
		o.apply(c)
	}
	return c
}

// load takes over what was found on the disk.
func (c *core) load(m *image) {
	// Numbers of writes that were tried and failed before must not come again.
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

// Lane returns the lane with the given name, 1 to 255 bytes, and makes it if need be; a
// name that is too long is a bug of the caller and panics. The name is what finds the
// lane after a restart: that of a source, or of a source and a key.
//
// Of lanes that hold nothing only some thousand are kept. A caller that keeps a lane
// must be ready for [ringbuf.ErrDropped] and ask Lane again. After Close the lane it
// returns is closed as well.
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

// Stats is what a [Spill] holds, at one instant, and what it did since Open.
type Stats struct {
	State    State
	Err      error  // why State is NoSpace or Failed
	Count    int    // messages held: confirmed and not committed
	Pending  int    // messages of Puts that are not confirmed yet
	Drained  int    // committed messages that are leased again after a crash now
	Bytes    int64  // what counts for Config.MaxBytes
	FileSize int64  // bytes of the file; it is made shorter only by an Open that finds it empty
	Lanes    int    // lanes that hold messages
	Waiting  int    // Puts that wait for room now
	Blocked  uint64 // Puts that had to wait, ever
	Refused  uint64 // calls that ended with ringbuf.ErrFull or ringbuf.ErrTooLarge, ever
	Damaged  uint64 // messages that a Lease found damaged, ever
	Writes   uint64 // transactions, each of which syncs twice
}

// Stats goes through all lanes under the Spill's lock.
func (s *Spill[T]) Stats() Stats {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	st := Stats{
		State: c.state, Err: c.err, Drained: c.drained, Bytes: c.bytes, FileSize: c.fileSize,
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

// Flush waits until everything that was put and committed before it is synced. The error
// is that of ctx, an [ErrFailed], an [ErrNoSpace] from a disk that has no room even for
// what was drained, or [ringbuf.ErrClosed].
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

// Close ends the spill. Messages whose Put waits for its sync, and committed positions,
// are still synced; Puts that wait for room, Leases that wait, and all later calls return
// [ringbuf.ErrClosed], and open leases are over. It waits for the disk, and for no
// caller. The error is that of closing the file, or an [ErrFailed] or [ErrNoSpace] if what
// was committed could not be synced. It may be called again.
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

// A Lane is one ordered queue of a [Spill]. Several goroutines may put and lease, but each
// Put's messages are in order only among themselves, so for order there should be one
// producer.
type Lane[T any] struct {
	l     *lane
	codec ringbuf.Codec[T]
}

// Name returns the name that [Spill.Lane] was asked for.
func (l *Lane[T]) Name() string { return l.l.name }

// Len returns how many messages the lane holds: confirmed and not committed, leased ones
// included.
func (l *Lane[T]) Len() int {
	l.l.c.mu.Lock()
	defer l.l.c.mu.Unlock()
	return l.l.count
}

// LaneStats is what a [Lane] holds, at one instant.
type LaneStats struct {
	Count   int       // as [Lane.Len]
	Pending int       // messages of Puts that are not confirmed yet
	Bytes   int64     // what of Config.MaxBytes it fills
	Oldest  time.Time // about when the oldest message came, by the wall clock, or before; zero if Count is 0
}

// Empty says whether nothing is held, and nothing on its way.
func (s LaneStats) Empty() bool { return s.Count == 0 && s.Pending == 0 }

// Stats returns what the lane holds.
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

// Put places vs behind what the lane holds, in order, and returns when they are synced:
// they then survive a crash of the process, of the machine and of its power. It waits
// while the spill or the lane's share is full, and while the disk has no room. It returns
// how many are synced; fewer than all only with an error: that of ctx, an [ErrFailed],
// [ringbuf.ErrTooLarge], [ringbuf.ErrClosed] or [ringbuf.ErrDropped]. Messages of other
// callers may come between those of one Put.
//
// A ctx that is done on entry places nothing. If it ends while messages are being synced,
// those may be held although they are not among those that Put returns, and likewise
// after an ErrFailed: such a message may be handled twice, and is never lost.
//
// Waiting Puts are served oldest first. A Put whose context cannot end, and BatchDelay is 0,
// syncs in its own goroutine if nobody else does just then, which is faster.
func (l *Lane[T]) Put(ctx context.Context, vs ...T) (n int, err error) {
	return l.put(ctx, true, vs)
}

// TryPut is [Lane.Put] without waiting for room: it places as many of vs as fit and
// returns [ringbuf.ErrFull] if the next one does not, of the kind [ErrNoSpace] if it is
// the disk. It does wait for the sync.
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

// Append places vs like [Lane.TryPut], but all or none, and does not wait for the sync:
// done is called once they are synced, with nil, or have failed, with the error, by the
// goroutine that writes. Nothing is confirmed before. done must not block, nor call Close.
// Calls of done come in the order of the calls of Append.
//
// If Append itself fails, done is not called. [ringbuf.ErrFull] may also mean that the
// disk does not keep up: two batches are on their way. After a batch that failed, what was
// appended behind it has failed as well, so that a caller can append all again in order.
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

// encoding is where messages are encoded before a lock is taken.
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

// encodeMax is how much is encoded at a time.
const encodeMax = 32 << 20

// encode encodes the first messages of vs, up to one that can never fit, which is the error.
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
			if w != nil { // the next one may place while this one waits for its sync
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
