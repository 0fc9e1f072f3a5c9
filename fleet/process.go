// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/quarantine"
	"github.com/stormguard-mq/stormguard/internal/storm"
	"github.com/stormguard-mq/stormguard/limiter"
)

// A Process is this process's part in a fleet. It is safe for concurrent use.
type Process struct {
	cfg    settings
	self   crdt.Replica
	clock  func() time.Duration
	log    *slog.Logger
	limits *escrow.Set
	seen   *seen

	member *fleetstate.Member // without a roster it decides nothing

	// Without a roster the fields from node to statuses are nil, and so are quarantine and orders.
	node     *gossip.Node
	config   *fleetstate.Configurator
	register register.Register // nil if the configuration is static
	verdicts *fleetstate.Verdicts
	storms   *fleetstate.Storms
	totals   *fleetstate.Totals
	journal  *fleetstate.Journal
	statuses *fleetstate.MemberStatuses

	rules      dlq.Quarantine // the list that the guard uses
	quarantine *fleetstate.Quarantine
	orders     *fleetstate.Orders

	ctx    context.Context //nolint:containedctx // the process's lifetime, which Close ends
	cancel context.CancelFunc
	wg     sync.WaitGroup
	drive  driver
	poked  chan struct{} // wakes the driver

	mu        sync.Mutex
	asked     []asked // requests of operators that are not in the journal yet
	unwritten unwritten
}

// The names of the sections.
const (
	sectionLimits        = "limits"
	sectionConfiguration = "configuration"
	sectionBreakers      = "breakers"
	sectionStorms        = "storms"
	sectionTotals        = "totals"
	sectionJournal       = "journal"
	sectionStatuses      = "statuses"

	sectionQuarantine = "quarantine"
	sectionOrders     = "orders"
)

// Start begins an incarnation of a process. It does not wait for other processes. Until the process
// has read the register, Limits.UntilJoined says whether calls are denied, and breakers decide by
// themselves. The error has all that Validate finds, or is the error of listening.
func Start(cfg Config, opts ...Option) (*Process, error) {
	return cfg.settings().start(opts...)
}

