// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
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
	if len(child.Args) > 3 {
		if h, err = parkAsChild(child); err != nil {
			return err
		}
	}
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

// parkAsChild fails each 67th message for a while, for itself, and parks it.
func parkAsChild(child *adaptertest.Child) (sarama.ConsumerGroupHandler, error) {
	addrs, topic, name := strings.Split(child.Args[0], ","), child.Args[1], child.Args[2]
	letters, err := NewDLQ(addrs, testConfig(), DLQConfig{Sources: []string{topic}, NoCreate: true})
	if err != nil {
		return nil, err
	}
	retries, err := NewRetryTopics(addrs, testConfig(), RetryConfig{Sources: []string{topic}, Group: name, Delays: childDelays, NoCreate: true})
	if err != nil {
		return nil, err
	}
	return Wrap(child.Guard, func(_ context.Context, m *sarama.ConsumerMessage) error {
		if i, err := strconv.Atoi(string(m.Value)); err == nil && i%67 == 0 {
			again, err := failAgain(filepath.Join(child.Args[3], string(m.Value)))
			if err != nil || again {
				return errors.Join(err, errDown)
			}
		}
		return child.Handle(m.Value)
	}, WithPolicy(parking(2)), WithDeadLetters(letters), WithRetryTopics(retries)), nil
}

// failAgain counts the calls for a message of all processes in a file: the first
// four fail.
func failAgain(path string) (bool, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if _, err = f.WriteString("x"); err != nil {
		return false, err
	}
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	return info.Size() < 5, nil
}

var childDelays = []time.Duration{50 * time.Millisecond, 150 * time.Millisecond}

// What is parked outlives the process, in the order of its key.
func TestKilledProcessKeepsWhatIsParked(t *testing.T) {
	t.Parallel()
	kills := 3
	if adaptertest.Full() {
		kills = 12
	}
	k := newKills(t, kills)
	r := k.rig
	r.dlq(DLQConfig{Sources: []string{r.topic}})
	r.retries(childDelays...)
	k.Args = append(k.Args, t.TempDir())
	k.Each = 200
	k.Lanes = 6
	k.Publish = func(from, to int) {
		r.publish(from, to, func(i int) int32 { return int32(i % 6 % 2) }, func(i int) string { return fmt.Sprint("k", i%6) })
	}
	k.Left = func() int { return int(r.pending() + r.parkedLeft()) }
	k.LosesNothing(t)
}

// markFirst marks a claim up to the log's end before it is handled.
type markFirst struct{ sarama.ConsumerGroupHandler }

func (h markFirst) ConsumeClaim(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
	s.MarkOffset(c.Topic(), c.Partition(), c.HighWaterMarkOffset(), "")
	s.Commit()
	return h.ConsumerGroupHandler.ConsumeClaim(s, c)
}

// killing is a test of processes that are killed, and its broker.
type killing struct {
	adaptertest.Kills
	rig *rig
}

func newKills(t *testing.T, kills int) killing {
	t.Helper()
	adaptertest.NotShort(t, "starts and kills processes")
	const partitions = 2
	r := newRig(t, partitions)
	return killing{rig: r, Kills: adaptertest.Kills{
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
	}}
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
