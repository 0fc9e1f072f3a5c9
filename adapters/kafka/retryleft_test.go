// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// leave puts records into a topic as a claim would that parked messages of a source.
func (r *rig) leave(group, topic, source string, partition int32, n int) {
	r.t.Helper()
	for i := range n {
		r.park(topic, parkedRecord{source: source, partition: partition, offset: int64(i), key: "a", value: "7", group: group})
	}
}

// commit commits an offset of the rig's group, by nobody's generation.
func (r *rig) commit(topic string, partition int32, offset int64, meta string) {
	r.t.Helper()
	to := map[string]map[int32]sarama.OffsetAndMetadata{topic: {partition: {Offset: offset, Metadata: meta, LeaderEpoch: -1}}}
	resp, err := r.admin.AlterConsumerGroupOffsets(r.group, to, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	if code := resp.Errors[topic][partition]; code != sarama.ErrNoError {
		r.t.Fatal(code)
	}
}

// What was parked in a topic that a configuration does not name any more is refused,
// and found by Inspect, until it is done or gone.
func TestLeftBehindIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	before := RetryConfig{Sources: []string{r.topic}, Group: r.group, Delays: []time.Duration{time.Minute, time.Hour, 2 * time.Hour}}
	r.retries(before.Delays...)
	third, first := before.name(r.topic, 3), before.name(r.topic, 1)
	check := func(what string, cfg RetryConfig, want ...string) {
		t.Helper()
		topics, err := NewRetryTopics(r.addrs, testConfig(), cfg)
		if err == nil {
			err = topics.Close()
		}
		found, inspectErr := Inspect(r.client, Target{DLQ: DLQConfig{Sources: cfg.Sources}, Retry: &cfg})
		if (err == nil) != (len(want) == 0) || err != nil && !errors.Is(err, ErrUnsuitable) || inspectErr != nil {
			t.Errorf("%s: %v, %v", what, err, inspectErr)
		}
		for _, w := range want {
			if err != nil && !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q is not in: %v", what, w, err)
			}
			if !slices.ContainsFunc(found, func(f guard.Finding) bool {
				return f.Severity == guard.Danger && strings.Contains(f.Where+": "+f.What+": "+f.Fix, w)
			}) {
				t.Errorf("%s: %q is not in: %v", what, w, found)
			}
		}
		for _, f := range found {
			if len(want) == 0 && strings.Contains(f.What, "nobody reads") {
				t.Errorf("%s: %v", what, f)
			}
		}
	}
	fewer := before
	fewer.Delays = before.Delays[:2]
	again := before
	again.Topic = "{topic}.{group}.again.{level}"
	t.Cleanup(func() {
		for level := range again.Delays {
			_ = r.admin.DeleteTopic(again.name(r.topic, level+1))
		}
	})
	check("nothing is parked", fewer)
	r.leave(r.group, third, "another-"+r.topic, 0, 1)
	check("of a source that is another's", fewer)
	r.leave(r.group, third, r.topic, 1, 3)
	check("as it was", before)
	two := []string{"topic " + third + ": up to 3 messages of " + r.topic + " that group " + r.group + " parked are in partition 1", "--delete --topic " + third}
	check("fewer delays", fewer, two...)
	r.commit(third, 1, 1, offsets.Encode(1, nil))
	check("one is done", fewer, "up to 2 messages")
	r.commit(third, 1, 1, offsets.Encode(1, []int64{2}))
	check("two are done, one of them ahead", fewer, "up to 2 messages")
	r.commit(third, 1, 2, offsets.Encode(2, []int64{2}))
	check("all are done, the last ahead", fewer)

	r.leave(r.group, first, r.topic, 0, 2)
	check("topics of another name, and no offset of the old", again)
	r.commit(first, 0, 0, "")
	check("an offset that is none of a retry topic", again)
	r.commit(first, 0, 1, offsets.Encode(1, nil))
	check("topics of another name", again, "topic "+first+": up to 1 messages")
	r.commit(first, 0, 2, offsets.Encode(2, nil))
	check("these are done", again)

	// Of another group only Inspect knows, and not whether it comes back.
	r.leave(r.group, first, r.topic, 0, 1)
	other := before
	other.Group = "other-" + r.group
	found, err := Inspect(r.client, Target{DLQ: DLQConfig{Sources: other.Sources}, Retry: &other})
	if err != nil {
		t.Error(err)
	}
	if !slices.ContainsFunc(found, func(f guard.Finding) bool {
		return f.Severity == guard.Warning && f.Where == "topic "+first && strings.Contains(f.What, "group "+r.group+" parked are in partition 0, and that group has no members")
	}) {
		t.Errorf("nothing about the group of before in %v", found)
	}
	m := r.join(testConfig(), rawHandler{func(s sarama.ConsumerGroupSession, _ sarama.ConsumerGroupClaim) error {
		<-s.Context().Done()
		return nil
	}})
	defer m.stop()
	adaptertest.Eventually(t, "a group with members is left alone", func() bool {
		found, err := Inspect(r.client, Target{DLQ: DLQConfig{Sources: other.Sources}, Retry: &other})
		return err == nil && !slices.ContainsFunc(found, func(f guard.Finding) bool { return f.Where == "topic "+first })
	})
}
