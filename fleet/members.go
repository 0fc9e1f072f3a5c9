// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/crdt"
)

// A Member is what a process says of itself, for people and metrics. Nothing is
// decided by it. Amounts are in tokens.
type Member struct {
	crdt.Replica
	Zone, Region string // up to 64 bytes each
	Version      string // of the program; up to 64 bytes

	Charter  uint64 // the newest that it has adopted
	Complete uint64 // the newest that it knows to be complete
	Applied  uint64 // the newest that it keeps within

	Share  float64 // of the rates, in [0, 1]
	Level  float64 // own tokens, over all keys
	Cap    float64 // the most that they can be
	Lent   float64 // out
	Pinned float64 // of these, to processes that are silent

	Unacked   uint64        // changes that its peers have not acknowledged
	SyncDelay time.Duration // the longest, from a change to its acknowledgement, lately

	Keys []MemberKey // the busiest first; what does not fit into a packet is left out

	Heard time.Duration // how long ago; 0 for this process itself
}

// MemberKey is what a process says of one limit's key.
type MemberKey struct {
	Key              string  // up to 128 bytes
	Admitted, Denied uint64  // since its start
	Level, Cap       float64 // as of [Member]
}

const (
	maxMemberText = 64
	maxMemberKey  = 128
	maxMemberKeys = 32

	// maxMember is the most bytes that a member takes in a packet.
	maxMember = 960
	// memberKeep is for how long a member that is not heard is remembered.
	memberKeep = 10 * time.Minute
)

// Members is what each process of a fleet says of itself: one row each, written
// by itself. It is a section for the gossip session, and safe for concurrent use.
// Instants are monotonic, as for [Verdicts].
type Members struct {
	self crdt.Replica

	mu     sync.Mutex
	own    Member
	seq    uint64
	wire   []byte // own, as it travels
	others map[string]*memberRow
}

type memberRow struct {
	Member
	num   uint64
	sent  time.Duration // the peer's clock
	heard time.Duration
}

// NewMembers returns the row of self, which says nothing yet but that. The error
// is [ErrConfig].
func NewMembers(self crdt.Replica) (*Members, error) {
	if len(self.Name) < 1 || len(self.Name) > maxName {
		return nil, fmt.Errorf("%w: self: length of the name %d is not in [1, %d]", ErrConfig, len(self.Name), maxName)
	}
	m := &Members{self: self, others: make(map[string]*memberRow)}
	m.Say(Member{})
	return m, nil
}

