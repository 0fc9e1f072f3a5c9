// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

type body struct {
	Key    uint32
	Spare  uint32
	Amount int64
}

// logged is an OpLog with what its operations come to.
type logged struct {
	*OpLog[body]

	epoch   uint64
	amounts map[uint32]int64
	seen    []Record[body]
}

func newLogged(self Replica, cfg OpLogConfig) *logged {
	l := &logged{amounts: make(map[uint32]int64)}
	log, err := NewOpLog(self, cfg, func(r Record[body], counts bool) {
		if r.Origin != (Replica{}) {
			l.seen = append(l.seen, r)
		}
		if !counts {
			return
		}
		switch r.Op {
		case OpReset:
			l.epoch = r.Epoch
			clear(l.amounts)
		case OpAdd:
			l.amounts[r.Body.Key] += r.Body.Amount
		case OpConsume:
			l.amounts[r.Body.Key] -= r.Body.Amount
		}
	})
	if err != nil {
		panic(err)
	}
	l.OpLog = log
	return l
}

func dumpAmounts(epoch uint64, amounts map[uint32]int64) string {
	lines := []string{fmt.Sprintf("epoch %d", epoch)}
	for k, v := range amounts {
		if v != 0 {
			lines = append(lines, fmt.Sprintf("%d: %d", k, v))
		}
	}
	return sorted(lines)
}

var opLogKind = kind{
	name: "OpLog",
	make: func(self Replica) state { return newLogged(self, OpLogConfig{}) },
	act: func(t *rapid.T, s state, _ Replica, _ []Replica, m *model) {
		op := rapid.SampledFrom([]Op{OpAdd, OpAdd, OpConsume, OpConsume, OpReset}).Draw(t, "op")
		b := body{Key: rapid.Uint32Range(1, 2).Draw(t, "key"), Amount: rapid.Int64Range(1, 9).Draw(t, "amount")}
		r, err := s.(*logged).Append(op, Stamp{Physical: uint64(len(m.ops))}, b)
		if err != nil {
			t.Fatal(err)
		}
		m.ops = append(m.ops, r)
	},
	dump: func(s state) string {
		l := s.(*logged)
		next := make(map[Replica]uint64)
		for _, r := range l.seen {
			if next[r.Origin]++; r.Seq != next[r.Origin] {
				return fmt.Sprintf("%v was applied as number %d of %v", r, next[r.Origin], r.Origin)
			}
		}
		return fmt.Sprintf("%v\n", next) + dumpAmounts(l.epoch, l.amounts)
	},
	want: func(m *model) string {
		next, amounts, epoch := make(map[Replica]uint64), make(map[uint32]int64), uint64(0)
		for _, r := range m.ops {
			epoch = max(epoch, r.Epoch)
			next[r.Origin]++
		}
		for _, r := range m.ops {
			if r.Epoch == epoch && r.Op != OpReset {
				amounts[r.Body.Key] += map[Op]int64{OpAdd: 1, OpConsume: -1}[r.Op] * r.Body.Amount
			}
		}
		return fmt.Sprintf("%v\n", next) + dumpAmounts(epoch, amounts)
	},
}

var origin1, origin2 = Replica{"origin", 1}, Replica{"second", 1}

func appendN(t *testing.T, l *logged, n int) {
	t.Helper()
	for range n {
		if _, err := l.Append(OpAdd, Stamp{Physical: 1000}, body{Key: 1, Amount: 1}); err != nil {
			t.Fatal(err)
		}
	}
}

func merge(t *testing.T, s state, b []byte) {
	t.Helper()
	if err := s.Merge(b); err != nil {
		t.Fatal(err)
	}
}

func after(s state, since uint64) []byte {
	b, _ := s.Delta(nil, since, math.MaxInt)
	return b
}

