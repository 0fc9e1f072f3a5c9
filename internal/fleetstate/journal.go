// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// JournalConfig bounds a [Journal]. The zero value is valid and means the
// documented defaults.
type JournalConfig struct {
	// Keep is how many entries are remembered: those with the latest stamps. In [1, 100000]; unset
	// means 1000. An entry takes about 400 bytes.
	Keep int

	// Backlog is how many entries of one process, beyond Keep, wait for peers that have not
	// acknowledged them. In [1, 65536]; unset means 1024.
	Backlog int

	// Patience is how long entries wait for a silent peer. A peer that comes back later may find a
	// gap in the journal. In [1s, 24h]; unset means 10 min.
	Patience time.Duration
}

// WithDefaults returns c with every unset field replaced by its default.
func (c JournalConfig) WithDefaults() JournalConfig {
	def(&c.Keep, 1000)
	def(&c.Backlog, 1024)
	def(&c.Patience, 10*time.Minute)
	return c
}

// Validate returns nil, or an [ErrConfig] that lists everything that is wrong with c.
func (c JournalConfig) Validate() error {
	var w checks
	c = c.WithDefaults()
	w.count("Keep", c.Keep, 1e5)
	w.count("Backlog", c.Backlog, 1<<16)
	w.span("Patience", c.Patience, time.Second, 24*time.Hour)
	return errors.Join(w...)
}

// EntryKind says what happened in an [Entry].
type EntryKind uint8

// The kinds.
const (
	EntryStarted       EntryKind = iota + 1 // an incarnation of a process began
	EntryLeft                               // an incarnation of a process left; Subject is its name
	EntryEvicted                            // an operator evicted a member; Subject is its name
	EntryConfiguration                      // a configuration was made; Number is its number
	EntryReset                              // all buckets were filled; Number is the configuration's number
	EntryOpened                             // a scope opened; Subject is its name
	EntryClosed                             // a scope closed; Subject is its name
	EntryStormBegan                         // a storm of the fleet began; Subject is its key
	EntryStormEnded                         // a storm of the fleet ended; Subject is its key
	EntryQuarantined                        // a rule was added to the quarantine; Subject is the rule
	EntryReleased                           // a rule was removed from the quarantine; Subject is the rule
	EntryOrdered                            // an operator gave an order to the processes of the fleet; Subject is the order
	entryKinds
)

var entryKindNames = [entryKinds]string{
	EntryStarted: "started", EntryLeft: "left", EntryEvicted: "evicted", EntryConfiguration: "configuration", EntryReset: "RESET",
	EntryOpened: "opened", EntryClosed: "closed", EntryStormBegan: "storm began", EntryStormEnded: "storm ended",
	EntryQuarantined: "quarantined", EntryReleased: "released", EntryOrdered: "ordered",
}

func (k EntryKind) String() string {
	if k > 0 && k < entryKinds {
		return entryKindNames[k]
	}
	return fmt.Sprintf("entry(%d)", uint8(k))
}

// An Entry is one entry of the journal. Subject is cut after 64 bytes, Text after 128.
type Entry struct {
	At      crdt.Stamp   // set by Add
	By      crdt.Replica // set by Add
	Kind    EntryKind
	Number  uint64
	Subject string
	Text    string
}

// before orders entries by stamp, then by the process that wrote them.
func (e *Entry) before(o *Entry) int {
	return cmp.Or(e.At.Compare(o.At), e.By.Compare(o.By))
}

// line is an entry in the form that [crdt.OpLog] carries: memory of a fixed shape.
type line struct {
	Kind        uint64
	Number      uint64
	SubjectSize uint32
	TextSize    uint32
	Subject     [64]byte
	Text        [128]byte
}

func lineOf(e Entry) line {
	l := line{Kind: uint64(e.Kind), Number: e.Number}
	l.SubjectSize = uint32(copy(l.Subject[:], e.Subject))
	l.TextSize = uint32(copy(l.Text[:], e.Text))
	return l
}

func (l *line) entry(at crdt.Stamp, by crdt.Replica) Entry {
	kind := EntryKind(min(l.Kind, uint64(entryKinds)))
	return Entry{
		At: at, By: by, Kind: kind, Number: l.Number,
		Subject: string(l.Subject[:min(l.SubjectSize, uint32(len(l.Subject)))]),
		Text:    string(l.Text[:min(l.TextSize, uint32(len(l.Text)))]),
	}
}

// A Journal has the history of the fleet, for people: processes that began and ended,
// configurations that were made, scopes that opened and closed, storms, and changes by operators.
// Nothing is decided by it.
//
// Every process has all entries in one order, that of the stamps of a hybrid logical clock. If an
// entry was written after another one was read, it comes after it. Wall clocks may be up to 50 ms
// off beyond their known offsets ([crdt.Clock]).
//
// It is a section of the gossip session, and safe for concurrent use. Instants are monotonic, as
// for [Verdicts].
type Journal struct {
	cfg   JournalConfig
	self  crdt.Replica
	clock *crdt.Clock

	mu      sync.Mutex
	log     *crdt.OpLog[line]
	entries []Entry // in order; at most Keep
	readers map[crdt.Replica]*journalReader
	gone    map[crdt.Replica]time.Duration
	lost    uint64
	lookAt  time.Duration // when peers are checked again
	changed func()
}

