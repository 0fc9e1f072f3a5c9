// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// halves loses what goes from one half of a fleet to the other while it is split.
type halves struct {
	mu    sync.Mutex
	of    map[netip.AddrPort]int
	split atomic.Bool
}

func (h *halves) cut(from int, to netip.AddrPort) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	half, ok := h.of[to]
	return ok && half != from && h.split.Load()
}

// half is what a process of a half sends.
type half struct {
	*halves

	n int
}

func (h half) Packet(to netip.AddrPort) (time.Duration, bool) { return 0, h.cut(h.n, to) }

func (h half) Dial(to netip.AddrPort) error {
	if h.cut(h.n, to) {
		return errors.New("cut")
	}
	return nil
}

// tenantWorker is a process that handles messages of two tenants.
type tenantWorker struct {
	*Process

	guard  *guard.Guard
	source *guard.Source[string]
	in     chan string
	good   atomic.Int64 // of ok
	bad    atomic.Int64 // of acme
	dead   atomic.Int64
	sent   int64
}

func (w *tenantWorker) settled() int64 { return w.good.Load() + w.bad.Load() + w.dead.Load() }

// send hands the source a message, and waits for what becomes of it.
func (w *tenantWorker) send(t *testing.T, s string) {
	t.Helper()
	w.in <- s
	w.sent++
	eventually(t, "it is handled or dead-lettered", func() bool { return w.settled() == w.sent })
}

// tenantPort describes messages whose text is their tenant.
type tenantPort struct{}

func (tenantPort) Lane(string) uint64 { return 0 }
func (tenantPort) Size(s string) int  { return len(s) }
func (tenantPort) Meta(s string) guard.Meta {
	return guard.Meta{Body: []byte(s), Headers: []dlq.Header{{Name: "tenant", Value: s}}, Lag: -1}
}
func (tenantPort) Ack(string) error                              { return nil }
func (tenantPort) Extend([]string)                               {}
func (tenantPort) Return([]string, guard.Reason) error           { return nil }
func (tenantPort) Demand(int)                                    {}
func (tenantPort) Flush() error                                  { return nil }
func (w *tenantWorker) Write(context.Context, *dlq.Record) error { w.dead.Add(1); return nil }

