// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
)

const (
	// totalsEvery is how often a process sends its counts, at most: four times a second. A driver's
	// tick of 250ms may come a little early, so it is less than 250ms.
	totalsEvery = 240 * time.Millisecond
	// successFresh is how old a success may be when this process hears of it, to show that the
	// dependency works now. It equals guard's proofFresh.
	successFresh = 5 * time.Second

	maxTotals       = 1000     // keys of this process, and keys of others
	maxTotalRows    = 1 << 14  // rows of others, over all keys: some 500 bytes each
	maxDepartedRows = 64       // incarnations that have ended and still have rows of their own
	longAgo         = -maxSpan // earlier than all fresh successes
)

// Totals are the fleet's counts by key: handler calls that succeeded, calls that failed, dead
// letters. Each count is a [crdt.GCounter] with a row for each incarnation of each process. Only
// that process sends the row: when it has changed, four times a second at most.
//
// A fresh count also shows that the dependency works: a row travels with the time since its latest
// success. The receiver adds the longest possible time in transit. By its own monotonic clock that
// is the time since it sent the latest packet that the sender had heard. No wall clock is needed. A
// success of more than five seconds ago, such as before a partition that has healed, is counted,
// but shows nothing.
//
// Memory is bounded: 1000 keys of this process and as many of others, 16384 rows of others. The
// latest 64 incarnations that have ended keep their rows; those of older ones are folded into one.
// Rows without room are left out and counted.
//
// Instants are monotonic, as for [Verdicts]. All methods are safe for concurrent use. It is its own
// section of the gossip session.
type Totals struct {
	self crdt.Replica

	mu       sync.Mutex
	keys     map[string]*total
	own      int // number of keys that this process counts
	changes  crdt.Changes[*total]
	rows     int
	departed []crdt.Replica
	refused  uint64
}

// total has the counts of one key.
type total struct {
	key    string
	counts [totalKinds]*crdt.GCounter
	folded [totalKinds]uint64

	mine   bool
	change crdt.Change[*total]
	told   time.Duration      // when our row was last sent
	last   [totalKinds]uint64 // our counts when they were last sent
	looked time.Duration      // when Count was last called: later counts came after it
	ok     time.Duration      // our latest success was not before this

	alive time.Duration // the latest success of another process was not before this, by our clock
}

// The counts of a key.
const (
	totalHandled = iota
	totalFailed
	totalDead
	totalKinds
)

// Total has the fleet's counts for a key, as far as this process has heard. It knows counts from
// before its start only of processes that still run.
type Total struct {
	Key                           string
	Handled, Failed, DeadLettered uint64
	Processes                     int // incarnations with a row of their own, this one included
}

// NewTotals returns the part of self, which has counted nothing yet. The error is [ErrConfig].
func NewTotals(self crdt.Replica) (*Totals, error) {
	if len(self.Name) < 1 || len(self.Name) > maxName {
		return nil, fmt.Errorf("%w: self: length of the name %d is not in [1, %d]", ErrConfig, len(self.Name), maxName)
	}
	return &Totals{self: self, keys: make(map[string]*total)}, nil
}

// Count adds the counts of this process for a key since the last call. Call it several times a
// second, also with zeros: a success is taken to be as old as the previous call. The errors are
// [ErrScope] for the key, and [ErrTooManyScopes] above 1000 keys.
func (t *Totals) Count(now time.Duration, key string, handled, failed, deadLettered uint64) error {
	if len(key) < 1 || len(key) > maxScope {
		return fmt.Errorf("%w: %d bytes are not in [1, %d]", ErrScope, len(key), maxScope)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.keys[key]
	if k == nil || !k.mine {
		if t.own >= maxTotals {
			return fmt.Errorf("%w: key %q would be number %d, the most is %d", ErrTooManyScopes, key, t.own+1, maxTotals)
		}
		if k == nil {
			k = t.addLocked(key)
		}
		k.mine, k.told, k.looked, k.ok = true, now-totalsEvery, longAgo, longAgo
		t.own++
	}
	if handled > 0 {
		k.ok = k.looked
	}
	k.looked = now
	changed := false
	for i, n := range [...]uint64{handled, failed, deadLettered} {
		c := k.counts[i]
		if err := c.Add(n); err != nil {
			return fmt.Errorf("fleet: totals of %q: %w", key, err)
		}
		changed = changed || c.Of(t.self) != k.last[i]
	}
	if changed && now-k.told >= totalsEvery {
		k.told = now
		for i, c := range k.counts {
			k.last[i] = c.Of(t.self)
		}
		t.changes.Touch(&k.change)
	}
	return nil
}

func (t *Totals) addLocked(key string) *total {
	k := &total{key: strings.Clone(key), alive: longAgo}
	k.change.Of = k
	for i := range k.counts {
		k.counts[i], _ = crdt.NewGCounter(t.self) // the name was checked
	}
	t.keys[k.key] = k
	return k
}

// OthersSucceeded returns how long ago, at most, a call of another process for this key succeeded.
// ok is false if no success is known that was fresh when this process heard of it.
func (t *Totals) OthersSucceeded(now time.Duration, key string) (ago time.Duration, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.keys[key]
	if k == nil || k.alive == longAgo {
		return 0, false
	}
	return max(now-k.alive, 0), true
}

// All appends the totals to dst, by key.
func (t *Totals) All(dst []Total) []Total {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(t.keys)) {
		k := t.keys[key]
		one := Total{Key: key, Handled: k.sum(totalHandled), Failed: k.sum(totalFailed), DeadLettered: k.sum(totalDead)}
		incarnations := make(map[crdt.Replica]bool)
		for _, c := range k.counts {
			for r := range c.All() {
				incarnations[r] = true
			}
		}
		one.Processes = len(incarnations)
		dst = append(dst, one)
	}
	return dst
}

