// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"runtime/debug"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
)

// While the breaker is open clients are told when to come back, and nothing
// reaches the handler but probes.
func TestRefused(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{Name: "pay"})
		r.want(r.get(), 200)
		if err := r.g.Source("pay").ForceOpen(7300 * time.Millisecond); err != nil {
			t.Fatal(err)
		}
		for _, want := range []struct {
			after time.Duration
			says  string
		}{{0, "8"}, {5 * time.Second, "3"}, {2 * time.Second, "1"}} {
			time.Sleep(want.after)
			res := r.want(r.get(), 503)
			if got := res.Header.Get("Retry-After"); got != want.says || res.Header.Get(HeaderReason) != "breaker" {
				t.Errorf("Retry-After %q, want %s: %s", got, want.says, res.Header)
			}
		}
		if n := r.s.count(); n != 1 {
			t.Errorf("%d calls", n)
		}
		time.Sleep(300 * time.Millisecond)
		for range 3 {
			r.want(r.get(), 200) // probes
		}
		if st := r.state(); st.Breaker.State != breaker.Closed || st.Tally.Probes != 3 {
			t.Errorf("%+v", st)
		}
		if err := r.g.Source("pay").ForceOpen(0); err != nil { // for ever
			t.Fatal(err)
		}
		if got := r.want(r.get(), 503).Header.Get("Retry-After"); got != "10" {
			t.Errorf("forced open without end: Retry-After %s", got)
		}
		_ = r.g.Source("pay").ForceClosed()
		r.g.Source("pay").Pause(0)
		if res := r.want(r.get(), 503); res.Header.Get("Retry-After") != "10" || res.Header.Get(HeaderReason) != "operator" {
			t.Errorf("paused: %s", res.Header)
		}
		r.g.Source("pay").Resume()
		if st := r.in.Stats(); st.Refused != 5 || st.Full+st.Accepted > 0 {
			t.Errorf("%+v", st)
		}
		r.close()
		if res := r.want(r.get(), 503); res.Header.Get(HeaderReason) != "shutdown" {
			t.Errorf("closed: %s", res.Header)
		}
	})
}

// A probe that hangs keeps its own client waiting and nobody else, who hears
// that it will not be long.
func TestProbeInHand(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		r.breakIt()
		r.s.setDown(false)
		r.s.handle = func(http.ResponseWriter, *http.Request) bool { time.Sleep(10 * time.Second); return false }
		time.Sleep(time.Second)
		probe := make(chan int)
		go func() { probe <- r.get().StatusCode }()
		synctest.Wait()
		start := time.Now()
		for range 100 {
			if got := r.want(r.get(), 503).Header.Get("Retry-After"); got != "1" {
				t.Fatalf("Retry-After %s", got)
			}
		}
		if time.Since(start) > 0 {
			t.Error("a refusal took time")
		}
		if status := <-probe; status != 200 {
			t.Errorf("the probe got %d", status)
		}
		r.close()
	})
}

// What a handler comes to, by every way it can say so.
func TestLiveOutcomes(t *testing.T) {
	type want struct{ status, failures int }
	for name, c := range map[string]struct {
		h    http.HandlerFunc
		want want
	}{
		"silent": {func(http.ResponseWriter, *http.Request) {}, want{200, 0}},
		"4xx":    {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404) }, want{404, 0}},
		"429":    {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(429) }, want{429, 0}},
		"503":    {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, want{503, 5}},
		"first status counts": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(nil)
			w.WriteHeader(500)
		}, want{200, 0}},
		"flushed":       {func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush(); w.WriteHeader(500) }, want{200, 0}},
		"error":         {HandlerFunc(func(http.ResponseWriter, *http.Request) error { return errBroken }).ServeHTTP, want{500, 5}},
		"written error": {HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error { w.WriteHeader(418); return errBroken }).ServeHTTP, want{418, 5}},
		"permanent":     {HandlerFunc(func(http.ResponseWriter, *http.Request) error { return guard.Permanent(errBroken) }).ServeHTTP, want{500, 0}},
		"ignored": {HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			w.WriteHeader(502)
			return guard.Ignore(errBroken)
		}).ServeHTTP, want{502, 0}},
		"said":       {func(_ http.ResponseWriter, r *http.Request) { Fail(r.Context(), errBroken) }, want{200, 5}},
		"taken back": {func(_ http.ResponseWriter, r *http.Request) { Fail(r.Context(), errBroken); Fail(r.Context(), nil) }, want{200, 0}},
		"timeout": {func(w http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			if !errors.Is(r.Context().Err(), context.DeadlineExceeded) {
				panic(r.Context().Err())
			}
			w.WriteHeader(504)
		}, want{504, 5}},
		"silent at its timeout": {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, want{504, 5}},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, quick, Config{})
			h := r.in.Wrap(c.h)
			for range 5 {
				r.want(send(h, "GET", "/", ""), c.want.status)
			}
			st := r.state()
			if open := st.Breaker.State == breaker.Open; open != (c.want.failures > 0) {
				t.Errorf("%+v", st.Breaker)
			}
			r.close()
		})
	}
}

