// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// point is one data point as an operator's tools see it.
type point struct {
	name   string
	attrs  attribute.Set
	value  float64 // of a histogram: its count
	series int     // time series in a store that keeps a histogram's buckets as series
}

func (p point) get(key string) string {
	v, _ := p.attrs.Value(attribute.Key(key))
	return v.String()
}

func (p point) String() string {
	return fmt.Sprintf("%s{%s} %v", p.name, p.attrs.Encoded(attribute.DefaultEncoder()), p.value)
}

// collect reads all metrics once.
func collect(t *testing.T, r *sdkmetric.ManualReader) (points []point) {
	t.Helper()
	var rm metricdata.ResourceMetrics
	if err := r.Collect(context.Background(), &rm); err != nil {
		t.Fatal(err)
	}
	for _, sm := range rm.ScopeMetrics {
		for _, m := range sm.Metrics {
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					points = append(points, point{m.Name, p.Attributes, float64(p.Value), 1})
				}
			case metricdata.Gauge[float64]:
				for _, p := range d.DataPoints {
					points = append(points, point{m.Name, p.Attributes, p.Value, 1})
				}
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					points = append(points, point{m.Name, p.Attributes, float64(p.Count), len(p.BucketCounts) + 2})
				}
			default:
				t.Fatalf("%s is a %T", m.Name, d)
			}
		}
	}
	return points
}

// sum adds up the points of a metric that have the labels, given as key, value, ….
func sum(points []point, name string, labels ...string) (total float64, n int) {
	for _, p := range points {
		match := p.name == name
		for i := 0; i < len(labels); i += 2 {
			match = match && p.get(labels[i]) == labels[i+1]
		}
		if match {
			total += p.value
			n++
		}
	}
	return total, n
}

