// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command otlp exports the spans and metrics of a guarded JetStream consumer by
// OTLP: one trace goes from the producer to the dead letter.
//
// It is a module of its own, so that the exporter is no dependency of stormguard.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	sgnats "github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/examples/internal/embedded"
	"github.com/stormguard-mq/stormguard/guard"
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "otlp:", err)
		os.Exit(1)
	}
}

func run(out io.Writer) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	collector := newCollector() // yours: an OpenTelemetry Collector on localhost:4318
	defer collector.close()

	spans, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(collector.url+"/v1/traces"))
	if err != nil {
		return err
	}
	figures, err := otlpmetrichttp.New(ctx, otlpmetrichttp.WithEndpointURL(collector.url+"/v1/metrics"))
	if err != nil {
		return err
	}
	traces := sdktrace.NewTracerProvider(sdktrace.WithBatcher(spans))
	meters := metric.NewMeterProvider(metric.WithReader(metric.NewPeriodicReader(figures)))

	// Links by default, as the messaging conventions have it; with
	// guard.WithParentSpans one trace goes all the way.
	w3c := propagation.TraceContext{}
	g, err := guard.New(guard.Config{Group: "billing"},
		guard.WithTracerProvider(traces), guard.WithMeterProvider(meters), guard.WithPropagator(w3c), guard.WithParentSpans())
	if err != nil {
		return err
	}
	sent, err := consumeOne(ctx, g, traces.Tracer("producer"), w3c)
	if err != nil {
		return errors.Join(err, closeGuard(ctx, g))
	}
	// A last look at the metrics belongs before the sources are gone, and the
	// exporters have the rest before the program ends.
	err = errors.Join(meters.ForceFlush(ctx), closeGuard(ctx, g), traces.Shutdown(ctx), meters.Shutdown(ctx))
	if err != nil {
		return err
	}
	for _, name := range []string{"send orders", "process ORDERS/billing", "dead_letter ORDERS"} {
		fmt.Fprintf(out, "%s, in the producer's trace: %t\n", name, collector.inTrace(name, sent.TraceID()))
	}
	fmt.Fprintf(out, "%s exported: %t\n", guard.MetricDeadLetters, collector.has(guard.MetricDeadLetters))
	return nil
}

// consumeOne publishes an order that nobody can handle, with the producer's trace
// in its headers, and waits for its dead letter.
func consumeOne(ctx context.Context, g *guard.Guard, producer trace.Tracer, w3c propagation.TextMapPropagator) (trace.SpanContext, error) {
	nc, stop, err := embedded.Connect()
	if err != nil {
		return trace.SpanContext{}, err
	}
	defer stop()
	js, err := jetstream.New(nc)
	if err != nil {
		return trace.SpanContext{}, err
	}
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders"}})
	if err != nil {
		return trace.SpanContext{}, err
	}
	consumer, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "billing"})
	if err != nil {
		return trace.SpanContext{}, err
	}
	letters, err := sgnats.NewDLQ(ctx, js, sgnats.DLQConfig{Stream: "ORDERS_DLQ"})
	if err != nil {
		return trace.SpanContext{}, err
	}

	ctx, span := producer.Start(ctx, "send orders", trace.WithSpanKind(trace.SpanKindProducer))
	m := &nats.Msg{Subject: "orders", Header: nats.Header{}, Data: []byte("thirteen")}
	w3c.Inject(ctx, propagation.HeaderCarrier(m.Header))
	_, err = js.PublishMsg(ctx, m)
	span.End()
	if err != nil {
		return trace.SpanContext{}, err
	}

	consuming, stopConsuming := context.WithCancel(ctx)
	defer stopConsuming()
	ended := make(chan error, 1)
	go func() {
		ended <- sgnats.Consume(consuming, g, consumer, func(context.Context, jetstream.Msg) error {
			return guard.Permanent(errors.New("not a number"))
		}, sgnats.WithDeadLetters(letters))
	}()
	dead, err := js.Stream(ctx, "ORDERS_DLQ")
	for err == nil && dead.CachedInfo().State.Msgs == 0 {
		time.Sleep(10 * time.Millisecond)
		_, err = dead.Info(ctx)
	}
	stopConsuming()
	return span.SpanContext(), errors.Join(err, <-ended)
}

func closeGuard(ctx context.Context, g *guard.Guard) error {
	_, err := g.Close(ctx)
	return err
}
