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
	keyed      bool // key is the user's function
	deferrable func(*http.Request) bool
	refused    func(http.ResponseWriter, *http.Request, Refusal)
	accepted   func(http.ResponseWriter, *http.Request, Held)
	judge      func(r *http.Request, status int, replay bool) error
	judged     bool // judge is the user's function
	replay     http.Handler
	values     []any
	limiter    guard.Limiter
}

// WithDeadLetters sets the writer of dead letters. It gets requests that were answered 202 and
// cannot be replayed. Their handler refuses them for good, or fails with them while others succeed,
// or the intake is closed. [FromRecord] makes a request of a dead letter. Without a writer nothing
// can be deferred: clients were told not to send their requests again, so somebody else must get
// them.
func WithDeadLetters(w dlq.Writer) Option { return func(o *options) { o.letters = w } }

// WithKey sets the function that returns the key of a request, such as an account in the path.
// Under [guard.OrderKey], requests of one key keep their order. The default key is the path. With
// one key for all, nothing ever overtakes held requests; see docs/http.md for what that needs.
func WithKey(key func(*http.Request) string) Option { return func(o *options) { o.key = key } }

// WithDeferrable sets the function that says which requests under [Intake.Wrap] may be deferred. It
// is for a router that is wrapped as a whole, and needs [WithDeadLetters]. f sees the request
// before any of its body is read. [Intake.Defer] does not ask f.
func WithDeferrable(f func(*http.Request) bool) Option { return func(o *options) { o.deferrable = f } }

// WithRefusal sets the answer to a request that is neither handled nor held, instead of the plain
// 503 (429 for a rate limit). Retry-After and [HeaderReason] are set already, and f may change
// them. f must be quick: clients get its answer while the dependency is down. If f writes nothing,
// the plain answer follows.
func WithRefusal(f func(http.ResponseWriter, *http.Request, Refusal)) Option {
	return func(o *options) { o.refused = f }
}

// WithAccepted sets the answer to a request that is held, instead of the plain 202. The headers
// [HeaderHold] and [HeaderHoldID] are set already. The request is held whatever f answers.
func WithAccepted(f func(http.ResponseWriter, *http.Request, Held)) Option {
	return func(o *options) { o.accepted = f }
}

// WithOutcome sets the function that judges an answer by its status; [DefaultOutcome] is the
// default. nil is success and an error is a failure. guard.Permanent, guard.Backoff and
// guard.Ignore say more. An error that the handler gave to [Fail] comes first. r is the handler's
// own copy of the request, and its body may have been read.
func WithOutcome(f func(r *http.Request, status int, replay bool) error) Option {
	return func(o *options) { o.judge = f }
}

// WithReplay sets the handler that replays held requests, instead of the handler that Wrap or Defer
// was given. Use it if that handler lives only as long as its request, as under
// echo.WrapMiddleware. Give it the whole router: the router leads the replay through the intake
// once more, and the intake lets it pass. The replay has the URL that the intake saw: if
// http.StripPrefix comes before the intake, the router does not find it.
//
// guard.Policy.Spill needs this option. Then h also gets the requests that an earlier process has
// left: see [Intake.Start].
func WithReplay(h http.Handler) Option { return func(o *options) { o.replay = h } }

// WithValues copies the values of these keys from the context of a request to the context of its
// replay. The replay has no other values of the request. The values must stay valid after the
// request is over. guard.Policy.Spill refuses this option.
func WithValues(keys ...any) Option {
	return func(o *options) { o.values = append(o.values, keys...) }
}

// WithLimiter paces live requests and replays together. A deferrable request above the limit is
// held. Another request waits up to 100 ms, and is then refused with 429. It does not wait while
// requests are held, except as a probe. Many goroutines call l.Admit at once.
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

// carried is a context with the values of some keys of another context.
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
