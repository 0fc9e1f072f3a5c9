// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// An outage of 30s of a topic of 200 partitions in one process: with Scope topic all of
// them share one breaker and its probes. With a breaker each they trip one by one, and
// then take turns to probe; docs/kafka.md has the figures.
func TestCallsOf200PartitionsInAnOutage(t *testing.T) {
	if os.Getenv("STORMGUARD_FULL") != "1" {
		t.Skip("200 partitions and an outage of 30s: STORMGUARD_FULL=1")
	}
	const partitions, outage = 200, 30 * time.Second
	for _, c := range []struct {
		scope guard.Scope
		most  int64
	}{{guard.ScopeTopic, 600}, {guard.ScopePartition, 10 * partitions}} {
		t.Run(c.scope.String(), func(t *testing.T) {
			r := newRig(t, partitions)
			var down atomic.Bool
			var calls, handled atomic.Int64
			g := adaptertest.Guard(t, guard.Config{Scope: c.scope})
			m := r.join(testConfig(), Wrap(g, func(context.Context, *sarama.ConsumerMessage) error {
				if down.Load() {
					calls.Add(1)
					return errDown
				}
				handled.Add(1)
				return nil
			}, WithDeadLetters(r.dlq(DLQConfig{Sources: []string{r.topic}}))))
			n := 0
			round := func() { // a message for each partition
				r.publish(n, n+partitions, func(i int) int32 { return int32(i % partitions) }, nil)
				n += partitions
			}
			round()
			adaptertest.Eventually(t, "all partitions are handled", func() bool { return handled.Load() == int64(n) })
			down.Store(true)
			for began := time.Now(); time.Since(began) < outage; time.Sleep(500 * time.Millisecond) {
				round()
			}
			during := calls.Load()
			down.Store(false)
			back := time.Now()
			adaptertest.Eventually(t, "the rest is handled", func() bool { return handled.Load() == int64(n) })
			t.Logf("%d calls in an outage of %s, %d messages; drained %s later", during, outage, n, time.Since(back).Round(time.Millisecond))
			if during > c.most {
				t.Errorf("%d calls, more than %d", during, c.most)
			}
			m.stop()
			for p := range int32(partitions) {
				if dead := r.end(r.topic+".dlq", p); dead > 0 {
					t.Fatalf("%d dead letters of partition %d", dead, p)
				}
			}
		})
	}
}
