// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// BenchmarkThroughput compares Wrap with a loop that marks each message and one
// that marks every 64th, in turns on one broker: go test -run=NONE
// -bench=Throughput -benchtime=1x. Each turn reads four partitions of 256 B
// messages as a new group; medians of the rounds are reported, of time and of the
// process's CPU.
func BenchmarkThroughput(b *testing.B) {
	const partitions, n, rounds = 4, 600_000, 7
	r := newRig(b, partitions)
	body := bytes.Repeat([]byte("x"), 256)
	for published := 0; published < n; {
		ms := make([]*sarama.ProducerMessage, min(5000, n-published))
		for i := range ms {
			ms[i] = &sarama.ProducerMessage{Topic: r.topic, Partition: int32((published + i) % partitions), Value: sarama.ByteEncoder(body)}
		}
		if err := r.producer.SendMessages(ms); err != nil {
			b.Fatal(err)
		}
		published += len(ms)
	}
	raw := func(every int64) func(done func()) sarama.ConsumerGroupHandler {
		return func(done func()) sarama.ConsumerGroupHandler {
			return rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
				for m := range c.Messages() {
					done()
					if m.Offset%every == 0 {
						s.MarkMessage(m, "")
					}
				}
				return nil
			}}
		}
	}
	g := adaptertest.Guard(b, guard.Config{})
	shapes := []func(done func()) sarama.ConsumerGroupHandler{
		raw(1), raw(64),
		func(done func()) sarama.ConsumerGroupHandler {
			return Wrap(g, func(context.Context, *sarama.ConsumerMessage) error { done(); return nil })
		},
	}
	turn := func(shape func(done func()) sarama.ConsumerGroupHandler) (took, cpu float64) {
		cfg := *testConfig()
		cfg.Consumer.Offsets.AutoCommit.Interval = time.Second
		group, err := sarama.NewConsumerGroup(r.addrs, fmt.Sprintf("bench-%d", time.Now().UnixNano()), &cfg)
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		var seen atomic.Int64
		var begun time.Time
		var spent time.Duration
		h := shape(func() {
			switch seen.Add(1) {
			case 1:
				begun, spent = time.Now(), used(b)
			case n:
				took, cpu = float64(time.Since(begun))/n, float64(used(b)-spent)/n
				cancel()
			}
		})
		for ctx.Err() == nil {
			if err := group.Consume(ctx, []string{r.topic}, h); err != nil {
				b.Fatal(err)
			}
		}
		if err := group.Close(); err != nil {
			b.Fatal(err)
		}
		return took, cpu
	}
	median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
	for b.Loop() {
		times, cpus := make([][]float64, len(shapes)), make([][]float64, len(shapes))
		var ratios, coalesced, cpuRatios []float64
		for round := range rounds + 1 {
			var t, c [3]float64
			for i := range shapes {
				which := (i + round) % len(shapes)
				t[which], c[which] = turn(shapes[which])
			}
			if round == 0 { // it warms up
				continue
			}
			for i := range shapes {
				times[i], cpus[i] = append(times[i], t[i]), append(cpus[i], c[i])
			}
			ratios, coalesced, cpuRatios = append(ratios, t[0]/t[2]), append(coalesced, t[1]/t[2]), append(cpuRatios, c[2]/c[0])
		}
		b.ReportMetric(median(ratios), "of-raw")
		b.ReportMetric(median(coalesced), "of-raw-coalesced")
		b.ReportMetric(median(cpuRatios), "cpu-of-raw")
		b.ReportMetric(median(times[0]), "raw-ns/msg")
		b.ReportMetric(median(times[2]), "ours-ns/msg")
		b.ReportMetric(median(cpus[0]), "raw-cpu-ns/msg")
		b.ReportMetric(median(cpus[2]), "ours-cpu-ns/msg")
		b.ReportMetric(0, "ns/op")
	}
}

// used is the CPU time of this process.
func used(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Error(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
