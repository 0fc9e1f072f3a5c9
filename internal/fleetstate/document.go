// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// A document is kept by a register and passed on between processes. A register keeps only the
// newest one, so it carries what a reader needs of those before: the configurations since the last
// one that its writer knew to be complete, and a log of the last writes.
//
//	document     = version fleet first { next } incarnations log
//	first        = number body members limits evicted
//	next         = number body members' limits' evicted      as many as "first" says
//	body         = rate burst learners roster resets
//	members      = count { name weight }                     by name
//	members'     = count { name change [weight] }            by name: the differences, 0 removes
//	limits       = count { key rate burst }                  by key
//	limits'      = count { key change [rate burst] }         by key: the differences, 0 removes
//	evicted      = count { name silent }                     by name
//	incarnations = count { name incarnation }                by name
//	log          = count { id at who what }                  the last is of the newest number
//
// Numbers are unsigned varints; rates, incarnations and ids are eight bytes; a text has its length
// before it. A document has one encoding: readers refuse any other.
const (
	documentVersion = 1

	// maxDocument is the largest size that every register takes.
	maxDocument = 64 << 10
	// roomDocument is the most that a document may take if its newest configuration evicts nobody:
	// the rest is kept for evictions. Number 1 may take maxDocument.
	roomDocument = maxDocument - 4<<10

	maxLog  = 32
	maxWho  = 64
	maxWhat = 160
)

// A Record is an entry of the document's log: one write of the configuration.
type Record struct {
	Number uint64
	ID     uint64 // random; distinguishes writes of the same number
	At     int64  // milliseconds since 1970 by the writer's wall clock
	Who    string // at most 64 bytes
	What   string // at most 160 bytes
}

type document struct {
	fleet        string
	stages       []stage  // from the last complete one to the newest; at least one
	incarnations []listed // by name; see configurator_lease.go
	log          []Record

	bytes []byte
}

// A stage is a configuration of the chain, with the evicted members: their share is free though
// they may not have applied it.
type stage struct {
	escrow.Configuration
	evicted []eviction // by name
	digest  uint64     // of the configuration and the evicted
}

// listed is the incarnation of a name that may confirm leases.
type listed struct {
	name        string
	incarnation uint64
}

func (d *document) newest() *stage { return &d.stages[len(d.stages)-1] }
func (d *document) number() uint64 { return d.newest().Number }

// find returns the log's record of a number. known says whether the log goes back that far.
func (d *document) find(number uint64) (r Record, known bool) {
	for _, r := range d.log {
		if r.Number == number {
			return r, true
		}
	}
	return Record{}, false
}

