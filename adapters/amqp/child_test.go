// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"io"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// consumeAsChild is the process that tests kill.
func consumeAsChild(child *adaptertest.Child) error {
	url, queue := child.Args[0], child.Args[1]
	handle := func(_ context.Context, d amqp091.Delivery) error { return child.Handle(d.Body) }
	if child.Mutant {
		return ackFirst(url, queue, handle)
	}
	return Consume(context.Background(), child.Guard, Dial(url), queue, handle, WithPrefetch(50))
}

// ackFirst is a consumer that does it wrong.
func ackFirst(url, queue string, handle func(context.Context, amqp091.Delivery) error) error {
	conn, err := amqp091.Dial(url)
	if err != nil {
		return err
	}
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	in, err := ch.Consume(queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for d := range in {
		if err := d.Ack(false); err != nil {
			return err
		}
		_ = handle(context.Background(), d)
	}
	return io.EOF
}

// The message in flight comes twice, and those whose acks were coalesced (64 at
// most) or in the broker's pipeline.
const perKill = 1 + 64 + 32

func newKills(t *testing.T, s *server, kills int) adaptertest.Kills {
	t.Helper()
	adaptertest.NotShort(t, "starts and kills processes")
	r := newRig(t, s, Quorum, amqp091.Table{"x-delivery-limit": int64(10 * kills)})
	return adaptertest.Kills{
		Kills:   kills,
		Each:    100,
		Twice:   perKill,
		Args:    []string{r.url(), r.queue},
		Publish: r.publish,
		Left: func() int {
			k, err := r.ready()
			if err != nil {
				return -1
			}
			return k
		},
	}
}

func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		kills := 5
		if adaptertest.Full() {
			kills = 100
		}
		newKills(t, s, kills).LosesNothing(t)
	})
}

func TestKilledProcessThatAcksFirstIsCaught(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) { newKills(t, s, 3).CatchesMutant(t) })
}
