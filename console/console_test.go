// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// numbers is a port of messages that are only numbers.
type numbers struct{}

func (numbers) Lane(int) uint64                  { return 0 }
func (numbers) Size(int) int                     { return 1 }
func (numbers) Ack(int) error                    { return nil }
func (numbers) Extend([]int)                     {}
func (numbers) Return([]int, guard.Reason) error { return nil }
func (numbers) Demand(int)                       {}
func (numbers) Flush() error                     { return nil }
func (numbers) Meta(m int) guard.Meta {
	return guard.Meta{Origin: dlq.Origin{System: "test", MessageID: fmt.Sprint(m)}}
}

// rig is a program with a guard, some sources and a console.
type rig struct {
	t       *testing.T
	g       *guard.Guard
	c       *console.Console
	log     lockedBuffer
	handled atomic.Int64
	letters atomic.Int64
	fails   atomic.Bool
	in      map[string]chan int
	ends    map[string]func()
	loops   sync.WaitGroup
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newRig(t *testing.T, cfg console.Config, sources ...string) *rig {
	t.Helper()
	r := &rig{t: t, in: make(map[string]chan int), ends: make(map[string]func())}
	logger := slog.New(slog.NewTextHandler(&r.log, nil))
	var err error
	if r.g, err = guard.New(guard.Config{Group: "billing"}, guard.WithLogger(logger)); err != nil {
		t.Fatal(err)
	}
	for _, name := range sources {
		r.open(name)
	}
	cfg.Process = "billing-1"
	if r.c, err = console.New(cfg, r.g); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) open(name string) {
	in := make(chan int, 1000)
	r.in[name] = in
	write := dlq.WriterFunc(func(context.Context, *dlq.Record) error { r.letters.Add(1); return nil })
	src, err := guard.Open(r.g, guard.SourceConfig{Name: name, DeadLetters: write}, guard.Limits{EndsWithInput: true}, numbers{},
		func(context.Context, int) error {
			if r.fails.Load() {
				return errors.New("it does not answer")
			}
			r.handled.Add(1)
			return nil
		})
	if err != nil {
		r.t.Fatal(err)
	}
	r.ends[name] = func() { src.End(context.Background(), guard.ReasonRebalance) }
	r.loops.Go(func() { _ = src.Run(context.Background(), in) })
}

// end takes a source away, as a rebalance does.
func (r *rig) end(name string) { r.ends[name]() }

func (r *rig) close() {
	r.c.Close()
	if _, err := r.g.Close(context.Background()); err != nil {
		r.t.Error(err)
	}
	r.loops.Wait()
}

// toLoopback is a request as if it had come to loopback.
func toLoopback(method, path, body string) *http.Request {
	at := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80}
	q := httptest.NewRequest(method, path, strings.NewReader(body))
	q.Host = "127.0.0.1:80"
	return q.WithContext(context.WithValue(q.Context(), http.LocalAddrContextKey, at))
}

// ask sends a request as if it had come to loopback, and reads the answer into out.
func (r *rig) ask(method, path, body string, out any) (status int) {
	r.t.Helper()
	q := toLoopback(method, path, body)
	if method == http.MethodPost {
		q.Header.Set("Content-Type", "application/json")
	}
	w := httptest.NewRecorder()
	r.c.ServeHTTP(w, q)
	if out != nil {
		if err := json.Unmarshal(w.Body.Bytes(), out); err != nil {
			r.t.Fatalf("%s %s: %v: %s", method, path, err, w.Body)
		}
	}
	return w.Code
}

func (r *rig) order(o console.Order) console.Outcome {
	r.t.Helper()
	body, err := json.Marshal(o)
	if err != nil {
		r.t.Fatal(err)
	}
	var out console.Outcome
	if status := r.ask(http.MethodPost, "/order", string(body), &out); status != http.StatusOK {
		r.t.Fatalf("%v: %d", o, status)
	}
	return out
}

func (r *rig) source(name string) (s console.Source) {
	r.t.Helper()
	var all []console.Source
	if r.ask(http.MethodGet, "/sources?name="+name, "", &all); len(all) != 1 {
		r.t.Fatalf("%d sources are called %s", len(all), name)
	}
	return all[0]
}

