// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// bookOf is a book with rules about the tenants that are given.
func bookOf(version uint64, tenants ...int) *ruleBook {
	if len(tenants) == 0 {
		return nil
	}
	b := &ruleBook{version: version, rules: map[dlq.Rule]time.Time{}, meta: true}
	for _, n := range tenants {
		b.rules[tenantRule(n)] = time.Now().Add(24 * time.Hour)
	}
	return b
}

func tenantRule(n int) dlq.Rule {
	return dlq.Rule{Kind: dlq.RuleHeader, Header: "tenant", Value: fmt.Sprint(n)}
}

// quarantinedBy is the rule of a book that message m matches, of tenant m%7.
func quarantinedBy(b *ruleBook, m int) *dlq.Rule {
	if r := tenantRule(m % 7); b.has(r) {
		return &r
	}
	return nil
}

// A tenantPort describes messages as of tenant m%7, and with the key k and a number.
type tenantPort struct {
	testPort

	looks atomic.Int64
	gate  atomic.Pointer[chan struct{}] // Meta waits for it; nil for none
}

func (p *tenantPort) Meta(m int) Meta {
	p.looks.Add(1)
	if gate := p.gate.Load(); gate != nil {
		<-*gate
	}
	meta := p.testPort.Meta(m)
	meta.Key = fmt.Append(nil, "k", m)
	meta.Headers = []dlq.Header{{Name: "Tenant", Value: []byte("old")}, {Name: "Tenant", Value: fmt.Append(nil, m%7)}, {Name: "shard", Value: int64(m % 7)}}
	return meta
}

// tenants opens a source whose port describes tenants. nil letters are none.
func tenants(t *testing.T, cfg SourceConfig, p Policy, handler func(m int) error) (*rig, *tenantPort) {
	t.Helper()
	g := Must(New(Config{Policy: p}))
	port := &tenantPort{}
	r := &rig{t: t, g: g, port: &port.testPort, in: make(chan int), ended: make(chan error, 1)}
	r.letters, _ = cfg.DeadLetters.(*testWriter)
	cfg.Name, cfg.Destination = "s", "t"
	var err error
	r.s, err = Open(g, cfg, Limits{}, Port[int](port), func(_ context.Context, m int) error {
		r.mu.Lock()
		r.calls = append(r.calls, m)
		r.mu.Unlock()
		if err := handler(m); err != nil {
			return err
		}
		r.mu.Lock()
		r.handled = append(r.handled, m)
		r.mu.Unlock()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.cancel = cancel
	go func() { r.ended <- r.s.Run(ctx, r.in) }()
	return r, port
}

func (r *rig) quarantine(rule dlq.Rule) {
	r.t.Helper()
	if err := r.g.Quarantine().Add(dlq.QuarantineEntry{Rule: rule, By: "op", Why: "it breaks us"}); err != nil {
		r.t.Fatal(err)
	}
	time.Sleep(2 * tick)
}

func (r *rig) release(rule dlq.Rule) {
	r.t.Helper()
	if err := r.g.Quarantine().Remove(rule, "op"); err != nil {
		r.t.Fatal(err)
	}
	time.Sleep(2 * tick)
}

func upTo(n int, keep func(int) bool) (all []int) {
	for m := range n {
		if keep(m) {
			all = append(all, m)
		}
	}
	return all
}

// A rule that is removed while a message is compared with it is not heeded, and one that
// comes meanwhile is.
func TestQuarantineChangesWhileComparing(t *testing.T) {
	for name, letters := range map[string]dlq.Writer{"": &testWriter{}, "without a writer": nil} {
		bubble(t, name, func(t *testing.T) {
			r, port := tenants(t, SourceConfig{DeadLetters: letters}, Policy{}, func(int) error { return nil })
			r.send(0, 1) // whose producer is looked up
			r.quarantine(tenantRule(3))
			compare := func(m int, change func(), calls int) {
				t.Helper()
				gate := make(chan struct{})
				port.gate.Store(&gate)
				r.in <- m
				time.Sleep(time.Second)
				port.gate.Store(nil)
				change()
				close(gate)
				time.Sleep(time.Second)
				if a := r.check(); len(r.done()) != calls {
					t.Errorf("%v handled, %+v", r.done(), a)
				}
			}
			compare(3, func() { r.release(tenantRule(3)) }, 2)
			r.quarantine(tenantRule(5))
			compare(4, func() { r.quarantine(tenantRule(4)) }, 2)
			r.release(tenantRule(4))
			time.Sleep(time.Second)
			a := r.check()
			if want := map[bool]uint64{true: 2, false: 3}[letters != nil]; a.Acked != want || a.Acked+a.DeadLettered != 3 {
				t.Errorf("%+v, want %d acked", a, want)
			}
			r.close()
		})
	}
}

// What matches is dead-lettered unhandled and at no cost, in its place; all else is
// handled in order; and when the rule is off, everything is.
func TestQuarantine(t *testing.T) {
	for name, rule := range map[string]dlq.Rule{
		"header": {Kind: dlq.RuleHeader, Header: "tenant", Value: "3"},
		"number": {Kind: dlq.RuleHeader, Header: "Shard", Value: "3"},
	} {
		bubble(t, name, func(t *testing.T) {
			r, port := tenants(t, SourceConfig{DeadLetters: &testWriter{}}, Policy{}, func(int) error { return nil })
			r.send(0, 20)
			time.Sleep(time.Second)
			if r.check(); port.looks.Load() != 1 || r.s.slow.Load() { // one for the first message's producer
				t.Errorf("%d looks at messages, slow %v, with an empty list", port.looks.Load(), r.s.slow.Load())
			}
			budget := r.s.State().Budget
			r.quarantine(rule)
			r.send(20, 90)
			time.Sleep(time.Second)
			a := r.check()
			good := upTo(90, func(m int) bool { return m < 20 || m%7 != 3 })
			bad := upTo(90, func(m int) bool { return m >= 20 && m%7 == 3 })
			if !slices.Equal(r.done(), good) {
				t.Errorf("handled %v, want %v", r.done(), good)
			}
			if got, want := strings.Join(r.letters.bodies(), " "), strings.Trim(fmt.Sprint(bad), "[]"); got != want {
				t.Errorf("dead-lettered %v, want %v", got, want)
			}
			st := r.s.State()
			if st.Tally.Quarantined != uint64(len(bad)) || a.DeadLettered != uint64(len(bad)) || st.Tally.Failures+st.Tally.Retries+st.Tally.FailedMessages != 0 || st.Budget < budget {
				t.Errorf("%+v, budget %v of %v", st.Tally, st.Budget, budget)
			}
			for _, rec := range r.letters.recs {
				if rec.Reason != dlq.ReasonQuarantine || rec.Attempts != 0 || !rec.FirstFailed.IsZero() || rec.Cause.ID == "" || !strings.Contains(rec.Error.Message, strings.ToLower(rule.String())) {
					t.Errorf("%+v", rec)
				}
			}
			r.release(rule)
			looks := port.looks.Load()
			r.send(90, 120)
			time.Sleep(time.Second)
			if r.check(); len(r.done()) != len(good)+30 || port.looks.Load() != looks || r.s.slow.Load() {
				t.Errorf("%d handled, %d looks, slow %v, after the rule went off", len(r.done()), port.looks.Load()-looks, r.s.slow.Load())
			}
			r.close()
		})
	}
}

// A key, while the breaker is open: what is held is dead-lettered when it is the head,
// though nothing is admitted; what is not on the list waits for the dependency.
func TestQuarantineWhileOpen(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		bubble(t, fmt.Sprint(order), func(t *testing.T) {
			var up atomic.Bool
			r, _ := tenants(t, SourceConfig{DeadLetters: &testWriter{}}, Policy{Order: order}, func(int) error {
				if up.Load() {
					return nil
				}
				return errDown
			})
			r.send(0, 30)
			time.Sleep(10 * time.Second)
			if n := len(r.letters.bodies()); n != 0 || r.g.Source("s").State().Breaker.State == 0 {
				t.Fatalf("%d dead letters, %+v", n, r.s.State().Breaker)
			}
			r.quarantine(dlq.Rule{Kind: dlq.RuleKey, Value: "k0"})
			within := time.Second
			if order == OrderNone { // each is compared in its turn to be a probe
				within = 10 * time.Second
			}
			time.Sleep(within)
			r.check()
			if got := r.letters.bodies(); !slices.Equal(got, []string{"0"}) {
				t.Errorf("dead-lettered %v, want the head within %v", got, within)
			}
			up.Store(true)
			time.Sleep(5 * time.Minute)
			r.check()
			done := r.done()
			slices.Sort(done)
			if !slices.Equal(done, upTo(30, func(m int) bool { return m > 0 })) {
				t.Errorf("handled %v", done)
			}
			r.close()
		})
	}
}

// A message that waits for its retry is compared at once with a rule that comes while it is
// compared with another.
func TestQuarantineOfWhatWaitsChangesWhileComparing(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r, port := tenants(t, SourceConfig{DeadLetters: &testWriter{}}, Policy{Retry: Retry{Attempts: 900, Base: time.Hour, Max: 2 * time.Hour}}, func(m int) error {
			if m == 3 {
				return errTenant
			}
			return nil
		})
		r.send(0, 4)
		time.Sleep(time.Second)
		if a := r.check(); a.RetryWait != 1 {
			t.Fatalf("%+v", a)
		}
		gate := make(chan struct{})
		port.gate.Store(&gate)
		r.quarantine(tenantRule(6))
		port.gate.Store(nil)
		r.quarantine(tenantRule(3))
		close(gate)
		time.Sleep(time.Second)
		if got := r.letters.bodies(); !slices.Equal(got, []string{"3"}) {
			t.Errorf("dead-lettered %v, %+v", got, r.check())
		}
		r.close()
	})
}

