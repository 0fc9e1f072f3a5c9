// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
)

// StormChange says that the fleet's storm of a key began or ended, as this process sees it.
type StormChange struct {
	Key string
	Storm
}

// Storms is one process's part in the fleet's storms. It has a snapshot of each process's
// detectors, by key: a queue, a topic or a group, the unit over which the detectors are compared.
// No process decides for others here, so there is no quorum of the roster: each side of a split has
// the storms of the processes that it hears.
//
// Instants are monotonic, as for [Verdicts]. All methods are safe for concurrent use. It is its own
// section of the gossip session.
type Storms struct {
	cfg  StormConfig
	self crdt.Replica

	mu      sync.Mutex
	peers   peers
	own     []*snapshot // our snapshots, by num
	others  map[string]map[string]*snapshot
	floors  map[string]uint64 // by peer: its versions up to this came before its last silence
	deaf    map[string]bool   // peers that may have dropped our snapshots
	seq     uint64
	active  map[string]bool
	changes []StormChange
	refused uint64
	notify  func() // called for each new num; nil if unset
}

// snapshot is a report as it is sent.
type snapshot struct {
	key  string
	num  uint64 // number of the change; for a peer's snapshot, its version
	gone bool
	at   time.Duration
	Report
}

const maxReason = 128

// NewStorms returns the part of self, which reports nothing yet. The error is an [ErrConfig] that
// lists everything that is wrong.
func NewStorms(c StormConfig, self crdt.Replica) (*Storms, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if len(self.Name) < 1 || len(self.Name) > maxName {
		return nil, fmt.Errorf("%w: self: length of the name %d is not in [1, %d]", ErrConfig, len(self.Name), maxName)
	}
	c = c.WithDefaults()
	return &Storms{
		cfg:    c,
		self:   self,
		peers:  peers{silent: c.Silent, m: make(map[string]*peer)},
		others: make(map[string]map[string]*snapshot),
		floors: make(map[string]uint64),
		deaf:   make(map[string]bool),
		active: make(map[string]bool),
	}, nil
}

// Report replaces this process's snapshot of a key. Call it at each step of the detector: small
// changes are sent only every StormConfig.Every. The errors are [ErrScope] for the key, and
// [ErrTooManyScopes] if it would be one more than Keys.
func (s *Storms) Report(now time.Duration, key string, r Report) error {
	if len(key) < 1 || len(key) > maxScope {
		return fmt.Errorf("%w: %d bytes are not in [1, %d]", ErrScope, len(key), maxScope)
	}
	r.Reason = r.Reason[:min(len(r.Reason), maxReason)]
	r.Age = min(max(r.Age, 0), maxSpan).Truncate(time.Microsecond)
	r.Attempts = min(max(r.Attempts, 0), math.MaxInt32)
	r.Crossed &= crossedAll
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.indexLocked(key)
	if i < 0 {
		if len(s.own) >= s.cfg.Keys {
			return fmt.Errorf("%w: key %q would be number %d, Keys is %d", ErrTooManyScopes, key, len(s.own)+1, s.cfg.Keys)
		}
		s.own = append(s.own, &snapshot{key: key, at: now})
		i = len(s.own) - 1
	} else if o := s.own[i]; !o.gone && o.Active == r.Active && o.Crossed == r.Crossed && (o.Report == r || now-o.at < s.cfg.Every) {
		return nil
	}
	o := s.own[i]
	o.Report, o.gone, o.at = r, false, now
	s.touchLocked(i)
	s.judgeLocked(now, key)
	return nil
}

// Withdraw takes this process's snapshot of a key back: it no longer has a source of that key.
func (s *Storms) Withdraw(now time.Duration, key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.indexLocked(key)
	if i < 0 || s.own[i].gone {
		return
	}
	o := s.own[i]
	o.Report, o.gone, o.at = Report{}, true, now
	s.touchLocked(i)
	s.judgeLocked(now, key)
}

func (s *Storms) indexLocked(key string) int {
	return slices.IndexFunc(s.own, func(o *snapshot) bool { return o.key == key })
}

