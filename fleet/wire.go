// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/crdt/wire"
)

// What a section says to a peer:
//
//	section  = version number digest informed { record }
//	record   = 1 name state age                 a decision
//	         | 2 vote age                       the sender's own
//	         | 3 node incarnation silent vote age   another's
//	         | 4 version incarnation                last: to this life of the receiver, no vote of
//	                                            the sender up to the version is missing
//	state    = gen round rung openFor cause
//	vote     = name version term flags gen round passes failed rung openFor cause
//
// Numbers are unsigned varints, except digest (eight bytes) and version, informed
// and flags (a byte); names and causes have their length before them. Times are
// durations in microseconds: age is since the open period began, silent since the
// process was last known to stand by its vote. No instant travels.
const (
	wireVersion = 1

	maxScope = 255
	maxName  = 128
	maxCause = 64

	recordState    = 1
	recordOwn      = 2
	recordOther    = 3
	recordComplete = 4

	flagWants = 1 << 6
	flagGone  = 1 << 7

	// maxSpan bounds a duration that travels; a longer one is cut.
	maxSpan = 1000 * time.Hour
	// maxRecord is more than any record takes, so a packet with room for a header
	// and this always makes progress.
	maxRecord = 1 + 3*(binary.MaxVarintLen16+maxScope) + 16*binary.MaxVarintLen64
	maxHeader = 1 + binary.MaxVarintLen64 + 8 + 1
)

// message is a section, read.
type message struct {
	number   uint64
	digest   uint64
	informed bool
	records  []record
	complete bool
	floor    uint64
	life     uint64 // the receiver's, as the sender knows it
}

type record struct {
	kind   byte
	state  State // recordState
	name   string
	vote   Vote
	age    time.Duration
	silent time.Duration
}

func appendHeader(b []byte, number, digest uint64, informed bool) []byte {
	b = append(b, wireVersion)
	b = binary.AppendUvarint(b, number)
	b = binary.BigEndian.AppendUint64(b, digest)
	if informed {
		return append(b, 1)
	}
	return append(b, 0)
}

func appendSpan(b []byte, d time.Duration) []byte {
	return binary.AppendUvarint(b, uint64(min(max(d, 0), maxSpan)/time.Microsecond))
}

func appendRecord(b []byte, r *record) []byte {
	b = append(b, r.kind)
	switch r.kind {
	case recordState:
		b = wire.AppendText(b, r.name)
		b = binary.AppendUvarint(b, r.state.Gen)
		b = binary.AppendUvarint(b, uint64(r.state.Round))
		b = binary.AppendUvarint(b, uint64(r.state.Rung))
		b = appendSpan(b, r.state.OpenFor)
		b = wire.AppendText(b, r.state.Cause)
		return appendSpan(b, r.age)
	case recordOther:
		b = wire.AppendText(b, r.vote.Node.Name)
		b = binary.AppendUvarint(b, r.vote.Node.Incarnation)
		b = appendSpan(b, r.silent)
	}
	v := &r.vote
	flags := byte(v.Phase)
	if v.Wants {
		flags |= flagWants
	}
	if v.Gone {
		flags |= flagGone
	}
	b = wire.AppendText(b, v.Scope)
	b = binary.AppendUvarint(b, v.Version)
	b = binary.AppendUvarint(b, v.Term)
	b = append(b, flags)
	b = binary.AppendUvarint(b, v.At.Gen)
	b = binary.AppendUvarint(b, uint64(v.At.Round))
	b = binary.AppendUvarint(b, uint64(v.Passes))
	b = binary.AppendUvarint(b, uint64(v.Failed))
	b = binary.AppendUvarint(b, uint64(v.Rung))
	b = appendSpan(b, v.OpenFor)
	b = wire.AppendText(b, v.Cause)
	return appendSpan(b, r.age)
}

func appendComplete(b []byte, version, life uint64) []byte {
	b = binary.AppendUvarint(append(b, recordComplete), version)
	return binary.AppendUvarint(b, life)
}

// reader reads a section. Nothing of a packet is kept.
type reader struct{ wire.Reader }

func read(b []byte) *reader { return &reader{wire.Read(b)} }

// number is any that fits.
func (r *reader) number(field string) uint64 { return r.Uint(field, 0, math.MaxUint64) }

// digest is eight bytes, the highest first.
func (r *reader) digest(field string) uint64 {
	if b := r.Bytes(field, 8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (r *reader) span(field string) time.Duration {
	return time.Duration(r.Uint(field, 0, uint64(maxSpan/time.Microsecond))) * time.Microsecond
}

// readMessage reads all of b, or says what is wrong with it.
func readMessage(b []byte, from crdt.Replica) (*message, error) {
	r := read(b)
	r.Uint("version", wireVersion, wireVersion)
	m := &message{number: r.number("roster number"), digest: r.digest("roster digest"), informed: r.Bool("informed")}
	for r.Len() > 0 {
		kind := r.Byte("kind")
		if kind == recordComplete {
			m.complete, m.floor = true, r.number("floor")
			m.life = r.number("receiver")
			r.End()
			break
		}
		rec := record{kind: kind}
		switch kind {
		case recordState:
			r.state(&rec)
		case recordOwn:
			rec.vote.Node = from
			r.vote(&rec)
		case recordOther:
			rec.vote.Node.Name = r.Text("node", 1, maxName)
			rec.vote.Node.Incarnation = r.number("incarnation")
			rec.silent = r.span("silent")
			r.vote(&rec)
		default:
			r.Fail("kind", kind, "1 to 4")
		}
		m.records = append(m.records, rec)
	}
	if r.Fault() != nil {
		return nil, fmt.Errorf("%w: record %d: %w", ErrMalformed, len(m.records), r.Fault())
	}
	return m, nil
}

func (r *reader) state(rec *record) {
	s := &rec.state
	rec.name = r.Text("scope", 1, maxScope)
	s.Gen = r.number("gen")
	s.Round = uint32(r.Uint("round", 0, math.MaxUint32))
	s.Rung = int(r.Uint("rung", 0, maxRung))
	s.OpenFor = r.span("open period")
	s.Cause = breaker.Cause(r.Text("cause", 0, maxCause))
	rec.age = r.span("age")
	if !s.Open() && (s.Rung != 0 || s.OpenFor != 0 || s.Cause != "") {
		r.Fail("a closed state", *s, "no open period")
	}
}

// maxRung bounds a ladder: a period doubles from a millisecond to a day in less.
const maxRung = 64

func (r *reader) vote(rec *record) {
	v := &rec.vote
	v.Scope = r.Text("scope", 1, maxScope)
	v.Version = r.Uint("version", 1, math.MaxUint64)
	v.Term = r.Uint("term", 0, math.MaxUint64-1)
	flags := r.Byte("flags")
	v.Wants, v.Gone = flags&flagWants != 0, flags&flagGone != 0
	v.Phase = Phase(flags &^ (flagWants | flagGone))
	if v.Phase >= phases {
		r.Fail("phase", v.Phase, fmt.Sprintf("0 to %d", phases-1))
	}
	v.At.Gen = r.number("gen")
	v.At.Round = uint32(r.Uint("round", 0, math.MaxUint32))
	v.Passes = uint32(r.Uint("passes", 0, math.MaxUint32))
	v.Failed = uint32(r.Uint("failed", 0, math.MaxUint32))
	v.Rung = int(r.Uint("rung", 0, maxRung))
	v.OpenFor = r.span("open period")
	v.Cause = breaker.Cause(r.Text("cause", 0, maxCause))
	rec.age = r.span("age")
}
