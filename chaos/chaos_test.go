// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// flawless draws a history of a consumer that did everything right, over kills, with a
// message of each ten poison.
func flawless(t *rapid.T) History {
	h := History{Schedule: Crash(rapid.Uint64().Draw(t, "seed"), 1, rapid.IntRange(1, 20).Draw(t, "kills"), 10)}
	h.Ordered = rapid.SampledFrom([]Redelivery{KeepsOrder, Redelivers}).Draw(t, "ordered")
	now := Instant(0)
	process := 1
	h.Starts = []Start{{1, 0}}
	keys := rapid.IntRange(1, 3).Draw(t, "keys")
	for id := range rapid.IntRange(30, 100).Draw(t, "messages") {
		now += time.Millisecond
		m := Message{ID: id, Key: id % keys, Poison: id%10 == 7, At: now}
		h.Published = append(h.Published, m)
		if rapid.IntRange(0, 9).Draw(t, "restart") == 0 {
			process++
			h.Starts = append(h.Starts, Start{process, now - 1})
		}
		e := Effect{id, process, now + time.Millisecond}
		if m.Poison {
			h.Letters = append(h.Letters, id)
			continue
		}
		h.Effects, h.Handled = append(h.Effects, e), append(h.Handled, e)
	}
	for i := range h.Schedule.Faults {
		h.Fired = append(h.Fired, Fired{Fault: i, At: now})
	}
	drained := now + time.Second
	h.Healed, h.Drained = now, &drained
	return h
}

// flaws are what can go wrong, each with the only figure that must show it.
var flaws = map[string]func(h *History){
	"Lost":                func(h *History) { h.Effects = append(h.Effects[:3], h.Effects[4:]...) },
	"DuplicateDeliveries": func(h *History) { h.Handled = append(h.Handled, h.Handled[2]) },
	"DuplicateEffects":    func(h *History) { h.Effects = append(h.Effects, h.Effects[2]) },
	"HealthyDeadLetters":  func(h *History) { h.Letters = append(h.Letters, 3) },
	"PoisonEffects":       func(h *History) { h.Effects = append(h.Effects, Effect{7, 1, h.Healed}) },
	"Unknown":             func(h *History) { h.Letters = append(h.Letters, 100_000) },
	"Fired":               func(h *History) { h.Fired = h.Fired[1:] },
	"Drained":             func(h *History) { h.Drained = nil },
	"ErrorPercent":        func(h *History) { h.Failed = append(h.Failed, h.Handled[2]) },
	"OutOfOrder": func(h *History) { // the last two of one key and one process
		e := h.Effects
		a, b := -1, -1
		for i := len(e) - 1; i >= 0 && a < 0; i-- {
			for k := i - 1; k >= 0; k-- {
				if e[k].ID%6 == e[i].ID%6 && e[k].Process == e[i].Process {
					a, b = k, i
					break
				}
			}
		}
		if a >= 0 {
			e[a], e[b] = e[b], e[a]
		}
	},
}

// What is right is found right, and each flaw by its oracle and no other.
func TestJudge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := flawless(t)
		good := Judge(h)
		if !good.OK() || good.DuplicateDeliveries != 0 || good.P99 != 1 || good.DrainSeconds != 1 {
			t.Fatalf("a flawless history: %+v", good)
		}
		undead := h
		undead.Letters = h.Letters[1:]
		if r := Judge(undead); r.Lost != 1 || r.OK() {
			t.Fatalf("poison without a dead letter: %+v", r)
		}
		name := rapid.SampledFrom([]string{"Lost", "DuplicateDeliveries", "DuplicateEffects", "HealthyDeadLetters", "PoisonEffects", "Unknown", "Fired", "Drained", "OutOfOrder", "ErrorPercent"}).Draw(t, "flaw")
		if name == "Fired" && len(h.Fired) == 0 {
			return
		}
		flaws[name](&h)
		bad := Judge(h)
		if bad.OK() && name != "DuplicateDeliveries" && name != "ErrorPercent" && name != "OutOfOrder" { // two of one key and process may not be there
			t.Fatalf("%s passes: %+v", name, bad)
		}
		was, is := reflect.ValueOf(good), reflect.ValueOf(bad)
		for i := range was.NumField() {
			switch field := was.Type().Field(i).Name; field {
			case "First", "P99", "DrainSeconds", name:
			default:
				if !reflect.DeepEqual(was.Field(i).Interface(), is.Field(i).Interface()) {
					t.Fatalf("%s shows in %s: %+v", name, field, bad)
				}
			}
		}
	})
}

