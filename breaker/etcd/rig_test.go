// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/breaker/etcd"
	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

const (
	ms  = time.Millisecond
	sec = time.Second
)

// rig is several processes in one, around a real etcd: each has a client, an
// Authority, breakers and a clock of its own. Their handler calls are what a test
// counts.
type rig struct {
	t      *testing.T
	addr   string
	cfg    etcd.Config
	began  time.Time
	frozen bool         // a proxy begins so
	down   atomic.Bool  // the dependency
	took   atomic.Int64 // a handler call that is the fleet's probe, in ns
	out    atomic.Int64 // probes that are out
	most   atomic.Int64 // of these, at once
	total  atomic.Int64
	went   atomic.Int64 // when the latest probe went out, in ns since began
	procs  []*proc
}

// proc is one incarnation of a process.
type proc struct {
	r      *rig
	name   string
	client *clientv3.Client
	a      *etcd.Authority
	proxy  *proxy // between it and etcd; nil if there is none
	offset time.Duration
	broken atomic.Bool // its own path
	paused atomic.Bool // it stands still
	quit   chan struct{}
	wg     sync.WaitGroup
	once   sync.Once
	wake   chan struct{}
	detach func()

	mu     sync.Mutex
	leaves []*leaf
	solo   atomic.Int64 // probes that its own breaker let through, not the fleet
}

type leaf struct {
	b      *circuit.Breaker
	path   []string
	quiet  bool // no message waits
	flying bool
}

// leases is how long those of a process and of a probe last.
type leases struct{ incarnation, probe time.Duration }

var (
	long  = leases{60 * sec, 60 * sec} // not to be lost where a machine is busy
	some  = leases{10 * sec, 10 * sec} // not to be lost soon, and then to be waited for
	short = leases{2 * sec, 2 * sec}   // to be waited for
	brief = leases{60 * sec, 2 * sec}  // that of a probe is to be waited for
)

func newRig(t *testing.T, addr string, lease leases, names ...string) *rig {
	r := &rig{
		t: t, addr: addr, began: time.Now(),
		cfg: etcd.Config{
			Prefix: "/stormguard-test/" + strings.ToLower(rand.Text()[:10]),
			Roster: breaker.Roster{Number: 1, Names: names},
			Fleet: breaker.FleetConfig{
				Successes: 4, Base: 100 * ms, Cap: 500 * ms, Lease: lease.probe, Silent: lease.incarnation,
				Settle: 200 * ms, Turn: 800 * ms, Keep: time.Minute,
			},
		},
	}
	r.took.Store(int64(5 * ms))
	return r
}

func dial(t testing.TB, addr string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 5 * sec})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// start begins an incarnation, whose breakers are driven until it is stopped.
func (r *rig) start(name string, viaProxy bool) *proc {
	r.t.Helper()
	p := &proc{
		r: r, name: name, offset: time.Duration(len(r.procs)+1) * time.Hour, quit: make(chan struct{}), wake: make(chan struct{}, 1),
	}
	addr := r.addr
	if viaProxy {
		p.proxy = newProxy(r.t, addr)
		if r.frozen {
			p.proxy.freeze()
		}
		addr = p.proxy.addr()
	}
	p.client = dial(r.t, addr)
	cfg := r.cfg
	cfg.Name = name
	var err error
	if p.a, err = etcd.New(p.client, cfg, etcd.WithLogger(slog.New(slog.NewTextHandler(testWriter{r.t}, nil)).With("proc", name))); err != nil {
		r.t.Fatal(err)
	}
	if p.detach, err = p.a.Attach(func() {
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}); err != nil {
		r.t.Fatal(err)
	}
	p.wg.Go(p.drive)
	r.procs = append(r.procs, p)
	r.t.Cleanup(p.stop)
	return p
}

func (r *rig) startAll(viaProxy ...string) []*proc {
	r.t.Helper()
	var ps []*proc
	for _, n := range r.cfg.Roster.Names {
		via := false
		for _, v := range viaProxy {
			via = via || v == n
		}
		ps = append(ps, r.start(n, via))
	}
	for _, p := range ps {
		r.until(p.name+" reaches etcd", func() bool { return p.a.Err() == nil })
	}
	return ps
}

