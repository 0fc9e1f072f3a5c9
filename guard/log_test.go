// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// An outage is one line when the breaker opens, with the error, one a minute while it
// lasts, and one when it closes; its probes and half-open states are none.
func TestOutageIsAFewLines(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var changes []StateChange
		r := newLogRig(t, OnStateChange(func(c StateChange) { changes = append(changes, c) }))
		s, in := r.open("orders/0", "orders", "0", r.letters)
		for i := range 20 {
			in <- i
		}
		elapse(time.Second)
		down := fmt.Errorf("charge: %w", syscall.ECONNREFUSED)
		r.fail(down)
		for i := range 100 {
			in <- i
		}
		elapse(4*time.Minute + 30*time.Second)
		opened := r.log.one(t, "breaker opened", slog.LevelWarn)
		if opened.args["scope"] != "g/orders/0" || opened.args["error"] != down.Error() || opened.args["class"] != "dependency" ||
			!strings.Contains(fmt.Sprint(opened.args["means"]), "the dependency fails") {
			t.Errorf("%+v", opened)
		}
		still := r.log.of("breaker is still open")
		if len(still) != 4 || still[3].args["calls"].(uint64) < 5 || still[0].args["error"] != down.Error() || still[0].level != slog.LevelInfo {
			t.Errorf("%+v", still)
		}
		r.fail(nil)
		for i := range 120 { // a storm ends by its readings
			in <- i
			elapse(time.Second)
		}
		closed := r.log.one(t, "breaker closed", slog.LevelInfo)
		if d := closed.args["for"].(time.Duration); d < 4*time.Minute+25*time.Second || d > 5*time.Minute+5*time.Second {
			t.Errorf("%+v", closed)
		}
		if n := s.State().Tally.Probes; closed.args["calls"] != n || n < 10 {
			t.Errorf("%+v, %d probes", closed, n)
		}
		began := r.log.one(t, "storm began", slog.LevelWarn)
		if began.args["source"] != "orders/0" || began.args["scope"] != "g/orders" {
			t.Errorf("%+v", began)
		}
		r.log.one(t, "storm is over", slog.LevelInfo)
		if n := len(r.log.lines) - len(r.log.of("breaker state")); n > 9 {
			t.Errorf("%d lines: %+v", n, r.log.lines)
		}
		r.close()
		var seen []string
		for _, c := range changes {
			seen = append(seen, fmt.Sprintf("%v %s %s %v", c.Reason, c.Scope, c.Source, c.Active))
		}
		slices.Sort(seen)
		if want := []string{
			"breaker g/orders/0  false", "breaker g/orders/0  true", "storm g/orders orders/0 false", "storm g/orders orders/0 true",
		}; !slices.Equal(seen, want) {
			t.Errorf("%q", seen)
		}
		if c := changes[0]; c.Error != down.Error() || c.Class != ClassDependency || !c.Active {
			t.Errorf("%+v", c)
		}
		last := changes[slices.IndexFunc(changes, func(c StateChange) bool { return c.Reason == ReasonBreaker && !c.Active })]
		if last.For != closed.args["for"] || last.Calls != closed.args["calls"] {
			t.Errorf("%+v", last)
		}
	})
}

// What happens to the partitions of one topic at the same time is one line and another
// for the rest; what ends is none.
func TestLinesOfATopicAreJoined(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const partitions = 20
		r := newLogRig(t)
		r.fail(fmt.Errorf("charge: %w", syscall.ECONNREFUSED))
		for p := range partitions {
			_, in := r.open(fmt.Sprint("orders/", p), "orders", fmt.Sprint(p), r.letters)
			for i := range 50 {
				in <- i
			}
		}
		elapse(30 * time.Second)
		// The topic itself opens by its partitions.
		topic := slices.IndexFunc(r.log.of("breaker opened"), func(l loggedLine) bool { return l.args["scope"] == "g/orders" })
		if n, lines := r.log.sum("breaker opened"), len(r.log.of("breaker opened")); n < partitions/2+1 || lines > 5 || topic < 0 {
			t.Errorf("%d breakers in %d lines: %+v", n, lines, r.log.lines)
		}
		elapse(5 * time.Minute)
		if n := len(r.log.of("breaker is still open")); n > 15 {
			t.Errorf("%d lines: %+v", n, r.log.lines)
		}
		r.fail(nil)
		elapse(2 * time.Minute)
		opened, closed := r.log.sum("breaker opened"), r.log.sum("breaker closed")
		if opened != closed || len(r.log.of("breaker closed")) > 8 {
			t.Errorf("%d opened, %d closed: %+v", opened, closed, r.log.of("breaker closed"))
		}
		r.log.mu.Lock()
		r.log.lines = nil
		r.log.mu.Unlock()
		r.close()
		for _, l := range r.log.lines {
			if l.level > slog.LevelDebug {
				t.Errorf("%+v", l)
			}
		}
	})
}

