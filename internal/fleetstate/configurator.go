// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// ConfiguratorConfig is what an operator may set from a file, a flag or the
// environment. Fleet must be set. Fleet, Static, OnSilence and Lease must be the same
// in all processes: processes that differ refuse each other.
type ConfiguratorConfig struct {
	// Fleet names the fleet, in 1 to 128 bytes. A document of another fleet is refused.
	Fleet string

	// Initial is written as number 1 by whoever is first, if the register is empty. A
	// later process with another Initial changes nothing. Without members nothing is
	// written, and the process waits for somebody who writes. Number is ignored. Unset
	// if Static.
	Initial escrow.Configuration

	// Static says that there is no register: an operator loads each configuration into each
	// process, see [Configurator.Load].
	Static bool

	// Weight is the share that this process asks for whenever it is not in the roster,
	// unless it has left. In [0, 1000000]; 0 means that it asks by [Configurator.Join]
	// only. A process that was evicted asks for what it had in any case, also for no share.
	Weight int

	// OnSilence says what becomes of the share of a silent member; unset is
	// [escrow.Hold]. With [escrow.Majority] each process mints only while a majority
	// of the roster confirms, within Lease, that it may, and who is silent is evicted.
	// It needs a register. A process whose clock stands still while it runs on is not
	// caught. [escrow.TakeOver] is no agreement: configurations change as with Hold.
	OnSilence escrow.SilencePolicy

	// UnstableNames says that a process that is gone does not come back under its
	// name, as in a Kubernetes Deployment. escrow.Hold is refused then: each crash would
	// strand a share for ever.
	UnstableNames bool

	// Lease is for how long a process mints after it sent the packet that a
	// majority confirmed, with escrow.Majority. In [50ms, 1m]; unset means 400 ms. A few
	// keep-alives of the gossip must fit in.
	Lease time.Duration

	// Silent is after which silence a member is evicted, with escrow.Majority. In
	// (Lease, 10m]; unset means 500 ms, or a quarter above Lease if that is more.
	Silent time.Duration

	// Batch is how long requests to join and leave are gathered for one write. In
	// [1ms, 10s]; unset means 50 ms. An operator's request does not wait for it.
	Batch time.Duration

	// Patience is how long a writer pauses after a write that failed, and how long the
	// others leave it to the one before them. In [10ms, 1m]; unset means 250 ms.
	Patience time.Duration
}

// WithDefaults returns c with every unset field replaced by its default.
func (c ConfiguratorConfig) WithDefaults() ConfiguratorConfig {
	def(&c.Lease, 400*time.Millisecond)
	def(&c.Silent, max(500*time.Millisecond, c.Lease+c.Lease/4))
	def(&c.Batch, 50*time.Millisecond)
	def(&c.Patience, 250*time.Millisecond)
	def(&c.OnSilence, escrow.Hold)
	return c
}

// Validate reports everything that is wrong with c at once, as an error that is
// [ErrConfig], or nil. Unset fields are judged as their defaults.
func (c ConfiguratorConfig) Validate() error {
	var w checks
	c = c.WithDefaults()
	if len(c.Fleet) < 1 || len(c.Fleet) > maxName {
		w.bad("Fleet", fmt.Sprintf("%q", c.Fleet), fmt.Sprintf("[1, %d] bytes", maxName))
	}
	if c.Weight < 0 || c.Weight > 1e6 {
		w.bad("Weight", c.Weight, "[0, 1000000]")
	}
	if c.OnSilence != escrow.Hold && c.OnSilence != escrow.Majority && c.OnSilence != escrow.TakeOver {
		w.bad("OnSilence", fmt.Sprintf("%q", c.OnSilence), "{hold, majority, takeover}")
	}
	if c.OnSilence == escrow.Majority && c.Static {
		w.bad("OnSilence", c.OnSilence, "{hold, takeover} with Static: an eviction is written to a register")
	}
	if c.UnstableNames && c.OnSilence == escrow.Hold {
		w.bad("OnSilence", c.OnSilence, "{majority, takeover} with UnstableNames: what crashes would strand its share for ever")
	}
	w.span("Lease", c.Lease, 50*time.Millisecond, time.Minute)
	w.span("Silent", c.Silent, c.Lease+1, 10*time.Minute)
	w.span("Batch", c.Batch, time.Millisecond, 10*time.Second)
	w.span("Patience", c.Patience, 10*time.Millisecond, time.Minute)
	switch {
	case len(c.Initial.Roster.Members) == 0:
	case c.Static:
		w.bad("Initial.Roster.Members", len(c.Initial.Roster.Members), "[0, 0] with Static")
	default:
		if err := checkConfiguration(c.Initial); err != nil {
			w = append(w, fmt.Errorf("%w: Initial: %w", ErrConfig, err))
		}
	}
	return errors.Join(w...)
}

