// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"bytes"
	"container/heap"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// realm is a fleet on virtual time that changes its configuration: the real
// Configurator, applier that keep the rule of the smallest share and nothing else, clocks
// that drift, a network that loses, repeats, delays and is cut, and a register that
// loses answers, writes late and is away. A seed replays exactly.
type realm struct {
	t      rapid.TB
	rng    *rand.Rand
	cfg    ConfiguratorConfig
	opt    ground
	now    time.Duration
	events events
	seq    int
	nodes  []*subject
	cut    func(a, b int) bool
	loss   float64
	reg    store

	adopted        map[uint64]uint64 // digest of the configuration of a number, as any applier adopted it
	configurations map[uint64]escrow.Configuration
	complete       uint64 // as any applier were ever told
	newest         uint64
	packets        int
	bytes          int
	loose          bool // an assertion of an operator was wrong: shares are not checked
}

// store is a model of a register.
type store struct {
	number   uint64
	document []byte
	history  map[uint64][]byte
	away     func(node int) bool // cannot reach it
	lossy    float64             // of requests and answers
	late     float64             // of requests that arrive when nobody waits for the answer
	writes   int
}

type ground struct {
	loss, dup float64
	delay     time.Duration // at least; plus as much, exponentially
	floor     time.Duration
	keep      time.Duration
	lag       time.Duration // applier take up to that long to shrink
	drift     float64       // of clocks, at most
	room      int
	rarely    bool // shares are checked each 10 ms only
}

const (
	registerTakes = 3 * ms // at least
	registerWaits = 100 * ms
	awayNoticed   = 200 * ms
)

// subject is one process.
type subject struct {
	w           *realm
	i           int
	name        string
	incarnation uint64
	epoch       int
	alive       bool
	c           *Configurator
	applier     *ration
	began       time.Duration
	origin      time.Duration
	rate        float64
	peers       []acquaintance
	wakeAt      time.Duration
	nextAt      time.Duration // of the latest flush, plus the floor
	busy        bool          // a write is out
	saw         uint64        // of the register
	told        bool          // that it is away
	first       bool          // it has read the register
	weight      int
	young       time.Duration // until then its applier keep within nothing: an earlier incarnation's loans
	file        uint64        // that its operator's file has, if static
	paused      bool          // it stands still: packets to it are lost, its clock goes on
}

// ration is a process's applier: the smallest share between the last complete configuration and
// the newest adopted, after a while.
type ration struct {
	n      *subject
	window []escrow.Configuration
	held   float64
	due    time.Duration // true time at which held has shrunk
	until  time.Duration
	minted bool
	refuse bool
}

func (b *ration) target() float64 {
	least := math.Inf(1)
	for i := range b.window {
		least = min(least, rateOf(&b.window[i], b.n.name))
	}
	return least
}

func (b *ration) settle() {
	if t := b.target(); b.held < t || b.n.w.now >= b.due || !b.minted { // an incarnation that never minted has nothing
		b.held = t
	}
}

func (b *ration) Adopt(_ time.Duration, c escrow.Configuration) error {
	w := b.n.w
	if b.refuse {
		return errRefused
	}
	digest := newStage(c, nil).digest
	if old, ok := w.adopted[c.Number]; ok && old != digest && !w.cfg.Static {
		w.t.Fatalf("%v: two configurations of number %d:\n%+v\n%+v", w.now, c.Number, w.configurations[c.Number], c)
	}
	w.adopted[c.Number], w.configurations[c.Number] = digest, c
	if k := len(b.window); k > 0 && b.window[k-1].Number >= c.Number {
		w.t.Fatalf("%s: configuration %d adopted after %d", b.n.name, c.Number, b.window[k-1].Number)
	}
	w.newest = max(w.newest, c.Number)
	w.tracef("%s#%d adopts %d: rate %v, roster %v", b.n.name, b.n.incarnation, c.Number, c.Limit.Rate, c.Roster.Members)
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

func (b *ration) Complete(_ time.Duration, number uint64) {
	w := b.n.w
	w.complete = max(w.complete, number)
	w.tracef("%s#%d: %d is complete", b.n.name, b.n.incarnation, number)
	for len(b.window) > 1 && b.window[0].Number < number {
		b.window = b.window[1:]
	}
	if b.window[0].Number != number {
		w.t.Fatalf("%s: %d is complete, but it was not adopted", b.n.name, number)
	}
	b.settle()
}

func (b *ration) Applied() uint64 {
	if b.n.w.now < b.n.young || len(b.window) == 0 {
		return 0
	}
	b.settle()
	if b.held > b.target() {
		return b.window[0].Number
	}
	return b.window[len(b.window)-1].Number
}

func (b *ration) Mint(until time.Duration) {
	if !b.minted {
		b.n.w.tracef("%s#%d mints", b.n.name, b.n.incarnation)
	}
	b.until, b.minted = until, true
}

// using is what the process mints with now.
func (b *ration) using() float64 {
	if !b.n.alive || !b.minted || b.until <= b.n.clock() || len(b.window) == 0 {
		return 0
	}
	b.settle()
	return b.held
}

// newRealm has processes of which the first are in the initial roster.
func newRealm(t rapid.TB, seed uint64, members, nodes int, cfg ConfiguratorConfig, o ground) *realm {
	if t, ok := t.(*testing.T); ok && raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	def(&o.delay, ms)
	def(&o.floor, 2*ms)
	def(&o.keep, 50*ms)
	def(&o.room, 1300)
	def(&cfg.Fleet, "f")
	if !cfg.Static && cfg.Initial.Roster.Members == nil {
		cfg.Initial = nation(members)
	}
	w := &realm{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), cfg: cfg, opt: o, cut: whole, loss: o.loss,
		adopted: map[uint64]uint64{}, configurations: map[uint64]escrow.Configuration{},
		reg: store{history: map[uint64][]byte{}, away: func(int) bool { return false }},
	}
	for i := range nodes {
		w.nodes = append(w.nodes, &subject{w: w, i: i, name: fmt.Sprintf("n%03d", i), peers: make([]acquaintance, nodes)})
	}
	return w
}

