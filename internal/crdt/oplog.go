// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"time"
)

// What a zero [OpLogConfig] means.
const (
	defaultMaxRecords = 4096
	defaultMaxHeld    = 1024
)

const maxRecords = 1 << 20

// OpLogConfig bounds an [OpLog]. The zero value is valid and means the defaults.
type OpLogConfig struct {
	// MaxRecords is how many records of one origin are kept for peers that have not
	// acknowledged them: 1 to 1048576; 0 means 4096. The bound is per origin. Two logs that
	// are full of their own records must still merge each other's, or neither would ever be
	// acknowledged.
	MaxRecords int

	// MaxHeld is how many records may wait for a missing earlier record: 1 to 1048576; 0
	// means 1024.
	MaxHeld int
}

// Validate returns an error that names every field out of range, or nil.
func (c OpLogConfig) Validate() error {
	var errs []error
	if c.MaxRecords < 0 || c.MaxRecords > maxRecords {
		errs = append(errs, argument("OpLogConfig.MaxRecords", c.MaxRecords, fmt.Sprintf("1 to %d, or 0 for %d", maxRecords, defaultMaxRecords)))
	}
	if c.MaxHeld < 0 || c.MaxHeld > maxRecords {
		errs = append(errs, argument("OpLogConfig.MaxHeld", c.MaxHeld, fmt.Sprintf("1 to %d, or 0 for %d", maxRecords, defaultMaxHeld)))
	}
	return errors.Join(errs...)
}

// Op is the operation of a record.
type Op uint8

// The operations. The record's body says what is added or consumed.
const (
	OpAdd     Op = 1
	OpConsume Op = 2
	OpReset   Op = 3 // begins the next epoch
)

func (o Op) String() string {
	switch o {
	case OpAdd:
		return "ADD"
	case OpConsume:
		return "CONSUME"
	case OpReset:
		return "RESET"
	}
	return fmt.Sprintf("Op(%d)", uint8(o))
}

// A Record is one operation, named by its origin and number.
type Record[T any] struct {
	Origin Replica
	Seq    uint64 // number within its origin, from 1, without gaps
	Epoch  uint64 // epoch in which it counts; of a RESET, the epoch that it begins
	At     Stamp  // stamp of its origin
	Op     Op
	Body   T
}

// OpLogStats counts records since the log was made.
type OpLogStats struct {
	Applied    uint64 // handed to apply, own records included
	Void       uint64 // applied without counting, since their epoch was over
	Duplicates uint64 // received again
	Skipped    uint64 // never received, since every log that was heard had dropped them
	Refused    uint64 // in messages that a bound refused; they come again
}

// An OpLog carries operations to every replica. Each replica applies each operation once, in
// the order of its origin; there is no order between origins. It is for rare operations that
// must be seen one by one: configuration, RESET, audit. Frequent counts should travel as
// state, whose cost does not depend on how often it changes.
//
// # Epochs
//
// Operations count within an epoch. The first epoch is 0. A RESET begins the next epoch, once
// at each replica: if two replicas reset at the same time, the second RESET does not count.
// An ADD or CONSUME counts if its epoch is the current one when it is applied. If its epoch is
// older, it does not count. If its epoch is later, it came before its RESET, and begins that
// epoch itself: apply first gets a RESET without Origin and Body. When the record of the RESET
// comes, it does not count. So once all replicas have all records, the same records have
// counted last at each: those of the highest epoch.
//
// # Memory
//
// A record is kept until every peer named by [OpLog.Join] has acknowledged it. If a peer does
// not acknowledge, [OpLog.Depth] grows up to MaxRecords for each origin. Then the log refuses
// new records of that origin. While no peer is known, the log keeps the newest MaxRecords
// records in all. A replica that joins later begins where the logs of the others begin: it
// skips dropped records, and learns the epoch. Everything else must reach it as state.
//
// # Layout
//
// A record is 40 bytes and its body, little-endian, and is written and read in place. So T
// must have the same memory on every machine. It consists of integers of fixed size, floats,
// arrays and structs, without holes. Its size is a multiple of 8 from 8 to 512 bytes. All
// replicas must have the same T.
//
// An OpLog is not safe for concurrent use. The zero value is not usable; see [NewOpLog].
type OpLog[T any] struct {
	self  Replica
	cfg   OpLogConfig
	size  int // bytes of a record
	apply func(r Record[T], counts bool)
	epoch uint64 // the current epoch

	kept    []record[T]  // in the order in which they were applied here
	from    []*origin[T] // origin of kept[i]
	dropped uint64       // records before kept; the mark of kept[i] is dropped+i+1
	base    uint64       // the highest epoch of the records before kept

	origins map[Replica]*origin[T]
	held    int                // records held by all origins
	known   map[Replica]uint64 // mark that each known peer has acknowledged
	stats   OpLogStats
	scratch []record[T]
}

