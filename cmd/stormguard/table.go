// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/words"
)

// table prints rows in columns below the words of head. Tabs separate the words; an empty head
// prints none. Unlike text/tabwriter, table knows that a Chinese character takes two columns.
func table(out io.Writer, l words.Language, head string, rows func(row func(...any))) error {
	var lines [][]string
	var widths []int
	add := func(cells []string) {
		for i, cell := range cells {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			if i < len(cells)-1 { // the last column needs no padding
				widths[i] = max(widths[i], words.Width(cell))
			}
		}
		lines = append(lines, cells)
	}
	if head != "" {
		cells := strings.Split(head, "\t")
		for i := range cells {
			cells[i] = l.Say(cells[i])
		}
		add(cells)
	}
	rows(func(values ...any) {
		cells := make([]string, len(values))
		for i, v := range values {
			cells[i] = printable(fmt.Sprint(v), "")
		}
		add(cells)
	})
	var b strings.Builder
	for _, cells := range lines {
		for i, cell := range cells {
			b.WriteString(cell)
			if i < len(cells)-1 {
				b.WriteString(strings.Repeat(" ", widths[i]-words.Width(cell)+2))
			}
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// printable makes a text safe for a terminal. An answer of a process may contain text from
// messages or requests. Such text must not control the terminal or look like a line of this
// command. The characters in keep stay.
func printable(text, keep string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	fine := func(r rune) bool { return unicode.IsPrint(r) || strings.ContainsRune(keep, r) }
	if strings.IndexFunc(text, func(r rune) bool { return !fine(r) }) < 0 {
		return text
	}
	var b strings.Builder
	for _, r := range text {
		if fine(r) {
			b.WriteRune(r)
			continue
		}
		q := strconv.QuoteRuneToASCII(r)
		b.WriteString(q[1 : len(q)-1])
	}
	return b.String()
}

// toTerminal makes all written text printable, and keeps line ends.
type toTerminal struct{ io.Writer }

func (t toTerminal) Write(b []byte) (int, error) {
	if _, err := io.WriteString(t.Writer, printable(string(b), "\n")); err != nil {
		return 0, err
	}
	return len(b), nil
}
