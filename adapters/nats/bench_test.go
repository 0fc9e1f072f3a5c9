// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// BenchmarkThroughput compares Consume with nats.go's own Consume, in turns on
// one server: go test -run=NONE -bench=Throughput -benchtime=1x. Each turn
// drains a stream of its own durable; the medians of the rounds are reported.
func BenchmarkThroughput(b *testing.B) {
	for _, work := range []time.Duration{0, 10 * time.Microsecond} {
		n := 150_000
		if work > 0 {
			n = 60_000
		}
		b.Run(fmt.Sprintf("work=%s", work), func(b *testing.B) {
			r := newRig(b, jetstream.ConsumerConfig{})
			body := make([]byte, 256)
			for i := range n {
				if _, err := r.js.PublishAsync("s.x", body); err != nil {
					b.Fatal(err)
				}
				if i%1000 == 999 {
					<-r.js.PublishAsyncComplete()
				}
			}
			<-r.js.PublishAsyncComplete()
			spin := func() {
				if work > 0 {
					for start := time.Now(); time.Since(start) < work; {
					}
				}
			}
			turn := 0
			fresh := func() jetstream.Consumer {
				turn++
				return r.durable(b, jetstream.ConsumerConfig{Durable: fmt.Sprintf("bench%d", turn)})
			}
			raw := func() time.Duration {
				c, left, done := fresh(), n, make(chan struct{})
				start := time.Now()
				cc, err := c.Consume(func(m jetstream.Msg) {
					spin()
					_ = m.Ack()
					if left--; left == 0 {
						close(done)
					}
				})
				if err != nil {
					b.Fatal(err)
				}
				<-done
				took := time.Since(start)
				cc.Stop()
				<-cc.Closed()
				return took
			}
			g := adaptertest.Guard(b, guard.Config{})
			guarded := func() time.Duration {
				c, left, done := fresh(), n, make(chan struct{})
				ctx, cancel := context.WithCancel(context.Background())
				ended := make(chan error)
				start := time.Now()
				go func() {
					ended <- Consume(ctx, g, c, func(context.Context, jetstream.Msg) error {
						spin()
						if left--; left == 0 {
							close(done)
						}
						return nil
					})
				}()
				<-done
				took := time.Since(start)
				cancel()
				if err := <-ended; err != nil {
					b.Fatal(err)
				}
				return took
			}
			raw()
			guarded()
			const rounds = 7
			var ratios, raws, ours []float64
			for b.Loop() {
				for i := range rounds {
					var a, z time.Duration
					if i%2 == 0 {
						a, z = raw(), guarded()
					} else {
						z, a = guarded(), raw()
					}
					raws, ours = append(raws, float64(a)/float64(n)), append(ours, float64(z)/float64(n))
					ratios = append(ratios, float64(a)/float64(z))
				}
			}
			median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
			b.ReportMetric(median(ratios), "of-raw")
			b.ReportMetric(ratios[0], "min-of-raw")
			b.ReportMetric(ratios[len(ratios)-1], "max-of-raw")
			b.ReportMetric(median(raws), "raw-ns/msg")
			b.ReportMetric(median(ours), "ours-ns/msg")
			b.ReportMetric(0, "ns/op")
		})
	}
}