// Configurator is one process's part in the fleet's configuration: configurations, one after
// the other, each a fact once it has its number. A register orders them: number n is
// written once, upon n-1, by whoever is first. Or an operator does, see
// [Configurator.Load].
//
// A configuration is applied in two steps, so that no share is ever used twice. Who loses by
// it uses less at once. When all losers keep within it, and all configurations before it are
// complete, it is complete, and who gains uses what was freed. Processes tell each other
// by gossip how far they are, and pass documents on: the Configurator is a section of a
// gossip session.
//
// It has no goroutine, timer or clock, and does no I/O. Its methods take instants of
// one monotonic clock, that of the session which calls Merge. A driver
//
//   - calls [Configurator.Tick] at [Configurator.Wake], and then [Configurator.Write];
//   - does the write that comes back, and says by [Configurator.Wrote] what came of it;
//   - says what it reads or watches, by [Configurator.Read] and [Configurator.Away], and
//     reads after each write that did not succeed;
//   - steps the session after each call that changed [Configurator.Counted].
//
// It is safe for concurrent use; the [Applier] are called under its lock.
//
// # Restarts
//
// A process mints once it has read the register: whatever it had applied in an earlier
// incarnation was written before. Where the register is away it mints by its peers' word: all
// other members say, within a second, that they know nothing newer, and one of them has
// its share itself. What that word misses is a newer configuration that only processes
// outside of the roster know, which nobody hears. Until it mints, a process borrows. If
// all start again while the register is away, nobody mints until it is back.
type Configurator struct {
	cfg     ConfiguratorConfig
	self    crdt.Replica
	applier Applier
	rand    *rand.Rand
	fleet   uint64 // digest of what all must have alike

	mu      sync.Mutex
	start   time.Duration
	ticked  time.Duration
	doc     *document   // the newest; nil if none is known
	digest  uint64      // tells it from another of the same number
	chain   []*chained  // adopted: from the last complete one to the newest
	voters  []confVoter // of the newest roster, by name
	voter   int         // ours, -1 if there is none
	peers   map[string]*confPeer
	list    []*confPeer        // the same, in the order in which they were met
	applied map[string]uint64  // by the word of each, whichever incarnation; see takeWord
	knew    map[string]uint64  // the newest that each has known
	gone    map[string]release // evicted, or left with a lease
	own     uint64             // applied by the applier
	read    bool               // the register was read in this incarnation
	away    error              // why it cannot be reached; nil if it can
	settled bool               // this incarnation may mint
	frozen  map[string]bool    // whose leases we confirm no more; see configurator_lease.go
	stamps  []time.Duration
	until   time.Duration
	broken  error // the applier refused a configuration

	loaded   uint64    // by an operator, if Static
	draft    []stage   // before this incarnation is settled, if Static
	conflict *confPeer // who has another configuration of our number, which is in force, if Static

	// Writing; see configurator_write.go.
	wishes   []wish
	outcomes map[uint64]outcome
	tickets  uint64
	sent     *sending
	fails    int
	retryAt  time.Duration
	wanted   time.Duration // something shared is requested since; never if nothing is
	rank     int           // in which order processes write it
	full     error         // why the latest draft was not written

	pull     confPull
	behind   time.Duration // a peer knows more since; never if none does
	joining  bool
	weight   int
	leaving  bool
	deadline time.Duration
	lingers  time.Duration // until then it may still be a voter, though it asked to leave
	leftAt   uint64        // the number that is without us
	evicted  uint64        // the latest number by which we were evicted

	seq, shared uint64
	toldAt      time.Duration // seq last rose
	doneAt      time.Duration // something was found complete
	foreign     uint64
	differing   uint64
	differs     *DiffersError
	refused     error // the latest document that could not be read
	row         confRow
}

