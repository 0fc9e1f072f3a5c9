// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"maps"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/limiter"
)

// Status is what one process knows about its fleet. Amounts are in tokens.
type Status struct {
	Fleet         string        `json:"fleet"`
	Name          string        `json:"name"` // the process that this view comes from
	Members       []Member      `json:"members"`
	Configuration Configuration `json:"configuration"`

	// Stranded is the sum of the shares of silent members, in [0, 1]: nobody mints them, unless
	// Limits.OnSilence is [TakeOver].
	Stranded float64 `json:"stranded_share"`
	// Skew is how unevenly the tokens lie: the standard deviation of level divided by cap, over the
	// members with a cap. 0 is even, 0.5 the most.
	Skew float64 `json:"token_skew"`

	// SyncDelay is the longest of the latest delays from a change here to its acknowledgement by a
	// peer. Silent peers do not count.
	SyncDelay time.Duration `json:"sync_delay_ns"`

	Backlog    uint64        `json:"journal_backlog"`        // journal entries that the slowest peer lacks
	BacklogAge time.Duration `json:"journal_backlog_age_ns"` // the longest time for which a peer has lacked an entry

	Scopes []Scope `json:"scopes,omitempty"` // scopes of breakers that this process has
	Totals []Total `json:"totals,omitempty"` // by topic or queue of a group

	Quarantine []Quarantined `json:"quarantine,omitempty"` // rules in force
}

// A Total has the fleet's counts for a topic or queue of a group, as far as this process has heard:
// handler calls that succeeded, handler calls that failed, and dead letters.
type Total struct {
	Key          string `json:"key"`
	Handled      uint64 `json:"handled"`
	Failed       uint64 `json:"failed"`
	DeadLettered uint64 `json:"dead_lettered"`
	Processes    int    `json:"processes"` // incarnations of processes that counted
}

// A Member is a process in the roster or a process that was heard, seen from one process of the
// fleet.
type Member struct {
	Name   string `json:"name"`
	Zone   string `json:"zone,omitempty"`
	Region string `json:"region,omitempty"`
	// Version is the version of its program.
	Version string `json:"version,omitempty"`
	// State is "self", "fresh", "silent", "lost", or "unknown" if it was never heard.
	State string        `json:"state"`
	Heard time.Duration `json:"heard_ns"` // how long ago it was heard

	Roster  bool   `json:"roster"`           // the roster names it
	Weight  int    `json:"weight"`           // its weight in the roster
	Number  uint64 `json:"number"`           // the newest configuration that it has
	Applied uint64 `json:"applied"`          // the newest configuration whose limits it keeps, by its own report
	Loaded  uint64 `json:"loaded,omitempty"` // the configuration that an operator loaded into it, if static
	Lacking bool   `json:"lacking"`          // the others wait until it has applied a configuration

	Share  float64 `json:"share"`
	Level  float64 `json:"level"`
	Cap    float64 `json:"cap"`
	Lent   float64 `json:"lent"`
	Pinned float64 `json:"pinned"`

	Unacked   uint64        `json:"unacked"`
	SyncDelay time.Duration `json:"sync_delay_ns"` // as Status.SyncDelay, measured by that process
	RTT       time.Duration `json:"rtt_ns"`
	Offset    time.Duration `json:"clock_offset_ns"`
	Broke     uint64        `json:"clock_violations"`

	// LoansRefused counts loans that were refused because they were far more than its share: its
	// accounts are wrong.
	LoansRefused uint64 `json:"loans_refused,omitempty"`

	Keys []Key `json:"keys,omitempty"` // its busiest keys
}

// A Key is the state of one limit's key in one process.
type Key struct {
	Key      string  `json:"key"`
	Admitted uint64  `json:"admitted"` // since the process started
	Denied   uint64  `json:"denied"`
	Level    float64 `json:"level"`
	Cap      float64 `json:"cap"`
}

// A Configuration is the newest fleet configuration that the process knows.
type Configuration struct {
	Number   uint64                   `json:"number"`
	Complete uint64                   `json:"complete"` // the newest that is complete: all members whose share shrank have applied it
	Resets   uint64                   `json:"resets"`
	Limit    limiter.Limit            `json:"limit"`
	Limits   map[string]limiter.Limit `json:"limits,omitempty"`
	Lacking  []string                 `json:"lacking,omitempty"` // members that have not applied it though their share shrank
	Settled  bool                     `json:"settled"`           // this process knows that it is the newest, or was the newest after its start
	Member   bool                     `json:"member"`
	Evicted  bool                     `json:"evicted"`
	Loaded   uint64                   `json:"loaded,omitempty"` // the number that was loaded into this process, if static
	Away     string                   `json:"away,omitempty"`   // why the register cannot be reached
	Requests int                      `json:"requests"`         // undecided requests of operators to this process
	Log      []Write                  `json:"log,omitempty"`    // the latest writes, oldest first
	// Problem is empty if there is none. Otherwise it says one of these: the limits of this process
	// refuse a configuration, a document of the register was refused, requests of members cannot be
	// written, a peer has another configuration of the same number, or the register takes no write
	// of this process.
	Problem string `json:"problem,omitempty"`
}

