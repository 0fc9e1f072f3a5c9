// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package guardhttp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
)

// spillChild is set for a process that serves, and has its directory.
const spillChild = "STORMGUARD_HTTP_SPILL_CHILD"

// asChild serves in a process that a test has started, and tells whether this is one.
func asChild() bool {
	dir := os.Getenv(spillChild)
	if dir != "" {
		fmt.Fprintln(os.Stderr, serveAsChild(dir))
	}
	return dir != ""
}

// serveAsChild serves until it is killed. The file "up" beside its spill says that the
// dependency is there, and the file "done" has what was handled.
func serveAsChild(dir string) error {
	done, err := os.OpenFile(filepath.Join(dir, "done"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	g, err := guard.New(guard.Config{SpillDir: filepath.Join(dir, "spill"), Policy: guard.Policy{Spill: true}})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	intake, err := New(g, Config{Name: "orders"}, WithDeadLetters(&letters{}), WithReplay(mux))
	if err != nil {
		return err
	}
	mux.Handle("POST /orders/{id}", intake.Defer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if _, upErr := os.Stat(filepath.Join(dir, "up")); upErr != nil || err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		_, _ = fmt.Fprintf(done, "%s %s %s\n", r.PathValue("id"), body, r.Header.Get("X-Request-ID"))
	})))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	intake.Start()
	fmt.Println("http://" + l.Addr().String())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	return server.Serve(l)
}

// spillServer starts such a process, and returns its address and what kills it.
func spillServer(t *testing.T, dir string) (address string, kill func()) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self) // itself, until it is killed
	cmd.Env = append(os.Environ(), spillChild+"="+dir)
	cmd.Stderr = t.Output()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	t.Cleanup(kill)
	address, err = bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(address), kill
}

// A server is killed again and again while clients post, in an outage. Whatever it has
// answered with a 202 from the disk is handled in order when the dependency is back.
func TestKilledServerKeepsIts202(t *testing.T) {
	t.Parallel()
	kills := 4
	if os.Getenv("STORMGUARD_FULL") == "1" {
		kills = 40
	}
	dir := t.TempDir()
	client := &http.Client{Timeout: 30 * time.Second}
	defer client.CloseIdleConnections()
	var accepted []string
	next := 0
	for range kills {
		address, kill := spillServer(t, dir)
		want := len(accepted) + 40
		// The kill comes while a request is under way, as soon as enough are accepted.
		enough := make(chan struct{})
		var killing sync.WaitGroup
		killing.Go(func() { <-enough; kill() })
		for range 10_000 {
			next++
			id := strconv.Itoa(next)
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, address+"/orders/"+id, strings.NewReader("body-"+id))
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("X-Request-ID", "\xff"+id)
			resp, err := client.Do(r)
			if err != nil {
				break // killed
			}
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusAccepted {
				if where := resp.Header.Get(HeaderHold); where != HoldDisk {
					t.Fatalf("%s: %q, want %q", HeaderHold, where, HoldDisk)
				}
				if accepted = append(accepted, id); len(accepted) == want {
					close(enough)
				}
			}
		}
		if len(accepted) < want {
			t.Fatalf("%d accepted before the server was gone, want %d", len(accepted), want)
		}
		killing.Wait()
	}
	if err := os.WriteFile(filepath.Join(dir, "up"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	spillServer(t, dir)
	var done []string
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		text, err := os.ReadFile(filepath.Join(dir, "done"))
		if err != nil {
			t.Fatal(err)
		}
		done = nil
		for line := range strings.Lines(string(text)) {
			id, _, _ := strings.Cut(line, " ")
			if want := fmt.Sprintf("%s body-%s \xff%s\n", id, id, id); line != want && strings.HasSuffix(line, "\n") {
				t.Fatalf("handled %q, want %q", line, want)
			}
			done = append(done, id)
		}
		missing := slices.DeleteFunc(slices.Clone(accepted), func(id string) bool { return slices.Contains(done, id) })
		if len(missing) == 0 {
			t.Logf("%d kills, %d answered with 202, %d handled", kills, len(accepted), len(done))
			break
		}
		if time.Since(began) > 2*time.Minute {
			t.Fatalf("%d of %d requests that were answered with 202 are lost, the first is %s", len(missing), len(accepted), missing[0])
		}
	}
	var numbers []int
	for _, id := range done {
		n, _ := strconv.Atoi(id)
		numbers = append(numbers, n)
	}
	if !slices.IsSorted(numbers) || len(slices.Compact(slices.Clone(numbers))) != len(numbers) {
		t.Errorf("out of order, or twice: %v", numbers)
	}
}

