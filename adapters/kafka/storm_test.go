// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// ledger is what all members of a test's group handled, in one order.
type ledger struct {
	mu       sync.Mutex
	seen     map[int]int       // by number
	next     map[int32]int64   // the offset that is first handled next, by partition
	keys     map[string]int    // the highest number, by key
	busy     map[string]int    // calls under way, by what keeps order
	disorder []string          // what came out of order
	times    map[int]time.Time // first handled
	order    func(*sarama.ConsumerMessage) string
}

func newLedger(order guard.Order) *ledger {
	l := &ledger{seen: map[int]int{}, next: map[int32]int64{}, keys: map[string]int{}, busy: map[string]int{}, times: map[int]time.Time{}}
	l.order = func(m *sarama.ConsumerMessage) string { return fmt.Sprint(m.Partition) }
	if order == guard.OrderKey {
		l.order = func(m *sarama.ConsumerMessage) string { return string(m.Key) }
	}
	return l
}

// begin and end enclose a handler call; end is for one that succeeds.
func (l *ledger) begin(m *sarama.ConsumerMessage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy[l.order(m)]++; l.busy[l.order(m)] > 1 {
		l.disorder = append(l.disorder, fmt.Sprintf("two calls at once for %s", l.order(m)))
	}
}

func (l *ledger) leave(m *sarama.ConsumerMessage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy[l.order(m)]--
}

func (l *ledger) end(m *sarama.ConsumerMessage, order guard.Order) {
	i, err := strconv.Atoi(string(m.Value))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy[l.order(m)]--
	if err != nil {
		l.disorder = append(l.disorder, err.Error())
		return
	}
	if l.seen[i]++; l.seen[i] > 1 {
		return
	}
	l.times[i] = time.Now()
	switch order {
	case guard.OrderSource:
		if m.Offset != l.next[m.Partition] {
			l.disorder = append(l.disorder, fmt.Sprintf("%d/%d handled, want %d", m.Partition, m.Offset, l.next[m.Partition]))
		}
		l.next[m.Partition] = max(l.next[m.Partition], m.Offset+1)
	case guard.OrderKey:
		if was, ok := l.keys[string(m.Key)]; ok && was > i {
			l.disorder = append(l.disorder, fmt.Sprintf("key %s: %d after %d", m.Key, i, was))
		}
		l.keys[string(m.Key)] = i
	default:
	}
}

func (l *ledger) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.seen)
}

// check wants all of n messages, in order.
func (l *ledger) check(t *testing.T, n int) (twice int) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.seen {
		twice += k - 1
	}
	if len(l.seen) != n {
		t.Errorf("%d lost of %d", n-len(l.seen), n)
	}
	if len(l.disorder) > 0 {
		t.Errorf("%d times out of order, such as %s", len(l.disorder), l.disorder[0])
	}
	return twice
}

// handler succeeds after a moment, and fails one call in 50.
func (l *ledger) handler(order guard.Order) func(context.Context, *sarama.ConsumerMessage) error {
	return func(ctx context.Context, m *sarama.ConsumerMessage) error {
		l.begin(m)
		work := time.NewTimer(time.Duration(rand.IntN(int(2 * time.Millisecond))))
		defer work.Stop()
		select {
		case <-work.C:
		case <-ctx.Done():
			l.leave(m)
			return context.Cause(ctx)
		}
		if rand.IntN(50) == 0 {
			l.leave(m)
			return errDown
		}
		l.end(m, order)
		return nil
	}
}

func key(i int) string { return "k" + strconv.Itoa(i%37) }

