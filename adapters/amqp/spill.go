// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
)

var _ guard.Spiller[amqp091.Delivery] = (*port)(nil)

// spillHead is what the spill keeps of a delivery beside its body: everything except the tags of
// its channel. Headers have types, because JSON alone would lose them. Texts are bytes, because
// they need not be UTF-8.
type spillHead struct {
	Headers         *typed `json:"headers,omitempty"`
	ContentType     []byte `json:"content_type,omitempty"`
	ContentEncoding []byte `json:"content_encoding,omitempty"`
	DeliveryMode    uint8  `json:"delivery_mode,omitempty"`
	Priority        uint8  `json:"priority,omitempty"`
	CorrelationID   []byte `json:"correlation_id,omitempty"`
	ReplyTo         []byte `json:"reply_to,omitempty"`
	Expiration      []byte `json:"expiration,omitempty"`
	MessageID       []byte `json:"message_id,omitempty"`
	Timestamp       *int64 `json:"timestamp,omitempty"` // Unix seconds: JSON has no time beyond the year 9999
	Type            []byte `json:"type,omitempty"`
	UserID          []byte `json:"user_id,omitempty"`
	AppID           []byte `json:"app_id,omitempty"`
	Redelivered     bool   `json:"redelivered,omitempty"`
	Exchange        []byte `json:"exchange"`
	RoutingKey      []byte `json:"routing_key"`
	Made            bool   `json:"made,omitempty"` // the message's id was made here
}

// madeID marks a delivery from the spill whose id was made for it. Handlers get [notYours] in its
// place.
type madeID struct{ notYours }

// Spill implements [guard.Spiller]. A message without an id gets the one that its dead letter would
// have.
func (p *port) Spill(d amqp091.Delivery) (head, body []byte, err error) {
	h := spillHead{
		ContentType: []byte(d.ContentType), ContentEncoding: []byte(d.ContentEncoding), DeliveryMode: d.DeliveryMode, Priority: d.Priority,
		CorrelationID: []byte(d.CorrelationId), ReplyTo: []byte(d.ReplyTo), Expiration: []byte(d.Expiration), MessageID: []byte(p.id(&d)),
		Type: []byte(d.Type), UserID: []byte(d.UserId), AppID: []byte(d.AppId),
		Redelivered: d.Redelivered, Exchange: []byte(d.Exchange), RoutingKey: []byte(d.RoutingKey),
		Made: nameless(&d),
	}
	if !d.Timestamp.IsZero() {
		at := d.Timestamp.Unix()
		h.Timestamp = &at
	}
	if d.Headers != nil {
		if h.Headers, err = newTyped(d.Headers); err != nil {
			return nil, nil, err
		}
	}
	head, err = json.Marshal(h)
	return head, d.Body, err
}

// Unspill implements [guard.Spiller].
func (p *port) Unspill(head, body []byte) (d amqp091.Delivery, err error) {
	var h spillHead
	if err := json.Unmarshal(head, &h); err != nil {
		return d, fmt.Errorf("amqp: a message in the spill: %w", err)
	}
	d = amqp091.Delivery{
		ContentType: string(h.ContentType), ContentEncoding: string(h.ContentEncoding), DeliveryMode: h.DeliveryMode, Priority: h.Priority,
		CorrelationId: string(h.CorrelationID), ReplyTo: string(h.ReplyTo), Expiration: string(h.Expiration), MessageId: string(h.MessageID),
		Type: string(h.Type), UserId: string(h.UserID), AppId: string(h.AppID),
		Redelivered: h.Redelivered, Exchange: string(h.Exchange), RoutingKey: string(h.RoutingKey),
		Body: body,
	}
	if h.Made {
		d.Acknowledger = madeID{}
	}
	if h.Timestamp != nil {
		d.Timestamp = time.Unix(*h.Timestamp, 0)
	}
	if h.Headers != nil {
		v, err := h.Headers.value()
		if err != nil {
			return d, err
		}
		table, ok := v.(amqp091.Table)
		if !ok {
			return d, fmt.Errorf("amqp: a message in the spill: its headers are of type %q", h.Headers.Type)
		}
		d.Headers = table
	}
	return d, nil
}

