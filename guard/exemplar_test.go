// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/hex"
	"testing"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// What is recorded of one message leads to the trace of the call, or of the write, that it
// tells of.
func TestExemplarsLeadToTraces(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		reader, spans := sdkmetric.NewManualReader(), tracetest.NewSpanRecorder()
		g := Must(New(Config{}, WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))),
			WithTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)))))
		s := Must(Open(g, SourceConfig{Name: "s", Destination: "orders", DeadLetters: &testWriter{}}, Limits{}, &testPort{}, func(ctx context.Context, m int) error {
			switch {
			case m == 1 && Attempt(ctx) == 1: // succeeds when retried
				return errBad
			case m == 2:
				return Permanent(errBad)
			}
			return nil
		}))
		in := make(chan int)
		go func() { _ = s.Run(context.Background(), in) }()
		for m := range 3 {
			in <- m
			time.Sleep(10 * time.Second)
		}
		closeGuard(t, g)
		names := map[string]string{}
		for _, sp := range spans.Ended() {
			names[sp.SpanContext().SpanID().String()] = sp.Name()
		}
		var rm metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &rm); err != nil {
			t.Fatal(err)
		}
		const call, write = "process orders", "dead_letter t"
		want := map[string]string{metricProcess: call, metricRecovery: call, metricFailures: call, metricDeadLetters: write, metricWrite: write}
		got := map[string]map[string]int{}
		note := func(metric string, spanID []byte) {
			if got[metric] == nil {
				got[metric] = map[string]int{}
			}
			got[metric][names[hex.EncodeToString(spanID)]]++
		}
		for _, m := range rm.ScopeMetrics[0].Metrics {
			switch d := m.Data.(type) {
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					for _, e := range p.Exemplars {
						note(m.Name, e.SpanID)
					}
				}
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					for _, e := range p.Exemplars {
						note(m.Name, e.SpanID)
					}
				}
			}
		}
		for metric, span := range want {
			if len(got[metric]) != 1 || got[metric][span] == 0 {
				t.Errorf("%s leads to %v, want %q", metric, got[metric], span)
			}
		}
		if n := got[metricFailures][call]; n != 2 {
			t.Errorf("%d failures lead to a trace, want 2", n)
		}
	})
}
