// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/dlq"
)

// The jitter of a source is drawn anew with STORMGUARD_FULL only: a red run is the
// commit's doing, and not the draw's.
func TestMain(m *testing.M) {
	if os.Getenv("STORMGUARD_FULL") == "" {
		drawSeed = func() uint64 { return 1 }
	}
	goleak.VerifyTestMain(m)
}

// testPort is a broker that remembers.
type testPort struct {
	mu       sync.Mutex
	acked    []int
	returned []int
	demands  []int
	extended int
	flushes  int
	keys     int // messages of one key; 0: the key is the message
	ackErr   error
	delivery int // what Meta says of each
}

func (p *testPort) Lane(m int) uint64 { return uint64(m % max(p.keys, 1)) }
func (p *testPort) Size(int) int      { return 1 }
func (p *testPort) Meta(m int) Meta {
	return Meta{Body: fmt.Append(nil, m), Origin: dlq.Origin{System: "test", Source: "t", Sequence: uint64(m)}, Deliveries: p.delivery, Lag: -1}
}

func (p *testPort) Ack(m int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ackErr != nil {
		return p.ackErr
	}
	p.acked = append(p.acked, m)
	return nil
}

func (p *testPort) Extend(ms []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.extended += len(ms)
}

func (p *testPort) Return(ms []int, _ Reason) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.returned = append(p.returned, ms...)
	return nil
}

func (p *testPort) Demand(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.demands = append(p.demands, n)
}

func (p *testPort) Flush() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flushes++
	return nil
}

// testWriter keeps dead letters.
type testWriter struct {
	mu   sync.Mutex
	recs []*dlq.Record
	err  error
	fail int // how many writes fail, at first
	says func(*dlq.Record) error
}

func (w *testWriter) Write(_ context.Context, r *dlq.Record) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	if w.fail > 0 {
		w.fail--
		return errDown
	}
	if w.says != nil {
		if err := w.says(r); err != nil {
			return err
		}
	}
	w.recs = append(w.recs, r)
	return nil
}

func (w *testWriter) bodies() (out []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.recs {
		out = append(out, string(r.Body))
	}
	return out
}

func TestOutageHoldsAndDrainsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		port, letters := &testPort{}, &testWriter{}
		var mu sync.Mutex
		down := false
		var handled []int
		calls := 0
		s, err := Open(g, SourceConfig{Name: "s", Destination: "s", DeadLetters: letters}, Limits{}, port, func(_ context.Context, m int) error {
			mu.Lock()
			defer mu.Unlock()
			calls++
			if down {
				return errRefused
			}
			handled = append(handled, m)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int)
		ended := make(chan error, 1)
		go func() { ended <- s.Run(context.Background(), in) }()
		send := func(from, to int) {
			for i := from; i < to; i++ {
				in <- i
				time.Sleep(time.Millisecond)
			}
		}
		send(0, 100)
		mu.Lock()
		down, calls = true, 0
		mu.Unlock()
		send(100, 600)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		mu.Lock()
		if calls > 60 {
			t.Errorf("%d calls during the outage", calls)
		}
		down = false
		mu.Unlock()
		st := s.State()
		if st.Account.Held == 0 || len(st.Holds) == 0 {
			t.Errorf("not held: %+v", st)
		}
		time.Sleep(60 * time.Second)
		synctest.Wait()
		if err := s.Account().Check(); err != nil {
			t.Error(err)
		}
		a := s.Account()
		if a.Acked != 600 {
			t.Errorf("account %+v", a)
		}
		mu.Lock()
		for i, m := range handled {
			if i != m {
				t.Errorf("handled %d as number %d", m, i)
				break
			}
		}
		mu.Unlock()
		if n := len(letters.bodies()); n != 0 {
			t.Errorf("%d dead letters", n)
		}
		close(in)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		reports, err := g.Close(context.Background())
		if err != nil || len(reports) != 1 {
			t.Error(reports, err)
		}
	})
}
