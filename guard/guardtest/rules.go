// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

var errBroken = errors.New("order 4711: no such customer")

// rules is the suite, common cases first. After each rule, run.finish checks everything once
// more.
var rules = slices.Concat(basics, liveness, loads)

// basics are the rules that are quick to see.
var basics = []rule{
	{
		name: "acks", says: "every message is handled once and acked",
		run: func(x *run) {
			x.publish(100)
			x.start()
			x.handled(100)
			x.publish(200)
			x.handled(300)
			if n := x.h.Len(); n != 300 {
				x.errorf("%d calls for 300 messages", n)
			}
		},
	},
	{
		name: "retries", says: "a failure is retried, and costs nobody a dead letter",
		run: func(x *run) {
			x.h.On(3, Fail(errBroken), Fail(errBroken))
			x.h.On(17, Fail(errBroken))
			x.publish(40)
			x.start()
			x.handled(40)
			if n := len(x.h.CallsOf(3)); n < 3 {
				x.errorf("%d calls of a message that fails twice", n)
			}
		},
	},
	{
		name: "dead-letter", says: "a message that keeps failing is dead-lettered with its history, and nothing else is",
		run: deadLetter,
	},
	{
		name: "permanent", says: "a permanent failure is dead-lettered at once",
		run: func(x *run) {
			x.h.On(5, repeat(Fail(guard.Permanent(errBroken)))...)
			x.publish(20)
			x.start()
			rec := x.buried(5)
			x.handled(19)
			if n := len(x.h.CallsOf(5)); n != 1 {
				x.errorf("%d calls", n)
			}
			if !rec.Permanent || rec.Reason != dlq.ReasonPermanent || rec.Attempts != 1 {
				x.errorf("the dead letter says permanent %t, reason %q, %d attempts", rec.Permanent, rec.Reason, rec.Attempts)
			}
		},
	},
	{
		name: "ignore", says: "an ignored failure is acked",
		run: func(x *run) {
			x.ignored[5] = true
			x.h.On(5, repeat(Fail(guard.Ignore(errBroken)))...)
			x.publish(20)
			x.start()
			x.handled(19)
			s := x.source()
			x.eventually("the ignored message is acked", func() bool { return s.Account().Acked == 20 })
			if n := len(x.h.CallsOf(5)); n != 1 {
				x.errorf("%d calls", n)
			}
		},
	},
	{
		name: "backoff", says: "a backoff holds the source and costs no attempt",
		run: backoff,
	},
	{
		name: "panic", says: "a panic and a Goexit are failures with a stack, and the source lives on", needs: function,
		run: func(x *run) {
			x.h.On(3, Panic("boom"), Goexit)
			x.h.On(4, Goexit, Panic(errBroken))
			x.h.On(9, repeat(Panic("boom"))...)
			x.h.On(15, repeat(Goexit)...)
			x.publish(40)
			x.start()
			for _, n := range []uint64{9, 15} {
				if rec := x.buried(n); !strings.Contains(rec.Error.Stack, "guardtest") {
					x.errorf("the dead letter of message %d has no stack of its handler: %+v", n, rec.Error)
				}
			}
			x.handled(38)
			if n := x.source().State().Tally.Panics; n < 8 {
				x.errorf("%d panics counted", n)
			}
		},
	},
	{
		name: "timeout", says: "a hanging handler is cancelled at its timeout, and the message retried", needs: function,
		run: func(x *run) {
			x.policy.Timeout = x.span(2*time.Second, 500*time.Millisecond)
			x.h.On(5, Hang)
			x.publish(20)
			x.start()
			x.handled(20)
			calls := x.h.CallsOf(5)
			took := calls[0].End.Sub(calls[0].Start)
			if slack := x.span(50*time.Millisecond, x.deadline()); took < x.policy.Timeout-20*time.Millisecond || took > x.policy.Timeout+slack {
				x.errorf("cancelled after %s, the timeout is %s", took, x.policy.Timeout)
			}
			if n := x.source().State().Tally.Timeouts; n != 1 {
				x.errorf("%d timeouts counted", n)
			}
		},
	},
	{
		name: "outage", says: "in an outage messages are held, not dead-lettered, and drain in order",
		run: func(x *run) {
			x.patient()
			x.publish(50)
			x.start()
			x.handled(50)
			x.outage(150, x.span(time.Minute, 3*time.Second))
		},
	},
	{
		name: "storm", says: "an outage under default settings becomes a storm, which ends by itself",
		needs: func(f Features) string {
			if f.RealTime {
				return "RealTime unset: it takes minutes"
			}
			return ""
		},
		run: func(x *run) {
			x.policy = guard.Policy{Order: x.policy.Order, Workers: x.policy.Workers}
			x.publish(300)
			x.start()
			x.handled(300)
			st := x.outage(500, 4*x.spanOf(150*time.Second))
			// With OrderNone, probes use all messages in turn, so each has few attempts.
			if !st.Storm.Active && x.policy.Order != guard.OrderNone {
				x.errorf("it is no storm: %+v", st.Storm)
			}
		},
	},
	{
		name: "forced-open", says: "while the breaker is forced open nothing is handled, acked or delivered again",
		run: func(x *run) {
			x.publish(20)
			x.start()
			x.handled(20)
			s := x.source()
			x.must("ForceOpen", s.ForceOpen(time.Hour))
			x.quietly(30, func() { x.must("ForceClosed", s.ForceClosed()) })
		},
	},
	{
		name: "pause", says: "a paused source handles nothing until it is resumed",
		run: func(x *run) {
			x.publish(20)
			x.start()
			x.handled(20)
			s := x.source()
			s.Pause(0)
			x.quietly(30, s.Resume)
		},
	},
	{
		name: "full", says: "a source whose window is full takes no more, and loses nothing",
		run: func(x *run) {
			x.policy.Window = max(16, 4*x.policy.Workers)
			x.publish(20)
			x.start()
			x.handled(20)
			s := x.source()
			s.Pause(0)
			unsettled := func() int {
				a := s.Account()
				return a.Waiting + a.Processing + a.Settling + a.Held + a.RetryWait
			}
			x.quietly(10*x.policy.Window, func() {
				x.eventually("a quarter of the window is unsettled", func() bool { return unsettled() >= x.policy.Window/4 })
				if n := unsettled(); n > x.policy.Window {
					x.errorf("%d messages unsettled in a window of %d", n, x.policy.Window)
				}
				s.Resume()
			})
		},
	},
	{
		name: "room", says: "a message that waits for room comes in as soon as there is some",
		run: room,
	},
	{
		name: "ended", says: "a source that has ended ends its reader, also one that waits for room",
		run: ended,
	},
	{
		name: "order", says: "handlers succeed in order, also through retries",
		run: func(x *run) {
			x.h.Delay(time.Millisecond)
			for n := uint64(10); n < 280; n += 30 {
				x.h.On(n, Fail(errBroken))
			}
			x.publish(150)
			x.start()
			x.publish(150)
			x.handled(300)
		},
	},
	{
		name: "poison", says: "poison among healthy traffic is dead-lettered once and does not delay the others unduly",
		run: poison,
	},
	{
		name: "quarantine", says: "what matches a rule of the quarantine is dead-lettered unhandled, all else is handled in order",
		run: quarantine,
	},
	{
		name: "writer-down", says: "while dead letters cannot be written nothing is settled or lost",
		run: writerDown,
	},
	{
		name: "writer-unsure", says: "a lost confirmation makes a twin at most, of the same ID",
		run: func(x *run) {
			x.writer.set(nil, 1)
			x.h.On(5, repeat(Fail(guard.Permanent(errBroken)))...)
			x.publish(20)
			x.start()
			x.buried(5)
			x.handled(19)
			x.eventually("the dead letter is written again", func() bool { return x.writer.tried() == 2 })
		},
	},
	{
		name: "budget", says: "what the dead-letter budget does not cover waits, until an operator grants credits",
		run: func(x *run) {
			x.policy.Budget = dlq.BudgetConfig{
				Earn: 0.06, Balance: 1, FreeEvery: time.Hour, PermanentEarn: 0.06, PermanentBalance: 1,
			}
			bad := []uint64{2, 4, 6}
			for _, n := range bad {
				x.h.On(n, repeat(Fail(guard.Permanent(errBroken)))...)
			}
			x.publish(8)
			x.start()
			s := x.source()
			x.eventually("the source says that it waits for a credit", func() bool {
				return slices.ContainsFunc(s.State().Holds, func(h guard.Hold) bool { return h.Reason == guard.ReasonDLQ })
			})
			x.pass(time.Minute, time.Second)
			if n := len(x.letters()); n != 1 {
				x.errorf("%d dead letters for one credit", n)
			}
			s.GrantCredits(2)
			x.expect(bad...)
			for _, n := range bad {
				x.buried(n)
				if calls := len(x.h.CallsOf(n)); calls != 1 {
					x.errorf("%d calls of message %d, whose failure is permanent", calls, n)
				}
			}
		},
	},
	{
		name: "keep-alive", says: "what is held or handled is not delivered again",
		needs: func(f Features) string { return lack(!f.AckWait, "AckWait") },
		setup: func(*run) Setup { return Setup{AckWait: 3 * time.Second} }, // long enough that a busy machine extends in time
		run: func(x *run) {
			wait := x.setup.AckWait
			x.policy.Timeout = 10 * wait
			x.h.On(3, Slow(3*wait))
			x.h.On(4, Fail(errBroken), Slow(3*wait))
			x.publish(20)
			x.start()
			x.handled(20)
			s := x.source()
			s.Pause(0)
			x.publish(20)
			time.Sleep(3 * wait)
			s.Resume()
			x.handled(40)
			if n := x.h.Len(); n != 41 {
				x.errorf("%d calls for 40 messages of which one failed once", n)
			}
		},
	},
	{
		name: "killed", says: "what was not acked when the connection broke is delivered again",
		run: func(x *run) {
			k, ok := x.subject.(Killer)
			if !ok {
				x.t.Skip("the Subject is no Killer")
			}
			x.again, x.disorder = true, x.f.RealTime // a real broker's redelivery is outside the order
			x.h.Delay(2 * time.Millisecond)
			x.publish(100)
			x.start()
			for _, n := range []int{10, 30, 60} {
				x.handled(n)
				x.must("Kill", k.Kill(x.ctx))
			}
			x.handled(100)
		},
	},
	{
		name: "revoked", says: "a queue that is taken away in the middle loses nothing, and what was handled is not delivered again",
		run: func(x *run) {
			r, ok := x.subject.(Revoker)
			if !ok {
				x.t.Skip("the Subject is no Revoker")
			}
			x.returned, x.disorder = true, x.f.RealTime
			x.h.Delay(2 * time.Millisecond)
			x.h.On(8, Fail(errBroken), Fail(errBroken)) // some wait for a retry
			x.h.On(28, Fail(errBroken))
			x.publish(100)
			x.start()
			for _, n := range []int{5, 25, 60} {
				x.handled(n)
				x.must("Revoke", r.Revoke(x.ctx))
			}
			x.handled(100)
		},
	},
	{
		name: "ack-fails", says: "an ack that fails is counted and not repeated, and its message is delivered again",
		run: ackFails,
	},
	{
		name: "killed-in-outage", says: "a connection that breaks while messages are held loses none",
		run: func(x *run) {
			k, ok := x.subject.(Killer)
			if !ok {
				x.t.Skip("the Subject is no Killer")
			}
			x.patient()
			x.recoveries++
			x.again, x.disorder = true, x.f.RealTime
			x.publish(20)
			x.start()
			x.handled(20)
			x.h.Down(nil)
			x.publish(50)
			x.pass(5*time.Second, time.Second)
			x.must("Kill", k.Kill(x.ctx))
			x.pass(5*time.Second, time.Second)
			x.h.Up()
			x.handled(70)
		},
	},
	{
		name: "restarted", says: "a restart of the broker loses nothing",
		run: func(x *run) {
			k, ok := x.subject.(Restarter)
			if !ok {
				x.t.Skip("the Subject is no Restarter")
			}
			x.again, x.disorder = true, x.f.RealTime
			x.h.Delay(2 * time.Millisecond)
			x.publish(100)
			x.start()
			x.handled(20)
			x.must("Restart", k.Restart(x.ctx))
			x.handled(100)
		},
	},
	{
		name: "last-delivery", says: "a failure at the broker's last delivery is dead-lettered, since nobody would get the message again",
		needs: func(f Features) string { return lack(!f.MaxDeliver, "MaxDeliver") },
		setup: func(*run) Setup { return Setup{MaxDeliver: 2} },
		run: func(x *run) {
			k, ok := x.subject.(Killer)
			if !ok {
				x.t.Skip("the Subject is no Killer")
			}
			x.again, x.disorder = true, true
			release := make(chan struct{})
			first := Slow(time.Hour)
			if x.f.Passive {
				first = Deaf(release) // the guard cannot cancel the user's loop
			}
			x.h.On(1, first)
			x.h.On(1, repeat(Fail(errBroken))...)
			x.policy.Retry.Attempts = 1000
			x.policy.Timeout = 2 * time.Hour
			x.publish(1)
			x.start()
			x.eventually("the message is being handled", func() bool { return x.h.Running() == 1 })
			x.must("Kill", k.Kill(x.ctx))
			close(release)
			if rec := x.buried(1); rec.Reason != dlq.ReasonLastDelivery && rec.Reason != dlq.ReasonPoisonHead && rec.Reason != dlq.ReasonGuess {
				x.errorf("reason %q", rec.Reason)
			}
			x.publish(5)
			x.handled(5)
		},
	},
	{
		name: "settled-twice", says: "a second settlement of one delivery does nothing",
		needs: func(f Features) string { return lack(!f.Passive, "Passive") },
		run: func(x *run) {
			x.twice = true
			x.h.On(3, Fail(errBroken))
			x.publish(50)
			x.start()
			x.handled(50)
		},
	},
	{
		name: "shapes", says: "size, emptiness and junk in headers are no reason to fail",
		run: shapes,
	},
	{name: "close-idle", says: closing, run: func(x *run) {
		x.publish(20)
		x.start()
		x.handled(20)
		x.ends(func() {})
	}},
	{name: "close-busy", says: closing, run: func(x *run) {
		x.h.Delay(20 * time.Millisecond)
		x.publish(200)
		x.start()
		x.handled(5)
		x.ends(func() { x.h.Delay(0) })
	}},
	{name: "close-retrying", says: closing, run: func(x *run) {
		x.policy.Retry.Base, x.policy.Retry.Max = time.Minute, time.Minute
		x.h.On(3, Fail(errBroken))
		x.publish(20)
		x.start()
		x.eventually("a message failed", func() bool { return len(x.h.CallsOf(3)) > 0 })
		x.ends(func() {})
	}},
	{name: "close-held", says: closing, run: func(x *run) {
		x.publish(20)
		x.start()
		x.handled(20)
		x.must("ForceOpen", x.source().ForceOpen(time.Hour))
		x.publish(20)
		x.pass(time.Second, 500*time.Millisecond)
		x.ends(func() {})
	}},
	{name: "close-paused", says: closing, run: func(x *run) {
		x.publish(20)
		x.start()
		x.handled(20)
		x.source().Pause(0)
		x.publish(20)
		x.pass(time.Second, 500*time.Millisecond)
		x.ends(func() {})
	}},
	{name: "close-in-outage", says: closing, run: func(x *run) {
		x.patient()
		x.publish(20)
		x.start()
		x.handled(20)
		x.h.Down(nil)
		x.publish(20)
		x.pass(5*time.Second, time.Second)
		x.ends(x.h.Up)
	}},
	{name: "close-unwritten", says: closing, run: func(x *run) {
		x.writer.set(errWriterDown, 0)
		x.h.On(3, repeat(Fail(guard.Permanent(errBroken)))...)
		x.publish(20)
		x.start()
		x.eventually("a dead letter cannot be written", func() bool { return x.writer.tried() > 0 })
		x.expect(3)
		x.ends(func() { x.writer.set(nil, 0) })
	}},
	{name: "close-hanging", says: closing, needs: function, run: func(x *run) {
		x.h.On(3, Hang)
		x.policy.NoTimeout, x.policy.Timeout = true, 0
		x.publish(20)
		x.start()
		x.eventually("a handler hangs", func() bool { return len(x.h.CallsOf(3)) > 0 })
		x.ends(func() {})
	}},
	{name: "close-deaf", says: closing, needs: function, run: func(x *run) {
		release := make(chan struct{})
		defer close(release)
		x.again, x.returned, x.disorder = true, true, true // the deaf handler succeeds in the end
		x.h.On(3, Deaf(release))
		x.publish(20)
		x.start()
		x.eventually("a handler hangs", func() bool { return len(x.h.CallsOf(3)) > 0 })
		x.pass(20*time.Second, 0)
		x.close(time.Second)
		_ = x.stopConsumer()
		x.look()
		x.start()
		x.handled(20)
	}},
}

