// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"container/heap"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// world is a fleet on virtual time: real breakers and Verdicts in each process,
// a network that loses, repeats, delays and is cut, and one dependency. A seed
// replays exactly.
type world struct {
	t      testing.TB
	rng    *rand.Rand
	now    time.Duration
	events events
	seq    int
	nodes  []*node
	opt    options

	down     bool                         // the dependency
	cut      func(a, b int) bool          // no packets from a to b
	stirred  time.Duration                // cut last changed, or somebody began or ended
	attempts int                          // on a dependency that was down
	good     int                          // handled
	out      map[int]Position             // nodes with a permitted probe out
	overlaps int                          // permitted probes that began while another was out in reach
	decided  func(n *node, was, is State) // a node's view changed
	trace    []string
	tracing  bool
}

type options struct {
	nodes       int
	cfg         Config
	brk         breaker.Config
	rate        int     // messages a second and node; 0 is none
	loss        float64 // of packets
	dup         float64
	delay       time.Duration // at least; as much again at random
	gossip      time.Duration // pacing of packets to one peer
	local       bool          // no fleet
	incarnation uint64        // added to incarnations
	quiet       map[int]bool  // nodes without traffic
}

type node struct {
	w           *world
	i           int
	name        string
	incarnation uint64
	origin      time.Duration // its clock's
	alive       bool
	epoch       int // incarnations
	v           *Verdicts
	b           *circuit.Breaker
	broken      bool // its own path
	frozen      bool // its handler does not return
	idle        bool // no new messages

	waiting int
	busy    bool
	probing bool
	head    uint64
	good    int
	last    State

	links []link
}

// link is what a session remembers of a peer.
type link struct {
	acked   uint64 // of ours, by it
	sentAt  time.Duration
	sentTo  uint64
	upto    uint64 // of its, by us
	replica crdt.Replica
	owes    bool
	sent    time.Duration // its latest Sent
	met     bool
}

type packet struct {
	from        crdt.Replica
	sent, echo  time.Duration
	payload     []byte
	since, upto uint64
	ack         uint64
	ackOf       crdt.Replica
}

type event struct {
	at  time.Duration
	seq int
	do  func()
}

type events []event

func (e *events) Len() int { return len(*e) }
func (e *events) Less(i, j int) bool {
	return (*e)[i].at < (*e)[j].at || (*e)[i].at == (*e)[j].at && (*e)[i].seq < (*e)[j].seq
}
func (e *events) Swap(i, j int) { (*e)[i], (*e)[j] = (*e)[j], (*e)[i] }
func (e *events) Push(x any)    { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// islands cuts the network into groups: nodes of different numbers do not hear
// each other.
func islands(of ...int) func(a, b int) bool {
	return func(a, b int) bool { return of[a] != of[b] }
}

func whole(int, int) bool { return false }

const scopeName = "orders"

func newWorld(t testing.TB, seed uint64, o options) *world {
	if _, ok := t.(*testing.T); ok && raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	def(&o.gossip, 50*ms)
	def(&o.delay, 5*ms)
	w := &world{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), opt: o,
		cut: whole,
		out: make(map[int]Position),
	}
	for i := range o.nodes {
		n := &node{w: w, i: i, name: fmt.Sprintf("node-%02d", i)}
		w.nodes = append(w.nodes, n)
	}
	for _, n := range w.nodes {
		n.start()
	}
	return w
}

func (w *world) roster() Roster {
	r := Roster{Number: 1}
	for _, n := range w.nodes {
		r.Names = append(r.Names, n.name)
	}
	return r
}

func (w *world) after(d time.Duration, do func()) {
	w.seq++
	heap.Push(&w.events, event{w.now + d, w.seq, do})
}

func (w *world) run(d time.Duration) {
	end := w.now + d
	for len(w.events) > 0 && w.events[0].at <= end {
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		e.do()
	}
	w.now = end
}

// until runs until ok, and fails after at most d.
func (w *world) until(d time.Duration, what string, ok func() bool) time.Duration {
	w.t.Helper()
	began := w.now
	for !ok() {
		if w.now-began >= d {
			w.t.Fatalf("%s: not within %v", what, d)
		}
		w.run(20 * ms)
	}
	return w.now - began
}

// watch calls f at every change of what a process takes for the fleet's state.
func (w *world) watch(f func(n *node, was, is State)) {
	for _, n := range w.nodes {
		n.last = n.v.Status(n.clock(), scopeName).State
	}
	w.decided = f
}

