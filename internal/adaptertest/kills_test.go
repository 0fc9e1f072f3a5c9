// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package adaptertest

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) { Main(m, Suite{Parallel: 4, Child: consumeLog}) }

// log is a broker of files: how many messages there are, and how many of them
// its one consumer has settled.
type log struct{ dir string }

func (l log) get(name string) (int, error) {
	text, err := os.ReadFile(filepath.Join(l.dir, name))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(text))
}

// set is atomic, kill or no kill.
func (l log) set(name string, n int) error {
	path := filepath.Join(l.dir, name)
	if err := os.WriteFile(path+".new", []byte(strconv.Itoa(n)), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// consumeLog settles a message after it was handled; or, as the mutant, all that
// there are before it handles them.
func consumeLog(c *Child) error {
	l := log{c.Args[0]}
	for ; ; time.Sleep(time.Millisecond) {
		end, err := l.get("end")
		if err != nil {
			return err
		}
		next, err := l.get("settled")
		if err != nil {
			return err
		}
		if c.Mutant {
			if err := l.set("settled", end); err != nil {
				return err
			}
		}
		for ; next < end; next++ {
			if c.Handle([]byte(strconv.Itoa(next))) != nil {
				break
			}
			if c.Mutant {
				continue
			}
			if err := l.set("settled", next+1); err != nil {
				return err
			}
		}
	}
}

func logKills(t *testing.T) Kills {
	l := log{t.TempDir()}
	set := func(name string, n int) {
		if err := l.set(name, n); err != nil {
			t.Fatal(err)
		}
	}
	set("end", 0)
	set("settled", 0)
	return Kills{
		Kills: 3, Each: 400, Twice: 1, Lanes: 1, Args: []string{l.dir},
		Publish: func(_, to int) { set("end", to) },
		Left: func() int {
			end, err1 := l.get("end")
			settled, err2 := l.get("settled")
			if err1 != nil || err2 != nil {
				t.Fatal(err1, err2)
			}
			return end - settled
		},
	}
}

func TestKillsOfAConsumer(t *testing.T) {
	t.Parallel()
	logKills(t).LosesNothing(t)
}

func TestKillsOfAMutant(t *testing.T) {
	t.Parallel()
	logKills(t).CatchesMutant(t)
}

func TestAudit(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		ledger string
		lanes  int
		want   books
	}{
		{"nothing", "", 2, books{lost: 6}},
		{"all", "0 1 2 3 4 5", 1, books{}},
		{"lanes are apart", "1 3 0 5 2 4", 2, books{}},
		{"a swap", "0 2 1 3 4 5", 1, books{disorder: 2}},
		{"a swap without lanes", "0 2 1 3 4 5", 0, books{}},
		{"a gap", "0 1 3 4 5", 1, books{lost: 1, disorder: 1}},
		{"again", "0 1 2 1 2 3 4 5 5", 1, books{twice: 3}},
		{"the first again", "0 1 0 2 3 4 5", 2, books{twice: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l := newLedger(t, 6, c.lanes)
			text := "failed 5\n"
			for i := range strings.FieldsSeq(c.ledger) {
				text += done + " " + i + "\n"
			}
			text += "do" // being written
			if err := os.WriteFile(l.path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if got := l.audit(t); got != c.want {
				t.Errorf("%s: %v, want %v", c.ledger, got, c.want)
			}
		})
	}
}
