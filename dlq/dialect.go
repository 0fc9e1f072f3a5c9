// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Dialect is one of the ways in which headers tell why a message is dead. The
// empty Dialect means the default, [Stormguard], to [Encode], and that no
// dialect was recognised from [Decode]. The set is fixed. Besides those that can be
// written, Decode knows "share-group" and "streams" of Kafka, "smallrye", "karafka",
// "watermill", "masstransit", "nservicebus", "wolverine", "knative", "cronsumer",
// "x-original-topic", "spring-amqp" and "rabbitmq".
type Dialect string

// The dialects that can be written.
const (
	// Stormguard is text under stormguard-*, and fits every broker: numbers are
	// decimal, times RFC 3339 in UTC, and text is escaped so that it survives
	// NATS headers (\n, \r, \t, \\, and \xNN for other control characters, for
	// bytes that are not UTF-8, and for a space at either end).
	Stormguard Dialect = "stormguard"

	// Spring is Spring Kafka's kafka_dlt-*, with big-endian integers. For
	// Kafka only: its values do not survive NATS headers.
	Spring Dialect = "spring"

	// Connect is Kafka Connect's __connect.errors.*, all text. Kafka Connect
	// keeps such headers if it finds them, so strip them before a message goes
	// back to a connector.
	Connect Dialect = "connect"
)

// The dialects that are only read.
const (
	shareGroup    Dialect = "share-group"      // Kafka share groups, __dlq.errors.*
	streams       Dialect = "streams"          // Kafka Streams, __streams.errors.*
	smallRye      Dialect = "smallrye"         // SmallRye (Quarkus), dead-letter-*
	karafka       Dialect = "karafka"          // Karafka, source_*
	watermill     Dialect = "watermill"        // watermill, *_poisoned
	massTransit   Dialect = "masstransit"      // MassTransit, MT-Fault-*
	nServiceBus   Dialect = "nservicebus"      // NServiceBus.ExceptionInfo.*
	wolverine     Dialect = "wolverine"        // Wolverine, exception-type and others
	knative       Dialect = "knative"          // Knative's CloudEvents attributes
	cronsumer     Dialect = "cronsumer"        // kafka-cronsumer, x-retry-count
	originalTopic Dialect = "x-original-topic" // Spring Cloud Stream, and many by hand
	springAMQP    Dialect = "spring-amqp"      // Spring AMQP, x-exception-*
	rabbitMQ      Dialect = "rabbitmq"         // the broker's own x-death
)

// grammar is a dialect as a table.
type grammar struct {
	dialect Dialect

	// fold means that names are compared without regard to case, for dialects
	// that travel over NATS or HTTP, where it may change.
	fold bool

	// system is the origin's, where the dialect implies it.
	system string

	// signature recognises the dialect: one name from each group must be
	// there. A name that ends in * is a prefix.
	signature [][]string

	// fields are read in this order, so that a later one that tells the same
	// thing wins.
	fields []field

	// owns are further names, or prefixes, that belong to the dialect: Record
	// has no field for them.
	owns []string

	// except is the one name among those that does not.
	except string

	// hook reads what does not fit the table, after it.
	hook func(*decoder, *grammar)

	// broker lets RabbitMQ's own headers fill in what the dialect left open.
	broker bool
}

// field ties a header to a slot of the record.
type field struct {
	name  string
	slot  slot
	codec codec
}

// grammars are in the order in which they are tried: the most telling names
// first, names that people also make up for themselves last.
var grammars []*grammar

func init() { //nolint:gochecknoinits // the table and its grammars' functions refer to each other
	grammars = []*grammar{
		&stormguardGrammar, &shareGroupGrammar, &springGrammar, &connectGrammar, &streamsGrammar, &smallRyeGrammar,
		&karafkaGrammar, &watermillGrammar, &massTransitGrammar, &nServiceBusGrammar, &wolverineGrammar, &knativeGrammar,
		&cronsumerGrammar, &originalTopicGrammar, &springAMQPGrammar, &rabbitMQGrammar,
	}
}

var writable = []Dialect{Stormguard, Spring, Connect}

// Writable reports whether [Encode] can write d.
func (d Dialect) Writable() bool { return d == "" || slices.Contains(writable, d) }

// Validate reports a dialect that cannot be written.
func (d Dialect) Validate() error {
	if d.Writable() {
		return nil
	}
	return fmt.Errorf("dlq: dialect %s: cannot be written: want one of %q, or empty for %s", show(string(d)), writable, Stormguard)
}

// grammarOf returns the grammar Encode writes for d.
func grammarOf(d Dialect) *grammar {
	switch d {
	case Spring:
		return &springWrittenGrammar
	case Connect:
		return &connectGrammar
	default:
		return &stormguardGrammar
	}
}

func (g *grammar) same(a, b string) bool {
	return a == b || g.fold && len(a) == len(b) && strings.EqualFold(a, b)
}

// match compares with a pattern, which is a name, or a prefix and *.
func (g *grammar) match(pattern, name string) bool {
	prefix, ok := strings.CutSuffix(pattern, "*")
	if !ok {
		return g.same(pattern, name)
	}
	return len(name) >= len(prefix) && g.same(prefix, name[:len(prefix)])
}

func (g *grammar) recognises(headers []Header) bool {
	for _, group := range g.signature {
		if !slices.ContainsFunc(headers, func(h Header) bool {
			return h.Value != nil && slices.ContainsFunc(group, func(p string) bool { return g.match(p, h.Name) })
		}) {
			return false
		}
	}
	return true
}

