// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	"golang.org/x/term"
)

// step is the time that one bar of a live curve stands for.
const step = 500 * time.Millisecond

// live redraws a picture in place.
type live struct {
	out     *os.File
	cfg     Config
	side    side
	run     int
	drawn   int // number of lines on the screen
	history []sample
}

func (v *live) begin(s side) {
	v.side, v.history = s, nil
	v.run++
	_, _ = v.out.WriteString("\x1b[?25l") // hides the cursor
}

// end restores the screen as it was before begin.
func (v *live) end() {
	_, _ = v.out.WriteString(v.home() + "\x1b[J\x1b[?25h")
	v.drawn = 0
}

// home returns the escape sequence that moves to the picture's first line.
func (v *live) home() string {
	if v.drawn == 0 {
		return ""
	}
	return fmt.Sprintf("\x1b[%dA\r", v.drawn)
}

func (v *live) show(x sample) {
	v.history = append(v.history, x)
	s := outputStyle(v.out, v.cfg)
	rows := picture(v.cfg, v.side, v.run, v.history, s.width)
	if _, height, err := term.GetSize(int(v.out.Fd())); err == nil && height > 1 {
		rows = rows[:min(len(rows), height-1)]
	}
	var b strings.Builder
	b.WriteString(v.home())
	for _, l := range rows {
		b.WriteString(l.render(s.width, s))
		b.WriteString("\x1b[K\n")
	}
	b.WriteString("\x1b[J")
	_, _ = v.out.WriteString(b.String())
	v.drawn = len(rows)
}

// picture draws the latest sample and the curves of all samples.
func picture(cfg Config, s side, run int, history []sample, width int) []line {
	x := history[len(history)-1]
	past := history[max(0, len(history)-11)] // a second ago
	per := max((x.at - past.at).Seconds(), 0.001)
	speed := func(of func(sample) int) float64 { return float64(of(x)-of(past)) / per }
	var (
		published = func(x sample) int { return x.published }
		handled   = func(x sample) int { return x.handled }
		failed    = func(x sample) int { return x.failed }
		dead      = func(x sample) int { return x.dead }
	)

	rows := []line{
		{{bold, " stormguard demo"}, {dim, fmt.Sprintf("  run %d of 2  ", run)}, {bold, s.name()}, {dim, "  " + s.how()}},
		{},
		timeline(cfg, x, width),
		status(cfg, x),
		{},
	}
	rows = append(rows, flow(x, cfg.platform().store, speed(published), speed(handled), speed(failed), speed(dead))...)
	rows = append(rows, line{})
	for _, c := range []struct {
		label string
		of    func(sample) int
		color color
	}{{" handled", handled, green}, {" failed", failed, yellow}, {" dead letters", dead, red}} {
		room := max(8, width-15-22)
		values, top := bars(history, c.of, room)
		l := line{{plain, c.label}}.pad(15)
		l = append(l, span{c.color, spark(values, top)})
		rows = append(rows, append(l, span{plain, fmt.Sprintf(" %9s", rate(speed(c.of)))}, span{bold, fmt.Sprintf(" %10s", count(c.of(x)))}))
	}
	rows = append(rows, line{})
	rows = append(rows, gauges(x, history, width)...)
	return append(rows, line{}, line{{cyan, " " + story(x, cfg.platform().store)}})
}

// bars returns the latest n steps of the run, the newest last, and the highest
// value of the whole run. With fewer steps NaN fills the rest of values.
func bars(history []sample, of func(sample) int, n int) (values []float64, top float64) {
	values = make([]float64, n)
	for i := range values {
		values[i] = math.NaN()
	}
	begin, at := sample{}, 0
	var all []float64
	for i, x := range history {
		if k := int(x.at / step); k > at || i == len(history)-1 && x.at-begin.at > step/2 {
			all = append(all, float64(of(x)-of(begin))/(x.at-begin.at).Seconds())
			begin, at = x, k
		}
	}
	for _, v := range all {
		top = max(top, v)
	}
	all = all[max(0, len(all)-n):]
	copy(values, all)
	return values, top
}

// timeline draws the phases of the run and marks the current time.
func timeline(cfg Config, x sample, width int) line {
	n := width - 2
	whole := max(x.at, cfg.WarmUp+cfg.Outage+cfg.After+10*time.Second)
	now := min(n-1, int(float64(x.at)/float64(whole)*float64(n)))
	l := line{{plain, " "}}
	for i := range n {
		at := time.Duration(float64(whole) * (float64(i) + 0.5) / float64(n))
		c, text := green, "━"
		if phaseAt(cfg, at) == down {
			c = red
		}
		switch {
		case i == now:
			c, text = bold, "●"
		case i > now:
			text = "─"
			if c == green {
				c = dim
			}
		}
		l = append(l, span{c, text})
	}
	return l
}

