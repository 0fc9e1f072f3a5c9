// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// Large messages are written to pages in a row, and bbolt takes those where it finds them:
// also beyond what the file was extended to. What is there is never written with zeros.
func TestLargeMessagesStayWhole(t *testing.T) {
	s := open(t, Config{Dir: fastTemp(t)})
	a := s.Lane("a")
	var want []string
	for i := range 8 {
		want = append(want, strings.Repeat(string(rune('a'+i)), 8<<20))
		put(t, a, want[i])
	}
	for i, got := range drain(t, a) {
		if got != want[i] {
			t.Fatalf("message %d is not what it was", i)
		}
	}
}

// A spill that is empty takes the largest message that it may ever hold, at any time.
func TestEmptySpillHasRoom(t *testing.T) {
	for name, c := range map[string]struct {
		bytes int64
		size  int
		n     int
	}{
		"one": {16 << 20, 10 << 20, 1},
		"all": {64 << 20, 15 << 20, 4},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, Config{Dir: fastTemp(t), MaxBytes: c.bytes})
			a := s.Lane("a")
			for round := range 3 {
				for i := range c.n {
					if _, err := a.TryPut(strings.Repeat("x", c.size)); err != nil {
						t.Fatalf("round %d, message %d: %v", round, i, err)
					}
				}
				if n := len(drain(t, a)); n != c.n {
					t.Fatalf("%d messages", n)
				}
				flushed(t, s)
			}
		})
	}
}

// A spill that is almost full and goes on for long, with a mixture of lanes and sizes, finds the
// room of what was drained again: its file does not grow with what passes through it.
func TestFileDoesNotGrowForEver(t *testing.T) {
	const held, passes = 8 << 20, 15
	dir := fastTemp(t)
	s := open(t, Config{Dir: dir, MaxBytes: held})
	r := rand.New(rand.NewPCG(1, 2))
	lanes, sizes := 7, [...]int{200, 600, 1100, 2300, 2600, 5000}
	for bytes := 0; bytes < passes*held; {
		lane := r.IntN(lanes)
		l := s.Lane(strconv.Itoa(lane))
		vs := make([]string, 1+r.IntN(40))
		for i := range vs {
			vs[i] = strings.Repeat("x", 1+r.IntN(sizes[r.IntN(len(sizes))]))
		}
		n, err := l.TryPut(vs...)
		for _, v := range vs[:n] {
			bytes += len(v)
		}
		if err != nil && !errors.Is(err, ringbuf.ErrFull) {
			t.Fatalf("after %d bytes: %v", bytes, err)
		}
		if st := s.Stats(); st.Bytes > held*9/10 || err != nil {
			drained := 0
			for i := range lanes {
				lease, err := s.Lane(strconv.Itoa((lane + i) % lanes)).TryLease(make([]string, 30))
				if err == nil {
					err = lease.Commit(lease.Len())
				}
				if err != nil && !errors.Is(err, ringbuf.ErrEmpty) {
					t.Fatal(err)
				}
				drained += lease.Len()
			}
			flushed(t, s)
			if st := s.Stats(); drained == 0 {
				t.Fatalf("nothing is held, and %d bytes are counted", st.Bytes)
			}
		}
	}
	info, err := os.Stat(filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("file of %d MiB for %d", info.Size()>>20, held>>20)
	if info.Size() > 2*held+growMax {
		t.Errorf("the file has %d bytes, want at most %d", info.Size(), 2*held+growMax)
	}
}

// A page that cannot be read while a transaction is under way fails the spill, and Close
// ends all the same.
func TestCloseAfterAFaultInAWrite(t *testing.T) {
	dir := fastTemp(t)
	s := open(t, Config{Dir: dir})
	put(t, s.Lane("a"), numbered(0, 50, 900)...)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, Config{Dir: dir})
	if err := os.Truncate(filepath.Join(dir, fileName), 2*pageSize); err != nil { // what the tree begins with is not there
		t.Fatal(err)
	}
	if _, err := s.Lane("a").TryPut("one more"); !errors.Is(err, ErrFailed) {
		t.Errorf("%v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Close() }()
	select {
	case err := <-ended:
		t.Log(err)
	case <-time.After(30 * time.Second):
		t.Fatal("Close does not end")
	}
	again, _, err := Open(Config{Dir: dir}, text{}) // which finds what it can
	if errors.Is(err, ErrLocked) {
		t.Error(err)
	}
	if err == nil {
		_ = again.Close()
	}
}
