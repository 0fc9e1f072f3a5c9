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
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// faulty is a store that fails when it is told to.
type faulty struct {
	store

	fail  atomic.Pointer[func(*transaction) error]
	after atomic.Pointer[func()]

	unreadable atomic.Bool
}

func (f *faulty) read(dst []stored, lane string, seq uint64, limit int) ([]stored, error) {
	if f.unreadable.Load() {
		return nil, syscall.EIO
	}
	return f.store.read(dst, lane, seq, limit)
}

func (f *faulty) write(t *transaction) error {
	if g := f.fail.Load(); g != nil {
		if err := (*g)(t); err != nil {
			return err
		}
	}
	err := f.store.write(t)
	if g := f.after.Load(); g != nil {
		(*g)()
	}
	return err
}

func (f *faulty) set(g func(*transaction) error) {
	if g == nil {
		f.fail.Store(nil)
		return
	}
	f.fail.Store(&g)
}

func openFaulty(t testing.TB, cfg Config, opts ...Option) (*Spill[string], *faulty) {
	s := open(t, cfg, opts...)
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	f := &faulty{store: s.c.store}
	s.c.store = f
	return s, f
}

func noRoomForChunks(tr *transaction) error {
	if len(tr.chunks) > 0 {
		return errNoRoom
	}
	return nil
}

// A disk without room: TryPut says so, Put waits, draining goes on, and intake goes on a second
// after there is room, or at once when something was drained.
func TestNoSpace(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex // another goroutine tells
		var states []State
		s, f := openFaulty(t, Config{Dir: dir}, WithState(func(st State, err error) {
			mu.Lock()
			defer mu.Unlock()
			states = append(states, st)
		}))
		l := s.Lane("a")
		put(t, l, "1", "2")
		f.set(noRoomForChunks)
		if n, err := l.TryPut("3"); n != 0 || !errors.Is(err, ErrNoSpace) || !errors.Is(err, ringbuf.ErrFull) {
			t.Fatal(n, err)
		}
		if err := l.Append(func(error) {}, "3"); !errors.Is(err, ErrNoSpace) {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 9500*time.Millisecond)
		if n, err := l.Put(ctx, "3"); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(n, err)
		}
		cancel()
		if st := s.Stats(); st.State != NoSpace || !errors.Is(st.Err, ErrNoSpace) || st.Count != 2 || st.Pending != 0 {
			t.Fatalf("%+v", st)
		}
		begin := time.Now()
		go func() { time.Sleep(5*time.Second + time.Millisecond); f.set(nil) }()
		put(t, l, "3")
		if d := time.Since(begin); d < 5*time.Second || d > 6*time.Second+time.Millisecond {
			t.Errorf("went on after %v", d)
		}
		f.set(noRoomForChunks)
		if _, err := l.TryPut("4"); !errors.Is(err, ErrNoSpace) {
			t.Fatal(err)
		}
		begin = time.Now()
		f.set(nil)
		if got := drain(t, l); !slices.Equal(got, []string{"1", "2", "3"}) {
			t.Fatal(got)
		}
		put(t, l, "4")
		if d := time.Since(begin); d != 0 {
			t.Errorf("went on after %v, although there was room", d)
		}
		synctest.Wait() // until the writer has told
		mu.Lock()
		told := slices.Clone(states)
		mu.Unlock()
		if told[0] != NoSpace || told[len(told)-1] != Ready || s.Stats().State != Ready {
			t.Error(told)
		}
		s.Close()
	})
}

