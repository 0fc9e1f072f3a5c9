// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"math"
	"net/http"
	"net/textproto"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// anyText draws text that is mostly readable, sometimes any bytes at all.
func anyText(max int) *rapid.Generator[string] {
	return rapid.OneOf(
		rapid.StringMatching(`[a-zA-Z0-9 ._:/\\-]{0,40}`),
		rapid.StringN(0, max, -1),
		rapid.Map(rapid.SliceOfN(rapid.Byte(), 0, max), func(b []byte) string { return string(b) }),
		rapid.SampledFrom([]string{"", " ", " a ", "\n", `\n`, `\\`, "a\r\nb\tc", "\x00", "\u00a0x", "日本語", "\u007f", `\x20`}),
	)
}

func anyTime() *rapid.Generator[time.Time] {
	return rapid.Custom(func(t *rapid.T) time.Time {
		if rapid.IntRange(0, 3).Draw(t, "kind") == 0 {
			return time.Time{}
		}
		sec := rapid.Int64Range(-1<<32, 1<<34).Draw(t, "sec")
		nsec := rapid.SampledFrom([]int64{0, 123e6, 999999999, 1}).Draw(t, "nsec")
		return time.Unix(sec, nsec).UTC()
	})
}

func anyValue() *rapid.Generator[any] {
	return rapid.Custom(func(t *rapid.T) any {
		switch rapid.IntRange(0, 9).Draw(t, "type") {
		case 0:
			return nil
		case 1:
			return rapid.SliceOfN(rapid.Byte(), 0, 12).Draw(t, "bytes")
		case 2:
			return rapid.Int64().Draw(t, "int64")
		case 3:
			return rapid.Int32().Draw(t, "int32")
		case 4:
			return rapid.Bool().Draw(t, "bool")
		case 5:
			return rapid.Float64().Draw(t, "float")
		case 6:
			return []any{int32(1), map[string]any{"k": "v"}, nil}
		case 7:
			return map[string]any{"queue": anyText(8).Draw(t, "queue"), "count": rapid.Int64().Draw(t, "count")}
		case 8:
			return time.Unix(rapid.Int64Range(0, 1<<33).Draw(t, "time"), 0).UTC()
		}
		return anyText(16).Draw(t, "text")
	})
}

// names of every kind that could confuse: of brokers, of each dialect, of ours.
var trickyNames = func() []string {
	list := []string{
		"traceparent", "Traceparent", "tracestate", "content-type", "a", "A", "", " ", "x-death", "X-Death", "x-delivery-count",
		"x-acquired-count", "x-first-death-queue", "x-last-death-reason", "x-stream-offset", "Nats-Msg-Id", "nats-foo", "CC", "BCC", "cc",
		"stormguard-version", "Stormguard-Dialect", "stormguard-", "stormguard-x", "stormguard-original-traceparent", "stormguardian",
		"kafka_dlt-original-topic-x", "kafka_dlt-", "__connect.errors.stage", "__connect.errorsx", "__dlq.errors.x", "x-retry-count",
	}
	for _, g := range grammars {
		for _, f := range g.fields {
			list = append(list, f.name)
		}
	}
	return list
}()

func anyHeaders() *rapid.Generator[[]Header] {
	header := rapid.Custom(func(t *rapid.T) Header {
		name := rapid.OneOf(rapid.SampledFrom(trickyNames), rapid.StringMatching(`[a-zA-Z-]{1,12}`)).Draw(t, "name")
		return Header{name, anyValue().Draw(t, "value")}
	})
	return rapid.SliceOfN(header, 0, 8)
}

func anyCount(t *rapid.T, name string) int {
	return int(rapid.OneOf(rapid.Int32Range(0, 3), rapid.Int32Range(0, math.MaxInt32)).Draw(t, name))
}