// The first dead letters of a minute are a line each, the others one line at its end;
// none has anything of the message. The hook gets every one, and may panic.
func TestDeadLetterLines(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var got []DeadLetter
		r := newLogRig(t, OnDeadLetter(func(d DeadLetter) {
			switch got = append(got, d); len(got) {
			case 3:
				panic("the user's")
			case 4:
				runtime.Goexit()
			}
		}))
		s, in := r.open("orders/0", "orders", "0", r.letters)
		r.fail(Permanent(errors.New(`no price for "secret": 17`)))
		for i := range 35 {
			in <- i
		}
		elapse(30 * time.Second)
		if n := len(r.log.of("dead letter")); n != 10 {
			t.Errorf("%d lines", n)
		}
		l := r.log.of("dead letter")[0]
		if l.level != slog.LevelWarn || l.args["source"] != "orders/0" || l.args["reason"] != "permanent" || l.args["attempts"] != int64(1) ||
			l.args["class"] != "message" || !strings.HasPrefix(fmt.Sprint(l.args["cause"]), "v2:") {
			t.Errorf("%+v", l)
		}
		if n := len(r.log.of("dead letters beyond those logged")); n != 0 {
			t.Errorf("%d lines too early", n)
		}
		elapse(time.Minute)
		if rest := r.log.one(t, "dead letters beyond those logged", slog.LevelWarn); rest.args["lines"] != int64(25) || rest.args["cause"] != l.args["cause"] {
			t.Errorf("%+v", rest)
		}
		in <- 36
		elapse(time.Second)
		if n := len(r.log.of("dead letter")); n != 11 {
			t.Errorf("%d lines in the next minute", n)
		}
		if len(got) != 36 || len(r.letters.bodies()) != 36 || s.Account().DeadLettered != 36 {
			t.Errorf("%d calls of the hook", len(got))
		}
		if d := got[0]; d.Source != "orders/0" || d.Destination != "orders" || d.Partition != "0" || d.Class != ClassMessage ||
			d.Record.Reason != dlq.ReasonPermanent || d.Record.Attempts != 1 {
			t.Errorf("%+v", d)
		}
		if n := r.log.sum("a hook did not return"); n != 2 || !strings.Contains(fmt.Sprint(r.log.of("a hook did not return")[0].args), "the user's") {
			t.Errorf("%d: %+v", n, r.log.lines)
		}
		r.close()
	})
}

// A hook of state changes that panics or exits costs nothing but its call.
func TestStateHookThatDoesNotReturn(t *testing.T) {
	for name, fail := range map[string]func(){"panic": func() { panic("the user's") }, "goexit": runtime.Goexit} {
		bubble(t, name, func(t *testing.T) {
			calls := 0
			r := newLogRig(t, OnStateChange(func(StateChange) {
				calls++
				fail()
			}))
			s, in := r.open("orders/0", "orders", "0", r.letters)
			r.fail(syscall.ECONNREFUSED)
			for i := range 20 {
				in <- i
			}
			elapse(20 * time.Second)
			r.fail(nil)
			elapse(time.Minute)
			if calls != 2 || s.Account().Acked != 20 || r.log.sum("a hook did not return") != 2 {
				t.Errorf("%d calls, %+v, %+v", calls, s.Account(), r.log.lines)
			}
			r.close()
		})
	}
}

