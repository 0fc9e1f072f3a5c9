// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/examples/internal/embedded"
	"github.com/stormguard-mq/stormguard/guard"
)

// An order that nobody can handle: one trace has the producer's span, the handler's and
// the dead letter's, and its metrics are exported.
func TestRun(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	collector := newCollector()
	defer collector.close()
	nc, stop, err := embedded.Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}}); err != nil {
		t.Fatal(err)
	}
	sent := produce(ctx, t, js, collector.url)
	consuming, interrupt := context.WithCancel(ctx)
	defer interrupt()
	ended := make(chan error, 1)
	go func() {
		ended <- run(consuming, nc.ConnectedUrl(), collector.url, func(context.Context, jetstream.Msg) error {
			return guard.Permanent(errors.New("not a number"))
		})
	}()
	for n := uint64(0); n == 0; time.Sleep(10 * time.Millisecond) {
		if dead, err := js.Stream(ctx, "ORDERS_DLQ"); err == nil {
			n = dead.CachedInfo().State.Msgs
		} else if !errors.Is(err, jetstream.ErrStreamNotFound) {
			t.Fatal(err)
		}
	}
	interrupt()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for _, name := range []string{"send orders", "process ORDERS/billing", "dead_letter ORDERS"} {
		if !collector.inTrace(name, sent.TraceID()) {
			t.Errorf("the producer's trace has no span %q", name)
		}
	}
	if name := "stormguard.dead_letters"; !collector.has(name) {
		t.Errorf("%s is not exported", name)
	}
}

// produce publishes an order with the producer's trace in its headers.
func produce(ctx context.Context, t *testing.T, js jetstream.JetStream, collector string) trace.SpanContext {
	t.Helper()
	spans, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(collector+"/v1/traces"))
	if err != nil {
		t.Fatal(err)
	}
	traces := sdktrace.NewTracerProvider(sdktrace.WithBatcher(spans))
	ctx, span := traces.Tracer("producer").Start(ctx, "send orders", trace.WithSpanKind(trace.SpanKindProducer))
	m := &nats.Msg{Subject: "orders.new", Header: nats.Header{}, Data: []byte("thirteen")}
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(m.Header))
	_, err = js.PublishMsg(ctx, m)
	span.End()
	if err = errors.Join(err, traces.Shutdown(ctx)); err != nil {
		t.Fatal(err)
	}
	return span.SpanContext()
}