// chained is a configuration in the chain.
type chained struct {
	stage

	from    string   // whom it was learned of; empty is the register
	lacking []string // losers that have not applied it, when last looked at
	unknown bool     // too few of the roster before it know of it, see spreadLocked
}

// confVoter is a member.
type confVoter struct {
	*confPeer // nil if it was not met

	name  string
	since time.Duration // it is a member since, as we know
}

// confPeer is another process, by its latest incarnation.
type confPeer struct {
	id     crdt.Replica
	voter  int           // -1 if it has none
	sent   time.Duration // its clock: of the latest row
	heard  time.Duration // and what it rests
	met    bool          // a row came
	row    confRow
	told   uint64        // the latest change that concerns it
	frozen time.Duration // sent, when we froze it
	grant  time.Duration // own clock: what it confirmed under the newest configuration
}

// confPull is a document that is being fetched.
type confPull struct {
	want

	from *confPeer // nil if nothing is
	buf  []byte
	at   time.Duration // last progress
}

// NewConfigurator is the part of an incarnation that begins now and knows nothing yet. The
// errors are [ErrConfig].
func NewConfigurator(self crdt.Replica, cfg ConfiguratorConfig, applier Applier, now time.Duration) (*Configurator, error) {
	var w checks
	if len(self.Name) < 1 || len(self.Name) > maxName {
		w.bad("self", fmt.Sprintf("%q", self.Name), fmt.Sprintf("[1, %d] bytes", maxName))
	}
	if err := errors.Join(append(w, cfg.Validate())...); err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	h := hashString(hashString(hashInit, cfg.Fleet), string(cfg.OnSilence))
	if cfg.OnSilence == escrow.Majority {
		h = hashNumber(h, uint64(cfg.Lease))
	}
	if cfg.Static {
		h = hashNumber(h, 1)
	}
	return &Configurator{
		cfg: cfg, self: self, applier: applier, start: now, ticked: now, voter: -1,
		rand:  rand.New(rand.NewPCG(self.Incarnation, hashEnd(hashString(hashInit, self.Name)))),
		fleet: hashEnd(h),
		peers: map[string]*confPeer{}, applied: map[string]uint64{}, knew: map[string]uint64{}, gone: map[string]release{},
		frozen: map[string]bool{}, outcomes: map[uint64]outcome{},
		wanted: never, behind: never, seq: 1, shared: 1,
	}, nil
}

// known is the newest number, 0 if there is none.
func (c *Configurator) known() uint64 {
	if c.doc == nil {
		return 0
	}
	return c.doc.number()
}

// complete is the base of the chain, 0 before there is one.
func (c *Configurator) complete() uint64 {
	if len(c.chain) == 0 {
		return 0
	}
	return c.chain[0].Number
}

func majorityOf(members []escrow.Member) int { return len(members)/2 + 1 }

// tell makes a change that concerns f, so that a packet goes there at once. All
// others learn of it with the next keep-alive.
func (c *Configurator) tell(f *confPeer) {
	if f != nil {
		c.seq++
		f.told, c.toldAt = c.seq, c.ticked
	}
}

func (c *Configurator) tellAll() {
	c.seq++
	c.shared, c.toldAt = c.seq, c.ticked
}

// learnLocked takes in a document that is newer than what is known.
func (c *Configurator) learnLocked(now time.Duration, d *document, from *confPeer) {
	if d.number() <= c.known() {
		return
	}
	name := ""
	if from != nil {
		name = from.id.Name
	}
	c.renewLocked(d, digestOf(d.bytes))
	base := d.stages[0].Number
	if len(c.chain) > 0 && base <= c.chain[len(c.chain)-1].Number {
		c.completeToLocked(now, base)
	} else {
		c.chain = nil
	}
	for _, s := range d.stages {
		if len(c.chain) == 0 || s.Number > c.chain[len(c.chain)-1].Number {
			c.adoptLocked(now, s, name)
		}
	}
	c.votersLocked(now, from)
}

