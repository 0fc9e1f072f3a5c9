// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// A Spiller is a [Port] whose messages can be kept on a disk, outside the broker; see
// [Policy.Spill]. Spill and Unspill must not call the broker. The source's loop calls them; after
// the loop has ended, End may call Unspill.
type Spiller[M any] interface {
	Port[M]

	// Spill encodes a message so that Unspill can make it again, maybe in another process. body
	// may be the message's own slice: the guard copies head and body.
	Spill(M) (head, body []byte, err error)

	// Unspill makes a message again from the results of Spill, and may keep head and body. Lane
	// and Meta of the message are the same as before. The guard asks nothing else about it,
	// because the broker has its ack.
	Unspill(head, body []byte) (M, error)
}

// A Keeper is a [Spiller] without a broker, such as an HTTP server: a message is safe only once
// it is on the disk. So each offered message goes to the disk first, whatever the state of the
// source. A message that the disk does not take is refused. The source's loop calls Kept and
// Lost, or End in its place. Ack follows when the message is done. Return gets the messages that
// were not on the disk when the source ended.
type Keeper[M any] interface {
	Spiller[M]

	// Kept says that a message survives a crash from now on. With an error, it says that the
	// source does not have the message: [ErrFull] if there was no room, else the disk's error.
	Kept(M, error)

	// Lost says that n messages in the spill are damaged, and will not be handled.
	Lost(n int)
}

const (
	// spillAfter is how long messages of a source on hold stay in memory alone: a shorter outage
	// writes nothing to the disk.
	spillAfter = 10 * time.Second
	// spillAtOnce and spillBytes bound the messages and the bytes that are read from the input,
	// and written, at a time.
	spillAtOnce = 512
	spillBytes  = 512 << 10
	// spillPatience is how long a disk must have no room before a Keeper's message is refused: a
	// busy disk has no room, either.
	spillPatience = 100 * time.Millisecond
)

// spilled is a message's copy in the spill. Guarded by Source.mu.
type spilled struct {
	number uint64 // tells the copy from others on the disk
	placed bool   // the copy is to be written, is being written or is written
	synced bool   // the copy survives a crash
	acked  bool   // the broker has the message's ack, or the ack is under way
	read   bool   // the copy is in overflow.read
	done   bool   // the copy is not needed any more
}

// onDisk tells whether the message is safe on the disk, and the broker needs no further call.
func (c *spilled) onDisk() bool { return c != nil && c.acked && c.synced }

// overflow is the hold on disk of one source. Only the loop, or End in its place, calls its
// methods. The fields that End and Account read are guarded by Source.mu.
//
// While the input goes to the disk, a message takes this way, so that the order holds:
//
//	input ─▶ next ─▶ written, synced ─▶ acked at the broker
//	                        └─▶ read, when the machine has room ─▶ machine ─▶ given up
//
// Messages that the machine had before keep their place in the machine. Their copies are written
// first, and are skipped when they are read. After the hold nothing is taken from the input until
// the disk is empty: the backlog stays at the broker.
type overflow[M any] struct {
	port Spiller[M]
	keep Keeper[M] // port as a Keeper; nil if there is a broker
	lane *spillLane
	name string // of the lane

	reader *spillReader // nil while nothing is on the disk
	buf    [][]byte
	first  uint64        // a random number: the numbers of this epoch's copies begin after it
	number uint64        // the number of the latest copy
	most   int           // the most messages of one write: fewer while the spill is nearly full
	told   bool          // a message that the spill does not take was logged since the last append
	memory bool          // a full spill did not take messages of the machine: they are written before next
	fullAt time.Duration // since when there is no room for a Keeper's message; 0 while there is

	// Guarded by Source.mu.
	diverts bool           // the input goes to the disk
	next    []spilling[M]  // messages to be written, in order
	bytes   int            // bytes of next, by Port.Size, without the messages that the machine has
	going   []spilling[M]  // messages being written
	synced  []spilling[M]  // messages written, to be acked
	copies  fifo[*spilled] // copies of messages of the machine, on the disk and not read yet
	read    fifo[*spilled] // copies on the disk that were read, in the order of the lane
	turning bool           // the loop, or End in its place, uses the reader
	left    bool           // the lane was given back
	askAt   time.Duration  // when the sweeper may nudge the loop again
	stuck   error          // why messages on the disk cannot be handed over; nil if they can
}

