// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"
)

// spillPort is a testPort of messages that can be kept on the disk.
type spillPort struct {
	testPort

	body    int            // bytes of each …
	empty   int            // … but for the first so many, which have none
	bad     func(int) bool // has no description
	keyless bool           // a key cannot be found for each fifth
}

func (p *spillPort) Lane(m int) uint64 {
	if p.keyless && m%5 == 0 {
		panic("no header")
	}
	return p.testPort.Lane(m)
}

func (p *spillPort) Spill(m int) (head, body []byte, err error) {
	if p.bad != nil && p.bad(m) {
		return nil, nil, errors.New("a header of no type")
	}
	return fmt.Append(nil, m), make([]byte, p.weighs(m)), nil
}

func (p *spillPort) weighs(m int) int {
	if m < p.empty {
		return 0
	}
	return p.body
}

func (p *spillPort) Unspill(head, body []byte) (int, error) {
	m, err := strconv.Atoi(string(head))
	if err == nil && len(body) != p.weighs(m) {
		err = fmt.Errorf("%d bytes", len(body))
	}
	return m, err
}

// spillLog is the port of a log.
type spillLog struct{ *spillPort }

func (spillLog) Ahead() int { return 0 }

// failer is a testing.T or a rapid.T.
type failer interface {
	Errorf(format string, args ...any)
	Fatal(args ...any)
}

// queue is a broker's queue, one consumer of it, and what its handler has done. What is
// delivered and not acked comes again, in its place, to the next consumer.
type queue struct {
	tb  failer
	dir string
	cfg Config

	name    string
	log     bool          // the broker is one: it has a low watermark
	keyless bool          // see spillPort
	hang    chan struct{} // not nil: message 0 waits for it, whatever its context says
	bad     func(int) bool
	body    int           // bytes of a message …
	empty   int           // … but for the first so many
	takes   time.Duration // to handle one
	limits  Limits
	faults  map[int]int // how often a message still fails by a fault of its own
	bads    int         // the first so many are poison, too

	mu      sync.Mutex
	sent    int
	ready   []int // not delivered, in order
	out     map[int]bool
	sending int // the source may not have taken it
	more    chan struct{}
	acked   int
	down    bool
	calls   int
	handled []int

	g       *Guard
	s       *Source[int]
	port    *spillPort
	letters *testWriter
	ended   chan struct{}
	stop    context.CancelFunc
}

func (q *queue) poison(m int) bool { return m < q.bads || m%41 == 13 }

func (q *queue) handle(_ context.Context, m int) error {
	time.Sleep(q.takes)
	q.mu.Lock()
	if hang := q.hang; m == 0 && hang != nil {
		q.mu.Unlock()
		<-hang
		q.mu.Lock()
	}
	defer q.mu.Unlock()
	q.calls++
	switch {
	case q.down:
		return Unavailable(errDown)
	case q.faults[m] > 0:
		q.faults[m]--
		return &json.SyntaxError{}
	case q.poison(m):
		return Permanent(errors.New("poison"))
	}
	q.handled = append(q.handled, m)
	return nil
}