const closing = "a source that closes returns in time, gives back the rest, and loses nothing"

func lack(missing bool, feature string) string {
	if missing {
		return feature
	}
	return ""
}

// function is needs of rules for the function shape.
func function(f Features) string { return lack(f.Passive, "Passive unset") }

// repeat returns s for more calls than any rule makes.
func repeat(s Step) []Step { return slices.Repeat([]Step{s}, 5000) }

// outage publishes n messages while the dependency is down for d.
func (x *run) outage(n int, d time.Duration) guard.State {
	x.t.Helper()
	before, calls := int(x.numbers), x.h.Len()
	x.h.Down(nil)
	for range 3 {
		x.publish(n / 3)
		time.Sleep(d / 3)
	}
	x.rest()
	x.recoveries++
	if made, most := x.h.Len()-calls, x.mostCalls(n, d, callsOfLook); made > most {
		x.errorf("%d calls in an outage of %s, more than %d", made, d, most)
	}
	st := x.source().State()
	if st.Account.Unsettled() == 0 || len(st.Holds) == 0 {
		x.errorf("nothing is held: %+v", st)
	}
	if n := len(x.letters()); n > 0 {
		x.errorf("%d dead letters in an outage", n)
	}
	x.h.Up()
	x.handled(before + n/3*3)
	return st
}