// namedError calls f when it is looked at for its cause.
type namedError struct{ f func() }

func (e namedError) Error() string {
	pcs := make([]uintptr, 32)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs)])
	for {
		frame, more := frames.Next()
		if strings.HasSuffix(frame.Function, "dlq.Fingerprint") {
			e.f()
		}
		if !more {
			return "it has no account"
		}
	}
}

// A rule about a cause that is removed while a failure is looked at is not heeded.
func TestQuarantineCauseRemovedMeanwhile(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		rule := dlq.Rule{Kind: dlq.RuleCause, Value: dlq.Fingerprint(namedError{func() {}}, nil).ID}
		var r *rig
		removed := false
		r, _ = tenants(t, SourceConfig{DeadLetters: &testWriter{}}, Policy{}, func(int) error {
			if removed {
				return nil
			}
			return namedError{func() {
				if !removed {
					removed = true
					r.release(rule)
				}
			}}
		})
		r.quarantine(rule)
		r.send(0, 1)
		time.Sleep(time.Minute)
		if a := r.check(); !removed || a.Acked != 1 || a.DeadLettered != 0 {
			t.Errorf("removed %v, %+v", removed, a)
		}
		r.close()
	})
}

var errTenant = errors.New("tenant 3 has no account")

// A rule about a cause: a message is tried once, and fails with it; those that have
// failed before the rule was set are dead-lettered without another attempt.
func TestQuarantineCause(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderNone} {
		bubble(t, fmt.Sprint(order), func(t *testing.T) {
			r, port := tenants(t, SourceConfig{DeadLetters: &testWriter{}}, Policy{Order: order, Retry: Retry{Attempts: 900, Base: 10 * time.Minute, Max: 20 * time.Minute}}, func(m int) error {
				if m%7 == 3 {
					return errTenant
				}
				return nil
			})
			r.send(0, 9)
			time.Sleep(time.Second)
			calls := r.s.State().Tally.Failures
			if r.check().DeadLettered != 0 || calls == 0 {
				t.Fatalf("%+v", r.s.State().Tally)
			}
			rule := dlq.Rule{Kind: dlq.RuleCause, Value: dlq.Fingerprint(errTenant, nil).ID}
			r.quarantine(rule)
			time.Sleep(time.Second)
			if got, again := r.letters.bodies(), r.s.State().Tally.Failures; !slices.Equal(got, []string{"3"}) || again != calls {
				t.Errorf("dead-lettered %v after %d more attempts", got, again-calls)
			}
			if r.s.slow.Load() {
				t.Error("the closed path is off for a rule about a cause")
			}
			looks := port.looks.Load()
			r.send(9, 40)
			time.Sleep(time.Second)
			r.check()
			if got := r.letters.bodies(); !slices.Equal(got, []string{"3", "10", "17", "24", "31", "38"}) {
				t.Errorf("dead-lettered %v", got)
			}
			st := r.s.State()
			if st.Tally.Quarantined != 6 || st.Tally.Failures != calls+5 || st.Tally.Retries != 0 {
				t.Errorf("%+v", st.Tally)
			}
			if n := port.looks.Load() - looks; n > 10 { // of those that failed: name and record
				t.Errorf("%d looks", n)
			}
			if rec := r.letters.recs[1]; rec.Attempts != 1 || rec.Cause.ID != rule.Value || rec.Error.Message != errTenant.Error() {
				t.Errorf("%+v", rec)
			}
			r.close()
		})
	}
}

