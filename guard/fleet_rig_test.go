// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
)

var errFleetDown = errors.New("dependency down")

// fleetRig is several processes in one: each has a Guard, its part in the fleet
// and a clock of its own, and all have one broker and one dependency. Packets
// between them are lost and cut as a test says.
type fleetRig struct {
	t       *testing.T
	ctx     context.Context
	stop    context.CancelFunc
	running sync.WaitGroup
	broker  *guardtest.Broker
	began   time.Time
	cfg     guard.Config
	fcfg    fleetstate.Config
	pace    guard.Limiter                     // of dead letters
	alone   bool                              // no fleet
	noVotes bool                              // storms only
	poison  uint64                            // every so manieth message of a queue fails
	bad     uint64                            // and this one
	spoiled func(queue string, n uint64) bool // and what it says; nil for none
	names   []string
	down    atomic.Bool // the dependency
	slow    atomic.Bool // a call takes almost as long as it may

	mu     sync.Mutex
	rng    *rand.Rand
	loss   float64
	island map[string]int // who is on another does not hear
	live   map[string]*party
	lives  uint64
	all    []*party
	calls  []fleetCall
	whole  []time.Duration // when turn mended something
	epochs []*guardtest.Epoch
}

// fleetCall is a handler call.
type fleetCall struct {
	at     time.Duration // since the rig began
	who    string
	queue  string
	number uint64
	ok     bool
}

// party is one life of a process.
type party struct {
	r       *fleetRig
	replica crdt.Replica
	offset  time.Duration
	guard   *guard.Guard
	v       *fleetstate.Verdicts
	st      *fleetstate.Storms
	tot     *fleetstate.Totals
	m       *fleetstate.Member
	broken  atomic.Bool // its own path
	quit    chan struct{}
	gone    sync.WaitGroup
	links   map[string]*fleetLink
}

// scope is what the fleet makes of a scope that p has; false if it has not.
func (p *party) scope(name string) (breaker.FleetScope, bool) {
	for _, sc := range p.m.Scopes() {
		if sc.Name == name {
			return sc, true
		}
	}
	return breaker.FleetScope{}, false
}

// fleetLink is what one process knows of another's packets, by section.
type fleetLink struct {
	peer  crdt.Replica
	acked [3]uint64 // of ours, by it
	upto  [3]uint64 // of its, by us
	sent  time.Duration
	said  time.Duration // the last packet to it, whether it arrived or not
	told  int           // packets to it
}

type fleetSection interface {
	Mark(to crdt.Replica) uint64
	Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) ([]byte, uint64)
	Merge(c crdt.Contact, b []byte) error
	Gone(now time.Duration, peer crdt.Replica)
}

func newFleetRig(t *testing.T, names ...string) *fleetRig {
	r := &fleetRig{
		t: t, broker: guardtest.NewBroker(), began: time.Now(), names: names, rng: rand.New(rand.NewPCG(1, 2)),
		island: make(map[string]int), live: make(map[string]*party),
	}
	r.ctx, r.stop = context.WithCancel(t.Context())
	r.cfg.Group = "g"
	t.Cleanup(r.end)
	return r
}

func (r *fleetRig) now() time.Duration { return time.Since(r.began) }

// start begins a life of a process.
func (r *fleetRig) start(name string) *party {
	r.t.Helper()
	r.mu.Lock()
	r.lives++
	p := &party{
		r: r, replica: crdt.Replica{Name: name, Incarnation: r.lives}, offset: time.Duration(r.rng.Int64N(int64(time.Hour))),
		quit: make(chan struct{}), links: make(map[string]*fleetLink),
	}
	r.mu.Unlock()
	opts := []guard.Option{guard.WithClock(func() time.Duration { return r.now() + p.offset/2 }), guard.WithDeadLetterLimiter(r.pace), guard.WithSeed(p.replica.Incarnation)}
	if !r.alone {
		roster := fleetstate.Roster{Number: 1, Names: r.names}
		var err error
		if p.v, err = fleetstate.NewVerdicts(p.clock(), r.fcfg, p.replica, roster); err != nil {
			r.t.Fatal(err)
		}
		if p.st, err = fleetstate.NewStorms(fleetstate.StormConfig{}, p.replica); err != nil {
			r.t.Fatal(err)
		}
		p.m = fleetstate.NewMember(p.clock, p.v, p.st)
		if r.noVotes {
			p.m = fleetstate.NewMember(p.clock, nil, p.st)
		}
		if p.tot, err = fleetstate.NewTotals(p.replica); err != nil {
			r.t.Fatal(err)
		}
		p.m.CarryTotals(p.tot)
		opts = append(opts, guard.WithFleet(p.m))
	}
	var err error
	if p.guard, err = guard.New(r.cfg, opts...); err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	r.live[name] = p
	r.all = append(r.all, p)
	r.mu.Unlock()
	if !r.alone {
		p.gone.Go(p.gossip)
	}
	return p
}

