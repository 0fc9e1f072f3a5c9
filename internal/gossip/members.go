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

// Member is a process as membership knows it. It is a hint: [Peer] says whether the process is
// there now.
type Member struct {
	crdt.Replica
	Addr         netip.AddrPort
	Zone, Region string
}

const metaVersion = 1

// makeMeta returns the metadata that membership carries for a process: at most 204 of the 512 bytes
// that memberlist allows.
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

// memberOf reads the metadata and the address of a memberlist node.
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

// members has the methods that memberlist calls. memberlist holds its own lock then, so none of
// them waits.
type members struct {
	meta  []byte
	limit int
	hint  func(netip.AddrPort)
	log   *scribe

	mu    sync.Mutex
	known map[string]Member // by memberlist's name; copies, since memberlist changes its nodes at any time
	names float64           // count of recent new names; it falls by limit in each namesFor
	at    time.Time         // when names was last updated
}

// namesFor is the time in which the count of new names falls by the limit of members. memberlist
// remembers a member that is gone for one round of its probes.
const namesFor = 5 * time.Minute

// newNameLocked reports whether one more unknown name may come. At most twice the limit of members
// may come at once, such as a fleet that restarts.
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

// NodeMeta returns the metadata that others learn about this process.
func (m *members) NodeMeta(int) []byte { return m.meta }

// NotifyMsg ignores user messages: none are sent.
func (m *members) NotifyMsg([]byte) {}

// GetBroadcasts returns nothing: the session sends its own packets.
func (m *members) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState is empty: push and pull carry membership only.
func (m *members) LocalState(bool) []byte { return nil }

// MergeRemoteState ignores the state of others.
func (m *members) MergeRemoteState([]byte, bool) {}

// NotifyAlive refuses malformed members, and members over the limits.
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

// NotifyUpdate has the session try the member's address.
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

// NotifyLeave forgets the member. The session itself judges which peers are there.
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

// scribe logs lines about membership, its own and memberlist's. memberlist holds its lock when it
// logs, so scribe queues each line, and its goroutine writes the line soon after.
type scribe struct {
	log   *slog.Logger
	debug bool // whether memberlist's own lines are logged; read once, when the node begins
	lines chan slog.Record
	lost  atomic.Uint64 // lines dropped because the queue was full
}

const (
	scribeRoom = 256
	scribeLast = 100 * time.Millisecond // longest time to write the remaining lines when the node ends
)

func newScribe(log *slog.Logger) *scribe {
	return &scribe{log: log, debug: log.Enabled(context.Background(), slog.LevelDebug), lines: make(chan slog.Record, scribeRoom)}
}

// say queues a line. It does not wait, and calls no code of the user.
func (s *scribe) say(level slog.Level, text string, args ...any) {
	line := slog.NewRecord(time.Now(), level, text, 0)
	line.Add(args...)
	select {
	case s.lines <- line:
	default:
		s.lost.Add(1)
	}
}

// Write queues a line that memberlist logs.
func (s *scribe) Write(b []byte) (int, error) {
	s.say(slog.LevelDebug, "gossip: memberlist", "line", string(bytes.TrimSpace(b)))
	return len(b), nil
}

// write is the goroutine that logs. After ctx has ended it writes the queued lines, but stops after
// scribeLast.
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

// newMemberlist starts memberlist over t. Each incarnation has its own name in memberlist, so a
// process that comes back at another address conflicts with nobody.
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

// checksum is the size of the header that memberlist puts before a packet that it has filled.
const checksum = 5

// How often the node rejoins: after rejoinWait plus a random part of rejoinJitter, and sooner while
// it has met nobody.
const (
	rejoinWait   = time.Second
	rejoinJitter = 3 * time.Second
	rejoinFirst  = 200 * time.Millisecond
	rejoinTime   = 2 * time.Second // limit of one discovery
	rejoinTries  = 3               // most streams to addresses without a member, each time
)

// rejoin is the goroutine that looks for processes that membership lacks. memberlist forgets dead
// members, so nothing else heals a split. The session is told all discovered addresses. memberlist
// dials some addresses at which it has no member: discovered ones, and those of the session's
// peers.
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

// discover asks all sources of addresses in parallel, and tells the session the addresses of each
// as they come.
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

// dialSome has memberlist join at some addresses where it has no member: first discovered addresses
// and those of fresh peers, then those of other peers. It reports whether this node has met
// anybody.
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
			_, _ = n.ml.Join([]string{a.String()}) // an address without a process is expected
		})
	}
	wg.Wait()
	return met
}

// some returns the addresses that are not in skip, each once, in random order.
func (n *Node) some(addrs []netip.AddrPort, skip map[netip.AddrPort]bool) []netip.AddrPort {
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	addrs = slices.DeleteFunc(slices.Compact(addrs), func(a netip.AddrPort) bool { return skip[a] })
	for i := range addrs {
		k := i + int(mathrand.Float64()*float64(len(addrs)-i))
		addrs[i], addrs[k] = addrs[k], addrs[i]
	}
	return addrs
}
