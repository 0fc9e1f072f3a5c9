// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// state is the shape that the types share.
type state interface {
	Mark() uint64
	Delta(b []byte, since uint64, room int) ([]byte, uint64)
	Merge(b []byte) error
}

// kind is one type under test.
type kind struct {
	name string
	make func(self Replica) state
	// act makes one random local change, and notes it in the model.
	act func(t *rapid.T, s state, self Replica, peers []Replica, model *model)
	// dump is the content, whatever the order of changes.
	dump func(s state) string
	// want is what all must hold in the end.
	want func(m *model) string
	// check holds at every step.
	check func(t *rapid.T, w *world)
}

// model is what really happened, kept without any merging.
type model struct {
	up     map[Replica]uint64
	writes map[string]write
	ops    []Record[body]
}

func mustMake[S state](make func(Replica) (S, error)) func(Replica) state {
	return func(self Replica) state {
		s, err := make(self)
		if err != nil {
			panic(err)
		}
		return s
	}
}

func sorted(lines []string) string {
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func dumpRows[K comparable, V any](t *table[K, V]) string {
	var lines []string
	for k, v := range t.all() {
		lines = append(lines, fmt.Sprintf("%v: %v", k, v))
	}
	return sorted(lines)
}

var kinds = []kind{
	{
		name: "GCounter",
		make: mustMake(NewGCounter),
		act: func(t *rapid.T, s state, self Replica, _ []Replica, m *model) {
			n := rapid.Uint64Range(0, 5).Draw(t, "n")
			if err := s.(*GCounter).Add(n); err != nil {
				t.Fatal(err)
			}
			m.up[self] += n
		},
		dump: func(s state) string {
			var lines []string
			total := uint64(0)
			for r, n := range s.(*GCounter).All() {
				lines = append(lines, fmt.Sprintf("%v: %d", r, n))
				total += n
			}
			if v, err := s.(*GCounter).Value(); err != nil || v != total {
				return fmt.Sprintf("Value is %d, %v; rows come to %d", v, err, total)
			}
			return sorted(lines)
		},
		want: func(m *model) string {
			var lines []string
			for r, n := range m.up {
				if n > 0 {
					lines = append(lines, fmt.Sprintf("%v: %d", r, n))
				}
			}
			return sorted(lines)
		},
	},
	{
		name: "LWWSet",
		make: mustMake(NewLWWSet),
		act: func(t *rapid.T, s state, self Replica, _ []Replica, m *model) {
			e := rapid.SampledFrom([]string{"", "a", "b", "c", "d"}).Draw(t, "element")
			w := write{
				// Few stamps, so that they tie.
				at:      Stamp{rapid.Uint64Range(1, 3).Draw(t, "physical"), rapid.Uint64Range(0, 1).Draw(t, "logical")},
				by:      self,
				removed: rapid.Bool().Draw(t, "remove"),
			}
			var err error
			if w.removed {
				_, err = s.(*LWWSet).Remove(e, w.at)
			} else {
				w.note = rapid.SampledFrom([]string{"", "m", "n"}).Draw(t, "note")
				_, err = s.(*LWWSet).Add(e, w.note, w.at)
			}
			if err != nil {
				t.Fatal(err)
			}
			if old, ok := m.writes[e]; !ok || later(w, old) {
				m.writes[e] = w
			}
		},
		dump: func(s state) string {
			c := s.(*LWWSet)
			if n := len(maps.Collect(c.All())); n != c.Len() || c.Len()+c.Tombstones() != len(c.rows.at) {
				return fmt.Sprintf("Len is %d with %d tombstones, elements are %d of %d", c.Len(), c.Tombstones(), n, len(c.rows.at))
			}
			return dumpRows(c.rows)
		},
		want: func(m *model) string {
			var lines []string
			for e, w := range m.writes {
				lines = append(lines, fmt.Sprintf("%v: %v", e, w))
			}
			return sorted(lines)
		},
	},
	opLogKind,
}

// later is the order of writes as the set's comment has it, written down again.
func later(w, o write) bool {
	switch {
	case w.at.Physical != o.at.Physical:
		return w.at.Physical > o.at.Physical
	case w.at.Logical != o.at.Logical:
		return w.at.Logical > o.at.Logical
	case w.by.Name != o.by.Name:
		return w.by.Name > o.by.Name
	case w.by.Incarnation != o.by.Incarnation:
		return w.by.Incarnation > o.by.Incarnation
	}
	if w.removed == o.removed {
		return w.note > o.note
	}
	return o.removed
}

// Two of them are incarnations of one process.
var names = []Replica{{"a", 1}, {"a", 2}, {"b", 1}, {"c", 1}}

// world is some replicas and a network that loses, repeats and reorders.
type world struct {
	kind
	at      []state
	model   model
	acked   [][]uint64 // of the sender by the receiver
	packets []packet
}

type packet struct {
	from, to int
	b        []byte
	upto     uint64
}

func newWorld(k kind) *world {
	w := &world{kind: k, model: model{up: map[Replica]uint64{}, writes: map[string]write{}}}
	for _, r := range names {
		w.at = append(w.at, k.make(r))
		w.acked = append(w.acked, make([]uint64, len(names)))
	}
	return w
}

func (w *world) send(t *rapid.T, from, to, room int) {
	since := w.acked[from][to]
	b, upto := w.at[from].Delta([]byte("prefix"), since, room)
	if string(b[:6]) != "prefix" || len(b)-6 > max(room, 0) {
		t.Fatalf("Delta with room %d appended %d bytes to %q", room, len(b)-6, b[:6])
	}
	if upto < since || upto > w.at[from].Mark() {
		t.Fatalf("Delta after %d of %d is complete up to %d", since, w.at[from].Mark(), upto)
	}
	if room >= MinRoom && since < w.at[from].Mark() && upto == since {
		t.Fatalf("Delta after %d of %d made no progress", since, w.at[from].Mark())
	}
	w.packets = append(w.packets, packet{from, to, b[6:], upto})
}

// deliver merges a packet, and says that the packet may be written over then.
func (w *world) deliver(t *rapid.T, i int, again, ackLost bool) {
	p := w.packets[i]
	if !again {
		w.packets = slices.Delete(w.packets, i, i+1)
	}
	before, _ := w.at[p.to].Delta(nil, 0, math.MaxInt)
	b := slices.Clone(p.b)
	if err := w.at[p.to].Merge(b); err != nil {
		t.Fatal(err)
	}
	for i := range b {
		b[i] = 0xAA
	}
	if !ackLost {
		w.acked[p.from][p.to] = max(w.acked[p.from][p.to], p.upto)
	}
	// What was there is in what is there now: merging it again is no change.
	mark := w.at[p.to].Mark()
	if err := w.at[p.to].Merge(before); err != nil {
		t.Fatal(err)
	}
	if got := w.at[p.to].Mark(); got != mark {
		t.Fatalf("%v went backwards", names[p.to])
	}
}

// run makes random things happen.
func (w *world) run(t *rapid.T, steps int) {
	node := rapid.IntRange(0, len(names)-1)
	for range steps {
		switch do := rapid.IntRange(0, 9).Draw(t, "do"); {
		case do < 4:
			i := node.Draw(t, "at")
			w.act(t, w.at[i], names[i], names, &w.model)
		case do < 7 || len(w.packets) == 0:
			from, to := node.Draw(t, "from"), node.Draw(t, "to")
			if from != to {
				w.send(t, from, to, rapid.SampledFrom([]int{-1, 0, 20, 60, 130, MinRoom, math.MaxInt}).Draw(t, "room"))
			}
		default:
			i := rapid.IntRange(0, len(w.packets)-1).Draw(t, "packet")
			switch do {
			case 7:
				w.packets = slices.Delete(w.packets, i, i+1)
			case 8:
				w.deliver(t, i, true, rapid.Bool().Draw(t, "ack lost"))
			case 9:
				w.deliver(t, i, false, rapid.Bool().Draw(t, "ack lost"))
			}
		}
		if w.check != nil {
			w.check(t, w)
		}
	}
}

// heal exchanges deltas after what was acknowledged until nothing is new.
func (w *world) heal(t *rapid.T, room int) {
	w.packets = nil
	for range 10_000 {
		quiet := true
		for from := range w.at {
			for to := range w.at {
				if from != to && w.acked[from][to] < w.at[from].Mark() {
					w.send(t, from, to, room)
					w.deliver(t, 0, false, false)
					quiet = false
				}
			}
		}
		if quiet {
			return
		}
	}
	t.Fatal("the replicas never stop talking")
}

func whole(s state) []byte {
	b, _ := s.Delta(nil, 0, math.MaxInt)
	return b
}

func forKinds(t *testing.T, f func(t *rapid.T, k kind)) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { f(t, k) })
		})
	}
}

