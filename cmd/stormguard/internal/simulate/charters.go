// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/limiter"
)

// charters is what a world needs of those who agree on charters.
type charters interface {
	// born says that a life has begun. It must not mint before it is confirmed.
	born(m *member)
	// propose has the next charter changed. What is proposed while one is on its way
	// goes together into the one after.
	propose(change func(c *limiter.Charter))
	// completed is how many charters were completed.
	completed() int
}

// An oracle agrees without a word: it sees every node that the net would let it
// reach, and a charter takes a round trip to be made, told, and seen to be complete.
type oracle struct {
	w         *world
	newest    limiter.Charter
	complete  uint64
	losers    []string
	changes   []func(c *limiter.Charter)
	told      []told              // by node
	confirmed []*member           // by node: the life that may mint
	reaches   func(node int) bool // nil is all
}

// told is what a life was told last.
type told struct {
	m                *member
	number, complete uint64
}

// roundTrip is how long agreement takes each time.
const roundTrip = 5 * time.Millisecond

func newOracle(w *world) *oracle {
	o := &oracle{w: w, newest: w.config(0).Charter(), complete: 1, confirmed: make([]*member, w.sc.nodes), told: make([]told, w.sc.nodes)}
	w.net.At(0, o.round)
	return o
}

func (o *oracle) born(m *member) {
	if o.w.net.Now() == 0 {
		o.confirmed[m.id] = m // a founder
		return
	}
	m.node.Mint(0)
}

func (o *oracle) propose(change func(c *limiter.Charter)) { o.changes = append(o.changes, change) }

func (o *oracle) completed() int { return int(o.complete) - 1 }

func (o *oracle) reached(id int) *member {
	if o.reaches != nil && !o.reaches(id) {
		return nil
	}
	return o.w.members[id]
}

// round looks at everybody, and goes on.
func (o *oracle) round() {
	w, now := o.w, o.w.net.Now()
	if o.complete == o.newest.Number && len(o.changes) > 0 {
		from := o.newest
		o.newest.Number++
		o.newest.Settled = o.complete
		o.newest.Roster.Members = slices.Clone(o.newest.Roster.Members)
		for _, change := range o.changes {
			change(&o.newest)
		}
		o.changes = nil
		o.losers = limiter.Losers(from, o.newest)
	}
	if o.complete < o.newest.Number && !slices.ContainsFunc(o.losers, o.lacks) {
		o.complete = o.newest.Number
	}
	for id := range w.members {
		m := o.reached(id)
		if m == nil {
			continue
		}
		own, _ := w.net.Clock(id)
		if told := (told{m, o.newest.Number, o.complete}); o.told[id] != told && o.newest.Number > 1 {
			o.told[id] = told
			if err := m.node.Adopt(own, o.newest); err != nil {
				panic(err) // the scenario is wrong
			}
			m.node.Complete(own, o.complete)
		}
		if o.confirmed[id] != m && o.complete == o.newest.Number {
			o.confirmed[id] = m
			m.node.Mint(gossip.Never)
		}
	}
	w.net.At(now+roundTrip, o.round)
}

// lacks tells whether somebody who loses is not known to keep within the newest.
func (o *oracle) lacks(name string) bool {
	m := o.reached(o.w.number(name))
	return m == nil || m.node.Applied() < o.newest.Number
}