// quietly publishes n messages to a source that must not handle them before release is
// called.
func (x *run) quietly(n int, release func()) {
	x.t.Helper()
	x.eventually("what was handled is settled", func() bool {
		a := x.source().Account()
		return a.Processing+a.Settling == 0
	})
	done, calls, acked := x.h.Done(), x.h.Len(), x.source().Account().Acked
	x.publish(n)
	x.pass(10*time.Second, time.Second)
	if now := x.h.Len(); now != calls {
		x.errorf("%d calls", now-calls)
	}
	if now := x.source().Account().Acked; now != acked {
		x.errorf("%d messages were acked", now-acked)
	}
	if back := x.backlog(); back.Pending >= 0 && back.Pending < n {
		x.errorf("%d messages are pending of %d that were not handled", back.Pending, n)
	}
	release()
	x.handled(done + n)
}

// room fills the window of a slow handler: no time may be lost between two calls. With
// RealTime a busy machine loses some time, and a broker may redeliver messages that wait
// for room and are not kept alive.
func room(x *run) {
	const each = time.Millisecond
	x.policy.Window = max(4, x.policy.Workers)
	again := x.f.RealTime && x.f.Passive
	x.again, x.disorder = again, again
	x.h.Delay(each)
	n := 50 * x.policy.Window
	x.publish(n)
	x.start()
	x.handled(n)
	calls := x.h.Calls()
	took := calls[len(calls)-1].End.Sub(calls[0].Start)
	if most := time.Duration(n) * each * 5 / 4; took > most && !x.f.RealTime {
		x.errorf("%d messages of %s, through a window of %d, took %s", n, each, x.policy.Window, took)
	}
}

