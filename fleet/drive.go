// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

const (
	statusEvery  = time.Second           // how often this process tells its status, at most
	statusApart  = 25 * time.Millisecond // the least pause between two, for each other process, since each is told
	statusRepeat = 4 * time.Minute       // after this an unchanged status is told again: fleetstate.MemberStatuses forgets after 10 min
)

// A driver is the state of the process's goroutine, run.
type driver struct {
	roster fleetstate.Roster // the roster that votes on breakers
	scopes map[string]breaker.State
	sayAt  time.Duration
	told   fleetstate.MemberStatus // the status that was last told
	toldAt time.Duration
	said   string // the problem that was last logged
	broke  map[string]brokeSaid

	refused map[string]*refusals // by section
	warned  []string             // warnings of the latest configuration

	evicted uint64      // the eviction that was last logged
	writing atomic.Bool // a write is in flight
	counted uint64      // changes of the configuration's section at the latest step
}

func (d *driver) init(r fleetstate.Roster) {
	d.roster, d.scopes, d.broke = r, map[string]breaker.State{}, map[string]brokeSaid{}
	d.refused = map[string]*refusals{}
}

// run is the goroutine that makes time pass for the parts without a clock of their own.
func (p *Process) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-p.poked:
		case <-p.node.Done():
			// The node was displaced or closed. It hears nothing any more, so the process must not
			// mint, also if the register is read or a configuration is loaded later.
			p.config.End(p.clock())
			if err := p.node.Err(); !errors.Is(err, gossip.ErrClosed) {
				p.log.Error("fleet: this process is out of the fleet and mints nothing; start it again", "error", err)
			}
			return
		case <-p.ctx.Done():
			return
		}
		now := p.clock()
		before := p.drive.counted
		p.config.Tick(now)
		p.writeNext(now)
		if p.drive.counted = p.config.Counted(); p.drive.counted != before {
			p.node.Kick()
		}
		p.follow(now)
		p.writeDown()
		if now >= p.drive.sayAt {
			p.drive.sayAt = now + statusEvery
			p.reportStatus(now)
		}
		timer.Reset(max(min(p.config.Wake(), p.drive.sayAt, now+p.member.Pass())-p.clock(), time.Millisecond))
	}
}

// follow makes the newest roster the one that votes on breakers.
func (p *Process) follow(now time.Duration) {
	if number, _ := p.config.Number(); number == p.drive.roster.Number || number == 0 {
		return
	}
	s := p.config.Status(now)
	roster := rosterOf(s.Configuration)
	if err := p.verdicts.SetRoster(now, roster); err != nil {
		p.log.Error("fleet: the roster was refused", "number", roster.Number, "error", err)
	}
	p.log.Info("fleet: configuration", "number", roster.Number, "members", len(roster.Names), "member", s.Member)
	p.warn(s.Configuration)
	if p.register == nil && s.Loaded < roster.Number {
		p.log.Warn("fleet: others have loaded a newer configuration; this process uses the smaller of its shares until it is given that one",
			"number", roster.Number, "loaded", s.Loaded)
	}
	if s.Evicted > p.drive.evicted {
		p.drive.evicted = s.Evicted
		if p.register == nil {
			p.log.Warn("fleet: a newer configuration leaves this process out although it runs; it only borrows", "number", s.Evicted, "name", p.self.Name)
		} else {
			p.log.Warn("fleet: this process was evicted although it runs; it asks for its share again", "number", s.Evicted, "name", p.self.Name)
		}
	}
	was := p.drive.roster.Names
	p.drive.roster = roster
	var moved []string
	for _, n := range roster.Names {
		if !slices.Contains(was, n) {
			moved = append(moved, "+"+n)
		}
	}
	for _, n := range was {
		if !slices.Contains(roster.Names, n) {
			moved = append(moved, "-"+n)
		}
	}
	if len(moved) > 0 && p.first() {
		p.write(fleetstate.Entry{Kind: fleetstate.EntryConfiguration, Number: roster.Number, Subject: "roster", Text: strings.Join(moved, " ")})
	}
}

// warn logs what the limits of a configuration cannot do well. It does not repeat what it logged of
// the configuration before.
func (p *Process) warn(c escrow.Configuration) {
	limits := p.cfg.limits
	limits.Limit, limits.Limits, limits.Roster = c.Limit, c.Limits, c.Roster
	all := limits.Warnings()
	for _, why := range all {
		if !slices.Contains(p.drive.warned, why) {
			p.log.Warn("fleet: a limit is allowed and will not work well", "number", c.Number, "why", why)
		}
	}
	if len(c.Roster.Members) > 1 { // for one alone there are none, and the others may come again
		p.drive.warned = all
	}
}

