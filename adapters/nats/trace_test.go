// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// A trace goes from the producer through the broker and the guarded handler to
// the dead letter.
func TestTraceReachesTheDeadLetter(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	w3c := propagation.TraceContext{}
	exporter := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter))
	g, err := guard.New(guard.Config{}, guard.WithTracerProvider(provider), guard.WithPropagator(w3c), guard.WithParentSpans())
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close(context.Background())
	letters, err := NewDLQ(adaptertest.Context(t), r.js, DLQConfig{Stream: "DLQ", Subject: "dlq.{stream}"})
	if err != nil {
		t.Fatal(err)
	}
	inHandler := make(chan trace.SpanContext, 1)
	c := consume(t, g, r.consumer, func(ctx context.Context, _ jetstream.Msg) error {
		inHandler <- trace.SpanContextFromContext(ctx)
		return guard.Permanent(errors.New("no such order"))
	}, WithDeadLetters(letters))

	ctx, sent := provider.Tracer("producer").Start(adaptertest.Context(t), "send s.x")
	m := &nats.Msg{Subject: "s.x", Header: nats.Header{}, Data: []byte("1")}
	w3c.Inject(ctx, propagation.HeaderCarrier(m.Header)) // "Traceparent": canonicalised
	if _, err := r.js.PublishMsg(ctx, m); err != nil {
		t.Fatal(err)
	}
	sent.End()

	handled := <-inHandler
	var letter jetstream.Msg
	adaptertest.Eventually(t, "a dead letter", func() bool {
		if all := r.letters(t, "DLQ"); len(all) > 0 {
			letter = all[0]
		}
		return letter != nil
	})
	if err := c.Stop(t); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if id := sent.SpanContext().TraceID(); handled.TraceID() != id {
		t.Errorf("the handler is in trace %s, the producer in %s", handled.TraceID(), id)
	}
	rec, err := ReadDeadLetter(letter)
	if err != nil {
		t.Fatal(err)
	}
	parsed := trace.SpanContextFromContext(w3c.Extract(context.Background(), propagation.MapCarrier{"traceparent": rec.TraceParent}))
	if parsed.TraceID() != sent.SpanContext().TraceID() || parsed.SpanID() != sent.SpanContext().SpanID() {
		t.Errorf("the dead letter's trace parent is %q, the message was sent by %s", rec.TraceParent, sent.SpanContext().SpanID())
	}
	kinds := map[trace.SpanKind]int{}
	for _, sp := range exporter.GetSpans() {
		if sp.SpanContext.TraceID() != sent.SpanContext().TraceID() {
			t.Errorf("%s is in a trace of its own", sp.Name)
		}
		kinds[sp.SpanKind]++
	}
	if kinds[trace.SpanKindConsumer] != 1 || kinds[trace.SpanKindProducer] != 1 {
		t.Errorf("spans by kind: %v", kinds)
	}
}
