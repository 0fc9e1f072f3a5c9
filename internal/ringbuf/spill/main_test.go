// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// childEnv names what this test binary is to do as a child process.
const childEnv = "STORMGUARD_SPILL_CHILD"

var children = map[string]func() error{"kill": killChild, "faults": faultChild, "trace": traceChild}

func TestMain(m *testing.M) {
	if name, _, _ := strings.Cut(os.Getenv(childEnv), " "); name != "" {
		if err := children[name](); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

var long = os.Getenv("STORMGUARD_FULL") == "1"

type text struct{}

func (text) Append(dst []byte, s string) []byte { return append(dst, s...) }

func (text) Decode(src []byte) (string, error) {
	if string(src) == "undecodable" {
		return "", errors.New("no text")
	}
	return string(src), nil
}

func open(t testing.TB, cfg Config, opts ...Option) *Spill[string] {
	t.Helper()
	s, rec, err := Open(cfg, text{}, opts...)
	if err != nil {
		t.Fatal(err)
	}
	if len(rec.Damaged) > 0 || rec.SetAside != nil {
		t.Fatalf("damage: %v, %v", rec.Damaged, rec.SetAside)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func put(t testing.TB, l *Lane[string], vs ...string) {
	t.Helper()
	if n, err := l.Put(t.Context(), vs...); n != len(vs) || err != nil {
		t.Fatalf("Put of %d: %d, %v", len(vs), n, err)
	}
}

// drain leases and commits all that a lane holds.
func drain(t testing.TB, l *Lane[string]) (vs []string) {
	t.Helper()
	dst := make([]string, 7)
	for {
		s, err := l.TryLease(dst)
		if errors.Is(err, ringbuf.ErrEmpty) {
			return vs
		}
		if err != nil {
			t.Fatal(err)
		}
		vs = append(vs, dst[:s.Len()]...)
		if err := s.Commit(s.Len()); err != nil {
			t.Fatal(err)
		}
	}
}

// numbered makes messages from to to-1 of so many bytes.
func numbered(from, to, size int) []string {
	vs := make([]string, 0, to-from)
	for i := from; i < to; i++ {
		v := fmt.Sprintf("%d,", i)
		vs = append(vs, v+strings.Repeat(string(rune('a'+i%26)), max(0, size-len(v))))
	}
	return vs
}

// fastTemp is a directory that needs no disk, if there is such a place. What is lost with
// the power is for TestPowerCut to tell.
func fastTemp(t testing.TB) string {
	t.Helper()
	if _, err := os.Stat("/dev/shm"); err != nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp("/dev/shm", "spill") //nolint:usetesting // it is not where TempDir is
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func flushed(t testing.TB, s *Spill[string]) {
	t.Helper()
	if err := s.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
}

var errWrong = errors.New("wrong")

// heldBy leases all that a lane holds, and keeps it.
func heldBy(l *Lane[string]) ([]string, error) {
	dst := make([]string, 1000)
	lease, err := l.TryLease(dst)
	if err != nil {
		if l.Len() == 0 {
			return nil, nil
		}
		return nil, err
	}
	defer lease.Release()
	if lease.Len() != l.Len() {
		return nil, fmt.Errorf("%w: leased %d of %d", errWrong, lease.Len(), l.Len())
	}
	return slices.Clone(dst[:lease.Len()]), nil
}

// inOrder checks what is held after a crash: a run of messages that begins where what was
// flushed ends, or up to where what was committed does, and has all that was confirmed.
func inOrder(got []string, flushed, committed, confirmed, size int) error {
	if len(got) == 0 {
		if committed < confirmed {
			return fmt.Errorf("%w: nothing is held, want %d to %d", errWrong, committed, confirmed)
		}
		return nil
	}
	var first int
	if _, err := fmt.Sscanf(got[0], "%d,", &first); err != nil {
		return err
	}
	if first < flushed || first > committed || first+len(got) < confirmed {
		return fmt.Errorf("%w: %d to %d are held, want from %d to %d, until %d at least", errWrong, first, first+len(got), flushed, committed, confirmed)
	}
	if !slices.Equal(got, numbered(first, first+len(got), size)) {
		return fmt.Errorf("%w: not what was put", errWrong)
	}
	return nil
}
