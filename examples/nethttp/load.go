// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/adapters/nethttp"
	"github.com/stormguard-mq/stormguard/breaker"
)

// plan is one run: requests at a rate per second, with an outage in the middle.
type plan struct {
	rate   int
	outage time.Duration
}

const (
	warmUp   = 500 * time.Millisecond
	cool     = time.Second // time after the last replay
	patience = 2 * time.Minute
	quiet    = 20 * time.Millisecond
	inFlight = 1024 // most requests without an answer; above it no more are sent
)

// loaded is how long the load continues after the dependency is back, if the hold is not
// empty earlier. It covers the longest open period that an outage leaves, the ramp, and
// some spare time, and is less than patience. A machine that is too slow for the rate never
// empties the hold under load.
func (p plan) loaded() time.Duration { return min(3*p.outage/2, 30*time.Second) + 15*time.Second }

// figures are the results of a run. Times are in milliseconds.
type figures struct {
	Rate       int     `json:"rate"`
	OutageS    float64 `json:"outage_s"`
	Requests   int     `json:"requests"`
	Answered   int     `json:"answered_200"`
	Accepted   int     `json:"accepted_202"`
	Refused    int     `json:"refused_503"`
	Failed     int     `json:"failed_500"`
	Other      int     `json:"other"`
	Unsent     int     `json:"unsent"` // requests not sent, because inFlight were waiting
	Calls      int     `json:"calls_while_open"`
	Probes     int     `json:"probes_while_open"`
	P50        float64 `json:"degraded_p50_ms"`
	P99        float64 `json:"degraded_p99_ms"`
	Max        float64 `json:"degraded_max_ms"`
	PlainP99   float64 `json:"plain_p99_ms"` // p99 of an unguarded handler at the same time
	Replayed   int     `json:"replayed"`
	Twice      int     `json:"replayed_twice"`
	Missing    int     `json:"never_replayed"`
	OutOfOrder int     `json:"out_of_order"`
	NoHeader   int     `json:"without_hold_header"`
	Gap        float64 `json:"gap_ms"`    // from the return of the dependency to its first call
	Closed     float64 `json:"closed_ms"` // from the return of the dependency to the close of the breaker
	Drained    float64 `json:"drained_ms"`
	Unloaded   bool    `json:"drained_without_load"` // the hold was drained only after the load had ended
}

func (f *figures) print(w io.Writer) {
	fmt.Fprintf(w, "%d requests at %d/s, dependency down for %gs\n", f.Requests, f.Rate, f.OutageS)
	fmt.Fprintf(w, "answers: %d handled, %d held (202), %d refused (503), %d failed (500), %d other; %d not sent\n", f.Answered, f.Accepted, f.Refused, f.Failed, f.Other, f.Unsent)
	fmt.Fprintf(w, "degraded answers: p50 %.2f ms, p99 %.2f ms, max %.2f ms (a plain handler beside them: p99 %.2f ms)\n", f.P50, f.P99, f.Max, f.PlainP99)
	fmt.Fprintf(w, "dependency while open: %d calls, %d of them probes\n", f.Calls, f.Probes)
	fmt.Fprintf(w, "held: %d replayed, %d twice, %d never, %d out of order\n", f.Replayed, f.Twice, f.Missing, f.OutOfOrder)
	fmt.Fprintf(w, "back: first call after %.0f ms (the gap), breaker closed after %.0f ms, hold drained after %.0f ms\n", f.Gap, f.Closed, f.Drained)
	if f.Unloaded {
		fmt.Fprintln(w, "this machine is too slow for the rate: the hold was drained when the load had ended")
	}
}

// check reports wrong results. It checks no times, since they depend on the machine.
func (f *figures) check() error {
	var errs []error
	wrong := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	wrong(f.Calls != f.Probes, "%d calls while the breaker was open, %d probes", f.Calls, f.Probes)
	wrong(f.Twice+f.Missing+f.OutOfOrder > 0, "of %d requests answered 202, %d were replayed twice, %d never, %d out of order", f.Accepted, f.Twice, f.Missing, f.OutOfOrder)
	wrong(f.NoHeader > 0, "%d answers 202 do not say what they promise", f.NoHeader)
	wrong(f.Accepted == 0 || f.Refused == 0, "%d requests held and %d refused: the outage was not seen", f.Accepted, f.Refused)
	wrong(f.Other > 0, "%d answers of another kind", f.Other)
	return errors.Join(errs...)
}

