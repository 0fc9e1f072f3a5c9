// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

const (
	silentAfter         = 20  // keep-alives until a peer is silent
	lostAfter           = 200 // keep-alives until a peer is lost
	lateAfter           = 3   // keep-alives until a peer is asked whether it is there
	askedFor            = 2   // keep-alives that we send at the full pace after a peer asked
	idlePackets         = 2   // packets to all peers together in a keep-alive, when there is nothing to say
	introEvery          = time.Second
	introAddrs          = 32 // most addresses of others in one introduction
	wallEvery           = 250 * time.Millisecond
	tellEvery           = 10 * time.Millisecond // least time between two refusals, to all together
	addrProtection      = 10 * time.Second      // longest time that the address of a peer is protected; see receive
	retireAfter         = 10 * time.Minute      // after so long without a packet, a lost peer makes room for a newcomer
	retiredIncarnations = 1024
)

type section struct {
	Section
	name   string
	id     uint32
	count  Counter // the section as a Counter, or nil
	keep   Keeper  // the section as a Keeper, or nil
	seen   uint64  // Counted when all peers were last looked at
	counts SectionStats
}

// Session is one process's part in the gossip, as a step machine: it owns no goroutine, timer,
// socket or clock. Its driver hands it events, sends its packets, and steps it with [Wake] at the
// instant that Wake returns and whenever a section has changed. The same events give the same
// actions.
//
// It is not safe for concurrent use. It calls its sections within Step, Stats and Peers only, and
// they must not call the session.
type Session struct {
	cfg      Config
	cluster  uint32
	selfName uint32
	sections []section
	rand     func() float64

	now       time.Duration
	peers     []*peer // nearby peers first, then by name
	here      int     // number of peers that are not lost
	byName    map[string]*peer
	agendas   [agendas]agenda
	lookAt    time.Duration // when all peers are looked at next, even if no section has changed
	due       []*peer       // scratch
	book      book
	retired   map[string]uint64 // by name: the highest incarnation that is over
	oldest    []string          // names in retired, oldest first
	left      []departed
	leaving   bool
	departure departure
	over      bool

	begun   float64 // count of recent new incarnations; see begins
	begunAt time.Duration

	canRejoin bool          // every section is a Rejoiner
	rejoined  int           // how often the session has rejoined
	metAt     time.Duration // when the first peer showed that it hears us; Never before that
	above     uint64        // set by the packet being received: the incarnation to go above, or 0
	doubt     bool          // set by the packet being received: another process of our name may run

	wake    time.Duration
	floorAt time.Duration // the first instant at which the floor lets a peer be served
	tellAt  time.Duration
	turn    int // index of the peer whose address the next introduction begins with

	arena []byte // the packets of the latest Step
	in    header // header of the packet being received; a field so that it is not allocated
	out   header
	stats Stats
}

// New returns a session that knows no peer; its driver adds addresses with [Join]. The error is
// everything that [Config.Validate] and the options find.
func New(cfg Config, opts ...Option) (*Session, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	o, err := buildOptions(opts)
	if err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	canRejoin := true
	for _, sec := range o.sections {
		_, ok := sec.Section.(Rejoiner)
		canRejoin = canRejoin && ok
	}
	return &Session{
		canRejoin: canRejoin, metAt: Never,
		cfg:      cfg,
		cluster:  hash32(cfg.Cluster),
		selfName: hash32(cfg.Self.Name),
		sections: o.sections,
		rand:     o.rand,
		byName:   map[string]*peer{},
		retired:  map[string]uint64{},
		book:     book{byAddr: map[netip.AddrPort]*address{}, limit: 4 * cfg.MaxPeers, next: Never},
		wake:     Never,
		floorAt:  Never,
		agendas:  [agendas]agenda{{which: byDue}, {which: byFloor}},
	}, nil
}

// Wake returns when Step wants to be called with [Wake], on the clock that Step is given; [Never]
// means not at all. Ask after every Step.
func (s *Session) Wake() time.Duration { return s.wake }

