// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
	"github.com/stormguard-mq/stormguard/limiter"
)

// paceRig is one guard whose dead letters are limited to one in 2s.
func paceRig(t *testing.T, order guard.Order, every uint64, permanent bool) (*guard.Guard, *guardtest.Broker, *guardtest.Handler, *guard.Source[*guardtest.Message], func()) {
	pace, err := limiter.Local(limiter.Limit{Rate: 0.5, Burst: 1})
	if err != nil {
		t.Fatal(err)
	}
	g, err := guard.New(guard.Config{Policy: guard.Policy{Order: order}}, guard.WithDeadLetterLimiter(pace))
	if err != nil {
		t.Fatal(err)
	}
	b, h := guardtest.NewBroker(), new(guardtest.Handler)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	opened := make(chan *guard.Source[*guardtest.Message], 1)
	go func() {
		defer close(ended)
		_ = b.Run(ctx, g, "q", guardtest.Guarded{Opened: func(s *guard.Source[*guardtest.Message], _ *guardtest.Epoch) { opened <- s }},
			func(ctx context.Context, m *guardtest.Message) error {
				n := guardtest.Number(m.Body)
				err := h.Handle(ctx, m.Key, m.Body)
				if err == nil && n%every == 0 {
					if err = errFleetDown; permanent {
						err = guard.Permanent(err)
					}
				}
				return err
			})
	}()
	s := <-opened
	return g, b, h, s, func() {
		cancel()
		<-ended
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

// Dead letters over their limit wait without another attempt, and are written in
// the end; the messages around them go on as they may.
func TestDeadLettersArePaced(t *testing.T) {
	for _, order := range []guard.Order{guard.OrderSource, guard.OrderNone} {
		for _, permanent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/permanent=%v", order, permanent), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					_, b, h, s, stop := paceRig(t, order, 10, permanent)
					began := time.Now()
					for n := range uint64(100) {
						b.Publish("q", guardtest.Message{Body: guardtest.Body(n+1, 0)})
						time.Sleep(time.Millisecond)
					}
					waited := false
					last, more := 0, uint64(0)
					for b.DeadLetters("q").Len() < 10 {
						more++ // that others succeed is what tells poison from an outage
						b.Publish("q", guardtest.Message{Body: guardtest.Body(1001+10*more, 0)})
						time.Sleep(50 * time.Millisecond)
						if n := b.DeadLetters("q").Len(); n > last+1 {
							t.Errorf("%d dead letters at once", n-last)
						} else {
							last = n
						}
						st := s.State()
						if err := st.Account.Check(); err != nil {
							t.Fatal(err)
						}
						if h := holdOf(st, guard.ReasonDLQ); h != nil && h.ClearedBy == "time" && st.Account.RetryWait > 0 {
							waited = true
						}
						if time.Since(began) > time.Minute {
							t.Fatalf("%d dead letters after a minute; %+v", last, st)
						}
					}
					if took := time.Since(began); took < 17*time.Second || took > 30*time.Second {
						t.Errorf("10 dead letters took %v", took)
					}
					if !waited {
						t.Error("nothing was seen to wait for the limit")
					}
					for n := uint64(10); n <= 100; n += 10 {
						calls := h.CallsOf(n)
						if needless(h.Calls(), calls, permanent) > 1 || len(calls) == 0 { // one as a witness
							t.Errorf("message %d had %d calls", n, len(calls))
						}
					}
					for _, rec := range b.DeadLetters("q").Records() {
						if calls := len(h.CallsOf(guardtest.Number(rec.Body))); rec.Attempts > calls {
							t.Errorf("dead letter of %d attempts, in %d calls: %+v", rec.Attempts, calls, rec.Reason)
						}
					}
					time.Sleep(time.Second)
					if st := s.State(); st.Tally.Paced == 0 || st.Account.Acked != 90+more || st.Account.DeadLettered != 10 || st.Account.Unsettled() != 0 {
						t.Errorf("%+v, %+v", st.Tally, st.Account)
					}
					stop()
				})
			})
		}
	}
}

// needless is how many calls of a poison message came after it was known to be poison:
// after its first if that was permanent, else after its fifth or a later one before
// which another message had succeeded since the last.
func needless(all, calls []guardtest.Call, permanent bool) (n int) {
	if permanent {
		return len(calls) - 1
	}
	for k := 4; k < len(calls)-1; k++ {
		if slices.ContainsFunc(all, func(c guardtest.Call) bool {
			return c.Seq%10 != 0 && c.End.After(calls[k-1].End) && c.End.Before(calls[k].End)
		}) {
			n++
		}
	}
	return n
}

// What waits for the limit when its source ends goes back to the broker, and its
// credit to the budget.
func TestPacedDeadLettersGoBack(t *testing.T) {
	for _, c := range []struct {
		order     guard.Order
		permanent bool
	}{{guard.OrderSource, true}, {guard.OrderSource, false}, {guard.OrderNone, true}} {
		t.Run(fmt.Sprintf("%v/permanent=%v", c.order, c.permanent), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, b, _, s, stop := paceRig(t, c.order, 2, c.permanent)
				for n := range uint64(8) {
					b.Publish("q", guardtest.Message{Body: guardtest.Body(n+1, 0)})
				}
				time.Sleep(1800 * time.Millisecond) // poison that is not permanent is overtaken by its witness
				if n := s.State().Account.RetryWait; n == 0 {
					t.Fatalf("nothing waits: %+v", s.State().Account)
				}
				stop()
				st := s.State()
				if err := st.Account.Check(); err != nil || st.Account.Unsettled() != 0 {
					t.Errorf("%+v: %v", st.Account, err)
				}
				if got, want := b.Stats("q").Acked, st.Account.Acked+st.Account.DeadLettered; got != want {
					t.Errorf("the broker has %d acks, the account %d", got, want)
				}
				if b := st.Budget; b < 19 {
					t.Errorf("credits left: %v", b)
				}
				if n := st.Account.DeadLettered; n != 1 || st.Account.Returned == 0 {
					t.Errorf("%+v", st.Account)
				}
			})
		})
	}
}
