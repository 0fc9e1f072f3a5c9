// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// A section sends a peer:
//
//	section  = version number digest informed { record }
//	record   = 1 name state age                    a decision
//	         | 2 vote age                          the sender's own vote
//	         | 3 node incarnation silent vote age  another process's vote
//	         | 4 version incarnation               the last record, for this incarnation of the receiver:
//	                                               no vote of the sender up to the version is missing
//	vote     = scope version term rest
//
// States, and the rest of a vote, are as internal/scope writes them. Numbers are unsigned varints,
// except digest (eight bytes) and version and informed (a byte); a name has its length before it.
// Times are durations in microseconds: age is the time since the open period began, silent the time
// since the process is last known to have held to its vote.
const (
	wireVersion = 1

	maxScope = scope.MaxName
	maxName  = 128

	recordState    = 1
	recordOwn      = 2
	recordOther    = 3
	recordComplete = 4

	maxSpan = scope.MaxSpan
	// maxRecord is more than any record takes. So a packet with room for a header and this always
	// makes progress.
	maxRecord = 1 + 3*(binary.MaxVarintLen16+maxScope) + 16*binary.MaxVarintLen64
	maxHeader = 1 + binary.MaxVarintLen64 + 8 + 1
)

// message is a decoded section.
type message struct {
	number      uint64
	digest      uint64
	informed    bool
	records     []record
	complete    bool
	floor       uint64
	incarnation uint64 // the receiver's incarnation, as the sender knows it
}

type record struct {
	kind   byte
	state  scope.State // recordState
	name   string
	vote   scope.Vote
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

func appendSpan(b []byte, d time.Duration) []byte { return scope.AppendSpan(b, d) }

func appendRecord(b []byte, r *record) []byte {
	b = append(b, r.kind)
	switch r.kind {
	case recordState:
		return appendSpan(scope.AppendState(wire.AppendText(b, r.name), r.state), r.age)
	case recordOther:
		b = wire.AppendText(b, r.vote.Node.Name)
		b = binary.AppendUvarint(b, r.vote.Node.Incarnation)
		b = appendSpan(b, r.silent)
	}
	v := &r.vote
	b = wire.AppendText(b, v.Scope)
	b = binary.AppendUvarint(b, v.Version)
	b = binary.AppendUvarint(b, v.Term)
	return appendSpan(scope.AppendVote(b, v), r.age)
}

func appendComplete(b []byte, version, incarnation uint64) []byte {
	b = binary.AppendUvarint(append(b, recordComplete), version)
	return binary.AppendUvarint(b, incarnation)
}

// reader reads a section. It keeps nothing of a packet.
type reader struct{ scope.Reader }

func read(b []byte) *reader { return &reader{scope.Read(b)} }

func (r *reader) number(field string) uint64      { return r.Number(field) }
func (r *reader) digest(field string) uint64      { return r.Digest(field) }
func (r *reader) span(field string) time.Duration { return r.Span(field) }

// readMessage reads all of b, or returns why it cannot.
func readMessage(b []byte, from crdt.Replica) (*message, error) {
	r := read(b)
	r.Uint("version", wireVersion, wireVersion)
	m := &message{number: r.number("roster number"), digest: r.digest("roster digest"), informed: r.Bool("informed")}
	for r.Len() > 0 {
		kind := r.Byte("kind")
		if kind == recordComplete {
			m.complete, m.floor = true, r.number("floor")
			m.incarnation = r.number("receiver")
			r.End()
			break
		}
		rec := record{kind: kind}
		switch kind {
		case recordState:
			rec.name, rec.state = r.Text("scope", 1, maxScope), r.State()
			rec.age = r.span("age")
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

func (r *reader) vote(rec *record) {
	v := &rec.vote
	v.Scope = r.Text("scope", 1, maxScope)
	v.Version = r.Uint("version", 1, math.MaxUint64)
	v.Term = r.Uint("term", 0, math.MaxUint64-1)
	r.Vote(v)
	rec.age = r.span("age")
}