// A member that comes and goes every 2 s loses nothing and disorders nothing,
// whichever protocol moves the partitions, and whatever keeps its order.
func TestRebalanceStorm(t *testing.T) {
	t.Parallel()
	period := 6 * time.Second
	if adaptertest.Full() {
		period = 60 * time.Second
	}
	for _, c := range []struct {
		name    string
		cfg     func() *sarama.Config
		order   guard.Order
		workers int
	}{
		{"eager, partition", testConfig, guard.OrderSource, 1},
		{"eager, key", testConfig, guard.OrderKey, 4},
		{"cooperative, partition", cooperativeConfig, guard.OrderSource, 1},
		{"cooperative, key", cooperativeConfig, guard.OrderKey, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			const partitions = 4
			r := newRig(t, partitions)
			l := newLedger(c.order)
			policy := guard.Policy{
				Order: c.order, Workers: c.workers, Timeout: 5 * time.Second,
				Retry: guard.Retry{Base: time.Millisecond, Max: 5 * time.Millisecond}, Ramp: guard.Ramp{Off: true},
			}
			joins := func() *member {
				// Each has a Guard of its own, as in a process of its own.
				return r.join(c.cfg(), Wrap(adaptertest.Guard(t, guard.Config{}), l.handler(c.order), WithPolicy(policy), WithLogger(adaptertest.Log())))
			}
			steady := joins()
			published, moves := 0, 0
			part := func(i int) int32 { return int32(i % 37 % partitions) }
			var guest *member
			begun := time.Now()
			for next := begun; time.Since(begun) < period; time.Sleep(50 * time.Millisecond) {
				r.publish(published, published+50, part, key)
				published += 50
				if time.Now().After(next) {
					if next = next.Add(2 * time.Second); guest == nil {
						guest = joins()
					} else {
						guest.stop()
						guest = nil
					}
					moves++
				}
			}
			adaptertest.Eventually(t, "all handled and committed", func() bool { return l.count() == published && r.pending() == 0 })
			twice := l.check(t, published)
			if guest != nil {
				guest.stop()
			}
			steady.stop()
			t.Logf("%d messages, %d rebalances at least: %d handled twice", published, moves, twice)
		})
	}
}

// A broker that is killed and comes back costs nothing but time.
func TestKilledBrokerLosesNothing(t *testing.T) {
	t.Parallel()
	kills := 1
	if adaptertest.Full() {
		kills = 10
	}
	b := brokers.StartForTest(t, brokers.Kafka, brokers.Options{})
	r := newRigAt(t, b.Addr(), 2, 1)
	l := newLedger(guard.OrderSource)
	m := r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), l.handler(guard.OrderSource), WithLogger(adaptertest.Log()),
		WithPolicy(guard.Policy{Retry: guard.Retry{Base: time.Millisecond, Max: 5 * time.Millisecond}, Ramp: guard.Ramp{Off: true}})))
	const each = 1500
	published := 0
	for range kills {
		r.publish(published, published+each, func(i int) int32 { return int32(i % 2) }, nil)
		before := l.count()
		published += each
		adaptertest.Eventually(t, "some are handled", func() bool { return l.count() > before+100 })
		if err := b.Kill(adaptertest.Context(t), 0); err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * time.Millisecond)
		if err := b.Restart(adaptertest.Context(t)); err != nil {
			t.Fatal(err)
		}
	}
	adaptertest.Eventually(t, "all handled and committed", func() bool { return l.count() == published && r.pending() == 0 })
	twice := l.check(t, published)
	m.stop()
	t.Logf("%d kills of the broker, %d messages: %d handled twice", kills, published, twice)
}

// Leaders move when their broker is killed; order and every message survive.
func TestLeaderMoves(t *testing.T) {
	t.Parallel()
	b := brokers.StartForTest(t, brokers.Kafka, brokers.Options{Nodes: 3})
	r := newRigAt(t, b.Addr(), 3, 3)
	l := newLedger(guard.OrderSource)
	m := r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), l.handler(guard.OrderSource), WithLogger(adaptertest.Log()),
		WithPolicy(guard.Policy{Retry: guard.Retry{Base: time.Millisecond, Max: 5 * time.Millisecond}, Ramp: guard.Ramp{Off: true}})))
	letters := r.dlq(DLQConfig{Sources: []string{r.topic}})
	part := func(i int) int32 { return int32(i % 3) }
	published := 0
	rounds := 1
	if adaptertest.Full() {
		rounds = 6
	}
	for i := range rounds {
		r.publish(published, published+1500, part, nil)
		before := l.count()
		published += 1500
		adaptertest.Eventually(t, "some are handled", func() bool { return l.count() > before+100 })
		node := i%3 + 1
		leader, err := r.client.Leader(r.topic, int32(i%3))
		if err == nil {
			node = int(leader.ID())
		}
		if err := b.Kill(adaptertest.Context(t), node); err != nil {
			t.Fatal(err)
		}
		rec := letterOf(r.topic, int64(i))
		adaptertest.Eventually(t, "a dead letter is written meanwhile", func() bool { return letters.Write(adaptertest.Context(t), rec) == nil })
		adaptertest.Eventually(t, "all are handled without it", func() bool { return l.count() == published })
		if err := b.Restart(adaptertest.Context(t)); err != nil {
			t.Fatal(err)
		}
	}
	adaptertest.Eventually(t, "all committed", func() bool { return r.pending() == 0 })
	twice := l.check(t, published)
	m.stop()
	t.Logf("%d leaders killed, %d messages: %d handled twice", rounds, published, twice)
}
