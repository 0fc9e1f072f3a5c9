// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// funcWriter is a writer that sources share.
type funcWriter struct {
	f func(context.Context, *dlq.Record) error
}

func (w *funcWriter) Write(ctx context.Context, r *dlq.Record) error { return w.f(ctx, r) }

// Writes that never return hold their own sources, however many these are: the letters of
// others are written. A write that returns after all is a dead letter, written once.
func TestWritesThatNeverReturn(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{}, WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		release := make(chan struct{})
		calls := make(chan string, 1000)
		write := func(_ context.Context, r *dlq.Record) error {
			if calls <- string(r.Body); len(r.Body) < 4 {
				<-release
			}
			return nil
		}
		shared := &funcWriter{write} // one for all, unlike a function
		type source struct {
			in chan int
			s  *Source[int]
		}
		open := func(name string) source {
			s, err := Open(g, SourceConfig{Name: name, DeadLetters: shared}, Limits{}, &testPort{}, func(context.Context, int) error { return Permanent(errBad) })
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 10)
			go func() { _ = s.Run(t.Context(), in) }()
			return source{in, s}
		}
		const hung = 2 * writesAtOnce
		var all []source
		for m := range hung {
			src := open("a" + strconv.Itoa(m))
			src.in <- m
			src.in <- 100 + m
			all = append(all, src)
		}
		time.Sleep(5 * time.Minute)
		b := open("b")
		b.in <- 1000
		time.Sleep(time.Minute)
		if a := b.s.Account(); a.DeadLettered != 1 {
			t.Errorf("the letter of another source waits: %+v", a)
		}
		close(release)
		time.Sleep(time.Minute)
		var got []string
		for range len(calls) {
			got = append(got, <-calls)
		}
		slices.Sort(got)
		if len(got) != 2*hung+1 || len(slices.Compact(got)) != 2*hung+1 {
			t.Errorf("%d writes: %v", len(got), got)
		}
		for _, src := range all {
			if a := src.s.Account(); a.DeadLettered != 2 || a.Check() != nil {
				t.Errorf("%s: %+v", src.s.Name(), a)
			}
		}
		if err := g.Ready(); err != nil {
			t.Error(err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// lockedLog is a log that is read while it is written.
type lockedLog struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lockedLog) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// A write that is late is said of a source whose letters fail, too, once, and not of one
// whose write has returned.
func TestLateWriteOfASourceWhoseLettersFail(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var logged lockedLog
		r := newRig(t, Policy{}, Limits{}, func(*rig, context.Context, int) error { return Permanent(errBad) })
		r.g.log = slog.New(slog.NewTextHandler(&logged, nil)) // before anything is logged
		writes, release := 0, make(chan struct{})
		r.letters.says = func(*dlq.Record) error {
			switch writes++; writes {
			case 1:
				return errDown
			case 2, 3:
				time.Sleep(writeLate - time.Second) // not late
				return errDown
			case 4, 5:
				time.Sleep(writeLate + time.Second)
				return errDown
			}
			<-release
			return nil
		}
		late := func() int {
			synctest.Wait()
			return strings.Count(logged.text(), errWriteLate.Error())
		}
		r.send(0, 1)
		time.Sleep(2*writeLate + 30*time.Second)
		if n := late(); n != 0 {
			t.Errorf("%d lines of a late write: %s", n, logged.text())
		}
		time.Sleep(10 * time.Minute)
		if n := late(); n != 1 || writes != 6 {
			t.Errorf("%d lines of a late write after %d writes: %s", n, writes, logged.text())
		}
		if err := r.g.Ready(); !errors.Is(err, errWriteLate) {
			t.Errorf("ready: %v", err)
		}
		close(release)
		synctest.Wait()
		if a := r.check(); a.DeadLettered != 1 || r.g.Ready() != nil {
			t.Errorf("%+v, %v", a, r.g.Ready())
		}
		r.close()
	})
}

// A write that returns when its source has ended calls no port, and is nobody's dead letter.
func TestLateWriteAfterEnd(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(*rig, context.Context, int) error { return Permanent(errBad) })
		release := make(chan struct{})
		r.letters.says = func(*dlq.Record) error { <-release; return nil }
		r.send(0, 1)
		time.Sleep(writeLate + time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if rep := r.s.End(ctx, ReasonShutdown); len(rep.Left) != 1 {
			t.Errorf("%+v", rep)
		}
		flushes := r.port.flushes
		close(release)
		synctest.Wait()
		if a := r.check(); a.DeadLettered != 0 || a.Returned != 1 || a.Unsettled() != 0 {
			t.Errorf("%+v", a)
		}
		if r.port.flushes != flushes || len(r.port.acked) > 0 {
			t.Errorf("%d flushes, acked %v", r.port.flushes-flushes, r.port.acked)
		}
		r.close()
	})
}
