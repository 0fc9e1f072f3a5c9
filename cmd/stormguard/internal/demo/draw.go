// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"
)

// color is an SGR parameter; empty means the terminal's own colour.
type color string

const (
	plain  color = ""
	bold   color = "1"
	dim    color = "2"
	red    color = "31"
	green  color = "32"
	yellow color = "33"
	cyan   color = "36"
	alarm  color = "1;31"
	fine   color = "1;32"
)

// A span is text in one colour. A line is a row of the screen.
type (
	span struct {
		color color
		text  string
	}
	line []span
)

// width counts cells: every character drawn here is one cell wide.
func (l line) width() (n int) {
	for _, s := range l {
		n += utf8.RuneCountInString(s.text)
	}
	return n
}

// pad appends spaces up to n cells.
func (l line) pad(n int) line {
	return append(l, span{plain, strings.Repeat(" ", max(0, n-l.width()))})
}

// render returns the line as text, cut at width cells.
func (l line) render(width int, s style) string {
	var b strings.Builder
	for _, sp := range l {
		text := []rune(sp.text)
		text = text[:min(len(text), width)]
		width -= len(text)
		if s.color && sp.color != plain && len(text) > 0 {
			b.WriteString("\x1b[" + string(sp.color) + "m" + string(text) + "\x1b[0m")
		} else {
			b.WriteString(string(text))
		}
	}
	return strings.TrimRight(b.String(), " ")
}

// style describes an output's width and colours.
type style struct {
	width int
	color bool
}

const (
	fullWidth = 100 // most columns, also on a wider terminal
	minWidth  = 40
)

// terminal tells whether w is a terminal that can redraw.
func terminal(w io.Writer) (*os.File, bool) {
	f, ok := w.(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb"
}

// outputStyle looks at an output as it is now.
func outputStyle(w io.Writer, cfg Config) style {
	s := style{width: fullWidth}
	f, ok := terminal(w)
	if !ok {
		return s
	}
	if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
		s.width = min(fullWidth, max(minWidth, width-1))
	}
	s.color = !cfg.NoColor && os.Getenv("NO_COLOR") == ""
	return s
}

// spark draws values as bars of eight heights; top is the full height. A value
// above zero has at least the lowest bar.
func spark(values []float64, top float64) string {
	const bars = "▁▂▃▄▅▆▇█"
	var b strings.Builder
	for _, v := range values {
		switch {
		case math.IsNaN(v):
			b.WriteByte(' ')
		case v <= 0 || top <= 0:
			b.WriteString("·")
		default:
			i := min(7, int(v/top*8))
			b.WriteString(bars[3*i : 3*i+3])
		}
	}
	return b.String()
}

// meter draws part of whole as a bar of n cells: full cells, and the rest.
func meter(part, whole float64, n int) (full, rest string) {
	eighths := 0
	if whole > 0 {
		eighths = min(8*n, int(math.Round(part/whole*float64(8*n))))
	}
	if part > 0 {
		eighths = max(1, eighths)
	}
	full = strings.Repeat("█", eighths/8)
	if e := eighths % 8; e > 0 {
		full += string(rune('█' + 8 - e)) // ▏▎▍▌▋▊▉
	}
	return full, strings.Repeat("░", n-utf8.RuneCountInString(full))
}

// resample reduces values to n steps, each the mean of its part.
func resample(values []float64, n int) []float64 {
	out := make([]float64, n)
	for i := range out {
		from, to := i*len(values)/n, (i+1)*len(values)/n
		to = min(len(values), max(to, from+1))
		var sum float64
		for _, v := range values[from:to] {
			sum += v
		}
		out[i] = sum / float64(to-from)
	}
	return out
}

// count formats a number with separators: 12,345.
func count(n int) string {
	if n < 0 {
		return "-" + count(-n)
	}
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func rate(perSecond float64) string { return count(int(math.Round(perSecond))) + "/s" }
