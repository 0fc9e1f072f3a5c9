// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"container/heap"
	"sync"
	"sync/atomic"
)

// origin identifies a parked message in its own topic and partition. Time and key tell messages
// apart if the topic was created again, so that offsets repeat.
type origin struct {
	offset int64
	stamp  int64 // milliseconds
	key    uint64
}

// entry is a message that is parked, or on its way.
type entry struct {
	origin    origin
	keyed     bool
	level     int   // level of the retry topic that has it; 0: only the claim has it
	at        int64 // offset in that topic; -1 unknown
	moves     int   // how often it was written
	writingTo int   // level that it is being written to; 0 for none
	due       int64 // when it is to be handled, milliseconds
	gone      bool  // removed from the table
}

// where is the level that messages behind this one must go to.
func (e *entry) where() int {
	if e.writingTo > 0 {
		return e.writingTo
	}
	return e.level
}

// keyQueue is a key with parked messages.
type keyQueue struct {
	order byOffset      // the key's messages; gone ones are taken out when they are at the top
	total int           // messages of order that are not gone
	freed chan struct{} // not nil while the last message of the key is done and not yet committed
}

// byOffset is a heap: the message that was first in the claim is on top.
type byOffset []*entry

func (h *byOffset) Len() int           { return len(*h) }
func (h *byOffset) Less(i, j int) bool { return (*h)[i].origin.offset < (*h)[j].origin.offset }
func (h *byOffset) Swap(i, j int)      { (*h)[i], (*h)[j] = (*h)[j], (*h)[i] }

func (h *byOffset) Push(x any) { *h = append(*h, x.(*entry)) } //nolint:forcetypeassert // nothing else is in there

func (h *byOffset) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return e
}

// first is the first message of a key that is not gone, nil for none.
func (k *keyQueue) first() *entry {
	for len(k.order) > 0 && k.order[0].gone {
		heap.Pop(&k.order)
	}
	if len(k.order) == 0 {
		return nil
	}
	return k.order[0]
}

// table knows the parked messages of one partition. The claim and its retry source share it. The
// decisions "handle or follow" and "the key is free" are made under its lock, so neither can
// overtake the other.
//
// This rule keeps the order of a key: a message is handled only if the table has no message of
// its key that stood before it in the claim. Otherwise it goes behind the first of these
// messages, into the same retry topic. A message is in the table from before it is written until
// after it is settled. So the messages behind it cannot pass it, wherever it is.
//
// It is safe for concurrent use. It holds about 200 bytes for each parked message, and at most
// max messages. It has more only if they were parked before, with a larger max.
type table struct {
	max int

	used     atomic.Bool // messages were parked in this epoch or before; if not, nobody asks the table
	followed atomic.Uint64

	mu      sync.Mutex
	entries map[origin]*entry
	keys    map[uint64]*keyQueue
	freeing []uint64 // keys whose end is not yet committed
	done    map[origin]struct{}
	recent  []origin // the origins of done, as a ring
	oldest  int
}

// recentlyDone is how many finished messages are remembered, to recognise copies that come late.
const recentlyDone = 4096

func newTable(limit int) *table {
	return &table{
		max: limit, entries: make(map[origin]*entry), keys: make(map[uint64]*keyQueue), done: make(map[origin]struct{}),
	}
}

// fate says what to do with a message whose turn it is.
type fate struct {
	kind  fateKind
	level int           // fateFollow: where to
	due   int64         // fateWait: until when, milliseconds
	freed chan struct{} // fateAwait: closed when the key is free, or has a parked message again
}

type fateKind uint8

const (
	fateHandle fateKind = iota
	fateFollow          // write the message to level, then settle it
	fateSettle          // settle the message: it is a copy
	fateWait            // the message stays where it is until due
	fateAwait           // the message's key is about to be free
	fateFull            // the message must follow, and the table is full
)

// decide decides about a message of the claim (level 0) or of a retry topic. patient says that the
// message may wait: for the commit that frees its key, or in its retry topic for the message that
// it would follow.
func (t *table) decide(p *Message, patient bool) fate {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[p.origin]
	switch {
	case t.elsewhere(p, e):
		return fate{kind: fateSettle}
	case e != nil && e.writingTo > 0: // finish a write that was begun, even if the key is free
		return fate{kind: fateFollow, level: e.writingTo}
	case !p.keyed:
		return fate{}
	}
	k := t.keys[p.origin.key]
	if k == nil {
		return fate{}
	}
	level := 1 // the key is done but not committed: as if a message were parked
	switch first := k.first(); {
	case first != nil && p.origin.offset <= first.origin.offset:
		return fate{} // the first of its key, or delivered again and before all parked ones
	case first != nil && p.level > 0 && patient:
		return fate{kind: fateWait, due: first.due + 1}
	case first != nil:
		level = first.where()
	case patient:
		return fate{kind: fateAwait, freed: k.freed}
	}
	if t.reserve(p, level, 0) == nil {
		return fate{kind: fateFull}
	}
	return fate{kind: fateFollow, level: level}
}

// elsewhere tells whether a message is not the parked one, but a copy of a message that is done
// or went on.
func (t *table) elsewhere(p *Message, e *entry) bool {
	switch {
	case e == nil:
		return p.level > 0 || t.isDone(p.origin)
	case p.level == 0:
		return e.level > 0
	}
	return e.level != p.level || e.at != p.at
}