// Two effects of one key in the wrong sequence are found, unless the broker hands messages
// over again and one of them is older than the process.
func TestJudgeOrder(t *testing.T) {
	h := History{
		Published: []Message{{ID: 1, At: 1}, {ID: 2, At: 2}, {ID: 3, Key: 1, At: 3}, {ID: 4, At: 11}, {ID: 5, At: 12}},
		Starts:    []Start{{1, 0}, {2, 10}},
		Ordered:   Redelivers,
		Effects:   []Effect{{2, 1, 3}, {3, 1, 4}, {4, 2, 13}, {1, 2, 14}, {5, 2, 15}},
	}
	if r := Judge(h); r.OutOfOrder != 0 {
		t.Errorf("what was delivered again: %+v", r)
	}
	h.Ordered = KeepsOrder
	if r := Judge(h); r.OutOfOrder != 1 || r.First[len(r.First)-1] != "out of order: 1" {
		t.Errorf("what a broker that keeps the order delivered late: %+v", r)
	}
	h.Ordered = Redelivers
	h.Effects = []Effect{{2, 1, 3}, {1, 1, 4}, {3, 1, 5}, {5, 2, 13}, {4, 2, 14}}
	if r := Judge(h); r.OutOfOrder != 2 {
		t.Errorf("two swapped pairs: %+v", r)
	}
}

// stages is a history of three stages of ten seconds, with a message each 10 ms that waits for
// one, and no fault found.
func stages() History {
	h := History{Schedule: Stages(1, 2, 100, 10*time.Second, 10*time.Second, 10*time.Second)}
	for id := range 4000 {
		at := Instant(id) * 10 * time.Millisecond
		h.Published = append(h.Published, Message{ID: id, At: at})
		h.Effects = append(h.Effects, Effect{ID: id, At: at + time.Millisecond})
		h.Handled = append(h.Handled, Effect{ID: id, At: at + time.Millisecond})
	}
	h.Fired = []Fired{{Fault: 0, At: time.Second, Count: 7}, {Fault: 1, At: 12 * time.Second}, {Fault: 2, At: 23 * time.Second, Count: 1}}
	h.Drained = new(Instant)
	return h
}

// Each gate is missed by what it is for, in its stage, and by nothing outside of it.
func TestGates(t *testing.T) {
	late := func(from time.Duration, n int, by time.Duration) func(*History) {
		return func(h *History) {
			for i := range n {
				h.Effects[int(from/(10*time.Millisecond))+i].At += by
			}
		}
	}
	fails := func(at time.Duration) func(*History) {
		return func(h *History) { h.Failed = append(h.Failed, Effect{ID: 1, At: at}) }
	}
	for name, tt := range map[string]struct {
		change func(*History)
		missed string
	}{
		"nothing":                 {func(*History) {}, ""},
		"a percent late in loss":  {late(2*time.Second, 11, 350*time.Millisecond), "p99_ms of the loss: 351, must be below 350"},
		"less than a percent":     {late(2*time.Second, 9, time.Minute), ""},
		"at the gate":             {late(2*time.Second, 11, 348*time.Millisecond), ""},
		"late in the burn":        {late(24*time.Second, 11, time.Second), "p99_ms of the burn: 1001, must be below 350"},
		"late outside":            {late(33500*time.Millisecond, 200, time.Minute), ""},
		"late while one is down":  {late(13*time.Second, 900, 4*time.Second), ""},
		"one waits for too long":  {late(13*time.Second, 1, 5*time.Second), "longest_ms of the down: 5001, must be below 5000"},
		"an error in the loss":    {fails(2 * time.Second), "error_percent of the loss: 0.0999001, must be below 0.02"},
		"an error while down":     {fails(13 * time.Second), "error_percent of the down: 0.0999001, must be below 0.02"},
		"an error outside":        {fails(35 * time.Second), ""},
		"nothing is sent in one":  {func(h *History) { h.Fired[2].At = time.Hour }, "the burn: no message was sent in it"},
		"no schedule of any gate": {func(h *History) { h.Schedule.Gates = nil; fails(2 * time.Second)(h) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := stages()
			tt.change(&h)
			r := Judge(h)
			if got := strings.Join(r.Missed, "; "); got != tt.missed || r.OK() != (tt.missed == "") {
				t.Errorf("missed %q, want %q; OK: %v", got, tt.missed, r.OK())
			}
			if text := r.Text(); tt.missed != "" && !strings.Contains(text, "Missed: "+tt.missed) {
				t.Errorf("the text does not say so:\n%s", text)
			}
		})
	}
}

// A fault of the network or of the processors that nothing shows did not happen.
func TestShown(t *testing.T) {
	for i, shown := range []bool{true, false, true} {
		h := stages()
		h.Fired[i].Count = 0
		if r := Judge(h); r.Fired == shown {
			t.Errorf("fault %d without a count: fired %v", i, r.Fired)
		}
	}
}

// The report says whether the kernel's timer decided the p99.
func TestTimers(t *testing.T) {
	const says = "the kernel's retransmission timer, 200 ms at least, fired 10 times"
	for _, tt := range []struct {
		timers int
		by     time.Duration
		quiet  time.Duration // outside
		says   bool
	}{
		{10, 250 * time.Millisecond, 0, true}, {9, 250 * time.Millisecond, 0, false},
		{10, 150 * time.Millisecond, 0, false}, {10, 250 * time.Millisecond, 250 * time.Millisecond, false},
	} {
		h := stages()
		h.Fired[0].Timers = tt.timers
		for i := range 11 {
			h.Effects[200+i].At += tt.by
		}
		for i := range 100 {
			h.Effects[3850+i].At += tt.quiet
		}
		if text := Judge(h).Text(); strings.Contains(text, says) != tt.says {
			t.Errorf("%+v:\n%s", tt, text)
		}
	}
}