// status describes the current phase and its remaining time; after the outage, the
// time since then.
func status(cfg Config, x sample) line {
	l := line{{plain, fmt.Sprintf(" %4.1f s   dependency ", x.at.Seconds())}}
	switch back := cfg.WarmUp + cfg.Outage; x.phase {
	case down:
		return append(l, span{alarm, "✖ DOWN"}, span{plain, fmt.Sprintf(" for %.1f s, back in %.1f s", (x.at - cfg.WarmUp).Seconds(), (back - x.at).Seconds())})
	case warmUp:
		return append(l, span{fine, "✔ up"}, span{plain, fmt.Sprintf(", dies in %.1f s", (cfg.WarmUp - x.at).Seconds())})
	default:
		return append(l, span{fine, "✔ up"}, span{plain, fmt.Sprintf(" again, for %.1f s", (x.at - back).Seconds())})
	}
}

// flow draws the path of the messages. Dots move on an arrow while messages move.
func flow(x sample, store string, published, handled, failed, dead float64) []line {
	tick := int(x.at / frame)
	const n = 5
	arrow := func(perSecond float64, c color) line {
		if perSecond <= 0 {
			return line{{dim, " " + strings.Repeat("┄", n) + "▷ "}}
		}
		belt := []rune(strings.Repeat("─", n))
		for i := tick % 3; i < n; i += 3 {
			belt[i] = '●'
		}
		return line{{c, " " + string(belt) + "▶ "}}
	}
	l := append(line{{plain, " publisher"}}, arrow(published, cyan)...)
	l = append(l, span{bold, store})
	if x.guarded {
		l = append(l, arrow(handled+failed, cyan)...)
		gate := span{green, "│ guard │"}
		if x.breaker != "closed" {
			gate = span{yellow, "┃ GUARD ┃"}
		}
		l = append(l, gate)
	}
	l = append(l, arrow(handled+failed, cyan)...)
	branch := l.width() + 3
	l = append(l, span{bold, "handler"})
	c, mark := green, span{fine, "✔"}
	if x.phase == down {
		c, mark = red, span{alarm, "✖"}
	}
	l = append(l, arrow(handled+failed, c)...)
	l = append(l, span{plain, "dependency "}, mark)
	below := append(line{{plain, strings.Repeat(" ", branch)}, {dim, "╰"}}, arrow(dead, red)...)
	below[2].text = strings.TrimPrefix(below[2].text, " ")
	letters := span{dim, "DLQ " + count(x.dead)}
	if x.dead > 0 {
		letters.color = alarm
	}
	return []line{l, append(below, letters)}
}

// gauges draws breaker, hold and backlog.
func gauges(x sample, history []sample, width int) []line {
	top := 1
	for _, h := range history {
		top = max(top, h.backlog())
	}
	room := max(8, width-15-22)
	bar := func(label string, part, whole int, c color, text string) line {
		full, rest := meter(float64(part), float64(whole), room)
		return append(line{{plain, label}}.pad(15), span{c, full}, span{dim, rest}, span{plain, " " + text})
	}
	backlog := bar(" backlog", x.backlog(), top, yellow, count(x.backlog())+" wait")
	if !x.guarded {
		return []line{
			append(line{{plain, " breaker"}}.pad(15), span{dim, "none"}),
			append(line{{plain, " hold"}}.pad(15), span{dim, "none"}),
			backlog,
		}
	}
	b := line{{plain, " breaker"}}.pad(15)
	switch {
	case x.breaker == "closed" && x.draining:
		b = append(b, span{fine, "● closed"}, span{plain, "   draining in order, faster and faster"})
	case x.breaker == "closed":
		b = append(b, span{fine, "● closed"})
	case x.breaker == "open":
		b = append(b, span{alarm, "● OPEN"}, span{plain, fmt.Sprintf("   next probe in %.1f s", x.probe.Seconds())})
	default:
		b = append(b, span{yellow, "● " + x.breaker})
	}
	if x.storm {
		b = append(b, span{plain, "   "}, span{alarm, "STORM"})
	}
	return []line{b, bar(" hold", x.hold, x.window, cyan, fmt.Sprintf("%d of %d", x.hold, x.window)), backlog}
}

// story describes the current state in a sentence.
func story(x sample, store string) string {
	switch {
	case x.phase == warmUp:
		return "All is well: every message is handled as it comes."
	case !x.guarded && x.phase == down:
		return "Every message fails five times at full speed and ends in the DLQ."
	case !x.guarded:
		return "The dependency is back, but the good messages in the DLQ stay there."
	case x.breaker != "closed" && x.phase == down:
		return "Messages wait in the " + store + "; now and then a probe asks for the dependency."
	case x.breaker != "closed":
		return "The dependency is back; the next probe will see it."
	case x.phase == down:
		return "The first calls fail; the guard retries and looks for a pattern."
	case x.draining || x.backlog() > 1000:
		return "What was held is handled first, in order, and the backlog melts."
	}
	return "Caught up: nothing lost, nothing twice, everything in order."
}
