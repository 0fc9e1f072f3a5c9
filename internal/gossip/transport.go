// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
)

// The first byte says what a packet, a frame or a stream is. Its low four bits are the version. The
// first byte of a session packet is magic.
//
//	packet, frame    session packet          C1 ...
//	                 memberlist's packet     D1 | cluster (4) | ...
//	                 sealed                  E1 | salt (12) | sequence (8) | ... | tag (16)
//	frame            start of packets        D3 | cluster (4) | port (2) | address (4, 16 or none)
//	                 memberlist's stream     D2 | cluster (4) | side (1) | stream (8) | number (4) | ...
//	stream           of packets              A1 { length (2) frame }
//	                 memberlist's            A2 { length (2) frame }
//
// The content of a sealed packet or frame begins with C1 or D1 to D3.
const (
	kindMember      = 0xD1
	kindMemberFrame = 0xD2
	kindStart       = 0xD3
	streamPackets   = 0xA1
	streamMember    = 0xA2
	kindMask        = 0xF0

	memberHeader = 1 + 4
)

// Drop says why an incoming packet, frame or stream was not taken in, before the session or
// memberlist saw it.
type Drop uint8

// The reasons.
const (
	DropMalformed       Drop = iota // not a packet, frame or stream of ours
	DropVersion                     // of another version
	DropCluster                     // of another cluster; the session counts its own
	DropUnauthenticated             // not sealed with a key of ours; or sealed, and we have no key
	DropTooLarge                    // longer than any packet that is sent
	DropBusy                        // came faster than it could be handled
	DropStreams                     // too many streams
	drops
)

var dropNames = [drops]string{
	"malformed", "version", "cluster", "unauthenticated", "too_large", "busy", "streams",
}

func (d Drop) String() string {
	if d >= drops {
		return fmt.Sprintf("Drop(%d)", uint8(d))
	}
	return dropNames[d]
}

// wireStats are the transport's counts.
type wireStats struct {
	packetsIn, packetsOut   atomic.Uint64
	bytesIn, bytesOut       atomic.Uint64
	refused                 [drops]atomic.Uint64
	sendErrors, sendDropped atomic.Uint64
	dials, dialErrors       atomic.Uint64
	streamsIn, streamsOut   atomic.Int64
}

// datagram is a packet in a pooled buffer.
type datagram struct {
	addr netip.AddrPort
	b    []byte // the packet, within buf
	buf  [frameHeader + bufferSize]byte
}

// bufferSize is more than the longest packet, so that a longer one is noticed.
const bufferSize = MaxPacket + 104

var datagrams = sync.Pool{New: func() any { return new(datagram) }}

func getDatagram() *datagram { return datagrams.Get().(*datagram) } //nolint:forcetypeassert // nothing else is put there

func (d *datagram) free() {
	d.b = nil
	datagrams.Put(d)
}

// transport has the sockets of a Node: one UDP socket and one TCP listener at one port, for the
// session and for memberlist.
//
// Its goroutines are the reader, the acceptor, one for each stream that was accepted and two for
// each that was dialed. close ends them and waits.
type transport struct {
	cluster uint32
	seal    *sealer // nil: nothing is sealed
	self    netip.AddrPort
	told    netip.AddrPort // address that streams announce; without an IP: the one they come from
	from    netip.Addr     // local address of dialed streams; none: the host's choice
	udp     *net.UDPConn   // nil: packets travel over streams
	ln      *net.TCPListener
	faults  Faults
	inbox   chan *datagram // packets for the session
	limit   int            // most entries in known, and most in outs
	room    int            // most entries in unknown
	stats   wireStats

	packets chan *memberlist.Packet
	streams chan net.Conn
	nodes   int // most nodes in one exchange of membership

	quotas struct {
		sync.Mutex
		packets, probes quota
	}

	ctx    context.Context //nolint:containedctx // ends what memberlist dials, whose interface has none
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	closed  bool                          // guarded by mu, as the fields below
	outs    map[netip.AddrPort]*outStream // dialed streams of packets
	conns   map[net.Conn]struct{}         // all open connections
	known   []stream                      // accepted streams whose first frame was right, oldest first
	unknown []net.Conn                    // other accepted streams, oldest first
}

