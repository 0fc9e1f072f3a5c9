// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Record is one dead letter: the message as it was, and why it is here.
//
// [Encode] turns all but Key, Body, Timestamp's native form and Properties
// into headers; the [Writer] puts those four where its broker keeps them. A
// Record is a plain value: it has no lock, and copies share slices.
type Record struct {
	// Key and Body are the message's own bytes. Key is nil where the broker
	// has no keys.
	Key, Body []byte

	// Headers are the message's own, with the broker's types, in order,
	// duplicates kept.
	Headers []Header

	// Properties are what the broker carries beside the headers, such as
	// AMQP's content-type and correlation-id, under the broker's names. Encode
	// leaves them to the writer of the same broker; Decode does not fill them.
	Properties []Header

	// Timestamp is the original message's own; zero if the broker gave none.
	Timestamp time.Time

	// Origin says where the message was.
	Origin Origin

	// FirstFailed and LastFailed are the wall times of the first and the last
	// failed attempt; zero if unknown.
	FirstFailed, LastFailed time.Time

	// Attempts counts the calls of the handler that are known of. Decode may
	// find only a lower bound.
	Attempts int

	// Deliveries is the broker's own count, which also rises for messages that
	// no handler saw; 0 if unknown.
	Deliveries int

	// Error is the last error.
	Error ErrorInfo

	// History is the first attempt and the last few, oldest first.
	History []Attempt

	// Cause is the group this record belongs to.
	Cause Cause

	// Permanent says that the handler itself called the message hopeless.
	Permanent bool

	// Reason says what made it a dead letter.
	Reason Reason

	// TraceParent and TraceState are the W3C trace context of the original
	// message, as found in Headers. Encode does not write them a second time.
	TraceParent, TraceState string

	// RedriveID names the redrive that last brought the message back, and
	// Redrives counts them.
	RedriveID string
	Redrives  int

	// Other are dead-letter headers that Decode recognised as such but that
	// no field above stands for, and those whose value it could not read.
	// Encode does not write them.
	Other []Header
}

// Origin is the place a message had at its broker. Unset parts are unknown or
// do not apply.
type Origin struct {
	// System is OpenTelemetry's messaging.system where it has one: "kafka",
	// "rabbitmq", "nats".
	System string

	// Source is the topic, queue or stream.
	Source string

	// Subject is the NATS subject or the AMQP routing key.
	Subject string

	// Exchange is AMQP's; empty is the default exchange.
	Exchange string

	// Group is the consumer group, the durable consumer, or whatever else
	// tells two readers of one source apart.
	Group string

	// Partition counts only if HasPartition is set, since 0 is a partition.
	Partition    int32
	HasPartition bool

	// Offset is the position in a Kafka partition or a RabbitMQ stream. It
	// counts only if HasOffset is set.
	Offset    int64
	HasOffset bool

	// Sequence is the position in a JetStream stream, from 1; 0 is none.
	Sequence uint64

	// MessageID names the message where the broker gives no position: AMQP's
	// message-id. An adapter without one may set an id of its own making, and
	// then recognises only its own repeats.
	MessageID string
}

// ErrorInfo is an error as text.
type ErrorInfo struct {
	// Type is the most telling type in the error's chain, with its import
	// path; see [DescribeError].
	Type string

	// Wrapper is the outer type where a foreign dialect tells it apart from
	// the cause's. DescribeError leaves it empty.
	Wrapper string

	Message string

	// Stack is set for panics, and where a foreign dialect carries one.
	Stack string
}

// Attempt is one failed call of the handler.
type Attempt struct {
	N       int       // 1 is the first
	At      time.Time // wall time of its end
	Type    string    // as ErrorInfo.Type
	Message string    // as ErrorInfo.Message, cut short
}

// Reason is what made a message a dead letter. Values not listed come from other
// versions, or from a broker that has a word of its own: RabbitMQ's x-death says
// "rejected", "expired", "maxlen" or "delivery_limit", and JetStream's advisories become
// "max-deliver", no delivery left, or "terminated" by a consumer.
type Reason string

// The reasons a guard gives.
const (
	ReasonAttempts     Reason = "attempts"      // attempts used up
	ReasonPermanent    Reason = "permanent"     // the handler said so
	ReasonPoisonHead   Reason = "poison-head"   // it blocked the head of a source whose breaker could not close
	ReasonGuess        Reason = "guess"         // nothing proved it to be at fault: it failed alone, and nothing came for long
	ReasonLastDelivery Reason = "last-delivery" // the broker would have dropped it after this delivery
	ReasonOperator     Reason = "operator"      // by hand
	ReasonQuarantine   Reason = "quarantine"    // it matches a rule of the [Quarantine]
)

// maxID keeps an ID inside an AMQP short string (255 bytes) with room to
// spare for a prefix.
const maxID = 200

