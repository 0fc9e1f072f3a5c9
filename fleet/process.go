// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/limiter"
)

// ProcessConfig is what an operator may set for a [Process]. Fleet and Name must
// be set, and Limits.Limit; with a roster, Fleet, Limits, Breakers.Quorum and
// Breakers.Successes must be the same in all processes.
type ProcessConfig struct {
	// Fleet names the fleet, in 1 to 128 bytes. It is what keeps its packets apart
	// from another's, and what its limits are founded under once.
	Fleet string

	// Name is that of this process, in 1 to 64 bytes: stable over restarts, and of
	// one living process at a time.
	Name string

	// Limits are those with which the fleet was founded, and its roster. Fleet is
	// filled in. Without a roster there is one process: nothing listens, and all that
	// follows but Limits is left out.
	Limits limiter.Config

	// Gossip says where to listen and whom to ask. Cluster and Self are filled in.
	Gossip gossip.NodeConfig

	Breakers Config
	Storms   StormConfig
	Journal  JournalConfig

	// Program is the version of the program, for those who look at the fleet. Up to
	// 64 bytes; unset says nothing.
	Program string
}

// WithDefaults returns c with every unset field replaced by its default.
func (c ProcessConfig) WithDefaults() ProcessConfig {
	c.Limits.Fleet = c.Fleet
	c.Limits = c.Limits.WithDefaults()
	c.Gossip.Cluster, c.Gossip.Self.Name = c.Fleet, c.Name
	if c.Gossip.Self.Incarnation == 0 {
		c.Gossip.Self.Incarnation = uint64(time.Now().UnixNano()) //nolint:forbidigo,gosec // a name for this life, no time
	}
	c.Gossip = c.Gossip.WithDefaults()
	c.Breakers, c.Storms, c.Journal = c.Breakers.WithDefaults(), c.Storms.WithDefaults(), c.Journal.WithDefaults()
	return c
}

// alone says that there is nobody to agree with.
func (c ProcessConfig) alone() bool { return len(c.Limits.Roster.Members) == 0 }

// charter is what [Charters] need.
func (c ProcessConfig) charter() CharterConfig {
	return CharterConfig{Fleet: c.Fleet, Founding: c.Limits.Charter(), OnSilence: c.Limits.OnSilence.Policy, UnstableNames: c.Limits.Roster.Unstable}
}

// Validate reports everything that is wrong with c at once, as an error that is
// [ErrConfig], [gossip.ErrConfig] or [limiter.ErrConfig], or nil.
func (c ProcessConfig) Validate() error {
	var w checks
	c = c.WithDefaults()
	if len(c.Fleet) < 1 || len(c.Fleet) > maxName {
		w.bad("Fleet", fmt.Sprintf("%q", c.Fleet), fmt.Sprintf("[1, %d] bytes", maxName))
	}
	if len(c.Program) > maxStandingText {
		w.bad("Program", fmt.Sprintf("%.20q…", c.Program), fmt.Sprintf("[0, %d] bytes", maxStandingText))
	}
	w = append(w, c.Limits.Validate())
	if c.alone() {
		if c.Name == "" {
			w.bad("Name", `""`, "[1, 64] bytes")
		}
		return errors.Join(w...)
	}
	return errors.Join(append(w, c.Gossip.Validate(), c.charter().Validate(), c.Breakers.Validate(), c.Storms.Validate(), c.Journal.Validate())...)
}

// A Process is one process's part in a fleet, whole: the limits, the charter, the
// verdicts on breakers, the storms, the journal and how everybody stands, with the
// gossip that carries them. It is safe for concurrent use.
//
//	p, err := fleet.Start(fleet.ProcessConfig{…})
//	g, err := guard.New(guard.Config{…}, guard.WithFleet(p.Member()))
//	…  guard.SourceConfig{Limiter: p.Key("payments")}
//	defer p.Leave(ctx)
//
// It owns one goroutine beside those of its [gossip.Node] and its [limiter.Set];
// all end with Close. Lock order: those of the parts that it calls, never its own
// around them.
type Process struct {
	cfg       ProcessConfig
	self      crdt.Replica
	clock     func() time.Duration
	log       *slog.Logger
	limits    *limiter.Set
	node      *gossip.Node // nil if alone, as what follows
	charters  *Charters
	verdicts  *Verdicts
	storms    *Storms
	member    *Member
	journal   *Journal
	standings *Standings

	ctx    context.Context //nolint:containedctx // the process's life, which Close ends
	cancel context.CancelFunc
	wg     sync.WaitGroup

	// The driver's.
	number   uint64 // of the charter that was last looked at
	resets   uint64
	names    []string
	seated   bool
	scopes   map[string]breaker.State
	delays   map[string]time.Duration // the longest sync delays, as last looked at
	sayAt    time.Duration
	admitted map[string]uint64
}

