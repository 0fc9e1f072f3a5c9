// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// What is parked has failed before: when it falls due together and fails again, that is
// no outage. The breaker stays closed, only poison is dead-lettered, and all is drained.
func TestRetryTopicsOpenNoBreaker(t *testing.T) {
	adaptertest.NotShort(t, "load of 12s")
	t.Parallel()
	const (
		n, keys, rate = 2500, 24, 200 // messages, and how many a second
		flaky         = 4 * time.Second
	)
	r := newRig(t, 2).parks(500*time.Millisecond, 1500*time.Millisecond, 4500*time.Millisecond)
	var own logged
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: guard.OrderKey, Workers: 4}}, guard.WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
	var mu sync.Mutex
	since := map[int]time.Time{}
	done := map[int]bool{}
	poison := func(i int) bool { return i%251 == 7 }
	m := r.join(testConfig(), Wrap(g, func(_ context.Context, m *sarama.ConsumerMessage) error {
		i, err := strconv.Atoi(string(m.Value))
		if err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		if poison(i) {
			return errDown
		}
		if i%101 == 31 {
			if since[i].IsZero() {
				since[i] = time.Now()
			}
			if time.Since(since[i]) < flaky {
				return errDown
			}
		}
		done[i] = true
		return nil
	}, WithDeadLetters(r.letters), WithRetryTopics(r.retries)))
	for from := 0; from < n; from += rate / 10 { // in turns over the keys: a key has few that fail
		r.publish(from, from+rate/10, func(i int) int32 { return int32(i * 7 % keys % 2) }, func(i int) string { return fmt.Sprint("k", i*7%keys) })
		time.Sleep(100 * time.Millisecond)
	}
	begun := time.Now()
	dying := 0
	for i := range n {
		if poison(i) {
			dying++
		}
	}
	letters := func() int64 { return r.end(r.topic+".dlq", 0) + r.end(r.topic+".dlq", 1) }
	handled := func() int { mu.Lock(); defer mu.Unlock(); return len(done) }
	adaptertest.Eventually(t, "all are handled", func() bool { return handled() == n-dying })
	adaptertest.Eventually(t, "poison is dead-lettered", func() bool { return letters() >= int64(dying) })
	t.Logf("drained %s after the load", time.Since(begun).Round(time.Millisecond))
	if trips := own.count("breaker opened"); trips > 0 {
		t.Errorf("the breaker opened %d times", trips)
	}
	if dead := letters(); dead != int64(dying) {
		t.Errorf("%d dead letters, %d are poison", dead, dying)
	}
	m.stop()
}
