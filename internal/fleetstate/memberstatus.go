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

// A MemberStatus is the status that a process sends about itself, for people and metrics. Nothing
// is decided by it. Amounts are in tokens.
type MemberStatus struct {
	crdt.Replica
	Zone, Region string // up to 64 bytes each
	Version      string // version of the program; up to 64 bytes

	Number   uint64 // the newest configuration that it has adopted
	Complete uint64 // the newest configuration that it knows to be complete
	Applied  uint64 // the newest configuration that it keeps within

	Share  float64 // its share of the rates, in [0, 1]
	Level  float64 // its own tokens, over all keys
	Cap    float64 // the upper bound of Level
	Lent   float64 // tokens lent to others
	Pinned float64 // tokens of Lent that silent processes have

	Unacked   uint64        // changes that its peers have not acknowledged
	SyncDelay time.Duration // the longest of the latest delays from a change to its acknowledgement by a peer

	Keys []KeyStatus // the busiest first; keys that do not fit into a packet are left out

	Heard time.Duration // how long ago it was heard; 0 for this process itself
}

// KeyStatus is the state of one limit's key in a process.
type KeyStatus struct {
	Key              string  // up to 128 bytes
	Admitted, Denied uint64  // since the process started
	Level, Cap       float64 // as in [MemberStatus], for this key
}

const (
	maxStatusText = 64
	maxStatusKey  = 128
	maxStatusKeys = 32

	// maxStatus is the most bytes of a status in a packet.
	maxStatus = 960
	// statusKeep is how long a silent process is remembered.
	statusKeep = 10 * time.Minute
)

// MemberStatuses has the status of each process of a fleet. Each process writes its own row only.
// It is a section of the gossip session, and safe for concurrent use. Instants are monotonic, as
// for [Verdicts].
type MemberStatuses struct {
	self crdt.Replica

	mu     sync.Mutex
	own    MemberStatus
	seq    uint64
	wire   []byte // the encoding of own
	others map[string]*statusRow
}

type statusRow struct {
	MemberStatus
	num   uint64
	sent  time.Duration // when the latest packet was sent, by the peer's clock
	heard time.Duration
}

// NewMemberStatuses returns the part of self, with an empty status. The error is [ErrConfig].
func NewMemberStatuses(self crdt.Replica) (*MemberStatuses, error) {
	if len(self.Name) < 1 || len(self.Name) > maxName {
		return nil, fmt.Errorf("%w: self: length of the name %d is not in [1, %d]", ErrConfig, len(self.Name), maxName)
	}
	m := &MemberStatuses{self: self, others: make(map[string]*statusRow)}
	m.Say(MemberStatus{})
	return m, nil
}

// Say replaces this process's status. It sets Replica and Heard, and cuts texts and lists that are
// too long. Once a second is often enough.
func (m *MemberStatuses) Say(own MemberStatus) {
	m.mu.Lock()
	own.Replica, own.Heard = m.self, 0
	m.mu.Unlock()
	own.Zone, own.Region, own.Version = clip(own.Zone, maxStatusText), clip(own.Region, maxStatusText), clip(own.Version, maxStatusText)
	own.Keys = slices.Clone(own.Keys[:min(len(own.Keys), maxStatusKeys)])
	for i := range own.Keys {
		own.Keys[i].Key = clip(own.Keys[i].Key, maxStatusKey)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.own = own
	m.seq++
	m.wire, m.own.Keys = appendStatus(m.wire[:0], &own, m.seq), own.Keys
}

func clip(s string, most int) string { return s[:min(len(s), most)] }

// All appends the status of this process and of all remembered ones to dst, by name. A process that
// was silent for ten minutes is forgotten.
func (m *MemberStatuses) All(now time.Duration, dst []MemberStatus) []MemberStatus {
	m.mu.Lock()
	defer m.mu.Unlock()
	dst = append(dst, m.own)
	for _, name := range slices.Sorted(maps.Keys(m.others)) {
		r := m.others[name]
		if now-r.heard > statusKeep {
			delete(m.others, name)
			continue
		}
		one := r.MemberStatus
		one.Heard = max(now-r.heard, 0)
		dst = append(dst, one)
	}
	slices.SortFunc(dst, func(a, b MemberStatus) int { return a.Compare(b.Replica) })
	return dst
}

// Skew says how unevenly the tokens lie: the standard deviation of level divided by cap, over the
// members with a cap. 0 is even; 0.5 is the most.
func Skew(all []MemberStatus) float64 {
	var levels []float64
	mean := 0.
	for _, m := range all {
		if m.Cap > 0 {
			levels = append(levels, m.Level/m.Cap)
			mean += m.Level / m.Cap
		}
	}
	if len(levels) == 0 {
		return 0
	}
	mean /= float64(len(levels))
	squares := 0.
	for _, x := range levels {
		squares += (x - mean) * (x - mean)
	}
	return math.Sqrt(squares / float64(len(levels)))
}

// Mark returns the number of this process's latest status.
func (m *MemberStatuses) Mark(crdt.Replica) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seq
}

