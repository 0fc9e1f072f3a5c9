// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"encoding/base64"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/dlq"
)

// system is the value of messaging.system.
const system = "rabbitmq"

// The broker's headers that count deliveries.
const (
	deliveryCount = "x-delivery-count"
	acquiredCount = "x-acquired-count"
)

// maxShort is the longest name or property that AMQP carries, in bytes.
const maxShort = 255

// fromTable lists the headers of a table in order of name, with their types.
func fromTable(t amqp091.Table) []dlq.Header {
	if len(t) == 0 {
		return nil
	}
	out := make([]dlq.Header, 0, len(t))
	for _, name := range slices.Sorted(maps.Keys(t)) {
		out = append(out, dlq.Header{Name: name, Value: fromField(t[name])})
	}
	return out
}

// fromField returns a table's field as the value of a header.
func fromField(v any) any {
	switch v := v.(type) {
	case amqp091.Table:
		out := make(map[string]any, len(v))
		for name, e := range v {
			out[name] = fromField(e)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = fromField(e)
		}
		return out
	case amqp091.Decimal:
		return dlq.Decimal{Scale: v.Scale, Unscaled: v.Value}
	}
	return v
}

// toTable makes a table of headers. If headers have the same name, the last counts.
func toTable(headers []dlq.Header) amqp091.Table {
	t := make(amqp091.Table, len(headers))
	for _, h := range headers {
		t[h.Name] = toField(h.Value)
	}
	return t
}

// keptPrefix begins the new name of a header that renameRouting renames.
const keptPrefix = "kept-"

// renameRouting renames the headers CC and BCC, which [dlq.Encode] leaves out only of messages from
// RabbitMQ. RabbitMQ sends a copy to each queue that a list in them names. With any other value it
// refuses the message and closes the channel. If an earlier death has kept a header, that one
// stays.
func renameRouting(t amqp091.Table) {
	for _, name := range []string{"CC", "BCC"} {
		v, ok := t[name]
		if !ok {
			continue
		}
		delete(t, name)
		if _, before := t[keptPrefix+name]; !before {
			t[keptPrefix+name] = v
		}
	}
}

func toField(v any) any {
	switch v := v.(type) {
	case map[string]any:
		t := make(amqp091.Table, len(v))
		for name, e := range v {
			t[name] = toField(e)
		}
		return t
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = toField(e)
		}
		return out
	case dlq.Decimal:
		return amqp091.Decimal{Scale: v.Scale, Value: v.Unscaled}
	case int: // the client would cut it to 32 bits
		return int64(v)
	case uint64: // AMQP 0-9-1 has no type for it here
		if v <= 1<<63-1 {
			return int64(v)
		}
		return strconv.FormatUint(v, 10)
	}
	return v
}

// fieldSize is the size of a value on the wire, with the letter of its type.
func fieldSize(v any) int {
	switch v := v.(type) {
	case nil:
		return 1
	case bool, int8, uint8:
		return 2
	case int16, uint16:
		return 3
	case int32, uint32, float32:
		return 5
	case int64, float64, time.Time:
		return 9
	case amqp091.Decimal:
		return 6
	case string:
		return 5 + len(v)
	case []byte:
		return 5 + len(v)
	case []any:
		n := 5
		for _, e := range v {
			n += fieldSize(e)
		}
		return n
	case amqp091.Table:
		return 1 + tableSize(v)
	}
	return 9
}

func tableSize(t amqp091.Table) int {
	n := 4
	for name, v := range t {
		n += 1 + len(name) + fieldSize(v)
	}
	return n
}

// longName finds a name that AMQP cannot carry, at any depth.
func longName(t amqp091.Table) (string, bool) {
	var in func(v any) (string, bool)
	in = func(v any) (string, bool) {
		switch v := v.(type) {
		case amqp091.Table:
			return longName(v)
		case []any:
			for _, e := range v {
				if name, ok := in(e); ok {
					return name, true
				}
			}
		}
		return "", false
	}
	for name, v := range t {
		if len(name) > maxShort {
			return name, true
		}
		if name, ok := in(v); ok {
			return name, true
		}
	}
	return "", false
}

func hasDecimal(v any) bool {
	switch v := v.(type) {
	case amqp091.Decimal:
		return true
	case amqp091.Table:
		for _, e := range v {
			if hasDecimal(e) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(v, hasDecimal)
	}
	return false
}

// tableWithoutDecimals returns a copy in which decimals are text, such as "-3.14".
func tableWithoutDecimals(t amqp091.Table) amqp091.Table {
	out := make(amqp091.Table, len(t))
	for name, e := range t {
		out[name] = withoutDecimals(e)
	}
	return out
}

func withoutDecimals(v any) any {
	switch v := v.(type) {
	case amqp091.Decimal:
		return strconv.FormatFloat(float64(v.Value)/math.Pow10(int(v.Scale)), 'f', int(v.Scale), 64)
	case amqp091.Table:
		return tableWithoutDecimals(v)
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = withoutDecimals(e)
		}
		return out
	}
	return v
}

