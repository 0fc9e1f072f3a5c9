// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// Two groups whose retry topics have one name pass each other's messages over, at the
// start and later. What does not say whose it is is handled.
func TestRetryTopicsOfTwoGroups(t *testing.T) {
	t.Parallel()
	for _, before := range []int{0, 2} {
		twoGroups(t, before)
	}
}

func twoGroups(t *testing.T, before int) {
	t.Helper()
	r, _ := newFakeRig(t)
	topics := func(group string) *RetryTopics {
		rt, err := NewRetryTopics(r.addrs, testConfig(), RetryConfig{
			Sources: []string{"orders"}, Group: group, Delays: []time.Duration{50 * time.Millisecond}, Topic: "{topic}.shared.{level}",
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = rt.Close() })
		return rt
	}
	ours := topics(r.group)
	letters := r.dlq(DLQConfig{Sources: []string{"orders"}})
	const topic = "orders.shared.1"
	r.leave("other", topic, "orders", 0, before) // of key a and value 7
	r.park(topic, parkedRecord{source: "orders", key: "b", value: "8", offset: 3})
	var mu sync.Mutex
	got := map[string]int{}
	count := func(value string) int {
		mu.Lock()
		defer mu.Unlock()
		return got[value]
	}
	handle := func(_ context.Context, m *sarama.ConsumerMessage) error {
		mu.Lock()
		defer mu.Unlock()
		got[string(m.Value)]++
		return nil
	}
	g := adaptertest.Guard(t, guard.Config{Policy: parking(2)})
	var log logged
	m := r.join(testConfig(), Wrap(g, handle, WithDeadLetters(letters), WithRetryTopics(ours), WithLogger(slog.New(slog.NewTextHandler(&log, nil)))))
	stop := r.pulse()
	adaptertest.Eventually(t, "what says nothing is handled", func() bool { return count("8") == 1 })
	r.leave("other", topic, "orders", 0, 3)
	adaptertest.Eventually(t, "all is passed", func() bool { return r.uncommitted(topic) == 0 })
	if _, _, err := r.producer.SendMessage(&sarama.ProducerMessage{Topic: "orders", Key: sarama.StringEncoder("a"), Value: sarama.StringEncoder("9")}); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "their key is free", func() bool { return count("9") == 1 })
	stop()
	m.stop()
	if n := count("7"); n > 0 || count("8") != 1 {
		t.Errorf("%d of another group were handled, of our own %d", n, count("8"))
	}
	if n := log.count("messages of another group"); n != 1 {
		t.Errorf("said %d times", n)
	}
}