// A pause holds the sources that its pattern names and no other, and is over after its
// time although nobody resumes it. What waited is handled then.
func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, console.Config{}, "orders/0", "orders/1", "refunds/0")
		defer r.close()
		out := r.order(console.Order{Action: console.Pause, Sources: []string{"orders/*"}, Why: "ticket 7"})
		if len(out.Results) != 2 || out.Process != "billing-1" || !strings.HasPrefix(out.Results[0].Before, "running") || !strings.HasPrefix(out.Results[1].After, "paused") {
			t.Errorf("%+v", out)
		}
		for _, in := range r.in {
			in <- 1
		}
		time.Sleep(29 * time.Minute)
		if n := r.handled.Load(); n != 1 {
			t.Errorf("%d handled during the pause, want that of refunds", n)
		}
		if s := r.source("orders/0"); s.State != "paused" || s.Holds[0].Until != 60 || s.Waiting+s.Holding != 1 {
			t.Errorf("%+v", s)
		}
		var st console.Status
		r.ask(http.MethodGet, "/status", "", &st)
		if st.Sources != 3 || st.Held != 2 || st.Paused != 2 || st.Unsettled != 2 || len(st.Attention) != 2 || st.Attention[0].ClearedBy == "" {
			t.Errorf("%+v", st)
		}
		time.Sleep(time.Minute + time.Second)
		if n := r.handled.Load(); n != 3 {
			t.Errorf("%d handled after the pause, want 3", n)
		}
		if s := r.source("orders/0"); s.State != "running" || len(s.Holds) != 0 {
			t.Errorf("%+v", s)
		}
		var audit []console.Entry
		r.ask(http.MethodGet, "/audit", "", &audit)
		if len(audit) != 1 || audit[0].Order != "pause orders/* for 30m0s" || audit[0].Why != "ticket 7" || len(audit[0].Results) != 2 {
			t.Errorf("%+v", audit)
		}
		if log := r.log.String(); !strings.Contains(log, `order="pause orders/* for 30m0s" why="ticket 7" sources=2 failed=0 first=orders/0 before="running`) {
			t.Error(log)
		}
	})
}

// A forced breaker is open for its time, then probes; release ends it sooner, close at once.
func TestBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, console.Config{}, "orders")
		defer r.close()
		one := func() (b console.Breaker) {
			t.Helper()
			var all []console.Breaker
			if r.ask(http.MethodGet, "/breakers", "", &all); len(all) != 1 || len(all[0].Sources) != 1 {
				t.Fatalf("%+v", all)
			}
			return all[0]
		}
		handles := func(after time.Duration, n int64) {
			t.Helper()
			time.Sleep(after)
			if got := r.handled.Load(); got != n {
				t.Errorf("%d handled, want %d", got, n)
			}
		}
		all := []string{"*"}
		r.order(console.Order{Action: console.Open, Sources: all, For: console.Duration(time.Minute)})
		r.in["orders"] <- 1
		time.Sleep(20 * time.Second)
		if b := one(); b.State != "open" || !b.Forced || b.Since != 20 || b.Until != 40 || b.Cause != "operator" || b.Group != "billing" {
			t.Errorf("%+v", b)
		}
		handles(39*time.Second, 0)
		handles(2*time.Second, 1)

		r.order(console.Order{Action: console.Open, Sources: all})
		r.in["orders"] <- 2
		handles(time.Minute, 1)
		r.order(console.Order{Action: console.Release, Sources: all})
		handles(time.Second, 2)

		r.order(console.Order{Action: console.Open, Sources: all})
		r.in["orders"] <- 3
		handles(time.Minute, 2)
		r.order(console.Order{Action: console.Close, Sources: all})
		handles(time.Second, 3)
		if b := one(); b.State != "closed" || b.Forced {
			t.Errorf("%+v", b)
		}
	})
}

// Messages that failed and wait are dead-lettered by hand, so many and no more; a dry run
// does nothing, and no audit has it.
func TestDeadLetter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, console.Config{}, "orders")
		defer r.close()
		r.fails.Store(true)
		for i := range 5 {
			r.in["orders"] <- i
		}
		time.Sleep(20 * time.Second) // the outage is known, and nothing proves poison
		o := console.Order{Action: console.DeadLetter, Sources: []string{"orders"}, Count: 1, DryRun: true}
		before := r.letters.Load()
		if out := r.order(o); len(out.Results) != 1 || out.Results[0].Count != 0 || r.letters.Load() != before {
			t.Errorf("a dry run: %+v, %d letters", out, r.letters.Load())
		}
		o.DryRun = false
		out := r.order(o)
		time.Sleep(time.Second)
		if out.Results[0].Count != 1 || r.letters.Load() != before+1 {
			t.Errorf("%+v, %d letters after %d", out, r.letters.Load(), before)
		}
		credits := r.source("orders").Credits
		r.order(console.Order{Action: console.Credits, Sources: []string{"orders"}, Count: 7})
		if now := r.source("orders").Credits; now < credits+6.9 {
			t.Errorf("%v credits, then %v", credits, now)
		}
		var audit []console.Entry
		if r.ask(http.MethodGet, "/audit", "", &audit); len(audit) != 2 {
			t.Errorf("%+v", audit)
		}
		r.fails.Store(false)
		r.order(console.Order{Action: console.Close, Sources: []string{"*"}})
		time.Sleep(time.Minute)
		if a := r.source("orders"); a.Waiting+a.Holding+a.RetryWait != 0 {
			t.Errorf("left after the outage: %+v", a)
		}
	})
}

