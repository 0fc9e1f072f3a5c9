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
	"github.com/stormguard-mq/stormguard/limiter"
)

// Config is what an operator may set. Fleet and Name must be set, and Limits.Limit;
// with a roster, Fleet, Limits, Breakers.Quorum and Breakers.Successes must be the
// same in all processes.
type Config struct {
	// Fleet names the fleet, in 1 to 128 bytes. It is what keeps its packets apart
	// from another's, and what its limits are founded under once.
	Fleet string

	// Name is that of this process, in 1 to 64 bytes: stable over restarts, and of
	// one living process at a time.
	Name string

	// Limits are those with which the fleet was founded, and its roster. They stay
	// what they are when the charter has changed: who differs is refused. A fleet whose
	// processes were all down at the same time begins with them again. Fleet is filled
	// in. Without a roster there is one process: nothing listens, and all that
	// follows but Limits is left out.
	Limits limiter.Config

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
	c.Limits.Fleet = c.Fleet
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

// weight is that of this process among the founders, 0 if it is none of them.
func (c Config) weight() int {
	for _, m := range c.Limits.Roster.Members {
		if m.Name == c.Name {
			return int(m.Weighs())
		}
	}
	return 0
}

// charter is what [fleet.Charters] need.
func (c Config) charter() fleet.CharterConfig {
	return fleet.CharterConfig{
		Fleet: c.Fleet, Founding: c.Limits.Charter(),
		OnSilence: c.Limits.OnSilence.Policy, UnstableNames: c.Limits.Roster.Unstable,
	}
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
		wrong = append(wrong, c.Gossip.Validate(), c.charter().Validate(), c.Breakers.Validate(), c.Storms.Validate(), c.Journal.Validate())
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
}

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
