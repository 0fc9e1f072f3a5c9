// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func kafkaOrigin(partition int32, offset int64) Origin {
	return Origin{System: "kafka", Source: "orders", Group: "billing", Partition: partition, HasPartition: true, Offset: offset, HasOffset: true}
}

func TestRecordID(t *testing.T) {
	for _, c := range []struct {
		name string
		r    Record
		want string
	}{
		{"kafka", Record{Origin: kafkaOrigin(3, 1042)}, "kafka/orders/billing/3/o1042"},
		{"kafka from the start", Record{Origin: kafkaOrigin(0, 0)}, "kafka/orders/billing/0/o0"},
		{"jetstream", Record{Origin: Origin{System: "nats", Source: "ORDERS", Group: "worker", Sequence: 17}}, "nats/ORDERS/worker/-/s17"},
		{"rabbitmq stream", Record{Origin: Origin{System: "rabbitmq", Source: "log", HasOffset: true, Offset: 5}}, "rabbitmq/log/-/-/o5"},
		{"separators", Record{Origin: Origin{System: "a/b", Source: "c%d", Group: "-", Sequence: 1}}, "a%2Fb/c%25d/%2D/-/s1"},
		{"not ASCII", Record{Origin: Origin{System: "kafka", Source: "bestellung-ü", Sequence: 1}}, "kafka/bestellung-%C3%BC/-/-/s1"},
		{"message id", Record{Body: []byte("x"), Origin: Origin{System: "rabbitmq", Source: "q", MessageID: "m/1"}}, "rabbitmq/q/-/-/mm%2F1.0.dbcdd5257900b0eeebb3c43d1da7b80a"},
		{"nothing to go by", Record{Body: []byte("x"), Origin: Origin{System: "rabbitmq", Source: "q"}}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := c.r.ID()
			if got != c.want {
				t.Fatalf("got %s, want %s", got, c.want)
			}
		})
	}
}

func TestRecordIDTellsApart(t *testing.T) {
	byID := func(id string) Record {
		return Record{Key: []byte("k"), Body: []byte("body"), Origin: Origin{System: "rabbitmq", Source: "q", MessageID: id}}
	}
	change := func(r Record, f func(*Record)) Record { f(&r); return r }
	base := Record{Origin: kafkaOrigin(1, 7)}
	records := []Record{
		base,
		change(base, func(r *Record) { r.Origin.Partition = 2 }),
		change(base, func(r *Record) { r.Origin.HasPartition = false }),
		change(base, func(r *Record) { r.Origin.Offset = 8 }),
		change(base, func(r *Record) { r.Origin.Group = "shipping" }),
		change(base, func(r *Record) { r.Origin.Source = "orders2" }),
		change(base, func(r *Record) { r.Origin.System = "redpanda" }),
		change(base, func(r *Record) { r.Origin.HasOffset, r.Origin.Sequence = false, 7 }),
		change(base, func(r *Record) { r.Origin.Source, r.Origin.Group = "orders/billing", "" }),
		byID("m"),
		change(byID("m"), func(r *Record) { r.Body = []byte("other") }),
		change(byID("m"), func(r *Record) { r.Key, r.Body = []byte("kb"), []byte("ody") }),
		change(byID("m"), func(r *Record) { r.Redrives = 1 }),
		byID("m2"),
		change(base, func(r *Record) { r.Origin.Source = strings.Repeat("x", 249) }),
		change(base, func(r *Record) { r.Origin.Source = strings.Repeat("x", 249); r.Origin.Offset = 8 }),
	}
	seen := map[string]int{}
	for i := range records {
		id := records[i].ID()
		if j, dup := seen[id]; dup || id == "" {
			t.Errorf("records %d and %d share the ID %q", j, i, id)
		}
		if len(id) > maxID {
			t.Errorf("record %d: ID of %d bytes", i, len(id))
		}
		seen[id] = i
	}
}

