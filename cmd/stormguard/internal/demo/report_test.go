// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func sampleOutcome() outcome {
	curve := func(n int) []float64 {
		out := make([]float64, curveSteps)
		for i := range out {
			out[i] = float64(i % n)
		}
		return out
	}
	return outcome{
		unguarded: trial{
			figures: Figures{
				Published: 70000, Handled: 28797, DeadLetters: 41203, CallsDuringOutage: 206015, Contain: 20,
				IdleAfterRecovery: 0.002, Drain: 0.1, OutOfOrder: 12,
			},
			end: 30 * time.Second, calls: curve(240), successes: curve(1), deadLetters: curve(240),
		},
		guarded: trial{
			figures: Figures{Published: 70000, Handled: 70000, CallsDuringOutage: 19, Contain: 0.4, IdleAfterRecovery: 5.612, Drain: 14.2},
			end:     40 * time.Second, calls: curve(120), successes: curve(120), deadLetters: curve(1),
		},
	}
}

func TestReport(t *testing.T) {
	got := report(Defaults(), sampleOutcome(), style{width: 79})
	const want = ` The same outage of 20s, twice   NATS JetStream, 2,500 messages/s, seed 1

                                  unguarded              guarded
 successes over time              ···············        ▁▂▂▃▄▅▆▆▇█▅▁▂▃▄▄▅▆▇██
 failures over time               ▁▁▂▂▃▄▄▅▅▆▆▇▇██        ·····················
 dead letters over time           ▁▁▂▂▃▄▄▅▅▆▆▇▇██        ·····················

 published                        70,000                 70,000
 handled                          28,797                 70,000
 dead letters                     41,203                 0
 handler calls during the outage  206,015                19
 until the handler was left alone never                  0.40 s
 idle after recovery              0.00 s                 5.6 s
 backlog gone after recovery      0.10 s                 14.2 s
 lost                             0                      0
 handled more than once           0                      0
 handled out of order             12                     0

 The dependency was down for 20s. Unguarded, it was called 206,015 times in
 that time and 41,203 good messages went to the DLQ; guarded, it was called 19
 times and no message went there: all others waited in the stream and were
 handled once, in order, and 14.2 s after the recovery the backlog was gone.
 Bounds for --errors refused: all 6 kept.
`
	if got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}

func TestReportFitsTheTerminal(t *testing.T) {
	for width := minWidth; width <= fullWidth; width++ {
		for row := range strings.Lines(report(Defaults(), sampleOutcome(), style{width: width})) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(row, "\n")); n > width {
				t.Fatalf("%d cells in %d: %q", n, width, row)
			}
		}
	}
}

func TestSentenceOwnsUpToAFailure(t *testing.T) {
	got := sentence(Defaults(), Figures{DeadLetters: 10}, Figures{Lost: 1, Duplicates: 2})
	if !strings.Contains(got, "guarded, 1 message was lost, 2 messages were handled more than once and 0 messages were out of order") {
		t.Error(got)
	}
}

func TestJSON(t *testing.T) {
	var b bytes.Buffer
	if err := json.NewEncoder(&b).Encode(sampleOutcome().result(Defaults())); err != nil {
		t.Fatal(err)
	}
	const want = `{"errors":"refused","unguarded":{"published":70000,"handled":28797,"dead_letters":41203,"calls_during_outage":206015,` +
		`"contain_seconds":20,"idle_after_recovery_seconds":0.002,"drain_seconds":0.1,"lost":0,"duplicates":0,"out_of_order":12},` +
		`"guarded":{"published":70000,"handled":70000,"dead_letters":0,"calls_during_outage":19,` +
		`"contain_seconds":0.4,"idle_after_recovery_seconds":5.612,"drain_seconds":14.2,"lost":0,"duplicates":0,"out_of_order":0},` +
		`"bounds":[{"name":"dead_letters","limit":5,"value":0,"kept":true},{"name":"calls_percent","limit":1,"value":0.009,"kept":true},` +
		`{"name":"contain_seconds","limit":1,"value":0.4,"kept":true},{"name":"lost","limit":0,"value":0,"kept":true},` +
		`{"name":"duplicates","limit":0,"value":0,"kept":true},{"name":"out_of_order","limit":0,"value":0,"kept":true}]}` + "\n"
	if b.String() != want {
		t.Errorf("got  %swant %s", b.String(), want)
	}
}

// The bounds that are judged depend on what the handler's errors say.
func TestBounds(t *testing.T) {
	u := Figures{CallsDuringOutage: 1000}
	for _, c := range []struct {
		errors  Failure
		u, g    Figures
		judged  int
		broken  []string
		verdict string // part of it
	}{
		{Refused, u, Figures{DeadLetters: 5, CallsDuringOutage: 10, Contain: 1}, 6, nil, "refused: all 6 kept"},
		{Refused, u, Figures{DeadLetters: 6, CallsDuringOutage: 11, Contain: 1.001, Lost: 1, Duplicates: 1, OutOfOrder: 1}, 6,
			[]string{"dead_letters", "calls_percent", "contain_seconds", "lost", "duplicates", "out_of_order"}, "refused: NOT kept: dead letters is 6, more than 5; calls percent is 1.1, more than 1;"},
		{Unknown, u, Figures{DeadLetters: 5, CallsDuringOutage: 10, Contain: 15, OutOfOrder: 1}, 3, nil, "unknown: all 3 kept"},
		{Unknown, u, Figures{DeadLetters: 6, CallsDuringOutage: 11, Contain: 15.1}, 3, []string{"dead_letters", "calls_percent", "contain_seconds"}, "unknown: NOT kept"},
		{Refused, Figures{}, Figures{CallsDuringOutage: 1}, 6, []string{"calls_percent"}, "calls percent is 100"},
		{"", Figures{}, Figures{}, 6, nil, "refused: all 6 kept"},
	} {
		cfg := Config{Errors: c.errors}
		got := outcome{unguarded: trial{figures: c.u}, guarded: trial{figures: c.g}}.result(cfg)
		var broken []string
		for _, b := range got.Bounds {
			if !b.Kept {
				broken = append(broken, b.Name)
			}
		}
		if len(got.Bounds) != c.judged || !slices.Equal(broken, c.broken) || got.Errors != cfg.failure() {
			t.Errorf("%s %+v: %+v", c.errors, c.g, got)
		}
		if text := verdict(cfg, c.u, c.g); !strings.Contains(text, c.verdict) {
			t.Errorf("%q has no %q", text, c.verdict)
		}
	}
}
