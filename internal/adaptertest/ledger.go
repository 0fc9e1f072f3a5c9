// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package adaptertest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// done is the first word of a ledger's line about a handled message.
const done = "done"

// ledger is the file that consumer processes write, about n messages in lanes.
type ledger struct {
	path     string
	n, lanes int
}

func newLedger(t *testing.T, n, lanes int) ledger {
	t.Helper()
	l := ledger{path: filepath.Join(t.TempDir(), "ledger"), n: n, lanes: lanes}
	if err := os.WriteFile(l.path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return l
}

func (l ledger) size(t *testing.T) int64 {
	t.Helper()
	st, err := os.Stat(l.path)
	if err != nil {
		t.Fatal(err)
	}
	return st.Size()
}

// books are the numbers that an audit counts.
type books struct {
	lost     int // messages that were never handled
	twice    int // messages that were handled again
	disorder int // messages that were first handled before or after their turn in their lane
}

func (b books) String() string {
	return fmt.Sprintf("%d lost, %d handled twice, %d out of order", b.lost, b.twice, b.disorder)
}

// audit counts the complete lines of the ledger. A message's turn is when all earlier
// messages of its lane have been handled, and no later one.
func (l ledger) audit(t *testing.T) (b books) {
	t.Helper()
	text, err := os.ReadFile(l.path)
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[int]bool, l.n)
	turn := make([]int, l.lanes)
	for line := range strings.Lines(string(text[:bytes.LastIndexByte(text, '\n')+1])) {
		var what string
		var i int
		if _, err := fmt.Sscan(line, &what, &i); err != nil || i < 0 || i >= l.n {
			t.Fatalf("%q: want one of %d messages: %v", line, l.n, err)
		}
		if what != done {
			continue
		}
		if seen[i] {
			b.twice++
			continue
		}
		seen[i] = true
		if l.lanes > 0 {
			lane, at := i%l.lanes, i/l.lanes
			if at != turn[lane] {
				b.disorder++
			}
			turn[lane] = max(turn[lane], at+1)
		}
	}
	b.lost = l.n - len(seen)
	return b
}
