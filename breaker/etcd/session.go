// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// writers is how many transactions are under way at once. etcd commits together those that
	// arrive together.
	writers = 4
	// page is the most keys that are listed at a time.
	page = 1000
	// closeTimeout is the longest time that Close waits for etcd.
	closeTimeout = 2 * time.Second
)

// leases are the three leases of a process.
type leases struct {
	member clientv3.LeaseID // for its place in the fleet and its votes; fixed during a session
	keep   sharedLease      // for the votes for next owners
	probe  sharedLease
}

func newLeases() *leases {
	return &leases{keep: newSharedLease(), probe: newSharedLease()}
}

// sharedLease is a lease that several goroutines use. The goroutine that renews it has the slot, so
// that no lock is held during the wait for etcd.
type sharedLease struct {
	slot chan struct{}
	id   *atomic.Int64 // 0 is none
}

func newSharedLease() sharedLease {
	return sharedLease{slot: make(chan struct{}, 1), id: new(atomic.Int64)}
}

func (s sharedLease) lease() clientv3.LeaseID { return clientv3.LeaseID(s.id.Load()) }

// run keeps a session until ctx ends.
func (a *Authority) run(ctx context.Context) {
	defer close(a.done)
	l := newLeases()
	wait := time.Duration(0)
	for ctx.Err() == nil {
		began := a.now()
		err := a.session(ctx, l)
		if ctx.Err() != nil {
			break
		}
		a.core.down(a.now(), errors.Is(err, errOver))
		a.say(err)
		if a.now()-began > a.ttl() {
			wait = 0
		}
		wait = min(max(2*wait, 50*time.Millisecond), a.ttl()/4)
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
	a.leave(l)
}

func (a *Authority) ttl() time.Duration {
	return time.Duration(seconds(a.cfg.Fleet.Silent)) * time.Second
}

// brief bounds one call, by a quarter of our lease.
func (a *Authority) brief(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, a.ttl()/4)
}

// leave gives up the leases of this process's place, votes and probe. Before that it writes the
// votes for next owners; their lease stays, and ends by itself.
func (a *Authority) leave(l *leases) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if l.member == 0 {
		return
	}
	a.core.part()
	for ctx.Err() == nil {
		o, _ := a.core.next(a.now())
		if o == nil || a.write(ctx, l, o) != nil {
			break
		}
	}
	a.core.down(a.now(), true)
	for _, id := range []clientv3.LeaseID{l.member, l.probe.lease()} {
		if id != 0 && ctx.Err() == nil {
			if _, err := a.client.Revoke(ctx, id); err != nil {
				a.log.Info("a lease is left to end by itself", "name", a.self.Name, "error", err)
			}
		}
	}
}

// session runs under one lease and with one watch. It returns the reason of its end.
func (a *Authority) session(ctx context.Context, l *leases) error {
	k, err := a.join(ctx, l)
	if err != nil {
		return err
	}
	k.watched = a.now()
	all, rev, err := a.list(ctx)
	if err != nil {
		return fmt.Errorf("etcd: list: %w", err)
	}
	a.core.reset(a.now(), a.keys, all, rev, k)
	a.say(nil)

	ctx, cancel := context.WithCancelCause(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel(nil)
	watcher := clientv3.NewWatcher(a.client)
	// Without this a server that has lost its leader would go on answering with old data.
	watching := clientv3.WithRequireLeader(ctx)
	running.Go(func() { a.beat(watching, cancel, watcher, l) })
	for range writers {
		running.Go(func() { a.writeAll(ctx, cancel, l) })
	}
	err = a.watch(watching, watcher, rev)
	cancel(err)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}
	_ = watcher.Close() // nothing is left that could fail
	return err
}

// join gets the leases, agrees on the roster and takes our name, in that order.
func (a *Authority) join(ctx context.Context, l *leases) (link, error) {
	ctx, cancel := context.WithTimeout(ctx, a.ttl())
	defer cancel()
	k := link{up: true, ttl: a.ttl(), renewed: a.now()}
	if err := a.hold(ctx, &l.member, a.cfg.Fleet.Silent); err != nil {
		return k, err
	}
	err := a.holdShared(ctx, l.keep, a.cfg.Fleet.Keep)
	if err != nil {
		return k, err
	}
	if k.settings, k.late, err = a.agree(ctx); err != nil {
		return k, err
	}
	key := a.keys.member(a.self.Name)
	value := string(encodeMember(a.self.Incarnation))
	resp, err := a.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, value, clientv3.WithLease(l.member))).
		Else(clientv3.OpGet(key)).Commit()
	if err != nil {
		return k, fmt.Errorf("etcd: join: %w", err)
	}
	k.born = resp.Header.GetRevision()
	if !resp.Succeeded {
		kvs := resp.Responses[0].GetResponseRange().GetKvs()
		if len(kvs) != 1 || string(kvs[0].GetValue()) != value || clientv3.LeaseID(kvs[0].GetLease()) != l.member {
			return k, fmt.Errorf("%w: %q", errName, a.self.Name)
		}
		k.born = kvs[0].GetCreateRevision()
	}
	return k, nil
}