// Records ahead of one that is missing wait for it, in a bound; what the bound
// refuses is not taken in, so that it comes again.
func TestOpLogGaps(t *testing.T) {
	from := newLogged(origin1, OpLogConfig{})
	appendN(t, from, 10)
	to := newLogged(origin2, OpLogConfig{MaxHeld: 4})

	merge(t, to, after(from, 6)) // 7 to 10
	if to.Held() != 4 || to.Applied(origin1) != 0 || to.Mark() != 0 {
		t.Fatalf("held %d, applied %d, mark %d", to.Held(), to.Applied(origin1), to.Mark())
	}
	if err := to.Merge(after(from, 5)); !errors.Is(err, ErrGap) {
		t.Fatal(err)
	}
	if s := to.Stats(); s.Refused != 1 || to.Held() != 4 {
		t.Fatalf("%+v, held %d", s, to.Held())
	}
	merge(t, to, after(from, 8)) // 9 and 10 again: nothing new to hold
	if s := to.Stats(); s.Duplicates != 2 {
		t.Fatalf("%+v", s)
	}
	merge(t, to, after(from, 0))
	if to.Held() != 0 || to.Applied(origin1) != 10 || len(to.seen) != 10 {
		t.Fatalf("held %d, applied %d, seen %d", to.Held(), to.Applied(origin1), len(to.seen))
	}
	if s := to.Stats(); s.Applied != 10 || s.Duplicates != 6 || s.Skipped != 0 {
		t.Fatalf("%+v", s)
	}
}

// What a message fills decides about what comes behind it in the same message.
func TestOpLogHeldIsPartOfTheWay(t *testing.T) {
	from := newLogged(origin1, OpLogConfig{})
	second := newLogged(origin2, OpLogConfig{})
	appendN(t, from, 3)
	merge(t, second, after(from, 0))
	appendN(t, second, 1) // cuts the run of origin1's records in two
	appendN(t, from, 3)
	merge(t, second, after(from, 3))

	to := newLogged(Replica{"third", 1}, OpLogConfig{MaxHeld: 1})
	merge(t, to, after(from, 5)) // 6 is held
	merge(t, to, after(second, 0))
	if to.Applied(origin1) != 6 || to.Applied(origin2) != 1 || to.Held() != 0 {
		t.Fatal(to.Applied(origin1), to.Applied(origin2), to.Held())
	}
}

// A record stays until the last known peer has it.
func TestOpLogCompaction(t *testing.T) {
	l := newLogged(origin1, OpLogConfig{MaxRecords: 4})
	l.Join(origin2)
	l.Join(Replica{"third", 1})
	l.Join(origin1) // self is nobody to wait for
	appendN(t, l, 4)
	if _, err := l.Append(OpAdd, Stamp{}, body{}); !errors.Is(err, ErrFull) || l.Depth() != 4 || l.Applied(origin1) != 4 {
		t.Fatal(err, l.Depth())
	}
	l.Ack(origin2, 4)
	l.Ack(Replica{"stranger", 1}, 4)
	if l.Depth() != 4 {
		t.Fatal("one of two peers was enough")
	}
	l.Ack(Replica{"third", 1}, 3)
	l.Ack(Replica{"third", 1}, 1) // an older one changes nothing
	l.Join(Replica{"third", 1})   // nor does joining twice
	if l.Depth() != 1 || l.Mark() != 4 {
		t.Fatal(l.Depth(), l.Mark())
	}
	if got := l.Age(Stamp{Physical: 3500}); got != 2500*time.Millisecond {
		t.Fatal(got)
	}
	if got := l.Age(Stamp{Physical: 999}); got != 0 {
		t.Fatal(got)
	}
	appendN(t, l, 3)
	l.Gone(Replica{"third", 1})
	if l.Depth() != 3 {
		t.Fatal(l.Depth())
	}
	l.Ack(origin2, 1<<40) // beyond what there is
	appendN(t, l, 1)
	l.Gone(Replica{"stranger", 1}) // looks again at what is acknowledged
	if l.Depth() != 1 {
		t.Fatal("a mark from the future acknowledged what came after it")
	}
}