func (w *realm) tracef(format string, args ...any) {
	if os.Getenv("STORMGUARD_TRACE") != "" {
		w.t.Logf("%v: %s", w.now, fmt.Sprintf(format, args...))
	}
}

func (w *realm) at(t time.Duration, do func()) {
	w.seq++
	heap.Push(&w.events, event{max(t, w.now), w.seq, do})
}

func (w *realm) run(until time.Duration) { w.runUntil(until, func() bool { return false }) }

// runUntil reports whether done came true before the instant.
func (w *realm) runUntil(until time.Duration, done func() bool) bool {
	sampled, asked := time.Duration(0), time.Duration(0)
	for len(w.events) > 0 && w.events[0].at <= until {
		if w.now >= asked {
			if done() {
				return true
			}
			asked = w.now + ms
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
func (w *realm) check() {
	sum := 0.0
	for _, n := range w.nodes {
		if n.alive {
			sum += n.applier.using()
		}
	}
	if limit := w.configurations[w.complete].Limit.Rate; sum > limit*(1+1e-9) && !w.loose {
		w.report()
		w.t.Fatalf("%v: %v in use of %v; complete is %d of %d", w.now, sum, limit, w.complete, w.newest)
	}
}

func (w *realm) report() {
	for _, n := range w.nodes {
		if n.alive {
			s := n.c.Status(n.clock())
			w.t.Logf("%s#%d: uses %v, knows %d, complete %d, applied %d, loaded %d, settled %v, member %v, joining %v, leaving %v, evicted %d, requests %d, lacking %v, away %v, full %v, refused %v, differs %v, rate %v",
				n.name, n.incarnation, n.applier.using(), s.Configuration.Number, s.Complete, s.Applied, s.Loaded, s.Settled, s.Member, s.Joining, s.Leaving, s.Evicted, s.Requests, s.Lacking, s.Away, s.Full, s.Refused, s.Differs, s.Configuration.Limit.Rate)
		}
	}
	w.t.Logf("the register has %d", w.reg.number)
}

func (n *subject) clock() time.Duration {
	return n.origin + time.Duration(float64(n.w.now-n.began)*n.rate)
}

func (n *subject) id() crdt.Replica { return crdt.Replica{Name: n.name, Incarnation: n.incarnation} }

func (n *subject) start() {
	w := n.w
	n.epoch++
	n.incarnation++
	n.alive, n.began, n.rate = true, w.now, 1
	n.busy, n.saw, n.told, n.first = false, 0, false, false
	n.origin = time.Duration(w.rng.Int64N(int64(time.Hour)))
	if w.opt.drift > 0 {
		n.rate = 1 + w.opt.drift*(2*w.rng.Float64()-1)
	}
	n.applier = &ration{n: n}
	for i := range n.peers {
		n.peers[i] = acquaintance{}
	}
	cfg := w.cfg
	cfg.Weight = n.weight
	c, err := NewConfigurator(n.id(), cfg, n.applier, n.clock())
	if err != nil {
		w.t.Fatal(err)
	}
	n.c = c
	if cfg.Static && n.file > 0 {
		if err := c.Load(n.clock(), n.file, w.configurations[n.file]); err != nil {
			w.t.Fatal(err)
		}
	}
	n.nextAt, n.wakeAt = w.now, -1
	w.tracef("%s#%d begins", n.name, n.incarnation)
	n.arm(w.now)
	if !cfg.Static {
		n.watch()
	}
}

func (n *subject) stop() {
	n.alive = false
	n.epoch++
	n.w.tracef("%s#%d ends", n.name, n.incarnation)
}

// soon does something while this incarnation lasts.
func (n *subject) soon(after time.Duration, do func()) {
	epoch := n.epoch
	n.w.at(n.w.now+after, func() {
		if n.epoch == epoch {
			do()
		}
	})
}

// takes is a round trip to the register.
func (w *realm) takes() time.Duration {
	return registerTakes + time.Duration(float64(registerTakes)*w.rng.ExpFloat64())
}

// watch is the register's watch: it tells the newest, and once that it is away.
func (n *subject) watch() {
	w := n.w
	if n.paused {
		n.soon(10*ms, n.watch)
		return
	}
	if w.reg.away(n.i) {
		n.soon(awayNoticed, func() {
			if w.reg.away(n.i) && !n.told {
				n.told = true
				n.c.Away(n.clock(), errAway)
				n.arm(w.now)
			}
		})
	} else if w.reg.number != n.saw || !n.first || n.told {
		number, document := w.reg.number, w.reg.document
		n.soon(w.takes(), func() {
			if number >= n.saw {
				n.saw, n.told, n.first = number, false, true
				n.hand(number, document)
			}
		})
	}
	n.soon(10*ms+time.Duration(w.rng.Int64N(int64(10*ms))), n.watch)
}

var errAway = errors.New("the register is away")

func (n *subject) hand(number uint64, document []byte) {
	if err := n.c.Read(n.clock(), number, document); err != nil {
		n.w.t.Fatalf("%s: %v", n.name, err)
	}
	n.arm(max(n.w.now, n.nextAt))
}

// cas writes what the machine wants written.
func (n *subject) cas() {
	if n.busy {
		return
	}
	w := n.w
	number, document, ok := n.c.Write(n.clock(), wallOf(w))
	if !ok {
		return
	}
	if len(document) > maxDocument {
		w.t.Fatalf("%d bytes", len(document))
	}
	n.busy = true
	apply := func() bool {
		w.reg.writes++
		if w.reg.number != number-1 {
			return false
		}
		if w.reg.history[number] != nil && !bytes.Equal(w.reg.history[number], document) {
			w.t.Fatalf("two documents of number %d", number)
		}
		w.reg.number, w.reg.document, w.reg.history[number] = number, document, document
		w.tracef("%s#%d writes %d: %v", n.name, n.incarnation, number, must(readDocument(document)).log)
		return true
	}
	answer := func(after time.Duration, r WriteResult) {
		n.soon(after, func() {
			n.busy = false
			n.c.Wrote(n.clock(), number, r)
			if r != Written {
				n.reread()
			}
			n.arm(max(w.now, n.nextAt))
		})
	}
	switch {
	case w.reg.away(n.i) && w.rng.IntN(2) == 0:
		answer(w.takes(), NotWritten)
	case w.reg.away(n.i), w.rng.Float64() < w.reg.lossy: // it never arrives
		answer(registerWaits, Unknown)
	case w.rng.Float64() < w.reg.late: // it arrives when nobody waits any more
		w.at(w.now+time.Duration(w.rng.Int64N(int64(2*sec))), func() { apply() })
		answer(registerWaits, Unknown)
	default:
		lost := w.rng.Float64() < w.reg.lossy
		w.at(w.now+w.takes()/2, func() {
			done := apply()
			switch {
			case lost:
				answer(registerWaits, Unknown)
			case done:
				answer(w.takes()/2, Written)
			default:
				answer(w.takes()/2, NotWritten)
			}
		})
	}
}

func wallOf(w *realm) time.Time { return time.UnixMilli(int64(w.now / ms)) }

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// reread reads the register after a write that did not succeed.
func (n *subject) reread() {
	w := n.w
	if w.reg.away(n.i) {
		return
	}
	n.soon(w.takes(), func() {
		if !w.reg.away(n.i) && w.reg.number >= n.saw {
			n.saw = w.reg.number
			n.hand(w.reg.number, w.reg.document)
		}
	})
}

// arm makes sure that the node is stepped at an instant.
func (n *subject) arm(at time.Duration) {
	if n.wakeAt >= n.w.now && n.wakeAt <= at && n.wakeAt >= 0 {
		return
	}
	n.wakeAt = at
	n.soon(at-n.w.now, func() {
		if n.wakeAt == n.w.now {
			n.wakeAt = -1
			n.step()
		}
	})
}

func (n *subject) step() {
	if n.paused {
		return
	}
	if n.clock() >= n.c.Wake() {
		n.c.Tick(n.clock())
	}
	n.cas()
	n.flush()
}

// poke steps a node after something was asked of it.
func (n *subject) poke() { n.arm(n.w.now) }

func (n *subject) flush() {
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
		if l.incarnation != p.incarnation {
			if !p.alive {
				continue
			}
			*l = acquaintance{incarnation: p.incarnation} // sessions tell incarnations apart
		}
		dirty := n.c.Mark(p.id()) > l.acked
		if l.sent && !dirty && !l.owes && w.now < l.sentAt+w.opt.keep {
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

func (n *subject) send(p *subject, l *acquaintance) {
	w := n.w
	b, upto := n.c.Delta(n.clock(), nil, p.id(), l.acked, w.opt.room)
	if len(b) > w.opt.room {
		w.t.Fatalf("%d bytes in a room of %d", len(b), w.opt.room)
	}
	l.sent, l.sentAt, l.owes = true, w.now, false
	w.packets++
	w.bytes += len(b)
	from, incarnation, ack, sent := n.id(), p.incarnation, l.upto, n.clock()
	for k := 0; k == 0 || w.rng.Float64() < w.opt.dup; k++ {
		if w.rng.Float64() < w.loss || w.cut(n.i, p.i) {
			continue
		}
		w.at(w.now+w.opt.delay+time.Duration(float64(w.opt.delay)*w.rng.ExpFloat64()), func() {
			if p.alive && p.incarnation == incarnation && !p.paused {
				p.receive(n.i, from, sent, b, upto, ack)
			}
		})
	}
}

func (n *subject) receive(i int, from crdt.Replica, sent time.Duration, b []byte, upto, ack uint64) {
	l := &n.peers[i]
	if from.Incarnation < l.incarnation {
		return
	}
	if from.Incarnation > l.incarnation {
		if l.incarnation > 0 {
			n.c.Gone(n.clock(), crdt.Replica{Name: from.Name, Incarnation: l.incarnation})
		}
		*l = acquaintance{incarnation: from.Incarnation}
	}
	if err := n.c.Merge(crdt.Contact{From: from, Now: n.clock(), Sent: sent}, b); err != nil && !errors.Is(err, ErrDiffers) {
		n.w.t.Fatalf("%s: %v", n.name, err)
	} else if err != nil && !n.w.cfg.Static {
		n.w.t.Fatalf("%s: %v", n.name, err)
	}
	l.acked = max(l.acked, ack)
	if upto > l.upto {
		l.upto, l.owes = upto, true
	}
	n.arm(max(n.w.now, n.nextAt))
}

// begun lets the first nodes begin, and waits until all of them have their shares.
func (w *realm) begun(nodes int) {
	w.t.Helper()
	for _, n := range w.nodes[:nodes] {
		n.start()
	}
	if !w.runUntil(w.now+5*sec, func() bool { return w.rested() }) {
		w.report()
		w.t.Fatal("the fleet did not begin")
	}
}

// rested tells whether all who live know the newest, which is complete, mint their
// shares of it, and have nothing to ask for.
func (w *realm) rested() bool {
	for _, n := range w.nodes {
		if !n.alive {
			continue
		}
		s := n.c.Status(n.clock())
		newest, complete := n.c.Number()
		if newest == 0 || newest != complete || newest != w.reg.number && !w.cfg.Static || s.Requests > 0 || s.Joining || s.Leaving && s.Member || !s.Settled {
			return false
		}
		c := s.Configuration
		if want := rateOf(&c, n.name); s.Member && math.Abs(n.applier.using()-want) > 1e-9*want {
			return false
		}
		if w.cfg.OnSilence == escrow.Majority && s.Member && !n.c.confirms() {
			return false
		}
	}
	return true
}

func (c *Configurator) confirms() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mayConfirm() && len(c.frozen) == 0
}

// set asks a node for a rate, upon what it knows.
func (n *subject) set(rate float64) (ticket uint64, err error) {
	number, _ := n.c.Number()
	ticket, err = n.c.Set(n.clock(), number, Change{Limit: &escrow.Limit{Rate: rate, Burst: 1_000_000}}, "ann")
	n.poke()
	return ticket, err
}