// A panic is a failure and goes on as it was, with the stack of the handler.
func TestPanics(t *testing.T) {
	for name, value := range map[string]any{"panic": "boom", "abort": http.ErrAbortHandler} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, quick, Config{})
			h := r.in.Wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { blowUp(value) }))
			for range 5 {
				func() {
					defer func() {
						stack := string(debug.Stack())
						if v := recover(); v != value || !strings.Contains(stack, "blowUp") {
							t.Errorf("recovered %v from\n%s", v, stack)
						}
					}()
					send(h, "GET", "/", "")
				}()
			}
			if st := r.state(); st.Breaker.State != breaker.Open || st.Account.Processing != 0 {
				t.Errorf("%+v", st)
			}
			r.close()
		})
	}
}

func blowUp(v any) { panic(v) }

// A client that goes away is no outcome, unless it had waited for Patience: a
// dependency that hangs is seen also where no client waits for the timeout.
func TestClientGone(t *testing.T) {
	answers := map[string]func(w http.ResponseWriter){
		"502": func(w http.ResponseWriter) { w.WriteHeader(502) }, "nothing": func(http.ResponseWriter) {},
		"panic": func(http.ResponseWriter) { panic(http.ErrAbortHandler) },
	}
	for name, answer := range answers {
		for _, c := range []struct {
			patience time.Duration
			open     bool
		}{{time.Second, false}, {6 * time.Second, true}} {
			bubble(t, name+" after "+c.patience.String(), func(t *testing.T) {
				r := newRig(t, quick, Config{})
				h := r.in.Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					<-r.Context().Done()
					if !errors.Is(r.Context().Err(), context.Canceled) {
						t.Error(r.Context().Err())
					}
					answer(w)
				}))
				for range 5 {
					ctx, cancel := context.WithTimeoutCause(t.Context(), time.Hour, nil)
					time.AfterFunc(c.patience, cancel)
					func() {
						defer func() { _ = recover() }()
						h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, "GET", "/", nil))
					}()
				}
				if st := r.state(); (st.Breaker.State == breaker.Open) != c.open {
					t.Errorf("%+v", st.Breaker)
				}
				r.close()
			})
		}
	}
}

// A handler that answers nothing before its request's own context ends, as by a middleware, is
// a 504 for a client that is still there. It is a failure as when the client has left.
func TestSilentWhenTheRequestEnds(t *testing.T) {
	for took, open := range map[time.Duration]bool{time.Second: false, 6 * time.Second: true} {
		bubble(t, took.String(), func(t *testing.T) {
			r := newRig(t, quick, Config{})
			inner := r.in.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
			h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				ctx, cancel := context.WithTimeout(r.Context(), took)
				defer cancel()
				inner.ServeHTTP(w, r.WithContext(ctx))
			})
			for range 5 {
				r.want(send(h, "GET", "/", ""), 504)
			}
			if st := r.state(); (st.Breaker.State == breaker.Open) != open {
				t.Errorf("%+v", st.Breaker)
			}
			r.close()
		})
	}
}

