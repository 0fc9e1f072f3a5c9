// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// namedPort's messages say who made them, each in another broker's way.
type namedPort struct{ testPort }

func (p *namedPort) Meta(m int) Meta {
	meta := p.testPort.Meta(m)
	switch m {
	case 0:
		meta.Headers = []dlq.Header{{Name: "ce_source", Value: []byte("shop")}}
	case 1:
		meta.Headers = []dlq.Header{{Name: "Ce-Source", Value: "shop"}}
	case 2:
		meta.Headers = []dlq.Header{{Name: "cloudEvents:source", Value: "mail\xff"}}
	case 3:
		meta.Properties = []dlq.Header{{Name: "app-id", Value: "till"}}
	case 4:
		meta.Headers = []dlq.Header{{Name: "ce_source", Value: strings.Repeat("x", longestProducer+1)}}
	case 5:
		meta.Headers = []dlq.Header{{Name: "ce_source", Value: 7}}
	}
	return meta
}

// What the sources of a topic read is told with who makes it and what the handlers call, and
// outlasts the sources.
func TestFlows(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g := Must(New(Config{Group: "billing"}, WithLogger(slog.New(slog.DiscardHandler))))
		handle := func(ctx context.Context, m int) error {
			Calls(ctx, "db")(nil)
			if m == 1 {
				Calls(ctx, "mail")(errDown)
				return Permanent(errDown)
			}
			return nil
		}
		var all []*Source[int]
		for m := range 7 { // the first message of each is looked at
			cfg := SourceConfig{Name: fmt.Sprintf("orders/%d", m), Destination: "orders", DeadLetters: &testWriter{}}
			s := Must(Open(g, cfg, Limits{}, &namedPort{}, handle))
			in := make(chan int, 1)
			in <- m
			go func() { _ = s.Run(context.Background(), in) }()
			all = append(all, s)
		}
		time.Sleep(time.Second)
		all[6].Pause(time.Hour)
		told := func() (lines []string) {
			for _, f := range g.Flows() {
				lines = append(lines, fmt.Sprintf("%s %s > %s %s: %d, %d failed, %d of %d held",
					f.From.Kind, f.From.Name, f.To.Kind, f.To.Name, f.Count, f.Failed, f.Held, f.Sources))
			}
			return lines
		}
		want := []string{
			"group billing > dependency db: 7, 0 failed, 0 of 0 held",
			"group billing > dependency mail: 1, 1 failed, 0 of 0 held",
			"producer mail\uFFFD > topic orders: 1, 0 failed, 0 of 0 held",
			"producer other > topic orders: 1, 0 failed, 0 of 0 held",
			"producer shop > topic orders: 2, 0 failed, 0 of 0 held",
			"producer till > topic orders: 1, 0 failed, 0 of 0 held",
			"topic orders > group billing: 7, 1 failed, 1 of 7 held",
		}
		if got := told(); !slices.Equal(got, want) {
			t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		for _, s := range all {
			s.End(t.Context(), ReasonShutdown)
		}
		want[len(want)-1] = "topic orders > group billing: 7, 1 failed, 0 of 0 held"
		if got := told(); !slices.Equal(got, want) {
			t.Errorf("after the sources: got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		closeGuard(t, g)
	})
}

// One message in 1,024 is looked at, on the closed path and where workers handle.
func TestProducersAreSampled(t *testing.T) {
	for _, workers := range []int{1, 4} {
		bubble(t, fmt.Sprintf("%d workers", workers), func(t *testing.T) {
			g := Must(New(Config{}, WithLogger(slog.New(slog.DiscardHandler))))
			s := Must(Open(g, SourceConfig{Name: "orders", Policy: &Policy{Workers: workers, Order: OrderNone}, DeadLetters: &testWriter{}}, Limits{}, &shopPort{}, func(ctx context.Context, m int) error {
				if m == 0 && Attempt(ctx) < 3 { // it is looked at once
					return errBad
				}
				return nil
			}))
			in := make(chan int)
			go func() { _ = s.Run(context.Background(), in) }()
			for m := range 3000 {
				in <- m
			}
			time.Sleep(time.Minute)
			i := slices.IndexFunc(g.Flows(), func(f Flow) bool { return f.From.Kind == nodeProducer })
			if i < 0 || g.Flows()[i].Count != 3 {
				t.Errorf("%+v", g.Flows())
			}
			closeGuard(t, g)
		})
	}
}

// A message that fails gives its number back on the closed path: who made it counts once.
func TestPoisonIsLookedUpOnce(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g := Must(New(Config{}, WithLogger(slog.New(slog.DiscardHandler))))
		s := Must(Open(g, SourceConfig{Name: "orders", DeadLetters: &testWriter{}}, Limits{}, &shopPort{}, func(context.Context, int) error { return Permanent(errBad) }))
		in := make(chan int)
		go func() { _ = s.Run(context.Background(), in) }()
		for m := range 10 {
			in <- m
			time.Sleep(time.Second)
		}
		i := slices.IndexFunc(g.Flows(), func(f Flow) bool { return f.From.Kind == nodeProducer })
		if i < 0 || g.Flows()[i].Count != 1 {
			t.Errorf("%+v", g.Flows())
		}
		closeGuard(t, g)
	})
}

// Names that a broker makes up are not remembered for ever.
func TestFlowsAreBounded(t *testing.T) {
	var f flows
	for i := range 2 * mostFlows {
		f.count(Node{nodeTopic, fmt.Sprint(i)}, Node{nodeGroup, "g"}, 1, 0)
	}
	f.count(Node{nodeGroup, "g"}, Node{nodeDependency, "db"}, 1, 0) // it has a place in any case
	if len(f.known) != mostFlows+1 {
		t.Errorf("%d ways are remembered", len(f.known))
	}
}

// shopPort's messages are all of one producer.
type shopPort struct{ testPort }

func (p *shopPort) Meta(m int) Meta {
	meta := p.testPort.Meta(m)
	meta.Headers = []dlq.Header{{Name: "ce_source", Value: "shop"}}
	return meta
}
