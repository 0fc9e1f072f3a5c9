// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/scope"
	"github.com/stormguard-mq/stormguard/internal/scopetest"
)

// store is a model of etcd in virtual time: keys, revisions, leases, a watch, and
// transactions whose answers are lost now and then. Sessions are run as session.go runs
// them.
type store struct {
	t     testing.TB
	rng   *rand.Rand
	now   time.Duration
	rev   int64
	keys  map[string]*stored
	log   []entry // by revision
	procs []*stationed
	cut   []string
	void  int // transactions
	taken int // probes
}

type stored struct {
	value        []byte
	created, mod int64
	lease        *lease
}

type lease struct{ ends time.Duration }

// stationed is a process and its session.
type stationed struct {
	scopetest.Process
	c           *core
	ttl         time.Duration
	lost        time.Duration // its session was lost; never if there is one
	incarnation *lease
	keep        *lease
	slot        *lease
	seen        int64
	renewed     time.Duration // by its clock
	flights     []flight
}

// flight is a transaction that is under way.
type flight struct {
	o  *op
	at time.Duration
}

func newStore(t testing.TB) *store {
	return &store{t: t, rng: rand.New(rand.NewPCG(7, 7)), rev: 1, keys: make(map[string]*stored)}
}

func (s *store) Start(p scopetest.Process) *scope.Machine {
	cfg := Config{Name: p.Name, Fleet: p.Config}
	cfg.Roster.Number, cfg.Roster.Names = 1, p.Roster
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		s.t.Fatal(err)
	}
	n := &stationed{Process: p, ttl: p.Config.Silent, lost: s.now}
	n.c = newCore(cfg, crdt.Replica{Name: p.Name, Incarnation: p.Incarnation}, p.Clock())
	s.procs = append(s.procs, n)
	return n.c.Machine
}

func (s *store) Stop(name string) {
	s.procs = slices.DeleteFunc(s.procs, func(n *stationed) bool { return n.Name == name })
}

func (s *store) Cut(names ...string) { s.cut = names }

func (s *store) Step() {
	s.now += scopetest.Tick
	s.expire()
	for _, n := range s.procs {
		switch cut := slices.Contains(s.cut, n.Name); {
		case !cut && n.lost != never:
			s.join(n)
		case !cut:
			s.serve(n)
		case n.lost == never && n.Clock()-n.renewed > n.ttl/2:
			n.c.down(n.Clock(), false)
			n.lost = s.now
		}
		s.write(n)
	}
}

// expire ends leases, up to half a second late.
func (s *store) expire() {
	for _, key := range slices.Sorted(maps.Keys(s.keys)) {
		if l := s.keys[key].lease; l != nil && s.now >= l.ends+time.Duration(len(key)%5)*100*time.Millisecond {
			s.rev++
			s.del(key)
		}
	}
}

func (s *store) put(key string, value []byte, l *lease) {
	k := s.keys[key]
	if k == nil {
		k = &stored{created: s.rev}
		s.keys[key] = k
	}
	k.value, k.mod, k.lease = value, s.rev, l
	s.log = append(s.log, entry{key: key, value: value, rev: s.rev})
}

func (s *store) del(key string) {
	if s.keys[key] != nil {
		delete(s.keys, key)
		s.log = append(s.log, entry{key: key, rev: s.rev, deleted: true})
	}
}

// join is Authority.join and list.
func (s *store) join(n *stationed) {
	if s.now-n.lost < 50*time.Millisecond {
		return
	}
	now := n.Clock()
	if n.incarnation == nil || s.now >= n.incarnation.ends {
		n.incarnation = new(lease)
	}
	n.incarnation.ends, n.renewed = s.now+n.ttl, now
	n.keep = &lease{s.now + n.Config.Keep}
	member := n.c.keys.member(n.Name)
	if s.keys[n.c.keys.roster()] == nil {
		s.rev++
		s.put(n.c.keys.roster(), settings{number: 1}.encode(), nil)
	}
	switch k := s.keys[member]; {
	case k == nil:
		s.rev++
		s.put(member, encodeMember(n.Incarnation), n.incarnation)
	case k.lease != n.incarnation:
		return // the name is taken, until that lease is over
	}
	var all []entry
	for _, key := range slices.Sorted(maps.Keys(s.keys)) {
		all = append(all, entry{key: key, value: s.keys[key].value, rev: s.keys[key].mod})
	}
	n.lost, n.flights, n.seen = never, nil, s.rev
	n.c.reset(now, n.c.keys, all, s.rev, link{
		up: true, ttl: n.ttl, renewed: now, watched: now, born: s.keys[member].created, settings: s.keys[n.c.keys.roster()].mod,
	})
}

// serve is beat and watch.
func (s *store) serve(n *stationed) {
	now := n.Clock()
	if now-n.renewed >= n.ttl/4 {
		if s.now >= n.incarnation.ends {
			n.c.down(now, true)
			n.lost = s.now
			return
		}
		n.renewed = now
		n.incarnation.ends = s.now + n.ttl
		n.c.ask(now)
		n.c.renewed(now, now)
		n.c.answer(now)
	}
	i, _ := slices.BinarySearchFunc(s.log, n.seen, func(e entry, rev int64) int { return cmp.Or(cmp.Compare(e.rev, rev), -1) })
	if i < len(s.log) {
		n.seen = s.rev
		n.c.apply(now, n.c.keys, s.log[i:], s.rev)
	}
}

// write is writeAll: a transaction takes a Tick to etcd, and its answer one back.
func (s *store) write(n *stationed) {
	n.c.pass(n.Clock())
	if o, _ := n.c.next(n.Clock()); o != nil {
		if o.kind == opTake && n.lost == never {
			n.slot = &lease{s.now + n.Config.Lease + time.Second}
			n.c.take(o, n.Clock())
		}
		n.flights = append(n.flights, flight{o, s.now})
	}
	n.flights = slices.DeleteFunc(n.flights, func(f flight) bool {
		switch {
		case f.at == s.now:
			return false
		case slices.Contains(s.cut, n.Name):
			n.c.done(n.Clock(), f.o, false, 0)
			return true
		}
		written := s.commit(n, f.o)
		if !written {
			s.void++
		}
		n.c.done(n.Clock(), f.o, written && s.rng.IntN(10) > 0, s.rev) // or the answer is lost
		return true
	})
}

func (s *store) commit(n *stationed, o *op) bool {
	for _, f := range o.finds {
		var created, mod int64
		if k := s.keys[f.key]; k != nil {
			created, mod = k.created, k.mod
		}
		if f.as == asChanged && mod != f.rev || f.as == asCreated && created != f.rev || f.as == asThere && created == 0 {
			return false
		}
	}
	s.rev++
	under := [...]*lease{memberLease: n.incarnation, keepLease: n.keep, probeLease: n.slot}
	for _, p := range o.puts {
		if p.value == nil {
			s.del(p.key)
		} else {
			s.put(p.key, p.value, under[p.under])
		}
	}
	if o.kind == opTake {
		s.taken++
	}
	return true
}

func TestScopesByStore(t *testing.T) {
	voids, probes := 0, 0
	var all []*store
	scopetest.Run(t, func() scopetest.Fabric {
		s := newStore(t)
		all = append(all, s)
		return s
	})
	for _, s := range all {
		voids, probes = voids+s.void, probes+s.taken
	}
	if voids == 0 || probes == 0 {
		t.Errorf("%d transactions were void, %d probes", voids, probes)
	}
}
