// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// A WriteResult is the outcome of a write.
type WriteResult uint8

const (
	// Written means that the document has its number.
	Written WriteResult = iota + 1
	// NotWritten means that the document was not written, and never will be. The number may be
	// taken.
	NotWritten
	// Unknown means that the document was written, or not, or not yet.
	Unknown
)

// A wish is an operator's request to this process. It changes one number, and ends when that number
// is not the newest any more.
type wish struct {
	ticket, number uint64
	change         *Change
	evict          string
	who            string
	ended          bool // the operator no longer waits for it
}

type outcome struct {
	number uint64
	err    error
}

// sending is a write that the driver does, or whose outcome is not known yet.
type sending struct {
	number, id uint64
	ticket     uint64 // ticket of the wish that the document makes; 0 if there is none
	doc, noop  *document
	out        bool // the driver is doing the write
	unknown    bool // an attempt may still be on its way
}

// ableLocked tells whether this process can write.
func (c *Configurator) ableLocked() bool {
	return !c.cfg.Static && c.read && c.away == nil && c.broken == nil
}

// Read takes the newest document of the register; 0 and nil mean that it is empty. A number below
// the known one changes nothing, and does not end that the register is away. The errors are
// [ErrMalformed], [ErrFleet] and [ErrDiffers], and then nothing was taken in; Status has the
// latest. The document must not change afterwards.
func (c *Configurator) Read(now time.Duration, number uint64, b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.readInLocked(now, number, b)
	// While the register is away, a number below the known one does not mean that it is back: it
	// was wiped, is an older copy, or lags.
	if c.refused = err; err == nil && (c.away == nil || number >= c.known()) {
		if c.away != nil || !c.read {
			c.away, c.read = nil, true
			c.tellAll()
		}
	}
	c.tickLocked(now)
	return err
}

func (c *Configurator) readInLocked(now time.Duration, number uint64, b []byte) error {
	if number == 0 && c.doc == nil && !c.read {
		// All processes of a fleet may begin at once. With this pause usually one writes first.
		few := min(c.cfg.Patience, time.Duration(len(c.cfg.Initial.Roster.Members))*5*time.Millisecond)
		c.retryAt = now + time.Duration(c.rand.Int64N(int64(few)+1))
	}
	if number == 0 || number < c.known() || c.cfg.Static {
		return nil
	}
	if number == c.known() && digestOf(b) == c.digest {
		return nil
	}
	d, err := readDocument(b)
	switch {
	case err != nil:
		return err
	case d.fleet != c.cfg.Fleet:
		return fmt.Errorf("%w: the register has the document of %q", ErrFleet, d.fleet)
	case d.number() != number:
		return fmt.Errorf("%w: document: number %d is kept as %d", ErrMalformed, d.number(), number)
	case number == c.known():
		c.differing++
		c.differs = &DiffersError{Number: number, Ours: c.digest, Theirs: digestOf(b)}
		return c.differs
	}
	c.learnLocked(now, d, nil)
	return nil
}

// Away says that the register cannot be reached, and why, until Read is called. The newest
// configuration stays in force, and nothing is written.
func (c *Configurator) Away(now time.Duration, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil || c.cfg.Static {
		return
	}
	if c.away == nil {
		c.tellAll()
	}
	c.away = err
	for _, f := range c.list {
		c.readLocked(now, f)
	}
	c.tickLocked(now)
}

// Set asks for a change of limits, weights or fill. It changes the configuration of the given
// number, or none. who is for the log, the ticket for [Configurator.Outcome]. The errors are
// [ErrConfig], [ErrMember], [ErrConflict] and [ErrBusy]; then nothing was asked for.
func (c *Configurator) Set(now time.Duration, number uint64, change Change, who string) (ticket uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.mayWishLocked(number); err != nil {
		return 0, err
	}
	if _, err := change.apply(c.doc.newest().Configuration, c.doc.newest().Resets); err != nil {
		return 0, err
	}
	return c.wishLocked(now, wish{number: number, change: &change, who: who}), nil
}

// Evict frees the share of a member, or of a process that left and that a configuration still waits
// for. It changes the configuration of the given number, or none. The operator vouches that the
// process does not mint. A process that is alive behind a cut adds what its share mints until it
// hears of the eviction; then it asks for a share again. Ticket and errors are those of Set.
func (c *Configurator) Evict(now time.Duration, number uint64, name, who string) (ticket uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.mayWishLocked(number); err != nil {
		return 0, err
	}
	if name == c.self.Name || memberIndex(c.doc.newest().Roster.Members, name) < 0 && !c.lacksLocked(name) {
		return 0, fmt.Errorf("%w: %q is no other member", ErrMember, name)
	}
	return c.wishLocked(now, wish{number: number, evict: name, who: who}), nil
}

