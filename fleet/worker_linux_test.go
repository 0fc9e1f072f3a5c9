// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/limiter"
)

// A worker is a process of its own: this program once more, told by its
// environment what to be, by its standard input what to do, and saying on its
// standard output what it was granted and whom it sees. It ends with its input.

// workerEnv, if set, makes the program a worker: a workerSpec.
const workerEnv = "STORMGUARD_FLEET_WORKER"

type workerSpec struct {
	Name, Bind, Network string
	Seeds, Roster       []string
	Rate                float64
	Burst               int
	Register            string // a file, if there is one
	OnSilence           SilencePolicy
	Shell               []string // commands that come first: those that give it an address
}

const (
	workerKey = "k"
	askTick   = 2 * time.Millisecond
	lookTick  = 50 * time.Millisecond
)

// A grant is some tokens that a process got between two instants.
type grant struct {
	From, To int64 // on the host's monotonic clock, in ns
	N        int
}

// A sight is how a process stands, and whom it sees.
type sight struct {
	At            int64
	Fresh         []string // heard, and hear it
	Members       []string // of memberlist
	Configuration uint64
	Complete      uint64
	Share         float64
	Minted        float64 // tokens of the key
	Fenced        bool
}

// A word is a line that a worker says; one field is set.
type word struct {
	Addr     string `json:"addr,omitempty"`
	Grant    *grant `json:"grant,omitempty"`
	Sight    *sight `json:"sight,omitempty"`
	Proposed string `json:"proposed,omitempty"` // what became of it
	Log      string `json:"log,omitempty"`      // a line, at WARN or above
}

// An order is a line that a worker is told.
type order struct {
	Start   bool   `json:"start,omitempty"`
	Demand  *int   `json:"demand,omitempty"`  // messages a second from now on
	Propose string `json:"propose,omitempty"` // a key that gets a limit of its own
	Evict   string `json:"evict,omitempty"`
}

// asProcess is what this program does in place of the tests, where a test has
// started it as a process of a fleet.
func asProcess() (status int, is bool) {
	text, is := os.LookupEnv(workerEnv)
	if !is {
		return 0, false
	}
	if err := runWorker(text); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		return 1, true
	}
	return 0, true
}

// hostClock is the same in all processes of the host, and no step moves it.
func hostClock() int64 {
	const monotonic = 1
	var ts syscall.Timespec
	if _, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, monotonic, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		panic(errno)
	}
	return ts.Nano()
}

func runWorker(text string) error {
	var spec workerSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return err
	}
	orders := make(chan order)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		defer cancel()
		in := json.NewDecoder(os.Stdin)
		for {
			var o order
			if in.Decode(&o) != nil {
				return
			}
			orders <- o
		}
	}()
	if o := <-orders; !o.Start {
		return fmt.Errorf("the first order is %+v, want to start", o)
	}
	for _, line := range spec.Shell {
		if out, err := exec.CommandContext(ctx, "sh", "-c", line).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", line, err, out)
		}
	}
	c := configOf(spec.Name, spec.Seeds, spec.Roster...)
	c.Limits.Limit = limiter.Limit{Rate: spec.Rate, Burst: spec.Burst}
	c.Limits.OnSilence.Policy = spec.OnSilence
	c.Gossip.Bind, c.Gossip.Network = spec.Bind, spec.Network
	c.Gossip.Insecure = true // some are bound to addresses of a network of the test's own
	w := &worker{}
	opts := []Option{WithLogger(slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelWarn})))}
	if spec.Register != "" {
		r, err := register.NewFile(spec.Register)
		if err != nil {
			return err
		}
		opts = append(opts, WithRegister(r))
	}
	p, err := Start(c, opts...)
	if err != nil {
		return err
	}
	defer p.Close()
	w.p = p
	w.say(word{Addr: p.Addr().String()})
	return w.run(ctx, orders)
}

type worker struct {
	p  *Process
	mu sync.Mutex // around each line that is said
}

// Write takes a line of the log.
func (w *worker) Write(line []byte) (int, error) {
	w.say(word{Log: string(line)})
	return len(line), nil
}

