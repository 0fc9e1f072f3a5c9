// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/retry"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// name is the retry topic of a level.
func (c RetryConfig) name(source string, level int) string {
	return retry.Config(c).Name(source, level)
}

// retries makes retry topics of the rig's group, deleted with the test.
func (r *rig) retries(delays ...time.Duration) *RetryTopics {
	return r.retriesOf(RetryConfig{Delays: delays})
}

func (r *rig) retriesOf(cfg RetryConfig) *RetryTopics {
	r.t.Helper()
	cfg.Sources, cfg.Group = []string{r.topic}, r.group
	t, err := NewRetryTopics(r.addrs, testConfig(), cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := t.Close(); err != nil {
			r.t.Error(err)
		}
		for level := range cfg.Delays {
			_ = r.admin.DeleteTopic(cfg.name(r.topic, level+1))
		}
	})
	return t
}

// parkRig is a rig whose group parks, and the journal of its handlers.
type parkRig struct {
	*rig
	j       *journal
	letters *DLQ
	retries *RetryTopics
	g       *guard.Guard // of the member that was started last

	mu      sync.Mutex
	sources map[int32][]guard.Control // by partition
}

// parks gives a rig dead letters, and retry topics of these delays.
func (r *rig) parks(delays ...time.Duration) *parkRig { return r.parksOf(RetryConfig{Delays: delays}) }

func (r *rig) parksOf(cfg RetryConfig) *parkRig {
	r.t.Helper()
	return &parkRig{rig: r, j: newJournal(), letters: r.dlq(DLQConfig{Sources: []string{r.topic}}), retries: r.retriesOf(cfg)}
}

// start joins the group with a guard of its own.
func (r *parkRig) start(policy guard.Policy, opts ...Option) *member {
	r.t.Helper()
	r.g = adaptertest.Guard(r.t, guard.Config{Policy: policy})
	return r.member(r.g, r.retries, testConfig(), opts...)
}

// member joins the group.
func (r *parkRig) member(g *guard.Guard, retries *RetryTopics, cfg *sarama.Config, opts ...Option) *member {
	r.t.Helper()
	opts = append([]Option{WithDeadLetters(r.letters), WithRetryTopics(retries), WithLogger(adaptertest.Log()), WithStopTimeout(3 * time.Second)}, opts...)
	return r.join(cfg, Wrap(g, r.j.handle, opts...))
}

// retryTopic is the topic of a level.
func (r *rig) retryTopic(level int) string {
	return RetryConfig{Group: r.group}.name(r.topic, level)
}

// failUntilParked lets messages fail until n are parked.
func (r *parkRig) failUntilParked(n uint64, ns ...int) {
	r.j.failUntil(func() bool { return r.parked(0) >= n }, ns...)
}

// parked is how many messages a partition's sources have parked, of those that it saw:
// a member that was too slow for its session gets another source.
func (r *parkRig) parked(p int32) (n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.g.Source(sourceName("", r.topic, p)); s != nil && !slices.Contains(r.sources[p], s) {
		if r.sources == nil {
			r.sources = make(map[int32][]guard.Control)
		}
		r.sources[p] = append(r.sources[p], s)
	}
	for _, s := range r.sources[p] {
		n += s.State().Tally.Parked
	}
	return n
}

// parking is a policy that parks soon.
func parking(workers int) guard.Policy {
	return guard.Policy{
		Order: guard.OrderKey, Workers: workers, NoBreaker: true, Ramp: guard.Ramp{Off: true}, Budget: dlq.BudgetConfig{Off: true},
		Retry: guard.Retry{Attempts: 2, Base: time.Millisecond, Max: 5 * time.Millisecond, Patience: 5 * time.Millisecond},
	}
}

const forEver = 1 << 30

// journal is what handlers were called with, by key, over all members of a group.
type journal struct {
	mu       sync.Mutex
	fails    map[int]int // how often a message fails yet
	calls    map[string][]int
	done     map[int]int
	first    map[string]int
	busy     map[string]bool
	disorder []string
	down     bool
	again    bool          // messages may be delivered again
	until    func() bool   // ends the failures, and is asked at each
	gate     chan struct{} // if not nil, a message that has failed is done only when it is closed
}

func newJournal() *journal {
	return &journal{fails: map[int]int{}, calls: map[string][]int{}, done: map[int]int{}, first: map[string]int{}, busy: map[string]bool{}}
}

