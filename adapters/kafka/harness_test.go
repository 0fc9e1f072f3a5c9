// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

func TestMain(m *testing.M) {
	adaptertest.Main(m, adaptertest.Suite{
		Parallel: 8,
		Child:    consumeAsChild,
		Ignore:   []goleak.Option{goleak.IgnoreAnyFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick")},
	})
}

// number makes the names of topics and groups of this process its own.
var number atomic.Int64

// rig is a real broker with a topic and a group of this test's own.
type rig struct {
	t          testing.TB
	addrs      []string
	topic      string
	group      string
	also       []string // topics that its members read, too
	partitions int32
	client     sarama.Client
	admin      sarama.ClusterAdmin
	producer   sarama.SyncProducer
}

func newRig(t testing.TB, partitions int32) *rig {
	t.Helper()
	return newRigAt(t, brokers.ForTest(t, brokers.Kafka), partitions, 1)
}

func newRigAt(t testing.TB, addr string, partitions int32, replicas int16) *rig {
	t.Helper()
	name := fmt.Sprintf("t%d-%d", time.Now().UnixNano()%1e12, number.Add(1))
	r := &rig{t: t, addrs: strings.Split(addr, ","), topic: name, group: "g-" + name, partitions: partitions}
	cfg := testConfig()
	cfg.Producer.Return.Successes = true
	cfg.Producer.RequiredAcks = sarama.WaitForAll
	cfg.Producer.Idempotent = true
	cfg.Net.MaxOpenRequests = 1
	cfg.Producer.MaxMessageBytes = 4 << 20
	cfg.Producer.Partitioner = sarama.NewManualPartitioner
	var err error
	if r.client, err = sarama.NewClient(r.addrs, cfg); err != nil {
		t.Fatal(err)
	}
	if r.admin, err = sarama.NewClusterAdminFromClient(r.client); err != nil {
		t.Fatal(err)
	}
	most := "2097152"
	adaptertest.Eventually(t, "the topic can be created", func() bool {
		err = r.admin.CreateTopic(name, &sarama.TopicDetail{NumPartitions: partitions, ReplicationFactor: replicas, ConfigEntries: map[string]*string{"max.message.bytes": &most}}, false)
		return !errors.Is(err, sarama.ErrInvalidReplicationFactor) // a starved node is none for a moment
	})
	if err != nil {
		t.Fatal(err)
	}
	r.awaitTopic(name, int(partitions))
	if r.producer, err = sarama.NewSyncProducerFromClient(r.client); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.producer.Close()
		_ = r.admin.DeleteTopic(name)
		_ = r.client.Close()
	})
	return r
}

func (r *rig) awaitTopic(name string, partitions int) {
	r.t.Helper()
	adaptertest.Eventually(r.t, "the topic is there", func() bool {
		if r.client.RefreshMetadata(name) != nil {
			return false
		}
		ps, err := r.client.WritablePartitions(name)
		return err == nil && len(ps) == partitions
	})
}

// testConfig is a consumer's, quick to notice and to retry.
func testConfig() *sarama.Config {
	c := sarama.NewConfig()
	c.Version = sarama.V3_6_0_0
	c.Consumer.Offsets.Initial = sarama.OffsetOldest
	c.Consumer.Offsets.AutoCommit.Interval = 100 * time.Millisecond
	c.Consumer.Group.Session.Timeout = 6 * time.Second
	c.Consumer.Group.Heartbeat.Interval = 200 * time.Millisecond
	c.Consumer.Group.Rebalance.Timeout = 40 * time.Second
	c.Consumer.Group.Rebalance.Retry.Backoff = 100 * time.Millisecond
	c.Consumer.Retry.Backoff = 200 * time.Millisecond
	c.Consumer.MaxWaitTime = 100 * time.Millisecond
	c.Admin.Timeout = 30 * time.Second // of 3s a busy broker may need more
	c.Metadata.Retry.Max = 20
	c.Metadata.Retry.Backoff = 100 * time.Millisecond
	return c
}

func cooperativeConfig() *sarama.Config {
	c := testConfig()
	c.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{sarama.NewBalanceStrategyCooperativeSticky()}
	return c
}

