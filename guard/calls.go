// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// Calls says that a handler calls a dependency now, such as a database or a service, and
// returns what is to be told how the call ended:
//
//	done := guard.Calls(ctx, "payments-db")
//	_, err := db.ExecContext(ctx, query)
//	done(err)
//
// It counts the calls of each topic or queue and dependency in the metric
// stormguard.dependency.calls, and decides nothing: what the handler returns does. ctx is
// the handler's, or comes from it; with any other ctx nothing is counted, so a function
// shared with others may call it. Of the passive shape there is no handler, and nothing is
// counted.
//
// Where all calls go through one place, such as an http.RoundTripper, a gRPC interceptor or
// a tracer of a database driver, that is the place to call it: see the example, and
// examples/calls_test.go for gRPC and pgx.
//
// dependency is a name of few: it is a label. A Guard takes 32 names of at most 64 bytes; a
// further one counts as "other". done may be called by any goroutine; only its first call
// counts. Without one the call is not counted.
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

// depended counts a call of a dependency. error.type is the class of its error, and is left
// out after a success.
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

// Value is the parent's, but for the keys of Calls and of callContext.
func (c *protectContext) Value(key any) any {
	if key == (callsKey{}) {
		return c.metrics
	}
	return c.callContext.Value(key)
}
