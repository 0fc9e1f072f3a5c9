// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

// Silence says how calls are answered while Redis does not decide: it is not reached, does
// not answer in time, or answers with an error.
type Silence int

const (
	// FailClosed denies. Waiters go on waiting.
	FailClosed Silence = iota
	// FailOpen admits everything.
	FailOpen
)

// String returns "closed" or "open".
func (s Silence) String() string {
	if s == FailOpen {
		return "open"
	}
	return "closed"
}

// Config holds the settings that an operator may set from a file, a flag or the environment.
// All processes must have the same Limit, Limits and Prefix. Limit has no default;
// everything else may be left out.
type Config struct {
	// Limit is the limit of each key that Limits does not name. Its ranges are those of
	// [limiter.Limit].
	Limit limiter.Limit

	// Limits are the limits of single keys.
	Limits map[string]limiter.Limit

	// Prefix begins the names of all keys at Redis: a key k is PREFIX{k}. It has no braces
	// and at most 128 bytes; unset means "stormguard:limit:".
	Prefix string

	// Silence says how calls are answered while Redis does not decide; unset means FailClosed.
	Silence Silence

	// Timeout bounds one question to Redis, in [1ms, 10s]; unset means 50 ms. The context of
	// a Wait may end that wait sooner.
	Timeout time.Duration

	// Batch is how many tokens Admit takes ahead at most, in [1, 10000]; unset means 16. It
	// is cut to a quarter of the burst, but is at least one. With a larger Batch a source
	// handles more messages per round trip. Tokens not used within a second are lost to the
	// fleet. Used ones may come on top of the bound.
	Batch int
}

// WithDefaults returns c with every unset field replaced by its default.
func (c Config) WithDefaults() Config {
	c.Prefix = cmp.Or(c.Prefix, "stormguard:limit:")
	c.Timeout = cmp.Or(c.Timeout, 50*time.Millisecond)
	c.Batch = cmp.Or(c.Batch, 16)
	return c
}

// Validate returns one error that names all faults of c, or nil. Unset fields are checked as
// their defaults.
func (c Config) Validate() error {
	var wrong []error
	bad := func(field string, value any, want string) {
		wrong = append(wrong, fmt.Errorf("%w: %s: %v is not in %s", errConfig, field, value, want))
	}
	limit := func(field string, l limiter.Limit) {
		if !(l.Rate >= 0.001 && l.Rate <= 1e9) {
			bad(field+".Rate", l.Rate, "[0.001, 1e+09] tokens per second")
		}
		if l.Burst < 1 || l.Burst > 1e9 {
			bad(field+".Burst", l.Burst, "[1, 1000000000] tokens")
		}
	}
	c = c.WithDefaults()
	limit("Limit", c.Limit)
	for _, key := range slices.Sorted(maps.Keys(c.Limits)) {
		field := fmt.Sprintf("Limits[%.20q]", key)
		if !validKey(key) {
			bad(field, len(key), fmt.Sprintf("[1, %d] bytes", limiter.MaxKey))
		}
		limit(field, c.Limits[key])
	}
	if len(c.Prefix) > 128 || strings.ContainsAny(c.Prefix, "{}") {
		bad("Prefix", fmt.Sprintf("%.40q", c.Prefix), "names of [1, 128] bytes without braces")
	}
	if c.Silence != FailClosed && c.Silence != FailOpen {
		bad("Silence", int(c.Silence), "{FailClosed, FailOpen}")
	}
	if c.Timeout < time.Millisecond || c.Timeout > 10*time.Second {
		bad("Timeout", c.Timeout, "[1ms, 10s]")
	}
	if c.Batch < 1 || c.Batch > 10_000 {
		bad("Batch", c.Batch, "[1, 10000] tokens")
	}
	return errors.Join(wrong...)
}

func validKey(key string) bool { return key != "" && len(key) <= limiter.MaxKey }

func (c Config) limit(key string) limiter.Limit {
	if l, ok := c.Limits[key]; ok {
		return l
	}
	return c.Limit
}
