// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/guard"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/stormguard-mq/stormguard/cmd/stormguard/internal/liveness.stuck"),
		goleak.IgnoreTopFunction("testing/synctest.testingSynctestTest")) // of bubbles that are stuck on purpose
}

// The table, with fewer runs of the rows that have many, and all runs with STORMGUARD_FULL. Under
// the race detector a few rows stand for all: big bubbles can kill the test binary.
func TestTable(t *testing.T) {
	t.Parallel()
	full := os.Getenv("STORMGUARD_FULL") != ""
	var cfg Config
	if raceEnabled {
		cfg = Config{Only: "^(adjacent-3-|outage-1s-unknown$|recovery-1s$|random$)"}
	}
	chosen, err := cfg.choose()
	if err != nil {
		t.Fatal(err)
	}
	if !full {
		for i := range chosen {
			most := 8
			switch {
			case raceEnabled:
				most = 4
			case strings.HasPrefix(chosen[i].name, "many-"): // a limit of 5 % needs twenty
				most = 20
			}
			chosen[i].parts = min(chosen[i].parts, most)
		}
	}
	for _, r := range runAll(t.Context(), chosen, []uint64{1}, io.Discard) {
		if len(r.Missed) > 0 {
			t.Errorf("%s: seed %d: %s", r.Name, r.Seed, r.verdict())
		}
	}
}

// A guard with something left out misses rows, or the table would show nothing.
func TestTableFails(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		do   func(*trial) error
		want string
	}{
		"no look": {func(t *trial) error {
			return t.adjacentOf(load{order: guard.OrderSource, rate: 10, call: callTime, says: unknown, policy: guard.Policy{StrictOrder: true}}, 8, unknown)
		}, "passed"},
		"no breaker": {func(t *trial) error {
			return t.outage(load{order: guard.OrderSource, rate: outageRate, call: callTime, policy: guard.Policy{NoBreaker: true, Retry: guard.Retry{Max: 50 * time.Millisecond}}}, time.Minute, unknown, 0)
		}, "calls"},
		"slow retries": {func(t *trial) error {
			return t.steady(load{order: guard.OrderSource, rate: 10, call: callTime, poison: 0.09, policy: guard.Policy{Retry: guard.Retry{Base: 5 * time.Second}}})
		}, "handled"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := runPart(t.Context(), spec{name: name, do: c.do}, 1, 0)
			if !strings.Contains(strings.Join(got.Missed, "; "), c.want) {
				t.Errorf("missed %q, want something of %q", got.Missed, c.want)
			}
		})
	}
}

// The ledger counts a healthy message that is dead-lettered, and sees one that is
// handled and dead-lettered.
func TestLedger(t *testing.T) {
	t.Parallel()
	if err := virtual(func() {
		w, err := newWorld(t.Context(), 1, load{rate: 10, call: callTime})
		if err != nil {
			t.Error(err)
			return
		}
		w.fail(unknown)
		w.pass(3 * time.Second)
		s := w.all[0]
		n := 0
		w.until(time.Second, func() bool { n = s.src.DeadLetterWaiting(1); return n > 0 }) // not while it probes
		if n != 1 {
			t.Errorf("dead-lettered by hand: %d", n)
		}
		w.pass(time.Second)
		if n := w.sum(); n.healthyLetters != 1 || n.letters != 0 || n.handled != 0 {
			t.Errorf("one healthy message was dead-lettered: %+v", n)
		}
		w.mend()
		w.pass(10 * time.Second)
		if n := w.sum(); n.handled < 100 {
			t.Errorf("%+v", n)
		}
		s.settle(1, dead)
		if err := w.close(); err != nil || len(w.wrong) != 1 || !strings.Contains(w.wrong[0], "handled and dead-lettered") {
			t.Errorf("error %v, wrong %q", err, w.wrong)
		}
	}); err != nil {
		t.Error(err)
	}
}

