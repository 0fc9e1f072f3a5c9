// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"os"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// State says what a [Spill] can do.
type State uint8

const (
	// Ready takes messages in and gives them out.
	Ready State = iota
	// NoSpace gives messages out. The disk, or the file's limit, had no room for more. It
	// tries again when messages were drained, and each second.
	NoSpace
	// Failed gives messages out, and takes none in until the directory is opened anew. What
	// was drained meanwhile may come again then.
	Failed
	// Closed does nothing.
	Closed
)

// String is the state as an operator sees it.
func (s State) String() string {
	return [...]string{"ready", "no space", "failed", "closed"}[s]
}

const (
	retryDelay = time.Second // between tries to find room
	idleLanes  = 1024        // empty lanes whose position is kept
)

// core is a Spill of bytes.
type core struct {
	cfg       Config
	laneCount int
	laneBytes int64
	store     store
	dir       *os.File // has the lock
	onState   func(State, error)
	onDamage  func(Damage)

	wake    chan struct{} // capacity 1: the writer is to look again
	stopped chan struct{} // closed when the writer has ended

	mu       sync.Mutex
	state    State
	err      error    // why state is not Ready
	untold   []change // of state, for onState, oldest first
	telling  bool     // somebody calls onState
	lanes    map[string]*lane
	idle     int   // lanes that hold nothing
	count    int   // messages held or on their way, committed ones until the next checkpoint included
	bytes    int64 // what all chunks cost
	open     *batch
	writing  *batch
	dirty    []*lane // lanes with commits that are not synced
	drained  int     // messages committed since the last checkpoint
	since    time.Time
	flushes  []*flush
	retryAt  time.Time
	stuck    bool // not even positions found room, until retryAt
	hungry   bool // somebody found no room while there was some to be synced
	closing  bool
	queue    []*waiter // Puts that wait for room, oldest first
	blocked  uint64
	refused  uint64
	damaged  uint64
	writes   uint64
	fileSize int64

	busy bool // somebody is the writer

	// The writer's own.
	commit uint64
	arena  []byte // where chunks are made
}

// A flush waits until what was committed before it is synced.
type flush struct {
	done chan struct{}
	err  error
}

// A waiter is a Put that waits for room.
type waiter struct {
	ch     chan struct{} // capacity 1: look again
	lane   *lane
	inLane bool // what is full is the lane's share
}

// lane is a Lane of bytes. Guarded by core.mu, but for the reader's part, which belongs
// to whoever has set leased.
type lane struct {
	c    *core
	name string
	err  error // why it takes no more calls, or nil

	head    uint64 // oldest message that is not committed
	tail    uint64 // the next message that is made durable
	synced  uint64 // head as of the last checkpoint
	count   int    // messages that can be leased
	held    int    // count, what is on its way, and what was committed since the last checkpoint
	bytes   int64
	oldest  time.Time
	idle    bool // it holds nothing
	dirty   bool // it has commits that are not synced
	going   bool // its position is being written
	waiting int  // calls that wait on it

	leased  bool
	lease   uint64
	ends    []uint64      // head after each leased message
	changed chan struct{} // closed when there is something new for a Lease; nil if none waits

	reader reader
}

// reader is where a lane's reading is.
type reader struct {
	seq    uint64 // where the next chunk begins, or later
	chunks []readChunk
	lost   []span // what is known to be damaged
}

type readChunk struct {
	seq   uint64 // of its key
	c     chunk
	err   error
	froms []int // where its messages begin
}

// batch is what is synced together. While it is core.open it is guarded by core.mu, then
// it is the writer's.
type batch struct {
	parcels []*parcel
	of      map[*lane]*parcel
	count   int
	bytes   int64
	since   time.Time
	done    chan struct{}
	err     error
	calls   []func(error)
}

// parcel is a lane's part of a batch.
type parcel struct {
	lane   *lane
	lens   []uint32 // of its messages
	data   []byte   // the messages, one after the other
	chunks []int    // how many messages each chunk has
	last   int      // bytes of the last chunk
	count  int
	bytes  int64
}

func (c *core) laneLocked(name string) *lane {
	l := c.lanes[name]
	if l == nil {
		l = &lane{c: c, name: name, head: 1, tail: 1, synced: 1, idle: true, reader: reader{seq: 1}}
		if c.closing {
			l.err = ringbuf.ErrClosed
			return l
		}
		c.lanes[name] = l
		c.idle++
	}
	return l
}

// full is why a message has no place.
type full uint8

const (
	fits   full = iota
	noRoom      // the bounds, or the disk
	noLane      // the lane's share
	busy        // two batches are on their way, or others wait longer
)

// request is what place is asked for: messages of a lane that lie one after the other in
// data.
type request struct {
	lane *lane
	lens []uint32
	data []byte
	wait bool        // it can wait for room, so it goes behind those that do
	all  bool        // all or none
	done func(error) // to call when they are synced, or nil

	inline bool // the caller calls help next
}