// ended closes the Guard while its source is full, and checks that nothing reads any more.
func ended(x *run) {
	x.policy.Window = max(16, 4*x.policy.Workers)
	x.publish(20)
	x.start()
	x.handled(20)
	x.source().Pause(0)
	x.publish(10 * x.policy.Window)
	x.pass(10*time.Second, time.Second)
	x.returned = true
	x.close(x.span(2*time.Second, 2*time.Second))
	x.pass(time.Second, time.Second)
	before := x.backlog().Delivered
	x.publish(20)
	x.pass(10*time.Second, time.Second)
	if n := x.backlog().Delivered; before >= 0 && n > before {
		x.errorf("%d messages were fetched after the source had ended", n-before)
	}
	began := time.Now()
	if err := x.stopConsumer(); err != nil {
		x.errorf("Stop after Close: %v", err)
	}
	if took := time.Since(began); took > x.span(time.Second, x.deadline()) {
		x.errorf("Stop took %s, and the source had ended", took)
	}
	x.start()
	x.handled(int(x.numbers))
}

var errAckRefused = errors.New("guardtest: ack refused")

func ackFails(x *run) {
	r, ok := x.subject.(Refuser)
	if !ok {
		x.t.Skip("the Subject is no Refuser")
	}
	const n = 20
	x.again, x.disorder = true, true // the messages are delivered again, behind others
	x.publish(n)
	x.start()
	x.handled(n)
	s := x.source()
	x.eventually("what was handled is acked", func() bool { return s.Account().Acked == n })
	r.RefuseAcks(errAckRefused)
	x.publish(n)
	if !x.f.RealTime { // a connection that ends with each refused ack may not handle all
		x.handled(2 * n)
	}
	// A port that coalesces acks learns of the failure later, with the next acks.
	x.trickle("the acks that fail are counted", func() bool { return x.ackFailures() > 0 })
	if a := s.Account(); a.Acked >= 2*n && !x.f.RealTime {
		x.errorf("all are acked, and the broker took none: %+v", a)
	}
	r.RefuseAcks(nil)
	x.publish(n)
	x.handled(int(x.numbers))
	x.eventually("what was not acked is delivered again, and acked", func() bool { return x.backlog().Pending <= 0 })
	if letters := len(x.letters()); letters > 0 {
		x.errorf("%d dead letters", letters)
	}
}

