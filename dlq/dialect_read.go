// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// slot is one fact about a record that a dialect can carry.
type slot int

const (
	slotSystem slot = iota
	slotSource
	slotSubject
	slotExchange
	slotGroup
	slotPartition
	slotOffset
	slotSequence
	slotMessageID
	slotTimestamp
	slotReason
	slotPermanent
	slotAttempts
	slotDeliveries
	slotFirstFailed
	slotLastFailed
	slotErrorType
	slotErrorWrapper
	slotErrorMessage
	slotErrorStack
	slotCauseID
	slotCauseTitle
	slotHistory
	slotRedriveID
	slotRedrives

	slotOuterType // the wrapper's type if there is one, else the error's
	slotInnerType // the error's type if there is a wrapper
	slotRetries   // attempts after the first; several add up
	slotAddress   // a URI that ends in the source and begins with the system

	slots
)

// value is the value of a slot. The slot decides which field is used.
type value struct {
	s       string
	n       int64
	u       uint64
	t       time.Time
	history []Attempt

	unknown bool // the header says that the value is unknown
}

type slotAccess struct {
	get func(*Record) (v value, ok bool) // ok is false if there is nothing to write
	set func(*Record, value)

	// max is the largest allowed number; 0 for slots without a number.
	max int64

	// also are the slots that need not be written once this one is; nil means this slot
	// only.
	also []slot
}

func (a slotAccess) carries(s slot) []slot {
	if a.also != nil {
		return a.also
	}
	return []slot{s}
}

func textSlot(at func(*Record) *string) slotAccess {
	return slotAccess{
		get: func(r *Record) (value, bool) { s := *at(r); return value{s: s}, s != "" },
		set: func(r *Record, v value) { *at(r) = v.s },
	}
}

func countSlot(at func(*Record) *int) slotAccess {
	return slotAccess{
		get: func(r *Record) (value, bool) { n := *at(r); return value{n: int64(n)}, n > 0 },
		set: func(r *Record, v value) { *at(r) = int(v.n) },
		max: math.MaxInt32,
	}
}

func timeSlot(at func(*Record) *time.Time) slotAccess {
	return slotAccess{
		get: func(r *Record) (value, bool) {
			t := at(r).UTC()
			return value{t: t}, !t.IsZero() && t.Year() >= 0 && t.Year() <= 9999
		},
		set: func(r *Record, v value) { *at(r) = v.t },
	}
}

