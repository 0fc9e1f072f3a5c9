// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
)

// The wire format, in packets and as values in a store:
//
//	state = gen round level openFor cause
//	vote  = flags gen round passes failed level openFor cause
//
// Numbers are unsigned varints. flags is a byte with the phase, wants and gone. A cause begins with
// its length. Times are durations in microseconds; no instant is sent.
const (
	flagWants = 1 << 6
	flagGone  = 1 << 7

	// MaxSpan is the longest duration that is sent; a longer one is cut.
	MaxSpan = 1000 * time.Hour
)

// AppendSpan appends a duration for [Reader.Span], in microseconds, cut to [0, MaxSpan].
func AppendSpan(b []byte, d time.Duration) []byte {
	return binary.AppendUvarint(b, uint64(min(max(d, 0), MaxSpan)/time.Microsecond))
}

func appendPeriod(b []byte, level int, openFor time.Duration, cause breaker.Cause) []byte {
	return wire.AppendText(AppendSpan(binary.AppendUvarint(b, uint64(level)), openFor), cause)
}

// AppendPosition appends a position for [Reader.Position].
func AppendPosition(b []byte, p Position) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, p.Gen), uint64(p.Round))
}

// AppendState appends a decision for [Reader.State].
func AppendState(b []byte, s State) []byte {
	return appendPeriod(AppendPosition(b, s.Position), s.BackoffLevel, s.OpenFor, s.Cause)
}

// AppendVote appends a vote for [Reader.Vote].
func AppendVote(b []byte, v *Vote) []byte {
	flags := byte(v.Phase)
	if v.Wants {
		flags |= flagWants
	}
	if v.Gone {
		flags |= flagGone
	}
	b = AppendPosition(append(b, flags), v.At)
	b = binary.AppendUvarint(binary.AppendUvarint(b, uint64(v.Passes)), uint64(v.Failed))
	return appendPeriod(b, v.BackoffLevel, v.OpenFor, v.Cause)
}

// A Reader reads the wire format. Its results keep nothing of the message.
type Reader struct{ wire.Reader }

// Read begins to read b.
func Read(b []byte) Reader { return Reader{wire.Read(b)} }

// Number reads any number of 64 bits.
func (r *Reader) Number(field string) uint64 { return r.Uint(field, 0, math.MaxUint64) }

// Digest reads eight bytes, the highest first.
func (r *Reader) Digest(field string) uint64 {
	if b := r.Bytes(field, 8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// Span reads a duration.
func (r *Reader) Span(field string) time.Duration {
	return time.Duration(r.Uint(field, 0, uint64(MaxSpan/time.Microsecond))) * time.Microsecond
}

func (r *Reader) small(field string) uint32 { return uint32(r.Uint(field, 0, math.MaxUint32)) }

// Position reads the position of a scope.
func (r *Reader) Position() Position {
	return Position{Gen: r.Number("gen"), Round: r.small("round")}
}

func (r *Reader) period() (level int, openFor time.Duration, cause breaker.Cause) {
	level = int(r.Uint("level", 0, MaxBackoffLevel))
	openFor = r.Span("open period")
	return level, openFor, breaker.Cause(r.Text("cause", 0, MaxCause))
}

// State reads a decision of the fleet.
func (r *Reader) State() (s State) {
	s.Position = r.Position()
	if s.BackoffLevel, s.OpenFor, s.Cause = r.period(); !s.Open() && s != (State{Position: s.Position}) {
		r.Fail("a closed state", s, "no open period")
	}
	return s
}

// Vote reads a vote, except its Scope, Node, Version and Term.
func (r *Reader) Vote(v *Vote) {
	flags := r.Byte("flags")
	v.Wants, v.Gone, v.Phase = flags&flagWants != 0, flags&flagGone != 0, Phase(flags&^(flagWants|flagGone))
	if v.Phase >= Phases {
		r.Fail("phase", v.Phase, fmt.Sprintf("0 to %d", Phases-1))
	}
	v.At, v.Passes, v.Failed = r.Position(), r.small("passes"), r.small("failed")
	v.BackoffLevel, v.OpenFor, v.Cause = r.period()
}
