// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// scribes are journals that exchange packets by hand, each with a wall clock that
// is off by so much.
type scribes struct {
	t     testing.TB
	now   time.Duration
	all   []*Journal
	off   []time.Duration
	acked map[[2]int]uint64
}

func newScribes(t testing.TB, c JournalConfig, off ...time.Duration) *scribes {
	t.Helper()
	w := &scribes{t: t, off: off, acked: map[[2]int]uint64{}}
	for i := range off {
		w.start(c, i, 1)
	}
	return w
}

func (w *scribes) start(c JournalConfig, i int, incarnation uint64) {
	w.t.Helper()
	wall := func() time.Time { return time.UnixMilli(1_000_000).Add(w.now + w.off[i]) }
	j, err := NewJournal(c, crdt.Replica{Name: string(rune('a' + i)), Incarnation: incarnation}, wall)
	if err != nil {
		w.t.Fatal(err)
	}
	if i == len(w.all) {
		w.all = append(w.all, nil)
	}
	w.all[i] = j
	for k := range w.off {
		delete(w.acked, [2]int{i, k})
		delete(w.acked, [2]int{k, i})
		j.Sample(crdt.Replica{Name: string(rune('a' + k)), Incarnation: 1}, w.off[k]-w.off[i], ms)
	}
}

// packet is what i says to k now; ack says that all up to upto has come.
func (w *scribes) packet(i, k, room int) (b []byte, upto uint64) {
	b, upto = w.all[i].Delta(w.now, nil, w.all[k].self, w.acked[[2]int{i, k}], room)
	if len(b) > room {
		w.t.Fatalf("%d bytes in a room of %d", len(b), room)
	}
	return b, upto
}

func (w *scribes) hand(i, k int, b []byte) error {
	return w.all[k].Merge(crdt.Contact{From: w.all[i].self, Now: w.now, Sent: w.now, Echo: w.now}, b)
}

// tell brings k all that i has.
func (w *scribes) tell(i, k int) {
	w.t.Helper()
	for w.acked[[2]int{i, k}] < w.all[i].Mark(w.all[k].self) {
		b, upto := w.packet(i, k, crdt.MinRoom)
		if err := w.hand(i, k, b); err != nil {
			w.t.Fatal(err)
		}
		if upto <= w.acked[[2]int{i, k}] {
			w.t.Fatal("no progress")
		}
		w.acked[[2]int{i, k}] = upto
	}
}

func (w *scribes) write(i int, text string) {
	w.t.Helper()
	if err := w.all[i].Add(Entry{Kind: EntryStarted, Text: text}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *scribes) texts(i int) string {
	var all []string
	for _, e := range w.all[i].Entries(nil) {
		all = append(all, e.Text)
	}
	return strings.Join(all, " ")
}

// Whatever becomes of packets, all have the same entries in the same order in the
// end, and each process's own in the order in which it wrote them.
func TestJournalConverges(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, 4).Draw(rt, "journals")
		var off []time.Duration
		for range n {
			off = append(off, time.Duration(rapid.IntRange(-87, 87).Draw(rt, "off"))*ms)
		}
		w := newScribes(t, JournalConfig{}, off...)
		type flight struct {
			i, k int
			b    []byte
			upto uint64
		}
		var air []flight
		wrote := 0
		for range rapid.IntRange(1, 80).Draw(rt, "steps") {
			w.now += time.Duration(rapid.IntRange(0, 40).Draw(rt, "ms")) * ms
			i, k := rapid.IntRange(0, n-1).Draw(rt, "i"), rapid.IntRange(0, n-1).Draw(rt, "k")
			switch rapid.IntRange(0, 3).Draw(rt, "what") {
			case 0:
				wrote++
				w.write(i, fmt.Sprint(wrote))
			case 1:
				if i != k {
					b, upto := w.packet(i, k, rapid.SampledFrom([]int{0, 16, 400, crdt.MinRoom, 4096}).Draw(rt, "room"))
					air = append(air, flight{i, k, b, upto})
				}
			case 2: // one comes, in any order, and perhaps again
				if len(air) > 0 {
					at := rapid.IntRange(0, len(air)-1).Draw(rt, "which")
					f := air[at]
					if err := w.hand(f.i, f.k, f.b); err != nil {
						rt.Fatal(err)
					}
					w.acked[[2]int{f.i, f.k}] = max(w.acked[[2]int{f.i, f.k}], f.upto)
					if rapid.Bool().Draw(rt, "once") {
						air = slices.Delete(air, at, at+1)
					}
				}
			case 3:
				air = nil
			}
		}
		for range 2 {
			for i := range n {
				for k := range n {
					if i != k {
						w.tell(i, k)
					}
				}
			}
		}
		want := w.all[0].Entries(nil)
		if len(want) != wrote {
			rt.Fatalf("%d entries, %d were written", len(want), wrote)
		}
		last := map[string]uint64{}
		for _, e := range want {
			var num uint64
			_, _ = fmt.Sscan(e.Text, &num)
			if num <= last[e.By.Name] {
				rt.Fatalf("%s wrote %d after %d", e.By.Name, last[e.By.Name], num)
			}
			last[e.By.Name] = num
		}
		for i := range w.all {
			if got := w.all[i].Entries(nil); !slices.Equal(got, want) {
				rt.Fatalf("%d differs:\n%v\n%v", i, got, want)
			}
		}
	})
}

