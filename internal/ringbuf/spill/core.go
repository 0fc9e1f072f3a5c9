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
	// NoSpace only gives messages out. The disk, or the file's limit, had no space for
	// more. The spill tries again after messages were drained, and each second.
	NoSpace
	// Failed only gives messages out, until the directory is opened again. Messages that
	// are drained in this state may come again then.
	Failed
	// Closed does nothing.
	Closed
)

// String returns the state for operators.
func (s State) String() string {
	return [...]string{"ready", "no space", "failed", "closed"}[s]
}

const (
	retryDelay = time.Second // time between tries to find space
	idleLanes  = 1024        // number of empty lanes whose position is kept
)

// core is a Spill without the codec: its messages are bytes.
type core struct {
	cfg       Config
	laneCount int
	laneBytes int64
	store     store
	dir       *os.File // the open directory, which holds the lock
	onState   func(State, error)
	onDamage  func(Damage)

	wake    chan struct{} // capacity 1: tells the writer to look again
	stopped chan struct{} // closed when the writer has ended

	mu      sync.Mutex
	state   State
	err     error    // the reason if state is not Ready
	untold  []change // changes of state that onState must still get, oldest first
	telling bool     // a goroutine is calling onState
	lanes   map[string]*lane
	idle    int   // number of lanes that hold nothing
	count   int   // messages held or in a batch, and committed ones until the next checkpoint
	bytes   int64 // cost of all chunks
	open    *batch
	writing *batch
	dirty   []*lane // lanes with unsynced commits
	drained int     // messages committed since the last checkpoint
	since   time.Time
	flushes []*flush
	retryAt time.Time
	stuck   bool // not even positions found space; until retryAt
	hungry  bool // a call found no room while commits were unsynced
	closing bool
	queue   []*waiter // Puts that wait for room, oldest first
	blocked uint64
	refused uint64
	damaged uint64
	writes  uint64
	spare   []byte // buffer for the messages of a parcel, or nil

	busy bool // a goroutine is the writer now

	// commit and arena are used by the writer only.
	commit uint64
	arena  []byte // memory in which chunks are built
}

// A flush waits until everything that was committed before it is synced.
type flush struct {
	done chan struct{}
	err  error
}

// A waiter is a Put that waits for room.
type waiter struct {
	ch     chan struct{} // capacity 1: tells the Put to look again
	lane   *lane
	inLane bool // the lane's share is full, not the spill
}

// lane is a Lane without the codec. It is guarded by core.mu, except for reader, which
// belongs to the call that has set leased.
type lane struct {
	c    *core
	name string
	err  error // why the lane takes no more calls, or nil

	head    uint64 // sequence number of the oldest uncommitted message
	tail    uint64 // sequence number of the next message that is made durable
	synced  uint64 // head as of the last checkpoint
	count   int    // number of messages that can be leased
	held    int    // count, messages in batches, and messages committed since the last checkpoint
	bytes   int64
	oldest  time.Time
	idle    bool // the lane holds nothing
	dirty   bool // the lane has unsynced commits
	going   bool // the lane's position is being written
	waiting int  // number of calls that wait on the lane

	leased  bool
	lease   uint64
	ends    []uint64      // the head that follows each leased message
	changed chan struct{} // closed when a waiting Lease should look again; nil if none waits

	reader reader
}

// reader is the position at which a lane is read, and chunks that were read.
type reader struct {
	seq    uint64 // lower limit of the sequence number at which the next chunk begins
	chunks []readChunk
	lost   []span // known damaged messages
}

type readChunk struct {
	seq   uint64 // sequence number in the chunk's key
	c     chunk
	err   error
	froms []int // offsets of the chunk's messages
}

// batch is a group of messages that are synced together. While a batch is core.open,
// core.mu guards it; then it belongs to the writer.
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
	lens   []uint32 // length of each message
	data   []byte   // the messages, one after the other
	chunks []int    // number of messages in each chunk
	last   int      // bytes in the last chunk
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

// full says why a message does not fit.
type full uint8

const (
	fits   full = iota
	noRoom      // the limits of the spill, or the disk
	noLane      // the lane's share is full
	busy        // the open batch is full, or other Puts wait longer
)

// request is the input of place: messages of a lane, which lie one after the other in data.
type request struct {
	lane *lane
	lens []uint32
	data []byte
	wait bool        // the call can wait for room, so waiting Puts go first
	all  bool        // place all messages or none
	done func(error) // called when the messages are synced; may be nil

	inline bool // the caller calls help after place
}

// place adds as many messages as fit to the open batch. If it adds fewer than all, or none, err
// is the reason. Waiting makes sense if why is not fits. w is the caller's waiter, or nil.
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
			p = &parcel{lane: l, lens: make([]uint32, 0, len(r.lens)), data: c.takeSpareLocked(len(r.data))}
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

// takeSpareLocked returns an empty buffer for n bytes: the one of an earlier parcel if it suits.
func (c *core) takeSpareLocked(n int) []byte {
	b := c.spare
	if cap(b) < n {
		return make([]byte, 0, n)
	}
	c.spare = nil
	return b[:0]
}

// keepSpareLocked keeps the buffer of a batch that is written.
func (c *core) keepSpareLocked(b *batch) {
	for _, p := range b.parcels {
		if n := cap(p.data); n > cap(c.spare) && int64(n) <= 2*c.cfg.BatchBytes {
			c.spare = p.data
		}
		p.data = nil
	}
}

// firstLocked reports whether no waiting Put comes before w on lane l. A Put that waits for
// its lane's share only blocks its own lane.
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

// fresh reports whether the next message begins a new chunk.
func (p *parcel) fresh(size int) bool {
	return len(p.chunks) == 0 || p.last+size+recordCost > chunkRoom(p.lane.name)
}

// costOf returns the maximum cost of messages.
func costOf(l *lane, lens []uint32) (cost int64) {
	for _, n := range lens {
		cost += int64(n) + recordCost + chunkCost(l.name, chunkOverhead(l.name))
	}
	return cost
}

// messageCost returns the maximum cost of one message.
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

// wakePutsLocked lets waiting Puts look again.
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
	w.ch <- struct{}{} // the Put must not miss room that became free since it looked
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

// tellLocked wakes the Leases that wait on the lane.
func (l *lane) tellLocked() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// weighLocked updates idle. It is called when a lane may have become empty, or non-empty.
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

// change is a change of state.
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

// tellState calls onState for all changes. If another goroutine is already doing that,
// tellState leaves the changes to it.
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