// Say replaces what this process says of itself; Replica and Heard are filled in.
// Texts and lists that are too long are cut. Once a second is often enough.
func (m *Members) Say(own Member) {
	own.Replica, own.Heard = m.self, 0
	own.Zone, own.Region, own.Version = clip(own.Zone, maxMemberText), clip(own.Region, maxMemberText), clip(own.Version, maxMemberText)
	own.Keys = slices.Clone(own.Keys[:min(len(own.Keys), maxMemberKeys)])
	for i := range own.Keys {
		own.Keys[i].Key = clip(own.Keys[i].Key, maxMemberKey)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.own = own
	m.seq++
	m.wire, m.own.Keys = appendMember(m.wire[:0], &own, m.seq), own.Keys
}

func clip(s string, most int) string { return s[:min(len(s), most)] }

// All appends this process and all that are remembered to dst, by name. A process
// that was not heard for ten minutes is forgotten.
func (m *Members) All(now time.Duration, dst []Member) []Member {
	m.mu.Lock()
	defer m.mu.Unlock()
	dst = append(dst, m.own)
	for _, name := range slices.Sorted(maps.Keys(m.others)) {
		r := m.others[name]
		if now-r.heard > memberKeep {
			delete(m.others, name)
			continue
		}
		one := r.Member
		one.Heard = max(now-r.heard, 0)
		dst = append(dst, one)
	}
	slices.SortFunc(dst, func(a, b Member) int { return a.Compare(b.Replica) })
	return dst
}

// Skew is the standard deviation of level over cap, of those that have one: how
// unevenly the tokens lie. 0 is even; 0.5 is the most.
func Skew(members []Member) float64 {
	var levels []float64
	mean := 0.
	for _, m := range members {
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

// Mark is the number of what this process last said.
func (m *Members) Mark(crdt.Replica) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seq
}

// The section: version, and if there is news
//
//	num zone region program charter complete applied
//	share level cap lent pinned unacked delay { key admitted denied level cap }
//
// with numbers as varints, share and amounts in millionths, delay in microseconds
// and a length before each text.
func appendMember(b []byte, m *Member, num uint64) []byte {
	b = binary.AppendUvarint(append(b, wireVersion), num)
	b = appendText(appendText(appendText(b, m.Zone), m.Region), m.Version)
	for _, n := range []uint64{
		m.Charter, m.Complete, m.Applied, millionths(m.Share), millionths(m.Level), millionths(m.Cap),
		millionths(m.Lent), millionths(m.Pinned), m.Unacked,
	} {
		b = binary.AppendUvarint(b, n)
	}
	b = appendSpan(b, m.SyncDelay)
	for i, k := range m.Keys {
		before := len(b)
		b = appendText(b, k.Key)
		for _, n := range []uint64{k.Admitted, k.Denied, millionths(k.Level), millionths(k.Cap)} {
			b = binary.AppendUvarint(b, n)
		}
		if len(b) > maxMember {
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

// Delta appends what this process says of itself, if the peer lacks it and room
// is enough, which 960 bytes always are.
func (m *Members) Delta(_ time.Duration, b []byte, _ crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if since >= m.seq || room < len(m.wire) {
		return b, since
	}
	return append(b, m.wire...), m.seq
}

// Merge takes in what a peer says of itself. It is commutative and idempotent. The
// errors are [ErrMalformed] and [ErrSelf], and then nothing was taken in.
func (m *Members) Merge(c crdt.Contact, b []byte) error {
	if c.From.Name == m.self.Name {
		return ErrSelf
	}
	var news *memberRow
	if len(b) > 0 {
		var err error
		if news, err = readMember(b); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	row := m.others[c.From.Name]
	if row == nil || row.Incarnation < c.From.Incarnation {
		row = &memberRow{sent: c.Sent - 1, heard: c.Now}
		row.Replica = crdt.Replica{Name: strings.Clone(c.From.Name), Incarnation: c.From.Incarnation}
		m.others[row.Name] = row
	}
	if row.Incarnation != c.From.Incarnation {
		return nil // of an earlier life
	}
	if c.Sent > row.sent {
		row.sent, row.heard = c.Sent, max(row.heard, c.Now)
	}
	if news != nil && news.num > row.num {
		life := row.Replica
		row.Member, row.num = news.Member, news.num
		row.Replica = life
	}
	return nil
}

func readMember(b []byte) (*memberRow, error) {
	r := &reader{b: b}
	if version := r.byte("version"); r.bad == "" && version != wireVersion {
		return nil, fmt.Errorf("%w: version %d, not %d", ErrMalformed, version, wireVersion)
	}
	amount := func(what string) float64 { return float64(r.number(what, 1<<62)) / 1e6 }
	m := &memberRow{num: r.number("number", math.MaxUint64)}
	m.Zone, m.Region, m.Version = r.text("zone", 0, maxMemberText), r.text("region", 0, maxMemberText), r.text("program", 0, maxMemberText)
	m.Charter, m.Complete, m.Applied = r.number("charter", math.MaxUint64), r.number("complete", math.MaxUint64), r.number("applied", math.MaxUint64)
	m.Share = float64(r.number("share", 1e6)) / 1e6
	m.Level, m.Cap, m.Lent, m.Pinned = amount("level"), amount("cap"), amount("lent"), amount("pinned")
	m.Unacked, m.SyncDelay = r.number("unacked", math.MaxUint64), r.span("delay")
	for len(r.b) > 0 && len(m.Keys) <= maxMemberKeys {
		k := MemberKey{Key: r.text("key", 0, maxMemberKey), Admitted: r.number("admitted", math.MaxUint64), Denied: r.number("denied", math.MaxUint64)}
		k.Level, k.Cap = amount("level of a key"), amount("cap of a key")
		m.Keys = append(m.Keys, k)
	}
	if len(m.Keys) > maxMemberKeys {
		r.fail("more keys than there may be")
	}
	if r.bad != "" {
		return nil, fmt.Errorf("%w: %s of a member", ErrMalformed, r.bad)
	}
	return m, nil
}

// Gone says that a peer's life is over for good.
func (m *Members) Gone(_ time.Duration, peer crdt.Replica) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r := m.others[peer.Name]; r != nil && r.Incarnation <= peer.Incarnation {
		delete(m.others, peer.Name)
	}
}
