// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A dead-letter writer that is down settles nothing and loses nothing.
func TestWriterDown(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			if m == 2 {
				return Permanent(errors.New("bad"))
			}
			return nil
		})
		r.letters.err = errors.New("stream offline")
		r.send(0, 10)
		time.Sleep(time.Minute)
		if a := r.check(); a.Acked != 9 || a.Settling != 1 {
			t.Errorf("%+v", a)
		}
		if h := r.s.State().Holds; len(h) != 1 || h[0].Reason != ReasonDLQ {
			t.Errorf("%+v", h)
		}
		if r.g.Ready() == nil {
			t.Error("ready although the writer fails")
		}
		r.letters.mu.Lock()
		r.letters.err = nil
		r.letters.mu.Unlock()
		time.Sleep(time.Minute)
		if a := r.check(); a.DeadLettered != 1 || r.g.Ready() != nil {
			t.Errorf("%+v", a)
		}
		r.close()
	})
}

// The letter of a source that has ended says nothing about the writer, which
// still fails for another source, and takes its error with it as the last one.
func TestLetterOfAnEndedSource(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		letters := &downWriter{took: time.Second}
		var sources [2]*Source[int]
		for i := range sources {
			s, err := Open(g, SourceConfig{Name: strconv.Itoa(i), DeadLetters: letters}, Limits{}, &testPort{},
				func(context.Context, int) error { return Permanent(errDown) })
			if err != nil {
				t.Fatal(err)
			}
			sources[i] = s
			in := make(chan int, 3)
			for m := range cap(in) {
				in <- m
			}
			go func() { _ = s.Run(t.Context(), in) }() // until Close
		}
		end := func(s *Source[int]) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if rep := s.End(ctx, ReasonShutdown); len(rep.Left) == 0 {
				t.Errorf("%+v", rep)
			}
		}
		time.Sleep(time.Minute)
		end(sources[0])
		for range 1200 {
			if time.Sleep(100 * time.Millisecond); g.Ready() == nil {
				t.Fatal("ready although the writer fails")
			}
		}
		end(sources[1])
		time.Sleep(time.Minute)
		if err := g.Ready(); err != nil {
			t.Errorf("nothing waits for the writer: %v", err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// downWriter fails slowly.
type downWriter struct{ took time.Duration }

func (w *downWriter) Write(context.Context, *dlq.Record) error {
	time.Sleep(w.took)
	return errDown
}

// Letters that the writer puts off are no failure of it: the Guard is ready, the
// source says why they wait, other letters are written without a pause, and these
// once they are taken. A failure before it, of the same letter, is over.
func TestLetterPutOff(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			if m >= 2 {
				return Permanent(errors.New("bad"))
			}
			return nil
		})
		full, offers, written := errors.New("no room"), 0, make(map[string]time.Time)
		taken := false
		r.letters.says = func(rec *dlq.Record) error {
			switch n, _ := strconv.Atoi(string(rec.Body)); {
			case n < 12 && !taken:
				if offers++; offers == 1 {
					return errDown
				}
				return fmt.Errorf("%w: %w", dlq.ErrPutOff, full)
			case n == 20:
				time.Sleep(10 * time.Second)
			}
			written[string(rec.Body)] = time.Now()
			return nil
		}
		r.send(0, 12)
		time.Sleep(time.Minute)
		if a := r.check(); a.Acked != 2 || a.Settling != 10 {
			t.Errorf("%+v", a)
		}
		if err := r.g.Ready(); err != nil {
			t.Errorf("a writer that puts letters off is not ready: %v", err)
		}
		if h := r.s.State().Holds; len(h) != 1 || h[0].Reason != ReasonDLQ || !strings.Contains(h[0].Detail, "10 dead letters are put off: dlq: record put off: no room") {
			t.Errorf("%+v", h)
		}
		if offers < 300 || offers > 2400 {
			t.Errorf("%d offers of 10 letters in a minute", offers)
		}
		begun := time.Now()
		r.send(12, 20)
		time.Sleep(time.Minute)
		r.check()
		for m := 12; m < 20; m++ {
			if at, ok := written[strconv.Itoa(m)]; !ok || at.Sub(begun) > putOffMax {
				t.Errorf("letter %d was written after %s", m, at.Sub(begun))
			}
		}
		r.letters.mu.Lock()
		taken = true
		r.letters.mu.Unlock()
		time.Sleep(2 * putOffMax)
		if a := r.check(); a.DeadLettered != 18 {
			t.Errorf("%+v", a)
		}
		r.send(20, 21)
		time.Sleep(time.Second)
		if a := r.check(); a.Settling != 1 || len(r.s.State().Holds) > 0 {
			t.Errorf("%+v: %+v", a, r.s.State().Holds)
		}
		time.Sleep(10 * time.Second)
		r.close()
	})
}

