// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// newFakeRig is a cluster that can be told to fail, with a topic of one partition and, unless
// opts say otherwise, one broker.
func newFakeRig(t *testing.T, opts ...kfake.Opt) (*rig, *kfake.Cluster) {
	t.Helper()
	fake, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(1), kfake.SeedTopics(1, "orders")}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fake.Close)
	r := &rig{t: t, addrs: fake.ListenAddrs(), topic: "orders", group: "billing", partitions: 1}
	cfg := testConfig()
	cfg.Producer.Return.Successes = true
	cfg.Producer.Partitioner = sarama.NewManualPartitioner
	if r.client, err = sarama.NewClient(r.addrs, cfg); err != nil {
		t.Fatal(err)
	}
	if r.admin, err = sarama.NewClusterAdminFromClient(r.client); err != nil {
		t.Fatal(err)
	}
	if r.producer, err = sarama.NewSyncProducerFromClient(r.client); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.producer.Close()
		_ = r.client.Close()
	})
	return r, fake
}

// A retry topic that cannot be written: what should be parked waits, unmarked, and
// so does what should follow; the source says why, and all is handled in order once
// it can.
func TestRetryTopicThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	orders, fake := newFakeRig(t)
	r := orders.parks(500 * time.Millisecond)
	j, name := r.j, r.retryTopic(1)
	j.gate = make(chan struct{}) // what is parked is not done before all that should follow was refused
	refuse := func() *kfake.FaultHandle {
		return fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: name, Err: kerr.TopicAuthorizationFailed, Count: -1})
	}
	r.failUntilParked(1, 0)
	var own logged
	m := r.start(parking(2), WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
	stop := r.pulse()
	fault := refuse()
	r.publish(0, 3, nil, func(int) string { return "a" })
	src := adaptertest.Source(t, r.g, "orders/0")
	adaptertest.Eventually(t, "the source says why", func() bool {
		return slices.ContainsFunc(src.State().Holds, func(h guard.Hold) bool {
			return h.Reason == guard.ReasonDLQ && strings.Contains(h.Detail, name)
		})
	})
	if r.parked(0) > 0 || j.handled() > 0 {
		t.Errorf("%d parked, %d handled", r.parked(0), j.handled())
	}
	stop()
	fault.Remove()
	adaptertest.Eventually(t, "it is parked", func() bool { return r.parked(0) == 1 })
	fault = refuse()
	r.publish(3, 4, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "what follows waits", func() bool { return own.has("cannot follow its key") })
	adaptertest.Eventually(t, "the source says so", func() bool {
		return slices.ContainsFunc(src.State().Holds, func(h guard.Hold) bool {
			return h.Reason == guard.ReasonBackpressure && strings.Contains(h.Detail, "cannot follow a parked one of its key: kafka: retry topic "+name)
		})
	})
	committed := r.committed(0)
	time.Sleep(400 * time.Millisecond)
	if r.committed(0) > committed && r.committed(0) == r.end(r.topic, 0) {
		t.Error("what could not be written is committed")
	}
	fault.Remove()
	close(j.gate)
	adaptertest.Eventually(t, "all are handled", func() bool { return j.handled() == 4 })
	adaptertest.Eventually(t, "all is committed", func() bool { return r.pending() == 0 && r.parkedLeft() == 0 })
	m.stop()
	j.check(t)
}

// A key whose end cannot be committed is not free: its messages go on to follow,
// and nothing stops.
func TestKeyIsFreeOnceItsEndIsCommitted(t *testing.T) {
	t.Parallel()
	orders, fake := newFakeRig(t)
	r := orders.parks(500 * time.Millisecond)
	j, name := r.j, r.retryTopic(1)
	j.gate = make(chan struct{}) // what is parked is not done before commits fail
	r.failUntilParked(1, 0)
	m := r.start(parking(2))
	stop := r.pulse()
	adaptertest.Eventually(t, "it runs", func() bool { return r.committed(0) > 0 })
	r.publish(0, 1, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "one is parked", func() bool { return r.parked(0) == 1 })
	fault := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: kerr.InvalidCommitOffsetSize, Count: -1})
	close(j.gate)
	adaptertest.Eventually(t, "it is handled", func() bool { return j.handled() == 1 })
	r.publish(1, 2, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "the next follows", func() bool { return j.handled() == 2 })
	if n := r.end(name, 0); n != 2 {
		t.Errorf("%d records in the retry topic, want 2", n)
	}
	fault.Remove()
	adaptertest.Eventually(t, "all is committed", func() bool { return r.parkedLeft() == 0 })
	r.publish(2, 3, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "the third is handled", func() bool { return j.handled() == 3 })
	if n := r.end(name, 0); n != 2 {
		t.Errorf("%d records in the retry topic, although the key is free", n)
	}
	stop()
	m.stop()
	j.check(t)
}

