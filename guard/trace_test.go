// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
)

// Handler call and dead letter are joined to the message's trace, by links or as
// children; a message without a trace is given one, and a letter that could not
// be written says so in its span.
func TestSpansJoinTheMessagesTrace(t *testing.T) {
	const far = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for name, c := range map[string]struct {
		parent string
		opts   []Option
	}{
		"links":   {far, nil},
		"parents": {far, []Option{WithParentSpans()}},
		"none":    {"", []Option{WithParentSpans()}},
	} {
		bubble(t, name, func(t *testing.T) {
			spans := tracetest.NewSpanRecorder()
			g, err := New(Config{}, append(c.opts,
				WithTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))), WithPropagator(propagation.TraceContext{}))...)
			if err != nil {
				t.Fatal(err)
			}
			letters := &testWriter{fail: 1}
			var inHandler trace.SpanContext
			s, err := Open(g, SourceConfig{Name: "s", System: "test", Destination: "orders", DeadLetters: letters}, Limits{},
				&tracedPort{parent: c.parent}, func(ctx context.Context, _ int) error {
					inHandler = trace.SpanContextFromContext(ctx)
					return Permanent(errors.New("hopeless"))
				})
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 1)
			in <- 0
			close(in)
			if err := s.Run(t.Context(), in); err != nil {
				t.Error(err)
			}
			time.Sleep(time.Minute)
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
			all := spans.Ended()
			if len(all) != 3 || len(letters.recs) != 1 {
				t.Fatalf("%d spans, %d letters", len(all), len(letters.recs))
			}
			handled, failed, written := all[0], all[1], all[2]
			if handled.SpanKind() != trace.SpanKindConsumer || handled.SpanContext().SpanID() != inHandler.SpanID() || handled.Status().Code != codes.Error {
				t.Errorf("%s %s %v", handled.Name(), handled.SpanKind(), handled.Status())
			}
			if failed.Status().Code != codes.Error || written.Status().Code != codes.Unset || written.SpanKind() != trace.SpanKindProducer {
				t.Errorf("%v, then %v", failed.Status(), written.Status())
			}
			for _, sp := range all {
				linked := len(sp.Links()) == 1 && sp.Links()[0].SpanContext.TraceID().String() == far[3:35]
				child := sp.Parent().SpanID().String() == far[36:52] && sp.SpanContext().TraceID().String() == far[3:35]
				if linked != (name == "links") || child != (name == "parents") {
					t.Errorf("%s: links %v, parent %v", sp.Name(), sp.Links(), sp.Parent())
				}
			}
			got := letters.recs[0].TraceParent
			if c.parent == "" {
				if sc := written.SpanContext(); got != "00-"+sc.TraceID().String()+"-"+sc.SpanID().String()+"-01" {
					t.Errorf("trace parent %q of the letter's span %v", got, sc)
				}
			} else if got != far {
				t.Errorf("trace parent %q", got)
			}
		})
	}
}
