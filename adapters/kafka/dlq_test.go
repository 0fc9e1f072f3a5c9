// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// letterOf is a dead letter of a message of a topic's partition 0.
func letterOf(topic string, offset int64) *dlq.Record {
	return &dlq.Record{
		Key: []byte("k"), Body: []byte("body"), Headers: []dlq.Header{{Name: "tenant", Value: []byte("acme")}},
		Timestamp: time.Now().Add(-time.Hour).UTC().Truncate(time.Millisecond),
		Origin:    dlq.Origin{System: cluster.System, Source: topic, Group: "g", HasPartition: true, Offset: offset, HasOffset: true},
		Attempts:  3, Reason: dlq.ReasonAttempts, Error: dlq.ErrorInfo{Type: "*errors.errorString", Message: "down"},
		FirstFailed: time.Now().UTC().Truncate(time.Millisecond), LastFailed: time.Now().UTC().Truncate(time.Millisecond),
	}
}

func TestDLQKeepsWhatDied(t *testing.T) {
	t.Parallel()
	for _, dialect := range []dlq.Dialect{"", dlq.Spring, dlq.Connect} {
		t.Run(string(dialect), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, 3)
			d := r.dlq(DLQConfig{Sources: []string{r.topic}, Dialect: dialect})
			want := letterOf(r.topic, 42)
			want.Origin.Partition = 2
			if err := d.Write(adaptertest.Context(t), want); err != nil {
				t.Fatal(err)
			}
			tombstone := letterOf(r.topic, 43)
			tombstone.Origin.Partition, tombstone.Key, tombstone.Body = 2, nil, nil
			if err := d.Write(adaptertest.Context(t), tombstone); err != nil {
				t.Fatal(err)
			}
			if ps, err := r.client.Partitions(r.topic + ".dlq"); err != nil || len(ps) != 3 {
				t.Errorf("%v, %v", ps, err)
			}
			ms, err := r.read(adaptertest.Context(t), r.topic+".dlq", 2, 0, 2)
			if err != nil {
				t.Fatal(err)
			}
			if m := ms[1]; m.Key != nil || m.Value != nil {
				t.Errorf("key %q, body %q", m.Key, m.Value)
			}
			if since := time.Since(ms[0].Timestamp); since > 5*time.Minute {
				t.Errorf("retention would count from %s ago", since)
			}
			got, err := ReadDeadLetter(ms[0])
			if err != nil {
				t.Fatal(err)
			}
			if got.ID() != want.ID() || !bytes.Equal(got.Key, want.Key) || !bytes.Equal(got.Body, want.Body) ||
				!got.Timestamp.Equal(want.Timestamp) || got.Attempts != 3 || got.Error.Message != "down" || len(got.Headers) != 1 ||
				got.Origin.Partition != 2 || got.Origin.Offset != 42 {
				t.Errorf("%+v became %+v", want, got)
			}
		})
	}
}

// Headers of the message that a dead letter has itself, or that a broker would set, stay
// under another name, and do not grow with a second death.
func TestHeadersOfTheMessageStayInItsLetter(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	d := r.dlq(DLQConfig{Sources: []string{r.topic}})
	died := letterOf(r.topic, 1)
	died.Headers = []dlq.Header{
		{Name: "stormguard-reason", Value: []byte("mine")}, {Name: "tenant", Value: []byte("acme")},
		{Name: "x-death", Value: []byte("from a bridge")}, {Name: "x-death", Value: []byte("twice")}, {Name: "Nats-Msg-Id", Value: []byte("7")},
	}
	want := []string{"tenant=acme", "kept-stormguard-reason=mine", "kept-x-death=from a bridge", "kept-x-death=twice", "kept-Nats-Msg-Id=7"}
	for offset := range int64(2) {
		if err := d.Write(adaptertest.Context(t), died); err != nil {
			t.Fatal(err)
		}
		ms, err := r.read(adaptertest.Context(t), r.topic+".dlq", 0, offset, offset+1)
		if err != nil {
			t.Fatal(err)
		}
		got, err := ReadDeadLetter(ms[0])
		var have []string
		for _, h := range got.Headers {
			have = append(have, h.Name+"="+string(headerBytes(h.Value)))
		}
		if err != nil || got.Reason != dlq.ReasonAttempts || !slices.Equal(have, want) {
			t.Errorf("%v, want %v; reason %s, %v", have, want, got.Reason, err)
		}
		// Its letter dies, too.
		died = letterOf(r.topic, 2)
		died.Headers = cluster.Headers(ms[0].Headers)
		for _, h := range died.Headers {
			if strings.HasPrefix(h.Name, "stormguard-") && h.Name != "stormguard-reason" {
				want = append(want, "kept-"+h.Name+"="+string(headerBytes(h.Value)))
			}
		}
	}
}

