// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// channelEpoch scopes delivery tags to one channel: once it has ended, they mean nothing.
//
// latch holds the channel's close event and is never read. The client puts the event there before
// anything else can happen to the channel. In particular that is before the client's recovery opens
// another channel under the same name, in which the tags begin at 1 again.
type channelEpoch struct {
	ch    *amqp091.Channel
	latch chan *amqp091.Error
	over  atomic.Bool
}

// newChannelEpoch begins the life of a channel's tags. closed gets the channel's end, too.
func newChannelEpoch(ch *amqp091.Channel) (l *channelEpoch, closed <-chan *amqp091.Error) {
	l = &channelEpoch{ch: ch, latch: make(chan *amqp091.Error, 1)}
	ch.NotifyClose(l.latch)
	return l, ch.NotifyClose(make(chan *amqp091.Error, 1))
}

// ended tells whether the tags are no longer valid.
func (l *channelEpoch) ended() bool {
	return l == nil || l.over.Load() || len(l.latch) > 0 || l.ch.IsClosed()
}

// meta describes deliveries for the ports of both shapes.
type meta struct {
	queue string
	mark  string // prefix of the ids of messages that have none; unique to this epoch
	key   func(amqp091.Delivery) string
	seed  maphash.Seed
}

func newMeta(queue string, o *options) meta {
	return meta{queue: queue, mark: fmt.Sprintf("sg-%016x-", rand.Uint64()), key: o.key, seed: maphash.MakeSeed()}
}

func (p *meta) lane(d *amqp091.Delivery) uint64 {
	key := d.RoutingKey
	if p.key != nil {
		key = p.key(*d)
	}
	return maphash.String(p.seed, key)
}

// size leaves the headers out: to measure them would cost more than it gains.
func size(d *amqp091.Delivery) int { return len(d.Body) + len(d.RoutingKey) + 512 }

// id returns the message's own id, or one that is made for its time in this process.
func (p *meta) id(d *amqp091.Delivery) string {
	if d.MessageId != "" {
		return d.MessageId
	}
	return p.mark + strconv.FormatUint(d.DeliveryTag, 10)
}

func (p *meta) describe(d *amqp091.Delivery) guard.Meta {
	m := guard.Meta{
		Body: d.Body, Headers: fromTable(d.Headers), Properties: fromProperties(d), Timestamp: brokerTime(d),
		Origin: dlq.Origin{
			System: system, Source: p.queue, Subject: d.RoutingKey, Exchange: d.Exchange, MessageID: p.id(d),
		},
		Deliveries: deliveries(d.Headers), Redelivered: d.Redelivered, Lag: -1,
	}
	if nameless(d) {
		m.Redelivered = m.Redelivered || d.MessageId != "" // a made id means that the message is from the spill
		headers, properties := m.Headers, m.Properties
		m.Content = func() string { return content(d, properties, headers) }
	}
	return m
}

// nameless tells whether the publisher gave a message no id.
func nameless(d *amqp091.Delivery) bool { return d.MessageId == "" || d.Acknowledger == madeID{} }

// content is a hash of what is the same in each delivery of a message. It leaves out the broker's
// counts.
func content(d *amqp091.Delivery, properties, headers []dlq.Header) string {
	h := fnv.New128a()
	fmt.Fprintf(h, "%q %q %d ", d.Exchange, d.RoutingKey, d.Timestamp.Unix())
	for _, all := range [][]dlq.Header{properties, headers} {
		for _, header := range all {
			if header.Name != deliveryCount && header.Name != acquiredCount {
				fmt.Fprintf(h, "%q=%q ", header.Name, header.Value)
			}
		}
	}
	_, _ = h.Write(d.Body)
	return hex.EncodeToString(h.Sum(nil))
}

// port is the port of the function shape: one channel with one consumer at a time, so that all tags
// on it are ours.
type port struct {
	meta
	acker
	rejects *rejects // nil unless dead letters are rejected

	back  sync.Mutex         // guards given and lasts. Lock order: back, then tags.mu
	given []amqp091.Delivery // messages that the source gave back at its end
	lasts []amqp091.Delivery // deliveries that are the last of their messages; some are settled
}

// rememberLast remembers a delivery that is the last of its message.
func (p *port) rememberLast(d amqp091.Delivery) {
	p.back.Lock()
	defer p.back.Unlock()
	if len(p.lasts) == cap(p.lasts) {
		p.lasts = slices.DeleteFunc(p.lasts, func(d amqp091.Delivery) bool { return !p.tags.isOpen(d.DeliveryTag) })
	}
	p.lasts = append(p.lasts, d)
}

func newPort(queue string, o *options) *port {
	p := &port{meta: newMeta(queue, o)}
	p.begin(ackDelay)
	return p
}

func (p *port) Lane(d amqp091.Delivery) uint64 { return p.lane(&d) }
func (p *port) Size(d amqp091.Delivery) int    { return size(&d) }

// Meta describes a delivery. If dead letters are rejected, it adds the delivery's name for
// [rejects].
func (p *port) Meta(d amqp091.Delivery) guard.Meta {
	m := p.describe(&d)
	if p.rejects != nil {
		m.Properties = append(m.Properties, dlq.Header{Name: rejectProperty, Value: reject{p.mark, d.DeliveryTag}.String()})
	}
	return m
}

// Ack settles a delivery. Flush sends the ack.
func (p *port) Ack(d amqp091.Delivery) error {
	if p.life.Load().ended() {
		return errChannelGone
	}
	if p.rejects != nil && p.rejects.take(reject{p.mark, d.DeliveryTag}) {
		return p.reject(d.DeliveryTag)
	}
	ok, due, _ := p.tags.settle(d.DeliveryTag, tagSettled)
	if !ok {
		return errSettled
	}
	p.wait(due)
	return nil
}

// Flush sends the acks of settled deliveries.
func (p *port) Flush() error { return p.flush() }

// Extend does nothing: a consumer_timeout cannot be extended.
func (p *port) Extend([]amqp091.Delivery) {}

// Return leaves messages to the channel's end, which puts them back in their order, except those
// that [epoch.rescue] takes out. A requeue would put a message at the tail of a quorum queue
// without a limit.
func (p *port) Return(ds []amqp091.Delivery, _ guard.Reason) error {
	p.back.Lock()
	defer p.back.Unlock()
	p.given = ds
	return nil
}

// Demand does nothing: the prefetch is the window.
func (p *port) Demand(int) {}
