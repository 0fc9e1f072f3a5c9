// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package guard

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// keepPort has no broker behind it: what it is told is all that anybody knows.
type keepPort struct {
	spillPort

	kept    []int
	refused []error
	lost    int
}

func (p *keepPort) Kept(m int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.refused = append(p.refused, err)
		return
	}
	p.kept = append(p.kept, m)
}

func (p *keepPort) Lost(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lost += n
}

// told is how many messages the port was told to be kept, refused and done.
func (p *keepPort) told() (kept []int, refused []error, acked []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.kept), slices.Clone(p.refused), slices.Clone(p.acked)
}

// intake is a source of which nobody else has the messages.
type intake struct {
	t    *testing.T
	g    *Guard
	s    *Source[int]
	port *keepPort
	done chan struct{}

	mu      sync.Mutex
	down    bool
	hang    chan struct{} // not nil: calls wait for it
	handled []int
}

func newIntake(t *testing.T, cfg Config, body int, bad func(int) bool) *intake {
	t.Helper()
	in := &intake{t: t, port: &keepPort{spillPort: spillPort{body: body, bad: bad}}, done: make(chan struct{}), down: true}
	cfg.Policy.Spill = true
	var err error
	if in.g, err = New(cfg, WithLogger(slog.New(slog.DiscardHandler))); err != nil {
		t.Fatal(err)
	}
	in.s, err = Open(in.g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, Port[int](in.port), in.handle)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(in.done)
		_ = in.s.Run(context.Background(), nil)
	}()
	return in
}

func (in *intake) handle(_ context.Context, m int) error {
	in.mu.Lock()
	if hang := in.hang; hang != nil {
		in.mu.Unlock()
		<-hang
		in.mu.Lock()
	}
	defer in.mu.Unlock()
	if in.down {
		return Unavailable(errDown)
	}
	in.handled = append(in.handled, m)
	return nil
}

func (in *intake) mend() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.down = false
}

// drain waits until nothing is left, for a time that is stated.
func (in *intake) drain(within time.Duration) {
	in.t.Helper()
	for waited := time.Duration(0); in.s.Account().Unsettled() > 0; waited += 100 * time.Millisecond {
		if waited > within {
			in.t.Fatalf("after %s: %+v", waited, in.s.State())
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (in *intake) close() Report {
	in.t.Helper()
	r := in.s.End(context.Background(), ReasonShutdown)
	<-in.done
	if err := r.Account.Check(); err != nil || !r.Clean() {
		in.t.Errorf("%v, %+v", err, r)
	}
	if _, err := in.g.Close(context.Background()); err != nil {
		in.t.Error(err)
	}
	return r
}

// What was said to be kept survives the process, from the first message on and with the
// breaker closed too; it is handled in order, and the port is told when it is done.
func TestKeeper(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		dir := filepath.Join(spillRoot(t), "d")
		in := newIntake(t, Config{SpillDir: dir, Policy: Policy{Window: 64}}, 100, nil)
		for m := range 500 {
			if err := in.s.Offer(m); err != nil {
				synctest.Wait() // the disk is slower than the window
				if err = in.s.Offer(m); err != nil {
					t.Fatal(m, err)
				}
			}
			if m == 0 {
				synctest.Wait()
				if kept, _, _ := in.port.told(); len(kept) != 1 {
					t.Errorf("the first message is not kept at once")
				}
			}
		}
		synctest.Wait()
		if kept, refused, acked := in.port.told(); len(kept) != 500 || len(refused) != 0 || len(acked) != 0 {
			t.Fatalf("%d kept, %d refused, %d done; want 500, 0, 0", len(kept), len(refused), len(acked))
		}
		crashed := filepath.Join(spillRoot(t), "crashed") // what a kill leaves
		if err := os.CopyFS(crashed, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		if n := in.s.State().Spilled; n != 500 {
			t.Errorf("%d spilled, want 500", n)
		}
		if r := in.close(); r.Spilled != 500 || r.Returned != 0 || len(in.port.returned) != 0 {
			t.Errorf("the end left %d on the disk and gave %d back", r.Spilled, r.Returned)
		}
		for _, again := range []string{dir, crashed} {
			in := newIntake(t, Config{SpillDir: again, Policy: Policy{Window: 64}}, 100, nil)
			in.mend()
			if err := in.s.Offer(500); err != nil { // behind them
				t.Fatal(err)
			}
			in.drain(30 * time.Second)
			if r := in.close(); r.Spilled != 0 {
				t.Errorf("%d are left", r.Spilled)
			}
			_, _, acked := in.port.told()
			if len(in.handled) != 501 || !slices.IsSorted(in.handled) || !slices.Equal(in.handled, acked) {
				t.Errorf("%d handled and %d done, want 501 in order", len(in.handled), len(acked))
			}
		}
	})
}

// What does not fit on the disk is refused, each message by itself; the others are kept,
// and there is room again after the drain.
func TestKeeperFull(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		in := newIntake(t, Config{SpillDir: filepath.Join(spillRoot(t), "d"), SpillBytes: 64 << 10}, 1000, nil)
		for m := range 200 {
			if err := in.s.Offer(m); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		kept, refused, _ := in.port.told()
		if len(kept) < 20 || len(refused) < 50 || len(kept)+len(refused) != 200 {
			t.Errorf("%d kept and %d refused, with room for 64 KiB", len(kept), len(refused))
		}
		for _, err := range refused {
			if !errors.Is(err, ErrFull) {
				t.Errorf("refused: %v", err)
			}
		}
		in.mend()
		in.drain(30 * time.Second)
		if err := in.s.Offer(1000); err != nil {
			t.Fatal(err)
		}
		in.drain(10 * time.Second)
		in.close()
		if want := append(kept, 1000); !slices.Equal(in.handled, want) {
			t.Errorf("%d handled, want the %d that were kept, in order, and the last", len(in.handled), len(kept))
		}
	})
}

// A message that cannot be described is refused, and its neighbours are kept.
func TestKeeperRefusesOne(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		in := newIntake(t, Config{SpillDir: filepath.Join(spillRoot(t), "d")}, 10, func(m int) bool { return m%10 == 3 })
		for m := range 40 {
			if err := in.s.Offer(m); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		if kept, refused, _ := in.port.told(); len(kept) != 36 || len(refused) != 4 {
			t.Errorf("%d kept and %d refused, want 36 and 4", len(kept), len(refused))
		}
		in.mend()
		in.drain(30 * time.Second)
		in.close()
	})
}

