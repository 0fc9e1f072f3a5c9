// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/operator"
	"github.com/stormguard-mq/stormguard/limiter"
)

// All start again at once, with another limit in their configuration, one of them alone
// at first: the operator's limit stays.
func TestProcessesAllStartAgain(t *testing.T) {
	all, _ := three(t)
	rate := limiter.Limit{Rate: 300, Burst: 30}
	eventually(t, "the limit is changed", func() bool {
		_, err := all[0].Set(t.Context(), Change{Limit: &rate})
		return err == nil
	})
	for _, p := range all {
		p.Close()
	}
	var seeds []string
	for _, name := range []string{"a", "b", "c"} {
		c := configOf(name, seeds, "a", "b", "c")
		c.Limits.Limit.Rate = 5000
		p := startProcess(t, c)
		eventually(t, name+" mints", func() bool {
			l := p.limits.Stats()
			return l.Number == 2 && !l.Fenced && l.Share > 0.33 && p.limits.Configuration().Limit == escrow.Limit(rate)
		})
		seeds = []string{p.Addr().String()}
	}
}

// A member that an operator takes for dead, and that runs, asks for its share again.
func TestProcessEvictedByMistake(t *testing.T) {
	all, _ := three(t)
	eventually(t, "they have begun", func() bool { return all[2].Status().Configuration.Settled && all[0].Status().Configuration.Settled })
	if _, err := all[0].Evict(t.Context(), 0, "c"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is back", func() bool {
		s := all[2].limits.Stats()
		return s.Number >= 3 && s.Completed == s.Number && s.Share > 0.33 && s.Share < 0.34
	})
}

// minting waits until processes have a third each, by one configuration, which is
// complete.
func minting(t *testing.T, what string, all ...*Process) {
	t.Helper()
	eventually(t, what, func() bool {
		number := all[0].limits.Stats().Number
		for _, p := range all {
			s := p.limits.Stats()
			if s.Number != number || s.Completed != number || s.Fenced || s.Share < .33 || s.Share > .34 {
				return false
			}
		}
		return true
	})
}

// leave has a process leave, in the time of a busy machine: without a deadline it has 10 s.
func leave(t *testing.T, p *Process) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return p.Leave(ctx)
}

// Two operators evict one member at once: it happens once, and changes go on.
func TestTwoEvictOne(t *testing.T) {
	all, _ := three(t)
	minting(t, "they have begun", all...)
	all[2].Close()
	errs := make(chan error, 2)
	for _, p := range all[:2] {
		go func() {
			_, err := p.Evict(t.Context(), 1, "c")
			errs <- err
		}()
	}
	made := 0
	for range 2 {
		switch err := <-errs; {
		case err == nil:
			made++
		case !errors.Is(err, ErrConflict) && !errors.Is(err, fleetstate.ErrMember):
			t.Error(err)
		}
	}
	if made != 1 {
		t.Errorf("%d evictions were made", made)
	}
	for _, p := range all[:2] {
		var err error
		eventually(t, "it knows what the other has made", func() bool {
			_, err = p.Set(t.Context(), Change{Reset: true})
			return !errors.Is(err, ErrConflict)
		})
		if err != nil {
			t.Error(err)
		}
	}
	eventually(t, "two have it all", func() bool {
		return all[0].limits.Stats().Share == .5 && all[1].limits.Stats().Share == .5 && all[0].limits.Stats().Completed == 4
	})
}

// Two of three leave, and start again together, where they hear nobody else. They have
// the configuration of the third.
func TestLeaveAndStartTogether(t *testing.T) {
	all, _ := three(t)
	minting(t, "they have begun", all...)
	rate := limiter.Limit{Rate: 300, Burst: 90}
	if _, err := all[2].Set(t.Context(), Change{Limit: &rate}); err != nil {
		t.Fatal(err)
	}
	var left sync.WaitGroup
	for _, p := range all[:2] {
		left.Go(func() {
			if err := leave(t, p); err != nil {
				t.Error(err)
			}
		})
	}
	left.Wait()
	number := all[2].Status().Configuration.Number
	all[0] = startProcess(t, configOf("a", nil, "a", "b", "c"))
	all[1] = startProcess(t, configOf("b", []string{all[0].Addr().String()}, "a", "b", "c"))
	eventually(t, "they know the configuration, and have shares of it", func() bool {
		for _, p := range all[:2] {
			if s := p.Status().Configuration; s.Number <= number || s.Limit != (limiter.Limit{Rate: 300, Burst: 90}) || !s.Settled || !s.Member {
				return false
			}
		}
		return true
	})
	for _, p := range all {
		if s := p.Status().Configuration; s.Problem != "" {
			t.Errorf("%s: %s", p.node.Self(), s.Problem)
		}
	}
}

