// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/limiter"
)

// country is a fleet on virtual time that changes its charter: the real Charters,
// books that keep the rule of the smallest share and nothing else, clocks that
// drift, and a network that loses, repeats, delays and is cut. A seed replays
// exactly.
type country struct {
	t      rapid.TB
	rng    *rand.Rand
	cfg    CharterConfig
	opt    terrain
	now    time.Duration
	events events
	seq    int
	nodes  []*citizen
	cut    func(a, b int) bool
	loss   float64

	chosen   map[uint64]*decree // as any books ever adopted them
	complete uint64             // as any books were ever told
	newest   uint64
	rested   int // came to rest after mischief
	packets  int
	bytes    int
	most     float64 // the largest share of the limit ever in use
	loose    bool    // an assertion of an operator was wrong: shares are not checked
}

type terrain struct {
	loss, dup float64
	delay     time.Duration // at least; plus as much, exponentially
	floor     time.Duration
	keep      time.Duration
	lag       time.Duration // books take up to that long to shrink
	drift     float64       // of clocks, at most
	room      int
	rarely    bool // shares are checked each 10 ms only
}

type citizen struct {
	w      *country
	i      int
	name   string
	life   uint64
	epoch  int
	alive  bool
	c      *Charters
	books  *modelBooks
	began  time.Duration
	origin time.Duration
	rate   float64
	peers  []acquaintance
	dirty  uint64 // seq that was flushed
	wakeAt time.Duration
	nextAt time.Duration // of the latest flush, plus the floor
	rejoin bool          // joins as soon as it is a guest
	heavy  int
	barred bool          // an operator said that it does not start again
	young  time.Duration // until then its books keep within nothing: an earlier life's loans
}

// acquaintance is what a session remembers of a peer.
type acquaintance struct {
	life   uint64
	acked  uint64 // of ours, by it
	upto   uint64 // of its, by us
	sentAt time.Duration
	sent   bool
	owes   bool
}

// modelBooks use the smallest share between the last complete charter and the
// newest adopted, after a while.
type modelBooks struct {
	n      *citizen
	window []limiter.Charter
	held   float64
	due    time.Duration // true time at which held has shrunk
	until  time.Duration
	minted bool
	refuse bool
}

func rateOf(c *limiter.Charter, name string) float64 {
	sum := int64(0)
	for _, m := range c.Roster.Members {
		sum += m.Weighs()
	}
	for _, m := range c.Roster.Members {
		if m.Name == name {
			return c.Limit.Rate * float64(m.Weighs()) / float64(sum)
		}
	}
	return 0
}

func (b *modelBooks) target() float64 {
	least := math.Inf(1)
	for i := range b.window {
		least = min(least, rateOf(&b.window[i], b.n.name))
	}
	return least
}

func (b *modelBooks) settle() {
	if t := b.target(); b.held < t || b.n.w.now >= b.due || !b.minted { // a life that never minted has nothing
		b.held = t
	}
}

func (b *modelBooks) Adopt(_ time.Duration, c limiter.Charter) error {
	w := b.n.w
	if b.refuse {
		return errRefused
	}
	d := newDecree(c, nil)
	if old := w.chosen[c.Number]; old != nil && old.digest != d.digest {
		w.t.Fatalf("%v: two charters of number %d:\n%+v\n%+v", w.now, c.Number, old.Charter, c)
	} else if old == nil {
		w.chosen[c.Number] = d
	}
	if k := len(b.window); k > 0 && b.window[k-1].Number >= c.Number {
		w.t.Fatalf("%s: charter %d adopted after %d", b.n.name, c.Number, b.window[k-1].Number)
	}
	w.newest = max(w.newest, c.Number)
	w.tracef("%s#%d adopts %d: rate %v, roster %v", b.n.name, b.n.life, c.Number, c.Limit.Rate, c.Roster.Members)
	b.settle()
	first := len(b.window) == 0
	b.window = append(b.window, c)
	b.due = w.now
	if w.opt.lag > 0 && !first {
		b.due += time.Duration(w.rng.Int64N(int64(w.opt.lag)))
	}
	b.settle()
	return nil
}

func (b *modelBooks) Complete(_ time.Duration, number uint64) {
	w := b.n.w
	w.complete = max(w.complete, number)
	w.tracef("%s#%d: %d is complete", b.n.name, b.n.life, number)
	for len(b.window) > 1 && b.window[0].Number < number {
		b.window = b.window[1:]
	}
	if b.window[0].Number != number {
		w.t.Fatalf("%s: %d is complete, but it was not adopted", b.n.name, number)
	}
	b.settle()
}

func (b *modelBooks) Applied() uint64 {
	if b.n.w.now < b.n.young {
		return 0
	}
	b.settle()
	if b.held > b.target() {
		return b.window[0].Number
	}
	return b.window[len(b.window)-1].Number
}