// An order that is wrong says what, and does nothing, also where a part of it is right.
func TestWrongOrders(t *testing.T) {
	r := newRig(t, console.Config{}, "orders/0")
	defer r.close()
	for body, want := range map[string]string{
		`{"action":"stop","sources":["*"]}`:                      `action: "stop" is not one of pause, resume, open, close, release, credits, deadletter`,
		`{"action":"pause"}`:                                     "sources and breakers: 0 names are not in [1, 1000]",
		`{"action":"pause","sources":[""]}`:                      "sources and breakers: an empty name",
		`{"action":"pause","sources":["*"],"for":"25h"}`:         "for: 25h0m0s is not in [1s, 24h0m0s]",
		`{"action":"pause","sources":["*"],"for":"-1m"}`:         "for: -1m0s is not in [1s, 24h0m0s]",
		`{"action":"pause","sources":["*"],"for":"soon"}`:        `"soon" is not a duration`,
		`{"action":"resume","sources":["*"],"for":"1m"}`:         "for: only pause and open",
		`{"action":"credits","sources":["*"]}`:                   "count: 0 is not in [1, 100000]",
		`{"action":"deadletter","sources":["*"],"count":100001}`: "count: 100001 is not in [1, 100000]",
		`{"action":"pause","sources":["*"],"count":1}`:           "count: only credits and deadletter",
		`{"action":"pause","sources":["*"],"until":"x"}`:         "until",
		`{"action":"pause","sources":["*"]} {}`:                  "want one object",
		`{"action":"pause","sources":["orders/0","typo"]}`:       `source "typo"; this process has orders/0`,
		`[]`: "body",
		`{"action":"pause","sources":["*"],"why":"` + strings.Repeat("y", 257) + `"}`: "why: 257 bytes are more than 256",
	} {
		var refused struct{ Error string }
		status := r.ask(http.MethodPost, "/order", body, &refused)
		wantStatus := http.StatusBadRequest
		if strings.Contains(want, "typo") {
			wantStatus = http.StatusNotFound
		}
		if status != wantStatus || !strings.Contains(refused.Error, want) {
			t.Errorf("%s: %d %s, want %q", body, status, refused.Error, want)
		}
	}
	if s := r.source("orders/0"); s.State != "running" {
		t.Errorf("a refused order did something: %+v", s)
	}
	var audit []console.Entry
	if r.ask(http.MethodGet, "/audit", "", &audit); len(audit) != 15 || audit[0].Error == "" {
		t.Errorf("%d entries: %+v", len(audit), audit)
	}
}

// The audit is bounded, the oldest entries go first; a change of the quarantine is in it,
// made or not.
func TestAudit(t *testing.T) {
	r := newRig(t, console.Config{}, "orders")
	defer r.close()
	for i := range 1000 {
		r.ask(http.MethodPost, "/order", fmt.Sprintf(`{"action":"pause","sources":["no-%d"]}`, i), nil)
	}
	var rules []console.Rule
	if status := r.ask(http.MethodPost, "/quarantine", `{"rule":"key=table 4","by":"ann","why":"broken"}`, &rules); status != http.StatusOK || len(rules) != 1 || rules[0].By != "ann" {
		t.Errorf("%d %+v", status, rules)
	}
	if status := r.ask(http.MethodPost, "/quarantine", `{"rule":"table 4"}`, nil); status != http.StatusBadRequest {
		t.Error("a rule that is none:", status)
	}
	var audit []console.Entry
	r.ask(http.MethodGet, "/audit", "", &audit)
	if len(audit) != 1000 || audit[0].Order != "pause no-2 for 30m0s" || audit[998].Order != "quarantine add key=table 4" || audit[998].Error != "" || audit[999].Error == "" {
		t.Errorf("%d entries, from %+v to %+v", len(audit), audit[0], audit[len(audit)-1])
	}
}

