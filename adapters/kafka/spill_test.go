// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"log/slog"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// spillHandler is a handler whose dependency may be down.
type spillHandler struct {
	down atomic.Bool

	mu  sync.Mutex
	got map[int32][]int // by partition
}

func (h *spillHandler) handle(_ context.Context, m *sarama.ConsumerMessage) error {
	if h.down.Load() {
		return guard.Unavailable(errDown)
	}
	n, err := strconv.Atoi(string(m.Value))
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.got[m.Partition] = append(h.got[m.Partition], n)
	return nil
}

func (h *spillHandler) count() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, got := range h.got {
		n += len(got)
	}
	return n
}

func newSpillHandler() *spillHandler { return &spillHandler{got: make(map[int32][]int)} }

func spillConfig(t *testing.T) guard.Config {
	return guard.Config{SpillDir: filepath.Join(t.TempDir(), "spill"), Policy: guard.Policy{Spill: true, Window: 50}}
}

func allSpilled(g *guard.Guard) (n int) {
	for _, s := range g.Sources() {
		n += s.State().Spilled
	}
	return n
}

// In an outage more than the window is committed, and after a restart it is handled in
// order.
func TestSpill(t *testing.T) {
	t.Parallel()
	const n = 400
	r := newRig(t, 2)
	cfg := spillConfig(t)
	h := newSpillHandler()
	h.down.Store(true)
	g := adaptertest.Guard(t, cfg)
	rare := testConfig()
	rare.Consumer.Offsets.AutoCommit.Interval = time.Hour
	m := r.join(rare, Wrap(g, h.handle))
	r.publish(0, n, func(i int) int32 { return int32(i % 2) }, strconv.Itoa)
	adaptertest.Eventually(t, "all spilled", func() bool { return allSpilled(g) == n })
	adaptertest.Eventually(t, "all committed at once", func() bool { return r.pending() == 0 })
	m.stop()
	if _, err := g.Close(adaptertest.Context(t)); err != nil {
		t.Error(err)
	}
	if r.pending() != 0 {
		t.Errorf("%d messages are not committed", r.pending())
	}
	h.down.Store(false)
	g = adaptertest.Guard(t, cfg)
	m = r.join(testConfig(), Wrap(g, h.handle))
	adaptertest.Eventually(t, "all handled", func() bool { return h.count() >= n })
	m.stop()
	for p, got := range h.got {
		if len(got) != n/2 || !slices.IsSorted(got) {
			t.Errorf("partition %d: %v", p, got)
		}
	}
}

// What was spilled of a partition that another process has taken over is handled by the one
// that has it on its disk.
func TestSpillOfAPartitionThatMoved(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]func() *sarama.Config{"eager": testConfig, "cooperative": cooperativeConfig} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const n = 400
			r := newRig(t, 2)
			first, second := newSpillHandler(), newSpillHandler()
			first.down.Store(true)
			g := adaptertest.Guard(t, spillConfig(t))
			r.join(config(), Wrap(g, first.handle))
			part := func(i int) int32 { return int32(i % 2) }
			r.publish(0, n, part, strconv.Itoa)
			adaptertest.Eventually(t, "all spilled", func() bool { return allSpilled(g) == n })
			g2 := adaptertest.Guard(t, spillConfig(t))
			r.join(config(), Wrap(g2, second.handle))
			adaptertest.Eventually(t, "a partition has moved", func() bool { return len(g2.Sources()) == 1 })
			adaptertest.Eventually(t, "the first still has what it spilled of both", func() bool { return allSpilled(g) == n })
			r.publish(n, n+100, part, strconv.Itoa)
			adaptertest.Eventually(t, "the second handles what is new", func() bool { return second.count() == 50 })
			first.down.Store(false)
			adaptertest.Eventually(t, "all handled", func() bool { return first.count()+second.count() >= n+100 })
			adaptertest.Eventually(t, "what was left is closed", func() bool { return len(g.Sources()) == 1 && len(g.Spilled()) == 0 })
			if first.count() != n+50 || second.count() != 50 {
				t.Errorf("the first handled %d, the second %d", first.count(), second.count())
			}
			first.mu.Lock()
			defer first.mu.Unlock()
			for p, got := range first.got {
				if len(got) < n/2 || !slices.IsSorted(got) {
					t.Errorf("partition %d: %v", p, got)
				}
			}
		})
	}
}

