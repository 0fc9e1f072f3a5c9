// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

const ms = time.Millisecond

// A fleet is nodes on a simulated network, for one key: packets every 2 ms at
// most while something is not acknowledged, every 50 ms at least; one way takes
// 0.5 ms and an exponential 0.5 ms more. All from one seed.
type fleet struct {
	t     testing.TB
	cfg   Config
	limit Limit
	rand  *rand.Rand
	now   time.Duration
	queue events
	seq   uint64
	nodes []*simNode
	free  [][]byte
	down  func(now time.Duration, from, to int) bool // the way is cut
	loss  float64
	dup   float64
	slow  time.Duration // more delay, up to
	probe func()        // after each event, or nil
	keep  func(*event)  // gets packets that were received, or nil

	ideal    bucket // what one ideal limiter admits of the same demand
	bound    bucket // what may be admitted at most
	over     float64
	admitted int
	perfect  int
	by       []int // admissions by node
	bins     [][2]int32
	packets  int
	bytes    int
	refused  int
	spent    int64 // by incarnations that are over
}

type bucket struct {
	rate, burst, level float64
	at                 time.Duration
}

func (b *bucket) refill(now time.Duration) {
	b.level = min(b.burst, b.level+b.rate*(now-b.at).Seconds())
	b.at = now
}

type simNode struct {
	*Node
	alive       bool
	incarnation uint64
	ppm         float64
	origin      time.Duration // true time at which its clock was at base
	base        time.Duration
	ticks       time.Duration // true time of the tick that is due
	row         *row
	counted     *row // that check has seen
	peers       []simPeer
	queue       int // waiters
}

// A simPeer is what a session keeps of a peer.
type simPeer struct {
	incarnation   uint64 // of the peer, as it is known
	acked, merged uint64
	sent, heard   time.Duration // last sent; newest stamp of the peer
	owes          bool          // an ack
}

type eventKind uint8

const (
	evPoll eventKind = iota
	evTick
	evPacket
	evCall
)

type event struct {
	at              time.Duration
	seq             uint64
	kind            eventKind
	node            int32
	from            int32
	incarnation     uint64 // the receiver's
	fromIncarnation uint64
	sent            time.Duration
	echo            time.Duration
	ack             uint64
	upto            uint64
	news            bool // there was something to acknowledge
	data            []byte
	call            func()
}

type events []*event

func (q *events) Len() int { return len(*q) }
func (q *events) Less(i, j int) bool {
	a, b := (*q)[i], (*q)[j]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}
func (q *events) Swap(i, j int) { (*q)[i], (*q)[j] = (*q)[j], (*q)[i] }
func (q *events) Push(x any)    { *q = append(*q, x.(*event)) }
func (q *events) Pop() any {
	old := *q
	e := old[len(old)-1]
	*q = old[:len(old)-1]
	return e
}

const simFloor, simKeep, simBin = 2 * ms, 50 * ms, 100 * ms

func newFleet(t testing.TB, n int, l Limit, seed uint64) *fleet {
	cfg := Config{Limit: l}
	for i := range n {
		cfg.Roster.Members = append(cfg.Roster.Members, Member{Name: fmt.Sprintf("n%02d", i)})
	}
	return newFleetOf(t, n, cfg, seed)
}

// newFleetOf has n nodes, of which the roster may know fewer.
func newFleetOf(t testing.TB, n int, cfg Config, seed uint64) *fleet {
	if _, ok := t.(*testing.T); ok && raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	f := &fleet{t: t, cfg: cfg, limit: cfg.Limit, rand: rand.New(rand.NewPCG(seed, 1)), by: make([]int, n)}
	f.ideal = bucket{rate: cfg.Limit.Rate, burst: float64(cfg.Limit.Burst), level: float64(cfg.Limit.Burst)}
	f.bound = f.ideal
	for i := range n {
		f.nodes = append(f.nodes, &simNode{peers: make([]simPeer, n)})
		f.start(i)
	}
	return f
}

