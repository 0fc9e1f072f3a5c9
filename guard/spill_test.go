// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package guard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// In an outage that is longer than its window a source acks what it spills, holds it, and
// handles all of it in order when the dependency is back.
func TestSpillHoldsAnOutage(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		bubble(t, order.String(), func(t *testing.T) {
			p := Policy{Spill: true, Window: 64, Order: order}
			if order != OrderSource {
				p.Workers = 4
			}
			q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: p})
			q.open()
			q.setDown(true)
			q.send(3000)
			time.Sleep(20 * time.Second)
			q.settle(false)
			a, st := q.s.Account(), q.s.State()
			if q.acked < 2990 || a.Unsettled() != 3000 || st.Spilled < 2990 || a.Acked > 0 {
				t.Errorf("in the outage %d are acked at the broker, %d spilled: %+v", q.acked, st.Spilled, a)
			}
			if st.used != 0 {
				t.Errorf("%v of the window used, and the disk takes more", st.used)
			}
			if err := a.Check(); err != nil {
				t.Error(err)
			}
			q.mu.Lock()
			if q.calls > 200 {
				t.Errorf("%d calls in the outage", q.calls)
			}
			q.mu.Unlock()
			q.setDown(false)
			q.drain(30 * time.Second)
			q.counts(1)
			if order == OrderSource && !slices.IsSorted(q.handled) {
				t.Errorf("not in order: %v", q.handled)
			}
			// What comes later does not touch the disk.
			q.send(100)
			q.drain(time.Second)
			if n := q.s.State().Tally.Spilled; n > 3000 {
				t.Errorf("%d messages spilled of 3000", n)
			}
			if n := q.g.spill.Stats().Count; n != 0 {
				t.Errorf("%d messages are left on the disk", n)
			}
			q.close(ReasonShutdown, true)
		})
	}
}

// What a source has spilled when it ends is handled first, in order, by the next one of
// its name.
func TestSpillOverAnEnd(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 64}})
		q.open()
		q.setDown(true)
		q.send(500)
		time.Sleep(20 * time.Second)
		if r := q.close(ReasonShutdown, true); r.Spilled < 490 || r.Spilled+r.Returned != 500 {
			t.Errorf("%d are left in the spill and %d given back, of 500", r.Spilled, r.Returned)
		}
		q.setDown(false)
		q.send(100)
		q.open()
		q.drain(30 * time.Second)
		q.counts(1)
		if !slices.IsSorted(q.handled) {
			t.Errorf("not in order: %v", q.handled)
		}
		q.close(ReasonShutdown, true)
	})
}

// End waits for a write that is under way, and tells the broker of it; a write that failed
// is made again, in its order.
func TestSpillWriteUnderWay(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 2}})
		q.open()
		q.setDown(true)
		q.send(4)
		time.Sleep(20 * time.Second)
		q.settle(false)
		begin := func(from, to int) {
			q.mu.Lock()
			defer q.mu.Unlock()
			q.s.mu.Lock()
			defer q.s.mu.Unlock()
			for m := from; m < to; m++ {
				q.out[m] = true
				q.s.c.behind++
				q.s.over.going = append(q.s.over.going, spilling[int]{m, &spilled{placed: true}, 1, false})
			}
		}
		begin(4, 6)
		q.mu.Lock()
		q.s.mu.Lock()
		q.s.spillLocked(0, 6, 1)
		q.s.mu.Unlock()
		q.out[6] = true
		q.mu.Unlock()
		q.s.wroteSpilled(errDown)
		synctest.Wait()
		if q.settle(false); q.acked != 7 {
			t.Errorf("%d messages are acked, want 7: those whose write failed are written again", q.acked)
		}
		begin(7, 8)
		done := make(chan Report)
		go func() { done <- q.s.End(t.Context(), ReasonShutdown) }()
		synctest.Wait()
		select {
		case <-done:
			t.Error("End did not wait for the write")
		default:
		}
		q.s.wroteSpilled(nil)
		if r := <-done; r.Spilled != 8 {
			t.Errorf("%d messages are left in the spill, want 8", r.Spilled)
		}
		q.sent = 8
		q.sending = -1
		q.close(ReasonShutdown, true)
		q.setDown(false)
		q.open()
		time.Sleep(10 * time.Second)
		q.sent = 7
		q.close(ReasonShutdown, true)
		if want := []int{0, 1, 2, 3, 4, 5, 6}; !slices.Equal(q.handled, want) { // the last was not really written
			t.Errorf("handled %v, want %v", q.handled, want)
		}
	})
}