// sum returns the whole count, or the largest number if it overflows.
func (k *total) sum(kind int) uint64 {
	n, err := k.counts[kind].Value()
	if err != nil || n+k.folded[kind] < n {
		return math.MaxUint64
	}
	return n + k.folded[kind]
}

// has tells whether an incarnation has a row.
func (k *total) has(r crdt.Replica) bool {
	return slices.ContainsFunc(k.counts[:], func(c *crdt.GCounter) bool { return c.Of(r) > 0 })
}

// Mark returns the number of the latest change of this process's own rows: only these are sent.
func (t *Totals) Mark(crdt.Replica) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changes.Mark()
}

// Counted returns the mark; see gossip.Counter.
func (t *Totals) Counted() uint64 { return t.Mark(crdt.Replica{}) }

// The section is: version, and at least one record. A record is
//
//	key age handled failed dead-lettered
//
// in the encoding of the section of [Verdicts]. age is the time since the row's latest success, at
// most. Without news the section is empty.

// Delta appends this process's rows that changed after since, in at most room bytes; 512 always
// make progress.
func (t *Totals) Delta(now time.Duration, b []byte, _ crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	start, upto := len(b), since
	for c := t.changes.After(since); c != nil; c = c.Next() {
		before := len(b)
		if before == start {
			b = append(b, wireVersion)
		}
		k := c.Of
		b = appendTotal(b, &totalRecord{key: k.key, age: now - k.ok, counts: k.last})
		if len(b) > start+room {
			return b[:before], upto
		}
		upto = c.Mark
	}
	return b, upto
}

// totalRecord is a row of the sender, as it is sent.
type totalRecord struct {
	key    string
	age    time.Duration
	counts [totalKinds]uint64
}

func appendTotal(b []byte, r *totalRecord) []byte {
	b = appendSpan(wire.AppendText(b, r.key), r.age)
	for _, n := range r.counts {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

func readTotals(b []byte) ([]totalRecord, error) {
	if len(b) == 0 {
		return nil, nil
	}
	r := read(b)
	r.Uint("version", wireVersion, wireVersion)
	var all []totalRecord
	for first := true; first || r.Len() > 0; first = false {
		one := totalRecord{key: r.Text("key", 1, maxScope), age: r.span("age")}
		one.counts = [...]uint64{r.number("handled"), r.number("failed"), r.number("dead-lettered")}
		all = append(all, one)
	}
	if r.Fault() != nil {
		return nil, fmt.Errorf("%w: total %d: %w", ErrMalformed, len(all), r.Fault())
	}
	return all, nil
}

// Merge takes in the output of a peer's Delta. It is commutative and idempotent. The errors are
// [ErrMalformed] and [ErrSelf], and then nothing was taken in.
func (t *Totals) Merge(c crdt.Contact, b []byte) error {
	if c.From.Name == t.self.Name {
		return ErrSelf
	}
	all, err := readTotals(b)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range all {
		t.mergeLocked(c, &all[i])
	}
	return nil
}

func (t *Totals) mergeLocked(c crdt.Contact, r *totalRecord) {
	k := t.keys[r.key]
	if k == nil {
		if len(t.keys)-t.own >= maxTotals || t.rows >= maxTotalRows {
			t.refused++
			return
		}
		k = t.addLocked(r.key)
	}
	if !k.has(c.From) && r.counts != [totalKinds]uint64{} {
		if t.rows >= maxTotalRows {
			t.refused++
			return
		}
		t.rows++
	}
	if r.counts[totalHandled] > k.counts[totalHandled].Of(c.From) && c.Echo > 0 {
		// The peer sent the packet after it had received ours with the time Echo.
		if age := r.age + max(c.Now-c.Echo, 0); age < successFresh {
			k.alive = max(k.alive, c.Now-age)
		}
	}
	for i, n := range r.counts {
		_ = k.counts[i].Join(c.From, n) // the error is nil: a session has accepted the name
	}
}

// Gone says that a peer's incarnation has ended for good. Its rows stay, or are folded into one
// when 64 later incarnations have ended: totals never go down.
func (t *Totals) Gone(_ time.Duration, peer crdt.Replica) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if peer == t.self || slices.Contains(t.departed, peer) || !t.knowsLocked(peer) {
		return
	}
	peer.Name = strings.Clone(peer.Name)
	t.departed = append(t.departed, peer)
	if len(t.departed) <= maxDepartedRows {
		return
	}
	oldest := t.departed[0]
	t.departed = slices.Delete(t.departed, 0, 1)
	for _, k := range t.keys {
		if !k.has(oldest) {
			continue
		}
		for i, c := range k.counts {
			if n := c.Of(oldest); n > 0 {
				k.folded[i] = min(k.folded[i], math.MaxUint64-n) + n
				c.Forget(oldest)
			}
		}
		t.rows--
	}
}

func (t *Totals) knowsLocked(r crdt.Replica) bool {
	for _, k := range t.keys {
		if k.has(r) {
			return true
		}
	}
	return false
}

// Refused counts the rows that were left out for lack of room.
func (t *Totals) Refused() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.refused
}
