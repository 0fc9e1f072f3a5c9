// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"testing"

	"github.com/IBM/sarama"
	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
)

// parkSim is a claim with retry topics in memory: logs, a table, and a writer whose
// confirmations may come late, twice, or not at all.
type parkSim struct {
	t      *rapid.T
	table  *table
	epoch  string
	levels int
	keys   []uint64 // of the claim's messages
	fails  []int    // how often each fails yet

	logs     [][]*Message     // of the retry topics
	done     []map[int64]bool // settled offsets
	boot     []int            // ends at the start
	read     []int
	waiting  [][]*Message   // read, not handled
	next     int            // of the claim
	replay   int            // it has to pass this one, before what is parked is handled
	settled  map[int64]bool // of the claim
	calls    map[uint64][]int64
	finished map[int64]int
}

func (s *parkSim) start() {
	s.table, s.epoch = newTable(1000), s.epoch+"x"
	s.next, s.replay = 0, -1
	for s.next < len(s.keys) && s.settled[int64(s.next)] {
		s.next++
	}
	for i := range s.logs {
		s.boot[i], s.read[i], s.waiting[i] = len(s.logs[i]), 0, nil
		for at, p := range s.logs[i] {
			if !s.done[i][int64(at)] {
				if level, at := s.table.load(p); level > 0 {
					s.done[level-1][at] = true
				}
				if !s.settled[p.origin.offset] {
					s.replay = max(s.replay, int(p.origin.offset))
				}
			}
		}
	}
}

// handle is what the handlers of both sources do, up to the settling.
func (s *parkSim) handle(p *Message) {
	f := s.table.decide(p, p.level > 0 && rapid.Bool().Draw(s.t, "patient"))
	switch f.kind {
	case fateWait:
		s.waiting[p.level-1] = append(s.waiting[p.level-1], p)
	case fateSettle:
		s.settle(p)
	case fateFollow:
		s.write(p, p.own, f.level)
	case fateHandle:
		s.call(p)
	default:
		s.t.Fatalf("fate %d", f.kind)
	}
}

func (s *parkSim) call(p *Message) {
	key, n := p.origin.key, p.origin.offset
	for before := range n { // every one of the key that was before is done
		if s.keys[before] == key && s.finished[before] == 0 {
			s.t.Fatalf("%d of key %d is handled before %d", n, key, before)
		}
	}
	for after := n + 1; after < int64(len(s.keys)); after++ {
		if s.keys[after] == key && s.finished[after] > 0 && s.finished[n] == 0 {
			s.t.Fatalf("%d of key %d is handled after %d", n, key, after)
		}
	}
	s.calls[key] = append(s.calls[key], n)
	if s.fails[n] > 0 && p.own < s.levels {
		s.fails[n]--
		level, gone := s.table.park(p, p.own+1, 1)
		if gone || level == 0 {
			s.t.Fatalf("%d is gone", n)
		}
		s.write(p, p.own+1, level)
		return
	}
	s.finished[n]++
	s.settle(p)
}

// write writes a copy; whether it is confirmed is told later, and it may be written
// again meanwhile, or not have been written at all.
func (s *parkSim) write(p *Message, own, level int) {
	to := *p
	to.own, to.moves, to.claim, to.level = own, p.moves+1, s.epoch, level
	copies := rapid.SampledFrom([]int{1, 1, 1, 2}).Draw(s.t, "copies")
	for range copies {
		c := to
		c.at = int64(len(s.logs[level-1]))
		s.logs[level-1] = append(s.logs[level-1], &c)
		if rapid.Bool().Draw(s.t, "read before the next") {
			s.readAll(level - 1)
		}
		to.at = c.at
	}
	if copies > 1 || rapid.Bool().Draw(s.t, "read before it is confirmed") {
		s.readAll(level - 1) // a copy that a crash leaves unread is handled again
	}
	if rapid.IntRange(0, 9).Draw(s.t, "crash before it is confirmed") == 0 {
		s.start()
		return
	}
	if rapid.IntRange(0, 4).Draw(s.t, "offset unknown") == 0 {
		to.at = -1
	}
	s.table.landed(p, level, to.at)
	if rapid.IntRange(0, 9).Draw(s.t, "crash before it is settled") == 0 {
		s.start()
		return
	}
	s.settle(p)
}