// ID returns the identity of the dead letter, the same each time the same
// message dies in the same group: to be used as a broker's message id and to
// recognise twins. It is made from the origin alone: system, source, group,
// partition, and offset or sequence, for example
//
//	kafka/orders/billing/3/o1042
//
// Separators inside a part are percent-encoded, so that two origins never
// share an ID. Above 200 bytes the tail is replaced by a digest.
//
// Without a position the message id stands in its place, joined with the
// number of redrives and a digest of key and body, since a message id is the
// publisher's word and may repeat. With neither, ID is empty: such a record
// cannot be recognised and must never be taken for the twin of another.
//
// A topic that was deleted and made anew counts its offsets from 0 again and
// repeats IDs. The cost is one string, and a SHA-256 of the body only where
// the message id is used.
func (r *Record) ID() string {
	o := &r.Origin
	var place string
	switch {
	case o.HasOffset:
		place = "o" + strconv.FormatInt(o.Offset, 10)
	case o.Sequence > 0:
		place = "s" + strconv.FormatUint(o.Sequence, 10)
	case o.MessageID != "":
		h := sha256.New()
		fmt.Fprintf(h, "%d:", len(r.Key))
		h.Write(r.Key)
		h.Write(r.Body)
		place = "m" + escapePart(o.MessageID) + "." + strconv.Itoa(r.Redrives) + "." + hex.EncodeToString(h.Sum(nil)[:16])
	default:
		return ""
	}
	partition := "-"
	if o.HasPartition {
		partition = strconv.FormatInt(int64(o.Partition), 10)
	}
	id := escapePart(o.System) + "/" + escapePart(o.Source) + "/" + escapePart(o.Group) + "/" + partition + "/" + place
	if len(id) > maxID {
		sum := sha256.Sum256([]byte(id))
		tail := "~" + hex.EncodeToString(sum[:16])
		id = id[:maxID-len(tail)] + tail
	}
	return id
}

// escapePart keeps what is printable ASCII and not a separator; "-" alone
// stands for nothing.
func escapePart(s string) string {
	if s == "" {
		return "-"
	}
	const upper = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		if c > ' ' && c < 0x7f && c != '/' && c != '%' && c != '~' && (c != '-' || len(s) > 1) {
			b.WriteByte(c)
			continue
		}
		b.WriteByte('%')
		b.WriteByte(upper[c>>4])
		b.WriteByte(upper[c&15])
	}
	return b.String()
}

// What a record carries of an error, in bytes of UTF-8; type names can be long where
// types are generic.
const (
	maxType    = 256
	maxMessage = 1024
	maxStack   = 8192
)

const (
	// headerOverhead and recordOverhead are what framing costs on the wire;
	// the three brokers need less.
	headerOverhead = 8
	recordOverhead = 128

	// trimSlack is what TrimFor cuts beyond what it is asked for.
	trimSlack = 64
)

// Size estimates the bytes r takes at a broker in the default dialect, framing
// included. It is meant to err on the large side, by a few hundred bytes; the
// other dialects differ by less than that. It costs one [Encode].
func (r *Record) Size() int {
	n := recordOverhead + len(r.Key) + len(r.Body)
	for _, list := range [][]Header{Encode(r, Stormguard), r.Properties} {
		for _, h := range list {
			size, _ := valueSize(h.Value, 0)
			n += headerOverhead + len(h.Name) + size
		}
	}
	return n
}

// trims are the steps of Trim, least missed first.
var trims = []func(*Record){
	func(r *Record) { r.Error.Stack = capText(r.Error.Stack, 2048) },
	func(r *Record) { r.Error.Stack = "" },
	func(r *Record) {
		if n := len(r.History); n > 2 {
			r.History = []Attempt{r.History[0], r.History[n-1]}
		}
	},
	func(r *Record) { r.History = nil },
	func(r *Record) { r.Error.Message = capText(r.Error.Message, 256) },
	func(r *Record) { r.Cause.Title = capText(r.Cause.Title, 64) },
	func(r *Record) { r.Error.Message, r.Error.Wrapper = "", "" },
	func(r *Record) { r.Cause.Title = "" },
}

// Trim shrinks r in place until [Record.Size] is at most size bytes, and
// reports whether it is. It drops, in this order and only as far as needed:
// most of the stack, the stack, the middle of the history, the history, most
// of the error text, most of the cause's title, the error text, the title.
// Key, body, original headers, origin, counts, times and the cause's id are
// never touched. The same record and size give the same result.
func (r *Record) Trim(size int) bool {
	for _, trim := range trims {
		if r.Size() <= size {
			return true
		}
		trim(r)
	}
	return r.Size() <= size
}

const ellipsis = "…"

// cut shortens s to at most n bytes, between characters where it is UTF-8.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for back := range min(utf8.UTFMax, n+1) {
		if utf8.RuneStart(s[n-back]) {
			return s[:n-back]
		}
	}
	return s[:n]
}

// capText makes s valid UTF-8 of at most n bytes. It looks at no more than
// the first n bytes and a few.
func capText(s string, n int) string {
	long := len(s) > n
	if long {
		s = s[:min(len(s), n+utf8.UTFMax)]
	}
	if !utf8.ValidString(s) {
		if long { // a character cut in two just now is not a fault of the text
			s = cut(s, n)
		}
		s = strings.ToValidUTF8(s, "\uFFFD")
	}
	if len(s) <= n && !long {
		return s
	}
	return cut(s, n-len(ellipsis)) + ellipsis
}

type jsonAttempt struct {
	N       int    `json:"n,omitempty"`
	At      string `json:"at,omitempty"`
	Type    string `json:"type,omitempty"`
	Message string `json:"error,omitempty"`
}

func historyJSON(history []Attempt) string {
	list := make([]jsonAttempt, len(history))
	for i, a := range history {
		list[i] = jsonAttempt{N: a.N, Type: a.Type, Message: a.Message}
		if !a.At.IsZero() {
			list[i].At = formatTime(a.At)
		}
	}
	b, err := json.Marshal(list)
	if err != nil { // strings and ints only
		panic(err)
	}
	return string(b)
}

func parseHistory(s string) ([]Attempt, error) {
	var list []jsonAttempt
	if err := json.Unmarshal([]byte(s), &list); err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, nil
	}
	history := make([]Attempt, len(list))
	for i, a := range list {
		history[i] = Attempt{N: a.N, Type: a.Type, Message: a.Message}
		if a.At != "" {
			at, err := time.Parse(time.RFC3339Nano, a.At)
			if err != nil {
				return nil, err
			}
			history[i].At = at.UTC()
		}
	}
	return history, nil
}

func formatTime(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }
