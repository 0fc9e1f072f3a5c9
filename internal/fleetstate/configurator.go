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

// ConfiguratorConfig has the settings of a [Configurator]. Fleet must be set. Fleet, Static,
// OnSilence and Lease must be the same in all processes: processes that differ refuse each other.
type ConfiguratorConfig struct {
	// Fleet names the fleet, in 1 to 128 bytes. A document of another fleet is refused.
	Fleet string

	// Initial is written as number 1 by the first process, if the register is empty. A later
	// process with another Initial changes nothing. Without members the process writes nothing, and
	// waits until another one writes. Number is ignored. It must be unset if Static.
	Initial escrow.Configuration

	// Static says that there is no register: an operator loads each configuration into each
	// process, see [Configurator.Load].
	Static bool

	// Weight is the share that this process asks for while it is not in the roster, unless it has
	// left. In [0, 1000000]; with 0 it asks by [Configurator.Join] only. An evicted process always
	// asks for the weight that it had, even if that was 0.
	Weight int

	// OnSilence says what happens to the share of a silent member; unset is [escrow.Hold].
	//
	// With [escrow.Majority] each process mints only while a majority of the roster confirms,
	// within Lease, that it may. Silent members are evicted. It needs a register. It does not
	// detect a process whose clock stands still while the process runs on.
	//
	// [escrow.TakeOver] needs no agreement: configurations change as with Hold.
	OnSilence escrow.SilencePolicy

	// UnstableNames says that a process that is gone does not come back under its name, as in a
	// Kubernetes Deployment. escrow.Hold is refused then: each crash would strand a share forever.
	UnstableNames bool

	// Lease is how long a process may mint after it sent the packet that a majority confirmed, with
	// escrow.Majority. In [50ms, 1m]; unset means 400 ms. A few keep-alives of the gossip must fit
	// in.
	Lease time.Duration

	// Silent is how long a member must be silent before it is evicted, with escrow.Majority. In
	// (Lease, 10m]; unset means 500 ms, or a quarter above Lease if that is more.
	Silent time.Duration

	// Batch is how long requests to join and leave are collected for one write. In [1ms, 10s];
	// unset means 50 ms. An operator's request does not wait for it.
	Batch time.Duration

	// Patience is how long a writer pauses after a failed write, and how long each process waits
	// for the writer before it. In [10ms, 1m]; unset means 250 ms.
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

// Validate returns nil, or an [ErrConfig] that lists everything that is wrong with c. Unset fields
// are judged as their defaults.
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

// Configurator is one process's part in the fleet's configuration: a sequence of numbered
// configurations. A register orders them: number n is written once, upon n-1, by the first writer.
// Without a register an operator orders them, see [Configurator.Load].
//
// A configuration is applied in two steps, so that no share is ever used twice. Members that lose
// by it use less at once. It is complete when all of them keep within it, and all configurations
// before it are complete. Then members that gain use what was freed. Processes tell each other by
// gossip how far they are, and pass documents on: the Configurator is a section of a gossip
// session.
//
// It has no goroutine, timer or clock, and does no I/O. Its methods take instants of one monotonic
// clock, that of the session which calls Merge. A driver
//
//   - calls [Configurator.Tick] at [Configurator.Wake], and then [Configurator.Write];
//   - does the returned write, and reports the outcome by [Configurator.Wrote];
//   - reports what it reads or watches, by [Configurator.Read] and [Configurator.Away], and reads
//     after each write that did not succeed;
//   - steps the session after each call that changed [Configurator.Counted].
//
// It is safe for concurrent use. The [Applier] is called under its lock.
//
// # Restarts
//
// A process mints once it has read the register: all that it had applied in an earlier incarnation
// was written before. Until it mints, a process borrows.
//
// While the register is away, a process mints by its peers' reports. All other members must report,
// within a second, that they know nothing newer, and one of them must have its share itself. These
// reports miss one case: a newer configuration that only processes outside of the roster know, and
// that is heard nowhere. If all start again while the register is away, no process mints until it
// is back.
type Configurator struct {
	cfg     ConfiguratorConfig
	self    crdt.Replica
	applier Applier
	rand    *rand.Rand
	fleet   uint64 // digest of the settings that must be the same everywhere

	mu        sync.Mutex
	start     time.Duration
	ticked    time.Duration
	doc       *document    // the newest document; nil if none is known
	digest    uint64       // digest of doc: distinguishes it from another document of the same number
	chain     []*chained   // adopted configurations, from the last complete one to the newest
	voters    []confMember // the members of the newest roster, by name
	selfIndex int          // this process's index in voters, -1 if there is none
	peers     map[string]*confPeer
	list      []*confPeer        // the peers in the order in which they were met
	applied   map[string]uint64  // the newest configuration that each name says it has applied; see noteApplied
	knew      map[string]uint64  // the newest configuration that each name has known
	gone      map[string]release // names that were evicted, or left with a lease
	own       uint64             // the newest configuration that the applier has applied
	read      bool               // the register was read in this incarnation
	away      error              // why the register cannot be reached; nil if it can
	settled   bool               // this incarnation may mint
	frozen    map[string]bool    // names whose leases are no longer confirmed; see configurator_lease.go
	stamps    []time.Duration
	until     time.Duration
	broken    error // the applier's error when it refused a configuration
	over      bool  // see End

	loaded   uint64    // the number that an operator loaded, if Static
	draft    []stage   // configurations known before this incarnation is settled, if Static
	conflict *confPeer // a peer whose different configuration of our number is in force, if Static

	// Writing; see configurator_write.go.
	wishes   []wish
	outcomes map[uint64]outcome
	tickets  uint64
	sent     *sending
	fails    int
	retryAt  time.Duration
	wanted   time.Duration // since when a request is open that any process may write; never if there is none
	rank     int           // how many processes write such requests before this one
	full     error         // why the latest draft was not written

	pull         confPull
	behind       time.Duration // since when a peer knows a newer document; never if none does
	joining      bool
	weight       int
	leaving      bool
	deadline     time.Duration
	mayJoinUntil time.Duration // until then this process may still become a member, though it asked to leave
	leftAt       uint64        // the first configuration without this process
	evicted      uint64        // the latest number by which this process was evicted

	seq, shared uint64
	toldAt      time.Duration // when seq last rose
	doneAt      time.Duration // when a configuration was last found complete
	foreign     uint64
	differing   uint64
	differs     *DiffersError
	refused     error // why the latest document was refused
	row         confRow
}

// chained is a configuration of the chain.
type chained struct {
	stage

	from    string   // the peer that sent it; empty if it came from the register
	lacking []string // members that lose by it and had not applied it at the last look
	unknown bool     // too few of the previous roster know it, see spreadLocked
}

// confMember is a member of the newest roster.
type confMember struct {
	*confPeer // nil if it was never met

	name  string
	since time.Duration // when this process first knew it as a member
}

// confPeer is another process, in its latest incarnation.
type confPeer struct {
	id          crdt.Replica
	rosterIndex int           // its index in voters, -1 if it is no member
	sent        time.Duration // when it sent the latest row, by its clock
	heard       time.Duration // when it was heard, plus the contact's Rest
	met         bool          // a row came from it
	row         confRow
	told        uint64        // number of the latest change that concerns it
	frozen      time.Duration // the value of sent when it was frozen
	grant       time.Duration // the latest instant, by our clock, that it confirmed under the newest configuration
}

// confPull is the fetch of a document.
type confPull struct {
	want

	from *confPeer // nil if there is no fetch
	buf  []byte
	at   time.Duration // when the latest piece came
}

// NewConfigurator returns the part of an incarnation that begins now and knows nothing yet. The
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
		cfg: cfg, self: self, applier: applier, start: now, ticked: now, selfIndex: -1,
		rand:  rand.New(rand.NewPCG(self.Incarnation, hashEnd(hashString(hashInit, self.Name)))),
		fleet: hashEnd(h),
		peers: map[string]*confPeer{}, applied: map[string]uint64{}, knew: map[string]uint64{}, gone: map[string]release{},
		frozen: map[string]bool{}, outcomes: map[uint64]outcome{},
		wanted: never, behind: never, seq: 1, shared: 1,
	}, nil
}