// A backlog stays at the broker: once messages are handled again, nothing more is spilled.
func TestSpillLeavesTheBacklog(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 64}})
		q.takes = 100 * time.Millisecond
		q.open()
		q.setDown(true)
		q.send(500)
		time.Sleep(20 * time.Second)
		q.setDown(false)
		time.Sleep(15 * time.Second) // the ramp is over, the disk is not empty
		spilled := q.s.State().Tally.Spilled
		q.send(2000)
		for q.s.State().Spilled > 0 {
			time.Sleep(time.Second)
		}
		if n := q.s.State().Tally.Spilled - spilled; n > 0 {
			t.Errorf("%d messages of the backlog were spilled", n)
		}
		q.drain(5 * time.Minute)
		q.counts(1)
		if !slices.IsSorted(q.handled) {
			t.Errorf("not in order")
		}
		q.close(ReasonShutdown, true)
	})
}

// What is read from the disk heeds WindowBytes, whatever it was like before.
func TestSpillReadsWhatFits(t *testing.T) {
	for _, empty := range []int{0, 300} {
		readsWhatFits(t, empty)
	}
}

func readsWhatFits(t *testing.T, empty int) {
	bubble(t, fmt.Sprint(empty, " empty"), func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 400, WindowBytes: 100 << 10}})
		q.body, q.empty = 10<<10, empty
		q.takes = 50 * time.Millisecond
		q.open()
		q.setDown(true)
		q.send(1000)
		time.Sleep(20 * time.Second)
		q.close(ReasonShutdown, false)
		q.setDown(false)
		q.open()
		for range 100 {
			time.Sleep(100 * time.Millisecond)
			q.s.mu.Lock()
			if n := q.s.c.bytes; n > 120<<10 {
				t.Errorf("%d bytes in the window of 100 KiB", n)
			}
			q.s.mu.Unlock()
		}
		q.drain(2 * time.Minute)
		q.counts(1)
		q.close(ReasonShutdown, true)
	})
}

// A message that is done while its copy is being written does not come again after a stop.
func TestSpillDoneMeanwhile(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 8}})
		q.open()
		copy := &spilled{placed: true, acked: true, done: true} // of a message that was handled meanwhile
		w := spilling[int]{0, copy, 0, true}
		data, err := q.s.over.encode(w)
		if err != nil {
			t.Fatal(err)
		}
		q.s.mu.Lock()
		q.s.over.going = []spilling[int]{w}
		q.s.mu.Unlock()
		written := make(chan error, 1)
		if err := q.s.over.lane.Append(func(err error) { written <- err }, data); err != nil {
			t.Fatal(err)
		}
		done := make(chan Report)
		go func() { done <- q.s.End(t.Context(), ReasonShutdown) }()
		synctest.Wait() // the loop has gone
		q.s.wroteSpilled(<-written)
		<-done
		q.close(ReasonShutdown, true)
		q.open()
		time.Sleep(20 * time.Second)
		q.close(ReasonShutdown, true)
		if len(q.handled) > 0 {
			t.Errorf("handled %v again", q.handled)
		}
	})
}

// A spill that another source has filled holds up nobody whose dependency is well.
func TestSpillFullOfAnother(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		a := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{SpillBytes: 64 << 10, Policy: Policy{Spill: true, Window: 16}})
		a.open()
		a.setDown(true)
		a.send(3000)
		time.Sleep(20 * time.Second)
		b := newQueue(t, a.dir, a.cfg)
		b.g, b.name = a.g, "other"
		b.open()
		b.setDown(true)
		b.send(2000)
		time.Sleep(20 * time.Second)
		b.setDown(false)
		b.drain(30 * time.Second)
		b.counts(1)
		if !slices.IsSorted(b.handled) {
			t.Error("not in order")
		}
		b.close(ReasonShutdown, false)
		a.setDown(false)
		a.drain(time.Minute)
		a.close(ReasonShutdown, true)
	})
}