func meteredGuard(t *testing.T, cfg Config) (*Guard, *sdkmetric.ManualReader) {
	t.Helper()
	reader := sdkmetric.NewManualReader()
	g, err := New(cfg, WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
	if err != nil {
		t.Fatal(err)
	}
	return g, reader
}

// lagPort is a port that knows its lag, as a Kafka claim does.
type lagPort struct{ testPort }

func (*lagPort) Lag() int64 { return 0 }

// partitions opens n partitions of the topic "orders" and runs them.
func partitions(t *testing.T, g *Guard, n int, handler func(partition, m int) error) []chan int {
	t.Helper()
	ins := make([]chan int, n)
	for i := range n {
		s, err := Open(g, SourceConfig{
			Name: "orders/" + strconv.Itoa(i), System: "kafka", Destination: "orders", Partition: strconv.Itoa(i), DeadLetters: &testWriter{},
		}, Limits{}, &lagPort{}, func(_ context.Context, m int) error { return handler(i, m) })
		if err != nil {
			t.Fatal(err)
		}
		ins[i] = make(chan int)
		go func() { _ = s.Run(context.Background(), ins[i]) }()
	}
	return ins
}

func closeGuard(t *testing.T, g *Guard) {
	t.Helper()
	if _, err := g.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

// A partition costs at most 30 time series whatever happens to it, and so does a topic
// of 8 for each of them, histograms and all. The account of messages can be read off
// the metrics.
func TestSeriesOfAPartition(t *testing.T) {
	const most = 30
	for _, n := range []int{1, 8} {
		bubble(t, strconv.Itoa(n), func(t *testing.T) {
			g, reader := meteredGuard(t, Config{})
			var down atomic.Bool
			seen := make([]map[int]bool, n)
			for i := range seen {
				seen[i] = make(map[int]bool)
			}
			ins := partitions(t, g, n, func(i, m int) error {
				again := seen[i][m]
				seen[i][m] = true
				switch {
				case down.Load():
					return Unavailable(errDown)
				case m == 20: // poison
					return errBad
				case m == 25:
					return Permanent(errBad)
				case m%50 == 10 && !again: // succeeds when retried
					return errBad
				}
				return nil
			})
			for m := range 200 {
				down.Store(m >= 100 && m < 150)
				for _, in := range ins {
					in <- m
				}
				time.Sleep(100 * time.Millisecond)
			}
			time.Sleep(2 * time.Minute)
			points := collect(t, reader)
			count := map[string]int{}
			total := 0
			for _, p := range points {
				count[p.get("stormguard.source")] += p.series
				total += p.series
				if p.get("stormguard.source") == "orders/0" {
					t.Log(p)
				}
			}
			t.Logf("%d partitions: %d data points, %d series: %d for each partition, %d for the topic, %.1f in all for a partition",
				n, len(points), total, count["orders/0"], count[""], float64(total)/float64(n))
			for source, series := range count {
				if source != "" && series > most {
					t.Errorf("%s has %d series, more than %d", source, series, most)
				}
			}
			if n > 1 && total > n*most {
				t.Errorf("%d series for %d partitions", total, n)
			}
			for name, want := range map[string]float64{
				metricConsumed: 200, metricHandled: 198, metricReturned: 0, metricDeadLetters: 2, metricMessages: 0, metricLag: 0,
				metricUsed: 0, metricWrite: 2,
			} {
				if v, _ := sum(points, name); v != want*float64(n) {
					t.Errorf("%s = %v, want %v", name, v, want*float64(n))
				}
			}
			for _, name := range []string{metricRetries, metricOvertaken, metricRecovery, metricProcess} {
				if v, _ := sum(points, name); v == 0 {
					t.Errorf("%s = 0", name)
				}
			}
			opened, _ := sum(points, metricTransitions, "to", "open", "scope", "default/orders/*")
			closed, _ := sum(points, metricTransitions, "to", "closed", "scope", "default/orders/*")
			if opened == 0 || closed == 0 {
				t.Errorf("%v opened, %v closed", opened, closed)
			}
			for _, in := range ins {
				close(in)
			}
			closeGuard(t, g)
		})
	}
}

// sizedPort's messages have a size.
type sizedPort struct {
	testPort
	size int
}

func (p *sizedPort) Size(int) int { return p.size }

// The used part of the window is 1 when intake has stopped, whether by the number of messages or
// by their bytes, and never more.
func TestUsedPartOfTheWindow(t *testing.T) {
	for name, tc := range map[string]struct {
		feed        bool
		size, put   int
		least, most float64
		room        bool
	}{
		"a feed, full":          {feed: true, size: 1, put: 1024, least: .9, most: 1},
		"a feed, a message":     {feed: true, size: 1, put: 1, least: .001, most: .01, room: true},
		"full by its bytes":     {size: 1 << 20, put: 64, least: .9, most: 1},
		"a channel, full":       {size: 1, put: 1024, least: .9, most: 1},
		"a channel, nine parts": {size: 1, put: 900, least: .85, most: .9, room: true},
		"at rest":               {size: 1, room: true},
	} {
		bubble(t, name, func(t *testing.T) {
			g, reader := meteredGuard(t, Config{Policy: Policy{Window: 1024, WindowBytes: 64 << 20}})
			s := Must(Open(g, SourceConfig{Name: "s", Destination: "orders", DeadLetters: &testWriter{}}, Limits{}, &sizedPort{size: tc.size},
				func(context.Context, int) error { return nil }))
			ended := make(chan error)
			in := make(chan int, tc.put)
			ctx, stop := context.WithCancel(t.Context())
			var feed *Feed[int]
			if tc.feed {
				feed = s.Feed()
				go func() { ended <- s.RunFeed(ctx) }()
			} else {
				go func() { ended <- s.Run(ctx, in) }()
			}
			if err := s.ForceOpen(0); err != nil {
				t.Fatal(err)
			}
			placed := make(chan struct{})
			go func() {
				defer close(placed)
				for m := range tc.put {
					if !tc.feed {
						in <- m
					} else if _, err := feed.Put(ctx, m); err != nil {
						return
					}
				}
			}()
			time.Sleep(time.Second)
			if used, n := sum(collect(t, reader), metricUsed); n != 1 || used < tc.least || used > tc.most || (s.State().Room > 0) != tc.room {
				t.Errorf("%v used (%d series), want %v to %v; %+v", used, n, tc.least, tc.most, s.State())
			}
			stop()
			<-placed
			if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			closeGuard(t, g)
		})
	}
}

// What counts what is rare is 0 before it happens: a scraper that never saw the 0 would
// take a first dead letter, or a first storm, for none.
func TestRareCountersAreZeroAtRest(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, reader := meteredGuard(t, Config{})
		ins := partitions(t, g, 1, func(_, m int) error {
			if m == 0 {
				return nil
			}
			return Unavailable(errDown)
		})
		ins[0] <- 0
		time.Sleep(time.Second)
		points := collect(t, reader)
		for name, want := range map[string]int{metricFailures: 5, metricDeadLetters: 7, metricStorms: 1, metricOvertaken: 1} {
			if v, n := sum(points, name, "messaging.destination.name", "orders"); v != 0 || n != want {
				t.Errorf("%s: %d series that add up to %v, want %d of 0", name, n, v, want)
			}
		}
		if _, n := sum(points, metricFailures, "scope", "default/orders/*"); n != 5 {
			t.Errorf("%d series of failures have the breaker's scope", n)
		}
		for m := range 50 { // an outage long enough for a storm
			ins[0] <- m + 1
		}
		time.Sleep(3 * time.Minute)
		points = collect(t, reader)
		if v, _ := sum(points, metricStorms); v != 1 {
			t.Errorf("%v storms", v)
		}
		if v, _ := sum(points, metricBreaker, "scope", "default/orders/*", "state", "closed"); v != 0 {
			t.Error("the breaker says closed")
		}
		closeGuard(t, g)
	})
}