// A journalReader is a peer's progress in the journal.
type journalReader struct {
	heard  time.Duration
	acked  uint64
	behind time.Duration // since when it lacks an entry; -1 if it has all
}

// archivist is a reader without a process. For it the log keeps the latest Keep entries, so that a
// process that starts later can read them, too.
var archivist = crdt.Replica{Name: "\x00"}

// NewJournal returns the empty journal of self. wall is the wall clock: [time.Now], or a test's.
// The error is an [ErrConfig] that lists everything that is wrong.
func NewJournal(c JournalConfig, self crdt.Replica, wall func() time.Time) (*Journal, error) {
	err := c.Validate()
	if e := self.Validate(); e != nil {
		err = errors.Join(err, fmt.Errorf("%w: self: %w", ErrConfig, e))
	}
	if wall == nil {
		err = errors.Join(err, fmt.Errorf("%w: wall: nil is not a clock", ErrConfig))
	}
	if err != nil {
		return nil, err
	}
	c = c.WithDefaults()
	j := &Journal{
		cfg: c, self: self, clock: crdt.NewClock(wall),
		readers: make(map[crdt.Replica]*journalReader), gone: make(map[crdt.Replica]time.Duration),
	}
	j.log, err = crdt.NewOpLog(self, crdt.OpLogConfig{MaxRecords: c.Keep + c.Backlog, MaxHeld: c.Keep + c.Backlog}, j.applyLocked)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	j.log.Join(archivist)
	return j, nil
}

// Add writes an entry. If Backlog of this process's entries wait for a peer already, the entry is
// lost and counted, and the error is [crdt.ErrFull].
func (j *Journal) Add(e Entry) error {
	if e.Kind < 1 || e.Kind >= entryKinds {
		return fmt.Errorf("%w: Entry.Kind: %d is not in [1, %d]", ErrConfig, e.Kind, entryKinds-1)
	}
	at := j.clock.Now()
	j.mu.Lock()
	op := crdt.OpAdd
	if e.Kind == EntryReset {
		op = crdt.OpReset
	}
	_, err := j.log.Append(op, at, lineOf(e))
	if err != nil {
		j.lost++
	}
	j.fileLocked()
	changed := j.changed
	j.mu.Unlock()
	if changed != nil && err == nil {
		changed()
	}
	return err
}

// fileLocked lets the log drop entries: it keeps Keep entries, and those that peers lack.
func (j *Journal) fileLocked() {
	if mark := j.log.Mark(); mark > uint64(j.cfg.Keep) {
		j.log.Ack(archivist, mark-uint64(j.cfg.Keep))
	}
}

// applyLocked takes in an entry that the log applies. It also takes entries of an epoch that is
// over: they happened.
func (j *Journal) applyLocked(r crdt.Record[line], _ bool) {
	if r.Origin.Name == "" {
		return // the start of an epoch whose RESET is still to come
	}
	e := r.Body.entry(r.At, r.Origin)
	i, known := slices.BinarySearchFunc(j.entries, &e, func(x Entry, e *Entry) int { return x.before(e) })
	switch {
	case known: // its origin was forgotten, and it came again
	case len(j.entries) < j.cfg.Keep:
		j.entries = slices.Insert(j.entries, i, e)
	case i > 0:
		copy(j.entries, j.entries[1:i])
		j.entries[i-1] = e
	}
}

// Entries appends the remembered entries to dst, oldest first.
func (j *Journal) Entries(dst []Entry) []Entry {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append(dst, j.entries...)
}

// OnChange sets f, which is called after each [Journal.Add], so that a session sends the entry at
// once. f is called without a lock. Call OnChange before the journal is used.
func (j *Journal) OnChange(f func()) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.changed = f
}

// Sample takes how far a peer's wall clock is ahead of ours, as a round trip measured it. Without
// samples a peer's stamps order its entries, but do not advance our clock. Sample does nothing for
// an incarnation that has ended.
func (j *Journal) Sample(peer crdt.Replica, offset, trip time.Duration) {
	sent := time.Unix(0, 0)
	theirs := sent.Add(offset + trip/2)
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, ok := j.gone[peer]; !ok {
		j.clock.Sample(peer, sent, theirs, theirs, sent.Add(trip))
	}
}

// IgnoreClock makes the clock of a silent peer not count; see [crdt.Clock.Ignore].
func (j *Journal) IgnoreClock(peer crdt.Replica) { j.clock.Ignore(peer) }

// JournalStats are figures of a journal.
type JournalStats struct {
	Backlog uint64        // entries that the slowest peer lacks; peers silent for longer than Patience do not count
	Age     time.Duration // the longest time for which a peer has lacked an entry
	Held    int           // entries that wait for an earlier entry
	Lost    uint64        // entries that Add had no room for
	crdt.OpLogStats
}

