// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bufio"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	mathrand "math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	frameHeader = 2
	frameMost   = 16 << 10 // of a frame of memberlist's

	dialTime   = 2 * time.Second
	writeTime  = 2 * time.Second
	startTime  = 5 * time.Second  // until an accepted stream has said what it is
	idleTime   = 30 * time.Second // after which a stream without packets is closed
	echoEvery  = 250 * time.Millisecond
	echoTime   = 3 * time.Second // for which a stream may stay without an echo
	redialSoon = 100 * time.Millisecond
	redialLate = 2 * time.Second
	queueSlots = 64 // packets that wait for a stream
	socketRoom = 128 << 10
)

var errFrame = errors.New("gossip: malformed frame")

func (t *transport) dial(to netip.AddrPort, timeout time.Duration) (net.Conn, error) {
	t.stats.dials.Add(1)
	if t.faults != nil {
		if err := t.faults.Dial(to); err != nil {
			t.stats.dialErrors.Add(1)
			return nil, err
		}
	}
	d := net.Dialer{Timeout: timeout}
	if t.from.IsValid() && t.from.Is4() == to.Addr().Is4() && t.from.IsLoopback() == to.Addr().IsLoopback() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(t.from, 0))
	}
	c, err := d.DialContext(t.ctx, "tcp", to.String())
	if err != nil {
		t.stats.dialErrors.Add(1)
		return nil, err
	}
	if !t.hold(c) {
		return nil, errClosed
	}
	return c, nil
}

// accept is the goroutine that accepts streams.
func (t *transport) accept() {
	for {
		c, err := t.ln.AcceptTCP()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || !pause(t.ctx, 10*time.Millisecond) {
				return
			}
			continue
		}
		if !t.hold(c) {
			return
		}
		t.await(c)
		t.wg.Go(func() {
			if !t.serve(c) {
				t.dismiss(c)
			}
		})
	}
}

// await notes a stream of which nothing was read yet. Of those that are too many the
// oldest is closed: whoever belongs to the fleet says so at once, and whoever opens
// streams and says nothing keeps nobody out.
func (t *transport) await(c net.Conn) {
	t.mu.Lock()
	var oldest net.Conn
	if t.unknown = append(t.unknown, c); len(t.unknown) > t.room {
		oldest, t.unknown = t.unknown[0], t.unknown[1:]
	}
	t.mu.Unlock()
	if oldest != nil {
		t.refuse(DropStreams)
		_ = oldest.Close()
	}
}

// stream is one that was accepted.
type stream struct {
	net.Conn

	from netip.AddrPort // of packets: what its first frame says; none for membership's
}

// oneNode is how many streams of packets one node may have: one that it has, and those
// that it has given up and we have not.
const oneNode = 3

// accepted says that the first frame of a stream was right. It is false when there
// are too many of those, or the stream was closed meanwhile. Of one node's, the
// oldest makes room.
func (t *transport) accepted(c net.Conn, from netip.AddrPort) bool {
	var late net.Conn
	defer func() {
		if late != nil {
			_ = late.Close() // its reader ends
		}
	}()
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.unknown, c)
	if i < 0 {
		return false
	}
	t.unknown = slices.Delete(t.unknown, i, i+1)
	same, oldest := 0, -1
	for i, s := range t.known {
		if from.IsValid() && s.from == from {
			if same++; oldest < 0 {
				oldest = i
			}
		}
	}
	if same >= oneNode || same > 0 && len(t.known) >= t.limit {
		late = t.known[oldest].Conn
		t.known = slices.Delete(t.known, oldest, oldest+1)
	}
	if len(t.known) >= t.limit {
		t.refuse(DropStreams)
		return false
	}
	t.known = append(t.known, stream{c, from})
	t.stats.streamsIn.Store(int64(len(t.known)))
	return true
}