func anyRecord(t *rapid.T) Record {
	text := func(name string) string { return anyText(40).Draw(t, name) }
	valid := func(name string) string { return strings.ToValidUTF8(text(name), "?") }
	r := Record{
		Headers:     anyHeaders().Draw(t, "headers"),
		Timestamp:   anyTime().Draw(t, "timestamp"),
		FirstFailed: anyTime().Draw(t, "first"),
		LastFailed:  anyTime().Draw(t, "last"),
		Attempts:    anyCount(t, "attempts"),
		Deliveries:  anyCount(t, "deliveries"),
		Error:       ErrorInfo{Type: text("type"), Wrapper: text("wrapper"), Message: text("message"), Stack: text("stack")},
		Cause:       Cause{ID: text("cause id"), Title: text("cause title")},
		Permanent:   rapid.Bool().Draw(t, "permanent"),
		Reason:      Reason(text("reason")),
		RedriveID:   text("redrive id"),
		Redrives:    anyCount(t, "redrives"),
		Origin: Origin{
			System:    rapid.SampledFrom([]string{"kafka", "rabbitmq", "nats", "", "other"}).Draw(t, "system"),
			Source:    text("source"),
			Subject:   text("subject"),
			Exchange:  text("exchange"),
			Group:     text("group"),
			MessageID: text("message id"),
			Sequence:  rapid.OneOf(rapid.Just(uint64(0)), rapid.Uint64()).Draw(t, "sequence"),
		},
	}
	if rapid.Bool().Draw(t, "has partition") {
		r.Origin.HasPartition, r.Origin.Partition = true, int32(anyCount(t, "partition"))
	}
	if rapid.Bool().Draw(t, "has offset") {
		r.Origin.HasOffset, r.Origin.Offset = true, rapid.Int64Range(0, math.MaxInt64).Draw(t, "offset")
	}
	for range rapid.IntRange(0, 3).Draw(t, "history") {
		r.History = append(r.History, Attempt{
			N: anyCount(t, "n"), At: anyTime().Draw(t, "at"), Type: valid("attempt type"), Message: valid("attempt message"),
		})
	}
	return r
}

// originals is what must come back of the headers, said in other words than
// the code's.
func originals(r Record, d Dialect) []Header {
	prefix := map[Dialect]string{Spring: "kafka_dlt-", Connect: "__connect.errors."}[d]
	var out []Header
	for _, h := range r.Headers {
		lower := strings.ToLower(h.Name)
		switch {
		case strings.HasPrefix(lower, "stormguard-") && lower != "stormguard-original-traceparent":
		case prefix != "" && strings.HasPrefix(h.Name, prefix):
		case lower == "x-death" || lower == "x-opt-deaths" || lower == "x-delivery-count" || lower == "x-acquired-count" || lower == "x-stream-offset":
		case strings.HasPrefix(lower, "x-first-death-") || strings.HasPrefix(lower, "x-last-death-") || strings.HasPrefix(lower, "nats-"):
		case r.Origin.System == "rabbitmq" && (h.Name == "CC" || h.Name == "BCC"):
		default:
			out = append(out, h)
		}
	}
	return out
}

func lastText(headers []Header, name string) (text string) {
	for _, h := range headers {
		if !strings.EqualFold(h.Name, name) {
			continue
		}
		switch v := h.Value.(type) {
		case string:
			text = v
		case []byte:
			text = string(v)
		default:
			text = ""
		}
	}
	return text
}

// carriers do to what we wrote as the brokers' clients do.
var carriers = map[string]func(own []Header) []Header{
	"as is": func(own []Header) []Header { return own },
	"kafka": func(own []Header) []Header {
		out := make([]Header, len(own))
		for i, h := range own {
			s, _ := asText(h.Value)
			out[i] = Header{h.Name, []byte(s)}
		}
		return out
	},
	"nats": func(own []Header) []Header {
		replacer := strings.NewReplacer("\n", " ", "\r", " ")
		out := make([]Header, len(own))
		for i, h := range own {
			s, _ := asText(h.Value)
			out[i] = Header{textproto.CanonicalMIMEHeaderKey(h.Name), textproto.TrimString(replacer.Replace(s))}
		}
		return out
	},
}