func quarantine(x *run) {
	tenants := func(bad int, of int) (numbers []uint64) { // one message in bad has the tenant acme
		ms := make([]Publication, of)
		for i := range ms {
			name := "good"
			if i%bad == 0 {
				name = "acme"
				numbers = append(numbers, x.numbers+1)
			}
			ms[i] = x.message(0, dlq.Header{Name: "Tenant", Value: x.headerText(name)})
		}
		x.must("Publish", x.subject.Publish(x.ctx, ms...))
		return numbers
	}
	rule := dlq.Rule{Kind: dlq.RuleHeader, Header: "Tenant", Value: "acme"}
	tenants(3, 30)
	x.start()
	x.handled(30)
	s := x.source()
	list := x.guard.Quarantine()
	x.must("Add", list.Add(dlq.QuarantineEntry{Rule: rule, By: "guardtest"}))
	x.pass(time.Second, 500*time.Millisecond)
	budget := s.State().Budget
	acme := tenants(3, 60)
	for _, n := range acme {
		if rec := x.buried(n); rec.Reason != dlq.ReasonQuarantine || rec.Attempts != 0 {
			x.errorf("the dead letter of message %d says %q, %d attempts", n, rec.Reason, rec.Attempts)
		}
	}
	x.handled(30 + 60 - len(acme))
	for _, n := range acme {
		if calls := len(x.h.CallsOf(n)); calls > 0 {
			x.errorf("%d calls of message %d, which is in quarantine", calls, n)
		}
	}
	st := s.State()
	if st.Tally.Quarantined != uint64(len(acme)) || st.Tally.Failures > 0 || st.Budget < budget {
		x.errorf("%d of %d in quarantine, %d failures, budget %g of %g", st.Tally.Quarantined, len(acme), st.Tally.Failures, st.Budget, budget)
	}
	x.must("Remove", list.Remove(rule, "guardtest"))
	x.pass(time.Second, 500*time.Millisecond)
	tenants(2, 20)
	x.handled(30 + 60 - len(acme) + 20)
}