func adoptAll(ps []*proc, path ...string) (ls []*leaf) {
	for _, p := range ps {
		ls = append(ls, p.adopt(path...))
	}
	return ls
}

func (r *rig) trip(ps []*proc, ls []*leaf, n int) {
	r.t.Helper()
	for i := range n {
		ls[i].b.Trip(ps[i].now(), "timeout")
	}
	r.until("opens", func() bool {
		for _, l := range ls {
			if !l.b.Held() {
				return false
			}
		}
		return all(ps, ls, breaker.Open)()
	})
}

// three is a fleet of three, each with the scope g/orders, closed.
func three(t *testing.T, addr string, lease leases, viaProxy ...string) (*rig, []*proc, []*leaf) {
	r := newRig(t, addr, lease, "a", "b", "c")
	ps := r.startAll(viaProxy...)
	return r, ps, adoptAll(ps, "g", "orders")
}

// tripped is three whose dependency is down, and which the fleet holds open.
func tripped(t *testing.T, addr string, lease leases, viaProxy ...string) (*rig, []*proc, []*leaf) {
	r, ps, ls := three(t, addr, lease, viaProxy...)
	r.down.Store(true)
	r.trip(ps, ls, 2)
	return r, ps, ls
}

// oneAtATime fails if ever two probes were out at once, or none was.
func (r *rig) oneAtATime() {
	r.t.Helper()
	if n := r.most.Load(); n != 1 {
		r.t.Errorf("%d probes at once", n)
	}
}

// testWriter makes a test's log of what is logged.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// stop ends an incarnation in order; kill ends it without a word.
func (p *proc) stop() {
	p.once.Do(func() {
		close(p.quit)
		p.wg.Wait()
		p.detach()
		p.a.Close()
		_ = p.client.Close()
		if p.proxy != nil {
			p.proxy.close()
		}
	})
}

func (p *proc) kill() {
	p.once.Do(func() {
		close(p.quit)
		_ = p.client.Close() // what it would still say does not get through
		p.a.Close()
		p.wg.Wait()
		p.detach()
		if p.proxy != nil {
			p.proxy.close()
		}
	})
}

func (p *proc) now() time.Duration { return time.Since(p.r.began) + p.offset }

func (p *proc) adopt(path ...string) *leaf {
	p.r.t.Helper()
	b, err := circuit.New(strings.Join(path, "/"), breaker.Config{Base: p.r.cfg.Fleet.Base, Cap: p.r.cfg.Fleet.Cap})
	if err != nil {
		p.r.t.Fatal(err)
	}
	l := &leaf{b: b, path: path}
	if err := p.a.Adopt(p.now(), b, path, 0); err != nil {
		p.r.t.Fatal(err)
	}
	p.mu.Lock()
	p.leaves = append(p.leaves, l)
	p.mu.Unlock()
	return l
}

func (p *proc) leave(l *leaf) {
	p.mu.Lock()
	for i, other := range p.leaves {
		if other == l {
			p.leaves = append(p.leaves[:i], p.leaves[i+1:]...)
			break
		}
	}
	p.mu.Unlock()
	p.a.Leave(p.now(), l.b)
}

// drive is the guard's part: it steps the fleet, and calls a handler for what waits.
func (p *proc) drive() {
	tick := time.NewTicker(10 * ms)
	defer tick.Stop()
	for {
		select {
		case <-p.quit:
			return
		case <-tick.C:
		case <-p.wake:
		}
		if p.paused.Load() {
			continue
		}
		waiting := make(map[*circuit.Breaker]bool)
		p.mu.Lock()
		for _, l := range p.leaves {
			l.b.Tick(p.now())
			if !l.b.Closed() && !l.quiet {
				waiting[l.b] = true
				p.probeLocked(l)
			}
		}
		p.mu.Unlock()
		p.a.Step(p.now(), waiting)
	}
}

