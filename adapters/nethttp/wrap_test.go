// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
)

// site is a real server.
type site struct {
	*httptest.Server
	log *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func serve(t *testing.T, h http.Handler, http2 bool) *site {
	s := &site{httptest.NewUnstartedServer(h), new(lockedBuffer)}
	s.Config.ErrorLog = log.New(s.log, "", 0)
	s.EnableHTTP2 = http2
	if http2 {
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

func (s *site) do(t *testing.T, method, path string, body io.Reader) (answer, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, body)
	if err != nil {
		t.Fatal(err)
	}
	res, err := s.Client().Do(req)
	if err != nil {
		return answer{}, "error"
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return answer{res.StatusCode, res.Header}, string(text) + " and an error"
	}
	return answer{res.StatusCode, res.Header}, string(text)
}

// raw sends bytes on a connection of its own and reads to its end.
func (s *site) raw(t *testing.T, request string) string {
	t.Helper()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	_, _ = io.WriteString(c, request)
	all, _ := io.ReadAll(c)
	var keep []string
	for line := range strings.Lines(string(all)) {
		if !strings.HasPrefix(line, "Date:") {
			keep = append(keep, strings.TrimSpace(line))
		}
	}
	return strings.Join(keep, "|")
}

func interfaces(w http.ResponseWriter) string {
	_, f := w.(http.Flusher)
	_, h := w.(http.Hijacker)
	_, r := w.(io.ReaderFrom)
	_, p := w.(http.Pusher)
	_, s := w.(io.StringWriter)
	return fmt.Sprintf("flush %t hijack %t readFrom %t push %t string %t", f, h, r, p, s)
}

// What net/http does with a handler is the same with an intake in between: each
// case tells a story, and the stories without and with it are compared.
func TestWrapChangesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		h     http.HandlerFunc
		http2 bool
		tell  func(t *testing.T, s *site) string
	}{
		"interfaces": {h: func(w http.ResponseWriter, _ *http.Request) {
			rc := http.NewResponseController(w)
			fmt.Fprint(w, interfaces(w), rc.SetReadDeadline(time.Time{}), rc.SetWriteDeadline(time.Time{}), rc.EnableFullDuplex(), rc.Flush())
		}, tell: plain},
		"interfaces of HTTP/2": {h: func(w http.ResponseWriter, r *http.Request) {
			rc := http.NewResponseController(w)
			fmt.Fprint(w, r.Proto, interfaces(w), rc.SetReadDeadline(time.Time{}), rc.SetWriteDeadline(time.Time{}), rc.Flush())
		}, http2: true, tell: plain},
		"stream": {h: func(w http.ResponseWriter, r *http.Request) {
			for i := range 3 {
				fmt.Fprintf(w, "event %d\n", i)
				w.(http.Flusher).Flush()
				time.Sleep(time.Millisecond)
			}
			<-r.Context().Done() // the client has seen all of it and leaves
		}, tell: func(t *testing.T, s *site) string {
			ctx, cancel := context.WithCancel(t.Context())
			req, _ := http.NewRequestWithContext(ctx, "GET", s.URL, nil)
			res, err := s.Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			in := bufio.NewReader(res.Body)
			story := fmt.Sprint(res.StatusCode)
			for range 3 {
				line, err := in.ReadString('\n')
				story += fmt.Sprint(line, err)
			}
			cancel()
			return story
		}},
		"hijack": {h: func(w http.ResponseWriter, _ *http.Request) {
			c, rw, err := w.(http.Hijacker).Hijack()
			if err != nil {
				panic(err)
			}
			defer c.Close()
			line, _ := rw.ReadString('\n')
			fmt.Fprintf(rw, "you said %s", line)
			_ = rw.Flush()
		}, tell: func(t *testing.T, s *site) string {
			return s.raw(t, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nhello\n")
		}},
		"HTTP/1.0": {h: func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, r.Proto, r.Host)
			w.(http.Flusher).Flush()
			fmt.Fprint(w, " end")
		}, tell: func(t *testing.T, s *site) string { return s.raw(t, "GET / HTTP/1.0\r\n\r\n") }},
		"HEAD": {h: func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "not sent") },
			tell: func(t *testing.T, s *site) string {
				return s.raw(t, "HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
			}},
		"early hints and trailers": {h: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Link", "</a.css>")
			w.WriteHeader(103)
			w.Header().Set("Trailer", "X-Sum")
			w.WriteHeader(201)
			fmt.Fprint(w, "body")
			w.Header().Set("X-Sum", "4")
		}, tell: func(t *testing.T, s *site) string {
			var hints []string
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
				hints = append(hints, fmt.Sprint(code, h))
				return nil
			}})
			req, _ := http.NewRequestWithContext(ctx, "GET", s.URL, nil)
			res, err := s.Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			text, _ := io.ReadAll(res.Body)
			return fmt.Sprint(hints, res.StatusCode, string(text), res.Trailer)
		}},
		"expect continue": {h: func(w http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			fmt.Fprint(w, string(b), err)
		}, tell: func(t *testing.T, s *site) string {
			return s.raw(t, "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
		}},
		"large bodies": {h: func(w http.ResponseWriter, r *http.Request) {
			sum := sha256.New()
			n, err := io.Copy(io.MultiWriter(sum, w), r.Body)
			fmt.Fprintf(w, "%d %v %x", n, err, sum.Sum(nil))
		}, tell: func(t *testing.T, s *site) string {
			_, text := s.do(t, "POST", "/", io.LimitReader(zeros{}, 32<<20))
			return fmt.Sprintf("%x", sha256.Sum256([]byte(text)))
		}},
		"file": {h: func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, "wrap_test.go") }, tell: func(t *testing.T, s *site) string {
			_, text := s.do(t, "GET", "/", nil)
			return text
		}},
		"client goes away": {h: func(_ http.ResponseWriter, r *http.Request) {
			left <- ""
			<-r.Context().Done()
			left <- r.Context().Err().Error()
		}, tell: func(t *testing.T, s *site) string {
			ctx, cancel := context.WithCancel(t.Context())
			go func() { <-left; cancel() }()
			req, _ := http.NewRequestWithContext(ctx, "GET", s.URL, nil)
			res, err := s.Client().Do(req)
			if err == nil {
				res.Body.Close()
			}
			return fmt.Sprint(errors.Is(err, context.Canceled), <-left)
		}},
		"abort": {h: func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "half")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}, tell: func(t *testing.T, s *site) string {
			_, text := s.do(t, "GET", "/", nil)
			s.Close()
			return text + s.log.String()
		}},
		"panic": {h: func(http.ResponseWriter, *http.Request) { blowUp("boom") }, tell: func(t *testing.T, s *site) string {
			_, text := s.do(t, "GET", "/", nil)
			s.Close()
			return fmt.Sprint(text, strings.Contains(s.log.String(), "panic serving"), strings.Contains(s.log.String(), "boom"), strings.Contains(s.log.String(), "blowUp"))
		}},
		"after the timeout of the server": {h: http.TimeoutHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			for { // before its 503 is written, an end of the handler may be the answer
				if _, err := w.Write(nil); err != nil {
					break
				}
				time.Sleep(time.Millisecond)
			}
			w.WriteHeader(200)
		}), 10*time.Millisecond, "too slow").ServeHTTP, tell: plain},
	} {
		t.Run(name, func(t *testing.T) {
			bare := c.tell(t, serve(t, c.h, c.http2))
			r := newRig(t, quick, Config{})
			defer r.close()
			for _, wrapped := range []http.Handler{r.in.Wrap(c.h), r.in.Defer(c.h)} {
				s := serve(t, wrapped, c.http2)
				if got := c.tell(t, s); got != bare {
					t.Errorf("without: %s\n   with: %s", bare, got)
				}
				s.Close()
			}
		})
	}
}

