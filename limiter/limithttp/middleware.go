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

// errConfig is what every refusal of a configuration begins with.
var errConfig = errors.New("limithttp: config")

// A Tier is what limits a request.
type Tier struct {
	// Name is the policy's in headers and bodies, so clients see it; printable ASCII,
	// anything else is shown as a question mark. Unset means "default".
	Name string
	// Gate admits; nil admits everything, and leaves no headers.
	Gate limiter.Gate
}

// Config is what an operator may set from a file, a flag or the environment. The
// zero value is valid.
type Config struct {
	// MaxWait is how long a request may wait to be admitted, in [0, 1h]; unset means
	// that it is answered at once. Each that waits has its goroutine and connection.
	MaxWait time.Duration

	// NoHeaders leaves RateLimit and RateLimit-Policy out. Retry-After stays.
	NoHeaders bool

	// Legacy adds RateLimit-Limit, RateLimit-Remaining and RateLimit-Reset, as earlier
	// drafts had them, for clients that know only those. NoHeaders goes before it.
	Legacy bool
}

// Validate returns one error with all that is wrong, or nil.
func (c Config) Validate() error {
	if c.MaxWait < 0 || c.MaxWait > time.Hour {
		return fmt.Errorf("%w: MaxWait: %v is not in [0s, 1h0m0s]", errConfig, c.MaxWait)
	}
	return nil
}

// A Middleware lets requests in. It is safe for concurrent use and has nothing to close.
type Middleware struct{ rules atomic.Pointer[rules] }

// rules are never changed, only exchanged.
type rules struct {
	choose func(*http.Request) Tier
	cfg    Config
}

// New is a middleware. choose returns the tier of a request. It is called for each, by many
// goroutines, and before anything is admitted: it must be quick. A gate with waiters in line
// is kept and not made anew each time, see [limiter.All].
func New(choose func(*http.Request) Tier, cfg Config) (*Middleware, error) {
	d := &Middleware{}
	return d, d.Swap(choose, cfg)
}

// Swap exchanges function and configuration. Requests that wait already go on at the
// gate that was chosen for them; all others have the new ones. After an error the
// old ones stay.
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

// Wrap is next behind the middleware.
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
		default: // it is closed, or cannot admit anything
			refuse(w, http.StatusServiceUnavailable, "temporary-reduced-capacity", "The service cannot admit requests at the moment.", name)
		}
	})
}

// problem is a body as RFC 9457 has it.
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

// RemoteIP is a key: the address that the connection comes from, as
// [limiter.AddrKey] has it. It reads no header.
func RemoteIP(r *http.Request) string { return limiter.AddrKey(r.RemoteAddr) }
