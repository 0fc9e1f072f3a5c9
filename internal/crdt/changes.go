// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

// Changes lists the elements of a state in the order of their latest change. A change gets
// the next mark and moves its element to the end. So the elements that changed after a mark
// are the tail of the list, each element once. The cost of unacknowledged changes depends on
// how many elements changed, not on how often. The zero value is empty and ready. It is not
// safe for concurrent use.
//
// To append the elements that a peer lacks, oldest change first:
//
//	for c := changes.After(since); c != nil; c = c.Next() {
//		… c.Of, and the peer is complete up to c.Mark
//	}
type Changes[T any] struct {
	first, last *Change[T]
	mark        uint64
}

// A Change is an element's place in the list. An element may be listed without a change,
// with mark 0: then it comes before all changed elements.
type Change[T any] struct {
	Of   T
	Mark uint64 // of the latest change

	prev, next *Change[T]
	listed     bool
}

// Mark returns the mark of the latest change of all elements, 0 if there was none.
func (l *Changes[T]) Mark() uint64 { return l.mark }

// First returns the element whose latest change is the oldest, nil if there is none.
func (l *Changes[T]) First() *Change[T] { return l.first }

// Next returns the element after c. Call it before c is touched or removed.
func (c *Change[T]) Next() *Change[T] { return c.next }

// List puts an element that is not listed before all others, without a change.
func (l *Changes[T]) List(c *Change[T]) {
	c.listed = true
	c.next = l.first
	if l.first != nil {
		l.first.prev = c
	} else {
		l.last = c
	}
	l.first = c
}

// Touch makes c the latest change.
func (l *Changes[T]) Touch(c *Change[T]) {
	l.mark++
	c.Mark = l.mark
	if l.last == c {
		return
	}
	l.Remove(c)
	c.listed = true
	c.prev = l.last
	if l.last != nil {
		l.last.next = c
	} else {
		l.first = c
	}
	l.last = c
}

// Skip counts a change without an element, so that an empty list has a mark.
func (l *Changes[T]) Skip() { l.mark++ }

// Remove takes an element out of the list. Nil, or an element that is not listed, is ignored.
// It makes no change, so peers are not told.
func (l *Changes[T]) Remove(c *Change[T]) {
	if c == nil || !c.listed {
		return
	}
	if c.prev != nil {
		c.prev.next = c.next
	} else {
		l.first = c.next
	}
	if c.next != nil {
		c.next.prev = c.prev
	} else {
		l.last = c.prev
	}
	c.prev, c.next, c.listed = nil, nil, false
}

// After returns the oldest change after a mark, nil if there is none. It walks from both ends
// at once. So its cost is the number of elements after the mark, or of those up to the mark,
// whichever is less: for a peer that lacks nearly everything, each packet begins near the
// front.
func (l *Changes[T]) After(since uint64) (found *Change[T]) {
	front := l.first
	for c := l.last; c != nil && c.Mark > since; c = c.prev {
		if front.Mark > since {
			return front
		}
		front, found = front.next, c
	}
	return found
}
