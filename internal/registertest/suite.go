// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package registertest is the conformance suite of the drivers of fleet/register. Each
// driver's tests run it against the real store.
package registertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/registers"
)

const (
	// patience is the longest wait. It is no measure of speed: the machine may be busy.
	patience = 2 * time.Minute
	// quiet is three pulses of a watch. A watch that ends by itself does not last as long.
	quiet = 3 * registers.Pulse
	// tries is how often a call may be late before the driver is to blame.
	tries = 5
)

// A Place is where one register is.
type Place struct {
	// Open returns a handle, as another process would have one. It must not fail when the store is
	// away. The handle is closed with the test.
	Open func(t *testing.T) register.Register

	// Break takes the store away from all handles, and Mend brings it back. Both are nil for a
	// place that cannot break.
	Break, Mend func(t *testing.T)
}

// Run runs all tests that need no fault. place makes an empty register.
func Run(t *testing.T, place func(t *testing.T) Place) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, Place)
	}{
		{"OneAfterTheOther", oneAfterTheOther},
		{"Twins", twins},
		{"Duel", duels},
		{"Ended", ended},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.run(t, place(t))
		})
	}
}

func oneAfterTheOther(t *testing.T, p Place) {
	ctx := context.WithoutCancel(t.Context())
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	a, b := p.Open(t), p.Open(t)

	if n, doc, err := a.Read(ctx); n != 0 || doc != nil || err != nil {
		t.Fatalf("an empty register reads %d, %q, %v; want 0, nil, nil", n, doc, err)
	}
	conflict(t, a.CompareAndSet(ctx, 2, []byte("two")), 0)
	for _, bad := range []struct {
		number uint64
		doc    []byte
		says   string
	}{
		{0, []byte("x"), "number 0"},
		{1, nil, "0 bytes"},
		{1, make([]byte, register.MaxDocument+1), "65537 bytes: it must be 1 to 65536"},
	} {
		if err := a.CompareAndSet(ctx, bad.number, bad.doc); !errors.Is(err, register.ErrDocument) || !strings.Contains(err.Error(), bad.says) {
			t.Errorf("number %d, %d bytes: %v; want ErrDocument with %q", bad.number, len(bad.doc), err, bad.says)
		}
	}
	over, end := context.WithCancel(ctx)
	end()
	if err := a.CompareAndSet(over, 1, []byte("never")); err == nil {
		t.Error("a write whose context had ended before succeeds")
	}
	if _, _, err := a.Read(over); err == nil {
		t.Error("a read whose context had ended before succeeds")
	}

	large := make([]byte, register.MaxDocument) // every byte, line ends and zeros among them
	for i := range large {
		large[i] = byte(rand.Uint32())
	}
	for i, doc := range [][]byte{[]byte("one"), large, {0}, []byte("\n\nfour\n")} {
		number := uint64(i + 1)
		writer, other := a, b
		if i%2 == 1 {
			writer, other = b, a
		}
		if err := writer.CompareAndSet(ctx, number, doc); err != nil {
			t.Fatalf("number %d: %v", number, err)
		}
		for _, r := range []register.Register{a, b, p.Open(t)} {
			if n, got, err := r.Read(ctx); n != number || !bytes.Equal(got, doc) || err != nil {
				t.Fatalf("after number %d, Read returns %d, %.20q, %v; want %.20q", number, n, got, err, doc)
			}
		}
		conflict(t, other.CompareAndSet(ctx, number, []byte("late")), number)
		conflict(t, other.CompareAndSet(ctx, number+2, []byte("early")), number)
		if number > 1 {
			conflict(t, other.CompareAndSet(ctx, number-1, []byte("later")), number)
		}
	}

	// Settle, too: a number that is taken, and a number that is free.
	if n, doc, err := register.Settle(ctx, a, 4, []byte("noop")); n != 4 || string(doc) != "\n\nfour\n" || err != nil {
		t.Errorf("Settle of a number that is taken: %d, %q, %v", n, doc, err)
	}
	if n, doc, err := register.Settle(ctx, a, 5, []byte("noop")); n != 5 || string(doc) != "noop" || err != nil {
		t.Errorf("Settle of a number that is free: %d, %q, %v", n, doc, err)
	}
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	if n, _, err := register.Settle(short, a, 7, []byte("noop")); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, register.ErrConflict) {
		t.Errorf("Settle of a number beyond the next: number %d, %v, want the end of the context", n, err)
	}
}