// dismiss ends a stream that was accepted.
func (t *transport) dismiss(c net.Conn) {
	t.drop(c)
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.Index(t.unknown, c); i >= 0 {
		t.unknown = slices.Delete(t.unknown, i, i+1)
	}
	t.known = slices.DeleteFunc(t.known, func(s stream) bool { return s.Conn == c })
	t.stats.streamsIn.Store(int64(len(t.known)))
}

// serve reads from a stream what it is. It reports whether memberlist has it now.
func (t *transport) serve(c *net.TCPConn) (taken bool) {
	_ = c.SetDeadline(time.Now().Add(startTime))
	var first [1]byte
	if _, err := io.ReadFull(c, first[:]); err != nil {
		return false
	}
	switch first[0] {
	case streamPackets:
		if t.udp == nil {
			t.receive(c)
		} else {
			t.refuse(DropMalformed) // where packets have a socket, nobody has streams of them
		}
		return false
	case streamMember:
		_ = c.SetDeadline(time.Time{})
		m := &memberConn{Conn: c, t: t, accepted: true}
		select {
		case t.streams <- m:
			return true
		case <-t.ctx.Done():
		}
		return false
	}
	if first[0]&kindMask == streamPackets&kindMask {
		t.refuse(DropVersion)
	} else {
		t.refuse(DropMalformed)
	}
	return false
}

// receive reads packets from a stream until it ends. Now and then it sends a byte
// back, from which the sender knows that the stream is alive.
func (t *transport) receive(c *net.TCPConn) {
	_ = c.SetReadBuffer(socketRoom)
	r := bufio.NewReaderSize(c, 16<<10)
	raw := make([]byte, MaxPacket)
	d := getDatagram()
	defer d.free()
	frame, ok := t.nextFrame(r, raw)
	if !ok {
		return
	}
	if reason, ok := t.unseal(d, frame); !ok {
		t.refuse(reason)
		return
	}
	remote, _ := netip.ParseAddrPort(c.RemoteAddr().String())
	from, reason, ok := t.parseStart(d.b, remote.Addr().Unmap())
	if !ok {
		t.refuse(reason)
		return
	}
	if !t.accepted(c, from) {
		return
	}
	t.hurry(from)
	var echoed time.Time
	for {
		now := time.Now()
		if now.Sub(echoed) < echoEvery && r.Buffered() == 0 {
			_ = c.SetReadDeadline(echoed.Add(echoEvery))
			if _, err := r.Peek(1); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				return
			}
			now = time.Now()
			_ = c.SetReadDeadline(now.Add(idleTime))
		}
		if now.Sub(echoed) >= echoEvery {
			echoed = now
			_ = c.SetDeadline(now.Add(idleTime))
			if _, err := c.Write([]byte{streamPackets}); err != nil {
				return
			}
		}
		frame, ok := t.nextFrame(r, raw)
		if !ok {
			return
		}
		if reason, ok := t.ingest(frame, from); !ok && reason != DropBusy {
			return
		}
	}
}

// hurry has a stream dialed now that would wait: its address is there.
func (t *transport) hurry(to netip.AddrPort) {
	t.mu.Lock()
	o := t.outs[to]
	t.mu.Unlock()
	if o != nil {
		select {
		case o.hurry <- struct{}{}:
		default:
		}
	}
}

// nextFrame reads one frame into raw.
func (t *transport) nextFrame(r *bufio.Reader, raw []byte) (frame []byte, ok bool) {
	head, err := r.Peek(frameHeader)
	if err != nil {
		return nil, false
	}
	n := int(binary.BigEndian.Uint16(head))
	_, _ = r.Discard(frameHeader)
	switch {
	case n == 0:
		t.refuse(DropMalformed)
		return nil, false
	case n > len(raw):
		t.refuse(DropTooLarge)
		return nil, false
	}
	_, err = io.ReadFull(r, raw[:n])
	return raw[:n], err == nil
}

