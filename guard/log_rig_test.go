// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// logged is a log handler that keeps what it gets.
type logged struct {
	mu    sync.Mutex
	lines []loggedLine
}

type loggedLine struct {
	at    time.Time
	level slog.Level
	text  string
	args  map[string]any
}

func (l *logged) Enabled(context.Context, slog.Level) bool { return true }
func (l *logged) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logged) WithGroup(string) slog.Handler            { return l }
func (l *logged) Handle(_ context.Context, r slog.Record) error {
	line := loggedLine{time.Now(), r.Level, r.Message, map[string]any{}}
	r.Attrs(func(a slog.Attr) bool {
		line.args[a.Key] = a.Value.Any()
		return true
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
	return nil
}

// of is the lines of a text.
func (l *logged) of(text string) (found []loggedLine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if line.text == text {
			found = append(found, line)
		}
	}
	return found
}

// one is the only line of a text.
func (l *logged) one(t *testing.T, text string, level slog.Level) loggedLine {
	t.Helper()
	found := l.of(text)
	if len(found) != 1 || found[0].level != level {
		t.Fatalf("%q: %+v\nof %+v", text, found, l.lines)
	}
	return found[0]
}

// sum is how many events the lines of a text stand for.
func (l *logged) sum(text string) (n int64) {
	for _, line := range l.of(text) {
		if joined, ok := line.args["lines"].(int64); ok {
			n += joined
		} else {
			n++
		}
	}
	return n
}

// logRig is sources of one Guard whose dependency may be down.
type logRig struct {
	t       *testing.T
	g       *Guard
	log     *logged
	letters *testWriter
	fault   atomic.Pointer[error] // nil while the dependency is up
	poison  func(m int) error     // of the messages themselves; may be nil
	ended   []chan error
	over    bool
}

func (r *logRig) fail(err error) {
	r.fault.Store(nil)
	if err != nil {
		r.fault.Store(&err)
	}
}

func newLogRig(t *testing.T, opts ...Option) *logRig {
	r := &logRig{t: t, log: new(logged), letters: &testWriter{}}
	r.g = Must(New(Config{Group: "g"}, append([]Option{WithLogger(slog.New(r.log))}, opts...)...))
	t.Cleanup(func() {
		if !r.over { // the test has failed
			_, _ = r.g.Close(context.Background())
		}
	})
	return r
}

func (r *logRig) open(name, topic, partition string, w dlq.Writer) (*Source[int], chan int) {
	s := Must(Open(r.g, SourceConfig{Name: name, Destination: topic, Partition: partition, DeadLetters: w}, Limits{}, &testPort{}, func(_ context.Context, m int) error {
		if err := r.fault.Load(); err != nil {
			return *err
		}
		if r.poison != nil {
			return r.poison(m)
		}
		return nil
	}))
	in, ended := make(chan int, 1000), make(chan error, 1)
	r.ended = append(r.ended, ended)
	go func() { ended <- s.Run(r.t.Context(), in) }()
	return s, in
}

func (r *logRig) close() {
	r.t.Helper()
	r.over = true
	closeAll(r.t, r.g)
	for _, ended := range r.ended {
		if err := <-ended; err != nil && !errors.Is(err, ErrClosed) {
			r.t.Error(err)
		}
	}
}
