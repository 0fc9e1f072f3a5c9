// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// consumeAsChild is the process that tests kill.
func consumeAsChild(child *adaptertest.Child) error {
	nc, err := nats.Connect(child.Args[0], nats.MaxReconnects(-1), nats.Timeout(connectTimeout))
	if err != nil {
		return err
	}
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(connectTimeout))
	if err != nil {
		return err
	}
	c, err := js.Consumer(context.Background(), "S", "C")
	if err != nil {
		return err
	}
	return Consume(context.Background(), child.Guard, c, func(_ context.Context, m jetstream.Msg) error {
		if child.Mutant {
			_ = m.Ack()
		}
		return child.Handle(m.Data())
	})
}

func newKills(t *testing.T, kills int) adaptertest.Kills {
	t.Helper()
	adaptertest.NotShort(t, "starts and kills processes")
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 600 * time.Millisecond})
	return adaptertest.Kills{
		Kills: kills,
		Each:  100,
		// A message in flight comes twice, and one whose ack was in the client's
		// write buffer of 32 KiB.
		Twice:   1 + 32<<10/60,
		Args:    []string{r.url()},
		Publish: func(from, to int) { r.publish(t, subject, from, to) },
		Left: func() int {
			i := r.info(t)
			return int(i.NumPending) + i.NumAckPending
		},
	}
}

func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	kills := 10
	if adaptertest.Full() {
		kills = 100
	}
	newKills(t, kills).LosesNothing(t)
}

func TestKilledProcessThatAcksFirstIsCaught(t *testing.T) {
	t.Parallel()
	newKills(t, 4).CatchesMutant(t) // it loses one in each of two outages
}