var slotTable = [slots]slotAccess{
	slotSystem:       textSlot(func(r *Record) *string { return &r.Origin.System }),
	slotSource:       textSlot(func(r *Record) *string { return &r.Origin.Source }),
	slotSubject:      textSlot(func(r *Record) *string { return &r.Origin.Subject }),
	slotExchange:     textSlot(func(r *Record) *string { return &r.Origin.Exchange }),
	slotGroup:        textSlot(func(r *Record) *string { return &r.Origin.Group }),
	slotMessageID:    textSlot(func(r *Record) *string { return &r.Origin.MessageID }),
	slotReason:       textSlot(func(r *Record) *string { return (*string)(&r.Reason) }),
	slotErrorType:    textSlot(func(r *Record) *string { return &r.Error.Type }),
	slotErrorWrapper: textSlot(func(r *Record) *string { return &r.Error.Wrapper }),
	slotErrorMessage: textSlot(func(r *Record) *string { return &r.Error.Message }),
	slotErrorStack:   textSlot(func(r *Record) *string { return &r.Error.Stack }),
	slotCauseID:      textSlot(func(r *Record) *string { return &r.Cause.ID }),
	slotCauseTitle:   textSlot(func(r *Record) *string { return &r.Cause.Title }),
	slotRedriveID:    textSlot(func(r *Record) *string { return &r.RedriveID }),
	slotAttempts:     countSlot(func(r *Record) *int { return &r.Attempts }),
	slotDeliveries:   countSlot(func(r *Record) *int { return &r.Deliveries }),
	slotRedrives:     countSlot(func(r *Record) *int { return &r.Redrives }),
	slotTimestamp:    timeSlot(func(r *Record) *time.Time { return &r.Timestamp }),
	slotFirstFailed:  timeSlot(func(r *Record) *time.Time { return &r.FirstFailed }),
	slotLastFailed:   timeSlot(func(r *Record) *time.Time { return &r.LastFailed }),

	slotPartition: {
		get: func(r *Record) (value, bool) {
			return value{n: int64(r.Origin.Partition)}, r.Origin.HasPartition && r.Origin.Partition >= 0
		},
		set: func(r *Record, v value) { r.Origin.Partition, r.Origin.HasPartition = int32(v.n), true },
		max: math.MaxInt32,
	},
	slotOffset: {
		get: func(r *Record) (value, bool) {
			return value{n: r.Origin.Offset}, r.Origin.HasOffset && r.Origin.Offset >= 0
		},
		set: func(r *Record, v value) { r.Origin.Offset, r.Origin.HasOffset = v.n, true },
		max: math.MaxInt64,
	},
	slotSequence: {
		get: func(r *Record) (value, bool) { return value{u: r.Origin.Sequence}, r.Origin.Sequence > 0 },
		set: func(r *Record, v value) { r.Origin.Sequence = v.u },
	},
	slotPermanent: {
		get: func(r *Record) (value, bool) { return value{n: 1}, r.Permanent },
		set: func(r *Record, v value) { r.Permanent = v.n == 1 },
	},
	slotHistory: {
		get: func(r *Record) (value, bool) { return value{history: r.History}, len(r.History) > 0 },
		set: func(r *Record, v value) { r.History = v.history },
	},

	slotOuterType: {
		get: func(r *Record) (value, bool) {
			if r.Error.Wrapper != "" {
				return value{s: r.Error.Wrapper}, true
			}
			return value{s: r.Error.Type}, r.Error.Type != ""
		},
		set:  func(r *Record, v value) { r.Error.Type = v.s },
		also: []slot{slotErrorType, slotErrorWrapper},
	},
	slotInnerType: {
		get:  func(r *Record) (value, bool) { return value{s: r.Error.Type}, r.Error.Wrapper != "" },
		set:  func(r *Record, v value) { r.Error.Wrapper, r.Error.Type = r.Error.Type, v.s },
		also: []slot{slotErrorType, slotErrorWrapper},
	},
	slotRetries: {
		get: func(*Record) (value, bool) { return value{}, false },
		set: func(r *Record, v value) {
			r.Attempts = int(min(int64(max(r.Attempts, 1))+v.n, math.MaxInt32))
		},
		max: math.MaxInt32,
	},
	slotAddress: {
		get: func(*Record) (value, bool) { return value{}, false },
		set: func(r *Record, v value) {
			scheme, rest, ok := strings.Cut(v.s, "://")
			if !ok {
				r.Origin.Source = v.s
				return
			}
			r.Origin.System = scheme
			if scheme == "rabbitmqs" {
				r.Origin.System = "rabbitmq"
			}
			rest, _, _ = strings.Cut(rest, "?")
			name := rest[strings.LastIndexByte(rest, '/')+1:]
			if plain, err := url.PathUnescape(name); err == nil {
				name = plain
			}
			r.Origin.Source = name
		},
	},
}

// codec is the format of a value in a dialect.
type codec struct {
	// want describes the format that decode expects. Error texts add the range of a number.
	want string

	// encode returns a nil out if the format cannot express v. exact says that decode would
	// return all of v. encode is nil in dialects that are only read.
	encode func(v value) (out any, exact bool)

	// decode reports whether in is well formed. The slot checks the range.
	decode func(in any) (value, bool)
}

// spelled makes a decode function from a parser of text.
func spelled(parse func(string) (value, bool)) func(any) (value, bool) {
	return func(in any) (value, bool) {
		s, ok := asText(in)
		if !ok {
			return value{}, false
		}
		return parse(s)
	}
}

// number wraps a decode function so that it also accepts integers of any type.
func number(decode func(any) (value, bool)) func(any) (value, bool) {
	return func(in any) (value, bool) {
		if n, ok := asInt(in); ok {
			return value{n: n}, true
		}
		return decode(in)
	}
}

