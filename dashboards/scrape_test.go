// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// idle is a port without messages.
type idle struct{}

func (idle) Lane(int) uint64                  { return 0 }
func (idle) Size(int) int                     { return 1 }
func (idle) Meta(int) guard.Meta              { return guard.Meta{} }
func (idle) Ack(int) error                    { return nil }
func (idle) Extend([]int)                     {}
func (idle) Return([]int, guard.Reason) error { return nil }
func (idle) Demand(int)                       {}
func (idle) Flush() error                     { return nil }

// What a scrape of a process with 1,000 sources takes.
//
//	go test -run '^$' -bench 1000
func BenchmarkScrape1000(b *testing.B) {
	registry := prom.NewRegistry()
	exporter, err := prometheus.New(prometheus.WithRegisterer(registry), prometheus.WithoutScopeInfo())
	if err != nil {
		b.Fatal(err)
	}
	thousand(b, exporter)
	handler := promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
	w := &answer{header: http.Header{}}
	for b.Loop() {
		w.Reset()
		handler.ServeHTTP(w, &http.Request{Method: http.MethodGet, Header: http.Header{}, Body: io.NopCloser(nil)})
	}
	series := 0
	for line := range bytes.Lines(w.Bytes()) {
		if line[0] != '#' {
			series++
		}
	}
	if bytes.Contains(w.Bytes(), []byte("otel_metric_overflow")) {
		b.Error("the SDK has left series out")
	}
	b.ReportMetric(float64(series), "series")
	b.ReportMetric(float64(w.Len()), "bytes")
	b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/scrape")
}

// What it takes to push the same to Prometheus's OTLP receiver.
func BenchmarkPush1000(b *testing.B) {
	var size int64
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		size, _ = io.Copy(io.Discard, r.Body)
	}))
	b.Cleanup(server.Close)
	exporter, err := otlpmetrichttp.New(b.Context(), otlpmetrichttp.WithEndpointURL(server.URL+"/v1/metrics"))
	if err != nil {
		b.Fatal(err)
	}
	provider := thousand(b, sdkmetric.NewPeriodicReader(exporter, sdkmetric.WithInterval(time.Hour)))
	for b.Loop() {
		if err := provider.ForceFlush(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(size), "bytes")
	b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/push")
}

// thousand opens 1,000 sources whose metrics go to reader: 20 topics of 50 partitions.
func thousand(b *testing.B, reader sdkmetric.Reader) *sdkmetric.MeterProvider {
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader), sdkmetric.WithCardinalityLimit(0))
	g, err := guard.New(guard.Config{Group: "billing"}, guard.WithMeterProvider(provider))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if _, err := g.Close(context.Background()); err != nil {
			b.Error(err)
		}
		if err := provider.Shutdown(context.Background()); err != nil {
			b.Error(err)
		}
	})
	for i := range 1000 {
		topic, partition := "topic-"+strconv.Itoa(i/50), strconv.Itoa(i%50)
		_, err := guard.Open(g, guard.SourceConfig{
			Name: topic + "/" + partition, System: "kafka", Destination: topic, Partition: partition, DeadLetters: nowhere{},
		}, guard.Limits{}, idle{}, func(context.Context, int) error { return nil })
		if err != nil {
			b.Fatal(err)
		}
	}
	return provider
}

// A failure that is scraped leads to the trace of its call.
func TestScrapeHasExemplars(t *testing.T) {
	registry := prom.NewRegistry()
	exporter, err := prometheus.New(prometheus.WithRegisterer(registry))
	if err != nil {
		t.Fatal(err)
	}
	g, err := guard.New(guard.Config{}, guard.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	f, err := guard.Protect(g, guard.SourceConfig{Name: "gateway"}, func(context.Context, int) error {
		return guard.Permanent(errors.New("it is no order"))
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, span := sdktrace.NewTracerProvider().Tracer("test").Start(t.Context(), "call")
	if err := f.Do(ctx, 1); err == nil {
		t.Fatal("the call succeeded")
	}
	span.End()
	w := &answer{header: http.Header{}}
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}).
		ServeHTTP(w, &http.Request{Method: http.MethodGet, Header: http.Header{"Accept": {"application/openmetrics-text"}}, Body: io.NopCloser(nil)})
	for line := range strings.Lines(w.String()) {
		if strings.HasPrefix(line, "stormguard_failures_total{") && strings.Contains(line, `trace_id="`+span.SpanContext().TraceID().String()) {
			return
		}
	}
	t.Errorf("no failure has an exemplar:\n%s", w)
}

// answer keeps what a handler writes.
type answer struct {
	bytes.Buffer
	header http.Header
}

func (a *answer) Header() http.Header { return a.header }
func (a *answer) WriteHeader(int)     {}

// nowhere is a dead-letter writer that nobody calls.
type nowhere struct{}

func (nowhere) Write(context.Context, *dlq.Record) error { return nil }
