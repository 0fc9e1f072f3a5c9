// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// run is the writer's goroutine, the only one of a Spill. It ends when Close has been
// called and all that can be synced is synced. Puts and Flushes may also write, see help:
// core.busy lets one goroutine write at a time.
func (c *core) run() {
	defer close(c.stopped)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		c.mu.Lock()
		var j *job
		wait := time.Hour
		if !c.busy { // otherwise help wakes this goroutine if there is more to do
			j, wait = c.nextLocked(time.Now())
			c.busy = j != nil
		}
		c.mu.Unlock()
		if j == nil {
			if wait < 0 {
				return
			}
			timer.Reset(wait)
			select {
			case <-c.wake:
			case <-timer.C:
			}
			continue
		}
		c.do(j)
	}
}

// help makes the caller the writer for one job, if there is no writer now. A caller that
// would only wait saves two switches between goroutines.
func (c *core) help() {
	c.mu.Lock()
	var j *job
	if !c.busy {
		j, _ = c.nextLocked(time.Now())
		c.busy = j != nil
	}
	c.mu.Unlock()
	if j != nil {
		c.do(j)
	}
	c.mu.Lock()
	more := c.open != nil || len(c.dirty) > 0 || len(c.flushes) > 0 || len(c.queue) > 0 || c.closing || c.state != Ready
	c.mu.Unlock()
	if more {
		c.signal()
	}
}

// job is the next work of the writer: sync a batch, or positions, or both.
type job struct {
	batch   *batch
	lanes   []*lane // lanes whose positions are written
	heads   []uint64
	counts  []int // for each of lanes: messages committed since the last checkpoint
	flushes []*flush
	forget  []*lane
	refused []*batch // batches that fail without a write
}

// nextLocked returns the next job, or the time after which to ask again; a time below 0
// means never.
func (c *core) nextLocked(now time.Time) (*job, time.Duration) {
	wait := time.Hour
	until := func(at time.Time) bool { // reports whether at has come, and otherwise limits wait
		if d := at.Sub(now); d > 0 {
			wait = min(wait, d)
			return false
		}
		return true
	}
	if c.state == Failed {
		c.failFlushesLocked()
		if c.open != nil { // messages that were put before a read failed
			return &job{refused: c.takeBackLocked(nil)}, 0
		}
		if c.closing {
			return nil, -1
		}
		return nil, wait
	}
	if c.state == NoSpace && until(c.retryAt) {
		c.stuck = false
		c.setStateLocked(Ready, nil)
		return &job{}, 0
	}
	if c.stuck {
		c.failFlushesLocked()
		if c.closing {
			return nil, -1
		}
		return nil, wait
	}
	j := &job{}
	if b := c.open; b != nil {
		full := b.count >= c.cfg.BatchCount || b.bytes >= c.cfg.BatchBytes || len(c.queue) > 0
		if full || c.closing || len(c.flushes) > 0 || c.cfg.BatchDelay == 0 || until(b.since.Add(c.cfg.BatchDelay)) {
			j.batch, c.writing, c.open = b, b, nil
			c.wakePutsLocked()
		}
	}
	if len(c.dirty) > 0 && (j.batch != nil || c.hastyLocked() || until(c.since.Add(c.cfg.CheckpointDelay))) {
		n := min(len(c.dirty), c.store.lanes())
		j.lanes = append(j.lanes, c.dirty[:n]...)
		c.dirty = append(c.dirty[:0], c.dirty[n:]...)
		c.since = now
	}
	for _, l := range j.lanes {
		l.dirty, l.going = false, true
	}
	if len(c.dirty) == 0 {
		c.hungry = false
		j.flushes, c.flushes = c.flushes, nil
	}
	c.headsLocked(j)
	if c.idle > idleLanes && len(j.lanes) > 0 {
		c.forgetLocked(j)
	}
	if j.batch == nil && len(j.lanes) == 0 {
		for _, f := range j.flushes {
			close(f.done)
		}
		if c.closing {
			return nil, -1
		}
		return nil, wait
	}
	return j, 0
}

// headsLocked adds the lanes of the batch to the job, and the heads and counts of all its
// lanes.
func (c *core) headsLocked(j *job) {
	if j.batch != nil {
		for _, p := range j.batch.parcels {
			if !p.lane.going {
				p.lane.going = true
				j.lanes = append(j.lanes, p.lane)
			}
		}
	}
	for _, l := range j.lanes {
		j.heads = append(j.heads, l.head)
		n := l.held - l.count // committed messages, and messages in batches
		for _, b := range []*batch{c.writing, c.open} {
			if b != nil && b.of[l] != nil {
				n -= b.of[l].count
			}
		}
		j.counts = append(j.counts, n)
		c.drained -= n
	}
}

// hastyLocked reports whether positions must be synced now.
func (c *core) hastyLocked() bool {
	return c.drained >= c.cfg.CheckpointCount || c.closing || c.hungry || len(c.flushes) > 0 || len(c.queue) > 0 || c.state == NoSpace
}

func (c *core) failFlushesLocked() {
	for _, f := range c.flushes {
		f.err = c.err
		close(f.done)
	}
	c.flushes = nil
}

// forgetLocked removes some empty lanes on which nobody waits. A few with each write are
// enough, since a write empties few lanes.
func (c *core) forgetLocked(j *job) {
	for _, l := range c.lanes {
		if len(j.forget) == lanesAtOnce || c.idle <= idleLanes {
			return
		}
		if l.held > 0 || l.bytes > 0 || l.leased || l.waiting > 0 || l.dirty || l.going {
			continue
		}
		l.err = ringbuf.ErrDropped
		delete(c.lanes, l.name)
		c.idle--
		j.forget = append(j.forget, l)
	}
}