// A rule about the cause of an outage, which somebody set in haste, dead-letters nothing:
// neither messages that have failed before nor those that fail now.
func TestQuarantineCauseOfAnOutage(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var down atomic.Bool
		down.Store(true)
		r, _ := tenants(t, SourceConfig{DeadLetters: &testWriter{}}, Policy{Order: OrderNone}, func(int) error {
			if down.Load() {
				return Unavailable(errTenant)
			}
			return nil
		})
		r.send(0, 9)
		time.Sleep(time.Second)
		r.quarantine(dlq.Rule{Kind: dlq.RuleCause, Value: dlq.Fingerprint(Unavailable(errTenant), nil).ID})
		r.quarantine(dlq.Rule{Kind: dlq.RuleCause, Value: dlq.Fingerprint(errTenant, nil).ID})
		r.send(9, 40)
		time.Sleep(20 * time.Second)
		if a := r.check(); a.DeadLettered != 0 || r.s.State().Tally.Failures < 5 {
			t.Errorf("%d dead letters in the outage, after %d failures", a.DeadLettered, r.s.State().Tally.Failures)
		}
		down.Store(false)
		time.Sleep(20 * time.Second)
		if a := r.check(); len(r.done()) != 40 || a.DeadLettered != 0 {
			t.Errorf("%d of 40 handled, %d dead letters", len(r.done()), a.DeadLettered)
		}
		r.close()
	})
}

// An error that says nothing is the dependency's while the health check fails, so no rule
// about its cause holds then: the breaker opens, and nothing is dead-lettered.
func TestQuarantineCauseWhileHealthFails(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var down atomic.Bool
		r, _ := healthRig(t, &down, Policy{})
		r.quarantine(dlq.Rule{Kind: dlq.RuleCause, Value: dlq.Fingerprint(errBad, nil).ID})
		down.Store(true)
		time.Sleep(5 * time.Second) // the check says so
		r.send(0, 40)
		time.Sleep(20 * time.Second)
		if a := r.s.Account(); a.DeadLettered != 0 || r.s.State().Breaker.State == breaker.Closed {
			t.Errorf("%d dead letters in the outage, breaker %v", a.DeadLettered, r.s.State().Breaker.State)
		}
		down.Store(false)
		time.Sleep(time.Minute)
		if a := r.check(); a.Acked != 40 {
			t.Errorf("%d of 40 handled, %d dead letters", a.Acked, a.DeadLettered)
		}
		r.close()
	})
}

// Without a writer what matches waits, and the state says for whom; it is handled when
// the rule is off, or its time is over. What is next to it in its order waits for it.
func TestQuarantineWithoutWriter(t *testing.T) {
	for name, end := range map[string]func(r *rig, rule dlq.Rule){
		"removed": (*rig).release,
		"expired": func(*rig, dlq.Rule) { time.Sleep(10 * time.Minute) },
	} {
		bubble(t, name, func(t *testing.T) {
			r, _ := tenants(t, SourceConfig{}, Policy{Order: OrderNone}, func(int) error { return nil })
			rule := tenantRule(3)
			if err := r.g.Quarantine().Add(dlq.QuarantineEntry{Rule: rule, Until: time.Now().Add(10 * time.Minute)}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * tick)
			r.send(0, 40)
			time.Sleep(5 * time.Minute)
			a := r.check()
			bad := len(upTo(40, func(m int) bool { return m%7 == 3 }))
			if a.RetryWait != bad || len(r.done()) != 40-bad {
				t.Errorf("%+v, %d handled", a, len(r.done()))
			}
			if h := r.s.State().Holds; len(h) != 1 || h[0].Reason != ReasonDLQ || !strings.Contains(h[0].Detail, "6 messages have failed for good or are in quarantine") {
				t.Errorf("%+v", h)
			}
			end(r, rule)
			time.Sleep(time.Second)
			if r.check(); len(r.done()) != 40 || r.s.State().Tally.Retries != 0 {
				t.Errorf("%d handled, %+v", len(r.done()), r.s.State().Tally)
			}
			r.close()
		})
	}
}

