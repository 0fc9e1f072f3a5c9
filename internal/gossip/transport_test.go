// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// bare is a transport without sockets.
func bare(keys ...[]byte) *transport {
	t := &transport{
		cluster: hash32("test"),
		self:    netip.MustParseAddrPort("127.0.0.1:7946"),
		told:    netip.AddrPortFrom(netip.Addr{}, 7946),
		inbox:   make(chan *datagram, 4),
		packets: make(chan *memberlist.Packet, 4),
		streams: make(chan net.Conn),
		limit:   16,
		room:    4,
		nodes:   2048,
		outs:    map[netip.AddrPort]*outStream{},
		conns:   map[net.Conn]struct{}{},
	}
	if len(keys) > 0 {
		ring, err := NewKeyring(keys...)
		if err != nil {
			panic(err)
		}
		t.seal = newSealer(ring, 8)
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	return t
}

// local is a transport with sockets on the loopback.
func local(tb testing.TB, network string, keys ...[]byte) *transport {
	tb.Helper()
	t := bare(keys...)
	var err error
	if t.ln, t.udp, err = listen(netip.MustParseAddrPort("127.0.0.1:0"), network); err != nil {
		tb.Fatal(err)
	}
	t.self = t.ln.Addr().(*net.TCPAddr).AddrPort()
	t.told = netip.AddrPortFrom(netip.Addr{}, t.self.Port())
	t.start()
	tb.Cleanup(t.close)
	return t
}

func (t *transport) counts() (c [drops]uint64) {
	for i := range c {
		c[i] = t.stats.refused[i].Load()
	}
	return c
}

func memberPacket(cluster string, b ...byte) []byte {
	return append(binary.LittleEndian.AppendUint32([]byte{kindMember}, hash32(cluster)), b...)
}

func TestDemultiplexing(t *testing.T) {
	secret := testKey(1)
	other := newSealer(mustRing(t, testKey(2)), 1)
	session := []byte{magic, 1, 2, 3}
	for _, tt := range []struct {
		name  string
		raw   func(own *sealer) []byte
		plain string // what becomes of it without keys: a drop, "session" or "member"
		keyed string // and with
	}{
		{"empty", func(*sealer) []byte { return nil }, "malformed", "malformed"},
		{"session", func(*sealer) []byte { return session }, "session", "unauthenticated"},
		{"session of another version", func(*sealer) []byte { return []byte{magic + 1} }, "session", "unauthenticated"},
		{"member", func(*sealer) []byte { return memberPacket("test", memberPing, 0x80) }, "member", "unauthenticated"},
		{"member of another cluster", func(*sealer) []byte { return memberPacket("prod", memberPing, 0x80) }, "cluster", "unauthenticated"},
		{"member without content", func(*sealer) []byte { return memberPacket("test") }, "malformed", "unauthenticated"},
		{"kind of another version", func(*sealer) []byte { return []byte{0xDF, 1} }, "version", "unauthenticated"},
		{"text", func(*sealer) []byte { return []byte("GET / HTTP/1.1") }, "malformed", "unauthenticated"},
		{"1,400 bytes", func(*sealer) []byte { return append([]byte{magic}, make([]byte, 1399)...) }, "session", "unauthenticated"},
		{"1,401 bytes", func(*sealer) []byte { return append([]byte{magic}, make([]byte, 1400)...) }, "too_large", "too_large"},
		{"sealed session", func(s *sealer) []byte { return s.seal(nil, session) }, "unauthenticated", "session"},
		{"sealed member", func(s *sealer) []byte { return s.seal(nil, memberPacket("test", memberPing, 0x80)) }, "unauthenticated", "member"},
		{"sealed of another cluster", func(s *sealer) []byte { return s.seal(nil, memberPacket("prod", memberPing, 0x80)) }, "unauthenticated", "cluster"},
		{"sealed text", func(s *sealer) []byte { return s.seal(nil, []byte("text")) }, "unauthenticated", "malformed"},
		{"sealed nothing", func(s *sealer) []byte { return s.seal(nil, nil) }, "unauthenticated", "malformed"},
		{"sealed twice", func(s *sealer) []byte { return s.seal(nil, s.seal(nil, session)) }, "unauthenticated", "version"},
		{"sealed with another key", func(*sealer) []byte { return other.seal(nil, session) }, "unauthenticated", "unauthenticated"},
		{"sealed in another version", func(s *sealer) []byte {
			b := s.seal(nil, session)
			b[0]++
			return b
		}, "version", "version"},
	} {
		for want, tr := range map[string]*transport{"plain " + tt.plain: bare(), "keyed " + tt.keyed: bare(secret)} {
			sealer := tr.seal
			if sealer == nil {
				sealer = newSealer(mustRing(t, secret), 1)
			}
			tr.ingest(tt.raw(sealer), tr.self)
			_, want, _ = strings.Cut(want, " ")
			got := "nothing"
			if len(tr.inbox) == 1 {
				got = "session"
			}
			if len(tr.packets) == 1 {
				got = "member"
			}
			for d, n := range tr.counts() {
				if n > 0 {
					got = Drop(d).String()
				}
			}
			if got != want {
				t.Errorf("%s, keys %v: %s, want %s", tt.name, tr.seal != nil, got, want)
			}
		}
	}
}

func TestBusyIsCounted(t *testing.T) {
	tr := bare()
	for range 10 {
		tr.ingest([]byte{magic}, tr.self)
		tr.ingest(memberPacket("test", memberAck, 0x80), tr.self)
	}
	if n := tr.counts()[DropBusy]; n != 12 {
		t.Errorf("%d are counted", n)
	}
}

func TestDropsHaveNames(t *testing.T) {
	for d := range drops {
		if d.String() == "" || strings.Contains(d.String(), "(") {
			t.Errorf("drop %d has no name", d)
		}
	}
	if drops.String() != "Drop(7)" {
		t.Error(drops.String())
	}
}

// FuzzIngest has anything come in as a packet: sealed with a key of ours when the
// first byte says so, so that what lies behind the seal is reached.
func FuzzIngest(f *testing.F) {
	f.Add(byte(0), []byte{magic})
	f.Add(byte(0), memberPacket("test", memberAck, 0x80))
	f.Add(byte(1), memberPacket("test", memberAck, 0x80))
	f.Add(byte(2), []byte{sealed, 1, 2})
	f.Add(byte(2), bytes.Repeat([]byte{sealed}, 200))
	f.Add(byte(1), bytes.Repeat([]byte{0xD0}, 1400))
	f.Fuzz(func(t *testing.T, how byte, b []byte) {
		var tr *transport
		switch how % 3 {
		case 0:
			tr = bare()
		default:
			tr = bare(testKey(1))
			if how%3 == 1 {
				b = tr.seal.seal(nil, b)
			}
		}
		tr.ingest(b, tr.self)
		n := uint64(len(tr.inbox) + len(tr.packets))
		for _, c := range tr.counts() {
			n += c
		}
		if n != 1 {
			t.Fatalf("it was counted %d times", n)
		}
		select {
		case d := <-tr.inbox:
			if len(d.b) == 0 || len(d.b) > MaxPacket {
				t.Fatalf("%d bytes", len(d.b))
			}
		default:
		}
	})
}

// FuzzStreams has anything come in as a stream: of packets, of memberlist's, or of
// nobody's.
func FuzzStreams(f *testing.F) {
	frame := func(b []byte) []byte { return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...) }
	start := bare().appendStart(nil)
	f.Add(false, slices.Concat([]byte{streamPackets}, frame(start), frame([]byte{magic, 1}), frame(memberPacket("test", memberAck, 0x80))))
	f.Add(false, slices.Concat([]byte{streamPackets}, frame(start), frame(make([]byte, 1500))))
	f.Add(true, slices.Concat([]byte{streamPackets}, frame(bare(testKey(1)).wrap(nil, start)), frame([]byte{sealed})))
	f.Add(false, []byte{streamPackets, 0, 0})
	f.Add(false, []byte{streamMember, 0, 1, kindMemberFrame})
	f.Add(false, []byte{streamMember, 0xFF, 0xFF})
	f.Add(true, []byte{0x16, 3, 1})
	f.Fuzz(func(t *testing.T, keyed bool, b []byte) {
		tr := bare()
		if keyed {
			tr = bare(testKey(1))
		}
		if len(b) > 0 && b[0] == streamMember {
			m := &memberConn{Conn: pipeOf(b[1:]), t: tr, accepted: true}
			n, err := io.Copy(io.Discard, m)
			if err == nil && keyed && n > 0 {
				t.Fatalf("%d bytes that nobody sealed", n)
			}
			return
		}
		r := bufio.NewReader(bytes.NewReader(b))
		_, _ = r.Discard(1)
		raw := make([]byte, MaxPacket)
		for {
			frame, ok := tr.nextFrame(r, raw)
			if !ok {
				return
			}
			if len(frame) == 0 || len(frame) > MaxPacket {
				t.Fatalf("a frame of %d bytes", len(frame))
			}
			d := getDatagram()
			if _, ok := tr.unseal(d, frame); ok {
				from, _, ok := tr.parseStart(d.b, tr.self.Addr())
				if ok && (from.Port() == 0 || !from.Addr().IsValid() || from.Addr().IsUnspecified()) {
					t.Fatalf("from %v", from)
				}
			}
			tr.ingest(frame, tr.self)
		}
	})
}

