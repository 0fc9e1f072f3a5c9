// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// A trace goes from the producer through the broker to the handler and into the
// dead letter, whether the producer's client writes it as text or as bytes.
func TestTraceFromProducerToDeadLetter(t *testing.T) {
	t.Parallel()
	spans := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	propagator := propagation.TraceContext{}
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	letters := r.deadLetters(Quorum)
	g := adaptertest.Guard(t, guard.Config{}, guard.WithTracerProvider(provider), guard.WithPropagator(propagator))

	produced := map[string]trace.SpanContext{}
	for i, kind := range []string{"text", "bytes", "none"} {
		ctx, span := provider.Tracer("producer").Start(context.Background(), "send", trace.WithSpanKind(trace.SpanKindProducer))
		carrier := propagation.MapCarrier{}
		propagator.Inject(ctx, carrier)
		span.End()
		headers := amqp091.Table{}
		switch kind {
		case "text":
			headers["traceparent"] = carrier["traceparent"]
		case "bytes":
			headers["traceparent"] = []byte(carrier["traceparent"])
		}
		produced[kind] = span.SpanContext()
		m := amqp091.Publishing{Headers: headers, Body: []byte(kind), DeliveryMode: amqp091.Persistent}
		if err := r.send(adaptertest.Context(t), m); err != nil {
			t.Fatal(i, err)
		}
	}
	inside := make(chan trace.SpanContext, 3)
	c := r.consume(g, func(ctx context.Context, _ amqp091.Delivery) error {
		inside <- trace.SpanContextFromContext(ctx)
		return guard.Permanent(errDown)
	}, WithDeadLetters(letters))
	dead := map[string]amqp091.Delivery{}
	adaptertest.Eventually(t, "three dead letters", func() bool {
		all, err := r.get(r.queue + ".dlq")
		for _, d := range all {
			dead[string(d.Body)] = d
		}
		return err == nil && len(dead) == 3
	})
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
	linked := map[trace.SpanID]bool{}
	for _, s := range spans.GetSpans() {
		if s.SpanKind == trace.SpanKindConsumer {
			for _, l := range s.Links {
				linked[l.SpanContext.SpanID()] = true
			}
		}
	}
	for range 3 {
		select {
		case sc := <-inside:
			if !sc.IsValid() {
				t.Error("the handler has no span")
			}
		case <-time.After(time.Second):
			t.Fatal("a handler was not called")
		}
	}
	for kind, from := range produced {
		rec, err := ReadDeadLetter(dead[kind])
		if err != nil {
			t.Fatal(err)
		}
		in := trace.SpanContextFromContext(propagator.Extract(context.Background(), propagation.MapCarrier{"traceparent": rec.TraceParent}))
		switch {
		case !in.IsValid():
			t.Errorf("%s: no trace in the dead letter: %q", kind, rec.TraceParent)
		case kind == "none":
			if linked[from.SpanID()] {
				t.Error("a link to a span that the message did not name")
			}
		case in.TraceID() != from.TraceID() || in.SpanID() != from.SpanID() || !linked[from.SpanID()]:
			t.Errorf("%s: produced in %s, dead in %s, linked %t", kind, from.SpanID(), in.SpanID(), linked[from.SpanID()])
		}
	}
}