// spilling is a message on its way to the disk.
type spilling[M any] struct {
	m    M
	copy *spilled
	size int
	ours bool // the machine has the message
}

// weight is how many bytes messages add to overflow.bytes.
func weight[M any](ws []spilling[M]) (n int) {
	for _, w := range ws {
		n += w.size
	}
	return n
}

// spillBusyLocked tells whether anything is on the disk or on its way there.
func (s *Source[M]) spillBusyLocked() bool {
	o := s.over
	return o != nil && (o.diverts && o.keep == nil || s.c.behind > 0 || len(o.next)+len(o.going)+len(o.synced)+o.copies.len()+o.read.len() > 0)
}

// newOverflow makes the hold on disk, or returns why the source cannot spill.
func (s *Source[M]) newOverflow() (*overflow[M], error) {
	port, ok := any(s.port).(Spiller[M])
	switch {
	case s.g.spill == nil:
		return nil, errors.New("Policy.Spill: needs Config.SpillDir, a directory on a local disk")
	case !ok || s.handler == nil:
		return nil, errors.New("Policy.Spill: not with this adapter or shape: it cannot make a message again from the disk")
	case s.parker != nil || s.from != nil:
		return nil, errors.New("Policy.Spill: not with retry topics: a message would wait in two places")
	case len(s.cfg.Name) > maxLaneName:
		return nil, fmt.Errorf("Policy.Spill: the source's name has %d bytes, at most %d", len(s.cfg.Name), maxLaneName)
	}
	keeper, _ := any(s.port).(Keeper[M])
	o := &overflow[M]{port: port, keep: keeper, most: spillAtOnce, name: s.cfg.Name, lane: s.g.spill.Lane(s.cfg.Name)}
	o.first = rand.Uint64()
	o.number = o.first
	s.c.spills = true
	return o, nil
}

// foundLocked takes over the messages that earlier epochs have left in the lane, or still write
// to it: a write may outlive its source. This source has the name by now, so no other source
// begins a write.
func (o *overflow[M]) foundLocked(c *machine[M]) {
	if o != nil {
		count, pending := laneHolds(o.lane)
		c.behind = count + pending
		o.diverts = c.behind > 0 || o.keep != nil
	}
}

// divertsLocked tells whether the input goes to the disk. It begins that when a source on hold is
// full, or its oldest message has waited for spillAfter.
func (s *Source[M]) divertsLocked(now time.Duration) bool {
	o := s.over
	switch {
	case o == nil:
		return false
	case o.diverts:
		return true
	case !s.spillDueLocked(now):
		return false
	}
	o.diverts = true
	s.placeLocked()
	return true
}

// placeLocked puts the messages that the machine has, and the disk has not, in front of next.
func (s *Source[M]) placeLocked() {
	o := s.over
	o.memory = false
	var ours []spilling[M]
	// A log commits nothing behind an unsettled message. So a message whose letter waits for the
	// writer is written and acked, too.
	s.c.unspilled(s.marker != nil, func(m M, c *spilled) {
		c.placed = true
		ours = append(ours, spilling[M]{m, c, 0, true})
	})
	o.next = append(ours, o.next...)
}

// spillDueLocked tells whether the hold is to go to the disk.
func (s *Source[M]) spillDueLocked(now time.Duration) bool {
	o, c := s.over, &s.c
	if o == nil || o.diverts || c.ended || c.draining || c.admitting(now) || c.unsettled() == 0 || !s.g.spillTakes() {
		return false
	}
	return c.room() == 0 || c.reading(now).Age >= spillAfter
}

