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

// Record is one dead letter: the original message, and why it died.
//
// [Encode] turns a Record into headers, except Key, Body, Properties and the broker's own
// timestamp. The [Writer] stores those four where its broker keeps them. A Record is a
// plain value: it has no lock, and copies share slices.
type Record struct {
	// Key and Body are the message's own bytes. Key is nil where the broker
	// has no keys.
	Key, Body []byte

	// Headers are the original headers, with the broker's types, in order. Duplicates are
	// kept.
	Headers []Header

	// Properties are the broker's fields outside the headers, such as AMQP's content-type
	// and correlation-id, under the broker's names. Encode leaves them to the writer of the
	// same broker. Decode does not fill them.
	Properties []Header

	// Timestamp is the original message's timestamp; zero if the broker gave none.
	Timestamp time.Time

	// Origin says where the message was.
	Origin Origin

	// FirstFailed and LastFailed are the wall times of the first and the last
	// failed attempt; zero if unknown.
	FirstFailed, LastFailed time.Time

	// Attempts is the number of known calls of the handler. After Decode it may be only a
	// lower bound.
	Attempts int

	// Deliveries is the broker's own count; 0 if unknown. It also counts deliveries that no
	// handler saw.
	Deliveries int

	// Error is the last error.
	Error ErrorInfo

	// History holds the first failed attempt and the latest few, oldest first.
	History []Attempt

	// Cause is the group of similar failures that this record belongs to.
	Cause Cause

	// Permanent is set if the handler itself declared the message hopeless.
	Permanent bool

	// Reason is why the message became a dead letter.
	Reason Reason

	// TraceParent and TraceState are the W3C trace context of the original
	// message, as found in Headers. Encode does not write them a second time.
	TraceParent, TraceState string

	// RedriveID names the latest redrive of the message, and Redrives is the number of its
	// redrives.
	RedriveID string
	Redrives  int

	// Other are dead-letter headers that Decode recognised, but that have no field above or
	// a value that Decode cannot read. Encode does not write them.
	Other []Header
}

// Origin is the position of a message at its broker. An unset field is unknown or does not
// apply.
type Origin struct {
	// System is "kafka", "rabbitmq" or "nats": the value of OpenTelemetry's
	// messaging.system, if OpenTelemetry has one for the broker.
	System string

	// Source is the topic, queue or stream.
	Source string

	// Subject is the NATS subject or the AMQP routing key.
	Subject string

	// Exchange is the AMQP exchange; empty means the default exchange.
	Exchange string

	// Group is the consumer group, the durable consumer, or another name that distinguishes
	// two readers of one source.
	Group string

	// Partition is valid only if HasPartition is set, since 0 is a partition.
	Partition    int32
	HasPartition bool

	// Offset is the position in a Kafka partition or a RabbitMQ stream. It is valid only if
	// HasOffset is set.
	Offset    int64
	HasOffset bool

	// Sequence is the position in a JetStream stream, from 1; 0 means none.
	Sequence uint64

	// MessageID identifies the message if the broker gives no position. It is AMQP's
	// message-id. If the message has none, an adapter may set an id that it makes itself,
	// which then identifies only repeats from the same adapter.
	MessageID string
}

// ErrorInfo is an error as text.
type ErrorInfo struct {
	// Type is the most specific type in the error's chain, with its import path; see
	// [DescribeError].
	Type string

	// Wrapper is the type of the outer error, if a foreign dialect has both it and the type
	// of the cause. DescribeError leaves it empty.
	Wrapper string

	Message string

	// Stack is the stack trace: of a panic, or from a foreign dialect that carries one.
	Stack string
}

// Attempt is one failed call of the handler.
type Attempt struct {
	N       int       // the number of the attempt, from 1
	At      time.Time // wall time of the attempt's end
	Type    string    // as ErrorInfo.Type
	Message string    // as ErrorInfo.Message, shortened
}

// Reason is why a message became a dead letter. Values that are not listed here come from
// other versions or from a broker. RabbitMQ's x-death says "rejected", "expired", "maxlen"
// or "delivery_limit". JetStream's advisories become "max-deliver" (no delivery is left) or
// "terminated" (by a consumer).
type Reason string

// The reasons a guard gives.
const (
	ReasonAttempts     Reason = "attempts"      // all attempts are used up
	ReasonPermanent    Reason = "permanent"     // the handler declared the message hopeless
	ReasonPoisonHead   Reason = "poison-head"   // the message blocked the head of a source whose breaker could not close
	ReasonGuess        Reason = "guess"         // no proof: only this message failed, and no other message came for long
	ReasonLastDelivery Reason = "last-delivery" // the broker would have dropped the message after this delivery
	ReasonOperator     Reason = "operator"      // an operator dead-lettered the message
	ReasonQuarantine   Reason = "quarantine"    // the message matches a rule of the [Quarantine]
)

// maxID keeps an ID inside an AMQP short string (255 bytes), with room for a prefix.
const maxID = 200

// ID returns the identity of the dead letter. It is the same each time the same message
// dies in the same group. Use it as the broker's message id, and to recognise duplicates.
// It is made of the origin only: system, source, group, partition, and offset or sequence,
// for example
//
//	kafka/orders/billing/3/o1042
//
// Separators inside a part are percent-encoded, so that two origins never share an ID.
// Above 200 bytes the end is replaced by a digest.
//
// Without a position, ID uses the message id, the number of redrives, and a digest of key
// and body: publishers choose message ids, and these may repeat. Without both, ID is empty.
// Such a record cannot be recognised and must never be treated as a duplicate.
//
// IDs repeat if a topic is deleted and created again, because its offsets start at 0. ID
// allocates one string. It computes a SHA-256 of key and body only if it uses the message
// id.
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

// escapePart percent-encodes separators, and all bytes that are not printable ASCII. An
// empty part becomes "-", and the part "-" is encoded.
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

// Limits of an error's texts in a record, in bytes of UTF-8. Type names can be long if
// types are generic.
const (
	maxType    = 256
	maxMessage = 1024
	maxStack   = 8192
)

const (
	// headerOverhead and recordOverhead are the bytes of framing on the wire. All three
	// brokers need less.
	headerOverhead = 8
	recordOverhead = 128

	// trimSlack is the number of bytes that TrimFor cuts in addition to what the error asks
	// for.
	trimSlack = 64
)

// Size estimates the bytes of r at a broker in the default dialect, with framing. The
// estimate is a few hundred bytes too large on purpose; the other dialects differ by less
// than that. Size costs one [Encode].
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

// trims are the steps of Trim, the least important data first.
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

// Trim shrinks r in place until [Record.Size] is at most size bytes. It returns false if r
// is still larger. It drops, in this order and only as far as needed: most of the stack,
// the stack, the middle of the history, the history, most of the error text, most of the
// cause's title, the error text, the title. Key, body, original headers, origin, counts,
// times and the cause's id never change. The same record and size give the same result.
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

// cut shortens s to at most n bytes, and splits no character if s is UTF-8.
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

// capText makes s valid UTF-8 of at most n bytes. It reads only a few bytes more than the
// first n.
func capText(s string, n int) string {
	long := len(s) > n
	if long {
		s = s[:min(len(s), n+utf8.UTFMax)]
	}
	if !utf8.ValidString(s) {
		if long { // the cut above may have split a character
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