// typed is a value of a table, with the letter of its type in RabbitMQ's version of AMQP 0-9-1.
type typed struct {
	Type  string          `json:"t"`
	Value json.RawMessage `json:"v,omitempty"`
}

// named is a field of a table, with its name.
type named struct {
	Name  []byte `json:"n"`
	Value *typed `json:"v"`
}

func newTyped(v any) (*typed, error) {
	var letter string
	switch x := v.(type) {
	case nil:
		return &typed{Type: "V"}, nil
	case bool:
		letter = "t"
	case int8:
		letter = "b"
	case uint8:
		letter = "B"
	case int16:
		letter = "s"
	case uint16:
		letter = "u"
	case int32:
		letter = "I"
	case uint32:
		letter = "i"
	case int64:
		letter = "l"
	case float32:
		letter, v = "f", math.Float32bits(x) // JSON has no NaN
	case float64:
		letter, v = "d", math.Float64bits(x)
	case amqp091.Decimal:
		letter = "D"
	case string:
		letter, v = "S", []byte(x) // it need not be UTF-8
	case []byte:
		letter = "x"
	case time.Time:
		letter, v = "T", x.Unix()
	case []any:
		all := make([]*typed, len(x))
		for i, e := range x {
			f, err := newTyped(e)
			if err != nil {
				return nil, err
			}
			all[i] = f
		}
		letter, v = "A", all
	case amqp091.Table:
		all := make([]named, 0, len(x))
		for _, name := range slices.Sorted(maps.Keys(x)) {
			f, err := newTyped(x[name])
			if err != nil {
				return nil, fmt.Errorf("header %q: %w", name, err)
			}
			all = append(all, named{[]byte(name), f})
		}
		letter, v = "F", all
	default:
		return nil, fmt.Errorf("amqp: a value of type %T is none of a table", v)
	}
	b, err := json.Marshal(v)
	return &typed{letter, b}, err
}

func (f *typed) value() (any, error) {
	if f == nil {
		return nil, errors.New("amqp: a header in the spill is missing")
	}
	switch f.Type {
	case "V":
		return nil, nil //nolint:nilnil // void is a value
	case "t":
		return read[bool](f)
	case "b":
		return read[int8](f)
	case "B":
		return read[uint8](f)
	case "s":
		return read[int16](f)
	case "u":
		return read[uint16](f)
	case "I":
		return read[int32](f)
	case "i":
		return read[uint32](f)
	case "l":
		return read[int64](f)
	case "f":
		bits, err := read[uint32](f)
		return math.Float32frombits(bits), err
	case "d":
		bits, err := read[uint64](f)
		return math.Float64frombits(bits), err
	case "D":
		return read[amqp091.Decimal](f)
	case "S":
		b, err := read[[]byte](f)
		return string(b), err
	case "x":
		return read[[]byte](f)
	case "T":
		at, err := read[int64](f)
		return time.Unix(at, 0), err
	case "A":
		all, err := read[[]*typed](f)
		out := make([]any, len(all))
		for i, e := range all {
			if err == nil {
				out[i], err = e.value()
			}
		}
		return out, err
	case "F":
		all, err := read[[]named](f)
		out := make(amqp091.Table, len(all))
		for _, e := range all {
			if err == nil {
				out[string(e.Name)], err = e.Value.value()
			}
		}
		return out, err
	}
	return nil, fmt.Errorf("amqp: a header in the spill is of type %q", f.Type)
}

func read[T any](f *typed) (v T, err error) {
	if err := json.Unmarshal(f.Value, &v); err != nil {
		return v, fmt.Errorf("amqp: a header in the spill: %w", err)
	}
	return v, nil
}
