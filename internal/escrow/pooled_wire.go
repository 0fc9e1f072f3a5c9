// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
)

// A packet holds the sender's own use. Integers are varints unless a size is given:
//
//	version  byte
//	config   4 bytes, the fingerprint of the limits
//	entries, to the end, each
//	  key    length and bytes
//	  series
//	  used   micro-tokens, in the series
//	  asked  micro-tokens, in the series
//	  flags  byte: 1 is denied recently
const (
	pooledVersion = 1
	pooledHeader  = 5
	pooledDenied  = 1
)

// Mark returns the number of the latest change. Each change concerns every peer.
func (p *pooled) Mark(crdt.Replica) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changes.Mark()
}

// Counted returns the same number as Mark; see gossip.Counter.
func (p *pooled) Counted() uint64 { return p.Mark(crdt.Replica{}) }

// Delta appends this process's use of the keys that changed after since, oldest change
// first; see gossip.Section. Without changes it appends only a header, which shows the
// peer that this process is alive. With a room of 1 KiB it always makes progress.
func (p *pooled) Delta(now time.Duration, b []byte, _ crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	p.lockAt(now)
	defer p.mu.Unlock()
	if room < pooledHeader {
		return b, since
	}
	start := len(b)
	b = binary.LittleEndian.AppendUint32(append(b, pooledVersion), p.config)
	upto = since
	for c := p.changes.After(since); c != nil; c = c.Next() {
		whole, r := len(b), c.Of
		b = wire.AppendText(b, r.key)
		b = binary.AppendUvarint(b, r.series)
		b = binary.AppendUvarint(b, uint64(r.used))
		b = binary.AppendUvarint(b, uint64(r.asked))
		flags := byte(0)
		if p.now-r.deniedAt < starvingFor {
			flags = pooledDenied
		}
		if b = append(b, flags); len(b)-start > room {
			return b[:whole], upto
		}
		upto = c.Mark
	}
	return b, p.changes.Mark()
}

// Keeps is true for every peer: each must be heard all the time, since a peer that is
// silent for pooledSilent is assumed to use its part; see gossip.Keeper.
func (p *pooled) Keeps(crdt.Replica) bool { return true }

// Merge merges a packet of a peer's Delta. It is commutative and idempotent. On an error
// nothing is merged.
func (p *pooled) Merge(c crdt.Contact, b []byte) error {
	r := reader{wire.Read(b)}
	v := r.Byte("version")
	if v != pooledVersion && v != numbered {
		return fmt.Errorf("%w: version %d from %v, want %d", errMalformed, v, c.From, pooledVersion)
	}
	// Only a process with Strategy escrow sends the version numbered, and its config differs.
	if (r.Uint32("config") != p.config || v == numbered) && !r.bad() {
		return fmt.Errorf("%w: Strategy, or initial configuration of %v", ErrSettings, c.From)
	}
	for look := r; look.Len() > 0 || look.bad(); {
		if look.use(); look.bad() {
			return fmt.Errorf("%w: an entry from %v", errMalformed, c.From)
		}
	}
	p.lockAt(c.Now)
	defer p.mu.Unlock()
	if c.From.Name == "" || c.From.Name == p.self.Name {
		return fmt.Errorf("%w: from %v", errMalformed, c.From)
	}
	peer := p.peers[c.From.Name]
	if peer == nil || peer.incarnation < c.From.Incarnation {
		peer = &pooledPeer{incarnation: c.From.Incarnation, heard: p.now, out: len(p.cfg.Roster.Members) > 0 && !p.cfg.Roster.admits(c.From.Name), used: map[string]*pooledUse{}}
		p.peers[strings.Clone(c.From.Name)] = peer
		p.lookAt = 0
	} else if peer.incarnation > c.From.Incarnation {
		return fmt.Errorf("%w: %v has begun a later incarnation", errStale, c.From)
	}
	silent := max(0, p.now-peer.heard-pooledSilent)
	if silent > 0 {
		p.lookAt = 0
	}
	for r.Len() > 0 {
		p.useLocked(peer, silent, r.use())
	}
	peer.heard = max(peer.heard, p.now)
	p.passLocked(p.now)
	return nil
}

// A pooledSaid is one entry of a packet.
type pooledSaid struct {
	key    []byte
	series uint64
	used   int64
	asked  int64
	denied bool
}

func (r *reader) use() (s pooledSaid) {
	s.key, s.series = r.key(), uint64(r.positive("series"))
	s.used, s.asked, s.denied = r.value("used"), r.value("asked"), r.Uint("flags", 0, pooledDenied) == pooledDenied
	return s
}

// useLocked subtracts a peer's new use from the bucket, less its assumed use during its
// silence. Debt beyond the burst is dropped: otherwise everyone would be denied after a
// split, for as long as the split lasted.
func (p *pooled) useLocked(peer *pooledPeer, silent time.Duration, s pooledSaid) {
	r := p.rowLocked(string(s.key))
	if r == nil {
		return // no room for the key: it is denied here
	}
	u, floor := peer.used[r.key], -float64(r.burst)
	first := u == nil
	if first {
		// The peer may have used that long ago. If not, the bucket may be emptied, but no debt
		// is made.
		u, floor = &pooledUse{at: p.now}, min(r.level, 0)
		peer.used[r.key] = u
	}
	if s.series < u.series || s.series == u.series && (s.used < u.used || s.asked < u.asked) {
		return // a newer packet came first
	}
	if s.series > u.series {
		u.series, u.used, u.asked = s.series, 0, 0
	}
	more := float64(s.used - u.used)
	if !first {
		u.count(p.now, float64(s.asked-u.asked))
	}
	u.used, u.asked = s.used, s.asked
	if s.denied {
		u.starving = p.now + starvingFor
	} else {
		u.starving = 0
	}
	p.refillLocked(r)
	assumed := r.rate / float64(len(p.peers)+1) * silent.Seconds()
	r.level = max(r.level-max(0, more-assumed), floor)
}

// count adds demand to the rate, an exponentially weighted mean over rateOver.
func (u *pooledUse) count(now time.Duration, more float64) {
	u.rate = u.lately(now) + more/rateOver.Seconds()
	u.at = now
}

func (u *pooledUse) lately(now time.Duration) float64 {
	return u.rate * decay(now-u.at)
}

// Gone says that a peer's incarnation is over for good. Nothing is assumed of it any more.
func (p *pooled) Gone(now time.Duration, id crdt.Replica) {
	p.lockAt(now)
	defer p.mu.Unlock()
	if peer := p.peers[id.Name]; peer != nil && peer.incarnation <= id.Incarnation {
		delete(p.peers, id.Name)
		p.lookAt = 0
		p.passLocked(p.now)
	}
}

func decay(d time.Duration) float64 { return math.Exp(-d.Seconds() / rateOver.Seconds()) }