// A Write is one write of the configuration.
type Write struct {
	Number uint64    `json:"number"`
	At     time.Time `json:"at"`
	Who    string    `json:"who"`
	What   string    `json:"what"`
}

// A Scope is the fleet's state of a breaker's scope.
type Scope struct {
	Name    string `json:"name"`
	State   string `json:"state"`
	Cause   string `json:"cause,omitempty"`
	Held    bool   `json:"held"`
	Probing bool   `json:"probing"`
}

func configurationOf(s fleetstate.ConfiguratorStatus) Configuration {
	c := Configuration{
		Number: s.Configuration.Number, Complete: s.Complete, Resets: s.Configuration.Resets, Limit: limiter.Limit(s.Configuration.Limit),
		Limits: limitsOf[limiter.Limit](s.Configuration.Limits), Lacking: s.Lacking, Settled: s.Settled, Member: s.Member, Evicted: s.Evicted > 0 && !s.Member, Loaded: s.Loaded, Requests: s.Requests,
	}
	if s.Away != nil {
		c.Away = s.Away.Error()
	}
	for _, r := range s.Log {
		c.Log = append(c.Log, Write{Number: r.Number, At: time.UnixMilli(r.At).UTC(), Who: r.Who, What: r.What})
	}
	switch {
	case s.Err != nil:
		c.Problem = s.Err.Error()
	case s.Refused != nil:
		c.Problem = s.Refused.Error()
	case s.Full != nil:
		c.Problem = s.Full.Error()
	case s.Differs != nil:
		c.Problem = s.Differs.Error()
	}
	return c
}

// Status describes the fleet, for people. It copies everything that it returns.
func (p *Process) Status() Status {
	limits := p.limits.Stats()
	s := Status{Fleet: p.cfg.Fleet, Name: p.self.Name, Stranded: limits.Stranded}
	s.Quarantine = p.quarantined()
	if p.node == nil {
		own := p.limits.Configuration()
		s.Configuration = configurationOf(fleetstate.ConfiguratorStatus{Configuration: own, Complete: own.Number, Settled: true, Member: true})
		s.Members = []Member{p.memberAlone(limits)}
		return s
	}
	now := p.clock()
	configuration := p.config.Status(now)
	s.Configuration = p.configuration(now, configuration)
	j := p.journal.Stats(now)
	s.Backlog, s.BacklogAge = j.Backlog, j.Age
	for _, c := range p.member.Scopes() {
		s.Scopes = append(s.Scopes, Scope{Name: c.Name, State: c.State.String(), Cause: string(c.Cause), Held: c.Held, Probing: c.Probing})
	}
	for _, t := range p.totals.All(nil) {
		s.Totals = append(s.Totals, Total(t))
	}
	statuses := p.statuses.All(now, nil)
	s.Skew = fleetstate.Skew(statuses)

	byName := map[string]*Member{}
	member := func(name string) *Member {
		m := byName[name]
		if m == nil {
			m = &Member{Name: name, State: "unknown"}
			byName[name] = m
		}
		return m
	}
	for i := range statuses {
		member(statuses[i].Name).stand(&statuses[i])
	}
	for _, c := range configuration.Members {
		m := member(c.Name)
		m.Roster, m.Weight, m.Applied, m.Loaded = true, c.Weight, c.Applied, c.Loaded
	}
	for _, name := range configuration.Lacking {
		member(name).Lacking = true
	}
	for _, peer := range p.node.Peers() {
		m := member(peer.Name)
		m.State, m.RTT, m.Zone, m.Region, m.Heard = peer.State.String(), peer.RTT, peer.Zone, peer.Region, peer.Heard
		m.Offset, _, m.Broke = p.journal.Clock(peer.Replica)
		if peer.State == gossip.Fresh {
			s.SyncDelay = max(s.SyncDelay, peer.Delay)
		}
	}
	for name, n := range limits.Broke {
		member(name).LoansRefused = n
	}
	own, self := p.memberStatus(), member(p.self.Name)
	self.stand(&own)
	self.State = "self"
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		s.Members = append(s.Members, *byName[name])
	}
	return s
}

// stand copies the status that a process sent about itself.
func (m *Member) stand(s *fleetstate.MemberStatus) {
	m.Zone, m.Region, m.Version, m.Heard = s.Zone, s.Region, s.Version, s.Heard
	m.Number, m.Applied, m.Share = s.Number, s.Applied, s.Share
	m.Level, m.Cap, m.Lent, m.Pinned = s.Level, s.Cap, s.Lent, s.Pinned
	m.Unacked, m.SyncDelay = s.Unacked, s.SyncDelay
	for _, k := range s.Keys {
		m.Keys = append(m.Keys, Key(k))
	}
}

func (p *Process) memberAlone(l escrow.Stats) Member {
	m := Member{
		Name: p.self.Name, State: "self", Version: p.cfg.Program, Roster: true, Weight: 1, Share: 1,
		Number: l.Number, Applied: l.Applied, Level: float64(l.Level) / micro, Cap: float64(l.Cap) / micro,
	}
	for _, k := range p.keys() {
		m.Keys = append(m.Keys, Key(k))
	}
	return m
}
