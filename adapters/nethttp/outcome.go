// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// outcome is the result of one run of a handler, live or replayed.
type outcome struct {
	rec recorder

	mu      sync.Mutex
	err     error            // the latest error given to Fail
	refused *guard.HeldError // the refusal of another intake that the handler called
}

type outcomeKey struct{}

func outcomeOf(ctx context.Context) *outcome {
	o, _ := ctx.Value(outcomeKey{}).(*outcome)
	return o
}

// Fail reports the outcome of the request of ctx, whatever its handler answers. An error is a
// failure of the dependency. guard.Permanent is a failure of the request, guard.Backoff asks for
// time, and guard.Ignore is no outcome. nil takes an earlier error back. Call Fail before the
// handler returns; of several calls the last counts. Outside an intake it does nothing.
func Fail(ctx context.Context, err error) {
	if o := outcomeOf(ctx); o != nil {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.err = err
	}
}

// HandlerFunc is a handler that returns its error. The intake gets the error as by [Fail]. A client
// that has no answer by then gets a plain 500.
type HandlerFunc func(w http.ResponseWriter, r *http.Request) error

// ServeHTTP calls f.
func (f HandlerFunc) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	err := f(w, r)
	if err == nil {
		return
	}
	Fail(r.Context(), err)
	if o := outcomeOf(r.Context()); o == nil || o.rec.silent() {
		http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
	}
}

// said returns the refusal and the error of the handler.
func (o *outcome) said() (refused *guard.HeldError, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.refused, o.err
}

// status is what the client sees: 200 if the handler wrote nothing.
func (o *outcome) status() int {
	if s := o.rec.status.Load(); s != 0 {
		return int(s)
	}
	return http.StatusOK
}

// DefaultOutcome judges an answer by its status. Live, 5xx is a failure and everything else a
// success. A replay has no client who could act on the answer, so more statuses count. There 429
// asks for time. 408, 425 and 5xx are failures, and the request is tried again. Other 4xx are
// permanent.
func DefaultOutcome(_ *http.Request, status int, replay bool) error {
	err := &StatusError{Status: status}
	switch {
	case status >= 500:
		return err
	case !replay || status < 400:
		return nil
	case status == http.StatusTooManyRequests:
		return guard.Backoff(err, time.Time{})
	case status == http.StatusRequestTimeout, status == http.StatusTooEarly:
		return err
	default:
		return guard.Permanent(err)
	}
}

// retryAfter returns the time in the Retry-After header of a replay's answer; zero if there is
// none.
func retryAfter(h http.Header, now time.Time) time.Time {
	v := h.Get("Retry-After")
	if n, err := strconv.Atoi(v); err == nil && n >= 0 {
		return now.Add(time.Duration(min(n, 1<<20)) * time.Second)
	}
	if at, err := http.ParseTime(v); err == nil {
		return at
	}
	return time.Time{}
}