// A read that fails refuses what is put and not written yet, whether the writer waits or writes.
func TestReadFails(t *testing.T) {
	t.Run("waits", func(t *testing.T) {
		s, f := openFaulty(t, Config{Dir: t.TempDir(), BatchDelay: time.Minute})
		l := s.Lane("a")
		if err := l.Append(func(error) {}, "1"); err != nil {
			t.Fatal(err)
		}
		flushed(t, s)
		refused := make(chan error, 1)
		if err := l.Append(func(err error) { refused <- err }, "2"); err != nil {
			t.Fatal(err)
		}
		readFails(t, s, f, refused, func() {})
	})
	t.Run("writes", func(t *testing.T) {
		s, f := openFaulty(t, Config{Dir: t.TempDir()})
		l := s.Lane("a")
		put(t, l, "1")
		flushed(t, s)
		writing, goOn := make(chan struct{}), make(chan error)
		f.set(func(*transaction) error { writing <- struct{}{}; return <-goOn })
		written, refused := make(chan error, 1), make(chan error, 1)
		if err := l.Append(func(err error) { written <- err }, "2"); err != nil {
			t.Fatal(err)
		}
		<-writing
		f.set(nil)
		if err := l.Append(func(err error) { refused <- err }, "3"); err != nil {
			t.Fatal(err)
		}
		readFails(t, s, f, refused, func() { goOn <- nil })
		if err := <-written; err != nil {
			t.Error(err)
		}
	})
}

func readFails(t *testing.T, s *Spill[string], f *faulty, refused <-chan error, then func()) {
	t.Helper()
	f.unreadable.Store(true)
	r, err := s.Lane("a").Reader()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]string, 1), 1); !errors.Is(err, ErrFailed) || !errors.Is(err, syscall.EIO) {
		t.Error(err)
	}
	then()
	if err := <-refused; !errors.Is(err, ErrFailed) {
		t.Error(err)
	}
	if st := s.Stats(); st.State != Failed || st.Pending != 0 {
		t.Errorf("%+v", st)
	}
	r.Close()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// Of two states that follow each other the older is told first, whoever came to them.
func TestStatesAreToldInOrder(t *testing.T) {
	var mu sync.Mutex
	var told []State
	telling, goOn := make(chan struct{}), make(chan struct{})
	s, f := openFaulty(t, Config{Dir: t.TempDir()}, WithState(func(st State, _ error) {
		if st == NoSpace {
			close(telling)
			<-goOn
		}
		mu.Lock()
		defer mu.Unlock()
		told = append(told, st)
	}))
	l := s.Lane("a")
	put(t, l, "1")
	flushed(t, s)
	f.set(noRoomForChunks)
	refused := make(chan error, 1)
	go func() {
		_, err := l.TryPut("2")
		refused <- err
	}()
	<-telling
	f.unreadable.Store(true)
	r, err := l.Reader()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]string, 1), 1); !errors.Is(err, ErrFailed) {
		t.Error(err)
	}
	close(goOn)
	if err := <-refused; !errors.Is(err, ErrNoSpace) && !errors.Is(err, ErrFailed) {
		t.Error(err)
	}
	r.Close()
	s.Close()
	mu.Lock()
	defer mu.Unlock()
	if n := len(told); n < 2 || told[0] != NoSpace || told[n-1] != Failed {
		t.Errorf("told %v, want no space first and failed at last", told)
	}
}

// A write that fails: intake stops for good, what was confirmed can be drained, what was not is
// told to its callers, and the next Open has all that was confirmed.
func TestFailed(t *testing.T) {
	dir := t.TempDir()
	var state atomic.Int32
	s, f := openFaulty(t, Config{Dir: dir}, WithState(func(st State, err error) {
		if errors.Is(err, syscall.EIO) {
			state.Store(int32(st))
		}
	}))
	l := s.Lane("a")
	put(t, l, numbered(0, 10, 0)...)
	flushed(t, s)
	f.set(func(*transaction) error { return syscall.EIO })
	n, err := l.Put(t.Context(), "x")
	var failed *FailedError
	if n != 0 || !errors.Is(err, ErrFailed) || !errors.Is(err, syscall.EIO) || !errors.As(err, &failed) || failed.Op != "write" {
		t.Fatal(n, err)
	}
	f.set(nil) // the disk is well again, and nobody knows what it has
	if n, err := l.Put(t.Context(), "y"); n != 0 || !errors.Is(err, ErrFailed) {
		t.Fatal(n, err)
	}
	if err := s.Flush(t.Context()); !errors.Is(err, ErrFailed) {
		t.Fatal(err)
	}
	if got := drain(t, l); !slices.Equal(got, numbered(0, 10, 0)) {
		t.Fatal(got)
	}
	if st := s.Stats(); st.State != Failed || st.Drained != 10 || State(state.Load()) != Failed {
		t.Fatalf("%+v", st)
	}
	if err := s.Close(); !errors.Is(err, ErrFailed) {
		t.Fatal(err)
	}
	s = open(t, Config{Dir: dir})
	if got := drain(t, s.Lane("a")); !slices.Equal(got, numbered(0, 10, 0)) {
		t.Fatal(got)
	}
}