// startAll begins a life of each, and lets them meet.
func (r *fleetRig) startAll() []*party {
	r.t.Helper()
	var ps []*party
	for _, n := range r.names {
		ps = append(ps, r.start(n))
	}
	time.Sleep(2 * time.Second)
	return ps
}

// openAll has each consume the queue of orders.
func openAll(ps []*party) (ss []*fleetSource) {
	for _, p := range ps {
		p.r.t.Helper()
		ss = append(ss, p.open("orders", ""))
	}
	return ss
}

// heldFleet is a fleet of three that has been open for a while over a queue.
func heldFleet(t *testing.T, n uint64) (*fleetRig, []*party, []*fleetSource) {
	r := newFleetRig(t, "a", "b", "c")
	ps := r.startAll()
	if n > 0 {
		r.feed("orders", n, 20*time.Millisecond)
	}
	ss := openAll(ps)
	time.Sleep(time.Second)
	r.down.Store(true)
	r.until(30*time.Second, "the fleet opens", func() bool { return ss[0].held() && ss[1].held() && ss[2].held() })
	return r, ps, ss
}

func (p *party) clock() time.Duration { return p.r.now() + p.offset }

func (p *party) sections() [3]fleetSection { return [3]fleetSection{p.v, p.st, p.tot} }

// gossip sends to everybody what is new, every 50ms.
func (p *party) gossip() {
	p.r.mu.Lock()
	first := time.Duration(p.r.rng.Int64N(int64(50 * time.Millisecond)))
	p.r.mu.Unlock()
	tick := time.NewTicker(50*time.Millisecond + first/50)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if p.m != nil {
				p.m.Pass() // as a fleet.Process does
			}
			for _, to := range p.r.names {
				p.send(to)
			}
		case <-p.quit:
			return
		}
	}
}

// send is one packet, both ways of its meaning: what changed, and what arrived.
func (p *party) send(to string) {
	r := p.r
	r.mu.Lock()
	defer r.mu.Unlock()
	q := r.live[to]
	if q == nil || q == p || r.live[p.replica.Name] != p {
		return
	}
	l, back := p.link(q), q.link(p)
	news := false
	for i, s := range p.sections() {
		news = news || s.Mark(q.replica) > l.acked[i]
	}
	if !news && l.told > 3 && p.clock()-l.said < 500*time.Millisecond {
		return // nothing new, and it knows that we are here
	}
	l.said = p.clock()
	l.told++
	if r.island[to] != r.island[p.replica.Name] || r.rng.Float64() < r.loss {
		return
	}
	for i, s := range p.sections() {
		payload, upto := s.Delta(p.clock(), nil, q.replica, l.acked[i], 1200)
		c := crdt.Contact{From: p.replica, Now: q.clock(), Sent: p.clock(), Echo: l.sent}
		if err := q.sections()[i].Merge(c, payload); err != nil {
			r.t.Errorf("%s refuses %s: %v", to, p.replica.Name, err)
		}
		back.upto[i] = max(back.upto[i], upto)
		back.acked[i] = max(back.acked[i], l.upto[i])
	}
	back.sent = p.clock()
}

// link is what p knows of q, of q's present life.
func (p *party) link(q *party) *fleetLink {
	l := p.links[q.replica.Name]
	if l == nil || l.peer != q.replica {
		if l != nil {
			for _, s := range p.sections() {
				s.Gone(p.clock(), l.peer)
			}
		}
		l = &fleetLink{peer: q.replica}
		p.links[q.replica.Name] = l
	}
	return l
}

// crash ends a life without a word: its gossip stops, and what it does then
// nobody hears.
func (p *party) crash() {
	p.r.mu.Lock()
	delete(p.r.live, p.replica.Name)
	p.r.mu.Unlock()
}

// split puts processes on islands.
func (r *fleetRig) split(islands map[string]int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.island = islands
}

// open consumes a queue as one source until the epoch or the rig ends. With a
// partition the queue is topic/partition.
func (p *party) open(topic, partition string) *fleetSource {
	p.r.t.Helper()
	s, err := p.tryOpen(topic, partition)
	if err != nil {
		p.r.t.Fatal(err)
	}
	return s
}

type fleetSource struct {
	*guard.Source[*guardtest.Message]
	e    *guardtest.Epoch
	done chan struct{}
}

func (p *party) tryOpen(topic, partition string) (*fleetSource, error) {
	r, queue := p.r, topic
	if partition != "" {
		queue += "/" + partition
	}
	e, err := r.broker.Consume(r.ctx, queue, guardtest.ConsumerConfig{Prefetch: 64})
	if err != nil {
		return nil, err
	}
	cfg := guard.SourceConfig{
		Name: queue, System: "guardtest", Destination: topic, Partition: partition, DeadLetters: r.broker.DeadLetters(queue),
	}
	s, err := guard.Open(p.guard, cfg, e.Limits(), e.Port(), func(_ context.Context, m *guardtest.Message) error {
		return p.handle(queue, m)
	})
	if err != nil {
		e.Close()
		return nil, err
	}
	fs := &fleetSource{Source: s, e: e, done: make(chan struct{})}
	r.mu.Lock()
	r.epochs = append(r.epochs, e)
	r.mu.Unlock()
	go func() {
		defer close(fs.done)
		_ = s.Run(e.Context(), e.Messages())
	}()
	return fs, nil
}