// Alone, a log keeps the newest for whoever comes; who comes begins there.
func TestOpLogAloneThenJoined(t *testing.T) {
	l := newLogged(origin1, OpLogConfig{MaxRecords: 4})
	appendN(t, l, 3)
	if _, err := l.Append(OpReset, Stamp{}, body{}); err != nil {
		t.Fatal(err)
	}
	appendN(t, l, 6)
	if l.Depth() != 4 || l.Mark() != 10 {
		t.Fatal(l.Depth(), l.Mark())
	}
	newcomer := newLogged(origin2, OpLogConfig{})
	b, upto := l.Delta(nil, 0, math.MaxInt)
	merge(t, newcomer, b)
	if upto != 10 || newcomer.Applied(origin1) != 10 || newcomer.Stats().Skipped != 6 {
		t.Fatalf("%d, %d, %+v", upto, newcomer.Applied(origin1), newcomer.Stats())
	}
	// The RESET is gone, and still it knows the epoch: what it adds counts.
	if newcomer.Epoch() != 1 || newcomer.epoch != 1 || newcomer.amounts[1] != 4 {
		t.Fatal(newcomer.Epoch(), newcomer.amounts)
	}

	// With nothing kept at all too.
	l.Join(origin2)
	l.Ack(origin2, 10)
	if l.Depth() != 0 {
		t.Fatal(l.Depth())
	}
	late := newLogged(Replica{"late", 1}, OpLogConfig{})
	b, upto = l.Delta(nil, 0, MinRoom)
	merge(t, late, b)
	if upto != 10 || late.Epoch() != 1 {
		t.Fatal(upto, late.Epoch())
	}
	if b, upto := l.Delta(nil, 0, 1); len(b) != 0 || upto != 0 {
		t.Fatalf("%x up to %d in one byte", b, upto)
	}
	// Where no record fits, no progress is told, not even over what is gone.
	appendN(t, l, 1)
	for room := range 20 {
		if b, upto := l.Delta(nil, 0, room); len(b) != 0 || upto != 0 {
			t.Fatalf("%x up to %d in %d bytes", b, upto, room)
		}
	}
}

// An epoch that was learned without a record is told to others too, also beside
// records that are older than it.
func TestOpLogTellsALearnedEpoch(t *testing.T) {
	l := newLogged(origin1, OpLogConfig{MaxRecords: 1})
	old := newLogged(origin2, OpLogConfig{})
	appendN(t, old, 1)
	if _, err := l.Append(OpReset, Stamp{}, body{}); err != nil {
		t.Fatal(err)
	}
	merge(t, l, whole(old)) // the RESET makes room for what it voids
	second, third := newLogged(Replica{"x", 1}, OpLogConfig{}), newLogged(Replica{"y", 1}, OpLogConfig{})
	merge(t, second, whole(l))
	merge(t, third, whole(second))
	for _, got := range []*logged{second, third} {
		if got.Epoch() != 1 || got.epoch != 1 || got.amounts[1] != 0 || got.Applied(origin2) != 1 {
			t.Fatal(got.Epoch(), got.amounts, got.Applied(origin2))
		}
	}
}

// Held records are not lost where the log of the sender begins behind them.
func TestOpLogSkipsByWayOfHeld(t *testing.T) {
	from := newLogged(origin1, OpLogConfig{})
	appendN(t, from, 10)
	to := newLogged(origin2, OpLogConfig{})
	some, _ := from.Delta(nil, 3, 1+1+(1+6+1)+1+3+2*from.size) // 4 and 5
	merge(t, to, some)
	if to.Held() != 2 {
		t.Fatal(to.Held())
	}
	from.Join(origin2)
	from.Ack(origin2, 6) // by mistake
	merge(t, to, after(from, 6))
	if to.Held() != 0 || to.Applied(origin1) != 10 || len(to.seen) != 6 || to.Stats().Skipped != 4 {
		t.Fatalf("held %d, applied %d, seen %d, %+v", to.Held(), to.Applied(origin1), len(to.seen), to.Stats())
	}
	// And a third learns the same from the one that skipped.
	third := newLogged(Replica{"third", 1}, OpLogConfig{})
	merge(t, third, after(to, 0))
	if third.Applied(origin1) != 10 || len(third.seen) != 6 {
		t.Fatal(third.Applied(origin1), len(third.seen))
	}
}

// Logs that are full of their own take in each other's.
func TestOpLogFullBothWays(t *testing.T) {
	a, b := newLogged(origin1, OpLogConfig{MaxRecords: 4}), newLogged(origin2, OpLogConfig{MaxRecords: 4})
	a.Join(origin2)
	b.Join(origin1)
	appendN(t, a, 4)
	appendN(t, b, 4)
	merge(t, a, after(b, 0))
	merge(t, b, after(a, 0))
	a.Ack(origin2, 8)
	b.Ack(origin1, 4)
	if a.Depth() != 0 || b.Depth() != 4 {
		t.Fatal(a.Depth(), b.Depth())
	}
	// b keeps 4 of a's, which a has not said it has again.
	appendN(t, a, 1)
	if err := b.Merge(after(a, 8)); !errors.Is(err, ErrFull) || b.Applied(origin1) != 4 || b.Stats().Refused != 1 {
		t.Fatal(err, b.Applied(origin1))
	}
	b.Ack(origin1, 8)
	merge(t, b, after(a, 8))
}

