// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"hash/maphash"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A Set holds the limits of one process: a [Node] behind a lock, a [Handle] for each key,
// and a driver goroutine. It is safe for concurrent use, and is a section that
// internal/gossip can carry.
//
// The goroutine runs only while the node has a next step: a caller waits, or keys are busy
// in a fleet. Close ends it.
type Set struct {
	clock   func() time.Duration
	handles [64]shard
	seed    maphash.Seed

	pool *pooled // only with [Pooled]: it has the tokens, and node has only the configurations

	mu      sync.Mutex
	node    *Node
	known   int              // handles that Key finds
	waiting map[*Handle]*row // handles with waiters, and the row that counts these
	driver  driver
	closed  bool
	notify  func() // see OnChange; may be nil
	told    uint64 // node.changes at the latest notify
}

// A shard has the handles of some keys. New handles are in fresh. They move to a copy of
// read once fresh is large enough, or used often enough, to pay for the copy.
type shard struct {
	read  atomic.Pointer[map[string]*Handle] // read without a lock; the map never changes
	fresh map[string]*Handle                 // guarded by Set.mu
	found int                                // lookups that fresh answered; guarded by Set.mu
}

// settled moves all fresh handles to read, and returns read. The caller holds Set.mu.
func (h *shard) settled() map[string]*Handle {
	all := map[string]*Handle{}
	if old := h.read.Load(); old != nil {
		all = *old
	}
	if len(h.fresh) > 0 {
		all = maps.Clone(all)
		maps.Copy(all, h.fresh)
		h.read.Store(&all)
		clear(h.fresh)
	}
	h.found = 0
	return all
}

// grown tells whether fresh is worth a copy of read.
func (h *shard) grown() bool {
	n := 0
	if old := h.read.Load(); old != nil {
		n = len(*old)
	}
	return max(len(h.fresh), h.found) > n/8
}

// An Option supplies a collaborator that a config file cannot express.
type Option interface{ apply(*Set) }

type optionFunc func(*Set)

func (f optionFunc) apply(s *Set) { f(s) }

// WithClock sets the monotonic clock. It must be the one of the session that
// calls Delta and Merge; the default counts from New. It is called under the
// set's lock.
func WithClock(clock func() time.Duration) Option {
	return optionFunc(func(s *Set) { s.clock = clock })
}

// New makes the set of an incarnation that begins now; see [NewNode]. With an empty roster
// the node is alone, every limit is exactly a token bucket, and self may be any replica
// with a name.
func New(self crdt.Replica, cfg Config, opts ...Option) (*Set, error) {
	s := &Set{seed: maphash.MakeSeed(), waiting: map[*Handle]*row{}, clock: monotonic()}
	for _, o := range opts {
		o.apply(s)
	}
	n, err := NewNode(self, cfg, s.clock())
	if err != nil {
		return nil, err
	}
	s.node = n
	if cfg.Strategy == Pooled {
		s.pool = newPooled(self, cfg, s.clock)
	}
	s.driver.init()
	return s, nil
}

// Local makes one limit of one process, without gossip. Nothing needs to be closed.
func Local(limit Limit) (*Handle, error) {
	s, err := New(crdt.Replica{Name: "local"}, Config{Limit: limit})
	if err != nil {
		return nil, err
	}
	return s.Key("local"), nil
}

