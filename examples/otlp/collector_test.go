// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"

	"go.opentelemetry.io/otel/trace"
	metricspb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	tracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

// collector takes OTLP over HTTP, and remembers names.
type collector struct {
	url    string
	server *httptest.Server

	mu      sync.Mutex
	traces  map[string][]byte // span's name to its trace
	metrics map[string]bool
}

func newCollector() *collector {
	c := &collector{traces: make(map[string][]byte), metrics: make(map[string]bool)}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/traces", c.takeTraces)
	mux.HandleFunc("POST /v1/metrics", c.takeMetrics)
	c.server = httptest.NewServer(mux)
	c.url = c.server.URL
	return c
}

func (c *collector) close() { c.server.Close() }

func (c *collector) inTrace(span string, id trace.TraceID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.traces[span]) == string(id[:])
}

func (c *collector) has(metric string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.metrics[metric]
}

func (c *collector) takeTraces(w http.ResponseWriter, r *http.Request) {
	var req tracepb.ExportTraceServiceRequest
	if !read(w, r, &req) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range req.GetResourceSpans() {
		for _, scope := range resource.GetScopeSpans() {
			for _, span := range scope.GetSpans() {
				c.traces[span.GetName()] = span.GetTraceId()
			}
		}
	}
}

func (c *collector) takeMetrics(w http.ResponseWriter, r *http.Request) {
	var req metricspb.ExportMetricsServiceRequest
	if !read(w, r, &req) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range req.GetResourceMetrics() {
		for _, scope := range resource.GetScopeMetrics() {
			for _, metric := range scope.GetMetrics() {
				c.metrics[metric.GetName()] = true
			}
		}
	}
}

func read(w http.ResponseWriter, r *http.Request, m proto.Message) bool {
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = proto.Unmarshal(body, m)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
	}
	return err == nil
}
