// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"mime/multipart"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
)

// In an outage deferrable requests are held; they are replayed in order once
// the dependency is back, at the ramp, and those that come meanwhile queue up
// behind them.
func TestOutage(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		r.want(r.post("live"), 200)
		broken := time.Now()
		r.breakIt()
		var ids []string
		for i := range 200 {
			res := r.want(r.post(strconv.Itoa(i)), 202)
			if res.Header.Get(HeaderHold) != HoldMemory {
				t.Fatal(res.Header)
			}
			ids = append(ids, res.Header.Get(HeaderHoldID))
			time.Sleep(20 * time.Millisecond)
		}
		slices.Sort(ids)
		if n := len(slices.Compact(ids)); n != 200 {
			t.Errorf("%d different ids", n)
		}
		if st := r.in.Stats(); st.Held != 200 || st.Accepted != 200 {
			t.Errorf("%+v", st)
		}
		probes := int(r.state().Tally.Probes + r.heldState().Tally.Probes)
		// A probe for each open period, and one call of its look: lookRate (3/s) allows less
		// than two in a period below 0.66s.
		most, breaks := 0, quick.Breaker.WithDefaults()
		for open := breaks.Base; open <= time.Since(broken); open += breaks.PeriodAfter(30, open) {
			most += 2
		}
		if made := r.s.count() - 1 - 5; made != probes || made == 0 || made > most {
			t.Errorf("%d calls in the outage, more than %d, or than %d probes", made, most, probes)
		}
		r.s.setDown(false)
		for r.state().Breaker.State != breaker.Closed {
			time.Sleep(time.Millisecond)
		}
		closed, before := time.Now(), r.in.Stats().Held
		for i := 200; i < 220; i++ {
			r.want(r.post(strconv.Itoa(i)), 202) // while the hold drains
		}
		r.want(r.get(), 200) // those who cannot wait do not
		r.drained()
		// Start·Double/ln 2·(2^(t/Double)−1) messages in the first t.
		n := float64(before + 20)
		want := time.Duration(math.Log2(1+n*math.Ln2/100) * float64(time.Second))
		if took := time.Since(closed); took < want-50*time.Millisecond || took > want+50*time.Millisecond {
			t.Errorf("%v requests were drained in %s, the ramp asks for %s", n, took, want)
		}
		r.want(r.post("after"), 200)
		if got, want := strings.Replace(r.s.handled(), "get ", "", 1), "live "+words("%d", 0, 220)+" after"; got != want {
			t.Errorf("handled %s", got)
		}
		if n := len(r.letters.list()); n > 0 {
			t.Errorf("%d dead letters", n)
		}
		if a := r.heldState().Account; a.Check() != nil || a.Acked != 220 || a.Received != 220 {
			t.Errorf("%+v", a)
		}
		r.close()
	})
}

// While requests are held they are the probes, and nobody who waits for an
// answer has to wait for a dependency that hangs.
func TestHeldProbeFirst(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		r.breakIt()
		r.s.handle = func(_ http.ResponseWriter, req *http.Request) bool {
			<-req.Context().Done() // 30s
			return false
		}
		r.want(r.post("held"), 202)
		// The message is guessed to be poison after Attempts timeouts of 30s and Patience of
		// 10s at the earliest; then live requests may be probes.
		for begun := time.Now(); time.Since(begun) < 3*30*time.Second+10*time.Second; {
			start := time.Now()
			r.want(r.get(), 503)
			if took := time.Since(start); took > 0 {
				t.Fatalf("a refusal took %s", took)
			}
			time.Sleep(7 * time.Millisecond)
		}
		if n := r.state().Tally.Probes; n != 0 {
			t.Errorf("%d live probes", n)
		}
		if n := r.heldState().Tally.Probes; n != 4 { // 30s each, and open periods of 0.1s to 2s between
			t.Errorf("%d held probes in 100s", n)
		}
		r.s.mu.Lock()
		r.s.handle = nil
		r.s.mu.Unlock()
		r.s.setDown(false)
		r.drained()
		r.close()
	})
}