// renewLocked makes a document the newest, and ends what was about the one before.
func (c *Configurator) renewLocked(d *document, digest uint64) {
	c.doc, c.digest = d, digest
	c.fails, c.retryAt, c.wanted, c.behind = 0, 0, never, never
	c.full = nil
	if c.differs != nil && c.differs.Number < d.number() {
		c.differs = nil
	}
	clear(c.frozen)
	if c.pull.from != nil && c.pull.number <= d.number() {
		from := c.pull.from
		c.pull = confPull{}
		c.tell(from)
	}
}

// adoptLocked puts a stage at the end of the chain. The first is complete.
func (c *Configurator) adoptLocked(now time.Duration, s stage, from string) {
	l := &chained{stage: s, from: from}
	first := len(c.chain) == 0
	if !first {
		before := c.chain[len(c.chain)-1]
		l.lacking = escrow.Losers(before.Configuration, s.Configuration)
		l.unknown = c.cfg.Static || c.cfg.OnSilence == escrow.Majority
		for _, e := range s.evicted {
			r := release{s.Number, now}
			if e.silent {
				r.from += fenced(c.cfg.Lease)
			}
			c.gone[e.name] = r
		}
		if c.cfg.OnSilence == escrow.Majority {
			// Who left by itself may die before it says that it has applied this. It mints no
			// longer than who was evicted: see configurator_lease.go.
			for _, m := range before.Roster.Members {
				if memberIndex(s.Roster.Members, m.Name) < 0 && c.gone[m.Name].number != s.Number {
					c.gone[m.Name] = release{s.Number, now + fenced(c.cfg.Lease)}
				}
			}
		}
	}
	c.chain = append(c.chain, l)
	if err := c.applier.Adopt(now, s.Configuration); err != nil {
		c.broken = err
	}
	if first {
		c.applier.Complete(now, s.Number)
	}
}

// votersLocked ends the taking in of stages: the roster is another.
func (c *Configurator) votersLocked(now time.Duration, from *confPeer) {
	before, weight := c.voter >= 0, 0
	if before {
		weight = c.weight
	}
	members := c.doc.newest().Roster.Members
	c.voterLocked(now, members)
	switch {
	case c.voter >= 0:
		c.weight, c.leftAt = int(members[c.voter].Weighs()), 0
		c.joining = false
	case !before:
	case c.leaving:
		c.leftAt = c.known()
	default:
		c.evicted = c.known()
		if !c.cfg.Static { // it runs, so it asks for its share again
			c.joining, c.weight = true, weight
		}
	}
	if c.broken != nil || c.cfg.OnSilence == escrow.Majority && c.voter < 0 {
		c.until = now
		c.applier.Mint(now)
	}
	for _, f := range c.list {
		c.takeWord(f)
	}
	c.pollLocked()
	c.answerLocked(now)
	c.completeLocked(now)
	c.settleLocked(now)
	if from == nil {
		c.tellAll()
	} else {
		c.tell(from)
	}
	for _, f := range c.list {
		c.readLocked(now, f)
	}
}

// voterLocked voters the members of a new roster.
func (c *Configurator) voterLocked(now time.Duration, members []escrow.Member) {
	since := make(map[string]time.Duration, len(c.voters))
	for i := range c.voters {
		since[c.voters[i].name] = c.voters[i].since
	}
	for _, f := range c.list {
		f.voter, f.frozen, f.grant = -1, 0, 0
	}
	c.voters = make([]confVoter, len(members))
	for i, m := range members {
		s := &c.voters[i]
		*s = confVoter{confPeer: c.peers[m.Name], name: m.Name, since: now}
		if at, ok := since[m.Name]; ok {
			s.since = at
		}
		if s.confPeer != nil {
			s.voter = i
		}
	}
	c.voter = memberIndex(members, c.self.Name)
}

// lacksLocked tells whether a configuration waits for a name that the newest roster has no
// more: it left, and may have died before it said that it keeps within that configuration.
func (c *Configurator) lacksLocked(name string) bool {
	return memberIndex(c.doc.newest().Roster.Members, name) < 0 &&
		slices.ContainsFunc(c.chain, func(l *chained) bool { return slices.Contains(l.lacking, name) })
}