// end ends the source as its broker does when another gets it.
func (s *fleetSource) end(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if rep := s.End(ctx, guard.ReasonRebalance); !rep.Clean() {
		t.Errorf("%+v", rep)
	}
	s.e.Close()
	<-s.done
}

func (p *party) handle(queue string, m *guardtest.Message) error {
	if p.r.slow.Load() {
		time.Sleep(29 * time.Second)
	}
	time.Sleep(2 * time.Millisecond)
	n := guardtest.Number(m.Body)
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	bad := p.r.down.Load() || p.broken.Load() || p.r.poison > 0 && n%p.r.poison == 0 || n == p.r.bad ||
		p.r.spoiled != nil && p.r.spoiled(queue, n)
	p.r.calls = append(p.r.calls, fleetCall{p.r.now(), p.replica.Name, queue, n, !bad})
	if bad {
		return errFleetDown
	}
	return nil
}

// feed publishes n numbered messages at a rate.
func (r *fleetRig) feed(queue string, n uint64, every time.Duration) {
	r.running.Go(func() {
		for i := range n {
			r.broker.Publish(queue, guardtest.Message{Body: guardtest.Body(i+1, 0)})
			select {
			case <-time.After(every):
			case <-r.ctx.Done():
				return
			}
		}
	})
}

// since is the calls from an instant on.
func (r *fleetRig) since(at time.Duration) (calls []fleetCall) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.calls {
		if c.at >= at {
			calls = append(calls, c)
		}
	}
	return calls
}

// until waits for cond, and fails after at most d.
func (r *fleetRig) until(d time.Duration, what string, cond func() bool) time.Duration {
	r.t.Helper()
	began := r.now()
	for !cond() {
		if r.now()-began > d {
			r.t.Fatalf("%s: not within %v; %s", what, d, r.describe())
		}
		time.Sleep(20 * time.Millisecond)
	}
	return r.now() - began
}

func (r *fleetRig) describe() string {
	text := ""
	r.mu.Lock()
	all := append([]*party(nil), r.all...)
	r.mu.Unlock()
	for _, p := range all {
		for _, s := range p.guard.Sources() {
			st := s.State()
			text += fmt.Sprintf("\n%s %s: %v held=%v %+v, fleet %+v, %+v", p.replica.Name, s.Name(), st.Breaker.State, st.Breaker.Held, st.Holds, st.Fleet, st.Account)
		}
	}
	return text
}

// check fails for an account that does not add up.
func (r *fleetRig) check() {
	r.t.Helper()
	r.mu.Lock()
	all := append([]*party(nil), r.all...)
	r.mu.Unlock()
	for _, p := range all {
		for _, s := range p.guard.Sources() {
			if err := s.Account().Check(); err != nil {
				r.t.Errorf("%s %s: %v", p.replica.Name, s.Name(), err)
			}
		}
	}
}

// closed tells whether every breaker is.
func (r *fleetRig) closed() bool {
	r.mu.Lock()
	all := append([]*party(nil), r.all...)
	r.mu.Unlock()
	for _, p := range all {
		for _, s := range p.guard.Sources() {
			if s.State().Breaker.State.String() != "closed" {
				return false
			}
		}
	}
	return true
}

// handled checks that each number of a queue succeeded exactly once, and in
// order if it is said so, and that nothing is a dead letter.
func (r *fleetRig) handled(queue string, n uint64, ordered bool) {
	r.t.Helper()
	seen := make(map[uint64]int)
	last := uint64(0)
	for _, c := range r.since(0) {
		if c.queue != queue || !c.ok {
			continue
		}
		seen[c.number]++
		if ordered && c.number < last {
			r.t.Errorf("%s: %d succeeded after %d", queue, c.number, last)
		}
		last = c.number
	}
	for i := range n {
		if seen[i+1] != 1 {
			r.t.Errorf("%s: message %d succeeded %d times", queue, i+1, seen[i+1])
		}
	}
	if d := r.broker.DeadLetters(queue).Records(); len(d) > 0 {
		r.t.Errorf("%s: %d dead letters, the first %v", queue, len(d), d[0].Reason)
	}
}

func (r *fleetRig) end() {
	r.stop()
	for _, p := range r.all {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if _, err := p.guard.Close(ctx); err != nil {
			r.t.Errorf("%s: %v", p.replica.Name, err)
		}
		cancel()
		close(p.quit)
		p.gone.Wait()
	}
	for _, e := range r.epochs {
		e.Close()
	}
	r.running.Wait()
}
