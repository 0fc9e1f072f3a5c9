// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// countingPace admits one dead letter each period, and counts how often it is asked.
type countingPace struct {
	pace
	asked atomic.Int64
}

func (p *countingPace) Admit(now time.Duration) time.Duration {
	p.asked.Add(1)
	return p.pace.Admit(now)
}

// Of many messages that wait for a credit, or for the limit of dead letters, one looks for
// all, and all are written in their order.
func TestOneLooksForAllThatWait(t *testing.T) {
	const n = 200
	poison := func(*rig, context.Context, int) error { return Permanent(errBad) }
	inOrder := func(t *testing.T, r *rig) {
		t.Helper()
		want := make([]string, n)
		for m := range want {
			want[m] = string(r.port.Meta(m).Body)
		}
		if got := r.letters.bodies(); !slices.Equal(got, want) {
			t.Errorf("%d letters: %v", len(got), got)
		}
	}
	bubble(t, "credit", func(t *testing.T) {
		r := newRig(t, Policy{Order: OrderNone, Budget: stingy}, Limits{}, poison)
		r.send(0, n)
		time.Sleep(10 * time.Second)
		r.s.mu.Lock()
		looks := r.s.c.budget.Refused()
		r.s.mu.Unlock()
		if a := r.s.Account(); a.RetryWait != n-1 || looks > 2*n {
			t.Errorf("%d looks for a credit: %+v", looks, a)
		}
		r.s.GrantCredits(n)
		time.Sleep(time.Second)
		r.check()
		inOrder(t, r)
		r.close()
	})
	bubble(t, "limit", func(t *testing.T) {
		p := &countingPace{pace: pace{every: 10 * time.Millisecond}}
		r := newRig(t, Policy{Order: OrderNone, Budget: dlq.BudgetConfig{Off: true}}, Limits{}, poison)
		r.s.mu.Lock()
		r.s.c.letterPace = p
		r.s.mu.Unlock()
		r.send(0, n)
		time.Sleep(10 * time.Second)
		r.check()
		if asked := p.asked.Load(); asked > 3*n {
			t.Errorf("the limit was asked %d times for %d letters", asked, n)
		}
		inOrder(t, r)
		r.close()
	})
}

// A message that fails now has its credit, and its turn at the limit of dead letters, after those
// that wait.
func TestWhoWaitsComesFirst(t *testing.T) {
	poison := func(_ *rig, _ context.Context, m int) error {
		if m < 10 || m >= 100 {
			return Permanent(errBad)
		}
		return nil
	}
	turns := func(t *testing.T, r *rig, bodies ...int) {
		t.Helper()
		r.check()
		var want []string
		for _, m := range bodies {
			want = append(want, string(r.port.Meta(m).Body))
		}
		if got := r.letters.bodies(); !slices.Equal(got, want) {
			t.Errorf("letters %q, want %q", got, want)
		}
	}
	bubble(t, "credit", func(t *testing.T) {
		budget := stingy
		budget.PermanentEarn = 0.25
		r := newRig(t, Policy{Order: OrderNone, Budget: budget}, Limits{}, poison)
		r.send(0, 10)
		turns(t, r, 0)
		r.send(50, 54) // a credit
		r.send(100, 101)
		turns(t, r, 0, 1)
		r.s.GrantCredits(20)
		time.Sleep(time.Second)
		turns(t, r, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100)
		r.close()
	})
	bubble(t, "limit", func(t *testing.T) {
		p := new(pace)
		r := newRig(t, Policy{Order: OrderNone, Budget: dlq.BudgetConfig{Off: true}}, Limits{}, poison)
		r.s.mu.Lock()
		r.s.c.letterPace = p
		p.next = r.g.now() + time.Hour
		r.s.mu.Unlock()
		r.send(0, 3)
		turns(t, r)
		r.s.mu.Lock()
		p.next = 0 // the hour was a mistake
		r.s.mu.Unlock()
		r.send(100, 101)
		turns(t, r, 0, 1, 2, 100)
		r.close()
	})
}

// A message that waits for a credit is compared with a new rule, which is not about it, and
// then has its credit as the others have.
func TestRuleBesideMessagesThatWaitForCredits(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{Order: OrderNone, Budget: stingy}, Limits{}, func(*rig, context.Context, int) error { return Permanent(errBad) })
		r.send(0, 20)
		for i := range 5 {
			time.Sleep(time.Second)
			if err := r.g.Quarantine().Add(dlq.QuarantineEntry{Rule: dlq.Rule{Kind: dlq.RuleKey, Value: string(rune('a' + i))}, By: "test"}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		r.s.GrantCredits(30)
		time.Sleep(time.Second)
		if a := r.check(); a.DeadLettered != 20 {
			t.Errorf("%+v", a)
		}
		r.close()
	})
}