func TestReadOfWhatIsNoDeadLetter(t *testing.T) {
	at := time.Now()
	r, err := ReadDeadLetter(&sarama.ConsumerMessage{Topic: "t", Partition: 3, Offset: 7, Value: []byte("v"), Timestamp: at})
	if err != nil || r.Origin.Source != "t" || r.Origin.Partition != 3 || r.Origin.Offset != 7 || !r.Timestamp.Equal(at) || string(r.Body) != "v" {
		t.Errorf("%+v, %v", r, err)
	}
}

// A letter over the limit says so, is trimmed and written; one whose message
// alone is too large cannot be.
func TestTooLargeDeadLetters(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	d := r.dlq(DLQConfig{Sources: []string{r.topic}})
	limit := d.max[r.topic+".dlq"]
	if limit != 2097152+cluster.HeaderRoom {
		t.Errorf("the topic takes %d bytes", limit)
	}
	rec := letterOf(r.topic, 1)
	rec.Error.Stack = strings.Repeat("frame\n", 1500)
	rec.Body = bytes.Repeat([]byte("x"), limit-6000)
	err := d.Write(adaptertest.Context(t), rec)
	if tooLarge := (*dlq.TooLargeError)(nil); !errors.As(err, &tooLarge) || tooLarge.Max != limit || tooLarge.Size <= limit {
		t.Fatalf("%v", err)
	}
	if !dlq.TrimFor(rec, err) {
		t.Fatal("nothing to trim")
	}
	if err := d.Write(adaptertest.Context(t), rec); err != nil {
		t.Fatal(err)
	}
	rec.Body = bytes.Repeat([]byte("x"), limit)
	if err := d.Write(adaptertest.Context(t), rec); !errors.Is(err, dlq.ErrTooLarge) {
		t.Errorf("%v", err)
	}
	// The broker's own word, if the topic changed since: the estimate is passed by.
	d.max[r.topic+".dlq"] = limit * 2
	d.client.Config().Producer.MaxMessageBytes = limit * 2
	if err := d.Write(adaptertest.Context(t), rec); !errors.Is(err, dlq.ErrTooLarge) {
		t.Errorf("%v", err)
	}
}

func TestPartitionsOfDeadLetters(t *testing.T) {
	rec := func(partition int32, key string) *dlq.Record {
		r := letterOf("t", 1)
		r.Origin.Partition, r.Key = partition, []byte(key)
		if key == "" {
			r.Key = nil
		}
		return r
	}
	if p := partitionFor(rec(3, "k"), 4); p != 3 {
		t.Errorf("partition 3 of 4 became %d", p)
	}
	if a, b := partitionFor(rec(7, "k"), 4), partitionFor(rec(9, "k"), 4); a != b || a < 0 || a > 3 {
		t.Errorf("one key went to %d and %d", a, b)
	}
	if p := partitionFor(rec(9, ""), 4); p != 1 {
		t.Errorf("no key: %d", p)
	}
	if p := partitionFor(rec(9, ""), 0); p != 0 {
		t.Errorf("no partitions known: %d", p)
	}
}

func TestUnsuitableDLQsAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	ctx := adaptertest.Context(t)
	_, err := NewDLQ(r.addrs, testConfig(), DLQConfig{Sources: []string{r.topic}, NoCreate: true})
	want := "kafka-topics.sh --bootstrap-server " + strings.Join(r.addrs, ",") + " --create --topic " + r.topic + ".dlq --partitions 2"
	if !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
	compact, one := "compact", int16(1)
	if err := r.admin.CreateTopic(r.topic+".dlq", &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: one, ConfigEntries: map[string]*string{"cleanup.policy": &compact}}, false); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.admin.DeleteTopic(r.topic + ".dlq") }()
	r.awaitTopic(r.topic+".dlq", 1)
	if _, err := NewDLQ(r.addrs, testConfig(), DLQConfig{Sources: []string{r.topic}}); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "--add-config cleanup.policy=delete") {
		t.Errorf("%v", err)
	}
	cfg := testConfig()
	cfg.Producer.Transaction.ID = "x"
	cfg.Version = sarama.V0_10_2_0
	_, err = NewDLQ(r.addrs, cfg, DLQConfig{Topic: "no good/{topic}", Dialect: "latin", Replicas: -1, Partitions: -1, Retention: time.Second})
	for _, want := range []string{"Transaction.ID", "Version", "Topic", "Sources", "Dialect", "Replicas: -1", "Partitions: -1", "Retention: 1s"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	if err := (DLQConfig{Topic: "{group}.dlq"}).Validate(); err == nil || !strings.Contains(err.Error(), "Group") {
		t.Errorf("%v", err)
	}
	if err := (DLQConfig{Topic: "t", Sources: []string{"t", ""}}).Validate(); err == nil || !strings.Contains(err.Error(), "itself") || !strings.Contains(err.Error(), "Sources") {
		t.Errorf("%v", err)
	}
	if got := (DLQConfig{Topic: "{topic}.{group}.dlq", Group: "a b:c"}).name("t"); got != "t.a_b_c.dlq" {
		t.Errorf("%q", got)
	}

	d := r.dlq(DLQConfig{Topic: r.topic + ".other", Sources: []string{r.topic}, Partitions: 1, Retention: 48 * time.Hour})
	if d.client.Config() == cfg || !d.client.Config().Producer.Idempotent || d.client.Config().Producer.RequiredAcks != sarama.WaitForAll || d.client.Config().Net.MaxOpenRequests != 1 {
		t.Error("the producer is not safe")
	}
	if err := d.Write(ctx, letterOf("elsewhere", 1)); err != nil { // one topic for all
		t.Errorf("%v", err)
	}
	if err := r.admin.DeleteTopic(r.topic + ".other"); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "a topic that is gone refuses", func() bool {
		_ = d.client.RefreshMetadata()
		return errors.Is(d.Write(ctx, letterOf("elsewhere", 1)), dlq.ErrRefused)
	})
}

// A source that is not there is an error, as of a name that is mistyped, and nothing is
// made for it or beside it; also where one topic takes all dead letters.
func TestDLQOfATopicThatIsNotThere(t *testing.T) {
	t.Parallel()
	r, _ := newFakeRig(t)
	for _, topic := range []string{"", "letters", "{topic}.dlq"} {
		d, err := NewDLQ(r.addrs, testConfig(), DLQConfig{Topic: topic, Sources: []string{"orders", "nosuch"}})
		if err == nil {
			_ = d.Close()
		}
		if !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "DLQConfig.Sources: topic nosuch does not exist") ||
			!strings.Contains(err.Error(), "--create --topic nosuch") {
			t.Errorf("%q: %v", topic, err)
		}
	}
	topics, err := r.admin.ListTopics()
	if _, there := topics["orders"]; err != nil || len(topics) != 1 || !there {
		t.Errorf("%v, %v", topics, err)
	}
}

// A write ends with its context although sarama heeds none, Close waits for it,
// and a broker that is back takes letters again.
func TestDLQWhileTheBrokerIsDown(t *testing.T) {
	t.Parallel()
	b := brokers.StartForTest(t, brokers.Kafka, brokers.Options{})
	r := newRigAt(t, b.Addr(), 1, 1)
	d := r.dlq(DLQConfig{Sources: []string{r.topic}})
	if err := b.Kill(adaptertest.Context(t), 0); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	begun := time.Now()
	if err := d.Write(ctx, letterOf(r.topic, 1)); err == nil || time.Since(begun) > 2*time.Second {
		t.Errorf("%v after %s", err, time.Since(begun))
	}
	if err := b.Restart(adaptertest.Context(t)); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "a letter is written again", func() bool { return d.Write(adaptertest.Context(t), letterOf(r.topic, 2)) == nil })
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := d.Write(adaptertest.Context(t), letterOf(r.topic, 3)); !errors.Is(err, errDLQClosed) && !errors.Is(err, sarama.ErrClosedClient) {
		t.Errorf("%v", err)
	}
}