func deadLetter(x *run) {
	x.h.Poison(5)
	ms := make([]Publication, 40)
	for i := range ms {
		ms[i] = x.message(100, dlq.Header{Name: "Tenant", Value: x.headerText("acme")}, dlq.Header{Name: "Step", Value: x.headerText(fmt.Sprint(i))})
	}
	x.must("Publish", x.subject.Publish(x.ctx, ms...))
	began := time.Now()
	x.start()
	rec := x.buried(5)
	x.handled(39)
	x.checkCopy(rec, ms[4])
	calls := len(x.h.CallsOf(5))
	wrong := func(what string, bad bool) {
		if bad {
			x.errorf("%s: %+v", what, rec)
		}
	}
	wrong("fewer attempts than the policy gives", rec.Attempts < 3)
	wrong(fmt.Sprintf("attempts that were not made: there were %d calls", calls), rec.Attempts > calls)
	wrong("not the handler's error", rec.Error.Message != errPoison.Error())
	wrong("no cause", rec.Cause.ID == "" || rec.Cause.Title == "")
	wrong("no history", len(rec.History) < 3 || rec.History[0].N != 1)
	wrong("no place of origin", rec.Origin.System == "" || rec.Origin.Source == "")
	wrong("permanent", rec.Permanent)
	wrong("no reason", rec.Reason != dlq.ReasonAttempts && rec.Reason != dlq.ReasonPoisonHead && rec.Reason != dlq.ReasonGuess)
	wrong("times that cannot be", rec.FirstFailed.Before(began.Add(-time.Second)) || rec.LastFailed.Before(rec.FirstFailed) || rec.LastFailed.After(time.Now().Add(time.Second)))
}

