// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

func TestMain(m *testing.M) {
	if asChild() {
		os.Exit(3)
	}
	goleak.VerifyTestMain(m)
}

// bubble runs f in virtual time.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

// letters is a dead-letter writer that keeps what it gets.
type letters struct {
	mu   sync.Mutex
	all  []*dlq.Record
	down error
}

func (l *letters) Write(_ context.Context, r *dlq.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down != nil {
		return l.down
	}
	l.all = append(l.all, r)
	return nil
}

func (l *letters) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = err
}

func (l *letters) list() []*dlq.Record {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]*dlq.Record(nil), l.all...)
}

// service is a handler whose dependency can be down: it answers 500 then.
type service struct {
	mu     sync.Mutex
	down   bool
	calls  []string // bodies, every call
	done   []string // bodies, in order of success
	handle func(w http.ResponseWriter, r *http.Request) bool
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	s.calls = append(s.calls, string(body))
	down, handle := s.down, s.handle
	s.mu.Unlock()
	if handle != nil && handle(w, r) {
		return
	}
	if down {
		http.Error(w, "the gateway is down", http.StatusInternalServerError)
		return
	}
	s.mu.Lock()
	s.done = append(s.done, string(body))
	s.mu.Unlock()
	_, _ = io.WriteString(w, "done "+string(body))
}

func (s *service) setDown(down bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = down
}

func (s *service) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.calls)
}

func (s *service) handled() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.done, " ")
}

// rig is an intake with everything around it.
type rig struct {
	t       *testing.T
	g       *guard.Guard
	in      *Intake
	s       *service
	letters *letters
	wrapped http.Handler
	defers  http.Handler
}

// quick is a policy for tests: the backoff is 100 ms, 200 ms and so on, and three
// probes close.
var quick = guard.Policy{Breaker: breaker.Config{Successes: 3, Cap: 2 * time.Second}, Retry: guard.Retry{Attempts: 3}}

func newRig(t *testing.T, p guard.Policy, cfg Config, opts ...Option) *rig {
	t.Helper()
	g, err := guard.New(guard.Config{Group: "shop", Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, g: g, s: &service{}, letters: &letters{}}
	if r.in, err = New(g, cfg, append([]Option{WithDeadLetters(r.letters)}, opts...)...); err != nil {
		t.Fatal(err)
	}
	r.wrapped, r.defers = r.in.Wrap(r.s), r.in.Defer(r.s)
	return r
}

// answer is what a client got.
type answer struct {
	StatusCode int
	Header     http.Header
}

// send makes a request and returns the answer.
func send(h http.Handler, method, target, body string, edit ...func(*http.Request)) answer {
	r := httptest.NewRequestWithContext(context.Background(), method, target, strings.NewReader(body))
	for _, f := range edit {
		f(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return answer{w.Code, w.Header()}
}

func (r *rig) get() answer { return send(r.wrapped, "GET", "/orders", "get") }

func (r *rig) post(body string) answer { return send(r.defers, "POST", "/orders", body) }

// want checks a status.
func (r *rig) want(res answer, status int) answer {
	r.t.Helper()
	if res.StatusCode != status {
		r.t.Errorf("status %d %s, want %d", res.StatusCode, res.Header, status)
	}
	return res
}

// breakIt opens the breaker by failing requests.
func (r *rig) breakIt() {
	r.t.Helper()
	r.s.setDown(true)
	for range 5 {
		r.want(r.get(), http.StatusInternalServerError)
	}
	if st := r.state(); st.Breaker.State != breaker.Open {
		r.t.Fatalf("not open: %+v", st.Breaker)
	}
}

func (r *rig) state() guard.State { return r.g.Source(r.in.cfg.Name).State() }

func (r *rig) heldState() guard.State { return r.g.Source(r.in.cfg.Name + "/held").State() }

// close ends everything and checks that it ends clean.
func (r *rig) close() {
	r.t.Helper()
	rep, err := r.in.Close(r.t.Context())
	if err != nil || len(rep.Left) > 0 {
		r.t.Errorf("%v, %+v", err, rep)
	}
	if err := rep.Held.Account.Check(); err != nil {
		r.t.Error(err)
	}
	if st := r.in.Stats(); st.Held != 0 {
		r.t.Errorf("still held after the end: %+v", st)
	}
	r.in.mu.Lock()
	if r.in.bytes != 0 || r.in.reading != 0 || len(r.in.lanes) != 0 {
		r.t.Errorf("room is not given back: %d bytes, %d being read, %d lanes", r.in.bytes, r.in.reading, len(r.in.lanes))
	}
	r.in.mu.Unlock()
	if _, err := r.g.Close(r.t.Context()); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) drained() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Hour)
	defer cancel()
	if err := r.in.Drained(ctx); err != nil {
		r.t.Fatalf("%v: %+v %+v", err, r.in.Stats(), r.heldState())
	}
	// The source has its room back a moment after the intake.
	for held := r.g.Source(r.in.cfg.Name + "/held"); held != nil && held.Account().Settling > 0; {
		runtime.Gosched()
	}
}

func words(format string, from, to int) string {
	var b strings.Builder
	for i := from; i < to; i++ {
		fmt.Fprintf(&b, format+" ", i)
	}
	return strings.TrimSpace(b.String())
}

var errBroken = errors.New("no such customer")
