// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// consumeAsChild is the process that tests kill.
func consumeAsChild(child *adaptertest.Child) error {
	addrs, topic, name := child.Args[0], child.Args[1], child.Args[2]
	cfg := testConfig()
	cfg.Consumer.Group.InstanceId = "child" // the next one takes over at once
	group, err := sarama.NewConsumerGroup(strings.Split(addrs, ","), name, cfg)
	if err != nil {
		return err
	}
	h := Wrap(child.Guard, func(_ context.Context, m *sarama.ConsumerMessage) error { return child.Handle(m.Value) })
	if child.Mutant {
		h = markFirst{h}
	}
	for {
		if err := group.Consume(context.Background(), []string{topic}, h); err != nil {
			fmt.Fprintln(os.Stderr, "child: consume:", err)
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// markFirst marks a claim up to the log's end before it is handled.
type markFirst struct{ sarama.ConsumerGroupHandler }

func (h markFirst) ConsumeClaim(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
	s.MarkOffset(c.Topic(), c.Partition(), c.HighWaterMarkOffset(), "")
	s.Commit()
	return h.ConsumerGroupHandler.ConsumeClaim(s, c)
}

func newKills(t *testing.T, kills int) adaptertest.Kills {
	t.Helper()
	adaptertest.NotShort(t, "starts and kills processes")
	const partitions = 2
	r := newRig(t, partitions)
	return adaptertest.Kills{
		Kills: kills,
		Each:  400,
		// What was handled since the last commit of the two partitions, a
		// millisecond each at least, for a commit's interval and as much again for
		// the commit itself, and the marks not flushed.
		Twice: partitions * (2*100 + 64),
		Lanes: partitions,
		Args:  []string{strings.Join(r.addrs, ","), r.topic, r.group},
		Publish: func(from, to int) {
			r.publish(from, to, func(i int) int32 { return int32(i % partitions) }, nil)
		},
		Left: func() int { return int(r.pending()) },
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

func TestKilledProcessThatMarksFirstIsCaught(t *testing.T) {
	t.Parallel()
	newKills(t, 3).CatchesMutant(t)
}
