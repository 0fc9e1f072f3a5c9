// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"encoding/binary"
	mathrand "math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// outStream is the stream of packets to one address. Its queue is bounded: when the peer is slow,
// the oldest packet makes room for the newest, which says all that the old one said.
//
// Its goroutine dials, writes and dials again. It ends when no packet was sent for idleTime, and
// with the transport.
type outStream struct {
	t     *transport
	to    netip.AddrPort
	kick  chan struct{} // a packet waits
	hurry chan struct{} // the peer was heard: dial at once

	mu     sync.Mutex
	queue  [queueSlots]*datagram // guarded by mu, as the fields below
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
		// The stream has just ended because it was idle.
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

// take appends all waiting frames to b.
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

// retire ends the stream if no packet waits, or with force. It reports whether the stream has
// ended.
func (o *outStream) retire(force bool) bool {
	o.t.mu.Lock()
	defer o.t.mu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed { // another stream may have its place
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
		// The waiting packets are out of date. The session sends again what matters.
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
	var unechoed, wrote time.Duration // times of the first write without an echo and of the latest write
	for {
		var frames int
		batch, frames = o.take(batch)
		now := time.Since(began)
		alive := time.Duration(echoed.Load())
		if alive >= unechoed {
			unechoed = wrote
		}
		if unechoed > alive && now-unechoed >= echoTime {
			return false // the network takes packets, but nobody reads them
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
