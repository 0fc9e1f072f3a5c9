// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"os"
	"regexp"
	"slices"
	"testing"
	"time"

	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/stormguard-mq/stormguard/dlq"
)

// The page lists what is exported, and nothing else.
func TestMetricsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var listed []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_.]+)`").FindAllSubmatch(page, -1) {
		listed = append(listed, string(m[1]))
	}
	exported := []string{
		metricConsumed, metricHandled, metricReturned, metricMessages, metricUsed, metricRetries, metricRefused, metricQuarantined,
		metricAckFailures, metricHoldAge, metricHold, metricBreaker, metricBudget, metricLag,
		metricParked, metricParkedTotal, metricFollowed, metricSpilled,
		metricProcess, metricFailures, metricDeadLetters, metricDLQRatio, metricOvertaken, metricRecovery, metricTransitions, metricStorms, metricWrite, metricDependency,
		metricFleetScope, metricFleetHeard, metricFleetQuorum, metricFleetStorm,
	}
	slices.Sort(listed)
	slices.Sort(exported)
	if !slices.Equal(listed, exported) {
		t.Errorf("documented %v\nexported   %v", listed, exported)
	}
}

// Every metric is exported with the labels it is documented with, and tells
// what happened.
func TestMetricsTellWhatHappened(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		reader := sdkmetric.NewManualReader()
		spans := tracetest.NewSpanRecorder()
		g, err := New(Config{},
			WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))),
			WithTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))),
			WithPropagator(propagation.TraceContext{}))
		if err != nil {
			t.Fatal(err)
		}
		const far = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		port := &tracedPort{parent: far}
		letters := &testWriter{}
		s, err := Open(g, SourceConfig{Name: "s", System: "test", Destination: "orders", DeadLetters: letters}, Limits{}, port, func(_ context.Context, m int) error {
			if m%50 == 49 {
				return Permanent(errDown)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int)
		ended := make(chan error)
		go func() { ended <- s.Run(t.Context(), in) }()
		for m := range 200 {
			in <- m
		}
		time.Sleep(time.Second)
		got := map[string]float64{}
		for _, p := range collect(t, reader) {
			got[p.name] += p.value
		}
		for name, want := range map[string]float64{
			metricConsumed: 200, metricFailures: 4, metricDeadLetters: 4, metricDLQRatio: 1,
			metricHandled: 196, metricReturned: 0, metricRetries: 0,
			metricBreaker: 1, metricLag: 7, metricMessages: 0, metricHold: 0, metricBudget: 20,
		} {
			if v, ok := got[name]; !ok || v != want {
				t.Errorf("%s = %v (%v), want %v", name, v, ok, want)
			}
		}
		if n := got[metricRecovery]; n != 0 {
			t.Errorf("%v recoveries of messages that were dead-lettered", n)
		}
		if n := got[metricProcess]; n < 3 || n > 4 {
			t.Errorf("%v durations sampled of 200", n)
		}
		if rec := letters.recs[0]; rec.TraceParent != far {
			t.Errorf("trace parent %q", rec.TraceParent)
		}
		close(in)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if n := got[metricWrite]; n != 4 {
			t.Errorf("%v writes of 4 dead letters", n)
		}
		named := map[string]int{}
		for _, sp := range spans.Ended() {
			named[sp.Name()]++
			if len(sp.Links()) != 1 || sp.Links()[0].SpanContext.TraceID().String() != far[3:35] || sp.Parent().IsValid() {
				t.Fatalf("%s %v %v", sp.Name(), sp.SpanKind(), sp.Links())
			}
		}
		if len(named) != 2 || named["process orders"] != 200 || named["dead_letter t"] != 4 {
			t.Errorf("spans %v", named)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// tracedPort's messages carry a trace context.
type tracedPort struct {
	testPort
	parent string
}

func (p *tracedPort) Lag() int64 { return 7 }

func (p *tracedPort) Meta(m int) Meta {
	meta := p.testPort.Meta(m)
	meta.Headers = []dlq.Header{{Name: "Traceparent", Value: []byte(p.parent)}}
	return meta
}