// A handler that hangs keeps nobody from the disk: what comes meanwhile is kept at once.
func TestKeeperBesideAHandler(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		in := newIntake(t, Config{SpillDir: filepath.Join(spillRoot(t), "d")}, 10, nil)
		hang := make(chan struct{})
		in.mu.Lock()
		in.down, in.hang = false, hang
		in.mu.Unlock()
		for m := range 50 {
			if err := in.s.Offer(m); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		if kept, _, acked := in.port.told(); len(kept) != 50 || len(acked) != 0 {
			t.Errorf("%d kept and %d done while a handler hangs, want 50 and 0", len(kept), len(acked))
		}
		if n := in.s.Account().Processing; n != 1 {
			t.Errorf("%d calls at once, want 1", n)
		}
		in.mu.Lock()
		in.hang = nil
		in.mu.Unlock()
		close(hang)
		in.drain(10 * time.Second)
		in.close()
		if len(in.handled) != 50 || !slices.IsSorted(in.handled) {
			t.Errorf("handled %v", in.handled)
		}
	})
}

// Nothing ticks for an intake that has nothing.
func TestKeeperRests(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		in := newIntake(t, Config{SpillDir: filepath.Join(spillRoot(t), "d")}, 10, nil)
		in.mend()
		if err := in.s.Offer(1); err != nil {
			t.Fatal(err)
		}
		in.drain(10 * time.Second)
		time.Sleep(time.Minute)
		in.s.mu.Lock()
		busy := in.s.spillBusyLocked()
		in.s.mu.Unlock()
		if busy {
			t.Error("the source is busy with nothing")
		}
		in.close()
	})
}

// A source that does not spill any more says that its messages wait.
func TestKeeperTurnedOff(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		dir := filepath.Join(spillRoot(t), "d")
		in := newIntake(t, Config{SpillDir: dir}, 10, nil)
		if err := in.s.Offer(1); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		in.close()
		var heard strings.Builder
		g, err := New(Config{SpillDir: dir}, WithLogger(slog.New(slog.NewTextHandler(&heard, nil))))
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, Port[int](&keepPort{}), in.handle)
		if err != nil {
			t.Fatal(err)
		}
		if n := g.Spilled()["s"]; n != 1 || !strings.Contains(heard.String(), "does not spill any more") {
			t.Errorf("%d in the spill; %s", n, heard.String())
		}
		s.End(context.Background(), ReasonShutdown)
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}