// Key returns the handle of a key, the same one as long as the key is in use. It does not
// fail: if the key is too long, or there are too many keys, the handle denies everything.
func (s *Set) Key(key string) *Handle {
	h := &s.handles[maphash.String(s.seed, key)%uint64(len(s.handles))]
	if m := h.read.Load(); m != nil {
		if l := (*m)[key]; l != nil {
			return l
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known >= 2*s.node.cfg.MaxKeys {
		s.purge()
	}
	if m := h.read.Load(); m != nil {
		if l := (*m)[key]; l != nil {
			return l
		}
	}
	l := h.fresh[key]
	if l == nil {
		l = &Handle{set: s, key: key}
		if s.pool != nil {
			l.pooled = &pooledHandle{set: s.pool, key: key}
		}
		if h.fresh == nil {
			h.fresh = map[string]*Handle{}
		}
		h.fresh[key] = l
		s.known++
	} else {
		h.found++
	}
	if h.grown() {
		h.settled()
	}
	return l
}

// purge forgets the handles of keys that the node does not know. A caller may go on using
// such a handle. It gets no pool once the key has another handle.
func (s *Set) purge() {
	for i := range s.handles {
		old := s.handles[i].settled()
		m := maps.Clone(old)
		maps.DeleteFunc(m, func(_ string, l *Handle) bool { return l.row == nil && l.first == nil })
		s.known -= len(old) - len(m)
		s.handles[i].read.Store(&m)
	}
}

// lock takes the lock and lets time pass.
func (s *Set) lock() {
	s.mu.Lock()
	s.node.advance(s.clock())
}

// unlock serves waiters that can be served, schedules the driver, and releases the lock.
func (s *Set) unlock() {
	s.settle()
	s.mu.Unlock()
}

// settle runs the steps that the last call made due, and serves waiters.
func (s *Set) settle() {
	n := s.node
	for !s.closed {
		if n.Wake() <= n.now {
			n.Tick(n.now)
		}
		if len(n.ripe) == 0 {
			break
		}
		for _, r := range n.ripe {
			r.ripe = false
			if r.handle != nil {
				r.handle.serve(r)
			}
			if r.waiting > 0 && (r.handle == nil || r.handle.first == nil) {
				for l, row := range s.waiting { // older handles of the key
					if row == r {
						l.serve(r)
					}
				}
			}
		}
		n.ripe = n.ripe[:0]
	}
	if s.told != n.changes {
		s.told = n.changes
		if s.notify != nil {
			s.notify()
		}
	}
	if wake := n.Wake(); wake < never && !s.closed {
		s.driver.by(wake, s)
	}
}

// OnChange sets f, which the set calls when there is something new to send to a peer: once
// for all changes of one call or one step of the set's goroutine, on the goroutine that made
// them. f is called under the set's lock, so it must not wait or call the set. It is meant
// for the Kick of a gossip.Node. nil ends the calls.
func (s *Set) OnChange(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pool != nil {
		s.pool.OnChange(f)
		return
	}
	s.notify = f
}

// Adopt is [Node.Adopt]. A wait for more than the new burst ends with [ErrBurst].
func (s *Set) Adopt(now time.Duration, c Configuration) error {
	s.mu.Lock()
	defer s.unlock()
	if err := s.node.Adopt(now, c); err != nil {
		return err
	}
	if s.pool != nil {
		s.pool.adopt(c)
	}
	for l, r := range s.waiting {
		for w := l.first; w != nil; {
			next := w.next
			if w.amount > r.burst {
				r.waiting = max(0, r.waiting-w.amount)
				l.remove(w)
				w.err = tooMuch(w.amount, r.burst)
				close(w.ready)
			}
			w = next
		}
		s.node.stir(r)
	}
	return nil
}

// Complete is [Node.Complete].
func (s *Set) Complete(now time.Duration, number uint64) {
	s.mu.Lock()
	defer s.unlock()
	s.node.Complete(now, number)
}

// Applied is [Node.Applied].
func (s *Set) Applied() uint64 {
	s.lock()
	defer s.unlock()
	return s.node.Applied()
}

// Configuration is [Node.Configuration].
func (s *Set) Configuration() Configuration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node.Configuration()
}

// Completed is [Node.Completed].
func (s *Set) Completed() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node.Completed()
}

// Mint is [Node.Mint].
func (s *Set) Mint(until time.Duration) {
	s.lock()
	defer s.unlock()
	s.node.Mint(until)
	if s.pool != nil {
		s.pool.mint(until)
	}
}

// Stats is [Node.Stats].
func (s *Set) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.node.Stats(s.clock())
	if s.pool != nil {
		s.pool.stats(&st)
	}
	return st
}

// View returns the state of a key; ok is false if the node does not know the key.
func (s *Set) View(key string) (v View, ok bool) {
	if s.pool != nil {
		return s.pool.view(key)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node.View(s.clock(), key)
}

func (s *Set) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Close ends all waits with [ErrClosed] and denies everything from now on. It
// returns when the set's goroutine has ended.
func (s *Set) Close() {
	s.mu.Lock()
	s.closed = true
	for l, r := range s.waiting {
		for l.first != nil {
			w := l.first
			r.waiting = max(0, r.waiting-w.amount)
			l.remove(w)
			w.err = ErrClosed
			close(w.ready)
		}
	}
	for _, r := range s.node.rows {
		r.reclaim()
	}
	s.mu.Unlock()
	if s.pool != nil {
		s.pool.Close()
	}
	s.driver.stop()
}

// Mark is [Node.Mark].
func (s *Set) Mark(to crdt.Replica) uint64 {
	if s.pool != nil {
		return s.pool.Mark(to)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node.Mark(to)
}

// Counted is [Node.Counted].
func (s *Set) Counted() uint64 {
	if s.pool != nil {
		return s.pool.Counted()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node.Counted()
}

// Keeps is [Node.Keeps]. With [Pooled] it is true for every peer.
func (s *Set) Keeps(to crdt.Replica) bool {
	if s.pool != nil {
		return s.pool.Keeps(to)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node.Keeps(to)
}

// Delta is [Node.Delta].
func (s *Set) Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	if s.pool != nil {
		return s.pool.Delta(now, b, to, since, room)
	}
	s.mu.Lock()
	defer s.unlock()
	return s.node.Delta(now, b, to, since, room)
}

// Merge is [Node.Merge].
func (s *Set) Merge(c crdt.Contact, b []byte) error {
	if s.pool != nil {
		return s.pool.Merge(c, b)
	}
	s.mu.Lock()
	defer s.unlock()
	return s.node.Merge(c, b)
}

// Rejoin is [Node.Rejoin].
func (s *Set) Rejoin(now time.Duration, self crdt.Replica) {
	s.mu.Lock()
	defer s.unlock()
	s.node.Rejoin(now, self)
	if s.pool != nil {
		s.pool.rejoin(self)
	}
}

// Gone is [Node.Gone].
func (s *Set) Gone(now time.Duration, peer crdt.Replica) {
	if s.pool != nil {
		s.pool.Gone(now, peer)
		return
	}
	s.mu.Lock()
	defer s.unlock()
	s.node.Gone(now, peer)
}