func (s *parkSim) settle(p *Message) {
	if p.level == 0 {
		s.settled[p.origin.offset] = true
	} else {
		s.done[p.level-1][p.at] = true
	}
	s.table.finish(p)
	s.table.free(s.table.ended())
}

func (s *parkSim) readAll(i int) {
	for ; s.read[i] < len(s.logs[i]); s.read[i]++ {
		at := s.read[i]
		p := s.logs[i][at]
		if s.done[i][int64(at)] {
			continue
		}
		if s.table.arrive(p, p.claim == s.epoch) {
			s.waiting[i] = append(s.waiting[i], p)
		} else {
			s.done[i][int64(at)] = true
		}
	}
}

// step does one thing; false when there is nothing left.
func (s *parkSim) step() bool {
	var can []func()
	if s.next < len(s.keys) {
		can = append(can, func() {
			n := int64(s.next)
			s.next++
			if !s.settled[n] {
				s.handle(&Message{origin: origin{offset: n, key: s.keys[n]}, keyed: s.keys[n] > 0, at: -1})
			}
		})
	}
	for i := range s.logs {
		if s.read[i] < len(s.logs[i]) {
			can = append(can, func() { s.readAll(i) })
		}
		if len(s.waiting[i]) > 0 && s.next > s.replay {
			can = append(can, func() {
				p := s.waiting[i][0]
				s.waiting[i] = s.waiting[i][1:]
				s.handle(p)
			})
		}
	}
	if len(can) == 0 {
		return false
	}
	can[rapid.IntRange(0, len(can)-1).Draw(s.t, "step")]()
	return true
}

// Whatever the sources do in whatever order, with confirmations that are late and
// copies, and crashes between a write, its confirmation and the mark: a message is
// handled only when all of its key before it are done, each is done once, and no
// key stays parked.
func TestLawOfTheParkedTable(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n, levels := rapid.IntRange(1, 14).Draw(t, "messages"), rapid.IntRange(1, 3).Draw(t, "levels")
		s := &parkSim{
			t: t, levels: levels, settled: map[int64]bool{}, calls: map[uint64][]int64{}, finished: map[int64]int{},
			logs: make([][]*Message, levels), boot: make([]int, levels), read: make([]int, levels), waiting: make([][]*Message, levels),
		}
		for range levels {
			s.done = append(s.done, map[int64]bool{})
		}
		for range n {
			s.keys = append(s.keys, uint64(rapid.IntRange(0, 2).Draw(t, "key")))
			s.fails = append(s.fails, rapid.SampledFrom([]int{0, 0, 1, 2, 3}).Draw(t, "fails"))
		}
		for i, key := range s.keys {
			if key == 0 { // without a key there is no order
				s.keys[i] = uint64(100 + i)
			}
		}
		s.start()
		for steps := 0; s.step(); steps++ {
			if steps > 5000 {
				t.Fatal("no end")
			}
		}
		for n := range s.keys {
			if s.finished[int64(n)] != 1 {
				t.Errorf("%d is done %d times", n, s.finished[int64(n)])
			}
		}
		if len(s.table.entries) > 0 || len(s.table.keys) > 0 {
			t.Errorf("left: %d messages, %d keys", len(s.table.entries), len(s.table.keys))
		}
	})
}