// What was spilled of a topic of which this process has no claim any more is handled by it.
// In a loop of the program's own nothing but the group knows the topic.
func TestSpillWithoutAClaim(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*rig, *sarama.Config, sarama.ConsumerGroupHandler) (stop func()){
		"Consume": func(r *rig, c *sarama.Config, h sarama.ConsumerGroupHandler) func() {
			group, err := sarama.NewConsumerGroup(r.addrs, r.group, c)
			if err != nil {
				r.t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error, 1)
			go func() { ended <- Consume(ctx, group, []string{r.topic}, h) }()
			return func() {
				cancel()
				if err := <-ended; err != nil {
					r.t.Error(err)
				}
			}
		},
		"a loop": func(r *rig, c *sarama.Config, h sarama.ConsumerGroupHandler) func() { return r.join(c, h).stop },
	} {
		for protocol, config := range map[string]func() *sarama.Config{"eager": stickyConfig, "cooperative": cooperativeConfig} {
			t.Run(name+", "+protocol, func(t *testing.T) {
				t.Parallel()
				const n = 200
				r, foreign := newRig(t, 1), newRig(t, 1)
				cfg := spillConfig(t)
				h, of := newSpillHandler(), newSpillHandler()
				h.down.Store(true)
				of.down.Store(true)
				g := adaptertest.Guard(t, cfg)
				m, mf := r.join(config(), Wrap(g, h.handle)), foreign.join(config(), Wrap(g, of.handle))
				for _, r := range []*rig{r, foreign} {
					r.publish(0, n, func(int) int32 { return 0 }, strconv.Itoa)
				}
				adaptertest.Eventually(t, "all spilled", func() bool { return allSpilled(g) == 2*n })
				m.stop()
				mf.stop()
				if _, err := g.Close(adaptertest.Context(t)); err != nil {
					t.Error(err)
				}
				other := adaptertest.Guard(t, spillConfig(t))
				r.join(config(), Wrap(other, newSpillHandler().handle))
				adaptertest.Eventually(t, "another process has the partition", func() bool { return len(other.Sources()) == 1 })

				h.down.Store(false)
				of.down.Store(false)
				g = adaptertest.Guard(t, cfg)
				stop := start(r, config(), Wrap(g, h.handle))
				adaptertest.Eventually(t, "all handled", func() bool { return h.count() == n })
				adaptertest.Eventually(t, "the other has the partition", func() bool { return len(other.Sources()) == 1 })
				stop()
				if got := h.got[0]; !slices.IsSorted(got) || len(got) != n {
					t.Errorf("handled %v", got)
				}
				if left := g.Spilled()[foreign.topic+"/0"]; left != n || of.count() > 0 {
					t.Errorf("of %d messages of a topic that the group does not read %d wait, and %d were handled", n, left, of.count())
				}
			})
		}
	}
}

func stickyConfig() *sarama.Config {
	c := testConfig()
	c.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{sarama.NewBalanceStrategySticky()}
	return c
}

// allBut is a strategy by which one member gets all partitions but those of a topic.
type allBut string

func (allBut) Name() string { return "all-but" }
func (a allBut) Plan(members map[string]sarama.ConsumerGroupMemberMetadata, topics map[string][]int32) (sarama.BalanceStrategyPlan, error) {
	plan := sarama.BalanceStrategyPlan{}
	for topic, partitions := range topics {
		if topic != string(a) {
			plan.Add(slices.Min(slices.Collect(maps.Keys(members))), topic, partitions...)
		}
	}
	return plan, nil
}

