// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import "iter"

// A table is a map whose entries also stand in the order of their latest
// change. A change gets the next mark and moves its entry to the end, so that
// what changed after a mark is the tail of the list, each key once: what a peer
// has not acknowledged costs the size of what changed, and not of how often.
type table[K comparable, V any] struct {
	at   map[K]*entry[K, V]
	ends entry[K, V] // its next is the oldest change, its prev the latest
	mark uint64      // of the latest change
}

type entry[K comparable, V any] struct {
	key        K
	val        V
	changed    uint64 // mark of the latest change
	prev, next *entry[K, V]
}

func newTable[K comparable, V any]() *table[K, V] {
	t := &table[K, V]{at: make(map[K]*entry[K, V])}
	t.ends.prev, t.ends.next = &t.ends, &t.ends
	return t
}

func (t *table[K, V]) get(k K) V {
	if e := t.at[k]; e != nil {
		return e.val
	}
	var zero V
	return zero
}

// put stores a value that is news. A key that is not there yet must be the
// table's to keep.
func (t *table[K, V]) put(k K, v V) {
	e := t.at[k]
	if e == nil {
		e = &entry[K, V]{key: k}
		t.at[k] = e
	} else {
		e.unlink()
	}
	t.mark++
	e.val, e.changed = v, t.mark
	e.prev, e.next = t.ends.prev, &t.ends
	e.prev.next, e.next.prev = e, e
}

// drop forgets a key, and makes no change that a peer hears of.
func (t *table[K, V]) drop(k K) {
	if e := t.at[k]; e != nil {
		e.unlink()
		delete(t.at, k)
	}
}

func (e *entry[K, V]) unlink() { e.prev.next, e.next.prev = e.next, e.prev }

// all yields the entries in the order of their latest change.
func (t *table[K, V]) all() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for e := t.ends.next; e != &t.ends; e = e.next {
			if !yield(e.key, e.val) {
				return
			}
		}
	}
}

// delta appends what changed after since, oldest first, in at most room bytes,
// or nothing. It walks back from the latest change, so it costs what it finds.
func (t *table[K, V]) delta(b []byte, format byte, since uint64, room int, row func([]byte, K, V) []byte) (_ []byte, upto uint64) {
	e := t.ends.prev
	if since >= t.mark || e.changed <= since { // the sentinel has changed 0
		return b, t.mark
	}
	for e.prev.changed > since {
		e = e.prev
	}
	start := len(b)
	b = append(b, format)
	for upto = since; e != &t.ends; e = e.next {
		n := len(b)
		if b = row(b, e.key, e.val); len(b)-start > room {
			if n == start+1 {
				n = start
			}
			return b[:n], upto
		}
		upto = e.changed
	}
	return b, t.mark
}