// inputRoomLocked is how many messages the source takes from its input.
func (s *Source[M]) inputRoomLocked() int {
	switch o := s.over; {
	case o == nil || !o.diverts:
		return s.c.room()
	case o.keep != nil:
		if s.c.ended || o.stuck != nil || int64(o.bytes) >= s.c.policy.WindowBytes {
			return 0
		}
		return max(0, s.c.limit()-len(o.next)-len(o.going))
	case len(o.next) >= spillAtOnce || o.bytes >= spillBytes || s.c.ended || s.holdOverLocked(s.g.now()):
		return 0
	default:
		return s.c.limit()
	}
}

// holdOverLocked tells whether messages are handled again, if slowly at first.
func (s *Source[M]) holdOverLocked(now time.Duration) bool { return s.c.admitting(now) || s.c.draining }

// spillTurn moves messages to the disk and back, as far as it can without waiting. more tells
// that there is more to do.
func (l *loop[M]) spillTurn(now time.Duration) (more bool) {
	s, o := l.s, l.s.over
	s.mu.Lock()
	diverts := s.divertsLocked(now)
	busy := s.spillBusyLocked() && !s.fenced.Load()
	o.turning = busy
	s.mu.Unlock()
	if !busy {
		return false
	}
	defer s.turned()
	s.ackSpilled()
	more = diverts && l.divert()
	s.writeSpilled()
	more = s.readSpilled() || more
	s.giveUpSpilled()
	s.mu.Lock()
	if s.c.behind == 0 && len(o.next)+len(o.going) == 0 && s.holdOverLocked(now) && o.keep == nil {
		o.diverts = false // all messages are in the machine: new ones follow them there
	}
	s.mu.Unlock()
	return more
}

// turned ends the use of the reader, which only one goroutine at a time may use.
func (s *Source[M]) turned() {
	s.mu.Lock()
	s.over.turning = false
	s.mu.Unlock()
	if s.fenced.Load() { // End has not waited
		s.closeSpill()
	}
}

// divert reads messages from the input, and sends them to the disk.
func (l *loop[M]) divert() (more bool) {
	s := l.s
	s.mu.Lock()
	take := s.inputRoomLocked() > 0
	s.mu.Unlock()
	if !take {
		return false
	}
	for take {
		m, batched, ok := l.poll()
		if !ok {
			return false
		}
		take = s.spillInput(m, batched)
	}
	return true
}

// spillInput sends a message of the input to the disk, and tells whether there is room for
// another. By Size the port learns of the message in order, as of any message that is not acked
// at once.
func (s *Source[M]) spillInput(m M, batched bool) (room bool) {
	if !s.begin() {
		s.put(m, batched) // put counts it as returned by End
		return false
	}
	size := s.port.Size(m)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endLocked()
	if s.fenced.Load() {
		s.strayLocked(batched)
		return false
	}
	if batched {
		s.diverted++
	}
	s.spillLocked(s.g.now(), m, size)
	return s.inputRoomLocked() > 0
}

// take takes in a message that came while the loop was waiting: to the disk, or by put.
func (s *Source[M]) take(m M) {
	s.mu.Lock()
	diverts := s.over != nil && s.over.diverts
	s.mu.Unlock()
	if diverts {
		s.spillInput(m, false)
	} else {
		s.put(m, false)
	}
}

// spillLocked appends a message to next.
func (s *Source[M]) spillLocked(now time.Duration, m M, size int) {
	s.c.behind++
	s.c.divert(now, 1)
	s.over.bytes += size
	s.over.next = append(s.over.next, spilling[M]{m, &spilled{placed: true}, size, false})
}

