// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// mountOwn mounts a small file system of its own, of so many MiB.
func mountOwn(t *testing.T, kind string, size int) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a small file system")
	}
	dir := t.TempDir()
	at := filepath.Join(dir, "mnt")
	if err := os.Mkdir(at, 0o700); err != nil {
		t.Fatal(err)
	}
	run := func(name string, args ...string) {
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Skipf("needs a machine where root may mount %s: %s: %v: %s", kind, name, err, out)
		}
	}
	switch kind {
	case "tmpfs":
		run("mount", "-t", "tmpfs", "-o", fmt.Sprintf("size=%dm", size), "spill-test", at)
	default:
		image := filepath.Join(dir, "image")
		f, err := os.Create(image)
		if err == nil {
			err = errors.Join(f.Truncate(int64(size)<<20), f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		run("mkfs."+kind, "-q", image)
		run("mount", "-o", "loop", image, at)
	}
	t.Cleanup(func() {
		var err error
		for begun := time.Now(); time.Since(begun) < time.Minute; time.Sleep(10 * time.Millisecond) {
			// A child that another test starts has every open file until its exec.
			if err = syscall.Unmount(at, 0); !errors.Is(err, syscall.EBUSY) {
				break
			}
		}
		if err != nil {
			t.Error(err)
		}
	})
	return at
}

// A disk that is full to the last block: the spill says so and keeps what it has, all of it can
// be drained and its position synced, and the room that this makes takes in as much again.
func TestDiskFull(t *testing.T) {
	for _, kind := range []string{"ext4", "tmpfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := mountOwn(t, kind, 8)
			s := open(t, Config{Dir: filepath.Join(dir, "spill"), MaxBytes: 256 << 20})
			l := s.Lane("a")
			seq := 0
			fill := func() {
				for {
					n, err := l.TryPut(numbered(seq, seq+50, 900)...)
					if seq += n; err == nil {
						continue
					}
					if !errors.Is(err, ErrNoSpace) {
						t.Fatal(err)
					}
					return
				}
			}
			fill()
			if st := s.Stats(); st.State != NoSpace || !errors.Is(st.Err, syscall.ENOSPC) || st.Count != seq || seq < 2000 {
				t.Fatalf("%+v, %d messages were put", st, seq)
			}
			fillDisk(t, dir)
			first := 0
			for round := range 2 {
				held := seq - first
				dst := make([]string, 256)
				for l.Len() > 0 {
					lease, err := l.TryLease(dst)
					if err != nil || !slices.Equal(dst[:lease.Len()], numbered(first, first+lease.Len(), 900)) {
						t.Fatalf("at %d: %d messages, %v", first, lease.Len(), err)
					}
					if err := lease.Commit(lease.Len()); err != nil {
						t.Fatal(err)
					}
					first += lease.Len()
					if err := s.Flush(t.Context()); err != nil {
						t.Fatalf("at %d: %v", first, err)
					}
				}
				fill()
				t.Logf("round %d: %d messages were drained from a full disk, and %d taken in", round, held, seq-first)
				if took := seq - first; took < held*9/10 {
					t.Errorf("took in %d", took)
				}
			}
			// The next start finds a full disk too.
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = open(t, Config{Dir: filepath.Join(dir, "spill"), MaxBytes: 256 << 20})
			if got := drain(t, s.Lane("a")); !slices.Equal(got, numbered(first, seq, 900)) {
				t.Errorf("%d messages, want %d to %d", len(got), first, seq)
			}
			flushed(t, s)
			s.Close()
		})
	}
}

// fillDisk takes the last block of the disk.
func fillDisk(t *testing.T, dir string) {
	t.Helper()
	rest, err := os.Create(filepath.Join(dir, "rest"))
	if err != nil {
		t.Fatal(err)
	}
	for size := 1 << 20; size > 0; {
		if _, err := rest.Write(make([]byte, size)); err != nil {
			size /= 2
		}
	}
	if err := rest.Close(); err != nil && !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
}

// On a full disk positions are synced all the same, of any lane and message, whatever the drains
// leave of the pages: also if lanes and sizes are mixed and messages go one by one. Small messages
// find as much room again.
func TestDiskFullOfLanes(t *testing.T) {
	t.Run("small", func(t *testing.T) { testDiskFullOfLanes(t, 10, true) })
	t.Run("mixed", func(t *testing.T) { testDiskFullOfLanes(t, 13, false) })
}

func testDiskFullOfLanes(t *testing.T, bits int, again bool) {
	dir := mountOwn(t, "tmpfs", 8)
	s := open(t, Config{Dir: filepath.Join(dir, "spill"), MaxBytes: 256 << 20})
	r := rand.New(rand.NewPCG(3, 4))
	var lanes [9]struct{ put, got int }
	name := func(i int) string { return strings.Repeat("x", 28*i) + strconv.Itoa(i) }
	fill := func() {
		for {
			i := r.IntN(len(lanes))
			vs := numbered(lanes[i].put, lanes[i].put+1+r.IntN(20), 10+r.IntN(1<<(6+r.IntN(bits-5))))
			n, err := s.Lane(name(i)).TryPut(vs...)
			if lanes[i].put += n; errors.Is(err, ErrNoSpace) {
				return
			} else if err != nil {
				t.Fatal(err)
			}
		}
	}
	fill()
	fillDisk(t, dir)
	dst := make([]string, 20)
	for round := range 4 {
		held := s.Stats().Count
		for s.Stats().Count > round*held/4 {
			i := r.IntN(len(lanes))
			lease, err := s.Lane(name(i)).TryLease(dst[:1+r.IntN(len(dst))])
			if errors.Is(err, ringbuf.ErrEmpty) {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range dst[:lease.Len()] {
				if want := numbered(lanes[i].got, lanes[i].got+1, 0)[0]; !strings.HasPrefix(v, want) {
					t.Fatalf("lane %d: %.20q, want %q", i, v, want)
				}
				lanes[i].got++
			}
			if err := lease.Commit(lease.Len()); err != nil {
				t.Fatal(err)
			}
			if err := s.Flush(t.Context()); err != nil {
				t.Fatalf("round %d, %d messages are held: %v", round, s.Stats().Count, err)
			}
		}
		fill()
		now := s.Stats().Count
		t.Logf("round %d: %d messages were held, now %d", round, held, now)
		if again && now < held*9/10 {
			t.Errorf("took in %d of %d", now, held)
		}
	}
}

// A directory that has become read-only, as Linux makes of a file system with errors: what is
// there can be drained, and nothing is taken in.
func TestReadOnly(t *testing.T) {
	dir := mountOwn(t, "ext4", 16)
	s := open(t, Config{Dir: filepath.Join(dir, "spill")})
	put(t, s.Lane("a"), "1", "2")
	s.Close()
	if err := syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	s = open(t, Config{Dir: filepath.Join(dir, "spill")})
	if _, err := s.Lane("a").TryPut("3"); !errors.Is(err, ErrFailed) || !errors.Is(err, syscall.EROFS) {
		t.Error(err)
	}
	if st := s.Stats(); st.State != Failed || !errors.Is(st.Err, syscall.EROFS) {
		t.Errorf("%+v", st)
	}
	if got := drain(t, s.Lane("a")); !slices.Equal(got, []string{"1", "2"}) {
		t.Error(got)
	}
	s.Close()
	if _, _, err := Open(Config{Dir: filepath.Join(dir, "other")}, text{}); err == nil {
		t.Error("a spill was made on a disk that is read-only")
	}
}
