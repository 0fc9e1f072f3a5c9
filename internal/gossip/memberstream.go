// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// memberConn is a stream of memberlist's, cut into frames. Each frame is sealed and numbered, so
// that no frame can be left out, repeated, or put into another stream.
type memberConn struct {
	net.Conn

	t        *transport
	accepted bool
	once     sync.Once

	// One goroutine reads and one writes. On the accepting side a read comes first.
	id       uint64
	known    bool
	in, out  uint32
	rest     []byte // unread part of the message
	whole    bool
	readBuf  []byte
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

// Read gives memberlist one message, when all of it has come and is within bounds: memberlist
// reserves memory by the lengths in it. Nothing follows a message in its stream.
func (m *memberConn) Read(b []byte) (int, error) {
	if !m.whole {
		if err := m.gather(); err != nil {
			return 0, err
		}
		m.whole = true
	}
	if len(m.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(b, m.rest)
	m.rest = m.rest[n:]
	return n, nil
}

// gather reads frames until rest is a whole message.
func (m *memberConn) gather() error {
	var v vetted
	for {
		switch err := v.vet(m.rest, m.t.nodes); {
		case err == nil:
			m.rest = m.rest[:v.size]
			return nil
		case !errors.Is(err, errShort):
			m.t.refuse(DropMalformed)
			return err
		}
		more, err := m.fill()
		if err != nil {
			return err
		}
		m.rest = append(m.rest, more...)
	}
}

// readGrowing reads n bytes into b, which grows as they come.
func readGrowing(r io.Reader, b []byte, n int) ([]byte, error) {
	b = b[:0]
	for len(b) < n {
		part := min(n-len(b), max(len(b), 1024))
		start := len(b)
		b = slices.Grow(b, part)[:start+part]
		if _, err := io.ReadFull(r, b[start:]); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// fill reads the next frame.
func (m *memberConn) fill() (more []byte, err error) {
	var head [frameHeader]byte
	if _, err := io.ReadFull(m.Conn, head[:]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint16(head[:]))
	if n > frameMost+memberFrameHeader+overhead {
		m.t.refuse(DropTooLarge)
		return nil, errFrame
	}
	if m.readBuf, err = readGrowing(m.Conn, m.readBuf, n); err != nil {
		return nil, err
	}
	raw := m.readBuf
	m.t.stats.bytesIn.Add(uint64(frameHeader + n))
	if m.t.seal != nil {
		plain, err := m.t.seal.open(m.restBuf, raw)
		if err != nil {
			m.t.refuse(DropUnauthenticated)
			return nil, err
		}
		m.restBuf, raw = plain[:0], plain
	} else if n > 0 && raw[0] == sealed {
		m.t.refuse(DropUnauthenticated)
		return nil, errSeal
	}
	r := read(raw)
	kind, cluster, side, id, number := r.Byte("kind"), r.Uint32("cluster"), r.Byte("side"), r.Uint64("stream"), r.Uint32("number")
	switch {
	case r.Fault() != nil || kind != kindMemberFrame:
		m.t.refuse(DropMalformed)
		return nil, errFrame
	case cluster != m.t.cluster:
		m.t.refuse(DropCluster)
		return nil, errFrame
	}
	if !m.known {
		m.id, m.known = id, true
	}
	if id != m.id || side == m.side() || side > 1 || number != m.in {
		m.t.refuse(DropMalformed)
		return nil, errFrame
	}
	if m.in == 0 && m.side() == 1 && !m.t.accepted(m.Conn, netip.AddrPort{}) {
		return nil, errFrame
	}
	m.in++
	return r.Rest(), nil
}

func (m *memberConn) Close() error {
	m.once.Do(func() {
		m.t.dismiss(m.Conn)
	})
	return nil
}
