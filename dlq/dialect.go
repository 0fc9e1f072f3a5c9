// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Dialect names a set of headers that describe a dead letter. The set of dialects is fixed.
// The empty Dialect means the default, [Stormguard], for [Encode], and an unknown dialect
// from [Decode].
//
// Encode writes the dialects below. Decode also knows "share-group" and "streams" of Kafka,
// "smallrye", "karafka", "watermill", "masstransit", "nservicebus", "wolverine", "knative",
// "cronsumer", "x-original-topic", "spring-amqp" and "rabbitmq".
type Dialect string

// The dialects that can be written.
const (
	// Stormguard is text in headers stormguard-*, for every broker. Numbers are decimal,
	// times RFC 3339 in UTC. Text is escaped so that NATS headers can carry it: \n, \r, \t,
	// \\, and \xNN for other control characters, for bytes that are not UTF-8, and for a
	// space at either end.
	Stormguard Dialect = "stormguard"

	// Spring is Spring Kafka's kafka_dlt-*, with big-endian integers. It is for Kafka only:
	// NATS headers cannot carry its values.
	Spring Dialect = "spring"

	// Connect is Kafka Connect's __connect.errors.*, all text. Remove these headers before
	// you send a message back to a connector: Kafka Connect keeps the ones that it finds.
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
	originalTopic Dialect = "x-original-topic" // Spring Cloud Stream, and headers written by hand
	springAMQP    Dialect = "spring-amqp"      // Spring AMQP, x-exception-*
	rabbitMQ      Dialect = "rabbitmq"         // the broker's own x-death
)

// grammar describes a dialect as a table.
type grammar struct {
	dialect Dialect

	// fold means that names are compared without regard to case. It is for dialects on NATS
	// or HTTP, which may change the case.
	fold bool

	// system is Origin.System, if the dialect implies it.
	system string

	// signature recognises the dialect: each group must match at least one header. A name
	// that ends in * is a prefix.
	signature [][]string

	// fields are read in this order. If two of them set the same slot, the later one wins.
	fields []field

	// owns are more names or prefixes of the dialect, which have no field in Record.
	owns []string

	// except is a name that matches owns but does not belong to the dialect.
	except string

	// hook runs after the fields and reads headers that do not fit the table.
	hook func(*decoder, *grammar)

	// broker lets RabbitMQ's own headers fill the fields that the dialect left empty.
	broker bool
}

// field ties a header to a slot of the record.
type field struct {
	name  string
	slot  slot
	codec codec
}

// grammars are tried in this order: the most specific names first, and last the names that
// users also choose for headers of their own.
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

// match compares name with a pattern: a name, or a prefix followed by *.
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

// transport are headers that a broker or its client sets. They describe one delivery of a
// message, not the message.
var transport = grammar{
	fold: true,
	owns: []string{
		"x-death", "x-opt-deaths", "x-first-death-*", "x-last-death-*", // RabbitMQ, on dead-lettering
		"x-delivery-count", "x-acquired-count", "x-stream-offset", // RabbitMQ, on delivery
		"Nats-*", // JetStream: message id, expectations, TTL, origin of mirrors
	},
}

// isTransport reports whether a copy of the message must be sent without this header. A
// broker would obey the header (Nats-Expected-*), count from it, or ignore it; the sender
// set none of them.
//
// For the system "rabbitmq" this includes CC and BCC: on a second publish they would send
// copies to queues that already got one.
func isTransport(system, name string) bool {
	return transport.mine(name) || system == "rabbitmq" && (name == "CC" || name == "BCC")
}

// Encode returns the headers of the dead letter of r in dialect d, in this order: the
// original headers, unchanged; those of the dialect; and, for a dialect other than
// [Stormguard], stormguard-* headers for fields that the dialect cannot carry. A dialect
// that is not [Dialect.Writable] is written as Stormguard, so that nothing is lost. Refuse
// it earlier, with [Dialect.Validate].
//
// Encode leaves out original headers that describe one delivery: x-death, x-opt-deaths,
// x-first-death-*, x-last-death-*, x-delivery-count, x-acquired-count, x-stream-offset and
// Nats-*, in any case, and CC and BCC from RabbitMQ. It also leaves out headers of an
// earlier death or redrive in the same dialect or in stormguard-*, since they would grow
// with each death. It keeps stormguard-original-traceparent, and headers of other dialects.
//
// Zero fields of r are not written. Values are strings, or []byte if the dialect is binary,
// so that each broker can carry them. Key, Body and Properties are not in the headers. The
// original values are shared, not copied. Encode allocates one slice, and one string for
// each header.
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
	want  string // the expected format, for the error text
}

func (e *headerError) Error() string {
	return fmt.Sprintf("dlq: header %s: %s: want %s", cut(e.name, 96), show(e.value), e.want)
}

// Decode reads the headers of a dead letter that any library wrote. It recognises the
// dialect and fills the record's fields from it. Record.Headers gets the original headers,
// without those that describe one delivery; see [Encode]. If no dialect is recognised,
// dialect is empty and Headers gets all other headers. The caller adds Key, Body, and
// Timestamp if it is still zero.
//
// Text may be a string or bytes; numbers may also be integers. Of headers with one name the
// last counts. Names are compared exactly, but without regard to case for dialects on NATS
// or HTTP (stormguard, watermill, Wolverine, Knative). A record of stormguard is read from
// its own headers and those of the dialect that it names. Otherwise the most specific
// dialect counts. RabbitMQ's x-death adds what SpringAMQP, MassTransit, NServiceBus,
// Wolverine and Watermill do not carry.
//
// err joins an error for each value that Decode cannot read. Such a header goes to Other,
// and everything else is decoded. In Kafka's partitions, offsets and timestamps, -1 means
// unknown and is no error. Decode never panics, takes time linear in the headers and limits
// no size.
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