// Each call of a dead-letter writer is timed, by what came of it.
func TestWritesHaveAnOutcome(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, reader := meteredGuard(t, Config{})
		w := &scriptedWriter{answers: []error{errDown, errDown, dlq.ErrPutOff, nil}}
		s := Must(Open(g, SourceConfig{Name: "s", Destination: "orders", DeadLetters: w}, Limits{}, &testPort{}, func(context.Context, int) error {
			return Permanent(errBad)
		}))
		in := make(chan int, 1)
		go func() { _ = s.Run(context.Background(), in) }()
		in <- 1
		time.Sleep(time.Minute)
		for outcome, want := range map[string]float64{"failed": 2, "put_off": 1, "confirmed": 1} {
			if v, n := sum(collect(t, reader), metricWrite, "outcome", outcome, "messaging.destination.name", "orders"); v != want || n != 1 {
				t.Errorf("%v writes %s in %d series, want %v", v, outcome, n, want)
			}
		}
		closeGuard(t, g)
	})
}

// scriptedWriter answers what it is told to, each time after a second.
type scriptedWriter struct{ answers []error }

func (w *scriptedWriter) Write(context.Context, *dlq.Record) error {
	time.Sleep(time.Second)
	err := w.answers[0]
	w.answers = w.answers[1:]
	return err
}

