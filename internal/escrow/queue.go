// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import "time"

// schedule sets the time of the row's next step; never takes the row out of the queue. The
// queue is a binary heap.
func (n *Node) schedule(r *row, at time.Duration) {
	switch {
	case r.queued < 0 && at == never:
		return
	case at == never:
		n.unqueue(r)
		return
	case r.queued < 0:
		r.queued = len(n.queue)
		n.queue = append(n.queue, r)
	}
	r.next = at
	n.fix(r.queued)
}

func (n *Node) unqueue(r *row) {
	r.next = never
	if r.queued < 0 {
		return
	}
	i, last := r.queued, len(n.queue)-1
	n.swap(i, last)
	n.queue[last] = nil
	n.queue = n.queue[:last]
	r.queued = -1
	if i < last {
		n.fix(i)
	}
}

func (n *Node) swap(i, j int) {
	q := n.queue
	q[i], q[j] = q[j], q[i]
	q[i].queued, q[j].queued = i, j
}

// fix restores the heap's order after row i has changed.
func (n *Node) fix(i int) {
	q := n.queue
	for i > 0 && q[i].next < q[(i-1)/2].next {
		n.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < len(q); c++ {
			if q[c].next < q[least].next {
				least = c
			}
		}
		if least == i {
			return
		}
		n.swap(i, least)
		i = least
	}
}
