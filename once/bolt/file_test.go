// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package bolt_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/bbolt"

	"github.com/stormguard-mq/stormguard/once"
	"github.com/stormguard-mq/stormguard/once/bolt"
)

func runner(t testing.TB, s once.Store, cfg once.Config) *once.Runner {
	t.Helper()
	r, err := once.New(s, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// ran tells whether Do runs the effect of a key.
func ran(t testing.TB, r *once.Runner, key string) (ran bool) {
	t.Helper()
	if err := r.Do(context.Background(), key, func(context.Context) error { ran = true; return nil }); err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	return ran
}

func kept(t testing.TB, s once.Store) (n int) {
	t.Helper()
	for _, err := range s.List(context.Background(), 'k') {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	return n
}

func TestConfig(t *testing.T) {
	t.Parallel()
	_, err := bolt.Open(filepath.Join(t.TempDir(), "x"), bolt.Config{Age: time.Millisecond, Count: -1})
	if err == nil || strings.Count(err.Error(), "Config.") != 2 {
		t.Errorf("%v: want both problems", err)
	}
	if _, err := bolt.Open(filepath.Join(t.TempDir(), "none", "x"), bolt.Config{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a directory that is not there: %v", err)
	}
}

// A mark is there for Age and is forgotten after it, over restarts.
func TestAge(t *testing.T) {
	path := filepath.Join(t.TempDir(), "once.db")
	synctest.Test(t, func(t *testing.T) {
		s := open(t, path, bolt.Config{Age: 24 * time.Hour})
		r := runner(t, s, once.Config{})
		for i := range 100 {
			if !ran(t, r, fmt.Sprint(i)) {
				t.Errorf("%d did not run", i)
			}
			for k := max(0, i-24); k < i; k++ {
				if ran(t, r, fmt.Sprint(k)) {
					t.Fatalf("after %d h, the effect of hour %d ran again", i, k)
				}
			}
			if n := kept(t, s); n > 25 {
				t.Fatalf("after %d h there are %d marks, want 25 at most", i, n)
			}
			if i%10 == 9 {
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				s = open(t, path, bolt.Config{Age: 24 * time.Hour})
				r = runner(t, s, once.Config{})
			}
			time.Sleep(time.Hour)
		}
		if !ran(t, r, "0") {
			t.Error("the mark of hour 0 is there after 100 h")
		}
	})
}

// Above Count the oldest are forgotten, also if the clock was set back meanwhile: each
// bubble begins at the same time.
func TestCount(t *testing.T) {
	path := filepath.Join(t.TempDir(), "once.db")
	const most = 10
	for round := range 3 {
		synctest.Test(t, func(t *testing.T) {
			s := open(t, path, bolt.Config{Count: most})
			r := runner(t, s, once.Config{})
			for i := range 100 {
				ran(t, r, fmt.Sprint(round, "/", i))
				if n := kept(t, s); n > most {
					t.Fatalf("%d marks, want %d at most", n, most)
				}
				for k := max(0, i-most+1); k <= i; k++ {
					if ran(t, r, fmt.Sprint(round, "/", k)) {
						t.Fatalf("round %d: mark %d is forgotten after %d", round, k, i)
					}
				}
				time.Sleep(time.Minute)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		s := open(t, path, bolt.Config{Count: 3})
		if ran(t, runner(t, s, once.Config{}), "one more"); kept(t, s) != 3 {
			t.Errorf("%d marks with a smaller Count, want 3", kept(t, s))
		}
	})
}

// Effects in doubt are never forgotten.
func TestDoubtStays(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "once.db")
	s := open(t, path, bolt.Config{Count: 1})
	if _, _, err := s.Claim(t.Context(), "kdoubtful", once.Ask{Record: true}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, path, bolt.Config{Count: 1})
	r := runner(t, s, once.Config{InDoubt: once.Refuse})
	for i := range 10 {
		ran(t, r, fmt.Sprint(i))
	}
	if err := r.Do(t.Context(), "doubtful", nil); !errors.Is(err, once.ErrInDoubt) {
		t.Error(err)
	}
	if n := kept(t, s); n != 2 {
		t.Errorf("%d marks, want that in doubt and the newest", n)
	}
}

func TestLocked(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "once.db")
	s := open(t, path, bolt.Config{})
	if _, err := bolt.Open(path, bolt.Config{}); !errors.Is(err, bolt.ErrLocked) || !strings.Contains(err.Error(), path) {
		t.Errorf("a second one: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := runner(t, s, once.Config{}).Do(t.Context(), "a", nil); !errors.Is(err, bolt.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	open(t, path, bolt.Config{})
}

// Marks that are written at the same time share a commit. A caller may give up meanwhile.
func TestGroupCommit(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "once.db"), bolt.Config{})
	r := runner(t, s, once.Config{})
	before := s.Commits()
	proceed := s.Stall()
	var wg sync.WaitGroup
	const marks = 50
	for i := range marks {
		wg.Go(func() { ran(t, r, fmt.Sprint(i)) })
	}
	for s.Queued() < marks {
		runtime.Gosched()
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	claim, _, err := s.Claim(t.Context(), "x", once.Ask{})
	if err != nil {
		t.Fatal(err)
	}
	if err := claim.Finish(ended, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("a commit that hangs: %v", err)
	}
	proceed()
	wg.Wait()
	if n := s.Commits() - before; n != 1 {
		t.Errorf("%d commits for %d marks, want 1", n, marks)
	}
	if err := claim.Finish(t.Context(), nil); err != nil {
		t.Error(err)
	}
}

// A delivery whose context ends while its beginning is written has begun nothing: its key is
// not in doubt, whether a commit has the beginning by then or not.
func TestCancelledBeginning(t *testing.T) {
	t.Parallel()
	for _, taken := range []bool{false, true} {
		s := open(t, filepath.Join(t.TempDir(), "once.db"), bolt.Config{})
		r := runner(t, s, once.Config{InDoubt: once.Refuse})
		proceed := s.Stall()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Do(ctx, "a", func(context.Context) error { t.Error("it began"); return nil }) }()
		for s.Queued() < 1 {
			runtime.Gosched()
		}
		end := func() {}
		if taken {
			end = s.Begin()
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("taken %v: %v", taken, err)
		}
		end()
		proceed()
		ran(t, r, "b")
		ran(t, r, "a")
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A release that gives up while the disk stalls removes the record of no later attempt,
// whether a commit has the removal by then or not.
func TestReleaseGivesUp(t *testing.T) {
	dir := t.TempDir()
	for _, taken := range []bool{false, true} {
		path := filepath.Join(dir, fmt.Sprint("once.db.", taken))
		synctest.Test(t, func(t *testing.T) {
			s := open(t, path, bolt.Config{})
			r, err := once.New(s, once.Config{}, once.WithLookup(func(context.Context, string) (bool, error) { return false, nil }))
			if err != nil {
				t.Fatal(err)
			}
			proceed, end := func() {}, func() {}
			ended := make(chan error, 1)
			failed := errors.New("no answer")
			go func() {
				ended <- r.Do(t.Context(), "a", func(context.Context) error {
					proceed = s.Stall()
					return failed
				})
			}()
			synctest.Wait() // until it is about to be released
			if taken {
				end = s.Begin()
			}
			if err := <-ended; !errors.Is(err, failed) || !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("taken %v: %v", taken, err)
			}
			goOn := make(chan struct{})
			go func() {
				ended <- r.Do(t.Context(), "a", func(context.Context) error { <-goOn; return nil })
			}()
			synctest.Wait()
			end()
			proceed()
			synctest.Wait() // until the second attempt is in its effect
			ran(t, r, "b")
			if keys, err := r.Doubtful(t.Context()); fmt.Sprint(keys) != "[a]" || err != nil {
				t.Errorf("taken %v: in doubt or under way are %v, %v: want a", taken, keys, err)
			}
			close(goOn)
			if err := <-ended; err != nil || ran(t, r, "a") {
				t.Errorf("taken %v: %v", taken, err)
			}
		})
	}
}

// edit changes the file without the store.
func edit(t *testing.T, path string, f func(marks *bbolt.Bucket) error) {
	t.Helper()
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Update(func(tx *bbolt.Tx) error { return f(tx.Bucket([]byte("marks"))) }), db.Close()); err != nil {
		t.Fatal(err)
	}
}

// A mark that is damaged is named, its effect does not run, and others do.
func TestDamaged(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "once.db")
	s := open(t, path, bolt.Config{Count: 3})
	r := runner(t, s, once.Config{})
	for _, key := range []string{"a", "x", "b"} {
		ran(t, r, key)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	edit(t, path, func(marks *bbolt.Bucket) error {
		for _, key := range []string{"ka", "kx"} {
			b := append([]byte(nil), marks.Get([]byte(key))...)
			b[5] ^= 1
			if err := marks.Put([]byte(key), b); err != nil {
				return err
			}
		}
		return nil
	})
	s = open(t, path, bolt.Config{Count: 3})
	r = runner(t, s, once.Config{})
	if err := r.Do(t.Context(), "a", nil); !errors.Is(err, once.ErrInDoubt) || !strings.Contains(err.Error(), "checksum") {
		t.Fatal(err)
	}
	doubtful := func(want string) {
		t.Helper()
		if keys, err := r.Doubtful(t.Context()); fmt.Sprint(keys) != want || err != nil {
			t.Fatalf("%v, %v; want %s", keys, err, want)
		}
	}
	doubtful("[a x]")
	if ran(t, r, "b") {
		t.Error("a mark is missing beside those that are damaged")
	}
	if err := r.Settle(t.Context(), "a", true); err != nil {
		t.Fatal(err)
	}
	doubtful("[x]")
	ran(t, r, "c")
	if ran(t, r, "a") {
		t.Error("the new mark is forgotten with the damaged one, or it ran although a person said that it had happened")
	}
	ran(t, r, "d")
	doubtful("[x]") // it waits for a person, however old
}

// A file that was cut: an error or all marks, and no crash.
func TestFileCut(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "once.db")
	s := open(t, path, bolt.Config{})
	r := runner(t, s, once.Config{})
	const marks = 20
	for i := range marks {
		ran(t, r, fmt.Sprint(i))
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var refused, lost int
	try := func(what string, b []byte) {
		t.Helper()
		path := filepath.Join(dir, what) // bbolt leaves some files that it refuses mapped, and so locked
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := bolt.Open(path, bolt.Config{})
		if err != nil {
			refused++
			return
		}
		defer func() {
			if err := s.Close(); err != nil {
				t.Log(what, err)
			}
		}()
		r := runner(t, s, once.Config{})
		for i := range marks {
			again := false
			err := r.Do(t.Context(), fmt.Sprint(i), func(context.Context) error { again = true; return nil })
			if again && err == nil {
				lost++
				t.Logf("%s: mark %d is not there", what, i)
			}
		}
		_, _ = r.Doubtful(t.Context())
	}
	cuts := 0
	for n := 512; n < len(whole); n += 512 {
		try(fmt.Sprint("cut to ", n), whole[:n])
		cuts++
	}
	if refused < cuts/2 {
		t.Errorf("%d of %d cut files are refused", refused, cuts)
	}
	if lost > 0 {
		t.Errorf("%d marks of cut files are missing without a word", lost)
	}
	t.Logf("%d of %d cut files refused", refused, cuts)
}

// A key that is written again takes one place, and is as old as its newest mark.
func TestRewritten(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "once.db"), bolt.Config{Count: 3})
	r := runner(t, s, once.Config{})
	ran(t, r, "a")
	ran(t, r, "b")
	for range 10 {
		claim, _, err := s.Claim(t.Context(), "kentity", once.Ask{Over: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := claim.Finish(t.Context(), []byte("state")); err != nil {
			t.Fatal(err)
		}
	}
	if ran(t, r, "a") || ran(t, r, "b") {
		t.Error("a mark is forgotten for one that was written again")
	}
	ran(t, r, "c")
	if _, done, err := s.Get(t.Context(), "kentity"); !done || err != nil || !ran(t, r, "a") {
		t.Errorf("%t, %v: want the oldest to be forgotten, which is a", done, err)
	}
}
