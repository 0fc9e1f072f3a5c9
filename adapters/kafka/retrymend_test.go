// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"errors"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// A retry topic is deleted and made anew under a claim: the claim begins anew, and
// parks and handles again.
func TestRetryTopicMadeAnew(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1).parks(300 * time.Millisecond)
	j, name := r.j, r.retryTopic(1)
	m := r.start(parking(2))
	stop := r.pulse()
	for n := range 3 { // one at a time: a second failure there would be the last
		j.failUntil(func() bool { return r.end(name, 0) > int64(n) }, n)
		r.publish(n, n+1, nil, strconv.Itoa)
		adaptertest.Eventually(t, "what was parked is handled", func() bool { return j.handled() == n+1 && r.parkedLeft() == 0 })
	}
	if err := r.admin.DeleteTopic(name); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "it is made anew", func() bool {
		return r.admin.CreateTopic(name, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: 1}, false) == nil
	})
	j.failUntil(func() bool { return r.end(name, 0) > 0 }, 3)
	r.publish(3, 4, nil, strconv.Itoa)
	adaptertest.Eventually(t, "the claim goes on", func() bool { return j.handled() == 4 })
	stop()
	m.stop()
}

// A record of a retry topic that nobody parked is handled as it is; where it fails
// it goes on as any other, and its key is free after it. Several keep their order.
func TestStrangerInARetryTopic(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1).parks(50*time.Millisecond, 300*time.Millisecond)
	j := r.j
	j.failUntil(func() bool { return r.end(r.retryTopic(2), 0) == 1 }, 0, 2)
	m := r.start(parking(2))
	stop := r.pulse()
	adaptertest.Source(t, r.g, r.topic+"/0/retry")
	for _, n := range []string{"0", "1"} {
		if _, _, err := r.producer.SendMessage(&sarama.ProducerMessage{
			Topic: r.retryTopic(1), Key: sarama.StringEncoder("a"), Value: sarama.StringEncoder(n),
		}); err != nil {
			t.Fatal(err)
		}
	}
	adaptertest.Eventually(t, "both are handled", func() bool { return j.handled() == 2 })
	j.mu.Lock()
	j.until = nil
	j.mu.Unlock()
	if _, _, err := r.producer.SendMessage(&sarama.ProducerMessage{
		Topic: r.retryTopic(1), Key: sarama.StringEncoder("b"), Value: sarama.StringEncoder("2"),
	}); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "one that fails for good is a dead letter", func() bool { return r.end(r.topic+".dlq", 0) == 1 })
	r.publish(3, 5, nil, func(i int) string { return []string{"a", "b"}[i-3] })
	adaptertest.Eventually(t, "their keys are free", func() bool { return j.handled() == 4 })
	adaptertest.Eventually(t, "all is committed", func() bool { return r.parkedLeft() == 0 })
	stop()
	m.stop()
	j.check(t)
}

// A retry topic that ends with the control record of somebody's transaction, which no
// reader is handed, does not keep a claim waiting at its start.
func TestRetryTopicEndsWithAControlRecord(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1).parks(50 * time.Millisecond)
	name := r.retryTopic(1)
	cfg := testConfig()
	cfg.Producer.Return.Successes = true
	cfg.Producer.RequiredAcks = sarama.WaitForAll
	cfg.Producer.Idempotent = true
	cfg.Producer.Transaction.ID = "tx-" + r.topic
	cfg.Net.MaxOpenRequests = 1
	somebody, err := sarama.NewSyncProducer(r.addrs, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer somebody.Close()
	for round, end := range []func() error{somebody.CommitTxn, somebody.AbortTxn, nil} {
		m := r.start(parking(2))
		r.publish(2*round, 2*round+1, nil, strconv.Itoa)
		adaptertest.Eventually(t, "the claim begins, and handles what there is", func() bool { return r.j.handled() == 2*round+1 })
		m.stop()
		if end == nil {
			break
		}
		// What was aborted is handled like any other stranger.
		if err := somebody.BeginTxn(); err != nil {
			t.Fatal(err)
		}
		if _, _, err := somebody.SendMessage(&sarama.ProducerMessage{Topic: name, Key: sarama.StringEncoder("x"), Value: sarama.StringEncoder(strconv.Itoa(2*round + 1))}); err != nil {
			t.Fatal(err)
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
		adaptertest.Eventually(t, "the control record is there", func() bool { return r.end(name, 0) == int64(2*round+2) })
	}
	// Once more, with nothing but the control record before the end.
	if left := r.parkedLeft(); left != 1 {
		t.Errorf("%d records after what is committed, want the control record alone", left)
	}
	if at, m, err := cluster.FirstMessage(r.client, name, 0, 0, 4, map[int64]bool{0: true}); err != nil || at != 2 || m == nil {
		t.Errorf("%d, %v, %v: want the second message", at, m, err)
	}
	m := r.start(parking(2))
	r.publish(6, 7, nil, strconv.Itoa)
	adaptertest.Eventually(t, "the claim begins", func() bool { return r.j.handled() == 6 })
	m.stop()
	r.j.check(t)
}

// What retention took while nobody looked is told; what was done behind it is done.
func TestDoneAheadSurvivesRetention(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1).parks(50 * time.Millisecond)
	j, name := r.j, r.retryTopic(1)
	for n := range 4 {
		r.park(name, parkedRecord{source: r.topic, offset: int64(n), key: string(rune('a' + n)), value: strconv.Itoa(n), group: r.group})
	}
	manager, err := sarama.NewOffsetManagerFromClient(r.group, r.client)
	if err != nil {
		t.Fatal(err)
	}
	at, err := manager.ManagePartition(name, 0)
	if err != nil {
		t.Fatal(err)
	}
	at.MarkOffset(1, offsets.Encode(1, []int64{2})) // 0 and 2 are done
	r.publish(10, 14, nil, strconv.Itoa)
	source, err := manager.ManagePartition(r.topic, 0)
	if err != nil {
		t.Fatal(err)
	}
	source.MarkOffset(4, "")
	if err := errors.Join(at.Close(), source.Close(), manager.Close()); err != nil {
		t.Fatal(err)
	}
	if err := r.admin.DeleteRecords(name, map[int32]int64{0: 2}); err != nil { // 1 is lost
		t.Fatal(err)
	}
	var own logged
	m := r.start(parking(2), WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
	adaptertest.Eventually(t, "what is left is handled", func() bool { return r.parkedLeft() == 0 })
	m.stop()
	if j.done[2] > 0 || j.done[3] != 1 {
		t.Errorf("handled %v, want 3 alone", j.done)
	}
	if !own.has("parked messages are lost") {
		t.Error("nothing tells of the loss")
	}
}