func (s settings) start(opts ...Option) (*Process, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	o := options{log: slog.New(slog.DiscardHandler)}
	for _, opt := range opts {
		opt(&o)
	}
	if o.log == nil {
		return nil, errors.New("fleet: WithLogger: the logger must not be nil; leave the option out for silence")
	}
	p := &Process{cfg: s, self: s.gossip.Self, clock: gossip.Clock(), log: o.log, poked: make(chan struct{}, 1)}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	if err := p.start(o); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

func (p *Process) start(o options) (err error) {
	limits := p.cfg.limits
	if p.cfg.alone() {
		if o.register != nil {
			return fmt.Errorf("%w: Limits.Roster.Members: 0 is not in [1, 1024] with a register", ErrConfig)
		}
		limits.Fleet = ""
	}
	if p.limits, err = escrow.New(p.self, limits, escrow.WithClock(p.clock)); err != nil {
		return err
	}
	if p.cfg.alone() {
		p.member = fleetstate.NewMember(p.clock, nil, nil)
		p.rules = quarantine.New(time.Now)
	} else if err := p.join(o); err != nil {
		return err
	}
	p.seen, err = p.look(o)
	if err != nil || p.cfg.alone() {
		return err
	}
	p.wg.Go(p.run)
	if p.register != nil {
		p.wg.Go(p.watch)
	}
	p.write(fleetstate.Entry{Kind: fleetstate.EntryStarted, Subject: p.self.Name, Text: p.cfg.Program})
	return nil
}

// join makes the parts that only a fleet has, and the node that carries them.
func (p *Process) join(o options) (err error) {
	now := p.clock()
	p.limits.Mint(now) // nothing until the configuration is known to be the newest
	if err := p.configure(o, now); err != nil {
		return err
	}
	roster := rosterOf(p.cfg.limits.Configuration())
	p.drive.init(roster)
	if p.verdicts, err = fleetstate.NewVerdicts(now, p.cfg.Breakers, p.self, roster); err != nil {
		return err
	}
	if p.storms, err = fleetstate.NewStorms(fleetstate.StormConfig(p.cfg.Storms), p.self); err != nil {
		return err
	}
	p.member = fleetstate.NewMember(p.clock, p.verdicts, p.storms)
	p.member.OnStorm(p.stormChanged)
	if p.totals, err = fleetstate.NewTotals(p.self); err != nil {
		return err
	}
	p.member.CarryTotals(p.totals)
	if p.journal, err = fleetstate.NewJournal(fleetstate.JournalConfig(p.cfg.Journal), p.self, time.Now); err != nil {
		return err
	}
	if p.statuses, err = fleetstate.NewMemberStatuses(p.self); err != nil {
		return err
	}
	quarantine, err := p.joinQuarantine()
	if err != nil {
		return err
	}
	if p.orders, err = fleetstate.NewOrders(p.self, time.Now); err != nil {
		return err
	}
	p.node, err = gossip.Start(p.cfg.gossip, append(slices.Clone(o.gossip), gossip.WithClock(p.clock), gossip.WithLogger(p.log),
		gossip.WithSection(sectionLimits, p.limits),
		gossip.WithSection(sectionConfiguration, p.config),
		gossip.WithSection(sectionBreakers, p.verdicts),
		gossip.WithSection(sectionStorms, p.storms),
		gossip.WithSection(sectionTotals, p.totals),
		gossip.WithSection(sectionJournal, p.journal),
		gossip.WithSection(sectionStatuses, p.statuses),
		gossip.WithSection(sectionQuarantine, quarantine),
		gossip.WithSection(sectionOrders, p.orders))...)
	if errors.Is(err, gossip.ErrConfig) { // a fault that only the options show, such as a missing key
		return fmt.Errorf("%w: Gossip: %w", ErrConfig, err)
	}
	return err
}

// configure makes the part that keeps the fleet's configuration.
func (p *Process) configure(o options, now time.Duration) (err error) {
	p.register = o.register
	if p.register != nil && p.cfg.Number != 0 {
		return fmt.Errorf("%w: Number: %d is not in [0, 0] with a register", ErrConfig, p.cfg.Number)
	}
	if p.config, err = fleetstate.NewConfigurator(p.self, p.cfg.configurator(p.register == nil), p.limits, now); err != nil {
		return err
	}
	if p.register != nil {
		return nil
	}
	return p.config.Load(now, max(1, p.cfg.Number), p.cfg.limits.Configuration())
}

// rosterOf returns the names that vote on breakers under a configuration.
func rosterOf(c escrow.Configuration) fleetstate.Roster {
	r := fleetstate.Roster{Number: c.Number}
	for _, m := range c.Roster.Members {
		r.Names = append(r.Names, m.Name)
	}
	slices.Sort(r.Names)
	return r
}

// Addr is the address at which other processes reach this one, for the Seeds of their Gossip.
// Without a roster it is the zero AddrPort.
func (p *Process) Addr() netip.AddrPort {
	if p.node == nil {
		return netip.AddrPort{}
	}
	return p.node.Addr()
}

// Key returns the limit of a key. It returns the same Limiter as long as the key is in use. It does
// not fail: a key that is too long, or above MaxKeys, is denied everything.
func (p *Process) Key(key string) *limiter.Limiter { return (*limiter.Limiter)(p.limits.Key(key)) }

// A Part connects one guard to the fleet's breakers, storms and totals. A program gets it from
// [Process.Member] and passes it to guard.WithFleet, nothing else.
type Part interface {
	circuit.Fleet
	storm.Fleet
	Count(key string, handled, failed, deadLettered uint64) error
	OthersSucceeded(key string) (ago time.Duration, ok bool)
}

// Member returns the Part for guard.WithFleet. Without a roster it leaves all decisions to the
// guard.
func (p *Process) Member() Part { return p.member }

// Done is closed when the process is out of its fleet: after Leave or Close, or because a later
// incarnation has its name; [Process.Err] says why. The process then mints nothing, and only a new
// Process can join. Done is nil without a roster.
//
// A process that was evicted but still runs is not out. It logs this at WARN, and asks for its
// share again.
func (p *Process) Done() <-chan struct{} {
	if p.node == nil {
		return nil
	}
	return p.node.Done()
}

// Err says why Done is closed: [ErrDisplaced] or [ErrClosed]. Before that it is nil.
func (p *Process) Err() error {
	if p.node == nil {
		return nil
	}
	return p.node.Err()
}

// inFleet returns an error if this process is out of its fleet: no other process would hear a
// change that it makes.
func (p *Process) inFleet() error {
	if err := p.Err(); err != nil {
		return fmt.Errorf("fleet: process %q is out of its fleet: ask another, or start it again: %w", p.self.Name, err)
	}
	return nil
}

// Close ends the process at once. It tells the others nothing: for them it falls silent. Close
// returns when all goroutines have ended, and may be called again.
func (p *Process) Close() {
	p.cancel()
	p.wg.Wait()
	if p.seen != nil {
		p.seen.close()
	}
	if p.node != nil {
		_ = p.node.Close()
	}
	if p.limits != nil {
		p.limits.Close()
	}
}