func TestInspect(t *testing.T) {
	t.Parallel()
	r := newRig(t, 3)
	cfg := DLQConfig{Sources: []string{r.topic}}
	find := func(client sarama.Client) []guard.Finding {
		t.Helper()
		fs, err := Inspect(client, Target{DLQ: cfg})
		if err != nil {
			t.Fatal(err)
		}
		return fs
	}
	has := func(fs []guard.Finding, where, what string) {
		t.Helper()
		if !slices.ContainsFunc(fs, func(f guard.Finding) bool { return f.Where == where && strings.Contains(f.What, what) && f.Fix != "" }) {
			t.Errorf("nothing about %q at %s in %v", what, where, fs)
		}
	}
	has(find(r.client), "topic "+r.topic+".dlq", "does not exist")
	hour, kilo := "3600000", "100000"
	if err := r.admin.CreateTopic(r.topic+".dlq", &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: 1, ConfigEntries: map[string]*string{
		"retention.ms": &hour, "retention.bytes": &kilo, "max.message.bytes": &kilo,
	}}, false); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.admin.DeleteTopic(r.topic + ".dlq") }()
	r.awaitTopic(r.topic+".dlq", 1)
	bad := testConfig()
	bad.Consumer.Offsets.Initial = sarama.OffsetNewest
	bad.Consumer.Offsets.AutoCommit.Interval = time.Minute
	bad.Consumer.Offsets.Retry.Max = 0
	bad.Consumer.Group.Heartbeat.Interval = 4 * time.Second
	bad.Consumer.MaxProcessingTime = time.Second
	bad.Consumer.Group.Rebalance.GroupStrategies = cooperativeConfig().Consumer.Group.Rebalance.GroupStrategies
	client, err := sarama.NewClient(r.addrs, bad)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	fs := find(client)
	for _, what := range []string{"OffsetNewest", "AutoCommit.Interval is 1m0s", "Retry.Max is 0", "Return.Errors", "Heartbeat.Interval is 4s", "MaxProcessingTime is 1s", "ReadTimeout is 30s"} {
		has(fs, "client", what)
	}
	for _, what := range []string{"keeps dead letters for 1h0m0s", "100000 bytes of a partition", "counts from the message's own time", "1 partitions", "max.message.bytes is 100000", "one replica"} {
		has(fs, "topic "+r.topic+".dlq", what)
	}
	if err := r.admin.DeleteTopic(r.topic + ".dlq"); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "the topic is gone", func() bool {
		in, err := cluster.NewAdmin(r.client)
		if err != nil {
			return false
		}
		info, err := in.Topic(r.topic + ".dlq")
		return err == nil && info == nil
	})
	r.dlq(cfg) // what the package creates has nothing but its single replica against it
	good := testConfig()
	good.Consumer.Return.Errors = true
	good.Net.ReadTimeout = good.Consumer.Group.Rebalance.Timeout
	client2, err := sarama.NewClient(r.addrs, good)
	if err != nil {
		t.Fatal(err)
	}
	defer client2.Close()
	for _, f := range find(client2) {
		if !strings.Contains(f.What, "one replica") {
			t.Errorf("%s", f)
		}
	}
	if _, err := Inspect(nil, Target{}); err == nil || !strings.Contains(err.Error(), "client") || !strings.Contains(err.Error(), "Sources") {
		t.Errorf("%v", err)
	}
	for setting, what := range map[string]string{"retention.ms": "it keeps messages for 59m0s", "retention.bytes": "it keeps 3540000 bytes"} {
		value := "3540000"
		if err := r.admin.AlterConfig(sarama.TopicResource, r.topic, map[string]*string{setting: &value}, false); err != nil {
			t.Fatal(err)
		}
		adaptertest.Eventually(t, what, func() bool {
			return slices.ContainsFunc(find(client2), func(f guard.Finding) bool {
				return f.Severity == guard.Danger && f.Where == "topic "+r.topic && strings.Contains(f.What, what)
			})
		})
	}
	cfg.Sources = []string{r.topic + "-misspelt"}
	missing := find(client2)
	has(missing, "topic "+r.topic+"-misspelt", "it does not exist, or may not be seen")
	if !slices.ContainsFunc(missing, func(f guard.Finding) bool { return f.Severity == guard.Danger && f.Where == "topic "+cfg.Sources[0] }) {
		t.Errorf("a topic that is not there is no danger: %v", missing)
	}
}