// A record is the layout in memory and on the wire.
type record[T any] struct {
	Seq   uint64
	Epoch uint64
	At    Stamp
	Op    uint64
	Body  T
}

const recordHead = 40

type origin[T any] struct {
	id      Replica
	applied uint64               // records up to this number are applied or skipped
	floor   uint64               // records up to this number are not in kept
	kept    int                  // records in OpLog.kept
	held    map[uint64]record[T] // records after applied+1, by number
}

// NewOpLog makes an empty log to which self appends. apply is called once for each record,
// within [OpLog.Append] and [OpLog.Merge], and must not call the log. counts is false if the
// record's epoch is over. The error names all faults.
func NewOpLog[T any](self Replica, cfg OpLogConfig, apply func(r Record[T], counts bool)) (*OpLog[T], error) {
	errs := []error{self.Validate(), cfg.Validate(), checkLayout(reflect.TypeFor[T]())}
	if apply == nil {
		errs = append(errs, argument("apply", "nil", "a function"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.MaxRecords == 0 {
		cfg.MaxRecords = defaultMaxRecords
	}
	if cfg.MaxHeld == 0 {
		cfg.MaxHeld = defaultMaxHeld
	}
	l := &OpLog[T]{
		self: self, cfg: cfg, apply: apply,
		size:    recordHead + int(reflect.TypeFor[T]().Size()),
		origins: make(map[Replica]*origin[T]),
		known:   make(map[Replica]uint64),
	}
	l.origin(self)
	return l, nil
}

// Append adds an operation of self in the current epoch, applies it and returns it. A RESET
// is in the next epoch. The error is [ErrFull] if a peer does not acknowledge. An unknown
// operation is an error, and so is a RESET after the last epoch.
func (l *OpLog[T]) Append(op Op, at Stamp, body T) (Record[T], error) {
	r := record[T]{Epoch: l.epoch, At: at, Op: uint64(op), Body: body}
	o := l.origins[l.self]
	switch {
	case op < OpAdd || op > OpReset:
		return Record[T]{}, argument("operation", uint8(op), "1 to 3")
	case op == OpReset && l.epoch == math.MaxUint64:
		return Record[T]{}, errOverflow
	case o.kept >= l.cfg.MaxRecords && len(l.known) > 0:
		return Record[T]{}, l.full(o.kept + 1)
	case op == OpReset:
		r.Epoch++
	}
	r.Seq = o.applied + 1
	l.take(o, r)
	return r.of(o.id), nil
}

// Epoch returns the current epoch.
func (l *OpLog[T]) Epoch() uint64 { return l.epoch }

// Applied returns the number of an origin's latest record that was applied or skipped here.
func (l *OpLog[T]) Applied(r Replica) uint64 {
	if o := l.origins[r]; o != nil {
		return o.applied
	}
	return 0
}

// Depth returns the backlog: how many records are kept because a known peer has not
// acknowledged them, or because no peer is known.
func (l *OpLog[T]) Depth() int { return len(l.kept) }

// Age returns the age of the oldest record of the backlog, by its stamp. It is at least 0,
// and 0 without records.
func (l *OpLog[T]) Age(now Stamp) time.Duration {
	if len(l.kept) == 0 || l.kept[0].At.Physical > now.Physical {
		return 0
	}
	const most = math.MaxInt64 / uint64(time.Millisecond)
	return time.Duration(min(now.Physical-l.kept[0].At.Physical, most)) * time.Millisecond
}

// Held returns how many records wait for a missing earlier record.
func (l *OpLog[T]) Held() int { return l.held }

// Stats returns the counts of records.
func (l *OpLog[T]) Stats() OpLogStats { return l.stats }

// Join adds a peer: records are kept until it has acknowledged them. Joining again changes
// nothing. A later incarnation is another peer.
func (l *OpLog[T]) Join(peer Replica) {
	if _, ok := l.known[peer]; !ok && peer != l.self {
		l.known[peer.kept()] = 0
	}
}

// Gone says that records no longer wait for a peer's acknowledgement. The peer's own records
// stay.
func (l *OpLog[T]) Gone(peer Replica) {
	delete(l.known, peer)
	l.compact()
}

// Ack says that a peer has all records up to a mark of this log: the since with which a
// session calls Delta. Unknown peers and older marks change nothing.
func (l *OpLog[T]) Ack(peer Replica, mark uint64) {
	if acked, ok := l.known[peer]; ok && mark > acked {
		l.known[peer] = min(mark, l.Mark())
		l.compact()
	}
}

// Forget drops the state of an origin that is gone. The log then no longer knows which of its
// records it has applied: if one comes again, it is applied again. So call it only when no
// other log keeps records of the origin and no packet can bring them, ten minutes after it
// went. It returns false, and does nothing, while this log keeps or holds records of the
// origin, or if the origin is self.
func (l *OpLog[T]) Forget(r Replica) bool {
	o := l.origins[r]
	if r == l.self || o != nil && o.kept+len(o.held) > 0 {
		return false
	}
	delete(l.origins, r)
	return true
}

// Mark returns the number of the latest record applied here, over all origins. See the
// package comment.
func (l *OpLog[T]) Mark() uint64 { return l.dropped + uint64(len(l.kept)) }

// Delta appends the records applied after since, in that order, in at most room bytes. upto
// is the mark up to which the result is complete. Without new records it appends nothing. It
// copies runs of records from memory as they are.
func (l *OpLog[T]) Delta(b []byte, since uint64, room int) (_ []byte, upto uint64) {
	if since >= l.Mark() {
		return b, l.Mark()
	}
	at := 0
	if since > l.dropped {
		at = int(since - l.dropped)
	}
	start := len(b)
	b = append(b, formatOpLog)
	b = binary.AppendUvarint(b, l.base)
	if len(b)-start > room {
		return b[:start], since
	}
	head := len(b)
	for at < len(l.kept) {
		n := len(b)
		o := l.from[at]
		b = appendReplica(b, o.id)
		b = binary.AppendUvarint(b, min(o.floor, l.kept[at].Seq-1))
		const countBytes = 3 // of a varint up to maxRecords
		fit := (room - (len(b) - start) - countBytes) / l.size
		if fit <= 0 {
			b = b[:n]
			break
		}
		end := at + 1
		for end < len(l.kept) && end-at < fit && l.from[end] == o && l.kept[end].Seq == l.kept[end-1].Seq+1 {
			end++
		}
		b = binary.AppendUvarint(b, uint64(end-at))
		b = append(b, memory(l.kept[at:end])...)
		at = end
	}
	upto = l.dropped + uint64(at)
	if len(b) == head && (l.base == 0 || at < len(l.kept)) {
		b = b[:start] // no record fitted, or a header alone would say nothing
		if at < len(l.kept) {
			upto = since
		}
	}
	return b, upto
}

// Merge merges a message of a Delta. It counts and ignores known records, applies the next
// ones, and holds records that come after a missing one. It keeps nothing of b.
//
// On an error nothing has changed. The error is [ErrMalformed]; or [ErrGap] until the missing
// records have come; or [ErrFull] until a peer has acknowledged; or another one for a record
// of self that self did not write.
func (l *OpLog[T]) Merge(b []byte) error {
	base, err := l.eachRun(b, nil)
	if err != nil {
		return err
	}
	if err := l.admit(b); err != nil {
		return err
	}
	if base > l.epoch {
		l.base = base
		l.begin(base, Stamp{})
	}
	_, err = l.eachRun(b, func(id Replica, floor uint64, records []record[T]) error {
		o := l.origin(id)
		l.skip(o, floor)
		for i := range records {
			l.put(o, &records[i])
		}
		return nil
	})
	return err
}

// admit returns an error if the records do not all fit into the bounds.
func (l *OpLog[T]) admit(b []byte) error {
	type after struct {
		applied uint64
		kept    int // records kept and held
	}
	fresh, ahead, full := 0, 0, 0
	will := make(map[Replica]after)
	_, err := l.eachRun(b, func(id Replica, floor uint64, records []record[T]) error {
		o, last := l.origins[id], records[len(records)-1].Seq
		a, ok := will[id]
		if !ok && o != nil {
			a = after{o.applied, o.kept + len(o.held)}
		}
		upto := a.applied
		if id == l.self && last > upto {
			return fmt.Errorf("%w: record %d of %v, which wrote %d", errTwin, last, id, upto)
		}
		upto = max(upto, floor)
		news := 0
		for i := range records {
			if seq := records[i].Seq; seq > upto && (o == nil || !o.holds(seq)) {
				news++
			}
		}
		fresh += news
		if records[0].Seq > upto+1 {
			ahead += news
		} else {
			upto = max(upto, last)
		}
		a.applied, a.kept = upto, a.kept+news
		will[id] = a
		if news > 0 && a.kept > l.cfg.MaxRecords && len(l.known) > 0 {
			full = a.kept
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case ahead > 0 && l.held+ahead > l.cfg.MaxHeld:
		l.stats.Refused += uint64(fresh)
		return fmt.Errorf("%w: %d records to hold beside %d, want at most %d", ErrGap, ahead, l.held, l.cfg.MaxHeld)
	case full > 0:
		l.stats.Refused += uint64(fresh)
		return l.full(full)
	}
	return nil
}

// eachRun parses a message. The records that run gets are in the message's memory or in
// l.scratch, and valid until run returns. With run nil, eachRun only checks the records.
func (l *OpLog[T]) eachRun(b []byte, run func(id Replica, floor uint64, records []record[T]) error) (base uint64, err error) {
	m := read("OpLog", formatOpLog, b)
	if m.Len() == 0 {
		return 0, m.err()
	}
	base = m.Uint("base epoch", 0, math.MaxUint64)
	if base == 0 && m.Fault() == nil && m.Len() == 0 {
		m.Fail("first run", "missing", "at least one when the base epoch is 0")
	}
	for m.Len() > 0 {
		id, floor := m.replica("origin"), m.Uint("floor", 0, math.MaxUint64-1)
		n := int(m.Uint("count", 1, maxRecords))
		off := m.Offset()
		raw := m.Bytes("records", n*l.size)
		if m.Fault() != nil {
			break
		}
		records, ok := overlay[record[T]](raw)
		if !ok {
			l.scratch = append(l.scratch[:0], make([]record[T], n)...)
			copy(memory(l.scratch), raw)
			records = l.scratch
		}
		if run != nil {
			if err := run(id, floor, records); err != nil {
				return 0, err
			}
			continue
		}
		for i := range records {
			r := &records[i]
			at := off + i*l.size
			switch {
			case i == 0 && r.Seq <= floor:
				m.FailAt(at, "number", r.Seq, fmt.Sprintf("above the floor, %d", floor))
			case i > 0 && r.Seq != records[i-1].Seq+1 || r.Seq == math.MaxUint64:
				m.FailAt(at, "number", r.Seq, "one more than that before, and not the last of all")
			case r.Op < uint64(OpAdd) || r.Op > uint64(OpReset):
				m.FailAt(at, "operation", r.Op, "1 to 3")
			case r.Op == uint64(OpReset) && r.Epoch == 0:
				m.FailAt(at, "epoch of a RESET", r.Epoch, "at least 1")
			}
		}
	}
	return base, m.err()
}

func (l *OpLog[T]) origin(id Replica) *origin[T] {
	o := l.origins[id]
	if o == nil {
		o = &origin[T]{id: id.kept()}
		l.origins[o.id] = o
	}
	return o
}

func (o *origin[T]) holds(seq uint64) bool {
	_, ok := o.held[seq]
	return ok
}

// skip skips an origin's records up to a floor: the sender has none up to and including it.
// It applies held records up to the floor, and then those that follow without a gap.
func (l *OpLog[T]) skip(o *origin[T], floor uint64) {
	if floor <= o.applied {
		return
	}
	var held []uint64
	for seq := range o.held {
		if seq <= floor {
			held = append(held, seq)
		}
	}
	slices.Sort(held)
	l.stats.Skipped += floor - o.applied - uint64(len(held))
	for _, seq := range held {
		l.unhold(o, seq)
	}
	o.applied, o.floor = floor, floor
	l.drain(o)
}

// put applies, holds or ignores a record.
func (l *OpLog[T]) put(o *origin[T], r *record[T]) {
	switch {
	case r.Seq <= o.applied || o.holds(r.Seq):
		l.stats.Duplicates++
	case r.Seq == o.applied+1:
		l.take(o, *r)
		l.drain(o)
	default:
		if o.held == nil {
			o.held = make(map[uint64]record[T])
		}
		o.held[r.Seq] = *r
		l.held++
	}
}

func (l *OpLog[T]) drain(o *origin[T]) {
	for o.holds(o.applied + 1) {
		l.unhold(o, o.applied+1)
	}
}

func (l *OpLog[T]) unhold(o *origin[T], seq uint64) {
	r := o.held[seq]
	delete(o.held, seq)
	l.held--
	l.take(o, r)
}

// take keeps and applies the next record of an origin.
func (l *OpLog[T]) take(o *origin[T], r record[T]) {
	if len(l.known) == 0 && len(l.kept) >= l.cfg.MaxRecords {
		l.drop(len(l.kept) - l.cfg.MaxRecords + 1)
	}
	l.kept, l.from = append(l.kept, r), append(l.from, o)
	o.applied = r.Seq
	o.kept++
	counts := r.Epoch == l.epoch
	switch {
	case r.Op == uint64(OpReset):
		counts = r.Epoch > l.epoch
		l.epoch = max(l.epoch, r.Epoch)
	case r.Epoch > l.epoch:
		l.begin(r.Epoch, r.At)
		counts = true
	}
	l.stats.Applied++
	if !counts {
		l.stats.Void++
	}
	l.apply(r.of(o.id), counts)
}

// begin begins an epoch whose RESET has not come.
func (l *OpLog[T]) begin(epoch uint64, at Stamp) {
	l.epoch = epoch
	l.apply(Record[T]{Epoch: epoch, At: at, Op: OpReset}, true)
}

func (r *record[T]) of(origin Replica) Record[T] {
	return Record[T]{Origin: origin, Seq: r.Seq, Epoch: r.Epoch, At: r.At, Op: Op(r.Op), Body: r.Body}
}

func (l *OpLog[T]) full(n int) error {
	return fmt.Errorf("%w: %d records of one origin, want at most %d", ErrFull, n, l.cfg.MaxRecords)
}

// compact drops records that every known peer has acknowledged.
func (l *OpLog[T]) compact() {
	if len(l.known) == 0 {
		return
	}
	acked := l.Mark()
	for _, mark := range l.known {
		acked = min(acked, mark)
	}
	if acked > l.dropped {
		l.drop(int(acked - l.dropped))
	}
}

func (l *OpLog[T]) drop(n int) {
	for i, o := range l.from[:n] {
		o.kept--
		o.floor = max(o.floor, l.kept[i].Seq)
		l.base = max(l.base, l.kept[i].Epoch)
	}
	l.kept, l.from = l.kept[n:], l.from[n:]
	l.dropped += uint64(n)
}
