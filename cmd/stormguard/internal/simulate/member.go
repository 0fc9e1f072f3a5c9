// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"math/rand/v2"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/gossip/simnet"
)

// stoppedFor is how late a message may be handled. A message that is later than this fell
// into a stop of its process, and is dropped.
const stoppedFor = 100 * time.Millisecond

// A member is one incarnation of a consumer process. It has a gossip session, the limiter
// as one section of the session, and arriving messages.
type member struct {
	w    *world
	id   int
	rng  *rand.Rand
	next time.Duration // true time of the next message

	self    crdt.Replica
	session *gossip.Session // nil if nothing is shared
	limits  gossip.Section  // node or pool
	node    *escrow.Node    // nil if the limit is pooled
	pool    *escrow.Set     // replaces node if the limit is pooled
	handle  *escrow.Handle  // of the only key of pool
	citizen *citizen        // nil unless the configuration changes
	seeds   []int           // nodes that it has still to join
	kicked  bool            // the configuration was used: the session must step
	waiting []int           // messages that wait for a token, by key
	waits   int             // the sum of waiting
	out     []byte          // packets of the current Step
}

// boot makes a member of the node with this number.
func (w *world) boot(id int) simnet.Boot {
	return func(incarnation int, rng *rand.Rand) simnet.Process {
		self := crdt.Replica{Name: w.names[id], Incarnation: uint64(incarnation)}
		if w.sc.twin && id == w.sc.nodes-1 {
			self.Incarnation += 1000 // the twin was started later
		}
		m := &member{w: w, id: id, rng: rng, self: self, waiting: make([]int, len(w.keys))}
		now, _ := w.net.Clock(id)
		must(m.begin(now))
		if w.shared() {
			section := m.limits
			if w.tap != nil {
				section = &tapped{Section: section, tap: w.tap, w: w, id: id}
			}
			if w.ears != nil {
				section = &listening{Section: section, ears: w.ears, w: w, id: id}
			}
			options := []gossip.Option{gossip.WithSection("limiter", section), gossip.WithRand(rng.Float64)}
			if m.citizen != nil {
				options = append(options, gossip.WithSection("configuration", m.citizen.config))
			}
			var err error
			m.session, err = gossip.New(
				gossip.Config{Cluster: "simulate", Self: self, Floor: w.sc.floor, MaxPeers: max(512, w.sc.nodes)}, options...)
			must(err)
			m.seeds = w.seeds(id)
		}
		m.next = w.draw(m, w.net.Now())
		w.members[id] = m
		if m.citizen != nil {
			m.citizen.read()
		}
		return m
	}
}

// must panics if the scenario is wrong.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// begin makes the limiter of an incarnation, and its part in the fleet's configuration.
func (m *member) begin(now time.Duration) (err error) {
	w := m.w
	if w.sc.pooled {
		cfg := escrow.Config{Limit: escrow.Limit{Rate: w.sc.rate, Burst: w.sc.burstTokens}, Strategy: escrow.Pooled}
		m.pool, err = escrow.New(m.self, cfg, escrow.WithClock(func() time.Duration {
			own, _ := w.net.Clock(m.id)
			return own
		}))
		if err == nil {
			m.handle, m.limits = m.pool.Key(w.keys[0]), m.pool
		}
		return err
	}
	if m.node, err = escrow.NewNode(m.self, w.config(m.id), now); err != nil {
		return err
	}
	m.limits = m.node
	if w.sc.changes && w.shared() {
		m.citizen, err = newCitizen(m, now)
	}
	return err
}

// Step is [simnet.Process].
func (m *member) Step(now time.Duration, ev gossip.Event, actions []gossip.Action) []gossip.Action {
	m.out = m.out[:0]
	for _, seed := range m.seeds {
		actions = m.step(now, gossip.Event{Kind: gossip.Join, Addr: simnet.Addr(seed), Wall: ev.Wall}, actions)
	}
	m.seeds = nil
	changed := ev.Kind != gossip.Wake || m.kicked
	m.kicked = false
	if ev.Kind == gossip.Packet && m.session != nil {
		actions = m.step(now, ev, actions)
	}
	t := m.w.net.Now()
	if t-m.next > stoppedFor { // the process was stopped, and got no messages
		m.next = m.w.draw(m, t)
	}
	for m.next <= t+time.Microsecond {
		changed = m.message(now, t) || changed
		m.next = m.w.draw(m, m.next)
	}
	if m.citizen != nil {
		actions, changed = m.citizen.step(now, ev.Wall, actions, changed)
	}
	if m.node != nil && m.node.Wake() <= now {
		m.node.Tick(now)
		changed = true
	}
	for k := 0; m.waits > 0 && k < len(m.waiting); k++ {
		for ; m.waiting[k] > 0 && m.node.Serve(now, m.w.keys[k], 1); m.waiting[k]-- {
			m.waits--
			m.w.ledgers[k].admit(t, m.id)
			changed = true
		}
	}
	if m.session != nil && (changed || m.session.Wake() <= now) {
		if m.w.tap != nil {
			m.w.tap.note(m)
		}
		actions = m.step(now, gossip.Event{Kind: gossip.Wake, Wall: ev.Wall}, actions)
	}
	return actions
}

// step steps the session and copies its packets: they are valid only until the session's
// next step.
func (m *member) step(now time.Duration, ev gossip.Event, actions []gossip.Action) []gossip.Action {
	had := len(actions)
	actions = m.session.Step(now, ev, actions)
	for i := had; i < len(actions); i++ {
		start := len(m.out)
		m.out = append(m.out, actions[i].Packet...)
		actions[i].Packet = m.out[start:len(m.out):len(m.out)]
		if k := actions[i].Kind; k != gossip.Send && k != gossip.Rejoined && m.citizen != nil {
			m.over(actions[i].Kind)
		}
	}
	return actions
}

// message handles one message, and tells whether the session may have a change to send.
func (m *member) message(now, t time.Duration) bool {
	k := 0
	if hot := m.w.sc.hot; hot > 1 {
		k = m.rng.IntN(hot)
	}
	l, n := m.w.ledgers[k], m.w.batch(m.id)
	for range n {
		l.ask(t)
	}
	if m.w.sc.wait {
		if m.node.Demand(now, m.w.keys[k], 1) {
			m.waiting[k]++
			m.waits++
		}
		return true
	}
	if m.pool != nil {
		if !m.handle.AllowN(n) {
			return true
		}
	} else if !m.node.Take(now, m.w.keys[k], n) {
		return true
	}
	for range n {
		l.admit(t, m.id)
	}
	return false
}

// Wake is [simnet.Process].
func (m *member) Wake() time.Duration {
	now, _ := m.w.net.Clock(m.id)
	at := gossip.Never
	if len(m.seeds) > 0 {
		return now // it joins the others at once, also without other work
	}
	if m.next < gossip.Never {
		at = now + max(0, m.next-m.w.net.Now())
	}
	if m.node != nil {
		at = min(at, m.node.Wake())
	}
	if m.citizen != nil {
		at = min(at, m.citizen.wake())
	}
	if m.session != nil {
		at = min(at, m.session.Wake())
	}
	return at
}