// open makes a Guard over the directory, if there is none, and a source.
func (q *queue) open() {
	var err error
	if q.g == nil {
		q.cfg.SpillDir = q.dir
		if q.g, err = New(q.cfg, WithLogger(slog.New(slog.DiscardHandler))); err != nil {
			q.tb.Fatal(err)
		}
	}
	q.port = &spillPort{testPort{keys: 8, delivery: q.limits.MaxDeliver}, q.body, q.empty, q.bad, q.keyless}
	port := Port[int](q.port)
	if q.log {
		port = spillLog{q.port}
	}
	q.s, err = Open(q.g, SourceConfig{Name: q.name, DeadLetters: q.letters}, q.limits, port, q.handle)
	if err != nil {
		q.tb.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	q.stop, q.ended, q.more = stop, make(chan struct{}), make(chan struct{}, 1)
	s, more := q.s, q.more
	in := make(chan int)
	var both sync.WaitGroup
	both.Go(func() { _ = s.Run(ctx, in) })
	both.Go(func() {
		for {
			q.mu.Lock()
			if len(q.ready) == 0 {
				q.mu.Unlock()
				select {
				case <-more:
					continue
				case <-s.Ended():
					return
				}
			}
			m := q.ready[0]
			q.ready, q.out[m], q.sending = q.ready[1:], true, m
			q.mu.Unlock()
			select {
			case in <- m:
				q.mu.Lock()
				q.sending = -1
				q.mu.Unlock()
			case <-s.Ended():
				return
			}
		}
	})
	ended := q.ended
	go func() { both.Wait(); close(ended) }()
}

// settle takes the acks, and puts back what was not acked once the consumer is gone.
func (q *queue) settle(gone bool) {
	q.port.mu.Lock()
	acked := q.port.acked
	q.port.acked = nil
	q.port.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, m := range acked {
		if !q.out[m] {
			q.tb.Errorf("message %d is acked twice", m)
		}
		delete(q.out, m)
		q.acked++
	}
	if gone {
		for m := range q.out {
			q.ready = append(q.ready, m)
		}
		slices.Sort(q.ready)
		clear(q.out)
	}
}

// close ends the source, and with all the Guard.
func (q *queue) close(why Reason, all bool) Report {
	r := q.s.End(context.Background(), why)
	if !r.Clean() {
		q.tb.Errorf("the end left %+v", r)
	}
	if err := r.Account.Check(); err != nil {
		q.tb.Errorf("%v", err)
	}
	q.stop()
	<-q.ended
	q.settle(false)
	q.mu.Lock()
	back := make(map[int]bool)
	for _, m := range q.port.returned {
		if back[m] = true; !q.out[m] {
			q.tb.Errorf("message %d is given back, and was acked", m)
		}
	}
	for m := range q.out {
		if !back[m] && m != q.sending {
			q.tb.Errorf("message %d is not acked, and was not given back", m)
		}
	}
	q.mu.Unlock()
	q.settle(true)
	if all {
		if _, err := q.g.Close(context.Background()); err != nil {
			q.tb.Errorf("%v", err)
		}
		q.g = nil
	}
	return r
}

func (q *queue) send(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for range n {
		q.ready = append(q.ready, q.sent)
		q.sent++
	}
	token(q.more)
}

func (q *queue) setDown(down bool) {
	q.mu.Lock()
	q.down = down
	q.mu.Unlock()
}

// finished tells whether every message was handled or dead-lettered, and acked.
func (q *queue) finished() bool {
	q.settle(false)
	q.letters.mu.Lock()
	letters := len(q.letters.recs)
	q.letters.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.acked >= q.sent && len(q.handled)+letters >= q.sent && q.s.Account().Unsettled() == 0
}

// drain waits for that, for a time that is stated.
func (q *queue) drain(within time.Duration) {
	for waited := time.Duration(0); !q.finished(); waited += 100 * time.Millisecond {
		if waited > within {
			q.tb.Errorf("after %s: %d sent, %d acked, %d handled, %d ready, %+v", waited, q.sent, q.acked, len(q.handled), len(q.ready), q.s.State())
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// counts checks that everything was handled, or dead-lettered where it is poison, at most
// so often.
func (q *queue) counts(most int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	done := make(map[int]int)
	for _, m := range q.handled {
		done[m]++
	}
	for _, r := range q.letters.recs {
		m, _ := strconv.Atoi(string(r.Body))
		if done[m]++; !q.poison(m) {
			q.tb.Errorf("message %d is healthy and dead-lettered", m)
		}
	}
	for m := range q.sent {
		if n := done[m]; n < 1 || n > most {
			q.tb.Errorf("message %d was handled %d times, want 1 to %d", m, n, most)
		}
	}
}

func newQueue(tb failer, dir string, cfg Config) *queue {
	return &queue{tb: tb, dir: dir, cfg: cfg, name: "s", body: 100, out: make(map[int]bool), letters: &testWriter{}}
}

// spillRoot is a directory in memory where there is one: what is tested is not the disk.
func spillRoot(tb testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "spill") //nolint:usetesting // not where that is
	if err != nil {
		return tb.TempDir()
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
