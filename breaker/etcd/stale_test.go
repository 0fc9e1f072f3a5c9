// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// still is a process that stands still between what it read and what it writes.
type still struct {
	*Authority
	l *leases
}

func newStill(t *testing.T, client *clientv3.Client, prefix, name string) *still {
	t.Helper()
	c := Config{
		Prefix: prefix, Name: name, Roster: breaker.Roster{Names: []string{"a", "b", "c"}},
		Fleet: breaker.FleetConfig{Silent: 40 * time.Second}, // a busy etcd has a quarter of it for each call
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	a := &Authority{
		cfg: c.WithDefaults(), client: client, log: slog.New(slog.DiscardHandler), keys: newLayout(prefix),
		self: crdt.Replica{Name: name, Incarnation: 7}, origin: time.Now(),
	}
	a.core = newCore(a.cfg, a.self, a.now())
	s := &still{Authority: a, l: newLeases()}
	s.sync(t)
	if _, err := a.core.Adopt(a.now(), "q"); err != nil {
		t.Fatal(err)
	}
	return s
}

// sync reads all that is there.
func (s *still) sync(t *testing.T) {
	t.Helper()
	k, err := s.join(t.Context(), s.l)
	if err != nil {
		t.Fatal(err)
	}
	k.watched = s.now()
	all, rev, err := s.list(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s.core.reset(s.now(), s.keys, all, rev, k)
}

// plan is the next operation that is not of the kinds to be written on the way.
func (s *still) plan(t *testing.T, want opKind) *op {
	t.Helper()
	for range 10 {
		s.sync(t)
		s.core.pass(s.now())
		o, _ := s.core.next(s.now())
		if o == nil {
			t.Fatalf("%s has nothing to write, wanted %d", s.self.Name, want)
		}
		if o.kind == want {
			return o
		}
		if err := s.write(t.Context(), s.l, o); err != nil {
			t.Fatal(err)
		}
	}
	t.Fatalf("%s does not come to %d", s.self.Name, want)
	return nil
}

// trip has s vote to open.
func (s *still) trip(t *testing.T, generation uint64) {
	t.Helper()
	s.core.Observe(s.now(), "q", seen(breaker.Snapshot{State: breaker.Open, Generation: generation, BackoffLevel: 1, Cause: "timeout"}))
	o := s.plan(t, opVote)
	if err := s.write(t.Context(), s.l, o); err != nil {
		t.Fatal(err)
	}
}

// What is decided from what is no longer so is void: another's decision since, a
// vote taken back or lost with its process, a lease of our own that is over, a later
// roster, a probe that somebody has.
func TestStaleWritesAreVoid(t *testing.T) {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{brokers.ForTest(t, brokers.Etcd)}, DialTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	value := func(t *testing.T, key string) string {
		t.Helper()
		resp, err := client.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.Kvs) == 0 {
			return ""
		}
		return string(resp.Kvs[0].GetValue())
	}
	must := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, since := range map[string]struct {
		kind opKind
		do   func(t *testing.T, a, b *still) error
		void bool
	}{
		"nothing": {opDecide, func(*testing.T, *still, *still) error { return nil }, false},
		"another decided": {opDecide, func(t *testing.T, a, _ *still) error {
			_, err := client.Put(t.Context(), a.keys.state("q"), string(encodeState(scope.State{Position: scope.Position{Gen: 4}})))
			return err
		}, true},
		"a vote was taken back": {opDecide, func(t *testing.T, a, _ *still) error {
			_, err := client.Delete(t.Context(), a.keys.vote("q", "b"))
			return err
		}, true},
		"a voter's lease is over": {opDecide, func(t *testing.T, _, b *still) error {
			_, err := client.Revoke(t.Context(), b.l.member)
			return err
		}, true},
		"our lease is over, and the name another's": {opDecide, func(t *testing.T, a, _ *still) error {
			_, err := client.Put(t.Context(), a.keys.vote("q", "a"), "")
			must(t, err)
			_, err = client.Revoke(t.Context(), a.l.member)
			return err
		}, true},
		"the roster is a later one": {opDecide, func(t *testing.T, a, _ *still) error {
			_, err := client.Put(t.Context(), a.keys.roster(), string(settings{number: 9}.encode()))
			return err
		}, true},
		"nothing, with a probe to take": {opTake, func(*testing.T, *still, *still) error { return nil }, false},
		"somebody has the probe": {opTake, func(t *testing.T, a, _ *still) error {
			_, err := client.Put(t.Context(), a.keys.probe("q"), "somebody")
			return err
		}, true},
		"the round is over": {opTake, func(t *testing.T, a, _ *still) error {
			_, err := client.Put(t.Context(), a.keys.state("q"), string(encodeState(scope.State{Position: scope.Position{Gen: 1}})))
			return err
		}, true},
		"our place is gone, and a probe to take": {opTake, func(t *testing.T, a, _ *still) error {
			_, err := client.Revoke(t.Context(), a.l.member)
			return err
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			prefix := "/stormguard-test/" + rand.Text()
			a, b := newStill(t, client, prefix, "a"), newStill(t, client, prefix, "b")
			b.trip(t, 1)
			a.trip(t, 1)
			o := a.plan(t, opDecide)
			key := a.keys.state("q")
			if since.kind == opTake {
				must(t, a.write(t.Context(), a.l, o))
				a.core.Want(a.now(), "q", true)
				a.sync(t)
				time.Sleep(120 * time.Millisecond) // the open period
				o = a.plan(t, opTake)
				key = a.keys.probe("q")
			}
			must(t, since.do(t, a, b))
			before := value(t, key)
			_ = a.write(t.Context(), a.l, o) // a lease that is over is an error as well
			if after := value(t, key); (after == before) != since.void {
				t.Errorf("from %q to %q, void: %v", before, after, since.void)
			}
		})
	}
}

// renewing is an etcd that renews every lease.
type renewing struct {
	clientv3.KV
	clientv3.Lease
}

func (renewing) Get(context.Context, string, ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	return &clientv3.GetResponse{}, nil
}

func (renewing) KeepAliveOnce(context.Context, clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	return &clientv3.LeaseKeepAliveResponse{}, nil
}

// newFaked is a process with a session of ttl, at an etcd that kv stands for.
func newFaked(t *testing.T, kv clientv3.KV, ttl time.Duration, log *slog.Logger) (*Authority, *leases) {
	t.Helper()
	cfg := Config{Name: "a", Roster: breaker.Roster{Names: []string{"a", "b", "c"}}}.WithDefaults()
	client := clientv3.NewCtxClient(t.Context())
	client.KV, client.Lease = kv, renewing{}
	a := &Authority{
		cfg: cfg, client: client, log: log, keys: newLayout(cfg.Prefix),
		self: crdt.Replica{Name: "a", Incarnation: 7}, origin: time.Now(),
	}
	a.core = newCore(cfg, a.self, a.now())
	a.core.reset(a.now(), a.keys, nil, 1, link{up: true, ttl: ttl})
	l := newLeases()
	l.member = 1
	l.keep.id.Store(1)
	return a, l
}

// watched is a watch; answer is called with its nth question.
type watched struct {
	clientv3.Watcher
	asked  int
	answer func(n int)
}

func (w *watched) RequestProgress(context.Context) error {
	w.asked++
	w.answer(w.asked)
	return nil
}

// A watch that says nothing while the lease is renewed is given up; not one that answers, or
// does so again after this process stood still, or that tells what it has to catch up with.
func TestSilentWatchIsReplaced(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(a *Authority, n int)
		want   error
	}{
		"silent":  {func(*Authority, int) {}, errSession},
		"answers": {func(a *Authority, _ int) { a.core.answer(a.now()) }, context.DeadlineExceeded},
		"tells":   {func(a *Authority, n int) { a.core.apply(a.now(), a.keys, nil, int64(n)) }, context.DeadlineExceeded},
		"falls quiet": {func(a *Authority, n int) {
			if n < 10 {
				a.core.answer(a.now())
			}
		}, errSession},
		"stood still": {func(a *Authority, n int) {
			if n == 10 {
				time.Sleep(2 * a.ttl())
				return
			}
			a.core.answer(a.now())
		}, context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, l := newFaked(t, renewing{}, 5*time.Second, slog.New(slog.DiscardHandler))
				within, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				ctx, end := context.WithCancelCause(within)
				defer end(nil)
				a.beat(ctx, end, &watched{answer: func(n int) { c.answer(a, n) }}, l)
				if cause := context.Cause(ctx); !errors.Is(cause, c.want) {
					t.Errorf("the session ends by %v, want %v", cause, c.want)
				}
			})
		})
	}
}

