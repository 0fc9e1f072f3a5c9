// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/gossip"
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

// What a fleet's limit cannot do well is said when a process starts.
func TestWarnings(t *testing.T) {
	for burst, want := range map[int]string{100: "", 5: "Limit.Burst: 5 tokens"} {
		c := configOf("a", nil, "a", "b", "c")
		c.Limits.Limit.Burst = burst
		var out bytes.Buffer
		p, err := Start(c, WithLogger(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn}))))
		if err != nil {
			t.Fatal(err)
		}
		p.Close()
		if got := out.String(); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("burst %d: %q, want %q", burst, got, want)
		}
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
	if _, err := a.Evict(ctx, 0, "c"); !errors.Is(err, ErrMember) {
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
	p := startProcess(t, Config{Fleet: "f", Name: "a", Limits: Limits{Limit: limiter.Limit{Rate: 1, Burst: 2}}})
	if !p.Key("k").AllowN(2) || p.Key("k").Allow() {
		t.Error("not two of two")
	}
	if _, err := p.Set(t.Context(), Change{}); !errors.Is(err, ErrAlone) {
		t.Error(err)
	}
	if _, err := p.Evict(t.Context(), 0, "b"); !errors.Is(err, ErrAlone) {
		t.Error(err)
	}
	if err := p.Join(t.Context(), 1); !errors.Is(err, ErrAlone) {
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

// While the register is away nothing changes and everything admits; a change that was
// given up is not made later, and the journal has no line of it.
func TestProcessRegisterAway(t *testing.T) {
	all, _ := three(t)
	eventually(t, "they have begun", func() bool { return all[1].Status().Configuration.Settled })
	storeOf(t).SetAway(errors.New("unplugged"))
	eventually(t, "they know", func() bool { return strings.Contains(all[1].Status().Configuration.Away, "unplugged") })
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := all[1].Set(short, Change{Reset: true}); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrEnded) {
		t.Errorf("a change without a register: %v", err)
	}
	if err := all[1].Key("k").WaitN(t.Context(), 50); err != nil {
		t.Error(err)
	}
	storeOf(t).SetAway(nil)
	rate := limiter.Limit{Rate: 300, Burst: 30}
	eventually(t, "a change is made again", func() bool {
		_, err := all[0].Set(t.Context(), Change{Number: 1, Limit: &rate})
		return err == nil
	})
	eventually(t, "all know", func() bool {
		return all[1].Status().Configuration.Number == 2 && len(all[1].Status().Configuration.Log) == 2
	})
	if c := all[1].Status().Configuration; c.Resets != 0 || c.Log[1].Who != "a" || !strings.Contains(c.Log[1].What, "300/s") {
		t.Errorf("%+v", c)
	}
	if strings.Contains(written(all[1]), "RESET") {
		t.Errorf("written down: %s", written(all[1]))
	}
	if _, err := all[2].Set(t.Context(), Change{Number: 1, Reset: true}); !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "the newest is 2") {
		t.Errorf("upon a number that is over: %v", err)
	}
}

// readOnly is a register that this user may only read.
type readOnly struct {
	*register.Memory
	may atomic.Bool
}

func (r *readOnly) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if !r.may.Load() {
		return errors.New("permission denied")
	}
	return r.Memory.CompareAndSet(ctx, number, document)
}

// A process that cannot write what is asked for says so, until it can.
func TestProcessMayNotWrite(t *testing.T) {
	r := &readOnly{Memory: new(register.Memory)}
	var out lockedBuffer
	p, err := Start(configOf("a", nil, "a"), WithRegister(r), WithLogger(slog.New(slog.NewTextHandler(&out, nil))))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	eventually(t, "it says why it does not begin", func() bool {
		return strings.HasSuffix(p.Status().Configuration.Problem, "takes no write of this process: permission denied") &&
			strings.Contains(out.take(), "permission denied")
	})
	r.may.Store(true)
	eventually(t, "it begins", func() bool { return p.Status().Configuration.Number == 1 })
	if problem := p.Status().Configuration.Problem; problem != "" {
		t.Error(problem)
	}
}