// gateway is the dependency.
type gateway struct {
	mu    sync.Mutex
	down  bool
	calls int
	first time.Time // time of the first call after the dependency came back
	back  time.Time
	done  []int // handled orders, in order
}

func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls++
	if g.down || err != nil {
		http.Error(w, "down", http.StatusServiceUnavailable)
		return
	}
	if !g.back.IsZero() && g.first.IsZero() {
		g.first = time.Now()
	}
	if n, err := strconv.Atoi(string(body)); err == nil {
		g.done = append(g.done, n)
	}
}

func (g *gateway) set(down bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.down = down
	if !down {
		g.back = time.Now()
	}
}

func (g *gateway) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.calls
}

// answer is the answer that a client got.
type answer struct {
	seq    int
	status int
	hold   string
	id     int // the request's number in the hold
	sent   time.Time
	took   time.Duration
}

// load sends requests without waiting for earlier answers, up to inFlight at a time.
type load struct {
	mu      sync.Mutex
	answers []answer
	err     error
	unsent  int // belongs to send's goroutine until it returns
}

func (l *load) send(ctx context.Context, addr string, rate int, client *http.Client) {
	var senders sync.WaitGroup
	defer senders.Wait()
	start := time.Now()
	room := make(chan struct{}, inFlight)
	send := func(seq int) {
		defer func() { <-room }()
		a, err := ask(context.WithoutCancel(ctx), addr, client, seq)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.answers = append(l.answers, a)
		if l.err == nil {
			l.err = err
		}
	}
	come := func(seq int) {
		select {
		case room <- struct{}{}:
			senders.Go(func() { send(seq) })
		default:
			l.unsent++
		}
	}
	for seq := 0; ctx.Err() == nil; seq++ {
		time.Sleep(time.Until(start.Add(time.Duration(seq) * time.Second / time.Duration(rate))))
		if seq%plainEvery == 0 {
			come(plain)
		}
		come(seq)
	}
}

// With every tenth request a plain request goes to an unguarded handler. It shows how long
// the machine takes for any answer.
const (
	plainEvery = 10
	plain      = -1
)

func ask(ctx context.Context, addr string, client *http.Client, seq int) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	method, path, body := http.MethodGet, "/balance", ""
	switch {
	case seq < 0:
		path = "/healthz"
	case seq%2 == 0:
		method, path, body = http.MethodPost, "/orders", strconv.Itoa(seq)
	default:
	}
	req, err := http.NewRequestWithContext(ctx, method, addr+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	a := answer{seq: seq, sent: time.Now()}
	res, err := client.Do(req)
	if err != nil {
		return a, err
	}
	_, err = io.Copy(io.Discard, res.Body)
	_ = res.Body.Close()
	a.took, a.status, a.hold = time.Since(a.sent), res.StatusCode, res.Header.Get(guardhttp.HeaderHold)
	if id := res.Header.Get(guardhttp.HeaderHoldID); id != "" {
		_, n, _ := strings.Cut(id, "-")
		a.id, err = strconv.Atoi(n)
	}
	return a, err
}