// spillIntake serves over a directory, in this process.
func spillIntake(t *testing.T, dir string, cfg guard.Config, s *service, opts ...Option) (*Intake, *guard.Guard, http.Handler) {
	t.Helper()
	cfg.SpillDir, cfg.Policy.Spill = dir, true
	cfg.Policy.Breaker = breaker.Config{}
	g, err := guard.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	in, err := New(g, Config{}, append([]Option{WithDeadLetters(&letters{}), WithReplay(mux)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	mux.Handle("/", in.Defer(s))
	return in, g, mux
}

func closeBoth(t *testing.T, in *Intake, g *guard.Guard) Report {
	t.Helper()
	rep, err := in.Close(context.Background())
	_, gErr := g.Close(context.Background())
	if err := errors.Join(err, gErr); err != nil {
		t.Error(err)
	}
	return rep
}

// A stop leaves what is held on the disk and writes no dead letter; the next process
// handles it before what comes then.
func TestDiskOverAStop(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		for _, order := range []guard.Order{guard.OrderSource, guard.OrderKey} {
			dir := filepath.Join(t.TempDir(), "d")
			cfg := guard.Config{Policy: guard.Policy{Order: order}}
			s := &service{down: true}
			in, g, h := spillIntake(t, dir, cfg, s)
			var want []string
			for i := range 60 {
				body := strconv.Itoa(i)
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/x", strings.NewReader(body)))
				if w.Code == http.StatusAccepted {
					want = append(want, body)
				}
			}
			if len(want) < 40 || in.Stats().Held != len(want) {
				t.Fatalf("%s: %d accepted, %d held", order, len(want), in.Stats().Held)
			}
			in.mu.Lock()
			if in.bytes != 0 || in.listed != 0 {
				t.Errorf("%s: %d requests of %d bytes are in memory, too", order, in.listed, in.bytes)
			}
			in.mu.Unlock()
			if rep := closeBoth(t, in, g); rep.Held.Spilled != len(want) || rep.Written != 0 || len(rep.Left) != 0 {
				t.Errorf("%s: the stop left %+v", order, rep)
			}

			s = &service{down: true} // or they might be done before the next comes
			in, g, h = spillIntake(t, dir, cfg, s)
			in.Start()
			synctest.Wait() // what was found is in memory now
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/x", strings.NewReader("last")))
			if w.Code != http.StatusAccepted {
				t.Errorf("%s: one that comes behind them is answered %d, want 202", order, w.Code)
			}
			s.mu.Lock()
			s.down = false
			s.mu.Unlock()
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			if err := in.Drained(ctx); err != nil {
				t.Errorf("%s: %v, %+v", order, err, in.Stats())
			}
			cancel()
			synctest.Wait()
			if want = append(want, "last"); !slices.Equal(s.done, want) {
				t.Errorf("%s: handled %v, want %v", order, s.done, want)
			}
			w = httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/x", strings.NewReader("live")))
			if w.Code != http.StatusOK {
				t.Errorf("%s: with nothing held a request is answered %d, want 200", order, w.Code)
			}
			closeBoth(t, in, g)
		}
	})
}

// A request that is not on the disk when the intake ends is refused, and no dead letter.
func TestDiskEndsBefore(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		s := &service{down: true}
		dir := filepath.Join(t.TempDir(), "d")
		in, g, h := spillIntake(t, dir, guard.Config{}, s)
		for in.Stats().Held == 0 {
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/x", strings.NewReader("first")))
		}
		closeBoth(t, in, g)
		for _, whole := range []bool{true, false} { // or the guard ends first
			written := &letters{}
			in, g, _ = spillIntake(t, dir, guard.Config{}, s, WithDeadLetters(written)) // not started: nobody writes
			r := httptest.NewRequest(http.MethodPost, "/x", http.NoBody)
			late := &held{req: in.copy(r, nil), stored: make(chan error, 1)}
			in.reserve(0)
			if err := in.enqueue(late, 0); err != nil {
				t.Fatal(err)
			}
			if !whole {
				if _, err := g.Close(context.Background()); err != nil {
					t.Error(err)
				}
			}
			if rep := closeBoth(t, in, g); whole && rep.Held.Spilled != 1 {
				t.Errorf("%d are on the disk, want the first", rep.Held.Spilled)
			}
			if err := in.awaitDisk(late); !errors.Is(err, guard.ErrClosed) {
				t.Errorf("it ends with %v", err)
			}
			if n := len(written.list()); n != 0 {
				t.Errorf("%d dead letters", n)
			}
		}
	})
}

