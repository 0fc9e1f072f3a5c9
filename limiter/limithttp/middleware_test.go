// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limithttp

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/limiter"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ms = time.Millisecond

func local(t testing.TB, rate float64, burst int) *limiter.Limiter {
	t.Helper()
	l, err := limiter.Local(limiter.Limit{Rate: rate, Burst: burst})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func always(g limiter.Gate, name string) func(*http.Request) Tier {
	return func(*http.Request) Tier { return Tier{Name: name, Gate: g} }
}

func middleware(t testing.TB, choose func(*http.Request) Tier, cfg Config) *Middleware {
	t.Helper()
	d, err := New(choose, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

var ok = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })

func get(ctx context.Context, h http.Handler) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
	return w
}

func TestConfig(t *testing.T) {
	_, err := New(nil, Config{MaxWait: -1})
	if !errors.Is(err, errConfig) || !strings.Contains(err.Error(), "MaxWait: -1ns") || !strings.Contains(err.Error(), "choose") {
		t.Error(err)
	}
	g := local(t, 1, 1)
	d := middleware(t, always(g, ""), Config{})
	if err := d.Swap(nil, Config{}); !errors.Is(err, errConfig) {
		t.Error(err)
	}
	if w := get(t.Context(), d.Wrap(ok)); w.Code != http.StatusNoContent {
		t.Error("a Swap that was refused has changed something:", w.Code)
	}
}

// What a bucket is in the words of the draft.
func TestHeaders(t *testing.T) {
	for _, c := range []struct {
		rate            float64
		burst, taken    int
		policy, current string
		limit, reset    string
	}{
		{100, 100, 1, `"x";q=100;w=1`, `"x";r=99;t=1`, "100", "1"},
		{10, 5, 1, `"x";q=10;w=1`, `"x";r=4;t=1`, "10", "1"},
		{50, 500, 1, `"x";q=500;w=10`, `"x";r=499;t=1`, "500", "1"},
		{50, 500, 400, `"x";q=500;w=10`, `"x";r=100;t=8`, "500", "8"},
		{50, 500, 401, `"x";q=500;w=10`, `"x";r=99;t=9`, "500", "9"},
		{.1, 5, 1, `"x";q=5;w=50`, `"x";r=4;t=10`, "5", "10"},
		{.1, 5, 5, `"x";q=5;w=50`, `"x";r=0;t=10`, "5", "10"},
		{.7, 21, 1, `"x";q=21;w=30`, `"x";r=20;t=2`, "21", "2"}, // 21/.7 is a little more than 30 in a float64
		{.3, 1, 1, `"x";q=1;w=4`, `"x";r=0;t=4`, "1", "4"},
		{3, 10, 3, `"x";q=12;w=4`, `"x";r=7;t=1`, "12", "1"},
		{1.0 / 3, 1, 1, `"x";q=1;w=3`, `"x";r=0;t=3`, "1", "3"},
		{.001, 1e9, 1, `"x";q=1000000000;w=1000000000000`, `"x";r=999999999;t=1000`, "1000000000", "1000"},
		{1e9, 1, 1, `"x";q=1000000000;w=1`, `"x";r=0;t=1`, "1000000000", "1"},
	} {
		synctest.Test(t, func(t *testing.T) {
			g := local(t, c.rate, c.burst)
			if !g.AllowN(c.taken - 1) {
				t.Fatal("not so many")
			}
			w := get(t.Context(), middleware(t, always(g, "x"), Config{Legacy: true}).Wrap(ok))
			if w.Code != http.StatusNoContent {
				t.Fatal(w.Code)
			}
			for name, want := range map[string]string{
				"RateLimit-Policy": c.policy, "RateLimit": c.current, "Retry-After": "",
				"RateLimit-Limit": c.limit, "RateLimit-Remaining": strconv.Itoa(c.burst - c.taken), "RateLimit-Reset": c.reset,
			} {
				if c.rate == 1e9 && (name == "RateLimit" || name == "RateLimit-Remaining") {
					continue // full again by the time that one looks
				}
				if got := w.Header().Get(name); got != want {
					t.Errorf("%v/s, %d, %d taken: %s: %s, want %s", c.rate, c.burst, c.taken, name, got, want)
				}
			}
		})
	}
}