func (c *Configurator) mayWishLocked(number uint64) error {
	switch {
	case c.cfg.Static:
		return errStatic()
	case c.doc == nil || number != c.known():
		return &ConflictError{Number: number, Newest: c.known()}
	case len(c.wishes) >= maxRequests:
		return fmt.Errorf("%w: %d requests of this process are undecided", ErrBusy, len(c.wishes))
	}
	return nil
}

func (c *Configurator) wishLocked(now time.Duration, w wish) uint64 {
	c.tickets++
	w.ticket = c.tickets
	c.wishes = append(c.wishes, w)
	c.tickLocked(now)
	return w.ticket
}

// Cancel ends a request: it is not made any more. If a write for it is under way, it may have been
// made; Outcome says so once that is known. A request whose outcome was an error is never made,
// except after [ErrUnknown].
func (c *Configurator) Cancel(_ time.Duration, ticket uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.wishes {
		if w := &c.wishes[i]; w.ticket == ticket {
			if w.ended = true; c.sent == nil || c.sent.ticket != ticket {
				c.finishLocked(ticket, outcome{err: ErrEnded})
			}
			return
		}
	}
}

// Outcome returns the number of the configuration that a request made, or the error why it was not
// made and will not be: [ErrConflict], [ErrEnded], [ErrBusy], [ErrMember] or [ErrConfig]. After
// [ErrUnknown] it may have been made. done is false while the request is undecided. The latest 256
// outcomes are remembered.
func (c *Configurator) Outcome(ticket uint64) (number uint64, done bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o, done := c.outcomes[ticket]
	return o.number, done, o.err
}

func (c *Configurator) finishLocked(ticket uint64, o outcome) {
	c.wishes = slices.DeleteFunc(c.wishes, func(w wish) bool { return w.ticket == ticket })
	c.outcomes[ticket] = o
	delete(c.outcomes, ticket-maxOutcomes)
}

// wishOf returns the wish with a ticket; nil if its outcome is known, or if no wish has the ticket.
func (c *Configurator) wishOf(ticket uint64) *wish {
	for i := range c.wishes {
		if c.wishes[i].ticket == ticket {
			return &c.wishes[i]
		}
	}
	return nil
}

// answerLocked ends the write and the wishes that the newest document decides.
func (c *Configurator) answerLocked(time.Duration) {
	if s := c.sent; s != nil && s.number <= c.known() {
		c.sent = nil
		if w := c.wishOf(s.ticket); w != nil {
			switch r, ok := c.doc.find(s.number); {
			case ok && r.ID == s.id:
				c.finishLocked(s.ticket, outcome{number: s.number})
			case !ok:
				c.finishLocked(s.ticket, outcome{err: fmt.Errorf("%w: number %d is out of the log by now", ErrUnknown, s.number)})
			default:
				c.finishLocked(s.ticket, c.overLocked(w))
			}
		}
	}
	for i := len(c.wishes) - 1; i >= 0; i-- {
		if w := &c.wishes[i]; w.number < c.known() {
			c.finishLocked(w.ticket, c.overLocked(w))
		}
	}
}

// overLocked is the outcome of a wish that was not made.
func (c *Configurator) overLocked(w *wish) outcome {
	if w.ended {
		return outcome{err: ErrEnded}
	}
	return outcome{err: &ConflictError{Number: w.number, Newest: c.known()}}
}

// Write returns the next document to write, and its number. ok is false if there is none. There is
// one write at a time: the next comes after Wrote. wall is for the log.
func (c *Configurator) Write(now time.Duration, wall time.Time) (number uint64, document []byte, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ableLocked() || now < c.retryAt {
		return 0, nil, false
	}
	if s := c.sent; s != nil {
		if s.out {
			return 0, nil, false
		}
		// Its number must be taken before anything else happens: by this document while its request
		// is wanted, or else by a document that changes nothing.
		d := s.doc
		if w := c.wishOf(s.ticket); s.ticket != 0 && (w == nil || w.ended) {
			if s.noop == nil {
				s.noop = c.documentLocked(wall, c.nextLocked(), nil, c.self.Name, "nothing, in place of a request that ended")
			}
			d = s.noop
		}
		s.out = true
		return s.number, d.bytes, true
	}
	if c.behind != never {
		return 0, nil, false // a peer knows a newer number; a store that lost it would take it again
	}
	d, ticket := c.draftLocked(now, wall)
	if d == nil {
		return 0, nil, false
	}
	c.sent = &sending{number: d.number(), id: d.log[len(d.log)-1].ID, ticket: ticket, doc: d, out: true}
	return d.number(), d.bytes, true
}

