// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package bolt

import "go.etcd.io/bbolt"

// Stall keeps commits from happening until the function that it returns is called.
func (s *Store) Stall() (proceed func()) {
	s.turn <- struct{}{}
	return func() { <-s.turn }
}

// Queued is how many writes wait for a commit.
func (s *Store) Queued() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.queue)
}

// Commits is the number of the newest transaction.
func (s *Store) Commits() (n int) {
	_ = s.view(func(tx *bbolt.Tx) error { n = tx.ID(); return nil })
	return n
}

// Begin has a commit take up what is queued, and end when the function that it returns is
// called. Nobody else commits: call Stall before.
func (s *Store) Begin() (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	batch := s.queue
	s.queue = nil
	return func() {
		err := s.store(batch)
		for _, w := range batch {
			w.err = err
			close(w.done)
		}
	}
}
