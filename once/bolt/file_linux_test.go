// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package bolt_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stormguard-mq/stormguard/once"
	"github.com/stormguard-mq/stormguard/once/bolt"
)

// unmount waits while it is busy: a child that another test starts has every open file until
// its exec.
func unmount(at string) (err error) {
	for begun := time.Now(); time.Since(begun) < time.Minute; time.Sleep(10 * time.Millisecond) {
		if err = syscall.Unmount(at, 0); !errors.Is(err, syscall.EBUSY) {
			break
		}
	}
	return err
}

// A full disk: no effect begins, and none is repeated when there is room again.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=512k"); err != nil {
		t.Skipf("LEFT OUT: a full disk; turn on by running as root, with the right to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unmount(dir); err != nil {
			t.Error(err)
		}
	})
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 300<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, filepath.Join(dir, "once.db"), bolt.Config{})
	t.Cleanup(func() { s.Close() }) // before the disk goes
	r := runner(t, s, once.Config{})
	calls := make(map[string]int)
	effect := func(key string) func(context.Context) ([]byte, error) {
		return func(context.Context) ([]byte, error) {
			calls[key]++
			return make([]byte, 8<<10), nil
		}
	}
	full := ""
	for i := 0; full == ""; i++ {
		key := fmt.Sprint(i)
		_, err := r.Result(t.Context(), key, effect(key))
		if err == nil {
			continue
		}
		if full = key; !errors.Is(err, once.ErrUnmarked) || !errors.Is(err, syscall.ENOSPC) || errors.Is(err, bolt.ErrBroken) {
			t.Fatal(err)
		}
	}
	// A try may find pages that the one before has left, so it may succeed. If not, no
	// effect has begun, or it is one more without its mark.
	for range 3 {
		for _, key := range []string{"another", full} {
			before := calls[key]
			_, err := r.Result(t.Context(), key, effect(key))
			if err != nil && !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			if err != nil && !errors.Is(err, once.ErrUnmarked) && calls[key] != before {
				t.Errorf("the effect of %s began although no mark could be written", key)
			}
		}
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"another", full, "0"} {
		if b, err := r.Result(t.Context(), key, effect(key)); len(b) != 8<<10 || err != nil {
			t.Fatal(key, len(b), err)
		}
		if calls[key] != 1 {
			t.Errorf("the effect of %s ran %d times, want once", key, calls[key])
		}
	}
}

// A file that a full disk left half made is no obstacle when there is room again.
func TestFullDiskAtTheStart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=512k"); err != nil {
		t.Skipf("LEFT OUT: a full disk; turn on by running as root, with the right to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unmount(dir); err != nil {
			t.Error(err)
		}
	})
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 504<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "once.db")
	for range 2 {
		if s, err := bolt.Open(path, bolt.Config{}); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("a file of four pages on a disk with room for two: %v, %v", s, err)
		}
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	s, err := bolt.Open(path, bolt.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// A write that fails otherwise: the store takes nothing more until it is opened anew.
func TestBroken(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "once.db")
	s := open(t, path, bolt.Config{})
	r := runner(t, s, once.Config{})
	ran(t, r, "before")
	// The file can be read only from here on: writes fail with EBADF.
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	readOnly, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer readOnly.Close()
	for _, fd := range fds {
		var n int
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err != nil || to != path {
			continue
		}
		if _, err := fmt.Sscan(fd.Name(), &n); err != nil {
			t.Fatal(err)
		}
		if n == int(readOnly.Fd()) {
			continue
		}
		if err := syscall.Dup3(int(readOnly.Fd()), n, syscall.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
	}
	calls := 0
	effect := func(context.Context) error { calls++; return nil }
	if err := r.Do(t.Context(), "a", effect); !errors.Is(err, once.ErrUnmarked) || !errors.Is(err, bolt.ErrBroken) {
		t.Fatal(err)
	}
	for _, key := range []string{"a", "b", "before"} {
		if err := r.Do(t.Context(), key, effect); !errors.Is(err, bolt.ErrBroken) {
			t.Fatal(key, err)
		}
		if err := runner(t, s, once.Config{}).Do(t.Context(), key, effect); !errors.Is(err, bolt.ErrBroken) {
			t.Fatal(key, err)
		}
	}
	if calls != 1 {
		t.Errorf("%d effects ran, want the first only", calls)
	}
	if err := s.Close(); err != nil {
		t.Log(err)
	}
	r = runner(t, open(t, path, bolt.Config{}), once.Config{})
	if ran(t, r, "before") || !ran(t, r, "a") {
		t.Error("opened anew, it has not what was there before")
	}
}

// A power cut loses no mark of a Do that has returned: each round marks, cuts the file
// system off from its disk without a flush, and looks at what the disk has.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	image, at := filepath.Join(dir, "image"), filepath.Join(dir, "at")
	do := func(name string, args ...string) error {
		out, err := exec.CommandContext(context.WithoutCancel(t.Context()), name, args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", name, err, out)
		}
		return nil
	}
	mount := func() error { return do("mount", "-t", "ext4", "-o", "loop", image, at) }
	err := errors.Join(os.Mkdir(at, 0o700), os.WriteFile(image, nil, 0o600), os.Truncate(image, 32<<20))
	if err == nil {
		err = do("mkfs.ext4", "-q", image)
	}
	if err == nil {
		err = mount()
	}
	if err != nil {
		t.Skipf("LEFT OUT: power cuts; turn on by running as root, with ext4 and loop devices: %v", err)
	}
	mounted := true
	t.Cleanup(func() { // after the store is closed
		if !mounted {
			return
		}
		if err := unmount(at); err != nil {
			t.Error(err)
		}
	})
	rounds := 6
	if os.Getenv("STORMGUARD_FULL") == "1" {
		rounds = 500
	}
	const marks = 5
	for round := range rounds {
		s := open(t, filepath.Join(at, "once.db"), bolt.Config{})
		r := runner(t, s, once.Config{})
		for i := range round * marks {
			if i < (round-1)*marks && round > 3 && i%17 != 0 {
				continue // a sample of the older ones
			}
			if ran(t, r, fmt.Sprint(i)) {
				t.Fatalf("after cut %d, mark %d is not on the disk", round, i)
			}
		}
		for i := range marks {
			if !ran(t, r, fmt.Sprint(round*marks+i)) {
				t.Fatalf("round %d: mark %d was there before", round, i)
			}
		}
		root, err := os.Open(at)
		if err != nil {
			t.Fatal(err)
		}
		noFlush := uint32(2)
		_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, root.Fd(), 0x8004587d, uintptr(unsafe.Pointer(&noFlush))) // EXT4_IOC_SHUTDOWN
		if errno != 0 {
			t.Fatal(errno)
		}
		_ = errors.Join(root.Close(), s.Close())
		mounted = false
		if err := errors.Join(unmount(at), mount()); err != nil {
			t.Fatal(err)
		}
		mounted = true
	}
}