// Deltas that are lost, repeated and reordered, followed by what was not
// acknowledged, come to the same as full states and as what really happened.
func TestConvergence(t *testing.T) {
	forKinds(t, func(t *rapid.T, k kind) {
		w := newWorld(k)
		w.run(t, rapid.IntRange(0, 120).Draw(t, "steps"))

		full := k.make(Replica{"observer", 1})
		for _, i := range rapid.Permutation([]int{0, 1, 2, 3}).Draw(t, "order") {
			if err := full.Merge(whole(w.at[i])); err != nil {
				t.Fatal(err)
			}
		}
		w.heal(t, rapid.SampledFrom([]int{MinRoom, math.MaxInt}).Draw(t, "room"))

		for i, s := range w.at {
			if got, want := k.dump(s), k.dump(full); got != want {
				t.Fatalf("%v holds by deltas\n%s\nand by full states\n%s", names[i], got, want)
			}
			if k.want != nil && k.dump(s) != k.want(&w.model) {
				t.Fatalf("%v holds\n%s\nwant\n%s", names[i], k.dump(s), k.want(&w.model))
			}
		}
		if w.check != nil {
			w.check(t, w)
		}
	})
}

// The laws of a join, over states as the network leaves them.
func TestLaws(t *testing.T) {
	forKinds(t, func(t *rapid.T, k kind) {
		w := newWorld(k)
		w.run(t, rapid.IntRange(0, 60).Draw(t, "steps"))
		join := func(messages ...[]byte) state {
			s := k.make(Replica{"observer", 1})
			for _, b := range messages {
				if err := s.Merge(b); err != nil {
					t.Fatal(err)
				}
			}
			return s
		}
		a, b, c := whole(w.at[0]), whole(w.at[1]), whole(w.at[2])
		same := func(law string, x, y state) {
			if k.dump(x) != k.dump(y) {
				t.Fatalf("%s: \n%s\nis not\n%s", law, k.dump(x), k.dump(y))
			}
		}
		same("commutative", join(a, b), join(b, a))
		same("associative", join(whole(join(a, b)), c), join(a, whole(join(b, c))))
		same("idempotent", join(a, a, b, a, b), join(a, b))
		same("empty is neutral", join(nil, a, nil), join(a))

		// Cut into deltas of any size, in order, a state is the same state.
		cut := k.make(Replica{"observer", 1})
		for since := uint64(0); since < w.at[3].Mark(); {
			b, upto := w.at[3].Delta(nil, since, rapid.IntRange(0, 300).Draw(t, "room"))
			if err := cut.Merge(b); err != nil {
				t.Fatal(err)
			}
			if upto == since {
				b, upto = w.at[3].Delta(nil, since, MinRoom)
				if err := cut.Merge(b); err != nil {
					t.Fatal(err)
				}
			}
			since = upto
		}
		same("cut into deltas", cut, join(whole(w.at[3])))
	})
}