// No more is parked than the table may have: the rest waits.
func TestMaxParked(t *testing.T) {
	t.Parallel()
	orders, _ := newFakeRig(t)
	r := orders.parksOf(RetryConfig{Delays: []time.Duration{1500 * time.Millisecond}, MaxParked: 3})
	j, name := r.j, r.retryTopic(1)
	r.failUntilParked(1, 0)
	m := r.start(parking(2))
	stop := r.pulse()
	r.publish(0, 20, nil, func(int) string { return "a" })
	for j.handled() == 0 {
		if n := r.end(name, 0); n > 3 && j.handled() == 0 {
			t.Fatalf("%d parked", n)
		}
		time.Sleep(5 * time.Millisecond)
	}
	adaptertest.Eventually(t, "all are handled", func() bool { return j.handled() == 20 })
	stop()
	m.stop()
	j.check(t)
}

// What cannot be parked for want of room waits and says so; the writer is well.
func TestPutOffIsNoFailureOfTheWriter(t *testing.T) {
	t.Parallel()
	orders, _ := newFakeRig(t)
	r := orders.parksOf(RetryConfig{Delays: []time.Duration{6 * time.Second}, MaxParked: 1})
	r.failUntilParked(1, 0)
	m := r.start(parking(2))
	stop := r.pulse()
	r.publish(0, 1, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "one is parked", func() bool { return r.parked(0) == 1 })
	r.j.fail(0, 0)
	r.j.failUntil(func() bool { return r.parked(0) == 2 }, 1)
	r.publish(1, 2, nil, func(int) string { return "b" })
	src := adaptertest.Source(t, r.g, "orders/0")
	adaptertest.Eventually(t, "the source says why", func() bool {
		if err := r.g.Ready(); err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(src.State().Holds, func(h guard.Hold) bool {
			return h.Reason == guard.ReasonDLQ && strings.Contains(h.Detail, "MaxParked messages of the partition are parked")
		})
	})
	adaptertest.Eventually(t, "both are handled", func() bool { return r.j.handled() == 2 })
	stop()
	m.stop()
	r.j.check(t)
}

// A message that comes up and has to wait for one of its key is counted as returned
// to its retry topic, and not as ignored.
func TestWaitingForItsKeyIsReturned(t *testing.T) {
	t.Parallel()
	orders, _ := newFakeRig(t)
	r := orders.parks(500*time.Millisecond, 4*time.Second)                  // so the next comes up before the first is done
	r.j.failUntil(func() bool { return r.end(r.retryTopic(2), 0) >= 1 }, 0) // on to level 2
	m := r.start(parking(2))
	stop := r.pulse()
	r.publish(0, 1, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "one is parked", func() bool { return r.parked(0) == 1 })
	r.publish(1, 2, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "both are handled", func() bool { return r.j.handled() == 2 })
	again := adaptertest.Source(t, r.g, "orders/0/retry")
	adaptertest.Eventually(t, "both are settled", func() bool { return again.Account().Unsettled() == 0 && r.parkedLeft() == 0 })
	// Acked: the first at both levels, and the second.
	if a, n := again.Account(), again.State().Tally; a.Acked != 3 || a.Returned == 0 || a.Received != a.Acked+a.Returned || n.Ignored > 0 || n.AckFailures > 0 {
		t.Errorf("%+v, %+v", a, n)
	}
	stop()
	m.stop()
	r.j.check(t)
}

// What is done is committed again each hour, although nothing has changed: a broker
// forgets what it does not hear of.
func TestPositionsAreCommittedAgain(t *testing.T) {
	t.Parallel()
	orders, fake := newFakeRig(t)
	r := orders.parks(time.Hour)
	var ahead atomic.Int64
	r.retries.topics.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	commits := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Topic: r.retryTopic(1), Observe: true, Count: -1})
	m := r.start(parking(2))
	adaptertest.Eventually(t, "the position is committed", func() bool { return commits.Hits() == 1 })
	for hits := 2; hits < 4; hits++ {
		ahead.Add(int64(59 * time.Minute))
		time.Sleep(5 * testConfig().Consumer.Offsets.AutoCommit.Interval) // nothing is to happen
		if n := commits.Hits(); n != hits-1 {
			t.Errorf("%d commits before the hour is over", n)
		}
		ahead.Add(int64(time.Minute))
		adaptertest.Eventually(t, "it is committed again", func() bool { return commits.Hits() == hits })
	}
	m.stop()
}

