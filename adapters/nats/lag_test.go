// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// lag reads stormguard.lag of the only source; -1 if it is not exported.
func lag(t *testing.T, r *sdkmetric.ManualReader) float64 {
	t.Helper()
	var rm metricdata.ResourceMetrics
	if err := r.Collect(t.Context(), &rm); err != nil {
		t.Fatal(err)
	}
	for _, scope := range rm.ScopeMetrics {
		for _, m := range scope.Metrics {
			if d, ok := m.Data.(metricdata.Gauge[float64]); ok && m.Name == "stormguard.lag" {
				return d.DataPoints[0].Value
			}
		}
	}
	return -1
}

// In an outage nothing is delivered, and the lag still rises with what is published. It falls
// again with the deliveries after it.
func TestLagRisesWhileTheWindowIsFull(t *testing.T) {
	t.Parallel()
	const window, n = 8, 1000
	r := newRig(t, jetstream.ConsumerConfig{})
	reader := sdkmetric.NewManualReader()
	g := adaptertest.Guard(t, guard.Config{}, guard.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
	healthy := make(chan struct{})
	handle := func(context.Context, jetstream.Msg) error {
		select {
		case <-healthy:
			return nil
		default:
			return guard.Unavailable(errDown)
		}
	}
	c := consume(t, g, r.consumer, handle, WithWindow(window), func(o *options) { o.lagEvery = 20 * time.Millisecond })
	src := adaptertest.Source(t, g, "S/C")
	r.publish(t, subject, 0, n)
	adaptertest.Eventually(t, "the window is full", func() bool { return src.State().Room == 0 })
	r.publish(t, subject, n, 2*n)
	adaptertest.Eventually(t, "the lag rises", func() bool { return lag(t, reader) >= 2*n-100 && lag(t, reader) == float64(r.info(t).NumPending) })
	close(healthy)
	if err := src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "the lag falls", func() bool { return lag(t, reader) == 0 })
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
}