func (b *modelBooks) Mint(until time.Duration) {
	if !b.minted {
		b.n.w.tracef("%s#%d mints", b.n.name, b.n.life)
	}
	b.until, b.minted = until, true
}

// using is what the process mints with now.
func (b *modelBooks) using() float64 {
	if !b.n.alive || !b.minted || b.until <= b.n.clock() {
		return 0
	}
	b.settle()
	return b.held
}

var errRefused = fmt.Errorf("refused")

// nation is a founding roster of n names, each of weight 1.
func nation(n int) limiter.Charter {
	c := limiter.Charter{Limit: limiter.Limit{Rate: 1000, Burst: 1_000_000}}
	c.Roster.Guests = true
	for i := range n {
		c.Roster.Members = append(c.Roster.Members, limiter.Member{Name: fmt.Sprintf("n%03d", i)})
	}
	return c
}

func newCountry(t rapid.TB, seed uint64, founders, nodes int, cfg CharterConfig, o terrain) *country {
	def(&o.delay, ms)
	def(&o.floor, 2*ms)
	def(&o.keep, 50*ms)
	def(&o.room, 1300)
	def(&cfg.Fleet, "f")
	if cfg.Founding.Roster.Members == nil {
		cfg.Founding = nation(founders)
	}
	w := &country{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), cfg: cfg, opt: o, cut: whole, loss: o.loss,
		chosen: map[uint64]*decree{},
	}
	for i := range nodes {
		n := &citizen{w: w, i: i, name: fmt.Sprintf("n%03d", i), peers: make([]acquaintance, nodes)}
		w.nodes = append(w.nodes, n)
	}
	return w
}

// tracef notes what happened, for whoever looks for the reason of a failure.
func (w *country) tracef(format string, args ...any) {
	if os.Getenv("STORMGUARD_TRACE") != "" {
		w.t.Logf("%v: %s", w.now, fmt.Sprintf(format, args...))
	}
}

func (w *country) at(t time.Duration, do func()) {
	w.seq++
	heap.Push(&w.events, event{max(t, w.now), w.seq, do})
}

func (w *country) run(until time.Duration) {
	w.runUntil(until, func() bool { return false })
}

// runUntil reports whether done came true before the instant.
func (w *country) runUntil(until time.Duration, done func() bool) bool {
	sampled := time.Duration(0)
	for len(w.events) > 0 && w.events[0].at <= until {
		if done() {
			return true
		}
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		e.do()
		if !w.opt.rarely || w.now >= sampled {
			w.check()
			sampled = w.now + 10*ms
		}
	}
	w.now = max(w.now, until)
	return done()
}

// check is the law: what is in use is never more than the limit that is complete.
func (w *country) check() {
	sum := 0.0
	for _, n := range w.nodes {
		if n.alive {
			sum += n.books.using()
		}
	}
	limit := w.chosen[max(1, w.complete)].Limit.Rate
	w.most = max(w.most, sum/limit)
	if sum > limit*(1+1e-9) && !w.loose {
		for _, n := range w.nodes {
			if n.alive {
				s := n.c.Status(n.clock())
				w.t.Logf("%s#%d: uses %v of %v, knows %d, complete %d, applied %d, over %v", n.name, n.life, n.books.using(), n.books.held, s.Charter.Number, s.Complete, s.Applied, s.Evicted)
			}
		}
		w.t.Fatalf("%v: %v in use of %v; complete is %d of %d", w.now, sum, limit, w.complete, w.newest)
	}
}

func (n *citizen) clock() time.Duration {
	return n.origin + time.Duration(float64(n.w.now-n.began)*n.rate)
}

func (n *citizen) id() crdt.Replica { return crdt.Replica{Name: n.name, Incarnation: n.life} }

func (n *citizen) start() {
	w := n.w
	n.epoch++
	n.life++
	n.alive, n.began, n.rate = true, w.now, 1
	n.origin = time.Duration(w.rng.Int64N(int64(time.Hour)))
	if w.opt.drift > 0 {
		n.rate = 1 + w.opt.drift*(2*w.rng.Float64()-1)
	}
	n.books = &modelBooks{n: n}
	n.dirty = 0
	for i := range n.peers {
		n.peers[i] = acquaintance{}
	}
	c, err := NewCharters(n.id(), w.cfg, n.books, n.clock())
	if err != nil {
		w.t.Fatal(err)
	}
	n.c = c
	n.nextAt, n.wakeAt = w.now, -1
	w.tracef("%s#%d begins", n.name, n.life)
	n.arm(w.now)
}

func (n *citizen) stop() {
	n.alive = false
	n.epoch++
	n.w.tracef("%s#%d ends", n.name, n.life)
}

