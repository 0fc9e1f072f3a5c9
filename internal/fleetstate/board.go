// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A board is what all processes may write on, each in its own name: a [crdt.LWWSet] as a
// section of its own for the gossip session, with watchers. What the elements say is that
// of who has the board, and so are its bounds. It is safe for concurrent use.
type board struct {
	mu       sync.Mutex
	self     crdt.Replica
	set      *crdt.LWWSet
	watchers map[*func()]struct{}
	changed  func()
}

// newBoard returns the empty board of self. The error is [ErrConfig].
func newBoard(self crdt.Replica) (*board, error) {
	set, err := crdt.NewLWWSet(self)
	if err != nil {
		return nil, fmt.Errorf("%w: self: %w", ErrConfig, err)
	}
	return &board{self: self, set: set, watchers: make(map[*func()]struct{})}, nil
}

// tellLocked tells the watchers, and whoever carries the section.
func (b *board) tellLocked() {
	b.watchedLocked()
	if b.changed != nil {
		b.changed()
	}
}

func (b *board) watchedLocked() {
	for f := range b.watchers {
		(*f)()
	}
}

// Watch has f called after each change until stop is called, under the lock of the board:
// f must not wait, nor call it.
func (b *board) Watch(f func()) (stop func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.watchers[&f] = struct{}{}
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.watchers, &f)
	}
}

// OnChange has f called after each change that there is to tell, under the lock of the
// board: it must not wait or call it. The Kick of a gossip.Node is meant. nil ends it.
func (b *board) OnChange(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changed = f
}

// Mark is the number of the latest change that came here.
func (b *board) Mark(crdt.Replica) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.set.Mark()
}

// Counted is that mark; see gossip.Counter.
func (b *board) Counted() uint64 { return b.Mark(crdt.Replica{}) }

// mergeLocked takes in what a peer's Delta appended. The error is [ErrMalformed], and then
// nothing was taken in.
func (b *board) mergeLocked(delta []byte) error {
	mark := b.set.Mark()
	if err := b.set.Merge(delta); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if b.set.Mark() != mark {
		b.tellLocked()
	}
	return nil
}

// Gone changes nothing: what a process has written stays.
func (*board) Gone(time.Duration, crdt.Replica) {}

// Rejoin writes as the new incarnation from now on; see gossip.Rejoiner.
func (b *board) Rejoin(_ time.Duration, self crdt.Replica) {
	b.mu.Lock()
	defer b.mu.Unlock()
	set, err := crdt.NewLWWSet(self)
	if err != nil {
		return // a session took the name
	}
	all, _ := b.set.Delta(nil, 0, math.MaxInt)
	_ = set.Merge(all) // it is well-formed
	b.self, b.set = self, set
}