// reserve announces that a message will be written to a level; nil if there is no room.
func (t *table) reserve(p *Message, next int, due int64) *entry {
	e := t.entries[p.origin]
	if e == nil {
		if len(t.entries) >= t.max {
			return nil
		}
		e = t.add(p)
		e.at = -1
	}
	e.writingTo, e.due = next, due
	return e
}

// add puts a message into the table.
func (t *table) add(p *Message) *entry {
	e := &entry{origin: p.origin, keyed: p.keyed}
	t.entries[p.origin] = e
	t.used.Store(true)
	if !p.keyed {
		return e
	}
	k := t.keys[p.origin.key]
	if k == nil {
		k = &keyQueue{}
		t.keys[p.origin.key] = k
	}
	heap.Push(&k.order, e)
	k.total++
	if k.freed != nil {
		close(k.freed)
		k.freed = nil
	}
	return e
}

// remove takes a message out of the table.
func (t *table) remove(e *entry) {
	e.gone = true
	delete(t.entries, e.origin)
	k := t.keys[e.origin.key]
	if !e.keyed || k == nil {
		return
	}
	if k.total--; k.total == 0 {
		k.order = nil
		k.freed = make(chan struct{})
		t.freeing = append(t.freeing, e.origin.key)
	}
}

// park announces that a failed message will be written to a level. gone says that the message was
// written already; level 0 says that there is no room.
func (t *table) park(p *Message, next int, due int64) (level int, gone bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[p.origin]
	switch {
	case t.elsewhere(p, e):
		return 0, true
	case e != nil && e.writingTo > 0: // an earlier try failed; this one is due later
		e.due = due
		return e.writingTo, false
	case t.reserve(p, next, due) == nil:
		return 0, false
	}
	return next, false
}

// dropped says that an announced message was not written and never can be: it stays where it is.
func (t *table) dropped(p *Message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch e := t.entries[p.origin]; {
	case e == nil || e.writingTo == 0:
	case e.level == 0:
		t.remove(e)
	default:
		e.writingTo = 0
	}
}

// landed says that the copy made of p is confirmed in the retry topic of a level. at is the
// copy's offset, -1 if the producer does not know it.
func (t *table) landed(p *Message, level int, at int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.entries[p.origin]; e != nil {
		t.land(e, level, at, p.moves+1)
	}
}

func (t *table) land(e *entry, level int, at int64, moves int) {
	switch {
	case e.writingTo == level && moves == e.moves+1:
		e.level, e.writingTo, e.at, e.moves = level, 0, at, moves
	case e.level == level && e.at < 0 && moves == e.moves:
		e.at = at
	}
}

// load takes over a message that a retry topic has at the start. Of two copies the one that was
// written later counts: it was confirmed before the other was settled. Of two copies of one write
// the first counts. The other copy is then settled: load returns its place, level 0 for none.
func (t *table) load(p *Message) (level int, at int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[p.origin]
	if e == nil {
		e = t.add(p)
	} else if e.moves >= p.moves {
		return p.level, p.at
	}
	level, at = e.level, e.at
	e.level, e.at, e.moves, e.due = p.level, p.at, p.moves, p.notBefore
	return level, at
}

// arrive tells whether a message that was read from a retry topic is the parked one. Otherwise it
// is a copy: its message is done or elsewhere, or an earlier owner of the partition wrote it
// after this claim had looked.
func (t *table) arrive(p *Message, own bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[p.origin]
	if e == nil {
		return false
	}
	if own {
		t.land(e, p.level, p.at, p.moves)
	}
	return e.level == p.level && e.at == p.at
}

// finish says that a message is settled in its present place.
func (t *table) finish(p *Message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[p.origin]
	if e == nil || e.level != p.level || e.at != p.at {
		return // the message went on, or p was a copy
	}
	t.remove(e)
	t.remember(p.origin)
}

// lost forgets unread messages that the retry topic of a level no longer has: those at offsets of
// at least from and below to. It returns their number.
func (t *table) lost(level int, from, to int64) (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.entries {
		if e.level == level && e.writingTo == 0 && e.at >= from && e.at < to {
			t.remove(e)
			n++
		}
	}
	return n
}

func (t *table) isDone(o origin) bool {
	_, ok := t.done[o]
	return ok
}

func (t *table) remember(o origin) {
	if t.isDone(o) {
		return
	}
	t.done[o] = struct{}{}
	if len(t.recent) < recentlyDone {
		t.recent = append(t.recent, o)
		return
	}
	delete(t.done, t.recent[t.oldest])
	t.recent[t.oldest] = o
	t.oldest = (t.oldest + 1) % recentlyDone
}

// ended are the keys whose last message is done: a commit that begins after this
// call frees them.
func (t *table) ended() map[uint64]chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.freeing) == 0 {
		return nil
	}
	keys := make(map[uint64]chan struct{}, len(t.freeing))
	rest := t.freeing[:0]
	for _, key := range t.freeing {
		if k := t.keys[key]; k != nil && k.freed != nil && keys[key] == nil {
			keys[key] = k.freed
			rest = append(rest, key)
		}
	}
	t.freeing = rest
	return keys
}

// free removes keys whose end is committed, unless messages of them were parked again.
func (t *table) free(keys map[uint64]chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, freed := range keys {
		if k := t.keys[key]; k != nil && k.freed == freed {
			delete(t.keys, key)
			close(freed)
		}
	}
}

// size is how many messages are parked.
func (t *table) size() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.entries)
}
