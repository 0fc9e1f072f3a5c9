// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// killChild puts, leases and commits for ever, and says on stdout what it is about to do and
// what is done.
func killChild() error {
	var dir string
	seq := map[string]int{}
	var a, b int
	if _, err := fmt.Sscan(strings.TrimPrefix(os.Getenv(childEnv), "kill "), &dir, &a, &b); err != nil {
		return err
	}
	seq["a"], seq["b"] = a, b
	s, _, err := Open(Config{Dir: dir}, text{})
	if err != nil {
		return err
	}
	for {
		for _, name := range []string{"a", "b"} {
			l, n := s.Lane(name), 1+rand.IntN(20)
			fmt.Println("try", name, seq[name]+n)
			if _, err := l.Put(context.Background(), numbered(seq[name], seq[name]+n, 200)...); err != nil {
				return err
			}
			seq[name] += n
			fmt.Println("put", name, seq[name])
			lease, err := l.TryLease(make([]string, 15))
			if errors.Is(err, ringbuf.ErrEmpty) {
				continue
			}
			if err != nil {
				return err
			}
			fmt.Println("commit", name, lease.Len())
			if err := lease.Commit(lease.Len()); err != nil {
				return err
			}
			if rand.IntN(3) == 0 {
				if err := s.Flush(context.Background()); err != nil {
					return err
				}
				fmt.Println("flush", name, 0)
			}
		}
	}
}

// kill -9 at any moment: what was confirmed is there, in order, and what was flushed does not
// come again. STORMGUARD_FULL=1 kills 500 times.
func TestKill(t *testing.T) {
	kills := 25
	if long {
		kills = 500
	}
	dir := filepath.Join(t.TempDir(), "spill")
	next, base := map[string]int{}, map[string]int{} // base is the number of the oldest message
	for range kills {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=kill %s %d %d", childEnv, dir, next["a"], next["b"]))
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		tried, confirmed, committed, flushed := map[string]int{}, map[string]int{}, map[string]int{}, map[string]int{}
		for name, n := range next {
			tried[name], confirmed[name] = n, n
		}
		left := 1 + rand.IntN(60)
		for lines := bufio.NewScanner(out); lines.Scan(); left-- {
			var what, name string
			var n int
			if _, err := fmt.Sscan(lines.Text(), &what, &name, &n); err != nil {
				t.Fatal(err)
			}
			switch what {
			case "try":
				tried[name] = n
			case "put":
				confirmed[name] = n
			case "commit":
				committed[name] += n
			case "flush":
				maps.Copy(flushed, committed)
			}
			if left == 0 {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := cmd.Wait(); err == nil || left > 0 {
			t.Fatalf("the child ended by itself: %v", err)
		}
		s := open(t, Config{Dir: dir})
		for _, name := range []string{"a", "b"} {
			got, err := heldBy(s.Lane(name))
			if err == nil {
				err = inOrder(got, base[name]+flushed[name], base[name]+committed[name], confirmed[name], 200)
			}
			if err != nil {
				t.Fatalf("lane %s: %v", name, err)
			}
			if len(got) == 0 {
				next[name] = tried[name]
				base[name] = tried[name]
				continue
			}
			var first int
			if _, err := fmt.Sscanf(got[0], "%d,", &first); err != nil {
				t.Fatal(err)
			}
			base[name], next[name] = first, first+len(got)
			if next[name] > tried[name] {
				t.Fatalf("lane %s: %d messages were put, %d were tried", name, next[name], tried[name])
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
