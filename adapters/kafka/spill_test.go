// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"

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
func TestSpillWithoutAClaim(t *testing.T) {
	t.Parallel()
	const n = 200
	r := newRig(t, 1)
	sticky := testConfig()
	sticky.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{sarama.NewBalanceStrategySticky()}
	cfg := spillConfig(t)
	h := newSpillHandler()
	h.down.Store(true)
	g := adaptertest.Guard(t, cfg)
	m := r.join(sticky, Wrap(g, h.handle))
	r.publish(0, n, func(int) int32 { return 0 }, strconv.Itoa)
	adaptertest.Eventually(t, "all spilled", func() bool { return allSpilled(g) == n })
	m.stop()
	if _, err := g.Close(adaptertest.Context(t)); err != nil {
		t.Error(err)
	}
	other := adaptertest.Guard(t, spillConfig(t))
	r.join(sticky, Wrap(other, newSpillHandler().handle))
	adaptertest.Eventually(t, "another process has the partition", func() bool { return len(other.Sources()) == 1 })

	h.down.Store(false)
	g = adaptertest.Guard(t, cfg)
	group, err := sarama.NewConsumerGroup(r.addrs, r.group, sticky)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Consume(ctx, group, []string{r.topic}, Wrap(g, h.handle)) }()
	adaptertest.Eventually(t, "all handled", func() bool { return h.count() == n })
	adaptertest.Eventually(t, "the other has the partition", func() bool { return len(other.Sources()) == 1 })
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if got := h.got[0]; !slices.IsSorted(got) || len(got) != n {
		t.Errorf("handled %v", got)
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
