// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

// ranks is a sorted multiset of numbers. It keeps each number once, with the count of messages
// that have it, and drops a number that no message has: so it is never longer than the number
// of messages. drop takes constant time. add and move take a step for each number that they
// pass: add comes from the greatest, move from the old place. A number below the smallest is
// added in constant time. The zero value is empty.
type ranks struct {
	nodes             []rank
	first, last, free int32 // places: indexes in nodes plus 1; 0 is none
}

// rank is a number in ranks. Free ones are linked by next.
type rank struct {
	v          int64
	n          int32 // messages that have the number
	prev, next int32
}

// smallRanks is the greatest capacity that empty ranks keep.
const smallRanks = 1024

func (r *ranks) at(place int32) *rank { return &r.nodes[place-1] }

func (r *ranks) empty() bool { return r.first == 0 }

// least and most are the smallest and the greatest number. The ranks must not be empty.
func (r *ranks) least() int64 { return r.at(r.first).v }
func (r *ranks) most() int64  { return r.at(r.last).v }

// add puts a number in, and returns its place. It is fast for a number that is near the greatest
// or below the smallest.
func (r *ranks) add(v int64) int32 {
	if r.first == 0 || v < r.least() {
		return r.join(v, 0)
	}
	p := r.last
	for r.at(p).v > v {
		p = r.at(p).prev
	}
	return r.join(v, p)
}

// move replaces the number at a place by v, and returns the place of v.
func (r *ranks) move(place int32, v int64) int32 {
	p := place
	for next := r.at(p).next; next != 0 && r.at(next).v <= v; next = r.at(p).next {
		p = next
	}
	for p != 0 && r.at(p).v > v {
		p = r.at(p).prev
	}
	to := r.join(v, p)
	r.drop(place)
	return to
}

// join puts a number in. p is the place of the greatest number that is not above v, 0 for none.
func (r *ranks) join(v int64, p int32) int32 {
	if p != 0 && r.at(p).v == v {
		r.at(p).n++
		return p
	}
	to := r.free
	if to != 0 {
		r.free = r.at(to).next
	} else {
		r.nodes = append(r.nodes, rank{})
		to = int32(len(r.nodes))
	}
	next := r.first
	if p != 0 {
		next = r.at(p).next
	}
	*r.at(to) = rank{v, 1, p, next}
	r.link(p, to)
	r.link(to, next)
	return to
}

// drop takes a number out.
func (r *ranks) drop(place int32) {
	d := r.at(place)
	if d.n--; d.n > 0 {
		return
	}
	r.link(d.prev, d.next)
	d.next, r.free = r.free, place
	if r.first == 0 {
		nodes := r.nodes[:0]
		if cap(nodes) > smallRanks {
			nodes = nil
		}
		*r = ranks{nodes: nodes}
	}
}

// link makes two places neighbours.
func (r *ranks) link(p, next int32) {
	if p == 0 {
		r.first = next
	} else {
		r.at(p).next = next
	}
	if next == 0 {
		r.last = p
	} else {
		r.at(next).prev = p
	}
}