// Counted returns the mark; see gossip.Counter.
func (m *MemberStatuses) Counted() uint64 { return m.Mark(crdt.Replica{}) }

// The section is: version, and if there is news
//
//	num zone region program configuration complete applied
//	share level cap lent pinned unacked delay { key admitted denied level cap }
//
// Numbers are varints, share and amounts are in millionths, delay is in microseconds. Each text has
// its length before it.
func appendStatus(b []byte, m *MemberStatus, num uint64) []byte {
	b = binary.AppendUvarint(append(b, wireVersion), num)
	b = wire.AppendText(wire.AppendText(wire.AppendText(b, m.Zone), m.Region), m.Version)
	for _, n := range []uint64{
		m.Number, m.Complete, m.Applied, millionths(m.Share), millionths(m.Level), millionths(m.Cap),
		millionths(m.Lent), millionths(m.Pinned), m.Unacked,
	} {
		b = binary.AppendUvarint(b, n)
	}
	b = appendSpan(b, m.SyncDelay)
	for i, k := range m.Keys {
		before := len(b)
		b = wire.AppendText(b, k.Key)
		for _, n := range []uint64{k.Admitted, k.Denied, millionths(k.Level), millionths(k.Cap)} {
			b = binary.AppendUvarint(b, n)
		}
		if len(b) > maxStatus {
			m.Keys = m.Keys[:i]
			return b[:before]
		}
	}
	return b
}

func millionths(v float64) uint64 {
	if !(v > 0) {
		return 0
	}
	return uint64(min(math.Round(v*1e6), 1<<62))
}

// Delta appends this process's status, if the peer lacks it and there is room. 960 bytes are always
// enough.
func (m *MemberStatuses) Delta(_ time.Duration, b []byte, _ crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if since >= m.seq || room < len(m.wire) {
		return b, since
	}
	return append(b, m.wire...), m.seq
}

// Merge takes in a peer's status. It is commutative and idempotent. The errors are [ErrMalformed]
// and [ErrSelf], and then nothing was taken in.
func (m *MemberStatuses) Merge(c crdt.Contact, b []byte) error {
	if c.From.Name == m.self.Name {
		return ErrSelf
	}
	var news *statusRow
	if len(b) > 0 {
		var err error
		if news, err = readStatus(b); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	row := m.others[c.From.Name]
	if row == nil || row.Incarnation < c.From.Incarnation {
		row = &statusRow{sent: c.Sent - 1, heard: c.Now}
		row.Replica = crdt.Replica{Name: strings.Clone(c.From.Name), Incarnation: c.From.Incarnation}
		m.others[row.Name] = row
	}
	if row.Incarnation != c.From.Incarnation {
		return nil // from an earlier incarnation
	}
	if c.Sent > row.sent {
		row.sent, row.heard = c.Sent, max(row.heard, c.Now)
	}
	if news != nil && news.num > row.num {
		incarnation := row.Replica
		row.MemberStatus, row.num = news.MemberStatus, news.num
		row.Replica = incarnation
	}
	return nil
}

func readStatus(b []byte) (*statusRow, error) {
	r := read(b)
	r.Uint("version", wireVersion, wireVersion)
	amount := func(what string) float64 { return float64(r.Uint(what, 0, 1<<62)) / 1e6 }
	m := &statusRow{num: r.number("number")}
	m.Zone, m.Region, m.Version = r.Text("zone", 0, maxStatusText), r.Text("region", 0, maxStatusText), r.Text("program", 0, maxStatusText)
	m.Number, m.Complete, m.Applied = r.number("configuration"), r.number("complete"), r.number("applied")
	m.Share = float64(r.Uint("share", 0, 1e6)) / 1e6
	m.Level, m.Cap, m.Lent, m.Pinned = amount("level"), amount("cap"), amount("lent"), amount("pinned")
	m.Unacked, m.SyncDelay = r.number("unacked"), r.span("delay")
	for r.Len() > 0 && len(m.Keys) <= maxStatusKeys {
		k := KeyStatus{Key: r.Text("key", 0, maxStatusKey), Admitted: r.number("admitted"), Denied: r.number("denied")}
		k.Level, k.Cap = amount("level of a key"), amount("cap of a key")
		m.Keys = append(m.Keys, k)
	}
	if len(m.Keys) > maxStatusKeys {
		r.Fail("keys", len(m.Keys), fmt.Sprintf("at most %d", maxStatusKeys))
	}
	if r.Fault() != nil {
		return nil, fmt.Errorf("%w: a member: %w", ErrMalformed, r.Fault())
	}
	return m, nil
}

// Gone says that a peer's incarnation has ended for good.
func (m *MemberStatuses) Gone(_ time.Duration, peer crdt.Replica) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r := m.others[peer.Name]; r != nil && r.Incarnation <= peer.Incarnation {
		delete(m.others, peer.Name)
	}
}