// ProcessOption supplies a collaborator that a config file cannot express.
type ProcessOption interface{ apply(*processOptions) }

type processOptions struct {
	log    *slog.Logger
	gossip []gossip.Option
}

type processOption func(*processOptions)

func (f processOption) apply(o *processOptions) { f(o) }

// WithProcessLogger has the process log its changes of state; silent by default.
func WithProcessLogger(log *slog.Logger) ProcessOption {
	return processOption(func(o *processOptions) { o.log = log })
}

// WithGossip passes options on to the [gossip.Node], such as a keyring or
// a discovery of one's own. Clock and sections are the process's.
func WithGossip(opts ...gossip.Option) ProcessOption {
	return processOption(func(o *processOptions) { o.gossip = append(o.gossip, opts...) })
}

// The names of the sections.
const (
	sectionLimits    = "limits"
	sectionCharter   = "charter"
	sectionBreakers  = "breakers"
	sectionStorms    = "storms"
	sectionJournal   = "journal"
	sectionStandings = "standings"
)

// Start begins a life of a process. It waits for nobody: until a majority of the
// roster has met, limits are denied or not by Limits.UntilJoined, and breakers go
// by themselves. The error is all that Validate finds, or that of listening.
func Start(cfg ProcessConfig, opts ...ProcessOption) (*Process, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	o := processOptions{log: slog.New(slog.DiscardHandler)}
	for _, opt := range opts {
		opt.apply(&o)
	}
	cfg = cfg.WithDefaults()
	p := &Process{cfg: cfg, self: cfg.Gossip.Self, clock: gossip.Clock(), log: o.log, scopes: map[string]breaker.State{}, delays: map[string]time.Duration{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	if cfg.alone() {
		limits := cfg.Limits
		limits.Fleet = ""
		var err error
		p.limits, err = limiter.New(p.self, limits, limiter.WithClock(p.clock))
		return p, err
	}
	if err := p.start(o); err != nil {
		p.cancel()
		if p.limits != nil {
			p.limits.Close()
		}
		return nil, err
	}
	p.wg.Go(p.drive)
	_ = p.journal.Add(Entry{Kind: EntryStarted, Subject: p.self.Name, Text: cfg.Program})
	return p, nil
}

func (p *Process) start(o processOptions) (err error) {
	now := p.clock()
	if p.limits, err = limiter.New(p.self, p.cfg.Limits, limiter.WithClock(p.clock)); err != nil {
		return err
	}
	p.limits.Mint(now) // nothing until the charter is known to be the newest
	if p.charters, err = NewCharters(p.self, p.cfg.charter(), p.limits, now); err != nil {
		return err
	}
	roster := rosterOf(p.cfg.Limits.Charter())
	p.number, p.names = roster.Number, roster.Names
	p.seated = slices.Contains(roster.Names, p.self.Name)
	if p.verdicts, err = NewVerdicts(now, p.cfg.Breakers, p.self, roster); err != nil {
		return err
	}
	if p.storms, err = NewStorms(p.cfg.Storms, p.self); err != nil {
		return err
	}
	p.member = NewMember(p.clock, p.verdicts, p.storms)
	if p.journal, err = NewJournal(p.cfg.Journal, p.self, time.Now); err != nil { //nolint:forbidigo // the wall clock, for people
		return err
	}
	p.member.onStorm(p.stormChanged)
	if p.standings, err = NewStandings(p.self); err != nil {
		return err
	}
	p.node, err = gossip.Start(p.cfg.Gossip, append(slices.Clone(o.gossip), gossip.WithClock(p.clock), gossip.WithLogger(p.log),
		gossip.WithSection(sectionLimits, p.limits),
		gossip.WithSection(sectionCharter, p.charters),
		gossip.WithSection(sectionBreakers, p.verdicts),
		gossip.WithSection(sectionStorms, p.storms),
		gossip.WithSection(sectionJournal, p.journal),
		gossip.WithSection(sectionStandings, p.standings))...)
	return err
}

// rosterOf is who votes on breakers under a charter.
func rosterOf(c limiter.Charter) Roster {
	r := Roster{Number: c.Number}
	for _, m := range c.Roster.Members {
		r.Names = append(r.Names, m.Name)
	}
	slices.Sort(r.Names)
	return r
}

// Self is this life of this process.
func (p *Process) Self() crdt.Replica { return p.self }

// Key is the handle of a limit's key; see [limiter.Set.Key].
func (p *Process) Key(key string) *limiter.Limiter { return p.limits.Key(key) }

// Limits are all of them.
func (p *Process) Limits() *limiter.Set { return p.limits }

// Member is what a guard takes, by its option WithFleet; nil if the process is
// alone.
func (p *Process) Member() *Member { return p.member }

// Node is the gossip; nil if the process is alone.
func (p *Process) Node() *gossip.Node { return p.node }

// Journal appends what the fleet's journal remembers to dst, oldest first.
func (p *Process) Journal(dst []Entry) []Entry {
	if p.journal == nil {
		return dst
	}
	return p.journal.Entries(dst)
}

// ErrAlone means that there is no fleet: the process has no roster.
var ErrAlone = errors.New("fleet: the process is alone")

// Propose asks for a change of the charter, waits until it is chosen, and returns
// its number; see [Charters.Propose]. When ctx ends first it may be chosen still.
// Who has not applied it is in [Status.Charter].
func (p *Process) Propose(ctx context.Context, change Change) (number uint64, err error) {
	if p.charters == nil {
		return 0, ErrAlone
	}
	ticket, err := p.charters.Propose(p.clock(), change)
	if err != nil {
		return 0, err
	}
	if number, err = p.outcome(ctx, ticket); err == nil {
		kind := EntryCharter
		if change.Reset {
			kind = EntryReset
		}
		_ = p.journal.Add(Entry{Kind: kind, Number: number, Subject: p.self.Name, Text: change.String()})
	}
	return number, err
}

// Evict frees the share of a member that is gone for good, and ends its life for
// the gossip; see [Charters.Evict] for what the operator asserts by it.
func (p *Process) Evict(ctx context.Context, name string) (number uint64, err error) {
	if p.charters == nil {
		return 0, ErrAlone
	}
	ticket, err := p.charters.Evict(p.clock(), name)
	if err != nil {
		return 0, err
	}
	if number, err = p.outcome(ctx, ticket); err == nil {
		p.node.Evict(name)
		_ = p.journal.Add(Entry{Kind: EntryEvicted, Number: number, Subject: name})
	}
	return number, err
}

// ErrMoot means that what was asked for cannot be done any more: the member is gone,
// or has started again.
var ErrMoot = errors.New("fleet: the request is moot")

// String is the change in a line.
func (ch Change) String() string {
	var b strings.Builder
	limit := func(key string, l *limiter.Limit) {
		if l == nil {
			fmt.Fprintf(&b, "%s as the others; ", key)
			return
		}
		fmt.Fprintf(&b, "%s%g/s burst %d; ", key, l.Rate, l.Burst)
	}
	if ch.Limit != nil {
		limit("", ch.Limit)
	}
	for _, key := range slices.Sorted(maps.Keys(ch.Limits)) {
		limit(key+" ", ch.Limits[key])
	}
	for _, name := range slices.Sorted(maps.Keys(ch.Weights)) {
		fmt.Fprintf(&b, "%s weighs %d; ", name, ch.Weights[name])
	}
	if ch.Reset {
		b.WriteString("all buckets filled; ")
	}
	return strings.TrimSuffix(b.String(), "; ")
}

// outcome waits until what a ticket stands for is chosen.
func (p *Process) outcome(ctx context.Context, ticket uint64) (uint64, error) {
	p.node.Kick()
	for {
		if number, done := p.charters.Outcome(ticket); done {
			if number == 0 {
				return 0, ErrMoot
			}
			return number, nil
		}
		if err := p.pause(ctx, outcomeEvery); err != nil {
			return 0, err
		}
	}
}

const (
	outcomeEvery = 5 * time.Millisecond
	sayEvery     = time.Second
	leaveFor     = 10 * time.Second // of Leave, if its context has no deadline
)

// pause lets d pass, unless ctx or the process ends first.
func (p *Process) pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d) //nolint:forbidigo // of the driver
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-p.ctx.Done():
		return gossip.ErrClosed
	}
}

