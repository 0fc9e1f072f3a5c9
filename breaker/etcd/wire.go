// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"slices"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// The format of values, each after a byte for the version, with internal/scope's encoding:
//
//	roster = number quorum successes names    quorum in millionths; names is a hash, eight bytes
//	member = incarnation
//	state  = gen round level openFor cause
//	vote   = incarnation flags gen round passes failed level openFor cause
//	probe  = name incarnation gen round
//	last   = name vote
const wireVersion = 1

// settings must be equal in all processes with one roster number, or they would count votes
// differently.
type settings struct {
	number, quorum, successes, names uint64
}

func settingsOf(c Config) settings {
	h := fnv.New64a()
	for _, n := range slices.Sorted(slices.Values(c.Roster.Names)) {
		_, _ = h.Write(wire.AppendText(nil, n)) // never fails
	}
	return settings{c.Roster.Number, uint64(math.Round(c.Fleet.Quorum * 1e6)), uint64(c.Fleet.Successes), h.Sum64()}
}

// probe says which process has the one probe of a scope.
type probe struct {
	holder crdt.Replica
	at     scope.Position
}

func numbers(b []byte, all ...uint64) []byte {
	for _, n := range all {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

func (c settings) encode() []byte {
	return binary.BigEndian.AppendUint64(numbers([]byte{wireVersion}, c.number, c.quorum, c.successes), c.names)
}

func encodeMember(incarnation uint64) []byte { return numbers([]byte{wireVersion}, incarnation) }

func encodeState(s scope.State) []byte { return scope.AppendState([]byte{wireVersion}, s) }

func encodeVote(v scope.Vote) []byte {
	return scope.AppendVote(numbers([]byte{wireVersion}, v.Node.Incarnation), &v)
}

func (p probe) encode() []byte {
	return scope.AppendPosition(numbers(wire.AppendText([]byte{wireVersion}, p.holder.Name), p.holder.Incarnation), p.at)
}

func encodeLast(v scope.Vote) []byte {
	return scope.AppendVote(numbers(wire.AppendText([]byte{wireVersion}, v.Node.Name), v.Node.Incarnation), &v)
}

// reader reads a value.
type reader struct{ scope.Reader }

// read reads the version first.
func read(b []byte) *reader {
	r := &reader{scope.Read(b)}
	r.Uint("version", wireVersion, wireVersion)
	return r
}

func (r *reader) node() crdt.Replica {
	return crdt.Replica{Name: r.Text("name", 1, maxName), Incarnation: r.Number("incarnation")}
}

// end reports the first fault, also bytes that are left over.
func (r *reader) end(what string) error {
	r.End()
	if r.Fault() != nil {
		return fmt.Errorf("%w: %s: %w", errMalformed, what, r.Fault())
	}
	return nil
}

func decodeSettings(b []byte) (settings, error) {
	r := read(b)
	c := settings{
		number: r.Number("number"), quorum: r.Uint("quorum", 0, 1e6),
		successes: r.Uint("successes", 0, math.MaxUint32), names: r.Digest("names"),
	}
	return c, r.end("roster")
}

func decodeMember(b []byte) (uint64, error) {
	r := read(b)
	n := r.Number("incarnation")
	return n, r.end("member")
}

func decodeState(b []byte) (scope.State, error) {
	r := read(b)
	s := r.State()
	if err := r.end("state"); err != nil {
		return scope.State{}, err
	}
	return s, nil
}

func decodeVote(b []byte, of, name string) (scope.Vote, error) {
	r := read(b)
	v := scope.Vote{Scope: of, Node: crdt.Replica{Name: name, Incarnation: r.Number("incarnation")}, Version: 1}
	r.Vote(&v)
	return v, r.end("vote")
}

func decodeProbe(b []byte) (probe, error) {
	r := read(b)
	p := probe{holder: r.node(), at: r.Position()}
	return p, r.end("probe")
}

func decodeLast(b []byte, of string) (scope.Vote, error) {
	r := read(b)
	v := scope.Vote{Scope: of, Node: r.node(), Version: 1}
	r.Vote(&v)
	if err := r.end("last owner"); err != nil {
		return scope.Vote{}, err
	}
	return v, nil
}
