// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"sync"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// lines are the connections of a dialer. It reads along what passes on them,
// keeps the broker's books, and can cut them without a word.
type lines struct {
	mu     sync.Mutex
	open   map[*line]bool
	seen   books
	faults []error
	refuse error // of writes with an ack
}

// refuseAcks makes writes fail that carry an ack, until it is called with nil.
func (l *lines) refuseAcks(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refuse = err
}

// books is what passed in all.
type books struct {
	delivered, acked int // deliveries
	ackFrames        int
	nacks, rejects   int
	flows, cancels   int
	prefetch         []int // of each basic.qos
}

func (l *lines) dialer(urls ...string) Dialer {
	return Dialer{URLs: urls, MaxPause: 200 * time.Millisecond, Config: amqp091.Config{Dial: l.dial}}
}

func (l *lines) dial(network, addr string) (net.Conn, error) {
	c, err := net.Dial(network, addr)
	if err != nil {
		return nil, err
	}
	n := &line{Conn: c, all: l, out: make(map[uint16]map[uint64]bool)}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = make(map[*line]bool)
	}
	l.open[n] = true
	return n, nil
}

// cut closes all connections.
func (l *lines) cut() {
	l.mu.Lock()
	open := l.open
	l.open = nil
	l.mu.Unlock()
	for n := range open {
		_ = n.Conn.Close()
	}
}

// unacked is how many deliveries the broker waits for.
func (l *lines) unacked() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range l.open {
		for _, tags := range line.out {
			n += len(tags)
		}
	}
	return n
}

func (l *lines) books() books {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen
}

// prefetch is the latest, 0 before the first.
func (l *lines) prefetch() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.seen.prefetch) == 0 {
		return 0
	}
	return l.seen.prefetch[len(l.seen.prefetch)-1]
}

// check reports what must never be on the wire: a settlement of a delivery that
// is not out, a nack, flow control.
func (l *lines) check() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	errs := l.faults
	if l.seen.nacks > 0 || l.seen.flows > 0 {
		errs = append(errs, fmt.Errorf("%d nacks, %d flows on the wire", l.seen.nacks, l.seen.flows))
	}
	return errors.Join(errs...)
}

// line is one connection.
type line struct {
	net.Conn
	all *lines
	out map[uint16]map[uint64]bool // by channel: deliveries that are out

	in, sent frames // what was read and written, up to the last whole frame
}

func (n *line) Read(p []byte) (int, error) {
	k, err := n.Conn.Read(p)
	n.all.mu.Lock()
	defer n.all.mu.Unlock()
	n.in.feed(p[:k], n.received)
	if err != nil {
		delete(n.all.open, n)
	}
	return k, err
}

func (n *line) Write(p []byte) (int, error) {
	n.all.mu.Lock()
	refused := error(nil)
	n.sent.feed(p, func(ch uint16, method uint32, args []byte) {
		if method == basicAck && n.all.refuse != nil || refused != nil {
			refused = n.all.refuse
			return
		}
		n.written(ch, method, args)
	})
	n.all.mu.Unlock()
	if refused != nil {
		_ = n.Close()
		return 0, refused
	}
	return n.Conn.Write(p)
}

func (n *line) Close() error {
	n.all.mu.Lock()
	delete(n.all.open, n)
	n.all.mu.Unlock()
	return n.Conn.Close()
}

// The methods, as class<<16 | method.
const (
	channelClose   = 20<<16 | 40
	channelCloseOK = 20<<16 | 41
	channelFlow    = 20<<16 | 20
	basicQos       = 60<<16 | 10
	basicCancel    = 60<<16 | 30
	basicDeliver   = 60<<16 | 60
	basicGetOK     = 60<<16 | 71
	basicAck       = 60<<16 | 80
	basicReject    = 60<<16 | 90
	basicNack      = 60<<16 | 120
)

func (n *line) received(ch uint16, method uint32, args []byte) {
	switch method {
	case basicDeliver:
		n.delivered(ch, binary.BigEndian.Uint64(args[1+int(args[0]):]))
	case basicGetOK:
		n.delivered(ch, binary.BigEndian.Uint64(args))
	case channelClose, channelCloseOK:
		delete(n.out, ch)
	default:
	}
}

func (n *line) delivered(ch uint16, tag uint64) {
	if n.out[ch] == nil {
		n.out[ch] = make(map[uint64]bool)
	}
	n.out[ch][tag] = true
	n.all.seen.delivered++
}

func (n *line) written(ch uint16, method uint32, args []byte) {
	b := &n.all.seen
	switch method {
	case channelFlow:
		b.flows++
	case basicCancel:
		b.cancels++
	case basicQos:
		b.prefetch = append(b.prefetch, int(binary.BigEndian.Uint16(args[4:])))
	case basicAck, basicReject, basicNack:
		tag := binary.BigEndian.Uint64(args)
		multiple := method != basicReject && args[8]&1 != 0
		if !n.out[ch][tag] {
			n.all.faults = append(n.all.faults, fmt.Errorf("delivery %d on channel %d was settled (method %d, multiple %t) and was not out", tag, ch, method&0xffff, multiple))
			return
		}
		was := len(n.out[ch])
		maps.DeleteFunc(n.out[ch], func(t uint64, _ bool) bool { return t == tag || multiple && t < tag })
		switch method {
		case basicAck:
			b.ackFrames++
			b.acked += was - len(n.out[ch])
		case basicReject:
			b.rejects++
		default:
			b.nacks++
		}
	default:
	}
}

// frames cuts a stream into frames and shows those of methods.
type frames struct{ rest []byte }

func (f *frames) feed(p []byte, show func(ch uint16, method uint32, args []byte)) {
	f.rest = append(f.rest, p...)
	at := 0
	for {
		b := f.rest[at:]
		if len(b) >= 8 && string(b[:4]) == "AMQP" {
			at += 8
			continue
		}
		if len(b) < 8 {
			break
		}
		size := int(binary.BigEndian.Uint32(b[3:]))
		if len(b) < size+8 {
			break
		}
		if b[0] == 1 && size >= 4 {
			show(binary.BigEndian.Uint16(b[1:]), binary.BigEndian.Uint32(b[7:]), b[11:7+size])
		}
		at += size + 8
	}
	f.rest = append(f.rest[:0], f.rest[at:]...)
}
