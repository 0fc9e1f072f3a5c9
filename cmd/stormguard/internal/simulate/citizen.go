// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

const leaveWithin = 9 * time.Second

// A citizen is a member's part in the fleet's configuration. It runs the configurator over
// the member's session and limiter, in the same way as package fleet.
type citizen struct {
	m       *member
	config  *fleetstate.Configurator
	leaving bool // leave was called
	left    bool // the share is given up, and the session leaves
}

// books is the member's limiter with the member's clock: the applier of its configurator.
type books struct {
	*escrow.Node
	m *member
}

// Applied is [fleetstate.Applier]'s, as of now, not as of the node's last step.
func (b books) Applied() uint64 {
	own, _ := b.m.w.net.Clock(b.m.id)
	b.Tick(own)
	return b.Node.Applied()
}

// newCitizen makes the citizen of an incarnation that begins now. The node mints nothing
// until the citizen has read the register.
func newCitizen(m *member, now time.Duration) (*citizen, error) {
	m.node.Mint(now)
	c := &citizen{m: m}
	limits := m.node.Config()
	var err error
	c.config, err = fleetstate.NewConfigurator(m.node.Self(), fleetstate.ConfiguratorConfig{
		Fleet: limits.Fleet, Initial: limits.Configuration(), Weight: 1, OnSilence: limits.OnSilence.Policy,
	}, books{m.node, m}, now)
	return c, err
}

// step ticks the configurator, writes to the register, and ends the session of a leaver.
// It returns changed as true if the session must step.
func (c *citizen) step(now time.Duration, wall int64, actions []gossip.Action, changed bool) ([]gossip.Action, bool) {
	if !c.left && now >= c.config.Wake() {
		c.config.Tick(now)
		changed = true
	}
	c.write(now)
	if c.ended(now) {
		actions = c.m.step(now, gossip.Event{Kind: gossip.Leave, Wall: wall}, actions)
	}
	return actions, changed
}

// wake returns when step must be called next.
func (c *citizen) wake() time.Duration {
	if c.left {
		return gossip.Never
	}
	return c.config.Wake()
}

// ended tells, once, that a leaver's share is given up.
func (c *citizen) ended(now time.Duration) bool {
	if !c.leaving || c.left {
		return false
	}
	done, err := c.config.Left(now)
	c.left = done && err == nil
	return c.left
}

// leave begins to give up the share. A process that is no member has none.
func (c *citizen) leave(now time.Duration) {
	switch err := c.config.Leave(now, now+leaveWithin); {
	case errors.Is(err, fleetstate.ErrMember):
	case err != nil:
		panic(err) // the scenario is wrong
	}
	c.leaving = true
}

// ask calls do for a node's citizen at the time at, and wakes its driver.
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

// set has the operator at the node id change the newest configuration.
func (w *world) set(at time.Duration, id int, change fleetstate.Change) {
	w.ask(at, id, func(c *citizen, now time.Duration) {
		number, _ := c.config.Number()
		if _, err := c.config.Set(now, number, change, "simulate"); err != nil {
			panic(err)
		}
	})
}

// evict has the operator at the node id evict the node whom.
func (w *world) evict(at time.Duration, id, whom int) {
	w.ask(at, id, func(c *citizen, now time.Duration) {
		number, _ := c.config.Number()
		if _, err := c.config.Evict(now, number, w.names[whom], "simulate"); err != nil {
			panic(err)
		}
	})
}

// agreed returns what all running nodes agree on: how many configurations after the initial
// one are complete, and how many members have a share in the newest. members is 0 if the
// nodes differ.
func (w *world) agreed() (completed, members int) {
	first := true
	var number uint64
	for id, m := range w.members {
		if m == nil || m.citizen == nil || w.net.Process(id) == nil {
			continue
		}
		own, _ := w.net.Clock(id)
		s := m.citizen.config.Status(own)
		n := 0
		for _, member := range s.Configuration.Roster.Members {
			if !member.NoShare {
				n++
			}
		}
		if first {
			first, number, completed, members = false, s.Configuration.Number, int(s.Complete)-1, n
			continue
		}
		if completed = min(completed, int(s.Complete)-1); number != s.Configuration.Number || members != n {
			members = 0
		}
	}
	return completed, members
}

// over ends a process whose incarnation is over: it has left, was evicted, or another
// process has its name. A process that did not leave is started again.
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
