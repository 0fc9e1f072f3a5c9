// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package guard

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// lateSpill is the port of a log whose first call of a kind waits.
type lateSpill struct {
	spillPort
	hangs   string
	once    sync.Once
	release chan struct{}
	begun   atomic.Int64
}

func (p *lateSpill) call(kind string) {
	if p.begun.Add(1); kind == p.hangs {
		p.once.Do(func() { <-p.release })
	}
}

func (p *lateSpill) Ack(m int) error {
	p.call("ack")
	return p.spillPort.Ack(m)
}

func (p *lateSpill) Flush() error {
	p.call("flush")
	return p.spillPort.Flush()
}

func (p *lateSpill) Ahead() int {
	p.call("ahead")
	return 0
}

func (p *lateSpill) Spill(m int) (head, body []byte, err error) {
	p.call("spill")
	return p.spillPort.Spill(m)
}

func (p *lateSpill) Unspill(head, body []byte) (int, error) {
	p.call("unspill")
	return p.spillPort.Unspill(head, body)
}

// While a source writes its messages to the disk, or acks those on it, a port call hangs for
// longer than End waits. Once End has returned, no other comes, and the next epoch goes on.
func TestSpillEndsWhileACallHangs(t *testing.T) {
	for kind, spilled := range map[string]int{"spill": 0, "ack": 10} {
		bubble(t, kind, func(t *testing.T) { spillEndsWhile(t, kind, spilled) })
	}
}

func spillEndsWhile(t *testing.T, kind string, onDisk int) {
	g, err := New(Config{SpillDir: filepath.Join(spillRoot(t), "d"), Policy: Policy{Spill: true, Window: 64}}, WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	port := &lateSpill{hangs: kind, release: make(chan struct{})}
	s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, Port[int](port), func(context.Context, int) error { return Unavailable(errDown) })
	if err != nil {
		t.Fatal(err)
	}
	// A message of an earlier epoch, whose write came late, is in front on the disk.
	s.over.number++
	old := binary.LittleEndian.AppendUint64(nil, s.over.number)
	old = append(append(old, 4), "1000"...)
	written := make(chan error, 1)
	if err := s.over.lane.Append(func(err error) { written <- err }, old); err != nil {
		t.Fatal(err)
	}
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	s.over.first += 1 << 40
	s.over.number = s.over.first
	in, ended := make(chan int, 10), make(chan error, 1)
	for m := range cap(in) {
		in <- m
	}
	go func() { ended <- s.Run(t.Context(), in) }()
	time.Sleep(spillAfter + 2*time.Second)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if rep := s.End(ctx, ReasonShutdown); rep.Err == nil || rep.Account.Check() != nil || rep.Returned != 10-onDisk {
		t.Errorf("%+v", rep)
	}
	begun := port.begun.Load()
	close(port.release)
	if err := <-ended; !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	synctest.Wait()
	if n := port.begun.Load() - begun; n > 0 {
		t.Errorf("%d port calls after End had returned", n)
	}
	if st := s.State(); st.Spilled < 0 || st.Account.Check() != nil || st.Tally.Spilled > 1 {
		t.Errorf("%+v", st)
	}
	// The next epoch has the lane, and all that is in it.
	var handled atomic.Int64
	next, err := Open(g, SourceConfig{Name: "s"}, Limits{}, Port[int](&spillPort{}), func(context.Context, int) error {
		handled.Add(1)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := next.ForceClosed(); err != nil {
		t.Error(err)
	}
	go func() { ended <- next.Run(t.Context(), nil) }()
	time.Sleep(10 * time.Second)
	if n := handled.Load(); int(n) != 1+onDisk {
		t.Errorf("%d messages handled, want %d", n, 1+onDisk)
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// A write that fails when its source has ended changes nothing of its account.
func TestSpillWriteFailsAfterEnd(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true}})
		q.open()
		q.setDown(true)
		q.send(1)
		synctest.Wait()
		q.s.mu.Lock()
		q.s.c.behind++
		q.s.over.going = append(q.s.over.going, spilling[int]{1, &spilled{placed: true}, 1, false})
		q.s.mu.Unlock()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		rep := q.s.End(ctx, ReasonShutdown)
		q.s.wroteSpilled(errDown)
		if st := q.s.State(); rep.Returned != 2 || st.Spilled != 0 || st.Account.Held != 0 || st.Account.Returned != 2 {
			t.Errorf("%+v\n%+v", rep, st)
		}
		q.stop()
		<-q.ended
		if _, err := q.g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// slowSize is a port that takes long to say the size of a message, once it hangs.
type slowSize struct {
	spillPort
	hangs   atomic.Bool
	release chan struct{}
	begun   atomic.Int64
}

func (p *slowSize) Size(m int) int {
	if p.begun.Add(1); p.hangs.Load() {
		<-p.release
	}
	return p.spillPort.Size(m)
}

// A message whose size is asked for while the source ends is given back with the rest of its batch.
func TestSpillEndsWhileASizeHangs(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{SpillDir: filepath.Join(spillRoot(t), "d"), Policy: Policy{Spill: true, Window: 64}}, WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		port := &slowSize{release: make(chan struct{})}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, Port[int](port), func(context.Context, int) error { return Unavailable(errDown) })
		if err != nil {
			t.Fatal(err)
		}
		feed, ended := s.Feed(), make(chan error, 1)
		go func() { ended <- s.RunFeed(t.Context()) }()
		if _, err := feed.Put(t.Context(), 0, 1, 2); err != nil {
			t.Fatal(err)
		}
		time.Sleep(spillAfter + 2*time.Second)
		port.hangs.Store(true)
		if _, err := feed.Put(t.Context(), 3, 4, 5); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		rep := s.End(ctx, ReasonShutdown)
		if rep.Err == nil || rep.Account.Check() != nil || rep.Account.Received != 6 || rep.Returned != 3 {
			t.Errorf("%+v", rep)
		}
		begun := port.begun.Load()
		close(port.release)
		if err := <-ended; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		synctest.Wait()
		if a := s.Account(); a != rep.Account || port.begun.Load() != begun {
			t.Errorf("%+v after the end, %+v in its report; %d port calls", a, rep.Account, port.begun.Load()-begun)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A source that finds its messages on the disk, but the reader in use by an earlier epoch, handles
// them once it is free, though nothing else moves.
func TestSpillOfAnEpochThatStillReads(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{SpillDir: filepath.Join(spillRoot(t), "d"), Policy: Policy{Spill: true}}, WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		lane, written := g.spill.Lane("s"), make(chan error, 1)
		reader, err := lane.Reader()
		if err != nil {
			t.Fatal(err)
		}
		if err := lane.Append(func(err error) { written <- err }, append(binary.LittleEndian.AppendUint64(nil, 1), "\x041000"...)); err != nil {
			t.Fatal(err)
		}
		if err := <-written; err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if !g.sweeper.parked.Load() {
			t.Fatal("the sweeper is not parked")
		}
		handled, ended := make(chan int, 1), make(chan error, 1)
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, Port[int](&spillPort{}), func(_ context.Context, m int) error {
			handled <- m
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		go func() { ended <- s.Run(t.Context(), nil) }()
		time.Sleep(time.Second)
		reader.Close()
		time.Sleep(10 * time.Second)
		select {
		case m := <-handled:
			if m != 1000 {
				t.Errorf("message %d handled, want 1000", m)
			}
		default:
			t.Errorf("not handled: %+v", s.State())
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-ended; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}