// asTime wraps a decode function so that it also accepts AMQP's own timestamps.
func asTime(decode func(any) (value, bool)) func(any) (value, bool) {
	return func(in any) (value, bool) {
		if t, ok := in.(time.Time); ok {
			return value{t: t.UTC()}, true
		}
		return decode(in)
	}
}

func parseDecimal(s string) (value, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return value{n: n}, err == nil
}

// millis reads a Unix time in milliseconds; Kafka's -1 means unknown.
func millis(v value, ok bool) (value, bool) {
	const most = 253402300799999 // the end of the year 9999
	if !ok || v.n < -1 || v.n > most {
		return value{}, false
	}
	return value{t: time.UnixMilli(v.n).UTC(), unknown: v.n == -1}, true
}

func bigEndian(size int) func(any) (value, bool) {
	return number(spelled(func(s string) (value, bool) {
		if len(s) != size {
			return value{}, false
		}
		if size == 4 {
			return value{n: int64(int32(binary.BigEndian.Uint32([]byte(s))))}, true
		}
		return value{n: int64(binary.BigEndian.Uint64([]byte(s)))}, true
	}))
}

// either reads digits as decimal and anything else as big-endian, for headers that exist in
// both formats. They do not collide: ASCII digits read as binary would be a larger
// partition or offset than any topic has.
func either(size int) func(any) (value, bool) {
	binary := bigEndian(size)
	return func(in any) (value, bool) {
		if s, ok := asText(in); ok && (allDigits(s) || s == "-1") {
			return parseDecimal(s)
		}
		return binary(in)
	}
}

var (
	text = codec{
		want:   "text",
		encode: func(v value) (any, bool) { return v.s, true },
		decode: spelled(func(s string) (value, bool) { return value{s: s}, true }),
	}
	decimal = codec{
		want:   "a decimal integer",
		encode: func(v value) (any, bool) { return strconv.FormatInt(v.n, 10), true },
		decode: number(spelled(parseDecimal)),
	}
	int32BE = codec{
		want:   "4 bytes, a big-endian integer",
		encode: func(v value) (any, bool) { return binary.BigEndian.AppendUint32(nil, uint32(v.n)), true },
		decode: bigEndian(4),
	}
	int64BE = codec{
		want:   "8 bytes, a big-endian integer",
		encode: func(v value) (any, bool) { return binary.BigEndian.AppendUint64(nil, uint64(v.n)), true },
		decode: bigEndian(8),
	}
	millisBE = codec{
		want: "8 bytes, big-endian milliseconds since 1970, or -1 for unknown",
		encode: func(v value) (any, bool) {
			ms := v.t.UnixMilli()
			if ms < 0 {
				return nil, false
			}
			return binary.BigEndian.AppendUint64(nil, uint64(ms)), time.UnixMilli(ms).Equal(v.t)
		},
		decode: asTime(func(in any) (value, bool) { return millis(bigEndian(8)(in)) }),
	}
	int32Either  = codec{want: "a decimal or a 4-byte big-endian integer", decode: number(either(4))}
	int64Either  = codec{want: "a decimal or an 8-byte big-endian integer", decode: number(either(8))}
	millisEither = codec{
		want:   "milliseconds since 1970, decimal or 8 bytes big-endian, or -1 for unknown",
		decode: asTime(func(in any) (value, bool) { return millis(either(8)(in)) }),
	}
	millisText = codec{
		want:   "decimal milliseconds since 1970",
		decode: asTime(func(in any) (value, bool) { return millis(number(spelled(parseDecimal))(in)) }),
	}
	isoTime = codec{
		want:   "a time as in RFC 3339",
		encode: func(v value) (any, bool) { return formatTime(v.t), true },
		decode: asTime(spelled(func(s string) (value, bool) {
			t, err := time.Parse(time.RFC3339Nano, s)
			return value{t: t.UTC()}, err == nil
		})),
	}
	nServiceBusTime = codec{
		want: "a time as yyyy-MM-dd HH:mm:ss:ffffff Z",
		decode: asTime(spelled(func(s string) (value, bool) {
			if i := strings.LastIndexByte(s, ':'); i >= 0 {
				s = s[:i] + "." + s[i+1:]
			}
			t, err := time.Parse("2006-01-02 15:04:05.000000 Z", s)
			return value{t: t}, err == nil
		})),
	}
	httpStatus = codec{
		want: "text",
		decode: func(in any) (value, bool) {
			s, ok := asText(in)
			if n, isInt := asInt(in); isInt {
				s, ok = strconv.FormatInt(n, 10), true
			}
			if s != "" {
				s = "HTTP " + s
			}
			return value{s: s}, ok
		},
	}
	// maybeBase64 reads text that is plain or base64; the base64 may be cut off. Many plain
	// words are valid base64, but do not decode to text.
	maybeBase64 = codec{
		want: "text",
		decode: spelled(func(s string) (value, bool) {
			enc := strings.TrimRight(s, "=")
			if len(enc)%4 == 1 {
				enc = enc[:len(enc)-1]
			}
			if plain, err := base64.RawStdEncoding.DecodeString(enc); err == nil && len(plain) > 0 {
				if text := withoutCut(string(plain)); isText(text) {
					return value{s: text}, true
				}
			}
			return value{s: s}, true
		}),
	}
)

