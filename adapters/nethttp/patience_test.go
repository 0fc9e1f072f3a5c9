// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// What is long, by what is normal.
func TestNormal(t *testing.T) {
	const ms = time.Millisecond
	tens := func(n int) (all []time.Duration) { // 10 ms, and one in ten 400 ms
		for i := range n {
			all = append(all, []time.Duration{10 * ms, 400 * ms}[i%10/9])
		}
		return all
	}
	same := func(n int, d time.Duration) (all []time.Duration) {
		for range n {
			all = append(all, d)
		}
		return all
	}
	for name, c := range map[string]struct {
		took []time.Duration
		left time.Duration
		from int // the first that counts, of clients in a row that leave then; 0 is none
	}{
		"nothing known, hasty":           {nil, 499 * ms, 0},
		"nothing known":                  {nil, 500 * ms, 6},
		"nothing known, 5 s":             {nil, 5 * time.Second, 1},
		"too few to know":                {same(19, 10*ms), 499 * ms, 0},
		"enough to know":                 {same(20, 10*ms), 100 * ms, 1},
		"shorter than any pause of ours": {same(20, ms), 99 * ms, 0},
		"the usual time":                 {same(100, 200*ms), 199 * ms, 0},
		"longer than usual":              {same(100, 200*ms), 200 * ms, 6},
		"just below twice":               {same(100, 200*ms), 399 * ms, 6},
		"twice":                          {same(100, 200*ms), 400 * ms, 1},
		"one in ten is slow":             {tens(100), 399 * ms, 0},
		"one in ten is slow, longer":     {tens(100), 799 * ms, 6},
		"one in ten is slow, twice":      {tens(100), 800 * ms, 1},
		"slower than Patience":           {same(100, 8*time.Second), 5 * time.Second, 1},
		"only the latest count":          {append(same(256, 4*time.Second), same(256, 200*ms)...), 400 * ms, 1},
		"the latest are slower":          {append(same(256, 200*ms), same(256, 2*time.Second)...), 1999 * ms, 0},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 { // a success begins anew
				n := new(normal)
				for _, d := range c.took {
					n.succeeded(d)
				}
				for range 3 {
					first := 0
					for i := range 20 {
						counts := n.abandoned(c.left)
						if counts && first == 0 {
							first = i + 1
						}
						if counts != (first > 0) {
							t.Fatalf("number %d does not count, number %d did", i+1, first)
						}
					}
					if first != c.from {
						t.Errorf("the first that counts is number %d, want %d", first, c.from)
					}
					n.left.Store(0)
				}
			}
		})
	}
	n := new(normal)
	for range abandonAfter {
		if n.abandoned(time.Second) {
			t.Error("counts at once")
		}
	}
	if n.succeeded(10 * ms); n.abandoned(time.Second) {
		t.Error("counts after a success")
	}
}

// hanging is a dependency that answers after a time, or not until its caller leaves.
type hanging struct {
	hangs atomic.Bool
	takes atomic.Int64
	calls atomic.Int64
}

func takes(d time.Duration) *hanging {
	h := new(hanging)
	h.takes.Store(int64(d))
	return h
}

func (h *hanging) ServeHTTP(_ http.ResponseWriter, r *http.Request) error {
	h.calls.Add(1)
	var answer <-chan time.Time
	if !h.hangs.Load() {
		timer := time.NewTimer(time.Duration(h.takes.Load()))
		defer timer.Stop()
		answer = timer.C
	}
	select {
	case <-answer:
		return nil
	case <-r.Context().Done():
		return fmt.Errorf("gateway: %w", r.Context().Err())
	}
}

// leaveAfter is one request whose client leaves.
func leaveAfter(t *testing.T, h http.Handler, d time.Duration) {
	ctx, cancel := context.WithCancel(t.Context())
	defer time.AfterFunc(d, cancel).Stop()
	defer cancel()
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, "GET", "/", nil))
}

