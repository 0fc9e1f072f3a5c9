// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stormguard-mq/stormguard/guard"
)

// What middleware in front of the intake made of a body is what is held.
func TestBodyOfMiddleware(t *testing.T) {
	swapped := func(body string) func(*http.Request) {
		return func(r *http.Request) { r.Body = io.NopCloser(strings.NewReader(body)) } // the length stays
	}
	bubble(t, "longer than its length, as when it was decompressed", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		r.breakIt()
		r.want(send(r.defers, "POST", "/orders", "short", swapped("the whole body")), http.StatusAccepted)
		r.s.setDown(false)
		r.drained()
		if got := r.s.handled(); got != "the whole body" {
			t.Errorf("%q", got)
		}
		r.close()
	})
	bubble(t, "longer than its length and than the room", func(t *testing.T) {
		p := quick
		p.WindowBytes = 16 << 10
		r := newRig(t, p, Config{MaxBody: 16 << 10})
		r.breakIt()
		r.want(r.post("a"), http.StatusAccepted)
		res := r.want(send(r.defers, "POST", "/orders", "short", swapped(strings.Repeat("x", 15<<10))), http.StatusServiceUnavailable)
		if why := res.Header.Get(HeaderReason); why != guard.ReasonBackpressure.String() {
			t.Error(why)
		}
		r.s.setDown(false)
		r.drained()
		r.close()
	})
	bubble(t, "a form that was parsed", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		form := ""
		r.s.handle = func(_ http.ResponseWriter, req *http.Request) bool {
			form = req.FormValue("a") + req.FormValue("b")
			return req.Method == http.MethodPost
		}
		r.breakIt()
		parsed := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if err := req.ParseForm(); err != nil {
				t.Error(err)
			}
			r.defers.ServeHTTP(w, req)
		})
		r.want(send(parsed, "POST", "/orders", "b=2&a=1", func(req *http.Request) {
			req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		}), http.StatusAccepted)
		r.s.setDown(false)
		r.drained()
		r.s.mu.Lock()
		if last := r.s.calls[len(r.s.calls)-1]; last != "a=1&b=2" || form != "12" {
			t.Errorf("body %q, form %q", last, form)
		}
		r.s.mu.Unlock()
		r.close()
	})
}
