// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/operator"
)

// carrier is that of one process, which the test plays the fleet for.
type carrier struct {
	mu       sync.Mutex
	orders   []operator.Carried
	answers  map[string]map[string]string
	watchers []func()
	others   []operator.Member
	told     int                                             // how often it was answered
	back     time.Duration                                   // by how much the wall clock was set back
	reply    func(o operator.Carried) (process, said string) // what another process answers at once
}

func (*carrier) Place() (name, zone string) { return "billing-1", "z1" }

func (c *carrier) Members() []operator.Member {
	return append([]operator.Member{{Name: "billing-1", Zone: "z1", Heard: true}}, c.others...)
}

func (c *carrier) Give(o operator.Carried, _, _, _ string) error {
	c.put(o)
	if c.reply != nil {
		process, said := c.reply(o)
		c.say(o.ID, process, said)
	}
	return nil
}

func (c *carrier) put(orders ...operator.Carried) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.orders = append(c.orders, orders...)
	for _, f := range c.watchers {
		f()
	}
}

func (c *carrier) Answer(id, text string) error {
	c.say(id, "billing-1", text)
	return nil
}

func (c *carrier) say(id, process, text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told++
	if c.answers == nil {
		c.answers = make(map[string]map[string]string)
	}
	if c.answers[id] == nil {
		c.answers[id] = make(map[string]string)
	}
	c.answers[id][process] = text[:min(len(text), 248)] // as a fleet does
	for _, f := range c.watchers {
		f()
	}
}

func (c *carrier) Answers(id string) map[string]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.answers[id])
}

func (c *carrier) InForce() []operator.Carried {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := slices.Clone(c.orders)
	for i := range all {
		all[i].Until = all[i].Until.Add(c.back)
	}
	return slices.DeleteFunc(all, func(o operator.Carried) bool { return !time.Now().Before(o.Until) })
}

func (c *carrier) Watch(f func()) (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watchers = append(c.watchers, f)
	return func() {}
}

func (*carrier) Routes() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who, _ := operator.From(r.Context())
		operator.Answer(w, http.StatusOK, r.Method+" "+r.URL.Path+" by "+who.Token)
	})
}

// The console answers what is asked of the fleet, by the console's rules of who may ask.
func TestFleetBelowTheConsole(t *testing.T) {
	const secret = "0123456789abcdef"
	r := newRig(t, console.Config{Fleet: new(carrier), Tokens: []console.Token{{Name: "ann", Secret: secret}}}, "orders")
	defer r.close()
	defer r.c.Close()
	for _, c := range []struct{ method, token, kind, want string }{
		{http.MethodGet, secret, "", "200 \"GET /fleet/status by ann\""},
		{http.MethodPost, secret, "application/json", "200 \"POST /fleet/status by ann\""},
		{http.MethodGet, "", "", "401 "},
		{http.MethodGet, "another one of 16", "", "401 "},
		{http.MethodPost, secret, "text/plain", "415 "},
	} {
		req := toLoopback(c.method, "/fleet/status", "")
		req.Header.Set("Content-Type", c.kind)
		if c.token != "" {
			req.Header.Set("Authorization", "Bearer "+c.token)
		}
		w := httptest.NewRecorder()
		r.c.ServeHTTP(w, req)
		if got := fmt.Sprintf("%d %s", w.Code, w.Body); !strings.HasPrefix(got, c.want) {
			t.Errorf("%+v: %s", c, got)
		}
	}
	alone := newRig(t, console.Config{}, "orders")
	defer alone.close()
	defer alone.c.Close()
	if status := alone.ask(http.MethodGet, "/fleet/status", "", nil); status != http.StatusNotFound {
		t.Errorf("without a fleet: %d", status)
	}
}

func carried(id, order string, d time.Duration) operator.Carried {
	return operator.Carried{ID: id, Order: order, Until: time.Now().Add(d)}
}