func (w *world) logf(format string, args ...any) {
	if w.tracing {
		w.trace = append(w.trace, fmt.Sprintf("%v ", w.now)+fmt.Sprintf(format, args...))
	}
}

func (w *world) hash() uint64 {
	h := fnv.New64a()
	for _, l := range w.trace {
		h.Write([]byte(l))
	}
	return h.Sum64()
}

func (w *world) closed() bool {
	return !slices.ContainsFunc(w.nodes, func(n *node) bool { return n.alive && !n.b.Closed() })
}

func (n *node) clock() time.Duration { return n.w.now + n.origin }

func (n *node) replica() crdt.Replica { return crdt.Replica{Name: n.name, Incarnation: n.incarnation} }

// start begins an incarnation: empty memory, another origin of the clock.
func (n *node) start() {
	w := n.w
	n.epoch++
	w.stirred = w.now
	n.alive, n.busy, n.waiting, n.probing = true, false, 0, false
	n.incarnation = w.opt.incarnation + uint64(n.epoch)
	n.origin = time.Duration(w.rng.Int64N(int64(1000 * sec)))
	n.links = make([]link, len(w.nodes))
	n.last = State{}
	var err error
	if n.v, err = NewVerdicts(n.clock(), w.opt.cfg, n.replica(), w.roster()); err != nil {
		w.t.Fatal(err)
	}
	if n.b, err = circuit.New(scopeName, w.opt.brk, circuit.WithRand(w.rng.Float64)); err != nil {
		w.t.Fatal(err)
	}
	if !w.opt.local {
		n.adopt()
	}
	epoch := n.epoch
	n.every(epoch, 50*ms, n.tick)
	n.every(epoch, w.opt.gossip, n.gossip)
	if w.opt.rate > 0 && !w.opt.quiet[n.i] {
		n.every(epoch, sec/time.Duration(w.opt.rate), n.arrive)
	}
}

func (n *node) adopt() {
	a, err := n.v.Adopt(n.clock(), scopeName)
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.apply(a)
	n.drive()
}

// crash ends an incarnation without a word.
func (n *node) crash() {
	n.alive = false
	n.epoch++
	n.w.stirred = n.w.now
	delete(n.w.out, n.i)
	n.w.logf("%s crashes", n.name)
}

// every calls f now and then, until the incarnation ends.
func (n *node) every(epoch int, d time.Duration, f func()) {
	var again func()
	again = func() {
		if n.epoch == epoch {
			f()
			n.w.after(d, again)
		}
	}
	n.w.after(time.Duration(n.w.rng.Int64N(int64(d))), again)
}

func (n *node) tick() {
	n.b.Tick(n.clock())
	if !n.w.opt.local {
		n.v.Want(n.clock(), scopeName, n.waiting > 0 && !n.b.Closed())
		n.v.Tick(n.clock())
		n.drive()
	}
	n.work()
}

func (n *node) apply(a Action) {
	if a.Kind == 0 {
		return
	}
	n.w.logf("%s %v for %v level %d cause %s at %v", n.name, a.Kind, a.For, a.BackoffLevel, a.Cause, a.At)
	a.Apply(n.clock(), n.b)
	if a.Kind != Probe && n.probing {
		n.probing = false // its token is void
		delete(n.w.out, n.i)
	}
}

// drive does what a driver does after each call.
func (n *node) drive() {
	if n.w.opt.local {
		return
	}
	n.v.m.Observe(n.clock(), scopeName, n.b.Snapshot(n.clock()))
	for {
		acts := n.v.Actions(nil)
		if len(acts) == 0 {
			break
		}
		for _, a := range acts {
			n.apply(a)
		}
		n.v.m.Observe(n.clock(), scopeName, n.b.Snapshot(n.clock()))
	}
	if n.w.decided != nil {
		if s := n.v.Status(n.clock(), scopeName).State; s != n.last {
			n.w.decided(n, n.last, s)
			n.last = s
		}
	}
}

func (n *node) arrive() {
	if n.idle {
		return
	}
	n.waiting = min(n.waiting+1, 200)
	n.work()
}