func (j *journal) handle(_ context.Context, m *sarama.ConsumerMessage) error {
	if string(m.Key) == healthy {
		return nil
	}
	n, err := strconv.Atoi(string(m.Value))
	if err != nil {
		return err
	}
	key := string(m.Key)
	j.mu.Lock()
	if j.busy[key] {
		j.disorder = append(j.disorder, fmt.Sprintf("%s: %d beside another", key, n))
	}
	calls := j.calls[key]
	if len(calls) > 0 && calls[len(calls)-1] > n && !j.again {
		j.disorder = append(j.disorder, fmt.Sprintf("%s: %d after %d", key, n, calls[len(calls)-1]))
	}
	j.calls[key] = append(calls, n)
	j.busy[key] = true
	j.mu.Unlock()
	time.Sleep(time.Duration(n%3) * 100 * time.Microsecond)
	j.mu.Lock()
	defer func() { j.busy[key] = false; j.mu.Unlock() }()
	if j.down {
		return errDown
	}
	if j.until != nil && j.fails[n] > 0 && j.until() {
		j.fails[n] = 0
		if j.gate != nil {
			j.mu.Unlock()
			<-j.gate
			j.mu.Lock()
		}
	}
	if j.fails[n] > 0 {
		j.fails[n]--
		return errDown
	}
	if j.done[n]++; j.done[n] == 1 {
		if before, any := j.first[key]; any && before > n {
			j.disorder = append(j.disorder, fmt.Sprintf("%s: %d is done after %d", key, n, before))
		}
		j.first[key] = n
	}
	return nil
}

func (j *journal) handled() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.done)
}

// fail sets how often messages fail yet.
func (j *journal) fail(times int, ns ...int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, n := range ns {
		j.fails[n] = times
	}
}

// failUntil lets messages fail until a look says that it is enough.
func (j *journal) failUntil(enough func() bool, ns ...int) {
	j.fail(forEver, ns...)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.until = enough
}

func (j *journal) check(t *testing.T) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	for i, d := range j.disorder {
		if i == 10 {
			t.Errorf("… and %d more", len(j.disorder)-i)
			break
		}
		t.Error(d)
	}
	for n, times := range j.done {
		if times > 1 && !j.again {
			t.Errorf("%d was handled %d times", n, times)
		}
	}
}

// healthy is the key of messages that prove that the dependency is well.
const healthy = "healthy"

// pulse publishes healthy messages to each partition until the test ends or stop is
// called.
func (r *rig) pulse() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var pulsing sync.WaitGroup
	pulsing.Go(func() {
		for ctx.Err() == nil {
			for p := range r.partitions {
				_, _, _ = r.producer.SendMessage(&sarama.ProducerMessage{Topic: r.topic, Partition: p, Key: sarama.StringEncoder(healthy)})
			}
			again := time.NewTimer(10 * time.Millisecond)
			select {
			case <-again.C:
			case <-ctx.Done():
				again.Stop()
			}
		}
	})
	stop = func() { cancel(); pulsing.Wait() }
	r.t.Cleanup(stop)
	return stop
}

// While a message of a key is parked, the later ones follow it, through all levels;
// what fails for good ends in the dead letters; nothing of a key is handled beside
// or before another, and nothing twice.
func TestRetryTopicsKeepTheOrderOfAKey(t *testing.T) {
	t.Parallel()
	const n = 210
	r := newRig(t, 2).parks(30*time.Millisecond, 100*time.Millisecond, 200*time.Millisecond)
	j := r.j
	random := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	dying := 0
	for i := range n {
		switch random.IntN(20) {
		case 0:
			j.fails[i] = 1 + random.IntN(7) // 2 calls a level: some reach the last
		case 1:
			if dying < 5 && i%7 != 0 {
				dying++
				j.fails[i] = forEver
			}
		}
	}
	m := r.start(parking(4))
	part := func(i int) int32 { return int32(i % 7 % 2) }
	key := func(i int) string { return fmt.Sprint("k", i%7) }
	stop := r.pulse()
	for from := 0; from < n; from += 70 {
		r.publish(from, from+70, part, key)
		time.Sleep(50 * time.Millisecond)
	}
	adaptertest.Eventually(t, "all are handled but the dead", func() bool { return j.handled() == n-dying })
	adaptertest.Eventually(t, "the dead are", func() bool { return r.end(r.topic+".dlq", 0)+r.end(r.topic+".dlq", 1) == int64(dying) })
	stop()
	adaptertest.Eventually(t, "all is committed", func() bool { return r.pending() == 0 && r.parkedLeft() == 0 })
	m.stop()
	j.check(t)
	var dead []int
	for p := range int32(2) {
		name := r.topic + ".dlq"
		ms, err := r.read(adaptertest.Context(t), name, p, 0, r.end(name, p))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range ms {
			rec, err := ReadDeadLetter(m)
			if err != nil {
				t.Fatal(err)
			}
			if rec.Attempts < 8 || rec.Origin.Source != r.topic || rec.Origin.Partition != p {
				t.Errorf("%d attempts, origin %+v", rec.Attempts, rec.Origin)
			}
			if slices.ContainsFunc(rec.Headers, func(h dlq.Header) bool { return h.Name == "stormguard-retry-offset" }) {
				t.Errorf("headers of the retry topic in a dead letter")
			}
			i, _ := strconv.Atoi(string(rec.Body))
			dead = append(dead, i)
		}
	}
	if len(dead) != dying {
		t.Errorf("dead %v, want %d", dead, dying)
	}
}