// probeLocked lets a message through if the breaker lets one.
func (p *proc) probeLocked(l *leaf) {
	if l.flying {
		return
	}
	tok, refused := l.b.Admit(p.now(), 1)
	if refused.State != breaker.Closed {
		return
	}
	l.flying = true
	fleets, took := l.b.Held(), 5*ms
	if fleets {
		p.r.went.Store(int64(time.Since(p.r.began)))
		p.r.total.Add(1)
		if n := p.r.out.Add(1); n > p.r.most.Load() {
			p.r.most.Store(n)
		}
	} else {
		p.solo.Add(1)
	}
	p.wg.Go(func() {
		if fleets {
			took = time.Duration(p.r.took.Load())
		}
		select {
		case <-time.After(took):
		case <-p.quit:
		}
		if fleets {
			p.r.out.Add(-1)
		}
		if p.r.down.Load() || p.broken.Load() {
			l.b.Failure(p.now(), tok, true)
		} else {
			l.b.Success(p.now(), tok)
		}
		p.mu.Lock()
		l.flying = false
		p.mu.Unlock()
	})
}

// scope is what the fleet makes of a breaker, as p knows.
func (p *proc) scope(l *leaf) breaker.FleetScope {
	s, _ := p.a.Scope(l.b)
	return s
}

// until waits for an event, however busy the machine is.
func (r *rig) until(what string, cond func() bool) time.Duration {
	r.t.Helper()
	began := time.Now()
	for !cond() {
		if time.Since(began) > 300*sec { // the machine's disk may stand still: etcd has waited 20 s for one fdatasync
			r.t.Fatalf("%s: never\n%s", what, r.describe())
		}
		time.Sleep(5 * ms)
	}
	return time.Since(began)
}

func (r *rig) describe() string {
	var b strings.Builder
	for _, p := range r.procs {
		p.mu.Lock()
		for _, l := range p.leaves {
			fmt.Fprintf(&b, "%s %v: %v, fleet %+v\n", p.name, p.a.Err(), l.b.Snapshot(p.now()).State, p.scope(l))
		}
		p.mu.Unlock()
	}
	return b.String()
}

// all reports whether every leaf is in a state as the fleet sees it.
func all(ps []*proc, ls []*leaf, s breaker.State) func() bool {
	return func() bool {
		for i, p := range ps {
			if f := p.scope(ls[i]); f.State != s || (s == breaker.Closed) != ls[i].b.Closed() {
				return false
			}
		}
		return true
	}
}

// pauser stops and continues the process of an etcd of the test's own.
func signalEtcd(t *testing.T, b *brokers.Broker, s syscall.Signal) {
	t.Helper()
	info, err := b.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(info["pid1"])
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, s); err != nil {
		t.Fatal(err)
	}
}

// proxy is a wire that can be cut: bytes wait, as in a network that lost its way,
// or connections are refused.
type proxy struct {
	ln     net.Listener
	target string
	wg     sync.WaitGroup

	mu     sync.Mutex
	frozen chan struct{} // not nil: nothing passes until it is closed
	conns  map[net.Conn]struct{}
	closed bool
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	u, err := url.Parse(target)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{ln: ln, target: u.Host, conns: make(map[net.Conn]struct{})}
	p.wg.Go(p.accept)
	return p
}

func (p *proxy) addr() string { return "http://" + p.ln.Addr().String() }

func (p *proxy) accept() {
	for {
		c, err := p.ln.Accept()
		if err != nil {
			return
		}
		s, err := new(net.Dialer).DialContext(context.Background(), "tcp", p.target)
		if err != nil {
			_ = c.Close()
			continue
		}
		if !p.add(c) || !p.add(s) {
			_, _ = c.Close(), s.Close()
			continue
		}
		p.wg.Go(func() { p.copy(c, s) })
		p.wg.Go(func() { p.copy(s, c) })
	}
}

func (p *proxy) add(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.conns[c] = struct{}{}
	}
	return !p.closed
}

func (p *proxy) copy(to, from net.Conn) {
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		if n > 0 {
			p.mu.Lock()
			frozen := p.frozen
			p.mu.Unlock()
			if frozen != nil {
				<-frozen
			}
			if _, werr := to.Write(b[:n]); werr != nil {
				err = io.ErrClosedPipe
			}
		}
		if err != nil {
			_, _ = to.Close(), from.Close()
			return
		}
	}
}

func (p *proxy) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.frozen == nil {
		p.frozen = make(chan struct{})
	}
}

func (p *proxy) thaw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.frozen != nil {
		close(p.frozen)
		p.frozen = nil
	}
}

// drop ends the connections there are.
func (p *proxy) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
		delete(p.conns, c)
	}
}

func (p *proxy) close() {
	_ = p.ln.Close()
	p.thaw()
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}