// Of three, one is dead and one starts again: it mints at once, without an operator.
func TestOneDeadOneRestarts(t *testing.T) {
	all, _ := three(t)
	minting(t, "they have begun", all...)
	all[1].Close()
	all[2].Close()
	again := startProcess(t, configOf("c", []string{all[0].Addr().String()}, "a", "b", "c"))
	minting(t, "it mints", all[0], again)
	eventually(t, "it admits", func() bool { return again.Key("k").Allow() })
}

// A member that left, and starts again, has its share again, whether it asks or not;
// so a restart by Leave of one after the other ends where it began.
func TestMemberComesBack(t *testing.T) {
	all, _ := three(t)
	eventually(t, "they have met", func() bool { return all[0].Status().Configuration.Settled && all[2].Status().Configuration.Settled })
	for i, name := range []string{"a", "b", "c"} {
		if err := leave(t, all[i]); err != nil {
			t.Fatal(err)
		}
		all[i] = startProcess(t, configOf(name, []string{all[(i+1)%3].Addr().String()}, "a", "b", "c"))
		if i == 1 { // the others do not ask
			if err := all[i].Join(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, name+" has its share", func() bool {
			s := all[i].limits.Stats()
			return s.Share > 0.33 && s.Share < 0.34 && s.Completed == s.Number && !s.Fenced
		})
	}
}

// The last member that starts again finds what the register has.
func TestLastMemberComesBack(t *testing.T) {
	all, seeds := three(t)
	eventually(t, "they have met", func() bool { return all[0].Status().Configuration.Settled && all[2].Status().Configuration.Settled })
	learner := startProcess(t, configOf("learner", seeds, "a", "b", "c"))
	for _, p := range all[1:] {
		if err := leave(t, p); err != nil {
			t.Fatal(err)
		}
	}
	number := all[0].Status().Configuration.Number
	all[0].Close()
	again := startProcess(t, configOf("a", []string{learner.Addr().String()}, "a", "b", "c"))
	eventually(t, "it has the whole", func() bool {
		s := again.limits.Stats()
		return s.Share == 1 && s.Number >= number && s.Completed == s.Number && !s.Fenced
	})
}

// A process that began its fleet alone, and starts again, does not begin it anew
// beside those who joined.
func TestLoneMemberRestarts(t *testing.T) {
	a := startProcess(t, configOf("a", nil, "a"))
	b := startProcess(t, configOf("b", []string{a.Addr().String()}, "a"))
	if err := b.Join(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	number := b.Status().Configuration.Number
	a.Close()
	a = startProcess(t, configOf("a", []string{b.Addr().String()}, "a"))
	change := Change{Limit: &limiter.Limit{Rate: 500, Burst: 50}}
	got := uint64(0)
	eventually(t, "it is a member, and changes the limit", func() bool {
		var err error
		got, err = a.Set(t.Context(), change)
		return err == nil
	})
	if got <= number {
		t.Errorf("configuration %d after %d", got, number)
	}
	eventually(t, "both are at one", func() bool {
		s := b.Status().Configuration
		return s.Number == got && s.Problem == "" && a.Status().Configuration.Number == got
	})
}

// Whose place was taken mints nothing any more, and says so.
func TestDisplaced(t *testing.T) {
	all, seeds := three(t)
	eventually(t, "they have met", func() bool { return all[2].Status().Configuration.Settled && !all[2].limits.Stats().Fenced })
	startProcess(t, configOf("c", seeds, "a", "b", "c"))
	eventually(t, "the first incarnation is out", func() bool {
		select {
		case <-all[2].Done():
			return all[2].limits.Stats().Fenced
		default:
			return false
		}
	})
	if err := all[2].Err(); !errors.Is(err, ErrDisplaced) {
		t.Errorf("out with %v", err)
	}
	if _, err := all[2].Set(t.Context(), Change{Reset: true}); !errors.Is(err, ErrDisplaced) {
		t.Errorf("it proposes: %v", err)
	}
	// Nobody would hear it.
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, ErrDisplaced) || !strings.Contains(err.Error(), `"c"`) {
			t.Errorf("%s: %v", what, err)
		}
	}
	order := operator.Carried{ID: "1", Order: "pause", Until: time.Now().Add(time.Minute)}
	refused("an order", all[2].Orders().Give(order, "pause", "ann", ""))
	rule := dlq.Rule{Kind: dlq.RuleHeader, Header: "tenant", Value: "acme"}
	refused("a rule", all[2].Quarantine().Add(dlq.QuarantineEntry{Rule: rule}))
	refused("the end of a rule", all[2].Quarantine().Remove(rule, "ann"))
	q := httptest.NewRequest(http.MethodPost, "http://localhost/fleet/quarantine", strings.NewReader(`{"rule":"header:tenant=acme"}`))
	q = q.WithContext(context.WithValue(q.Context(), http.LocalAddrContextKey, loopback))
	q.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	if all[2].Handler().ServeHTTP(w, q); w.Code != http.StatusServiceUnavailable {
		t.Errorf("a request: %d %s", w.Code, w.Body)
	}
}