func TestDenied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := middleware(t, always(local(t, .4, 1), `a "b\`+"\n"), Config{}).Wrap(ok)
		get(t.Context(), h)
		time.Sleep(100 * ms)
		w := get(t.Context(), h)
		for name, want := range map[string]string{
			"Retry-After": "3", "RateLimit": `"a \"b\\?";r=0;t=3`, "RateLimit-Policy": `"a \"b\\?";q=1;w=3`,
			"Content-Type": "application/problem+json", "RateLimit-Limit": "",
		} {
			if got := w.Header().Get(name); got != want {
				t.Errorf("%s: %s, want %s", name, got, want)
			}
		}
		var body map[string]any
		if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
			t.Fatal(err)
		}
		if w.Code != 429 || body["status"] != 429.0 || body["type"] != "https://iana.org/assignments/http-problem-types#quota-exceeded" {
			t.Errorf("%d: %v", w.Code, body)
		}
		if p, _ := body["violated-policies"].([]any); len(p) != 1 || p[0] != `a "b\?` {
			t.Errorf("%v", body)
		}
		// Retry-After is the truth: a little before it is too soon, then it is not.
		time.Sleep(2399 * ms)
		if w := get(t.Context(), h); w.Code != 429 || w.Header().Get("Retry-After") != "1" {
			t.Errorf("%d, %v", w.Code, w.Header())
		}
		time.Sleep(ms)
		if w := get(t.Context(), h); w.Code != http.StatusNoContent {
			t.Error(w.Code)
		}
	})
}

// moving is a gate that denies, and of which others take and leave meanwhile.
type moving struct {
	limiter.Gate

	levels []limiter.Level
}

func (*moving) Allow() bool                    { return false }
func (*moving) Wait(ctx context.Context) error { return ctx.Err() }
func (m *moving) Level() limiter.Level {
	l := m.levels[0]
	m.levels = m.levels[1:]
	l.Limit = limiter.Limit{Rate: 1, Burst: 10}
	return l
}

// One answer does not contradict itself, whatever happens while it is written.
func TestDeniedMeanwhile(t *testing.T) {
	g := &moving{levels: []limiter.Level{{Next: 5 * time.Second}, {Left: 3}}}
	w := get(t.Context(), middleware(t, always(g, "x"), Config{}).Wrap(ok))
	if w.Code != 429 || w.Header().Get("Retry-After") != "5" || w.Header().Get("Ratelimit") != `"x";r=0;t=5` {
		t.Errorf("%d, %v", w.Code, w.Header())
	}
}

func TestNoHeaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := middleware(t, always(local(t, .001, 1), ""), Config{NoHeaders: true, Legacy: true}).Wrap(ok)
		get(t.Context(), h)
		w := get(t.Context(), h)
		if w.Code != 429 || w.Header().Get("Retry-After") != "1000" {
			t.Errorf("%d, %v", w.Code, w.Header())
		}
		for name := range w.Header() {
			if strings.HasPrefix(strings.ToLower(name), "ratelimit") {
				t.Errorf("has %s", name)
			}
		}
	})
	w := get(t.Context(), middleware(t, always(nil, "x"), Config{}).Wrap(ok))
	if w.Code != http.StatusNoContent || len(w.Header()) != 0 {
		t.Errorf("no gate: %d, %v", w.Code, w.Header())
	}
	// A tier with a name of its own, and one without.
	if w := get(t.Context(), middleware(t, always(local(t, 1, 1), ""), Config{}).Wrap(ok)); !strings.HasPrefix(w.Header().Get("Ratelimit"), `"default";`) {
		t.Errorf("%v", w.Header())
	}
}

// MaxWait and the context's deadline bound a wait, and one that cannot be met is
// answered at once.
func TestWaits(t *testing.T) {
	for _, c := range []struct {
		name           string
		most, deadline time.Duration
		code           int
		took           time.Duration
	}{
		{"in time", 2 * time.Second, time.Minute, 204, time.Second},
		{"no wait", 0, time.Minute, 429, 0},
		{"too long for MaxWait", 999 * ms, time.Minute, 429, 0},
		{"too long for the deadline", time.Minute, 999 * ms, 429, 0},
		{"past the deadline", time.Minute, -1, 429, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := middleware(t, always(local(t, 1, 1), ""), Config{MaxWait: c.most}).Wrap(ok)
			get(t.Context(), h)
			ctx, cancel := context.WithTimeout(t.Context(), c.deadline)
			defer cancel()
			start := time.Now()
			w := get(ctx, h)
			if took := time.Since(start); w.Code != c.code || took != c.took {
				t.Errorf("%s: %d after %v, want %d after %v", c.name, w.Code, took, c.code, c.took)
			}
			if (w.Header().Get("Retry-After") != "") != (c.code == 429) {
				t.Errorf("%s: %v", c.name, w.Header())
			}
		})
	}
}