// Of two orders that come late and together the last one decides, and one that is heard
// after a later one of its kind does nothing any more.
func TestLateOrders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := new(carrier)
		r := newRig(t, console.Config{Fleet: c}, "orders", "refunds")
		defer r.close()
		defer r.c.Close()
		state := func() string { synctest.Wait(); return r.source("orders").State + " " + r.source("refunds").State }
		c.put(carried("1", `{"action":"pause","sources":["*"],"for":"30m","in":"fleet"}`, 10*time.Minute),
			carried("2", `{"action":"resume","sources":["refunds"],"in":"fleet"}`, 10*time.Minute))
		if got := state(); got != "paused running" {
			t.Error(got)
		}
		c.mu.Lock() // heard late, and in front of the others by its stamp
		c.orders = append([]operator.Carried{carried("0", `{"action":"pause","sources":["refunds"],"for":"30m","in":"fleet"}`, 10*time.Minute)}, c.orders...)
		c.mu.Unlock()
		time.Sleep(time.Second)
		if got := state(); got != "paused running" {
			t.Error("after an order that is older:", got)
		}
		c.put(carried("3", `{"action":"pause","sources":["refunds"],"for":"30m","in":"zone:z2"}`, 10*time.Minute),
			carried("4", `{"action":"dance","sources":["*"],"in":"fleet"}`, 10*time.Minute),
			carried("5", `{"action":"pause","sources":["*"],"`+strings.Repeat("x", 300)+`":1}`, 10*time.Minute))
		if got := state(); got != "paused running" {
			t.Error("after an order to another zone:", got)
		}
		for id, want := range map[string]string{"0": `"sources":1`, "1": `"sources":2`, "2": `"sources":1`, "4": `"dance\" is not one of`} {
			if got := c.Answers(id)["billing-1"]; !strings.Contains(got, want) {
				t.Errorf("order %s: %s", id, got)
			}
		}
		var long console.Answer
		if err := json.Unmarshal([]byte(c.Answers("5")["billing-1"]), &long); err != nil || !strings.Contains(long.Error, "unknown field") {
			t.Errorf("an answer with a long error: %v %q", err, c.Answers("5"))
		}
		var audit []console.Entry
		r.ask(http.MethodGet, "/audit", "", &audit)
		var done []string
		for _, e := range audit {
			if e.Who != "the fleet" {
				t.Errorf("%+v", e)
			}
			done = append(done, fmt.Sprint(e.Order, ": ", len(e.Results)))
		}
		// What the last orders decide is done; the others are written down too.
		if want := []string{"pause * in fleet for 30m0s: 1", "resume refunds in fleet: 1", "pause refunds in fleet for 30m0s: 0"}; !slices.Equal(done, want) {
			t.Errorf("the audit has %q, want %q", done, want)
		}
		if got := c.Answers("3"); len(got) != 0 {
			t.Errorf("an order to another zone is answered: %v", got)
		}
		time.Sleep(9 * time.Minute)
		if got := state(); got != "paused running" {
			t.Error("before the end:", got)
		}
		time.Sleep(time.Minute)
		if got := state(); got != "running running" {
			t.Error("after the end:", got)
		}
	})
}

// An order that is carried out once is not carried out again by the next run of the
// process, but a pause that still counts is.
func TestOrdersOverARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := new(carrier)
		credits := func(n float64) {
			t.Helper()
			r := newRig(t, console.Config{Fleet: c}, "orders")
			time.Sleep(time.Second)
			s := r.source("orders")
			r.c.Close()
			r.close()
			if s.Credits < n || s.Credits > n+1 || s.State != "paused" {
				t.Errorf("%v credits, want %v, and %s", s.Credits, n, s.State)
			}
		}
		c.put(carried("1", `{"action":"credits","sources":["*"],"count":7,"in":"fleet"}`, time.Minute),
			carried("2", `{"action":"pause","sources":["*"],"for":"30m","in":"fleet"}`, time.Minute))
		credits(27)
		credits(20)

		// The answer of the run before comes later than the order.
		c.put(carried("3", `{"action":"credits","sources":["*"],"count":7,"in":"fleet"}`, time.Minute))
		time.Sleep(time.Millisecond)
		credits(20)
		if got := c.Answers("3")["billing-1"]; !strings.Contains(got, "began after the order") {
			t.Errorf("the order that is left is answered by %q", got)
		}
	})
}