// A coordinator that takes less metadata than the offsets of a retry topic need is
// refused, and found by Inspect.
func TestTooLittleMetadata(t *testing.T) {
	t.Parallel()
	for limit, fits := range map[int64]bool{offsets.MaxMetadata - 1: false, offsets.MaxMetadata: true} {
		r, fake := newFakeRig(t)
		fake.ControlKey(int16(kmsg.DescribeConfigs), func(req kmsg.Request) (kmsg.Response, error, bool) {
			fake.KeepControl()
			ask, ok := req.(*kmsg.DescribeConfigsRequest)
			if !ok || len(ask.Resources) != 1 || ask.Resources[0].ResourceType != kmsg.ConfigResourceTypeBroker {
				return nil, nil, false //nolint:nilnil // the cluster answers
			}
			resp := ask.ResponseKind().(*kmsg.DescribeConfigsResponse)
			broker, entry, value := kmsg.NewDescribeConfigsResponseResource(), kmsg.NewDescribeConfigsResponseResourceConfig(), strconv.FormatInt(limit, 10)
			broker.ResourceType, broker.ResourceName = ask.Resources[0].ResourceType, ask.Resources[0].ResourceName
			entry.Name, entry.Value = "offset.metadata.max.bytes", &value
			broker.Configs = append(broker.Configs, entry)
			resp.Resources = append(resp.Resources, broker)
			return resp, nil, true
		})
		cfg := RetryConfig{Sources: []string{r.topic}, Group: r.group, Delays: []time.Duration{time.Minute}}
		found, err := Inspect(r.client, Target{DLQ: DLQConfig{Sources: cfg.Sources}, Retry: &cfg})
		if err != nil {
			t.Error(err)
		}
		if is := slices.ContainsFunc(found, func(f guard.Finding) bool {
			return f.Severity == guard.Danger && strings.Contains(f.What, fmt.Sprintf("offset.metadata.max.bytes is %d", limit)) && f.Fix != ""
		}); is == fits {
			t.Errorf("limit %d: found %v", limit, found)
		}
		topics, err := NewRetryTopics(r.addrs, testConfig(), cfg)
		switch {
		case fits && err == nil:
			err = topics.Close()
		case fits:
		case !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), fmt.Sprintf("offset.metadata.max.bytes is %d", limit)):
			t.Errorf("limit %d: %v", limit, err)
		default:
			err = nil
		}
		if err != nil {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
}

// A stop is quick and leaves nothing behind, whatever the claim is at: reading what
// is parked from a broker that does not answer, waiting, or writing.
func TestStopWithRetryTopics(t *testing.T) {
	t.Parallel()
	for _, key := range []kmsg.Key{kmsg.OffsetFetch, kmsg.ListOffsets, kmsg.Fetch, kmsg.Produce, kmsg.OffsetCommit, -1} {
		t.Run(fmt.Sprint(key), func(t *testing.T) {
			t.Parallel()
			orders, fake := newFakeRig(t)
			r := orders.parks(50 * time.Millisecond)
			j, name := r.j, r.retryTopic(1)
			j.fail(forEver, 0)
			r.park(name, parkedRecord{source: r.topic, key: "a", value: "7", group: r.group})
			if key >= 0 {
				fake.Fault(kfake.Fault{Keys: []kmsg.Key{key}, Topic: name, Err: kerr.UnknownServerError, Count: -1})
			}
			m := r.start(parking(2))
			r.publish(0, 5, nil, func(int) string { return "a" })
			time.Sleep(500 * time.Millisecond)
			begun := time.Now()
			m.stop()
			if took := time.Since(begun); took > 20*time.Second { // 8s, and what a busy machine needs
				t.Errorf("stopped after %s", took)
			}
			if n := r.committed(0); n == 5 && j.handled() < 5 && key != -1 && r.end(name, 0) < 2 {
				t.Errorf("committed %d, handled %d", n, j.handled())
			}
			for _, s := range r.g.Sources() {
				t.Errorf("source %s is left", s.Name())
			}
		})
	}
}

// A stop also ends a claim whose topics were closed under it.
func TestClosedRetryTopics(t *testing.T) {
	t.Parallel()
	orders, _ := newFakeRig(t)
	r := orders.parks(50 * time.Millisecond)
	j := r.j
	j.fail(forEver, 0)
	m := r.start(parking(2))
	adaptertest.Source(t, r.g, "orders/0/retry")
	if err := r.retries.Close(); err != nil {
		t.Fatal(err)
	}
	stop := r.pulse()
	r.publish(0, 2, nil, func(int) string { return "a" })
	time.Sleep(200 * time.Millisecond)
	stop()
	m.stop()
	if j.handled() > 0 || r.parked(0) > 0 {
		t.Errorf("%d handled", j.handled())
	}
}