// known is the number of the newest known configuration, 0 if there is none.
func (c *Configurator) known() uint64 {
	if c.doc == nil {
		return 0
	}
	return c.doc.number()
}

// complete is the number of the last complete configuration, 0 if there is none.
func (c *Configurator) complete() uint64 {
	if len(c.chain) == 0 {
		return 0
	}
	return c.chain[0].Number
}

func majorityOf(members []escrow.Member) int { return len(members)/2 + 1 }

// tell counts a change that concerns f, so that a packet goes to it at once. All other peers learn
// of it with the next keep-alive.
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

// learnLocked takes in a document that is newer than the known one.
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
			c.appendStageLocked(now, s, name)
		}
	}
	c.votersLocked(now, from)
}

// renewLocked makes a document the newest, and ends everything that was about the one before.
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

// appendStageLocked puts a stage at the end of the chain. The first stage is complete.
func (c *Configurator) appendStageLocked(now time.Duration, s stage, from string) {
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
			// A member that left may die before it says that it has applied this. It mints no
			// longer than an evicted member: see configurator_lease.go.
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

// votersLocked is called after new stages were adopted. It follows the new roster.
func (c *Configurator) votersLocked(now time.Duration, from *confPeer) {
	before, weight := c.selfIndex >= 0, 0
	if before {
		weight = c.weight
	}
	members := c.doc.newest().Roster.Members
	c.voterLocked(now, members)
	switch {
	case c.selfIndex >= 0:
		c.weight, c.leftAt = int(members[c.selfIndex].Weighs()), 0
		c.joining = false
	case !before:
	case c.leaving:
		c.leftAt = c.known()
	default:
		c.evicted = c.known()
		if !c.cfg.Static { // it still runs, so it asks for its share again
			c.joining, c.weight = true, weight
		}
	}
	if c.broken != nil || c.cfg.OnSilence == escrow.Majority && c.selfIndex < 0 {
		c.until = now
		c.applier.Mint(now)
	}
	for _, f := range c.list {
		c.noteApplied(f)
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

// voterLocked makes voters from the members of a new roster.
func (c *Configurator) voterLocked(now time.Duration, members []escrow.Member) {
	since := make(map[string]time.Duration, len(c.voters))
	for i := range c.voters {
		since[c.voters[i].name] = c.voters[i].since
	}
	for _, f := range c.list {
		f.rosterIndex, f.frozen, f.grant = -1, 0, 0
	}
	c.voters = make([]confMember, len(members))
	for i, m := range members {
		s := &c.voters[i]
		*s = confMember{confPeer: c.peers[m.Name], name: m.Name, since: now}
		if at, ok := since[m.Name]; ok {
			s.since = at
		}
		if s.confPeer != nil {
			s.rosterIndex = i
		}
	}
	c.selfIndex = memberIndex(members, c.self.Name)
}

// lacksLocked tells whether a configuration waits for a name that is not in the newest roster. It
// left, and may have died before it said that it keeps within that configuration.
func (c *Configurator) lacksLocked(name string) bool {
	return memberIndex(c.doc.newest().Roster.Members, name) < 0 &&
		slices.ContainsFunc(c.chain, func(l *chained) bool { return slices.Contains(l.lacking, name) })
}

// completeToLocked moves the chain on to a number that is known to be complete.
func (c *Configurator) completeToLocked(now time.Duration, number uint64) {
	before := c.complete()
	for len(c.chain) > 1 && c.chain[1].Number <= number {
		c.chain = c.chain[1:]
	}
	c.completedLocked(now, before, false)
}

// completeLocked moves the chain on to the latest configuration that all losers have applied.
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

// completedLocked acts if more is complete than before. found says that this process found that out
// by itself.
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
		c.tellAll() // a process that got the configuration from a peer tells with the next keep-alive
	}
}

// keepsLocked tells whether a name uses no more than its share in a configuration: by its own
// report, or because that one or a later one is without it (see gone) and its share is free.
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
		a = min(a, c.loaded) // a restart would forget the rest, so it must not be reported
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
	if c.cfg.Weight > 0 && c.settled && c.selfIndex < 0 && !c.leaving && !c.joining {
		c.joining, c.weight = true, c.cfg.Weight
		c.tellAll()
	}
	c.wantLocked(now)
}

