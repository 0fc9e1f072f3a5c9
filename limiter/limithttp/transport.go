// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limithttp

import (
	"net/http"

	"github.com/stormguard-mq/stormguard/limiter"
)

// Transport puts gates in front of base, or of [http.DefaultTransport] if base is nil. Each
// request waits at its gate until it is admitted, or until its context ends. A nil gate
// admits everything. Redirects and retries of the client are requests too.
func Transport(base http.RoundTripper, gate func(*http.Request) limiter.Gate) http.RoundTripper {
	if base == nil {
		base = http.DefaultTransport
	}
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if g := gate(r); g != nil {
			if err := g.Wait(r.Context()); err != nil {
				if r.Body != nil {
					_ = r.Body.Close() // a RoundTripper must close it, also on an error
				}
				return nil, err
			}
		}
		return base.RoundTrip(r)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
