// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/limiter"
)

// Config is what an operator may set. Fleet and Name must be set, and Limits.Limit;
// with a roster, Fleet, Limits, Breakers.Quorum and Breakers.Successes must be the
// same in all processes.
type Config struct {
	// Fleet names the fleet, in 1 to 128 bytes. It is what keeps its packets and
	// its configuration apart from another's.
	Fleet string

	// Name is that of this process, in 1 to 64 bytes: stable over restarts, and of
	// one living process at a time.
	Name string

	// Limits are the limits and the roster. With a register they are what is written
	// to it if it is empty, and nothing else: what is in it holds. Without one they are
	// number Number of a static configuration, the same in all processes. A member has
	// its weight there whenever the register's roster does not name it and it has not
	// left. Fleet and Provisional are filled in. Without a roster there is one process:
	// nothing listens, and all that follows but Limits is left out.
	Limits limiter.Config

	// Number is that of Limits, without a register: raise it by one with each change of
	// Limit, Limits or Roster. Processes with different numbers keep within the smallest
	// share of each. Unset means 1. It must be unset with a register.
	Number uint64

	// Silent is after which silence a member is evicted, and Lease for how long a
	// process mints after a majority confirmed it, with limiter.Majority: see
	// [fleet.ConfiguratorConfig], which has their ranges and defaults.
	Silent, Lease time.Duration

	// Gossip says where to listen and whom to ask. Cluster and Self are filled in.
	Gossip gossip.NodeConfig

	Breakers fleet.Config
	Storms   fleet.StormConfig
	Journal  fleet.JournalConfig

	// Program is the version of the program, for those who look at the fleet. Up to
	// 64 bytes; unset says nothing.
	Program string

	// LagDelay and LagBacklog are from which sync delay, and from how many journal
	// entries that a peer lacks, the fleet counts as lagging: it is logged, and a span
	// tells of it. LagDelay in [1ms, 1h], unset means 1 s; LagBacklog in [1, 100000],
	// unset means 100.
	LagDelay   time.Duration
	LagBacklog int
}

const (
	maxFleet   = 128
	maxProgram = 64
)

// WithDefaults returns c with every unset field replaced by its default.
func (c Config) WithDefaults() Config {
	c.Limits.Fleet, c.Limits.Provisional = c.Fleet, len(c.Limits.Roster.Members) > 0
	c.Limits = c.Limits.WithDefaults()
	c.Gossip.Cluster, c.Gossip.Self.Name = c.Fleet, c.Name
	if c.Gossip.Self.Incarnation == 0 {
		c.Gossip.Self.Incarnation = gossip.NewIncarnation(time.Now(), rand.Uint64())
	}
	c.Gossip = c.Gossip.WithDefaults()
	c.Breakers, c.Storms, c.Journal = c.Breakers.WithDefaults(), c.Storms.WithDefaults(), c.Journal.WithDefaults()
	if c.LagDelay == 0 {
		c.LagDelay = time.Second
	}
	if c.LagBacklog == 0 {
		c.LagBacklog = 100
	}
	return c
}

// alone says that there is nobody to agree with.
func (c Config) alone() bool { return len(c.Limits.Roster.Members) == 0 }

// weight is that of this process in Limits, 0 if it is not in the roster there.
func (c Config) weight() int {
	for _, m := range c.Limits.Roster.Members {
		if m.Name == c.Name {
			return int(m.Weighs())
		}
	}
	return 0
}

// configurator is what a [fleet.Configurator] needs.
func (c Config) configurator(static bool) fleet.ConfiguratorConfig {
	out := fleet.ConfiguratorConfig{
		Fleet: c.Fleet, Static: static, Weight: c.weight(), Silent: c.Silent, Lease: c.Lease,
		OnSilence: c.Limits.OnSilence.Policy, UnstableNames: c.Limits.Roster.Unstable,
	}
	if !static {
		out.Initial = c.Limits.Configuration()
	}
	return out
}

// ErrConfig means a configuration was refused. The text names every field that is
// wrong, its value and the allowed range.
var ErrConfig = errors.New("process: config")

// Validate reports everything that is wrong with c at once, as an error that is
// [ErrConfig], or nil.
func (c Config) Validate() error {
	var wrong []error
	bad := func(field string, value any, want string) {
		wrong = append(wrong, fmt.Errorf("%s: %v is not in %s", field, value, want))
	}
	c = c.WithDefaults()
	if len(c.Fleet) < 1 || len(c.Fleet) > maxFleet {
		bad("Fleet", fmt.Sprintf("%.20q", c.Fleet), fmt.Sprintf("[1, %d] bytes", maxFleet))
	}
	if len(c.Program) > maxProgram {
		bad("Program", fmt.Sprintf("%.20q…", c.Program), fmt.Sprintf("[0, %d] bytes", maxProgram))
	}
	if c.LagDelay < time.Millisecond || c.LagDelay > time.Hour {
		bad("LagDelay", c.LagDelay, "[1ms, 1h]")
	}
	if c.LagBacklog < 1 || c.LagBacklog > 100_000 {
		bad("LagBacklog", c.LagBacklog, "[1, 100000]")
	}
	wrong = append(wrong, c.Limits.Validate())
	switch {
	case !c.alone():
		wrong = append(wrong, c.Gossip.Validate(), c.configurator(false).Validate(), c.Breakers.Validate(), c.Storms.Validate(), c.Journal.Validate())
	case c.Name == "":
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
// fleet must have; the default is a static configuration, see [Config.Number]. The
// register must live as long as the process.
func WithRegister(r register.Register) Option { return func(o *options) { o.register = r } }

// WithLogger has the process log its changes of state; silent by default.
func WithLogger(log *slog.Logger) Option { return func(o *options) { o.log = log } }

// WithGossip passes options on to the [gossip.Node], such as a keyring or
// a discovery of one's own. Clock, logger and sections are the process's.
func WithGossip(opts ...gossip.Option) Option {
	return func(o *options) { o.gossip = append(o.gossip, opts...) }
}

// WithMeterProvider sets where metrics go; the default is the global one.
func WithMeterProvider(m metric.MeterProvider) Option { return func(o *options) { o.meters = m } }

// WithTracerProvider records a span for each [Process.Wait] and for each time that
// the fleet lags; the default is none.
func WithTracerProvider(t trace.TracerProvider) Option { return func(o *options) { o.traces = t } }