// appendStart appends the frame that a stream of packets begins with: where this
// node listens.
func (t *transport) appendStart(b []byte) []byte {
	b = append(b, kindStart)
	b = binary.LittleEndian.AppendUint32(b, t.cluster)
	b = binary.LittleEndian.AppendUint16(b, t.told.Port())
	if t.told.Addr().IsValid() {
		b = append(b, t.told.Addr().AsSlice()...)
	}
	return b
}

func (t *transport) parseStart(b []byte, remote netip.Addr) (from netip.AddrPort, reason Drop, ok bool) {
	r := read(b)
	kind, cluster, port := r.Byte("kind"), r.Uint32("cluster"), r.Uint16("port")
	switch {
	case r.Fault() != nil || kind != kindStart || port == 0:
		return from, DropMalformed, false
	case cluster != t.cluster:
		return from, DropCluster, false
	case r.Len() != 0:
		if remote, ok = netip.AddrFromSlice(r.Rest()); !ok || remote.IsUnspecified() || remote.IsMulticast() {
			return from, DropMalformed, false
		}
	}
	return canonical(netip.AddrPortFrom(remote, port)), 0, true
}

// outStream is the stream of packets to one address. What waits for it is bounded:
// when the peer is slow, the oldest packet makes room for the newest, which says
// all that the old one said.
//
// Its goroutine dials, writes and dials again. It ends when nothing was sent for
// idleTime, and with the transport.
type outStream struct {
	t     *transport
	to    netip.AddrPort
	kick  chan struct{} // something waits
	hurry chan struct{} // the peer is there

	mu     sync.Mutex
	queue  [queueSlots]*datagram // guarded by mu, as what follows
	first  int
	n      int
	closed bool
}

// push queues one packet for an address.
func (t *transport) push(packet []byte, to netip.AddrPort) {
	to = canonical(to)
	for range 2 {
		o := t.out(to)
		if o == nil {
			break
		}
		if o.push(packet) {
			return
		}
		// It has just ended because it was idle.
	}
	t.stats.sendDropped.Add(1)
}

func (t *transport) out(to netip.AddrPort) *outStream {
	t.mu.Lock()
	defer t.mu.Unlock()
	o := t.outs[to]
	if o == nil && !t.closed && len(t.outs) < t.limit {
		o = &outStream{t: t, to: to, kick: make(chan struct{}, 1), hurry: make(chan struct{}, 1)}
		t.outs[to] = o
		t.wg.Go(o.run)
	}
	return o
}

func (o *outStream) push(packet []byte) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return false
	}
	d := getDatagram()
	d.b = o.t.wrap(d.buf[:frameHeader], packet)
	binary.BigEndian.PutUint16(d.b, uint16(len(d.b)-frameHeader))
	if o.n == queueSlots {
		o.queue[o.first].free()
		o.first = (o.first + 1) % queueSlots
		o.n--
		o.t.stats.sendDropped.Add(1)
	}
	o.queue[(o.first+o.n)%queueSlots] = d
	o.n++
	select {
	case o.kick <- struct{}{}:
	default:
	}
	return true
}

// take appends all frames that wait.
func (o *outStream) take(b []byte) (_ []byte, frames int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for ; o.n > 0; o.n-- {
		d := o.queue[o.first]
		b = append(b, d.b...)
		d.free()
		o.queue[o.first] = nil
		o.first = (o.first + 1) % queueSlots
		frames++
	}
	return b, frames
}

// retire ends the stream if nothing waits.
func (o *outStream) retire(force bool) bool {
	o.t.mu.Lock()
	defer o.t.mu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed { // and another may have its place
		return true
	}
	if o.n > 0 && !force {
		return false
	}
	for ; o.n > 0; o.n-- {
		o.queue[o.first].free()
		o.first = (o.first + 1) % queueSlots
	}
	o.closed = true
	delete(o.t.outs, o.to)
	return true
}

