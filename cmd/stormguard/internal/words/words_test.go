// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package words

import (
	"maps"
	"regexp"
	"strconv"
	"testing"
)

var verb = regexp.MustCompile(`%(?:\[(\d+)\])?[.\d]*([a-zA-Z%])`)

// verbs are those of a format, by the place of their value.
func verbs(t *testing.T, format string) map[int]string {
	t.Helper()
	all := make(map[int]string)
	next := 1
	for _, m := range verb.FindAllStringSubmatch(format, -1) {
		if m[2] == "%" {
			continue
		}
		if m[1] != "" {
			next, _ = strconv.Atoi(m[1])
		}
		all[next] += m[2]
		next++
	}
	return all
}

// A translation has the values of its text, each by the same verb.
func TestTranslationsHaveTheirValues(t *testing.T) {
	for english, chinese := range zh {
		if want, got := verbs(t, english), verbs(t, chinese); !maps.Equal(got, want) {
			t.Errorf("%q has %v, %q has %v", english, want, chinese, got)
		}
	}
}

func TestCount(t *testing.T) {
	for want, got := range map[string]string{
		"1 source": English.Count(1, "source"), "0 sources": English.Count(0, "source"), "2 processes": English.Count(2, "process"), "1 个进程": Chinese.Count(1, "process"),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestWidth(t *testing.T) {
	for text, want := range map[string]int{"": 0, "orders": 6, "状态": 4, "a：b": 4, "é": 1} {
		if got := Width(text); got != want {
			t.Errorf("%q takes %d columns, want %d", text, got, want)
		}
	}
}