// A close is known for as long as the force that it ended. A process that starts again meanwhile
// ends a force by it, and leaves a breaker alone that has tripped since.
func TestCloseAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before := new(carrier)
		r := newRig(t, console.Config{Fleet: before}, "orders")
		all := []string{"*"}
		r.order(console.Order{Action: console.Open, Sources: all, For: console.Duration(24 * time.Hour), In: "fleet"})
		time.Sleep(30 * time.Minute)
		r.order(console.Order{Action: console.Close, Sources: all, In: "fleet"})
		if b := r.source("orders").Breaker; b.State != "closed" || b.Forced {
			t.Errorf("after the close: %+v", b)
		}
		r.c.Close()
		r.close()
		time.Sleep(6 * time.Hour)

		again := new(carrier) // it has no orders before it knows the fleet's time
		r = newRig(t, console.Config{Fleet: again}, "orders", "refunds")
		defer r.close()
		defer r.c.Close()
		r.fails.Store(true)
		for i := range 5 {
			r.in["orders"] <- i
		}
		time.Sleep(20 * time.Second)
		for _, s := range r.g.Sources() { // as a guard's state brings back a force
			if s.Name() == "refunds" {
				if err := s.ForceOpen(time.Hour); err != nil {
					t.Fatal(err)
				}
			}
		}
		tripped := r.source("orders").Breaker
		if tripped.State == "closed" {
			t.Fatalf("it has not tripped: %+v", tripped)
		}
		again.put(before.InForce()...)
		synctest.Wait()
		if b := r.source("orders").Breaker; b.State != tripped.State || b.Since != tripped.Since {
			t.Errorf("a breaker that tripped after the close: %+v, before it was heard: %+v", b, tripped)
		}
		if b := r.source("refunds").Breaker; b.State != "closed" || b.Forced {
			t.Errorf("a forced breaker: %+v", b)
		}

		r.order(console.Order{Action: console.Close, Sources: all, In: "fleet"})
		if b := r.source("orders").Breaker; b.State != "closed" {
			t.Errorf("after a close that is later than the start: %+v", b)
		}
	})
}

// A fleet's close or resume that a process hears again after a restart leaves alone what a person
// has forced or paused since in this process, and a guard's state has brought back.
func TestOldOrderLeavesWhatCameLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := new(carrier)
		r := newRig(t, console.Config{Fleet: c}, "orders")
		defer r.close()
		defer r.c.Close()
		s := r.g.Sources()[0]
		s.Pause(8 * time.Hour)
		if err := s.ForceOpen(8 * time.Hour); err != nil {
			t.Fatal(err)
		}
		c.put(carried("1", `{"action":"close","sources":["*"],"over":"24h59m","in":"fleet"}`, 19*time.Hour),
			carried("2", `{"action":"pause","sources":["*"],"for":"30m","over":"24h30m","in":"fleet"}`, 19*time.Hour),
			carried("3", `{"action":"resume","sources":["*"],"over":"24h59m","in":"fleet"}`, 19*time.Hour))
		time.Sleep(time.Minute)
		if now := r.source("orders"); now.State != "paused" || !now.Breaker.Forced {
			t.Errorf("%s, %+v", now.State, now.Breaker)
		}
	})
}

// Who does not answer is named at once if it is silent, and after five seconds if it is
// heard; a dry run asks nobody.
func TestSilentProcesses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &carrier{others: []operator.Member{{Name: "away", Zone: "z2"}}}
		r := newRig(t, console.Config{Fleet: c}, "orders")
		defer r.close()
		defer r.c.Close()
		o := console.Order{Action: console.Pause, Sources: []string{"*"}, In: "fleet", DryRun: true}
		if out := r.order(o); len(out.Processes) != 2 || len(c.InForce()) != 0 {
			t.Errorf("%+v %v", out, c.InForce())
		}
		o.DryRun = false
		took := func(want time.Duration, silent ...string) {
			t.Helper()
			began := time.Now()
			out := r.order(o)
			if len(out.Processes) != 1 || out.Processes[0].Sources != 1 || !slices.Equal(out.Silent, silent) || time.Since(began) != want {
				t.Errorf("%+v after %v", out, time.Since(began))
			}
		}
		took(0, "away")
		c.others[0].Heard = true
		took(5*time.Second, "away")
		o.In = "zone:z1"
		took(0)
		c.others = append(c.others, operator.Member{Name: "new"}) // nobody has heard its zone
		took(0, "new")
		if status := r.ask(http.MethodPost, "/order", `{"action":"pause","sources":["*"],"in":"zone:z9"}`, nil); status != http.StatusNotFound {
			t.Error("a zone without processes:", status)
		}
	})
}

