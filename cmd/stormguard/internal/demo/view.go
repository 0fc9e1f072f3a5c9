// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"fmt"
	"io"
	"time"
)

// sample is the state of a run at one instant.
type sample struct {
	at                               time.Duration
	phase                            phase
	published, handled, failed, dead int
	look
}

// backlog is the number of messages that wait: not handled and not dead-lettered.
func (x sample) backlog() int { return max(0, x.published-x.handled-x.dead) }

// view shows a run's progress. One goroutine at a time uses it.
type view interface {
	begin(s side)
	show(x sample)
	end()
}

// newView returns a picture on a terminal, else lines.
func newView(w io.Writer, cfg Config) view {
	if f, ok := terminal(w); ok {
		return &live{out: f, cfg: cfg}
	}
	return &lines{out: w}
}

// lines prints one line per second.
type lines struct {
	out  io.Writer
	side side
	last sample
}

func (v *lines) begin(s side) {
	v.side, v.last = s, sample{}
	fmt.Fprintf(v.out, "%s: %s\n", s.name(), s.how())
}

func (v *lines) show(x sample) {
	if x.at/time.Second == v.last.at/time.Second {
		return
	}
	per := (x.at - v.last.at).Seconds()
	delta := func(now, was int) string { return rate(float64(now-was) / per) }
	fmt.Fprintf(v.out, "%-9s %5.1fs  %-8s  handled %7s (%s)  failed %7s (%s)  dead letters %6s (%s)  backlog %6s",
		v.side.name(), x.at.Seconds(), x.phase,
		count(x.handled), delta(x.handled, v.last.handled), count(x.failed), delta(x.failed, v.last.failed),
		count(x.dead), delta(x.dead, v.last.dead), count(x.backlog()))
	if x.guarded {
		fmt.Fprintf(v.out, "  breaker %s  hold %d/%d", x.breaker, x.hold, x.window)
		if x.storm {
			fmt.Fprint(v.out, "  storm")
		}
	}
	fmt.Fprintln(v.out)
	v.last = x
}

func (v *lines) end() {}