// parkedLeft is how much of the rig's retry topics is not committed.
func (r *rig) parkedLeft() (n int64) {
	topics, err := r.client.Topics()
	if err == nil {
		err = r.client.RefreshMetadata()
	}
	if err != nil {
		return 1 << 30
	}
	for level := 1; slices.Contains(topics, r.retryTopic(level)); level++ {
		n += r.uncommitted(r.retryTopic(level))
	}
	return n
}

// uncommitted is how much of a topic is not committed.
func (r *rig) uncommitted(topic string) (n int64) {
	for p := range r.partitions {
		at, _ := r.position(topic, p)
		end, err := r.client.GetOffset(topic, p, sarama.OffsetNewest)
		if err != nil {
			return 1 << 30
		}
		n += end - max(0, at)
	}
	return n
}

// parkedRecord is a record of a retry topic, as a claim of another epoch writes it.
type parkedRecord struct {
	source           string
	partition        int32
	offset           int64
	key, value       string
	stamp, notBefore int64
	group            string // unset: the record does not say it
}

// park writes records to a retry topic.
func (r *rig) park(topic string, records ...parkedRecord) {
	r.t.Helper()
	for _, p := range records {
		m := &sarama.ProducerMessage{Topic: topic, Partition: p.partition, Key: sarama.StringEncoder(p.key), Value: sarama.StringEncoder(p.value)}
		add := func(name string, value any) {
			m.Headers = append(m.Headers, sarama.RecordHeader{Key: []byte("stormguard-retry-" + name), Value: fmt.Append(nil, value)})
		}
		add("topic", p.source)
		add("partition", p.partition)
		add("offset", p.offset)
		add("timestamp", p.stamp)
		add("attempts", 0)
		add("level", 1)
		add("moves", 1)
		add("not-before", p.notBefore)
		add("first-failed", 0)
		add("claim", "x")
		if p.group != "" {
			add("group", p.group)
		}
		if _, _, err := r.producer.SendMessage(m); err != nil {
			r.t.Fatal(err)
		}
	}
}

// Whoever gets a partition knows what is parked before it handles its first
// message, also while that is not due; copies of what is parked, whoever wrote them,
// are dropped; and what is done is not handled again after the next start, although
// what stands before it in the retry topic is not.
func TestRestartKnowsWhatIsParked(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1).parks(4 * time.Second)
	j, name := r.j, r.retryTopic(1)
	j.gate = make(chan struct{}) // what is parked is not done before the others follow
	r.failUntilParked(2, 0, 1)
	m := r.start(parking(2))
	stop := r.pulse()
	begun := time.Now()
	r.publish(0, 2, nil, func(i int) string { return []string{"a", "b"}[i] }) // both are parked
	adaptertest.Eventually(t, "two are parked", func() bool { return r.parked(0) == 2 })
	r.publish(2, 4, nil, func(i int) string { return "a" })
	adaptertest.Eventually(t, "two follow", func() bool { return r.end(name, 0) == 4 })
	j.fail(0, 0, 1)
	close(j.gate)
	for _, foreign := range []bool{false, true} { // copies of all of them
		ms, err := r.read(adaptertest.Context(t), name, 0, 0, 4)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range ms {
			out := &sarama.ProducerMessage{Topic: name, Key: sarama.ByteEncoder(m.Key), Value: sarama.ByteEncoder(m.Value)}
			for _, h := range m.Headers {
				if foreign && string(h.Key) == "stormguard-retry-claim" {
					h.Value = []byte("another")
				}
				out.Headers = append(out.Headers, *h)
			}
			if _, _, err := r.producer.SendMessage(out); err != nil {
				t.Fatal(err)
			}
		}
	}
	m.stop()
	m = r.start(parking(2))
	r.publish(4, 6, nil, func(i int) string { return []string{"a", "c"}[i-4] })
	adaptertest.Eventually(t, "what is not parked is handled", func() bool { return j.handled() >= 1 })
	if n, since := j.handled(), time.Since(begun); n > 1 && since < 4*time.Second {
		t.Errorf("%d handled after %s", n, since)
	}
	adaptertest.Eventually(t, "all are handled", func() bool { return j.handled() == 6 })
	stop()
	adaptertest.Eventually(t, "all is committed", func() bool { return r.pending() == 0 && r.parkedLeft() == 0 })
	m.stop()
	m = r.start(parking(2))
	time.Sleep(200 * time.Millisecond)
	m.stop()
	j.check(t)
	if r.end(r.topic+".dlq", 0) > 0 {
		t.Error("a dead letter")
	}
}

