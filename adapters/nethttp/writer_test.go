// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// gin's Context.Stream asks for the notifier unasked: it is there as without the guard, and
// tells when the client goes.
func TestCloseNotify(t *testing.T) {
	notifier := func(w http.ResponseWriter) <-chan bool {
		return w.(http.CloseNotifier).CloseNotify() //nolint:staticcheck // as gin does
	}
	stream := func(told chan<- string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			gone := notifier(w)
			fmt.Fprintln(w, "event")
			w.(http.Flusher).Flush()
			select {
			case <-gone:
				told <- "gone"
			case <-time.After(time.Minute):
				told <- "nothing"
			}
		}
	}
	for name, http2 := range map[string]bool{"HTTP/1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, quick, Config{})
			defer r.close()
			told := make(chan string, 1)
			s := serve(t, r.in.Wrap(stream(told)), http2)
			for range 6 { // a panic each would open the breaker
				ctx, cancel := context.WithCancel(t.Context())
				req, _ := http.NewRequestWithContext(ctx, "GET", s.URL, nil)
				res, err := s.Client().Do(req)
				if err != nil {
					t.Fatal(err)
				}
				line, err := bufio.NewReader(res.Body).ReadString('\n')
				if line != "event\n" || err != nil {
					t.Error(line, err)
				}
				cancel()
				res.Body.Close()
				if got := <-told; got != "gone" {
					t.Errorf("the handler hears of %s", got)
				}
			}
			s.Close()
			if st := r.state(); st.Breaker.State != breaker.Closed || st.Tally.Failures > 0 || s.log.String() != "" {
				t.Errorf("%+v, log: %s", st.Breaker, s.log)
			}
		})
	}
	bubble(t, "replay", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		done := false
		h := r.in.Defer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			select {
			case <-notifier(w):
				t.Error("a client that is not there went away")
			case <-time.After(time.Second):
				done = true
			}
		}))
		_ = r.g.Source("http").ForceOpen(time.Second)
		r.want(send(h, "POST", "/", "x"), 202)
		r.drained()
		if !done {
			t.Error("not replayed")
		}
		r.close()
	})
}