// A spent budget keeps what would be dead-lettered, until an operator's grant.
func TestBudgetSpentWaitsForGrant(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := Policy{}
		p.Budget.PermanentBalance = 2
		p.Budget.FreeEvery = 1000 * time.Hour
		r := newRig(t, p, Limits{}, func(*rig, context.Context, int) error { return Permanent(errors.New("bad")) })
		r.send(0, 5)
		time.Sleep(time.Minute)
		if a := r.check(); a.DeadLettered != 2 || a.Unsettled() != 3 {
			t.Errorf("%+v", a)
		}
		if h := r.s.State().Holds; len(h) == 0 || h[0].Reason != ReasonDLQ {
			t.Errorf("%+v", h)
		}
		r.s.GrantCredits(3)
		time.Sleep(time.Minute)
		if a := r.check(); a.DeadLettered != 5 {
			t.Errorf("%+v", a)
		}
		if n := len(r.calls); n != 5 {
			t.Errorf("%d handler calls for 5 permanent failures", n)
		}
		r.close()
	})
}

// Letters that one topic's DLQ does not take keep no other waiting, and the writer is in
// trouble until they are gone.
func TestFailedLettersKeepNoOtherWaiting(t *testing.T) {
	for name, why := range map[string]error{"refused": fmt.Errorf("topic a.dlq: %w", dlq.ErrRefused), "down": errDown} {
		bubble(t, name, func(t *testing.T) {
			p := newPartlyDown(t, why)
			a, b := p.open("a"), p.open("b")
			for m := range 100 {
				a <- m
			}
			time.Sleep(5 * time.Minute)
			for m := range 5 {
				tries := p.failed.Load()
				b <- 1000 + m
				if synctest.Wait(); len(p.bodies()) != m+1 {
					t.Fatalf("%d letters of b are written at once, want %d", len(p.bodies()), m+1)
				}
				if n := p.failed.Load() - tries; n > 0 {
					t.Fatalf("a letter of b brings %d tries of a", n)
				}
				for range 60 {
					if time.Sleep(time.Second / 2); p.g.Ready() == nil {
						t.Fatal("ready, while letters fail")
					}
				}
			}
			p.mend(105)
		})
	}
}

// A source whose DLQ is well does not say that its letters cannot be written while another's is
// down, and Ready says whose it is.
func TestFailedLettersAreTheirSources(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := newPartlyDown(t, errDown)
		p.each = time.Second / 2
		p.open("a") <- 7
		b := p.open("b")
		time.Sleep(10 * time.Second)
		b <- 1000
		synctest.Wait()
		holds := func(source string) bool {
			return slices.ContainsFunc(p.g.Source(source).State().Holds, func(h Hold) bool { return h.Reason == ReasonDLQ })
		}
		if a, b := holds("a"), holds("b"); !a || b || len(p.bodies()) > 0 {
			t.Errorf("%d letters are written, a has a hold: %v, b: %v", len(p.bodies()), a, b)
		}
		if err := p.g.Ready(); err == nil || !strings.Contains(err.Error(), "source a: ") {
			t.Errorf("ready: %v", err)
		}
		p.open("c") <- 8
		time.Sleep(10 * time.Second)
		if err := p.g.Ready(); err == nil || !strings.Contains(err.Error(), "source a and 1 more: ") {
			t.Errorf("ready: %v", err)
		}
		p.mend(3)
	})
}