func (w *tenantWorker) run(t *testing.T) {
	t.Helper()
	g, err := guard.New(guard.Config{}, guard.WithFleet(w.Member()), guard.WithQuarantine(w.Quarantine()))
	if err != nil {
		t.Fatal(err)
	}
	w.guard = g
	t.Cleanup(func() {
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	w.open(t, "s")
}

// open opens a source of the worker's guard, and runs it until the guard is closed.
func (w *tenantWorker) open(t *testing.T, name string) {
	t.Helper()
	w.in = make(chan string)
	var err error
	w.source, err = guard.Open(w.guard, guard.SourceConfig{Name: name, Destination: "orders", DeadLetters: w}, guard.Limits{}, guard.Port[string](tenantPort{}), func(_ context.Context, s string) error {
		if s == "acme" {
			w.bad.Add(1)
		} else {
			w.good.Add(1)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	source := w.source
	go func() {
		defer close(done)
		_ = source.Run(context.Background(), w.in)
	}()
	t.Cleanup(func() {
		source.End(context.Background(), guard.ReasonShutdown)
		<-done
	})
}

// Nine real processes with guards: one command keeps a tenant from all handlers, and no
// other message waits for it; what is taken off during a split is off when it has healed.
func TestQuarantineOfNineProcesses(t *testing.T) {
	cut := &halves{of: map[netip.AddrPort]int{}}
	var names, seeds []string
	for i := range 9 {
		names = append(names, fmt.Sprint("n", i))
	}
	all := make([]*tenantWorker, 9)
	for i := range all {
		p, err := Start(configOf(names[i], seeds, names...), withGossip(gossip.WithFaults(half{cut, i / 5})))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		cut.mu.Lock()
		cut.of[p.Addr()] = i / 5
		cut.mu.Unlock()
		if seeds == nil {
			seeds = []string{p.Addr().String()}
		}
		all[i] = &tenantWorker{Process: p}
		all[i].run(t)
	}
	eventually(t, "all hear all", func() bool {
		for _, w := range all {
			if w.node.Stats().Session.Fresh != 8 {
				return false
			}
		}
		return true
	})
	send := func(good, bad, dead int64) { // 5 of each tenant to each, and what comes of it since the start
		t.Helper()
		for _, w := range all {
			for range 5 {
				w.in <- "acme"
				w.in <- "ok"
			}
			w.sent += 10
		}
		for i, w := range all {
			eventually(t, fmt.Sprint("everything is settled at ", i), func() bool { return w.settled() == w.sent })
			if w.good.Load() != good || w.bad.Load() != bad || w.dead.Load() != dead {
				t.Errorf("%d handled %d and %d of acme, and dead-lettered %d; want %d, %d, %d", i, w.good.Load(), w.bad.Load(), w.dead.Load(), good, bad, dead)
			}
		}
	}
	on := func(of []*tenantWorker, rule string, want bool) {
		t.Helper()
		began := time.Now()
		for i, w := range of {
			eventually(t, fmt.Sprintf("%s is on %v at %d", rule, want, i), func() bool {
				return strings.Contains(rulesIn(w.Process), rule) == want
			})
		}
		t.Logf("%s: %v everywhere after %v", rule, want, time.Since(began).Round(time.Millisecond))
	}
	send(5, 5, 0)

	server := httptest.NewServer(all[0].Handler())
	defer server.Close()
	post := func(body string) (int, string) {
		t.Helper()
		r, err := http.Post(server.URL+"/fleet/quarantine", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Body.Close() }()
		text, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(text)
	}
	if code, text := post(`{"rule":"header:tenant=acme","why":"no account","by":"ann"}`); code != http.StatusOK || !strings.Contains(text, `"rule":"header:tenant=acme","by":"ann","why":"no account"`) {
		t.Fatalf("%d %s", code, text)
	}
	on(all, "acme", true)
	for _, w := range all { // and the guards have read it
		eventually(t, "the guards keep to it", func() bool {
			before := w.bad.Load()
			w.send(t, "acme")
			return w.bad.Load() == before
		})
	}
	for _, w := range all {
		w.good.Store(0)
		w.bad.Store(0)
		w.dead.Store(0)
		w.sent = 0
	}
	send(5, 0, 5)

	cut.split.Store(true)
	for _, i := range []int{0, 8} {
		eventually(t, "the halves do not hear each other", func() bool { return all[i].node.Stats().Session.Fresh <= 4 })
	}
	if err := all[8].Quarantine().Remove(tenantRule("acme"), "bob"); err != nil {
		t.Fatal(err)
	}
	on(all[5:], "acme", false)
	if got := rulesIn(all[0].Process); got != "header:tenant=acme" {
		t.Errorf("in the other half: %q", got)
	}
	if err := all[1].Quarantine().Add(dlq.QuarantineEntry{Rule: tenantRule("else")}); err != nil {
		t.Fatal(err)
	}
	on(all[:5], "else", true)
	cut.split.Store(false)
	on(all, "else", true)
	on(all, "acme", false)
	for _, w := range all {
		if got := rulesIn(w.Process); got != "header:tenant=else" {
			t.Errorf("after the split: %q", got)
		}
		eventually(t, "the guards handle it again", func() bool {
			before := w.bad.Load()
			w.send(t, "acme")
			return w.bad.Load() > before
		})
		eventually(t, "the journal has it", func() bool {
			said := written(w.Process)
			return strings.Contains(said, "quarantined header:tenant=acme") && strings.Contains(said, "released header:tenant=acme") && strings.Contains(said, "quarantined header:tenant=else")
		})
	}
	for _, e := range all[3].Journal() {
		if want := map[string]string{"quarantined": "by ann: no account", "released": "by bob"}[e.Kind]; strings.HasSuffix(e.Subject, "acme") && e.Text != want {
			t.Errorf("%v says %q, want %q", e.Kind, e.Text, want)
		}
	}

	for body, want := range map[string]string{
		`{"rule":"tenant=acme"}`:                          `is not key=K, header:NAME=VALUE or cause=ID`,
		`{"rule":"key=k","for_ns":-1}`:                    `is not in (0, 168h0m0s]`,
		`{"rule":"key=k"} {}`:                             `want one object`,
		`{"rules":"key=k"}`:                               `unknown field`,
		`{"rule":"key=` + strings.Repeat("k", 257) + `"}`: `257 bytes are not in [1, 256]`,
	} {
		if code, text := post(body); code != http.StatusBadRequest || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s", body, code, text)
		}
	}
	if code, text := post(`{"rule":"header:tenant=else","remove":true}`); code != http.StatusOK || text != "[]\n" {
		t.Errorf("%d %s", code, text)
	}
	r, err := http.Get(server.URL + "/fleet/status")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	var s Status
	if err := json.NewDecoder(r.Body).Decode(&s); err != nil || len(s.Quarantine) != 0 {
		t.Errorf("%v %+v", err, s.Quarantine)
	}
	if r, err := http.Post(server.URL+"/fleet/quarantine", "text/plain", strings.NewReader(`{"rule":"key=k"}`)); err != nil || r.StatusCode != http.StatusUnsupportedMediaType {
		t.Errorf("%v %v", r, err)
	} else {
		_ = r.Body.Close()
	}
}

func tenantRule(name string) dlq.Rule {
	return dlq.Rule{Kind: dlq.RuleHeader, Header: "tenant", Value: name}
}

func rulesIn(p *Process) string {
	var all []string
	for _, e := range p.Quarantine().Entries() {
		all = append(all, e.Rule.String())
	}
	return strings.Join(all, " ")
}

// Peers that have gone do not tell the fleet's time; one that starts again does meanwhile.
func TestOffsetsOf(t *testing.T) {
	gone := gossip.Peer{State: gossip.Lost, Heard: time.Hour, Offset: time.Hour, HasOffset: true}
	got := offsetsOf([]gossip.Peer{
		{Heard: time.Second, Offset: 1, HasOffset: true},
		{State: gossip.Silent, Heard: 7 * time.Second, Offset: 2, HasOffset: true},
		{State: gossip.Lost, Heard: time.Minute, Offset: 3, HasOffset: true},
		{Heard: time.Second, Offset: 4},
		gone, gone, gone, gone,
	})
	if want := []time.Duration{1, 2, 3}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// A process that hears nobody keeps to the last time of the fleet that it knew.
func TestFleetTimeOfOneCutOff(t *testing.T) {
	p := startProcess(t, configOf("a", nil, "a", "b", "c"))
	p.quarantine.Offset([]time.Duration{2 * time.Hour, 2 * time.Hour})
	if err := p.Quarantine().Add(dlq.QuarantineEntry{Rule: tenantRule("acme")}); err != nil {
		t.Fatal(err)
	}
	before := p.Quarantine().Entries()
	p.keepFleetTime()
	if after := p.Quarantine().Entries(); len(before) != 1 || len(after) != 1 || !after[0].Until.Equal(before[0].Until) {
		t.Errorf("%+v, before %+v", after, before)
	}
}

// A process that is alone has a list of its own.
func TestQuarantineAlone(t *testing.T) {
	c := configOf("a", nil)
	p := startProcess(t, c)
	if err := p.Quarantine().Add(dlq.QuarantineEntry{Rule: tenantRule("acme")}); err != nil {
		t.Fatal(err)
	}
	if got := p.Status().Quarantine; len(got) != 1 || got[0].Rule != "header:tenant=acme" {
		t.Errorf("%+v", got)
	}
}