// place puts as many messages as fit into the open batch. If it places none, the error
// says why, and full whether it is worth waiting; w is the caller's waiter, if any.
func (c *core) place(r request, w *waiter) (n int, b *batch, why full, err error) {
	l := r.lane
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case l.err != nil:
		return 0, nil, fits, l.err
	case c.state == Failed:
		return 0, nil, fits, c.err
	case c.state == NoSpace:
		return 0, nil, noRoom, c.err
	case (r.wait || w != nil) && !c.firstLocked(l, w):
		return 0, nil, busy, ringbuf.ErrFull
	}
	b = c.open
	if b == nil {
		b = &batch{of: map[*lane]*parcel{}, done: make(chan struct{}), since: time.Now()}
	}
	if r.all {
		why = c.fitsLocked(l, b, len(r.lens), costOf(l, r.lens))
	}
	p := b.of[l]
	for from := uint32(0); n < len(r.lens) && why == fits; {
		rec := r.data[from : from+r.lens[n]]
		cost := int64(len(rec) + recordCost)
		fresh := p == nil || p.fresh(len(rec))
		if fresh {
			cost += chunkCost(l.name, chunkOverhead(l.name))
		}
		if !r.all {
			if why = c.fitsLocked(l, b, 1, cost); why != fits {
				break
			}
		}
		if p == nil {
			p = &parcel{lane: l, lens: make([]uint32, 0, len(r.lens)), data: make([]byte, 0, len(r.data))}
			b.of[l] = p
			b.parcels = append(b.parcels, p)
		}
		if fresh {
			p.chunks, p.last = append(p.chunks, 0), 0
		}
		p.chunks[len(p.chunks)-1]++
		p.last += len(rec) + recordCost
		p.lens, p.data = append(p.lens, r.lens[n]), append(p.data, rec...)
		p.count++
		p.bytes += cost
		l.held++
		l.bytes += cost
		c.count++
		c.bytes += cost
		b.count++
		b.bytes += cost
		from += r.lens[n]
		n++
	}
	if why != fits {
		err = ringbuf.ErrFull
	}
	if n == 0 {
		if why != busy && len(c.dirty) > 0 {
			c.hungry = true
			c.signal()
		}
		if w != nil {
			w.inLane = why == noLane
		}
		return 0, nil, why, err
	}
	if r.done != nil {
		b.calls = append(b.calls, r.done)
	}
	c.weighLocked(l)
	if c.open == nil || b.count >= c.cfg.BatchCount || b.bytes >= c.cfg.BatchBytes {
		c.open = b
		if !r.inline || c.busy {
			c.signal()
		}
	}
	return n, b, why, err
}

// firstLocked says whether no Put that waits goes before that of w on lane l. One that
// waits for its lane's share is in the way of its own lane alone.
func (c *core) firstLocked(l *lane, w *waiter) bool {
	for _, q := range c.queue {
		if q == w {
			return true
		}
		if !q.inLane || q.lane == l {
			return false
		}
	}
	return true
}

// fresh says whether the next message begins a chunk.
func (p *parcel) fresh(size int) bool {
	return len(p.chunks) == 0 || p.last+size+recordCost > chunkTarget
}

// costOf is the most that messages can cost.
func costOf(l *lane, lens []uint32) (cost int64) {
	for _, n := range lens {
		cost += int64(n) + recordCost + chunkCost(l.name, chunkOverhead(l.name))
	}
	return cost
}

// messageCost is the most that one message costs.
func messageCost(name string, size int) int64 {
	return int64(size) + recordCost + chunkCost(name, chunkOverhead(name))
}

func (c *core) fitsLocked(l *lane, b *batch, n int, cost int64) full {
	lone := l.held == 0 && n == 1 // a lane may always hold one message
	switch {
	case c.count+n > c.cfg.MaxCount || c.bytes+cost > c.cfg.MaxBytes:
		return noRoom
	case !lone && (l.held+n > c.laneCount || l.bytes+cost > c.laneBytes):
		return noLane
	case b.count > 0 && (b.count+n > c.cfg.BatchCount || b.bytes+cost > c.cfg.BatchBytes):
		return busy
	}
	return fits
}

func (c *core) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// wakePutsLocked lets Puts that wait look again.
func (c *core) wakePutsLocked() {
	for _, w := range c.queue {
		select {
		case w.ch <- struct{}{}:
		default:
		}
	}
}

func (c *core) enterLocked(l *lane, inLane bool) *waiter {
	w := &waiter{ch: make(chan struct{}, 1), lane: l, inLane: inLane}
	c.queue = append(c.queue, w)
	l.waiting++
	c.signal()
	w.ch <- struct{}{} // what came free since it looked must not be missed
	return w
}

func (c *core) leave(w *waiter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, q := range c.queue {
		if q == w {
			c.queue = append(c.queue[:i], c.queue[i+1:]...)
			w.lane.waiting--
			c.wakePutsLocked()
			return
		}
	}
}

// tell wakes the Leases that wait on the lane.
func (l *lane) tellLocked() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// weighLocked is called when a lane may have become empty, or is no longer.
func (c *core) weighLocked(l *lane) {
	if idle := l.held == 0 && l.bytes == 0; idle != l.idle {
		l.idle = idle
		if idle {
			c.idle++
		} else {
			c.idle--
		}
	}
}

// change is one of state.
type change struct {
	state State
	err   error
}

// setStateLocked changes the state. tellState follows, without the lock.
func (c *core) setStateLocked(s State, err error) {
	if c.state == s || c.state == Closed || c.state == Failed && s != Closed {
		return
	}
	c.state, c.err = s, err
	c.wakePutsLocked()
	if c.onState != nil {
		c.untold = append(c.untold, change{s, err})
	}
}

// tellState calls onState for all changes, unless somebody does: then that one goes on with them.
func (c *core) tellState() {
	c.mu.Lock()
	if c.telling {
		c.mu.Unlock()
		return
	}
	c.telling = true
	for len(c.untold) > 0 {
		n := c.untold[0]
		c.untold = c.untold[1:]
		c.mu.Unlock()
		c.onState(n.state, n.err)
		c.mu.Lock()
	}
	c.telling = false
	c.mu.Unlock()
}