// say writes a line at once: what has been said survives a kill.
func (w *worker) say(x word) {
	b, err := json.Marshal(x)
	if err != nil {
		panic(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_, _ = os.Stdout.Write(append(b, '\n')) // who cannot be told is gone, and ends the input
}

func (w *worker) run(ctx context.Context, orders <-chan order) error {
	limit := w.p.Key(workerKey)
	ask, look := time.NewTicker(askTick), time.NewTicker(lookTick)
	defer ask.Stop()
	defer look.Stop()
	var proposing sync.WaitGroup
	defer proposing.Wait()
	demand, since, asked := 0, hostClock(), 0
	for {
		select {
		case <-ctx.Done():
			return nil
		case o := <-orders:
			if o.Demand != nil {
				demand, since, asked = *o.Demand, hostClock(), 0
			}
			if o.Propose != "" {
				proposing.Go(func() { w.propose(ctx, o.Propose) })
			}
			if o.Evict != "" {
				proposing.Go(func() {
					number, err := w.p.Evict(ctx, 0, o.Evict)
					w.say(word{Proposed: fmt.Sprint(number, " ", err)})
				})
			}
		case <-ask.C:
			g := grant{From: hostClock()}
			due := int(float64(g.From-since) / 1e9 * float64(demand))
			asked = max(asked, due-demand/10) // who was stopped does not ask for it all at once
			for ; asked < due; asked++ {
				if limit.Allow() {
					g.N++
				}
			}
			if g.To = hostClock(); g.N > 0 {
				w.say(word{Grant: &g})
			}
		case <-look.C:
			w.say(word{Sight: w.look()})
		}
	}
}

func (w *worker) look() *sight {
	l := w.p.limits.Stats()
	s := &sight{Configuration: l.Number, Complete: l.Completed, Share: l.Share, Fenced: l.Fenced}
	for _, peer := range w.p.node.Peers() {
		if peer.State == gossip.Fresh && peer.HearsUs {
			s.Fresh = append(s.Fresh, peer.Name)
		}
	}
	for _, m := range w.p.node.Members() {
		s.Members = append(s.Members, m.Name)
	}
	if v, ok := w.p.limits.View(workerKey); ok {
		s.Minted = float64(v.Sums.Minted) / micro
	}
	slices.Sort(s.Fresh)
	s.At = hostClock()
	return s
}

func (w *worker) propose(ctx context.Context, key string) {
	l := limiter.Limit{Rate: 1, Burst: 10}
	number, err := w.p.Set(ctx, Change{Limits: map[string]*limiter.Limit{key: &l}})
	w.say(word{Proposed: fmt.Sprint(number, " ", err)})
}

// --- the side of the test ----------------------------------------------------

// A hired is a worker as the test has it.
type hired struct {
	t    *testing.T
	cmd  *exec.Cmd
	in   *json.Encoder
	said chan struct{} // closed when all that it said has been read

	mu       sync.Mutex
	addr     string
	grants   []grant
	sights   []sight
	proposed string
	logged   []string
}

// hire starts a process, in a network namespace of its own if so. Whatever becomes
// of the test, and if it is killed, the process ends with it; its namespace and what
// is in there, with the process.
func hire(t *testing.T, spec workerSpec, ownNetwork bool) *hired {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	h := &hired{t: t, cmd: exec.CommandContext(context.WithoutCancel(t.Context()), self), said: make(chan struct{})}
	h.cmd.Env = append(os.Environ(), workerEnv+"="+string(text))
	h.cmd.Stderr = os.Stderr
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if ownNetwork {
		h.cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	}
	in, err := h.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := h.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	h.in = json.NewEncoder(in)
	go func() {
		defer close(h.said)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var x word
			if err := json.Unmarshal(lines.Bytes(), &x); err != nil {
				continue // the last one of a process that was killed
			}
			h.hear(x)
		}
	}()
	t.Cleanup(h.kill)
	return h
}

func (h *hired) hear(x word) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case x.Grant != nil:
		h.grants = append(h.grants, *x.Grant)
	case x.Sight != nil:
		h.sights = append(h.sights, *x.Sight)
	case x.Addr != "":
		h.addr = x.Addr
	case x.Proposed != "":
		h.proposed = x.Proposed
	case x.Log != "":
		h.logged = append(h.logged, x.Log)
	}
}

// kill ends it at once, stopped or not, and waits until it has; it may be called
// again.
func (h *hired) kill() {
	_ = h.cmd.Process.Kill()
	<-h.said
	_ = h.cmd.Wait() // that it was killed, or has been waited for
}

func (h *hired) order(o order) {
	h.t.Helper()
	if err := h.in.Encode(o); err != nil {
		h.t.Fatal(err)
	}
}

func (h *hired) demand(perSecond int) { h.t.Helper(); h.order(order{Demand: &perSecond}) }

func (h *hired) address() string { h.mu.Lock(); defer h.mu.Unlock(); return h.addr }

func (h *hired) proposal() string { h.mu.Lock(); defer h.mu.Unlock(); return h.proposed }

// log are the lines that have it in them.
func (h *hired) log(text string) (lines []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, line := range h.logged {
		if strings.Contains(line, text) {
			lines = append(lines, line)
		}
	}
	return lines
}

// now is how it stands.
func (h *hired) now() (s sight) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.sights); n > 0 {
		s = h.sights[n-1]
	}
	return s
}

// first is how it stood when ok came true, from an instant on.
func (h *hired) first(from int64, ok func(sight) bool) (at sight, found bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.sights {
		if s.At >= from && ok(s) {
			return s, true
		}
	}
	return at, false
}

func (h *hired) all() []grant { h.mu.Lock(); defer h.mu.Unlock(); return slices.Clone(h.grants) }

// within is what it got between two instants, that is: surely after the one and
// before the other.
func (h *hired) within(from, to int64) (n int) {
	for _, g := range h.all() {
		if g.From >= from && g.To <= to {
			n += g.N
		}
	}
	return n
}