func conflict(t *testing.T, err error, newest uint64) {
	t.Helper()
	var c *register.ConflictError
	if !errors.Is(err, register.ErrConflict) || !errors.As(err, &c) {
		t.Fatalf("got %q, want ErrConflict", fmt.Sprint(err))
	}
	if c.Newest != newest {
		t.Errorf("conflict names number %d, want %d", c.Newest, newest)
	}
}

// twins write the same document at the same time. Only one of them may be told that it did.
func twins(t *testing.T, p Place) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	const writers = 4
	var handles []register.Register
	for range writers {
		handles = append(handles, p.Open(t))
	}
	for number := uint64(1); number <= 5; number++ {
		var wg sync.WaitGroup
		errs := make([]error, writers)
		for i, r := range handles {
			wg.Go(func() { errs[i] = r.CompareAndSet(ctx, number, []byte("the same")) })
		}
		wg.Wait()
		won := 0
		for _, err := range errs {
			if err == nil {
				won++
			} else {
				conflict(t, err, number)
			}
		}
		if won != 1 {
			t.Fatalf("number %d: %d of %d writers of the same document won: %v", number, won, writers, errs)
		}
	}
}

func duels(t *testing.T, p Place) {
	d := newDuel(t, p)
	d.watch("early", 0)
	d.watch("slow", 20*time.Millisecond)
	d.write(4, 30, func() time.Duration { return patience })
	d.watch("late", 0)
	d.write(4, 40, func() time.Duration { return patience })
	d.judge(false)
}

// ended has writers give up at any moment of a write.
func ended(t *testing.T, p Place) {
	d := newDuel(t, p)
	d.watch("watch", 0)
	begun := time.Now()
	d.write(1, 6, func() time.Duration { return patience })
	took := time.Since(begun) / 6 // a read and a write
	unknown := 0
	for round := uint64(1); round <= 6 && unknown < 5; round++ {
		d.write(2, d.newest()+5, func() time.Duration { return rand.N(2*took) + time.Microsecond })
		unknown = d.count(func(a attempt) bool { return errors.Is(a.err, register.ErrUnknown) })
	}
	t.Logf("a read and a write take %s; of %d writes %d had an unknown outcome", took, len(d.attempts), unknown)
	d.judge(true)
}

// Fault breaks the place before its first use, and again in the middle of a duel.
func Fault(t *testing.T, p Place) {
	p.Break(t)
	broken := true
	mend := func() {
		if broken {
			broken = false
			p.Mend(t)
		}
	}
	defer mend()

	d := newDuel(t, p)
	early := d.watch("early", 0)
	r := p.Open(t)
	for what, do := range map[string]func(context.Context) error{
		"Read": func(ctx context.Context) error {
			_, _, err := r.Read(ctx)
			return err
		},
		"CompareAndSet": func(ctx context.Context) error {
			err := r.CompareAndSet(ctx, 1, []byte("start"))
			d.note(attempt{1, "start", err})
			return err
		},
	} {
		for n := 1; ; n++ {
			begun := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			err := do(ctx)
			cancel()
			took := time.Since(begun)
			if err == nil || errors.Is(err, register.ErrConflict) {
				t.Errorf("%s while the store is away returns %v", what, err)
			}
			if took < 2*time.Second {
				break
			}
			if n == tries {
				t.Errorf("%s while the store is away returned %d times long after its context, at last after %s: %v", what, n, took, err)
				break
			}
		}
	}
	eventually(t, "the watch says that the store is away at its start", early.isAway)
	mend()
	eventually(t, "the watch says that the store is there", func() bool { return early.documents() > 0 })

	number := d.newest()
	if number == 0 {
		d.write(2, 5, func() time.Duration { return 5 * time.Second })
	}
	d.watch("middle", 0)
	number = d.newest()
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Some give up soon, and some wait for as long as a busy store may take.
		d.write(4, number+10, func() time.Duration { return 700 * time.Millisecond << rand.IntN(4) })
	}()
	defer func() {
		d.stop()
		<-done
	}()
	eventually(t, "some are written", func() bool { return early.number() >= number+5 })
	p.Break(t)
	broken = true
	eventually(t, "the watch says that the store is away", early.isAway)
	mend()
	<-done
	d.write(2, d.newest()+5, func() time.Duration { return 5 * time.Second })
	// A slow store may be taken for one that is away, but not again and again.
	eventually(t, "the watch says no more that the store is away", early.steady)
	d.judge(true)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for begun := time.Now(); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Since(begun) > patience {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// A duel has writers compete for numbers. Each document is the list of all ids that won so far, so
// the last document is the whole history.
type duel struct {
	t        *testing.T
	place    Place
	over     context.Context //nolint:containedctx // its end is the writers'
	stop     context.CancelFunc
	reader   register.Register
	mu       sync.Mutex
	attempts []attempt
	watchers []*watcher
	next     int
	late     int // writes that returned long after their context
	timely   int // writes that returned with their context
}

type attempt struct {
	number uint64
	id     string
	err    error
}

func newDuel(t *testing.T, p Place) *duel {
	d := &duel{t: t, place: p, reader: p.Open(t)}
	d.over, d.stop = context.WithCancel(context.Background())
	t.Cleanup(d.stop)
	return d
}

func (d *duel) note(a attempt) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.attempts = append(d.attempts, a)
}