// A message of another topic of the same name is no copy, and one that stood before
// all that is parked is not held up by it.
func TestTableKnowsWhatIsNoCopy(t *testing.T) {
	t.Parallel()
	table := newTable(10)
	p := &Message{origin: origin{offset: 5, stamp: 1, key: 7}, keyed: true, level: 1, at: 0, moves: 1}
	table.load(p)
	for _, c := range []struct {
		o    origin
		want fateKind
	}{
		{origin{5, 1, 7}, fateSettle},
		{origin{5, 2, 7}, fateHandle}, // the topic was made anew
		{origin{4, 1, 7}, fateHandle}, // delivered again
		{origin{6, 1, 7}, fateFollow},
		{origin{6, 1, 8}, fateHandle},
	} {
		if f := table.decide(&Message{origin: c.o, keyed: true, at: -1}, true); f.kind != c.want {
			t.Errorf("%+v: fate %d, want %d", c.o, f.kind, c.want)
		}
	}
	table.finish(p)
	q := &Message{origin: origin{6, 1, 7}, keyed: true, at: -1}
	table.landed(q, 1, 1)
	q.level, q.at = 1, 1
	table.finish(q)
	if f := table.decide(&Message{origin: origin{7, 1, 7}, keyed: true, at: -1}, true); f.kind != fateAwait {
		t.Errorf("fate %d before its end is committed", f.kind)
	}
	ended := table.ended()
	if f := table.decide(&Message{origin: origin{7, 1, 7}, keyed: true, at: -1}, false); f.kind != fateFollow || f.level != 1 {
		t.Errorf("fate %+v of one that cannot wait", f)
	}
	table.free(ended) // it was parked again: not free
	if f := table.decide(&Message{origin: origin{8, 1, 7}, keyed: true, at: -1}, true); f.kind != fateFollow {
		t.Errorf("fate %d behind one that is on its way", f.kind)
	}
	if n := table.lost(1, 0, 100); n != 0 {
		t.Errorf("%d lost that are on their way", n)
	}
}

// A message whose write was tried again is due as its latest try says: what waits for it
// does not look before.
func TestTableKnowsTheLatestDue(t *testing.T) {
	t.Parallel()
	table := newTable(10)
	first := &Message{origin: origin{offset: 5, stamp: 1, key: 7}, keyed: true, level: 1, at: 0, moves: 1}
	second := &Message{origin: origin{offset: 6, stamp: 1, key: 7}, keyed: true, level: 1, at: 1, moves: 1}
	table.load(first)
	table.load(second)
	for _, due := range []int64{100, 900} {
		if level, gone := table.park(first, 2, due); level != 2 || gone {
			t.Fatalf("level %d, %t", level, gone)
		}
	}
	table.landed(first, 2, 0)
	if f := table.decide(second, true); f.kind != fateWait || f.due != 901 {
		t.Errorf("%+v", f)
	}
}

func TestRecentlyDoneIsBounded(t *testing.T) {
	t.Parallel()
	table := newTable(10)
	for i := range int64(recentlyDone + 100) {
		table.remember(origin{offset: i})
	}
	if len(table.done) != recentlyDone || len(table.recent) != recentlyDone || table.isDone(origin{offset: 99}) || !table.isDone(origin{offset: 100}) {
		t.Errorf("%d remembered", len(table.done))
	}
}

// Whatever a group's metadata or a record's headers are, nothing breaks.
func FuzzReadParked(f *testing.F) {
	f.Add("stormguard/1:AQ", "orders", "5", "1700000000000", "1")
	f.Add("", "", "", "", "")
	f.Add("stormguard/1:!", "orders", "-1", "x", "99999999999999999999")
	f.Fuzz(func(t *testing.T, meta, topic, offset, stamp, own string) {
		for n := range offsets.Decode(7, meta) {
			if n < 7 || n > 7+offsets.MaxAhead+7 {
				t.Errorf("offset %d", n)
			}
		}
		p := readParked(recordOf(map[string]string{
			retryTopicHeader: topic, retryPartition: "0", retryOffset: offset, retryTimestamp: stamp,
			retryAttempts: "1", retryLevel: own, retryMoves: "1", retryNotBefore: "1", retryFirstFailed: "1",
		}), 1)
		if p.own < 0 || p.own > maxLevels || len(p.msg.Headers) != 1 || string(p.msg.Value) != "v" {
			t.Errorf("%+v", p)
		}
	})
}