func (s *Storms) touchLocked(i int) {
	o := s.own[i]
	s.seq++
	o.num = s.seq
	s.own = append(slices.Delete(s.own, i, i+1), o)
	if s.notify != nil {
		s.notify()
	}
}

// OnChange sets f, which is called after each change to send, under the lock of s. f must not wait
// or call s. It is meant for the Kick of a gossip.Node. nil ends it.
func (s *Storms) OnChange(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notify = f
}

// Storm returns the fleet's state for a key now. It takes a lock and looks at each process that is
// heard. So it is for decisions about dead letters, not for each delivery.
func (s *Storms) Storm(now time.Duration, key string) Storm {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stormLocked(now, key)
}

func (s *Storms) stormLocked(now time.Duration, key string) Storm {
	var reports []Report
	if i := s.indexLocked(key); i >= 0 && !s.own[i].gone {
		reports = append(reports, s.own[i].Report)
	}
	for name, keys := range s.others {
		if r := keys[key]; r != nil && !r.gone && s.peers.live(now, s.peers.m[name]) {
			reports = append(reports, r.Report)
		}
	}
	return JudgeStorm(s.cfg.Share, reports)
}

// Tick makes time pass: it drops the snapshots of processes that fell silent. Call it at least once
// a second.
func (s *Storms) Tick(now time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	again := false
	for name, p := range s.peers.m {
		if live := s.peers.live(now, p); live != p.live {
			p.live = live
			if !live {
				s.dropLocked(name)
			}
			s.judgeAllLocked(now)
		}
		hears := p.within(now, s.cfg.Silent/2)
		again = again || hears && s.deaf[name]
		s.deaf[name] = !hears
	}
	if again {
		for range s.own {
			s.touchLocked(0)
		}
	}
	s.own = slices.DeleteFunc(s.own, func(o *snapshot) bool { return o.gone && now-o.at > 10*s.cfg.Silent })
}

// dropLocked forgets a peer's snapshots. Older packets of the peer that are still on their way must
// not bring them back. When the peer is heard again it sends all of them anew.
func (s *Storms) dropLocked(name string) {
	for _, r := range s.others[name] {
		s.floors[name] = max(s.floors[name], r.num)
	}
	delete(s.others, name)
}

// Changes appends the storms that began or ended to dst, and forgets them. Call it after each call
// of Report, Withdraw, Tick and Merge.
func (s *Storms) Changes(dst []StormChange) []StormChange {
	s.mu.Lock()
	defer s.mu.Unlock()
	dst = append(dst, s.changes...)
	clear(s.changes)
	s.changes = s.changes[:0]
	return dst
}

func (s *Storms) judgeLocked(now time.Duration, key string) {
	f := s.stormLocked(now, key)
	if f.Active == s.active[key] {
		return
	}
	if f.Active {
		s.active[key] = true
	} else {
		delete(s.active, key)
	}
	s.changes = append(s.changes, StormChange{key, f})
}

func (s *Storms) judgeAllLocked(now time.Duration) {
	keys := maps.Clone(s.active)
	for _, o := range s.own {
		keys[o.key] = true
	}
	for _, of := range s.others {
		for k := range of {
			keys[k] = true
		}
	}
	for _, k := range slices.Sorted(maps.Keys(keys)) {
		s.judgeLocked(now, k)
	}
}

// Mark returns the number of this process's latest snapshot: only its own snapshots are sent.
func (s *Storms) Mark(crdt.Replica) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seq
}

// Counted returns the mark; see gossip.Counter.
func (s *Storms) Counted() uint64 { return s.Mark(crdt.Replica{}) }

// The section is: version { snapshot }. A snapshot is
//
//	key version flags failed outcomes attempts age diverted reason
//
// in the encoding of the section of [Verdicts]. flags has the thresholds, active and gone.
const (
	flagActive      = 1 << 3
	flagWithdrawn   = 1 << 4
	maxSnapshot     = 2*binary.MaxVarintLen16 + maxScope + maxReason + 1 + 6*binary.MaxVarintLen64
	stormWireFlags  = byte(crossedAll) | flagActive | flagWithdrawn
	maxWireAttempts = math.MaxInt32
)