func TestOpLogEpochs(t *testing.T) {
	a, b := newLogged(origin1, OpLogConfig{}), newLogged(origin2, OpLogConfig{})
	op := func(l *logged, op Op, n int64) {
		t.Helper()
		if _, err := l.Append(op, Stamp{}, body{Key: 1, Amount: n}); err != nil {
			t.Fatal(err)
		}
	}
	op(a, OpAdd, 5)
	op(b, OpAdd, 7)
	// Both reset without knowing of each other: one epoch, entered once.
	op(a, OpReset, 0)
	op(b, OpReset, 0)
	op(a, OpAdd, 20)
	op(b, OpConsume, 3)
	merge(t, a, after(b, 0))
	merge(t, b, after(a, 0))
	for _, l := range []*logged{a, b} {
		if l.Epoch() != 1 || l.amounts[1] != 17 || l.Stats().Void != 2 || l.Stats().Applied != 6 {
			t.Fatalf("epoch %d, %v, %+v", l.Epoch(), l.amounts, l.Stats())
		}
	}
	// An operation ahead of its RESET begins the epoch.
	op(a, OpReset, 0)
	c := newLogged(Replica{"third", 1}, OpLogConfig{})
	merge(t, c, after(a, 0))
	op(c, OpAdd, 2)
	own := after(c, c.Mark()-1)
	merge(t, b, own)
	if b.Epoch() != 2 || b.amounts[1] != 2 {
		t.Fatal(b.Epoch(), b.amounts)
	}
	merge(t, b, after(a, 0)) // the RESET itself, which has been done
	if b.Epoch() != 2 || b.amounts[1] != 2 {
		t.Fatal(b.Epoch(), b.amounts)
	}
}

func TestOpLogTwin(t *testing.T) {
	l := newLogged(origin1, OpLogConfig{})
	appendN(t, l, 3)
	forgetful := newLogged(origin1, OpLogConfig{})
	appendN(t, forgetful, 1)
	mark := forgetful.Mark()
	if err := forgetful.Merge(after(l, 0)); !errors.Is(err, errTwin) || forgetful.Mark() != mark {
		t.Fatal(err)
	}
	merge(t, l, after(forgetful, 0))
}

func TestOpLogForget(t *testing.T) {
	l, from := newLogged(origin1, OpLogConfig{}), newLogged(origin2, OpLogConfig{})
	appendN(t, from, 2)
	merge(t, l, after(from, 1))
	if l.Forget(origin2) {
		t.Fatal("forgot an origin with a held record")
	}
	merge(t, l, after(from, 0))
	if l.Forget(origin2) || l.Forget(origin1) {
		t.Fatal("forgot an origin with kept records, or self")
	}
	l.Join(origin2)
	l.Ack(origin2, 2)
	if !l.Forget(origin2) || l.Applied(origin2) != 0 {
		t.Fatal("did not forget")
	}
}