var errClosed = errors.New("gossip: closed")

func listen(bind netip.AddrPort, network string) (ln *net.TCPListener, udp *net.UDPConn, err error) {
	for range 10 { // a port that is free for TCP may be in use for UDP
		ln, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(bind))
		if err != nil || network == TCP {
			return ln, nil, err
		}
		port := uint16(ln.Addr().(*net.TCPAddr).Port) //nolint:forcetypeassert // of a TCPListener
		udp, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(bind.Addr(), port)))
		if err == nil {
			// The default buffer holds about 150 packets. The system may allow less than this size.
			_ = udp.SetReadBuffer(2 << 20)
			_ = udp.SetWriteBuffer(1 << 20)
			return ln, udp, nil
		}
		_ = ln.Close()
		if bind.Port() != 0 {
			break
		}
	}
	return nil, nil, err
}

func (t *transport) start() {
	t.wg.Go(t.accept)
	if t.udp != nil {
		t.wg.Go(t.read)
	}
}

// close ends everything and returns when it has ended.
func (t *transport) close() {
	t.cancel()
	t.mu.Lock()
	t.closed = true
	for c := range t.conns {
		_ = c.Close()
	}
	t.mu.Unlock()
	_ = t.ln.Close()
	if t.udp != nil {
		_ = t.udp.Close()
	}
	t.wg.Wait()
}

// hold has close end a connection. It returns false if close was called before.
func (t *transport) hold(c net.Conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		_ = c.Close()
		return false
	}
	t.conns[c] = struct{}{}
	return true
}

func (t *transport) drop(c net.Conn) {
	_ = c.Close()
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, c)
}

func (t *transport) refuse(d Drop) { t.stats.refused[d].Add(1) }

// read is the goroutine that reads packets. It allocates nothing per packet.
func (t *transport) read() {
	raw := make([]byte, bufferSize)
	for {
		n, from, err := t.udp.ReadFromUDPAddrPort(raw)
		if err != nil {
			if errors.Is(err, net.ErrClosed) || !pause(t.ctx, time.Millisecond) {
				return
			}
			continue
		}
		t.ingest(raw[:n], netip.AddrPortFrom(from.Addr().Unmap(), from.Port()))
	}
}

// ingest takes in one packet, from the socket or from a stream.
func (t *transport) ingest(raw []byte, from netip.AddrPort) (reason Drop, ok bool) {
	t.stats.packetsIn.Add(1)
	t.stats.bytesIn.Add(uint64(len(raw)))
	d := getDatagram()
	if reason, ok = t.unseal(d, raw); ok {
		d.addr = from
		if reason, ok = t.dispatch(d); ok {
			return 0, true
		}
	}
	d.free()
	t.refuse(reason)
	return reason, false
}

// unseal puts the opened content of raw into d.
func (t *transport) unseal(d *datagram, raw []byte) (reason Drop, ok bool) {
	switch {
	case len(raw) == 0:
		return DropMalformed, false
	case len(raw) > MaxPacket:
		return DropTooLarge, false
	case t.seal == nil && raw[0] == sealed:
		return DropUnauthenticated, false
	case t.seal == nil:
		d.b = d.buf[:copy(d.buf[:], raw)]
		return 0, true
	}
	if raw[0] != sealed && raw[0]&kindMask == sealed&kindMask {
		return DropVersion, false
	}
	plain, err := t.seal.open(d.buf[:0], raw)
	if err != nil {
		return DropUnauthenticated, false
	}
	d.b = plain
	return 0, true
}