// An intake inside another: a refusal of the inner one is no outcome of the
// outer one's dependency, and a request passes the same intake once.
func TestNested(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{Name: "outer"})
		inner, err := New(r.g, Config{Name: "inner"}, WithDeadLetters(r.letters))
		if err != nil {
			t.Fatal(err)
		}
		h := r.in.Wrap(inner.Wrap(r.in.Wrap(r.s)))
		both := r.in.Defer(inner.Wrap(r.s))
		for range 3 {
			r.want(send(h, "GET", "/", "x"), 200)
		}
		if a := r.state().Account; a.Acked != 3 {
			t.Errorf("the outer intake counts %+v", a)
		}
		if err := r.g.Source("inner").ForceOpen(time.Minute); err != nil {
			t.Fatal(err)
		}
		for range 20 {
			r.want(send(h, "GET", "/", "x"), 503)
		}
		if st := r.state(); st.Breaker.State != breaker.Closed || st.Tally.Failures > 0 {
			t.Errorf("refusals of the inner intake are failures of the outer: %+v", st)
		}
		// Held by the outer, refused by the inner: it waits for the inner, and
		// costs no attempt.
		if err := r.g.Source("outer").ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		r.want(send(both, "POST", "/", "deferred"), 202)
		time.Sleep(30 * time.Second)
		if st := r.heldState(); st.Tally.Failures > 0 || st.Account.Unsettled() != 1 {
			t.Errorf("%+v", st)
		}
		time.Sleep(31 * time.Second)
		r.drained()
		if got := r.s.handled(); !strings.HasSuffix(got, " deferred") {
			t.Error(got)
		}
		if _, err := inner.Close(t.Context()); err != nil {
			t.Error(err)
		}
		r.close()
	})
}

// Intakes of one dependency share its breaker.
func TestSharedDependency(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{Name: "a", Dependency: "db"})
		b, err := New(r.g, Config{Name: "b", Dependency: "db"})
		if err != nil {
			t.Fatal(err)
		}
		r.breakIt()
		r.want(send(b.Wrap(r.s), "GET", "/", ""), 503)
		if _, err := New(r.g, Config{Name: "b"}); err == nil {
			t.Error("two intakes of one name")
		}
		if _, err := b.Close(t.Context()); err != nil {
			t.Error(err)
		}
		r.close()
	})
}

type everySecond struct{ next time.Time }

func (l *everySecond) Admit(time.Duration) time.Duration {
	now := time.Now()
	if now.Before(l.next) {
		return l.next.Sub(now)
	}
	l.next = now.Add(time.Second)
	return 0
}

// Above the rate limit a client hears 429, and a deferrable request waits.
func TestLimited(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{}, WithLimiter(new(everySecond)))
		r.want(r.get(), 200)
		res := r.want(r.get(), 429)
		if res.Header.Get("Retry-After") != "1" || res.Header.Get(HeaderReason) != "limiter" {
			t.Error(res.Header)
		}
		for _, body := range []string{"a", "b", "c"} {
			r.want(r.post(body), 202)
		}
		start := time.Now()
		r.drained()
		if took := time.Since(start); took != 3*time.Second || r.s.handled() != "get a b c" {
			t.Errorf("%s, handled %s", took, r.s.handled())
		}
		r.close()
	})
}

// The user's own answers.
func TestOwnAnswers(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{RetryAfter: time.Minute},
			WithRefusal(func(w http.ResponseWriter, r *http.Request, ref Refusal) {
				if ref.Reason != guard.ReasonOperator || ref.Status != 503 || ref.RetryAfter != time.Minute || r.URL.Path != "/orders" {
					t.Errorf("%+v", ref)
				}
				w.Header().Del("Retry-After")
				w.WriteHeader(599)
			}),
			WithAccepted(func(w http.ResponseWriter, _ *http.Request, h Held) {
				w.Header().Set("Location", "/status/"+h.ID)
				w.WriteHeader(http.StatusNoContent)
			}),
			WithOutcome(func(_ *http.Request, status int, replay bool) error {
				if status == 500 && !replay {
					return nil
				}
				return DefaultOutcome(nil, status, replay)
			}))
		r.s.setDown(true)
		for range 10 {
			r.want(r.get(), 500) // no failure, says the user
		}
		r.s.setDown(false)
		r.g.Source("http").Pause(0)
		if res := r.want(r.get(), 599); res.Header.Get("Retry-After") != "" || res.Header.Get("Content-Type") != "" {
			t.Error(res.Header) // or the plain answer follows it
		}
		res := r.want(r.post("x"), 204)
		if id := res.Header.Get(HeaderHoldID); id == "" || res.Header.Get("Location") != "/status/"+id || res.Header.Get(HeaderHold) != HoldMemory {
			t.Error(res.Header)
		}
		r.drained()
		r.close()
	})
}

// An answer of the user's own that says nothing would be a 200 of a request that
// nobody has.
func TestOwnRefusalThatSaysNothing(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{}, WithRefusal(func(w http.ResponseWriter, _ *http.Request, _ Refusal) {
			w.Header().Set("Retry-After", "7")
		}))
		r.g.Source("http").Pause(0)
		if res := r.want(r.get(), 503); res.Header.Get("Retry-After") != "7" || res.Header.Get(HeaderReason) != "operator" {
			t.Error(res.Header)
		}
		r.close()
	})
}
