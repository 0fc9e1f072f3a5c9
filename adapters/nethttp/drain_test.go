// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// traffic is deferrable requests at a rate, whatever becomes of those before, to a
// handler that takes its time.
type traffic struct {
	r     *rig
	every time.Duration
	all   sync.WaitGroup
	n     int

	mu       sync.Mutex
	statuses map[int]int // of answers
	held     []int       // numbers of requests that were answered 202
}

func newTraffic(r *rig, takes, every time.Duration) *traffic {
	r.s.handle = func(http.ResponseWriter, *http.Request) bool { time.Sleep(takes); return false }
	return &traffic{r: r, every: every, statuses: make(map[int]int)}
}

// run sends for some time.
func (tr *traffic) run(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(tr.every) {
		i := tr.n
		tr.n++
		tr.all.Go(func() {
			res := tr.r.post(strconv.Itoa(i))
			tr.mu.Lock()
			defer tr.mu.Unlock()
			tr.statuses[res.StatusCode]++
			if res.StatusCode == http.StatusAccepted {
				tr.held = append(tr.held, i)
			}
		})
	}
}

func (tr *traffic) got(status int) int {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.statuses[status]
}

// replayed checks that what was answered 202 was handled once and in order.
func (tr *traffic) replayed() {
	tr.r.t.Helper()
	tr.all.Wait()
	tr.r.drained()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	held := make(map[string]bool)
	var want, got []string
	slices.Sort(tr.held)
	for _, i := range tr.held {
		held[strconv.Itoa(i)] = true
		want = append(want, strconv.Itoa(i))
	}
	for word := range strings.FieldsSeq(tr.r.s.handled()) {
		if held[word] {
			got = append(got, word)
		}
	}
	if !slices.Equal(got, want) {
		tr.r.t.Errorf("of %d requests that were held %d were replayed, or in another order", len(want), len(got))
	}
}

// More requests come than one worker can handle in sequence, and fewer than their
// handlers at once are any trouble for: the hold ends all the same, nobody is refused
// once the breaker is closed, and what was accepted is replayed in order.
func TestHoldEnds(t *testing.T) {
	for name, c := range map[string]struct {
		window int
		every  time.Duration
		within time.Duration
	}{
		"full":           {1024, 5 * time.Millisecond, 30 * time.Second},     // after 5.5 s, and 1024 take 20.5 s
		"without an end": {1 << 20, 5 * time.Millisecond, 100 * time.Second}, // 84 s if the look after 10 s meets the ramp's last instant
		"just too many":  {1 << 20, 19 * time.Millisecond, 30 * time.Second},
	} {
		bubble(t, name, func(t *testing.T) {
			p := quick
			p.Window = c.window
			r := newRig(t, p, Config{})
			tr := newTraffic(r, 20*time.Millisecond, c.every)
			_ = r.g.Source("http").ForceOpen(time.Second)
			tr.run(c.within)
			refused := r.in.Stats()
			for range 3 {
				if st := r.in.Stats(); st.Held > 0 {
					t.Fatalf("%s after the outage: %+v", c.within, st)
				}
				tr.run(3 * time.Second)
			}
			if st := r.in.Stats(); st.Full != 0 || st.Refused != 0 || st.Accepted != refused.Accepted {
				t.Errorf("%+v, before: %+v", st, refused)
			}
			tr.replayed()
			if n := tr.got(200) + tr.got(202); n != tr.n || tr.got(200) == 0 || tr.got(202) < 40 {
				t.Errorf("%d requests, answers %v", tr.n, tr.statuses)
			}
			r.close()
		})
	}
}

// While the worker keeps up, however slowly, nothing goes before what is held.
func TestHoldKeepsOrderWhileItEnds(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		tr := newTraffic(r, 20*time.Millisecond, 25*time.Millisecond) // 50/s, 40/s
		_ = r.g.Source("http").ForceOpen(20 * time.Second)
		tr.run(20*time.Second + 70*time.Second) // 800 at 10/s: it takes 80 s
		if st := r.in.Stats(); st.Held == 0 {
			t.Fatalf("%+v", st)
		}
		if n := tr.got(200); n != 0 {
			t.Errorf("%d requests went before what is held", n)
		}
		tr.run(20 * time.Second)
		if st := r.in.Stats(); st.Held != 0 || st.Full != 0 {
			t.Errorf("%+v", st)
		}
		tr.all.Wait()
		r.drained()
		if got := r.s.handled(); got != words("%d", 0, tr.n) {
			t.Errorf("handled %s", got)
		}
		r.close()
	})
}

// A request that is too large to be held is handled while others are held and the
// breaker is closed, and the others stay in their order.
func TestTooLargeWhileDraining(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{MaxBody: 10})
		_ = r.g.Source("http").ForceOpen(time.Second)
		tr := newTraffic(r, 20*time.Millisecond, 50*time.Millisecond)
		tr.run(time.Second)
		big := strings.Repeat("x", 11)
		r.want(r.post(big), http.StatusServiceUnavailable)
		for r.state().Holds != nil {
			time.Sleep(time.Millisecond)
		}
		r.want(r.post(big), http.StatusOK)
		r.want(r.post("behind"), http.StatusAccepted)
		tr.replayed()
		if got := r.s.handled(); !strings.HasSuffix(got, " behind") {
			t.Error(got)
		}
		if st := r.in.Stats(); st.Full != 1 {
			t.Errorf("%+v", st)
		}
		r.close()
	})
}