// hold renews a lease, or asks for one if there is none.
func (a *Authority) hold(ctx context.Context, id *clientv3.LeaseID, span time.Duration) error {
	if *id != 0 {
		err := a.renew(ctx, *id)
		if !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return err
		}
		*id = 0
	}
	ctx, cancel := a.brief(ctx)
	defer cancel()
	resp, err := a.client.Grant(ctx, seconds(span))
	if err != nil {
		return fmt.Errorf("etcd: lease: %w", err)
	}
	*id = resp.ID
	return nil
}

// renew first reads the member key. That call waits between two tries, as the client's own calls
// do. The client's renewals of a lease do not, and would spin while no server answers.
func (a *Authority) renew(ctx context.Context, id clientv3.LeaseID) error {
	ctx, cancel := a.brief(ctx)
	defer cancel()
	if _, err := a.client.Get(ctx, a.keys.member(a.self.Name), clientv3.WithKeysOnly()); err != nil {
		return fmt.Errorf("etcd: lease: %w", err)
	}
	if _, err := a.client.KeepAliveOnce(ctx, id); err != nil {
		return fmt.Errorf("etcd: lease: %w", err)
	}
	return nil
}

// agree compares the roster with the one in etcd. It writes ours if there is none or an earlier
// one. late is the number of a later one that is there, or 0.
func (a *Authority) agree(ctx context.Context) (rev int64, late uint64, err error) {
	key, ours := a.keys.roster(), settingsOf(a.cfg)
	for {
		resp, err := a.client.Get(ctx, key)
		if err != nil {
			return 0, 0, fmt.Errorf("etcd: roster: %w", err)
		}
		if len(resp.Kvs) > 0 {
			kv := resp.Kvs[0]
			they, err := decodeSettings(kv.GetValue())
			switch {
			case err != nil:
				return 0, 0, err
			case they == ours:
				return kv.GetModRevision(), 0, nil
			case they.number > ours.number:
				return kv.GetModRevision(), they.number, nil
			case they.number == ours.number:
				return 0, 0, fmt.Errorf("%w: number %d", errRoster, ours.number)
			}
			rev = kv.GetModRevision()
		}
		put, err := a.client.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
			Then(clientv3.OpPut(key, string(ours.encode()))).Commit()
		if err != nil {
			return 0, 0, fmt.Errorf("etcd: roster: %w", err)
		}
		if put.Succeeded {
			return put.Header.GetRevision(), 0, nil
		}
		rev = 0
	}
}

// list returns everything that is there, as of one revision.
func (a *Authority) list(ctx context.Context) (all []entry, rev int64, err error) {
	from, end := a.keys.root, clientv3.GetPrefixRangeEnd(a.keys.root)
	for {
		one, cancel := a.brief(ctx)
		resp, err := a.client.Get(one, from, clientv3.WithRange(end), clientv3.WithLimit(page), clientv3.WithRev(rev))
		cancel()
		if err != nil {
			return nil, 0, err
		}
		if rev == 0 {
			rev = resp.Header.GetRevision()
		}
		for _, kv := range resp.Kvs {
			all = append(all, entry{key: string(kv.GetKey()), value: kv.GetValue(), rev: kv.GetModRevision()})
			from = string(kv.GetKey()) + "\x00"
		}
		if !resp.More {
			return all, rev, nil
		}
	}
}

// watch takes in the changes after a revision, until it ends. The client repairs a lost connection.
// It cannot repair a revision that was compacted away meanwhile.
func (a *Authority) watch(ctx context.Context, w clientv3.Watcher, rev int64) error {
	var changed []entry
	for resp := range w.Watch(ctx, a.keys.root, clientv3.WithPrefix(), clientv3.WithRev(rev+1)) {
		if err := resp.Err(); err != nil {
			return fmt.Errorf("etcd: watch: %w", err)
		}
		if resp.IsProgressNotify() {
			a.core.answer(a.now())
			continue
		}
		changed = changed[:0]
		for _, e := range resp.Events {
			rev = e.GetKv().GetModRevision()
			changed = append(changed, entry{
				key: string(e.GetKv().GetKey()), value: e.GetKv().GetValue(), rev: rev, deleted: e.GetType() == clientv3.EventTypeDelete,
			})
		}
		a.core.apply(a.now(), a.keys, changed, rev)
	}
	return errSession
}