// An order that a process cannot read, as one of a later version, is answered once.
func TestUnreadableOrderIsAnsweredOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := new(carrier)
		r := newRig(t, console.Config{Fleet: c}, "orders")
		defer r.close()
		defer r.c.Close()
		c.put(operator.Carried{ID: "1", Order: `{"action":"pause","sources":["*"],"in":"fleet","later":true}`, Until: time.Now().Add(time.Hour)})
		time.Sleep(10 * time.Second)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.told != 1 {
			t.Errorf("answered %d times: %v", c.told, c.answers)
		}
	})
}

// Of two pauses, or two forced breakers, the later decides also where it is the shorter one:
// the earlier does not come back when it is over.
func TestLaterShorterOrders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := new(carrier)
		r := newRig(t, console.Config{Fleet: c}, "orders")
		defer r.close()
		defer r.c.Close()
		for _, d := range []time.Duration{2 * time.Hour, time.Minute} {
			r.order(console.Order{Action: console.Pause, Sources: []string{"*"}, In: "fleet", For: console.Duration(d)})
		}
		if got := r.source("orders").State; got != "paused" {
			t.Error("in the second order's time:", got)
		}
		time.Sleep(61 * time.Second)
		if got := r.source("orders").State; got != "running" {
			t.Error("after it:", got)
		}
		r.end("orders") // and takes with it what the guard remembers of the first
		r.open("orders")
		time.Sleep(time.Hour)
		if got := r.source("orders").State; got != "running" {
			t.Error("an hour later:", got)
		}
		c.put(carried("a", `{"action":"pause","sources":["*"],"for":"2h","in":"fleet"}`, 2*time.Hour))
		time.Sleep(time.Second)
		r.end("orders")
		c.put(carried("b", `{"action":"pause","sources":["*"],"for":"1m","in":"fleet","over":"1h58m"}`, 119*time.Minute))
		time.Sleep(2 * time.Minute)
		r.open("orders") // elsewhere while the second order lasted
		time.Sleep(time.Second)
		if got := r.source("orders").State; got != "running" {
			t.Error("of a source that comes back after the second order:", got)
		}
		for _, d := range []time.Duration{2 * time.Hour, time.Minute} {
			r.order(console.Order{Action: console.Open, Sources: []string{"*"}, In: "fleet", For: console.Duration(d)})
		}
		if b := r.source("orders").Breaker; !b.Forced || b.Until > 60 {
			t.Errorf("%+v", b)
		}
		time.Sleep(61 * time.Second)
		if b := r.source("orders").Breaker; b.Until > 0 { // a probe ends it
			t.Errorf("after the second order: %+v", b)
		}
	})
}

// Of two orders whose givers had not heard of each other the later decides, also where it ends
// first: the earlier does not come back, whichever was heard first.
func TestLaterOrderEndsFirst(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprint("the earlier is heard late: ", late), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := new(carrier)
				r := newRig(t, console.Config{Fleet: c}, "orders")
				defer r.close()
				defer r.c.Close()
				free := func(when, name string) {
					t.Helper()
					if s := r.source(name); s.State != "running" || s.Breaker.Forced || s.Breaker.State != "closed" {
						t.Errorf("%s: %s is %s, and its breaker %+v", when, name, s.State, s.Breaker)
					}
				}
				earlier := []operator.Carried{
					carried("1", `{"action":"pause","sources":["*"],"for":"2h","in":"fleet","over":"23h"}`, 25*time.Hour),
					carried("2", `{"action":"open","sources":["*"],"for":"2h","in":"fleet","over":"23h"}`, 25*time.Hour),
				}
				later := []operator.Carried{
					carried("3", `{"action":"resume","sources":["*"],"in":"fleet","over":"24h59m"}`, 25*time.Hour),
					carried("4", `{"action":"close","sources":["*"],"in":"fleet","over":"24h59m"}`, 25*time.Hour),
				}
				if late {
					c.put(later...)
					time.Sleep(time.Second)
					c.mu.Lock()
					c.orders = append(earlier, c.orders...)
					c.mu.Unlock()
				} else {
					c.put(append(earlier, later...)...)
				}
				time.Sleep(time.Second)
				free("in the later ones' time", "orders")
				time.Sleep(time.Minute)
				free("after it", "orders")
				r.end("orders")
				r.open("orders")
				r.open("refunds")
				time.Sleep(time.Second)
				free("after a rebalance", "orders")
				free("that begins after it", "refunds")
				c.put(carried("5", `{"action":"pause","sources":["*"],"for":"1m","in":"fleet"}`, time.Minute))
				time.Sleep(time.Second)
				if got := r.source("orders").State; got != "paused" {
					t.Error("after one that is later than all:", got)
				}
			})
		})
	}
}