// Whatever a record holds comes back, in every dialect, over every broker
// that the dialect is for.
func TestRoundTrip(t *testing.T) {
	for _, c := range []struct {
		d       Dialect
		carrier string
	}{
		{"", "as is"}, {Stormguard, "kafka"}, {Stormguard, "nats"}, {Spring, "as is"}, {Spring, "kafka"}, {Connect, "as is"}, {Connect, "kafka"},
	} {
		t.Run(string(c.d)+"/"+c.carrier, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				r := anyRecord(t)
				before := append([]Header(nil), r.Headers...)
				want := r
				want.Headers = originals(r, c.d)
				want.TraceParent, want.TraceState = lastText(want.Headers, "traceparent"), lastText(want.Headers, "tracestate")

				encoded := Encode(&r, c.d)
				if !reflect.DeepEqual(before, append([]Header(nil), r.Headers...)) {
					t.Fatal("Encode changed the record's headers")
				}
				n := len(want.Headers)
				if !reflect.DeepEqual(encoded[:n:n], append([]Header{}, want.Headers...)) {
					t.Fatalf("original headers: got %v, want %v", encoded[:n], want.Headers)
				}
				for _, h := range encoded[n:] {
					if strings.HasPrefix(h.Name, "x-") {
						t.Fatalf("wrote %s", h.Name)
					}
				}
				got, d, err := Decode(append(encoded[:n:n], carriers[c.carrier](encoded[n:])...))
				if err != nil {
					t.Fatalf("%v in %v", err, encoded)
				}
				if wantD := c.d; d != wantD && (wantD != "" || d != Stormguard) {
					t.Fatalf("dialect %q, want %q", d, wantD)
				}
				if !reflect.DeepEqual(got, want) {
					t.Fatalf("got\n%#v, want\n%#v", got, want)
				}
			})
		})
	}
}

// A record that dies again must not grow by its earlier deaths.
func TestEncodeAgainDoesNotGrow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := anyRecord(t)
		d := rapid.SampledFrom(writable).Draw(t, "dialect")
		once := Encode(&r, d)
		r.Headers = once
		if twice := Encode(&r, d); !reflect.DeepEqual(once, twice) {
			t.Fatalf("once\n%v, twice\n%v", once, twice)
		}
	})
}

// In a foreign dialect the stormguard set adds only what is missing.
func TestForeignDialectsAreNotDoubled(t *testing.T) {
	r := fatRecord()
	r.Timestamp = time.UnixMilli(1_700_000_000_123)
	for d, doubled := range map[Dialect][]string{
		Spring:  {"origin-source", "origin-partition", "origin-offset", "origin-group", "origin-timestamp", "error-type", "error-message", "error-stack"},
		Connect: {"origin-source", "origin-partition", "origin-offset", "error-type", "error-message", "error-stack"},
	} {
		h := Encode(&r, d)
		for _, name := range doubled {
			if _, ok := Lookup(h, "stormguard-"+name); ok {
				t.Errorf("%s: stormguard-%s written too", d, name)
			}
		}
		for _, name := range []string{"attempts", "first-failed", "cause-id", "reason", "history", "origin-system"} {
			if _, ok := Lookup(h, "stormguard-"+name); !ok {
				t.Errorf("%s: stormguard-%s missing", d, name)
			}
		}
	}
	r.Timestamp = r.Timestamp.Add(time.Microsecond)
	if _, ok := Lookup(Encode(&r, Spring), "stormguard-origin-timestamp"); !ok {
		t.Error("a timestamp finer than milliseconds needs our own header beside Spring's")
	}
}

