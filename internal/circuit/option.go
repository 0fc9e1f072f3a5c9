// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import "math/rand/v2"

// An Option supplies a collaborator that a config file cannot express.
type Option interface{ apply(*options) }

type options struct{ rand func() float64 }

type optionFunc func(*options)

func (f optionFunc) apply(o *options) { f(o) }

// WithRand sets the source of jitter: f returns numbers in [0, 1). The breaker calls f once
// per open period, under its lock, and not at all if Jitter is 0. The default is
// math/rand/v2. A simulation that must be repeatable passes its own f.
func WithRand(f func() float64) Option {
	return optionFunc(func(o *options) { o.rand = f })
}

func buildOptions(opts []Option) options {
	o := options{rand: rand.Float64}
	for _, opt := range opts {
		opt.apply(&o)
	}
	return o
}