// The limit of dead letters paces them; who is released while it waits for that is
// handled.
func TestQuarantineIsPaced(t *testing.T) {
	bubble(t, "paced", func(t *testing.T) {
		pace := &slowPace{every: time.Second}
		g := Must(New(Config{Policy: Policy{Order: OrderNone}}, WithDeadLetterLimiter(pace)))
		letters := &testWriter{}
		var handled atomic.Int64
		s := Must(Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, Port[int](&tenantPort{}), func(context.Context, int) error {
			handled.Add(1)
			return nil
		}))
		if err := g.Quarantine().Add(dlq.QuarantineEntry{Rule: tenantRule(0)}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * tick)
		in := make(chan int, 100)
		for m := range 10 {
			in <- m * 7
		}
		go func() { _ = s.Run(t.Context(), in) }()
		time.Sleep(4500 * time.Millisecond)
		if n := len(letters.bodies()); n != 5 || handled.Load() != 0 || s.State().Tally.Paced == 0 {
			t.Errorf("%d dead letters in 4.5 s, %+v", n, s.State().Tally)
		}
		if err := g.Quarantine().Remove(tenantRule(0), ""); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if n := len(letters.bodies()); n != 5 || handled.Load() != 5 {
			t.Errorf("%d dead letters, %d handled", n, handled.Load())
		}
		if err := s.Account().Check(); err != nil {
			t.Error(err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// slowPace admits one each so often.
type slowPace struct{ every, next time.Duration }

func (p *slowPace) Admit(now time.Duration) time.Duration {
	if now < p.next {
		return p.next - now
	}
	p.next = now + p.every
	return 0
}

// Behind a head that fails a look passes over what matches: it is dead-lettered, and
// the message after it is the witness.
func TestQuarantineInALook(t *testing.T) {
	bubble(t, "look", func(t *testing.T) {
		r, _ := tenants(t, SourceConfig{DeadLetters: &testWriter{}}, Policy{}, func(m int) error {
			if m == 0 || m%7 == 3 {
				return errTenant
			}
			return nil
		})
		r.quarantine(tenantRule(1))
		go r.send(0, 40) // 0 fails, 1 is in quarantine, 3 fails
		time.Sleep(5 * time.Minute)
		a := r.check()
		if a.Unsettled() != 0 || len(r.done()) != 40-1-6-6 || slices.Contains(r.calls, 1) {
			t.Errorf("%+v, %d handled", a, len(r.done()))
		}
		r.close()
	})
}

// Passive: what matches is never offered, also what stood on Ready when it was put on
// the list.
func TestQuarantinePassive(t *testing.T) {
	bubble(t, "passive", func(t *testing.T) {
		g := Must(New(Config{}))
		letters := &testWriter{}
		s := Must(Open[int](g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, &tenantPort{}, nil))
		for m := range 14 {
			if err := s.Offer(m); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second) // 0 stands on Ready
		if err := g.Quarantine().Add(dlq.QuarantineEntry{Rule: tenantRule(0)}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		for range 12 {
			it := <-s.Ready()
			if it.Msg%7 == 0 {
				t.Errorf("%d was offered", it.Msg)
			}
			s.Done(it.Token, nil)
		}
		time.Sleep(time.Second)
		if err := s.Account().Check(); err != nil {
			t.Error(err)
		}
		if got := letters.bodies(); !slices.Equal(got, []string{"0", "7"}) || s.Account().Unsettled() != 0 {
			t.Errorf("dead-lettered %v, %+v", got, s.Account())
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Of headers of one name the last counts, whatever its case; values that are no text are
// compared with what people write.
func TestQuarantineHeaders(t *testing.T) {
	meta := (&tenantPort{}).Meta(3)
	meta.Headers = append(meta.Headers, dlq.Header{Name: "on", Value: true}, dlq.Header{Name: "at", Value: time.Now()}, dlq.Header{Name: "none", Value: nil})
	g := Must(New(Config{}))
	defer func() { _, _ = g.Close(t.Context()) }()
	for text, want := range map[string]bool{
		"header:tenant=3": true, "header:TENANT=3": true, "header:tenant=old": false, "header:shard=3": true, "header:shard=03": false,
		"header:on=true": true, "header:none=": false, "header:missing=": false, "key=k3": true, "key=K3": false,
	} {
		rule, err := dlq.ParseRule(text)
		if err != nil {
			t.Fatal(err)
		}
		book := g.newRuleBook([]dlq.QuarantineEntry{{Rule: rule, Until: time.Now().Add(time.Hour)}})
		if got := book.ofMeta(meta); (got != nil) != want {
			t.Errorf("%s: %v", text, got)
		}
		book = g.newRuleBook([]dlq.QuarantineEntry{{Rule: rule, Until: time.Now()}})
		if got := book.ofMeta(meta); got != nil {
			t.Errorf("%s has ended, and matches", text)
		}
	}
}
