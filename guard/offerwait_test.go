// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// waitingOffer starts an OfferWait and returns where its error goes.
func waitingOffer(ctx context.Context, s *Source[int], m int) <-chan error {
	done := make(chan error, 1)
	go func() { done <- s.OfferWait(ctx, m) }()
	synctest.Wait()
	return done
}

// pending tells whether nothing was said yet.
func pending(c <-chan error) bool {
	synctest.Wait()
	return len(c) == 0
}

// OfferWait takes the first room there is, at the instant it comes, and no more than
// there is; a caller in front keeps its place.
func TestOfferWaitForRoom(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, s := openPassive(t, Policy{Window: 2}, &testPort{})
		start := time.Now()
		for m := range 2 {
			if err := s.OfferWait(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}
		a, b := waitingOffer(t.Context(), s, 2), waitingOffer(t.Context(), s, 3)
		if !pending(a) || !pending(b) {
			t.Fatal("more than the window was taken")
		}
		s.Done((<-s.Ready()).Token, nil)
		synctest.Wait()
		if len(a)+len(b) != 1 {
			t.Errorf("%d taken for one that was settled", len(a)+len(b))
		}
		s.Done((<-s.Ready()).Token, nil)
		synctest.Wait()
		for _, c := range []<-chan error{a, b} {
			select {
			case err := <-c:
				if err != nil {
					t.Error(err)
				}
			default:
				t.Error("not taken, although there is room")
			}
		}
		if took := time.Since(start); took > 0 {
			t.Errorf("it took %s", took)
		}
		if acc := s.Account(); acc.Received != 4 || acc.Check() != nil {
			t.Errorf("%+v", acc)
		}
		closeAll(t, g)
	})
}

// Messages that one goroutine offers, one after another, are handled in their order: in
// both shapes, and through a window of one.
func TestOfferWaitKeepsOrder(t *testing.T) {
	for _, window := range []int{1, 2, 7} {
		bubble(t, "", func(t *testing.T) {
			g, err := New(Config{Policy: Policy{Window: window}})
			if err != nil {
				t.Fatal(err)
			}
			var handled []int
			s, err := Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, &testPort{}, func(_ context.Context, m int) error {
				time.Sleep(time.Millisecond)
				handled = append(handled, m)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- s.Run(t.Context(), nil) }()
			for m := range 100 {
				if err := s.OfferWait(t.Context(), m); err != nil {
					t.Fatal(err)
				}
			}
			elapse(time.Minute)
			if len(handled) != 100 || !slices.IsSorted(handled) {
				t.Errorf("handled %v", handled)
			}
			closeAll(t, g)
			if err := <-ended; err != nil && !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
		})
	}
}

// OfferWait ends with its context, and takes no room from those that go on waiting.
func TestOfferWaitEndsWithItsContext(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, s := openPassive(t, Policy{Window: 1}, &testPort{})
		if err := s.Offer(0); err != nil {
			t.Fatal(err)
		}
		over, cancel := context.WithCancel(t.Context())
		var waiting []<-chan error
		for range 50 {
			waiting = append(waiting, waitingOffer(over, s, 1))
		}
		last := waitingOffer(t.Context(), s, 2)
		it := <-s.Ready()
		go cancel() // at the instant when there is room
		s.Done(it.Token, nil)
		synctest.Wait()
		taken := 0
		for _, c := range waiting {
			switch err := <-c; {
			case err == nil:
				taken++
			case !errors.Is(err, context.Canceled):
				t.Error(err)
			}
		}
		if taken > 0 { // it was one of them; the next room is the last's
			s.Done((<-s.Ready()).Token, nil)
		}
		synctest.Wait()
		select {
		case err := <-last:
			if err != nil {
				t.Error(err)
			}
		default:
			t.Error("still waiting, although there is room")
		}
		if a := s.Account(); a.Received != uint64(2+taken) || a.Check() != nil {
			t.Errorf("%+v, %d taken", a, taken)
		}
		closeAll(t, g)
		if err := s.OfferWait(t.Context(), 3); !errors.Is(err, ErrClosed) {
			t.Errorf("after the end: %v", err)
		}
	})
}

// Ended is closed as soon as End begins, though a handler is still busy, and so ends what
// waits for room.
func TestEnded(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, s := openPassive(t, Policy{Window: 1}, &testPort{})
		if err := s.Offer(0); err != nil {
			t.Fatal(err)
		}
		it := <-s.Ready()
		wait := waitingOffer(t.Context(), s, 1)
		select {
		case <-s.Ended():
			t.Error("ended before its End")
		default:
		}
		reports := make(chan Report, 1)
		go func() { reports <- s.End(t.Context(), ReasonShutdown) }()
		<-s.Ended()
		if err := <-wait; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if len(reports) > 0 {
			t.Error("End has returned, and a message is out")
		}
		s.Done(it.Token, nil)
		if rep := <-reports; !rep.Clean() || rep.Account.Acked != 1 {
			t.Errorf("%+v", rep)
		}
		s.End(t.Context(), ReasonShutdown)
		closeAll(t, g)
	})
}

// Room that the window itself makes, by an Update, is room too: for all who wait for it.
func TestOfferWaitForALargerWindow(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, s := openPassive(t, Policy{Window: 1}, &testPort{})
		if err := s.Offer(0); err != nil {
			t.Fatal(err)
		}
		var waiting []<-chan error
		for range 3 {
			waiting = append(waiting, waitingOffer(t.Context(), s, 1))
		}
		p := s.State().Settings
		p.Window = 4
		if err := s.Update(p); err != nil {
			t.Fatal(err)
		}
		for _, c := range waiting {
			if pending(c) {
				t.Error("not taken, although there is room for all")
			} else if err := <-c; err != nil {
				t.Error(err)
			}
		}
		closeAll(t, g)
	})
}
