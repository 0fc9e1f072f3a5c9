// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"
	"time"

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

// A key may come from a form, in any order of requests: what is held has the key and the form.
func TestKeyOfAForm(t *testing.T) {
	for _, order := range []guard.Order{guard.OrderSource, guard.OrderKey, guard.OrderNone} {
		bubble(t, order.String(), func(t *testing.T) {
			p := quick
			p.Order = order
			var forms []string
			s := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				forms = append(forms, req.FormValue("account")+" "+req.FormValue("amount"))
			})
			r := newRig(t, p, Config{}, WithKey(func(req *http.Request) string { return req.FormValue("account") }))
			r.breakIt()
			r.want(send(r.in.Defer(s), "POST", "/orders", "account=7&amount=5", func(req *http.Request) {
				req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			}), http.StatusAccepted)
			r.in.mu.Lock()
			key := r.in.oldest.key
			r.in.mu.Unlock()
			r.s.setDown(false)
			r.drained()
			if key != "7" || len(forms) != 1 || forms[0] != "7 5" {
				t.Errorf("key %q, forms %q", key, forms)
			}
			r.close()
		})
	}
}

// A form with files, which a key parses, can be handled and not held: the files would be lost.
func TestKeyOfAFormWithFiles(t *testing.T) {
	for _, order := range []guard.Order{guard.OrderSource, guard.OrderKey, guard.OrderNone} {
		bubble(t, order.String(), func(t *testing.T) {
			p := quick
			p.Order = order
			r := newRig(t, p, Config{}, WithKey(func(req *http.Request) string { return req.FormValue("account") }))
			r.breakIt()
			var form bytes.Buffer
			parts := multipart.NewWriter(&form)
			_ = parts.WriteField("account", "7")
			if f, err := parts.CreateFormFile("f", "f.txt"); err == nil {
				_, _ = f.Write([]byte("its content"))
			}
			_ = parts.Close()
			r.want(send(r.defers, "POST", "/orders", form.String(), func(req *http.Request) {
				req.Header.Set("Content-Type", parts.FormDataContentType())
			}), http.StatusServiceUnavailable)
			r.s.setDown(false)
			r.close()
		})
	}
}

// A form of many short values takes a multiple of its body, and is weighed.
func TestParsedFormsAreWeighed(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := quick
		p.WindowBytes = 1 << 20
		r := newRig(t, p, Config{})
		var body strings.Builder
		for i := range 5_000 {
			fmt.Fprintf(&body, "%d=&", i)
		}
		parsed := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if err := req.ParseForm(); err != nil {
				t.Error(err)
			}
			r.defers.ServeHTTP(w, req)
		})
		r.breakIt()
		held := 0
		for range 20 { // 25 KB each
			if send(parsed, "POST", "/orders", body.String(), func(req *http.Request) {
				req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			}).StatusCode == http.StatusAccepted {
				held++
			}
		}
		if held != 1 { // the first is let in when nothing else is there
			t.Errorf("%d are held", held)
		}
		r.s.setDown(false)
		r.drained()
		r.close()
	})
}

// Replays that always get a 4xx, as where the authentication is inside, are no outcome to the
// breaker: then a live request probes, or it would never close.
func TestBreakerClosesThoughReplaysAreRefused(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		r.breakIt()
		r.s.handle = func(w http.ResponseWriter, req *http.Request) bool {
			if _, ok := Replayed(req.Context()); ok {
				w.WriteHeader(http.StatusUnauthorized)
				return true
			}
			return false
		}
		r.want(r.post("x"), http.StatusAccepted)
		r.s.setDown(false)
		begun := time.Now()
		for r.post("y").StatusCode != http.StatusOK {
			if time.Sleep(time.Second); time.Since(begun) > time.Minute {
				t.Fatalf("%+v", r.state())
			}
		}
		r.close()
	})
}

// A full hold that is not replayed, as where its head waits for a credit, leaves the probes
// to requests that it cannot take.
func TestBreakerClosesThoughTheHoldStands(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := quick
		p.Window = 3
		r := newRig(t, p, Config{})
		r.breakIt()
		r.g.Source("http/held").Pause(0)
		for range 3 {
			r.want(r.post("x"), http.StatusAccepted)
		}
		r.s.setDown(false)
		begun := time.Now()
		for r.post("y").StatusCode != http.StatusOK {
			if time.Sleep(time.Second); time.Since(begun) > 2*time.Minute {
				t.Fatalf("%+v", r.state())
			}
		}
		r.g.Source("http/held").Resume()
		r.close()
	})
}

// Requests that cannot be held probe, if nothing is: or the breaker would stay open for ever.
func TestBreakerClosesThoughNothingCanBeHeld(t *testing.T) {
	for _, chunked := range []bool{false, true} { // then nobody says how long it is
		bubble(t, fmt.Sprint("too large, chunked ", chunked), func(t *testing.T) {
			r := newRig(t, quick, Config{MaxBody: 10})
			post := func() answer {
				return send(r.defers, "POST", "/orders", "too large to be held", func(r *http.Request) {
					if chunked {
						r.ContentLength = -1
					}
				})
			}
			r.breakIt()
			r.want(post(), http.StatusServiceUnavailable)
			r.s.setDown(false)
			begun := time.Now()
			for post().StatusCode != http.StatusOK {
				if time.Sleep(100 * time.Millisecond); time.Since(begun) > time.Minute {
					t.Fatalf("%+v", r.state())
				}
			}
			if got := r.s.handled(); !strings.HasSuffix(got, "too large to be held") {
				t.Errorf("%q", got)
			}
			r.close()
		})
	}
	bubble(t, "shorter than its length", func(t *testing.T) { // decompressed by a middleware, say
		r := newRig(t, quick, Config{})
		r.breakIt()
		r.want(send(r.defers, "POST", "/orders", "a longer body", func(r *http.Request) {
			r.Header.Set("Content-Encoding", "gzip")
			r.Body = io.NopCloser(strings.NewReader("short"))
		}), http.StatusAccepted)
		r.s.setDown(false)
		r.drained()
		if got := r.s.handled(); got != "short" {
			t.Errorf("%q", got)
		}
		r.close()
	})
}