// writeSpilled begins to write next, unless a write is under way: after a failed write all
// messages are written again in order. Messages of the machine are written first. Otherwise the
// next source of that name would handle them after later messages.
func (s *Source[M]) writeSpilled() {
	o := s.over
	now := s.g.now()
	s.mu.Lock()
	if len(o.going) > 0 || s.c.ended {
		s.mu.Unlock()
		return
	}
	if o.memory && (len(o.next) > 0 || !s.holdOverLocked(now)) {
		s.placeLocked()
	}
	if len(o.next) == 0 {
		s.mu.Unlock()
		return
	}
	o.next = slices.DeleteFunc(o.next, func(w spilling[M]) bool { return w.ours && w.copy.done })
	some := o.next[:min(len(o.next), o.most)]
	s.calls++ // as begin
	s.mu.Unlock()

	var data [][]byte
	size := 0
	var err error
	for i, w := range some {
		if s.fenced.Load() {
			break
		}
		var b []byte
		if b, err = o.encode(w); err != nil {
			break
		}
		if size += len(b); i > 0 && size > spillBytes {
			break
		}
		data = append(data, b)
	}
	some = some[:len(data)]
	s.mu.Lock()
	s.endLocked()
	if s.fenced.Load() { // End has not waited, and has taken the messages
		s.mu.Unlock()
		return
	}
	o.going, o.next = some, o.next[len(some):]
	o.bytes -= weight(some)
	s.mu.Unlock()
	if len(data) > 0 {
		o.lane = s.g.spill.Lane(o.name) // an empty lane may have been dropped
		if err = o.lane.Append(s.wroteSpilled, data...); err == nil {
			o.told, o.most, o.fullAt = false, spillAtOnce, 0
			return
		}
		s.placedSpilled(err)
	}
	s.notSpilled(err)
}

// encode returns the bytes of a copy: its number, which tells it from other copies, and the
// message. The numbers of an epoch begin at a random one.
func (o *overflow[M]) encode(w spilling[M]) ([]byte, error) {
	head, body, err := o.port.Spill(w.m)
	if err != nil {
		return nil, err
	}
	o.number++
	w.copy.number = o.number
	b := make([]byte, 0, 8+binary.MaxVarintLen32+len(head)+len(body))
	b = binary.LittleEndian.AppendUint64(b, w.copy.number)
	b = binary.AppendUvarint(b, uint64(len(head)))
	return append(append(b, head...), body...), nil
}

func decodeSpilled(b []byte) (number uint64, head, body []byte, err error) {
	if len(b) < 8 {
		return 0, nil, nil, errSpilled
	}
	number = binary.LittleEndian.Uint64(b)
	n, k := binary.Uvarint(b[8:])
	if k <= 0 || n > uint64(len(b)-8-k) {
		return number, nil, nil, errSpilled
	}
	rest := b[8+k:]
	return number, rest[:n:n], rest[n:], nil
}

var errSpilled = errors.New("guard: a message in the spill is not in its form")

// wroteSpilled takes the result of a write. The spill's goroutine calls it.
func (s *Source[M]) wroteSpilled(err error) {
	s.placedSpilled(err)
	s.nudge()
}

// placedSpilled moves going to synced, or after an error back to next. End may have taken going.
func (s *Source[M]) placedSpilled(err error) {
	o := s.over
	s.mu.Lock()
	if err != nil {
		o.next = append(o.going, o.next...)
		o.bytes += weight(o.going)
	} else {
		for _, w := range o.going {
			w.copy.synced = true
			if w.ours {
				o.copies.push(w.copy)
			}
		}
		o.synced = append(o.synced, o.going...)
	}
	o.going = nil
	s.mu.Unlock()
}