// ended notes that the context of a write ended before the write returned.
func (d *duel) ended(late bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if late {
		d.late++
	} else {
		d.timely++
	}
}

func (d *duel) count(of func(attempt) bool) (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, a := range d.attempts {
		if of(a) {
			n++
		}
	}
	return n
}

func (d *duel) id() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next++
	return fmt.Sprintf("w%d", d.next)
}

// read reads the register, and tries for as long as the store may be away.
func (d *duel) read() (number uint64, document []byte) {
	d.t.Helper()
	var err error
	for begun := time.Now(); time.Since(begun) < patience; time.Sleep(5 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		number, document, err = d.reader.Read(ctx)
		cancel()
		if err == nil {
			return number, document
		}
	}
	d.t.Errorf("the register cannot be read: %v", err)
	return 0, nil
}

func (d *duel) newest() uint64 {
	d.t.Helper()
	number, _ := d.read()
	return number
}

// write has a number of writers write until the number is reached. Each has its own handle and two
// goroutines.
func (d *duel) write(writers int, until uint64, limit func() time.Duration) {
	var wg sync.WaitGroup
	for range writers {
		r := d.place.Open(d.t)
		for range 2 {
			wg.Go(func() {
				for begun := time.Now(); time.Since(begun) < 2*patience; {
					if d.over.Err() != nil || d.once(r, until, limit()) {
						return
					}
				}
				d.t.Errorf("number %d was not reached in %s", until, 2*patience)
			})
		}
	}
	wg.Wait()
}

func (d *duel) once(r register.Register, until uint64, limit time.Duration) (done bool) {
	reading, cancel := context.WithTimeout(context.Background(), max(limit, time.Second))
	number, document, err := r.Read(reading)
	cancel()
	if err != nil {
		time.Sleep(5 * time.Millisecond)
		return false
	}
	if number >= until {
		return true
	}
	id := d.id()
	document = append(document, id+"\n"...)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	// A busy machine also notices the context's end late. That is not the write's fault.
	noticed := make(chan time.Time, 1)
	context.AfterFunc(ctx, func() { noticed <- time.Now() })
	err = r.CompareAndSet(ctx, number+1, document)
	returned := time.Now()
	if ctx.Err() != nil {
		d.ended(returned.Sub(<-noticed) > time.Second)
	}
	d.note(attempt{number + 1, id, err})
	return false
}

