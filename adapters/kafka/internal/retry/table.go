// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"container/heap"
	"sync"
	"sync/atomic"
)

// origin is what a parked message was in its own topic and partition. The time
// and the key tell a topic that was made anew, whose offsets repeat.
type origin struct {
	offset int64
	stamp  int64 // milliseconds
	key    uint64
}

// entry is one message that is parked, or on its way.
type entry struct {
	origin origin
	keyed  bool
	level  int   // of the retry topic that has it; 0: the claim alone
	at     int64 // offset there; -1 unknown
	moves  int   // how often it was written
	next   int   // level it is being written to; 0 none
	due    int64 // when it is to be handled, milliseconds
	gone   bool  // from the table
}

// where is the level behind which what follows the message has to go.
func (e *entry) where() int {
	if e.next > 0 {
		return e.next
	}
	return e.level
}

// keyQueue is a key with parked messages.
type keyQueue struct {
	order byOffset      // its messages; those that are gone are taken out at the top
	total int           // of them, not gone
	freed chan struct{} // not nil while its last one is done and not yet committed
}

// byOffset is a heap: the first message of a key, as the claim had it, is on top.
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

// table knows what of one partition is parked. The claim and its retry
// source share it: "handle or follow" and "the key is free" are decided under its
// lock, so neither can overtake the other.
//
// The law that keeps the order of a key: a message is handled only if none of its
// key that stood before it in the claim is in the table; otherwise it goes behind
// the first of these, into the same retry topic. A message is in the table from
// before it is written until after it is settled, so wherever it is, what stood
// behind it cannot pass.
//
// It is safe for concurrent use. It holds some 200 bytes for each parked message,
// and at most max of them; only what was parked before with a larger max may be
// more.
type table struct {
	max int

	used     atomic.Bool // something was parked in this epoch: otherwise nobody looks
	followed atomic.Uint64

	mu      sync.Mutex
	entries map[origin]*entry
	keys    map[uint64]*keyQueue
	freeing []uint64 // keys whose end is to be committed
	done    map[origin]struct{}
	recent  []origin // of done, a ring
	oldest  int
}

// recentlyDone is how many finished messages are remembered, for copies of them
// that come late.
const recentlyDone = 4096

func newTable(limit int) *table {
	return &table{
		max: limit, entries: make(map[origin]*entry), keys: make(map[uint64]*keyQueue), done: make(map[origin]struct{}),
	}
}

// fate is what is to be done with a message that is up.
type fate struct {
	kind  fateKind
	level int           // follow: where to
	due   int64         // wait: until when
	freed chan struct{} // await
}

type fateKind uint8

const (
	fateHandle fateKind = iota
	fateFollow          // write it to level, then settle it
	fateSettle          // it is a copy: settle it
	fateWait            // it stays where it is for now
	fateAwait           // its key is about to be free
	fateFull            // it has to follow, and the table is full
)

// up decides about a message of the claim (level 0) or of a retry topic. patient
// says that it may wait: for the commit that frees its key, or in its retry topic
// for what it would follow.
func (t *table) up(p *Message, patient bool) fate {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[p.origin]
	switch {
	case t.elsewhere(p, e):
		return fate{kind: fateSettle}
	case e != nil && e.next > 0: // a write that was begun is ended, whatever became of the key
		return fate{kind: fateFollow, level: e.next}
	case !p.keyed:
		return fate{}
	}
	k := t.keys[p.origin.key]
	if k == nil {
		return fate{}
	}
	level := 1 // done and not committed: as if it were there
	switch first := k.first(); {
	case first != nil && p.origin.offset <= first.origin.offset:
		return fate{} // its turn, or delivered again and before all that is parked
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

// elsewhere tells whether a message is not what is parked, but a copy of what is
// done or went on.
func (t *table) elsewhere(p *Message, e *entry) bool {
	switch {
	case e == nil:
		return p.level > 0 || t.isDone(p.origin)
	case p.level == 0:
		return e.level > 0
	}
	return e.level != p.level || e.at != p.at
}

// reserve announces that a message is written to a level; nil if there is no room.
func (t *table) reserve(p *Message, next int, due int64) *entry {
	e := t.entries[p.origin]
	if e == nil {
		if len(t.entries) >= t.max {
			return nil
		}
		e = t.add(p)
		e.at = -1
	}
	e.next, e.due = next, due
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

// park announces that a message which has failed is written to a level. gone says
// that it was written already; level 0 that there is no room.
func (t *table) park(p *Message, next int, due int64) (level int, gone bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[p.origin]
	switch {
	case t.elsewhere(p, e):
		return 0, true
	case e != nil && e.next > 0: // a try before failed; this one is due later
		e.due = due
		return e.next, false
	case t.reserve(p, next, due) == nil:
		return 0, false
	}
	return next, false
}

// dropped says that a message which was announced was not written and never can be: it
// stays where it is.
func (t *table) dropped(p *Message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch e := t.entries[p.origin]; {
	case e == nil || e.next == 0:
	case e.level == 0:
		t.remove(e)
	default:
		e.next = 0
	}
}

// landed says that the copy of a message that was made of p is confirmed in the
// retry topic of a level; at is -1 where the producer does not know its offset.
func (t *table) landed(p *Message, level int, at int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.entries[p.origin]; e != nil {
		t.land(e, level, at, p.moves+1)
	}
}

func (t *table) land(e *entry, level int, at int64, moves int) {
	switch {
	case e.next == level && moves == e.moves+1:
		e.level, e.next, e.at, e.moves = level, 0, at, moves
	case e.level == level && e.at < 0 && moves == e.moves:
		e.at = at
	}
}

// load takes over what a retry topic has at the start. Of two copies that which
// was written later counts: it is confirmed before the other is settled; of two of
// the same writing the first. The other is settled by that: its place is returned, level 0
// for none.
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

// arrive tells whether a message that was read from a retry topic is the parked
// one, or a copy: of one that is done, that is elsewhere, or that an earlier owner
// of the partition wrote after this claim had looked.
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

// finish says that a message is settled where it was.
func (t *table) finish(p *Message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[p.origin]
	if e == nil || e.level != p.level || e.at != p.at {
		return // it went on, or was a copy
	}
	t.remove(e)
	t.remember(p.origin)
}

// lost forgets what a retry topic no longer has: parked at a level from an offset
// on and before another, and not read. It returns how many.
func (t *table) lost(level int, from, to int64) (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.entries {
		if e.level == level && e.next == 0 && e.at >= from && e.at < to {
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

// free lets go of keys whose end is committed, unless they were parked again.
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