// A function of Protect has its breaker's lines, too.
func TestFuncLines(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newLogRig(t)
		f := Must(Protect(r.g, SourceConfig{Name: "charge"}, func(context.Context, int) error {
			if err := r.fault.Load(); err != nil {
				return *err
			}
			return nil
		}))
		r.fail(syscall.ECONNREFUSED)
		for range 40 {
			_ = f.Do(t.Context(), 1)
			elapse(time.Second)
		}
		r.fail(nil)
		for range 40 {
			_ = f.Do(t.Context(), 1)
			elapse(time.Second)
		}
		if l := r.log.one(t, "breaker opened", slog.LevelWarn); l.args["error"] != syscall.ECONNREFUSED.Error() || l.args["class"] != "dependency" {
			t.Errorf("%+v", l)
		}
		if l := r.log.one(t, "breaker closed", slog.LevelInfo); l.args["calls"] != f.State().Tally.Probes {
			t.Errorf("%+v", l)
		}
		r.close()
	})
}

// The probes of a source that ended during an outage count, too. What it was asked for
// as a person's is forgotten.
func TestCallsOfAnOutage(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := &logRig{t: t, log: new(logged), letters: &testWriter{}}
		r.g = Must(New(Config{Scope: ScopeTopic}, WithLogger(slog.New(r.log))))
		first, in := r.open("orders/0", "orders", "0", r.letters)
		r.fail(syscall.ECONNREFUSED)
		for i := range 20 {
			in <- i
		}
		elapse(10 * time.Second)
		second, in := r.open("orders/1", "orders", "1", r.letters)
		for i := range 20 {
			in <- i
		}
		elapse(6 * time.Minute)
		first.End(t.Context(), ReasonRebalance)
		elapse(time.Minute)
		r.fail(nil)
		elapse(time.Minute)
		probes := first.State().Tally.Probes + second.State().Tally.Probes
		if l := r.log.one(t, "breaker closed", slog.LevelInfo); l.args["calls"] != probes || first.State().Tally.Probes == 0 {
			t.Errorf("%+v, %d probes", l, probes)
		}
		r.close()
		j := r.g.journal
		if len(j.outages)+len(j.storms)+len(j.wants) > 0 {
			t.Errorf("left: %v, %v, %v", j.outages, j.storms, j.wants)
		}
	})
}

// A shutdown during an outage closes no breaker, and no line or hook says so. Where all
// partitions go to other processes their topic's scope ends here: that is no recovery,
// and the line says that it was released.
func TestAnEndClosesNoBreaker(t *testing.T) {
	for _, scope := range []Scope{ScopePartition, ScopeTopic, ScopeGroup} {
		for _, rebalance := range []bool{false, true} {
			bubble(t, fmt.Sprintf("%s, rebalance %t", scope, rebalance), func(t *testing.T) {
				var closed []StateChange
				r := &logRig{t: t, log: new(logged), letters: &testWriter{}}
				r.g = Must(New(Config{Scope: scope}, WithLogger(slog.New(r.log)), OnStateChange(func(c StateChange) {
					if !c.Active {
						closed = append(closed, c)
					}
				})))
				r.fail(syscall.ECONNREFUSED)
				for p := range 3 {
					_, in := r.open(fmt.Sprint("orders/", p), "orders", fmt.Sprint(p), r.letters)
					for i := range 20 {
						in <- i
					}
				}
				elapse(10 * time.Second)
				if n := len(r.log.of("breaker opened")); n == 0 {
					t.Fatalf("%+v", r.log.lines)
				}
				if rebalance {
					for _, s := range r.g.Sources() {
						s.End(t.Context(), ReasonRebalance)
					}
					elapse(10 * time.Second)
				}
				r.close()
				released := func(l loggedLine) bool { return rebalance && l.args["reason"] == "released" }
				for _, l := range append(r.log.of("breaker closed"), r.log.of("breaker state")...) {
					if to, ok := l.args["to"]; (!ok || to == "closed") && !released(l) {
						t.Errorf("%+v", l)
					}
				}
				for _, c := range closed {
					if !rebalance || c.Detail != "released" {
						t.Errorf("%+v", c)
					}
				}
				for _, l := range r.log.of("source ended") {
					if want := map[bool]string{false: "shutdown", true: "rebalance"}[rebalance]; l.args["reason"] != want {
						t.Errorf("%+v", l)
					}
				}
				if n := len(r.log.of("source ended")); n != 3 {
					t.Errorf("%d ends", n)
				}
			})
		}
	}
}

