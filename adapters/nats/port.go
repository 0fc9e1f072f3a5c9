// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"cmp"
	"context"
	"errors"
	"hash/maphash"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// system is messaging.system; the OTel conventions list no value for NATS.
const system = "nats"

// msgPort is the common part of the ports of both shapes: it reads and settles messages. It
// is safe for concurrent use.
type msgPort struct {
	group  string     // name of the consumer
	conn   *nats.Conn // connection of the consumer; nil if unknown
	key    func(jetstream.Msg) string
	seed   maphash.Seed
	double bool
	copies *copies // set before the first message
	log    *slog.Logger
	name   string // name of the source; "" for the consumer's name

	mu     sync.Mutex
	last   jetstream.Msg // the latest delivery, for the lag
	asked  bool          // the server answered a request for the lag since the latest delivery
	behind uint64        // the server's latest answer to a request for the lag
}

func newMsgPort(group string, conn *nats.Conn, o *options) msgPort {
	return msgPort{group: group, conn: conn, key: o.key, double: o.doubleAck, seed: maphash.MakeSeed(), log: o.log, name: o.name}
}

func (p *msgPort) Lane(m jetstream.Msg) uint64 {
	key := m.Subject()
	if p.key != nil {
		key = p.key(m)
	}
	return maphash.String(p.seed, key)
}

func (p *msgPort) Size(m jetstream.Msg) int {
	n := len(m.Data()) + len(m.Subject()) + len(m.Reply())
	for name, values := range m.Headers() {
		for _, v := range values {
			n += len(name) + len(v)
		}
	}
	return n
}

func (p *msgPort) Meta(m jetstream.Msg) guard.Meta {
	meta := guard.Meta{
		Body:    m.Data(),
		Headers: fromHeader(m.Headers()),
		Origin:  dlq.Origin{System: system, Subject: m.Subject(), Group: p.group},
		Lag:     -1,
	}
	if md, err := p.copies.of(m).Metadata(); err == nil {
		meta.Timestamp = md.Timestamp
		meta.Origin.Source, meta.Origin.Group, meta.Origin.Sequence = md.Stream, md.Consumer, md.Sequence.Stream
		meta.Deliveries = int(md.NumDelivered)
		meta.Lag = int64(md.NumPending)
	}
	return meta
}

// errEarlierStream is the error of an ack whose message is from an earlier stream.
var errEarlierStream = errors.New("nats: the message is of an earlier stream of that name")

func (p *msgPort) Ack(m jetstream.Msg) error {
	if p.copies.stale(m) {
		return errEarlierStream
	}
	latest := p.copies.of(m)
	if !p.double {
		return p.acked(m, latest.Ack())
	}
	ctx, cancel := context.WithTimeout(context.Background(), ackTimeout)
	defer cancel()
	return p.acked(m, latest.DoubleAck(ctx))
}

// acked notes the result of an ack.
func (p *msgPort) acked(m jetstream.Msg, err error) error {
	p.copies.settled(m, err == nil)
	return err
}

// took notes a message from the server, and reports whether it must be handled; see [copies].
func (p *msgPort) took(m jetstream.Msg) bool {
	p.mu.Lock()
	p.last, p.asked = m, false
	p.mu.Unlock()
	return p.copies.take(m)
}

// isBehind notes how many messages are behind the latest delivery by now.
func (p *msgPort) isBehind(n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked, p.behind = true, n
}

// Extend sends one +WPI for each message and waits for no answer. The guard calls it every
// AckWait/3. If one +WPI is lost, the next may be late by AckWait/3; if two in a row are
// lost, the next is due exactly at the deadline. The first +WPI of a message from nats.go's
// buffer comes up to AckWait/6 and [settleTime] later, and has that much less time to spare.
//
// While the connection is down, +WPIs wait in the client's reconnect buffer. A full buffer
// refuses acks, too, so Extend leaves half of it to them.
func (p *msgPort) Extend(ms []jetstream.Msg) {
	for _, m := range ms {
		if p.crowded() {
			return
		}
		_ = m.InProgress() // an error means settled, or the connection is closed: the server decides
	}
}

// crowded reports whether the connection is down and over half of its reconnect buffer is in
// use.
func (p *msgPort) crowded() bool {
	if p.conn == nil || p.conn.IsConnected() {
		return false
	}
	n, err := p.conn.Buffered()
	return err == nil && n > p.conn.Opts.ReconnectBufSize/2
}

// Flush does nothing: the connection's own flusher sends acks at once.
func (p *msgPort) Flush() error { return nil }

// Lag is the number of messages that were behind the latest delivery. While Consume does not
// pull, it is the server's latest answer to [intake.askLag]. In the passive shape it does
// not change while nothing is delivered.
func (p *msgPort) Lag() int64 {
	p.mu.Lock()
	m, asked, behind := p.last, p.asked, p.behind
	p.mu.Unlock()
	if asked {
		return int64(behind)
	}
	if m == nil {
		return -1
	}
	md, err := m.Metadata()
	if err != nil {
		return -1
	}
	return int64(md.NumPending)
}

// nakAll gives messages back in the order of the stream, by one nak each. It does not nak a
// message on its last delivery, since the server would not deliver it again: only a [Mover]
// after the AckWait, or a larger MaxDeliver, brings it back.
func (p *msgPort) nakAll(ms []jetstream.Msg, maxDeliver int) error {
	type back struct {
		m   jetstream.Msg
		seq uint64
	}
	rest := make([]back, 0, len(ms))
	last, lasts := (*jetstream.MsgMetadata)(nil), 0
	for _, m := range ms {
		if p.copies.stale(m) {
			continue
		}
		m = p.copies.of(m)
		md, err := m.Metadata()
		if err != nil {
			continue
		}
		if maxDeliver > 0 && md.NumDelivered >= uint64(maxDeliver) {
			last, lasts = md, lasts+1
			continue
		}
		rest = append(rest, back{m, md.Sequence.Stream})
	}
	if last != nil {
		p.log.Warn("messages are not delivered again: they were at their last delivery; a Mover brings them to the DLQ after the AckWait",
			"source", cmp.Or(p.name, last.Stream+"/"+last.Consumer), "messages", lasts, "max_deliver", maxDeliver,
			"help", "run guardnats.NewMover, or within the AckWait: nats consumer edit "+last.Stream+" "+last.Consumer+" --max-deliver=-1")
	}
	slices.SortFunc(rest, func(a, b back) int { return cmp.Compare(a.seq, b.seq) })
	var errs []error
	for _, b := range rest {
		if err := b.m.Nak(); err != nil && !errors.Is(err, jetstream.ErrMsgAlreadyAckd) {
			errs = append(errs, err)
			break // the connection is gone
		}
	}
	return errors.Join(errs...)
}

// fromHeader lists headers in the order of their names. The values of a name keep their order.
func fromHeader(h nats.Header) []dlq.Header {
	if len(h) == 0 {
		return nil
	}
	out := make([]dlq.Header, 0, len(h))
	for _, name := range slices.Sorted(maps.Keys(h)) {
		for _, v := range h[name] {
			out = append(out, dlq.Header{Name: name, Value: v})
		}
	}
	return out
}