// Many wait, in their order, and those who cannot be in time do not wait for it.
func TestWaitsInLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := middleware(t, always(local(t, 10, 1), ""), Config{MaxWait: 550 * ms}).Wrap(ok)
		start := time.Now()
		var mu sync.Mutex
		var codes []int
		var late time.Duration
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				w := get(t.Context(), h)
				mu.Lock()
				defer mu.Unlock()
				codes = append(codes, w.Code)
				late = max(late, time.Since(start))
			})
			synctest.Wait()
		}
		all.Wait()
		slices.Sort(codes)
		if codes[5] != 204 || codes[6] != 429 || late > 500*ms {
			t.Errorf("%v within %v", codes, late)
		}
	})
}

func TestClosedGate(t *testing.T) {
	s, err := escrow.New(crdt.Replica{Name: "a"}, escrow.Config{Limit: escrow.Limit{Rate: 1, Burst: 1}})
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	for _, most := range []time.Duration{0, 10 * time.Second} {
		h := middleware(t, always((*limiter.Limiter)(s.Key("k")), ""), Config{MaxWait: most}).Wrap(ok)
		if w := get(t.Context(), h); w.Code != 503 || !strings.Contains(w.Body.String(), "temporary-reduced-capacity") {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	}
}

// Tiers are exchanged while a real server serves real clients: every answer is one of
// the old or of the new.
func TestSwapUnderLoad(t *testing.T) {
	d := middleware(t, always(limiter.All(), "free"), Config{})
	server := httptest.NewServer(d.Wrap(ok))
	defer server.Close()
	client := server.Client()
	var all sync.WaitGroup
	var served, denied atomic.Int64
	stop := make(chan struct{})
	for range 4 {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				response, err := client.Get(server.URL)
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, response.Body)
				_ = response.Body.Close()
				current := response.Header.Get("Ratelimit")
				switch {
				case response.StatusCode == 204 && current == "":
					served.Add(1)
				case response.StatusCode == 204 && strings.HasPrefix(current, `"one"`):
				case response.StatusCode == 429 && strings.HasPrefix(current, `"one";r=0;`):
					denied.Add(1)
				default:
					t.Errorf("%d, %v", response.StatusCode, response.Header)
				}
			}
		})
	}
	for i := range 6 {
		before := served.Load() + denied.Load()
		for served.Load()+denied.Load() < before+20 {
			time.Sleep(ms)
		}
		choose := always(limiter.All(), "free")
		if i%2 == 0 {
			choose = always(local(t, .001, 1), "one")
		}
		if err := d.Swap(choose, Config{Legacy: i%3 == 0}); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	all.Wait()
	if served.Load() == 0 || denied.Load() == 0 {
		t.Errorf("served %d, denied %d", served.Load(), denied.Load())
	}
}

func TestRemoteIP(t *testing.T) {
	for addr, want := range map[string]string{
		"192.0.2.7:1234": "192.0.2.7", "[::ffff:192.0.2.7]:1": "192.0.2.7",
		"[2001:db8:1:2:3:4:5:6]:80": "2001:db8:1:2::/64", "[fe80::1%eth0]:80": "fe80::/64",
		"@": "", "": "", "pipe": "",
	} {
		if got := RemoteIP(&http.Request{RemoteAddr: addr, Header: http.Header{"X-Forwarded-For": {"1.1.1.1"}}}); got != want {
			t.Errorf("%q: %q, want %q", addr, got, want)
		}
	}
}

type body struct {
	io.Reader

	closed bool
}

func (b *body) Close() error { b.closed = true; return nil }

func TestTransport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, calls := local(t, 10, 1), 0
		rt := Transport(roundTripper(func(*http.Request) (*http.Response, error) {
			calls++
			return &http.Response{StatusCode: 200}, nil
		}), func(r *http.Request) limiter.Gate {
			if r.URL.Path == "/free" {
				return nil
			}
			return g
		})
		do := func(ctx context.Context, path string) (*body, error) {
			b := &body{Reader: strings.NewReader("x")}
			response, err := rt.RoundTrip(httptest.NewRequestWithContext(ctx, http.MethodPost, path, b)) //nolint:bodyclose // it has none
			if (response == nil) == (err == nil) {
				t.Error(response, err)
			}
			return b, err
		}
		start := time.Now()
		for range 4 {
			if _, err := do(t.Context(), "/"); err != nil {
				t.Error(err)
			}
			if _, err := do(t.Context(), "/free"); err != nil {
				t.Error(err)
			}
		}
		if d := time.Since(start); d != 300*ms || calls != 8 {
			t.Error(d, calls)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*ms)
		defer cancel()
		if b, err := do(ctx, "/"); !errors.Is(err, context.DeadlineExceeded) || !b.closed || calls != 8 {
			t.Error(err, b.closed, calls)
		}
		time.Sleep(100 * ms) // until the limiter's goroutine has nothing left to do
	})
}