var left = make(chan string)

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func plain(t *testing.T, s *site) string {
	res, text := s.do(t, "GET", "/", nil)
	return fmt.Sprint(res.StatusCode, res.Header["Content-Length"], text)
}

// What is said of a request after its handler has run: the pattern that matched
// further in, and files of a form, which the server removes.
func TestWrapGivesBack(t *testing.T) {
	r := newRig(t, quick, Config{})
	defer r.close()
	mux := http.NewServeMux()
	file := make(chan string, 1)
	mux.HandleFunc("POST /files/{id}", func(_ http.ResponseWriter, req *http.Request) {
		if err := req.ParseMultipartForm(1); err != nil {
			t.Error(err)
		}
		f, err := req.MultipartForm.File["f"][0].Open()
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		file <- f.(*os.File).Name()
	})
	pattern := make(chan string, 1)
	h := r.in.Wrap(mux)
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h.ServeHTTP(w, req)
		pattern <- req.Pattern
	}), false)
	var form bytes.Buffer
	parts := multipart.NewWriter(&form)
	part, _ := parts.CreateFormFile("f", "f.txt")
	_, _ = io.CopyN(part, zeros{}, 11<<20)
	_ = parts.Close()
	req, _ := http.NewRequestWithContext(t.Context(), "POST", s.URL+"/files/1", &form)
	req.Header.Set("Content-Type", parts.FormDataContentType())
	res, err := s.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	s.Close() // the request is over
	if got := <-pattern; got != "POST /files/{id}" {
		t.Errorf("pattern %q", got)
	}
	if _, err := os.Stat(<-file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the form's file is still there: %v", err)
	}
}

