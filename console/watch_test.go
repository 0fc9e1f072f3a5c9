// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console_test

import (
	"bufio"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/console"
)

// Whoever watches is told within a second what has changed, and nothing else; the
// console's end ends it.
func TestWatch(t *testing.T) {
	r := newRig(t, console.Config{}, "orders/0", "orders/1")
	server := httptest.NewUnstartedServer(r.c)
	server.Config.ReadTimeout = time.Second // which the stream outlives
	server.Start()
	defer server.Close()
	q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/watch", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	next := func() (ch console.Change) {
		for lines.Scan() {
			if text, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				if err := json.Unmarshal([]byte(text), &ch); err != nil {
					t.Fatal(err)
				}
				return ch
			}
		}
		t.Fatal("it has ended")
		return ch
	}
	if ch := next(); len(ch.Sources) != 2 || ch.Status.Sources != 2 || resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Errorf("%+v", ch)
	}
	r.order(console.Order{Action: console.Pause, Sources: []string{"orders/1"}})
	changed := console.Change{}
	for len(changed.Sources) == 0 {
		changed = next()
	}
	if len(changed.Sources) != 1 || changed.Sources[0].Name != "orders/1" || changed.Sources[0].State != "paused" || changed.Status.Paused != 1 {
		t.Errorf("%+v", changed)
	}
	r.order(console.Order{Action: console.Pause, Sources: []string{"orders/1"}, For: console.Duration(2 * time.Hour)})
	for changed = next(); len(changed.Sources) == 0; changed = next() {
	}
	if changed.Sources[0].Holds[0].Until < 3600 {
		t.Errorf("a longer pause is not told: %+v", changed)
	}
	r.end("orders/0")
	for changed = next(); len(changed.Gone) == 0; changed = next() {

	}
	if len(changed.Gone) != 1 || changed.Gone[0] != "billing orders/0" {
		t.Errorf("%+v", changed)
	}
	if changed = next(); len(changed.Gone)+len(changed.Sources) != 0 || changed.Status.Sources != 1 {
		t.Errorf("nothing has changed, and it says %+v", changed)
	}
	r.c.Close()
	for lines.Scan() {
	}
	r.close()
	http.DefaultClient.CloseIdleConnections()
}

// The history shows what held a source in each minute, the strongest reason of it, and
// forgets what is older than six hours.
func TestHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(30 * time.Second) // the middle of a minute
		r := newRig(t, console.Config{}, "orders/0", "orders/1")
		defer r.close()
		row := func(name string) string {
			var h console.History
			r.ask(http.MethodGet, "/history", "", &h)
			if h.Every != 60 || time.Since(h.Now) > time.Minute {
				t.Errorf("%+v", h)
			}
			for _, row := range h.Rows {
				if row.Source == name {
					if len(row.Cells) != 360 {
						t.Errorf("%d cells", len(row.Cells))
					}
					return strings.TrimLeft(row.Cells, " ")
				}
			}
			return ""
		}
		time.Sleep(2*time.Minute + time.Second)
		if got := row("orders/0"); got != "rrr" {
			t.Errorf("%q", got)
		}
		r.order(console.Order{Action: console.Pause, Sources: []string{"orders/0"}, For: console.Duration(90 * time.Second)})
		r.order(console.Order{Action: console.Open, Sources: []string{"orders/1"}, For: console.Duration(time.Hour)})
		time.Sleep(3 * time.Minute)
		if got := row("orders/0"); got != "rrooor" {
			t.Errorf("%q", got)
		}
		if got := row("orders/1"); !strings.HasSuffix(got, "bbb") || !strings.HasPrefix(got, "rr") {
			t.Errorf("%q", got)
		}
		r.end("orders/1")
		time.Sleep(6*time.Hour + time.Minute)
		if got := row("orders/1"); got != "" {
			t.Errorf("six hours after its end: %q", got)
		}
		if got := row("orders/0"); got != strings.Repeat("r", 360) {
			t.Errorf("%q", got)
		}
	})
}