// recordOf is a record of a retry topic with these headers and one of its own.
func recordOf(headers map[string]string) *sarama.ConsumerMessage {
	m := &sarama.ConsumerMessage{Topic: "orders.billing.retry.1", Offset: 3, Value: []byte("v"), Headers: []*sarama.RecordHeader{{Key: []byte("tenant"), Value: []byte("acme")}}}
	for name, value := range headers {
		m.Headers = append(m.Headers, &sarama.RecordHeader{Key: []byte(name), Value: []byte(value)})
	}
	return m
}

// What the table tells apart, one thing at a time.
func TestTableTellsCopiesApart(t *testing.T) {
	t.Parallel()
	at := func(offset int64, level int, at int64, moves int) *Message {
		return &Message{origin: origin{offset: offset, key: 7}, keyed: true, level: level, at: at, moves: moves}
	}
	// Of two copies the one that was written later counts, wherever it is read first.
	for _, newest := range []int{0, 1} {
		table := newTable(10)
		copies := []*Message{at(1, 1, 5, 2), at(1, 2, 3, 2)}
		copies[newest].moves = 3
		table.load(copies[0])
		level, offset := table.load(copies[1])
		if old := copies[1-newest]; level != old.level || offset != old.at {
			t.Errorf("level %d, offset %d is settled", level, offset)
		}
		if !table.arrive(copies[newest], false) || table.arrive(copies[1-newest], false) {
			t.Error("the older copy is taken")
		}
	}
	// One that was written again to its own level is a copy where it was.
	table := newTable(10)
	old := at(1, 1, 0, 1)
	table.load(old)
	table.park(old, 1, 0)
	if table.arrive(at(1, 1, 4, 2), false) {
		t.Error("another owner's copy is taken for the one being written")
	}
	if !table.arrive(at(1, 1, 5, 2), true) || table.arrive(at(1, 1, 6, 2), true) {
		t.Error("of one's own the first is to be taken")
	}
	if f := table.decide(old, true); f.kind != fateSettle {
		t.Errorf("fate %d of a copy that went on in its level", f.kind)
	}
	// A write that was begun is ended, also when nothing is in front any more.
	table = newTable(10)
	table.load(old)
	next := at(2, 0, -1, 0)
	if f := table.decide(next, true); f.kind != fateFollow {
		t.Fatalf("fate %d", f.kind)
	}
	table.finish(old)
	if f := table.decide(next, true); f.kind != fateFollow || f.level != 1 {
		t.Errorf("fate %+v of one that may be there already", f)
	}
}

// A write that cannot be leaves the message where it is, and its turn comes.
func TestTableDropsAWrite(t *testing.T) {
	t.Parallel()
	at := func(offset int64, level int) *Message {
		p := &Message{origin: origin{offset: offset, key: 7}, keyed: true, level: level, at: offset, moves: level}
		if level == 0 {
			p.at = -1
		}
		return p
	}
	table := newTable(10)
	first, large, parked := at(1, 1), at(2, 0), at(3, 1)
	table.load(first)
	table.load(parked)
	for range 3 {
		if f := table.decide(large, false); f.kind != fateFollow || f.level != 1 {
			t.Fatalf("fate %+v", f)
		}
		table.dropped(large)
		if n := table.size(); n != 2 {
			t.Fatalf("%d in the table", n)
		}
	}
	if f := table.decide(parked, false); f.kind != fateFollow { // of a retry topic
		t.Fatalf("fate %+v", f)
	}
	table.dropped(parked)
	table.dropped(at(9, 0)) // nothing was begun
	if table.size() != 2 || !table.arrive(parked, false) {
		t.Error("what is parked is lost")
	}
	table.finish(first)
	if f := table.decide(large, false); f.kind != fateHandle {
		t.Errorf("fate %+v", f)
	}
	if f := table.decide(parked, false); f.kind != fateHandle {
		t.Errorf("fate %+v", f)
	}
}