// notSpilled deals with messages that the disk does not take. While the disk is full and the hold
// is on, they wait until the sweeper lets the loop ask again. Otherwise messages of the machine
// stay in it, and need the broker's ack after all, until more is to be written. The others wait.
// But if nothing of the lane is on the disk, they go to the machine, as far as it has room.
func (s *Source[M]) notSpilled(err error) {
	o := s.over
	if err == nil { // all messages of next are done meanwhile
		return
	}
	full := errors.Is(err, ringbuf.ErrFull)
	if o.keep != nil {
		s.refuseSpilled(err, full)
		return
	}
	if full {
		o.most = max(1, o.most/2)
		now := s.g.now()
		s.mu.Lock()
		on := !s.holdOverLocked(now)
		s.mu.Unlock()
		if on {
			return
		}
	}
	if !full && !o.told {
		o.told = true
		s.g.log.Warn("the spill does not take a message: it stays in memory, and at the broker", "source", s.cfg.Name, "error", err)
	}
	for {
		s.mu.Lock()
		if len(o.next) == 0 {
			s.mu.Unlock()
			return
		}
		w := o.next[0]
		if w.ours {
			w.copy.placed = false
			o.next = o.next[1:]
			o.memory = o.memory || full
			s.mu.Unlock()
			if full || !s.g.spillTakes() {
				continue
			}
			s.nudge() // only that message cannot be written: the others are written next
			return
		}
		direct := s.c.behind == len(o.next) && s.c.room() > 0
		if direct {
			o.next = o.next[1:]
			o.bytes -= w.size
			s.c.behind--
		}
		s.mu.Unlock()
		if !direct {
			return
		}
		s.put(w.m, false)
		o.memory = o.memory || full
	}
}

// refuseSpilled gives the oldest message back that the disk does not take. But while the spill is
// full, it first lets fewer messages be written at a time: the message alone may fit.
func (s *Source[M]) refuseSpilled(err error, full bool) {
	o := s.over
	now := s.g.now()
	if full {
		if err = ErrFull; o.most > 1 {
			o.most /= 2
			s.nudge()
			return
		}
		if o.fullAt == 0 {
			o.fullAt = now
		}
		if now-o.fullAt < spillPatience { // the disk may only be busy with other sources
			s.mu.Lock()
			o.askAt = now // the sweeper's next tick
			s.mu.Unlock()
			return
		}
	}
	s.mu.Lock()
	if len(o.next) == 0 || s.fenced.Load() { // fenced: End has taken the messages
		s.mu.Unlock()
		return
	}
	w := o.next[0]
	o.next = o.next[1:]
	o.bytes -= w.size
	s.c.behind--
	s.giveBackLocked(1)
	s.mu.Unlock()
	if s.begin() {
		o.keep.Kept(w.m, err)
		s.end()
	}
	s.nudge()
}

// ackSpilled acks the synced messages at the broker. A Keeper gets Kept instead.
func (s *Source[M]) ackSpilled() {
	o := s.over
	for {
		s.mu.Lock()
		if len(o.synced) == 0 || s.fenced.Load() {
			s.mu.Unlock()
			return
		}
		s.calls++ // as begin
		var some []M
		for len(o.synced) > 0 && len(some) < flushEvery {
			w := o.synced[0]
			o.synced = o.synced[1:]
			if !w.copy.acked {
				w.copy.acked = true
				some = append(some, w.m)
			}
		}
		s.mu.Unlock()
		done, failed := uint64(0), uint64(0)
		for _, m := range some {
			if s.fenced.Load() { // End has not waited for the call before
				break
			}
			if done++; o.keep != nil {
				o.keep.Kept(m, nil)
			} else if err := s.port.Ack(m); err != nil && !errors.Is(err, ErrTakenBack) {
				failed++
			}
		}
		if done > 0 && !s.fenced.Load() {
			s.countFlush(s.port.Flush())
		}
		turn, ahead := s.lookAhead()
		s.mu.Lock()
		s.c.lookedAhead(turn, ahead)
		s.c.tally.Spilled += done
		s.c.tally.AckFailures += failed
		s.endLocked()
		s.mu.Unlock()
	}
}