// isText reports whether s is UTF-8 without control characters other than white space.
func isText(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsControl(r) && !unicode.IsSpace(r)
	})
}

// cutLeast is the smallest length in bytes at which a text may have been cut inside a
// character. A shorter text that ends with part of a character is no text.
const cutLeast = 64

// withoutCut removes an incomplete character from the end of a long text.
func withoutCut(s string) string {
	for n := 1; len(s) >= cutLeast && n < utf8.UTFMax; n++ {
		if tail := s[len(s)-n:]; utf8.RuneStart(tail[0]) {
			if !utf8.FullRuneInString(tail) {
				s = s[:len(s)-n]
			}
			break
		}
	}
	return s
}

// state says whether Decode read a header.
type state uint8

const (
	stateUnread state = iota
	stateRead         // the value was read
	stateBad          // the value cannot be read
)

type decoder struct {
	r       *Record
	headers []Header
	state   []state
	in      []*grammar // the grammars that read was called with
	errs    []error

	// leftBy is the reason in x-death for which the message left its source.
	leftBy Reason
}

// last returns the index of the last header called name, or -1.
func (d *decoder) last(g *grammar, name string) int {
	for i, v := range slices.Backward(d.headers) {
		if g.same(v.Name, name) {
			return i
		}
	}
	return -1
}

func (d *decoder) bad(i int, want string) {
	d.state[i] = stateBad
	d.errs = append(d.errs, &headerError{d.headers[i].Name, d.headers[i].Value, want})
}

func (d *decoder) read(g *grammar) {
	d.in = append(d.in, g)
	for k := range g.fields {
		f := &g.fields[k]
		i := d.last(g, f.name)
		if i < 0 {
			continue
		}
		h := &d.headers[i]
		if b, ok := h.Value.([]byte); h.Value == nil || ok && b == nil {
			d.state[i] = stateRead
			continue
		}
		v, ok := f.codec.decode(h.Value)
		most := slotTable[f.slot].max
		switch {
		case !ok || most > 0 && (v.n < -1 || v.n > most):
			want := f.codec.want
			if most > 0 {
				want = fmt.Sprintf("%s from 0 to %d, or -1 for unknown", want, most)
			}
			d.bad(i, want)
			continue
		case !v.unknown && (most == 0 || v.n >= 0):
			slotTable[f.slot].set(d.r, v)
		}
		d.state[i] = stateRead
	}
	if g.hook != nil {
		g.hook(d, g)
	}
}

// rest puts the headers that no slot took into Other or Headers, or drops them.
func (d *decoder) rest() {
	for i, h := range d.headers {
		mine := false
		for _, g := range d.in {
			mine = mine || g.mine(h.Name)
		}
		switch {
		case d.state[i] == stateRead:
		case d.state[i] == stateBad:
			d.r.Other = append(d.r.Other, h)
		case isTransport(d.r.Origin.System, h.Name):
		case mine:
			d.r.Other = append(d.r.Other, h)
		default:
			d.r.Headers = append(d.r.Headers, h)
		}
	}
}