// mine reports whether a header belongs to the dialect.
func (g *grammar) mine(name string) bool {
	if g.except != "" && g.same(g.except, name) {
		return false
	}
	for i := range g.fields {
		if g.same(g.fields[i].name, name) {
			return true
		}
	}
	return slices.ContainsFunc(g.owns, func(p string) bool { return g.match(p, name) })
}

// transport are the headers that a broker or its client sets and that tell of
// one passage of a message, not of the message.
var transport = grammar{
	fold: true,
	owns: []string{
		"x-death", "x-opt-deaths", "x-first-death-*", "x-last-death-*", // RabbitMQ, on dead-lettering
		"x-delivery-count", "x-acquired-count", "x-stream-offset", // RabbitMQ, on delivery
		"Nats-*", // JetStream: message id, expectations, TTL, origin of mirrors
	},
}

// isTransport reports whether a header of this name must not be sent again
// with a copy of the message. A broker would obey it (Nats-Expected-*), or count
// from it, or ignore it; none is the sender's own.
//
// For a system of "rabbitmq" CC and BCC are among them too: published again,
// they would send copies to queues that have had theirs.
func isTransport(system, name string) bool {
	return transport.mine(name) || system == "rabbitmq" && (name == "CC" || name == "BCC")
}

// Encode returns the headers of the dead letter of r in dialect d: the
// original ones first, in their order and with their types, then those of the
// dialect, then, for a dialect other than [Stormguard], the stormguard-* ones
// for what it cannot carry. A dialect that is not [Dialect.Writable] is
// written as Stormguard, so that nothing is lost; refuse it earlier, with
// [Dialect.Validate].
//
// Left out of the original headers are those of one passage of the message: x-death,
// x-opt-deaths, x-first-death-*, x-last-death-*, x-delivery-count, x-acquired-count,
// x-stream-offset and Nats-*, in any case, and CC and BCC from RabbitMQ. So is what an
// earlier death or redrive left there in the same dialect or in stormguard-*
// (except stormguard-original-traceparent): headers grow with each death
// otherwise. Those of other dialects are kept as they are.
//
// What is zero in r is not written. Values are strings, or []byte where the
// dialect is binary, so that each broker can carry them. Key, Body and
// Properties are not in the headers. The original values are shared, not
// copied. One slice and one string per header are allocated.
func Encode(r *Record, d Dialect) []Header {
	g := grammarOf(d)
	out := make([]Header, 0, len(r.Headers)+len(stormguardGrammar.fields)+2)
	for _, h := range r.Headers {
		if !isTransport(r.Origin.System, h.Name) && !g.mine(h.Name) && !stormguardGrammar.mine(h.Name) {
			out = append(out, h)
		}
	}
	var carried [slots]bool
	if g != &stormguardGrammar {
		for i := range g.fields {
			f := &g.fields[i]
			v, ok := slotTable[f.slot].get(r)
			if !ok || f.codec.encode == nil {
				continue
			}
			value, exact := f.codec.encode(v)
			if value == nil {
				continue
			}
			out = append(out, Header{f.name, value})
			for _, s := range slotTable[f.slot].carries(f.slot) {
				carried[s] = carried[s] || exact
			}
		}
	}
	out = append(out, Header{versionHeader, stormguardVersion}, Header{dialectHeader, string(g.dialect)})
	for i := range stormguardGrammar.fields {
		f := &stormguardGrammar.fields[i]
		if carried[f.slot] {
			continue
		}
		if v, ok := slotTable[f.slot].get(r); ok {
			value, _ := f.codec.encode(v)
			out = append(out, Header{f.name, value})
		}
	}
	return out
}

// headerError is a dead-letter header whose value cannot be read.
type headerError struct {
	name  string
	value any
	want  string // what was expected
}

func (e *headerError) Error() string {
	return fmt.Sprintf("dlq: header %s: %s: want %s", cut(e.name, 96), show(e.value), e.want)
}

// Decode reads the headers of a dead letter, whoever wrote it: it recognises
// the dialect, puts what it tells into the record's fields, and leaves in
// Headers the message's original ones, without those of one passage; see [Encode].
// Where nothing is recognised, dialect is empty and Headers are all the
// others. The caller adds Key, Body, and Timestamp if it is still zero.
//
// Text may come as a string or as bytes, numbers also as integers. Of headers
// with one name the last counts. Names are compared exactly, but without
// regard to case for the dialects that travel over NATS or HTTP (stormguard,
// watermill, Wolverine, Knative). A record that stormguard wrote is read by its
// own headers and those of the dialect it names; of others the most telling dialect
// counts, and RabbitMQ's x-death fills in what
// SpringAMQP, MassTransit, NServiceBus, Wolverine and Watermill do not tell.
//
// err joins an error for each value that cannot be read; everything else is decoded all
// the same, and the header is put into Other. -1 stands
// for unknown in Kafka's partitions, offsets and timestamps, and is no error.
// Decode never panics, takes time linear in the headers and caps nothing.
func Decode(headers []Header) (r Record, dialect Dialect, err error) {
	d := decoder{r: &r, headers: headers, state: make([]state, len(headers))}
	for _, g := range grammars {
		if !g.recognises(headers) {
			continue
		}
		dialect = g.dialect
		if g == &stormguardGrammar {
			if written := d.written(); written != g {
				dialect = written.dialect
				d.read(written)
			}
		} else {
			r.Origin.System = g.system
		}
		d.read(g)
		if g.broker && rabbitMQGrammar.recognises(headers) {
			d.fillFromBroker()
		}
		break
	}
	d.rest()
	r.TraceParent, _ = LookupText(r.Headers, "traceparent")
	r.TraceState, _ = LookupText(r.Headers, "tracestate")
	return r, dialect, errors.Join(d.errs...)
}
