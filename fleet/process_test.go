// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/limiter"
)

// configOf is that of a process on loopback whose members are given.
func configOf(name string, seeds []string, members ...string) Config {
	c := Config{
		Fleet: os.Getenv(fleetEnv), Name: name, Program: "v1",
		Limits: Limits{Limit: limiter.Limit{Rate: 1000, Burst: 100}, Roster: Roster{Learners: true}},
		Gossip: Gossip{Zone: "z-" + name, Bind: "127.0.0.1:0", Seeds: seeds},
	}
	for _, f := range members {
		c.Limits.Roster.Members = append(c.Limits.Roster.Members, Share{Name: f})
	}
	return c
}

// storeOf is the register of a test's processes.
func storeOf(t *testing.T) *register.Memory {
	t.Helper()
	r, loaded := stores.LoadOrStore(t, &register.Memory{})
	if !loaded {
		t.Cleanup(func() { stores.Delete(t) })
	}
	return r.(*register.Memory)
}

var stores sync.Map

func startProcess(t *testing.T, c Config) *Process {
	t.Helper()
	return startSettings(t, c.settings())
}

func startSettings(t *testing.T, s settings) *Process {
	t.Helper()
	opts := []Option{WithRegister(storeOf(t))}
	if s.Number != 0 || s.alone() {
		opts = nil
	}
	p, err := s.start(opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// three are the members of a fleet, and where the first of them listens.
func three(t *testing.T) (all []*Process, seeds []string) {
	t.Helper()
	for _, name := range []string{"a", "b", "c"} {
		p := startProcess(t, configOf(name, seeds, "a", "b", "c"))
		if all = append(all, p); seeds == nil {
			seeds = []string{p.Addr().String()}
		}
	}
	return all, seeds
}

// eventually polls real processes, which no event of the test's can wake.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

func written(p *Process) string {
	var all []string
	for _, e := range p.Journal() {
		all = append(all, fmt.Sprintf("%v %s", e.Kind, e.Subject))
	}
	return strings.Join(all, ", ")
}

// What a fleet's limit cannot do well is said when a process starts, and when the limit is changed,
// once.
func TestWarnings(t *testing.T) {
	begun := func(c Config, opts ...Option) (p *Process, logged func(what, line string) string) {
		t.Helper()
		var out lockedBuffer
		p, err := Start(c, append(opts, WithLogger(slog.New(slog.NewTextHandler(&out, nil))))...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		all := ""
		return p, func(what, line string) string {
			t.Helper()
			eventually(t, what, func() bool {
				all += out.take()
				return strings.Contains(all, line)
			})
			return all
		}
	}
	const text = "will not work well"
	for burst, want := range map[int]string{100: "", 5: "Limit.Burst: 5 tokens"} {
		c := configOf("a", nil, "a", "b", "c")
		c.Limits.Limit.Burst = burst
		p, logged := begun(c)
		logged("it begins", `msg="fleet: configuration" number=1`)
		p.Close()
		if got := logged("it has ended", ""); strings.Contains(got, text) != (want != "") || !strings.Contains(got, want) {
			t.Errorf("burst %d: %q, want %q", burst, got, want)
		}
	}

	p, logged := begun(configOf("a", nil, "a", "b"), WithRegister(storeOf(t)))
	if got := logged("it begins", `msg="fleet: configuration" number=1`); strings.Contains(got, text) {
		t.Errorf("before the change: %q", got)
	}
	less := limiter.Limit{Rate: 1000, Burst: 5}
	if _, err := p.Set(t.Context(), Change{Limit: &less}); err != nil {
		t.Fatal(err)
	}
	logged("the limit is changed", `will not work well" number=2 why="Limit.Burst: 5 tokens`)
	if _, err := p.Set(t.Context(), Change{Weights: map[string]int{"a": 2}}); err != nil {
		t.Fatal(err)
	}
	logged("a weight is changed", `msg="fleet: configuration" number=3`)
	p.Close()
	if got := logged("it has ended", ""); strings.Count(got, text) != 1 {
		t.Errorf("not once: %q", got)
	}
}

// Three real processes share a limit: one that asks gets what the others have; a
// rate is changed while they run; one joins, one leaves, one is evicted; and all
// read the same of it.
func TestProcesses(t *testing.T) {
	all, seeds := three(t)
	a, b, c := all[0], all[1], all[2]
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := a.Key("k").WaitN(ctx, 90); err != nil { // more than its share of 33
		t.Fatal(err)
	}

	rate := limiter.Limit{Rate: 2000, Burst: 300}
	number, err := b.Set(ctx, Change{Limit: &rate})
	if err != nil || number != 2 {
		t.Fatalf("configuration %d, %v", number, err)
	}
	eventually(t, "all use the new burst", func() bool {
		return a.limits.Stats().Completed == 2 && c.limits.Stats().Completed == 2
	})
	if err := c.Key("k").WaitN(ctx, 290); err != nil {
		t.Fatal(err)
	}

	d := startProcess(t, configOf("d", seeds, "a", "b", "c"))
	if err := d.Key("k").WaitN(ctx, 10); err != nil { // as a learner
		t.Fatal(err)
	}
	if err := d.Join(ctx, 1); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the joiner has its share", func() bool {
		s := d.limits.Stats()
		return s.Share == 0.25 && s.Completed == s.Number
	})
	if err := b.Leave(ctx); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if number, err = a.Evict(ctx, 0, "c"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two have it all", func() bool {
		sa, sd := a.limits.Stats(), d.limits.Stats()
		return sa.Share == 0.5 && sd.Share == 0.5 && sa.Completed == number && sd.Completed == number && sa.Stranded == 0
	})
	if _, err := a.Evict(ctx, 0, "c"); !errors.Is(err, fleetstate.ErrMember) {
		t.Errorf("evicted twice: %v", err)
	}
	eventually(t, "both read that it was evicted, and the same", func() bool {
		return strings.Contains(written(d), "evicted c") && written(a) == written(d)
	})
	for _, want := range []string{"started a", "started d", "configuration b", "left b"} {
		if got := written(a); !strings.Contains(got, want) {
			t.Errorf("%q is not in the journal: %s", want, got)
		}
	}
	eventually(t, "each sees how the other stands", func() bool {
		s := a.statuses.All(a.clock(), nil)
		return len(s) >= 2 && s[len(s)-1].Name == "d" && s[len(s)-1].Zone == "z-d" && s[len(s)-1].Share == 0.5
	})
}