// Wrote reports the outcome of the latest write. Unless it is Written, the driver also reads the
// register, and reports that by Read, before or after.
func (c *Configurator) Wrote(now time.Duration, number uint64, result WriteResult) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.sent
	if s == nil || s.number != number || !s.out {
		return // its outcome is known already
	}
	s.out = false
	switch result {
	case Written:
		d := s.doc
		if s.noop != nil {
			d = s.noop
		}
		c.learnLocked(now, d, nil)
	case Unknown:
		s.unknown = true
		c.pauseLocked(now)
	default:
		c.pauseLocked(now)
		if s.unknown {
			break // another attempt may have written it, or will
		}
		c.sent = nil
		if w := c.wishOf(s.ticket); w != nil && w.ended {
			c.finishLocked(s.ticket, outcome{err: ErrEnded})
		}
	}
	c.tickLocked(now)
}

// pauseLocked leaves writing to other processes for a while.
func (c *Configurator) pauseLocked(now time.Duration) {
	span := c.cfg.Patience << min(c.fails, 3)
	c.fails++
	c.retryAt = now + span/8 + time.Duration(c.rand.Int64N(int64(span)))
}

// wantLocked notes since when a request is open that any process may write.
func (c *Configurator) wantLocked(now time.Duration) {
	switch {
	case !c.ableLocked() || c.doc == nil || !c.sharedLocked(now):
		c.wanted = never
	case c.wanted == never:
		c.wanted, c.rank = now, c.rankLocked(now)
	}
}

// rankLocked counts the reachable processes that write before this one. Members come first.
func (c *Configurator) rankLocked(now time.Duration) int {
	const most = 8
	score := func(name string) uint64 {
		return hashEnd(hashString(hashNumber(c.fleet, c.known()), name))
	}
	own, rank := score(c.self.Name), 0
	for _, f := range c.list {
		if f.row.flags&confAble == 0 || f.row.known != c.known() || now-f.heard >= nearby {
			continue
		}
		member, we := f.rosterIndex >= 0, c.selfIndex >= 0
		if member && !we || member == we && score(f.id.Name) < own {
			rank++
		}
	}
	return min(rank, most)
}

// joins, leaves and asks tell what f asks for.
func (c *Configurator) joins(now time.Duration, f *confPeer) bool {
	return f.row.flags&confJoining != 0 && f.rosterIndex < 0 && now-f.heard < nearby && f.row.applied > 0 &&
		f.row.known == c.known() && c.gone[f.id.Name].number == 0
}

func (c *Configurator) leaves(f *confPeer) bool {
	return f.row.flags&confLeaving != 0 && f.rosterIndex >= 0
}

func (c *Configurator) asks(now time.Duration, f *confPeer, flag uint64) bool {
	return f.row.flags&flag != 0 && f.rosterIndex >= 0 && now-f.heard < nearby && f.row.known == c.known()
}

func (c *Configurator) weJoin() bool {
	return c.joining && c.selfIndex < 0 && c.settled && c.own > 0 && c.gone[c.self.Name].number == 0
}

// sharedLocked tells whether a request is open that any process may write.
func (c *Configurator) sharedLocked(now time.Duration) bool {
	if c.leaving && c.selfIndex >= 0 || c.weJoin() || c.unlisted() || c.thawsLocked(now) {
		return true
	}
	for _, f := range c.list {
		if c.joins(now, f) || c.leaves(f) || c.asks(now, f, confUnlist) || c.asks(now, f, confRenew) {
			return true
		}
	}
	for name := range c.frozen {
		if c.evictableLocked(name) {
			return true
		}
	}
	return false
}

// nextLocked returns the newest configuration with the next number.
func (c *Configurator) nextLocked() escrow.Configuration {
	if c.doc == nil {
		to := normal(c.cfg.Initial)
		to.Number, to.Roster.Number = 1, 1
		return to
	}
	to := c.doc.newest().Configuration
	to.Number++
	return to
}

// documentLocked returns a document whose newest configuration is to.
func (c *Configurator) documentLocked(wall time.Time, to escrow.Configuration, evicted []eviction, who, what string) *document {
	d := &document{fleet: c.cfg.Fleet}
	for _, l := range c.chain {
		d.stages = append(d.stages, l.stage)
	}
	d.stages = append(d.stages, newStage(to, evicted))
	if c.doc != nil {
		d.log = slices.Clone(c.doc.log)
	}
	r := Record{Number: to.Number, At: max(wall.UnixMilli(), 0), Who: shorten(who, maxWho), What: shorten(what, maxWhat)}
	// A clone of this process draws the same random numbers, but writes something else.
	r.ID = hashEnd(hashString(hashString(hashNumber(hashNumber(c.rand.Uint64(), uint64(r.At)), d.newest().digest), r.Who), r.What))
	d.log = append(d.log, r)
	d.log = d.log[max(0, len(d.log)-maxLog):]
	if c.cfg.OnSilence == escrow.Majority {
		for _, m := range to.Roster.Members {
			if incarnation, ok := c.listedLocked(m.Name); ok {
				d.incarnations = append(d.incarnations, listed{m.Name, incarnation})
			}
		}
	}
	d.encode()
	return d
}

// listedLocked returns the incarnation of a member that may confirm leases under the next document.
func (c *Configurator) listedLocked(name string) (incarnation uint64, ok bool) {
	f := c.peers[name]
	switch {
	case name == c.self.Name && !c.leaving:
		return c.self.Incarnation, true
	case f != nil && f.met && f.row.flags&(confUnlist|confJoining) != 0:
		return f.id.Incarnation, true
	case c.doc == nil:
		return 0, false
	}
	return c.doc.incarnationOf(name)
}

// rosterEdit changes a roster, and always leaves a member that mints.
type rosterEdit struct {
	members []escrow.Member
	mint    int
}

func editRoster(members []escrow.Member) *rosterEdit {
	e := &rosterEdit{members: slices.Clone(members)}
	for _, m := range members {
		if m.Weighs() > 0 {
			e.mint++
		}
	}
	return e
}

func (e *rosterEdit) remove(name string) bool {
	i := memberIndex(e.members, name)
	if i < 0 || len(e.members) == 1 || e.members[i].Weighs() > 0 && e.mint == 1 {
		return false
	}
	if e.members[i].Weighs() > 0 {
		e.mint--
	}
	e.members = slices.Delete(e.members, i, i+1)
	return true
}

func (e *rosterEdit) add(name string, weight int) bool {
	m := escrow.Member{Name: name, Weight: weight, NoShare: weight == 0}
	i, ok := slices.BinarySearchFunc(e.members, m, byName)
	if ok || len(e.members) >= maxMembers {
		return false
	}
	if weight > 0 {
		e.mint++
	}
	e.members = slices.Insert(e.members, i, m)
	return true
}

// draftLocked returns the next document, and the ticket of the wish that it makes. It returns nil
// if there is no request, if it is another process's turn, or if the document cannot be made: too
// many configurations are not complete, or it would be too large.
func (c *Configurator) draftLocked(now time.Duration, wall time.Time) (*document, uint64) {
	if c.doc == nil {
		if len(c.cfg.Initial.Roster.Members) == 0 {
			return nil, 0
		}
		return c.checkedLocked(c.documentLocked(wall, c.nextLocked(), nil, c.self.Name, "the initial configuration"), maxDocument, nil)
	}
	var w *wish
	for i := range c.wishes {
		if o := &c.wishes[i]; !o.ended && o.number == c.known() {
			w = o
			break
		}
	}
	due := c.wanted != never && now >= c.wanted+c.cfg.Batch+time.Duration(c.rank)*c.cfg.Patience
	if w == nil && !due {
		return nil, 0
	}
	pending := len(c.chain) - 1
	evicting := w != nil && w.evict != ""
	if w != nil && (pending >= maxPending || pending >= fewPending && !evicting) {
		c.finishLocked(w.ticket, outcome{err: c.busyLocked("%d configurations are not complete", pending)})
		return nil, 0
	}
	if pending >= maxPending {
		c.full = c.busyLocked("%d configurations are not complete", pending)
		return nil, 0
	}
	d, what := c.composeLocked(now, wall, w, pending < fewPending)
	if d == nil || what == "" {
		return nil, 0
	}
	most := roomDocument
	if len(d.newest().evicted) > 0 {
		most = maxDocument
	}
	return c.checkedLocked(d, most, w)
}

