// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// Config has the settings of one [Intake] that an operator may change. The zero value is valid and
// means the documented defaults.
type Config struct {
	// Name is the intake's name in states, metrics and logs. Held requests are the source Name +
	// "/held". Names are unique within a Guard. Unset means "http".
	Name string

	// Dependency is the breaker's scope. Intakes that share a dependency share
	// its breaker. Unset means Name.
	Dependency string

	// Policy is the intake's policy; nil means the Guard's. Window and WindowBytes bound the hold,
	// and are fixed once the intake is made; unset means 1024 requests and 64 MiB. Timeout is how
	// long the context of a request lasts, live or replayed (30s); NoTimeout is for routes that
	// stream. Retry is for replays: a live request is never tried twice.
	Policy *guard.Policy

	// MaxBody is the largest body, in bytes, of a request that can be held. In [1, 1 GiB]; unset
	// means 1 MiB. A request with a larger body is handled as usual. While the breaker is not
	// closed or its key is held, it is refused, unless it is the breaker's probe.
	MaxBody int64

	// MaxHeader is the same limit for the method, the URL and the chosen headers together. In [1,
	// 16 MiB]; unset means 16 KiB.
	MaxHeader int

	// BodyTimeout is how long a client may take to send the body of a request that is to be held.
	// Meanwhile the request takes up room. For that body it replaces the rest of the server's
	// ReadTimeout. In [1ms, 1h]; unset means 10s.
	BodyTimeout time.Duration

	// Headers are the names of the request headers that a held request keeps, instead of
	// [DefaultHeaders]. An empty list that is not nil keeps none. Headers of the connection cannot
	// be kept.
	Headers []string

	// RetryAfter is the value of the Retry-After header if no time is known, or one above 24h. No
	// time is known while the intake is paused or forced open without end, while it ends, or if the
	// hold is full with a closed breaker. In [1s, 24h], in whole seconds; unset means 10s.
	RetryAfter time.Duration

	// Patience is about a failed request whose client has left: the failure counts if the handler
	// has run for at least this time. In [1ms, 24h]. Unset means 5s, or less if requests that
	// succeed are faster: docs/http.md has the rule. Set it if clients leave requests that are slow
	// by nature, such as a long poll.
	Patience time.Duration
}

// DefaultHeaders returns the names of the request headers that a held request keeps. They describe
// its body, its conditions, its identity and its trace. Credentials (Authorization, Cookie) are not
// among them: they would lie in memory and in dead letters, and may have expired at the replay.
// Authenticate in front of the intake and carry the result over by [WithValues], or name them in
// [Config.Headers].
func DefaultHeaders() []string { return slices.Clone(defaultHeaders) }

var defaultHeaders = []string{
	"Content-Type", "Content-Encoding", "Content-Language", "Content-Location", "Content-Range", "Content-Disposition",
	"Content-Digest", "Repr-Digest", "Digest", "Content-Md5",
	"If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since", "Prefer",
	"Idempotency-Key", "X-Request-Id", "X-Correlation-Id",
	"Traceparent", "Tracestate", "Baggage",
}

// perHop are the headers of a connection, and those that would be wrong for a body of known length.
var perHop = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade", "Http2-Settings", "Expect", "Content-Length", "Host",
}

const (
	defaultName        = "http"
	defaultMaxBody     = 1 << 20
	defaultMaxHeader   = 16 << 10
	defaultBodyTimeout = 10 * time.Second
	defaultRetryAfter  = 10 * time.Second

	longestPatience = 5 * time.Second // applies while Config.Patience is unset
)

// WithDefaults returns c with every unset field replaced by its default.
func (c Config) WithDefaults() Config {
	def(&c.Name, defaultName)
	def(&c.Dependency, c.Name)
	def(&c.MaxBody, defaultMaxBody)
	def(&c.MaxHeader, defaultMaxHeader)
	def(&c.BodyTimeout, defaultBodyTimeout)
	def(&c.RetryAfter, defaultRetryAfter)
	if c.Headers == nil {
		c.Headers = DefaultHeaders()
	}
	return c
}

func def[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Validate returns one error with all that is wrong, or nil. Unset fields are judged as
// their defaults.
func (c Config) Validate() error {
	var wrong []error
	addf := func(format string, args ...any) {
		wrong = append(wrong, fmt.Errorf("%w: "+format, append([]any{errConfig}, args...)...))
	}
	span := func(field string, v, low, high time.Duration) {
		if v < low || v > high {
			addf("Config.%s: %s is not within %s and %s", field, v, low, high)
		}
	}
	c = c.WithDefaults()
	if c.MaxBody < 1 || c.MaxBody > 1<<30 {
		addf("Config.MaxBody: %d is not within 1 and %d bytes", c.MaxBody, 1<<30)
	}
	if c.MaxHeader < 1 || c.MaxHeader > 16<<20 {
		addf("Config.MaxHeader: %d is not within 1 and %d bytes", c.MaxHeader, 16<<20)
	}
	span("BodyTimeout", c.BodyTimeout, time.Millisecond, time.Hour)
	span("RetryAfter", c.RetryAfter, time.Second, 24*time.Hour)
	if c.RetryAfter%time.Second != 0 {
		addf("Config.RetryAfter: %s is not in whole seconds", c.RetryAfter)
	}
	if c.Patience != 0 {
		span("Patience", c.Patience, time.Millisecond, 24*time.Hour)
	}
	for _, name := range c.Headers {
		switch key := textproto.CanonicalMIMEHeaderKey(name); {
		case !isToken(name):
			addf("Config.Headers: %q is not the name of a header", name)
		case slices.Contains(perHop, key):
			addf("Config.Headers: %q belongs to the connection, not to the request", name)
		case slices.Contains(pseudo, key):
			addf("Config.Headers: %q is a name that dead letters use: none of %s can be kept", name, strings.Join(pseudo, ", "))
		}
	}
	if c.Policy != nil {
		if err := c.Policy.Validate(); err != nil {
			wrong = append(wrong, fmt.Errorf("%w: Config.Policy: %w", errConfig, err))
		}
	}
	return errors.Join(wrong...)
}

// isToken tells whether s can be a method or the name of a header.
func isToken(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return r <= ' ' || r >= 0x7f || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r)
	})
}

// keep returns the set of headers to keep.
func (c Config) keep() map[string]bool {
	set := make(map[string]bool, len(c.Headers))
	for _, name := range c.Headers {
		set[http.CanonicalHeaderKey(name)] = true
	}
	return set
}