// Also at the very instant at which a probe is due, with many who would make it.
func TestHeldProbeAtTheInstant(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		for range 30 {
			due := time.Now().Add(time.Second)
			var live sync.WaitGroup
			for range 20 {
				live.Go(func() {
					time.Sleep(time.Until(due))
					r.get()
				})
			}
			synctest.Wait() // they sleep
			if err := r.g.Source("http").ForceOpen(time.Second); err != nil {
				t.Fatal(err)
			}
			for range 4 { // more than it takes to close the breaker
				r.want(r.post("held"), 202)
			}
			live.Wait()
			r.drained()
			_ = r.g.Source("http").ForceClosed()
		}
		if n := r.state().Tally.Probes; n != 0 {
			t.Errorf("%d live probes", n)
		}
		r.close()
	})
}

// A request that can be held is never a live probe: its client need not wait.
func TestDeferrableIsNoLiveProbe(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		_ = r.g.Source("http").ForceOpen(time.Second)
		time.Sleep(2 * time.Second)
		r.want(r.post("x"), 202)
		r.drained()
		r.close()
	})
}

// If held requests cannot probe, those who wait do: the breaker closes again.
func TestLiveProbesWhenHeldDoNot(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		r.breakIt()
		r.want(r.post("held"), 202)
		synctest.Wait()
		r.g.Source("http/held").Pause(0)
		r.s.setDown(false)
		start := time.Now()
		for r.state().Breaker.State != breaker.Closed {
			if time.Since(start) > 10*time.Second {
				t.Fatalf("not closed: %+v", r.state())
			}
			r.get()
			time.Sleep(10 * time.Millisecond)
		}
		if took := time.Since(start); took < probeGrace {
			t.Errorf("held requests were left %s to probe", took)
		}
		r.want(r.post("behind"), 202)
		r.g.Source("http/held").Resume()
		r.drained()
		if got := r.s.handled(); !strings.HasSuffix(got, "held behind") {
			t.Error(got)
		}
		r.close()
	})
}

// With order by key only the requests of a key wait for each other.
func TestKeys(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := quick
		p.Order, p.Workers = guard.OrderKey, 4
		r := newRig(t, p, Config{}, WithKey(func(r *http.Request) string { return r.Header.Get("Account") }))
		post := func(account, body string) answer {
			return send(r.defers, "POST", "/", body, func(r *http.Request) { r.Header.Set("Account", account) })
		}
		r.breakIt()
		for i := range 50 {
			r.want(post("a", "a"+strconv.Itoa(i)), 202)
			r.want(post("b", "b"+strconv.Itoa(i)), 202)
		}
		hang := make(chan struct{})
		r.s.mu.Lock()
		r.s.down = false
		r.s.handle = func(_ http.ResponseWriter, r *http.Request) bool {
			if h, ok := Replayed(r.Context()); ok && strings.HasSuffix(h.ID, "-99") {
				<-hang // a49
			}
			return false
		}
		r.s.mu.Unlock()
		time.Sleep(10 * time.Second)
		r.want(post("a", "a50"), 202)  // behind a49
		r.want(post("b", "b50"), 200)  // nobody of b is held
		r.want(post("c", "live"), 200) // nor of c
		close(hang)
		r.drained()
		var a, b []string
		for word := range strings.FieldsSeq(r.s.handled()) {
			switch word[0] {
			case 'a':
				a = append(a, word)
			case 'b':
				b = append(b, word)
			}
		}
		if got := strings.Join(a, " "); got != words("a%d", 0, 51) {
			t.Error(got)
		}
		if got := strings.Join(b, " "); got != words("b%d", 0, 51) {
			t.Error(got)
		}
		r.close()
	})
}

// Without order a request is held only while the breaker is not closed.
func TestNoOrder(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := quick
		p.Order, p.Workers = guard.OrderNone, 2
		r := newRig(t, p, Config{})
		r.breakIt()
		for i := range 300 {
			r.want(r.post(strconv.Itoa(i)), 202)
		}
		r.s.setDown(false)
		for r.state().Breaker.State != breaker.Closed {
			time.Sleep(time.Millisecond)
		}
		if r.in.Stats().Held == 0 {
			t.Fatal("nothing is held any more")
		}
		r.want(r.post("live"), 200)
		r.drained()
		if n := len(strings.Fields(r.s.handled())); n != 301 {
			t.Errorf("%d handled", n)
		}
		r.close()
	})
}