// publish sends messages from to to, without to: the body is the number, key(i)
// the key, and part(i) the partition.
func (r *rig) publish(from, to int, part func(int) int32, key func(int) string) {
	r.t.Helper()
	var ms []*sarama.ProducerMessage
	send := func() {
		if len(ms) > 0 {
			if err := r.producer.SendMessages(ms); err != nil {
				r.t.Fatal(err)
			}
		}
		ms = ms[:0]
	}
	for i := from; i < to; i++ {
		m := &sarama.ProducerMessage{Topic: r.topic, Value: sarama.StringEncoder(fmt.Sprint(i))}
		if part != nil {
			m.Partition = part(i)
		}
		if key != nil {
			m.Key = sarama.StringEncoder(key(i))
		}
		if ms = append(ms, m); len(ms) == 1000 {
			send()
		}
	}
	send()
}

// end is the end of a partition's log.
func (r *rig) end(topic string, partition int32) int64 {
	r.t.Helper()
	n, err := r.client.GetOffset(topic, partition, sarama.OffsetNewest)
	if err != nil {
		r.t.Fatal(err)
	}
	return n
}

// committed is what the group has committed, -1 for nothing.
func (r *rig) committed(partition int32) int64 {
	at, _ := r.position(r.topic, partition)
	return at
}

// position is what the group has committed of a topic, -1 for nothing.
func (r *rig) position(topic string, partition int32) (offset int64, meta string) {
	resp, err := r.admin.ListConsumerGroupOffsets(r.group, map[string][]int32{topic: {partition}})
	if err != nil {
		return -1, ""
	}
	if b := resp.GetBlock(topic, partition); b != nil {
		return b.Offset, b.Metadata
	}
	return -1, ""
}

// pending is how many messages are not committed.
func (r *rig) pending() (n int64) {
	for p := range r.partitions {
		end, err := r.client.GetOffset(r.topic, p, sarama.OffsetNewest)
		if err != nil {
			return 1 << 30
		}
		if end > 0 {
			n += end - max(0, r.committed(p))
		}
	}
	return n
}

// member is one member of the rig's group, which consumes until it is stopped.
type member struct {
	t      testing.TB
	group  sarama.ConsumerGroup
	cancel context.CancelFunc
	done   chan struct{}

	mu   sync.Mutex
	errs []error
	last error // what ended it
}

// join starts a member. It ends when Setup refuses.
func (r *rig) join(cfg *sarama.Config, h sarama.ConsumerGroupHandler) *member {
	r.t.Helper()
	m, err := r.tryJoin(cfg, h)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(m.stop)
	return m
}

func (r *rig) tryJoin(cfg *sarama.Config, h sarama.ConsumerGroupHandler) (*member, error) {
	c := *cfg
	c.Consumer.Return.Errors = true
	group, err := sarama.NewConsumerGroup(r.addrs, r.group, &c)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	m := &member{t: r.t, group: group, cancel: cancel, done: make(chan struct{})}
	var reading sync.WaitGroup
	reading.Go(func() {
		for err := range group.Errors() {
			m.mu.Lock()
			m.errs = append(m.errs, err)
			m.mu.Unlock()
		}
	})
	go func() {
		defer close(m.done)
		for ctx.Err() == nil {
			err := group.Consume(ctx, append([]string{r.topic}, r.also...), h)
			if errors.Is(err, guard.ErrClosed) || errors.Is(err, ErrUnsuitable) || errors.Is(err, sarama.ErrClosedConsumerGroup) {
				m.mu.Lock()
				m.last = err
				m.mu.Unlock()
				break
			}
			if err != nil {
				select {
				case <-time.After(100 * time.Millisecond):
				case <-ctx.Done():
				}
			}
		}
		_ = group.Close()
		reading.Wait()
	}()
	return m, nil
}

func (m *member) stop() {
	m.cancel()
	select {
	case <-m.done:
	case <-time.After(50 * time.Second):
		m.t.Error("the consumer does not stop")
	}
}

func (m *member) errors() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return errors.Join(m.errs...).Error()
}

var errDown = errors.New("connection refused")