// Many sources whose DLQ is down: the writer is tried 8 times for each pause, and a source
// whose DLQ is not waits for a pause of each 8 of them.
func TestFailedSourcesTakeTurns(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const sources = 20
		p := newPartlyDown(t, errDown)
		for m := range sources {
			a := p.open(fmt.Sprint("a", m))
			for range 10 {
				a <- m
			}
		}
		time.Sleep(time.Minute)
		tries := p.failed.Load()
		if time.Sleep(3 * time.Minute); p.failed.Load()-tries > 8*(3*60/4) { // a pause takes 5s on average
			t.Errorf("%d failed writes in 3 min", p.failed.Load()-tries)
		}
		b := p.open("b")
		for m := range 3 {
			b <- 1000 + m
			if time.Sleep((sources/8 + 3) * writeMax); len(p.bodies()) != m+1 {
				t.Fatalf("%d letters of b are written, want %d", len(p.bodies()), m+1)
			}
		}
		p.mend(3 + 10*sources)
	})
}

// One letter that can never be written keeps no other of its source waiting for long.
func TestFailedLetterOfItsSource(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := newPartlyDown(t, errDown)
		a := p.open("a")
		a <- 7
		for m := range 20 {
			a <- 1000 + m
		}
		if time.Sleep(writeMax); len(p.bodies()) != 20 {
			t.Errorf("%d letters are written, want 20", len(p.bodies()))
		}
		p.mend(21)
	})
}

// A writer that never rests takes what failed once, as soon as it can.
func TestFailedLetterOfABusyWriter(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := newPartlyDown(t, errDown)
		p.each = time.Millisecond
		a, b := p.open("a"), p.open("b")
		go func() {
			for m := range 20_000 {
				b <- 1000 + m
			}
		}()
		a <- 7
		for p.failed.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		p.mended.Store(true)
		if time.Sleep(writeMax); !slices.Contains(p.bodies(), "7") || p.g.Ready() != nil {
			t.Errorf("the letter of a waits behind %d others, %v", len(p.bodies()), p.g.Ready())
		}
		time.Sleep(time.Minute)
		p.mend(20_001)
	})
}

// Writes that hang for sources whose DLQ is down keep another's letter waiting for a second
// and, if none has succeeded for long, a pause.
func TestWritesThatHangTakeTurns(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := newPartlyDown(t, errDown)
		p.hangs = writeTimeout
		b := p.open("b")
		for m := range 12 {
			p.open(fmt.Sprint("a", m)) <- m
		}
		time.Sleep(15 * time.Minute)
		for m := range 3 {
			b <- 1000 + m
			if time.Sleep(2*writeSlow + writeMax); len(p.bodies()) != m+1 {
				t.Fatalf("%d letters of b are written, want %d", len(p.bodies()), m+1)
			}
		}
		p.mended.Store(true)
		time.Sleep(writeTimeout)
		p.mend(15)
	})
}

// Sources whose DLQ hangs, which nobody knows yet, keep another's letter waiting for one write,
// and not for one of each.
func TestFirstWritesThatHang(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := newPartlyDown(t, errDown)
		p.hangs = writeTimeout
		for m := range 12 {
			p.open(fmt.Sprint("a", m)) <- m
			synctest.Wait() // its letter is in front of b's
		}
		start := time.Now()
		p.open("b") <- 1000
		for len(p.bodies()) == 0 {
			if time.Sleep(time.Second); time.Since(start) > 10*time.Minute {
				t.Fatal("the letter of b is not written")
			}
		}
		if took := time.Since(start); took > 2*writeTimeout {
			t.Errorf("the letter of b is written after %v", took)
		}
		if n := p.most.Load(); n > writesAtOnce {
			t.Errorf("%d writes at once", n)
		}
		p.mended.Store(true)
		time.Sleep(writeTimeout)
		p.mend(13)
	})
}

