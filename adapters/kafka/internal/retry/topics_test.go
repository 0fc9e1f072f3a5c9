// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"))
}

// newFake makes retry topics of orders, of one partition, on a cluster that can be told to
// fail.
func newFake(t *testing.T, delays ...time.Duration) (*Topics, sarama.Client, *kfake.Cluster) {
	t.Helper()
	fake, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fake.Close)
	config := sarama.NewConfig()
	config.Version = sarama.V3_6_0_0
	topics, err := New(fake.ListenAddrs(), config, Config{Sources: []string{"orders"}, Group: "billing", Delays: delays})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := topics.Close(); err != nil {
			t.Error(err)
		}
	})
	return topics, topics.reads, fake
}

// Nothing is written after Close.
func TestWriteAfterClose(t *testing.T) {
	topics, _, _ := newFake(t, time.Minute)
	if err := topics.Close(); err != nil {
		t.Fatal(err)
	}
	p := &Message{msg: &sarama.ConsumerMessage{Topic: "orders"}}
	if _, err := topics.write(t.Context(), p, "orders.billing.retry.1"); !errors.Is(err, cluster.ErrClosed) {
		t.Error(err)
	}
}

// A coordinator that has moved is looked for again.
func TestOffsetsOfACoordinatorThatMoved(t *testing.T) {
	t.Parallel()
	topics, _, fake := newFake(t, time.Hour)
	asked := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.FindCoordinator}, Observe: true, Count: -1})
	fake.ControlKey(int16(kmsg.OffsetFetch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		resp := req.ResponseKind().(*kmsg.OffsetFetchResponse)
		group := kmsg.NewOffsetFetchResponseGroup() // as version 8 has it
		group.Group, group.ErrorCode = "billing", kerr.NotCoordinator.Code
		resp.Groups = append(resp.Groups, group)
		return resp, nil, true
	})
	if _, err := topics.committed(0, []string{"orders.billing.retry.1"}); !errors.Is(err, sarama.ErrNotCoordinatorForConsumer) || asked.Hits() == 0 {
		t.Errorf("%v, asked %d times where it is", err, asked.Hits())
	}
}

// What waits for one of its key looks at times whether it is in the way of the messages
// behind it, and then follows.
func TestWaitsNoLongerThanItIsInTheWay(t *testing.T) {
	t.Parallel()
	topics, client, _ := newFake(t, time.Minute, 20*time.Minute)
	now := time.Now().UnixMilli()
	first := &Message{msg: &sarama.ConsumerMessage{Topic: "orders"}, origin: origin{key: 1}, keyed: true, level: 2, at: 0, moves: 2, notBefore: now + (20 * time.Minute).Milliseconds()}
	second := &Message{msg: &sarama.ConsumerMessage{Topic: "orders", Offset: 1}, origin: origin{offset: 1, key: 1}, keyed: true, level: 1, at: 0, moves: 1, notBefore: now}
	pt := newPartition(topics, Claim{Topic: "orders", Timeout: time.Minute, Log: slog.New(slog.DiscardHandler)})
	pt.table.load(first)
	pt.table.load(second)
	if handle, _ := pt.first(t.Context(), second); handle || second.waitUntil <= now || second.waitUntil > time.Now().Add(lookAtLast).UnixMilli() {
		t.Errorf("handle %t, waits until %d, now is %d", handle, second.waitUntil, now)
	}
	pt.mu.Lock()
	pt.levels[0].read = offsets.MaxAhead / 2
	pt.mu.Unlock()
	second.waitUntil = 0
	handle, _ := pt.first(t.Context(), second)
	n, err := client.GetOffset(pt.levels[1].name, 0, sarama.OffsetNewest)
	if handle || second.waitUntil > 0 || n != 1 || err != nil {
		t.Errorf("handle %t, waits until %d, %d records at the next level, %v", handle, second.waitUntil, n, err)
	}
}

// What waits for one that is due much later does not wait in a topic that keeps it
// no longer than its own delay: it follows.
func TestWaitsNoLongerThanItsTopicKeepsIt(t *testing.T) {
	t.Parallel()
	topics, client, _ := newFake(t, time.Minute, 24*time.Hour)
	now := time.Now().UnixMilli()
	first := &Message{msg: &sarama.ConsumerMessage{Topic: "orders"}, origin: origin{key: 1}, keyed: true, level: 2, at: 0, moves: 2, notBefore: now + (24 * time.Hour).Milliseconds()}
	second := &Message{msg: &sarama.ConsumerMessage{Topic: "orders", Offset: 1}, origin: origin{offset: 1, key: 1}, keyed: true, level: 1, at: 0, moves: 1, notBefore: now}
	pt := newPartition(topics, Claim{Topic: "orders", Timeout: time.Minute, Log: slog.New(slog.DiscardHandler)})
	end := func(topic string) int64 {
		n, err := client.GetOffset(topic, 0, sarama.OffsetNewest)
		if err != nil {
			t.Error(err)
		}
		return n
	}
	pt.table.load(first)
	pt.table.load(second)
	if handle, _ := pt.first(t.Context(), second); handle || second.waitUntil > 0 || end(pt.levels[1].name) != 1 {
		t.Errorf("handle %t, waits until %d, %d records at its level", handle, second.waitUntil, end(pt.levels[1].name))
	}
}
