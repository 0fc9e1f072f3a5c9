// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// A Fleet connects a Guard to the other processes that run the same consumers. The Member
// of a fleet.Process is a Fleet. It decides about breakers, compares storms, and sums up
// the counts of the processes.
type Fleet interface {
	circuit.Fleet
	storm.Fleet

	// Count takes what this process has counted for a key since the last call: successful
	// handler calls, failed calls, and dead letters. The keys are those of the storms. The
	// Guard calls it every 250ms, or every 500ms while it is idle, also if all counts are 0.
	Count(key string, handled, failed, deadLettered uint64) error

	// OthersSucceeded returns how long ago a call for this key last succeeded in another
	// process; false if that is not known. The result may be too large, but never too
	// small.
	OthersSucceeded(key string) (ago time.Duration, ok bool)
}

// WithFleet makes the Guard a member of a fleet. The breakers of all processes open, probe
// and close together. The state of a breaker goes with a source to its next process. A
// storm of the fleet stops dead-lettering here, too. The default is no fleet: the Guard
// decides alone. A Fleet serves one Guard at a time; [New] fails for a second one.
//
// A fleet knows scopes only by name. So all processes need the same [Config.Group] and
// [Config.Scope] for the same consumers, and different groups for different consumers.
func WithFleet(f Fleet) Option { return func(g *Guard) { g.fleet = f } }

// WithDeadLetterLimiter paces the dead letters of all sources, in front of their writers.
// Messages over the limit wait without another handler call, and keep their credit. The
// default is no limit.
func WithDeadLetterLimiter(l Limiter) Option { return func(g *Guard) { g.letterPace = l } }

const (
	// fleetRest is how often a parked sweeper steps the fleet.
	fleetRest = 500 * time.Millisecond
	// probeSoon is how soon a waiting message must be due to count as a message to probe
	// with.
	probeSoon = 100 * time.Millisecond
	// callFresh is how long a refused call of a function counts as a waiting message.
	callFresh = time.Second
)

// path is the breaker scope of a source: the consumer group, the topic or queue, and the
// partition if there is one. A coarser Config.Scope leaves out the last elements.
func (g *Guard) path(cfg SourceConfig) []string {
	path := []string{g.cfg.Group}
	if g.cfg.Scope != ScopeGroup {
		path = append(path, cmp.Or(cfg.Destination, cfg.Name))
	}
	if g.cfg.Scope == ScopePartition && cfg.Partition != "" {
		path = append(path, cfg.Partition)
	}
	return path
}

// leaf claims the breaker of a source by [circuit.Scopes.Leaf], or of a function by
// [circuit.Scopes.Aside]. When it returns, the breaker is as the fleet wants it.
func (g *Guard) leaf(cfg SourceConfig, slow time.Duration, claim func(*circuit.Scopes, ...string) (*circuit.Leaf, error)) (*circuit.Leaf, error) {
	path := g.path(cfg)
	leaf, err := claim(g.scopes, path...)
	if err != nil {
		return nil, err
	}
	g.restore(g.now(), leaf, path)
	if g.fleet == nil {
		return leaf, nil
	}
	if err := g.fleet.Adopt(g.now(), leaf.Breaker, path, slow); err != nil {
		g.log.Warn("the fleet has no part in a breaker, which goes by itself", "scope", leaf.Name(), "source", cfg.Name, "error", err)
	}
	g.sweeper.stir() // the fleet may change the breaker by itself
	return leaf, nil
}

// unclaim ends a claim of a breaker, also in the fleet.
func (g *Guard) unclaim(leaf *circuit.Leaf) {
	if g.fleet != nil {
		g.fleet.Leave(g.now(), leaf.Breaker)
	}
	g.scopes.Release(leaf)
}

// stepFleet tells the fleet the state of the breakers, and lets the fleet change them. busy
// tells whether the fleet is busy.
func (g *Guard) stepFleet(now time.Duration) (busy bool) {
	if g.fleet == nil {
		return false
	}
	clear(g.waiting)
	for _, s := range g.all() {
		if b := s.waits(now); b != nil {
			g.waiting[b] = true
		}
	}
	return g.fleet.Step(now, g.waiting)
}

// compareStorms reports the readings of the storm detectors to the fleet, summed up over
// the sources of a topic or queue, and gives the fleet's verdict to the sources. The
// sweeper calls it as often as the detectors step.
func (g *Guard) compareStorms(now time.Duration) {
	if g.fleet == nil {
		return
	}
	for _, sum := range g.storms {
		*sum = stormSum{err: sum.err}
	}
	all := g.all()
	for _, s := range all {
		key, storm, ok := s.detected()
		if !ok {
			continue
		}
		sum := g.storms[key]
		if sum == nil {
			sum = new(stormSum)
			g.storms[key] = sum
		}
		sum.add(storm)
	}
	for key, sum := range g.storms {
		if sum.sources == 0 {
			g.fleet.Withdraw(key)
			delete(g.storms, key)
			continue
		}
		err := g.fleet.Report(key, sum.storm(g.scopes.Config().Quorum))
		if err != nil && sum.err == nil {
			g.log.Warn("the fleet takes no reports of storms", "key", key, "error", err)
		}
		sum.err = err
		sum.verdict = g.fleet.Storm(key)
	}
	for _, s := range all {
		if key, _, ok := s.detected(); ok {
			s.setFleetStorm(now, g.storms[key].verdict)
		}
	}
}