// completeToLocked moves on to a number that is known to be complete.
func (c *Configurator) completeToLocked(now time.Duration, number uint64) {
	before := c.complete()
	for len(c.chain) > 1 && c.chain[1].Number <= number {
		c.chain = c.chain[1:]
	}
	c.completedLocked(now, before, false)
}

// completeLocked moves on to the latest configuration that all losers have applied.
func (c *Configurator) completeLocked(now time.Duration) {
	before := c.complete()
	for len(c.chain) > 1 {
		l := c.chain[1]
		if l.lacking = slices.DeleteFunc(l.lacking, func(name string) bool { return c.keepsLocked(now, name, l.Number) }); len(l.lacking) > 0 {
			break
		}
		if l.unknown = l.unknown && !c.spreadLocked(now, c.chain[0].Roster.Members, l.Number); l.unknown {
			break
		}
		c.chain = c.chain[1:]
	}
	c.completedLocked(now, before, true)
}

// completedLocked says that more is complete than before; found, that it was us who
// found out.
func (c *Configurator) completedLocked(now time.Duration, before uint64, found bool) {
	if c.complete() == before {
		return
	}
	c.doneAt = now
	c.applier.Complete(now, c.complete())
	for name, r := range c.gone {
		if r.number <= c.complete() {
			delete(c.gone, name)
		}
	}
	for _, words := range []map[string]uint64{c.applied, c.knew} {
		if len(words) > 4*maxMembers {
			maps.DeleteFunc(words, func(name string, _ uint64) bool { return memberIndex(c.doc.newest().Roster.Members, name) < 0 })
		}
	}
	if found && c.chain[0].from == "" {
		c.tellAll() // the others tell with the next keep-alive
	}
}

// keepsLocked tells whether the name uses no more than it has in a configuration: by its
// own word, or because it was evicted there or later.
func (c *Configurator) keepsLocked(now time.Duration, name string, number uint64) bool {
	if name == c.self.Name && c.own >= number || c.applied[name] >= number {
		return true
	}
	r, ok := c.gone[name]
	return ok && r.number >= number && now >= r.from
}

// pollLocked asks the applier how far it is.
func (c *Configurator) pollLocked() {
	if len(c.chain) == 0 {
		return
	}
	a := min(c.applier.Applied(), c.known())
	if c.cfg.Static {
		a = min(a, c.loaded) // what would not be there after a restart is no word
	}
	if a <= c.own {
		return
	}
	c.own = a
	for _, l := range c.chain {
		c.tell(c.peers[l.from])
	}
	if c.chain[len(c.chain)-1].from == "" {
		c.tellAll()
	}
}

// Tick lets time pass.
func (c *Configurator) Tick(now time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tickLocked(now)
}

func (c *Configurator) tickLocked(now time.Duration) {
	c.ticked = now
	c.pollLocked()
	c.completeLocked(now)
	c.settleLocked(now)
	c.freezeLocked(now)
	c.leaseLocked(now)
	c.refetchLocked(now)
	if c.cfg.Weight > 0 && c.settled && c.voter < 0 && !c.leaving && !c.joining {
		c.joining, c.weight = true, c.cfg.Weight
		c.tellAll()
	}
	c.wantLocked(now)
}

// Wake is when Tick wants to be called next.
func (c *Configurator) Wake() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.activeLocked() && c.ticked-c.toldAt < underWay {
		return c.ticked + activeTick
	}
	return c.ticked + min(idleTick, c.cfg.Lease/16, c.cfg.Batch)
}

// activeLocked tells whether something is under way.
func (c *Configurator) activeLocked() bool {
	return len(c.chain) > 1 || c.own < c.known() || c.pull.from != nil || c.wanted != never || len(c.wishes) > 0 || c.sent != nil || c.behind != never
}

// settleLocked finds out whether this incarnation may mint.
func (c *Configurator) settleLocked(now time.Duration) {
	if c.settled {
		return
	}
	switch {
	case c.cfg.Static:
		c.settleStaticLocked(now)
		return
	case c.doc == nil, !c.read && !c.vouchedLocked(now):
		return
	}
	c.settled = true
	c.tellAll()
	c.leaseLocked(now)
}