// An answer comes after what it answers, though the clock of who answers is
// behind by more than it takes to read.
func TestJournalKeepsCauseBeforeEffect(t *testing.T) {
	w := newScribes(t, JournalConfig{}, 87*ms, -87*ms)
	w.write(0, "cause")
	w.now += ms
	w.tell(0, 1)
	w.write(1, "effect")
	w.tell(1, 0)
	if got := w.texts(0); got != "cause effect" {
		t.Errorf("it reads %q", got)
	}
	if _, _, bad := w.all[1].Clock(w.all[0].self); bad != 0 {
		t.Errorf("%d stamps broke the rule", bad)
	}
	far := newScribes(t, JournalConfig{}, time.Hour, 0)
	far.write(0, "from afar")
	far.tell(0, 1)
	far.write(1, "here")
	if _, _, bad := far.all[1].Clock(far.all[0].self); bad != 1 {
		t.Errorf("a clock that is off by an hour broke the rule %d times", bad)
	}
	if got := far.texts(1); got != "here from afar" {
		t.Errorf("it reads %q: the stamp of a wrong clock was followed", got)
	}
}

// Entries wait for a peer up to Backlog, and for Patience; then the journal goes
// on, and who comes back finds a gap and not an error.
func TestJournalDoesNotWaitForEver(t *testing.T) {
	w := newScribes(t, JournalConfig{Keep: 3, Backlog: 4, Patience: 10 * sec}, 0, 0)
	w.write(0, "0")
	w.tell(0, 1)
	w.tell(1, 0)
	for i := 1; i <= 8; i++ {
		err := w.all[0].Add(Entry{Kind: EntryStarted, Text: fmt.Sprint(i)})
		if full := i > 7; full != errors.Is(err, crdt.ErrFull) {
			t.Fatalf("entry %d: %v", i, err)
		}
		w.packet(0, 1, crdt.MinRoom)
	}
	w.now += 5 * sec
	if s := w.all[0].Stats(w.now); s.Backlog != 7 || s.Lost != 1 || s.Age != 5*sec {
		t.Errorf("%+v, want a backlog of 7 for 5 s and one lost", s)
	}
	w.now += 6 * sec
	w.packet(0, 1, crdt.MinRoom) // it still tries
	for i := 9; i <= 12; i++ {
		w.now += ms
		w.write(0, fmt.Sprint(i))
	}
	if got := w.texts(0); got != "10 11 12" {
		t.Errorf("it keeps %q", got)
	}
	if s := w.all[0].Stats(w.now); s.Backlog != 0 || s.Age != 0 {
		t.Errorf("%+v: it is still waited for", s)
	}
	if err := w.hand(1, 0, nil); err != nil { // it is back
		t.Fatal(err)
	}
	w.tell(0, 1)
	if got := w.texts(1); got != "10 11 12" {
		t.Errorf("the one that came back has %q", got)
	}
}

// Who starts later reads what the others remember.
func TestJournalForNewcomers(t *testing.T) {
	w := newScribes(t, JournalConfig{Keep: 3}, 0, 0)
	for i := range 5 {
		w.write(0, fmt.Sprint(i))
	}
	w.tell(0, 1)
	w.start(JournalConfig{Keep: 3}, 1, 2)
	w.tell(0, 1)
	if got := w.texts(1); got != "2 3 4" {
		t.Errorf("it reads %q", got)
	}
}

