// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// report makes the last screen: curves, the table, and a summary in words.
func report(cfg Config, o outcome, s style) string {
	u, g := o.unguarded.figures, o.guarded.figures
	const label = 34
	column := max(10, min(30, (s.width-label-2)/2))
	var rows []line
	add := func(l ...span) { rows = append(rows, l) }
	add(span{bold, fmt.Sprintf(" The same outage of %s, twice", cfg.Outage)},
		span{dim, fmt.Sprintf("   %s, %s messages/s, seed %d", cfg.platform().title, count(cfg.Rate), cfg.Seed)})
	add()
	rows = append(rows, append(append(line{}.pad(label), line{{bold, "unguarded"}}.pad(column+2)...), span{bold, "guarded"}))

	// Both sides have the same scales of time and height, so that they compare.
	whole := max(o.unguarded.end, o.guarded.end)
	for _, c := range []struct {
		label string
		color color
		of    func(trial) []float64
	}{
		{" successes", green, func(t trial) []float64 { return t.successes }},
		{" failures", yellow, func(t trial) []float64 {
			out := slices.Clone(t.calls)
			for i, n := range t.successes {
				out[i] = max(0, out[i]-n)
			}
			return out
		}},
		{" dead letters", red, func(t trial) []float64 { return t.deadLetters }},
	} {
		curve := func(t trial) []float64 {
			if whole <= 0 || len(c.of(t)) == 0 {
				return nil
			}
			return resample(c.of(t), max(1, int(float64(column)*float64(t.end)/float64(whole))))
		}
		left, right := curve(o.unguarded), curve(o.guarded)
		top := slices.Max(append(append([]float64{0}, left...), right...))
		l := line{{plain, c.label + " over time"}}.pad(label)
		l = append(l, append(line{{c.color, spark(left, top)}}.pad(column+2), span{c.color, spark(right, top)})...)
		rows = append(rows, l)
	}
	add()

	row := func(name, left, right string, worse, better bool) {
		l := line{{plain, " " + name}}.pad(label)
		lc, rc := plain, plain
		if worse {
			lc = alarm
		}
		if better {
			rc = fine
		}
		rows = append(rows, append(append(l, line{{lc, left}}.pad(column+2)...), span{rc, right}))
	}
	number := func(name string, a, b int) { row(name, count(a), count(b), a > b, b < a) }
	duration := func(name string, a, b float64) {
		row(name, short(a), short(b), false, false)
	}
	row("published", count(u.Published), count(g.Published), false, false)
	row("handled", count(u.Handled), count(g.Handled), u.Handled < g.Handled, u.Handled < g.Handled)
	number("dead letters", u.DeadLetters, g.DeadLetters)
	number("handler calls during the outage", u.CallsDuringOutage, g.CallsDuringOutage)
	row("until the handler was left alone", alone(u, cfg), alone(g, cfg), u.Contain > g.Contain, g.Contain < u.Contain)
	duration("idle after recovery", u.IdleAfterRecovery, g.IdleAfterRecovery)
	duration("backlog gone after recovery", u.Drain, g.Drain)
	number("lost", u.Lost, g.Lost)
	number("handled more than once", u.Duplicates, g.Duplicates)
	number("handled out of order", u.OutOfOrder, g.OutOfOrder)
	add()

	var b strings.Builder
	for _, l := range rows {
		b.WriteString(l.render(s.width, s) + "\n")
	}
	for _, l := range wrap(sentence(cfg, u, g), s.width-2) {
		b.WriteString(line{{bold, " " + l}}.render(s.width, s) + "\n")
	}
	for _, l := range wrap(verdict(cfg, u, g), s.width-2) {
		b.WriteString(line{{dim, " " + l}}.render(s.width, s) + "\n")
	}
	return b.String()
}

func alone(f Figures, cfg Config) string {
	if f.Contain >= cfg.Outage.Seconds()-2*pause.Seconds() {
		return "never"
	}
	return short(f.Contain)
}

// short formats seconds: two decimals below 1 s, else one.
func short(seconds float64) string {
	if seconds < 1 {
		return fmt.Sprintf("%.2f s", seconds)
	}
	return fmt.Sprintf("%.1f s", seconds)
}

// sentence describes the outcome of both runs.
func sentence(cfg Config, u, g Figures) string {
	var b strings.Builder
	fmt.Fprintf(&b, "The dependency was down for %s. Unguarded, it was called %s in that time and %s went to the DLQ; guarded, it was called %s and %s went there",
		cfg.Outage, times(u.CallsDuringOutage), messages(u.DeadLetters, "good message"), times(g.CallsDuringOutage), messages(g.DeadLetters, "message"))
	if g.Lost+g.Duplicates+g.OutOfOrder == 0 {
		fmt.Fprintf(&b, ": all others waited in the %s and were handled once, in order, and %.1f s after the recovery the backlog was gone.", cfg.platform().store, g.Drain)
	} else {
		fmt.Fprintf(&b, ". But guarded, %s lost, %s handled more than once and %s out of order: that should not be, please report it.",
			were(g.Lost), were(g.Duplicates), were(g.OutOfOrder))
	}
	return b.String()
}

// verdict says whether the guarded run kept the bounds, and names the broken ones.
func verdict(cfg Config, u, g Figures) string {
	judged := bounds(cfg.failure(), u, g)
	var broken []string
	for _, b := range judged {
		if !b.Kept {
			broken = append(broken, fmt.Sprintf("%s is %s, more than %s", strings.ReplaceAll(b.Name, "_", " "), figure(b.Value), figure(b.Limit)))
		}
	}
	if len(broken) > 0 {
		return fmt.Sprintf("Bounds for --errors %s: NOT kept: %s.", cfg.failure(), strings.Join(broken, "; "))
	}
	return fmt.Sprintf("Bounds for --errors %s: all %d kept.", cfg.failure(), len(judged))
}

// figure formats a number of a bound, with at most two decimals.
func figure(x float64) string { return strconv.FormatFloat(math.Round(100*x)/100, 'f', -1, 64) }

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return count(n) + " times"
}

func messages(n int, what string) string {
	switch n {
	case 0:
		return "no " + what
	case 1:
		return "1 " + what
	}
	return count(n) + " " + what + "s"
}

func were(n int) string {
	if n == 1 {
		return "1 message was"
	}
	return count(n) + " messages were"
}

// wrap breaks text into lines of at most n characters.
func wrap(text string, n int) (out []string) {
	current := ""
	for word := range strings.FieldsSeq(text) {
		if current != "" && len(current)+1+len(word) > n {
			out, current = append(out, current), ""
		}
		if current != "" {
			current += " "
		}
		current += word
	}
	return append(out, current)
}
