// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limithttp

import (
	"net/http"

	"github.com/stormguard-mq/stormguard/limiter"
)

// Transport is base, or [http.DefaultTransport] if that is nil, behind gates: each
// request waits at its own until it is admitted, or its context ends. A nil gate
// admits. Redirects and retries that the client makes are requests too.
func Transport(base http.RoundTripper, gate func(*http.Request) limiter.Gate) http.RoundTripper {
	if base == nil {
		base = http.DefaultTransport
	}
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if g := gate(r); g != nil {
			if err := g.Wait(r.Context()); err != nil {
				if r.Body != nil {
					_ = r.Body.Close() // as a RoundTripper must, also when it fails
				}
				return nil, err
			}
		}
		return base.RoundTrip(r)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
