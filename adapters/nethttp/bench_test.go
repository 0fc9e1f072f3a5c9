// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// discard is a ResponseWriter that costs nothing.
type discard struct{ h http.Header }

func (d discard) Header() http.Header       { return d.h }
func (discard) Write(p []byte) (int, error) { return len(p), nil }
func (discard) WriteHeader(int)             {}
func (discard) Flush()                      {}
func newRequest(method, body string) *http.Request {
	r, err := http.NewRequest(method, "/orders/1", strings.NewReader(body))
	if err != nil {
		panic(err)
	}
	return r
}

// What the guard adds to a request: bare is the handler alone, closed the usual
// path, refused the degraded answer, held the 202.
func BenchmarkIntake(b *testing.B) {
	for _, c := range []struct {
		name, method string
		open         bool
	}{{"closed", "GET", false}, {"closed-deferrable", "POST", false}, {"refused", "GET", true}, {"held", "POST", true}} {
		b.Run(c.name, func(b *testing.B) {
			g, err := guard.New(guard.Config{Policy: guard.Policy{Window: 1 << 20, WindowBytes: 1 << 40}})
			if err != nil {
				b.Fatal(err)
			}
			in, err := New(g, Config{}, WithDeadLetters(&letters{}))
			if err != nil {
				b.Fatal(err)
			}
			h := in.Defer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(200) }))
			if c.open {
				_ = g.Source("http").ForceOpen(time.Hour)
			}
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				w := discard{make(http.Header)}
				for pb.Next() {
					h.ServeHTTP(w, newRequest(c.method, "{}"))
				}
			})
			b.StopTimer()
			_ = g.Source("http").ForceClosed()
			_, _ = in.Close(b.Context())
			_, _ = g.Close(b.Context())
		})
	}
	b.Run("bare", func(b *testing.B) {
		var h http.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(200) })
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			w := discard{make(http.Header)}
			for pb.Next() {
				h.ServeHTTP(w, newRequest("GET", "{}"))
			}
		})
	})
}
