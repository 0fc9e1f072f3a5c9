// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console_test

import (
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/console"
)

// An incident is told in its order: what tripped, who did what, what died, what came back.
// Dead letters of one cause are one event.
func TestEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, console.Config{}, "orders")
		defer r.close()
		events := func(since string) (all []console.Event) {
			t.Helper()
			if status := r.ask(http.MethodGet, "/events?since="+since, "", &all); status != http.StatusOK {
				t.Fatal(status)
			}
			return all
		}
		if all := events("1h"); len(all) != 0 {
			t.Errorf("before anything happened: %+v", all)
		}
		r.fails.Store(true)
		for i := range 5 {
			r.in["orders"] <- i
		}
		time.Sleep(20 * time.Second)
		var one, many []console.Source
		r.ask(http.MethodGet, "/sources?name=orders", "", &one)
		if len(one) != 1 || len(one[0].Errors) != 1 {
			t.Fatalf("%+v", one)
		}
		if e := one[0].Errors[0]; e.Title != "it does not answer" || e.Class != "unknown" || !strings.HasPrefix(e.Cause, "v2:") || e.Messages < 1 || e.Attempts < 5 {
			t.Errorf("%+v", e)
		}
		if r.ask(http.MethodGet, "/sources", "", &many); len(many) != 1 || many[0].Errors != nil {
			t.Errorf("%+v", many)
		}
		r.order(console.Order{Action: console.DeadLetter, Sources: []string{"orders"}, Count: 2, Why: "ticket 7"})
		time.Sleep(time.Second)
		r.fails.Store(false)
		r.order(console.Order{Action: console.Close, Sources: []string{"*"}})
		time.Sleep(time.Minute)
		r.ask(http.MethodPost, "/order", `{"action":"dance","sources":["*"]}`, nil)

		want := []string{console.EventOpened, console.EventOrder, console.EventDead, console.EventOrder, console.EventClosed, console.EventRefused}
		all := events("1h")
		var got []string
		for _, e := range all {
			got = append(got, e.Kind)
		}
		if strings.Join(got, ", ") != strings.Join(want, ", ") {
			t.Fatalf("%q, want %q", got, want)
		}
		for _, e := range all {
			switch e.Kind {
			case console.EventOpened:
				if e.Subject != "billing/orders" || !strings.Contains(e.Detail, "it does not answer") {
					t.Errorf("%+v", e)
				}
			case console.EventDead:
				if e.Subject != "orders" || e.Count != int(r.letters.Load()) || e.Count < 2 || !strings.HasPrefix(e.Cause, "v2:") || !strings.Contains(e.Detail, "operator") {
					t.Errorf("%+v; %d letters", e, r.letters.Load())
				}
			case console.EventClosed:
				if e.Lasted < 15 {
					t.Errorf("%+v", e)
				}
			}
		}
		var causes []console.Cause
		if r.ask(http.MethodGet, "/causes?since=1h", "", &causes); len(causes) != 1 {
			t.Fatalf("causes: %+v", causes)
		}
		if c := causes[0]; c.Count != int(r.letters.Load()) || c.Title != "it does not answer" || c.Class != "unknown" || !strings.HasPrefix(c.Cause, "v2:") ||
			!slices.Equal(c.Sources, []string{"orders"}) || !maps.Equal(c.Reasons, map[string]int{"operator": c.Count}) || c.First.After(c.Last) {
			t.Errorf("%+v", c)
		}
		if r.ask(http.MethodGet, "/causes?since=30s", "", &causes); len(causes) != 0 {
			t.Errorf("of the last 30 s: %+v", causes)
		}
		if status := r.ask(http.MethodGet, "/causes?since=-1s", "", nil); status != http.StatusBadRequest {
			t.Error("a time that is none:", status)
		}
		if late := events("30s"); len(late) != 1 || late[0].Kind != console.EventRefused {
			t.Errorf("of the last 30 s: %+v", late)
		}
		if status := r.ask(http.MethodGet, "/events?since=soon", "", nil); status != http.StatusBadRequest {
			t.Error("a time that is none:", status)
		}
		r.c.Close()
		r.fails.Store(true)
		for i := range 5 {
			r.in["orders"] <- i
		}
		time.Sleep(time.Minute)
		if n := len(events("1h")); n != len(all) {
			t.Errorf("a closed console has %d events, had %d", n, len(all))
		}
		r.fails.Store(false)
		time.Sleep(time.Minute)
	})
}