// readSpilled hands messages from the disk to the machine, oldest first, as far as it has room.
func (s *Source[M]) readSpilled() (more bool) {
	o := s.over
	s.mu.Lock()
	room := s.c.room()
	want, limit := 0, int64(spillBytes)
	switch {
	case o.stuck != nil:
	case o.copies.len() > 0:
		want = min(o.copies.len(), spillAtOnce)
	case s.c.ended:
	case s.c.behind > len(o.next)+len(o.going) && (2*room >= s.c.limit() || s.c.still() || s.c.unsettled() == 0):
		if room == 0 {
			break
		}
		want, limit = min(room, spillAtOnce), max(1, s.c.policy.WindowBytes-s.c.bytes)
	}
	s.mu.Unlock()
	if want == 0 || !o.open() {
		return false
	}
	if len(o.buf) < want {
		o.buf = make([][]byte, want)
	}
	_, pending := laneHolds(o.lane) // a write that ends from here on may be missing in what is read
	n, err := o.reader.Read(o.buf[:want], limit)
	if err != nil {
		s.g.log.Warn("the spill cannot be read: what is in it waits there", "source", s.cfg.Name, "error", err)
		s.mu.Lock()
		o.stuck = err
		s.mu.Unlock()
		return false
	}
	for _, b := range o.buf[:n] {
		if !s.unspill(b) {
			return false
		}
	}
	clear(o.buf[:n])
	if n == 0 {
		lost := 0
		s.mu.Lock()
		if len(o.going) == 0 && len(o.synced) == 0 && pending == 0 {
			// The missing messages are damaged, as the log says.
			lost = s.c.behind - len(o.next) + o.oursLocked()
			s.c.behind, o.copies = s.c.behind-lost, fifo[*spilled]{}
			s.giveBackLocked(lost)
		}
		s.mu.Unlock()
		if lost > 0 && o.keep != nil && s.begin() {
			o.keep.Lost(lost)
			s.end()
		}
	}
	return n > 0
}

// open opens the reader.
func (o *overflow[M]) open() bool {
	if o.reader != nil {
		return true
	}
	r, err := o.lane.Reader()
	if err != nil {
		return false // an earlier epoch still has the reader: the sweeper lets the loop ask again
	}
	o.reader = r
	return true
}

// unspill hands the message of a copy to the machine, unless the machine has it.
func (s *Source[M]) unspill(b []byte) bool {
	o := s.over
	number, head, body, err := decodeSpilled(b)
	s.mu.Lock()
	for err == nil && o.copies.len() > 0 {
		// A copy of an earlier epoch, whose write came late, is in front of our copies. If one of
		// our copies is missing, it is damaged: the machine still has the message.
		if at := number - o.first; at > o.number-o.first || at < o.copies.peek().number-o.first {
			break
		}
		if c := o.copies.pop(); c.number == number {
			s.pushReadLocked(c)
			s.mu.Unlock()
			return true
		}
	}
	s.mu.Unlock()
	var m M
	var key uint64
	if err == nil {
		if !s.begin() {
			return false // the message stays on the disk
		}
		if m, err = o.port.Unspill(head, body); err == nil && s.c.policy.Order == OrderKey && !s.fenced.Load() {
			key = s.laneOf(m)
		}
		s.end()
	}
	if err != nil {
		s.g.log.Warn("a message in the spill cannot be made again: it and those behind it wait there", "source", s.cfg.Name, "error", err,
			"help", "start the version that wrote it, or move the directory away")
		s.mu.Lock()
		o.stuck = err
		s.mu.Unlock()
		return false
	}
	c := &spilled{number: number, placed: true, synced: true, acked: true}
	now := s.g.now()
	s.mu.Lock()
	s.pushReadLocked(c)
	if s.fenced.Load() {
		s.mu.Unlock()
		return true
	}
	s.c.behind = max(0, s.c.behind-1)
	s.c.put(now, m, key, len(b), c)
	s.unlock(now)
	s.g.sweeper.kick()
	s.cond.Signal()
	return true
}

// pushReadLocked records a copy that was read. A done message behind a waiting one keeps its
// place in the window, as with a log: it comes again after a stop.
func (s *Source[M]) pushReadLocked(c *spilled) {
	if c.read = true; c.done {
		s.c.doneBehind++
	}
	s.over.read.push(c)
}

