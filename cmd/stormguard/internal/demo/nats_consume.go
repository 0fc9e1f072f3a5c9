// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/guard"
)

// unguarded acks, naks, and at the last delivery publishes to the DLQ.
func (p *natsRun) unguarded(ctx context.Context, handle handler) error {
	cc, err := p.consumer.Consume(func(m jetstream.Msg) {
		if ctx.Err() != nil {
			return
		}
		err := handle(ctx, m.Data())
		if err == nil {
			_ = m.Ack()
			return
		}
		md, mdErr := m.Metadata()
		if mdErr != nil || md.NumDelivered < maxDeliver {
			_ = m.Nak()
			return
		}
		letter := natsgo.NewMsg(p.dlqSubject)
		letter.Data = m.Data()
		letter.Header.Set("Error", err.Error())
		if _, err := p.consumerJS.PublishMsg(ctx, letter); err != nil {
			return // the message stays unsettled after its last delivery: the ledger counts it as lost
		}
		_ = m.Ack()
	},
		// nats.go's pull may stall until two heartbeats are missed, by default
		// 30 s. The demo does not compare this stall.
		jetstream.PullHeartbeat(time.Second))
	if err != nil {
		return err
	}
	<-ctx.Done()
	cc.Drain()
	<-cc.Closed()
	return nil
}

func (p *natsRun) guarded(ctx context.Context, g *guard.Guard, handle handler) error {
	letters, err := guardnats.NewDLQ(ctx, p.consumerJS, guardnats.DLQConfig{Stream: p.dlqStream, Subject: p.dlqSubject})
	if err != nil {
		return err
	}
	return guardnats.Consume(ctx, g, p.consumer, func(ctx context.Context, m jetstream.Msg) error { return handle(ctx, m.Data()) },
		guardnats.WithDeadLetters(letters), guardnats.WithStopTimeout(stopTimeout))
}