// Join asks for a share of the given weight, and waits until this process has it.
// Until then it borrows.
func (p *Process) Join(ctx context.Context, weight int) error {
	if p.charters == nil {
		return ErrAlone
	}
	if err := p.charters.Join(p.clock(), weight); err != nil {
		return err
	}
	p.node.Kick()
	for !p.charters.Status(p.clock()).Member {
		if err := p.pause(ctx, outcomeEvery); err != nil {
			return err
		}
	}
	return nil
}

// Leave gives the share to the others, tells everybody that this life is over, and
// closes the process. It takes until ctx ends at most, 10 s if ctx has no deadline;
// a share that is not handed over by then is stranded until the name is back or is
// evicted, and the error says so. A member that is to come back under its name with
// its share, as in a restart, is closed without Leave.
func (p *Process) Leave(ctx context.Context) error {
	if p.node == nil {
		p.Close()
		return nil
	}
	defer p.Close()
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, leaveFor)
		defer cancel()
	}
	_ = p.journal.Add(Entry{Kind: EntryLeft, Subject: p.self.Name})
	err := p.giveUp(ctx)
	return errors.Join(err, p.node.Leave(ctx))
}

// giveUp leaves the roster.
func (p *Process) giveUp(ctx context.Context) error {
	now := p.clock()
	limit := leaveFor
	if until, ok := ctx.Deadline(); ok {
		limit = time.Until(until) //nolint:forbidigo // of a context
	}
	switch err := p.charters.Leave(now, now+limit*9/10); {
	case errors.Is(err, ErrMember):
		return nil // no member, or the last: nobody waits for its share
	case err != nil:
		return err
	}
	p.node.Kick()
	for {
		if left, err := p.charters.Left(p.clock()); left {
			return err
		}
		if err := p.pause(ctx, outcomeEvery); err != nil {
			return err
		}
	}
}