// A later order decides also where the earlier is heard after the later one's time, and in a
// process that begins after it; an order of one process that is later than both stands.
func TestOverruledOrderIsHeardLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := new(carrier)
		r := newRig(t, console.Config{Fleet: c}, "orders")
		all := []string{"*"}
		given := time.Now().Add(25 * time.Hour)
		time.Sleep(time.Second)
		r.order(console.Order{Action: console.Resume, Sources: all, In: "fleet"})
		r.order(console.Order{Action: console.Close, Sources: all, In: "fleet"})
		time.Sleep(2 * time.Hour)
		c.mu.Lock() // in front of the others by their stamps
		c.orders = append([]operator.Carried{
			{ID: "1", Order: `{"action":"pause","sources":["*"],"for":"24h","in":"fleet","over":"1h"}`, Until: given},
			{ID: "2", Order: `{"action":"open","sources":["*"],"for":"24h","in":"fleet","over":"1h"}`, Until: given},
		}, c.orders...)
		c.mu.Unlock()
		free := func(when string) {
			t.Helper()
			time.Sleep(time.Second)
			if s := r.source("orders"); s.State != "running" || s.Breaker.Forced || s.Breaker.State != "closed" {
				t.Errorf("%s it is %s, and its breaker %+v", when, s.State, s.Breaker)
			}
		}
		free("when they are heard late")
		r.c.Close()
		r.close()
		r = newRig(t, console.Config{Fleet: c}, "orders")
		defer func() { r.c.Close(); r.close() }()
		free("after a restart")
		r.order(console.Order{Action: console.Pause, Sources: all, For: console.Duration(time.Hour)})
		c.mu.Lock() // given an hour ago, and heard now
		c.orders = append(c.orders, operator.Carried{ID: "3", Order: `{"action":"resume","sources":["*"],"in":"fleet","over":"24h59m0s"}`, Until: time.Now().Add(24 * time.Hour)})
		c.mu.Unlock()
		time.Sleep(time.Second)
		if got := r.source("orders").State; got != "paused" {
			t.Errorf("after an order of this process, and an earlier of the fleet that is heard late, it is %s", got)
		}
	})
}

// An order of one process stands, also over a rebalance, against the fleet's orders before it,
// and not against those after it.
func TestLocalOrderAfterTheFleets(t *testing.T) {
	for name, c := range map[string]struct {
		before, local string
		want          string
	}{
		"a pause after a resume": {`{"action":"resume","sources":["*"],"in":"fleet"}`, console.Pause, "paused"},
		"a resume after a pause": {`{"action":"pause","sources":["*"],"for":"2h","in":"fleet"}`, console.Resume, "running"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := new(carrier)
				r := newRig(t, console.Config{Fleet: f}, "orders")
				defer r.close()
				defer r.c.Close()
				f.put(carried("1", c.before, 2*time.Hour))
				time.Sleep(time.Second)
				o := console.Order{Action: c.local, Sources: []string{"*"}}
				if c.local == console.Pause {
					o.For = console.Duration(time.Hour)
				}
				r.order(o)
				r.end("orders")
				r.open("orders")
				time.Sleep(time.Second)
				if got := r.source("orders").State; got != c.want {
					t.Errorf("after a rebalance: %s, want %s", got, c.want)
				}
				if r.open("refunds"); c.local == console.Resume { // which the order was not about
					time.Sleep(time.Second)
					if got := r.source("refunds").State; got != "paused" {
						t.Errorf("another source: %s", got)
					}
				}
				f.put(carried("2", `{"action":"pause","sources":["*"],"for":"30m","in":"fleet"}`, 30*time.Minute),
					carried("3", `{"action":"resume","sources":["*"],"in":"fleet"}`, 30*time.Minute))
				time.Sleep(time.Second)
				if got := r.source("orders").State; got != "running" {
					t.Errorf("after later orders of the fleet: %s", got)
				}
			})
		})
	}
}