func (allBut) AssignmentData(string, map[string][]int32, int32) ([]byte, error) { return nil, nil }

// lookedAt counts the looks of a session with one claim.
type lookedAt struct {
	sarama.Client
	n atomic.Int64
}

func (l *lookedAt) GetOffset(topic string, partition int32, at int64) (int64, error) {
	l.n.Add(1)
	return l.Client.GetOffset(topic, partition, at)
}

// The group is asked for the topics until it answers, and once in a session, though the spill
// has something of other topics. A second failure in a row is said once. A handler that cannot
// spill does not ask.
func TestTopicsAreAskedOnceInASession(t *testing.T) {
	t.Parallel()
	const n = 100
	fake, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "t", "foreign", "more"))
	if err != nil {
		t.Fatal(err)
	}
	defer fake.Close()
	var asked, failing atomic.Int64
	failing.Store(4)
	fake.ControlKey(int16(kmsg.DescribeGroups), func(req kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		if groups := req.(*kmsg.DescribeGroupsRequest).Groups; !slices.Contains(groups, "g") || asked.Add(1) > failing.Load() {
			return nil, nil, false //nolint:nilnil // the cluster answers
		}
		resp := req.ResponseKind().(*kmsg.DescribeGroupsResponse)
		g := kmsg.NewDescribeGroupsResponseGroup()
		g.Group, g.ErrorCode = "g", kerr.CoordinatorLoadInProgress.Code
		resp.Groups = append(resp.Groups, g)
		return resp, nil, true
	})
	rigOf := func(topic, group string) *rig {
		r := &rig{t: t, addrs: fake.ListenAddrs(), topic: topic, group: group, partitions: 1}
		cfg := testConfig()
		cfg.Producer.Return.Successes = true
		if r.producer, err = sarama.NewSyncProducer(r.addrs, cfg); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = r.producer.Close() })
		return r
	}
	r, foreign := rigOf("t", "g"), rigOf("foreign", "f")
	cfg := spillConfig(t)
	h, of := newSpillHandler(), newSpillHandler()
	h.down.Store(true)
	of.down.Store(true)
	g := adaptertest.Guard(t, cfg)
	m, mf := r.join(testConfig(), Wrap(g, h.handle)), foreign.join(testConfig(), Wrap(g, of.handle))
	r.publish(0, n, nil, strconv.Itoa)
	foreign.publish(0, n, nil, strconv.Itoa)
	adaptertest.Eventually(t, "all spilled", func() bool { return allSpilled(g) == 2*n })
	m.stop()
	mf.stop()
	if _, err := g.Close(adaptertest.Context(t)); err != nil {
		t.Error(err)
	}
	if asked.Load() > 0 {
		t.Errorf("a group was asked %d times for nothing", asked.Load())
	}

	h.down.Store(false)
	g = adaptertest.Guard(t, cfg)
	var log logged
	few := testConfig()
	few.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{allBut("t")}
	few.Consumer.Offsets.AutoCommit.Interval = time.Millisecond
	client, err := sarama.NewClient(r.addrs, few)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	looks := &lookedAt{Client: client}
	often := func(o *options) { o.client, o.lookEvery = looks, 10*time.Millisecond }
	more := func() {
		before := looks.n.Load()
		adaptertest.Eventually(t, "further looks", func() bool { return looks.n.Load() > before+5 })
	}
	r.also = []string{"more"}
	passive := rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		for m := range c.Messages() {
			s.MarkMessage(m, "")
		}
		return nil
	}}
	m = r.join(few, WrapHandler(g, passive, often, WithPolicy(guard.Policy{})))
	more()
	m.stop()
	if asked.Load() > 0 {
		t.Errorf("a handler that cannot spill asked %d times", asked.Load())
	}
	m = r.join(few, Wrap(g, h.handle, often, WithLogger(slog.New(slog.NewTextHandler(&log, nil)))))
	adaptertest.Eventually(t, "all handled", func() bool { return h.count() == n })
	more()
	m.stop()
	if a, w := asked.Load(), log.count("level=WARN"); a != failing.Load()+1 || w != 1 || !log.has("group=g") {
		t.Errorf("%d times asked, %d lines:\n%s", a, w, log.buf.String())
	}
	if got := h.got[0]; !slices.IsSorted(got) || len(got) != n || of.count() > 0 {
		t.Errorf("handled %v, and %d of a topic that the group does not read", got, of.count())
	}
}

