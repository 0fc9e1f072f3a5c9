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