// What was handled out of the log's order is not handled again by the next owner.
func TestDoneAheadIsNotHandledAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1).parks(300*time.Millisecond, 30*time.Second)
	j, name := r.j, r.retryTopic(1)
	r.failUntilParked(1, 1)
	// The first record of level 1 is due only in a minute, by its header.
	r.park(name, parkedRecord{source: r.topic, key: "late", value: "99", stamp: 1, notBefore: time.Now().Add(time.Minute).UnixMilli(), group: r.group})
	m := r.start(parking(1))
	stop := r.pulse()
	r.publish(1, 3, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "one is parked", func() bool { return r.parked(0) == 1 })
	adaptertest.Eventually(t, "what came later is handled", func() bool { return j.handled() == 2 })
	adaptertest.Eventually(t, "that is committed", func() bool {
		at, meta := r.position(name, 0)
		return at == 0 && len(offsets.Decode(0, meta)) == 2
	})
	m.stop()
	m = r.start(parking(1))
	r.publish(3, 4, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "the key is free", func() bool { return j.handled() == 3 })
	stop()
	m.stop()
	j.check(t)
	if at, meta := r.position(name, 0); at != 0 || len(offsets.Decode(0, meta)) != 2 {
		t.Errorf("%d, %q", at, meta)
	}
}

// An outage parks nothing, and holds what is parked and due.
func TestOutageParksNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1).parks(5 * time.Second) // the breaker is forced open before it is due
	j := r.j
	r.failUntilParked(1, 0)
	policy := parking(2)
	policy.NoBreaker, policy.Retry.Patience = false, 10*time.Second
	policy.Breaker.Base = 100 * time.Millisecond
	m := r.start(policy)
	stop := r.pulse()
	r.publish(0, 1, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "one is parked", func() bool { return r.parked(0) == 1 })
	stop()
	src, again := r.g.Source(sourceName("", r.topic, 0)), r.g.Source(sourceName("", r.topic, 0)+"/retry")
	if err := src.ForceOpen(0); err != nil {
		t.Fatal(err)
	}
	j.mu.Lock()
	j.down = true
	j.mu.Unlock()
	r.publish(1, 60, nil, func(i int) string { return fmt.Sprint("k", i%5) })
	adaptertest.Eventually(t, "the parked one is due, and held", func() bool { return again.Account().Held == 1 })
	time.Sleep(500 * time.Millisecond)
	if n := j.handled(); n > 0 || r.parked(0) != 1 || again.State().Tally.Parked > 0 || r.end(r.topic+".dlq", 0) > 0 {
		t.Errorf("%d handled, %d and %d parked", n, r.parked(0), again.State().Tally.Parked)
	}
	j.mu.Lock()
	j.down = false
	j.mu.Unlock()
	if err := src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "all are handled", func() bool { return j.handled() == 60 })
	m.stop()
	j.check(t)
}

// A partition that moves takes what is parked along, eager and cooperative, and
// nothing of it is lost or passed.
func TestRebalanceWhileParked(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]*sarama.Config{"eager": testConfig(), "cooperative": cooperativeConfig()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const n = 150
			r := newRig(t, 2).parks(100*time.Millisecond, 200*time.Millisecond)
			others := r.rig.retries(100*time.Millisecond, 200*time.Millisecond)
			j := r.j
			j.again = true
			for i := 0; i < n; i += 11 {
				j.fails[i] = 1 + i%5
			}
			r.g = adaptertest.Guard(t, guard.Config{Policy: parking(2)})
			m := r.member(r.g, r.retries, cfg)
			stop := r.pulse()
			part := func(i int) int32 { return int32(i % 6 % 2) }
			key := func(i int) string { return fmt.Sprint("k", i%6) }
			for round := range 2 {
				before := r.parked(0) + r.parked(1)
				r.publish(round*n/2, (round+1)*n/2, part, key)
				adaptertest.Eventually(t, "some are parked", func() bool { return r.parked(0)+r.parked(1) > before || j.handled() > round*n/2 })
				other := adaptertest.Guard(t, guard.Config{Policy: parking(2)})
				b := r.member(other, others, cfg)
				adaptertest.Eventually(t, "the other has a partition", func() bool {
					return other.Source(sourceName("", r.topic, 0)) != nil || other.Source(sourceName("", r.topic, 1)) != nil
				})
				b.stop()
			}
			adaptertest.Eventually(t, "all are handled", func() bool { return j.handled() == n })
			stop()
			adaptertest.Eventually(t, "all is committed", func() bool { return r.pending() == 0 && r.parkedLeft() == 0 })
			m.stop()
			j.check(t)
		})
	}
}