// headerText is a text as a header value of the kind Features.Headers.
func (x *run) headerText(s string) any {
	if x.f.Headers == HeaderBytes {
		return []byte(s)
	}
	return s
}

// checkCopy compares a dead letter with the message that died.
func (x *run) checkCopy(rec dlq.Record, p Publication) {
	x.t.Helper()
	if x.f.Keys && string(rec.Key) != p.Key {
		x.errorf("the key became %q, it was %q", rec.Key, p.Key)
	}
	if !bytes.Equal(rec.Body, p.Body) {
		x.errorf("the body became %d bytes, it was %d", len(rec.Body), len(p.Body))
	}
	for _, h := range p.Headers {
		got, ok := dlq.Lookup(rec.Headers, h.Name)
		if same := sameValue(got, h.Value); !ok || !same {
			x.errorf("header %s became %#v, it was %#v", h.Name, got, h.Value)
		}
	}
}

// sameValue compares header values. Bytes and text are equal if they have the same bytes.
func sameValue(a, b any) bool {
	text := func(v any) (string, bool) {
		switch v := v.(type) {
		case string:
			return v, true
		case []byte:
			return string(v), true
		}
		return "", false
	}
	s, aText := text(a)
	t, bText := text(b)
	if aText || bText {
		return aText && bText && s == t
	}
	if at, ok := a.(time.Time); ok {
		bt, ok := b.(time.Time)
		return ok && at.Equal(bt)
	}
	return a == b
}

func backoff(x *run) {
	const times = 5
	d := x.span(2*time.Second, 600*time.Millisecond)
	var until atomic.Int64
	ask := func(context.Context) error {
		at := time.Now().Add(d)
		until.Store(at.UnixNano())
		return guard.Backoff(errBroken, at)
	}
	x.h.On(3, slices.Repeat([]Step{ask}, times)...)
	x.publish(20)
	x.start()
	x.handled(20)
	calls := x.h.CallsOf(3)
	if len(calls) != times+1 {
		x.errorf("%d calls of a message that asks for time %d times", len(calls), times)
	}
	slack := x.span(time.Millisecond, 250*time.Millisecond) // other workers may be in a call, on a busy machine
	for i, c := range calls[:len(calls)-1] {
		from, to := c.End.Add(slack), c.End.Add(d-slack)
		for _, o := range x.h.Calls() {
			if o.Start.After(from) && o.Start.Before(to) && !x.f.Passive {
				x.errorf("message %d was handled %s after backoff %d of %s", o.Seq, o.Start.Sub(c.End), i+1, d)
			}
		}
	}
	if n := x.source().State().Tally.Failures; n != 0 {
		x.errorf("%d failures counted", n)
	}
}

func poison(x *run) {
	x.policy.Retry.Base, x.policy.Retry.Max = 100*time.Millisecond, 100*time.Millisecond
	bad := []uint64{20, 71, 122}
	x.h.Poison(bad...)
	x.expect(bad...)
	x.publish(150)
	start := time.Now()
	x.start()
	x.handled(147)
	took := time.Since(start)
	// Traffic goes on: poison without other messages looks like an outage.
	x.eventually("the poison is dead-lettered", func() bool {
		x.publish(1)
		x.pass(100*time.Millisecond, 20*time.Millisecond)
		return len(x.letters()) == len(bad)
	})
	for _, n := range bad {
		x.buried(n)
	}
	if most := x.span(10*time.Second, x.deadline()); took > most {
		x.errorf("three poison messages delayed the others by %s", took)
	}
	if x.f.Order == guard.OrderSource {
		return
	}
	first, last := time.Time{}, time.Time{}
	for _, c := range x.h.Calls() {
		switch {
		case c.Seq == bad[0]:
			last = c.End
		case first.IsZero() && c.Seq > bad[0] && c.Seq%keys != bad[0]%keys && c.Outcome == Succeeded:
			first = c.End
		}
	}
	if !first.Before(last) {
		x.errorf("no message of another key was handled while one was waiting for its retry")
	}
}