// Close ends the process at once: to the others it falls silent. It returns when
// all its goroutines have ended, and may be called again.
func (p *Process) Close() {
	p.cancel()
	p.wg.Wait()
	if p.node != nil {
		_ = p.node.Close()
	}
	p.limits.Close()
}

// drive is the goroutine that makes time pass for what has no clock of its own.
func (p *Process) drive() {
	timer := time.NewTimer(0) //nolint:forbidigo // of the driver
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-p.ctx.Done():
			return
		}
		now := p.clock()
		mark := p.charters.Mark(crdt.Replica{})
		p.charters.Tick(now)
		if p.charters.Mark(crdt.Replica{}) != mark {
			p.node.Kick()
		}
		p.follow(now)
		if now >= p.sayAt {
			p.sayAt = now + sayEvery
			p.lookAround(now)
		}
		timer.Reset(max(min(p.charters.Wake(), p.sayAt)-p.clock(), time.Millisecond))
	}
}

// follow has the breakers vote by the newest roster.
func (p *Process) follow(now time.Duration) {
	number, _ := p.charters.Number()
	if number == p.number {
		return
	}
	s := p.charters.Status(now)
	roster := rosterOf(s.Charter)
	if err := p.verdicts.SetRoster(now, roster); err != nil {
		p.log.Error("fleet: roster", "number", number, "error", err)
	}
	seated := slices.Contains(roster.Names, p.self.Name)
	p.log.Info("fleet: charter", "number", number, "members", len(roster.Names), "member", seated)
	if p.first(p.names) {
		p.tellSeats(number, roster.Names)
	}
	p.number, p.names, p.seated = number, roster.Names, seated
}