func (c *core) do(j *job) {
	if j.batch == nil && len(j.lanes) == 0 {
		c.mu.Lock()
		c.busy = false
		err := c.err
		c.mu.Unlock()
		c.tellState()
		end(j.refused, err)
		return
	}
	c.commit++
	if j.batch == nil { // a drain needs no buffers
		c.arena = nil
		c.mu.Lock()
		c.spare = nil
		c.mu.Unlock()
	}
	t := &transaction{}
	arena := c.arena[:0]
	if j.batch != nil && int64(cap(arena)) < j.batch.bytes { // batch.bytes is an upper limit of the size of the chunks
		arena = make([]byte, 0, j.batch.bytes)
	}
	if c.arena = arena; int64(cap(arena)) > 2*c.cfg.BatchBytes {
		c.arena = nil // not kept: it was for a message larger than a batch
	}
	tails := make([]uint64, len(j.lanes))
	for i, l := range j.lanes {
		tails[i] = l.tail // only the writer changes it
		if j.batch != nil {
			if p := j.batch.of[l]; p != nil {
				tails[i] += uint64(p.count)
				seq, lens, data := l.tail, p.lens, p.data
				t.chunks = slices.Grow(t.chunks, len(p.chunks))
				for _, n := range p.chunks {
					size := 0
					for _, k := range lens[:n] {
						size += int(k)
					}
					at := len(arena)
					arena = appendChunk(arena, l.name, seq, c.commit, j.batch.since.UnixNano(), lens[:n], data[:size])
					t.chunks = append(t.chunks, newChunk{l.name, seq, arena[at:len(arena):len(arena)]})
					seq, lens, data = seq+uint64(n), lens[n:], data[size:]
				}
			}
		}
		t.positions = append(t.positions, position{name: l.name, head: j.heads[i], tail: tails[i], commit: c.commit, moved: j.heads[i] > l.synced})
	}
	for _, l := range j.forget {
		t.forget = append(t.forget, l.name)
	}
	err := c.store.write(t)
	c.finish(j, t, tails, err)
}

func (c *core) finish(j *job, t *transaction, tails []uint64, err error) {
	var failed []*batch
	c.mu.Lock()
	c.writing, c.busy = nil, false
	for _, l := range j.lanes {
		l.going = false
	}
	if j.batch != nil {
		c.keepSpareLocked(j.batch)
	}
	switch {
	case err == nil:
		c.writes++
		c.doneLocked(j, t, tails)
	case errors.Is(err, errNoRoom):
		// The messages of this batch and of the open one go back to their callers, in
		// order: later messages must not overtake this batch.
		failed = c.takeBackLocked(j.batch)
		c.redoLocked(j)
		c.retryAt, c.stuck = time.Now().Add(retryDelay), j.batch == nil
		c.setStateLocked(NoSpace, fmt.Errorf("%w: %w", ErrNoSpace, err))
		err = c.err
	default:
		failed = c.takeBackLocked(j.batch)
		c.redoLocked(j)
		c.setStateLocked(Failed, &FailedError{Op: "write", Err: err})
		err = c.err
	}
	if err != nil && c.state != Failed && j.batch != nil {
		// Positions alone may find room where the batch did not.
		c.flushes = append(j.flushes, c.flushes...)
		j.flushes = nil
	}
	c.wakePutsLocked()
	c.mu.Unlock()
	if err != nil {
		c.tellState()
	}
	for _, f := range j.flushes {
		f.err = err
		close(f.done)
	}
	if err == nil && j.batch != nil {
		failed = []*batch{j.batch}
	}
	end(failed, err)
}

// end reports the result to the callers of batches.
func end(bs []*batch, err error) {
	for _, b := range bs {
		b.err = err
		close(b.done)
		for _, call := range b.calls {
			call(err)
		}
	}
}

// doneLocked updates the lanes after a durable write.
func (c *core) doneLocked(j *job, t *transaction, tails []uint64) {
	for i, l := range j.lanes {
		l.synced = j.heads[i]
		l.held -= j.counts[i]
		l.bytes -= t.freed[i]
		c.count -= j.counts[i]
		c.bytes -= t.freed[i]
		if n := int(tails[i] - l.tail); n > 0 {
			if l.count == 0 {
				l.oldest = j.batch.since
			}
			l.tail = tails[i]
			l.count += n
			l.tellLocked()
		}
		c.weighLocked(l)
		if t.freed[i] > 0 {
			c.retryAt = time.Time{} // there may be space now
		}
	}
}

// takeBackLocked undoes place for the failed batch and the open one.
func (c *core) takeBackLocked(b *batch) []*batch {
	var all []*batch
	for _, b := range []*batch{b, c.open} {
		if b == nil {
			continue
		}
		all = append(all, b)
		for _, p := range b.parcels {
			p.lane.held -= p.count
			p.lane.bytes -= p.bytes
			c.count -= p.count
			c.bytes -= p.bytes
			c.weighLocked(p.lane)
		}
	}
	c.open = nil
	return all
}

// redoLocked puts the positions of a failed job back, for the next one.
func (c *core) redoLocked(j *job) {
	for i, l := range j.lanes {
		c.drained += j.counts[i]
		if !l.dirty && (j.counts[i] > 0 || l.head > l.synced) {
			l.dirty = true
			c.dirty = append(c.dirty, l)
		}
	}
	for _, l := range j.forget {
		// The lane's position stays on the disk. A lane of that name must continue from
		// there.
		if c.lanes[l.name] == nil {
			l.err = nil
			c.lanes[l.name] = l
			c.idle++
		}
	}
}
