// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command otlp exports the spans and metrics of a guarded JetStream consumer over OTLP. One
// trace goes from the producer to the dead letter. The program runs until it is
// interrupted.
//
// It is a separate module, so that the exporter is no dependency of stormguard.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/guard"
)

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("STORMGUARD_NATS"), "nats://127.0.0.1:4222"), "the server, with JetStream")
	collector := flag.String("otlp", cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT"), "http://127.0.0.1:4318"), "the collector, OTLP over HTTP")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *url, *collector, bill)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// bill stands for your program's call of its dependency. ctx has the span.
func bill(_ context.Context, m jetstream.Msg) error {
	log.Printf("billed order %s", m.Data())
	return nil
}

func run(ctx context.Context, url, collector string, handle func(context.Context, jetstream.Msg) error) (err error) {
	spans, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(collector+"/v1/traces"))
	if err != nil {
		return err
	}
	figures, err := otlpmetrichttp.New(ctx, otlpmetrichttp.WithEndpointURL(collector+"/v1/metrics"))
	if err != nil {
		return err
	}
	traces := sdktrace.NewTracerProvider(sdktrace.WithBatcher(spans))
	meters := metric.NewMeterProvider(metric.WithReader(metric.NewPeriodicReader(figures)))
	// By default spans of a message link to the producer's span, as the messaging
	// conventions say. With guard.WithParentSpans all are one trace.
	g, err := guard.New(guard.Config{Group: "billing"}, guard.WithLogger(slog.Default()),
		guard.WithTracerProvider(traces), guard.WithMeterProvider(meters),
		guard.WithPropagator(propagation.TraceContext{}), guard.WithParentSpans())
	if err != nil {
		return err
	}
	defer func() { // export metrics once more while the sources exist
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		flushErr := meters.ForceFlush(ctx)
		_, closeErr := g.Close(ctx)
		err = errors.Join(err, flushErr, closeErr, traces.Shutdown(ctx), meters.Shutdown(ctx))
	}()

	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.PingInterval(10*time.Second), nats.FlusherTimeout(5*time.Second)) // by default nats.go gives up after two minutes
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}})
	if err != nil {
		return err // a stream of that name with other settings exists
	}
	consumer, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "billing"})
	if err != nil {
		return err
	}
	letters, err := guardnats.NewDLQ(ctx, js, guardnats.DLQConfig{Stream: "ORDERS_DLQ"})
	if err != nil {
		return err
	}
	return guardnats.Consume(ctx, g, consumer, handle, guardnats.WithDeadLetters(letters), guardnats.WithLogger(slog.Default()))
}
