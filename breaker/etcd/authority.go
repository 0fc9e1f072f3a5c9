// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/scope"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// driver is what drives breakers for gossip as well; the alias keeps the embedded
// field to ourselves.
type driver = scope.Driver

// Authority is one process's part in a fleet that decides through etcd: a
// [breaker.Fleet], and what guard.WithFleet takes. It takes no part in storms of the
// fleet: what the detectors report goes nowhere, and Storm says that there is none.
//
// All methods are safe for concurrent use, and none but Close waits for etcd.
type Authority struct {
	*driver
	cfg    Config
	client *clientv3.Client
	log    *slog.Logger
	keys   layout
	self   crdt.Replica
	origin time.Time
	core   *core

	// run is the one goroutine that New starts. It owns the leases, and starts and
	// awaits the others of a session.
	cancel context.CancelFunc
	done   chan struct{}

	mu      sync.Mutex
	err     error         // why etcd is not reached; nil if it is
	refusal error         // of the latest write; nil if etcd took it
	tried   time.Duration // when that was; it is tried again within a second or so
}

var (
	_ circuit.Fleet = (*Authority)(nil)
	_ storm.Fleet   = (*Authority)(nil)
)

// Why etcd is not reached, where no call failed.
var (
	errStarting = errors.New("etcd: not reached yet")
	errSilent   = errors.New("etcd: silent for as long as our lease lasts")
)

// New returns the part of the process that c names, and starts to reach etcd. It
// does not wait for that: until then each breaker goes by itself, and what is
// adopted within Start is held. The client stays the caller's, who closes it after
// [Authority.Close]; endpoints, TLS and users are its matter. The error names every
// field that is wrong, its value and the allowed range.
func New(client *clientv3.Client, c Config, opts ...Option) (*Authority, error) {
	if client == nil {
		return nil, errors.Join(fmt.Errorf("%w: client: nil is none", errConfig), c.Validate())
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c = c.WithDefaults()
	var incarnation [8]byte
	_, _ = rand.Read(incarnation[:]) // never fails
	a := &Authority{
		cfg: c, client: client, log: slog.New(slog.DiscardHandler), keys: newLayout(c.Prefix),
		self:   crdt.Replica{Name: c.Name, Incarnation: binary.BigEndian.Uint64(incarnation[:])},
		origin: time.Now(), done: make(chan struct{}), err: errStarting,
	}
	for _, o := range opts {
		o(a)
	}
	a.core = newCore(c, a.self, a.now())
	a.core.report = a.logScopes
	a.driver = scope.NewDriver(a.now, a.core.Machine)
	ctx, cancel := context.WithCancel(context.Background())
	a.cancel = cancel
	go a.run(ctx)
	return a, nil
}

// now is monotonic, since New.
func (a *Authority) now() time.Duration { return time.Since(a.origin) }

// Config returns the configuration with its defaults filled in.
func (a *Authority) Config() Config { return a.cfg }

// Err says why this process is without etcd, or nil while it has it. Somebody has to
// mend a name that is taken, and a roster that differs. With [ErrLate] it has it, and follows
// only. A pause of etcd shows here when the lease is over, not at once. While etcd
// refuses what this process writes, for want of space or of the right, that is the error.
func (a *Authority) Err() error {
	fresh, late := a.core.status(a.now())
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.err != nil:
		return a.err
	case !fresh:
		return errSilent
	case a.refusedLocked():
		return a.refusal
	case late != 0:
		return fmt.Errorf("%w: number %d, and ours is %d", ErrLate, late, a.cfg.Roster.Number)
	}
	return nil
}

// Close ends this process's part: its votes and its place in the fleet are gone at
// once, what a next owner has to know stays for Keep. Breakers are left as they are;
// close the Guard first, which gives them back. It waits for etcd for at most two
// seconds, or else the leases end by themselves. A second Close does nothing.
func (a *Authority) Close() {
	a.cancel()
	<-a.done
}

// Report is [storm.Fleet]'s, and does nothing.
func (a *Authority) Report(string, dlq.Storm) error { return nil }

// Withdraw is [storm.Fleet]'s, and does nothing.
func (a *Authority) Withdraw(string) {}

// Storm is [storm.Fleet]'s: there is none.
func (a *Authority) Storm(string) dlq.FleetStorm { return dlq.FleetStorm{} }

// Count is guard.Fleet's, and does nothing.
func (a *Authority) Count(string, uint64, uint64, uint64) error { return nil }

// OthersSucceeded is guard.Fleet's: each process knows its own calls only.
func (a *Authority) OthersSucceeded(string) (time.Duration, bool) { return 0, false }

// say notes and logs that etcd is reached, or why not.
func (a *Authority) say(err error) {
	a.mu.Lock()
	changed := (a.err == nil) != (err == nil) || err != nil && a.err != nil && a.err.Error() != err.Error()
	a.err = err
	a.mu.Unlock()
	switch {
	case !changed:
	case err == nil:
		a.log.Info("the fleet's authority is reached", "name", a.self.Name, "prefix", a.cfg.Prefix)
	default:
		a.log.Warn("the fleet's authority is not reached; breakers go by themselves when our lease is over", "name", a.self.Name, "prefix", a.cfg.Prefix, "error", err)
	}
}

// wrote notes and logs whether etcd takes what this process writes. A write without an
// answer says nothing.
func (a *Authority) wrote(err error) {
	switch {
	case err == nil:
	case errors.Is(err, rpctypes.ErrNoSpace), errors.Is(err, rpctypes.ErrPermissionDenied):
		err = fmt.Errorf("etcd: write: %w", err)
	default:
		return
	}
	a.mu.Lock()
	before := a.refusedLocked()
	a.refusal, a.tried = err, a.now()
	a.mu.Unlock()
	switch {
	case before == (err != nil):
	case err == nil:
		a.log.Info("the fleet's authority takes writes again", "name", a.self.Name, "prefix", a.cfg.Prefix)
	default:
		a.log.Warn("the fleet's authority refuses writes; the votes of this process do not count", "name", a.self.Name, "prefix", a.cfg.Prefix, "error", err)
	}
}

// refusedLocked reports whether the latest write was refused. One that was not tried again is
// no longer wanted. The caller holds mu.
func (a *Authority) refusedLocked() bool { return a.refusal != nil && a.now()-a.tried < a.ttl() }

func (a *Authority) logScopes(events []event) {
	for _, e := range events {
		state := breaker.Closed
		if e.state.Open() {
			state = breaker.Open
		}
		a.log.Info("the fleet's state of a scope changed", "scope", e.scope, "state", state.String(),
			"round", e.state.Round, "period", e.state.OpenFor, "reason", string(e.state.Cause))
	}
}
