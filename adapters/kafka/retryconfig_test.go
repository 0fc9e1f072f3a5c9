// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

func TestRetryConfigReportsAll(t *testing.T) {
	t.Parallel()
	minute := []time.Duration{time.Minute}
	for _, c := range []struct {
		name string
		cfg  RetryConfig
		want []string
	}{
		{"good", RetryConfig{Sources: []string{"orders"}, Group: "g", Delays: []time.Duration{time.Minute, time.Hour}}, nil},
		{"nothing", RetryConfig{}, []string{"Group: must not be empty", "kafka: RetryConfig.Sources: at least one", "Delays: 0 of them"}},
		{"descending", RetryConfig{Sources: []string{"o"}, Group: "g", Delays: []time.Duration{time.Hour, time.Minute, time.Minute, 0, -1, 1000 * time.Hour}},
			[]string{"Delays[1]: 1m0s does not ascend after 1h0m0s", "Delays[2]: 1m0s does not ascend", "Delays[3]: 0s", "Delays[4]: -1ns", "Delays[5]: 1000h0m0s"}},
		{"nine", RetryConfig{Sources: []string{"o"}, Group: "g", Delays: make([]time.Duration, 9)}, []string{"Delays: 9 of them: from 1 to 8"}},
		{"no level", RetryConfig{Sources: []string{"o"}, Group: "g", Topic: "{topic}.r", Delays: []time.Duration{time.Minute, time.Hour}}, []string{"has no {level}"}},
		{"no topic", RetryConfig{Sources: []string{"o", "p"}, Group: "g", Topic: "r.{level}", Delays: minute}, []string{"has no {topic}"}},
		{"itself", RetryConfig{Sources: []string{"o"}, Group: "g", Topic: "{topic}", Delays: minute}, []string{`"o", level 1 of "o", is taken by "o"`}},
		{"a source", RetryConfig{Sources: []string{"o", "o.g.retry.1"}, Group: "g", Delays: minute}, []string{"or a retry topic of another"}},
		{"a bad name", RetryConfig{Sources: []string{"o o"}, Group: "g", Topic: "a b", Delays: minute}, []string{`Topic: "a b" is not a topic's name`, `"o o" is not a topic's name`}},
		{"numbers", RetryConfig{Sources: []string{"o"}, Group: "g", Delays: minute, MaxParked: -1, Replicas: -1, Retention: time.Minute}, []string{"MaxParked: -1", "Replicas: -1", "Retention: 1m0s"}},
	} {
		err := c.cfg.Validate()
		if (err == nil) != (c.want == nil) {
			t.Errorf("%s: %v", c.name, err)
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q is not in: %v", c.name, want, err)
			}
		}
	}
	if name := (RetryConfig{Group: "a b"}).name("orders", 2); name != "orders.a_b.retry.2" {
		t.Errorf("%s", name)
	}
}

// What parking cannot keep its promise with is refused before the group is joined.
func TestRetryTopicsAreRefused(t *testing.T) {
	t.Parallel()
	g := adaptertest.Guard(t, guard.Config{})
	topics := &RetryTopics{}
	letters := WithDeadLetters(dlq.WriterFunc(nil))
	for _, c := range []struct {
		name  string
		check func() error
		want  string
	}{
		{"order source", func() error { return Check(g, testConfig(), WithRetryTopics(topics), letters) }, "Policy.Order: source, with WithRetryTopics"},
		{"no letters", func() error {
			return Check(g, testConfig(), WithRetryTopics(topics), WithPolicy(guard.Policy{Order: guard.OrderKey}))
		}, "needs WithDeadLetters"},
		{"a spill", func() error {
			return Check(g, testConfig(), WithRetryTopics(topics), letters, WithPolicy(guard.Policy{Order: guard.OrderKey, Spill: true}))
		}, "Policy.Spill: not with WrapHandler or WithRetryTopics"},
		{"passive", func() error { return CheckHandler(g, testConfig(), WithRetryTopics(topics), letters) }, "use Wrap"},
	} {
		if err := c.check(); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	for _, order := range []guard.Order{guard.OrderKey, guard.OrderNone} {
		if err := Check(g, testConfig(), WithRetryTopics(topics), letters, WithPolicy(guard.Policy{Order: order})); err != nil {
			t.Errorf("%v: %v", order, err)
		}
	}
}

// The retry topics are made for their source, or checked, and refused with what
// mends them; and a group that they do not fit is.
func TestRetryTopicsFit(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	cfg := RetryConfig{Sources: []string{r.topic}, Group: r.group, Delays: []time.Duration{time.Minute, time.Hour}, NoCreate: true}
	name := cfg.name(r.topic, 2)
	open := func(want ...string) {
		t.Helper()
		topics, err := NewRetryTopics(r.addrs, testConfig(), cfg)
		if err == nil {
			err = topics.Close()
		}
		if (err == nil) != (len(want) == 0) || err != nil && !errors.Is(err, ErrUnsuitable) {
			t.Errorf("%v", err)
		}
		for _, w := range want {
			if err != nil && !strings.Contains(err.Error(), w) {
				t.Errorf("%q is not in: %v", w, err)
			}
		}
	}
	inspect := func(where, what string) {
		t.Helper()
		fs, err := Inspect(r.client, Target{DLQ: DLQConfig{Sources: cfg.Sources}, Retry: &cfg})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(fs, func(f guard.Finding) bool {
			return f.Where == "topic "+where && strings.Contains(f.What, what) && f.Fix != ""
		}) {
			t.Errorf("nothing about %q at %s in %v", what, where, fs)
		}
	}
	open("topic "+name+" does not exist: kafka-topics.sh", "--partitions 2", "retention.ms=608400000")
	inspect(name, "does not exist")
	t.Cleanup(func() {
		for level := range cfg.Delays {
			_ = r.admin.DeleteTopic(cfg.name(r.topic, level+1))
		}
	})
	kilo, hour, compact := "100000", "3600000", "compact,delete"
	if err := r.admin.CreateTopic(name, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: 1, ConfigEntries: map[string]*string{
		"retention.ms": &hour, "retention.bytes": &kilo, "max.message.bytes": &kilo, "cleanup.policy": &compact,
	}}, false); err != nil {
		t.Fatal(err)
	}
	r.awaitTopic(name, 1)
	faults := []string{"it has 1 partitions", "cleanup.policy is compact", "it keeps messages for 1h0m0s: less than its delay of 1h0m0s and 1h0m0s more", "it keeps 100000 bytes", "max.message.bytes is 100000"}
	cfg.NoCreate = false
	open(faults...)
	for _, f := range faults[:4] {
		inspect(name, f)
	}
	if err := r.admin.DeleteTopic(name); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "the topic is gone", func() bool {
		topics, err := NewRetryTopics(r.addrs, testConfig(), cfg)
		if err != nil {
			return false
		}
		for _, c := range []struct {
			group  string
			claims map[string][]int32
			want   string
		}{
			{r.group, map[string][]int32{r.topic: {0, 1}}, ""},
			{"other", nil, `the consumer group is "other"`},
			{r.group, map[string][]int32{r.topic: {2}}, "partition 2 of " + r.topic},
			{r.group, map[string][]int32{name: {0}}, "is consumed and is not among them"},
		} {
			err := topics.topics.Fits(c.group, c.claims)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%+v: %v", c, err)
			}
		}
		return topics.Close() == nil
	})
	cfg.NoCreate = true
	open()
	cfg.Sources = []string{"missing-" + r.topic}
	open("does not exist")
}

