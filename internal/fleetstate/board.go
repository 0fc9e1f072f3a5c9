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

// A board is a set that all processes write to, each in its own name: a [crdt.LWWSet] with
// watchers, as its own section of the gossip session. The owner of the board decides what the
// elements mean, and bounds them. It is safe for concurrent use.
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

// tellLocked calls the watchers, and the function that OnChange has set.
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

// Watch calls f after each change until stop is called, under the lock of the board. f must not
// wait, and must not call the board.
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

// OnChange sets f, which is called after each change to send, under the lock of the board. f must
// not wait, and must not call the board. It is meant for the Kick of a gossip.Node. nil ends it.
func (b *board) OnChange(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changed = f
}

// Mark returns the number of the latest change that is here.
func (b *board) Mark(crdt.Replica) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.set.Mark()
}

// Counted returns the mark; see gossip.Counter.
func (b *board) Counted() uint64 { return b.Mark(crdt.Replica{}) }

// mergeLocked takes in the output of a peer's Delta. The error is [ErrMalformed], and then nothing
// was taken in.
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

// Gone changes nothing: the elements of a process stay.
func (*board) Gone(time.Duration, crdt.Replica) {}

// Rejoin makes the board write as the new incarnation from now on; see gossip.Rejoiner.
func (b *board) Rejoin(_ time.Duration, self crdt.Replica) {
	b.mu.Lock()
	defer b.mu.Unlock()
	set, err := crdt.NewLWWSet(self)
	if err != nil {
		return // cannot happen: a session has accepted the name
	}
	all, _ := b.set.Delta(nil, 0, math.MaxInt)
	_ = set.Merge(all) // all is well-formed
	b.self, b.set = self, set
}
