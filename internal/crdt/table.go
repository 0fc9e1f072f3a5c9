// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import "iter"

// A table is a map whose entries are listed in the order of their latest change.
type table[K comparable, V any] struct {
	at      map[K]*Change[entry[K, V]]
	changes Changes[entry[K, V]]
}

type entry[K comparable, V any] struct {
	key K
	val V
}

func newTable[K comparable, V any]() *table[K, V] {
	return &table[K, V]{at: make(map[K]*Change[entry[K, V]])}
}

func (t *table[K, V]) get(k K) V {
	if c := t.at[k]; c != nil {
		return c.Of.val
	}
	var zero V
	return zero
}

// put stores a changed value. The table keeps a new key: its memory must not be part of a
// message.
func (t *table[K, V]) put(k K, v V) {
	c := t.at[k]
	if c == nil {
		c = &Change[entry[K, V]]{Of: entry[K, V]{key: k}}
		t.at[k] = c
	}
	c.Of.val = v
	t.changes.Touch(c)
}

// drop forgets a key. It makes no change, so peers are not told.
func (t *table[K, V]) drop(k K) {
	t.changes.Remove(t.at[k])
	delete(t.at, k)
}

// all yields the entries in the order of their latest change. The caller may drop the
// yielded entry.
func (t *table[K, V]) all() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for c := t.changes.First(); c != nil; {
			next := c.Next()
			if !yield(c.Of.key, c.Of.val) {
				return
			}
			c = next
		}
	}
}

// delta appends the rows that changed after since, oldest change first, in at most room
// bytes, or nothing. upto is the mark up to which the result is complete.
func (t *table[K, V]) delta(b []byte, format byte, since uint64, room int, row func([]byte, K, V) []byte) (_ []byte, upto uint64) {
	c := t.changes.After(since)
	if c == nil {
		return b, t.changes.Mark()
	}
	start := len(b)
	b = append(b, format)
	for upto = since; c != nil; c = c.Next() {
		n := len(b)
		if b = row(b, c.Of.key, c.Of.val); len(b)-start > room {
			if n == start+1 {
				n = start
			}
			return b[:n], upto
		}
		upto = c.Mark
	}
	return b, t.changes.Mark()
}