// A handler that hangs keeps its own message, and not the disk: the next epoch reads on.
func TestSpillBehindAHungHandler(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 16}})
		q.open()
		q.setDown(true)
		q.send(100)
		time.Sleep(20 * time.Second)
		q.close(ReasonShutdown, false)
		q.setDown(false)
		hang := make(chan struct{})
		q.hang = hang
		q.open()
		time.Sleep(10 * time.Second) // a probe
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if r := q.s.End(ctx, ReasonRebalance); len(r.Left) != 1 {
			t.Errorf("left: %+v", r)
		}
		q.stop()
		q.settle(false)
		ended := q.ended
		q.mu.Lock()
		q.hang = nil
		q.mu.Unlock()
		q.open()
		q.drain(30 * time.Second)
		close(hang)
		<-ended
		q.close(ReasonShutdown, true)
		if first := slices.Index(q.handled, 0); first != 0 {
			t.Errorf("handled %v", q.handled)
		}
		if n := len(q.handled); n != 98 { // of 100 three are poison; the one that hung is handled twice
			t.Errorf("%d handled", n)
		}
	})
}

// What is done behind a message that waits takes its place in the window, so that neither
// memory nor what a stop brings back grows.
func TestSpillBehindOneThatWaits(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 20, Order: OrderKey}})
		q.letters.err = errDown // so the first poison waits for its letter
		q.open()
		q.setDown(true)
		q.send(13)
		q.send(1000)
		time.Sleep(20 * time.Second)
		q.close(ReasonShutdown, false)
		q.setDown(false)
		q.open()
		time.Sleep(2 * time.Minute)
		q.s.mu.Lock()
		if n := q.s.over.read.len(); n > 20+farWitnesses {
			t.Errorf("%d messages are read behind one that waits, with a window of 20", n)
		}
		q.s.mu.Unlock()
		q.letters.mu.Lock()
		q.letters.err = nil
		q.letters.mu.Unlock()
		q.drain(5 * time.Minute)
		q.counts(1)
		q.close(ReasonShutdown, true)
	})
}

// A message whose dead letter cannot be written goes to the disk with the others where the
// broker is a log: it would commit nothing of what is behind it.
func TestSpillTakesWhatWaitsForItsLetter(t *testing.T) {
	for _, again := range []bool{false, true} {
		bubble(t, "", func(t *testing.T) {
			q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 20}})
			q.log, q.letters.err = true, errDown
			q.open()
			q.send(14) // the last is poison
			time.Sleep(time.Second)
			q.setDown(true)
			q.send(500)
			time.Sleep(20 * time.Second)
			q.settle(false)
			q.mu.Lock()
			if len(q.out)+len(q.ready) > 0 {
				t.Errorf("the broker waits for %v and has %d more", slices.Sorted(maps.Keys(q.out)), len(q.ready))
			}
			q.mu.Unlock()
			if again { // the letter still waits
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				q.s.End(ctx, ReasonShutdown)
				q.stop()
				<-q.ended
				q.settle(true)
				q.setDown(false)
				q.open()
			}
			q.setDown(false)
			time.Sleep(time.Minute)
			q.letters.mu.Lock()
			q.letters.err = nil
			q.letters.mu.Unlock()
			q.drain(5 * time.Minute)
			q.counts(1)
			q.close(ReasonShutdown, true)
		})
	}
}

// A message whose key cannot be found comes back from the disk as any other.
func TestSpillOfKeylessMessages(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 16, Order: OrderKey}})
		q.keyless = true
		q.open()
		q.setDown(true)
		q.send(200)
		time.Sleep(20 * time.Second)
		q.setDown(false)
		q.drain(5 * time.Minute)
		q.counts(1)
		q.close(ReasonShutdown, true)
	})
}

// A message that cannot be described stays in memory and at the broker, alone.
func TestSpillWithoutOne(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 16}})
		q.bad = func(m int) bool { return m == 3 }
		q.open()
		q.setDown(true)
		q.send(300)
		time.Sleep(20 * time.Second)
		if q.settle(false); q.acked != 299 {
			t.Errorf("%d acked, want all but one of 300", q.acked)
		}
		q.setDown(false)
		q.drain(30 * time.Second)
		q.counts(1)
		if !slices.IsSorted(q.handled) {
			t.Error("not in order")
		}
		q.close(ReasonShutdown, true)
	})
}

