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
	// maxRoster keeps a decision, which compares each vote that it counts, within the 128
	// operations that etcd by default allows in a transaction.
	maxRoster = 120
	// leastLease is the lease that etcd with its default timing gives for any shorter one.
	leastLease = 2 * time.Second
)

// Config holds an operator's settings, from a file, a flag or the environment. Name and Roster have
// no default. All processes under one prefix need the same roster, Quorum and Successes, and are
// refused otherwise. The other fields may differ.
type Config struct {
	// Prefix begins every key. Up to 255 bytes, no slash at its end; unset means /stormguard.
	// Separate fleets need different prefixes. The user of the client needs to read and write below
	// it.
	Prefix string

	// Name is the name of this process, 1 to 128 bytes. It votes if Roster has the name. Of several
	// processes with one name the first counts until its lease is over.
	Name string

	// Roster names the processes that may vote, 120 at most. A later roster has a higher number. It
	// takes over when the first process brings it. Processes with an earlier roster follow and may
	// vote, but no longer decide or probe; see [ErrLate]. The later roster stays when its process
	// goes. So going back to the earlier names takes a higher number, too.
	Roster breaker.Roster

	// Fleet has the settings that processes that gossip have as well, with the same meaning. Here:
	//
	//   - Silent is the lease of a process. So it is how long a dead process's vote counts, and
	//     after how long without etcd a process goes by itself. At least 2 s, which is etcd's own
	//     least; unset means 5 s.
	//   - Lease is the lease of a probe, which has a second more in etcd. At least 2 s.
	//   - Keep is the lease of the vote that an owner leaves for the next one.
	//   - Settle and Votes mean nothing.
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

// Validate returns one error with all faults, or nil. An unset field is checked as its default.
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

// WithLogger sets the logger for changes of state. The default logs nothing; nil changes nothing.
func WithLogger(l *slog.Logger) Option {
	return func(a *Authority) {
		if l != nil {
			a.log = l
		}
	}
}

// seconds returns a lease's time to live in etcd's unit, rounded up.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
