// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/limiter"
)

const (
	rejoinEvery = 100 * time.Millisecond // who looks whether it still has its share, as fleet/process does
	leaveWithin = 9 * time.Second
)

// A citizen is a member's part in how the fleet changes its charter: the section of
// fleet over the member's own session and books, driven as fleet/process drives it.
type citizen struct {
	m        *member
	charters *fleet.Charters
	weight   int // that it asks for when it is no member
	asked    bool
	lookAt   time.Duration
	leaving  bool
	left     bool // the session is leaving
}

// books are the node's, behind a clock.
type books struct {
	*limiter.Node
	m *member
}

// Applied is that of [fleet.Books]: as of now, and not as of the node's last step.
func (b books) Applied() uint64 {
	own, _ := b.m.w.net.Clock(b.m.id)
	b.Tick(own)
	return b.Node.Applied()
}

// newCitizen is the part of a life that begins now. It mints nothing until the
// charter is known to be the newest.
func newCitizen(m *member, now time.Duration) (*citizen, error) {
	m.node.Mint(now)
	c := &citizen{m: m, weight: 1}
	var err error
	c.charters, err = fleet.NewCharters(m.node.Self(), fleet.CharterConfig{
		Fleet: m.node.Config().Fleet, Founding: m.node.Config().Charter(), OnSilence: m.node.Config().OnSilence.Policy,
	}, books{m.node, m}, now)
	return c, err
}

// step does what is due, and what the session must hear of.
func (c *citizen) step(now time.Duration, wall int64, actions []gossip.Action, changed bool) ([]gossip.Action, bool) {
	m := c.m
	changed = c.tick(now) || changed
	if m.ticket != 0 {
		if number, done := c.charters.Outcome(m.ticket); done {
			m.ticket = 0
			if number != 0 {
				actions = m.step(now, gossip.Event{Kind: gossip.Evict, Name: m.evicts, Wall: wall}, actions)
			}
		}
	}
	if c.ended(now) {
		actions = m.step(now, gossip.Event{Kind: gossip.Leave, Wall: wall}, actions)
	}
	return actions, changed
}

// wake is when step wants to be called next.
func (c *citizen) wake() time.Duration {
	if c.left {
		return gossip.Never
	}
	return c.charters.Wake()
}

// tick lets time pass, and tells whether it was due.
func (c *citizen) tick(now time.Duration) bool {
	if c.left || now < c.charters.Wake() {
		return false
	}
	c.charters.Tick(now)
	if !c.asked && !c.leaving && now >= c.lookAt {
		c.lookAt = now + rejoinEvery
		s := c.charters.Status(now)
		c.asked = s.Settled && (s.Member || !s.Evicted && c.charters.Join(now, c.weight) == nil)
	}
	return true
}

// ended tells whether nobody waits for a leaver's share any more.
func (c *citizen) ended(now time.Duration) bool {
	if !c.leaving || c.left {
		return false
	}
	done, err := c.charters.Left(now)
	c.left = done && err == nil
	return c.left
}

// leave begins to give the share up; who is no member has none.
func (c *citizen) leave(now time.Duration) {
	switch err := c.charters.Leave(now, now+leaveWithin); {
	case errors.Is(err, fleet.ErrMember):
	case err != nil:
		panic(err) // the scenario is wrong
	}
	c.leaving = true
}

// ask has a node's process do something about the charter, and its driver see it.
func (w *world) ask(at time.Duration, id int, do func(c *citizen, now time.Duration)) {
	w.net.At(at, func() {
		m := w.members[id]
		if m == nil || m.citizen == nil {
			return
		}
		own, _ := w.net.Clock(id)
		do(m.citizen, own)
		m.kicked = true
		w.net.Poke(id)
	})
}

// propose has a member ask for a change.
func (w *world) propose(at time.Duration, id int, change fleet.Change) {
	w.ask(at, id, func(c *citizen, now time.Duration) {
		if _, err := c.charters.Propose(now, change); err != nil {
			panic(err)
		}
	})
}

// evict has a member's operator say that another one does not run, and end its
// life for the gossip when that is agreed on.
func (w *world) evict(at time.Duration, id, whom int) {
	w.ask(at, id, func(c *citizen, now time.Duration) {
		ticket, err := c.charters.Evict(now, w.names[whom])
		if err != nil {
			panic(err)
		}
		c.m.ticket, c.m.evicts = ticket, w.names[whom]
	})
}

// agreed is what all that live know: how many charters after the founding one are
// complete, and how many members have a share in the newest; 0 if they differ.
func (w *world) agreed() (completed, members int) {
	first := true
	var number uint64
	for id, m := range w.members {
		if m == nil || m.citizen == nil || w.net.Process(id) == nil {
			continue
		}
		own, _ := w.net.Clock(id)
		s := m.citizen.charters.Status(own)
		n := 0
		for _, member := range s.Charter.Roster.Members {
			if !member.NoShare {
				n++
			}
		}
		if first {
			first, number, completed, members = false, s.Charter.Number, int(s.Complete)-1, n
			continue
		}
		if completed = min(completed, int(s.Complete)-1); number != s.Charter.Number || members != n {
			members = 0
		}
	}
	return completed, members
}

// over ends a process whose session says that its life is over: by leaving, or
// because another has its name or it was evicted. Who did not leave is started again.
func (m *member) over(how gossip.ActionKind) {
	w := m.w
	w.net.At(w.net.Now(), func() {
		if w.members[m.id] != m {
			return
		}
		w.net.Crash(m.id)
		w.members[m.id] = nil
		if how == gossip.Displaced {
			w.net.Restart(m.id)
		}
	})
}