// A seed draws the same schedule each time, of as many kills as asked; it survives JSON.
func TestSchedule(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed, kills := rapid.Uint64().Draw(t, "seed"), rapid.IntRange(1, 300).Draw(t, "kills")
		consumers := rapid.IntRange(1, 64).Draw(t, "consumers")
		s := Crash(seed, consumers, kills, 50)
		if err := s.Validate(); err != nil {
			t.Fatal(err)
		}
		if s.Count(Kill) != kills || !reflect.DeepEqual(s, Crash(seed, consumers, kills, 50)) {
			t.Fatalf("%d kills, want %d, or not the same twice", s.Count(Kill), kills)
		}
		text, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var back Schedule
		if err := json.Unmarshal(text, &back); err != nil || !reflect.DeepEqual(s, back) {
			t.Fatalf("%v: %s", err, text)
		}
	})
	rolling := Rolling(7, 3, 4, 50)
	if err := rolling.Validate(); err != nil {
		t.Error(err)
	}
	times := make(map[int]int)
	for i, f := range rolling.Faults {
		if f.Kind == Restart {
			times[f.Consumer]++
		} else if rolling.Faults[i+1].Kind != Restart {
			t.Errorf("fault %d is %+v, and no restart comes in it", i, f)
		}
	}
	if !reflect.DeepEqual(times, map[int]int{0: 4, 1: 4, 2: 4}) {
		t.Errorf("restarts by consumer: %v", times)
	}
	network := Network(7, 3, 100, 50)
	if err := network.Validate(); err != nil {
		t.Error(err)
	}
	for _, k := range []Kind{Loss, Delay, Blackhole, Reset} {
		if n := network.Count(k); n != 25 {
			t.Errorf("%d of the kind %s, want 25", n, k)
		}
	}
	broker := Broker(7, 3, 40, 50)
	if err := broker.Validate(); err != nil {
		t.Error(err)
	}
	if broker.Count(BrokerKill) != 20 || broker.Count(BrokerFreeze) != 20 || broker.Count(Kill) == 0 || network.Count(Kill) == 0 {
		t.Errorf("%+v", broker)
	}
	disk := Disk(7, 3, 40, 50)
	if err := disk.Validate(); err != nil {
		t.Error(err)
	}
	if disk.Count(DiskFull) != 40 || disk.Count(Outage) != 20 || disk.Count(Kill) != 20 {
		t.Errorf("%+v", disk)
	}
	full, at := 0, 0 // for how long the disk is full, and after how long of it the next fault comes
	for i, f := range disk.Faults {
		switch f.Kind {
		case DiskFull:
			full, at = f.For, f.For/2
		case Outage:
			at += f.For / 2
		default:
		}
		if f.Kind == Kill && at >= full {
			t.Errorf("fault %d is a kill after %d ms of a disk that is full for %d", i, at, full)
		}
	}
	if s := Stages(1, 3, 300, time.Minute, 45*time.Second, time.Minute); s.Validate() != nil {
		t.Error(s.Validate())
	}
	bad := Schedule{Gates: &Gates{P99: 1, ErrorPercent: math.NaN()}, Consumers: 65, Faults: []Fault{{Kind: "melt"}, {Kind: Kill, For: 1}, {Kind: Outage}, {Kind: Freeze, For: 600_001}, {Kind: Kill, After: -1}, {Kind: Restart, Consumer: 65}, {Kind: Outage, For: 1, Consumer: 1}, {Kind: Loss, For: 1}, {Kind: Loss, For: 1, Percent: 100}, {Kind: Burn, For: 1, Percent: 1}, {Kind: Burn, For: 1, Incoming: true}, {Kind: Reset, For: 1}}}
	err := bad.Validate()
	for _, want := range []string{`fault 0: kind: "melt" is not one of`, "fault 1: for_ms: 1 is not in [0, 0] of a kill", "fault 2: for_ms: 0 is not in [1, 600000]", "fault 3: for_ms: 600001", "fault 4: after: -1 is not in [0, 100000]", "consumers: 65 are not in [1, 64]", "fault 5: consumer: 65 is not in [0, 64]", "fault 6: consumer: 1 is not in [0, 0] of a outage",
		"fault 7: percent: 0 is not in [1, 99] of a loss", "fault 8: percent: 100 is", "fault 9: percent: 1 is not in [0, 0] of a burn", "fault 10: incoming: true is not in [false] of a burn", "fault 11: for_ms: 1 is not in [0, 0] of a reset",
		"gates: longest_ms: 0 is not above 0", "gates: error_percent: NaN is not above 0"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v\nhas no %q", err, want)
		}
	}
	if err := (Schedule{}).Validate(); err == nil {
		t.Error("a schedule without faults is valid")
	}
}