// newStage makes a stage of a normal configuration.
func newStage(c escrow.Configuration, evicted []eviction) stage {
	c.Roster.Unstable = false // it is not encoded
	s := stage{Configuration: c, evicted: evicted}
	s.digest = digestOf(appendStage(nil, nil, &s))
	return s
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// appendStage writes a stage: whole, or only the differences from the stage before it.
func appendStage(b []byte, before, s *stage) []byte {
	b = binary.AppendUvarint(b, s.Number)
	b = appendLimit(b, s.Limit)
	b = appendBool(b, s.Roster.Learners)
	b = binary.AppendUvarint(b, s.Roster.Number)
	b = binary.AppendUvarint(b, s.Resets)
	if before == nil {
		b = binary.AppendUvarint(b, uint64(len(s.Roster.Members)))
		for _, m := range s.Roster.Members {
			b = binary.AppendUvarint(wire.AppendText(b, m.Name), uint64(m.Weighs()))
		}
		b = binary.AppendUvarint(b, uint64(len(s.Limits)))
		for _, k := range sortedKeys(s.Limits) {
			b = appendLimit(wire.AppendText(b, k), s.Limits[k])
		}
	} else {
		names, weights := differingMembers(before.Roster.Members, s.Roster.Members)
		b = binary.AppendUvarint(b, uint64(len(names)))
		for i, name := range names {
			b = appendBool(wire.AppendText(b, name), weights[i] >= 0)
			if weights[i] >= 0 {
				b = binary.AppendUvarint(b, uint64(weights[i]))
			}
		}
		keys := differingLimits(before.Limits, s.Limits)
		b = binary.AppendUvarint(b, uint64(len(keys)))
		for _, k := range keys {
			l, ok := s.Limits[k]
			b = appendBool(wire.AppendText(b, k), ok)
			if ok {
				b = appendLimit(b, l)
			}
		}
	}
	b = binary.AppendUvarint(b, uint64(len(s.evicted)))
	for _, e := range s.evicted {
		b = appendBool(wire.AppendText(b, e.name), e.silent)
	}
	return b
}

// differingMembers returns the names whose weight differs in to, in order; weight -1 is gone.
func differingMembers(from, to []escrow.Member) (names []string, weights []int64) {
	for i, j := 0, 0; i < len(from) || j < len(to); {
		switch {
		case j == len(to) || i < len(from) && from[i].Name < to[j].Name:
			names, weights = append(names, from[i].Name), append(weights, -1)
			i++
		case i == len(from) || to[j].Name < from[i].Name:
			names, weights = append(names, to[j].Name), append(weights, to[j].Weighs())
			j++
		default:
			if from[i].Weighs() != to[j].Weighs() {
				names, weights = append(names, to[j].Name), append(weights, to[j].Weighs())
			}
			i, j = i+1, j+1
		}
	}
	return names, weights
}

// differingLimits returns the keys whose limit differs in to, in order.
func differingLimits(from, to map[string]escrow.Limit) (keys []string) {
	for k, l := range to {
		if was, ok := from[k]; !ok || was != l {
			keys = append(keys, k)
		}
	}
	for k := range from {
		if _, ok := to[k]; !ok {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	return keys
}

// encode sets the bytes. Their length shows whether the document is too large for a register.
func (d *document) encode() {
	b := wire.AppendText([]byte{documentVersion}, d.fleet)
	b = binary.AppendUvarint(b, uint64(len(d.stages)))
	for i := range d.stages {
		var before *stage
		if i > 0 {
			before = &d.stages[i-1]
		}
		b = appendStage(b, before, &d.stages[i])
	}
	b = binary.AppendUvarint(b, uint64(len(d.incarnations)))
	for _, l := range d.incarnations {
		b = binary.BigEndian.AppendUint64(wire.AppendText(b, l.name), l.incarnation)
	}
	b = binary.AppendUvarint(b, uint64(len(d.log)))
	for _, r := range d.log {
		b = binary.BigEndian.AppendUint64(b, r.ID)
		b = binary.AppendUvarint(b, uint64(r.At))
		b = wire.AppendText(b, r.Who)
		b = wire.AppendText(b, r.What)
	}
	d.bytes = b
}

// stage reads a stage as appendStage writes it.
func (r *reader) stage(before *stage) stage {
	low := uint64(1)
	if before != nil {
		low = before.Number + 1
	}
	c := escrow.Configuration{Number: r.Uint("number", low, math.MaxUint64-1), Limit: r.limit("limit")}
	c.Roster.Learners = r.Bool("learners")
	c.Roster.Number = r.number("roster")
	c.Resets = r.number("resets")
	if before != nil {
		c.Roster.Members = slices.Clone(before.Roster.Members)
		c.Limits = maps.Clone(before.Limits)
	}
	last := ""
	for n := r.Uint("members", 0, 2*maxMembers); n > 0 && r.Fault() == nil; n-- {
		m := escrow.Member{Name: r.Text("member", 1, maxName)}
		if m.Name <= last {
			r.Fail("member", m.Name, "one after "+last)
		}
		last = m.Name
		i, was := slices.BinarySearchFunc(c.Roster.Members, m, byName)
		if before != nil && !r.Bool("change") {
			if was {
				c.Roster.Members = slices.Delete(c.Roster.Members, i, i+1)
			}
			continue
		}
		m.Weight = int(r.Uint("weight", 0, 1e6))
		m.NoShare = m.Weight == 0
		if was {
			c.Roster.Members[i] = m
		} else {
			c.Roster.Members = slices.Insert(c.Roster.Members, i, m)
		}
	}
	last = ""
	for n := r.Uint("limits", 0, 2*maxLimits); n > 0 && r.Fault() == nil; n-- {
		k := r.Text("key", 1, escrow.MaxKey)
		if k <= last {
			r.Fail("key", k, "one after "+last)
		}
		last = k
		if before != nil && !r.Bool("change") {
			delete(c.Limits, k)
			continue
		}
		if c.Limits == nil {
			c.Limits = map[string]escrow.Limit{}
		}
		c.Limits[k] = r.limit("limit of a key")
	}
	if len(c.Limits) == 0 {
		c.Limits = nil
	}
	var evicted []eviction
	for n := r.Uint("evicted", 0, maxMembers); n > 0 && r.Fault() == nil; n-- {
		e := eviction{name: r.Text("evicted", 1, maxName), silent: r.Bool("evicted")}
		if k := len(evicted); k > 0 && evicted[k-1].name >= e.name || memberIndex(c.Roster.Members, e.name) >= 0 {
			r.Fail("evicted", e.name, "one after the last, that is no member")
		}
		evicted = append(evicted, e)
	}
	if r.Fault() != nil {
		return stage{}
	}
	if err := checkConfiguration(c); err != nil {
		r.Fail("configuration", err, "one that is valid")
		return stage{}
	}
	return newStage(c, evicted)
}

// readDocument reads a document as encode writes it, or returns an [ErrMalformed] that says what is
// wrong. It keeps b.
func readDocument(b []byte) (*document, error) {
	if len(b) > maxDocument {
		return nil, fmt.Errorf("%w: document: %d bytes are more than %d", ErrMalformed, len(b), maxDocument)
	}
	r := read(b)
	r.Uint("version", documentVersion, documentVersion)
	d := &document{fleet: r.Text("fleet", 1, maxName)}
	for n := r.Uint("stages", 1, maxPending+1); n > 0 && r.Fault() == nil; n-- {
		var before *stage
		if len(d.stages) > 0 {
			before = d.newest()
		}
		d.stages = append(d.stages, r.stage(before))
	}
	for n := r.Uint("lives", 0, maxMembers); n > 0 && r.Fault() == nil; n-- {
		l := listed{name: r.Text("incarnation", 1, maxName), incarnation: r.digest("incarnation")}
		if k := len(d.incarnations); k > 0 && d.incarnations[k-1].name >= l.name {
			r.Fail("incarnation", l.name, "one after "+d.incarnations[k-1].name)
		}
		d.incarnations = append(d.incarnations, l)
	}
	most := uint64(maxLog)
	if r.Fault() == nil {
		most = min(most, d.number())
	}
	n := r.Uint("log", 0, most)
	for k := n; k > 0 && r.Fault() == nil; k-- {
		d.log = append(d.log, Record{
			Number: d.number() - k + 1, ID: r.digest("id"), At: int64(r.Uint("at", 0, math.MaxInt64)),
			Who: r.Text("who", 0, maxWho), What: r.Text("what", 0, maxWhat),
		})
	}
	r.End()
	if r.Fault() != nil {
		return nil, fmt.Errorf("%w: document: %w", ErrMalformed, r.Fault())
	}
	if d.encode(); !slices.Equal(d.bytes, b) {
		return nil, fmt.Errorf("%w: document: not as it is written", ErrMalformed)
	}
	return d, nil
}

// shorten cuts a text to most bytes, in whole characters.
func shorten(s string, most int) string {
	const more = "…"
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most-len(more)], "") + more
}

// incarnationOf returns the incarnation of a name that may confirm leases; false if there is none.
func (d *document) incarnationOf(name string) (uint64, bool) {
	i, ok := slices.BinarySearchFunc(d.incarnations, name, func(l listed, name string) int { return cmp.Compare(l.name, name) })
	if !ok {
		return 0, false
	}
	return d.incarnations[i].incarnation, true
}

func digestOf(b []byte) uint64 { return max(1, hashEnd(hashString(hashInit, string(b)))) }

func appendLimit(b []byte, l escrow.Limit) []byte {
	b = binary.BigEndian.AppendUint64(b, math.Float64bits(l.Rate))
	return binary.AppendUvarint(b, uint64(l.Burst))
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

func (r *reader) limit(what string) escrow.Limit {
	return escrow.Limit{Rate: math.Float64frombits(r.digest(what)), Burst: int(r.Uint(what, 0, math.MaxInt32))}
}
