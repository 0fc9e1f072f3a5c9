// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// frames is an outage from 1 s to 3 s at 1,000 messages a second, sampled every
// 100 ms.
func frames(guarded bool) (out []sample) {
	cfg := Config{WarmUp: time.Second, Outage: 2 * time.Second}
	for i := 1; i <= 50; i++ {
		at := time.Duration(i) * frame
		x := sample{at: at, phase: phaseAt(cfg, at), published: i * 100, handled: min(i, 10) * 100, look: look{guarded: guarded}}
		over := max(0, i-10)
		if guarded {
			x.breaker, x.window = "closed", 250
			if over > 0 {
				x.failed, x.hold, x.breaker, x.probe = min(over, 20), min(250, over*100), "open", 1234*time.Millisecond
				x.storm = over > 10
			}
		} else {
			x.failed, x.dead = over*500, over*100
		}
		out = append(out, x)
	}
	return out
}

func TestLines(t *testing.T) {
	var b bytes.Buffer
	v := newView(&b, Config{})
	for _, s := range []side{unguarded{onNATS}, newGuarded(onNATS, false, "")} {
		v.begin(s)
		for _, x := range frames(s.name() == "guarded") {
			v.show(x)
		}
		v.end()
	}
	const want = `unguarded: Nak on error, MaxDeliver 5, then the DLQ
unguarded   1.0s  outage    handled   1,000 (1,000/s)  failed       0 (0/s)  dead letters      0 (0/s)  backlog      0
unguarded   2.0s  outage    handled   1,000 (0/s)  failed   5,000 (5,000/s)  dead letters  1,000 (1,000/s)  backlog      0
unguarded   3.0s  recovery  handled   1,000 (0/s)  failed  10,000 (5,000/s)  dead letters  2,000 (1,000/s)  backlog      0
unguarded   4.0s  recovery  handled   1,000 (0/s)  failed  15,000 (5,000/s)  dead letters  3,000 (1,000/s)  backlog      0
unguarded   5.0s  recovery  handled   1,000 (0/s)  failed  20,000 (5,000/s)  dead letters  4,000 (1,000/s)  backlog      0
guarded: guardnats.Consume(ctx, g, c, handle)
guarded     1.0s  outage    handled   1,000 (1,000/s)  failed       0 (0/s)  dead letters      0 (0/s)  backlog      0  breaker closed  hold 0/250
guarded     2.0s  outage    handled   1,000 (0/s)  failed      10 (10/s)  dead letters      0 (0/s)  backlog  1,000  breaker open  hold 250/250
guarded     3.0s  recovery  handled   1,000 (0/s)  failed      20 (10/s)  dead letters      0 (0/s)  backlog  2,000  breaker open  hold 250/250  storm
guarded     4.0s  recovery  handled   1,000 (0/s)  failed      20 (0/s)  dead letters      0 (0/s)  backlog  3,000  breaker open  hold 250/250  storm
guarded     5.0s  recovery  handled   1,000 (0/s)  failed      20 (0/s)  dead letters      0 (0/s)  backlog  4,000  breaker open  hold 250/250  storm
`
	if b.String() != want {
		t.Errorf("got:\n%s\nwant:\n%s", b.String(), want)
	}
}

func TestPicture(t *testing.T) {
	all := frames(true)[:25]
	var b strings.Builder
	for _, l := range picture(Config{WarmUp: time.Second, Outage: 2 * time.Second, After: time.Second}, newGuarded(onNATS, false, ""), 2, all, 79) {
		b.WriteString(l.render(79, style{}) + "\n")
	}
	const want = ` stormguard demo  run 2 of 2  guarded  guardnats.Consume(ctx, g, c, handle)

 ━━━━━━━━━━━━━●───────────────────────────────────────────────────────────────
  2.5 s   dependency ✖ DOWN for 1.5 s, back in 0.5 s

 publisher ─●──●▶ stream ─●──●▶ ┃ GUARD ┃ ─●──●▶ handler ─●──●▶ dependency ✖
                                                    ╰┄┄┄┄┄▷ DLQ 0

 handled       ██···                                            0/s      1,000
 failed        ··███                                           10/s         15
 dead letters  ·····                                            0/s          0

 breaker       ● OPEN   next probe in 1.2 s   STORM
 hold          ██████████████████████████████████████████ 250 of 250
 backlog       ██████████████████████████████████████████ 1,500 wait

 Messages wait in the stream; now and then a probe asks for the dependency.
`
	if b.String() != want {
		t.Errorf("got:\n%s\nwant:\n%s", b.String(), want)
	}
}

// Whatever the width, nothing wraps, and without colours there are no escapes.
func TestPictureFitsTheTerminal(t *testing.T) {
	for _, guarded := range []bool{false, true} {
		all := frames(guarded)
		for width := minWidth; width <= fullWidth; width++ {
			for n := 1; n <= len(all); n += 7 {
				for _, l := range picture(Defaults(), unguarded{onNATS}, 1, all[:n], width) {
					text := l.render(width, style{})
					if got := (line{{plain, text}}).width(); got > width || strings.ContainsRune(text, '\x1b') {
						t.Fatalf("%d cells in %d: %q", got, width, text)
					}
				}
			}
		}
	}
}

func TestMeter(t *testing.T) {
	for _, c := range []struct {
		part, whole float64
		want        string
	}{
		{0, 10, "░░░░"}, {10, 10, "████"}, {20, 10, "████"}, {5, 10, "██░░"}, {0.001, 10, "▏░░░"}, {1, 32, "▏░░░"}, {7, 32, "▉░░░"}, {1, 0, "▏░░░"},
	} {
		full, rest := meter(c.part, c.whole, 4)
		if full+rest != c.want {
			t.Errorf("%v of %v: %q, want %q", c.part, c.whole, full+rest, c.want)
		}
	}
}

func TestCount(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1000: "-1,000"} {
		if got := count(n); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}
