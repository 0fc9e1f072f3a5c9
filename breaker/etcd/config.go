// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

const (
	defaultPrefix = "/stormguard"
	maxPrefix     = 255
	maxName       = 128
	maxScope      = scope.MaxName
	// maxRoster keeps a decision, which compares each vote that it counts, within
	// the 128 operations that etcd allows a transaction by default.
	maxRoster = 120
	// leastLease is what etcd with its default timing gives for any shorter lease.
	leastLease = 2 * time.Second
)

// Config is what an operator may set from a file, a flag or the environment. Name
// and Roster have no default. All processes under one prefix need the same roster,
// Quorum and Successes, and are refused otherwise; they may differ in the rest.
type Config struct {
	// Prefix begins every key. Up to 255 bytes, no slash at its end; unset means
	// /stormguard. Fleets that have nothing to do with each other need different
	// ones, and the user of the client needs to read and write below it.
	Prefix string

	// Name is this process's own, in Roster if it is to vote. Of several with one
	// name the first counts until its lease is over. 1 to 128 bytes.
	Name string

	// Roster is who may vote. A later one has a higher number: it takes over when
	// the first process brings it; those with the earlier follow and may vote, but
	// decide and probe no more, see [ErrLate]. It stays when that process goes: going
	// back to the earlier names takes a higher number too. At most 120 names.
	Roster breaker.Roster

	// Fleet is what processes that gossip have as well, and means the same. Here:
	// Silent is how long the lease of a process lasts, and so how long a dead one's
	// vote counts, and after how long without etcd a process goes by itself. At
	// least 2 s, which is etcd's own least; unset means 5 s.
	// Lease is that of a probe, and a second more in etcd. At least 2 s.
	// Keep is the lease of what a next owner has to know.
	// Settle and Votes mean nothing.
	Fleet breaker.FleetConfig
}

// WithDefaults returns c with every unset field replaced by its default.
func (c Config) WithDefaults() Config {
	if c.Prefix == "" {
		c.Prefix = defaultPrefix
	}
	c.Fleet = c.Fleet.WithDefaults()
	return c
}

// Validate returns one error with all that is wrong, or nil. Unset fields are
// judged as their defaults.
func (c Config) Validate() error {
	c = c.WithDefaults()
	var all []error
	bad := func(field string, value any, want string) {
		all = append(all, fmt.Errorf("%w: %s: %v is not in %s", errConfig, field, value, want))
	}
	if len(c.Prefix) > maxPrefix || strings.HasSuffix(c.Prefix, "/") {
		bad("Prefix", fmt.Sprintf("%q", c.Prefix), fmt.Sprintf("up to %d bytes without a slash at the end", maxPrefix))
	}
	if len(c.Name) < 1 || len(c.Name) > maxName {
		bad("Name: length", len(c.Name), fmt.Sprintf("[1, %d]", maxName))
	}
	if err := c.Roster.Validate(); err != nil {
		all = append(all, fmt.Errorf("%w: %w", errConfig, err))
	}
	if n := len(c.Roster.Names); n > maxRoster {
		bad("Roster: names", n, fmt.Sprintf("[1, %d]", maxRoster))
	}
	if err := c.Fleet.Validate(); err != nil {
		all = append(all, fmt.Errorf("%w: Fleet: %w", errConfig, err))
	}
	if c.Fleet.Silent < leastLease {
		bad("Fleet.Silent", c.Fleet.Silent, fmt.Sprintf("[%v, 10m0s]", leastLease))
	}
	if c.Fleet.Lease < leastLease {
		bad("Fleet.Lease", c.Fleet.Lease, fmt.Sprintf("[%v, 1h0m0s]", leastLease))
	}
	return errors.Join(all...)
}

// An Option supplies a collaborator that a configuration cannot express.
type Option func(*Authority)

// WithLogger sets where changes of state go. The default is nowhere.
func WithLogger(l *slog.Logger) Option {
	return func(a *Authority) {
		if l != nil {
			a.log = l
		}
	}
}

// seconds is a lease's time to live in etcd's unit, rounded up.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