// All that is on its way fails together, in order, so that it can be appended again in order.
func TestAppend(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s, f := openFaulty(t, Config{Dir: dir, BatchCount: 4})
		l := s.Lane("a")
		calls := make(chan string, 100)
		add := func(vs ...string) error {
			return l.Append(func(err error) {
				calls <- fmt.Sprint(strings.Join(vs, ""), " ", errors.Is(err, ringbuf.ErrFull), " ", err == nil)
			}, vs...)
		}
		writing, goOn := make(chan struct{}), make(chan error)
		f.set(func(*transaction) error { writing <- struct{}{}; return <-goOn })
		if err := add("1", "2"); err != nil {
			t.Fatal(err)
		}
		<-writing
		if err := errors.Join(add("3"), add("4", "5")); err != nil {
			t.Fatal(err)
		}
		if err := add("6", "7"); !errors.Is(err, ringbuf.ErrFull) { // half of it would fit
			t.Fatal(err)
		}
		if n := l.Len(); n != 0 || l.Stats().Pending != 5 || l.Stats().Empty() {
			t.Fatalf("%d, %+v", n, l.Stats())
		}
		goOn <- errNoRoom
		for _, want := range []string{"12 true false", "3 true false", "45 true false"} {
			if got := <-calls; got != want {
				t.Errorf("%q, want %q", got, want)
			}
		}
		f.set(nil)
		put(t, l, "1", "2")
		if err := add("3"); err != nil {
			t.Fatal(err)
		}
		if got := <-calls; got != "3 false true" {
			t.Error(got)
		}
		if got := drain(t, l); !slices.Equal(got, []string{"1", "2", "3"}) {
			t.Error(got)
		}
		s.Close()
	})
}

// A full spill makes Put wait until what was drained is synced; it never overwrites. A lane
// that has its share is in nobody's way.
func TestFull(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := open(t, Config{Dir: dir, MaxCount: 4, LaneShare: 0.5, CheckpointDelay: time.Minute})
		a, b := s.Lane("a"), s.Lane("b")
		put(t, a, "1", "2")
		done := make(chan error, 2)
		go func() { _, err := a.Put(t.Context(), "3"); done <- err }()
		synctest.Wait()
		put(t, b, "1", "2")
		if n, err := b.TryPut("3"); n != 0 || !errors.Is(err, ringbuf.ErrFull) || errors.Is(err, ErrNoSpace) {
			t.Fatal(n, err)
		}
		if st := s.Stats(); st.Waiting != 1 || st.Blocked != 1 || st.Refused != 1 || st.Count != 4 {
			t.Fatalf("%+v", st)
		}
		begin := time.Now()
		lease, err := a.TryLease(make([]string, 1))
		if err == nil {
			err = lease.Commit(1)
		}
		if err = errors.Join(err, <-done); err != nil {
			t.Fatal(err)
		}
		if time.Since(begin) != 0 {
			t.Error("waited for CheckpointDelay")
		}
		if got := drain(t, a); !slices.Equal(got, []string{"2", "3"}) {
			t.Error(got)
		}
		if _, err := a.TryPut(strings.Repeat("x", MaxMessage)); !errors.Is(err, ringbuf.ErrTooLarge) {
			t.Error(err)
		}
		go func() { _, err := b.Put(t.Context(), "3"); done <- err }()
		synctest.Wait()
		s.Close()
		if err := <-done; !errors.Is(err, ringbuf.ErrClosed) {
			t.Error(err)
		}
		if _, err := b.TryLease(make([]string, 1)); !errors.Is(err, ringbuf.ErrClosed) {
			t.Error(err)
		}
	})
}