// composeLocked makes the next document of a wish, if there is one, and of the other open requests.
// Joins and leaves are among these only with room. what is empty if the document would change
// nothing.
func (c *Configurator) composeLocked(now time.Duration, wall time.Time, w *wish, room bool) (_ *document, what string) {
	to := c.nextLocked()
	edit := editRoster(to.Roster.Members)
	who, reweighed := c.self.Name, false
	var evicted []eviction
	var did []string
	if w != nil {
		who = w.who
		if w.change != nil {
			resets := to.Resets
			if w.change.Reset {
				resets++
			}
			changed, err := w.change.apply(to, resets)
			if err != nil {
				c.finishLocked(w.ticket, outcome{err: err})
				return nil, ""
			}
			to, edit = changed, editRoster(changed.Roster.Members)
			reweighed = len(w.change.Weights) > 0
			did = append(did, w.change.String())
		} else {
			if !edit.remove(w.evict) && !c.lacksLocked(w.evict) {
				c.finishLocked(w.ticket, outcome{err: fmt.Errorf("%w: %q is the last that mints", ErrMember, w.evict)})
				return nil, ""
			}
			evicted = append(evicted, eviction{name: w.evict})
			did = append(did, "evict "+w.evict)
		}
	}
	for name := range c.frozen {
		if c.evictableLocked(name) && edit.remove(name) {
			evicted = append(evicted, eviction{name, true})
			did = append(did, "evict "+name+": silent")
		}
	}
	slices.SortFunc(evicted, func(a, b eviction) int { return strings.Compare(a.name, b.name) })
	if room {
		did = c.batchLocked(now, edit, did)
	}
	if c.unlisted() || slices.ContainsFunc(c.list, func(f *confPeer) bool { return c.asks(now, f, confUnlist) }) {
		did = append(did, "a new incarnation confirms leases")
	}
	if c.thawsLocked(now) || slices.ContainsFunc(c.list, func(f *confPeer) bool { return c.asks(now, f, confRenew) }) {
		did = append(did, "who was silent is heard")
	}
	slices.Sort(did)
	moved := reweighed || !slices.Equal(edit.members, to.Roster.Members)
	if to.Roster.Members = edit.members; moved {
		to.Roster.Number = to.Number
	}
	what = strings.Join(did, ", ")
	return c.documentLocked(wall, to, evicted, who, what), what
}

// batchLocked makes joins and leaves, and appends them to did.
func (c *Configurator) batchLocked(now time.Duration, edit *rosterEdit, did []string) []string {
	if c.leaving && edit.remove(c.self.Name) {
		did = append(did, "leave "+c.self.Name)
	}
	if c.weJoin() && edit.add(c.self.Name, c.weight) {
		did = append(did, "join "+c.self.Name)
	}
	for _, f := range c.list {
		switch {
		case c.leaves(f) && edit.remove(f.id.Name):
			did = append(did, "leave "+f.id.Name)
		case c.joins(now, f) && edit.add(f.id.Name, f.row.weight):
			did = append(did, "join "+f.id.Name)
		}
	}
	return did
}

// checkedLocked returns the document if every process can read it and it is not too large.
func (c *Configurator) checkedLocked(d *document, most int, w *wish) (*document, uint64) {
	var err error
	if len(d.bytes) > most {
		err = c.busyLocked("the document has %d bytes, and may have %d", len(d.bytes), most)
	} else if _, bad := readDocument(d.bytes); bad != nil {
		err = fmt.Errorf("%w: %w", ErrConfig, bad)
	}
	switch {
	case err == nil && w != nil:
		return d, w.ticket
	case err == nil:
		return d, 0
	case w != nil:
		c.finishLocked(w.ticket, outcome{err: err})
	default:
		c.full = err
		c.retryAt = c.ticked + c.cfg.Patience // a draft costs a millisecond
	}
	return nil, 0
}

// busyLocked is an error that names the members the others wait for.
func (c *Configurator) busyLocked(format string, args ...any) error {
	return fmt.Errorf("%w: %s: these have not applied them: %q", ErrBusy, fmt.Sprintf(format, args...), c.lackingLocked(c.ticked))
}