// Every failed call is counted, with one of five words for its error, on the closed
// path and off it.
func TestFailuresHaveATypeOfFew(t *testing.T) {
	bubble(t, "source", func(t *testing.T) {
		g, reader := meteredGuard(t, Config{Policy: Policy{NoBreaker: true, Timeout: time.Second}})
		calls := map[int]int{}
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, &testPort{}, func(ctx context.Context, m int) error {
			if calls[m]++; calls[m] > 2 {
				return nil
			}
			switch m {
			case 0:
				return Unavailable(errDown)
			case 1:
				return Permanent(errBad)
			case 2:
				return errBad
			case 3:
				<-ctx.Done()
				return ctx.Err()
			case 4:
				panic("here")
			case 5:
				runtime.Goexit()
			case 6:
				return Ignore(errBad)
			case 7:
				return Backoff(errBad, time.Now())
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int)
		go func() { _ = s.Run(context.Background(), in) }()
		for m := range 10 {
			in <- m
		}
		time.Sleep(5 * time.Minute)
		points := collect(t, reader)
		for _, kind := range []string{"dependency", "message", "unknown", "timeout", "panic"} {
			if v, _ := sum(points, metricFailures, "error.type", kind); v == 0 {
				t.Errorf("no failure of type %s", kind)
			}
		}
		if v, n := sum(points, metricFailures); n != 5 || uint64(v) != s.State().Tally.Failures {
			t.Errorf("%v failures of %d types, %d in all", v, n, s.State().Tally.Failures)
		}
		closeGuard(t, g)
	})
	bubble(t, "function", func(t *testing.T) {
		g, reader := meteredGuard(t, Config{Policy: Policy{NoBreaker: true, Timeout: time.Second}})
		f, err := Protect(g, SourceConfig{Name: "f"}, func(ctx context.Context, m int) error {
			switch m {
			case 0:
				return Unavailable(errDown)
			case 1:
				<-ctx.Done()
				return errors.New("late")
			case 2:
				panic("here")
			}
			return Permanent(errBad)
		})
		if err != nil {
			t.Fatal(err)
		}
		for m := range 4 {
			_ = f.Do(t.Context(), m)
		}
		func() {
			defer func() { _ = recover() }()
			_ = f.Call(t.Context(), 2)
		}()
		points := collect(t, reader)
		for kind, want := range map[string]float64{"dependency": 5, "timeout": 5, "panic": 6, "message": 1} {
			if v, _ := sum(points, metricFailures, "error.type", kind, "stormguard.source", "f"); v != want {
				t.Errorf("%v of type %s, want %v", v, kind, want)
			}
		}
		if v, n := sum(points, metricRefused); v != 0 || n != 1 {
			t.Errorf("%v refused (%d)", v, n)
		}
		if _, n := sum(points, metricBudget); n != 0 {
			t.Error("a function has a DLQ budget")
		}
		if v, _ := sum(points, metricFailures); uint64(v) != f.State().Tally.Failures {
			t.Errorf("%v failures, %d in all", v, f.State().Tally.Failures)
		}
		closeGuard(t, g)
	})
}

// A partition that its topic's scope holds does not say that it is closed.
func TestStateOfAPartitionThatItsTopicHolds(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, reader := meteredGuard(t, Config{})
		handled := 0
		ins := partitions(t, g, 3, func(int, int) error { handled++; return nil })
		state := func(source string) (on []string) {
			for _, p := range collect(t, reader) {
				if p.name == metricBreaker && p.get("stormguard.source") == source && p.value == 1 {
					on = append(on, p.get("state"))
				}
			}
			return on
		}
		for i := range 2 { // a person speaks of these two, and not of the third
			if err := g.Source("orders/" + strconv.Itoa(i)).ForceOpen(time.Minute); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		ins[2] <- 1
		time.Sleep(time.Second)
		if on := state("orders/2"); handled != 1 || !slices.Equal(on, []string{"closed"}) {
			t.Errorf("beside two that are forced: %d handled, %v", handled, on)
		}
		for i := range 2 {
			s, _ := g.Source("orders/" + strconv.Itoa(i)).(*Source[int])
			if err := s.ForceClosed(); err != nil {
				t.Fatal(err)
			}
			s.c.gate.Trip(g.now(), causeOutage)
		}
		time.Sleep(time.Second)
		if st := g.Source("orders/2").State(); st.Breaker.State != breaker.Closed || len(st.Holds) == 0 {
			t.Fatalf("%v %v", st.Breaker.State, st.Holds)
		}
		if on := state("orders/2"); !slices.Equal(on, []string{"open"}) {
			t.Errorf("a partition that its topic holds says %v", on)
		}
		for i := range 2 {
			if err := g.Source("orders/" + strconv.Itoa(i)).ForceClosed(); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		if on := state("orders/2"); !slices.Equal(on, []string{"closed"}) {
			t.Errorf("at rest it says %v", on)
		}
		closeGuard(t, g)
	})
}

// What a source exports once it exports always: a gauge is 0 and does not vanish.
func TestGaugesDoNotVanish(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, reader := meteredGuard(t, Config{})
		partitions(t, g, 1, func(int, int) error { return nil })
		gauges := func() (names []string) {
			for _, p := range collect(t, reader) {
				if !strings.HasSuffix(p.name, "transitions") {
					names = append(names, p.name+" "+p.attrs.Encoded(attribute.DefaultEncoder()))
				}
			}
			slices.Sort(names)
			return names
		}
		hold := func(reason string) (float64, int) {
			return sum(collect(t, reader), metricHold, "reason", reason, "messaging.destination.partition.id", "0", "stormguard.source", "orders/0")
		}
		rest := gauges()
		if v, n := sum(collect(t, reader), metricHold); v != 0 || n != 5 {
			t.Errorf("%v holds of %d at rest", v, n)
		}
		if v, n := sum(collect(t, reader), metricDLQRatio); v != 0 || n != 1 {
			t.Errorf("ratio %v (%d) at rest", v, n)
		}
		s := g.Source("orders/0")
		s.Pause(0)
		if err := s.ForceOpen(time.Minute); err != nil {
			t.Fatal(err)
		}
		if v, n := hold("operator"); v != 1 || n != 1 {
			t.Errorf("paused: %v (%d)", v, n)
		}
		if v, n := hold("breaker"); v != 1 || n != 1 {
			t.Errorf("open: %v (%d)", v, n)
		}
		if held := gauges(); !slices.Equal(held, rest) {
			t.Errorf("at rest %v, held %v", rest, held)
		}
		s.Resume()
		if err := s.ForceClosed(); err != nil {
			t.Fatal(err)
		}
		if v, n := hold("operator"); v != 0 || n != 1 {
			t.Errorf("resumed: %v (%d)", v, n)
		}
		if again := gauges(); !slices.Equal(again, rest) {
			t.Errorf("at rest %v, later %v", rest, again)
		}
		closeGuard(t, g)
	})
}

