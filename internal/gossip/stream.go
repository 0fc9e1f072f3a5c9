// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
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
	streamRoom = 4 << 10 // of a reader: whoever connects costs that much
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
	r := bufio.NewReaderSize(c, streamRoom)
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
