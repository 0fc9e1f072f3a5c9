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

// Config is what an operator may set. Fleet, Name and Limits.Limit must be set. With a
// roster, these must be the same in all processes: Fleet, Limits, Breakers.Quorum and
// Breakers.Successes.
type Config struct {
	// Fleet names the fleet, in 1 to 128 bytes. It is what keeps its packets and
	// its configuration apart from another's.
	Fleet string

	// Name is that of this process, in 1 to 64 bytes: stable over restarts, and of
	// one living process at a time.
	Name string

	// Limits are the limits and the roster. With a register they are written to it if it
	// is empty; otherwise the register's limits and roster hold. Without a register they
	// are number Number of a static configuration, the same in all processes. A member has
	// its weight there whenever the register's roster does not name it and it has not
	// left. Without a roster there is one process: nothing listens, and all fields below
	// are ignored.
	Limits Limits

	// Number is that of Limits, without a register: raise it by one with each change of
	// Limit, Limits or Roster. Processes with different numbers keep within the smallest
	// share of each. Unset means 1. It must be unset with a register.
	Number uint64

	// Silent is after which silence a member is evicted, with [Majority]. In (Lease, 10m];
	// unset means 500 ms, or a quarter above Lease if that is more.
	Silent time.Duration

	// Lease is for how long a process mints after a majority of the roster confirmed it,
	// with [Majority]. A few keep-alives of the gossip must fit in. In [50ms, 1m]; unset
	// means 400 ms.
	Lease time.Duration

	// Gossip says where to listen and whom to ask.
	Gossip Gossip

	// Breakers says how the processes decide over their breakers together.
	Breakers breaker.FleetConfig

	// Storms says when a storm of some processes is one of the fleet.
	Storms Storms

	// Journal bounds what is remembered of the fleet's history.
	Journal Journal

	// Program is the version of the program, for those who look at the fleet. Up to
	// 64 bytes; unset says nothing.
	Program string

	// LagDelay is from which sync delay the fleet counts as lagging: it is logged, and a
	// span tells of it. In [1ms, 1h]; unset means 1 s.
	LagDelay time.Duration

	// LagBacklog is from how many journal entries that a peer lacks the fleet counts as
	// lagging. In [1, 100000]; unset means 100.
	LagBacklog int
}

// Limits are a fleet's limits, and who shares them. Limit has no default; everything else
// may be left out.
type Limits struct {
	// Limit is that of each key that Limits does not name.
	Limit limiter.Limit

	// Limits are those of keys that have their own.
	Limits map[string]limiter.Limit

	// Strategy says how the processes share a limit. Unset means [Escrow].
	Strategy Strategy

	// Roster says who mints. Without members there is one process, which has it all.
	Roster Roster

	// MaxKeys bounds the keys that are known at a time; a key that lies idle is
	// forgotten. In [1, 10000000]; unset means 100,000. Above it new keys are
	// refused: nothing is admitted for them. Keys that only peers use are a quarter of
	// it at most, and an eighth for one peer, or 1,024 if that is more. For a key beyond
	// that a peer borrows nothing here, until there is room.
	MaxKeys int

	// OnSilence says what becomes of the share of a member that is not heard. Unset
	// means that it is held for that member, which keeps the bound.
	OnSilence Silence

	// UntilJoined says what becomes of admissions before the process may mint. Unset
	// means that they are denied.
	UntilJoined Joining
}

// A Roster says who mints, and how much of it. Shares are configured. They never follow
// from who can be seen, or both sides of a split would mint it all.
type Roster struct {
	// Members are at most 1,024 names with their shares, in any order; the same everywhere.
	Members []Share

	// Learners lets names that are not in the roster take part; they mint nothing and
	// live on loans. The price: a member that starts again mints nothing for 1.011 s,
	// for it cannot know all who may still hold what it had lent.
	Learners bool

	// Unstable says that names do not come back after a restart, as those of a
	// Deployment's pods do not. Then a share must not wait for its name: see
	// Limits.OnSilence.
	Unstable bool
}

// A Share is a member's part of every limit.
type Share struct {
	// Name is the Config.Name of the member. A share whose name does not come back is
	// stranded.
	Name string
	// Weight is the member's part of the sum of all weights. In [0, 1000000];
	// unset means 1 unless NoShare is set.
	Weight int
	// NoShare makes the weight 0: the member only borrows.
	NoShare bool
}

// A Strategy is how the processes of a fleet share a limit.
type Strategy string

const (
	// Escrow is the default: each process mints its share and lends what it does not
	// use. It keeps Burst + Rate·T.
	Escrow Strategy = "escrow"

	// Pooled is optimistic: each process has the whole bucket, and takes from it what
	// all of them say that they have used. The full burst is to be had anywhere at once,
	// and the others use the part of one that leaves. One that crashes is assumed to use
	// its part, Rate/N, until its name is back or evicted. A learner cannot be evicted: its
	// part is free again after 10 min of silence. Weights, owners and loans mean
	// nothing to it. OnSilence must be Hold and UntilJoined Deny.
	//
	// It is not strict. With N processes, rate R, burst B, and d from a use to its
	// arrival at a peer, the fleet admits more than B + R·T by up to
	//
	//	(N-1)·R·d                while it is busy
	//	(N-1)·(B + R·d)          when all begin at the same instant after a rest
	//	(P-1)·(B + R·(160ms+d))  at each split into P sides; afterwards a peer that is
	//	                         not heard is assumed to use R/N, so the sides share the rate
	//	(P-1)·R·(T-10min)        at a split that lasts for a longer T, if there are learners
	//
	// A process that starts in a split knows of nobody on the other side: it may admit
	// B + R·T by itself. What a peer was assumed to use is not given back when it is
	// heard again.
	Pooled Strategy = "pooled"
)