// Informational answers are not the answer; switching protocols is.
func TestRecorderStatus(t *testing.T) {
	for _, c := range []struct {
		statuses []int
		want     int32
	}{{[]int{103, 500}, 500}, {[]int{100, 103, 204, 500}, 204}, {[]int{101}, 101}, {[]int{103}, 0}} {
		rec := &recorder{w: discard{make(http.Header)}}
		w := rec.writer()
		for _, s := range c.statuses {
			w.WriteHeader(s)
		}
		if got := rec.status.Load(); got != c.want {
			t.Errorf("%v: %d, want %d", c.statuses, got, c.want)
		}
	}
}

// A handler that took the connection over and then fails gets no answer written
// into it, and its failure counts.
func TestHijackedFailure(t *testing.T) {
	r := newRig(t, quick, Config{})
	s := serve(t, r.in.Wrap(HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return err
		}
		defer c.Close()
		_, _ = rw.WriteString("mine")
		_ = rw.Flush()
		return errBroken
	})), false)
	for range 5 {
		if got := s.raw(t, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); got != "mine" {
			t.Error(got)
		}
	}
	s.Close()
	for range 60_000 { // nobody waits for handlers with a connection of their own
		if r.state().Breaker.State == breaker.Open {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if st := r.state(); st.Breaker.State != breaker.Open || s.log.String() != "" {
		t.Errorf("%+v, log: %s", st.Breaker, s.log)
	}
	r.close()
}

// A server that ends the contexts of its requests as it stops, and a client whose
// request then waits for its answer: what is neither handled nor held is not said to be.
func TestStoppingServer(t *testing.T) {
	r := newRig(t, quick, Config{})
	defer r.close()
	ctx, stop := context.WithCancel(t.Context())
	s := &site{httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		stop()
		<-req.Context().Done()
		r.defers.ServeHTTP(w, req)
	})), new(lockedBuffer)}
	s.Config.BaseContext = func(net.Listener) context.Context { return ctx }
	s.Start()
	defer s.Close()
	_ = r.g.Source("http").ForceOpen(time.Hour)
	for _, method := range []string{"POST", "PUT", "GET"} {
		res, _ := s.do(t, method, "/", strings.NewReader("x"))
		if res.StatusCode != http.StatusServiceUnavailable || res.Header.Get("Retry-After") == "" {
			t.Errorf("%s: %d %s", method, res.StatusCode, res.Header)
		}
	}
	if st := r.in.Stats(); st.Refused != 3 || st.Accepted+st.Full != 0 || r.s.count() != 0 {
		t.Errorf("%+v, %d calls", st, r.s.count())
	}
}