// Wake is when Tick must be called next.
func (c *Configurator) Wake() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.activeLocked() && c.ticked-c.toldAt < underWay {
		return c.ticked + activeTick
	}
	return c.ticked + min(idleTick, c.cfg.Lease/16, c.cfg.Batch)
}

// activeLocked tells whether a change is under way.
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

// vouchedLocked tells whether the peers' reports replace a read of the register.
func (c *Configurator) vouchedLocked(now time.Duration) bool {
	if c.away == nil || now-c.start < nearby {
		return false
	}
	settled := false
	for i := range c.voters {
		f := c.voters[i].confPeer
		if i == c.selfIndex {
			continue
		}
		if f == nil || now-f.heard >= nearby || f.row.known != c.known() {
			return false
		}
		settled = settled || f.row.flags&confSettled != 0
	}
	return settled && !slices.ContainsFunc(c.list, func(f *confPeer) bool { return f.row.known > c.known() })
}

// Join asks for a share of the given weight, in [1, 1000000]. Status tells when it is a member.
// Asking twice is asking once, with the later weight. The errors are [ErrConfig] and [ErrMember].
//
// It is written once the applier of this incarnation keeps within the newest configuration. A
// limiter takes 1.011 s for that. If it were written earlier, a share would be taken from the
// others and minted by no process.
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
	case c.selfIndex >= 0:
		return fmt.Errorf("%w: %q is one", ErrMember, c.self.Name)
	}
	c.joining, c.weight = true, weight
	c.tellAll()
	c.tickLocked(now)
	return nil
}

