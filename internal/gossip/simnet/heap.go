// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet

import "time"

// flight is a packet on its way, or a scheduled call. It has no pointers, so the garbage collector
// does not scan a heap of a million flights. It has 32 bytes.
type flight struct {
	at   time.Duration // true time of arrival
	seq  uint64        // order of sending; it decides between flights of one instant
	buf  int32         // index into Net.bufs or Net.tasks
	from int32
	to   int32
}

func (f *flight) before(g *flight) bool {
	return f.at < g.at || f.at == g.at && f.seq < g.seq
}

// flights is a 4-ary heap: half the depth of a binary one, and the four children
// share two cache lines.
type flights []flight

func (h *flights) push(f flight) {
	s := append(*h, f)
	i := len(s) - 1
	for i > 0 {
		up := (i - 1) / 4
		if !f.before(&s[up]) {
			break
		}
		s[i] = s[up]
		i = up
	}
	s[i] = f
	*h = s
}

func (h *flights) pop() flight {
	s := *h
	top := s[0]
	n := len(s) - 1
	f := s[n]
	s = s[:n]
	*h = s
	if n == 0 {
		return top
	}
	i := 0
	for {
		least := 4*i + 1
		if least >= n {
			break
		}
		for c := least + 1; c < min(4*i+5, n); c++ {
			if s[c].before(&s[least]) {
				least = c
			}
		}
		if !s[least].before(&f) {
			break
		}
		s[i] = s[least]
		i = least
	}
	s[i] = f
	return top
}

// timers has one wake instant for each node, in a binary heap that knows the place of each node. So
// a timer is moved in place, and the heap never has more entries than there are nodes.
type timers struct {
	at   []time.Duration // by node; never if the node has no timer
	heap []int32         // nodes
	pos  []int32         // by node: index into heap
}

func (t *timers) grow() {
	node := int32(len(t.at))
	t.at = append(t.at, never)
	t.pos = append(t.pos, node)
	t.heap = append(t.heap, node)
}

func (t *timers) less(a, b int32) bool {
	return t.at[a] < t.at[b] || t.at[a] == t.at[b] && a < b
}

// next returns the node whose timer is first, and its instant.
func (t *timers) next() (node int32, at time.Duration) {
	if len(t.heap) == 0 {
		return 0, never
	}
	return t.heap[0], t.at[t.heap[0]]
}

func (t *timers) set(node int32, at time.Duration) {
	if t.at[node] == at {
		return
	}
	t.at[node] = at
	i := int(t.pos[node])
	for i > 0 && t.less(node, t.heap[(i-1)/2]) {
		i = t.place(t.heap[(i-1)/2], i, (i-1)/2)
	}
	for {
		c := 2*i + 1
		if c >= len(t.heap) {
			break
		}
		if c+1 < len(t.heap) && t.less(t.heap[c+1], t.heap[c]) {
			c++
		}
		if !t.less(t.heap[c], node) {
			break
		}
		i = t.place(t.heap[c], i, c)
	}
	t.heap[i], t.pos[node] = node, int32(i)
}

// place puts a node where another was and returns the hole that it leaves.
func (t *timers) place(node int32, at, from int) int {
	t.heap[at], t.pos[node] = node, int32(at)
	return from
}