// Whatever is handed over can be found in one of the metrics.
func TestMetricsAccountForEveryMessage(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, reader := meteredGuard(t, Config{})
		block := make(chan struct{})
		ins := partitions(t, g, 1, func(_, m int) error {
			switch m {
			case 5:
				return Permanent(errBad)
			case 6:
				return Ignore(errBad)
			case 12:
				<-block
			}
			return nil
		})
		for m := range 12 {
			ins[0] <- m
		}
		time.Sleep(time.Second)
		g.Source("orders/0").(*Source[int]).port.(*lagPort).fail(errDown)
		check := func(want map[string]float64) {
			t.Helper()
			points := collect(t, reader)
			got := map[string]float64{}
			for name := range want {
				got[name], _ = sum(points, name)
			}
			if !maps.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
		}
		ins[0] <- 12
		synctest.Wait()
		check(map[string]float64{
			metricConsumed: 13, metricHandled: 11, metricDeadLetters: 1, metricReturned: 0, metricMessages: 1, metricAckFailures: 0,
		})
		close(block)
		synctest.Wait()
		check(map[string]float64{
			metricConsumed: 13, metricHandled: 11, metricDeadLetters: 1, metricReturned: 1, metricMessages: 0, metricAckFailures: 1,
		})
		closeGuard(t, g)
	})
}

func (p *testPort) fail(err error) {
	p.mu.Lock()
	p.ackErr = err
	p.mu.Unlock()
}

// With an SDK, what the closed path allocates is still a part of a chunk of contexts and
// one sample in 64.
func TestMetricsCostTheClosedPathNothing(t *testing.T) {
	if RaceEnabled {
		t.Skip("the race detector allocates")
	}
	g, _ := meteredGuard(t, Config{})
	defer closeGuard(t, g)
	s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, nopPort{}, func(context.Context, int) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	s.ctx = t.Context()
	l := &loop[int]{s: s, ctx: s.ctx}
	const batch = 64 * 100
	n := testing.AllocsPerRun(10, func() {
		for m := range batch {
			l.fast(m, false)
		}
	}) / batch
	s.rest()
	if n > 0.1 {
		t.Errorf("%.3f allocations a message", n)
	}
}

// Calls of a dependency are counted for the topic whose handler makes them, by the class of
// their error, and a program that names too many makes no further series.
func TestCallsOfDependencies(t *testing.T) {
	bubble(t, "source", func(t *testing.T) {
		g, reader := meteredGuard(t, Config{})
		s := Must(Open(g, SourceConfig{Name: "s", Destination: "orders", DeadLetters: &testWriter{}}, Limits{}, &testPort{}, func(ctx context.Context, m int) error {
			done := Calls(context.WithoutCancel(ctx), "db")
			defer func() { done(nil) }() // too late
			if m == 1 {
				done(Unavailable(errDown))
			}
			done(nil)
			for i := range 40 {
				Calls(ctx, "s"+strconv.Itoa(i))(nil)
			}
			Calls(ctx, strings.Repeat("x", 65))(nil)
			return nil
		}))
		in := make(chan int, 3)
		go func() { _ = s.Run(context.Background(), in) }()
		for m := range 3 {
			in <- m
		}
		time.Sleep(time.Second)
		points := collect(t, reader)
		for _, c := range []struct {
			labels []string
			want   float64
		}{
			{[]string{"stormguard.dependency", "db"}, 3},
			{[]string{"stormguard.dependency", "db", "error.type", "dependency"}, 1},
			{[]string{"stormguard.dependency", "s30", "messaging.destination.name", "orders"}, 3},
			{[]string{"stormguard.dependency", "s31"}, 0},
			{[]string{"stormguard.dependency", "other"}, 3 * (9 + 1)},
		} {
			if v, _ := sum(points, metricDependency, c.labels...); v != c.want {
				t.Errorf("%v: %v calls, want %v", c.labels, v, c.want)
			}
		}
		if _, n := sum(points, metricDependency); n != 32+1+1 {
			t.Errorf("%d series", n)
		}
		Calls(t.Context(), "db")(nil) // of nobody
		if v, _ := sum(collect(t, reader), metricDependency, "stormguard.dependency", "db"); v != 3 {
			t.Errorf("%v calls", v)
		}
		closeGuard(t, g)
	})
	bubble(t, "function", func(t *testing.T) {
		g, reader := meteredGuard(t, Config{})
		f := Must(Protect(g, SourceConfig{Name: "f"}, func(ctx context.Context, _ int) error {
			if n := Attempt(ctx); n != 1 {
				t.Errorf("attempt %d", n)
			}
			Calls(ctx, "db")(nil)
			return nil
		}))
		if err := f.Do(t.Context(), 1); err != nil {
			t.Error(err)
		}
		if v, _ := sum(collect(t, reader), metricDependency, "stormguard.dependency", "db", "stormguard.source", "f"); v != 1 {
			t.Errorf("%v calls", v)
		}
		closeGuard(t, g)
	})
}