// A full disk is no 202.
func TestDiskFull(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		s := &service{down: true}
		in, g, h := spillIntake(t, filepath.Join(t.TempDir(), "d"), guard.Config{SpillBytes: 64 << 10}, s)
		answers := make(map[int]int)
		for range 200 {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/x", bytes.NewReader(make([]byte, 2000))))
			if answers[w.Code]++; w.Code == http.StatusServiceUnavailable && w.Header().Get(HeaderReason) != "backpressure" {
				t.Fatalf("refused for %q", w.Header().Get(HeaderReason))
			}
		}
		if n := answers[http.StatusAccepted]; n < 10 || n > 40 || answers[http.StatusServiceUnavailable] < 100 {
			t.Errorf("answers %v, with room for 64 KiB", answers)
		}
		s.mu.Lock()
		s.down = false
		s.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := in.Drained(ctx); err != nil {
			t.Error(err)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/x", bytes.NewReader(make([]byte, 2000))))
		if w.Code != http.StatusOK {
			t.Errorf("with room and nothing held a request is answered %d", w.Code)
		}
		answers[http.StatusAccepted]++ // for the count below
		synctest.Wait()
		if n := len(s.done); n != answers[http.StatusAccepted] {
			t.Errorf("%d handled, want %d", n, answers[http.StatusAccepted])
		}
		closeBoth(t, in, g)
	})
}

// A request that the disk does not take probes, and has its handler's time for that, not
// BodyTimeout: also where something in front has read its body.
func TestDiskFullProbe(t *testing.T) {
	for _, front := range []bool{false, true} {
		bubble(t, fmt.Sprint("read in front ", front), func(t *testing.T) {
			s := &service{down: true}
			in, g, h := spillIntake(t, filepath.Join(t.TempDir(), "d"), guard.Config{SpillBytes: 64 << 10}, s)
			conns := make(pipes)
			server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if front {
					body, err := io.ReadAll(req.Body)
					if err != nil {
						t.Error(err)
					}
					req.Body = io.NopCloser(bytes.NewReader(body))
				}
				h.ServeHTTP(w, req)
			})}
			go func() { _ = server.Serve(conns) }()
			client := &http.Client{Transport: &http.Transport{DialContext: conns.dial}}
			post := func() int {
				res, err := client.Post("http://server/", "text/plain", bytes.NewReader(make([]byte, 100<<10)))
				if err != nil {
					t.Fatal(err)
				}
				res.Body.Close()
				return res.StatusCode
			}
			for post() != http.StatusServiceUnavailable { // until the breaker opens
			}
			var ended error
			s.mu.Lock()
			s.down = false
			s.handle = func(_ http.ResponseWriter, req *http.Request) bool {
				select {
				case <-req.Context().Done():
					ended = req.Context().Err()
				case <-time.After(2 * in.cfg.BodyTimeout):
				}
				return false
			}
			s.mu.Unlock()
			for begun := time.Now(); post() != http.StatusOK; time.Sleep(100 * time.Millisecond) {
				if time.Since(begun) > 5*time.Minute {
					t.Fatal("no request probes")
				}
			}
			if ended != nil {
				t.Errorf("the context of a probe: %v", ended)
			}
			client.CloseIdleConnections()
			if err := server.Close(); err != nil {
				t.Error(err)
			}
			closeBoth(t, in, g)
		})
	}
}

