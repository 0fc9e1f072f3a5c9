// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package amqp

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// BenchmarkThroughput compares Consume and Deliveries with a plain loop over
// the client's deliveries, in turns on one broker: go test -run=NONE
// -bench=Throughput -benchtime=1x. Each turn drains a queue that was filled
// before; the medians of the rounds are reported.
func BenchmarkThroughput(b *testing.B) {
	for _, work := range []time.Duration{0, 10 * time.Microsecond} {
		b.Run(fmt.Sprintf("work=%s", work), func(b *testing.B) {
			const n, prefetch = 40_000, 256
			s := shared(b, brokers.RabbitMQ4)
			r := newRig(b, s, Quorum, nil)
			fill := func() {
				body := make([]byte, 256)
				ms := make([]amqp091.Publishing, 1000)
				for i := range ms {
					ms[i] = amqp091.Publishing{Body: body, DeliveryMode: amqp091.Persistent}
				}
				for range n / len(ms) {
					if err := r.send(context.Background(), ms...); err != nil {
						b.Fatal(err)
					}
				}
			}
			spin := func() {
				if work > 0 {
					for start := time.Now(); time.Since(start) < work; {
					}
				}
			}
			raw := func(wrap bool, g *guard.Guard) time.Duration {
				fill()
				conn, ch, in := r.openedAs("c", amqp091.Config{}, prefetch)
				defer conn.Close()
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				start := time.Now()
				if wrap {
					var err error
					if in, err = Deliveries(ctx, g, ch, in, WithPrefetch(prefetch)); err != nil {
						b.Fatal(err)
					}
				}
				left := n
				for d := range in {
					spin()
					if err := d.Ack(false); err != nil {
						b.Fatal(err)
					}
					if left--; left == 0 {
						break
					}
				}
				took := time.Since(start)
				cancel()
				if wrap {
					for range in {
					}
				}
				if err := ch.Cancel("c", false); err != nil {
					b.Fatal(err)
				}
				return took
			}
			g := adaptertest.Guard(b, guard.Config{})
			guarded := func() time.Duration {
				fill()
				left, done := n, make(chan struct{})
				start := time.Now()
				c := r.consume(g, func(context.Context, amqp091.Delivery) error {
					spin()
					if left--; left == 0 {
						close(done)
					}
					return nil
				}, WithPrefetch(prefetch))
				<-done
				took := time.Since(start)
				if err := c.Stop(b); err != nil {
					b.Fatal(err)
				}
				return took
			}
			raw(false, nil)
			guarded()
			const rounds = 5
			var ratios, passive, again, raws []float64
			for b.Loop() {
				for range rounds {
					a := raw(false, nil)
					z := guarded()
					p := raw(true, g)
					a2 := raw(false, nil)
					ratios = append(ratios, float64(a)/float64(z))
					passive = append(passive, float64(a2)/float64(p))
					again = append(again, float64(a)/float64(a2))
					raws = append(raws, float64(a)/n)
				}
			}
			median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
			b.ReportMetric(median(ratios), "of-raw")
			b.ReportMetric(median(passive), "passive-of-raw")
			b.ReportMetric(median(again), "raw-of-raw")
			b.ReportMetric(median(raws), "raw-ns/msg")
			b.ReportMetric(0, "ns/op")
		})
	}
}
