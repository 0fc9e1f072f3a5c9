// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/limiter"
)

// Config has the settings of one process. Fleet, Name and Limits.Limit must be set. With a roster,
// these must be the same in all processes: Fleet, Limits, Breakers.Quorum and Breakers.Successes.
type Config struct {
	// Fleet names the fleet, in 1 to 128 bytes. It keeps the fleet's packets and configuration
	// apart from those of other fleets.
	Fleet string

	// Name names this process, in 1 to 64 bytes. It must stay the same after a restart. Two living
	// processes must not have the same name.
	Name string

	// Limits are the limits and the roster.
	//
	// With a register they are written to it if it is empty. Otherwise the register's limits and
	// roster count. A process that Limits.Roster names asks for its weight there whenever the
	// register's roster does not name it, unless it has left.
	//
	// Without a register they are a static configuration with the number Number. They must be the
	// same in all processes.
	//
	// Without a roster there is one process. It does not listen. Of the fields below only Program
	// and Gossip.Zone have an effect.
	Limits Limits

	// Number is the number of Limits, without a register. Raise it by one with each change of
	// Limit, Limits or Roster. While processes have different numbers, each uses the smallest share
	// that these numbers give it. Unset means 1. It must be unset with a register.
	Number uint64

	// Silent is how long a member must be silent before it is evicted, with [Majority]. In
	// (Lease, 10m]; unset means 500 ms, or a quarter above Lease if that is more.
	Silent time.Duration

	// Lease is how long a process may mint after a majority of the roster confirmed it, with
	// [Majority]. A few keep-alives of the gossip must fit in. In [50ms, 1m]; unset means 400 ms.
	Lease time.Duration

	// Gossip says where the process listens and where it looks for the others.
	Gossip Gossip

	// Breakers says how the processes decide about their breakers together.
	Breakers breaker.FleetConfig

	// Storms says when storms of single processes are a storm of the fleet.
	Storms Storms

	// Journal bounds the fleet's journal.
	Journal Journal

	// Program is the version of the program, shown in the Status of all processes. Up to 64 bytes;
	// unset shows no version.
	Program string

	// LagDelay is the sync delay from which the fleet counts as lagging: this is logged, and a span
	// records it. In [1ms, 1h]; unset means 1 s.
	LagDelay time.Duration

	// LagBacklog is the journal backlog from which the fleet counts as lagging: the number of
	// entries that the slowest peer lacks. In [1, 100000]; unset means 100.
	LagBacklog int
}

// Limits are a fleet's limits, and the processes that share them. Limit has no default; everything
// else may be left out.
type Limits struct {
	// Limit is the limit of each key that Limits does not name.
	Limit limiter.Limit

	// Limits has the keys with a limit of their own.
	Limits map[string]limiter.Limit

	// Strategy says how the processes share a limit. Unset means [Escrow].
	Strategy Strategy

	// Roster lists the processes that mint. Without members there is one process, with the whole
	// limit.
	Roster Roster

	// MaxKeys is how many keys may be known at a time. Idle keys are forgotten. In [1, 10000000];
	// unset means 100,000. At the bound new keys are refused: nothing is admitted for them.
	//
	// Keys that only peers use may take a quarter of MaxKeys. Those of one peer may take an eighth,
	// or 1,024 if that is more. For a key beyond that a peer borrows nothing here, until there is
	// room.
	MaxKeys int

	// OnSilence says what happens to the share of a silent member. Unset means [Hold]: the share
	// waits for that member, which keeps the bound.
	OnSilence Silence

	// UntilJoined says what happens to calls before the process may mint. Unset means [Deny].
	UntilJoined Joining
}

