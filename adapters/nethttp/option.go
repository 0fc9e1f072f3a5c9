// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// An Option supplies a collaborator that a config file cannot express.
type Option func(*options)

type options struct {
	letters    dlq.Writer
	key        func(*http.Request) string
	keyed      bool // key is the user's
	deferrable func(*http.Request) bool
	refused    func(http.ResponseWriter, *http.Request, Refusal)
	accepted   func(http.ResponseWriter, *http.Request, Held)
	judge      func(r *http.Request, status int, replay bool) error
	judged     bool // judge is the user's
	replay     http.Handler
	values     []any
	limiter    guard.Limiter
}

// WithDeadLetters is where a request goes that was answered 202 and cannot be
// replayed: the handler refuses it for good, or fails with it while others
// succeed, or the intake is closed. [FromRecord] makes a request of it again.
// Without a writer nothing can be deferred: somebody must get what a client was
// told not to send again.
func WithDeadLetters(w dlq.Writer) Option { return func(o *options) { o.letters = w } }

// WithKey chooses the key whose requests keep their order under
// [guard.OrderKey], such as an account in the path. The default is the path. With one
// key for all nothing ever overtakes what is held; see docs/http.md for what that needs.
func WithKey(key func(*http.Request) string) Option { return func(o *options) { o.key = key } }

// WithDeferrable marks requests under [Intake.Wrap] as deferrable, for a router
// that is wrapped as a whole. It sees the request before any of its body is
// read. [Intake.Defer] does not ask it.
func WithDeferrable(f func(*http.Request) bool) Option { return func(o *options) { o.deferrable = f } }

// WithRefusal answers a request that is neither handled nor held, in place of
// the plain 503 (429 for a rate limit). Retry-After and [HeaderReason] are set
// already, and may be changed. f must be quick: it is what clients get while
// the dependency is down. If it writes nothing, the plain answer follows.
func WithRefusal(f func(http.ResponseWriter, *http.Request, Refusal)) Option {
	return func(o *options) { o.refused = f }
}

// WithAccepted answers a request that is held, in place of the plain 202. The
// headers [HeaderHold] and [HeaderHoldID] are set already. The request is held
// whatever f answers.
func WithAccepted(f func(http.ResponseWriter, *http.Request, Held)) Option {
	return func(o *options) { o.accepted = f }
}

// WithOutcome judges an answer by its status: nil is success, an error is a
// failure, and guard.Permanent, guard.Backoff and guard.Ignore say more. What
// the handler said by [Fail] comes first. [DefaultOutcome] is the default. The
// request is the handler's own copy; its body is spent.
func WithOutcome(f func(r *http.Request, status int, replay bool) error) Option {
	return func(o *options) { o.judge = f }
}

// WithReplay is where held requests are replayed, in place of the handler that
// Wrap or Defer was given. Use it where that handler lives only as long as its
// request, as under echo.WrapMiddleware: give it the whole router, which leads
// the replay through the intake once more, and the intake lets it pass. The
// replay has the URL that the intake saw: a router in which http.StripPrefix
// comes before the intake would not find it. With guard.Policy.Spill it is needed, and gets
// what an earlier process has left, too: see [Intake.Start].
func WithReplay(h http.Handler) Option { return func(o *options) { o.replay = h } }

// WithValues carries the values of these keys over from the context of a
// request to that of its replay, which has no other values of it. They must be
// good after the request is over.
func WithValues(keys ...any) Option {
	return func(o *options) { o.values = append(o.values, keys...) }
}

// WithLimiter paces live requests and replays together. A request above the
// limit is held if it is deferrable; otherwise it waits up to 100 ms, and is refused
// with 429. Admit is called by many goroutines at once.
func WithLimiter(l guard.Limiter) Option { return func(o *options) { o.limiter = l } }

func newOptions(opts []Option) (options, error) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	var wrong []error
	if o.deferrable != nil && o.letters == nil {
		wrong = append(wrong, fmt.Errorf("%w: WithDeferrable: it needs WithDeadLetters", errConfig))
	}
	for _, key := range o.values {
		if key == nil {
			wrong = append(wrong, fmt.Errorf("%w: WithValues: a key must not be nil", errConfig))
		}
	}
	if o.judged = o.judge != nil; !o.judged {
		o.judge = DefaultOutcome
	}
	if o.accepted == nil {
		o.accepted = accept
	}
	if o.keyed = o.key != nil; !o.keyed {
		o.key = func(r *http.Request) string { return r.URL.Path }
	}
	return o, errors.Join(wrong...)
}

// carried are values of one context under another.
type carried struct {
	context.Context //nolint:containedctx // it is a context itself
	keys, values    []any
}

func (c *carried) Value(key any) any {
	for i, k := range c.keys {
		if k == key {
			return c.values[i]
		}
	}
	return c.Context.Value(key)
}