// pipeOf is a connection from which b can be read.
func pipeOf(b []byte) net.Conn { return &readOnly{r: bytes.NewReader(b)} }

type readOnly struct {
	net.Conn

	r io.Reader
}

func (r *readOnly) Read(b []byte) (int, error) { return r.r.Read(b) }
func (r *readOnly) Close() error               { return nil }

func FuzzMeta(f *testing.F) {
	f.Add(makeMeta(Member{Zone: "a"}))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, ok := parseMeta(b)
		if ok && !bytes.Equal(makeMeta(m), b) {
			t.Fatalf("%+v", m)
		}
	})
}

func TestMetaFits(t *testing.T) {
	long := strings.Repeat("x", maxName)
	m := Member{Zone: long, Region: long}
	m.Name, m.Incarnation = long, 1
	b := makeMeta(m)
	if len(b) > memberlist.MetaMaxSize {
		t.Errorf("%d bytes", len(b))
	}
	if got, ok := parseMeta(b); !ok || got != m {
		t.Errorf("%+v, %v", got, ok)
	}
}

// What memberlist writes to a stream arrives, and what is changed, left out,
// repeated or put into another stream on the way does not.
func TestMemberStreams(t *testing.T) {
	for _, keys := range [][][]byte{nil, {testKey(1)}} {
		a, b := local(t, TCP, keys...), local(t, TCP, keys...)
		c, err := a.DialTimeout(b.self.String(), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		sent := exchange(1000)
		go func() { _, _ = c.Write(sent) }()
		s := <-b.StreamCh()
		got := make([]byte, len(sent))
		if _, err := io.ReadFull(s, got); err != nil || !bytes.Equal(got, sent) {
			t.Fatalf("keys %d: %v", len(keys), err)
		}
		if _, err := s.Write([]byte{memberAck, 0x80, 'x'}); err != nil {
			t.Fatal(err)
		}
		if back, err := io.ReadAll(c); err != nil || string(back) != string([]byte{memberAck, 0x80}) {
			t.Fatalf("keys %d: %q, %v", len(keys), back, err)
		}
		_, _ = s.Close(), c.Close()
	}

	frames := func(t *testing.T, tr *transport, id uint64, parts ...string) (all [][]byte) {
		t.Helper()
		m := &memberConn{t: tr, id: id, known: true}
		for _, p := range parts {
			var w writeOnly
			m.Conn = &w
			if _, err := m.Write([]byte(p)); err != nil {
				t.Fatal(err)
			}
			all = append(all, w.Bytes())
		}
		return all
	}
	tr := bare(testKey(1))
	const one, two, three = "\x0d\xa9o", "ne", "twthree" // an error of nine bytes
	own := frames(t, tr, 1, one, two, three)
	other := frames(t, tr, 2, one, "NE")
	bad := bytes.Clone(own[1])
	bad[len(bad)-1] ^= 1
	for _, tt := range []struct {
		name   string
		frames [][]byte
		want   string
	}{
		{"whole", own, one + two + three[:6]},
		{"left out", [][]byte{own[0], own[2]}, ""},
		{"repeated", [][]byte{own[0], own[0]}, ""},
		{"of another stream", [][]byte{own[0], other[1]}, ""},
		{"changed", [][]byte{own[0], bad, own[2]}, ""},
		{"begins late", own[1:], ""},
	} {
		m := &memberConn{Conn: pipeOf(slices.Concat(tt.frames...)), t: tr, accepted: true}
		tr.await(m.Conn)
		got, err := io.ReadAll(m)
		if string(got) != tt.want || (err == nil) != (tt.name == "whole") {
			t.Errorf("%s: %q, %v", tt.name, got, err)
		}
	}
	m := &memberConn{Conn: pipeOf(slices.Concat(own...)), t: tr, id: 1, known: true}
	if got, err := io.ReadAll(m); err == nil {
		t.Errorf("what was sent can be sent back: %q", got)
	}
}

// exchange is a push of as many nodes, as memberlist writes it.
func exchange(nodes int) []byte {
	b := []byte{memberPushPull, 0x83, 0xA4}
	b = append(b, "Join"...)
	b = append(b, 0xC3, 0xA5)
	b = append(b, "Nodes"...)
	b = binary.BigEndian.AppendUint16(append(b, 0xCD), uint16(nodes))
	b = append(b, 0xAC)
	b = append(append(b, "UserStateLen"...), 0)
	for range nodes {
		b = append(b, 0x82, 0xA4)
		b = append(b, "Name"...)
		b = append(b, 0xA1, 'x', 0xA4)
		b = append(b, "Meta"...)
		b = append(append(b, 0xDA, 0, 200), make([]byte, 200)...)
	}
	return b
}

type writeOnly struct {
	net.Conn
	bytes.Buffer
}

func (w *writeOnly) Write(b []byte) (int, error) { return w.Buffer.Write(b) }
func (w *writeOnly) Read([]byte) (int, error)    { return 0, io.EOF }
func (w *writeOnly) SetDeadline(time.Time) error { return nil }

func waitFor(t testing.TB, within time.Duration, what string, ok func() bool) {
	t.Helper()
	within = max(within, time.Minute) // a busy machine has time
	for end := time.Now().Add(within); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// A peer that takes connections and reads nothing never makes the sender wait,
// what waits for it is bounded, and the stream is given up when no echo comes.
func TestPeerThatDoesNotRead(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	a := local(t, TCP)
	to := netip.MustParseAddrPort(ln.Addr().String())
	packet := append([]byte{magic}, make([]byte, 1300)...)
	var worst time.Duration
	begin := time.Now()
	for a.stats.dials.Load() < 2 {
		if time.Since(begin) > time.Minute {
			t.Fatalf("it was dialed %d times in a minute", a.stats.dials.Load())
		}
		before := time.Now()
		a.send(packet, to)
		worst = max(worst, time.Since(before))
		time.Sleep(100 * time.Microsecond)
	}
	if worst > writeTime*3/4 { // above what a busy machine does, below a write's deadline
		t.Errorf("a send took %v", worst)
	}
	if a.stats.sendDropped.Load() == 0 {
		t.Error("nothing was dropped")
	}
	if gave := time.Since(begin); gave < writeTime-200*time.Millisecond {
		t.Errorf("given up after %v", gave)
	}
}

// Packets travel over one stream, in order, and after the peer comes back at its
// address over another.
func TestPacketStream(t *testing.T) {
	for _, keys := range [][][]byte{nil, {testKey(1)}} {
		a, b := local(t, TCP, keys...), local(t, TCP, keys...)
		next := func() byte {
			t.Helper()
			select {
			case d := <-b.inbox:
				defer d.free()
				if d.addr != a.self {
					t.Errorf("from %v", d.addr)
				}
				return d.b[1]
			case <-time.After(time.Minute):
				t.Fatal("nothing came")
				return 0
			}
		}
		for i := range byte(100) {
			a.send([]byte{magic, i}, b.self)
			if got := next(); got != i {
				t.Fatalf("%d came for %d", got, i)
			}
		}
		if n := a.stats.dials.Load(); n != 1 {
			t.Errorf("%d dials", n)
		}
		b.mu.Lock()
		for c := range b.conns {
			_ = c.Close()
		}
		b.mu.Unlock()
		waitFor(t, 5*time.Second, "the stream is dialed again", func() bool {
			a.send([]byte{magic, 200}, b.self)
			return a.stats.dials.Load() > 1
		})
		if next() != 200 {
			t.Error("something else came")
		}
	}
}

// Streams that are too many, say nothing, or say nonsense, do not stay.
func TestStreamsAreBounded(t *testing.T) {
	a, b := local(t, TCP), local(t, TCP)
	dial := func(to *transport) net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", to.self.String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	open := func() int {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.conns)
	}
	var silent []net.Conn
	for range 40 {
		silent = append(silent, dial(a))
	}
	waitFor(t, 5*time.Second, "those too many are closed", func() bool { return a.counts()[DropStreams] == 36 && open() == 4 })

	// Whoever belongs to the fleet gets in beside them.
	b.send([]byte{magic, 1}, a.self)
	select {
	case d := <-a.inbox:
		d.free()
	case <-time.After(time.Minute):
		t.Fatal("silent streams kept a peer out")
	}
	for _, c := range silent {
		_, _ = c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	}
	waitFor(t, 5*time.Second, "nonsense is closed", func() bool { return open() == 1 })
	if c := a.counts(); c[DropMalformed] != 3 || c[DropStreams] != 37 { // the peer had the oldest one's place
		t.Errorf("%v", c)
	}

	start := func(port int) []byte {
		b.told = netip.AddrPortFrom(netip.Addr{}, uint16(port))
		start := b.appendStart([]byte{streamPackets, 0, 0})
		binary.BigEndian.PutUint16(start[1:], uint16(len(start)-3))
		return start
	}
	for i := range 20 {
		if _, err := dial(a).Write(start(1000 + i)); err != nil {
			t.Fatal(err)
		}
		waitFor(t, 5*time.Second, "it is known or refused", func() bool {
			return a.stats.streamsIn.Load() == int64(min(2+i, 16)) && a.counts()[DropStreams] == uint64(37+max(0, i-14))
		})
	}

	// A node has three at most, and one where all places are taken: its oldest makes room.
	for stays, at := range map[int]*transport{1: a, oneNode: local(t, TCP)} {
		var own []net.Conn
		for range oneNode + 2 {
			c := dial(at)
			if _, err := c.Write(start(1003)); err != nil {
				t.Fatal(err)
			}
			waitFor(t, 5*time.Second, "it is known", func() bool {
				at.mu.Lock()
				defer at.mu.Unlock()
				return len(at.known) > 0 && at.known[len(at.known)-1].RemoteAddr().String() == c.LocalAddr().String()
			})
			own = append(own, c)
		}
		for i, c := range own {
			within := 200 * time.Millisecond
			if i < len(own)-stays { // its end comes, if late
				within = time.Minute
			}
			_ = c.SetReadDeadline(time.Now().Add(within))
			_, err := io.Copy(io.Discard, c)
			if open := errors.Is(err, os.ErrDeadlineExceeded); open != (i >= len(own)-stays) {
				t.Errorf("stream %d of one node, of which %d stay: %v", i, stays, err)
			}
		}
	}
}

// Where packets have a socket, nobody has streams of them.
func TestNoPacketStreamsBesideASocket(t *testing.T) {
	a := local(t, UDP)
	c, err := net.Dial("tcp", a.self.String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	start := a.appendStart([]byte{streamPackets, 0, 0})
	binary.BigEndian.PutUint16(start[1:], uint16(len(start)-3))
	if _, err := c.Write(start); err != nil {
		t.Fatal(err)
	}
	waitFor(t, 5*time.Second, "it is refused", func() bool { return a.counts()[DropMalformed] == 1 && a.stats.streamsIn.Load() == 0 })
}

// A stream ends on which something comes that does not open, or is no packet.
func TestStreamThatDoesNotOpenEnds(t *testing.T) {
	a := local(t, TCP, testKey(1))
	b, stranger := bare(testKey(1)), bare(testKey(2))
	start := b.wrap(nil, b.appendStart(nil))
	for name, last := range map[string][]byte{
		"of a stranger":          stranger.wrap(nil, []byte{magic, 2}),
		"a start, a second time": start,
	} {
		c, err := net.Dial("tcp", a.self.String())
		if err != nil {
			t.Fatal(err)
		}
		frame := func(packet []byte) {
			t.Helper()
			f := append([]byte{0, 0}, packet...)
			binary.BigEndian.PutUint16(f, uint16(len(packet)))
			if _, err := c.Write(f); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := c.Write([]byte{streamPackets}); err != nil {
			t.Fatal(err)
		}
		frame(start)
		frame(b.wrap(nil, []byte{magic, 1}))
		select {
		case d := <-a.inbox:
			d.free()
		case <-time.After(time.Minute):
			t.Fatal("what opens does not come in")
		}
		frame(last)
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		if _, err := io.Copy(io.Discard, c); err != nil {
			t.Errorf("%s: it goes on: %v", name, err)
		}
		waitFor(t, 5*time.Second, "it is forgotten", func() bool { return a.stats.streamsIn.Load() == 0 })
		_ = c.Close()
	}
}

// Who is bound to one of a host's addresses dials from it: the others take the
// address that a stream comes from to be his.
func TestDialsFromWhereItListens(t *testing.T) {
	a, b := local(t, TCP), bare()
	var err error
	if b.ln, b.udp, err = listen(netip.MustParseAddrPort("127.0.0.2:0"), TCP); err != nil {
		t.Skipf("this host has one loopback address: %v", err)
	}
	b.from = netip.MustParseAddr("127.0.0.2")
	b.told = netip.AddrPortFrom(netip.Addr{}, 7946)
	b.start()
	t.Cleanup(b.close)
	b.send([]byte{magic, 1}, a.self)
	select {
	case d := <-a.inbox:
		defer d.free()
		if d.addr != netip.MustParseAddrPort("127.0.0.2:7946") {
			t.Errorf("from %v", d.addr)
		}
	case <-time.After(time.Minute):
		t.Fatal("nothing came")
	}
}

func TestIdleStreamEnds(t *testing.T) {
	a := bare()
	o := &outStream{t: a, to: a.self, kick: make(chan struct{}, 1)}
	a.outs[a.self] = o
	if !o.push([]byte{magic}) || o.retire(false) {
		t.Error("it ends though something waits")
	}
	o.take(nil)
	if !o.retire(false) || o.push([]byte{magic}) || len(a.outs) != 0 {
		t.Error("it does not end")
	}
}

func TestQueueDropsTheOldest(t *testing.T) {
	a := bare()
	o := &outStream{t: a, to: a.self, kick: make(chan struct{}, 1)}
	for i := range byte(queueSlots + 10) {
		o.push([]byte{magic, i})
	}
	b, n := o.take(nil)
	if n != queueSlots || b[3] != 10 || b[len(b)-1] != queueSlots+9 || a.stats.sendDropped.Load() != 10 {
		t.Errorf("%d frames, first %d, last %d", n, b[3], b[len(b)-1])
	}
}

func TestWriteToAfterClose(t *testing.T) {
	a := local(t, UDP)
	a.close()
	if _, err := a.WriteTo([]byte{1}, "127.0.0.1:1"); !errors.Is(err, ErrClosed) {
		t.Errorf("%v", err)
	}
	a.send([]byte{magic}, a.self)
	a.push([]byte{magic}, a.self)
	if a.stats.packetsOut.Load() != 0 {
		t.Error("something was sent")
	}
}

// BenchmarkReceive is what a packet costs from the socket's bytes to the session.
func BenchmarkReceive(b *testing.B) {
	for name, keys := range map[string][][]byte{"plain": nil, "sealed": {testKey(1)}} {
		b.Run(name, func(b *testing.B) {
			tr := bare(keys...)
			raw := tr.wrap(nil, append([]byte{magic}, make([]byte, 999)...))
			b.ReportAllocs()
			for b.Loop() {
				tr.ingest(raw, tr.self)
				(<-tr.inbox).free()
			}
		})
	}
}

// BenchmarkLoopback is a packet through two sockets.
func BenchmarkLoopback(b *testing.B) {
	for _, network := range []string{UDP, TCP} {
		for name, keys := range map[string][][]byte{"plain": nil, "sealed": {testKey(1)}} {
			b.Run(network+"/"+name, func(b *testing.B) {
				from, to := local(b, network, keys...), local(b, network, keys...)
				packet := append([]byte{magic}, make([]byte, 999)...)
				b.ReportAllocs()
				for b.Loop() {
					from.send(packet, to.self)
					(<-to.inbox).free()
				}
			})
		}
	}
}

// A stream whose packets arrive nowhere is given up although the system takes
// them all, and before it would say so by itself; one on which little is sent is not.
func TestStreamWithoutEchoIsGivenUp(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	swallowed := make(chan struct{})
	defer func() { _ = ln.Close(); <-swallowed }()
	go func() {
		defer close(swallowed)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(io.Discard, c); _ = c.Close() }()
		}
	}()
	a := local(t, TCP)
	begin := time.Now()
	to := netip.MustParseAddrPort(ln.Addr().String())
	a.send([]byte{magic}, to)
	waitFor(t, 10*time.Second, "it is dialed", func() bool { return len(openConns(a)) == 1 })
	waitFor(t, 10*time.Second, "it is given up", func() bool { return len(openConns(a)) == 0 })
	if took := time.Since(begin); took < echoTime/2 {
		t.Errorf("given up after %v", took)
	}
	a.send([]byte{magic}, to)
	waitFor(t, 5*time.Second, "it is dialed again", func() bool { return a.stats.dials.Load() == 2 })
}

func TestQuietStreamStays(t *testing.T) {
	t.Parallel()
	a, b := local(t, TCP), local(t, TCP)
	for i, wait := range []time.Duration{0, 50 * time.Millisecond, echoTime + 500*time.Millisecond, 50 * time.Millisecond} {
		time.Sleep(wait) // what is tested is what happens when nothing is sent
		a.send([]byte{magic, byte(i)}, b.self)
		(<-b.inbox).free()
	}
	if n := a.stats.dials.Load(); n != 1 {
		t.Errorf("%d dials", n)
	}
}

func openConns(t *transport) (all []net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.conns {
		all = append(all, c)
	}
	return all
}

// otherName is the header of an exchange with the name of its count in a longer form.
func otherName(nodes uint32) []byte {
	b := append([]byte{memberPushPull, 0x81, 0xDA, 0, 5}, "Nodes"...)
	return binary.BigEndian.AppendUint32(append(b, 0xCE), nodes)
}

// memberlist reads a name in each of its forms, and makes room for what it counts.
func TestVetOtherName(t *testing.T) {
	var v vetted
	if err := v.vet(otherName(1<<20), 100); !errors.Is(err, errMember) {
		t.Errorf("a million members are said, 100 are the most: %v", err)
	}
}

// Names that come and go are bounded, also such as membership never tells of.
func TestNewNamesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 100
		m := members{limit: limit, known: make(map[string]Member), hint: func(netip.AddrPort) {}}
		alive := func(i int) error {
			return m.NotifyAlive(&memberlist.Node{
				Name: fmt.Sprint(i), Addr: net.IPv4(127, 0, 0, 1).To4(), Port: 9,
				Meta: makeMeta(Member{Replica: crdt.Replica{Name: "x", Incarnation: 1}}),
			})
		}
		taken := func() (n int) {
			for i := range 10 * limit {
				if alive(i) == nil {
					n++
				}
			}
			return n
		}
		if n := taken(); n != 2*limit {
			t.Errorf("%d names at once", n)
		}
		if n := taken(); n != 0 {
			t.Errorf("%d names more", n)
		}
		time.Sleep(namesFor)
		if n := taken(); n < limit-1 || n > limit {
			t.Errorf("%d names after %s", n, namesFor)
		}
	})
}