// What may not be asked is refused over a real socket, and stands in the audit.
func TestAccess(t *testing.T) {
	const secret = "0123456789abcdef"
	r := newRig(t, console.Config{Tokens: []console.Token{{Name: "ann", Secret: secret}}}, "orders")
	defer r.close()
	server := httptest.NewServer(r.c)
	defer server.Close()
	send := func(header ...string) int {
		t.Helper()
		q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/order", strings.NewReader(`{"action":"pause","sources":["*"],"for":"1h"}`))
		if err != nil {
			t.Fatal(err)
		}
		q.Header.Set("Content-Type", "application/json")
		for i := 0; i < len(header); i += 2 {
			q.Header.Set(header[i], header[i+1])
		}
		a, err := server.Client().Do(q)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = a.Body.Close() }()
		return a.StatusCode
	}
	if status := send(); status != http.StatusUnauthorized {
		t.Error("without a token:", status)
	}
	if status := send("Authorization", "Bearer "+secret+"x"); status != http.StatusUnauthorized {
		t.Error("a wrong token:", status)
	}
	if status := send("Authorization", "Bearer "+secret, "Origin", "http://evil.example"); status != http.StatusForbidden {
		t.Error("another origin:", status)
	}
	if status := send("Authorization", "Bearer "+secret, "Content-Type", "text/plain"); status != http.StatusUnsupportedMediaType {
		t.Error("a form:", status)
	}
	if s := r.g.Source("orders").State(); len(s.Holds) != 0 {
		t.Errorf("a refused request paused: %+v", s.Holds)
	}
	if status := send("Authorization", "Bearer "+secret); status != http.StatusOK {
		t.Error("with the token:", status)
	}
	q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/audit", nil)
	if err != nil {
		t.Fatal(err)
	}
	q.Header.Set("Authorization", "Bearer "+secret)
	a, err := server.Client().Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Body.Close() }()
	var audit []console.Entry
	if err := json.NewDecoder(a.Body).Decode(&audit); err != nil {
		t.Fatal(err)
	}
	if len(audit) != 2 || audit[0].Order != "POST /order" || !strings.Contains(audit[0].Error, "a token is needed") || !strings.HasPrefix(audit[1].Who, "ann at ") {
		t.Errorf("%+v", audit)
	}
	for _, bad := range []func() (*console.Console, error){
		func() (*console.Console, error) { return console.New(console.Config{}) },
		func() (*console.Console, error) { return console.New(console.Config{}, nil) },
		func() (*console.Console, error) {
			return console.New(console.Config{Tokens: []console.Token{{Name: "bob", Secret: "short"}}}, r.g)
		},
	} {
		if c, err := bad(); err == nil || c != nil {
			t.Error("no error:", err)
		}
	}
}

// Orders and looks are safe beside sources that come and go.
func TestConcurrent(t *testing.T) {
	r := newRig(t, console.Config{}, "a", "b")
	defer r.close()
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for i := range 50 {
				o := console.Order{Action: []string{console.Pause, console.Resume, console.Open, console.Close, console.Release}[i%5], Sources: []string{"*"}}.WithDefaults()
				r.order(o)
				r.ask(http.MethodGet, "/status", "", nil)
				r.ask(http.MethodGet, "/breakers", "", nil)
				r.ask(http.MethodGet, "/audit", "", nil)
			}
		})
	}
	all.Go(func() {
		for range 50 {
			src, err := guard.Open(r.g, guard.SourceConfig{Name: "c"}, guard.Limits{}, numbers{}, func(context.Context, int) error { return nil })
			if err != nil {
				t.Error(err)
				return
			}
			src.End(context.Background(), guard.ReasonRebalance)
		}
	})
	all.Wait()
	r.order(console.Order{Action: console.Resume, Sources: []string{"*"}})
	r.order(console.Order{Action: console.Close, Sources: []string{"*"}})
	for i := range 10 {
		r.in["a"] <- i
	}
	for deadline := time.Now().Add(time.Minute); r.handled.Load() < 10 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if n := r.handled.Load(); n != 10 {
		t.Errorf("%d of 10 handled afterwards: %+v", n, r.source("a"))
	}
}

// A function has no dead letters. An order for credits that names it says so, and one for
// all sources passes it over.
func TestCreditsOfAFunction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, console.Config{}, "orders")
		defer r.close()
		if _, err := guard.Protect(r.g, guard.SourceConfig{Name: "rates"}, func(context.Context, int) error { return nil }); err != nil {
			t.Fatal(err)
		}
		out := r.order(console.Order{Action: console.Credits, Sources: []string{"orders", "rates"}, Count: 5})
		if len(out.Results) != 2 || out.Results[0].Error != "" || out.Results[1].Source != "rates" || out.Results[1].Error != "a function has no dead letters" {
			t.Errorf("%+v", out.Results)
		}
		if out := r.order(console.Order{Action: console.Credits, Sources: []string{"*"}, Count: 5}); len(out.Results) != 1 || out.Results[0].Error != "" {
			t.Errorf("all sources: %+v", out.Results)
		}
		if s := r.source("orders"); s.Credits != 30 {
			t.Errorf("orders has %v credits", s.Credits)
		}
	})
}