// Leave asks for a roster without this process. It stops minting when that is written; see
// [Configurator.Left]. The last member that mints cannot leave. The error is [ErrMember], also with
// a static configuration.
func (c *Configurator) Leave(now, deadline time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	others := c.selfIndex >= 0 && slices.ContainsFunc(c.doc.newest().Roster.Members, func(m escrow.Member) bool { return m.Name != c.self.Name && m.Weighs() > 0 })
	switch {
	case c.cfg.Static:
		return errStatic()
	case c.selfIndex < 0 && !c.joining:
		return fmt.Errorf("%w: %q is none", ErrMember, c.self.Name)
	case c.selfIndex >= 0 && !others:
		return fmt.Errorf("%w: %q is the last that mints", ErrMember, c.self.Name)
	}
	if c.joining {
		c.mayJoinUntil = now + nearby // a write that makes it a member may be under way
	}
	c.joining, c.leaving, c.deadline = false, true, deadline
	c.tellAll()
	c.tickLocked(now)
	return nil
}

// Left tells whether a leaving process may end: all members that it hears, at least one, know that
// it mints no more. A process that was still joining waits for a second: others may have made it a
// member meanwhile.
//
// At the deadline Left is true in any case. If the others do not know, the error is [ErrBusy]. Then
// the share is stranded until the name is back or evicted, or, with [escrow.Majority], until its
// lease is over.
func (c *Configurator) Left(now time.Duration) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !c.leaving:
		return false, nil
	case c.selfIndex < 0 && c.leftAt == 0:
		return now >= min(c.mayJoinUntil, c.deadline), nil
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

// leftLocked tells whether the heard members that stay know that the configuration without us is
// complete. It is not enough that we know it. If many leave at once, each has heard all the others.
// These then end, and a member that stays may have missed one of them.
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

// End says that this process is out of its fleet: it hears nothing of it any more. It mints nothing
// from now on, whatever is read or loaded later.
func (c *Configurator) End(now time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over, c.until = true, now
	c.applier.Mint(now)
}

// Rejoin goes on as another incarnation of the same name: for its peers this process has restarted.
// With escrow.Majority a writer must admit it again before it confirms leases.
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
