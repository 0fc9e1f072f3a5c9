// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stormguard-mq/stormguard/limiter"
)

// lockedBuffer is what a logger writes and a test reads.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// take returns what was written since the last call.
func (l *lockedBuffer) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.b.Reset()
	return l.b.String()
}

// Who may ask depends on where the request came to, which the server says of each
// request, and on what a page of another origin cannot have.
func TestHandlerAccess(t *testing.T) {
	var log lockedBuffer
	p, err := Start(configOf("a", nil, "a"), WithRegister(storeOf(t)), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	eventually(t, "it is a fleet of one", func() bool { return p.Status().Configuration.Settled })
	const secret = "0123456789abcdef"
	loopback := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80}
	world := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 80}
	open := p.Handler()
	keyed := p.Handler(Token{Name: "ann", Secret: secret}, Token{Name: "bob", Secret: secret + "x"}, Token{Name: "short", Secret: "short"})
	with := func(pairs ...string) (h http.Header) {
		h = http.Header{"Content-Type": {"application/json"}}
		for i := 0; i < len(pairs); i += 2 {
			h.Set(pairs[i], pairs[i+1])
		}
		return h
	}
	bearer := func(s string) http.Header { return with("Authorization", "Bearer "+s) }
	for _, c := range []struct {
		name    string
		handler http.Handler
		at      net.Addr // nil: a server that does not say
		tls     bool
		host    string
		header  http.Header
		status  int
	}{
		{"loopback", open, loopback, false, "127.0.0.1:80", with(), 200},
		{"loopback by name", open, loopback, false, "localhost:80", with(), 200},
		{"loopback, IPv6", open, &net.TCPAddr{IP: net.IPv6loopback}, false, "[::1]:80", with(), 200},
		{"loopback, same origin", open, loopback, false, "127.0.0.1:80", with("Origin", "http://127.0.0.1:80"), 200},
		{"a Unix socket", open, &net.UnixAddr{Name: "x", Net: "unix"}, false, "localhost", with(), 200},
		{"a rebound name", open, loopback, false, "evil.example:80", with(), 403},
		{"no Host", open, loopback, false, "", with(), 403},
		{"another origin", open, loopback, false, "127.0.0.1:80", with("Origin", "http://evil.example"), 403},
		{"another port's page", open, loopback, false, "127.0.0.1:80", with("Origin", "http://127.0.0.1:81"), 403},
		{"a page, by its browser", open, loopback, false, "127.0.0.1:80", with("Sec-Fetch-Site", "cross-site"), 403},
		{"no origin", open, loopback, false, "127.0.0.1:80", with("Origin", "null"), 403},
		{"a form", open, loopback, false, "127.0.0.1:80", with("Content-Type", "text/plain"), 415},
		{"nothing said", open, loopback, false, "127.0.0.1:80", http.Header{}, 415},
		{"the world", open, world, false, "127.0.0.1:80", with(), 403},
		{"the world, TLS", open, world, true, "127.0.0.1:80", with(), 403},
		{"a server that does not say", open, nil, false, "127.0.0.1:80", with(), 403},
		{"the world, no TLS", keyed, world, false, "h", bearer(secret), 403},
		{"the world, TLS and token", keyed, world, true, "h", bearer(secret), 200},
		{"another token", keyed, world, true, "h", bearer(secret + "x"), 200},
		{"no token", keyed, world, true, "h", with(), 401},
		{"a wrong token", keyed, world, true, "h", bearer(secret + "y"), 401},
		{"part of a token", keyed, world, true, "h", bearer(secret[:15]), 401},
		{"a short token", keyed, world, true, "h", bearer("short"), 401},
		{"not a bearer", keyed, world, true, "h", with("Authorization", "Basic "+secret), 401},
		{"loopback without its token", keyed, loopback, false, "127.0.0.1", with(), 401},
		{"loopback with its token, through a proxy", keyed, loopback, false, "fleet.example", bearer(secret), 200},
		{"a token and another origin", keyed, world, true, "h", with("Authorization", "Bearer "+secret, "Origin", "http://evil.example"), 403},
	} {
		number := p.Status().Configuration.Number
		r := httptest.NewRequest(http.MethodPost, "/fleet/change", strings.NewReader(`{"reset":true}`))
		r.Header, r.Host = c.header, c.host
		if c.tls {
			r.TLS = &tls.ConnectionState{}
		}
		if c.at != nil {
			r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, c.at))
		}
		w := httptest.NewRecorder()
		c.handler.ServeHTTP(w, r)
		if w.Code != c.status || w.Code != 200 && p.Status().Configuration.Number != number || w.Code == 200 && p.Status().Configuration.Number == number {
			t.Errorf("%s: %d %s, want %d; configuration %d after %d", c.name, w.Code, w.Body, c.status, p.Status().Configuration.Number, number)
		}
	}
	if got := log.take(); !strings.Contains(got, "too short and admits nobody") || !strings.Contains(got, "was refused") || strings.Contains(got, secret) {
		t.Error(got)
	}
}

// A write says who, what, before and after: in the log, and who in the journal.
func TestHandlerAudits(t *testing.T) {
	var log lockedBuffer
	p, err := Start(configOf("a", nil, "a"), WithRegister(storeOf(t)), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	eventually(t, "it is a fleet of one", func() bool { return p.Status().Configuration.Settled })
	server := httptest.NewServer(p.Handler(Token{Name: "ann", Secret: "0123456789abcdef"}))
	defer server.Close()
	post := func(path, body string) int {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header = http.Header{"Content-Type": {"application/json"}, "Authorization": {"Bearer 0123456789abcdef"}}
		a, err := server.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = a.Body.Close() }()
		return a.StatusCode
	}
	log.take()
	if got := post("/fleet/change", `{"limit":{"rate":500,"burst":50},"limits":{"x":{"rate":5,"burst":5}},"weights":{"a":3}}`); got != 200 {
		t.Fatal(got)
	}
	if got := post("/fleet/evict?name=nobody", ""); got != 409 {
		t.Fatal(got)
	}
	got := log.take()
	for _, want := range []string{
		`level=INFO msg="fleet: an operator's change was made" who=127.0.0.1:`, ` token=ann what=set before="1000/s burst 100; x `, `a weighs 1" after="500/s burst 50; x 5/s burst 5; a weighs 3" number=2`,
		`level=WARN msg="fleet: an operator's change was not made"`, `what="evict nobody" before="no member" error=`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is not in:\n%s", want, got)
		}
	}
	if p.Status().Configuration.Limit != (limiter.Limit{Rate: 500, Burst: 50}) {
		t.Error(p.limits.Configuration())
	}
	var last string
	for _, e := range p.Journal() {
		last = e.Text
	}
	if !strings.Contains(last, "500/s burst 50; ") || !strings.Contains(last, ", by ann at 127.0.0.1:") {
		t.Errorf("the journal says %q", last)
	}
}