// What happened to a message after it was taken must not change its ID.
func TestRecordIDIsStable(t *testing.T) {
	r := Record{Origin: kafkaOrigin(1, 7), Attempts: 3}
	id := r.ID()
	r.Attempts, r.LastFailed, r.Error, r.Redrives, r.Body = 9, time.Now(), ErrorInfo{Message: "x"}, 2, []byte("b")
	if got := r.ID(); got != id {
		t.Fatalf("%s became %s", id, got)
	}
}

func TestCapText(t *testing.T) {
	for _, c := range []struct {
		in   string
		max  int
		want string
	}{
		{"", 10, ""},
		{"0123456789", 10, "0123456789"},
		{"0123456789a", 10, "0123456…"},
		{"äöü", 6, "äöü"},
		{"äöüß", 6, "ä…"},
		{"日本語日本語", 10, "日本…"},
		{"a\xffb", 10, "a\uFFFDb"},
		{"\xff\xff\xff\xff", 10, "\uFFFD"}, // one replacement for a run
		{strings.Repeat("\x80", 100), 10, "\uFFFD…"},
		{"aaaaaaa\xf0\x9f\x98\x80bbb", 10, "aaaaaaa…"},
	} {
		got := capText(c.in, c.max)
		if got != c.want {
			t.Errorf("capText(%q, %d) = %q, want %q", c.in, c.max, got, c.want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		s := anyText(64).Draw(t, "s")
		max := rapid.IntRange(8, 64).Draw(t, "max")
		got := capText(s, max)
		if len(got) > max || !utf8.ValidString(got) {
			t.Fatalf("%d bytes, valid %v: %q", len(got), utf8.ValidString(got), got)
		}
		if capText(got, max) != got {
			t.Fatalf("not idempotent: %q, then %q", got, capText(got, max))
		}
		if len(s) <= max && utf8.ValidString(s) && got != s {
			t.Fatalf("changed %q to %q", s, got)
		}
	})
}

func fatRecord() Record {
	r := Record{
		Key: []byte("k"), Body: []byte(strings.Repeat("b", 1000)),
		Headers:     []Header{{"traceparent", "00-a-b-01"}},
		Origin:      kafkaOrigin(3, 1042),
		FirstFailed: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), LastFailed: time.Date(2026, 1, 2, 3, 5, 5, 6, time.UTC),
		Attempts: 4, Reason: ReasonAttempts,
		Error: ErrorInfo{Type: "*net.OpError", Message: strings.Repeat("m", 1000), Stack: strings.Repeat("main.f()\n", 900)},
		Cause: Cause{ID: "v1:0123456789abcdef", Title: strings.Repeat("t", 150)},
	}
	for i := range 8 {
		r.History = append(r.History, Attempt{N: i + 1, At: r.FirstFailed, Message: strings.Repeat("h", 100)})
	}
	return r
}

func TestTrimDropsInOrder(t *testing.T) {
	full := fatRecord()
	size := full.Size()
	type kept struct {
		stack, history, message, title int
	}
	var seen []kept
	for max := size; max > 0; max -= 50 {
		r := fatRecord()
		fits := r.Trim(max)
		if fits != (r.Size() <= max) {
			t.Fatalf("max %d: reported %v at size %d", max, fits, r.Size())
		}
		k := kept{len(r.Error.Stack), len(r.History), len(r.Error.Message), len(r.Cause.Title)}
		if len(seen) == 0 || seen[len(seen)-1] != k {
			seen = append(seen, k)
		}
		r.Error, full.Error = ErrorInfo{}, ErrorInfo{}
		r.History, full.History, r.Cause.Title, full.Cause.Title = nil, nil, "", ""
		if !reflect.DeepEqual(r, full) {
			t.Fatalf("max %d: something else was touched: %+v", max, r)
		}
		if !fits {
			break
		}
	}
	want := []kept{
		{8100, 8, 1000, 150}, {2048, 8, 1000, 150}, {0, 8, 1000, 150}, {0, 2, 1000, 150}, {0, 0, 1000, 150},
		{0, 0, 256, 150}, {0, 0, 256, 64}, {0, 0, 0, 64}, {0, 0, 0, 0},
	}
	if !reflect.DeepEqual(seen, want) {
		t.Errorf("steps\n%v, want\n%v", seen, want)
	}
}