// start begins an incarnation.
func (f *fleet) start(i int) {
	s := f.nodes[i]
	s.incarnation++
	s.alive = true
	s.origin, s.base = f.now, time.Duration(f.rand.Int64N(int64(time.Hour)))
	self := crdt.Replica{Name: fmt.Sprintf("n%02d", i), Incarnation: s.incarnation}
	n, err := NewNode(self, f.cfg, s.clock(f.now))
	if err != nil {
		f.t.Fatal(err)
	}
	s.Node, s.row, s.ticks = n, nil, never
	for j := range s.peers {
		s.peers[j] = simPeer{incarnation: 1, sent: -never / 2}
		if j < len(f.nodes) {
			s.peers[j].incarnation = max(1, f.nodes[j].incarnation)
		}
	}
	f.post(&event{at: f.now + time.Duration(f.rand.Int64N(int64(simFloor))), kind: evPoll, node: int32(i), incarnation: s.incarnation})
}

func (f *fleet) crash(i int) {
	s := f.nodes[i]
	if r := s.rows["k"]; r != nil {
		f.spent += r.sum.Own + r.sum.Borrowed
	}
	s.alive, s.queue, s.row, s.counted = false, 0, nil, nil
}

func (f *fleet) at(when time.Duration, call func()) {
	f.post(&event{at: when, kind: evCall, call: call})
}

func (s *simNode) clock(now time.Duration) time.Duration {
	d := now - s.origin
	return s.base + d + time.Duration(float64(d)*s.ppm*1e-6)
}

// truly is the true time at which the node's clock says t.
func (s *simNode) truly(t time.Duration) time.Duration {
	d := t - s.base
	return s.origin + time.Duration(math.Ceil(float64(d)/(1+s.ppm*1e-6))) + 1
}

func (f *fleet) post(e *event) {
	f.seq++
	e.seq = f.seq
	heap.Push(&f.queue, e)
}

func (f *fleet) key(s *simNode) *row {
	if s.row == nil || s.rows["k"] != s.row {
		s.row = s.Node.row("k")
	}
	return s.row
}

// settleNode serves waiters and sees to it that the node is ticked in time.
func (f *fleet) settleNode(i int) {
	s := f.nodes[i]
	for {
		now := s.clock(f.now)
		if s.Wake() <= now {
			s.Tick(now)
			continue
		}
		s.ripe = s.ripe[:0]
		if r := s.rows["k"]; r != nil {
			r.ripe = false
			s.advance(now)
			for s.queue > 0 && s.serve(r, micro) {
				s.queue--
				f.admit(i)
			}
			if s.Wake() <= now {
				continue
			}
		}
		break
	}
	if w := s.Wake(); w < never {
		at := s.truly(w)
		if s.ticks <= f.now || at < s.ticks {
			s.ticks = at
			f.post(&event{at: at, kind: evTick, node: int32(i), incarnation: s.incarnation})
		}
	}
}

func (f *fleet) admit(i int) {
	f.admitted++
	f.by[i]++
	f.bound.refill(f.now)
	f.bound.level--
	f.over = max(f.over, -f.bound.level)
}

// arrive is one message at a node that is denied or admitted now.
func (f *fleet) arrive(i int) {
	f.ideal.refill(f.now)
	if f.ideal.level >= 1 {
		f.ideal.level--
		f.perfect++
	}
	s := f.nodes[i]
	if !s.alive {
		return
	}
	s.advance(s.clock(f.now))
	if s.take(f.key(s), micro) {
		f.admit(i)
	}
	f.settleNode(i)
}

// wait adds a waiter.
func (f *fleet) wait(i int) {
	s := f.nodes[i]
	s.queue++
	s.advance(s.clock(f.now))
	s.demand(f.key(s), micro)
	f.settleNode(i)
}

func (f *fleet) poll(i int) {
	s := f.nodes[i]
	for j := range s.peers {
		if j == i {
			continue
		}
		p := &s.peers[j]
		to := crdt.Replica{Name: f.nodes[j].self.Name, Incarnation: p.incarnation}
		if f.now-p.sent < simKeep && s.Mark(to) <= p.acked && !p.owes {
			continue
		}
		var buf []byte
		if len(f.free) > 0 {
			buf = f.free[len(f.free)-1][:0]
			f.free = f.free[:len(f.free)-1]
		}
		now := s.clock(f.now)
		news := s.Mark(to) > p.acked
		data, upto := s.Delta(now, buf, to, p.acked, 1200)
		p.sent, p.owes = f.now, false
		f.packets++
		f.bytes += len(data)
		e := event{
			kind: evPacket, node: int32(j), from: int32(i), incarnation: p.incarnation, fromIncarnation: s.incarnation,
			sent: now, echo: p.heard, ack: p.merged, upto: upto, news: news, data: data,
		}
		f.send(&e, i, j)
		if f.rand.Float64() < f.dup {
			again := e
			again.data = append([]byte(nil), data...)
			f.send(&again, i, j)
		}
	}
	f.post(&event{at: f.now + simFloor, kind: evPoll, node: int32(i), incarnation: s.incarnation})
}