// What an operator forces is no warning.
func TestForcedBreakerLines(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newLogRig(t)
		s, _ := r.open("orders/0", "orders", "0", r.letters)
		if err := s.ForceOpen(0); err != nil {
			t.Fatal(err)
		}
		elapse(time.Second)
		r.log.one(t, "breaker opened", slog.LevelInfo)
		if err := s.ForceClosed(); err != nil {
			t.Fatal(err)
		}
		elapse(time.Second)
		r.log.one(t, "breaker closed", slog.LevelInfo)
		f := Must(Protect(r.g, SourceConfig{Name: "idle"}, func(context.Context, int) error { return nil }))
		elapse(time.Minute) // the sweeper is parked
		if err := f.ForceOpen(0); err != nil {
			t.Fatal(err)
		}
		elapse(time.Second)
		if n := len(r.log.of("breaker opened")); n != 2 {
			t.Errorf("%d lines", n)
		}
		s.Pause(0)
		s.Resume()
		r.log.one(t, "source paused", slog.LevelInfo)
		r.log.one(t, "source resumed", slog.LevelInfo)
		r.close()
		r.log.one(t, "source ended", slog.LevelDebug)
	})
}

// A guess says that it is one, in the record and in the log; what was proved does not. Up
// to three messages that are all there is are guessed within 50 s, four after 11 minutes.
func TestAGuessSaysSo(t *testing.T) {
	for n, within := range []time.Duration{1: 14 * time.Second, 2: 26 * time.Second, 3: 50 * time.Second, 4: 13 * time.Minute} {
		if n == 0 {
			continue
		}
		bubble(t, fmt.Sprint(n), func(t *testing.T) {
			r := newLogRig(t)
			r.poison = func(m int) error {
				if m < 10 {
					return errors.New("no")
				}
				return nil
			}
			_, in := r.open("orders/0", "orders", "0", r.letters)
			for m := range n {
				in <- m
			}
			if n == 4 {
				elapse(10 * time.Minute)
				if n := len(r.log.of("dead letter")); n > 0 {
					t.Errorf("%d dead letters too early", n)
				}
			}
			for begun := time.Now(); len(r.log.of("dead letter")) == 0 && time.Since(begun) < within; {
				elapse(time.Second)
			}
			in <- 10
			elapse(time.Minute)
			lines := r.log.of("dead letter")
			if len(lines) != n || len(r.letters.recs) != n {
				t.Fatalf("%+v", lines)
			}
			for i, l := range lines {
				want := dlq.ReasonGuess
				if i > 0 {
					want = r.letters.recs[i].Reason
					if want != dlq.ReasonAttempts && want != dlq.ReasonPoisonHead {
						t.Errorf("message %d was proved: %s", i, want)
					}
				}
				if l.args["reason"] != string(want) || r.letters.recs[i].Reason != want {
					t.Errorf("message %d: %+v, the record says %s", i, l, r.letters.recs[i].Reason)
				}
			}
			r.close()
		})
	}
}