// An incarnation that is over is forgotten in time, and its entries are not told twice by
// a packet that comes later still.
func TestJournalForgetsIncarnations(t *testing.T) {
	w := newScribes(t, JournalConfig{Keep: 2}, 0, 0, 0)
	w.write(0, "last words")
	late, _ := w.packet(0, 1, 4096)
	w.tell(0, 1)
	dead := w.all[0].self
	w.all[1].Gone(w.now, dead)
	w.write(1, "1")
	w.now += forgetGone + sec
	w.packet(1, 2, 4096)
	if n := len(w.all[1].gone); n != 1 {
		t.Fatalf("%d incarnations are remembered whose entries are kept", n)
	}
	if err := w.hand(0, 1, late); err != nil {
		t.Fatal(err)
	}
	if got := w.texts(1); got != "last words 1" {
		t.Errorf("it reads %q", got)
	}
	w.tell(1, 2)
	w.write(1, "2")
	w.tell(1, 2)
	w.now += sec
	w.packet(1, 2, 4096)
	if n := len(w.all[1].gone); n != 0 {
		t.Fatalf("%d incarnations are remembered", n)
	}
}

// A sample of an incarnation that is over is not taken in: nobody would forget it.
func TestJournalSamplesNobodyGone(t *testing.T) {
	w := newScribes(t, JournalConfig{}, 0, 0)
	dead := w.all[0].self
	w.all[1].Gone(w.now, dead)
	w.all[1].Sample(dead, 400*ms, ms)
	if off, known, _ := w.all[1].Clock(dead); known {
		t.Errorf("its clock is known to be off by %v", off)
	}
}

func TestJournalRefuses(t *testing.T) {
	self := crdt.Replica{Name: "a", Incarnation: 1}
	if _, err := NewJournal(JournalConfig{Keep: -1, Backlog: 1 << 20, Patience: 1}, crdt.Replica{}, nil); !errors.Is(err, ErrConfig) ||
		strings.Count(err.Error(), "\n") != 4 {
		t.Errorf("not all five: %v", err)
	}
	j, err := NewJournal(JournalConfig{}, self, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Add(Entry{}); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
	if err := j.Merge(crdt.Contact{From: self}, nil); !errors.Is(err, ErrSelf) {
		t.Error(err)
	}
	from := crdt.Contact{From: crdt.Replica{Name: "b", Incarnation: 1}}
	for _, b := range [][]byte{{0}, {wireVersion}, {wireVersion, 1}, {wireVersion, 1, 1, 9}} {
		if err := j.Merge(from, b); !errors.Is(err, ErrMalformed) {
			t.Errorf("% x: %v", b, err)
		}
	}
	long := strings.Repeat("x", 300)
	if err := j.Add(Entry{Kind: EntryReset, Subject: long, Text: long, Number: 7}); err != nil {
		t.Fatal(err)
	}
	if e := j.Entries(nil)[0]; len(e.Subject) != 64 || len(e.Text) != 128 || e.Number != 7 || e.By != self || e.Kind.String() != "RESET" {
		t.Errorf("%+v", e)
	}
}

// A session that is told of changes sends them at once.
func TestJournalTellsOfChanges(t *testing.T) {
	w := newScribes(t, JournalConfig{}, 0)
	told := 0
	w.all[0].OnChange(func() { told += len(w.all[0].Entries(nil)) })
	w.write(0, "x")
	if told != 1 {
		t.Errorf("told %d times, with the entry there", told)
	}
}

func FuzzJournal(f *testing.F) {
	w := newScribes(f, JournalConfig{}, 0, 0)
	w.write(0, "one")
	w.write(0, "two")
	b, _ := w.packet(0, 1, 4096)
	f.Add(b)
	f.Add(b[:len(b)-1])
	f.Add([]byte{wireVersion, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		w := newScribes(t, JournalConfig{Keep: 8, Backlog: 8}, 0, 0)
		if err := w.hand(0, 1, b); err != nil {
			if n := len(w.all[1].Entries(nil)); n != 0 {
				t.Fatalf("refused with %v, and took in %d", err, n)
			}
			return
		}
		for _, e := range w.all[1].Entries(nil) {
			if len(e.Subject) > 64 || len(e.Text) > 128 || e.Kind > entryKinds || e.Kind.String() == "" {
				t.Fatalf("%+v", e)
			}
		}
	})
}
