// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd_test

import (
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/breaker/etcd"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// One process that trips costs the others nothing; two of three are a quorum. Then
// probes, one at a time, close it for all.
func TestQuorumOpensAndCloses(t *testing.T) {
	r, ps, ls := three(t, brokers.ForTest(t, brokers.Etcd), long)
	for i, p := range ps {
		r.until("hears all", func() bool { return p.scope(ls[i]).Heard == 3 })
	}
	r.down.Store(true)
	ls[0].b.Trip(ps[0].now(), "timeout")
	time.Sleep(500 * ms)
	for i, p := range ps {
		if s := p.scope(ls[i]); s.State != breaker.Closed || s.Need != 2 {
			t.Errorf("%s: one vote: %+v", p.name, s)
		}
	}
	if !ls[1].b.Closed() || !ls[2].b.Closed() {
		t.Error("one vote opened others")
	}
	ls[1].b.Trip(ps[1].now(), "timeout")
	took := r.until("opens", all(ps, ls, breaker.Open))
	t.Logf("opened for all in %v", took)
	r.until("climbs", func() bool { return ps[2].scope(ls[2]).Round >= 3 })
	r.down.Store(false)
	took = r.until("closes", all(ps, ls, breaker.Closed))
	t.Logf("closed for all in %v, %d probes, %d at once", took, r.total.Load(), r.most.Load())
	r.oneAtATime()
}

// A hundred rounds of three that all have something to probe with: never two
// probes at once, whoever has the turn, and nobody's breaker goes by itself.
func TestOneProbeAtATime(t *testing.T) {
	r := newRig(t, brokers.ForTest(t, brokers.Etcd), long, "a", "b", "c")
	r.cfg.Fleet.Base, r.cfg.Fleet.Cap = 2*ms, 20*ms
	r.took.Store(int64(3 * ms))
	ps := r.startAll()
	ls := adoptAll(ps, "g", "orders")
	r.down.Store(true)
	r.trip(ps, ls, 2)
	before := ps[0].solo.Load() + ps[1].solo.Load() + ps[2].solo.Load()
	took := time.Duration(0)
	for n := uint32(25); n <= 100; n += 25 {
		took += r.until("a hundred rounds", func() bool { return ps[0].scope(ls[0]).Round > n })
	}
	r.down.Store(false)
	r.until("closes", all(ps, ls, breaker.Closed))
	solo := ps[0].solo.Load() + ps[1].solo.Load() + ps[2].solo.Load() - before
	t.Logf("100 rounds in %v: %d probes, %d at once, %d by a breaker itself", took, r.total.Load(), r.most.Load(), solo)
	if n := r.total.Load(); r.most.Load() != 1 || n < 100 || n > 140 || solo != 0 {
		t.Errorf("%d probes in 100 rounds, %d at once, %d outside the fleet", n, r.most.Load(), solo)
	}
}

// The prober dies with its probe out: the probe passes on when its lease is over,
// and not before.
func TestProberDies(t *testing.T) {
	r, ps, ls := three(t, brokers.ForTest(t, brokers.Etcd), brief)
	r.down.Store(true)
	r.took.Store(int64(time.Hour)) // no probe comes back, the first neither
	r.trip(ps, ls, 2)
	var prober int
	r.until("a probe", func() bool {
		for i, p := range ps {
			if p.scope(ls[i]).Probing && r.out.Load() > 0 {
				prober = i
				return true
			}
		}
		return false
	})
	ps[prober].kill()
	first := r.went.Load()
	r.took.Store(int64(5 * ms))
	r.down.Store(false)
	before := r.total.Load()
	rest := append(append([]*proc(nil), ps[:prober]...), ps[prober+1:]...)
	restLeaves := append(append([]*leaf(nil), ls[:prober]...), ls[prober+1:]...)
	r.until("the next probe", func() bool { return r.total.Load() > before })
	passed := time.Duration(r.went.Load() - first)
	r.until("closes", all(rest, restLeaves, breaker.Closed))
	t.Logf("%s died; the probe passed on after %v, %d at once", ps[prober].name, passed, r.most.Load())
	// The lease is 3 s and began before the probe, by less than a Turn.
	if passed < 2*sec {
		t.Errorf("the probe passed on after %v", passed)
	}
}

// etcd is killed and comes back with its data, while a scope is open. Each process
// goes by itself meanwhile, and is in line again afterwards.
func TestEtcdIsKilled(t *testing.T) {
	t.Parallel()
	b := brokers.StartForTest(t, brokers.Etcd, brokers.Options{})
	r, ps, ls := tripped(t, b.Addr(), short)
	if err := b.Kill(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.until("all know that they are cut off", func() bool {
		return ps[0].a.Err() != nil && ps[1].a.Err() != nil && ps[2].a.Err() != nil
	})
	solo := ps[2].solo.Load()
	r.until("goes by its own breaker", func() bool { return ps[2].solo.Load() > solo })
	if err := b.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.until("all are back", func() bool {
		return ps[0].a.Err() == nil && ps[1].a.Err() == nil && ps[2].a.Err() == nil
	})
	r.until("still open, and held again", func() bool {
		for i, p := range ps {
			if s := p.scope(ls[i]); s.State != breaker.Open || !s.Held {
				return false
			}
		}
		return true
	})
	r.down.Store(false)
	r.until("closes", all(ps, ls, breaker.Closed))
	r.oneAtATime()
}

// Dependency and etcd recover in the other order: what closed by itself while cut
// off counts as passed, and nobody stays behind.
func TestRecoversWhileCutOff(t *testing.T) {
	t.Parallel()
	b := brokers.StartForTest(t, brokers.Etcd, brokers.Options{})
	r, ps, ls := tripped(t, b.Addr(), short)
	signalEtcd(t, b, syscall.SIGSTOP)
	r.down.Store(false)
	r.until("each closes by itself", func() bool { return ls[0].b.Closed() && ls[1].b.Closed() && ls[2].b.Closed() })
	signalEtcd(t, b, syscall.SIGCONT)
	r.until("closed for all", all(ps, ls, breaker.Closed))
	r.until("all are back", func() bool {
		return ps[0].a.Err() == nil && ps[1].a.Err() == nil && ps[2].a.Err() == nil
	})
}

// etcd stands still again and again, shorter and longer than a lease.
func TestEtcdStandsStill(t *testing.T) {
	t.Parallel()
	b := brokers.StartForTest(t, brokers.Etcd, brokers.Options{})
	r, ps, ls := tripped(t, b.Addr(), short)
	for _, d := range []time.Duration{300 * ms, 900 * ms, 2500 * ms, 200 * ms, 4 * sec} {
		signalEtcd(t, b, syscall.SIGSTOP)
		time.Sleep(d)
		signalEtcd(t, b, syscall.SIGCONT)
		round := ps[0].scope(ls[0]).Round
		r.until("goes on", func() bool {
			return ps[0].a.Err() == nil && ps[1].a.Err() == nil && ps[2].a.Err() == nil && ps[0].scope(ls[0]).Round > round
		})
	}
	r.down.Store(false)
	r.until("closes", all(ps, ls, breaker.Closed))
	r.oneAtATime()
}

// One process loses its way to etcd, without a word from the network. It knows
// within a lease, trusts nothing it had heard, and is in line when it is back.
func TestCutOff(t *testing.T) {
	r := newRig(t, brokers.ForTest(t, brokers.Etcd), short, "a", "b", "c")
	ps := r.startAll("c")
	c := ps[2]
	ls := adoptAll(ps, "g", "orders")
	warm := 0
	r.until("c knows that nothing is wrong, and begins closed", func() bool {
		warm++
		return c.adopt("g", "warm", strconv.Itoa(warm)).b.Closed()
	})
	c.proxy.freeze()
	r.until("c knows", func() bool { return c.a.Err() != nil })
	for _, p := range ps[:2] {
		r.until("the others know", func() bool { return p.scope(ls[0]).Heard == 2 || p != ps[0] })
	}
	r.down.Store(true)
	r.trip(ps[:2], ls[:2], 2)
	if s := c.scope(ls[2]); s.State != breaker.Closed || !ls[2].b.Closed() {
		t.Errorf("c: %+v", s)
	}
	// What c had heard says that other is closed; that is no longer worth anything.
	other := c.adopt("g", "other")
	if other.b.Closed() {
		t.Error("c took its stale word for it that other is closed")
	}
	c.proxy.thaw()
	r.until("c is back, and held", func() bool { s := c.scope(ls[2]); return s.State == breaker.Open && s.Held })
	r.down.Store(false)
	r.until("closes", all(ps, ls, breaker.Closed))
	r.oneAtATime()
}

// A process that is cut off with its probe out ends it before its lease does, so
// that the next begins after.
func TestProberIsCutOff(t *testing.T) {
	r, ps, ls := tripped(t, brokers.ForTest(t, brokers.Etcd), short, "a", "b", "c")
	r.took.Store(int64(1500 * ms))
	prober := -1
	r.until("a probe", func() bool {
		for i, p := range ps {
			if p.scope(ls[i]).Probing && r.out.Load() == 1 {
				prober = i
				return true
			}
		}
		return false
	})
	ps[prober].proxy.freeze()
	before := r.total.Load()
	r.until("the next probe", func() bool { return r.total.Load() > before })
	r.oneAtATime()
	ps[prober].proxy.thaw()
	r.took.Store(int64(5 * ms))
	r.down.Store(false)
	r.until("closes", all(ps, ls, breaker.Closed))
}

// The revisions that a process would go on from are gone when it is back: it lists
// anew.
func TestCompaction(t *testing.T) {
	r, ps, ls := three(t, brokers.ForTest(t, brokers.Etcd), long, "c")
	c := ps[2]
	c.proxy.freeze()
	r.down.Store(true)
	r.trip(ps[:2], ls[:2], 2)
	r.until("a few rounds", func() bool { return ps[0].scope(ls[0]).Round > 4 })
	direct := dial(t, r.addr)
	defer func() { _ = direct.Close() }()
	resp, err := direct.Get(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := direct.Compact(t.Context(), resp.Header.GetRevision(), clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	c.proxy.drop()
	c.proxy.thaw()
	r.until("c lists anew", func() bool { s := c.scope(ls[2]); return s.State == breaker.Open && s.Held && c.a.Err() == nil })
	r.down.Store(false)
	r.until("closes", all(ps, ls, breaker.Closed))
}

// told tells whether err says the words.
func told(err error, words string) bool { return err != nil && strings.Contains(err.Error(), words) }

// Of two processes with one name the second waits until the first's lease is over.
func TestOneName(t *testing.T) {
	r := newRig(t, brokers.ForTest(t, brokers.Etcd), some, "a", "b")
	ps := r.startAll()
	ls := adoptAll(ps, "g", "orders")
	twin := r.start("a", false)
	r.until("refused", func() bool { return told(twin.a.Err(), "name is taken") })
	r.down.Store(true)
	l := twin.adopt("g", "orders")
	l.b.Trip(twin.now(), "timeout")
	ls[1].b.Trip(ps[1].now(), "timeout")
	time.Sleep(700 * ms)
	if s := ps[0].scope(ls[0]); s.State != breaker.Closed {
		t.Errorf("the twin had a vote: %+v", s)
	}
	ps[0].kill()
	r.until("takes the name", func() bool { return twin.a.Err() == nil })
	r.until("opens", func() bool { return twin.scope(l).State == breaker.Open })
}

// Who counts by another roster is refused under the same number, and follows
// under a lower one.
func TestRosters(t *testing.T) {
	r, ps, ls := three(t, brokers.ForTest(t, brokers.Etcd), brief)
	other := newRig(t, r.addr, brief)
	other.cfg = r.cfg
	other.cfg.Roster.Names = []string{"a", "b", "c", "d"}
	d := other.start("d", false)
	r.until("refused", func() bool { return told(d.a.Err(), "roster differs") })
	d.stop()
	other.cfg.Roster.Number = 2
	d = other.start("d", false)
	r.until("takes over", func() bool { return d.a.Err() == nil })
	ld := d.adopt("g", "orders")
	r.down.Store(true)
	other.down.Store(true) // d's calls, too: its probes would close the scope again
	// Three of the earlier roster's would decide; the later needs two of its own
	// four, and one process that counts by it.
	ls[0].b.Trip(ps[0].now(), "timeout")
	ls[1].b.Trip(ps[1].now(), "timeout")
	r.until("opens", all(append(ps, d), append(ls, ld), breaker.Open))
	d.stop()
	others := adoptAll(ps, "g", "others")
	others[0].b.Trip(ps[0].now(), "timeout")
	others[1].b.Trip(ps[1].now(), "timeout")
	time.Sleep(500 * ms)
	r.down.Store(false)
	time.Sleep(sec)
	if s, o := ps[0].scope(ls[0]), ps[0].scope(others[0]); s.State != breaker.Open || o.State != breaker.Closed || r.count("scope/g%2Fothers/state") != 0 {
		t.Errorf("those with the earlier roster decided: %+v, %+v", s, o)
	}
	for i, p := range ps {
		r.until(p.name+" says so", func() bool {
			err := p.a.Err()
			return errors.Is(err, etcd.ErrLate) && strings.Contains(err.Error(), "number 2, and ours is 1")
		})
		r.until(p.name+" goes by its own breaker", ls[i].b.Closed)
	}
}

// Votes of a process that died count until its lease is over, and not longer.
func TestVotesDieWithTheirProcess(t *testing.T) {
	r, ps, ls := three(t, brokers.ForTest(t, brokers.Etcd), short)
	r.down.Store(true)
	ls[0].b.Trip(ps[0].now(), "timeout")
	r.until("the vote is there", func() bool { return r.count("scope/g%2Forders/vote/a") == 1 })
	ps[0].kill()
	r.until("it is gone", func() bool { return r.count("scope/g%2Forders/vote/a") == 0 && ps[1].scope(ls[1]).Heard == 2 })
	ls[1].b.Trip(ps[1].now(), "timeout")
	time.Sleep(500 * ms)
	if s := ps[2].scope(ls[2]); s.State != breaker.Closed {
		t.Errorf("a dead process's vote opened it: %+v", s)
	}
}

// count is how many keys there are below a key of the test's prefix.
func (r *rig) count(below string) int64 {
	r.t.Helper()
	c := dial(r.t, r.addr)
	defer func() { _ = c.Close() }()
	resp, err := c.Get(r.t.Context(), r.cfg.Prefix+"/v1/"+below, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.Count
}

// settle waits until a knows all that is in etcd by now.
func (r *rig) settle(a *etcd.Authority) {
	r.t.Helper()
	c := dial(r.t, r.addr)
	defer func() { _ = c.Close() }()
	resp, err := c.Put(r.t.Context(), r.cfg.Prefix+"/v1/mark", "")
	if err != nil {
		r.t.Fatal(err)
	}
	r.until("settles", func() bool { return a.Revision() >= resp.Header.GetRevision() })
}

// What troubled a partition is there before its next owner handles anything, be
// the last one gone in order or dead, and be it a process that has just started.
func TestTakeOver(t *testing.T) {
	r := newRig(t, brokers.ForTest(t, brokers.Etcd), long, "a", "b", "c")
	r.cfg.Fleet.Cap, r.cfg.Fleet.Base = 5*sec, 5*sec
	r.down.Store(true)
	ps := r.startAll()
	first := ps[0].adopt("g", "orders", "7")
	second := ps[0].adopt("g", "orders", "8")
	calm := ps[0].adopt("g", "bills", "9")
	for _, p := range []string{"1", "2", "3"} { // the topic itself has nothing wrong
		ps[0].adopt("g", "orders", p)
	}
	first.b.Trip(ps[0].now(), "timeout")
	second.b.Trip(ps[0].now(), "timeout")
	r.until("word is left", func() bool {
		return r.count("scope/g%2Forders%2F7/last") == 1 && r.count("scope/g%2Forders%2F8/last") == 1
	})
	ps[0].leave(first)
	ps[0].leave(calm)
	r.settle(ps[1].a)
	if l := ps[1].adopt("g", "bills", "9"); !l.b.Closed() {
		t.Error("9 had nothing wrong and does not begin closed")
	}
	if l := ps[1].adopt("g", "orders", "7"); l.b.Closed() {
		t.Error("7 begins closed, though its last owner had tripped")
	}
	ps[0].kill()
	r.cfg.Fleet.Start, r.frozen = 60*sec, true
	d := r.start("d", true) // not in the roster, knows nothing yet
	l := d.adopt("g", "orders", "8")
	if l.b.Closed() || !l.b.Held() {
		t.Error("8 is not held before anything is known")
	}
	d.proxy.thaw()
	r.until("knows", func() bool { return d.a.Err() == nil })
	r.until("is no longer held", func() bool { return !l.b.Held() })
	if l.b.Closed() {
		t.Error("8 is closed, though its last owner had tripped")
	}
	fresh := d.adopt("g", "bills", "10")
	if !fresh.b.Closed() {
		t.Error("10, of which nobody ever said a word, does not begin closed")
	}
}

// Without etcd a start is not the end: held for Start, then by itself.
func TestStartsWithoutEtcd(t *testing.T) {
	r := newRig(t, brokers.ForTest(t, brokers.Etcd), long, "a", "b")
	r.cfg.Fleet.Start = 5 * sec
	dead := newProxy(t, r.addr)
	dead.close()
	r.addr = dead.addr()
	a := r.start("a", false)
	l := a.adopt("g", "orders")
	if l.b.Closed() || !l.b.Held() {
		t.Error("not held while nothing is known")
	}
	took := r.until("goes by itself", func() bool { return !l.b.Held() })
	r.until("closes by its own probes", l.b.Closed)
	t.Logf("by itself after %v", took)
}

// Close returns, whatever is under way, and leaves nothing.
func TestCloseDuringEverything(t *testing.T) {
	t.Parallel()
	b := brokers.StartForTest(t, brokers.Etcd, brokers.Options{})
	for round := range 12 {
		r := newRig(t, b.Addr(), long, "a", "b", "c")
		r.down.Store(round%2 == 0)
		var ps []*proc
		for _, n := range r.cfg.Roster.Names {
			ps = append(ps, r.start(n, false))
		}
		ls := adoptAll(ps, "g", "orders")
		if round >= 4 {
			time.Sleep(time.Duration(rand.IntN(400)) * ms)
			ls[0].b.Trip(ps[0].now(), "timeout")
			ls[1].b.Trip(ps[1].now(), "timeout")
			time.Sleep(time.Duration(rand.IntN(400)) * ms)
		}
		if round >= 10 {
			signalEtcd(t, b, syscall.SIGSTOP)
		}
		var wg sync.WaitGroup
		began := time.Now()
		for _, p := range ps {
			wg.Go(func() { p.a.Close(); p.a.Close() })
		}
		wg.Wait()
		if d := time.Since(began); d > 60*sec {
			t.Errorf("round %d: Close took %v", round, d)
		}
		if round >= 10 {
			signalEtcd(t, b, syscall.SIGCONT)
		}
		for _, p := range ps {
			p.stop()
		}
	}
}

// A value that cannot be read, as a later version may write, is nobody's verdict:
// the scope goes by its breaker, and nothing overwrites it.
func TestUnreadable(t *testing.T) {
	r := newRig(t, brokers.ForTest(t, brokers.Etcd), long, "a", "b")
	ps := r.startAll()
	ls := adoptAll(ps, "g", "orders")
	direct := dial(t, r.addr)
	defer func() { _ = direct.Close() }()
	key := r.cfg.Prefix + "/v1/scope/g%2Forders/state"
	if _, err := direct.Put(t.Context(), key, "\x09later"); err != nil {
		t.Fatal(err)
	}
	for i, p := range ps {
		ls[i].b.Trip(p.now(), "timeout")
	}
	r.until("each by itself", func() bool { return ls[0].b.Closed() && ls[1].b.Closed() })
	resp, err := direct.Get(t.Context(), key)
	if err != nil || len(resp.Kvs) != 1 || string(resp.Kvs[0].GetValue()) != "\x09later" {
		t.Errorf("overwritten: %v, %v", resp, err)
	}
}

func TestNewRefuses(t *testing.T) {
	_, err := etcd.New(nil, etcd.Config{Prefix: "x/", Fleet: breaker.FleetConfig{Silent: sec, Lease: 100 * ms, Quorum: 2}})
	if err == nil {
		t.Fatal("not refused")
	}
	for _, want := range []string{"etcd: config: client", "Prefix", "Name", "Roster", "Fleet.Silent", "Fleet.Lease", "Quorum"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not named in %v", want, err)
		}
	}
	c := etcd.Config{Name: "a", Roster: breaker.Roster{Names: []string{"a"}}}
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	if c = c.WithDefaults(); c.Prefix != "/stormguard" || c.Fleet.Silent != 5*sec {
		t.Errorf("%+v", c)
	}
}

// A process alone is its own quorum.
func TestAlone(t *testing.T) {
	r := newRig(t, brokers.ForTest(t, brokers.Etcd), long, "a")
	ps := r.startAll()
	ls := adoptAll(ps, "g", "orders")
	r.down.Store(true)
	r.trip(ps, ls, 1)
	r.down.Store(false)
	r.until("closes", all(ps, ls, breaker.Closed))
}

// A probe that hangs has failed when its lease ends, by its own process's clock.
func TestProbeHangs(t *testing.T) {
	r, ps, ls := three(t, brokers.ForTest(t, brokers.Etcd), brief)
	r.down.Store(true)
	r.took.Store(int64(time.Hour))
	r.trip(ps, ls, 2)
	r.until("a probe", func() bool { return r.out.Load() == 1 })
	r.until("the next round", func() bool { return ps[0].scope(ls[0]).Round >= 2 })
	if s := ps[0].scope(ls[0]); s.Cause != breaker.CauseLost {
		t.Errorf("%+v", s)
	}
}