// over is by how many tokens grants exceed burst + rate·T in some interval, as far
// as it is sure: a grant may have come at any instant between its two. Below 0 is
// how far they stayed away from it.
//
// Of the interval [a, b] those that end by b are surely in it, but for those that
// began before a. So it is the most of (ended by b) - rate·b - ((began before a) -
// rate·a) - burst over a ≤ b.
func over(grants []grant, rate float64, burst int) float64 {
	type edge struct {
		at    int64
		n     int
		begin bool
	}
	var edges []edge
	for _, g := range grants {
		edges = append(edges, edge{g.From, g.N, true}, edge{g.To, g.N, false})
	}
	slices.SortFunc(edges, func(a, b edge) int {
		switch {
		case a.at != b.at:
			return int(max(-1, min(1, a.at-b.at)))
		case a.begin == b.begin:
			return 0
		case a.begin:
			return -1
		}
		return 1
	})
	if len(edges) == 0 {
		return float64(-burst)
	}
	origin := edges[0].at
	began, ended, low, most := 0, 0, 0., float64(-burst)
	for _, e := range edges {
		line := rate * float64(e.at-origin) / 1e9
		if e.begin {
			low = min(low, float64(began)-line)
			began += e.n
			continue
		}
		ended += e.n
		most = max(most, float64(ended)-line-low-float64(burst))
	}
	return most
}

// What finds nothing in any run must find something where there is something.
func TestOver(t *testing.T) {
	at := func(ms float64) int64 { return int64(ms * 1e6) }
	steady := func(n int) (all []grant) {
		for i := range 1000 {
			all = append(all, grant{at(float64(i)), at(float64(i) + .5), n})
		}
		return all
	}
	for _, tt := range []struct {
		name   string
		grants []grant
		want   float64
	}{
		{"nothing", nil, -100},
		{"the burst, then the rate", append(steady(1), grant{at(0), at(0), 99}), -0.5},
		{"one more at the end", append(steady(1), grant{at(999), at(999.5), 101}), 1.5 - .5 - .5},
		{"twice the rate", steady(2), 2000 - 100 - 999.5},
		{"two bursts at once, late", []grant{{at(0), at(1), 1}, {at(5000), at(5000), 200}}, 100},
		{"two bursts, that may have been apart", []grant{{at(0), at(200), 100}, {at(0), at(200), 100}}, -100},
	} {
		if got := over(tt.grants, 1000, 100); got < tt.want-1.01 || got > tt.want+1.01 {
			t.Errorf("%s: %v over, want %v", tt.name, got, tt.want)
		}
	}
}

// A staff is three workers of one fleet.
type staff struct {
	t     *testing.T
	begun int64
	rate  float64
	burst int
	every []*hired // who ever worked

	register  string // a file, if there is one
	onSilence SilencePolicy
}

var members = []string{"a", "b", "c"}

func others(name string) []string {
	return slices.DeleteFunc(slices.Clone(members), func(n string) bool { return n == name })
}

// whole says that a process sees the other two, and they it.
func whole(name string) func(sight) bool {
	return func(s sight) bool {
		return slices.Equal(s.Fresh, others(name)) && slices.Equal(s.Members, members) && !s.Fenced && s.Configuration > 0 && s.Complete == s.Configuration
	}
}

// until waits for processes, which no event of the test's can wake.
func (s *staff) until(within time.Duration, what string, ok func() bool) {
	s.t.Helper()
	within = max(within, time.Minute) // a busy machine has time
	for end := time.Now().Add(within); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			for _, h := range s.every {
				s.t.Logf("%d: %+v", h.cmd.Process.Pid, h.now())
			}
			s.t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// judge checks the bound over everything that anybody was ever granted.
func (s *staff) judge() {
	s.t.Helper()
	end := hostClock()
	total := 0
	var grants []grant
	for _, h := range s.every {
		h.kill()
		for _, g := range h.all() {
			total += g.N
			grants = append(grants, g)
		}
	}
	took := float64(end-s.begun) / 1e9
	bound := float64(s.burst) + s.rate*took
	s.t.Logf("admitted %d of the bound %.0f in %.1f s; worst interval: %.1f tokens over", total, bound, took, over(grants, s.rate, s.burst))
	if float64(total) > bound {
		s.t.Errorf("admitted %d in %.3f s, above B + R·T = %.0f", total, took, bound)
	}
	if x := over(grants, s.rate, s.burst); x > 0 {
		s.t.Errorf("%.1f tokens above B + R·T in some interval", x)
	}
}

// lends says that one process alone gets much more than its third, so that the
// others' tokens come to it.
func (s *staff) lends(to *hired, of ...*hired) {
	s.t.Helper()
	for _, h := range of {
		h.demand(0)
	}
	to.demand(int(s.rate))
	s.until(20*time.Second, "one that asks alone gets what the others do not need", func() bool {
		now := hostClock()
		return float64(to.within(now-1e9, now)) > .6*s.rate
	})
}

func full() bool { return os.Getenv("STORMGUARD_FULL") != "" }

func listed(names ...string) string { return strings.Join(names, ", ") }