// A message that was merged into an empty state comes out the same.
func TestCanonical(t *testing.T) {
	forKinds(t, func(t *rapid.T, k kind) {
		w := newWorld(k)
		w.run(t, 60)
		for _, s := range w.at {
			b := whole(s)
			again := k.make(Replica{"observer", 1})
			if err := again.Merge(b); err != nil {
				t.Fatal(err)
			}
			if got := whole(again); string(got) != string(b) {
				t.Fatalf("%x came out as %x", b, got)
			}
			for n := 1; n < len(b); n++ { // cut off anywhere, it is whole rows or refused
				s := k.make(Replica{"observer", 1})
				if err := s.Merge(b[:n]); err != nil && s.Mark() != 0 {
					t.Fatalf("%x was refused and taken in", b[:n])
				} else if err == nil && string(whole(s)) != string(b[:n]) {
					t.Fatalf("%x came out as %x", b[:n], whole(s))
				}
			}
		}
	})
}

// What changed after a mark, each key once, oldest change first, as room allows.
func TestTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tab := newTable[byte, byte]()
		model := map[byte]uint64{} // key to its latest mark
		marks := uint64(0)
		for range rapid.IntRange(0, 40).Draw(t, "changes") {
			k := rapid.ByteRange(0, 6).Draw(t, "key")
			if rapid.IntRange(0, 5).Draw(t, "drop") == 0 {
				tab.drop(k)
				delete(model, k)
				continue
			}
			marks++
			tab.put(k, byte(marks))
			model[k] = marks
		}
		for k, mark := range model { // the latest change may be of a key that is gone
			if mark == marks && rapid.Bool().Draw(t, "drop the latest") {
				tab.drop(k)
				delete(model, k)
			}
		}
		since := rapid.Uint64Range(0, marks+2).Draw(t, "since")
		room := rapid.IntRange(0, 8).Draw(t, "room")
		keys := slices.SortedFunc(maps.Keys(model), func(a, b byte) int { return int(model[a]) - int(model[b]) })
		var want []byte
		upto := marks
		for _, k := range keys {
			if model[k] <= since {
				continue
			}
			if len(want) == 0 && room < 2 || len(want) > 0 && len(want)+1 > room {
				upto = since
				if len(want) > 0 {
					upto = model[want[len(want)-1]]
				}
				break
			}
			if len(want) == 0 {
				want = []byte{0xFF}
			}
			want = append(want, k)
		}
		if since >= marks {
			upto = marks
		}
		got, gotUpto := tab.delta([]byte("prefix"), 0xFF, since, room, func(b []byte, k, _ byte) []byte { return append(b, k) })
		if string(got) != "prefix"+string(want) || gotUpto != upto {
			t.Fatalf("delta(%d, room %d) of %v = %v up to %d, want %v up to %d", since, room, model, got, gotUpto, want, upto)
		}
	})
}
