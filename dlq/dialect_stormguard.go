// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Header names that the code uses. All begin with stormguard-. None begins with x-, which
// RabbitMQ and others reserve.
const (
	// redriveIDHeader and redrivesHeader are set on a message that is sent back to its
	// source.
	redriveIDHeader = "stormguard-redrive-id"
	redrivesHeader  = "stormguard-redrives"

	// originalTraceHeader keeps the trace of the first death, because a redrive starts a
	// new trace. Decode treats it as one of the original headers.
	originalTraceHeader = "stormguard-original-traceparent"

	versionHeader = "stormguard-version"
	dialectHeader = "stormguard-dialect"

	stormguardVersion = "1"
)

var stormguardGrammar = grammar{
	dialect:   Stormguard,
	fold:      true,
	signature: [][]string{{versionHeader}},
	owns:      []string{"stormguard-*"},
	except:    originalTraceHeader,
	fields: []field{
		{"stormguard-reason", slotReason, escaped},
		{"stormguard-permanent", slotPermanent, truth},
		{"stormguard-attempts", slotAttempts, decimal},
		{"stormguard-deliveries", slotDeliveries, decimal},
		{"stormguard-first-failed", slotFirstFailed, isoTime},
		{"stormguard-last-failed", slotLastFailed, isoTime},
		{"stormguard-error-type", slotErrorType, escaped},
		{"stormguard-error-wrapper", slotErrorWrapper, escaped},
		{"stormguard-error-message", slotErrorMessage, escaped},
		{"stormguard-error-stack", slotErrorStack, escaped},
		{"stormguard-cause-id", slotCauseID, escaped},
		{"stormguard-cause-title", slotCauseTitle, escaped},
		{"stormguard-history", slotHistory, attempts},
		{"stormguard-origin-system", slotSystem, escaped},
		{"stormguard-origin-source", slotSource, escaped},
		{"stormguard-origin-subject", slotSubject, escaped},
		{"stormguard-origin-exchange", slotExchange, escaped},
		{"stormguard-origin-group", slotGroup, escaped},
		{"stormguard-origin-partition", slotPartition, decimal},
		{"stormguard-origin-offset", slotOffset, decimal},
		{"stormguard-origin-sequence", slotSequence, unsigned},
		{"stormguard-origin-message-id", slotMessageID, escaped},
		{"stormguard-origin-timestamp", slotTimestamp, isoTime},
		{redriveIDHeader, slotRedriveID, escaped},
		{redrivesHeader, slotRedrives, decimal},
	},
}

var (
	escaped = codec{
		want:   "text",
		encode: func(v value) (any, bool) { return escape(v.s), true },
		decode: spelled(func(s string) (value, bool) { return value{s: unescape(s)}, true }),
	}
	unsigned = codec{
		want:   "a decimal integer from 1 to 18446744073709551615",
		encode: func(v value) (any, bool) { return strconv.FormatUint(v.u, 10), true },
		decode: func(in any) (value, bool) {
			if n, ok := asInt(in); ok {
				return value{u: uint64(n)}, n > 0
			}
			s, _ := asText(in)
			u, err := strconv.ParseUint(s, 10, 64)
			return value{u: u}, err == nil && u > 0
		},
	}
	truth = codec{
		want:   "true or false",
		encode: func(v value) (any, bool) { return strconv.FormatBool(v.n == 1), true },
		decode: func(in any) (value, bool) {
			if b, ok := in.(bool); ok {
				in = strconv.FormatBool(b)
			}
			switch s, _ := asText(in); s {
			case "true":
				return value{n: 1}, true
			case "false":
				return value{}, true
			}
			return value{}, false
		},
	}
	attempts = codec{
		want:   `a JSON list of {"n", "at", "type", "error"}`,
		encode: func(v value) (any, bool) { return historyJSON(v.history), true },
		decode: spelled(func(s string) (value, bool) {
			history, err := parseHistory(s)
			return value{history: history}, err == nil
		}),
	}
)

// written returns the grammar in which stormguard wrote the record.
func (d *decoder) written() *grammar {
	g := &stormguardGrammar
	i := d.last(g, versionHeader)
	d.state[i] = stateRead
	if s, _ := asText(d.headers[i].Value); s != stormguardVersion {
		d.bad(i, fmt.Sprintf("%q", stormguardVersion))
	}
	i = d.last(g, dialectHeader)
	if i < 0 {
		return g
	}
	d.state[i] = stateRead
	s, _ := asText(d.headers[i].Value)
	if s == "" || !Dialect(s).Writable() {
		d.bad(i, fmt.Sprintf("one of %q", writable))
		return g
	}
	return grammarOf(Dialect(s))
}

const hexDigits = "0123456789abcdef"

// escape makes s valid for a text header of any broker.
func escape(s string) string {
	if plain(s) {
		return s
	}
	b := make([]byte, 0, len(s)+len(s)/8+8)
	for i := 0; i < len(s); {
		c := s[i]
		if c >= utf8.RuneSelf {
			if r, size := utf8.DecodeRuneInString(s[i:]); r != utf8.RuneError || size > 1 {
				b = append(b, s[i:i+size]...)
				i += size
				continue
			}
		}
		switch {
		case c == '\\':
			b = append(b, `\\`...)
		case c == '\n':
			b = append(b, `\n`...)
		case c == '\r':
			b = append(b, `\r`...)
		case c == '\t':
			b = append(b, `\t`...)
		case c < ' ' || c >= 0x7f || c == ' ' && (i == 0 || i == len(s)-1):
			b = append(b, '\\', 'x', hexDigits[c>>4], hexDigits[c&15])
		default:
			b = append(b, c)
		}
		i++
	}
	return string(b)
}

func plain(s string) bool {
	if s == "" {
		return true
	}
	for i := range len(s) {
		if c := s[i]; c < ' ' || c >= 0x7f || c == '\\' {
			return c >= 0x80 && plainUnicode(s)
		}
	}
	return s[0] != ' ' && s[len(s)-1] != ' '
}

func plainUnicode(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == 0x7f || c == '\\' {
			return false
		}
	}
	return utf8.ValidString(s) && s[0] != ' ' && s[len(s)-1] != ' '
}

// unescape undoes escape. An unknown escape stays as it is.
func unescape(s string) string {
	i := strings.IndexByte(s, '\\')
	if i < 0 {
		return s
	}
	b := append(make([]byte, 0, len(s)), s[:i]...)
	for i < len(s) {
		if s[i] != '\\' || i+1 == len(s) {
			b = append(b, s[i])
			i++
			continue
		}
		switch c := s[i+1]; {
		case c == '\\':
			b = append(b, '\\')
		case c == 'n':
			b = append(b, '\n')
		case c == 'r':
			b = append(b, '\r')
		case c == 't':
			b = append(b, '\t')
		case c == 'x' && i+3 < len(s) && strings.IndexByte(hexDigits, s[i+2]) >= 0 && strings.IndexByte(hexDigits, s[i+3]) >= 0:
			b = append(b, byte(strings.IndexByte(hexDigits, s[i+2])<<4|strings.IndexByte(hexDigits, s[i+3])))
			i += 2
		default:
			b = append(b, '\\', c)
		}
		i += 2
	}
	return string(b)
}