// A restart under the same name mints again by what the register has, whatever its
// configuration says.
func TestProcessRestarts(t *testing.T) {
	all, seeds := three(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	less := limiter.Limit{Rate: 500, Burst: 50}
	if _, err := all[0].Set(ctx, Change{Limit: &less}); err != nil {
		t.Fatal(err)
	}
	all[2].Close()
	again := startProcess(t, configOf("c", seeds, "a", "b", "c"))
	eventually(t, "it is a member under the configuration that was made meanwhile", func() bool {
		s := again.limits.Stats()
		return s.Number >= 2 && s.Completed == s.Number && !s.Fenced && s.Cap+s.Level >= 0
	})
	if err := again.Key("k").WaitN(ctx, 10); err != nil {
		t.Fatal(err)
	}
	if err := again.Key("k").WaitN(ctx, 51); !errors.Is(err, limiter.ErrBurst) {
		t.Errorf("more than the burst that was agreed on: %v", err)
	}
}

// A process that is alone listens nowhere, has its limits, and leaves a guard to
// itself.
func TestProcessAlone(t *testing.T) {
	p := startProcess(t, Config{Fleet: "f", Name: "a", Limits: Limits{Limit: limiter.Limit{Rate: 0.001, Burst: 2}}})
	if !p.Key("k").AllowN(2) || p.Key("k").Allow() {
		t.Error("not two of two")
	}
	if _, err := p.Set(t.Context(), Change{}); !errors.Is(err, errAlone) {
		t.Error(err)
	}
	if _, err := p.Evict(t.Context(), 0, "b"); !errors.Is(err, errAlone) {
		t.Error(err)
	}
	if err := p.Join(t.Context(), 1); !errors.Is(err, errAlone) {
		t.Error(err)
	}
	if len(p.Member().Scopes()) != 0 || p.node != nil || len(p.Journal()) != 0 {
		t.Error("it has parts of a fleet")
	}
	g, err := guard.New(guard.Config{Group: "g"}, guard.WithFleet(p.Member()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = g.Close(t.Context()) }()
	charge, err := guard.Protect(g, guard.SourceConfig{Name: "charge", Limiter: p.Key("other")}, func(context.Context, int) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if err := charge.Do(t.Context(), 1); err != nil {
		t.Error(err)
	}
	if err := p.Leave(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestProcessRefuses(t *testing.T) {
	_, err := Start(Config{
		Program: strings.Repeat("x", 65), Limits: Limits{Roster: Roster{Members: []Share{{Name: "a"}}}},
		Gossip: Gossip{Bind: "nowhere"}, Breakers: breaker.FleetConfig{Quorum: 2}, Storms: Storms{Share: 2}, Journal: Journal{Keep: -1},
	})
	for _, field := range []string{"Fleet:", "Program:", "Limit.Rate", "Self.Name", "Bind", "Quorum", "Share", "Keep"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not in: %v", field, err)
		}
	}
	open := configOf("a", nil, "a", "b")
	open.Gossip.Bind = ":0"
	if _, err := Start(open); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), `Bind: ":0"`) || !strings.Contains(err.Error(), "fleet keygen") {
		t.Errorf("open without a key: %v", err)
	}
	if _, err := Start(configOf("a", nil), WithRegister(new(register.Memory))); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "Limits.Roster.Members: 0") {
		t.Errorf("a register without a roster: %v", err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	c := configOf("a", nil, "a", "b")
	c.Gossip.Bind = taken.Addr().String()
	if p, err := Start(c); err == nil {
		p.Close()
		t.Error("it listens where somebody does")
	}
}

// Close and Leave end whatever is going on, in whatever order.
func TestProcessEnds(t *testing.T) {
	all, _ := three(t)
	ended := make(chan error, 3)
	go func() { ended <- all[0].Key("k").WaitN(context.Background(), 100) }()
	go func() {
		_, err := all[1].Set(context.Background(), Change{Reset: true})
		ended <- err
	}()
	soon, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	go func() { ended <- all[2].Leave(soon) }()
	for _, p := range all[:2] {
		p.Close()
		p.Close()
	}
	for range 3 {
		if err := <-ended; err == nil {
			t.Log("one of the three came through before the end")
		}
	}
	if err := all[0].Key("k").Wait(t.Context()); !errors.Is(err, limiter.ErrClosed) {
		t.Error(err)
	}
}

// By one process's handler an operator sees and changes the whole fleet, and what
// is wrong is answered with what would be right.
func TestHandler(t *testing.T) {
	all, _ := three(t)
	server := httptest.NewServer(http.StripPrefix("/ops", all[1].Handler()))
	t.Cleanup(server.Close)
	ask := func(method, path, body string) (int, string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, server.URL+"/ops/fleet/"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		a, err := server.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = a.Body.Close() }()
		b, err := io.ReadAll(a.Body)
		if err != nil {
			t.Fatal(err)
		}
		return a.StatusCode, strings.TrimSpace(string(b))
	}
	eventually(t, "three are there", func() bool { return len(all[1].Status().Members) == 3 })
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"POST", "change", `{"limit":{"rate":2000,"burst":200},"limits":{"x":{"rate":5,"burst":5}}}`, 200, `{"number":2}`},
		{"POST", "change", `{"limits":{"x":null},"weights":{"a":3}}`, 200, `{"number":3}`},
		{"POST", "change", `{"reset":true}`, 200, `{"number":4}`},
		{"POST", "change", `{"limit":{"rate":-1,"burst":200}}`, 400, "Rate: -1 is not in [0.001, 1e+09]"},
		{"POST", "change", `{"number":2,"reset":true}`, 409, `"newest":4`},
		{"POST", "evict?name=a&number=3", "", 409, `"newest":4`},
		{"POST", "evict?name=a&number=x", "", 400, "number"},
		{"POST", "change", `{"weights":{"z":1}}`, 409, `\"z\" is none`},
		{"POST", "change", `{"limitt":1}`, 400, "unknown field"},
		{"POST", "change", `{}`, 400, "want one object with a change"},
		{"POST", "change", `{"reset":true}{}`, 400, "want one object with a change"},
		{"POST", "evict", "", 400, "name"},
		{"POST", "evict?name=nobody", "", 409, "nobody"},
		{"GET", "evict?name=a", "", 405, ""},
		{"GET", "journal", "", 200, `"kind":"RESET"`},
		{"GET", "status", "", 200, `"roster":true,"weight":3`},
	} {
		if status, got := ask(c.method, c.path, c.body); status != c.status || !strings.Contains(got, c.want) {
			t.Errorf("%s %s %s: %d %s, want %d %s", c.method, c.path, c.body, status, got, c.status, c.want)
		}
	}
	all[0].Close()
	if status, got := ask("POST", "evict?name=a", ""); status != 200 || !strings.HasPrefix(got, `{"number":`) {
		t.Errorf("%d %s", status, got)
	}
	eventually(t, "the status says who is there", func() bool {
		for _, m := range all[2].Status().Members {
			if m.Name == "a" && m.Roster {
				return false
			}
		}
		return true
	})
}