// A Silence is what becomes of the share of a member that is not heard.
type Silence struct {
	// Policy is Hold if unset.
	Policy SilencePolicy
	// After is how long a member must be silent before its share of the rate is taken
	// over. In a large fleet the longest pause between its packets is added. In [1s, 1h],
	// with TakeOver only; unset means 5 s there.
	After time.Duration
}

// A SilencePolicy is what is done about members that are not heard.
type SilencePolicy string

const (
	// Hold is the default: the share waits for its name. It keeps the bound, and is
	// refused for rosters whose names are [Roster.Unstable].
	Hold SilencePolicy = "hold"

	// Majority means that the share of a silent member is given to others when most of the
	// roster has agreed that the member is fenced. Each process mints only while a majority
	// of the roster confirms, within Config.Lease, that it may; a member that is silent for
	// Config.Silent is evicted. It needs a register. A process whose clock stands still
	// while it runs on is not caught.
	Majority SilencePolicy = "majority"

	// TakeOver means that every process that neither hears another nor finds its own
	// packets answered for After mints for it: its weight over the sum of the weights
	// of all that it hears and itself, of the whole rate, until the first packet that
	// it hears of any of them. Caps stay, so it brings no burst, and small limits stay
	// with their owners.
	//
	// It is not strict. P sides of a split admit up to (P-1)·(Burst + Rate·(T-After))
	// more, each time that the network flaps. T is the longest time for which two processes
	// take in nothing of each other. That is the split and 0.1 s more;
	// after a split of 10 s or longer, up to 5.1 s more, and after one of an hour 50 s,
	// since lost peers are tried every 1 to 5 s, and later ten times as rarely.
	TakeOver SilencePolicy = "takeover"
)

// A Joining is what becomes of admissions before a process may mint: until whatever an
// earlier incarnation has lent is over, and until it knows the configuration.
type Joining string

const (
	// Deny is the default: what cannot be borrowed is denied. It fails closed.
	Deny Joining = "deny"

	// Open admits from a bucket of the process's own meanwhile, as large as its share
	// in the newest configuration that it knows. It fails open: each start of a process
	// admits up to its share of Burst + Rate·T more, where T is how long it takes
	// until it may mint. A process without a share yet is denied. Who waits for loans or the
	// own mint goes on waiting.
	Open Joining = "open"
)

// Storms says when the storms of single processes are a storm of the fleet. The zero value
// is valid and means the documented defaults.
type Storms struct {
	// Share is how many of the processes that report a key must be affected for
	// the fleet to be. In (0, 1]; unset means 0.5. At least two must be, unless
	// only one reports.
	Share float64

	// Silent is the silence after which a process's reports are dropped. In a large
	// fleet the longest pause between its packets is added. In [100ms, 10m]; unset means 5 s.
	Silent time.Duration

	// Every is how often a report whose verdict has not changed is told anew. In
	// [10ms, 1m]; unset means 1 s.
	Every time.Duration

	// Keys is how many keys one process may report, its own and each peer's; what
	// comes above it is left out and counted. In [1, 100000]; unset means 1000.
	Keys int
}

// Journal bounds the fleet's journal. The zero value is valid and means the documented
// defaults.
type Journal struct {
	// Keep is how many entries are remembered, the latest by their stamps. In
	// [1, 100000]; unset means 1000. About 400 bytes each.
	Keep int

	// Backlog is how many entries of one process, beyond Keep, wait for peers that
	// have not acknowledged them. In [1, 65536]; unset means 1024.
	Backlog int

	// Patience is for how long they wait for a peer that is not heard. After that
	// it may come back to a journal with a gap. In [1s, 24h]; unset means 10 min.
	Patience time.Duration
}

const (
	maxFleet   = 128
	maxProgram = 64
)

// settings are a Config as the parts of a process take it.
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

// limitsOf are limits by key as another package has them; nil stays nil.
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

// alone says that there is nobody to agree with.
func (c Config) alone() bool { return len(c.Limits.Roster.Members) == 0 }

// weight is that of this process in Limits, 0 if it is not in the roster there.
func (s settings) weight() int {
	for _, m := range s.limits.Roster.Members {
		if m.Name == s.Name {
			return int(m.Weighs())
		}
	}
	return 0
}

// configurator is what a [fleetstate.Configurator] needs.
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

// ErrConfig means a configuration was refused. The text names every field that is
// wrong, its value and the allowed range.
var ErrConfig = fleetstate.ErrConfig

// Validate reports everything that is wrong with c at once, as an error that is
// [ErrConfig], or nil. Unset fields are judged as their defaults.
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

// An Option supplies a collaborator that a config file cannot express.
type Option func(*options)

type options struct {
	log    *slog.Logger
	gossip []gossip.Option
	meters metric.MeterProvider
	traces trace.TracerProvider

	register register.Register
}

// WithRegister keeps the fleet's configuration in a register, which all processes of the
// fleet must have; the default is a static configuration, see [Config].Number. The
// register must live as long as the process.
func WithRegister(r register.Register) Option { return func(o *options) { o.register = r } }

// WithLogger has the process log its changes of state; silent by default.
func WithLogger(log *slog.Logger) Option { return func(o *options) { o.log = log } }

// WithMeterProvider sets where metrics go; the default is the global one.
func WithMeterProvider(m metric.MeterProvider) Option { return func(o *options) { o.meters = m } }

// WithTracerProvider records a span for each [Process.Wait] and for each time that
// the fleet lags; the default is none.
func WithTracerProvider(t trace.TracerProvider) Option { return func(o *options) { o.traces = t } }