// write adds an entry to the journal, which counts lost entries.
func (p *Process) write(e fleetstate.Entry) { _ = p.journal.Add(e) }

// first reports whether this process writes the journal entries for facts that all processes see.
// It does if its name is the first of the roster's names that it hears. In a split each side has
// one such process.
func (p *Process) first() bool {
	heard := map[string]bool{p.self.Name: true}
	for _, peer := range p.node.Peers() {
		heard[peer.Name] = peer.State == gossip.Fresh && peer.HearsUs
	}
	names := p.drive.roster.Names
	i := slices.IndexFunc(names, func(n string) bool { return heard[n] })
	return i >= 0 && names[i] == p.self.Name
}

// stormChanged writes a storm of the fleet to the journal. It runs on the goroutine that steps the
// member: a guard's or the process's own.
func (p *Process) stormChanged(c fleetstate.StormChange) {
	kind := fleetstate.EntryStormEnded
	if c.Active {
		kind = fleetstate.EntryStormBegan
	}
	p.write(fleetstate.Entry{Kind: kind, Subject: c.Key, Text: c.Reason})
}

// reportStatus tells this process's status, logs problems, and writes scopes that opened or closed to
// the journal.
func (p *Process) reportStatus(now time.Duration) {
	peers := p.node.Peers()
	sampleClocks(p.journal, peers)
	p.keepFleetTime()
	if s := p.memberStatus(); p.drive.says(now, &s, len(peers)) {
		p.statuses.Say(s)
	}
	if problem := p.configuration(now, p.config.Status(now)).Problem; problem != p.drive.said {
		p.drive.said = problem
		if problem == "" {
			p.log.Info("fleet: the configuration has no problem any more")
		} else {
			p.log.Error("fleet: the configuration has a problem", "problem", problem)
		}
	}
	p.watchLag(now)
	p.logOverlending(now)
	p.logRefusals(now)
	scopes := p.member.Scopes()
	before := p.drive.scopes
	p.drive.scopes = make(map[string]breaker.State, len(scopes))
	for _, s := range scopes {
		p.drive.scopes[s.Name] = s.State
		open, was := s.State != breaker.Closed, before[s.Name] != breaker.Closed
		if open == was || shared(s.Name) && !p.first() {
			continue
		}
		kind := fleetstate.EntryClosed
		if open {
			kind = fleetstate.EntryOpened
		}
		p.write(fleetstate.Entry{Kind: kind, Subject: s.Name, Text: string(s.Cause)})
	}
}

// sampleClocks tells the journal the offsets of the peers' clocks. The clock of a peer that has
// gone does not count: else the journal could follow stamps that are as far ahead as that clock.
// The clock is not forgotten either: the first packet of a peer that is back would break the 50 ms
// rule.
func sampleClocks(j *fleetstate.Journal, peers []gossip.Peer) {
	for _, peer := range peers {
		switch {
		case peer.Heard >= backFor:
			j.IgnoreClock(peer.Replica)
		case peer.HasOffset:
			j.Sample(peer.Replica, peer.Offset, peer.RTT)
		}
	}
}

// says reports whether to tell this process's status now. It does so when the status has changed,
// but not too often for the number of others, and often enough not to be forgotten. Unacked and
// SyncDelay always differ, so they do not count as a change.
func (d *driver) says(now time.Duration, s *fleetstate.MemberStatus, others int) bool {
	was, is := d.told, *s
	was.Unacked, was.SyncDelay, is.Unacked, is.SyncDelay = 0, 0, 0, 0
	since := now - d.toldAt
	if d.toldAt != 0 && (since < time.Duration(others)*statusApart || since < statusRepeat && reflect.DeepEqual(was, is)) {
		return false
	}
	d.told, d.toldAt = *s, now
	return true
}

// logOverlending logs members that lend more tokens than they can have: at once, and then once a minute
// while it goes on.
func (p *Process) logOverlending(now time.Duration) {
	for name, n := range p.limits.Stats().Broke {
		if s := p.drive.broke[name]; n > s.count && (s.count == 0 || now-s.at >= brokeEvery) {
			p.drive.broke[name] = brokeSaid{n, now}
			p.log.Error("fleet: a member lends more than its share; the loans are refused. Look at that process",
				"member", name, "loans", n, "then", "stormguard fleet evict "+name)
		}
	}
}

const brokeEvery = time.Minute

type brokeSaid struct {
	count uint64
	at    time.Duration
}

// shared reports whether several processes may have the scope. group/topic is shared;
// group/topic/partition belongs to one process.
func shared(scope string) bool { return strings.Count(scope, "/") < 2 }
