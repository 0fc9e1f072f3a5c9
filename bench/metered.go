// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/stormguard-mq/stormguard/guard"
)

// metered is a Guard with everything at its default and metrics on: OTel's SDK
// records them. Only our side pays for metrics; no rival is asked for any.
type metered struct {
	*guard.Guard
	provider *metric.MeterProvider
	reader   *metric.ManualReader
	found    metricdata.ResourceMetrics
}

func newMetered() (*metered, error) {
	m := &metered{reader: metric.NewManualReader()}
	m.provider = metric.NewMeterProvider(metric.WithReader(m.reader))
	var err error
	m.Guard, err = guard.New(guard.Config{Group: "bench"}, guard.WithMeterProvider(m.provider))
	return m, err
}

// scrape reads all metrics. Cases do so once in each turn, on the clock: more
// often than any collector would.
func (m *metered) scrape(ctx context.Context) error { return m.reader.Collect(ctx, &m.found) }

func (m *metered) close() error {
	ctx := context.Background()
	_, err := m.Close(ctx)
	return errors.Join(err, m.provider.Shutdown(ctx))
}

// noPort is a Port whose broker costs nothing.
type noPort[M any] struct{}

func (noPort[M]) Lane(M) uint64                  { return 0 }
func (noPort[M]) Size(M) int                     { return 0 }
func (noPort[M]) Meta(M) guard.Meta              { return guard.Meta{} }
func (noPort[M]) Ack(M) error                    { return nil }
func (noPort[M]) Extend([]M)                     {}
func (noPort[M]) Return([]M, guard.Reason) error { return nil }
func (noPort[M]) Demand(int)                     {}
func (noPort[M]) Flush() error                   { return nil }