// A client that sends its body too slowly does not keep its place, and the
// connection of one that was held goes on.
func TestHoldOnARealConnection(t *testing.T) {
	r := newRig(t, quick, Config{BodyTimeout: 300 * time.Millisecond})
	defer r.close()
	s := serve(t, r.defers, false)
	_ = r.g.Source("http").ForceOpen(time.Hour)
	got := s.raw(t, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
	if !strings.HasPrefix(got, "HTTP/1.1 408 ") {
		t.Error(got)
	}
	if st := r.in.Stats(); st.Held != 0 {
		t.Errorf("%+v", st)
	}
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	in := bufio.NewReader(c)
	for i := range 3 {
		if i > 0 {
			time.Sleep(400 * time.Millisecond) // above the body's timeout
		}
		_, _ = io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
		res, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != 202 {
			t.Error(res.Status, err)
		}
		res.Body.Close()
	}
	_ = r.g.Source("http").ForceClosed()
	r.drained()
	if got := r.s.handled(); got != "hi hi hi" {
		t.Error(got)
	}
}

// What replaces the body in front may end it before the client does. The answer does not wait for
// the client.
func TestBodyThatEndsEarly(t *testing.T) {
	r := newRig(t, quick, Config{BodyTimeout: 300 * time.Millisecond})
	defer r.close()
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		front := req.WithContext(req.Context())
		front.Body = io.NopCloser(io.LimitReader(req.Body, 2))
		r.defers.ServeHTTP(w, front)
	}), false)
	_ = r.g.Source("http").ForceOpen(time.Hour)
	got := s.raw(t, "POST / HTTP/1.1\r\nHost: x\r\nContent-Encoding: deflate\r\nContent-Length: 1000\r\n\r\nhi")
	if !strings.HasPrefix(got, "HTTP/1.1 202 ") {
		t.Error(got)
	}
	_ = r.g.Source("http").ForceClosed()
	r.drained()
	if got := r.s.handled(); got != "hi" {
		t.Error(got)
	}
}

// Many at once, through an outage: each request is answered by its handler, or
// refused, or held and replayed once.
func TestHammer(t *testing.T) {
	r := newRig(t, guard.Policy{Breaker: quick.Breaker, Ramp: guard.Ramp{Off: true}}, Config{})
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == "GET" {
			r.wrapped.ServeHTTP(w, req)
			return
		}
		r.defers.ServeHTTP(w, req)
	}), false)
	var senders sync.WaitGroup
	var mu sync.Mutex
	count := make(map[int]int)
	accepted := make(map[string]bool)
	for n := range 8 {
		senders.Go(func() {
			for i := range 150 {
				method, body := "GET", "get"
				if i%2 == 0 {
					method, body = "POST", fmt.Sprintf("%d-%d", n, i)
				}
				if n == 0 && (i == 20 || i == 80) {
					r.s.setDown(i == 20)
				}
				res, _ := s.do(t, method, "/", strings.NewReader(body))
				mu.Lock()
				count[res.StatusCode]++
				if res.StatusCode == 202 || res.StatusCode == 200 && method == "POST" {
					accepted[body] = true
				}
				mu.Unlock()
			}
		})
	}
	senders.Wait()
	r.drained()
	done := make(map[string]int)
	for word := range strings.FieldsSeq(r.s.handled()) {
		done[word]++
	}
	for body := range accepted {
		if done[body] != 1 {
			t.Errorf("%s was handled %d times", body, done[body])
		}
	}
	t.Logf("answers by status: %v", count)
	if total := count[200] + count[202] + count[500] + count[503]; total != 1200 || count[202] == 0 || count[503] == 0 {
		t.Errorf("answers by status: %v", count)
	}
	s.Close()
	r.close()
}