// judge settles writes that may still be on their way. Then it compares what the writers were told
// and what the watchers saw with the history.
func (d *duel) judge(settle bool) {
	t := d.t
	t.Helper()
	if settle {
		number, document := d.read()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if _, _, err := register.Settle(ctx, d.reader, number+1, append(document, "settled\n"...)); err != nil {
			t.Fatalf("Settle: %v", err)
		}
	}
	number, document := d.read()
	history := strings.Fields(string(document))
	if uint64(len(history)) != number {
		t.Fatalf("number %d has a history of %d: numbers were left out, or written over:\n%s", number, len(history), document)
	}
	won, unknown := 0, 0
	d.mu.Lock()
	for _, a := range d.attempts {
		at := slices.Index(history, a.id)
		happened := at >= 0
		switch {
		case happened && uint64(at+1) != a.number:
			t.Errorf("%s was for number %d, and is number %d", a.id, a.number, at+1)
		case a.err == nil && !happened:
			t.Errorf("%s won number %d, and %s has it", a.id, a.number, history[a.number-1])
		case a.err == nil:
			won++
		case errors.Is(a.err, register.ErrUnknown):
			unknown++
		case happened:
			t.Errorf("%s is number %d, and its writer was told that it is not: %v", a.id, a.number, a.err)
		}
	}
	t.Logf("%d numbers, %d attempts: %d won, %d unknown; %d late", number, len(d.attempts), won, unknown, d.late)
	if d.late > d.timely {
		t.Errorf("%d writes returned more than a second after their contexts, and %d in time", d.late, d.timely)
	}
	d.mu.Unlock()

	for _, w := range d.watchers {
		eventually(t, fmt.Sprintf("watch %s sees number %d", w.name, number), func() bool { return w.number() == number })
	}
	time.Sleep(100 * time.Millisecond) // for late writes, which must change nothing
	if n, doc := d.read(); n != number || !bytes.Equal(doc, document) {
		t.Errorf("number %d was settled, and then there was number %d: %q", number, n, doc)
	}
	for _, w := range d.watchers {
		w.end(t)
		w.judge(t, history)
	}
}

// A watcher notes the events of its Watch.
type watcher struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{}
	err    error

	mu     sync.Mutex
	events []register.Event
	away   time.Time // when the store was last away
	over   bool      // Watch has returned
	after  int       // events after Watch has returned
}

func (d *duel) watch(name string, slow time.Duration) *watcher {
	ctx, cancel := context.WithCancel(context.Background())
	w := &watcher{name: name, cancel: cancel, done: make(chan struct{})}
	d.watchers = append(d.watchers, w)
	r := d.place.Open(d.t)
	go func() {
		defer close(w.done)
		err := r.Watch(ctx, func(e register.Event) {
			w.mu.Lock()
			w.events = append(w.events, e)
			if e.Err != nil {
				w.away = time.Now()
			}
			if w.over {
				w.after++
			}
			w.mu.Unlock()
			time.Sleep(slow)
		})
		w.mu.Lock()
		defer w.mu.Unlock()
		w.err, w.over = err, true
	}()
	d.t.Cleanup(func() {
		cancel()
		<-w.done
	})
	return w
}

func (w *watcher) number() (n uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.events {
		n = max(n, e.Number)
	}
	return n
}

// isAway reports whether the store is away, according to the watch.
func (w *watcher) isAway() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.events) > 0 && w.events[len(w.events)-1].Err != nil
}

// steady reports whether the store has been there for a while, according to the watch.
func (w *watcher) steady() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.events[len(w.events)-1].Err == nil && time.Since(w.away) > quiet
}

func (w *watcher) documents() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.events {
		if e.Err == nil {
			n++
		}
	}
	return n
}

func (w *watcher) end(t *testing.T) {
	t.Helper()
	w.cancel()
	select {
	case <-w.done:
	case <-time.After(patience):
		t.Fatalf("watch %s does not end with its context", w.name)
	}
	if !errors.Is(w.err, context.Canceled) {
		t.Errorf("watch %s returned %v, want its context's error", w.name, w.err)
	}
}

func (w *watcher) judge(t *testing.T, history []string) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.after > 0 {
		t.Errorf("watch %s said %d things after it had returned", w.name, w.after)
	}
	last, away := uint64(0), false
	for i, e := range w.events {
		if e.Err != nil {
			if away {
				t.Errorf("watch %s said twice in a row that the store is away: %v", w.name, e.Err)
			}
			away = true
			continue
		}
		if e.Number < last || e.Number == last && !away && i > 0 {
			t.Errorf("watch %s said number %d after number %d", w.name, e.Number, last)
		}
		away, last = false, e.Number
		if want := strings.Join(history[:min(e.Number, uint64(len(history)))], "\n"); strings.TrimSpace(string(e.Document)) != want {
			t.Errorf("watch %s saw another document as number %d:\n%s\nthe history has\n%s", w.name, e.Number, e.Document, want)
		}
		if (e.Number == 0) != (e.Document == nil) {
			t.Errorf("watch %s: number %d with document %q", w.name, e.Number, e.Document)
		}
	}
	if last != uint64(len(history)) {
		t.Errorf("watch %s ended at number %d of %d", w.name, last, len(history))
	}
}