// arm makes sure that the node is stepped at an instant.
func (n *citizen) arm(at time.Duration) {
	if n.wakeAt >= n.w.now && n.wakeAt <= at && n.wakeAt >= 0 {
		return
	}
	n.wakeAt = at
	epoch := n.epoch
	n.w.at(at, func() {
		if n.epoch == epoch && n.wakeAt == n.w.now {
			n.wakeAt = -1
			n.step()
		}
	})
}

func (n *citizen) step() {
	if n.clock() >= n.c.Wake() {
		if n.rejoin {
			_ = n.c.Join(n.clock(), max(1, n.heavy))
		}
		n.c.Tick(n.clock())
	}
	n.flush()
}

// poke steps a node after something was asked of it.
func (n *citizen) poke() { n.arm(n.w.now) }

func (n *citizen) flush() {
	w := n.w
	next := w.now + max(time.Duration(float64(n.c.Wake()-n.clock())/n.rate), 0) + 1
	if w.now < n.nextAt {
		n.arm(min(next, n.nextAt))
		return
	}
	n.nextAt = w.now + w.opt.floor
	for j, p := range w.nodes {
		if j == n.i {
			continue
		}
		l := &n.peers[j]
		if l.life != p.life {
			if !p.alive {
				continue
			}
			*l = acquaintance{life: p.life} // sessions tell lives apart
		}
		dirty := n.c.Mark(p.id()) > l.acked
		if l.sent && !(dirty || l.owes) && w.now < l.sentAt+w.opt.keep {
			next = min(next, l.sentAt+w.opt.keep)
			continue
		}
		if l.sent && w.now < l.sentAt+w.opt.floor {
			next = min(next, n.nextAt)
			continue
		}
		// What nobody answers is not sent at every floor.
		if l.sent && dirty && !l.owes && l.upto == 0 && w.now < l.sentAt+10*w.opt.floor {
			next = min(next, n.nextAt)
			continue
		}
		n.send(p, l)
		if dirty {
			next = min(next, n.nextAt)
		}
	}
	n.arm(next)
}

func (n *citizen) send(p *citizen, l *acquaintance) {
	w := n.w
	b, upto := n.c.Delta(n.clock(), nil, p.id(), l.acked, w.opt.room)
	if len(b) > w.opt.room {
		w.t.Fatalf("%d bytes in a room of %d", len(b), w.opt.room)
	}
	l.sent, l.sentAt, l.owes = true, w.now, false
	w.packets++
	w.bytes += len(b)
	from, life, ack, sent := n.id(), p.life, l.upto, n.clock()
	for k := 0; k == 0 || w.rng.Float64() < w.opt.dup; k++ {
		if w.rng.Float64() < w.loss || w.cut(n.i, p.i) {
			continue
		}
		w.at(w.now+w.opt.delay+time.Duration(float64(w.opt.delay)*w.rng.ExpFloat64()), func() {
			if p.alive && p.life == life {
				p.receive(n.i, from, sent, b, upto, ack)
			}
		})
	}
}

func (n *citizen) receive(i int, from crdt.Replica, sent time.Duration, b []byte, upto, ack uint64) {
	l := &n.peers[i]
	if from.Incarnation < l.life {
		return
	}
	if from.Incarnation > l.life {
		if l.life > 0 {
			n.c.Gone(n.clock(), crdt.Replica{Name: from.Name, Incarnation: l.life})
		}
		*l = acquaintance{life: from.Incarnation}
	}
	if err := n.c.Merge(crdt.Contact{From: from, Now: n.clock(), Sent: sent}, b); err != nil {
		n.w.t.Fatalf("%s: %v", n.name, err)
	}
	l.acked = max(l.acked, ack)
	if upto > l.upto {
		l.upto, l.owes = upto, true
	}
	n.arm(max(n.w.now, n.nextAt))
}

// founded lets everybody of the roster begin, and waits until all may mint.
func (w *country) founded(founders int) {
	w.t.Helper()
	for _, n := range w.nodes[:founders] {
		n.start()
	}
	ok := w.runUntil(w.now+10*sec, func() bool {
		return !slices.ContainsFunc(w.nodes[:founders], func(n *citizen) bool { return !n.c.votesNow() })
	})
	if !ok {
		w.t.Fatal("the fleet was not founded")
	}
}

func (c *Charters) votesNow() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mayVote() && c.settled
}

// agreed tells whether all who live know a charter, that nobody waits for.
func (w *country) agreed(number uint64) bool {
	for _, n := range w.nodes {
		if n.alive {
			if newest, complete := n.c.Number(); newest < number || complete != newest || newest != w.newest {
				return false
			}
		}
	}
	return true
}
