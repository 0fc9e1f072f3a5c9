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

func appendText[T ~string](b []byte, s T) []byte {
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

func appendSpan(b []byte, d time.Duration) []byte {
	return binary.AppendUvarint(b, uint64(min(max(d, 0), maxSpan)/time.Microsecond))
}

func appendRecord(b []byte, r *record) []byte {
	b = append(b, r.kind)
	switch r.kind {
	case recordState:
		b = appendText(b, r.name)
		b = binary.AppendUvarint(b, r.state.Gen)
		b = binary.AppendUvarint(b, uint64(r.state.Round))
		b = binary.AppendUvarint(b, uint64(r.state.Rung))
		b = appendSpan(b, r.state.OpenFor)
		b = appendText(b, r.state.Cause)
		return appendSpan(b, r.age)
	case recordOther:
		b = appendText(b, r.vote.Node.Name)
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
	b = appendText(b, v.Scope)
	b = binary.AppendUvarint(b, v.Version)
	b = binary.AppendUvarint(b, v.Term)
	b = append(b, flags)
	b = binary.AppendUvarint(b, v.At.Gen)
	b = binary.AppendUvarint(b, uint64(v.At.Round))
	b = binary.AppendUvarint(b, uint64(v.Passes))
	b = binary.AppendUvarint(b, uint64(v.Failed))
	b = binary.AppendUvarint(b, uint64(v.Rung))
	b = appendSpan(b, v.OpenFor)
	b = appendText(b, v.Cause)
	return appendSpan(b, r.age)
}

func appendComplete(b []byte, version, life uint64) []byte {
	b = binary.AppendUvarint(append(b, recordComplete), version)
	return binary.AppendUvarint(b, life)
}

// reader reads a section. After the first fault it reads nothing but zeros.
type reader struct {
	b   []byte
	bad string
}

func (r *reader) fail(what string) {
	if r.bad == "" {
		r.bad = what
	}
	r.b = nil
}

func (r *reader) byte(what string) byte {
	if len(r.b) < 1 {
		r.fail(what)
		return 0
	}
	c := r.b[0]
	r.b = r.b[1:]
	return c
}

func (r *reader) number(what string, most uint64) uint64 {
	n, size := binary.Uvarint(r.b)
	if size <= 0 || n > most {
		r.fail(what)
		return 0
	}
	r.b = r.b[size:]
	return n
}

func (r *reader) fixed(what string) uint64 {
	if len(r.b) < 8 {
		r.fail(what)
		return 0
	}
	n := binary.BigEndian.Uint64(r.b)
	r.b = r.b[8:]
	return n
}

// text copies: nothing of a packet is kept.
func (r *reader) text(what string, least, most int) string {
	n := r.number(what, uint64(most))
	if r.bad != "" || int(n) < least || len(r.b) < int(n) {
		r.fail(what)
		return ""
	}
	s := string(r.b[:n])
	r.b = r.b[n:]
	return s
}

func (r *reader) span(what string) time.Duration {
	return time.Duration(r.number(what, uint64(maxSpan/time.Microsecond))) * time.Microsecond
}

// readMessage reads all of b, or says what is wrong with it.
func readMessage(b []byte, from crdt.Replica) (*message, error) {
	r := &reader{b: b}
	if version := r.byte("version"); r.bad == "" && version != wireVersion {
		return nil, fmt.Errorf("%w: version %d, not %d", ErrMalformed, version, wireVersion)
	}
	m := &message{number: r.number("roster number", math.MaxUint64), digest: r.fixed("roster digest")}
	informed := r.byte("informed")
	if informed > 1 {
		r.fail("informed")
	}
	m.informed = informed == 1
	for len(r.b) > 0 {
		kind := r.byte("kind")
		if kind == recordComplete {
			m.complete, m.floor = true, r.number("floor", math.MaxUint64)
			m.life = r.number("receiver", math.MaxUint64)
			if len(r.b) > 0 {
				r.fail("something after the last record")
			}
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
			rec.vote.Node.Name = r.text("node", 1, maxName)
			rec.vote.Node.Incarnation = r.number("incarnation", math.MaxUint64)
			rec.silent = r.span("silent")
			r.vote(&rec)
		default:
			r.fail("kind")
		}
		m.records = append(m.records, rec)
	}
	if r.bad != "" {
		return nil, fmt.Errorf("%w: %s, record %d", ErrMalformed, r.bad, len(m.records))
	}
	return m, nil
}

func (r *reader) state(rec *record) {
	s := &rec.state
	rec.name = r.text("scope", 1, maxScope)
	s.Gen = r.number("gen", math.MaxUint64)
	s.Round = uint32(r.number("round", math.MaxUint32))
	s.Rung = int(r.number("rung", maxRung))
	s.OpenFor = r.span("open period")
	s.Cause = breaker.Cause(r.text("cause", 0, maxCause))
	rec.age = r.span("age")
	if !s.Open() && (s.Rung != 0 || s.OpenFor != 0 || s.Cause != "") {
		r.fail("a closed state with a period")
	}
}

// maxRung bounds a ladder: a period doubles from a millisecond to a day in less.
const maxRung = 64

func (r *reader) vote(rec *record) {
	v := &rec.vote
	v.Scope = r.text("scope", 1, maxScope)
	v.Version = r.number("version", math.MaxUint64)
	v.Term = r.number("term", math.MaxUint64-1)
	flags := r.byte("flags")
	v.Wants, v.Gone = flags&flagWants != 0, flags&flagGone != 0
	v.Phase = Phase(flags &^ (flagWants | flagGone))
	if v.Phase >= phases {
		r.fail("phase")
	}
	v.At.Gen = r.number("gen", math.MaxUint64)
	v.At.Round = uint32(r.number("round", math.MaxUint32))
	v.Passes = uint32(r.number("passes", math.MaxUint32))
	v.Failed = uint32(r.number("failed", math.MaxUint32))
	v.Rung = int(r.number("rung", maxRung))
	v.OpenFor = r.span("open period")
	v.Cause = breaker.Cause(r.text("cause", 0, maxCause))
	rec.age = r.span("age")
	if v.Version == 0 {
		r.fail("version of a vote")
	}
}