func (o *outStream) run() {
	defer o.retire(true)
	t := o.t
	idle := time.NewTimer(idleTime)
	defer idle.Stop()
	backoff := redialSoon
	for {
		idle.Reset(idleTime)
		select {
		case <-o.kick:
		case <-idle.C:
			if o.retire(false) {
				return
			}
		case <-t.ctx.Done():
			return
		}
		c, err := t.dial(o.to, dialTime)
		if err == nil {
			began := time.Now()
			if o.serve(c) {
				return
			}
			if time.Since(began) > redialLate {
				backoff = redialSoon
			}
		}
		// What waited is out of date, and the session sends again what matters.
		_, lost := o.take(nil)
		t.stats.sendDropped.Add(uint64(lost))
		wait := time.NewTimer(backoff + time.Duration(mathrand.Int64N(int64(backoff)))/2)
		select {
		case <-wait.C:
			backoff = min(2*backoff, redialLate)
		case <-o.hurry:
			backoff = redialSoon
		case <-t.ctx.Done():
		}
		wait.Stop()
	}
}

// serve writes to a connection until it breaks. It reports whether the stream is
// to end.
func (o *outStream) serve(c net.Conn) (end bool) {
	t := o.t
	if tc, ok := c.(*net.TCPConn); ok {
		_ = tc.SetWriteBuffer(socketRoom)
	}
	t.stats.streamsOut.Add(1)
	defer t.stats.streamsOut.Add(-1)

	// The watcher reads echoes. It ends with the connection.
	var echoed atomic.Int64
	broken := make(chan struct{})
	watched := make(chan struct{})
	began := time.Now()
	go func() {
		defer close(watched)
		defer close(broken)
		var b [16]byte
		for {
			if _, err := c.Read(b[:]); err != nil {
				return
			}
			echoed.Store(int64(time.Since(began)))
		}
	}()
	defer func() {
		t.drop(c)
		<-watched
	}()

	batch := make([]byte, 0, 4<<10)
	start := getDatagram()
	batch = append(batch, streamPackets, 0, 0)
	batch = t.wrap(batch, t.appendStart(start.buf[:0]))
	start.free()
	binary.BigEndian.PutUint16(batch[1:], uint16(len(batch)-1-frameHeader))

	idle := time.NewTimer(idleTime)
	defer idle.Stop()
	var unechoed, wrote time.Duration // the first write without an echo, and the last of all
	for {
		var frames int
		batch, frames = o.take(batch)
		now := time.Since(began)
		alive := time.Duration(echoed.Load())
		if alive >= unechoed {
			unechoed = wrote
		}
		if unechoed > alive && now-unechoed >= echoTime {
			return false // the network takes it and nobody reads it
		}
		if len(batch) > 0 {
			if unechoed <= alive {
				unechoed = now
			}
			wrote = now
			_ = c.SetWriteDeadline(time.Now().Add(writeTime))
			if _, err := c.Write(batch); err != nil {
				t.stats.sendErrors.Add(uint64(max(frames, 1)))
				return false
			}
			t.stats.packetsOut.Add(uint64(frames))
			t.stats.bytesOut.Add(uint64(len(batch)))
			batch = batch[:0]
		}
		wait := wrote + idleTime - now
		if unechoed > alive {
			wait = unechoed + echoTime - now
		}
		idle.Reset(wait)
		select {
		case <-o.kick:
		case <-broken:
			return false
		case <-idle.C:
			if time.Since(began)-wrote >= idleTime && o.retire(false) {
				return true
			}
		case <-t.ctx.Done():
			return true
		}
	}
}

// memberConn is a stream of memberlist's in frames, each sealed and numbered, so
// that none can be left out, repeated, or put into another stream.
type memberConn struct {
	net.Conn

	t        *transport
	accepted bool
	once     sync.Once

	// One goroutine reads, and one writes, and the one who accepted reads first.
	id       uint64
	known    bool
	in, out  uint32
	rest     []byte
	restBuf  []byte
	writeBuf []byte
}

