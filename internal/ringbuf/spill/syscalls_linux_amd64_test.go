// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// The kernel hands this process's own system calls on files to this process, which lets
// them happen, makes them fail, and writes down what they did: so the real store and the
// real bbolt meet a disk that fails anywhere.

const (
	sysSeccomp     = 317
	recvNotify     = 0xC0502100
	sendNotify     = 0xC0182101
	flagContinue   = 1
	auditArchAMD64 = 0xC000003E
)

// watched are the calls that write, sync or name.
var watched = []uint32{
	syscall.SYS_PWRITE64, syscall.SYS_FSYNC, syscall.SYS_FDATASYNC, syscall.SYS_FTRUNCATE,
	syscall.SYS_RENAMEAT, syscall.SYS_LINKAT, syscall.SYS_MKDIRAT, 316, // renameat2
}

type notification struct {
	id         uint64
	pid, flags uint32
	nr         int32
	arch       uint32
	ip         uint64
	args       [6]uint64
}

type response struct {
	id    uint64
	val   int64
	error int32
	flags uint32
}

// a tap is what decides over system calls. It may be changed between them.
type tap struct {
	decide atomic.Pointer[func(n *notification) syscall.Errno]
}

// openTap installs the filter for all threads of this process, for good.
func openTap() (*tap, error) {
	type filter struct {
		code   uint16
		jt, jf uint8
		k      uint32
	}
	prog := []filter{{0x20, 0, 0, 4}, {0x15, 1, 0, auditArchAMD64}, {0x06, 0, 0, 0x7fff0000}, {0x20, 0, 0, 0}}
	for i, nr := range watched {
		prog = append(prog, filter{0x15, uint8(len(watched) - i), 0, nr})
	}
	prog = append(prog, filter{0x06, 0, 0, 0x7fff0000}, filter{0x06, 0, 0, 0x7fc00000})
	fprog := struct {
		n      uint16
		filter *filter
	}{uint16(len(prog)), &prog[0]}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_PRCTL, 38, 1, 0, 0, 0, 0); errno != 0 {
		return nil, fmt.Errorf("no_new_privs: %w", errno)
	}
	fd, _, errno := syscall.RawSyscall(sysSeccomp, 1, 1|8|16, uintptr(unsafe.Pointer(&fprog)))
	if errno != 0 {
		return nil, fmt.Errorf("seccomp: %w", errno)
	}
	t := &tap{}
	go func() {
		for {
			var n notification
			if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, recvNotify, uintptr(unsafe.Pointer(&n))); errno != 0 {
				continue // the thread has gone, or a signal came
			}
			r := response{id: n.id, flags: flagContinue}
			if f := t.decide.Load(); f != nil {
				if errno := (*f)(&n); errno != 0 {
					r.error, r.flags = -int32(errno), 0
				}
			}
			_, _, _ = syscall.Syscall(syscall.SYS_IOCTL, fd, sendNotify, uintptr(unsafe.Pointer(&r)))
		}
	}()
	return t, nil
}

func (t *tap) set(f func(n *notification) syscall.Errno) {
	if f == nil {
		t.decide.Store(nil)
		return
	}
	t.decide.Store(&f)
}

// An event is what the disk was told, or the program.
type event struct {
	Kind byte   // 'w'rite, 't'runcate, 's'ync, 'p'ut confirmed, 'c'ommitted, 'f'lushed
	Off  int64  // or the size; or how many messages of the lane
	Data []byte // or the lane
}

// record writes down what happens to the file with the given path.
func (t *tap) record(path string, add func(event)) error {
	mem, err := os.Open("/proc/self/mem")
	if err != nil {
		return err
	}
	t.set(func(n *notification) syscall.Errno {
		switch uint32(n.nr) {
		case syscall.SYS_PWRITE64, syscall.SYS_FSYNC, syscall.SYS_FDATASYNC, syscall.SYS_FTRUNCATE:
		default:
			return 0
		}
		if name, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", n.args[0])); name != path {
			return 0
		}
		switch uint32(n.nr) {
		case syscall.SYS_PWRITE64:
			data := make([]byte, n.args[2])
			if _, err := mem.ReadAt(data, int64(n.args[1])); err != nil {
				return syscall.EFAULT
			}
			add(event{'w', int64(n.args[3]), data})
		case syscall.SYS_FTRUNCATE:
			add(event{'t', int64(n.args[1]), nil})
		default:
			add(event{'s', 0, nil}) // what was written before; the call has not returned yet
		}
		return 0
	})
	return nil
}