// Many Puts share a sync; with BatchDelay the first one waits for others.
func TestBatch(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := open(t, Config{Dir: dir, BatchDelay: 5 * time.Millisecond, BatchCount: 100, CheckpointDelay: time.Second})
		begin, before := time.Now(), s.Stats().Writes
		done := make(chan error, 100)
		for i := range 30 {
			go func() { _, err := s.Lane(fmt.Sprint(i%7)).Put(t.Context(), "x"); done <- err }()
		}
		for range 30 {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		if d, n := time.Since(begin), s.Stats().Writes-before; d != 5*time.Millisecond || n != 1 {
			t.Errorf("%d writes after %v", n, d)
		}
		put(t, s.Lane("0"), numbered(0, 250, 0)...) // two that are full, and one that waits
		if d, n := time.Since(begin), s.Stats().Writes-before; d != 10*time.Millisecond || n != 4 {
			t.Errorf("%d writes after %v", n, d)
		}
		drain(t, s.Lane("0"))
		time.Sleep(999 * time.Millisecond)
		synctest.Wait()
		if st := s.Stats(); st.Drained == 0 {
			t.Error("a checkpoint came too early")
		}
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		if st := s.Stats(); st.Drained != 0 {
			t.Error("no checkpoint")
		}
		s.Close()
	})
}

func TestLease(t *testing.T) {
	s := open(t, Config{Dir: t.TempDir()})
	l := s.Lane("a")
	got := make(chan []string)
	dst := make([]string, 3)
	go func() {
		lease, err := l.Lease(t.Context(), dst)
		if err != nil {
			t.Error(err)
		}
		got <- dst[:lease.Len()]
		lease.Release()
		lease.Release()
		got <- nil
	}()
	put(t, l, "1", "2")
	if vs := <-got; !slices.Equal(vs, []string{"1", "2"}) {
		t.Error(vs)
	}
	<-got
	ctx, cancel := context.WithCancel(t.Context())
	lease, err := l.Lease(ctx, dst[:1])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.TryLease(dst); !errors.Is(err, ringbuf.ErrLeased) {
		t.Error(err)
	}
	cancel()
	if _, err := l.Lease(ctx, dst); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := errors.Join(lease.Commit(1)); err != nil {
		t.Fatal(err)
	}
	put(t, l, "undecodable", "3")
	lease, err = l.TryLease(dst)
	if err != nil || lease.Len() != 1 || dst[0] != "2" || lease.Commit(1) != nil {
		t.Fatal(lease.Len(), err)
	}
	var bad *DecodeError
	lease, err = l.TryLease(dst)
	if !errors.As(err, &bad) || bad.Lane != "a" || bad.Seq != 3 || string(bad.Data) != "undecodable" || lease.Len() != 1 {
		t.Fatal(lease.Len(), err)
	}
	if err := lease.Commit(1); err != nil {
		t.Fatal(err)
	}
	if vs := drain(t, l); !slices.Equal(vs, []string{"3"}) {
		t.Error(vs)
	}
}