// Two members of one process do not wait for each other: what one handles of a partition
// that it does not have gives way to the claim of the other, also in an outage.
func TestSpillOfTwoMembers(t *testing.T) {
	t.Parallel()
	const n, more = 200, 100
	r := newRig(t, 2)
	cfg := spillConfig(t)
	h := newSpillHandler()
	h.down.Store(true)
	g := adaptertest.Guard(t, cfg)
	m := r.join(testConfig(), Wrap(g, h.handle))
	part := func(i int) int32 { return int32(i % 2) }
	r.publish(0, n, part, strconv.Itoa)
	adaptertest.Eventually(t, "all spilled", func() bool { return allSpilled(g) == n })
	m.stop()
	if _, err := g.Close(adaptertest.Context(t)); err != nil {
		t.Error(err)
	}
	g = adaptertest.Guard(t, cfg)
	r.join(testConfig(), Wrap(g, h.handle))
	r.join(testConfig(), Wrap(g, h.handle))
	r.publish(n, n+more, part, strconv.Itoa)
	adaptertest.Eventually(t, "both read on in the outage", func() bool { return allSpilled(g) == n+more })
	h.down.Store(false)
	adaptertest.Eventually(t, "all handled", func() bool { return h.count() >= n+more })
	h.mu.Lock()
	defer h.mu.Unlock()
	for p, got := range h.got {
		if len(got) != (n+more)/2 || !slices.IsSorted(got) {
			t.Errorf("partition %d: %v", p, got)
		}
	}
}

// A message is the same after it was in the spill.
func TestSpilledMessage(t *testing.T) {
	t.Parallel()
	c := &claim{}
	at := time.UnixMilli(1_700_000_000_123_000) // microseconds, taken for milliseconds
	for _, m := range []*sarama.ConsumerMessage{
		{
			Topic: "t", Partition: 3, Offset: 1 << 40, Timestamp: at, BlockTimestamp: at.Add(time.Second), Key: []byte{0, 255}, Value: []byte("v"),
			Headers: []*sarama.RecordHeader{{Key: []byte("k"), Value: []byte{0xff}}, {Key: []byte{}, Value: nil}, {Key: []byte("k"), Value: []byte{}}},
		},
		{Topic: "t", Key: nil, Value: nil},
		{Topic: "t", Key: []byte{}, Value: []byte{}},
	} {
		head, body, err := c.Spill(m)
		if err != nil {
			t.Fatal(err)
		}
		got, err := c.Unspill(head, slices.Clip(append([]byte{}, body...)))
		if err != nil {
			t.Fatal(err)
		}
		if !got.Timestamp.Equal(m.Timestamp) || !got.BlockTimestamp.Equal(m.BlockTimestamp) {
			t.Errorf("got %v and %v, want %v and %v", got.Timestamp, got.BlockTimestamp, m.Timestamp, m.BlockTimestamp)
		}
		got.Timestamp, got.BlockTimestamp = m.Timestamp, m.BlockTimestamp
		if !reflect.DeepEqual(got, m) {
			t.Errorf("got  %+v\nwant %+v", got, m)
		}
	}
	if _, err := c.Unspill([]byte("{"), nil); err == nil {
		t.Error("what is no message was read")
	}
}