// Stats returns the journal's figures.
func (j *Journal) Stats(now time.Duration) JournalStats {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := JournalStats{Held: j.log.Held(), Lost: j.lost, OpLogStats: j.log.Stats()}
	for _, p := range j.readers {
		if j.awaited(now, p) && p.acked < j.log.Mark() {
			s.Backlog = max(s.Backlog, j.log.Mark()-p.acked)
			s.Age = max(s.Age, now-p.behind)
		}
	}
	return s
}

func (j *Journal) awaited(now time.Duration, p *journalReader) bool {
	return now-p.heard <= j.cfg.Patience
}

// Clock returns the offset of a peer's clock, as [Journal.Sample] set it; known is false without a
// sample. violations counts its stamps that broke the 50 ms rule of [crdt.Clock].
func (j *Journal) Clock(peer crdt.Replica) (offset time.Duration, known bool, violations uint64) {
	offset, known = j.clock.Offset(peer)
	return offset, known, j.clock.Violations(peer)
}

// Mark returns the number of the latest entry that is here.
func (j *Journal) Mark(crdt.Replica) uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.log.Mark()
}

// Counted returns the mark; see gossip.Counter.
func (j *Journal) Counted() uint64 { return j.Mark(crdt.Replica{}) }

// The section is: version, the sender's stamp, and the output of [crdt.OpLog].
const journalHeader = 1 + 2*binary.MaxVarintLen64

// Delta appends the entries that a peer has not acknowledged, in at most room bytes; [crdt.MinRoom]
// always makes progress. Without news it appends nothing.
func (j *Journal) Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	stamp := j.clock.Now()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.expireLocked(now)
	if p := j.readerLocked(now, to); j.awaited(now, p) {
		j.log.Join(to)
		j.log.Ack(to, since)
		p.acked = max(p.acked, since)
		if p.acked >= j.log.Mark() {
			p.behind = -1
		} else if p.behind < 0 {
			p.behind = now
		}
	}
	if since >= j.log.Mark() || room < journalHeader {
		return b, since
	}
	start := len(b)
	b = append(b, wireVersion)
	b = binary.AppendUvarint(b, stamp.Physical)
	b = binary.AppendUvarint(b, stamp.Logical)
	head := len(b)
	b, upto = j.log.Delta(b, since, room-(head-start))
	if len(b) == head {
		b = b[:start]
	}
	return b, upto
}

// Merge takes in the output of a peer's Delta. It is commutative and idempotent. The errors are
// [ErrMalformed] and [ErrSelf], and [crdt.ErrFull] and [crdt.ErrGap] when a bound refuses the
// entries. Then nothing was taken in, and the peer sends it again.
func (j *Journal) Merge(c crdt.Contact, b []byte) error {
	if c.From == j.self {
		return ErrSelf
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, ok := j.gone[c.From]; ok {
		return nil
	}
	p := j.readerLocked(c.Now, c.From)
	p.heard = max(p.heard, c.Now)
	if len(b) == 0 {
		return nil
	}
	r := read(b)
	r.Uint("version", wireVersion, wireVersion)
	stamp := crdt.Stamp{Physical: r.Uint("physical", 0, 1<<62), Logical: r.Uint("logical", 0, 1<<62)}
	if r.Fault() != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, r.Fault())
	}
	if err := j.log.Merge(r.Rest()); err != nil {
		if errors.Is(err, crdt.ErrMalformed) {
			err = fmt.Errorf("%w: %w", ErrMalformed, err)
		}
		return err
	}
	j.fileLocked()
	j.clock.Observe(c.From, stamp)
	return nil
}

func (j *Journal) readerLocked(now time.Duration, peer crdt.Replica) *journalReader {
	p := j.readers[peer]
	if p == nil {
		p = &journalReader{heard: now, behind: -1}
		j.readers[peer] = p
	}
	return p
}

// Gone says that a peer's incarnation has ended for good. Its entries stay, and no entry waits for
// it any more.
func (j *Journal) Gone(now time.Duration, peer crdt.Replica) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.clock.Forget(peer)
	delete(j.readers, peer)
	j.log.Gone(peer)
	j.gone[peer] = now
	j.lookAt = now
}

// forgetGone is the time after which no packet can still bring entries of an ended incarnation.
const forgetGone = 10 * time.Minute

// expireLocked stops waiting for silent peers, and forgets incarnations that ended long ago.
func (j *Journal) expireLocked(now time.Duration) {
	if now < j.lookAt {
		return
	}
	j.lookAt = now + time.Second
	for peer, p := range j.readers {
		if !j.awaited(now, p) {
			j.log.Gone(peer)
		}
	}
	for peer, at := range j.gone {
		if now-at > forgetGone && j.log.Forget(peer) {
			delete(j.gone, peer)
		}
	}
}