// Clients that give up after a second do not hide a dependency that hangs, whether it
// hung from the start, hangs at once, or became slower and slower until no answer came
// in time.
func TestImpatientClients(t *testing.T) {
	for name, before := range map[string][]time.Duration{
		"from the start": nil,
		"at once":        {20 * time.Millisecond},
		"gradually":      {20 * time.Millisecond, 400 * time.Millisecond, 800 * time.Millisecond, 950 * time.Millisecond, 990 * time.Millisecond},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, quick, Config{})
			dep := new(hanging)
			h := r.in.Wrap(HandlerFunc(dep.ServeHTTP))
			var all sync.WaitGroup
			load := func(d time.Duration) { // 100 a second
				for range int(d.Seconds() * 100) {
					all.Go(func() { leaveAfter(t, h, time.Second) })
					time.Sleep(10 * time.Millisecond)
				}
			}
			for _, d := range before {
				dep.takes.Store(int64(d))
				load(4 * time.Second)
				all.Wait()
			}
			if st := r.state(); st.Breaker.State != breaker.Closed || st.Tally.Failures > 0 {
				t.Fatalf("before: %+v", st)
			}
			healthy := dep.calls.Load()
			dep.hangs.Store(true)
			load(15 * time.Second)
			// A second's calls, before the first client leaves, those until the tenth
			// has, and probes of a second each.
			if n := dep.calls.Load() - healthy; n > 100+10+15 {
				t.Errorf("%d calls in 15 s, want 125 at most", n)
			}
			if st := r.state(); st.Breaker.State == breaker.Closed {
				t.Errorf("%+v", st.Breaker)
			}
			all.Wait()
			dep.hangs.Store(false)
			dep.takes.Store(int64(20 * time.Millisecond))
			load(5 * time.Second)
			all.Wait()
			if st := r.state(); st.Breaker.State != breaker.Closed {
				t.Errorf("not closed after the recovery: %+v", st.Breaker)
			}
			r.close()
		})
	}
}

// A third of the calls hang, and their clients leave after a second.
func TestImpatientClientsOfAPartialOutage(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		well, hung := takes(20*time.Millisecond), new(hanging)
		hung.hangs.Store(true)
		good, bad := r.in.Wrap(HandlerFunc(well.ServeHTTP)), r.in.Wrap(HandlerFunc(hung.ServeHTTP))
		var all sync.WaitGroup
		for i := range 600 {
			all.Go(func() { leaveAfter(t, []http.Handler{good, good, bad}[i%3], time.Second) })
			time.Sleep(10 * time.Millisecond)
		}
		all.Wait()
		if r.in.Stats().Refused == 0 {
			t.Errorf("never open: %+v", r.state().Breaker)
		}
		r.close()
	})
}

// A healthy service whose clients change their minds stays closed: six in seven
// leave before the answer, at any time, and one in five requests takes four times as long.
func TestHastyClients(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		usual, slow := takes(500*time.Millisecond), takes(2*time.Second)
		h, long := r.in.Wrap(HandlerFunc(usual.ServeHTTP)), r.in.Wrap(HandlerFunc(slow.ServeHTTP))
		var all sync.WaitGroup
		for i := range 5000 {
			at := time.Duration(i*7919%500) * time.Millisecond
			switch {
			case i%7 == 0:
				at = time.Hour
			case i%5 == 3:
				at *= 4
			}
			all.Go(func() {
				if i%5 == 3 {
					leaveAfter(t, long, at)
				} else {
					leaveAfter(t, h, at)
				}
			})
			time.Sleep(10 * time.Millisecond)
		}
		all.Wait()
		st := r.state()
		if st.Breaker.State != breaker.Closed || r.in.Stats().Refused > 0 || usual.calls.Load()+slow.calls.Load() != 5000 {
			t.Errorf("%+v, %d calls", st.Breaker, usual.calls.Load()+slow.calls.Load())
		}
		r.close()
	})
}