// Step takes in one event at now and appends its actions. now is the process's own monotonic clock;
// an earlier now counts as the latest one.
//
// With [Packet] it answers that peer only, and serves others at the next wake. With [Wake] it
// serves all peers that are due. That costs one Mark per peer and section. If all sections are a
// [Counter] and none has changed, it costs only the packets that are sent. Step allocates only for
// a new peer, a new address or a larger batch.
func (s *Session) Step(now time.Duration, ev Event, actions []Action) []Action {
	now = max(now, s.now)
	s.now = now
	s.arena = s.arena[:0]
	switch {
	case s.over:
		return actions
	case s.leaving:
		return s.leave(now, ev, actions)
	}
	switch ev.Kind {
	case Packet:
		s.stats.PacketsIn++
		s.stats.BytesIn += uint64(len(ev.Packet))
		p, reason, answer := s.receive(now, ev)
		s.stats.Refused[reason]++
		switch {
		case s.over:
			return append(actions, Action{Kind: Displaced, By: answer})
		case s.above != 0:
			return append(actions, Action{Kind: Rejoined, By: s.rejoin(now, s.above)})
		case s.doubt:
			return s.challenge(now, ev.Addr, actions)
		case p != nil:
			s.look(now, p)
			if p.due <= now {
				actions = s.send(now, ev.Wall, p, actions)
			}
			s.plan()
			if reason == Accepted && s.in.flags&flagElicits != 0 {
				s.wake = min(s.wake, s.floorAt) // merged changes may be news for others
			}
		case answer.Incarnation != 0 && now >= s.tellAt:
			s.tellAt = now + tellEvery
			actions = s.tell(ev.Addr, answer, actions)
		}
		return actions
	case Join:
		if ev.Addr.IsValid() {
			if a := s.book.learn(now, canonical(ev.Addr)); a != nil {
				a.seed = true
			}
		}
	case Hint:
		if ev.Addr.IsValid() {
			if a := s.book.learn(now, canonical(ev.Addr)); a != nil {
				s.book.hint(now, a)
			}
		}
	case Leave:
		s.leaving = true
		return s.leave(now, ev, actions)
	case Wake:
		if now < s.floorAt && now < s.wake {
			s.wake = min(s.wake, s.floorAt) // changes wait for the first floor
			return actions
		}
	}
	return s.flush(now, ev.Wall, actions)
}