// Without a register a configuration is loaded into one process after the other.
func TestProcessesStatic(t *testing.T) {
	var all []*Process
	var seeds []string
	config := func(name string, number uint64, rate float64) Config {
		c := configOf(name, seeds, "a", "b")
		c.Number, c.Limits.Limit.Rate = number, rate
		return c
	}
	var log lockedBuffer
	for _, name := range []string{"a", "b"} {
		p, err := Start(config(name, 1, 1000), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		all = append(all, p)
		seeds = []string{p.Addr().String()}
	}
	complete := func(number uint64) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d is complete", number), func() bool {
			return all[0].limits.Stats().Completed == number && all[1].limits.Stats().Completed == number
		})
	}
	complete(1)
	if _, err := all[0].Set(t.Context(), Change{Reset: true}); !errors.Is(err, fleetstate.ErrMember) {
		t.Error(err)
	}
	all[0].Close()
	all[0] = startProcess(t, func() Config { // a deployment's first
		c := config("a", 2, 500)
		c.Gossip.Seeds = []string{all[1].Addr().String()}
		return c
	}())
	eventually(t, "it lacks in the other", func() bool {
		return slices.Equal(all[0].Status().Configuration.Lacking, []string{"b"}) && all[1].limits.Stats().Number == 2
	})
	eventually(t, "which says so", func() bool { return strings.Contains(log.take(), "others have loaded a newer configuration") })
	if err := all[0].Key("k").WaitN(t.Context(), 10); err != nil {
		t.Fatal(err)
	}
	if err := all[1].Load(2, config("b", 2, 500).Limits); err != nil {
		t.Fatal(err)
	}
	complete(2)
}