// A disk that stalls ends no connection: the next request of the client is a new one, also where
// something in front has read the body of the first.
func TestDiskStalls(t *testing.T) {
	for _, front := range []bool{false, true} {
		bubble(t, fmt.Sprint("read in front ", front), func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "d")
			before, g, h := spillIntake(t, dir, guard.Config{}, &service{down: true})
			for before.Stats().Held == 0 {
				h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/x", strings.NewReader("held")))
			}
			closeBoth(t, before, g)

			// The next process holds what comes behind that request. Its loop writes to the disk.
			s := &service{}
			in, g, h := spillIntake(t, dir, guard.Config{}, s)
			answers := make(chan struct{})
			in.started.Do(func() {
				go func() {
					defer close(in.ran)
					<-answers
					_ = in.src.Run(context.Background(), nil)
				}()
			})
			conns := make(pipes)
			server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if front {
					body, err := io.ReadAll(req.Body)
					if err != nil {
						t.Error(err)
					}
					req.Body = io.NopCloser(bytes.NewReader(body))
				}
				h.ServeHTTP(w, req)
				time.Sleep(time.Millisecond) // as one that logs what it has answered
			})}
			go func() { _ = server.Serve(conns) }()
			dials := 0
			client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				dials++
				return conns.dial(ctx, network, address)
			}}}
			post := func(body string) int {
				res, err := client.Post("http://server/", "text/plain", strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, res.Body)
				res.Body.Close()
				return res.StatusCode
			}
			if code := post("stalled"); code != http.StatusServiceUnavailable {
				t.Errorf("without an answer of the disk: %d", code)
			}
			close(answers)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := in.Drained(ctx); err != nil {
				t.Error(err)
			}
			var ended error
			s.mu.Lock()
			s.handle = func(_ http.ResponseWriter, req *http.Request) bool {
				ended = req.Context().Err()
				return false
			}
			s.mu.Unlock()
			if code := post("live"); code != http.StatusOK || ended != nil || dials != 1 {
				t.Errorf("the next request over %d connections: %d, its context: %v", dials, code, ended)
			}
			client.CloseIdleConnections()
			if err := server.Close(); err != nil {
				t.Error(err)
			}
			closeBoth(t, in, g)
			if got := s.handled(); got != "held stalled live" {
				t.Errorf("handled %q", got)
			}
		})
	}
}

// What is read from the disk is what was written, byte by byte, whatever a client sent; and
// whatever the disk has is an error at worst.
func FuzzSpilledRequest(f *testing.F) {
	f.Add("POST", "/a/b?c=d", "shop", "k", "v", []byte("body"), []byte("{}"))
	f.Add("PUT", "/%2f\xff?\xfe", "\xff", "\x00", "\xff\x00", []byte{0xff}, []byte(`{"header":{"A":[null]},"url":{"path":"%"}}`))
	f.Fuzz(func(t *testing.T, method, target, host, key, value string, body, head []byte) {
		in := &Intake{ids: "here-"}
		p := port{in}
		in.lanes = make(map[uint64]int)
		_, _ = p.Unspill(head, body)
		at, err := url.ParseRequestURI(target)
		if err != nil || !isToken(method) {
			return
		}
		h := &held{id: "here-1", key: key, since: time.Unix(1, 2).UTC(), body: body, req: &http.Request{
			TLS: &tls.ConnectionState{}, Method: method, URL: at, RequestURI: target, Host: host, RemoteAddr: "[::1]:1", Header: http.Header{"X-A": {value, ""}, "X-B": {key}},
		}}
		first, data, err := p.Spill(h)
		if err != nil {
			t.Fatal(err)
		}
		again, err := p.Unspill(first, data)
		if err != nil {
			t.Fatal(err)
		}
		a, b := h.req, again.req
		if again.id != h.id || again.key != key || !again.since.Equal(h.since) || !bytes.Equal(again.body, body) || a.Method != b.Method ||
			!reflect.DeepEqual(a.URL, b.URL) || a.RequestURI != b.RequestURI || a.Host != b.Host || a.RemoteAddr != b.RemoteAddr || b.TLS == nil || !reflect.DeepEqual(a.Header, b.Header) {
			t.Errorf("%+v, want %+v", b, a)
		}
	})
}

func TestDiskRefused(t *testing.T) {
	g, err := guard.New(guard.Config{SpillDir: filepath.Join(t.TempDir(), "d"), Policy: guard.Policy{Spill: true}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = New(g, Config{MaxBody: 9 << 20}, WithDeadLetters(&letters{}), WithValues("k"))
	for _, want := range []string{"Policy.Spill: needs WithReplay", "Policy.Spill: not with WithValues", "Config.MaxBody: 9437184 is not within 1 and 8388608"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
