// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

type userKey struct{}

type secretKey struct{}

// A replay is the request as it was, as far as it is kept: each attempt of it,
// whatever the one before did to it.
func TestReplayIsTheRequest(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{Headers: append(DefaultHeaders(), "X-Tenant", "X-Hop")}, WithValues(userKey{}))
		seen := 0
		check := func(what string, got, want any) {
			t.Helper()
			if got != want {
				t.Errorf("%s: %v, want %v", what, got, want)
			}
		}
		mux := http.NewServeMux()
		mux.Handle("POST /orders/{id}/{rest...}", r.in.Defer(HandlerFunc(func(w http.ResponseWriter, req *http.Request) error {
			seen++
			body, err := io.ReadAll(req.Body)
			if err != nil {
				t.Error(err)
			}
			check("body", string(body), "the body")
			check("length", req.ContentLength, int64(len("the body")))
			check("method", req.Method, "POST")
			check("url", req.URL.String(), "/orders/a%20b/c/d?q=1&q=2")
			check("request URI", req.RequestURI, "/orders/a%20b/c/d?q=1&q=2")
			check("path value", req.PathValue("id")+"|"+req.PathValue("rest"), "a b|c/d")
			check("pattern", req.Pattern, "POST /orders/{id}/{rest...}")
			check("host", req.Host, "shop.example")
			check("remote", req.RemoteAddr, "192.0.2.1:1234")
			check("form", req.FormValue("q"), "1")
			for name, want := range map[string]string{
				"Content-Type": "text/x", "Idempotency-Key": "k1", "X-Tenant": "acme", "If-Match": `"v1"`,
				"Authorization": "", "Cookie": "", "X-Other": "", "X-Hop": "", "Connection": "", "Te": "",
			} {
				check(name, req.Header.Get(name), want)
			}
			check("a kept value", req.Context().Value(userKey{}), "ada")
			check("another value", req.Context().Value(secretKey{}), nil)
			check("context", req.Context().Err(), nil)
			check("connection", fmt.Sprint(req.Close, req.Trailer, req.TransferEncoding, req.Proto), "false map[] []HTTP/1.1")
			if _, ok := req.Context().Deadline(); !ok {
				t.Error("no deadline")
			}
			info, ok := Replayed(req.Context())
			check("attempt", info.Attempt, seen)
			if !ok || !strings.HasSuffix(info.ID, "-1") || time.Since(info.Since) < time.Second {
				t.Errorf("%+v", info)
			}
			// Whatever a handler does to its request stays with this attempt.
			req.Header.Set("Content-Type", "spoilt")
			req.URL.Path = "/spoilt"
			req.SetPathValue("id", "spoilt")
			copy(body, "spoilt")
			if _, err := io.WriteString(w, "ok"); err != nil {
				t.Error(err)
			}
			if err := http.NewResponseController(w).Flush(); err != nil {
				t.Error(err)
			}
			if _, _, err := http.NewResponseController(w).Hijack(); err == nil {
				t.Error("a replay has no connection")
			}
			if seen < 3 {
				return errBroken
			}
			return nil
		})))
		ctx, cancel := context.WithCancel(context.WithValue(context.WithValue(t.Context(), userKey{}, "ada"), secretKey{}, "x"))
		_ = r.g.Source("http").ForceOpen(time.Second)
		res := send(mux, "POST", "/orders/a%20b/c/d?q=1&q=2", "the body", func(req *http.Request) {
			*req = *req.WithContext(ctx)
			req.Host, req.Close, req.Trailer, req.TransferEncoding, req.Proto = "shop.example", true, http.Header{"X-Sum": {"1"}}, []string{"x"}, "HTTP/1.0"
			for name, value := range map[string]string{
				"Content-Type": "text/x", "Idempotency-Key": "k1", "X-Tenant": "acme", "If-Match": `"v1"`,
				"Authorization": "Bearer s3cret", "Cookie": "s3cret", "X-Other": "x", "X-Hop": "x", "Connection": "close, X-hop", "Te": "trailers",
			} {
				req.Header.Set(name, value)
			}
		})
		r.want(res, 202)
		cancel() // the request is over
		r.drained()
		check("calls", seen, 3)
		r.close()
	})
}