// What is not settled when an epoch ends is handed over again, in order, once.
func TestEpochs(t *testing.T) {
	t.Parallel()
	for _, o := range orders {
		if err := virtual(func() {
			w, err := newWorld(t.Context(), 1, load{order: o, rate: 100, call: callTime})
			if err != nil {
				t.Error(err)
				return
			}
			for i := range 20 {
				if i%3 == 0 {
					w.fail(refused)
				} else {
					w.mend()
				}
				w.pass(700 * time.Millisecond)
				if err := w.all[0].again(); err != nil {
					t.Error(err)
				}
			}
			w.mend()
			w.all[0].quiet()
			w.pass(time.Minute)
			if n := w.sum(); n.handled != n.sent || n.overtaken && o != guard.OrderSource {
				t.Errorf("%v: %+v", o, n)
			}
			if err := w.close(); err != nil || len(w.wrong) > 0 {
				t.Errorf("%v: error %v, wrong %q", o, err, w.wrong)
			}
		}); err != nil {
			t.Error(err)
		}
	}
}

// The loop without a guard handles what arithmetic says.
func TestUnguarded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		l          load
		low, above int
	}{
		{load{rate: 100, call: callTime}, 5995, 6001},                                                  // all of it
		{load{rate: 1000, call: callTime}, 29990, 30001},                                               // as fast as calls go
		{load{rate: 1000, call: callTime, flaky: 0.5, order: guard.OrderNone}, 13500, 15500},           // half of the calls
		{load{rate: 1000, call: callTime, flaky: 0.5, keys: 128, order: guard.OrderKey}, 13500, 15500}, // as many lanes do
		{load{rate: 1000, call: callTime, flaky: 0.5}, 500, 1500},                                      // each waits for its retries
	} {
		if n := unguarded(c.l, 1, time.Minute); n < c.low || n >= c.above {
			t.Errorf("%+v: %d handled, want %d to %d", c.l, n, c.low, c.above)
		}
	}
}

// Each row has its own draws, and each run of it; a seed repeats them.
func TestSeeds(t *testing.T) {
	t.Parallel()
	seen := map[uint64]string{}
	for _, seed := range []uint64{1, 2} {
		for _, name := range []string{"random", "recovery-1s"} {
			for part := range 3 {
				s := seedOf(seed, name, part)
				if other, ok := seen[s]; ok || s != seedOf(seed, name, part) {
					t.Errorf("%d %s %d: the seed of %s", seed, name, part, other)
				}
				seen[s] = name
			}
		}
	}
}

// The command prints every row it was asked for, with the fields that are promised.
func TestRun(t *testing.T) {
	t.Parallel()
	var out, progress bytes.Buffer
	if err := Run(t.Context(), Config{Seed: 7, Only: "^adjacent-2-message-none$", JSON: true}, &out, &progress); err != nil {
		t.Fatal(err)
	}
	var got struct{ Rows []map[string]any }
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || len(got.Rows) != 1 {
		t.Fatalf("%v: %s", err, out.String())
	}
	r := got.Rows[0]
	for _, field := range []string{
		"name", "order", "class", "poison", "handled_percent", "healthy_dead_letters", "passed_seconds", "passed_limit_seconds",
		"drained_seconds", "drained_limit_seconds", "calls_percent", "overtaken_percent", "seed",
	} {
		if _, ok := r[field]; !ok {
			t.Errorf("no field %s in %v", field, r)
		}
	}
	if r["name"] != "adjacent-2-message-none" || r["poison"] != 2.0 || r["seed"] != 7.0 || r["calls_percent"] != nil || r["passed_limit_seconds"] != 2.0 {
		t.Errorf("%v", r)
	}
	if !strings.Contains(progress.String(), "adjacent-2-message-none") {
		t.Errorf("progress %q", progress.String())
	}

	out.Reset()
	if err := Run(t.Context(), Config{Only: "nothing"}, &out, io.Discard); !errors.Is(err, ErrUsage) {
		t.Error(err)
	}
	if err := Run(t.Context(), Config{Only: "("}, &out, io.Discard); !errors.Is(err, ErrUsage) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if err := Run(ctx, Config{All: true, Only: "^random$"}, &out, io.Discard); !errors.Is(err, context.Canceled) || out.Len() > 0 {
		t.Errorf("interrupted: %v, %q", err, out.String())
	}
}
