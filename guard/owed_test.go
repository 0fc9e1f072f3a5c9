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
		if st := r.s.State(); st.Account.RetryWait != n-1 || st.Tally.Refused > 2*n {
			t.Errorf("%d looks for a credit: %+v", st.Tally.Refused, st.Account)
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