func (p plan) run(ctx context.Context) (f figures, err error) {
	ctx, cancel := context.WithTimeout(ctx, p.outage+patience)
	defer cancel()
	gw := &gateway{}
	server, addr, err := listen(ctx, gw)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, server.Shutdown(context.WithoutCancel(ctx))) }()
	// The window has room for all orders of the outage, of the open period after it, and of
	// the drain.
	window := min(1<<20, int(float64(p.rate)*(2*p.outage.Seconds()+30)))
	s, err := openShop(ctx, addr, window)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, s.close(context.WithoutCancel(ctx))) }()

	client := newClient()
	defer client.CloseIdleConnections()
	l := &load{}
	sending, stop := context.WithCancel(ctx)
	defer stop()
	var sender sync.WaitGroup
	sender.Go(func() { l.send(sending, s.addr, p.rate, client) })
	defer sender.Wait()
	defer stop()

	f = figures{Rate: p.rate, OutageS: p.outage.Seconds()}
	pause(ctx, warmUp)
	gw.set(true)
	down := time.Now()
	calls, probes := s.still(ctx, gw) // the breaker is open
	open := time.Now()
	pause(ctx, p.outage-time.Since(down))
	calls2, probes2 := s.still(ctx, gw)
	f.Calls, f.Probes = calls2-calls, probes2-probes
	gw.set(false)
	back := time.Now()
	defer time.AfterFunc(p.loaded(), stop).Stop()
	if err := s.until(ctx, breaker.Closed); err != nil {
		return f, err
	}
	f.Closed = ms(time.Since(back))
	if err := s.payments.Drained(ctx); err != nil {
		return f, fmt.Errorf("not drained: %w: %+v", err, s.g.Source("payments/held").State())
	}
	f.Drained, f.Unloaded = ms(time.Since(back)), sending.Err() != nil
	pause(ctx, cool)
	stop()
	sender.Wait()
	if err := s.payments.Drained(ctx); err != nil {
		return f, err
	}
	f.Gap = ms(gw.first.Sub(back))
	f.Unsent = l.unsent
	f.count(l.answers, gw.done, open, back)
	return f, errors.Join(l.err, ctx.Err())
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func ms(d time.Duration) float64 { return math.Round(float64(d)/1e4) / 100 }

func (s *shop) until(ctx context.Context, want breaker.State) error {
	for s.g.Source("payments").State().Breaker.State != want {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("the breaker does not become %s: %w", want, err)
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// still waits until the breaker is open and no call is in progress. It then returns the
// numbers of calls and probes.
func (s *shop) still(ctx context.Context, gw *gateway) (calls, probes int) {
	for ctx.Err() == nil {
		time.Sleep(time.Millisecond)
		live, held := s.g.Source("payments").State(), s.g.Source("payments/held").State()
		if live.Breaker.State != breaker.Open || live.Account.Processing+held.Account.Processing > 0 || live.Holds[0].Until < quiet {
			continue
		}
		calls, probes = gw.count(), int(live.Tally.Probes+held.Tally.Probes)
		again := s.g.Source("payments").State()
		if again.Breaker.Generation == live.Breaker.Generation && again.Holds[0].Until > 0 {
			return calls, probes
		}
	}
	return calls, probes
}

// count compares the answers with the calls that the dependency saw.
func (f *figures) count(answers []answer, done []int, open, back time.Time) {
	var degraded, plains []time.Duration
	place := make(map[int]int) // number of each held order
	for _, a := range answers {
		during := a.sent.After(open) && a.sent.Before(back)
		if a.seq == plain {
			if during {
				plains = append(plains, a.took)
			}
			continue
		}
		f.Requests++
		switch a.status {
		case http.StatusOK:
			f.Answered++
		case http.StatusAccepted:
			f.Accepted++
			place[a.seq] = a.id
			if a.hold != guardhttp.HoldMemory || a.id == 0 {
				f.NoHeader++
			}
		case http.StatusServiceUnavailable:
			f.Refused++
		case http.StatusInternalServerError:
			f.Failed++
		default:
			f.Other++
		}
		if during && (a.status == http.StatusAccepted || a.status == http.StatusServiceUnavailable) {
			degraded = append(degraded, a.took)
		}
	}
	seen := make(map[int]int)
	last := 0
	for _, seq := range done {
		at, ok := place[seq]
		if !ok {
			continue // the order was handled while its client waited
		}
		if seen[seq]++; seen[seq] > 1 {
			f.Twice++
			continue
		}
		f.Replayed++
		if at < last {
			f.OutOfOrder++
		}
		last = at
	}
	f.Missing = f.Accepted - f.Replayed
	slices.Sort(degraded)
	slices.Sort(plains)
	if n := len(plains); n > 0 {
		f.PlainP99 = ms(plains[n*99/100])
	}
	if n := len(degraded); n > 0 {
		f.P50, f.P99, f.Max = ms(degraded[n/2]), ms(degraded[n*99/100]), ms(degraded[n-1])
	}
}