// While the disk is slow the broker hears of what waits for it.
func TestSpillExtendsWhatIsWritten(t *testing.T) {
	s := &Source[int]{over: &overflow[int]{
		synced: []spilling[int]{{m: 1, copy: &spilled{acked: true}}, {m: 2, copy: &spilled{}}},
		going:  []spilling[int]{{m: 3, copy: &spilled{}}, {m: 4, copy: &spilled{}, ours: true}},
		next:   []spilling[int]{{m: 5, copy: &spilled{}}},
	}}
	if got := s.unackedLocked(nil); !slices.Equal(got, []int{2, 3, 5}) {
		t.Errorf("extended %v, want 2, 3, 5: 1 is acked, and the machine has 4", got)
	}
}

// A copy that is damaged is waited for by nobody: the machine has the message.
func TestSpillWithoutACopy(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true}})
		q.open()
		q.s.mu.Lock()
		q.s.over.copies.push(&spilled{number: q.s.over.first + 1})
		q.s.unlock(0)
		q.s.nudge()
		q.send(10)
		q.drain(time.Second)
		q.s.mu.Lock()
		if q.s.spillBusyLocked() {
			t.Error("the source still waits for what is not on the disk")
		}
		q.s.mu.Unlock()
		q.close(ReasonShutdown, true)
	})
}

// Damage of which no copy could be made is told at the start: when the spill has drained past
// it, it is gone.
func TestSpillDamageWithoutACopy(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 16}})
		q.open()
		q.setDown(true)
		q.send(40)
		time.Sleep(20 * time.Second)
		q.close(ReasonShutdown, true)
		file := filepath.Join(q.dir, "spill.db")
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		chunks := 0
		for at := range data {
			if bytes.HasPrefix(data[at:], []byte("SGc1")) { // each chunk that was ever written
				data[at+200] ^= 1
				chunks++
			}
		}
		if chunks == 0 {
			t.Fatal("nothing is on the disk")
		}
		if err := errors.Join(os.WriteFile(file, data, 0o600), os.RemoveAll(filepath.Join(q.dir, "damaged")),
			os.WriteFile(filepath.Join(q.dir, "damaged"), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		g, err := New(q.cfg, WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		if err != nil {
			t.Fatal(err)
		}
		closeAll(t, g)
		if text := log.String(); !strings.Contains(text, "the spill is damaged") || !strings.Contains(text, "could not be set aside") {
			t.Error(text)
		}
	})
}

// A write of an earlier epoch that lands late is read in its turn.
func TestSpillLateWrite(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Window: 16}})
		q.open()
		late, err := q.s.over.encode(spilling[int]{0, new(spilled), 1, false})
		if err != nil {
			t.Fatal(err)
		}
		q.setDown(true)
		written := make(chan error, 1)
		if err := q.s.over.lane.Append(func(err error) { written <- err }, late); err != nil { // nobody has counted it
			t.Fatal(err)
		}
		if err := <-written; err != nil {
			t.Fatal(err)
		}
		q.s.over.first += 1 << 40 // the number is of another epoch
		q.s.over.number = q.s.over.first
		q.mu.Lock()
		q.sent, q.acked = 1, 1 // the broker has the ack of 0
		q.mu.Unlock()
		q.send(39)
		time.Sleep(20 * time.Second)
		q.setDown(false)
		q.drain(30 * time.Second)
		q.counts(1)
		if n := q.g.spill.Stats().Count; n != 0 {
			t.Errorf("%d messages are left on the disk", n)
		}
		q.close(ReasonShutdown, true)
	})
}

// A message on the disk has all its attempts, however often the broker has delivered it.
func TestSpilledIsNoLastDelivery(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true}})
		q.limits = Limits{MaxDeliver: 1}
		q.open()
		q.setDown(true)
		q.send(3)
		time.Sleep(spillAfter + time.Second)
		if q.settle(false); q.acked != 3 {
			t.Fatalf("%d acked, want 3", q.acked)
		}
		q.mu.Lock()
		q.faults = map[int]int{0: 2, 1: 2, 2: 2}
		q.down = false
		q.mu.Unlock()
		q.drain(30 * time.Second)
		q.counts(1)
		if n := len(q.handled); n != 3 {
			t.Errorf("%d messages handled, %d dead letters", n, len(q.letters.recs))
		}
		q.close(ReasonShutdown, true)
	})
}

