// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import "time"

// An agenda orders the peers by one instant of each, the earliest first. It is a binary heap that
// knows the place of each peer, so that moving a peer takes O(log n).
type agenda struct {
	which int // index into a peer's places
	list  []appointment
}

// A session's agendas.
const (
	byDue   = iota // when the next packet leaves
	byFloor        // when the floor allows the next packet; Never for a lost peer
	agendas
)

type appointment struct {
	at time.Duration
	p  *peer
}

// next returns the earliest instant, or Never if the agenda is empty.
func (a *agenda) next() time.Duration {
	if len(a.list) == 0 {
		return Never
	}
	return a.list[0].at
}

// set puts p at an instant.
func (a *agenda) set(p *peer, at time.Duration) {
	place := &p.places[a.which] // one more than the index; 0 is none
	if *place == 0 {
		a.list = append(a.list, appointment{p: p})
		*place = len(a.list)
	} else if a.list[*place-1].at == at {
		return
	}
	a.fix(*place-1, appointment{at, p})
}

// remove takes p out.
func (a *agenda) remove(p *peer) {
	place := &p.places[a.which]
	if *place == 0 {
		return
	}
	i, last := *place-1, len(a.list)-1
	*place = 0
	moved := a.list[last]
	a.list[last] = appointment{}
	a.list = a.list[:last]
	if i < last {
		a.fix(i, moved)
	}
}

// until appends the peers whose instant is not after now, from index i down, in no order.
func (a *agenda) until(now time.Duration, i int, all []*peer) []*peer {
	if i >= len(a.list) || a.list[i].at > now {
		return all
	}
	all = append(all, a.list[i].p)
	return a.until(now, 2*i+2, a.until(now, 2*i+1, all))
}

func (a *agenda) put(i int, e appointment) {
	a.list[i], e.p.places[a.which] = e, i+1
}

// fix puts e at the free index i, or moves it up or down from there.
func (a *agenda) fix(i int, e appointment) {
	for i > 0 && e.at < a.list[(i-1)/2].at {
		a.put(i, a.list[(i-1)/2])
		i = (i - 1) / 2
	}
	for {
		c := 2*i + 1
		if c >= len(a.list) {
			break
		}
		if c+1 < len(a.list) && a.list[c+1].at < a.list[c].at {
			c++
		}
		if a.list[c].at >= e.at {
			break
		}
		a.put(i, a.list[c])
		i = c
	}
	a.put(i, e)
}