func (f *fleet) send(e *event, from, to int) {
	if f.down != nil && f.down(f.now, from, to) || f.loss > 0 && f.rand.Float64() < f.loss {
		return
	}
	e.at = f.now + 500*time.Microsecond + time.Duration(f.rand.ExpFloat64()*5e5)
	if f.slow > 0 {
		e.at += time.Duration(f.rand.Int64N(int64(f.slow)))
	}
	f.post(e)
}

func (f *fleet) receive(e *event) {
	i, j := int(e.node), int(e.from)
	s := f.nodes[i]
	p := &s.peers[j]
	if !s.alive || e.incarnation != s.incarnation || e.fromIncarnation < p.incarnation {
		return // a session tells incarnations apart
	}
	if e.fromIncarnation > p.incarnation {
		*p = simPeer{incarnation: e.fromIncarnation, sent: p.sent}
	}
	now := s.clock(f.now)
	c := crdt.Contact{From: crdt.Replica{Name: f.nodes[j].self.Name, Incarnation: e.fromIncarnation}, Now: now, Sent: e.sent, Echo: e.echo}
	p.heard = max(p.heard, e.sent)
	p.acked = max(p.acked, e.ack)
	if err := s.Merge(c, e.data); err == nil {
		p.merged = max(p.merged, e.upto)
		p.owes = p.owes || e.news
	} else {
		f.refused++
	}
	f.settleNode(i)
	if f.keep != nil {
		f.keep(e)
		return
	}
	f.free = append(f.free, e.data)
}

// step does the next event, if it is due before end.
func (f *fleet) step(end time.Duration) bool {
	if len(f.queue) == 0 || f.queue[0].at > end {
		return false
	}
	e := heap.Pop(&f.queue).(*event)
	f.now = e.at
	switch e.kind {
	case evCall:
		e.call()
	case evPacket:
		f.receive(e)
	default:
		s := f.nodes[e.node]
		if !s.alive || s.incarnation != e.incarnation {
			break
		}
		if e.kind == evPoll {
			f.poll(int(e.node))
		} else {
			if s.ticks <= f.now {
				s.ticks = never
			}
			f.settleNode(int(e.node))
		}
	}
	if f.probe != nil {
		f.probe()
	}
	return true
}

// run lets messages arrive by a Poisson process until end: rate a second, each
// at the node that where says.
func (f *fleet) run(end time.Duration, rate float64, where func(now time.Duration) int) {
	gap := func() time.Duration { return time.Duration(f.rand.ExpFloat64() / rate * 1e9) }
	next := f.now + gap()
	bin := f.now + simBin
	for {
		at := min(next, bin, end)
		for f.step(at) {
		}
		f.now = at
		switch at {
		case end:
			return
		case bin:
			f.bins = append(f.bins, [2]int32{int32(f.admitted), int32(f.perfect)})
			bin += simBin
		default:
			f.arrive(where(f.now))
			if f.probe != nil {
				f.probe()
			}
			next += gap()
		}
	}
}

// pass lets time pass until end, with no demand.
func (f *fleet) pass(end time.Duration) {
	for f.step(end) {
	}
	f.now = end
}

// worst is the error of the worst 10 s window that lies between from and to,
// against the ideal.
func (f *fleet) worst(from, to time.Duration) (err float64) {
	const width = int(10 * time.Second / simBin)
	first, last := int(from/simBin), min(int(to/simBin), len(f.bins))
	for i := first; i+width < last; i++ {
		a, b := f.bins[i], f.bins[i+width]
		e := float64(b[0]-a[0])/float64(b[1]-a[1]) - 1
		if math.Abs(e) > math.Abs(err) {
			err = e
		}
	}
	return err
}
