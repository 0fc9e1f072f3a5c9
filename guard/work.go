// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

// work is one of several workers. It does the machine's next step, or waits on cond if
// there is none. The loop reads the input, and wakes the workers when a wait is over. If
// a handler's Goexit ends a worker, a new one takes its place.
func (s *Source[M]) work(retired chan<- struct{}) {
	var h hand[M]
	defer func() {
		if !h.busy {
			retired <- struct{}{}
			return
		}
		s.finish(h.item, s.exited(h.item.ctx))
		go s.work(retired)
	}()
	for {
		st, ok := s.await()
		switch {
		case !ok:
			return
		case st.kind == stepHandle:
			s.handle(&h, st.it)
		default:
			s.settle(st.it)
		}
	}
}

// await waits for the next step; false means that the worker must end.
func (s *Source[M]) await() (step[M], bool) {
	s.mu.Lock()
	for {
		if s.ctx.Err() != nil {
			s.c.stopped = true // do not wait for Run to notice: a call now would only be cancelled and repeated
		}
		now := s.g.now()
		st := s.next(now)
		if st.kind != stepWait {
			s.prepareLocked(st)
			if s.demandDueLocked() {
				token(s.wake)
			}
			s.unlock(now)
			return st, true
		}
		if s.retire || s.fenced.Load() {
			s.mu.Unlock()
			return st, false
		}
		if len(s.c.toWrite) > 0 {
			s.unlock(now)
			s.mu.Lock()
			continue
		}
		if st.at > 0 && (s.lookAt == 0 || st.at < s.lookAt) {
			s.lookAt = st.at
			token(s.wake)
		}
		if s.c.ended || s.c.unsettled() == 0 || s.demandDueLocked() {
			token(s.wake)
		}
		if s.acks > 0 {
			s.mu.Unlock()
			s.flush()
			s.mu.Lock()
			continue
		}
		s.cond.Wait()
	}
}