// beat renews the leases, and asks the watch for signs of life. A watch that gives none while the
// lease is renewed is on a node that died without closing its connections. Then beat ends the
// session, since the client would keep the watch as long as TCP does.
func (a *Authority) beat(ctx context.Context, cancel context.CancelCauseFunc, w clientv3.Watcher, l *leases) {
	tick := time.NewTicker(a.ttl() / 4)
	defer tick.Stop()
	kept, told, known, silent := a.now(), true, uint64(0), false
	for {
		asked := a.now()
		a.core.ask(asked)
		one, done := a.brief(ctx)
		err := w.RequestProgress(one) // an error shows as a missing answer
		done()
		if err == nil {
			err = a.renew(ctx, l.member)
		}
		switch {
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			cancel(errOver)
			return
		case err == nil:
			a.core.renewed(a.now(), asked)
		}
		if a.now()-kept > a.cfg.Fleet.Keep/4 && a.holdShared(ctx, l.keep, a.cfg.Fleet.Keep) == nil {
			kept = a.now()
		}
		fresh, late := a.core.status(a.now())
		if late > known {
			known = late
			a.log.Warn("a later roster is in force; this process follows, and neither decides nor probes",
				"name", a.self.Name, "prefix", a.cfg.Prefix, "roster", a.cfg.Roster.Number, "later", late)
		}
		if fresh != told {
			told = fresh
			if fresh {
				a.say(nil)
			} else {
				a.say(errSilent)
			}
		}
		switch {
		case !a.core.silent(a.now()):
			silent = false
		case err != nil:
		case silent:
			cancel(errSession)
			return
		default: // this process may have stood still: the watch has until the next beat
			silent = true
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// writeAll writes the core's operations.
func (a *Authority) writeAll(ctx context.Context, cancel context.CancelCauseFunc, l *leases) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		a.core.pass(a.now())
		o, wait := a.core.next(a.now())
		if o != nil {
			a.core.nudge() // another writer may take the next
			if err := a.write(ctx, l, o); errors.Is(err, rpctypes.ErrLeaseNotFound) {
				cancel(errOver)
			}
			continue
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
		case <-a.core.work:
		case <-timer.C:
		}
	}
}

// write carries out one operation.
func (a *Authority) write(ctx context.Context, l *leases, o *op) error {
	ctx, cancel := a.brief(ctx)
	defer cancel()
	if o.kind == opTake {
		asked := a.now()
		// The lease is a second longer than the probe may be out, so that a probe has ended before
		// another begins.
		if err := a.holdShared(ctx, l.probe, a.cfg.Fleet.Lease+time.Second); err != nil {
			a.wrote(err)
			a.core.done(a.now(), o, false, 0)
			return nil // not the lease of the session; it is tried again
		}
		a.core.take(o, asked)
	}
	conds, puts := a.txn(l, o)
	resp, err := a.client.Txn(ctx).If(conds...).Then(puts...).Commit()
	if err != nil || slices.ContainsFunc(o.puts, func(p put) bool { return p.value != nil }) {
		a.wrote(err) // etcd deletes even where it has no space
	}
	if err != nil {
		a.core.done(a.now(), o, false, 0)
		if o.kind == opTake || o.kind == opTestify {
			return nil // as above
		}
		return err
	}
	a.core.done(a.now(), o, resp.Succeeded, resp.Header.GetRevision())
	return nil
}

// holdShared is hold for a lease that several goroutines use. Goroutines that only write with the
// lease meanwhile use the present one.
func (a *Authority) holdShared(ctx context.Context, s sharedLease, span time.Duration) error {
	select {
	case s.slot <- struct{}{}:
		defer func() { <-s.slot }()
	case <-ctx.Done():
		return fmt.Errorf("etcd: lease: %w", ctx.Err())
	}
	id := s.lease()
	if err := a.hold(ctx, &id, span); err != nil {
		return err
	}
	s.id.Store(int64(id))
	return nil
}

// txn returns the conditions and the writes of an operation.
func (a *Authority) txn(l *leases, o *op) (conds []clientv3.Cmp, puts []clientv3.Op) {
	for _, f := range o.finds {
		switch f.as {
		case asChanged:
			conds = append(conds, clientv3.Compare(clientv3.ModRevision(f.key), "=", f.rev))
		case asCreated:
			conds = append(conds, clientv3.Compare(clientv3.CreateRevision(f.key), "=", f.rev))
		case asThere:
			conds = append(conds, clientv3.Compare(clientv3.CreateRevision(f.key), ">", 0))
		}
	}
	ids := [...]clientv3.LeaseID{memberLease: l.member, keepLease: l.keep.lease(), probeLease: l.probe.lease()}
	for _, p := range o.puts {
		if p.value == nil {
			puts = append(puts, clientv3.OpDelete(p.key))
		} else {
			puts = append(puts, clientv3.OpPut(p.key, string(p.value), clientv3.WithLease(ids[p.under])))
		}
	}
	return conds, puts
}