// Delta appends this process's snapshots after since, in at most room bytes; 1 KiB always makes
// progress. Without news it appends a header.
func (s *Storms) Delta(_ time.Duration, b []byte, _ crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if room < 1 {
		return b, since
	}
	end := len(b) + room
	b = append(b, wireVersion)
	upto = since
	for _, o := range s.own {
		if o.num <= since {
			continue
		}
		before := len(b)
		if b = appendSnapshot(b, o); len(b) > end {
			return b[:before], upto
		}
		upto = o.num
	}
	return b, max(upto, s.seq)
}

func appendSnapshot(b []byte, o *snapshot) []byte {
	flags := byte(o.Crossed)
	if o.Active {
		flags |= flagActive
	}
	if o.gone {
		flags |= flagWithdrawn
	}
	b = wire.AppendText(b, o.key)
	b = binary.AppendUvarint(b, o.num)
	b = append(b, flags)
	b = binary.AppendUvarint(b, o.Failed)
	b = binary.AppendUvarint(b, o.Outcomes)
	b = binary.AppendUvarint(b, uint64(o.Attempts))
	b = appendSpan(b, o.Age)
	b = binary.AppendUvarint(b, o.Diverted)
	return wire.AppendText(b, o.Reason)
}

func readSnapshots(b []byte) ([]*snapshot, error) {
	r := read(b)
	r.Uint("version", wireVersion, wireVersion)
	var all []*snapshot
	for r.Len() > 0 {
		o := &snapshot{key: r.Text("key", 1, maxScope), num: r.number("version")}
		flags := r.Byte("flags")
		if flags&^stormWireFlags != 0 || o.num == 0 {
			r.Fail("flags", flags, "known ones, of version 1 or later")
		}
		o.Crossed, o.Active, o.gone = Thresholds(flags)&crossedAll, flags&flagActive != 0, flags&flagWithdrawn != 0
		o.Failed = r.number("failed")
		o.Outcomes = r.number("outcomes")
		o.Attempts = int(r.Uint("attempts", 0, maxWireAttempts))
		o.Age = r.span("age")
		o.Diverted = r.number("diverted")
		o.Reason = r.Text("reason", 0, maxReason)
		all = append(all, o)
	}
	if r.Fault() != nil {
		return nil, fmt.Errorf("%w: snapshot %d: %w", ErrMalformed, len(all), r.Fault())
	}
	return all, nil
}

// Merge takes in the output of a peer's Delta. It is commutative and idempotent while the peer is
// heard. The errors are [ErrMalformed] and [ErrSelf], and then nothing was taken in.
func (s *Storms) Merge(c crdt.Contact, b []byte) error {
	if c.From.Name == s.self.Name {
		return ErrSelf
	}
	all, err := readSnapshots(b)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	name := c.From.Name
	was := s.peers.m[name]
	p := s.peers.hear(c)
	if p.incarnation != c.From.Incarnation {
		return nil // from an earlier incarnation: nothing of it is live
	}
	if was != p {
		delete(s.others, name)
		delete(s.floors, name)
		s.deaf[name] = true
	}
	keys := s.others[name]
	if keys == nil {
		keys = make(map[string]*snapshot)
		s.others[name] = keys
	}
	for _, o := range all {
		old := keys[o.key]
		switch {
		case o.num <= s.floors[name], old != nil && o.num <= old.num:
			continue
		case old == nil && len(keys) >= s.cfg.Keys:
			s.refused++
			continue
		}
		keys[o.key] = o
	}
	live := s.peers.live(c.Now, p)
	if live != p.live {
		p.live = live
		s.judgeAllLocked(c.Now)
		return nil
	}
	for _, o := range all {
		s.judgeLocked(c.Now, o.key)
	}
	return nil
}

// Gone says that a peer's incarnation has ended for good.
func (s *Storms) Gone(now time.Duration, peer crdt.Replica) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.peers.m[peer.Name]; p == nil || p.incarnation > peer.Incarnation {
		return
	}
	s.peers.gone(peer)
	delete(s.others, peer.Name)
	delete(s.floors, peer.Name)
	delete(s.deaf, peer.Name)
	s.judgeAllLocked(now)
}

// Refused counts the snapshots that were left out because their process reports more than Keys.
func (s *Storms) Refused() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused
}
