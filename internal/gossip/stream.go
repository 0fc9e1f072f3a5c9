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
	frameMost   = 16 << 10 // most content bytes of a frame of memberlist's

	dialTime   = 2 * time.Second
	writeTime  = 2 * time.Second
	startTime  = 5 * time.Second  // limit for an accepted stream to identify itself
	idleTime   = 30 * time.Second // after which a stream without packets is closed
	echoEvery  = 250 * time.Millisecond
	echoTime   = 3 * time.Second // longest time that a stream may stay without an echo
	redialSoon = 100 * time.Millisecond
	redialLate = 2 * time.Second
	queueSlots = 64 // most packets that wait for a stream
	socketRoom = 128 << 10
	streamRoom = 4 << 10 // buffer of a reader: the cost of each connection
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

// await notes a stream of which nothing was read yet. If there are too many, the oldest is closed.
// A process of the fleet sends its first frame at once, so silent streams cannot keep it out.
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

// stream is an accepted stream whose first frame was right.
type stream struct {
	net.Conn

	from netip.AddrPort // of a packet stream: the address in its first frame; of a membership stream: none
}

// oneNode is the most streams of packets that one node may have: one that it uses, and those that
// it has given up but we have not.
const oneNode = 3

// accepted notes that the first frame of a stream was right. It returns false if there are too many
// such streams, or if the stream was closed meanwhile. If one node has too many, its oldest stream
// makes room.
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

// serve reads the kind of a stream and serves it. It reports whether memberlist has the stream now.
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
			t.refuse(DropMalformed) // over UDP nobody sends streams of packets
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

// receive reads packets from a stream until it ends. At most once per echoEvery it sends a byte
// back, which tells the sender that the stream is alive.
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

// hurry has a waiting stream dialed at once, because a process at its address was heard.
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

// appendStart appends the first frame of a stream of packets: the address at which this node
// listens.
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