// Letters whose refusals take time keep another's waiting for one of them.
func TestRefusalsThatTakeTime(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := newPartlyDown(t, dlq.ErrRefused)
		p.hangs = time.Second
		a, b := p.open("a"), p.open("b")
		for m := range 100 {
			a <- m
		}
		time.Sleep(5 * time.Minute)
		for m := range 20 {
			b <- 1000 + m
			if time.Sleep(p.hangs + time.Millisecond); len(p.bodies()) != m+1 {
				t.Fatalf("%d letters of b are written, want %d", len(p.bodies()), m+1)
			}
		}
		p.mend(120)
	})
}

// A letter that is refused for good makes no other wait for longer: not one whose write
// failed once, nor one that is put off.
func TestRefusedLetterLeavesThePaceOfOthers(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := newPartlyDown(t, dlq.ErrRefused)
		once := make(chan error, 1)
		p.says = func(r *dlq.Record) error {
			select {
			case err := <-once:
				return err
			default:
				return nil
			}
		}
		p.open("a") <- 7
		time.Sleep(2 * time.Minute)
		b := p.open("b")
		for m, why := range []error{errDown, dlq.ErrPutOff, errDown, dlq.ErrPutOff} {
			once <- why
			b <- 1000 + m
			if time.Sleep(writeBase); len(p.bodies()) != m+1 {
				t.Errorf("%v: %d letters of b are written, want %d", why, len(p.bodies()), m+1)
			}
			time.Sleep(time.Second)
		}
		p.mend(5)
	})
}

// partlyDown is a writer that does not take bodies of less than four bytes until it is
// mended, and sources whose messages are all dead-lettered.
type partlyDown struct {
	t           *testing.T
	g           *Guard
	why         error
	each, hangs time.Duration             // a write takes so long, one that fails hangs longer
	says        func(r *dlq.Record) error // of what it takes; nil for no error
	failed      atomic.Int64
	now, most   atomic.Int64 // writes under way, and at most
	mended      atomic.Bool

	mu      sync.Mutex
	written []string
}

func newPartlyDown(t *testing.T, why error) *partlyDown {
	t.Helper()
	g, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	return &partlyDown{t: t, g: g, why: why}
}

func (p *partlyDown) Write(_ context.Context, r *dlq.Record) error {
	n := p.now.Add(1)
	for was := p.most.Load(); n > was && !p.most.CompareAndSwap(was, n); was = p.most.Load() {
	}
	defer p.now.Add(-1)
	time.Sleep(p.each)
	if len(r.Body) < 4 && !p.mended.Load() {
		time.Sleep(p.hangs)
		p.failed.Add(1)
		return p.why
	}
	if p.says != nil {
		if err := p.says(r); err != nil {
			return err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.written = append(p.written, string(r.Body))
	return nil
}

func (p *partlyDown) bodies() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.written)
}

func (p *partlyDown) open(name string) chan<- int {
	p.t.Helper()
	cfg := SourceConfig{Name: name, Destination: name, DeadLetters: p, Policy: &Policy{Budget: dlq.BudgetConfig{Off: true}}}
	s, err := Open(p.g, cfg, Limits{}, &testPort{}, func(context.Context, int) error { return Permanent(errBad) })
	if err != nil {
		p.t.Fatal(err)
	}
	in := make(chan int)
	go func() { _ = s.Run(p.t.Context(), in) }() // ends with the Guard
	return in
}

// mend lets the writer take all, and ends the Guard when they are written.
func (p *partlyDown) mend(letters int) {
	p.t.Helper()
	p.mended.Store(true)
	time.Sleep(writeMax)
	if got := len(p.bodies()); got != letters || p.g.Ready() != nil {
		p.t.Errorf("%d letters of %d, %v", got, letters, p.g.Ready())
	}
	if _, err := p.g.Close(p.t.Context()); err != nil {
		p.t.Error(err)
	}
}