const memberFrameHeader = 1 + 4 + 1 + 8 + 4

func newMemberConn(t *transport, c net.Conn) (net.Conn, error) {
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	m := &memberConn{Conn: c, t: t, id: binary.LittleEndian.Uint64(id[:]), known: true}
	_ = c.SetWriteDeadline(time.Now().Add(writeTime))
	if _, err := c.Write([]byte{streamMember}); err != nil {
		_ = m.Close()
		return nil, err
	}
	_ = c.SetWriteDeadline(time.Time{})
	return m, nil
}

func (m *memberConn) side() byte {
	if m.accepted {
		return 1
	}
	return 0
}

func (m *memberConn) Write(b []byte) (n int, err error) {
	for len(b) > 0 {
		part := b[:min(len(b), frameMost)]
		inner := make([]byte, 0, memberFrameHeader+len(part))
		inner = append(inner, kindMemberFrame)
		inner = binary.LittleEndian.AppendUint32(inner, m.t.cluster)
		inner = append(inner, m.side())
		inner = binary.LittleEndian.AppendUint64(inner, m.id)
		inner = binary.LittleEndian.AppendUint32(inner, m.out)
		inner = append(inner, part...)
		m.out++
		m.writeBuf = m.t.wrap(append(m.writeBuf[:0], 0, 0), inner)
		binary.BigEndian.PutUint16(m.writeBuf, uint16(len(m.writeBuf)-frameHeader))
		if _, err := m.Conn.Write(m.writeBuf); err != nil {
			return n, err
		}
		m.t.stats.bytesOut.Add(uint64(len(m.writeBuf)))
		n += len(part)
		b = b[len(part):]
	}
	return n, nil
}

func (m *memberConn) Read(b []byte) (int, error) {
	for len(m.rest) == 0 {
		if err := m.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(b, m.rest)
	m.rest = m.rest[n:]
	return n, nil
}

// fill reads the next frame.
func (m *memberConn) fill() error {
	var head [frameHeader]byte
	if _, err := io.ReadFull(m.Conn, head[:]); err != nil {
		return err
	}
	n := int(binary.BigEndian.Uint16(head[:]))
	if n > frameMost+memberFrameHeader+overhead {
		m.t.refuse(DropTooLarge)
		return errFrame
	}
	raw := make([]byte, n)
	if _, err := io.ReadFull(m.Conn, raw); err != nil {
		return err
	}
	m.t.stats.bytesIn.Add(uint64(frameHeader + n))
	if m.t.seal != nil {
		plain, err := m.t.seal.open(m.restBuf, raw)
		if err != nil {
			m.t.refuse(DropUnauthenticated)
			return err
		}
		m.restBuf, raw = plain[:0], plain
	} else if n > 0 && raw[0] == sealed {
		m.t.refuse(DropUnauthenticated)
		return errSeal
	}
	r := read(raw)
	kind, cluster, side, id, number := r.Byte("kind"), r.Uint32("cluster"), r.Byte("side"), r.Uint64("stream"), r.Uint32("number")
	switch {
	case r.Fault() != nil || kind != kindMemberFrame:
		m.t.refuse(DropMalformed)
		return errFrame
	case cluster != m.t.cluster:
		m.t.refuse(DropCluster)
		return errFrame
	}
	if !m.known {
		m.id, m.known = id, true
	}
	if id != m.id || side == m.side() || side > 1 || number != m.in {
		m.t.refuse(DropMalformed)
		return errFrame
	}
	if m.in == 0 && m.side() == 1 && !m.t.accepted(m.Conn, netip.AddrPort{}) {
		return errFrame
	}
	m.in++
	m.rest = r.Rest()
	return nil
}

func (m *memberConn) Close() error {
	m.once.Do(func() {
		m.t.dismiss(m.Conn)
	})
	return nil
}