// writable is an etcd that finds each transaction void, or refuses it.
type writable struct {
	clientv3.KV
	refuses atomic.Bool
	err     error
}

func (w *writable) Txn(context.Context) clientv3.Txn { return transaction{w} }

type transaction struct{ at *writable }

func (t transaction) If(...clientv3.Cmp) clientv3.Txn  { return t }
func (t transaction) Then(...clientv3.Op) clientv3.Txn { return t }
func (t transaction) Else(...clientv3.Op) clientv3.Txn { return t }

func (t transaction) Commit() (*clientv3.TxnResponse, error) {
	if t.at.refuses.Load() {
		return nil, t.at.err
	}
	return &clientv3.TxnResponse{}, nil
}

// A write that etcd refuses shows in Err, and is logged once, until etcd takes one or nothing
// is to be written any more. One without an answer says nothing.
func TestRefusedWritesShow(t *testing.T) {
	for err, shows := range map[error]bool{
		rpctypes.ErrNoSpace: true, rpctypes.ErrPermissionDenied: true, rpctypes.ErrNoLeader: false, context.DeadlineExceeded: false,
	} {
		t.Run(err.Error(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var said strings.Builder // by the writer, which the test waits for
				kv := &writable{err: err}
				kv.refuses.Store(true)
				a, l := newFaked(t, kv, time.Hour, slog.New(slog.NewTextHandler(&said, nil)))
				if _, err := a.core.Adopt(a.now(), "q"); err != nil {
					t.Fatal(err)
				}
				a.core.Observe(a.now(), "q", seen(breaker.Snapshot{State: breaker.Open, Generation: 1, BackoffLevel: 1, Cause: "timeout"}))
				ctx, end := context.WithCancelCause(t.Context())
				defer end(nil)
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					a.writeAll(ctx, end, l)
				}()
				check := func(refused bool, warnings, infos int) {
					t.Helper()
					time.Sleep(3 * time.Second)
					synctest.Wait()
					if got := a.Err(); (got == nil) == (refused && shows) || got != nil && !errors.Is(got, err) {
						t.Errorf("Err is %v", got)
					}
					if !shows {
						warnings, infos = 0, 0
					}
					if strings.Count(said.String(), "level=WARN") != warnings || strings.Count(said.String(), "level=INFO") != infos {
						t.Errorf("%d warnings and %d ends are to be logged:\n%s", warnings, infos, said.String())
					}
				}
				check(true, 1, 0)
				kv.refuses.Store(false)
				check(false, 1, 1)
				kv.refuses.Store(true)
				check(true, 2, 1)
				end(nil)
				<-ended
				time.Sleep(a.ttl())
				check(false, 2, 1)
			})
		})
	}
}