// dispatch hands a packet to the session, which then owns d, or to memberlist.
func (t *transport) dispatch(d *datagram) (reason Drop, ok bool) {
	if len(d.b) == 0 {
		return DropMalformed, false
	}
	switch first := d.b[0]; {
	case first&magicMask == magic&magicMask:
		select {
		case t.inbox <- d:
			return 0, true
		default:
			return DropBusy, false
		}
	case first == kindMember:
		if len(d.b) <= memberHeader {
			return DropMalformed, false
		}
		if binary.LittleEndian.Uint32(d.b[1:]) != t.cluster {
			return DropCluster, false
		}
		probes, ok := vetPacket(d.b[memberHeader:])
		if !ok {
			return DropMalformed, false
		}
		if !t.admitMember(probes) {
			return DropBusy, false
		}
		p := &memberlist.Packet{ // memberlist keeps it
			Buf:       append([]byte(nil), d.b[memberHeader:]...),
			From:      net.UDPAddrFromAddrPort(d.addr),
			Timestamp: time.Now(),
		}
		select {
		case t.packets <- p:
			d.free()
			return 0, true
		default:
			return DropBusy, false
		}
	case first&kindMask == kindMember&kindMask, first&kindMask == sealed&kindMask:
		return DropVersion, false
	}
	return DropMalformed, false
}

// admitMember reports whether membership may have one more packet this second.
func (t *transport) admitMember(probes int) bool {
	t.quotas.Lock()
	defer t.quotas.Unlock()
	now := time.Now()
	return t.quotas.packets.take(now, 1, memberPackets) && t.quotas.probes.take(now, probes, memberProbes)
}

// send sends one packet. It keeps nothing of the packet, and waits only for room in the socket's
// buffer.
func (t *transport) send(packet []byte, to netip.AddrPort) {
	if t.faults != nil {
		switch delay, lost := t.faults.Packet(to); {
		case lost:
			return
		case delay > 0:
			later := append([]byte(nil), packet...)
			time.AfterFunc(delay, func() { t.post(later, to) })
			return
		}
	}
	t.post(packet, to)
}

func (t *transport) post(packet []byte, to netip.AddrPort) {
	if t.udp == nil {
		t.push(packet, to)
		return
	}
	d := getDatagram()
	defer d.free()
	b := t.wrap(d.buf[:0], packet)
	if _, err := t.udp.WriteToUDPAddrPort(b, to); err != nil {
		t.stats.sendErrors.Add(1)
		return
	}
	t.stats.packetsOut.Add(1)
	t.stats.bytesOut.Add(uint64(len(b)))
}

// wrap appends a packet in the form in which it travels.
func (t *transport) wrap(b, packet []byte) []byte {
	if t.seal == nil {
		return append(b, packet...)
	}
	return t.seal.seal(b, packet)
}

// The methods below implement memberlist's Transport.

// FinalAdvertiseAddr returns where others reach this node.
func (t *transport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return t.self.Addr().AsSlice(), int(t.self.Port()), nil
}

// WriteTo sends one packet of memberlist's.
func (t *transport) WriteTo(b []byte, addr string) (time.Time, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return time.Time{}, err
	}
	if t.ctx.Err() != nil {
		return time.Time{}, errClosed
	}
	if len(b) > bufferSize-memberHeader {
		t.stats.sendErrors.Add(1)
		return time.Time{}, fmt.Errorf("gossip: membership packet of %d bytes", len(b))
	}
	d := getDatagram()
	defer d.free()
	p := append(d.buf[:0], kindMember)
	p = binary.LittleEndian.AppendUint32(p, t.cluster)
	t.send(append(p, b...), canonical(to))
	return time.Now(), nil
}

// WriteToAddress is WriteTo; names are not needed.
func (t *transport) WriteToAddress(b []byte, addr memberlist.Address) (time.Time, error) {
	return t.WriteTo(b, addr.Addr)
}

// PacketCh returns memberlist's packets.
func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// StreamCh returns memberlist's streams.
func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

// DialTimeout opens a stream of memberlist's.
func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	c, err := t.dial(to, min(timeout, dialTime))
	if err != nil {
		return nil, err
	}
	return newMemberConn(t, c)
}

// DialAddressTimeout is DialTimeout; names are not needed.
func (t *transport) DialAddressTimeout(addr memberlist.Address, timeout time.Duration) (net.Conn, error) {
	return t.DialTimeout(addr.Addr, timeout)
}

// Shutdown does nothing: the Node closes its transport.
func (t *transport) Shutdown() error { return nil }

// pause waits for d. It returns false if ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