// canonical returns one form for all forms of an address.
func canonical(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// flush sends to all peers that are due, and plans the next wake.
func (s *Session) flush(now time.Duration, wall int64, actions []Action) []Action {
	due := s.lookAll(now)
	budget := s.cfg.Burst
	if len(due) > budget { // then peers that would starve come first
		for _, p := range due {
			if now-p.due > s.cfg.KeepAlive && budget > 0 {
				actions = s.send(now, wall, p, actions)
				budget--
			}
		}
	}
	for _, p := range due {
		if p.due <= now && budget > 0 {
			actions = s.send(now, wall, p, actions)
			budget--
		}
	}
	if now >= s.book.next {
		s.book.next = Never
		for _, a := range s.book.list {
			if a.quiet() {
				continue
			}
			if a.next <= now && budget > 0 {
				actions = s.hello(now, wall, a.addr, actions)
				s.book.tried(now, a, s.rand)
				budget--
			}
			s.book.next = min(s.book.next, a.next)
		}
	}
	s.plan()
	return actions
}

// lookAll finds out when the next packet to each peer leaves. It returns the peers that are due, in
// the order in which they are served. If no section has changed since the last look at all, it
// looks only at peers whose packet seems to be due.
func (s *Session) lookAll(now time.Duration) (due []*peer) {
	due = s.due[:0]
	if s.changed() || now >= s.lookAt {
		s.lookAt = Never
		for _, p := range s.peers {
			if s.look(now, p); p.due <= now {
				due = append(due, p)
			}
		}
	} else {
		due = s.agendas[byDue].until(now, 0, due)
		slices.SortFunc(due, nearer)
		due = slices.DeleteFunc(due, func(p *peer) bool {
			s.look(now, p)
			return p.due > now
		})
	}
	s.due = due
	return due
}

// changed tells whether a mark may have risen since it was last asked.
func (s *Session) changed() (changed bool) {
	for k := range s.sections {
		sec := &s.sections[k]
		if sec.count == nil {
			changed = true
		} else if n := sec.count.Counted(); n != sec.seen {
			sec.seen, changed = n, true
		}
	}
	return changed
}

// look finds out when the next packet to p leaves.
func (s *Session) look(now time.Duration, p *peer) {
	p.due = s.dueAt(now, p)
	floor := Never
	if !p.lost {
		floor = p.sentAt + s.cfg.Floor
	}
	s.agendas[byDue].set(p, p.due)
	s.agendas[byFloor].set(p, floor)
}

// plan finds the next wake, and the first floor.
func (s *Session) plan() {
	s.wake = min(s.book.next, s.agendas[byDue].next())
	s.floorAt = s.agendas[byFloor].next()
}

func (s *Session) silence() time.Duration { return silentAfter * s.cfg.KeepAlive }

func (s *Session) lostAfter(p *peer) time.Duration { return lostAfter*s.cfg.KeepAlive + p.rest }

// dueAt returns when the next packet to p leaves: at the floor if p hears us and lacks a change,
// otherwise at the keep-alive. It also finds out that p is lost.
func (s *Session) dueAt(now time.Duration, p *peer) time.Duration {
	if !p.lost && now-p.heardAt >= s.lostAfter(p) {
		p.lost = true
		s.here--
		if a := s.book.learn(now, p.addr); a != nil {
			s.book.seek(a, now)
		}
	}
	if p.lost {
		return Never
	}
	s.lookAt = min(s.lookAt, p.heardAt+s.lostAfter(p))
	dirty := s.dirty(now, p)
	switch {
	case !p.everSent:
		return now
	case p.owes:
		return p.sentAt + s.cfg.Floor
	case dirty && p.hears(now, s.silence()):
		if !p.restful() {
			s.lookAt = min(s.lookAt, p.hearsAt+s.silence())
		}
		if p.unechoedAskAt != 0 {
			s.lookAt = min(s.lookAt, p.unechoedAskAt+s.silence())
		}
		return p.sentAt + s.cfg.Floor
	}
	soon := p.sentAt + s.cfg.KeepAlive
	switch {
	case p.restAt <= soon:
		return p.restAt
	case now < p.fullPaceUntil || s.asks(now, p):
		return soon
	case p.away(now, s.silence()):
		return p.restAt
	}
	return min(p.restAt, max(s.late(p), soon))
}

// late returns when p is asked whether it is there and hears us.
func (s *Session) late(p *peer) time.Duration {
	return min(p.heardAt, p.hearsAt) + p.rest + lateAfter*s.cfg.KeepAlive
}

// asks reports whether we want p's keep-alives at the full pace: p has not heard us yet, owes us an
// answer, is late, or a section needs it.
func (s *Session) asks(now time.Duration, p *peer) bool {
	return (!p.met || p.unechoedAskAt != 0 || now >= s.late(p)) && !p.away(now, s.silence()) || s.keeps(p)
}

func (s *Session) keeps(p *peer) bool {
	for k := range s.sections {
		if keep := s.sections[k].keep; keep != nil && keep.Keeps(p.incarnation) {
			return true
		}
	}
	return false
}

// restOf returns for how long p gets nothing if there is nothing to say. It is random, so that the
// packets to all peers spread.
func (s *Session) restOf(now time.Duration, p *peer) time.Duration {
	mean := s.cfg.KeepAlive * time.Duration(s.here) / idlePackets
	if mean <= s.cfg.KeepAlive {
		return s.cfg.KeepAlive
	}
	rest := max(s.cfg.KeepAlive, mean/2+time.Duration(s.rand()*float64(mean)))
	if p.away(now, s.silence()) {
		rest = min(rest, max(s.cfg.KeepAlive, tryWait))
	}
	return rest
}

// dirty reports whether a section has a change that p has not acknowledged. Changes that p refuses
// do not count; otherwise they would be sent at every floor without end.
func (s *Session) dirty(now time.Duration, p *peer) bool {
	dirty := false
	for k := range s.sections {
		mark := s.sections[k].Mark(p.incarnation)
		if mark <= p.acked[k] || p.refused[k] {
			continue
		}
		dirty = true
		if !p.delay.on {
			p.delay = delayProbe{on: true, section: k, mark: mark, at: now}
		}
	}
	return dirty
}

// begin starts a packet's header.
func (s *Session) begin(now time.Duration, wall int64) *header {
	h := &s.out
	*h = header{cluster: s.cluster, fromInc: s.cfg.Self.Incarnation, sent: now}
	if wall != 0 {
		h.flags, h.wall = flagWall, wall
	}
	return h
}

func (s *Session) sent(start int, addr netip.AddrPort, actions []Action) []Action {
	packet := s.arena[start:len(s.arena):len(s.arena)]
	s.stats.PacketsOut++
	s.stats.BytesOut += uint64(len(packet))
	return append(actions, Action{Kind: Send, Addr: addr, Packet: packet})
}

// hello asks the process at an address who it is.
func (s *Session) hello(now time.Duration, wall int64, addr netip.AddrPort, actions []Action) []Action {
	start := len(s.arena)
	s.arena = s.begin(now, wall).append(s.arena, s.cfg.Self.Name)
	s.arena = s.intro(s.arena, nil, s.cfg.MaxPacket-(len(s.arena)-start))
	s.stats.Hellos++
	return s.sent(start, addr, actions)
}

// tell tells an incarnation that it is over.
func (s *Session) tell(addr netip.AddrPort, incarnation crdt.Replica, actions []Action) []Action {
	by := max(s.retired[incarnation.Name], incarnation.Incarnation) // right for a name we never met, too
	switch p := s.byName[incarnation.Name]; {
	case p != nil:
		by = p.incarnation.Incarnation
	case incarnation.Name == s.cfg.Self.Name:
		by = s.cfg.Self.Incarnation
	}
	start := len(s.arena)
	h := s.begin(s.now, 0)
	h.flags = flagRefusal
	h.toInc, h.toName, h.seq = incarnation.Incarnation, hash32(incarnation.Name), 1
	s.arena = h.append(s.arena, s.cfg.Self.Name)
	s.arena = binary.LittleEndian.AppendUint64(s.arena, by)
	return s.sent(start, addr, actions)
}

// send sends p its one packet: our acknowledgements, and the unacknowledged changes of every
// section, as far as there is room.
func (s *Session) send(now time.Duration, wall int64, p *peer, actions []Action) []Action {
	start := len(s.arena)
	p.seq++
	if now < p.wallAt {
		wall = 0
	} else if wall != 0 {
		p.wallAt = now + wallEvery
	}
	h := s.begin(now, wall)
	h.toInc, h.toName, h.seq = p.incarnation.Incarnation, p.toName, p.seq
	h.ack, h.bits = p.heard, p.bits
	asks := s.here > idlePackets && s.asks(now, p)
	if asks {
		h.flags |= flagAsks
	}
	next := s.cfg.KeepAlive
	if !asks && now >= p.fullPaceUntil {
		next = s.restOf(now, p)
		if h.rest = (next - s.cfg.KeepAlive + time.Millisecond - 1).Truncate(time.Millisecond); h.rest > 0 {
			h.flags |= flagRests
		}
	}
	if p.peerSent > 0 {
		h.echo, h.held = p.peerSent, now-p.peerSentAt
	}
	for k, bits := range p.refuse {
		if bits != 0 {
			h.refusals[h.nrefusals] = refusal{id: s.sections[k].id, bits: bits}
			h.nrefusals++
		}
	}
	b := h.append(s.arena, s.cfg.Self.Name)
	end := start + s.cfg.MaxPacket
	if !p.met || now >= p.introAt {
		p.introAt = now + introEvery*time.Duration(max(1, s.here/idlePackets))
		b = s.intro(b, p, (end-len(b))/2)
		b = s.departures(now, b, (end-len(b))/2)
	}

	n := len(s.sections)
	slot := int(p.seq % window)
	p.ring[slot] = p.seq
	elicits, again := false, true
	for i := range n {
		k := (i + int(p.seq%uint64(n))) % n
		upto := p.acked[k]
		if room := end - len(b) - blockHeader; room > 0 {
			b, upto = s.delta(now, b, p, k, room)
		}
		p.upto[slot*n+k] = upto
		if upto > p.acked[k] {
			elicits = true
			again = again && upto <= p.sentUpto[k]
			p.sentUpto[k] = max(p.sentUpto[k], upto)
		}
	}
	if elicits {
		b[start+1] |= flagElicits
		if again {
			s.stats.Resent++
		}
	}
	s.arena = b
	p.everSent, p.sentAt, p.owes = true, now, false
	p.restAt, p.announcedRest = now+next, h.rest
	p.maxAnnouncedRest = max(p.maxAnnouncedRest, p.announcedRest)
	if p.unechoed == 0 {
		p.unechoed = now
	}
	if elicits || asks {
		p.asks(now)
	}
	s.look(now, p)
	return s.sent(start, p.addr, actions)
}

// delta appends one section's block and returns the mark that it makes complete.
func (s *Session) delta(now time.Duration, b []byte, p *peer, k, room int) ([]byte, uint64) {
	sec := &s.sections[k]
	front := len(b)
	b = openBlock(b, sec.id)
	content := len(b)
	b, upto := sec.Delta(now, b, p.incarnation, p.acked[k], room)
	switch size := len(b) - content; {
	case size > room:
		sec.counts.Oversize++
		return b[:front], p.acked[k]
	case size == 0:
		return b[:front], upto
	}
	return closeBlock(b, content), upto
}

// intro appends our zone and region, and the addresses of peers that are heard now. Silent peers
// are left out; otherwise the addresses of dead processes would go round without end.
func (s *Session) intro(b []byte, to *peer, room int) []byte {
	fixed := blockHeader + 3 + len(s.cfg.Zone) + len(s.cfg.Region)
	if room < fixed {
		return b
	}
	room -= fixed
	b = openBlock(b, blockIntro)
	content := len(b)
	b = appendString(b, s.cfg.Zone)
	b = appendString(b, s.cfg.Region)
	count := len(b)
	b = append(b, 0)
	first := s.turn
	for i := range s.peers {
		k := (first + i) % len(s.peers)
		p := s.peers[k]
		if p == to || p.silent(s.now, s.silence()) {
			continue
		}
		if b[count] == introAddrs || room < 19 {
			break
		}
		before := len(b)
		b = appendAddr(b, p.addr)
		room -= len(b) - before
		b[count]++
		s.turn = (k + 1) % len(s.peers)
	}
	return closeBlock(b, content)
}

// receive takes in a packet. It returns the peer that sent it if the peer may need an answer.
// Otherwise answer may be an incarnation that is over and should be told so. If the session itself
// is over, answer is the incarnation that took its name.
func (s *Session) receive(now time.Duration, ev Event) (p *peer, reason Reason, answer crdt.Replica) {
	h := &s.in
	s.above, s.doubt = 0, false
	body, err := h.parse(ev.Packet)
	switch {
	case err != nil:
		if err == errMagic { //nolint:errorlint // parse returns the sentinels themselves
			return nil, Version, answer
		}
		return nil, Malformed, answer
	case h.cluster != s.cluster:
		return nil, Cluster, answer
	}
	addr := canonical(ev.Addr)
	ours := h.toInc == s.cfg.Self.Incarnation && h.toName == s.selfName
	if h.flags&flagRefusal != 0 && (ours || string(h.from) != s.cfg.Self.Name) {
		return nil, Refusal, s.displaced(now, body, ours)
	}
	if string(h.from) == s.cfg.Self.Name {
		return nil, Self, s.mirror(h, addr)
	}
	if h.flags&flagLeave != 0 {
		reason, answer = s.departed(now, crdt.Replica{Name: string(h.from), Incarnation: h.fromInc})
		return nil, reason, answer
	}
	if ours && h.echo > now { // an older incarnation of ours had another clock
		return nil, Malformed, answer
	}

	p = s.byName[string(h.from)]
	// A packet that is not to this incarnation does not move a peer that hears us to another
	// address. Somebody may have passed on a packet that was sent to others.
	if !ours && p != nil && p.incarnation.Incarnation == h.fromInc && p.met && now-p.hearsAt < min(s.silence(), addrProtection)+p.rest {
		addr = p.addr
	}
	switch {
	case p == nil:
		if inc, ok := s.retired[string(h.from)]; ok && h.fromInc <= inc {
			return nil, Superseded, crdt.Replica{Name: string(h.from), Incarnation: h.fromInc}
		}
		if ours && !framed(body) {
			return nil, Malformed, answer
		}
		if !s.begins(now) {
			return nil, Full, answer
		}
		if p = s.admit(now, crdt.Replica{Name: string(h.from), Incarnation: h.fromInc}, addr); p == nil {
			return nil, Full, answer
		}
	case h.fromInc < p.incarnation.Incarnation:
		return nil, Superseded, crdt.Replica{Name: p.incarnation.Name, Incarnation: h.fromInc}
	case !framed(body), ours && h.ack > p.seq && h.fromInc == p.incarnation.Incarnation:
		return nil, Malformed, answer
	case h.fromInc > p.incarnation.Incarnation && !s.begins(now):
		return nil, Full, answer
	case h.fromInc > p.incarnation.Incarnation:
		s.gone(now, p.incarnation)
		s.back(p)
		p.reset(now, crdt.Replica{Name: p.incarnation.Name, Incarnation: h.fromInc}, len(s.sections))
	}

	if ours {
		if reason = p.receive(h.seq); reason != Accepted {
			return p, reason, answer
		}
	} else if h.sent <= p.peerSent && p.peerSent > 0 {
		return nil, Stale, answer // anybody can repeat a packet without a number
	}
	s.heard(now, ev.Wall, p, h, addr)
	switch {
	case ours:
		s.merge(now, p, h, body)
	case h.toInc == 0:
		s.merge(now, p, h, body) // it carries an introduction at most
		p.owes = true
	case h.toName == s.selfName:
		p.owes = true // so that it learns which incarnation this is
		reason = OtherIncarnation
	default:
		p.owes = true
		reason = OtherName
	}
	return p, reason, answer
}

// begins reports whether one more incarnation may begin. Sections remember ended incarnations for
// minutes, so nobody may invent incarnations faster than a fleet restarts: 2 * MaxPeers at once,
// and MaxPeers in a minute.
func (s *Session) begins(now time.Duration) bool {
	most := 2 * float64(s.cfg.MaxPeers)
	s.begun = max(0, s.begun-(now-s.begunAt).Minutes()*float64(s.cfg.MaxPeers))
	s.begunAt = now
	if s.begun+1 > most {
		return false
	}
	s.begun++
	return true
}

// framed reports whether a whole body can be cut into blocks. So a packet is never taken in by
// half.
func framed(body []byte) bool {
	for len(body) > 0 {
		var err error
		if _, _, body, err = nextBlock(body); err != nil {
			return false
		}
	}
	return true
}

// mirror handles a packet of our own name. It comes from ourselves, at an address that we need not
// ask, or from another incarnation. Of two incarnations the later one stays.
func (s *Session) mirror(h *header, addr netip.AddrPort) (answer crdt.Replica) {
	incarnation := crdt.Replica{Name: s.cfg.Self.Name, Incarnation: h.fromInc}
	switch inc := s.cfg.Self.Incarnation; {
	case h.fromInc > inc:
		s.doubt = true
		return crdt.Replica{}
	case h.fromInc == inc:
		// Only for an address that we ask. From any other address it may be a packet of ours that
		// somebody sent back, to fill the book or to hide a peer.
		if a := s.book.byAddr[addr]; a != nil && a.peer == nil {
			a.own = true
		}
		return crdt.Replica{}
	}
	return incarnation
}

// displaced handles a peer's message that our incarnation is over. It ends the session, or has it
// go on above the incarnation that took its name.
func (s *Session) displaced(now time.Duration, body []byte, ours bool) (by crdt.Replica) {
	r := read(body)
	inc := r.Uint64("incarnation")
	if !ours || r.Fault() != nil || r.Len() != 0 || inc < s.cfg.Self.Incarnation {
		return crdt.Replica{}
	}
	if s.rejoins(now, inc) {
		s.above = inc
		return crdt.Replica{}
	}
	s.end()
	return crdt.Replica{Name: s.cfg.Self.Name, Incarnation: inc}
}

func (s *Session) end() {
	s.over = true
	s.wake = Never
}

// admit adds a newcomer as a peer, or returns nil if there is no room.
func (s *Session) admit(now time.Duration, incarnation crdt.Replica, addr netip.AddrPort) *peer {
	if len(s.peers) >= s.cfg.MaxPeers {
		var out *peer
		for _, p := range s.peers {
			if p.lost && now-p.heardAt >= retireAfter && (out == nil || p.heardAt < out.heardAt) {
				out = p
			}
		}
		if out == nil {
			return nil
		}
		s.retire(now, out)
	}
	p := &peer{addr: addr}
	p.reset(now, incarnation, len(s.sections))
	s.byName[incarnation.Name] = p
	s.here++
	s.insert(p)
	return p
}

// insert sets p's distance, and puts p among the peers.
func (s *Session) insert(p *peer) {
	switch {
	case p.region != s.cfg.Region:
		p.distance = 2
	case p.zone != s.cfg.Zone:
		p.distance = 1
	default:
		p.distance = 0
	}
	i, _ := slices.BinarySearchFunc(s.peers, p, nearer)
	s.peers = slices.Insert(s.peers, i, p)
}

// nearer orders peers by distance, then by name. Names make the order complete, so that it does not
// depend on the order of arrival.
func nearer(a, b *peer) int {
	return cmp.Or(cmp.Compare(a.distance, b.distance), cmp.Compare(a.incarnation.Name, b.incarnation.Name))
}

// retire ends a peer's incarnation for good and remembers that it is over.
func (s *Session) retire(now time.Duration, p *peer) {
	s.retireIncarnation(p.incarnation)
	s.back(p)
	s.here--
	delete(s.byName, p.incarnation.Name)
	s.peers = slices.DeleteFunc(s.peers, func(q *peer) bool { return q == p })
	for i := range s.agendas {
		s.agendas[i].remove(p)
	}
	s.turn = 0
	for _, a := range s.book.list {
		if a.peer == p {
			a.peer = nil
		}
	}
	s.gone(now, p.incarnation)
}

// retireIncarnation remembers that an incarnation is over.
func (s *Session) retireIncarnation(incarnation crdt.Replica) {
	inc, ok := s.retired[incarnation.Name]
	if !ok {
		if len(s.oldest) == retiredIncarnations {
			delete(s.retired, s.oldest[0])
			s.oldest = slices.Delete(s.oldest, 0, 1)
		}
		s.oldest = append(s.oldest, incarnation.Name)
	}
	s.retired[incarnation.Name] = max(inc, incarnation.Incarnation)
}

func (s *Session) gone(now time.Duration, incarnation crdt.Replica) {
	s.stats.Gone++
	for k := range s.sections {
		s.sections[k].Gone(now, incarnation)
	}
}

// back notes that p is not lost, and reports whether it was.
func (s *Session) back(p *peer) (was bool) {
	if was = p.lost; was {
		p.lost = false
		s.here++
	}
	return was
}

// heard notes that p is there, and the times in its header.
func (s *Session) heard(now time.Duration, wall int64, p *peer, h *header, addr netip.AddrPort) {
	back := s.back(p)
	p.heardAt, p.unansweredSince = now, 0
	ours := h.toInc == s.cfg.Self.Incarnation && h.toName == s.selfName
	if h.sent > p.peerSent {
		p.peerSent, p.peerSentAt = h.sent, now
		p.addr = addr
		if ours {
			p.rest = min(h.rest, time.Duration(s.cfg.MaxPeers)*s.cfg.KeepAlive)
		}
	}
	if ours && h.flags&flagAsks != 0 {
		p.fullPaceUntil = now + askedFor*s.cfg.KeepAlive
	}
	if p.at == nil || p.at.addr != addr || p.at.dropped {
		p.at = s.book.learn(now, addr)
	}
	if p.at != nil {
		p.at.peer, p.at.heardAt, p.at.own = p, now, false
	}
	if back {
		s.book.hintAll(now)
	}
	if h.echo == 0 || !ours {
		return
	}
	p.met = true
	p.hearing(now, h.echo, s.cfg.KeepAlive)
	s.metAt = min(s.metAt, now)
	if rtt := now - h.echo - h.held; rtt >= 0 {
		sample := rttSample{ok: true, rtt: rtt, hasWall: wall != 0 && h.wall != 0}
		if sample.hasWall {
			sample.offset = apart(h.wall, wall) + rtt/2
		}
		p.rtt.add(now, sample)
	}
}

// maxOffset is the largest measured offset of a peer's wall clock.
const maxOffset = 24 * time.Hour

// apart is a - b of wall clocks, at most maxOffset either way.
func apart(a, b int64) time.Duration {
	half := a/2 - b/2 // the difference itself may not fit
	if half > int64(maxOffset/2) || half < -int64(maxOffset/2) {
		if half > 0 {
			return maxOffset
		}
		return -maxOffset
	}
	return time.Duration(a - b)
}

// merge takes in the body of a packet, and its acknowledgements.
func (s *Session) merge(now time.Duration, p *peer, h *header, body []byte) {
	p.acks(h, s.sections)
	if p.delay.on && p.acked[p.delay.section] >= p.delay.mark {
		p.delay.on = false
		p.last = now - p.delay.at
		p.worst = max(p.worst, p.last)
		s.stats.Delay.add(p.last)
	}
	if h.flags&flagElicits != 0 {
		p.owes = true
	}
	c := crdt.Contact{From: p.incarnation, Now: now, Sent: h.sent, Echo: h.echo, Hears: p.hearsAt, Rest: max(p.rest, p.maxAnnouncedRest)}
	for len(body) > 0 {
		var id uint32
		var block []byte
		id, block, body, _ = nextBlock(body)
		if id == blockIntro {
			s.meet(now, p, block)
			continue
		}
		if id == blockLeft {
			s.mergeDepartures(now, p, block)
			continue
		}
		k := s.find(id)
		if k < 0 || h.toInc == 0 {
			s.stats.Unknown++
			continue
		}
		if err := s.sections[k].Merge(c, block); err != nil {
			s.sections[k].counts.Refused++
			s.sections[k].counts.LastError = err
			p.refuse[k] |= 1 << (p.heard - h.seq)
			continue
		}
		s.sections[k].counts.Merged++
	}
}

func (s *Session) find(id uint32) int {
	for k := range s.sections {
		if s.sections[k].id == id {
			return k
		}
	}
	return -1
}

// meet takes in an introduction, up to its first malformed part. An introduction is a hint, and the
// packet around it was well-formed.
func (s *Session) meet(now time.Duration, p *peer, b []byte) {
	r := read(b)
	zone, region := r.short("zone"), r.short("region")
	n := int(r.Byte("addresses"))
	if r.Fault() != nil || len(zone) > maxName || len(region) > maxName || n > introAddrs {
		s.stats.Refused[Introduction]++
		return
	}
	if string(zone) != p.zone || string(region) != p.region {
		i, _ := slices.BinarySearchFunc(s.peers, p, nearer)
		s.peers = slices.Delete(s.peers, i, i+1)
		p.zone, p.region = string(zone), string(region)
		s.insert(p)
	}
	for range n {
		addr := r.addr()
		if r.Fault() != nil {
			s.stats.Refused[Introduction]++
			return
		}
		if addr.Port() != 0 && addr.Addr().IsValid() && !addr.Addr().IsUnspecified() && !addr.Addr().IsMulticast() {
			if a := s.book.learn(now, canonical(addr)); a != nil {
				s.book.hint(now, a)
			}
		}
	}
}