// work is one worker: it handles what waits, if the breaker lets it.
func (n *node) work() {
	if n.busy || n.waiting == 0 {
		return
	}
	tok, refusal := n.b.Admit(n.clock(), n.head+1)
	if !refusal.OK() {
		if !n.w.opt.local {
			n.v.Want(n.clock(), scopeName, true)
			n.drive()
		}
		return
	}
	w := n.w
	n.busy = true
	n.head++
	held := tok.Probe() && n.b.Snapshot(n.clock()).Held
	if held {
		n.probe()
	}
	bad := w.down || n.broken
	if w.down {
		w.attempts++
	}
	n.drive()
	epoch := n.epoch
	w.after(5*ms, func() {
		if n.epoch != epoch || n.frozen {
			return
		}
		n.busy = false
		if held && n.probing {
			n.probing = false
			delete(w.out, n.i)
		}
		if bad {
			n.b.Failure(n.clock(), tok, true)
		} else {
			n.b.Success(n.clock(), tok)
			n.waiting--
			n.good++
			w.good++
		}
		n.drive()
		n.work()
	})
}

// probe counts a permitted probe, and those that it overlaps in reach.
func (n *node) probe() {
	w := n.w
	at := n.v.Status(n.clock(), scopeName).Position
	settled := w.now-w.stirred > w.opt.cfg.WithDefaults().Silent+w.opt.cfg.WithDefaults().Settle
	for i := range w.out {
		if !settled {
			break // the sides do not know themselves yet
		}
		if !w.cut(i, n.i) && !w.cut(n.i, i) {
			w.overlaps++
			w.logf("OVERLAP %s and %s", n.name, w.nodes[i].name)
		}
	}
	w.out[n.i] = at
	n.probing = true
	w.logf("%s probes at %v", n.name, at)
}

// gossip sends each peer what it has not acknowledged, or that we are there.
func (n *node) gossip() {
	if n.w.opt.local {
		return
	}
	now := n.clock()
	for i, p := range n.w.nodes {
		if i == n.i {
			continue
		}
		l := &n.links[i]
		to := l.replica
		if !l.met {
			to = crdt.Replica{Name: p.name}
		}
		mark := n.v.Mark(to)
		news := mark > l.acked && (mark > l.sentTo || now-l.sentAt >= 2*n.w.opt.gossip)
		if !news && !l.owes && now-l.sentAt < sec && l.sentAt != 0 {
			continue
		}
		payload, upto := n.v.Delta(now, nil, to, l.acked, 1200)
		if len(payload) > 1200 {
			n.w.t.Fatalf("Delta appended %d bytes", len(payload))
		}
		l.sentAt, l.sentTo, l.owes = now, upto, false
		n.w.send(n, p, packet{
			from: n.replica(), sent: now, echo: l.sent, payload: payload,
			since: l.acked, upto: upto, ack: l.upto, ackOf: p.incarnationOf(l),
		})
	}
}

func (n *node) incarnationOf(l *link) crdt.Replica { return l.replica }

func (w *world) send(from, to *node, p packet) {
	copies := 1
	if w.rng.Float64() < w.opt.dup {
		copies = 2
	}
	for range copies {
		if w.rng.Float64() < w.opt.loss || w.cut(from.i, to.i) {
			continue
		}
		d := w.opt.delay + time.Duration(w.rng.Int64N(int64(w.opt.delay)+1))
		w.after(d, func() {
			if to.alive && !w.cut(from.i, to.i) {
				to.receive(from.i, p)
			}
		})
	}
}

func (n *node) receive(i int, p packet) {
	l := &n.links[i]
	if !l.met || l.replica.Incarnation < p.from.Incarnation {
		if l.met {
			n.v.Gone(n.clock(), l.replica)
		}
		*l = link{met: true, replica: p.from}
	}
	if p.from != l.replica {
		return
	}
	if err := n.v.Merge(crdt.Contact{From: p.from, Now: n.clock(), Sent: p.sent, Echo: n.echo(p)}, p.payload); err != nil {
		n.w.t.Fatal(err)
	}
	l.sent = max(l.sent, p.sent)
	if p.upto > l.upto && (p.since == 0 || p.ackOf == n.replica()) {
		l.upto, l.owes = p.upto, true
	}
	if p.ackOf == n.replica() {
		l.acked = max(l.acked, p.ack)
	}
	n.drive()
}

// echo is only ours to read if it is of this incarnation.
func (n *node) echo(p packet) time.Duration {
	if p.ackOf != n.replica() {
		return 0
	}
	return p.echo
}
