// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// A Header is one header of a message. Names may repeat, and order counts, as on Kafka and
// NATS. For a broker with a table of headers, such as RabbitMQ, the adapter chooses an
// order and never changes it.
type Header struct {
	Name string

	// Value has the type that the broker gave it. It is one of: nil, string, []byte, bool,
	// int8, int16, int32, int64, int, uint8, uint16, uint32, uint64, float32, float64,
	// [time.Time], [Decimal], and []any or map[string]any of these. [Header.Validate]
	// checks this. The adapter knows which types its broker can carry: Kafka carries bytes,
	// NATS text, RabbitMQ nearly all.
	Value any
}

// Decimal is AMQP's fixed-point number: Unscaled divided by ten to the power
// of Scale.
type Decimal struct {
	Scale    uint8
	Unscaled int32
}

// maxDepth is the maximum depth of nested tables and lists in a header value.
const maxDepth = 32

// Validate returns an error for a value whose type [Header] does not list, or that is
// nested more than 32 deep. It walks the value once.
func (h Header) Validate() error {
	if _, bad := valueSize(h.Value, 0); bad != "" {
		return fmt.Errorf("dlq: header %s: value of type %s: want nil, text, bytes, bool, number, time, decimal, or a list or table of these at most %d deep",
			show(h.Name), bad, maxDepth)
	}
	return nil
}

// Lookup returns the value of the last header with this name: where names repeat, the last
// one counts. It ignores case, since NATS and HTTP may change it. It allocates nothing.
func Lookup(headers []Header, name string) (value any, ok bool) {
	for _, header := range slices.Backward(headers) {
		if strings.EqualFold(header.Name, name) {
			return header.Value, true
		}
	}
	return nil, false
}

// LookupText is [Lookup] for text: a string or bytes. For any other type, ok is false.
func LookupText(headers []Header, name string) (text string, ok bool) {
	v, ok := Lookup(headers, name)
	if !ok {
		return "", false
	}
	return asText(v)
}

func asText(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case []byte:
		return string(v), true
	}
	return "", false
}

// asInt accepts every integer type that fits an int64.
func asInt(v any) (int64, bool) {
	switch v := v.(type) {
	case int64:
		return v, true
	case int32:
		return int64(v), true
	case int:
		return int64(v), true
	case int16:
		return int64(v), true
	case int8:
		return int64(v), true
	case uint8:
		return int64(v), true
	case uint16:
		return int64(v), true
	case uint32:
		return int64(v), true
	case uint64:
		return int64(v), v <= 1<<63-1
	}
	return 0, false
}

// valueSize estimates the bytes of a value on the wire. bad names the first type that a
// header may not hold, if there is one.
func valueSize(v any, depth int) (size int, bad string) {
	if depth > maxDepth {
		return 0, fmt.Sprintf("%T nested too deep", v)
	}
	switch v := v.(type) {
	case nil, bool, int8, uint8:
		return 1, ""
	case int16, uint16:
		return 2, ""
	case int32, uint32, float32:
		return 4, ""
	case int, int64, uint64, float64, time.Time, Decimal:
		return 8, ""
	case string:
		return len(v), ""
	case []byte:
		return len(v), ""
	case []any:
		for _, e := range v {
			n, bad := valueSize(e, depth+1)
			if bad != "" {
				return 0, bad
			}
			size += n + headerOverhead
		}
		return size, ""
	case map[string]any:
		for name, e := range v {
			n, bad := valueSize(e, depth+1)
			if bad != "" {
				return 0, bad
			}
			size += len(name) + n + headerOverhead
		}
		return size, ""
	}
	return 0, fmt.Sprintf("%T", v)
}

// show renders a name or value for an error text, quoted and short.
func show(v any) string {
	const most = 48
	s, ok := v.(string)
	if !ok {
		switch b := v.(type) {
		case []byte:
			if len(b) > most {
				return fmt.Sprintf("0x%x… (%d bytes)", b[:most], len(b))
			}
			return fmt.Sprintf("0x%x (%d bytes)", b, len(b))
		case []any:
			return fmt.Sprintf("a list of %d", len(b))
		case map[string]any:
			return fmt.Sprintf("a table of %d", len(b))
		}
		s = fmt.Sprintf("%v", v)
		return fmt.Sprintf("%T %s", v, cut(s, most))
	}
	return fmt.Sprintf("%q", cut(s, most))
}
