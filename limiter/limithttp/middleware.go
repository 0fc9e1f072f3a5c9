// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limithttp

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

// errConfig is the beginning of every error about a configuration.
var errConfig = errors.New("limithttp: config")

// A Tier is the limit of a request.
type Tier struct {
	// Name is the name of the policy in headers and bodies, so clients see it. It is
	// printable ASCII; other characters are shown as a question mark. Unset means "default".
	Name string
	// Gate admits requests. nil admits everything, without headers.
	Gate limiter.Gate
}

// Config holds the settings that an operator may set from a file, a flag or the environment.
// The zero value is valid.
type Config struct {
	// MaxWait is how long a request may wait to be admitted, in [0, 1h]; unset means that it
	// is answered at once. A waiting request keeps its goroutine and connection.
	MaxWait time.Duration

	// NoHeaders leaves RateLimit and RateLimit-Policy out. Retry-After stays.
	NoHeaders bool

	// Legacy adds RateLimit-Limit, RateLimit-Remaining and RateLimit-Reset of earlier drafts,
	// for clients that know only those. With NoHeaders it does nothing.
	Legacy bool
}

// Validate returns one error with all faults of c, or nil.
func (c Config) Validate() error {
	if c.MaxWait < 0 || c.MaxWait > time.Hour {
		return fmt.Errorf("%w: MaxWait: %v is not in [0s, 1h0m0s]", errConfig, c.MaxWait)
	}
	return nil
}

// A Middleware limits the requests to a handler. It is safe for concurrent use. Nothing
// needs to be closed.
type Middleware struct{ rules atomic.Pointer[rules] }

// rules are never changed, only replaced by others.
type rules struct {
	choose func(*http.Request) Tier
	cfg    Config
}

// New makes a middleware. choose returns the tier of a request. It is called for each request
// by many goroutines, before anything is admitted: it must be quick. It must not make a new
// gate for each request if waiters are to be served in order, see [limiter.All].
func New(choose func(*http.Request) Tier, cfg Config) (*Middleware, error) {
	d := &Middleware{}
	return d, d.Swap(choose, cfg)
}

// Swap replaces function and configuration. Requests that already wait stay at the gate that
// was chosen for them. All later requests use the new ones. After an error the old ones stay.
func (d *Middleware) Swap(choose func(*http.Request) Tier, cfg Config) error {
	err := cfg.Validate()
	if choose == nil {
		err = errors.Join(err, fmt.Errorf("%w: choose: nil is not a function", errConfig))
	}
	if err == nil {
		d.rules.Store(&rules{choose, cfg})
	}
	return err
}

// Wrap returns a handler that limits the requests to next.
func (d *Middleware) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		now := d.rules.Load()
		tier := now.choose(r)
		if tier.Gate == nil {
			next.ServeHTTP(w, r)
			return
		}
		name := printable(tier.Name)
		err := limiter.Enter(r.Context(), tier.Gate, now.cfg.MaxWait)
		denied, _ := errors.AsType[*limiter.DeniedError](err)
		if !now.cfg.NoHeaders {
			describe(w.Header(), name, tier.Gate, denied, now.cfg.Legacy)
		}
		switch {
		case err == nil:
			next.ServeHTTP(w, r)
		case denied != nil:
			w.Header().Set("Retry-After", seconds(denied.After))
			refuse(w, http.StatusTooManyRequests, "quota-exceeded", "The rate limit of these requests is exceeded.", name)
		default: // the gate is closed, or cannot admit anything
			refuse(w, http.StatusServiceUnavailable, "temporary-reduced-capacity", "The service cannot admit requests at the moment.", name)
		}
	})
}

// problem is a response body of RFC 9457.
type problem struct {
	Type     string   `json:"type"`
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Policies []string `json:"violated-policies"` //nolint:tagliatelle // the name in the draft
}

func refuse(w http.ResponseWriter, status int, kind, title, policy string) {
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	//nolint:errchkjson // strings and a number; and who has gone does not read it
	_ = json.NewEncoder(w).Encode(problem{
		Type: "https://iana.org/assignments/http-problem-types#" + kind, Title: title, Status: status, Policies: []string{policy},
	})
}

// RemoteIP returns a key for the connection's remote address, see [limiter.AddrKey]. It
// reads no header.
func RemoteIP(r *http.Request) string { return limiter.AddrKey(r.RemoteAddr) }
