// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	mathrand "math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// Member is a process as membership knows it. It is a hint: whether it is there
// now is what [Peer] says.
type Member struct {
	crdt.Replica
	Addr         netip.AddrPort
	Zone, Region string
}

const metaVersion = 1

// makeMeta is what membership carries of a process: at most 204 bytes of the 512
// that there is room for.
func makeMeta(m Member) []byte {
	b := []byte{metaVersion}
	b = appendString(b, m.Name)
	b = binary.LittleEndian.AppendUint64(b, m.Incarnation)
	b = appendString(b, m.Zone)
	return appendString(b, m.Region)
}

func parseMeta(b []byte) (m Member, ok bool) {
	r := read(b)
	version := r.Byte("version")
	name := r.short("name")
	m.Incarnation = r.Uint64("incarnation")
	zone, region := r.short("zone"), r.short("region")
	m.Name, m.Zone, m.Region = string(name), string(zone), string(region)
	ok = r.Fault() == nil && r.Len() == 0 && version == metaVersion && m.Incarnation != 0 &&
		len(name) >= 1 && max(len(name), len(zone), len(region)) <= maxName
	return m, ok
}

// memberOf reads what memberlist says of a node.
func memberOf(n *memberlist.Node) (Member, error) {
	m, ok := parseMeta(n.Meta)
	if !ok {
		return m, errors.New("gossip: malformed metadata")
	}
	ip, ok := netip.AddrFromSlice(n.Addr)
	if m.Addr = canonical(netip.AddrPortFrom(ip, n.Port)); !ok || n.Port == 0 || ip.IsUnspecified() || ip.IsMulticast() {
		return m, errors.New("gossip: malformed address")
	}
	return m, nil
}

// members is what memberlist calls. It does so under its own lock, so nothing
// here waits.
type members struct {
	meta  []byte
	limit int
	hint  func(netip.AddrPort)
	log   *scribe

	mu    sync.Mutex
	known map[string]Member // by memberlist's names; its own nodes change while one looks
	names float64           // that were new of late, and are forgotten at limit in namesFor
	at    time.Time         // when that was counted
}

// namesFor is how long as many new names take to be forgotten as there may be members:
// memberlist remembers who is gone for a round of its probes.
const namesFor = 5 * time.Minute

// newNameLocked tells whether one more name that is not known may come: twice as many as
// there may be members at once, such as a fleet that starts again.
func (m *members) newNameLocked(now time.Time) bool {
	if past := now.Sub(m.at); past > 0 {
		m.names = max(0, m.names-float64(m.limit)*float64(past)/float64(namesFor))
		m.at = now
	}
	if m.names+1 > 2*float64(m.limit) {
		return false
	}
	m.names++
	return true
}

// NodeMeta is what others learn of this process.
func (m *members) NodeMeta(int) []byte { return m.meta }

// NotifyMsg ignores user messages: none are sent.
func (m *members) NotifyMsg([]byte) {}

// GetBroadcasts has none: the session sends its own packets.
func (m *members) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState is empty: push and pull carry membership only.
func (m *members) LocalState(bool) []byte { return nil }

// MergeRemoteState ignores what others may have.
func (m *members) MergeRemoteState([]byte, bool) {}

// NotifyAlive refuses who is malformed, and one too many.
func (m *members) NotifyAlive(n *memberlist.Node) error {
	if _, err := memberOf(n); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.known[n.Name]; !ok && (len(m.known) >= m.limit || !m.newNameLocked(time.Now())) {
		return fmt.Errorf("gossip: more than %d members, or than twice as many new names in %s", m.limit, namesFor)
	}
	return nil
}

// NotifyJoin has the session try the newcomer's address.
func (m *members) NotifyJoin(n *memberlist.Node) {
	if member, ok := m.learn(n); ok {
		m.log.say(slog.LevelInfo, "gossip: member joined", "member", member.Replica.String(), "addr", member.Addr.String(), "zone", member.Zone)
	}
}