// hanging is a register whose writes after the first do not end by themselves.
type hanging struct {
	*register.Memory
	writing chan struct{}
}

func (r *hanging) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if number == 1 {
		return r.Memory.CompareAndSet(ctx, number, document)
	}
	r.writing <- struct{}{}
	<-ctx.Done()
	return fmt.Errorf("%w: %w", register.ErrUnknown, ctx.Err())
}

// A process that ends in the middle of a change says whether it may still be made.
func TestProcessEndsInAChange(t *testing.T) {
	for name, under := range map[string]bool{"under way": true, "not begun": false} {
		t.Run(name, func(t *testing.T) {
			r := &hanging{new(register.Memory), make(chan struct{}, 9)}
			p, err := Start(configOf("a", nil, "a"), WithRegister(r))
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			eventually(t, "it begins", func() bool { return p.Status().Configuration.Number == 1 })
			if !under {
				r.SetAway(errors.New("unplugged"))
				eventually(t, "it knows", func() bool { return p.Status().Configuration.Away != "" })
			}
			answer := make(chan error)
			go func() {
				_, err := p.Set(t.Context(), Change{Number: 1, Reset: true})
				answer <- err
			}()
			if under {
				<-r.writing
			} else {
				eventually(t, "it is asked", func() bool {
					p.mu.Lock()
					defer p.mu.Unlock()
					return len(p.asked) == 1
				})
			}
			p.Close()
			if err := <-answer; !errors.Is(err, ErrClosed) || errors.Is(err, ErrUnknown) != under || errors.Is(err, ErrEnded) == under {
				t.Error(err)
			}
		})
	}
}

// mute is a register whose Watch says neither a document nor an error.
type mute struct {
	*register.Memory
	speaks chan struct{}
}

