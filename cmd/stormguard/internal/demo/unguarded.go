// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// unguarded consumes as most programs do: ack, nak, and at the last delivery
// the DLQ.
type unguarded struct{}

func (unguarded) name() string { return "unguarded" }
func (unguarded) how() string  { return "Nak on error, MaxDeliver 5, then the DLQ" }
func (unguarded) look() look   { return look{} }

func (unguarded) consume(ctx context.Context, p *plumbing, handle handler) error {
	cc, err := p.consumer.Consume(func(m jetstream.Msg) {
		if ctx.Err() != nil {
			return
		}
		err := handle(ctx, m)
		if err == nil {
			_ = m.Ack()
			return
		}
		md, mdErr := m.Metadata()
		if mdErr != nil || md.NumDelivered < maxDeliver {
			_ = m.Nak()
			return
		}
		letter := nats.NewMsg(p.dlqSubject)
		letter.Data = m.Data()
		letter.Header.Set("Error", err.Error())
		if _, err := p.consumerJS.PublishMsg(ctx, letter); err != nil {
			return // unsettled at its last delivery: the ledger would call it lost
		}
		_ = m.Ack()
	},
		// nats.go's pull may stall until its heartbeat is missed twice, 30 s by
		// its default. That is not what is compared here.
		jetstream.PullHeartbeat(time.Second))
	if err != nil {
		return err
	}
	<-ctx.Done()
	cc.Drain()
	<-cc.Closed()
	return nil
}