// What a replay's answer means.
func TestReplayOutcomes(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(w http.ResponseWriter, r *http.Request) // the first two times
		calls  int
		letter string // in its error; empty for none
		after  time.Duration
	}{
		"201":       {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(201) }, 1, "", 0},
		"303":       {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(303) }, 1, "", 0},
		"500":       {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, 3, "", 0},
		"408":       {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(408) }, 3, "", 0},
		"404":       {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no such order", 404) }, 1, "404 Not Found: no such order", 0},
		"409":       {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(409) }, 1, "409 Conflict", 0},
		"permanent": {HandlerFunc(func(http.ResponseWriter, *http.Request) error { return guard.Permanent(errBroken) }).ServeHTTP, 1, errBroken.Error(), 0},
		"ignored":   {HandlerFunc(func(http.ResponseWriter, *http.Request) error { return guard.Ignore(errBroken) }).ServeHTTP, 1, "", 0},
		"429": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "60")
			w.WriteHeader(429)
		}, 3, "", 2 * time.Minute},
		"429 without a time": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(429) }, 3, "", 0},
		"429 until": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", time.Now().Add(time.Minute).UTC().Format(http.TimeFormat))
			w.WriteHeader(429)
		}, 3, "", 119 * time.Second},
		"silent at its timeout":   {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, 3, "", time.Minute},
		"silent, and never looks": {func(http.ResponseWriter, *http.Request) { time.Sleep(31 * time.Second) }, 1, "", 31 * time.Second},
		"499 at its timeout":      {func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done(); w.WriteHeader(499) }, 3, "", time.Minute},
		"panic":                   {func(http.ResponseWriter, *http.Request) { panic("boom") }, 3, "", 0},
		"abort":                   {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 3, "", 0},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, quick, Config{})
			calls := 0
			r.s.handle = func(w http.ResponseWriter, req *http.Request) bool {
				if _, ok := Replayed(req.Context()); ok {
					calls++
				}
				if calls < 3 {
					c.answer(w, req)
					return true
				}
				return false
			}
			_ = r.g.Source("http").ForceOpen(time.Second)
			r.want(r.post("x"), 202)
			_ = r.g.Source("http").ForceClosed()
			start := time.Now()
			r.drained()
			if took := time.Since(start); took < c.after || took > c.after+5*time.Second {
				t.Errorf("took %s, want %s", took, c.after)
			}
			if calls != c.calls {
				t.Errorf("%d calls, want %d", calls, c.calls)
			}
			got := r.letters.list()
			switch {
			case c.letter == "" && len(got) > 0:
				t.Errorf("dead-lettered: %+v", got[0].Error)
			case c.letter != "" && (len(got) != 1 || !strings.Contains(got[0].Error.Message, c.letter) || got[0].Reason != dlq.ReasonPermanent):
				t.Errorf("dead letters %+v", got)
			}
			r.close()
		})
	}
}

// A request that keeps failing while others succeed is dead-lettered with all
// that is needed to send it again, and the others keep their order.
func TestPoison(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{Name: "pay"})
		r.s.handle = func(w http.ResponseWriter, req *http.Request) bool {
			if req.Header.Get("Idempotency-Key") != "bad" {
				return false
			}
			http.Error(w, "amount 17 is not a date", 500)
			return true
		}
		_ = r.g.Source("pay").ForceOpen(time.Second)
		for i := range 10 {
			key := strconv.Itoa(i)
			if i == 4 {
				key = "bad"
			}
			r.want(send(r.defers, "PUT", "/orders/"+key+"?dry=1", strconv.Itoa(i), func(r *http.Request) { r.Header.Set("Idempotency-Key", key) }), 202)
		}
		r.drained()
		if got := r.s.handled(); got != "0 1 2 3 5 6 7 8 9" {
			t.Error(got)
		}
		got := r.letters.list()
		if len(got) != 1 {
			t.Fatalf("%d dead letters", len(got))
		}
		rec := got[0]
		if rec.Attempts < 3 || rec.Error.Message != "nethttp: the handler answered 500 Internal Server Error: amount 17 is not a date" ||
			rec.Origin.System != "http" || rec.Origin.Source != "pay" || rec.Origin.Subject != "PUT /orders/bad" || rec.ID() == "" {
			t.Errorf("%+v", rec)
		}
		req, err := FromRecord(t.Context(), rec)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(req.Body)
		if req.Method != "PUT" || req.URL.String() != "/orders/bad?dry=1" || req.Host != "example.com" || string(body) != "4" || req.Header.Get("Idempotency-Key") != "bad" {
			t.Errorf("%+v %s", req, body)
		}
		w := httptest.NewRecorder()
		r.s.handle = nil
		req.Body = io.NopCloser(strings.NewReader("4"))
		r.wrapped.ServeHTTP(w, req)
		r.want(answer{w.Code, w.Header()}, 200)
		r.close()
	})
}