// A Roster lists the processes that mint, and the share of each. Shares are configured. They never
// depend on which processes are heard: otherwise both sides of a split would mint the whole limit.
type Roster struct {
	// Members are at most 1,024 names with their shares, in any order, the same everywhere.
	Members []Share

	// Learners lets names that are not in the roster take part. They mint nothing and only borrow.
	// The price: after a restart a member mints nothing for 1.011 s, because it cannot know all
	// processes that may still hold tokens it had lent.
	Learners bool

	// Unstable says that names do not come back after a restart, such as the names of a
	// Deployment's pods. Then a share must not wait for its name: [Hold] is refused.
	Unstable bool
}

// A Share is a member's part of every limit.
type Share struct {
	// Name is the Config.Name of the member. A share whose name does not come back is stranded:
	// nobody uses it.
	Name string
	// Weight divided by the sum of all weights is the member's part. In [0, 1000000]; unset means 1
	// unless NoShare is set.
	Weight int
	// NoShare makes the weight 0: the member only borrows.
	NoShare bool
}

// A Strategy is how the processes of a fleet share a limit.
type Strategy string

const (
	// Escrow is the default: each process mints its share and lends the tokens that it does not
	// use. It keeps the bound Burst + Rate·T.
	Escrow Strategy = "escrow"

	// Pooled is optimistic: each process has the whole bucket, and subtracts the tokens that all
	// processes report as used. The full burst is available anywhere at once. When a process
	// leaves, the others use its part.
	//
	// A crashed process is assumed to use its part, Rate/N, until its name is back or evicted. A
	// learner cannot be evicted: its part is free again after 10 min of silence. Weights, owners
	// and loans have no effect. OnSilence must be Hold and UntilJoined Deny.
	//
	// It is not strict. With N processes, rate R, burst B, and d from a use to its arrival at a
	// peer, the fleet admits more than B + R·T by up to
	//
	//	(N-1)·R·d                while it is busy
	//	(N-1)·(B + R·d)          when all begin at the same instant after a rest
	//	(P-1)·(B + R·(160ms+d))  at each split into P sides; afterwards a peer that is
	//	                         not heard is assumed to use R/N, so the sides share the rate
	//	(P-1)·R·(T-10min)        at a split that lasts for a longer T, if there are learners
	//
	// A process that starts in a split does not know the other side: it may admit B + R·T by
	// itself. Tokens that a peer was assumed to use are not given back when it is heard again.
	Pooled Strategy = "pooled"
)

// A Silence says what happens to the share of a silent member.
type Silence struct {
	// Policy is Hold if unset.
	Policy SilencePolicy
	// After is how long a member must be silent before the others use its share of the rate. In a
	// large fleet the longest pause between the member's packets is added. It needs TakeOver. In
	// [1s, 1h]; unset means 5 s.
	After time.Duration
}

// A SilencePolicy says what happens to silent members.
type SilencePolicy string

const (
	// Hold is the default: the share waits for its name. It keeps the bound. It is refused for
	// rosters with [Roster.Unstable] names.
	Hold SilencePolicy = "hold"

	// Majority gives the share of a silent member to others, once most of the roster has agreed
	// that the member is fenced. Each process mints only while a majority of the roster confirms,
	// within Config.Lease, that it may. A member that is silent for Config.Silent is evicted. It
	// needs a register. It does not detect a process whose clock stands still while the process
	// runs on.
	Majority SilencePolicy = "majority"

	// TakeOver lets each process use a part of a silent member's rate. A member is silent for a
	// process if for After no packet of it came and it answered no packet. The process then mints
	// this part of the whole rate: its own weight, divided by the sum of its weight and those of
	// the members it hears. This ends with the first packet from a silent member. Caps stay, so it
	// adds no burst. Small limits stay with their owners.
	//
	// It is not strict. P sides of a split admit up to (P-1)·(Burst + Rate·(T-After)) more, each
	// time that the network flaps. T is the longest time in which two processes receive nothing
	// from each other. That is the split and 0.1 s more. After a split of 10 s or longer it is up
	// to 5.1 s more, and after an hour 50 s: lost peers are tried every 1 to 5 s, and later ten
	// times as rarely.
	TakeOver SilencePolicy = "takeover"
)