// An order that is over stays over when the wall clock is set back, also when no other is in
// force and the fleet has forgotten the answers to it.
func TestClockSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := new(carrier)
		r := newRig(t, console.Config{Fleet: c}, "orders")
		defer r.close()
		defer r.c.Close()
		c.put(carried("1", `{"action":"credits","sources":["*"],"count":7,"in":"fleet"}`, time.Minute),
			carried("2", `{"action":"pause","sources":["*"],"for":"5m","over":"24h55m","in":"fleet"}`, 25*time.Hour))
		time.Sleep(10 * time.Minute)
		check := func(when string) {
			t.Helper()
			s := r.source("orders")
			if s.Credits < 27 || s.Credits >= 30 || s.State != "running" {
				t.Errorf("%s: %v credits, and it is %s", when, s.Credits, s.State)
			}
		}
		check("after the orders")
		c.mu.Lock()
		c.answers, c.back = nil, 9*time.Minute+30*time.Second
		c.mu.Unlock()
		r.open("refunds")
		time.Sleep(time.Second)
		check("after the clock was set back")
		if got := r.source("refunds").State; got != "running" {
			t.Errorf("a source that begins then is %s", got)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.answers) > 0 {
			t.Errorf("answered again: %v", c.answers)
		}
	})
}

// A change of the quarantine is asked of all processes of the fleet. Those in which the rule is
// not in force, or that do not answer, are named.
func TestQuarantineOfAFleet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &carrier{others: []operator.Member{{Name: "billing-2", Heard: true}, {Name: "away"}}}
		r := newRig(t, console.Config{Fleet: c}, "orders")
		defer r.close()
		defer r.c.Close()
		change := func(body, want string) {
			t.Helper()
			var said struct {
				Error string `json:"error"`
			}
			if status := r.ask(http.MethodPost, "/quarantine", body, &said); status != http.StatusBadGateway || said.Error != want {
				t.Errorf("%d %s\nwant %s", status, said.Error, want)
			}
		}
		change(`{"rule":"key=a"}`, "quarantine add key=a: done here and sent, but no answer from away, billing-2")
		answers := `{}`
		c.reply = func(operator.Carried) (process, said string) { return "billing-2", answers }
		change(`{"rule":"key=a","remove":true}`, "quarantine remove key=a: done here and sent, but no answer from away")
		c.others = c.others[:1]
		if status := r.ask(http.MethodPost, "/quarantine", `{"rule":"key=a"}`, nil); status != http.StatusOK {
			t.Error("all have it:", status)
		}
		answers = `{"error":"not on its list"}`
		change(`{"rule":"key=b"}`, "quarantine add key=b: done here and sent, but not by billing-2: not on its list")
		if got := len(r.g.Quarantine().Entries()); got != 2 {
			t.Errorf("%d rules", got)
		}
		var audit []console.Entry
		r.ask(http.MethodGet, "/audit", "", &audit)
		if len(audit) != 4 || audit[2].Error != "" || !strings.Contains(audit[3].Error, "billing-2") {
			t.Errorf("%+v", audit)
		}
		if status := r.ask(http.MethodPost, "/order", `{"action":"quarantine add","sources":["key=a"],"in":"fleet"}`, nil); status != http.StatusBadRequest {
			t.Error("as an order:", status)
		}
	})
}

// A process answers a change of the quarantine when its guards' lists have it, and within some
// seconds that they do not. It changes none of them: the fleet's list may say otherwise by now.
func TestQuarantineIsAcknowledged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := new(carrier)
		r := newRig(t, console.Config{Fleet: c}, "orders")
		defer r.close()
		defer r.c.Close()
		answer := func(id, want string) {
			t.Helper()
			time.Sleep(time.Second)
			if got := c.Answers(id)["billing-1"]; got != want {
				t.Errorf("%s is answered by %q, want %q", id, got, want)
			}
		}
		c.put(carried("1", `{"action":"quarantine add","sources":["key=a"],"in":"fleet"}`, time.Minute))
		answer("1", "")
		if err := r.g.Quarantine().Add(dlq.QuarantineEntry{Rule: dlq.Rule{Kind: dlq.RuleKey, Value: "a"}}); err != nil {
			t.Fatal(err)
		}
		answer("1", `{"sources":0}`)
		c.put(carried("2", `{"action":"quarantine add","sources":["key=b"],"in":"fleet"}`, time.Minute),
			carried("3", `{"action":"quarantine remove","sources":["key=b"],"in":"fleet"}`, time.Minute),
			carried("4", `{"action":"quarantine remove","sources":["key=a"],"in":"fleet"}`, time.Minute),
			carried("5", `{"action":"quarantine add","sources":["b"],"in":"fleet"}`, time.Minute))
		answer("3", `{"sources":0}`)
		answer("2", "")
		time.Sleep(time.Second)
		answer("2", `{"sources":0,"error":"not on its guards' list, which may be one of its own and not the fleet's"}`)
		answer("4", `{"sources":0,"error":"still on its guards' list, which may be one of its own and not the fleet's"}`)
		if got := c.Answers("5")["billing-1"]; !strings.Contains(got, "error") {
			t.Error("no rule:", got)
		}
		if got := r.g.Quarantine().Entries(); len(got) != 1 {
			t.Errorf("the list was changed: %v", got)
		}
	})
}

