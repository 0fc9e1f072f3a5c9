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
		_, _ = h.Write(appendText(nil, n)) // never fails
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

func appendText[T ~string](b []byte, s T) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func span(d time.Duration) uint64 { return uint64(min(max(d, 0), maxSpan) / time.Microsecond) }

func (c charter) encode() []byte {
	return binary.BigEndian.AppendUint64(numbers([]byte{wireVersion}, c.number, c.quorum, c.successes), c.names)
}

func encodeMember(incarnation uint64) []byte { return numbers([]byte{wireVersion}, incarnation) }

func encodeState(s fleet.State) []byte {
	b := numbers([]byte{wireVersion}, s.Gen, uint64(s.Round), uint64(s.Rung), span(s.OpenFor))
	return appendText(b, s.Cause)
}

func encodeVote(v fleet.Vote) []byte {
	flags := uint64(v.Phase)
	if v.Wants {
		flags |= flagWants
	}
	b := numbers([]byte{wireVersion}, v.Node.Incarnation, flags, v.At.Gen, uint64(v.At.Round),
		uint64(v.Passes), uint64(v.Failed), uint64(v.Rung), span(v.OpenFor))
	return appendText(b, v.Cause)
}

func (p probe) encode() []byte {
	return numbers(appendText([]byte{wireVersion}, p.holder.Name), p.holder.Incarnation, p.at.Gen, uint64(p.at.Round))
}

func encodeLast(v fleet.Vote) []byte {
	b := numbers(appendText([]byte{wireVersion}, v.Node.Name), v.Node.Incarnation,
		uint64(v.Phase), v.At.Gen, uint64(v.Rung), span(v.OpenFor))
	return appendText(b, v.Cause)
}

// reader reads a value. After the first fault it reads nothing but zeros.
type reader struct {
	b   []byte
	bad string
}

// read begins with the version.
func read(b []byte) *reader {
	r := &reader{b: b}
	if r.number("version", math.MaxUint64) != wireVersion {
		r.fail("version")
	}
	return r
}

func (r *reader) fail(what string) {
	if r.bad == "" {
		r.bad = what
	}
	r.b = nil
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

func (r *reader) text(what string, least, most int) string {
	n := int(r.number(what, uint64(most)))
	if r.bad != "" || n < least || len(r.b) < n {
		r.fail(what)
		return ""
	}
	s := string(r.b[:n])
	r.b = r.b[n:]
	return s
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

func (r *reader) position() fleet.Position {
	return fleet.Position{Gen: r.number("gen", math.MaxUint64), Round: uint32(r.number("round", math.MaxUint32))}
}

func (r *reader) span() time.Duration {
	return time.Duration(r.number("open period", uint64(maxSpan/time.Microsecond))) * time.Microsecond
}

func (r *reader) rung() int            { return int(r.number("rung", maxRung)) }
func (r *reader) cause() breaker.Cause { return breaker.Cause(r.text("cause", 0, maxCause)) }

// phase refuses what may not be in a vote, or in the last owner's word.
func (r *reader) phase(v *fleet.Vote, flags uint64) {
	n := r.number("flags", math.MaxUint8)
	v.Wants = n&flags != 0
	if n&^flags > uint64(fleet.PhaseSeconded) {
		r.fail("phase")
	}
	v.Phase = fleet.Phase(n &^ flags)
}

// end reports what was wrong, something at the end included.
func (r *reader) end(what string) error {
	if r.bad == "" && len(r.b) > 0 {
		r.bad = "something at the end"
	}
	if r.bad != "" {
		return fmt.Errorf("%w: %s of a %s", ErrMalformed, r.bad, what)
	}
	return nil
}

func decodeCharter(b []byte) (charter, error) {
	r := read(b)
	c := charter{
		number: r.number("number", math.MaxUint64), quorum: r.number("quorum", 1e6),
		successes: r.number("successes", math.MaxUint32), names: r.fixed("names"),
	}
	return c, r.end("roster")
}

func decodeMember(b []byte) (uint64, error) {
	r := read(b)
	n := r.number("incarnation", math.MaxUint64)
	return n, r.end("member")
}

func decodeState(b []byte) (fleet.State, error) {
	r := read(b)
	s := fleet.State{Position: r.position(), Rung: r.rung(), OpenFor: r.span(), Cause: r.cause()}
	if !s.Open() && (s.Rung != 0 || s.OpenFor != 0 || s.Cause != "") {
		r.fail("a closed state with a period")
	}
	if err := r.end("state"); err != nil {
		return fleet.State{}, err
	}
	return s, nil
}

func decodeVote(b []byte, scope, name string) (fleet.Vote, error) {
	r := read(b)
	v := fleet.Vote{Scope: scope, Node: crdt.Replica{Name: name, Incarnation: r.number("incarnation", math.MaxUint64)}, Version: 1}
	r.phase(&v, flagWants)
	v.At = r.position()
	v.Passes = uint32(r.number("passes", math.MaxUint32))
	v.Failed = uint32(r.number("failed", math.MaxUint32))
	v.Rung, v.OpenFor, v.Cause = r.rung(), r.span(), r.cause()
	return v, r.end("vote")
}

func decodeProbe(b []byte) (probe, error) {
	r := read(b)
	p := probe{holder: crdt.Replica{Name: r.text("name", 1, maxName), Incarnation: r.number("incarnation", math.MaxUint64)}}
	p.at = r.position()
	return p, r.end("probe")
}

func decodeLast(b []byte, scope string) (fleet.Vote, error) {
	r := read(b)
	v := fleet.Vote{Scope: scope, Version: 1}
	v.Node = crdt.Replica{Name: r.text("name", 1, maxName), Incarnation: r.number("incarnation", math.MaxUint64)}
	r.phase(&v, 0)
	v.At.Gen = r.number("gen", math.MaxUint64)
	v.Rung, v.OpenFor, v.Cause = r.rung(), r.span(), r.cause()
	return v, r.end("last owner")
}