// The estimate must not be below what the parts add up to.
func TestSizeIsNoLessThanTheBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := anyRecord(t)
		n := len(r.Key) + len(r.Body)
		for _, h := range Encode(&r, Stormguard) {
			n += len(h.Name)
			if s, ok := asText(h.Value); ok {
				n += len(s)
			}
		}
		if r.Size() < n {
			t.Fatalf("%d, but %d bytes", r.Size(), n)
		}
	})
}

func TestTrimFor(t *testing.T) {
	r := fatRecord()
	before := r.Size()
	if TrimFor(&r, errors.New("other")) || r.Size() != before {
		t.Error("trimmed for another error")
	}
	err := fmt.Errorf("writer: %w", &TooLargeError{Size: 2_000_000, Max: 1_999_000})
	if !TrimFor(&r, err) {
		t.Fatal("not trimmed")
	}
	if got := before - r.Size(); got < 1000 || r.Error.Message == "" || len(r.History) != 8 {
		t.Errorf("cut %d bytes, left %+v", got, r.Error)
	}
	if !TrimFor(&r, ErrTooLarge) || r.History != nil || r.Error.Message != "" || len(r.Body) != 1000 {
		t.Error("without sizes everything droppable must go, and nothing else")
	}
	if TrimFor(&r, ErrTooLarge) {
		t.Error("reported progress where none was possible")
	}
}

func TestWriterErrors(t *testing.T) {
	inner := errors.New("kafka: message was too large")
	var err error = &TooLargeError{Size: 11, Max: 10, Err: inner}
	if !errors.Is(err, ErrTooLarge) || !errors.Is(err, inner) {
		t.Error("not found in the chain")
	}
	if want := "dlq: record too large: 11 bytes, at most 10 allowed: kafka: message was too large"; err.Error() != want {
		t.Errorf("got %q", err)
	}
	if got := (&TooLargeError{}).Error(); got != ErrTooLarge.Error() {
		t.Errorf("got %q", got)
	}
	var got *Record
	w := WriterFunc(func(_ context.Context, r *Record) error { got = r; return ErrRefused })
	r := &Record{}
	if err := w.Write(context.Background(), r); err != ErrRefused || got != r {
		t.Error("WriterFunc does not pass through")
	}
}

func TestHeaderValidate(t *testing.T) {
	good := []any{
		nil, "s", []byte("b"), true, int8(1), int16(1), int32(1), int64(1), 1, uint8(1), uint16(1), uint32(1), uint64(1),
		float32(1), 1.0, time.Now(), Decimal{2, 314}, []any{1, []any{"x"}}, map[string]any{"a": map[string]any{"b": nil}},
	}
	for _, v := range good {
		if err := (Header{"h", v}).Validate(); err != nil {
			t.Errorf("%T: %v", v, err)
		}
	}
	deep := any("x")
	for range 40 {
		deep = []any{deep}
	}
	for _, v := range []any{[]string{"x"}, struct{}{}, map[string]string{}, []any{uint(1)}, map[string]any{"a": complex(1, 1)}, deep} {
		if err := (Header{"h", v}).Validate(); err == nil {
			t.Errorf("%T accepted", v)
		}
	}
}

func TestLookup(t *testing.T) {
	h := []Header{{"A", "1"}, {"Traceparent", []byte("x")}, {"a", "2"}, {"n", int32(1)}}
	if v, ok := Lookup(h, "A"); !ok || v != "2" {
		t.Errorf("got %v: the last counts, whatever its case", v)
	}
	if s, ok := LookupText(h, "traceparent"); !ok || s != "x" {
		t.Errorf("got %q", s)
	}
	if _, ok := LookupText(h, "n"); ok {
		t.Error("a number passed as text")
	}
	if _, ok := Lookup(h, "none"); ok {
		t.Error("found what is not there")
	}
}