// otherClaim is a claim of another topic or partition.
type otherClaim struct {
	*fakeClaim
	topic     string
	partition int32
}

func (c otherClaim) Topic() string    { return c.topic }
func (c otherClaim) Partition() int32 { return c.partition }

// The session of a cooperative group gets claims after its Setup, which has seen none of
// them: what does not fit the retry topics is refused then.
func TestClaimThatDoesNotFitIsRefused(t *testing.T) {
	t.Parallel()
	r, _ := newFakeRig(t)
	opts := []Option{
		WithConfig(cooperativeConfig()), WithGroup(r.group), WithDeadLetters(r.dlq(DLQConfig{Sources: []string{r.topic}})),
		WithRetryTopics(r.retriesOf(RetryConfig{Delays: []time.Duration{time.Hour}})),
	}
	for _, c := range []struct {
		topic     string
		partition int32
		want      string
		waits     bool
	}{
		{"refunds", 0, `RetryConfig.Sources: topic "refunds"`, false},
		{r.topic, 1, "partition 1 of orders has none to be parked in: kafka-topics.sh --alter", true}, // it can be added
	} {
		var own logged
		h := Wrap(adaptertest.Guard(t, guard.Config{Policy: parking(2)}), nothing, append(opts, WithLogger(slog.New(slog.NewTextHandler(&own, nil))))...)
		s, end := setup(t, h)
		ended := make(chan error, 1)
		go func() { ended <- h.ConsumeClaim(s, otherClaim{newFakeClaim(), c.topic, c.partition}) }()
		adaptertest.Eventually(t, "the claim ends, or waits", func() bool { return len(ended) == 1 || own.has("the claim waits") })
		end(nil)
		err, refused := <-ended, h.(*handler).takeRefused()
		switch {
		case c.waits:
			if err != nil || refused != nil || !own.has(c.want) {
				t.Errorf("%v, refused %v, and %q is not logged", err, refused, c.want)
			}
		case !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), c.want):
			t.Errorf("%q is not in: %v", c.want, err)
		case !errors.Is(refused, ErrUnsuitable):
			t.Errorf("Consume would begin again: %v", refused)
		}
	}
}

// Without an order, and without a key, each message is parked by itself; it comes
// back as it was.
func TestParkedWithoutOrder(t *testing.T) {
	t.Parallel()
	for _, order := range []guard.Order{guard.OrderNone, guard.OrderKey} {
		const delay = 2 * time.Second
		fake, _ := newFakeRig(t)
		r := fake.parks(delay)
		j := r.j
		j.again = true // no order
		r.failUntilParked(1, 0)
		policy := parking(2)
		policy.Order = order
		m := r.start(policy)
		stop := r.pulse()
		adaptertest.Eventually(t, "it runs", func() bool { return r.committed(0) > 0 })
		var key func(int) string
		if order == guard.OrderNone {
			key = func(int) string { return "a" }
		}
		begun := time.Now()
		r.publish(0, 1, nil, key)
		adaptertest.Eventually(t, "one is parked", func() bool { return r.parked(0) == 1 })
		r.publish(1, 5, nil, key)
		adaptertest.Eventually(t, "the others are handled", func() bool { return j.handled() >= 4 })
		if n := j.handled(); n > 4 && time.Since(begun) < delay {
			t.Errorf("%d handled before the parked one was due", n)
		}
		adaptertest.Eventually(t, "it is handled", func() bool { return j.handled() == 5 })
		if n := r.end(r.retryTopic(1), 0); n > 4 { // tries until the journal was told
			t.Errorf("%d records", n)
		}
		stop()
		m.stop()
	}
}
