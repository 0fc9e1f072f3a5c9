// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// fatWriter is the dead-letter writer of one epoch, such as of one channel.
type fatWriter struct {
	testWriter
	state [2048]byte
}

// A Guard keeps nothing of the writers of epochs that have ended.
func TestWritersGoWithTheirEpochs(t *testing.T) {
	g, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	epoch := func() {
		w := &fatWriter{}
		w.state[0] = 1
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: w}, Limits{}, &testPort{}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		s.End(t.Context(), ReasonRebalance)
	}
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	for range 10 {
		epoch()
	}
	const epochs = 1000
	before := heap()
	for range epochs {
		epoch()
	}
	each := (heap() - before) / epochs
	t.Logf("%d B for each epoch", each)
	if n := len(g.dispatchers); n > 0 || each > 200 {
		t.Errorf("%d boxes are kept, %d B for each epoch", n, each)
	}
	closeAll(t, g)
}

// The letters of a source are written one at a time, also when that which had the name has
// ended while it was writing and the next has its writer too; then the box goes.
func TestWriterOutlivesItsSource(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		release, under, most := make(chan struct{}), 0, 0
		w := &slowWriter{write: func() error {
			under++
			most = max(most, under)
			<-release
			under--
			return nil
		}}
		open := func() (*Source[int], chan int) {
			s, err := Open(g, SourceConfig{Name: "s", DeadLetters: w}, Limits{}, &testPort{}, func(context.Context, int) error { return Permanent(errDown) })
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int)
			go func() { _ = s.Run(t.Context(), in) }()
			return s, in
		}
		s, in := open()
		in <- 1
		elapse(time.Second)
		over, cancel := context.WithCancel(t.Context())
		cancel()
		if rep := s.End(over, ReasonRebalance); len(rep.Left) != 1 {
			t.Errorf("%+v", rep)
		}
		s, in = open()
		in <- 2
		elapse(time.Second)
		if under != 1 || most != 1 || len(g.dispatchers) != 1 {
			t.Errorf("%d writes at once, %d boxes", most, len(g.dispatchers))
		}
		close(release)
		elapse(time.Minute)
		if a := s.Account(); a.DeadLettered != 1 || most != 1 {
			t.Errorf("%+v, %d writes at once", a, most)
		}
		s.End(t.Context(), ReasonRebalance)
		synctest.Wait()
		g.mu.Lock()
		if len(g.dispatchers) > 0 {
			t.Errorf("%d boxes are left", len(g.dispatchers))
		}
		g.mu.Unlock()
		closeAll(t, g)
	})
}

// slowWriter is a writer that can be compared.
type slowWriter struct{ write func() error }

func (w *slowWriter) Write(context.Context, *dlq.Record) error { return w.write() }

// A box whose source has ended while it was writing goes once it has nothing to write.
func TestBoxGoesAfterItsLastWrite(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		release := make(chan struct{})
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: &slowWriter{func() error { <-release; return nil }}}, Limits{}, &testPort{},
			func(context.Context, int) error { return Permanent(errDown) })
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int)
		go func() { _ = s.Run(t.Context(), in) }()
		in <- 1
		elapse(time.Second)
		over, cancel := context.WithCancel(t.Context())
		cancel()
		s.End(over, ReasonRebalance)
		if len(g.dispatchers) != 1 {
			t.Errorf("%d boxes, and one is writing", len(g.dispatchers))
		}
		close(release)
		synctest.Wait()
		if len(g.dispatchers) != 0 {
			t.Errorf("%d boxes are left", len(g.dispatchers))
		}
		closeAll(t, g)
	})
}