// stuckList is a program's own list, which does not answer once it is stuck, until it is released.
type stuckList struct {
	stuck, asked atomic.Bool
	until        chan struct{}
}

func (*stuckList) Add(dlq.QuarantineEntry) error { return nil }
func (*stuckList) Remove(dlq.Rule, string) error { return nil }
func (*stuckList) Watch(func()) (stop func())    { return func() {} }
func (l *stuckList) Entries() []dlq.QuarantineEntry {
	if l.stuck.Load() {
		l.asked.Store(true)
		<-l.until
	}
	return nil
}

// A list that does not answer keeps no order of the process waiting.
func TestListThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := &stuckList{until: make(chan struct{})}
		g, err := guard.New(guard.Config{Group: "billing"}, guard.WithQuarantine(list))
		if err != nil {
			t.Fatal(err)
		}
		f, err := guard.Protect(g, guard.SourceConfig{Name: "payments"}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		carries := new(carrier)
		r := &rig{t: t, g: g}
		if r.c, err = console.New(console.Config{Process: "billing-1", Fleet: carries}, g); err != nil {
			t.Fatal(err)
		}
		list.stuck.Store(true)
		carries.put(carried("1", `{"action":"quarantine add","sources":["key=a"],"in":"fleet"}`, time.Minute))
		synctest.Wait()
		if !list.asked.Load() {
			t.Error("the list was not asked")
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.order(console.Order{Action: console.Open, Breakers: []string{"*"}})
		}()
		synctest.Wait()
		select {
		case <-done:
		default:
			t.Error("an order waits for the list")
		}
		if !f.State().Breaker.Forced {
			t.Error("the breaker is not forced")
		}
		close(list.until)
		<-done
		r.c.Close()
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A breaker that is forced open twice stays open for the time of the second order, and one
// release ends both.
func TestForcedTwice(t *testing.T) {
	for _, in := range []string{"process", "fleet"} {
		t.Run(in, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := new(carrier)
				r := newRig(t, console.Config{Fleet: c}, "orders")
				defer r.close()
				defer r.c.Close()
				open := func(d time.Duration) {
					t.Helper()
					r.order(console.Order{Action: console.Open, Breakers: []string{"*"}, In: in, For: console.Duration(d)})
				}
				breaker := func(when, state string, forced bool) {
					t.Helper()
					if b := r.source("orders").Breaker; b.State != state || b.Forced != forced {
						t.Errorf("%s: %+v, want %s, forced %v", when, b, state, forced)
					}
				}
				open(time.Minute)
				time.Sleep(30 * time.Second)
				open(time.Minute)
				time.Sleep(50 * time.Second)
				breaker("after the end of the first", "open", true)
				send := func() {
					for i := range 20 { // some are probes
						r.in["orders"] <- i
					}
				}
				send()
				time.Sleep(40 * time.Second)
				breaker("after the end of the second", "closed", false)

				open(2 * time.Minute)
				open(4 * time.Minute)
				r.order(console.Order{Action: console.Release, Breakers: []string{"*"}, In: in})
				send()
				time.Sleep(30 * time.Second)
				breaker("after a release", "closed", false)
				r.end("orders")
				r.open("orders")
				time.Sleep(3 * time.Minute)
				breaker("in the time of the second", "closed", false)
				if got := r.handled.Load(); got != 40 {
					t.Errorf("%d messages were handled", got)
				}
			})
		})
	}
}