// FuzzVet has anything come as membership: it takes no more than there is, whole is
// whole however it comes, and what is in a packet is in bounds.
func FuzzVet(f *testing.F) {
	f.Add(exchange(2), uint8(7))
	f.Add([]byte{memberErr, 0xA3, 'b', 'a', 'd'}, uint8(1))
	f.Add([]byte{memberPushPull, 0x81, 0xA5, 'N', 'o', 'd', 'e', 's', 0xCE, 0xFF, 0xFF, 0xFF, 0xFF}, uint8(3))
	f.Add([]byte{memberCompound, 1, 0, 2, memberIndirectPing, 0x80}, uint8(1))
	f.Add(otherName(1<<20), uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, step uint8) {
		if probes, ok := vetPacket(b); ok && probes > len(b) {
			t.Fatalf("%d probes in %d bytes", probes, len(b))
		}
		var whole, parts vetted
		want := whole.vet(b, 2048)
		if whole.size > len(b) {
			t.Fatalf("%d of %d bytes", whole.size, len(b))
		}
		got := errShort
		for n := 0; errors.Is(got, errShort) && n < len(b); {
			n = min(n+int(step)+1, len(b))
			got = parts.vet(b[:n], 2048)
		}
		if !errors.Is(got, want) && !(got == nil && want == nil) && len(b) > 0 || want == nil && parts.size != whole.size {
			t.Fatalf("in parts %v, %d bytes; whole %v, %d", got, parts.size, want, whole.size)
		}
	})
}