// A Joining says what happens to calls before a process may mint: until all loans of its earlier
// incarnations are over, and until it knows the configuration.
type Joining string

const (
	// Deny is the default: a call that cannot borrow is denied. It fails closed.
	Deny Joining = "deny"

	// Open admits from a bucket of the process's own until the process may mint. The bucket is as
	// large as its share in the newest configuration that it knows. A process without a share is
	// denied. A call that waits for loans or for the process's own tokens goes on waiting.
	//
	// Open fails open: each start of a process admits up to its share of Burst + Rate·T more, where
	// T is the time until it may mint.
	Open Joining = "open"
)

// Storms says when storms of single processes are a storm of the fleet. The zero value is valid and
// means the documented defaults.
type Storms struct {
	// Share is the least part of a key's reporting processes that must be in a storm, so that the
	// fleet is in one. In (0, 1]; unset means 0.5. At least two must be, unless only one reports.
	Share float64

	// Silent is how long a process must be silent before its reports are dropped. In a large fleet
	// the longest pause between its packets is added. In [100ms, 10m]; unset means 5 s.
	Silent time.Duration

	// Every is how often changes of a report are sent while its verdict stays the same. In
	// [10ms, 1m]; unset means 1 s.
	Every time.Duration

	// Keys is how many keys one process may report. It holds for this process and for each peer.
	// Further keys are left out and counted. In [1, 100000]; unset means 1000.
	Keys int
}

// Journal bounds the fleet's journal. The zero value is valid and means the documented
// defaults.
type Journal struct {
	// Keep is how many entries are remembered: those with the latest stamps. In [1, 100000]; unset
	// means 1000. An entry takes about 400 bytes.
	Keep int

	// Backlog is how many entries of one process, beyond Keep, wait for peers that have not
	// acknowledged them. In [1, 65536]; unset means 1024.
	Backlog int

	// Patience is how long entries wait for a silent peer. A peer that comes back later may find a
	// gap in the journal. In [1s, 24h]; unset means 10 min.
	Patience time.Duration
}

const (
	maxFleet   = 128
	maxProgram = 64
)

// settings are a Config in the form that the parts of a process take.
type settings struct {
	Config

	limits escrow.Config
	gossip gossip.NodeConfig
}

// settings fills in all defaults.
func (c Config) settings() settings {
	s := settings{Config: c, limits: c.Limits.config(), gossip: c.Gossip.config()}
	s.limits.Fleet, s.limits.Provisional = c.Fleet, len(c.Limits.Roster.Members) > 0
	s.limits = s.limits.WithDefaults()
	s.gossip.Cluster = c.Fleet
	s.gossip.Self = crdt.Replica{Name: c.Name, Incarnation: gossip.NewIncarnation(time.Now(), rand.Uint64())}
	s.gossip = s.gossip.WithDefaults()
	if s.LagDelay == 0 {
		s.LagDelay = time.Second
	}
	if s.LagBacklog == 0 {
		s.LagBacklog = 100
	}
	return s
}

func (l Limits) config() escrow.Config {
	return escrow.Config{
		Limit: escrow.Limit(l.Limit), Limits: limitsOf[escrow.Limit](l.Limits), Strategy: escrow.Strategy(l.Strategy),
		Roster: l.Roster.roster(), MaxKeys: l.MaxKeys, UntilJoined: escrow.Joining(l.UntilJoined),
		OnSilence: escrow.Silence{Policy: escrow.SilencePolicy(l.OnSilence.Policy), After: l.OnSilence.After},
	}
}

func (r Roster) roster() escrow.Roster {
	out := escrow.Roster{Learners: r.Learners, Unstable: r.Unstable}
	for _, m := range r.Members {
		out.Members = append(out.Members, escrow.Member(m))
	}
	return out
}

