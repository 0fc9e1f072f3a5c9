// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"maps"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/limiter"
)

// What is exported is what the page lists, and says what there is.
func TestMetrics(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	c := configOf("a", nil, "a", "b")
	a, err := Start(c, WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	b := startProcess(t, configOf("b", []string{a.Addr().String()}, "a", "b"))
	if err := b.Key("k").WaitN(t.Context(), 80); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../docs/fleet-metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var listed []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_.]+)`").FindAllSubmatch(page, -1) {
		listed = append(listed, string(m[1]))
	}
	slices.Sort(listed)
	values := map[string]float64{}
	eventually(t, "all metrics are there", func() bool {
		var all metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &all); err != nil {
			t.Fatal(err)
		}
		values = map[string]float64{}
		for _, s := range all.ScopeMetrics {
			for _, m := range s.Metrics {
				switch d := m.Data.(type) {
				case metricdata.Gauge[float64]:
					for _, p := range d.DataPoints {
						values[m.Name] += p.Value
					}
				case metricdata.Sum[int64]:
					for _, p := range d.DataPoints {
						values[m.Name] += float64(p.Value)
					}
				}
			}
		}
		names := slices.Sorted(maps.Keys(values))
		return slices.Equal(names, listed) && values[metricMerges] > 0 && values[metricMembers] == 1 && values[metricShare] == 0.5 && values[metricConfiguration] == 3
	})
	if t.Failed() {
		t.Logf("listed %v\nexported %v", listed, values)
	}
	if values[metricShareStranded] != 0 || values[metricRegisterAway] != 0 || values[metricSilence] > 10 {
		t.Errorf("%v", values)
	}
}

// Each key's tokens are shown while there are few keys, and then those of keys that the
// configuration names: a key for each user would be a series for each user.
func TestTokensByKey(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	c := Config{Fleet: os.Getenv(fleetEnv), Name: "a", Limits: Limits{
		Limit:  limiter.Limit{Rate: 1, Burst: 10},
		Limits: map[string]limiter.Limit{"named": {Rate: 0.001, Burst: 10}}, // nothing is minted meanwhile
	}}
	p, err := Start(c, WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	shown := func(name string) map[string]int64 {
		var all metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &all); err != nil {
			t.Fatal(err)
		}
		by := map[string]int64{}
		for _, s := range all.ScopeMetrics {
			for _, m := range s.Metrics {
				if m.Name != name {
					continue
				}
				for _, point := range m.Data.(metricdata.Sum[int64]).DataPoints {
					key, _ := point.Attributes.Value("key")
					by[key.AsString()] = point.Value
				}
			}
		}
		return by
	}
	p.Key("named").AllowN(3)
	p.Key("named").AllowN(9) // more than are left
	p.Key("user-0").AllowN(2)
	if got := shown(metricAdmitted); !maps.Equal(got, map[string]int64{"named": 3, "user-0": 2}) {
		t.Errorf("admitted %v", got)
	}
	if got := shown(metricDenied); got["named"] != 9 {
		t.Errorf("denied %v", got)
	}
	for i := range 40 {
		p.Key("user-" + strconv.Itoa(i)).Allow()
	}
	if got := shown(metricAdmitted); !maps.Equal(got, map[string]int64{"named": 3}) {
		t.Errorf("admitted, of 41 keys: %v", got)
	}
}

// When the fleet lags a span tells of it, linked to the latest decision that
// waited, and once.
func TestLagIsTold(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	c := configOf("a", nil, "a", "b")
	c.LagDelay = time.Millisecond
	a, err := Start(c, WithTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	slow := slowly{}
	b, err := Start(configOf("b", []string{a.Addr().String()}, "a", "b"), withGossip(gossip.WithFaults(slow)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	if err := a.Wait(t.Context(), "k", 80); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a span that is linked", func() bool {
		_ = a.Wait(t.Context(), "k", 1)
		for _, s := range spans.Ended() {
			if s.Name() == "fleet lag" && len(s.Events()) == 1 && len(s.Links()) == 1 {
				return true
			}
		}
		return false
	})
	decisions := map[trace.SpanID]bool{}
	var links []sdktrace.Link
	for _, s := range spans.Ended() {
		switch s.Name() {
		case "limit k":
			decisions[s.SpanContext().SpanID()] = true
		case "fleet lag":
			links = append(links, s.Links()...)
		}
	}
	for _, l := range links {
		if !decisions[l.SpanContext.SpanID()] {
			t.Errorf("linked to %v, which is no decision", l.SpanContext.SpanID())
		}
	}
}

// slowly is a network on which everything takes 20 ms.
type slowly struct{}

func (slowly) Packet(netip.AddrPort) (time.Duration, bool) { return 20 * time.Millisecond, false }
func (slowly) Dial(netip.AddrPort) error                   { return nil }