// Adjacent poison that no look gets past is said after five minutes, with what helps.
func TestLineOfAdjacentPoison(t *testing.T) {
	const text = "messages fail, nothing succeeds, and their errors do not say why"
	bad := errors.New("no such tenant")
	bubble(t, "", func(t *testing.T) {
		r := newLogRig(t)
		r.poison = func(m int) error {
			if m >= 10 && m < 90 {
				return bad
			}
			return nil
		}
		s, in := r.open("orders/0", "orders", "0", r.letters)
		elapse(6 * time.Minute)
		for m := range 100 {
			in <- m
		}
		elapse(5 * time.Minute)
		if n := len(r.log.of(text)); n != 0 {
			t.Errorf("%d lines too early", n)
		}
		elapse(15 * time.Second)
		l := r.log.one(t, text, slog.LevelWarn)
		if l.args["source"] != "orders/0" || l.args["messages"] != int64(1+maxLook) || l.args["error"] != bad.Error() || l.args["class"] != "unknown" ||
			l.args["cause"] != dlq.Fingerprint(bad, nil).ID || l.args["for"].(time.Duration) < needHead ||
			!strings.Contains(fmt.Sprint(l.args["help"]), "DeadLetterWaiting") || !strings.Contains(fmt.Sprint(l.args["help"]), "quarantine") {
			t.Errorf("%+v", l)
		}
		elapse(65 * time.Minute)
		if n := len(r.log.of(text)); n != 2 {
			t.Errorf("%d lines in more than an hour", n)
		}
		for m := 100; s.DeadLetterWaiting(1000) > 0 || s.Account().Unsettled() > 0; m++ {
			in <- m
			elapse(10 * time.Second)
		}
		elapse(time.Minute)
		if l := r.log.one(t, "what waited goes on", slog.LevelInfo); l.args["was"] != text || l.args["for"].(time.Duration) < time.Hour {
			t.Errorf("%+v", l)
		}
		r.close()
	})
}

// The same of a whole outage whose errors say nothing, in every order, and not of messages
// that fail while others succeed.
func TestLineOfErrorsThatSayNothing(t *testing.T) {
	const text = "messages fail, nothing succeeds, and their errors do not say why"
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		for _, others := range []bool{false, true} {
			bubble(t, fmt.Sprint(order, " others ", others), func(t *testing.T) {
				r := newLogRig(t)
				r.g.cfg.Policy.Order = order
				r.poison = func(m int) error {
					if others && m%2 == 0 {
						return nil
					}
					return errors.New("no")
				}
				_, in := r.open("orders/0", "orders", "0", r.letters)
				for m := range 400 {
					select {
					case in <- m:
					default:
					}
					elapse(time.Second)
				}
				if lines := r.log.of(text); len(lines) > 1 || len(lines) == 1 == others {
					t.Errorf("%+v", lines)
				}
				r.close()
			})
		}
	}
}

// A writer that fails is one warning, and one line when it works again.
func TestWriterLines(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var down atomic.Bool
		r := newLogRig(t)
		_, in := r.open("orders/0", "orders", "0", writerFunc(func(context.Context, *dlq.Record) error {
			if down.Load() {
				return errDown
			}
			return nil
		}))
		r.fail(Permanent(errDown))
		down.Store(true)
		for i := range 5 {
			in <- i
		}
		elapse(2 * time.Minute)
		if l := r.log.one(t, "dead-letter writer fails", slog.LevelWarn); fmt.Sprint(l.args["error"]) != errDown.Error() || l.args["source"] != "orders/0" {
			t.Errorf("%+v", l)
		}
		down.Store(false)
		elapse(time.Minute)
		if l := r.log.one(t, "dead-letter writer works again", slog.LevelInfo); l.args["for"].(time.Duration) < 2*time.Minute {
			t.Errorf("%+v", l)
		}
		r.close()
	})
}

// Of two sources whose DLQs are down each is a warning, and a line when it is well.
func TestWriterLinesOfTwoSources(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r, p := newLogRig(t), &partlyDown{t: t, why: errDown}
		r.fail(Permanent(errDown))
		names := []string{"bills/0", "orders/0"}
		for i, name := range names {
			_, in := r.open(name, name[:len(name)-2], "0", p)
			in <- i
			elapse(time.Minute)
		}
		p.mended.Store(true)
		elapse(time.Minute)
		for text, level := range map[string]slog.Level{lineWriter: slog.LevelWarn, lineWriterWell: slog.LevelInfo} {
			var of []string
			for _, l := range r.log.of(text) {
				of = append(of, fmt.Sprint(l.level, " ", l.args["source"]))
			}
			slices.Sort(of)
			if want := []string{level.String() + " " + names[0], level.String() + " " + names[1]}; !slices.Equal(of, want) {
				t.Errorf("%q of %q, want %q", text, of, want)
			}
		}
		r.close()
	})
}

