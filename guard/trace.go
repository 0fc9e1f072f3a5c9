// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/dlq"
)

// span starts the span of a handler call.
func (s *Source[M]) span(ctx context.Context, m M) (context.Context, trace.Span) {
	opts := []trace.SpanStartOption{
		trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithAttributes(s.metrics.attrs...),
		trace.WithAttributes(attribute.String("messaging.operation.type", "process")),
	}
	if s.begin() {
		meta, err := s.meta(m)
		s.end()
		if err == nil {
			opts = append(opts, trace.WithAttributes(placeOf(meta.Origin)...))
			if s.g.propagator != nil {
				ctx, opts = s.g.relate(ctx, s.g.extract(&meta.Headers), opts)
			}
		}
	}
	return s.metrics.tracer.Start(ctx, s.metrics.name, opts...) //nolint:spancheck // the caller ends it
}

// placeOf has the attributes that identify the message in its source.
func placeOf(o dlq.Origin) (attrs []attribute.KeyValue) {
	if o.MessageID != "" {
		attrs = append(attrs, attribute.String("messaging.message.id", o.MessageID))
	}
	if o.HasOffset && o.System == "kafka" {
		attrs = append(attrs, attribute.Int64("messaging.kafka.offset", o.Offset))
	}
	if o.Sequence > 0 {
		attrs = append(attrs, attribute.Int64("messaging.nats.stream.sequence", int64(o.Sequence)))
	}
	return attrs
}

// extract is the trace context in the headers of a message.
func (g *Guard) extract(h *[]dlq.Header) trace.SpanContext {
	return trace.SpanContextFromContext(g.propagator.Extract(context.Background(), headerCarrier{h}))
}

// relate joins a new span to the message's trace: by a link, or as its child.
func (g *Guard) relate(ctx context.Context, far trace.SpanContext, opts []trace.SpanStartOption) (context.Context, []trace.SpanStartOption) {
	switch {
	case !far.IsValid():
	case g.parents:
		ctx = trace.ContextWithRemoteSpanContext(ctx, far)
	default:
		opts = append(opts, trace.WithLinks(trace.Link{SpanContext: far}))
	}
	return ctx, opts
}

// trace starts the span of writing a dead letter, if there is a tracer. With a propagator
// the dead letter keeps the message's trace context, or gets the span's if the message has
// none. The caller calls end with the error of the write.
func (g *Guard) trace(ctx context.Context, r *dlq.Record) (_ context.Context, end func(error)) {
	end = func(error) {}
	carrier := headerCarrier{&r.Headers}
	var far trace.SpanContext
	if g.propagator != nil {
		far = g.extract(&r.Headers)
	}
	if g.metrics.tracer != nil {
		var opts []trace.SpanStartOption
		ctx, opts = g.relate(ctx, far, []trace.SpanStartOption{
			trace.WithSpanKind(trace.SpanKindProducer),
			trace.WithAttributes(attribute.String("messaging.system", r.Origin.System),
				attribute.String("messaging.operation.name", "dead_letter"), attribute.String("messaging.operation.type", "send"),
				attribute.String("stormguard.origin", r.Origin.Source), attribute.String("stormguard.reason", string(r.Reason)),
				attribute.Int("stormguard.attempts", r.Attempts)),
		})
		var span trace.Span
		ctx, span = g.metrics.tracer.Start(ctx, "dead_letter "+r.Origin.Source, opts...)
		if g.propagator != nil && !far.IsValid() {
			g.propagator.Inject(ctx, carrier)
		}
		end = func(err error) {
			switch {
			case errors.Is(err, dlq.ErrPutOff):
				span.SetAttributes(attribute.Bool("stormguard.put_off", true))
			case err != nil:
				span.SetStatus(codes.Error, "")
				span.SetAttributes(attribute.String("error.type", dlq.DescribeError(err, nil).Type))
			}
			span.End()
		}
	}
	if g.propagator != nil {
		r.TraceParent, r.TraceState = carrier.Get("traceparent"), carrier.Get("tracestate")
	}
	return ctx, end
}

// headerCarrier reads and writes trace context in message headers. It ignores the case of
// names, because NATS clients change it. Of several equal names the last counts.
type headerCarrier struct{ h *[]dlq.Header }

var _ propagation.TextMapCarrier = headerCarrier{}

func (c headerCarrier) Get(key string) string {
	for _, h := range slices.Backward(*c.h) {
		if strings.EqualFold(h.Name, key) {
			switch v := h.Value.(type) {
			case string:
				return v
			case []byte:
				return string(v)
			default:
				return fmt.Sprint(v)
			}
		}
	}
	return ""
}

func (c headerCarrier) Set(key, value string) {
	*c.h = append(slices.Clip(*c.h), dlq.Header{Name: key, Value: value})
}

func (c headerCarrier) Keys() []string {
	keys := make([]string, len(*c.h))
	for i, h := range *c.h {
		keys[i] = h.Name
	}
	return keys
}