// script is what a program does with a spill; step is called after each of its steps with
// what is now certain. It goes on after errors, as a program would.
func script(s *Spill[string], seq map[string]int, sized int, step func(kind byte, lane string, n int)) (errs []error) {
	fail := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	committed := map[string]int{}
	for round := range 4 {
		for _, name := range []string{"a", "b"} {
			l := s.Lane(name)
			n, err := l.TryPut(numbered(seq[name], seq[name]+5+round, sized)...)
			if fail(err); n > 0 {
				seq[name] += n
				step('p', name, seq[name])
			}
			if round%2 == 0 {
				continue
			}
			dst := make([]string, 6)
			lease, err := l.TryLease(dst)
			if !errors.Is(err, ringbuf.ErrEmpty) {
				fail(err)
			}
			if err == nil {
				fail(lease.Commit(lease.Len() - 1))
				committed[name] += lease.Len() - 1
				step('c', name, lease.Len()-1)
			}
		}
		err := s.Flush(contextBackground)
		if fail(err); err == nil {
			for name, n := range committed {
				step('f', name, n)
			}
		}
	}
	return errs
}

// faultChild makes each of the calls fail that the script makes, one run for each, once or
// from then on, and opens again what that leaves.
func faultChild() error {
	var dir, kind string
	var from, stride int
	if _, err := fmt.Sscan(strings.TrimPrefix(os.Getenv(childEnv), "faults "), &dir, &kind, &from, &stride); err != nil {
		return err
	}
	t, err := openTap()
	if err != nil {
		return fmt.Errorf("LEFT OUT: %w", err)
	}
	errno := map[string]syscall.Errno{"EIO": syscall.EIO, "ENOSPC": syscall.ENOSPC}[strings.TrimSuffix(kind, "+")]
	hits := 0
	for n := from; ; n += stride {
		hit, err := faultRun(t, fmt.Sprintf("%s/%s-%d", dir, kind, n), n, errno, strings.HasSuffix(kind, "+"))
		if err != nil {
			return fmt.Errorf("%s at call %d: %w", kind, n, err)
		}
		if !hit {
			break
		}
		hits++
	}
	fmt.Println("faults", hits)
	return nil
}

func faultRun(t *tap, dir string, at int, errno syscall.Errno, sticky bool) (hit bool, err error) {
	var calls atomic.Int64
	t.set(func(*notification) syscall.Errno {
		if n := int(calls.Add(1)); n == at || sticky && n > at {
			return errno
		}
		return 0
	})
	defer t.set(nil)
	want := map[string]int{}    // confirmed
	tried := map[string]int{}   // numbers that were used
	drained := map[string]int{} // committed
	flushedTo := map[string]int{}
	s, _, err := Open(Config{Dir: dir}, text{})
	if err == nil {
		errs := script(s, tried, 700, func(kind byte, lane string, n int) {
			switch kind {
			case 'p':
				want[lane] = n
			case 'c':
				drained[lane] += n
			case 'f':
				flushedTo[lane] = n
			}
		})
		st := s.Stats()
		for _, err := range errs {
			if !errors.Is(err, ErrFailed) && !errors.Is(err, ErrNoSpace) {
				return int(calls.Load()) >= at, fmt.Errorf("an error without a type: %w", err)
			}
			if errno == syscall.EIO && !errors.Is(err, syscall.EIO) {
				return int(calls.Load()) >= at, fmt.Errorf("does not say why: %w", err)
			}
		}
		if len(errs) > 0 && st.State == Ready && sticky {
			return true, fmt.Errorf("ready after %v", errs)
		}
		// Draining goes on.
		for _, name := range []string{"a", "b"} {
			got, err := heldBy(s.Lane(name))
			if err != nil || !slices.Equal(got, numbered(drained[name], want[name], 700)) {
				return true, fmt.Errorf("%s: %d messages, %w; want %d to %d", name, len(got), err, drained[name], want[name])
			}
		}
		t.set(nil)
		if err := s.Close(); err != nil && !errors.Is(err, ErrFailed) && !errors.Is(err, ErrNoSpace) {
			return true, err
		}
	}
	t.set(nil)
	s, rec, err := Open(Config{Dir: dir}, text{})
	if err != nil || len(rec.Damaged) > 0 {
		return true, fmt.Errorf("opened again: %v, %w", rec.Damaged, err)
	}
	for _, name := range []string{"a", "b"} {
		got, err := heldBy(s.Lane(name))
		if err != nil {
			return true, err
		}
		if err := inOrder(got, flushedTo[name], drained[name], want[name], 700); err != nil {
			return true, fmt.Errorf("%s: %w", name, err)
		}
	}
	return int(calls.Load()) >= at, errors.Join(s.Close(), os.RemoveAll(dir))
}