// The warning about a source's letters has its end, too, when they go back on a revoke.
func TestWriterLinesOfARevoke(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newLogRig(t)
		r.letters.err = errDown
		r.fail(Permanent(errDown))
		s, in := r.open("orders/0", "orders", "0", r.letters)
		for m := range 3 {
			in <- m
		}
		elapse(time.Minute)
		r.log.one(t, lineWriter, slog.LevelWarn)
		if rep := s.End(t.Context(), ReasonRebalance); rep.Returned != 3 {
			t.Errorf("%+v", rep)
		}
		elapse(time.Minute)
		l := r.log.one(t, lineGoesOn, slog.LevelInfo)
		if d := l.args["for"].(time.Duration); l.args["was"] != lineWriter || l.args["source"] != "orders/0" || d < 50*time.Second || d > time.Minute {
			t.Errorf("%+v", l)
		}
		r.close()
	})
}

type writerFunc func(context.Context, *dlq.Record) error

func (f writerFunc) Write(ctx context.Context, r *dlq.Record) error { return f(ctx, r) }

// Without a logger warnings go to slog's default, and the end of what was warned of too;
// nothing else does. DiscardHandler is silent.
func TestDefaultLogger(t *testing.T) {
	before, out, flags := slog.Default(), log.Writer(), log.Flags()
	heard := new(logged)
	slog.SetDefault(slog.New(heard))
	defer func() {
		slog.SetDefault(before)
		log.SetOutput(out)
		log.SetFlags(flags)
	}()
	synctest.Test(t, func(t *testing.T) {
		for _, silent := range []bool{false, true} {
			heard.lines = nil
			var opts []Option
			if silent {
				opts = append(opts, WithLogger(slog.New(slog.DiscardHandler)))
			}
			r := &logRig{t: t, log: heard, letters: &testWriter{}, g: Must(New(Config{}, opts...))}
			s, in := r.open("orders/0", "orders", "0", r.letters)
			s.Pause(0) // INFO
			s.Resume()
			r.g.Logger().Info("an adapter's")
			r.g.Logger().With("a", 1).WithGroup("b").Info("another")
			r.g.Logger().With("a", 1).WithGroup("b").Warn("a warning")
			r.fail(syscall.ECONNREFUSED)
			for i := range 20 {
				in <- i
			}
			elapse(40 * time.Second)
			r.fail(nil)
			elapse(2 * time.Minute)
			r.close()
			want := []string{"a warning", "breaker opened", "breaker closed"}
			if silent {
				want = nil
			}
			var texts []string
			for _, l := range heard.lines {
				texts = append(texts, l.text)
			}
			if !slices.Equal(texts, want) {
				t.Errorf("silent=%v: %q", silent, texts)
			}
		}
	})
}

// docs/operating.md has every line.
func TestLogLinesAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(page), "\n## Logs\n")
	if !ok {
		t.Fatal("no section Logs")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	lines := []string{
		lineOpened, lineStillOpen, lineClosed, lineState, lineStorm, lineStormOver, lineFleetStorm, lineFleetOver, lineLetter, lineLetters, lineByHand,
		lineWriter, lineWriterWell, lineCredit, lineNoWriter, lineBlocked, lineUnproven, lineStands, lineGoesOn, linePaused, lineResumed, lineEnds, lineEnded, lineLeft, lineHook,
		lineCheck, lineCheckWell, lineSpill,
	}
	for _, text := range lines {
		if !strings.Contains(section, "| `"+text+"` |") {
			t.Errorf("%q is missing", text)
		}
	}
}

// The line of a dead letter tells which message it was.
func TestLineOfALetterNamesItsMessage(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newLogRig(t)
		for name, o := range map[string]dlq.Origin{
			"offset": {HasOffset: true, Offset: 7, MessageID: "a"}, "sequence": {Sequence: 7}, "message_id": {MessageID: "7"}, "none": {},
		} {
			r.g.journal.letter(letterFrom{SourceConfig{Name: name}, name, ClassMessage}, &dlq.Record{Origin: o})
		}
		for _, l := range r.log.of("dead letter") {
			name := fmt.Sprint(l.args["source"])
			if got := fmt.Sprint(l.args[name]); (got != "7") != (name == "none") {
				t.Errorf("%s: %+v", name, l.args)
			}
		}
		r.close()
	})
}
