// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// Calls says that a handler now calls a dependency, such as a database or a service. It
// returns a function that takes the result of the call:
//
//	done := guard.Calls(ctx, "payments-db")
//	_, err := db.ExecContext(ctx, query)
//	done(err)
//
// Calls counts in the metric stormguard.dependency.calls, for each dependency and each
// topic or queue. It decides nothing: only the handler's return does. ctx is the handler's
// context or comes from it. With any other ctx nothing is counted, so shared functions may
// use Calls. In the passive shape, which has no handler, nothing is counted.
//
// If all calls go through one place, such as an http.RoundTripper, a gRPC interceptor or
// a tracer of a database driver, use Calls there: see the example, and
// examples/calls_test.go for gRPC and pgx.
//
// dependency is a metric label: use few names. A Guard takes 32 names of at most 64 bytes;
// any other name counts as "other". Any goroutine may call done; only the first call
// counts. Without a call of done nothing is counted.
func Calls(ctx context.Context, dependency string) (done func(error)) {
	m, ok := ctx.Value(callsKey{}).(*sourceMetrics)
	if !ok {
		return func(error) {}
	}
	var once sync.Once
	return func(err error) { once.Do(func() { m.depended(ctx, dependency, err) }) }
}

// callsKey is the key by which Calls finds the metrics behind a handler's context.
type callsKey struct{}

// depended counts a call of a dependency. The label error.type is the kind of the error;
// a success has no such label.
func (m *sourceMetrics) depended(ctx context.Context, dependency string, err error) {
	dependency = m.flows.dependencies.name(dependency)
	attrs := []attribute.KeyValue{attribute.String("stormguard.dependency", dependency)}
	failed := uint64(0)
	if err != nil {
		failed = 1
		attrs = append(attrs, attribute.String("error.type", m.g.resultOf(sound(err), nil).kind()))
	}
	m.flows.count(m.g.node(), Node{nodeDependency, dependency}, 1, failed)
	m.dependencyCalls.Add(ctx, 1, m.topic, metric.WithAttributes(attrs...))
}

// protectContext is the context of a protected function's call.
type protectContext struct {
	callContext

	metrics *sourceMetrics
}

// Value is the parent's, except for the keys of Calls and of callContext.
func (c *protectContext) Value(key any) any {
	if key == (callsKey{}) {
		return c.metrics
	}
	return c.callContext.Value(key)
}
