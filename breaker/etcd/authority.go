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

// driver is the type that drives breakers for gossip as well; the alias keeps the embedded field
// unexported.
type driver = scope.Driver

// Authority is one process's part in a fleet that decides through etcd. It is a [breaker.Fleet],
// for guard.WithFleet. It takes no part in storms of the fleet: reports of the detectors go
// nowhere, and Storm says that there is none.
//
// All methods are safe for concurrent use, and only Close waits for etcd.
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
	err     error         // why etcd is not reached; nil if it is reached
	refusal error         // error of the latest write; nil if etcd took it
	tried   time.Duration // when the latest write was tried; it is tried again within about a second
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

// New returns the Authority of the process that c names, and starts to reach etcd. It does not wait
// for etcd. Until etcd is reached each breaker goes by itself, and a scope that is adopted within
// Start is held. The client stays the caller's: close it after [Authority.Close], and set its
// endpoints, TLS and users. The error names every wrong field, its value and the allowed range.
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

// now returns the time since New, by a monotonic clock.
func (a *Authority) now() time.Duration { return time.Since(a.origin) }

// Config returns the configuration with its defaults filled in.
func (a *Authority) Config() Config { return a.cfg }

// Err says why this process is without etcd, or nil while it has etcd. A person has to repair a
// name that is taken, or a roster that differs. With [ErrLate] the process has etcd but only
// follows. A pause of etcd shows here when the lease is over, not at once. While etcd refuses this
// process's writes, for lack of space or permission, Err returns that error.
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

// Close ends this process's part. Its votes and its place in the fleet are gone at once; what the
// next owner has to know stays for Keep. Breakers are left as they are: close the Guard first,
// which gives them back. Close waits for etcd for at most two seconds; after that the leases end by
// themselves. A second Close does nothing.
func (a *Authority) Close() {
	a.cancel()
	<-a.done
}

// Report implements [storm.Fleet], and does nothing.
func (a *Authority) Report(string, dlq.Storm) error { return nil }

// Withdraw implements [storm.Fleet], and does nothing.
func (a *Authority) Withdraw(string) {}

// Storm implements [storm.Fleet]: there is none.
func (a *Authority) Storm(string) dlq.FleetStorm { return dlq.FleetStorm{} }

// Count implements guard.Fleet, and does nothing.
func (a *Authority) Count(string, uint64, uint64, uint64) error { return nil }

// OthersSucceeded implements guard.Fleet: each process knows only its own calls.
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

// wrote notes and logs whether etcd takes this process's writes. A write without an answer changes
// nothing.
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

// refusedLocked reports whether the latest write was refused. A write that was not tried again is
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