// A few messages of a source without traffic are spilled after 10 s of a hold.
func TestSpillAfterAWhile(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true}})
		q.open()
		q.setDown(true)
		q.send(3)
		time.Sleep(spillAfter - time.Second)
		if q.settle(false); q.acked > 0 {
			t.Errorf("%d acked at once", q.acked)
		}
		time.Sleep(2 * time.Second)
		if q.settle(false); q.acked != 3 {
			t.Errorf("%d acked, want 3", q.acked)
		}
		q.send(2)
		time.Sleep(2 * time.Second)
		if q.settle(false); q.acked != 5 {
			t.Errorf("%d acked, want 5", q.acked)
		}
		q.setDown(false)
		q.drain(30 * time.Second)
		q.counts(1)
		q.close(ReasonShutdown, true)
	})
}

// A full spill stops the intake, loses nothing and goes on.
func TestSpillFull(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{SpillBytes: 64 << 10, Policy: Policy{Spill: true, Window: 16}})
		q.open()
		q.setDown(true)
		q.send(3000)
		time.Sleep(30 * time.Second)
		q.settle(false)
		if q.acked < 100 || q.acked > 700 || len(q.ready) < 1500 {
			t.Errorf("%d acked and %d left at the broker, with room for 64 KiB", q.acked, len(q.ready))
		}
		if !slices.ContainsFunc(q.s.State().Holds, func(h Hold) bool { return strings.Contains(h.Detail, "spill") }) {
			t.Errorf("no hold says so: %+v", q.s.State().Holds)
		}
		if used := q.s.State().used; used != 1 {
			t.Errorf("%v of the window used, and intake has stopped", used)
		}
		q.setDown(false)
		q.drain(60 * time.Second)
		q.counts(1)
		if !slices.IsSorted(q.handled) {
			t.Errorf("not in order")
		}
		q.close(ReasonShutdown, true)
	})
}

// When the dependency fails again before a full spill has drained, the messages that were left in
// memory go to the disk before later ones: the next source handles all in order.
func TestSpillFullAndHeldAgain(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{SpillBytes: 64 << 10, Policy: Policy{Spill: true, Window: 400}})
		q.body = 300 // some 200 are a full spill
		q.open()
		q.setDown(true)
		q.send(1000)
		time.Sleep(20 * time.Second)
		q.setDown(false)
		for handled := 0; handled < 60; {
			time.Sleep(10 * time.Millisecond)
			q.mu.Lock()
			handled = len(q.handled)
			q.mu.Unlock()
		}
		q.setDown(true)
		time.Sleep(20 * time.Second)
		q.close(ReasonShutdown, true)
		q.setDown(false)
		q.open()
		q.drain(2 * time.Minute)
		q.counts(1)
		if !slices.IsSorted(q.handled) {
			t.Errorf("not in order: %v", q.handled)
		}
		q.close(ReasonShutdown, true)
	})
}

