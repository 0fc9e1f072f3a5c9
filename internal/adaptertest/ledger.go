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

// done is what a ledger's line of a handled message begins with.
const done = "done"

// ledger is the file that consumer processes write, of n messages in lanes.
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

// books is what a ledger says of messages that were handled.
type books struct {
	lost     int // never handled
	twice    int // handled again
	disorder int // first handled before or after their turn in their lane
}

func (b books) String() string {
	return fmt.Sprintf("%d lost, %d handled twice, %d out of order", b.lost, b.twice, b.disorder)
}

// audit reads the ledger as far as it is written. A message's turn is when all
// before it in its lane have been handled, and none after it.
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
