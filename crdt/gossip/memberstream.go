// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"crypto/rand"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"
)

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
