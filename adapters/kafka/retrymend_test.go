// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"strconv"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// A retry topic is deleted and made anew under a claim: the claim begins anew, and
// parks and handles again.
func TestRetryTopicMadeAnew(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	letters := r.dlq(DLQConfig{Sources: []string{r.topic}})
	retries := r.retries(300 * time.Millisecond)
	name := retries.cfg.name(r.topic, 1)
	j := newJournal()
	j.fail(forEver, 0, 1, 2)
	g := adaptertest.Guard(t, guard.Config{Policy: parking(2)})
	j.until = func() bool { return r.end(name, 0) >= 3 }
	m := r.parker(g, j, letters, retries, testConfig())
	stop := r.pulse()
	r.publish(0, 3, nil, strconv.Itoa)
	adaptertest.Eventually(t, "what was parked is handled", func() bool { return j.handled() == 3 && r.parkedLeft(retries) == 0 })
	if err := r.admin.DeleteTopic(name); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "it is made anew", func() bool {
		return r.admin.CreateTopic(name, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: 1}, false) == nil
	})
	j.mu.Lock()
	j.until = func() bool { return r.end(name, 0) > 0 }
	j.mu.Unlock()
	j.fail(forEver, 3)
	r.publish(3, 4, nil, strconv.Itoa)
	adaptertest.Eventually(t, "the claim goes on", func() bool { return j.handled() == 4 })
	stop()
	m.stop()
}