func TestOpLogRefusesArguments(t *testing.T) {
	_, err := NewOpLog[*int](Replica{}, OpLogConfig{MaxRecords: -1, MaxHeld: maxRecords + 1}, nil)
	for _, want := range []string{"Replica.Name is 0", "MaxRecords is -1", "MaxHeld is 1048577", "apply is nil", "*int is of type *int"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
	l := newLogged(origin1, OpLogConfig{})
	for _, op := range []Op{0, 4} {
		if _, err := l.Append(op, Stamp{}, body{}); !errors.Is(err, errArgument) {
			t.Error(op, err)
		}
	}
	l.OpLog.epoch = math.MaxUint64
	if _, err := l.Append(OpReset, Stamp{}, body{}); !errors.Is(err, errOverflow) || l.Mark() != 0 {
		t.Error(err)
	}
}

func TestLayout(t *testing.T) {
	type inner struct {
		A uint32
		B uint64
	}
	type good struct {
		A [2]struct{ X, Y uint16 }
		B float64
		C [8]int8
	}
	check := func(want string, err error) {
		t.Helper()
		switch {
		case want == "" && err != nil:
			t.Error(err)
		case want != "" && (!errors.Is(err, errRecordType) || !strings.Contains(err.Error(), want)):
			t.Errorf("%v does not say %q", err, want)
		}
	}
	check("", recordType[uint64]())
	check("", recordType[good]())
	check("", recordType[[maxBody]byte]())
	check("has 520 bytes, want a multiple of 8 up to 512", recordType[[maxBody + 8]byte]())
	check("has 4 bytes, want a multiple of 8", recordType[uint32]())
	check("is an empty struct", recordType[struct{}]())
	check("length 0", recordType[[0]uint64]())
	check("length 0", recordType[struct {
		A uint64
		B [0]byte
	}]())
	check("is of type string", recordType[string]())
	check(".S is of type []uint8", recordType[struct{ S []byte }]())
	check(".M is of type map", recordType[struct{ M map[int]int }]())
	check(".I is of type interface", recordType[struct{ I any }]())
	check(".F is of type func", recordType[struct{ F func() }]())
	check(".C is of type chan", recordType[struct{ C chan int }]())
	check(".P[0] is of type *uint64", recordType[struct{ P [3]*uint64 }]())
	check(".N is of type int, whose size", recordType[struct{ N int }]())
	check(".N is of type uint, whose size", recordType[struct{ N uint }]())
	check(".N is of type uintptr, whose size", recordType[struct{ N uintptr }]())
	check(".B is a bool", recordType[struct {
		B bool
		P [7]byte
	}]())
	check(".C is of type complex128", recordType[struct{ C complex128 }]())
	check("._ is a blank field", recordType[struct {
		A uint32
		_ uint32
	}]())
	check(".B would follow a hole at byte 4, want a multiple of 8", recordType[inner]())
	check("would end in a hole after byte 12", recordType[struct {
		A uint64
		B uint32
	}]())
	check(".In.B would follow a hole", recordType[struct {
		A  uint32
		In inner
	}]())
	check(".B would follow a hole", recordType[struct {
		A uint8
		B uint16
		C [5]uint8
	}]())
	// All that is wrong is said at once.
	err := recordType[struct {
		S string
		N int
	}]()
	check(".S", err)
	check(".N", err)
}

func recordType[T any]() error {
	_, err := NewOpLog(origin1, OpLogConfig{}, func(Record[T], bool) {})
	return err
}

// Records are read where they lie, or copied where the machine wants them:
// wherever a message begins in memory, it says the same.
func TestOpLogAnyAlignment(t *testing.T) {
	from := newLogged(origin1, OpLogConfig{})
	appendN(t, from, 5)
	b := whole(from)
	copied := 0
	for shift := range 16 {
		buf := make([]byte, shift+len(b))
		at := buf[shift:]
		copy(at, b)
		to := newLogged(origin2, OpLogConfig{})
		merge(t, to, at)
		if len(to.scratch) > 0 {
			copied++
		}
		if got := whole(to); string(got) != string(b) {
			t.Fatalf("at %d: %x, want %x", shift, got, b)
		}
	}
	if copied == 0 || copied == 16 {
		t.Errorf("%d of 16 were copied, want some and not all", copied)
	}
}

// A log under a network that breaks, with acknowledgements that compact: each
// known replica applies each record once and in order, and the backlog ends.
func TestOpLogCompactsUnderFaults(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := opLogKind
		k.make = func(self Replica) state {
			l := newLogged(self, OpLogConfig{MaxRecords: 32, MaxHeld: 2})
			for _, r := range names {
				l.Join(r)
			}
			return l
		}
		w := newWorld(k)
		acks := func() {
			for i, s := range w.at {
				for j, r := range names {
					s.(*logged).Ack(r, w.acked[i][j])
				}
			}
		}
		w.check = func(*rapid.T, *world) { acks() }
		for range rapid.IntRange(1, 6).Draw(t, "rounds") {
			w.run(t, 20)
			w.heal(t, MinRoom)
			acks()
		}
		for i, s := range w.at {
			l := s.(*logged)
			if k.dump(s) != k.want(&w.model) {
				t.Fatalf("%v holds\n%s\nwant\n%s", names[i], k.dump(s), k.want(&w.model))
			}
			if l.Depth() != 0 || l.Held() != 0 || l.Stats().Skipped != 0 || len(l.seen) != len(w.model.ops) {
				t.Fatalf("%v: depth %d, held %d, seen %d of %d, %+v", names[i], l.Depth(), l.Held(), len(l.seen), len(w.model.ops), l.Stats())
			}
		}
	})
}