// fromProperties returns the properties of a message, by AMQP's names. It leaves out those that a
// dead letter must not have: expiration would end it, user-id is checked against the connection's,
// and delivery-mode is always persistent. message-id and timestamp have fields of their own.
func fromProperties(d *amqp091.Delivery) []dlq.Header {
	var out []dlq.Header
	text := func(name, v string) {
		if v != "" {
			out = append(out, dlq.Header{Name: name, Value: v})
		}
	}
	text("content-type", d.ContentType)
	text("content-encoding", d.ContentEncoding)
	text("correlation-id", d.CorrelationId)
	text("reply-to", d.ReplyTo)
	text("type", d.Type)
	text("app-id", d.AppId)
	if d.Priority > 0 {
		out = append(out, dlq.Header{Name: "priority", Value: d.Priority})
	}
	return out
}

func toProperties(p *amqp091.Publishing, props []dlq.Header) {
	text := func(name string) string {
		v, _ := dlq.LookupText(props, name)
		return v
	}
	p.ContentType, p.ContentEncoding = text("content-type"), text("content-encoding")
	p.CorrelationId, p.ReplyTo = text("correlation-id"), text("reply-to")
	p.Type, p.AppId = text("type"), text("app-id")
	if v, ok := dlq.Lookup(props, "priority"); ok {
		p.Priority, _ = v.(uint8)
	}
}

// deliveries is the broker's own count, from 1, or 0 if the broker does not count. A classic queue
// never counts, a quorum queue counts from the second delivery on. The broker compares a delivery
// limit with x-delivery-count. From RabbitMQ 4.3 on a nack does not raise that, and only
// x-acquired-count counts every delivery.
func deliveries(t amqp091.Table) int {
	if n, ok := integer(t[deliveryCount]); ok {
		return n + 1
	}
	n, _ := integer(t[acquiredCount])
	return n
}

func integer(v any) (n int, ok bool) {
	switch v := v.(type) {
	case int64:
		n, ok = int(v), true
	case int32:
		n, ok = int(v), true
	case int16:
		n, ok = int(v), true
	case int8:
		n, ok = int(v), true
	case uint8:
		n, ok = int(v), true
	case uint16:
		n, ok = int(v), true
	case uint32:
		n, ok = int(v), true
	}
	return max(n, 0), ok
}

// brokerTime is when the broker took a message in. If the broker does not say so, it is the
// publisher's timestamp.
func brokerTime(d *amqp091.Delivery) time.Time {
	if ms, ok := d.Headers["timestamp_in_ms"].(int64); ok && ms > 0 {
		return time.UnixMilli(ms).UTC()
	}
	return d.Timestamp
}

// keyHeader has the key of a dead letter from elsewhere, such as of a held HTTP request, in base64.
// AMQP has no place for a key.
const keyHeader = "x-stormguard-message-key"

// takeKey takes the key out of the headers; nil if there is none that can be read.
func takeKey(headers *[]dlq.Header) []byte {
	i := slices.IndexFunc(*headers, func(h dlq.Header) bool { return h.Name == keyHeader })
	if i < 0 {
		return nil
	}
	text, _ := (*headers)[i].Value.(string)
	key, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil
	}
	*headers = slices.Delete(*headers, i, i+1)
	return key
}

// ReadDeadLetter reads a dead letter in any dialect, the broker's own x-death included. The record
// shares the delivery's body. The error joins one error for each header that cannot be read; the
// rest is decoded all the same.
func ReadDeadLetter(d amqp091.Delivery) (dlq.Record, error) {
	headers := fromTable(d.Headers)
	key := takeKey(&headers)
	r, dialect, err := dlq.Decode(headers)
	r.Key, r.Body = key, d.Body
	r.Properties = fromProperties(&d)
	if r.Timestamp.IsZero() {
		r.Timestamp = d.Timestamp
	}
	if dialect == "" {
		r.Origin = dlq.Origin{System: system, Subject: d.RoutingKey, Exchange: d.Exchange}
	}
	if r.Origin.MessageID == "" && (dialect == "" || dialect == "rabbitmq") {
		r.Origin.MessageID = d.MessageId
	}
	return r, err
}