// first says whether this process writes down what all see: of those in the roster
// that it hears, the first by name. In a split each side has one.
func (p *Process) first(names []string) bool {
	heard := map[string]bool{p.self.Name: true}
	for _, s := range p.standings.All(p.clock(), nil) {
		if s.Heard < p.cfg.Breakers.Silent {
			heard[s.Name] = true
		}
	}
	i := slices.IndexFunc(names, func(n string) bool { return heard[n] })
	return i >= 0 && names[i] == p.self.Name
}

// tellSeats writes down who came into the roster and who went.
func (p *Process) tellSeats(number uint64, names []string) {
	var came, went []string
	for _, n := range names {
		if !slices.Contains(p.names, n) {
			came = append(came, "+"+n)
		}
	}
	for _, n := range p.names {
		if !slices.Contains(names, n) {
			went = append(went, "-"+n)
		}
	}
	if len(came)+len(went) > 0 {
		_ = p.journal.Add(Entry{Kind: EntryCharter, Number: number, Subject: "roster", Text: strings.Join(append(came, went...), " ")})
	}
}

// stormChanged writes down a storm of the fleet. Called by Member.
func (p *Process) stormChanged(c StormChange) {
	if !p.first(p.names) {
		return
	}
	kind := EntryStormEnded
	if c.Active {
		kind = EntryStormBegan
	}
	_ = p.journal.Add(Entry{Kind: kind, Subject: c.Key, Text: c.Reason})
}

// lookAround says how this process stands, and writes down what became of scopes.
func (p *Process) lookAround(now time.Duration) {
	for _, peer := range p.node.Peers() {
		if peer.HasOffset {
			p.journal.Sample(peer.Replica, peer.Offset, peer.RTT)
		}
	}
	p.standings.Say(p.standing(now))
	seen := map[string]bool{}
	for _, s := range p.member.Scopes() {
		seen[s.Name] = true
		was, known := p.scopes[s.Name]
		p.scopes[s.Name] = s.State
		open, wasOpen := s.State != breaker.Closed, known && was != breaker.Closed
		shared := strings.Count(s.Name, "/") < partitionDepth-1
		if open == wasOpen || shared && !p.first(p.names) {
			continue
		}
		kind := EntryClosed
		if open {
			kind = EntryOpened
		}
		_ = p.journal.Add(Entry{Kind: kind, Subject: s.Name, Text: string(s.Cause)})
	}
	for name := range p.scopes {
		if !seen[name] {
			delete(p.scopes, name)
		}
	}
}

// standing is what there is to say of this process.
func (p *Process) standing(now time.Duration) Standing {
	const micro = 1e6
	l, g := p.limits.Stats(), p.node.Stats()
	s := Standing{
		Zone: p.cfg.Gossip.Zone, Region: p.cfg.Gossip.Region, Version: p.cfg.Program,
		Charter: l.Charter, Complete: l.Completed, Applied: l.Applied, Share: l.Share,
		Level: float64(l.Level) / micro, Cap: float64(l.Cap) / micro, Lent: float64(l.Lent) / micro, Pinned: float64(l.Pinned) / micro,
		Unacked: g.Session.Unacked,
	}
	for _, peer := range p.node.Peers() {
		if peer.State == gossip.Fresh {
			s.SyncDelay = max(s.SyncDelay, peer.Delay)
		}
	}
	s.Keys = p.busiest()
	return s
}

// busiest are the keys that this process spends most of.
func (p *Process) busiest() []KeyStanding {
	const micro = 1e6
	var keys []KeyStanding
	for _, v := range p.limits.Busiest(maxStandingKeys) {
		keys = append(keys, KeyStanding{
			Key: v.Key, Admitted: uint64(v.Admitted() / micro), Denied: uint64(v.Sums.Denied / micro), //nolint:gosec // sums
			Level: float64(v.Level) / micro, Cap: float64(v.Cap) / micro,
		})
	}
	return keys
}