// Config.Patience decides alone where it is set, an answer that has begun is given the
// longest time, and what says that it is no failure of the dependency stays none.
func TestPatience(t *testing.T) {
	wait := func(r *http.Request) { <-r.Context().Done() }
	for name, c := range map[string]struct {
		patience, left time.Duration
		h              HandlerFunc
		open           bool
	}{
		"long poll": {time.Hour, 20 * time.Second, func(_ http.ResponseWriter, r *http.Request) error { wait(r); return errBroken }, false},
		"shorter":   {50 * time.Millisecond, 50 * time.Millisecond, func(_ http.ResponseWriter, r *http.Request) error { wait(r); return errBroken }, true},
		"slow download": {0, 4 * time.Second, func(w http.ResponseWriter, r *http.Request) error {
			_, _ = io.WriteString(w, "some")
			wait(r)
			return errBroken
		}, false},
		"download that hangs": {0, 5 * time.Second, func(w http.ResponseWriter, r *http.Request) error {
			_, _ = io.WriteString(w, "some")
			wait(r)
			return errBroken
		}, true},
		"error answer": {0, time.Second, func(w http.ResponseWriter, r *http.Request) error {
			wait(r)
			w.WriteHeader(502)
			return nil
		}, true},
		"panic": {0, time.Second, func(_ http.ResponseWriter, r *http.Request) error { wait(r); panic(http.ErrAbortHandler) }, true},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, quick, Config{Patience: c.patience})
			h := r.in.Wrap(c.h)
			for range 10 {
				func() {
					defer func() { _ = recover() }()
					leaveAfter(t, h, c.left)
				}()
			}
			if st := r.state(); (st.Breaker.State == breaker.Open) != c.open {
				t.Errorf("%+v", st.Breaker)
			}
			r.close()
		})
	}
}

// A request whose client leaves when the handler has failed already is a failure.
func TestClientLeavesTooLate(t *testing.T) {
	c := &call{in: &Intake{}, took: time.Millisecond}
	if c.Excuses() {
		t.Error("excused")
	}
	c = &call{in: &Intake{}, took: time.Second, gone: true}
	for range abandonAfter + 5 {
		if !c.Excuses() {
			t.Error("one request counts for more than one")
		}
	}
}

// pipes is a listener whose connections are in memory, so that a server and its clients
// live in a bubble.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if c, ok := <-p; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (p pipes) Close() error   { close(p); return nil }
func (p pipes) Addr() net.Addr { return &net.UnixAddr{} }

func (p pipes) dial(context.Context, string, string) (net.Conn, error) {
	here, there := net.Pipe()
	p <- there
	return here, nil
}

// The same with net/http's own server and client: a dependency hangs, its clients' timeout
// is 1 s.
func TestImpatientClientsOfAServer(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		defer r.close()
		dep := takes(5 * time.Millisecond)
		conns := make(pipes)
		s := &http.Server{Handler: r.in.Wrap(HandlerFunc(dep.ServeHTTP)), ReadHeaderTimeout: time.Minute}
		defer s.Close()
		go func() { _ = s.Serve(conns) }()
		client := &http.Client{Transport: &http.Transport{DialContext: conns.dial}}
		defer client.CloseIdleConnections()
		load := func(n int, timeout func(i int) time.Duration) { // 50 a second
			var all sync.WaitGroup
			for i := range n {
				all.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), timeout(i))
					defer cancel()
					req, err := http.NewRequestWithContext(ctx, "GET", "http://server/", nil)
					if err != nil {
						t.Error(err)
						return
					}
					res, err := client.Do(req)
					if err == nil {
						res.Body.Close()
					} else if !errors.Is(err, context.DeadlineExceeded) {
						t.Error(err)
					}
				})
				time.Sleep(20 * time.Millisecond)
			}
			all.Wait()
			synctest.Wait()
		}
		second := func(int) time.Duration { return time.Second }
		load(30, second)
		dep.takes.Store(int64(200 * time.Millisecond))
		load(100, func(i int) time.Duration { // healthy, and most clients are hasty
			if i%4 == 0 {
				return time.Second
			}
			return time.Duration(i) * time.Millisecond
		})
		if st := r.state(); st.Breaker.State != breaker.Closed || r.in.Stats().Refused > 0 || dep.calls.Load() != 130 {
			t.Errorf("healthy: %d calls, %+v", dep.calls.Load(), st.Breaker)
		}
		healthy := dep.calls.Load()
		dep.hangs.Store(true)
		load(250, second)
		// 50 before the first client leaves, and some until enough have left.
		if n, st := dep.calls.Load()-healthy, r.state(); n > 60 || st.Breaker.State == breaker.Closed {
			t.Errorf("%d of 250 calls, %+v", n, st.Breaker)
		}
	})
}