// The breaker opens again while requests go before what is held: they are held, and
// the queue behind the hold begins anew.
func TestOpensAgainWhileOvertaken(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		tr := newTraffic(r, 20*time.Millisecond, 5*time.Millisecond)
		_ = r.g.Source("http").ForceOpen(time.Second)
		tr.run(15 * time.Second)
		if tr.got(200) == 0 || r.in.Stats().Held == 0 {
			t.Fatalf("not what this is about: %v, %+v", tr.statuses, r.in.Stats())
		}
		tr.all.Wait()
		_ = r.g.Source("http").ForceOpen(time.Second)
		live := tr.got(200)
		tr.run(900 * time.Millisecond)
		tr.all.Wait()
		if n := tr.got(200); n != live {
			t.Errorf("%d live requests while the breaker is open", n-live)
		}
		for r.state().Holds != nil {
			time.Sleep(time.Millisecond)
		}
		for r.in.Stats().Held > 800 {
			time.Sleep(time.Millisecond)
		}
		r.want(r.post("behind"), http.StatusAccepted)
		tr.replayed()
		r.close()
	})
}

// A hold that was overtaken says nothing of the next one.
func TestNextHoldIsNotOvertaken(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		tr := newTraffic(r, 20*time.Millisecond, 5*time.Millisecond)
		_ = r.g.Source("http").ForceOpen(time.Second)
		tr.run(15 * time.Second)
		tr.replayed()
		_ = r.g.Source("http").ForceOpen(time.Hour)
		r.want(r.post("first"), http.StatusAccepted)
		r.g.Source("http/held").Pause(0)
		_ = r.g.Source("http").ForceClosed()
		r.want(r.post("second"), http.StatusAccepted)
		r.g.Source("http/held").Resume()
		r.drained()
		if got := r.s.handled(); !strings.HasSuffix(got, " first second") {
			t.Error(got[len(got)-20:])
		}
		r.close()
	})
}

// shyLimiter lets ten through each second, and asks for more patience than it needs:
// whoever does not listen has the others' turns.
type shyLimiter struct {
	mu   sync.Mutex
	next time.Time
}

func (l *shyLimiter) Admit(time.Duration) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if now.Before(l.next) {
		return 200 * time.Millisecond
	}
	l.next = now.Add(100 * time.Millisecond)
	return 0
}

// A hold that waits for a limiter is not overtaken by more requests for its turns,
// but for one now and then that finds out.
func TestLimitedHoldIsNotOvertaken(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := quick
		p.Window = 20
		r := newRig(t, p, Config{}, WithLimiter(new(shyLimiter)))
		tr := newTraffic(r, time.Millisecond, 30*time.Millisecond)
		tr.run(2 * time.Minute)
		if live := tr.got(200); live == 0 || live > 50 {
			t.Errorf("%d requests went before what is held: %v", live, tr.statuses)
		}
		if tr.got(503) < 2000 || tr.got(202) < 500 {
			t.Errorf("answers %v", tr.statuses)
		}
		tr.replayed()
		r.close()
	})
}

// Nor is one that waits for an operator, or for the time a handler asked for.
func TestWaitingHoldIsNotOvertaken(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		_ = r.g.Source("http").ForceOpen(time.Second)
		r.want(r.post("0"), http.StatusAccepted)
		r.g.Source("http/held").Pause(0)
		_ = r.g.Source("http").ForceClosed()
		for i := range 60 {
			time.Sleep(time.Second)
			r.want(r.post(strconv.Itoa(i+1)), http.StatusAccepted)
		}
		r.s.mu.Lock()
		asks := true
		r.s.handle = func(w http.ResponseWriter, _ *http.Request) bool {
			if !asks {
				return false
			}
			asks = false
			w.Header().Set("Retry-After", "60")
			w.WriteHeader(http.StatusTooManyRequests)
			return true
		}
		r.s.mu.Unlock()
		r.g.Source("http/held").Resume()
		for i := range 59 {
			time.Sleep(time.Second)
			r.want(r.post(strconv.Itoa(i+61)), http.StatusAccepted)
		}
		r.drained()
		if got := r.s.handled(); got != words("%d", 0, 120) {
			t.Error(got)
		}
		r.close()
	})
}

// One key for all is an order that nothing overtakes: what has no room is refused.
func TestOneKeyIsNeverOvertaken(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := quick
		p.Order, p.Window = guard.OrderKey, 100
		r := newRig(t, p, Config{}, WithKey(func(*http.Request) string { return "" }))
		tr := newTraffic(r, 20*time.Millisecond, 10*time.Millisecond)
		_ = r.g.Source("http").ForceOpen(time.Second)
		tr.run(30 * time.Second)
		if live, full := tr.got(200), r.in.Stats().Full; live > 0 || full == 0 {
			t.Errorf("%d live, %d refused", live, full)
		}
		tr.replayed()
		r.close()
	})
}