// Damage that comes while the spill is open is found by the lease that meets it.
func TestDamageWhileOpen(t *testing.T) {
	dir := t.TempDir()
	var told []Damage
	s := open(t, Config{Dir: dir}, WithDamage(func(d Damage) { told = append(told, d) }))
	l := s.Lane("a")
	put(t, l, numbered(1, 60, 200)...)
	data, err := os.ReadFile(dir + "/" + fileName)
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(dir+"/"+fileName, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for from := 0; ; {
		i := strings.Index(string(data[from:]), "7,hhhhh")
		if i < 0 {
			break
		}
		if _, err := file.WriteAt([]byte("7,hhHhh"), int64(from+i)); err != nil {
			t.Fatal(err)
		}
		from += i + 1
	}
	file.Close()
	want := slices.Delete(numbered(1, 60, 200), 6, 7)
	want = slices.DeleteFunc(want, func(s string) bool { return strings.Contains(s, "7,hhhhh") })
	got := drain(t, l)
	if !slices.Equal(got, want) {
		t.Errorf("%d, want %d", len(got), len(want))
	}
	if len(told) == 0 || told[0].Lane != "a" || told[0].First != 7 || told[0].Last != 7 || s.Stats().Damaged != uint64(len(told)) || l.Len() != 0 {
		t.Errorf("%v, %+v", told, s.Stats())
	}
	if copied, err := os.ReadFile(dir + "/" + told[0].File); err != nil || !strings.Contains(string(copied), "hhHhh") {
		t.Errorf("%q, %v", copied, err)
	}
}

// One process at a time; and not a word is written where no directory was named.
func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir})
	if _, _, err := Open(Config{Dir: dir}, text{}); !errors.Is(err, ErrLocked) {
		t.Error(err)
	}
	s.Close()
	s.Close()
	open(t, Config{Dir: dir}).Close()
	if _, _, err := Open(Config{}, text{}); err == nil || !strings.Contains(err.Error(), "Dir is empty") {
		t.Error(err)
	}
	if _, _, err := Open(Config{Dir: dir + "/no/such"}, text{}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func TestValidate(t *testing.T) {
	if err := (Config{Dir: "x"}).Validate(); err != nil {
		t.Error(err)
	}
	err := Config{
		MaxCount: -1, MaxBytes: 7, LaneShare: 2, BatchCount: -3, BatchBytes: 1 << 40,
		BatchDelay: -1, CheckpointCount: 1 << 30, CheckpointDelay: time.Nanosecond,
	}.Validate()
	for _, field := range []string{
		"Dir is empty", "MaxCount is -1", "MaxBytes is 7, want 65536", "LaneShare is 2", "BatchCount is -3",
		"BatchBytes is 1099511627776", "BatchDelay is -1ns", "CheckpointCount is 1073741824", "CheckpointDelay is 1ns, want 1ms",
	} {
		if !strings.Contains(fmt.Sprint(err), field) {
			t.Errorf("no %q in %v", field, err)
		}
	}
}

// Empty lanes are forgotten, and a lane that comes back begins anew.
func TestManyLanes(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir})
	first := s.Lane("0")
	put(t, first, "x")
	drain(t, first)
	flushed(t, s)
	n := idleLanes + 500
	for i := range n {
		l := s.Lane(fmt.Sprint(i))
		for {
			err := l.Append(func(error) {}, fmt.Sprint(i))
			if err == nil {
				break
			}
			if !errors.Is(err, ringbuf.ErrFull) {
				t.Fatal(err)
			}
			flushed(t, s)
		}
	}
	flushed(t, s)
	if st := s.Stats(); st.Lanes != n || st.Count != n {
		t.Fatalf("%+v", st)
	}
	for l := range s.Lanes() {
		if got := drain(t, l); !slices.Equal(got, []string{l.Name()}) {
			t.Fatal(got)
		}
	}
	for range 5 {
		flushed(t, s)
		put(t, s.Lane("again"), "x")
		drain(t, s.Lane("again"))
	}
	flushed(t, s)
	s.c.mu.Lock()
	lanes, idle := len(s.c.lanes), s.c.idle
	s.c.mu.Unlock()
	if lanes > n-2*lanesAtOnce || idle != lanes {
		t.Errorf("%d lanes are known, %d of them empty", lanes, idle)
	}
	put(t, s.Lane("0"), "y")
	s.Close()
	s = open(t, Config{Dir: dir})
	if got := drain(t, s.Lane("0")); !slices.Equal(got, []string{"y"}) {
		t.Error(got)
	}
}
