// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/crdt/wire"
	"github.com/stormguard-mq/stormguard/fleet"
)

// Values, each after a byte for the version:
//
//	roster = number quorum successes names    quorum in millionths; names is a hash, eight bytes
//	member = incarnation
//	state  = gen round rung openFor cause
//	vote   = incarnation flags gen round passes failed rung openFor cause
//	probe  = name incarnation gen round
//	last   = name incarnation flags gen rung openFor cause
//
// Numbers are unsigned varints; texts have their length before them; durations are
// microseconds. No instant travels.
const (
	wireVersion = 1
	flagWants   = 1 << 6
	maxRung     = 64
	maxSpan     = 1000 * time.Hour
)

// charter is what all must have alike, or they would count differently.
type charter struct {
	number, quorum, successes, names uint64
}

func charterOf(c Config) charter {
	h := fnv.New64a()
	for _, n := range slices.Sorted(slices.Values(c.Roster.Names)) {
		_, _ = h.Write(wire.AppendText(nil, n)) // never fails
	}
	return charter{c.Roster.Number, uint64(math.Round(c.Fleet.Quorum * 1e6)), uint64(c.Fleet.Successes), h.Sum64()}
}

// probe is who has the one probe of a scope.
type probe struct {
	holder crdt.Replica
	at     fleet.Position
}

func numbers(b []byte, all ...uint64) []byte {
	for _, n := range all {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

func span(d time.Duration) uint64 { return uint64(min(max(d, 0), maxSpan) / time.Microsecond) }

func (c charter) encode() []byte {
	return binary.BigEndian.AppendUint64(numbers([]byte{wireVersion}, c.number, c.quorum, c.successes), c.names)
}

func encodeMember(incarnation uint64) []byte { return numbers([]byte{wireVersion}, incarnation) }

func encodeState(s fleet.State) []byte {
	b := numbers([]byte{wireVersion}, s.Gen, uint64(s.Round), uint64(s.Rung), span(s.OpenFor))
	return wire.AppendText(b, s.Cause)
}

func encodeVote(v fleet.Vote) []byte {
	flags := uint64(v.Phase)
	if v.Wants {
		flags |= flagWants
	}
	b := numbers([]byte{wireVersion}, v.Node.Incarnation, flags, v.At.Gen, uint64(v.At.Round),
		uint64(v.Passes), uint64(v.Failed), uint64(v.Rung), span(v.OpenFor))
	return wire.AppendText(b, v.Cause)
}

func (p probe) encode() []byte {
	return numbers(wire.AppendText([]byte{wireVersion}, p.holder.Name), p.holder.Incarnation, p.at.Gen, uint64(p.at.Round))
}

func encodeLast(v fleet.Vote) []byte {
	b := numbers(wire.AppendText([]byte{wireVersion}, v.Node.Name), v.Node.Incarnation,
		uint64(v.Phase), v.At.Gen, uint64(v.Rung), span(v.OpenFor))
	return wire.AppendText(b, v.Cause)
}

// reader reads a value.
type reader struct{ wire.Reader }

// read begins with the version.
func read(b []byte) *reader {
	r := &reader{wire.Read(b)}
	r.Uint("version", wireVersion, wireVersion)
	return r
}

// number is any that fits.
func (r *reader) number(field string) uint64 { return r.Uint(field, 0, math.MaxUint64) }

func (r *reader) names() uint64 {
	if b := r.Bytes("names", 8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (r *reader) position() fleet.Position {
	return fleet.Position{Gen: r.number("gen"), Round: uint32(r.Uint("round", 0, math.MaxUint32))}
}

func (r *reader) span() time.Duration {
	return time.Duration(r.Uint("open period", 0, uint64(maxSpan/time.Microsecond))) * time.Microsecond
}

func (r *reader) rung() int            { return int(r.Uint("rung", 0, maxRung)) }
func (r *reader) cause() breaker.Cause { return breaker.Cause(r.Text("cause", 0, maxCause)) }

// phase refuses what may not be in a vote, or in the last owner's word.
func (r *reader) phase(v *fleet.Vote, flags uint64) {
	n := r.Uint("flags", 0, math.MaxUint8)
	v.Wants = n&flags != 0
	if n&^flags > uint64(fleet.PhaseSeconded) {
		r.Fail("phase", n&^flags, fmt.Sprintf("0 to %d", fleet.PhaseSeconded))
	}
	v.Phase = fleet.Phase(n &^ flags)
}

// end reports what was wrong, something at the end included.
func (r *reader) end(what string) error {
	r.End()
	if r.Fault() != nil {
		return fmt.Errorf("%w: %s: %w", ErrMalformed, what, r.Fault())
	}
	return nil
}

func decodeCharter(b []byte) (charter, error) {
	r := read(b)
	c := charter{
		number: r.number("number"), quorum: r.Uint("quorum", 0, 1e6),
		successes: r.Uint("successes", 0, math.MaxUint32), names: r.names(),
	}
	return c, r.end("roster")
}

func decodeMember(b []byte) (uint64, error) {
	r := read(b)
	n := r.number("incarnation")
	return n, r.end("member")
}

func decodeState(b []byte) (fleet.State, error) {
	r := read(b)
	s := fleet.State{Position: r.position(), Rung: r.rung(), OpenFor: r.span(), Cause: r.cause()}
	if !s.Open() && (s.Rung != 0 || s.OpenFor != 0 || s.Cause != "") {
		r.Fail("a closed state", s, "no open period")
	}
	if err := r.end("state"); err != nil {
		return fleet.State{}, err
	}
	return s, nil
}

func decodeVote(b []byte, scope, name string) (fleet.Vote, error) {
	r := read(b)
	v := fleet.Vote{Scope: scope, Node: crdt.Replica{Name: name, Incarnation: r.number("incarnation")}, Version: 1}
	r.phase(&v, flagWants)
	v.At = r.position()
	v.Passes = uint32(r.Uint("passes", 0, math.MaxUint32))
	v.Failed = uint32(r.Uint("failed", 0, math.MaxUint32))
	v.Rung, v.OpenFor, v.Cause = r.rung(), r.span(), r.cause()
	return v, r.end("vote")
}

func decodeProbe(b []byte) (probe, error) {
	r := read(b)
	p := probe{holder: crdt.Replica{Name: r.Text("name", 1, maxName), Incarnation: r.number("incarnation")}}
	p.at = r.position()
	return p, r.end("probe")
}

func decodeLast(b []byte, scope string) (fleet.Vote, error) {
	r := read(b)
	v := fleet.Vote{Scope: scope, Version: 1}
	v.Node = crdt.Replica{Name: r.Text("name", 1, maxName), Incarnation: r.number("incarnation")}
	r.phase(&v, 0)
	v.At.Gen = r.number("gen")
	v.Rung, v.OpenFor, v.Cause = r.rung(), r.span(), r.cause()
	return v, r.end("last owner")
}