// What the hold has no room for is refused, and what is being read counts.
func TestFull(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := quick
		p.Window = 3
		r := newRig(t, p, Config{MaxBody: 100, MaxHeader: 200})
		full := func(res answer) {
			t.Helper()
			if r.want(res, 503); res.Header.Get(HeaderReason) != "backpressure" || res.Header.Get("Retry-After") != "2" {
				t.Error(res.Header)
			}
		}
		big := strings.Repeat("x", 101)
		r.want(r.post(big), 200) // no need to hold it
		_ = r.g.Source("http").ForceOpen(time.Minute)
		time.Sleep(58500 * time.Millisecond)
		full(r.post(big))
		full(send(r.defers, "POST", "/", "x", func(r *http.Request) { r.Header.Set("Idempotency-Key", strings.Repeat("k", 200)) }))
		full(send(r.defers, "POST", "/", big, func(r *http.Request) { r.ContentLength = -1 }))
		r.want(send(r.defers, "POST", "/", big[:100], func(r *http.Request) { r.ContentLength = -1 }), 202)
		r.want(r.post("2"), 202)

		body, write := io.Pipe()
		slow := make(chan answer)
		go func() {
			slow <- send(r.defers, "POST", "/", "", func(r *http.Request) { r.Body, r.ContentLength = body, -1 })
		}()
		synctest.Wait()
		full(r.post("4")) // the third is still being sent
		_, _ = write.Write([]byte("3"))
		_ = write.Close()
		r.want(<-slow, 202)
		full(r.post("5"))
		if st := r.in.Stats(); st.Full != 5 || st.Accepted != 3 || st.Refused != 0 {
			t.Errorf("%+v", st)
		}
		_ = r.g.Source("http").ForceClosed()
		r.drained()
		r.close()
	})
	bubble(t, "bytes", func(t *testing.T) {
		p := quick
		p.WindowBytes = 10 * overhead
		r := newRig(t, p, Config{})
		_ = r.g.Source("http").ForceOpen(time.Minute)
		r.want(r.post(strings.Repeat("x", 20*overhead)), 202) // one may be larger
		r.want(r.post("x"), 503)
		_ = r.g.Source("http").ForceClosed()
		r.drained()
		_ = r.g.Source("http").ForceOpen(time.Minute)
		n := 0
		for ; r.post("x").StatusCode == 202; n++ {
		}
		if n != 9 {
			t.Errorf("%d requests of a little more than %d bytes in %d", n, overhead, p.WindowBytes)
		}
		_ = r.g.Source("http").ForceClosed()
		r.drained()

		// A body of unknown length may be as long as allowed.
		_ = r.g.Source("http").ForceOpen(time.Minute)
		r.want(r.post("x"), 202)
		r.want(send(r.defers, "POST", "/", "x", func(r *http.Request) { r.ContentLength = -1 }), 503)
		_ = r.g.Source("http").ForceClosed()
		r.drained()
		r.close()
	})
}

// A request that cannot be read whole is not held, and its client is told.
func TestUnreadable(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		_ = r.g.Source("http").ForceOpen(time.Minute)
		limited := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			req.Body = http.MaxBytesReader(w, req.Body, 3)
			req.ContentLength = -1
			r.defers.ServeHTTP(w, req)
		})
		r.want(send(limited, "POST", "/", "1234"), 413)
		r.want(send(r.defers, "POST", "/", "1234", func(r *http.Request) { r.ContentLength = 5 }), 400)
		r.want(send(r.defers, "POST", "/", "", func(r *http.Request) {
			r.Body, r.ContentLength = io.NopCloser(&failing{errBroken}), -1
		}), 400)
		// Its context has ended: that its client has gone is only one reason.
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		res := r.want(send(r.defers, "POST", "/", "x", func(req *http.Request) { *req = *req.WithContext(gone) }), 503)
		if res.Header.Get(HeaderReason) != "shutdown" || res.Header.Get("Retry-After") != "10" {
			t.Error(res.Header)
		}
		if st := r.in.Stats(); st.Accepted != 0 || st.Held != 0 || st.Refused != 1 || st.Full != 0 {
			t.Errorf("%+v", st)
		}

		// A form that was read in front of the intake has files that go with the request.
		var form bytes.Buffer
		parts := multipart.NewWriter(&form)
		_, _ = parts.CreateFormFile("f", "f.txt")
		_ = parts.Close()
		parsed := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if err := req.ParseMultipartForm(1); err != nil {
				t.Error(err)
			}
			r.defers.ServeHTTP(w, req)
		})
		r.want(send(parsed, "POST", "/", form.String(), func(r *http.Request) { r.Header.Set("Content-Type", parts.FormDataContentType()) }), 503)
		r.close()
	})
}