// leaveFleet ends the Guard's membership in the fleet, when the sweeper has ended.
func (g *Guard) leaveFleet() {
	if g.fleet == nil {
		return
	}
	g.shareTotals(g.now())
	for key := range g.storms {
		g.fleet.Withdraw(key)
		delete(g.storms, key)
	}
	g.detachFleet()
}

// stormSum is the sum of the storm detectors of one key.
type stormSum struct {
	sources, active int
	sum             dlq.Storm
	verdict         dlq.FleetStorm
	err             error // error of the latest report
}

func (m *stormSum) add(s dlq.Storm) {
	m.sources++
	if s.Active {
		m.active++
	}
	m.sum.Failed += s.Failed
	m.sum.Outcomes += s.Outcomes
	m.sum.Diverted += s.Diverted
	m.sum.Attempts = max(m.sum.Attempts, s.Attempts)
	m.sum.Age = max(m.sum.Age, s.Age)
	m.sum.Since = max(m.sum.Since, s.Since)
	m.sum.Config = s.Config
	if s.Basis != "" {
		m.sum.Basis = s.Basis
	}
}

// storm is the sum; it is active if at least share of the sources, and at least one, are
// in storm.
func (m *stormSum) storm(share float64) dlq.Storm {
	s := m.sum
	s.Active = m.active > 0 && float64(m.active) >= share*float64(m.sources)
	return s
}

// stormKey is the key by which the fleet compares storms: sources of one topic or queue
// have the same key.
func (g *Guard) stormKey(cfg SourceConfig) string {
	return g.cfg.Group + "/" + cmp.Or(cfg.Destination, cfg.Name)
}

// waits returns the source's breaker if it is not closed and a message waits for it, else
// nil.
func (s *Source[M]) waits(now time.Duration) *circuit.Breaker {
	if s.c.gate == nil || s.c.gate.Breaker.Closed() {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.c.waits(now) {
		return nil
	}
	return s.c.gate.Breaker
}

// waits tells whether there is a message to probe with, now or within probeSoon. A running
// probe counts, because another may follow.
func (c *machine[M]) waits(now time.Duration) bool {
	if c.paused || c.ended || c.stopped || c.asked > now || c.limited > now+probeSoon {
		return false
	}
	for _, it := range c.busy {
		if it.probe {
			return true
		}
	}
	switch {
	case c.count[processing] >= c.policy.Workers:
		return false
	case len(c.due) > 0 && !c.due[0].decided() && c.due[0].due <= now+probeSoon:
		return true
	case c.order() == OrderNone:
		return c.again.len() > 0 || c.queued > 0
	}
	return c.ready.len() > 0
}

func (s *Source[M]) detected() (key string, storm dlq.Storm, ok bool) {
	return s.stormKey, s.seen.detected, s.seen.detected.Config != dlq.StormConfig{} && !s.seen.detected.Config.Off
}

// setFleetStorm takes the fleet's verdict about the source's key. The sweeper calls it.
func (s *Source[M]) setFleetStorm(now time.Duration, f dlq.FleetStorm) {
	s.mu.Lock()
	changed := s.c.fleetStorm.Active != f.Active
	s.c.fleetStorm = f
	if changed && f.Active && s.c.gate != nil && s.c.gate.Closed() {
		s.c.gate.Trip(now, causeStorm)
		s.c.notice(now)
	}
	s.unlock(now)
	if changed {
		s.g.journal.storm(now, s.cfg, s.stormKey, true, f.Active, f.String())
		s.nudge()
	}
}

// waits returns the breaker if a call was refused lately: another call may follow.
func (f *Func[M]) waits(now time.Duration) *circuit.Breaker {
	if f.gate == nil || f.gate.Breaker.Closed() || f.closed.Load() || f.pausedUntil(now) != 0 {
		return nil
	}
	if at := time.Duration(f.refused.Load()); at == 0 || now-at > callFresh {
		return nil
	}
	return f.gate.Breaker
}

func (*Func[M]) detected() (key string, storm dlq.Storm, ok bool) { return "", dlq.Storm{}, false }

func (*Func[M]) setFleetStorm(time.Duration, dlq.FleetStorm) {}

// fleetScope is the fleet's decision about a breaker; zero without a fleet or a breaker.
func (g *Guard) fleetScope(gate *circuit.Leaf) breaker.FleetScope {
	if g.fleet == nil || gate == nil {
		return breaker.FleetScope{}
	}
	s, _ := g.fleet.Scope(gate.Breaker)
	return s
}

// never is a deadline that does not come.
const never = time.Duration(math.MaxInt64)

// heldFor is for how long at least a breaker admits no call; 0 if it would admit a probe.
// A breaker that the fleet holds has no deadline of its own, but the fleet's.
func heldFor(b breaker.Snapshot, f breaker.FleetScope, base, now time.Duration) time.Duration {
	if b.Held && b.Until == never {
		return max(f.Left, base)
	}
	return max(0, b.Until-now)
}

// fleetDetail is the text for a breaker that the fleet holds.
func fleetDetail(f breaker.FleetScope, cause breaker.Cause) string {
	var b strings.Builder
	fmt.Fprintf(&b, "held by the fleet: %s", f.Name)
	if f.State == breaker.Closed {
		b.WriteString(" was taken over")
	} else {
		fmt.Fprintf(&b, " is open, period %d", f.Round)
	}
	fmt.Fprintf(&b, ": %s; %d processes heard, %d decide", cause, f.Heard, f.Need)
	return b.String()
}