func (r *mute) Watch(ctx context.Context, changed func(register.Event)) error {
	select {
	case <-r.speaks:
		return r.Memory.Watch(ctx, changed)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A register that says nothing is away.
func TestProcessRegisterMute(t *testing.T) {
	r := &mute{new(register.Memory), make(chan struct{})}
	p, err := Start(configOf("a", nil, "a"), WithRegister(r))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	eventually(t, "it says that it is away", func() bool { return strings.Contains(p.Status().Configuration.Away, "said nothing for 5s") })
	close(r.speaks)
	eventually(t, "it begins", func() bool {
		c := p.Status().Configuration
		return c.Number == 1 && c.Away == ""
	})
}

// A process that begins after its register was wiped has the configuration from its peers,
// and says why nothing can be changed.
func TestProcessRegisterWiped(t *testing.T) {
	all, seeds := three(t)
	rate := limiter.Limit{Rate: 300, Burst: 30}
	for number := range uint64(3) {
		eventually(t, "the limit is changed", func() bool {
			n, err := all[0].Set(t.Context(), Change{Limit: &rate})
			return err == nil && n >= number+2
		})
	}
	d, err := Start(configOf("d", seeds, "a", "b", "c"), WithRegister(new(register.Memory)))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	eventually(t, "it knows the newest", func() bool { return d.Status().Configuration.Number >= 4 })
	asking, cancel := context.WithCancel(t.Context())
	var asked sync.WaitGroup
	asked.Go(func() { _, _ = d.Set(asking, Change{Reset: true}) })
	defer asked.Wait()
	defer cancel()
	eventually(t, "it says why", func() bool { return strings.Contains(d.Status().Configuration.Problem, "wiped, or is an older copy") })
}

// All start again at once, with another limit in their configuration, one of them alone
// at first: the operator's limit stays.
func TestProcessesAllStartAgain(t *testing.T) {
	all, _ := three(t)
	rate := limiter.Limit{Rate: 300, Burst: 30}
	eventually(t, "the limit is changed", func() bool {
		_, err := all[0].Set(t.Context(), Change{Limit: &rate})
		return err == nil
	})
	for _, p := range all {
		p.Close()
	}
	var seeds []string
	for _, name := range []string{"a", "b", "c"} {
		c := configOf(name, seeds, "a", "b", "c")
		c.Limits.Limit.Rate = 5000
		p := startProcess(t, c)
		eventually(t, name+" mints", func() bool {
			l := p.limits.Stats()
			return l.Number == 2 && !l.Fenced && l.Share > 0.33 && p.limits.Configuration().Limit == escrow.Limit(rate)
		})
		seeds = []string{p.Addr().String()}
	}
}

// A member that an operator takes for dead, and that runs, asks for its share again.
func TestProcessEvictedByMistake(t *testing.T) {
	all, _ := three(t)
	eventually(t, "they have begun", func() bool { return all[2].Status().Configuration.Settled && all[0].Status().Configuration.Settled })
	if _, err := all[0].Evict(t.Context(), 0, "c"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is back", func() bool {
		s := all[2].limits.Stats()
		return s.Number >= 3 && s.Completed == s.Number && s.Share > 0.33 && s.Share < 0.34
	})
}

// minting waits until processes have a third each, by one configuration, which is
// complete.
func minting(t *testing.T, what string, all ...*Process) {
	t.Helper()
	eventually(t, what, func() bool {
		number := all[0].limits.Stats().Number
		for _, p := range all {
			s := p.limits.Stats()
			if s.Number != number || s.Completed != number || s.Fenced || s.Share < .33 || s.Share > .34 {
				return false
			}
		}
		return true
	})
}

// Two operators evict one member at once: it happens once, and changes go on.
func TestTwoEvictOne(t *testing.T) {
	all, _ := three(t)
	minting(t, "they have begun", all...)
	all[2].Close()
	errs := make(chan error, 2)
	for _, p := range all[:2] {
		go func() {
			_, err := p.Evict(t.Context(), 1, "c")
			errs <- err
		}()
	}
	made := 0
	for range 2 {
		switch err := <-errs; {
		case err == nil:
			made++
		case !errors.Is(err, ErrConflict) && !errors.Is(err, ErrMember):
			t.Error(err)
		}
	}
	if made != 1 {
		t.Errorf("%d evictions were made", made)
	}
	for _, p := range all[:2] {
		if _, err := p.Set(t.Context(), Change{Reset: true}); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "two have it all", func() bool {
		return all[0].limits.Stats().Share == .5 && all[1].limits.Stats().Share == .5 && all[0].limits.Stats().Completed == 4
	})
}

// Two of three leave, and start again together, where they hear nobody else. They have
// the configuration of the third.
func TestLeaveAndStartTogether(t *testing.T) {
	all, _ := three(t)
	minting(t, "they have begun", all...)
	rate := limiter.Limit{Rate: 300, Burst: 90}
	if _, err := all[2].Set(t.Context(), Change{Limit: &rate}); err != nil {
		t.Fatal(err)
	}
	var left sync.WaitGroup
	for _, p := range all[:2] {
		left.Go(func() {
			if err := p.Leave(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	left.Wait()
	number := all[2].Status().Configuration.Number
	all[0] = startProcess(t, configOf("a", nil, "a", "b", "c"))
	all[1] = startProcess(t, configOf("b", []string{all[0].Addr().String()}, "a", "b", "c"))
	eventually(t, "they know the configuration, and have shares of it", func() bool {
		for _, p := range all[:2] {
			if s := p.Status().Configuration; s.Number <= number || s.Limit != (limiter.Limit{Rate: 300, Burst: 90}) || !s.Settled || !s.Member {
				return false
			}
		}
		return true
	})
	for _, p := range all {
		if s := p.Status().Configuration; s.Problem != "" {
			t.Errorf("%s: %s", p.node.Self(), s.Problem)
		}
	}
}

// Of three, one is dead and one starts again: it mints at once, without an operator.
func TestOneDeadOneRestarts(t *testing.T) {
	all, _ := three(t)
	minting(t, "they have begun", all...)
	all[1].Close()
	all[2].Close()
	again := startProcess(t, configOf("c", []string{all[0].Addr().String()}, "a", "b", "c"))
	minting(t, "it mints", all[0], again)
	eventually(t, "it admits", func() bool { return again.Key("k").Allow() })
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
	if _, err := all[0].Set(t.Context(), Change{Reset: true}); !errors.Is(err, ErrMember) {
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

// A member that left, and starts again, has its share again, whether it asks or not;
// so a restart by Leave of one after the other ends where it began.
func TestMemberComesBack(t *testing.T) {
	all, _ := three(t)
	eventually(t, "they have met", func() bool { return all[0].Status().Configuration.Settled && all[2].Status().Configuration.Settled })
	for i, name := range []string{"a", "b", "c"} {
		if err := all[i].Leave(t.Context()); err != nil {
			t.Fatal(err)
		}
		all[i] = startProcess(t, configOf(name, []string{all[(i+1)%3].Addr().String()}, "a", "b", "c"))
		if i == 1 { // the others do not ask
			if err := all[i].Join(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, name+" has its share", func() bool {
			s := all[i].limits.Stats()
			return s.Share > 0.33 && s.Share < 0.34 && s.Completed == s.Number && !s.Fenced
		})
	}
}

// The last member that starts again finds what the register has.
func TestLastMemberComesBack(t *testing.T) {
	all, seeds := three(t)
	eventually(t, "they have met", func() bool { return all[0].Status().Configuration.Settled && all[2].Status().Configuration.Settled })
	learner := startProcess(t, configOf("learner", seeds, "a", "b", "c"))
	for _, p := range all[1:] {
		if err := p.Leave(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	number := all[0].Status().Configuration.Number
	all[0].Close()
	again := startProcess(t, configOf("a", []string{learner.Addr().String()}, "a", "b", "c"))
	eventually(t, "it has the whole", func() bool {
		s := again.limits.Stats()
		return s.Share == 1 && s.Number >= number && s.Completed == s.Number && !s.Fenced
	})
}

// A process that began its fleet alone, and starts again, does not begin it anew
// beside those who joined.
func TestLoneMemberRestarts(t *testing.T) {
	a := startProcess(t, configOf("a", nil, "a"))
	b := startProcess(t, configOf("b", []string{a.Addr().String()}, "a"))
	if err := b.Join(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	number := b.Status().Configuration.Number
	a.Close()
	a = startProcess(t, configOf("a", []string{b.Addr().String()}, "a"))
	change := Change{Limit: &limiter.Limit{Rate: 500, Burst: 50}}
	got := uint64(0)
	eventually(t, "it is a member, and changes the limit", func() bool {
		var err error
		got, err = a.Set(t.Context(), change)
		return err == nil
	})
	if got <= number {
		t.Errorf("configuration %d after %d", got, number)
	}
	eventually(t, "both are at one", func() bool {
		s := b.Status().Configuration
		return s.Number == got && s.Problem == "" && a.Status().Configuration.Number == got
	})
}

// Whose place was taken mints nothing any more, and says so.
func TestDisplaced(t *testing.T) {
	all, seeds := three(t)
	eventually(t, "they have met", func() bool { return all[2].Status().Configuration.Settled && !all[2].limits.Stats().Fenced })
	startProcess(t, configOf("c", seeds, "a", "b", "c"))
	eventually(t, "the first incarnation is out", func() bool {
		select {
		case <-all[2].Done():
			return all[2].limits.Stats().Fenced
		default:
			return false
		}
	})
	if err := all[2].Err(); !errors.Is(err, ErrDisplaced) {
		t.Errorf("out with %v", err)
	}
	if _, err := all[2].Set(t.Context(), Change{Reset: true}); !errors.Is(err, ErrDisplaced) {
		t.Errorf("it proposes: %v", err)
	}
}

// What is exported is what the page lists, and says what there is.
func TestMetrics(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	c := configOf("a", nil, "a", "b")
	a, err := Start(c, WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	b := startProcess(t, configOf("b", []string{a.Addr().String()}, "a", "b"))
	if err := b.Key("k").WaitN(t.Context(), 80); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../docs/fleet-metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var listed []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_.]+)`").FindAllSubmatch(page, -1) {
		listed = append(listed, string(m[1]))
	}
	slices.Sort(listed)
	values := map[string]float64{}
	eventually(t, "all metrics are there", func() bool {
		var all metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &all); err != nil {
			t.Fatal(err)
		}
		values = map[string]float64{}
		for _, s := range all.ScopeMetrics {
			for _, m := range s.Metrics {
				switch d := m.Data.(type) {
				case metricdata.Gauge[float64]:
					for _, p := range d.DataPoints {
						values[m.Name] += p.Value
					}
				case metricdata.Sum[int64]:
					for _, p := range d.DataPoints {
						values[m.Name] += float64(p.Value)
					}
				}
			}
		}
		names := slices.Sorted(maps.Keys(values))
		return slices.Equal(names, listed) && values[metricMerges] > 0 && values[metricMembers] == 1 && values[metricShare] == 0.5
	})
	if t.Failed() {
		t.Logf("listed %v\nexported %v", listed, values)
	}
	if values[metricConfiguration] != 3 || values[metricShareStranded] != 0 || values[metricRegisterAway] != 0 || values[metricSilence] > 10 {
		t.Errorf("%v", values)
	}
}

// Each key's tokens are shown while there are few keys, and then those of keys that the
// configuration names: a key for each user would be a series for each user.
func TestTokensByKey(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	c := Config{Fleet: os.Getenv(fleetEnv), Name: "a", Limits: Limits{
		Limit:  limiter.Limit{Rate: 1, Burst: 10},
		Limits: map[string]limiter.Limit{"named": {Rate: 1, Burst: 10}},
	}}
	p, err := Start(c, WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	shown := func(name string) map[string]int64 {
		var all metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &all); err != nil {
			t.Fatal(err)
		}
		by := map[string]int64{}
		for _, s := range all.ScopeMetrics {
			for _, m := range s.Metrics {
				if m.Name != name {
					continue
				}
				for _, point := range m.Data.(metricdata.Sum[int64]).DataPoints {
					key, _ := point.Attributes.Value("key")
					by[key.AsString()] = point.Value
				}
			}
		}
		return by
	}
	p.Key("named").AllowN(3)
	p.Key("named").AllowN(9) // more than are left
	p.Key("user-0").AllowN(2)
	if got := shown(metricAdmitted); !maps.Equal(got, map[string]int64{"named": 3, "user-0": 2}) {
		t.Errorf("admitted %v", got)
	}
	if got := shown(metricDenied); got["named"] != 9 {
		t.Errorf("denied %v", got)
	}
	for i := range 40 {
		p.Key("user-" + strconv.Itoa(i)).Allow()
	}
	if got := shown(metricAdmitted); !maps.Equal(got, map[string]int64{"named": 3}) {
		t.Errorf("admitted, of 41 keys: %v", got)
	}
}

// When the fleet lags a span tells of it, linked to the latest decision that
// waited, and once.
func TestLagIsTold(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	c := configOf("a", nil, "a", "b")
	c.LagDelay = time.Millisecond
	a, err := Start(c, WithTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	slow := slowly{}
	b, err := Start(configOf("b", []string{a.Addr().String()}, "a", "b"), withGossip(gossip.WithFaults(slow)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	if err := a.Wait(t.Context(), "k", 80); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a span that is linked", func() bool {
		_ = a.Wait(t.Context(), "k", 1)
		for _, s := range spans.Ended() {
			if s.Name() == "fleet lag" && len(s.Events()) == 1 && len(s.Links()) == 1 {
				return true
			}
		}
		return false
	})
	decisions := map[trace.SpanID]bool{}
	var links []sdktrace.Link
	for _, s := range spans.Ended() {
		switch s.Name() {
		case "limit k":
			decisions[s.SpanContext().SpanID()] = true
		case "fleet lag":
			links = append(links, s.Links()...)
		}
	}
	for _, l := range links {
		if !decisions[l.SpanContext.SpanID()] {
			t.Errorf("linked to %v, which is no decision", l.SpanContext.SpanID())
		}
	}
}

// slowly is a network on which everything takes 20 ms.
type slowly struct{}

func (slowly) Packet(netip.AddrPort) (time.Duration, bool) { return 20 * time.Millisecond, false }
func (slowly) Dial(netip.AddrPort) error                   { return nil }