// A deletion that etcd takes does not say that it takes writes again.
func TestADeletionEndsNoRefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := &writable{err: rpctypes.ErrNoSpace}
		a, l := newFaked(t, kv, time.Hour, slog.New(slog.DiscardHandler))
		probe := a.keys.probe("q")
		puts, deletes := &op{kind: opVote, scope: "q", puts: []put{{probe, []byte{1}, memberLease}}}, &op{kind: opDrop, scope: "q", puts: []put{{key: probe}}}
		for i, c := range []struct {
			o       *op
			refuses bool
			want    error
		}{{puts, true, kv.err}, {deletes, false, kv.err}, {puts, false, nil}, {deletes, false, nil}} {
			kv.refuses.Store(c.refuses)
			_ = a.write(t.Context(), l, c.o) // a refusal is an error as well
			if err := a.Err(); !errors.Is(err, c.want) {
				t.Errorf("after write %d Err is %v, want %v", i, err, c.want)
			}
		}
	})
}

// ungranted has etcd not answer who asks for a lease.
type ungranted struct {
	clientv3.Lease
	asked chan struct{}
}

func (u ungranted) Grant(ctx context.Context, _ int64) (*clientv3.LeaseGrantResponse, error) {
	u.asked <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

// A lease that etcd does not grant keeps nobody but those who ask for it, and them
// not for long.
func TestALeaseThatIsNotGranted(t *testing.T) {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{brokers.ForTest(t, brokers.Etcd)}, DialTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	prefix := "/stormguard-test/" + rand.Text()
	s := newStill(t, client, prefix, "a")
	asked := make(chan struct{}, 10)
	client.Lease = ungranted{client.Lease, asked}

	var taking sync.WaitGroup
	defer taking.Wait()
	began := time.Now()
	for range 2 { // the second waits for the first
		taking.Go(func() {
			o := &op{kind: opTake, scope: "q", puts: []put{{s.keys.probe("q"), probe{holder: s.self}.encode(), probeLease}}}
			if err := s.write(t.Context(), s.l, o); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took > s.ttl()/2 {
				t.Errorf("a probe was tried for for %v", took)
			}
		})
	}
	<-asked
	s.core.Observe(s.now(), "q", seen(breaker.Snapshot{State: breaker.Open, Generation: 1, BackoffLevel: 1, Cause: "timeout"}))
	for _, kind := range []opKind{opVote, opTestify} {
		s.core.pass(s.now())
		o, _ := s.core.next(s.now())
		if o == nil || o.kind != kind {
			t.Fatalf("%+v is to be written, want %d", o, kind)
		}
		if err := s.write(t.Context(), s.l, o); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > s.ttl()/8 {
			t.Errorf("%d was written after %v", kind, took)
		}
		s.sync(t)
	}

	// What renews the leases has no deadline of its own.
	if err := s.holdShared(context.WithoutCancel(t.Context()), newSharedLease(), time.Minute); err == nil {
		t.Error("a lease that was not granted")
	}
}
