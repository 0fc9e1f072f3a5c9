// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/operator"
)

// operated is a process that handles messages, with its console.
type operated struct {
	tenantWorker

	console *console.Console
	url     string
}

func (w *operated) serve(t *testing.T) {
	t.Helper()
	c, err := console.New(console.Config{Process: w.self.Name, Fleet: w.Orders()}, w.guard)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(c)
	w.console, w.url = c, server.URL
	t.Cleanup(func() {
		server.Close()
		c.Close()
	})
}

// order gives an order to one process, and returns its answer.
func (w *operated) order(t *testing.T, o console.Order) (out console.Outcome) {
	t.Helper()
	body, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.Post(w.url+"/order", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	if err := json.NewDecoder(r.Body).Decode(&out); err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("%v: %s %v", o, r.Status, err)
	}
	return out
}

// told gives an order until these have answered, and those are silent: a console waits for
// five seconds, and a busy machine may need more.
func (w *operated) told(t *testing.T, o console.Order, silent []string, answered ...string) {
	t.Helper()
	var out console.Outcome
	for range 6 {
		if out = w.order(t, o); slices.Equal(names(out.Processes), answered) && slices.Equal(out.Silent, silent) {
			return
		}
		t.Logf("%v are silent, want %v", out.Silent, silent)
	}
	t.Errorf("%+v", out)
}

// paused tells whether an operator holds the worker's source.
func (w *operated) paused() bool {
	h := w.source.State().Holds
	return len(h) > 0 && h[0].Detail == "paused"
}

func fleetOf(t *testing.T, n int, halfOf func(i int) int) ([]*operated, *halves) {
	t.Helper()
	cut := &halves{of: map[netip.AddrPort]int{}}
	var names, seeds []string
	for i := range n {
		names = append(names, fmt.Sprint("n", i))
	}
	all := make([]*operated, n)
	for i := range all {
		cfg := configOf(names[i], seeds, names...)
		cfg.Gossip.Zone = fmt.Sprint("z", i%3)
		p, err := Start(cfg, withGossip(gossip.WithFaults(half{cut, halfOf(i)})))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		cut.mu.Lock()
		cut.of[p.Addr()] = halfOf(i)
		cut.mu.Unlock()
		if seeds == nil {
			seeds = []string{p.Addr().String()}
		}
		all[i] = &operated{tenantWorker: tenantWorker{Process: p}}
		all[i].run(t)
		all[i].serve(t)
	}
	eventually(t, "all hear all, and know their zones", func() bool {
		for _, w := range all {
			if w.node.Stats().Session.Fresh != n-1 {
				return false
			}
			for _, m := range w.Orders().Members() {
				if m.Zone == "" {
					return false
				}
			}
		}
		return true
	})
	return all, cut
}

func names(answers []console.Answer) (all []string) {
	for _, a := range answers {
		all = append(all, a.Process)
	}
	return all
}

// One order holds the sources of nine processes. The one that is cut off is named, follows
// when it is heard again, and does not if the order's time is over by then. A source that
// begins later is held too.
func TestOrderToNineProcesses(t *testing.T) {
	all, cut := fleetOf(t, 9, func(i int) int { return i / 8 })
	cut.split.Store(true)
	eventually(t, "the ninth is not heard", func() bool { return all[0].node.Stats().Session.Fresh == 7 })

	eight := []string{"n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"}
	all[3].told(t, console.Order{Action: console.Pause, Sources: []string{"*"}, For: console.Duration(2 * time.Second), In: "fleet"}, []string{"n8"}, eight...)
	eventually(t, "a pause of two seconds is over", func() bool { return !all[0].paused() && !all[3].paused() })
	cut.split.Store(false)
	eventually(t, "the ninth is heard again", func() bool { return all[0].node.Stats().Session.Fresh == 8 && all[8].node.Stats().Session.Fresh == 8 })
	eventually(t, "it has heard of the order", func() bool { return strings.Contains(written(all[8].Process), "ordered pause * in fleet for 2s") })
	if all[8].paused() {
		t.Error("an order whose time was over is carried out")
	}

	cut.split.Store(true)
	eventually(t, "the ninth is not heard", func() bool { return all[0].node.Stats().Session.Fresh == 7 })
	began := time.Now()
	all[0].told(t, console.Order{Action: console.Pause, Sources: []string{"s*"}, Why: "ticket 7", In: "fleet"}, []string{"n8"}, eight...)
	t.Logf("eight answered after %v", time.Since(began).Round(time.Millisecond))
	for i, w := range all {
		if w.paused() != (i != 8) {
			t.Errorf("%d is held: %v", i, w.paused())
		}
	}
	cut.split.Store(false)
	began = time.Now()
	eventually(t, "the ninth follows", all[8].paused)
	t.Logf("the ninth followed after %v", time.Since(began).Round(time.Millisecond))
	if left := all[8].source.State().Holds[0].Until; left > 30*time.Minute || left < 25*time.Minute {
		t.Errorf("the ninth is held for %v, not for the rest of the order", left)
	}

	late := &operated{tenantWorker: tenantWorker{Process: all[1].Process, guard: all[1].guard}}
	late.open(t, "s2")
	eventually(t, "a source that begins later is held", late.paused)

	all[5].told(t, console.Order{Action: console.Resume, Sources: []string{"*"}, In: "zone:z1"}, nil, "n1", "n4", "n7")
	for i, w := range all {
		if w.paused() != (i%3 != 1) {
			t.Errorf("after the resume of zone 1, %d is held: %v", i, w.paused())
		}
	}
	if late.paused() {
		t.Error("the later source of zone 1 is held")
	}
	all[8].order(t, console.Order{Action: console.Resume, Sources: []string{"*"}, In: "fleet"})
	for _, w := range all {
		eventually(t, "none is held", func() bool { return !w.paused() })
		eventually(t, "the journal has who and why", func() bool {
			for _, e := range w.Journal() {
				if e.Kind == "ordered" && strings.Contains(e.Text, "ticket 7") && strings.Contains(e.Text, "127.0.0.1") {
					return true
				}
			}
			return false
		})
	}
}

// Orders are for who is in the roster, heard or not, and for learners that may be there.
func TestAddressees(t *testing.T) {
	got := addressees([]Member{
		{Name: "self", State: "self"},
		{Name: "fresh", State: "fresh"},
		{Name: "member", State: "lost", Heard: time.Hour, Roster: true},
		{Name: "never heard", State: "unknown", Roster: true},
		{Name: "away", State: "lost", Zone: "z", Heard: 9 * time.Minute},
		{Name: "gone", State: "lost", Heard: 10 * time.Minute},
	})
	want := []operator.Member{
		{Name: "self", Heard: true}, {Name: "fresh", Heard: true},
		{Name: "member"}, {Name: "never heard"}, {Name: "away", Zone: "z"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