// giveUpSpilled removes done copies from the front of the lane on the disk.
func (s *Source[M]) giveUpSpilled() {
	o := s.over
	s.mu.Lock()
	n := 0
	for o.read.len() > 0 && o.read.peek().done {
		o.read.pop()
		s.c.doneBehind--
		n++
	}
	over := o.reader != nil && s.c.behind+o.copies.len()+o.read.len() == 0 && len(o.going)+len(o.synced) == 0
	s.mu.Unlock()
	if n > 0 {
		if err := o.reader.Commit(n); err != nil {
			s.g.log.Warn("the spill does not give up what was handled: it may be handled again", "source", s.cfg.Name, "error", err)
		}
	}
	if over {
		o.reader.Close()
		o.reader = nil
	}
}

// ackHere tells whether a done message has to be acked at the port. It has not if the broker got
// the ack when the message was written to the disk. With a Keeper, which has no broker, it always
// has. ackHere also marks the copy on the disk, if there is one, as done.
func (s *Source[M]) ackHere(it *item[M]) bool {
	c := it.copy
	if c == nil {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.done = true; c.read {
		s.c.doneBehind++
	}
	was := c.acked
	c.acked = true
	return !was || s.over.keep != nil
}

// endSpill waits for the write that is under way and acks its messages, so that the broker does
// not deliver them again.
func (s *Source[M]) endSpill() {
	o := s.over
	if o == nil {
		return
	}
	s.mu.Lock()
	for len(o.going) > 0 && !s.hung {
		s.cond.Wait()
	}
	gone := s.loops == 0 && !s.fenced.Load()
	o.turning = o.turning || gone
	s.mu.Unlock()
	s.ackSpilled()
	if !gone {
		return
	}
	defer s.turned()
	for more := true; more; { // else copies that are done would come again
		more = s.readSpilled()
	}
}

// leaveSpillLocked takes out the messages that are not on the disk, and counts those that are.
func (s *Source[M]) leaveSpillLocked() (rest []M, left int) {
	o := s.over
	if o == nil {
		return nil, 0
	}
	for _, w := range slices.Concat(o.going, o.next) {
		if !w.ours {
			rest = append(rest, w.m)
		}
	}
	s.giveBackLocked(s.c.behind)
	left = s.c.behind - len(rest)
	s.c.behind = 0
	o.next, o.going, o.bytes, o.diverts = nil, nil, 0, false
	return rest, left
}

// closeSpill gives the lane back when no goroutine uses its reader any more.
func (s *Source[M]) closeSpill() {
	s.mu.Lock()
	o := s.over
	free := o != nil && s.fenced.Load() && !o.turning && !o.left
	if free {
		o.left = true
	}
	s.mu.Unlock()
	if free && o.reader != nil {
		s.giveUpSpilled()
		if o.reader != nil {
			o.reader.Close()
		}
	}
}

// unackedLocked appends the unacked messages that are on their way to the disk.
func (s *Source[M]) unackedLocked(dst []M) []M {
	if s.over == nil {
		return dst
	}
	o := s.over
	for _, ws := range [][]spilling[M]{o.synced, o.going, o.next} {
		for _, w := range ws {
			if !w.ours && !w.copy.acked {
				dst = append(dst, w.m)
			}
		}
	}
	return dst
}

// spilledLocked is how many unsettled messages are on the disk.
func (s *Source[M]) spilledLocked() int {
	o := s.over
	if o == nil {
		return 0
	}
	waits := len(o.next) + len(o.going) - o.oursLocked()
	return s.c.behind - waits + o.copies.len() + o.read.len()
}

// oursLocked is how many messages of going and next the machine has.
func (o *overflow[M]) oursLocked() (n int) {
	for _, ws := range [][]spilling[M]{o.going, o.next} {
		for _, w := range ws {
			if w.ours {
				n++
			}
		}
	}
	return n
}

// spillWaitsLocked tells whether the sweeper has to nudge the loop: a hold has become long, or
// messages wait for the disk and nothing else wakes the loop.
func (s *Source[M]) spillWaitsLocked(now time.Duration) bool {
	o := s.over
	if o == nil || now < o.askAt {
		return false
	}
	waits := len(o.next) > 0 && len(o.going) == 0 || s.c.behind > 0 && o.stuck == nil
	if !waits && !s.spillDueLocked(now) {
		return false
	}
	o.askAt = now + stormEvery
	return true
}

// spillHoldLocked says why the disk takes or gives no message.
func (s *Source[M]) spillHoldLocked() (detail, by string) {
	o := s.over
	switch {
	case o == nil:
		return "", ""
	case o.stuck != nil:
		return fmt.Sprintf("%d messages in the spill cannot be read", s.c.behind), "operator: see the log"
	case len(o.next) > 0 && len(o.going) == 0:
		return "the spill takes no message", "room on the disk, or in SpillBytes"
	}
	return "", ""
}

// Spilled tells, by the source's name, how many messages are in the spill of sources that are not
// open or do not spill. They are of a partition that another process has now, or of an earlier
// run. An adapter may open such a source without an input, so that its messages are handled. The
// map is empty without a spill.
func (g *Guard) Spilled() map[string]int {
	all := make(map[string]int)
	if g.spill == nil {
		return all
	}
	for l := range g.spill.Lanes() {
		n, open := l.Len(), g.Source(l.Name())
		if n > 0 && (open == nil || !open.State().Settings.Spill) {
			all[l.Name()] = n
		}
	}
	return all
}

// spillUnopened is how long messages of an earlier process may wait for their source before that is
// logged.
const spillUnopened = time.Minute

// sayUnopened logs, once, the messages of an earlier process whose source has not been opened. Its
// goroutine is the Guard's, and ends after that or with the Guard.
func (g *Guard) sayUnopened(ctx context.Context) {
	select {
	case <-time.After(spillUnopened):
	case <-ctx.Done():
		return
	}
	g.mu.Lock()
	found := maps.Clone(g.spillFound)
	if g.closed {
		clear(found)
	}
	g.mu.Unlock()
	for name, n := range g.Spilled() {
		if found[name] {
			g.log.Warn("the spill has messages of a source that is not open: nobody handles them, and the broker may not have them any more",
				"source", name, "messages", n, "help", "if its consumer waits for the broker, nothing; else open a source of that name with Policy.Spill")
		}
	}
}

// spilledOf is how many messages of the source with that name are in the spill.
func (g *Guard) spilledOf(name string) (n int) {
	if g.spill == nil {
		return 0
	}
	for l := range g.spill.Lanes() {
		if l.Name() == name {
			n = l.Len()
		}
	}
	return n
}

// closeSpill closes the directory.
func (g *Guard) closeSpill() error {
	if g.spill == nil {
		return nil
	}
	if err := g.spill.Close(); err != nil {
		return fmt.Errorf("guard: Config.SpillDir: %w", err)
	}
	return nil
}

// spillSays is how long a state of the directory must last before it is logged. That the directory
// takes no message, because it has failed, is logged at once.
const spillSays = 3 * time.Second

// spillState is the latest state that the directory of the spill has reported.
type spillState struct {
	takes bool
	name  string
	err   error
	at    time.Duration
}

// spillTakes tells whether the directory may take a message.
func (g *Guard) spillTakes() bool {
	st := g.spillState.Load()
	return st == nil || st.takes
}

// saySpill logs the state of the directory if it has changed. The sweeper calls it.
func (g *Guard) saySpill() {
	if !g.spillNews.CompareAndSwap(true, false) {
		return
	}
	st := g.spillState.Load()
	if st.takes && g.now()-st.at < spillSays { // a full disk is tried each second
		g.spillNews.Store(true)
		return
	}
	if st.name == g.spillSaid {
		return
	}
	level, log := slog.LevelWarn, g.log
	if st.err == nil {
		level = slog.LevelInfo
		if g.spillSaid != "" {
			log = g.ends
		}
	}
	g.spillSaid = st.name
	log.Log(g.ctx, level, lineSpill, "state", st.name, "dir", g.cfg.SpillDir, "error", st.err)
}