// A panic on the way into the hold gives its room back.
func TestPanicBeforeTheHold(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		key := "panics"
		r := newRig(t, quick, Config{}, WithKey(func(*http.Request) string {
			if key == "panics" {
				panic(http.ErrAbortHandler)
			}
			return key
		}))
		r.breakIt()
		post := func(edit func(*http.Request)) {
			defer func() {
				if v := recover(); v == nil {
					t.Error("the panic is gone")
				}
			}()
			send(r.defers, "POST", "/", "x", edit)
		}
		post(func(*http.Request) {})
		key = "k"
		post(func(req *http.Request) { req.Body = io.NopCloser(panicking{}) })
		r.want(r.post("a"), http.StatusAccepted)
		r.s.setDown(false)
		r.drained()
		r.close() // looks at the room
	})
}

type panicking struct{}

func (panicking) Read([]byte) (int, error) { panic(http.ErrAbortHandler) }

type failing struct{ err error }

func (f *failing) Read([]byte) (int, error) { return 0, f.err }

// Only what changes something is held by Defer; a router may say otherwise.
func TestWhatIsDeferrable(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{}, WithDeferrable(func(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/jobs") }))
		_ = r.g.Source("http").ForceOpen(time.Minute)
		for method, status := range map[string]int{
			"POST": 202, "PUT": 202, "PATCH": 202, "DELETE": 202, "GET": 503, "HEAD": 503, "OPTIONS": 503, "CONNECT": 503,
		} {
			r.want(send(r.defers, method, "/x", ""), status)
		}
		r.want(send(r.wrapped, "POST", "/x", ""), 503)
		r.want(send(r.wrapped, "GET", "/jobs/1", ""), 202)
		r.want(send(r.wrapped, "GET", "/jobs/1", "", func(r *http.Request) { r.Header.Set("Upgrade", "websocket") }), 503)
		for offer, status := range map[string]int{"h2c": 202, "H2C": 202, "TLS/1.2, h2c": 202, "tcp": 503, "h2c, websocket": 503} {
			r.want(send(r.defers, "POST", "/x", "", func(r *http.Request) { r.Header.Set("Upgrade", offer) }), status)
		}
		_ = r.g.Source("http").ForceClosed()
		r.drained()
		r.close()
	})
	g, err := guard.New(guard.Config{})
	if err != nil {
		t.Fatal(err)
	}
	in, err := New(g, Config{})
	if err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("Defer without a dead-letter writer does not panic")
			}
		}()
		in.Defer(http.NotFoundHandler())
	}()
	if w := in.Wrap(http.NotFoundHandler()); w == nil {
		t.Error("no handler")
	}
	if _, err := in.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := in.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// Everything wrong is named at once.
func TestConfig(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Error(err)
	}
	bad := Config{
		MaxBody: -1, MaxHeader: 17 << 20, BodyTimeout: time.Microsecond, RetryAfter: 1500 * time.Millisecond, Patience: -1,
		Headers: []string{"X Y", "connection", "http-method"}, Policy: &guard.Policy{Window: -3},
	}
	_, err := New(nil, bad, WithDeferrable(func(*http.Request) bool { return true }), WithValues(nil))
	if !errors.Is(err, errConfig) {
		t.Fatal(err)
	}
	for _, want := range []string{
		"Config.MaxBody: -1 is not within 1 and", "Config.MaxHeader: 17825792", "Config.BodyTimeout: 1µs is not within 1ms and 1h0m0s",
		"Config.RetryAfter: 1.5s is not in whole seconds", "Config.Patience: -1ns", `Config.Headers: "X Y"`, `Config.Headers: "connection"`,
		`Config.Headers: "http-method"`, "Policy.Window: -3", "WithDeferrable: it needs WithDeadLetters", "WithValues: a key", "the Guard must not be nil",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q:\n%v", want, err)
		}
	}
	g, err := guard.New(guard.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	if _, err := New(g, Config{Policy: &guard.Policy{Breaker: breaker.Config{Run: 9}}}, WithDeadLetters(&letters{})); err == nil {
		t.Error("a breaker of its own in a shared scope")
	}
	if n := len(g.Sources()); n != 0 {
		t.Errorf("%d sources are left of an intake that was refused", n)
	}
}