// NotifyUpdate is as NotifyJoin.
func (m *members) NotifyUpdate(n *memberlist.Node) { m.learn(n) }

func (m *members) learn(n *memberlist.Node) (Member, bool) {
	member, err := memberOf(n)
	if err != nil {
		return member, false
	}
	m.mu.Lock()
	m.known[n.Name] = member
	m.mu.Unlock()
	m.hint(member.Addr)
	return member, true
}

// NotifyLeave forgets; the session judges by itself who is there.
func (m *members) NotifyLeave(n *memberlist.Node) {
	m.mu.Lock()
	member, ok := m.known[n.Name]
	delete(m.known, n.Name)
	m.mu.Unlock()
	if ok {
		m.log.say(slog.LevelInfo, "gossip: member left or failed", "member", member.Replica.String(), "addr", member.Addr.String())
	}
}

func (m *members) list() []Member {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.SortedFunc(maps.Values(m.known), func(a, b Member) int { return a.Compare(b.Replica) })
}

// scribe logs what is said of membership, and by memberlist, which holds its own lock
// then: nothing is written there, but soon after.
type scribe struct {
	log   *slog.Logger
	debug bool // whether memberlist's own lines are wanted, as it was when the node began
	lines chan slog.Record
	lost  atomic.Uint64 // lines, while there was no room
}

const (
	scribeRoom = 256
	scribeLast = 100 * time.Millisecond // for the lines that are left when the node ends
)

func newScribe(log *slog.Logger) *scribe {
	return &scribe{log: log, debug: log.Enabled(context.Background(), slog.LevelDebug), lines: make(chan slog.Record, scribeRoom)}
}

// say does not wait, and calls nothing of the user's.
func (s *scribe) say(level slog.Level, text string, args ...any) {
	line := slog.NewRecord(time.Now(), level, text, 0)
	line.Add(args...)
	select {
	case s.lines <- line:
	default:
		s.lost.Add(1)
	}
}

// Write says a line that memberlist writes.
func (s *scribe) Write(b []byte) (int, error) {
	s.say(slog.LevelDebug, "gossip: memberlist", "line", string(bytes.TrimSpace(b)))
	return len(b), nil
}

// write is the goroutine that logs. It ends after ctx, when it has logged what was
// said until then, or a part of it if that takes too long.
func (s *scribe) write(ctx context.Context) {
	for {
		select {
		case line := <-s.lines:
			s.put(line)
		case <-ctx.Done():
			for began := time.Now(); len(s.lines) > 0; {
				if s.put(<-s.lines); time.Since(began) > scribeLast {
					return
				}
			}
			return
		}
	}
}

func (s *scribe) put(line slog.Record) {
	if !s.log.Enabled(context.Background(), line.Level) {
		return
	}
	_ = s.log.Handler().Handle(context.Background(), line) // as a Logger does
	if lost := s.lost.Swap(0); lost > 0 {
		s.log.Warn("gossip: lines about membership left out, too many at once", "lines", lost)
	}
}

// newMemberlist starts memberlist over t. Each incarnation has a name of its own in it,
// so a process that comes back at another address conflicts with nobody.
func newMemberlist(t *transport, m *members, self crdt.Replica) (*memberlist.Memberlist, error) {
	c := memberlist.DefaultLANConfig()
	c.Name = self.String()
	c.Transport = t
	c.BindPort = int(t.self.Port())
	c.AdvertisePort = int(t.self.Port())
	c.Delegate, c.Events, c.Alive = m, m, m
	c.LogOutput = io.Discard
	if m.log.debug {
		c.LogOutput = m.log
	}
	c.EnableCompression = false
	c.TCPTimeout = 3 * time.Second
	c.AwarenessMaxMultiplier = 2 // a probe, and so its goroutine, lasts 2 s at most
	c.DeadNodeReclaimTime = time.Second
	c.UDPBufferSize = MaxPacket - memberHeader - checksum
	if t.seal != nil {
		c.UDPBufferSize -= overhead
	}
	return memberlist.Create(c)
}

