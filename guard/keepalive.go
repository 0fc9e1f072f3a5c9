// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"sync"
	"time"
)

// keepAlive starts the goroutine that extends all unsettled messages every AckWait/3.
// stop ends it.
func (s *Source[M]) keepAlive() (stop func()) {
	if s.limits.AckWait <= 0 {
		return func() {}
	}
	quit := make(chan struct{})
	var gone sync.WaitGroup
	gone.Go(func() {
		tick := time.NewTicker(s.limits.AckWait / 3)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				s.extend()
			case <-quit:
				return
			}
		}
	})
	return func() {
		close(quit)
		gone.Wait()
	}
}

// extend extends all unsettled messages.
func (s *Source[M]) extend() {
	s.mu.Lock()
	ms := s.c.messages(nil)
	for _, it := range s.c.going { // the writer has the dead letter, or the loop must ack
		ms = append(ms, it.m)
	}
	if len(s.batch) > 0 {
		w := s.word.Load()
		n := s.batchLeftLocked(w >> phaseBits)
		if phase(w&phaseMask) == processing {
			n++ // the message in hand
		}
		ms = append(ms, s.batch[len(s.batch)-min(n, len(s.batch)):]...)
	}
	if s.feed != nil {
		ms = s.feed.peek(ms)
	}
	ms = s.unackedLocked(ms)
	busy := s.c.count[processing] > 0
	fenced := s.fenced.Load()
	if !fenced {
		s.calls++
	}
	s.mu.Unlock()
	if fenced {
		return
	}
	if len(ms) > 0 {
		s.port.Extend(ms)
	}
	busy = busy || phase(s.word.Load()&phaseMask) == processing
	if busy && !s.fenced.Load() { // fenced: End did not wait for Extend
		// The loop's coalesced acks must not wait behind a slow handler.
		if err := s.port.Flush(); err != nil {
			s.mu.Lock()
			s.c.tally.AckFailures++
			s.mu.Unlock()
		}
	}
	s.end()
}