// Settings that cannot work are refused, by name.
func TestSpillRefused(t *testing.T) {
	dir := spillRoot(t)
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{Policy: Policy{Spill: true}}, "Config.SpillDir: must be set"},
		{Config{SpillDir: filepath.Join(dir, "d"), SpillBytes: 100}, "Config.SpillBytes: 100 is not within 65536"},
		{Config{SpillDir: filepath.Join(dir, "no", "such")}, "Config.SpillDir: "},
	} {
		if g, err := New(c.cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.cfg, err, c.want)
			if g != nil {
				_, _ = g.Close(t.Context())
			}
		}
	}
	g, err := New(Config{SpillDir: filepath.Join(dir, "d")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(Config{SpillDir: filepath.Join(dir, "d")}); err == nil || !strings.Contains(err.Error(), "locked") {
		t.Errorf("a second Guard over the directory: %v", err)
	}
	handle := func(context.Context, int) error { return nil }
	if _, err := Open(g, SourceConfig{Name: "s", Policy: &Policy{Spill: true}}, Limits{}, Port[int](&testPort{}), handle); err == nil || !strings.Contains(err.Error(), "Policy.Spill: not with this adapter") {
		t.Errorf("a port that cannot: %v", err)
	}
	if _, err := Open(g, SourceConfig{Name: "s", Policy: &Policy{Spill: true}}, Limits{}, Port[int](&spillPort{}), nil); err == nil || !strings.Contains(err.Error(), "Policy.Spill: not with this adapter or shape") {
		t.Errorf("the passive shape: %v", err)
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// Messages that wait for credits, and fill most of the window, keep no other on the disk.
func TestSpillBesideMessagesThatWaitForCredits(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(spillRoot(t), "d"), Config{Policy: Policy{Spill: true, Order: OrderNone, Window: 16, Budget: stingy}})
		q.bads = 11
		q.open()
		q.send(11)
		time.Sleep(time.Second)
		q.setDown(true)
		q.send(60)
		time.Sleep(20 * time.Second)
		if n := q.s.State().Spilled; n == 0 {
			t.Fatal("nothing is spilled")
		}
		q.setDown(false)
		time.Sleep(2 * time.Minute)
		q.mu.Lock()
		if n := len(q.handled); n != 58 {
			t.Errorf("%d messages handled, want 58: %+v", n, q.s.State())
		}
		q.mu.Unlock()
		q.s.GrantCredits(20)
		q.drain(time.Minute)
		q.close(ReasonShutdown, true)
	})
}

// Messages on the disk whose source is not opened are said once at WARN.
func TestSpillOfASourceThatIsNotOpened(t *testing.T) {
	for name, opened := range map[string]string{"another name": "b", "the same name": "a"} {
		bubble(t, name, func(t *testing.T) {
			dir := filepath.Join(spillRoot(t), "d")
			q := newQueue(t, dir, Config{Policy: Policy{Spill: true, Window: 64}})
			q.name = "a"
			q.open()
			q.setDown(true)
			q.send(100)
			time.Sleep(20 * time.Second)
			left := q.close(ReasonShutdown, true).Spilled
			var log lockedLog
			g, err := New(Config{SpillDir: dir, Policy: Policy{Spill: true}}, WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
			if err != nil {
				t.Fatal(err)
			}
			s, err := Open(g, SourceConfig{Name: opened, DeadLetters: &testWriter{}}, Limits{}, Port[int](&spillPort{body: 100}), func(context.Context, int) error { return nil })
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- s.Run(t.Context(), nil) }()
			time.Sleep(10 * spillUnopened)
			want := 0
			if opened != "a" {
				want = 1
			}
			line := fmt.Sprintf("source=a messages=%d help=", left)
			if n := strings.Count(log.text(), "level=WARN"); left == 0 || n != want || strings.Count(log.text(), line) != want {
				t.Errorf("%d lines at WARN, want %d, with %s:\n%s", n, want, line, log.text())
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
			if err := <-ended; !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
		})
	}
}

// A batch that was read in part goes to the disk before what comes after it.
func TestSpillKeepsABatchInOrder(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{SpillDir: filepath.Join(spillRoot(t), "d"), Policy: Policy{Spill: true, Window: 64}}, WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		var down atomic.Bool
		down.Store(true)
		var handled []int
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{AckWait: time.Minute}, Port[int](&spillPort{body: 100}), func(_ context.Context, m int) error {
			if down.Load() {
				return Unavailable(errDown)
			}
			handled = append(handled, m)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		in, ended := make(chan int, 20_000), make(chan error, 1)
		for m := range cap(in) {
			in <- m
		}
		go func() { ended <- s.Run(t.Context(), in) }()
		time.Sleep(20 * time.Second)
		down.Store(false)
		close(in)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if n := s.State().Tally.Spilled; len(handled) != cap(in) || !slices.IsSorted(handled) || n == 0 {
			at := 1
			for at < len(handled) && handled[at-1] < handled[at] {
				at++
			}
			t.Errorf("%d messages handled of %d, %d of them spilled, in order up to %d", len(handled), cap(in), n, at)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