func writerDown(x *run) {
	x.writer.set(errWriterDown, 0)
	x.h.On(5, repeat(Fail(guard.Permanent(errBroken)))...)
	x.publish(20)
	x.start()
	x.eventually("a dead letter cannot be written", func() bool { return x.writer.tried() > 0 })
	x.handled(19) // the others go on
	x.pass(time.Minute, time.Second)
	if back := x.backlog(); back.Pending == 0 {
		x.errorf("the message was settled before its dead letter was written")
	}
	if n := x.source().Account().Settling; n != 1 {
		x.errorf("%d messages are settling", n)
	}
	if n, tries := x.writer.tried(), x.span(time.Minute, time.Second)/(100*time.Millisecond); n > int(tries) {
		x.errorf("%d writes against a writer that is down", n)
	}
	x.writer.set(nil, 0)
	x.buried(5)
	if n := len(x.h.CallsOf(5)); n != 1 {
		x.errorf("%d calls of a message whose failure is permanent", n)
	}
}

func shapes(x *run) {
	size := x.f.MaxBody
	if size == 0 {
		size = 1 << 20
	}
	text := x.headerText
	junk := []dlq.Header{
		{Name: "traceparent", Value: text("00-not-a-trace-parent")},
		{Name: "tracestate", Value: text("=,;=")},
		{Name: "baggage", Value: text(strings.Repeat("%", 200))},
		{Name: "x-empty", Value: text("")},
		{Name: "x-utf8", Value: text("żółć ≠ 漢字")},
		{Name: "x-long", Value: text(strings.Repeat("v", 2048))},
		{Name: "stormguard-attempts", Value: text("many")},
	}
	switch x.f.Headers {
	case HeaderBytes:
		junk = append(junk, dlq.Header{Name: "x-bytes", Value: []byte{0xff, 0xfe, 0, 1}})
	case HeaderNative:
		junk = append(junk,
			dlq.Header{Name: "x-bytes", Value: []byte{0xff, 0xfe, 0, 1}}, dlq.Header{Name: "x-int", Value: int64(-7)},
			dlq.Header{Name: "x-bool", Value: true}, dlq.Header{Name: "x-float", Value: 1.5}, dlq.Header{Name: "x-nil", Value: nil},
		)
	default:
	}
	ms := []Publication{x.message(size), x.message(0, junk...), x.message(0), x.message(size), x.message(0, junk...)}
	ms[2].Key = ""
	giant, odd := ms[3], ms[4]
	if x.f.EmptyBody {
		ms = append(ms, Publication{Key: "key-0"}, Publication{Body: []byte{}})
		x.unnamed = 2
	}
	ms = append(ms, x.message(0))
	x.h.On(4, repeat(Fail(guard.Permanent(errBroken)))...)
	x.h.On(5, repeat(Fail(guard.Permanent(errBroken)))...)
	x.must("Publish", x.subject.Publish(x.ctx, ms...))
	x.start()
	x.checkCopy(x.buried(4), giant)
	rec := x.buried(5)
	odd.Headers = slices.DeleteFunc(slices.Clone(odd.Headers), func(h dlq.Header) bool { return h.Name == "stormguard-attempts" })
	x.checkCopy(rec, odd)
	if rec.Attempts != 1 {
		x.errorf("a header of the message made its dead letter say %d attempts", rec.Attempts)
	}
	x.eventually("the messages without a body are handled", func() bool { return len(x.h.CallsOf(0)) == x.unnamed })
}

// stopConsumer stops the subject's consumer, but not the Guard.
func (x *run) stopConsumer() error {
	ctx, cancel := context.WithTimeout(x.ctx, x.deadline())
	defer cancel()
	x.running = false
	return x.subject.Stop(ctx)
}

// ends closes the Guard under the running consumer, calls undo to remove what held the
// messages back, and starts again.
func (x *run) ends(undo func()) {
	x.t.Helper()
	x.returned = true
	limit := x.span(2*time.Second, 2*time.Second)
	for _, r := range x.close(limit) {
		if n := r.Account.Unsettled(); n != len(r.Left) {
			x.errorf("%d messages unsettled, the report names %d: %+v", n, len(r.Left), r)
		}
	}
	calls := x.h.Len()
	x.pass(5*time.Second, 500*time.Millisecond)
	if n := x.h.Len(); n != calls {
		x.errorf("%d calls after the source was closed", n-calls)
	}
	if err := x.stopConsumer(); err != nil {
		x.errorf("Stop after Close: %v", err)
	}
	undo()
	x.start()
	x.handled(int(x.numbers) - len(x.dead))
}