// The files of a form that a replay read go with it.
func TestReplayedForm(t *testing.T) {
	r := newRig(t, quick, Config{MaxBody: 16 << 20})
	names, calls := make(chan string, 2), 0
	h := r.in.Defer(HandlerFunc(func(_ http.ResponseWriter, req *http.Request) error {
		if err := req.ParseMultipartForm(1); err != nil {
			return guard.Permanent(err)
		}
		f, err := req.MultipartForm.File["f"][0].Open()
		if err != nil {
			return guard.Permanent(err)
		}
		names <- f.(*os.File).Name()
		err = f.Close()
		if calls++; calls == 1 {
			panic("boom")
		}
		return err
	}))
	var form bytes.Buffer
	parts := multipart.NewWriter(&form)
	part, _ := parts.CreateFormFile("f", "f.txt")
	_, _ = io.CopyN(part, zeros{}, 11<<20)
	_ = parts.Close()
	_ = r.g.Source("http").ForceOpen(time.Minute)
	r.want(send(h, "POST", "/", form.String(), func(req *http.Request) { req.Header.Set("Content-Type", parts.FormDataContentType()) }), 202)
	_ = r.g.Source("http").ForceClosed()
	r.drained()
	for range 2 {
		if _, err := os.Stat(<-names); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the form's file is still there: %v", err)
		}
	}
	r.close()
}

// A replay that goes through a whole router passes the intake on its way: what
// is needed where the wrapped handler lives as long as its request only.
func TestReplayThroughRouter(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		mux := http.NewServeMux()
		r := newRig(t, quick, Config{}, WithReplay(mux))
		mux.HandleFunc("POST /orders", func(w http.ResponseWriter, req *http.Request) {
			over := false
			defer func() { over = true }()
			r.in.Defer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if over {
					t.Error("the handler of a request that is over was called")
				}
				r.s.ServeHTTP(w, req)
			})).ServeHTTP(w, req)
		})
		_ = r.g.Source("http").ForceOpen(time.Second)
		for i := range 5 {
			r.want(send(mux, "POST", "/orders", strconv.Itoa(i)), 202)
		}
		r.drained()
		if got := r.s.handled(); got != "0 1 2 3 4" {
			t.Error(got)
		}
		r.close()
	})
}

// The span of a replay is linked to the trace that the request came with.
func TestTraceLink(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	g, err := guard.New(guard.Config{Policy: quick}, guard.WithTracerProvider(provider), guard.WithPropagator(propagation.TraceContext{}))
	if err != nil {
		t.Fatal(err)
	}
	l := &letters{}
	in, err := New(g, Config{}, WithDeadLetters(l))
	if err != nil {
		t.Fatal(err)
	}
	inside := make(chan trace.SpanContext, 2)
	h := in.Defer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, ok := Replayed(r.Context()); ok {
			inside <- trace.SpanContextFromContext(r.Context())
			w.WriteHeader(404)
		}
	}))
	_ = g.Source("http").ForceOpen(time.Hour)
	const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	send(h, "POST", "/", "", func(r *http.Request) { r.Header.Set("Traceparent", parent) })
	ctx, server := provider.Tracer("server").Start(t.Context(), "POST /") // as otelhttp would
	send(h, "POST", "/", "", func(r *http.Request) { r.Header.Set("Traceparent", parent); *r = *r.WithContext(ctx) })
	server.End()
	_ = g.Source("http").ForceClosed()
	if err := in.Drained(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{"00f067aa0ba902b7", server.SpanContext().SpanID().String()}
	for i, span := range want {
		sc := <-inside
		found := false
		for _, s := range spans.Ended() {
			if s.SpanContext().SpanID() == sc.SpanID() && len(s.Links()) == 1 && s.Links()[0].SpanContext.SpanID().String() == span {
				found = true
			}
		}
		if !found {
			t.Errorf("replay %d: no span %s linked to %s", i, sc.SpanID(), span)
		}
	}
	for i, rec := range l.list() {
		if !strings.Contains(rec.TraceParent, want[i]) {
			t.Errorf("dead letter %d: %s", i, rec.TraceParent)
		}
	}
	if _, err := in.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