// limitsOf converts limits by key to another package's type. nil stays nil.
func limitsOf[To, From limiter.Limit | escrow.Limit](from map[string]From) map[string]To {
	var to map[string]To
	for key, l := range from {
		if to == nil {
			to = make(map[string]To, len(from))
		}
		to[key] = To(l)
	}
	return to
}

// alone reports whether there is no roster: the process has nobody to agree with.
func (c Config) alone() bool { return len(c.Limits.Roster.Members) == 0 }

// weight is the weight of this process in Limits.Roster, 0 if it is not there.
func (s settings) weight() int {
	for _, m := range s.limits.Roster.Members {
		if m.Name == s.Name {
			return int(m.Weighs())
		}
	}
	return 0
}

// configurator returns the settings of the [fleetstate.Configurator].
func (s settings) configurator(static bool) fleetstate.ConfiguratorConfig {
	out := fleetstate.ConfiguratorConfig{
		Fleet: s.Fleet, Static: static, Weight: s.weight(), Silent: s.Silent, Lease: s.Lease,
		OnSilence: s.limits.OnSilence.Policy, UnstableNames: s.limits.Roster.Unstable,
	}
	if !static {
		out.Initial = s.limits.Configuration()
	}
	return out
}

// ErrConfig means that a configuration was refused. The text names each wrong field, its value and
// the allowed range.
var ErrConfig = fleetstate.ErrConfig

// Validate returns nil, or an [ErrConfig] that lists everything that is wrong with c. Unset fields
// are judged as their defaults.
func (c Config) Validate() error { return c.settings().validate() }

func (s settings) validate() error {
	var wrong []error
	bad := func(field string, value any, want string) {
		wrong = append(wrong, fmt.Errorf("%s: %v is not in %s", field, value, want))
	}
	if len(s.Fleet) < 1 || len(s.Fleet) > maxFleet {
		bad("Fleet", fmt.Sprintf("%.20q", s.Fleet), fmt.Sprintf("[1, %d] bytes", maxFleet))
	}
	if len(s.Program) > maxProgram {
		bad("Program", fmt.Sprintf("%.20q…", s.Program), fmt.Sprintf("[0, %d] bytes", maxProgram))
	}
	if s.LagDelay < time.Millisecond || s.LagDelay > time.Hour {
		bad("LagDelay", s.LagDelay, "[1ms, 1h]")
	}
	if s.LagBacklog < 1 || s.LagBacklog > 100_000 {
		bad("LagBacklog", s.LagBacklog, "[1, 100000]")
	}
	wrong = append(wrong, s.limits.Validate())
	switch {
	case !s.alone():
		wrong = append(wrong, s.gossip.Validate(), s.configurator(false).Validate(), s.Breakers.Validate(),
			fleetstate.StormConfig(s.Storms).Validate(), fleetstate.JournalConfig(s.Journal).Validate())
	case s.Name == "":
		bad("Name", `""`, "[1, 64] bytes")
	}
	if err := errors.Join(wrong...); err != nil {
		return fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return nil
}

// An Option supplies an object that a config file cannot express.
type Option func(*options)

type options struct {
	log    *slog.Logger
	gossip []gossip.Option
	meters metric.MeterProvider
	traces trace.TracerProvider

	register register.Register
}

// WithRegister keeps the fleet's configuration in a register. All processes of the fleet must use
// the same one, and r must live as long as the process. The default is a static configuration, see
// [Config].Number.
func WithRegister(r register.Register) Option { return func(o *options) { o.register = r } }

// WithLogger sets the logger for changes of state. The default logs nothing.
func WithLogger(log *slog.Logger) Option { return func(o *options) { o.log = log } }

// WithMeterProvider sets the provider of the metrics. The default is the global one.
func WithMeterProvider(m metric.MeterProvider) Option { return func(o *options) { o.meters = m } }

// WithTracerProvider records a span for each [Process.Wait], and one each time the fleet begins to
// lag. The default is none.
func WithTracerProvider(t trace.TracerProvider) Option { return func(o *options) { o.traces = t } }