// checksum is the size of the header that memberlist puts before a packet that it has
// filled.
const checksum = 5

// Rejoining: at random between these, and sooner while nobody was met.
const (
	rejoinWait   = time.Second
	rejoinJitter = 3 * time.Second
	rejoinFirst  = 200 * time.Millisecond
	rejoinTime   = 2 * time.Second // for discovery
	rejoinTries  = 3               // streams to addresses of no member, each time
)

// rejoin is the goroutine that looks for processes which are not there: memberlist
// forgets who is dead, and nobody else heals a split. The session is told of all
// addresses that discovery has, and memberlist dials some of those at which it has
// no member: discovered ones, and those of the session's peers.
func (n *Node) rejoin() {
	failing := false
	for round := 0; ; round++ {
		found, err := n.discover()
		if n.ctx.Err() != nil {
			return
		}
		if err != nil && !failing {
			n.log.Warn("gossip: discovery fails", "error", err, "found", len(found))
		} else if err == nil && failing {
			n.log.Info("gossip: discovery works again", "found", len(found))
		}
		failing = err != nil
		n.discoveryErr.Store(&err)
		met := n.dialSome(found)
		wait := rejoinWait + time.Duration(mathrand.Float64()*float64(rejoinJitter))
		if !met && round < 10 {
			wait = rejoinFirst << min(round, 3)
		}
		if !pause(n.ctx, wait) {
			return
		}
	}
}

// discover asks all that know addresses, side by side, and tells the session of what
// each found as it comes.
func (n *Node) discover() (found []netip.AddrPort, _ error) {
	ctx, cancel := context.WithTimeout(n.ctx, rejoinTime)
	defer cancel()
	addrs := make([][]netip.AddrPort, len(n.discovery))
	wrong := make([]error, len(n.discovery))
	var wg sync.WaitGroup
	for i, d := range n.discovery {
		wg.Go(func() {
			var all []netip.AddrPort
			all, wrong[i] = d.Addrs(ctx)
			for _, a := range all {
				if a = canonical(a); a.IsValid() && a.Port() != 0 && !a.Addr().IsUnspecified() && a != n.t.self {
					addrs[i] = append(addrs[i], a)
				}
			}
			n.hint(addrs[i]...)
		})
	}
	wg.Wait()
	return slices.Concat(addrs...), errors.Join(wrong...)
}

// dialSome has memberlist join at some addresses where it has nobody: those that
// discovery has and at which a peer is heard, then those of peers that are lost.
// It reports whether there is anybody at all.
func (n *Node) dialSome(found []netip.AddrPort) (met bool) {
	there := map[netip.AddrPort]bool{n.t.self: true}
	for _, m := range n.Members() {
		there[m.Addr] = true
		met = met || m.Replica != n.cfg.Self
	}
	var lost []netip.AddrPort
	for _, p := range n.Peers() {
		if p.State == Fresh {
			met = true
			found = append(found, p.Addr)
		} else {
			lost = append(lost, p.Addr)
		}
	}
	try := append(n.some(found, there), n.some(lost, there)...)
	var wg sync.WaitGroup
	for _, a := range try[:min(len(try), rejoinTries)] {
		wg.Go(func() {
			_, _ = n.ml.Join([]string{a.String()}) // that nobody is there is no news
		})
	}
	wg.Wait()
	return met
}

// some returns addresses, each once, in random order, without those to skip.
func (n *Node) some(addrs []netip.AddrPort, skip map[netip.AddrPort]bool) []netip.AddrPort {
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	addrs = slices.DeleteFunc(slices.Compact(addrs), func(a netip.AddrPort) bool { return skip[a] })
	for i := range addrs {
		k := i + int(mathrand.Float64()*float64(len(addrs)-i))
		addrs[i], addrs[k] = addrs[k], addrs[i]
	}
	return addrs
}