// vouchedLocked tells whether the peers' word stands in for the register's.
func (c *Configurator) vouchedLocked(now time.Duration) bool {
	if c.away == nil || now-c.start < nearby {
		return false
	}
	settled := false
	for i := range c.voters {
		f := c.voters[i].confPeer
		if i == c.voter {
			continue
		}
		if f == nil || now-f.heard >= nearby || f.row.known != c.known() {
			return false
		}
		settled = settled || f.row.flags&confSettled != 0
	}
	return settled && !slices.ContainsFunc(c.list, func(f *confPeer) bool { return f.row.known > c.known() })
}

// Join asks for a share of the given weight, in [1, 1000000]. Somebody writes it once
// the applier of this incarnation keeps within the newest configuration; Status tells when it is a
// member. Before its applier does, which a limiter's take 1.011 s for, a share would be taken
// from the others and minted by nobody. Asking twice is asking once, with the later
// weight. The errors are [ErrConfig] and [ErrMember].
func (c *Configurator) Join(now time.Duration, weight int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.cfg.Static:
		return errStatic()
	case weight < 1 || weight > 1e6:
		return fmt.Errorf("%w: weight: %v is not in [1, 1000000]", ErrConfig, weight)
	case c.leaving:
		return fmt.Errorf("%w: %q is leaving", ErrMember, c.self.Name)
	case c.voter >= 0:
		return fmt.Errorf("%w: %q is one", ErrMember, c.self.Name)
	}
	c.joining, c.weight = true, weight
	c.tellAll()
	c.tickLocked(now)
	return nil
}

// Leave asks for a roster without this process. It stops minting when that is
// written; see [Configurator.Left]. The last member that mints cannot leave. The
// error is [ErrMember], also where the configuration is static.
func (c *Configurator) Leave(now, deadline time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	others := c.voter >= 0 && slices.ContainsFunc(c.doc.newest().Roster.Members, func(m escrow.Member) bool { return m.Name != c.self.Name && m.Weighs() > 0 })
	switch {
	case c.cfg.Static:
		return errStatic()
	case c.voter < 0 && !c.joining:
		return fmt.Errorf("%w: %q is none", ErrMember, c.self.Name)
	case c.voter >= 0 && !others:
		return fmt.Errorf("%w: %q is the last that mints", ErrMember, c.self.Name)
	}
	if c.joining {
		c.lingers = now + nearby // a write that voters it may be under way
	}
	c.joining, c.leaving, c.deadline = false, true, deadline
	c.tellAll()
	c.tickLocked(now)
	return nil
}

// Left tells whether the leaver may end: all members that it hears, one at least, know
// that it mints no more. One that was still joining waits for a second, in which others may
// have made it a member. At the deadline it is true whatever the others know, with an
// error that is [ErrBusy] if they do not; then the share is stranded until the name is
// back or evicted, or, with [escrow.Majority], its lease is over.
func (c *Configurator) Left(now time.Duration) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !c.leaving:
		return false, nil
	case c.voter < 0 && c.leftAt == 0:
		return now >= min(c.lingers, c.deadline), nil
	case c.leftAt > 0 && c.complete() >= c.leftAt && c.leftLocked(now):
		return true, nil
	case now < c.deadline:
		return false, nil
	case c.leftAt == 0:
		return true, fmt.Errorf("%w: no configuration without %q was written in time", ErrBusy, c.self.Name)
	default:
		return true, fmt.Errorf("%w: configuration %d is not complete in time", ErrBusy, c.leftAt)
	}
}

// leftLocked tells whether those who stay and are heard know that the configuration without
// us is complete. That we know it is not enough: of many who leave at once each has
// heard all the others, who end, and those who stay may have missed one of them.
func (c *Configurator) leftLocked(now time.Duration) bool {
	known := false
	for i := range c.voters {
		f := c.voters[i].confPeer
		if f == nil || !f.met || now-f.heard >= nearby {
			continue
		}
		if f.row.complete < c.leftAt {
			return false
		}
		known = true
	}
	return known
}

// Rejoin goes on as another incarnation of the same name: to its peers this process has
// started again. With escrow.Majority somebody must admit it again before it confirms
// leases.
func (c *Configurator) Rejoin(now time.Duration, self crdt.Replica) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.self = self
	for len(c.list) > 0 {
		c.dropLocked(c.list[0])
	}
	c.pull = confPull{}
	c.tellAll()
	c.tickLocked(now)
}
