// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"errors"
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// run is the writer: the only goroutine that a Spill has, and the only one that writes to
// its store. It ends when Close has been called and all is synced that can be.
func (c *core) run() {
	defer close(c.stopped)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		c.mu.Lock()
		var j *job
		wait := time.Hour
		if !c.busy { // else it is told when there is more to do
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

// help makes the caller the writer for one job, if nobody is: a caller that would only wait
// saves two switches between goroutines.
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

// job is what the writer does next: sync a batch, or positions, or both.
type job struct {
	batch   *batch
	lanes   []*lane // whose positions go with it
	heads   []uint64
	counts  []int // messages committed since the last checkpoint, for each of lanes
	flushes []*flush
	forget  []*lane
	refused []*batch // are written by nobody
}

// nextLocked returns what is to be done now, or after how long to ask again; below 0
// means never.
func (c *core) nextLocked(now time.Time) (*job, time.Duration) {
	wait := time.Hour
	until := func(at time.Time) bool { // whether it is then, and else when
		if d := at.Sub(now); d > 0 {
			wait = min(wait, d)
			return false
		}
		return true
	}
	if c.state == Failed {
		c.failFlushesLocked()
		if c.open != nil { // put before a read failed
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

// headsLocked adds the lanes of the batch, and what is to be written of all lanes.
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
		n := l.held - l.count // that, and what is on its way
		for _, b := range []*batch{c.writing, c.open} {
			if b != nil && b.of[l] != nil {
				n -= b.of[l].count
			}
		}
		j.counts = append(j.counts, n)
		c.drained -= n
	}
}

// hastyLocked says whether positions are to be synced now.
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

// forgetLocked takes out some empty lanes on which nobody waits. A few with each write
// are enough, for a write makes few empty.
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
	t := &transaction{}
	arena := c.arena[:0]
	if j.batch != nil && int64(cap(arena)) < j.batch.bytes { // which counts more than the chunks have
		arena = make([]byte, 0, j.batch.bytes)
	}
	if c.arena = arena; int64(cap(arena)) > 2*c.cfg.BatchBytes {
		c.arena = nil // for a message that is larger than a batch
	}
	tails := make([]uint64, len(j.lanes))
	for i, l := range j.lanes {
		tails[i] = l.tail // only the writer changes it
		if j.batch != nil {
			if p := j.batch.of[l]; p != nil {
				tails[i] += uint64(p.count)
				seq, lens, data := l.tail, p.lens, p.data
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
		t.positions = append(t.positions, position{name: l.name, head: j.heads[i], tail: tails[i], commit: c.commit})
	}
	for _, l := range j.forget {
		t.forget = append(t.forget, l.name)
	}
	err := c.store.write(t)
	c.finish(j, t, tails, err)
}

func (c *core) finish(j *job, t *transaction, tails []uint64, err error) {
	size := c.store.size()
	var failed []*batch
	c.mu.Lock()
	c.writing, c.busy = nil, false
	c.fileSize = size
	for _, l := range j.lanes {
		l.going = false
	}
	switch {
	case err == nil:
		c.writes++
		c.doneLocked(j, t, tails)
	case errors.Is(err, errNoRoom):
		// All that is on its way goes back to its callers, in order: what came after this
		// batch must not overtake it.
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
		// Positions alone may find the room that the batch did not.
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

// end tells the callers of batches what became of them.
func end(bs []*batch, err error) {
	for _, b := range bs {
		b.err = err
		close(b.done)
		for _, call := range b.calls {
			call(err)
		}
	}
}

// doneLocked is after a write that is durable.
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
			c.retryAt = time.Time{} // perhaps there is room now
		}
	}
}

// takeBackLocked undoes what place did for the batch that failed and the one behind it.
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

// redoLocked makes the positions of a job wait for the next one.
func (c *core) redoLocked(j *job) {
	for i, l := range j.lanes {
		c.drained += j.counts[i]
		if !l.dirty && (j.counts[i] > 0 || l.head > l.synced) {
			l.dirty = true
			c.dirty = append(c.dirty, l)
		}
	}
	for _, l := range j.forget {
		// Its position stays on the disk. A lane of that name must go on from there.
		if c.lanes[l.name] == nil {
			l.err = nil
			c.lanes[l.name] = l
			c.idle++
		}
	}
}