// Text headers of ours must pass through HTTP-like headers unchanged.
func TestEscape(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anyText(64).Draw(t, "s")
		e := escape(s)
		if got := unescape(e); got != s {
			t.Fatalf("%q became %q, then %q", s, e, got)
		}
		if carried := textproto.TrimString(e); carried != e || strings.ContainsAny(e, "\r\n\x00") {
			t.Fatalf("%q would not survive", e)
		}
		var b strings.Builder
		if err := (http.Header{"K": {e}}).Write(&b); err != nil || b.String() != "K: "+e+"\r\n" {
			t.Fatalf("%q was written as %q", e, b.String())
		}
	})
	for in, want := range map[string]string{
		"plain text":   "plain text",
		"two\nlines\r": `two\nlines\r`,
		`C:\new`:       `C:\\new`,
		" a ":          `\x20a\x20`,
		"日本\xff":       `日本\xff`,
	} {
		if got := escape(in); got != want {
			t.Errorf("escape(%q) = %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]string{`\q`: `\q`, `\`: `\`, `\x1`: `\x1`, `\xZZ`: `\xZZ`, `a\nb`: "a\nb"} {
		if got := unescape(in); got != want {
			t.Errorf("unescape(%q) = %q, want %q", in, got, want)
		}
	}
}

// Any headers at all: no panic, each header accounted for exactly once, and
// the same answer twice.
func TestDecodeIsTotal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { checkDecode(t, anyDeadLetter().Draw(t, "headers")) })
}

// anyDeadLetter draws headers of one or two dialects, some values right, some
// not.
func anyDeadLetter() *rapid.Generator[[]Header] {
	return rapid.Custom(func(t *rapid.T) []Header {
		headers := anyHeaders().Draw(t, "originals")
		for range rapid.IntRange(1, 2).Draw(t, "dialects") {
			g := grammars[rapid.IntRange(0, len(grammars)-1).Draw(t, "dialect")]
			names := []string{versionHeader, "x-death", "x-first-death-reason"}
			for _, f := range g.fields {
				names = append(names, f.name)
			}
			for range rapid.IntRange(1, 12).Draw(t, "fields") {
				name := rapid.SampledFrom(names).Draw(t, "field")
				value := rapid.OneOf(anyValue(), rapid.SampledFrom([]any{
					"1", "-1", "-2", "99999999999999999999", b("\x00\x00\x00\x07"), b("\xff\xff\xff\xff\xff\xff\xff\xff"), b(""), b("7"),
					"2026-01-02T03:04:05Z", "true", "kafka://topic/orders", "%zz://%zz/%zz?", "[]", `[{"at":"x"}]`, "dXBz", "spring", "connect",
				})).Draw(t, "value")
				headers = append(headers, Header{name, value})
			}
		}
		return headers
	})
}

func checkDecode(t interface{ Fatalf(string, ...any) }, in []Header) {
	r, d, err := Decode(in)
	again, d2, err2 := Decode(in)
	if !reflect.DeepEqual(r, again) || d != d2 || (err == nil) != (err2 == nil) {
		t.Fatalf("two answers for %v", in)
	}
	if d == "" && (err != nil || len(r.Other) > 0) {
		t.Fatalf("nothing recognised, but %v, %v", err, r.Other)
	}
	if len(r.Headers)+len(r.Other) > len(in) {
		t.Fatalf("%d and %d headers out of %d", len(r.Headers), len(r.Other), len(in))
	}
	o := r.Origin
	if r.Attempts < 0 || r.Deliveries < 0 || r.Redrives < 0 || o.Partition < 0 || o.Offset < 0 {
		t.Fatalf("negative: %+v", r)
	}
	// What was read can be written and read again.
	back, _, err := Decode(Encode(&r, ""))
	if err != nil {
		t.Fatalf("read %+v, wrote it, and then: %v", r, err)
	}
	if back.Origin != r.Origin || back.Attempts != r.Attempts || back.Error != r.Error {
		t.Fatalf("read %+v, wrote it, then read %+v", r, back)
	}
	r.ID()
	r.Error.Fingerprint()
}
