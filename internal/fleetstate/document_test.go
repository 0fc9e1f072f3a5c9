// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// drawDocument is one that a writer may write.
func drawDocument(t *rapid.T) *document {
	d := &document{fleet: rapid.StringN(1, 20, maxName).Draw(t, "fleet")}
	name := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f"})
	limit := rapid.Custom(func(t *rapid.T) escrow.Limit {
		return escrow.Limit{Rate: float64(rapid.IntRange(1, 1e6).Draw(t, "rate")), Burst: rapid.IntRange(1, 1e6).Draw(t, "burst")}
	})
	number := rapid.Uint64Range(1, 1<<40).Draw(t, "number")
	for range rapid.IntRange(1, 5).Draw(t, "stages") {
		c := escrow.Configuration{Number: number, Limit: limit.Draw(t, "limit"), Resets: rapid.Uint64().Draw(t, "resets")}
		c.Roster.Learners, c.Roster.Number = rapid.Bool().Draw(t, "learners"), rapid.Uint64().Draw(t, "roster")
		c.Limits = rapid.MapOfN(rapid.SampledFrom([]string{"x", "y", "z"}), limit, 0, 3).Draw(t, "limits")
		if len(c.Limits) == 0 {
			c.Limits = nil
		}
		names := rapid.SliceOfNDistinct(name, 1, 5, rapid.ID[string]).Draw(t, "members")
		for i, n := range names {
			c.Roster.Members = append(c.Roster.Members, escrow.Member{Name: n, Weight: 1 + i, NoShare: false})
		}
		var evicted []eviction
		if e := name.Draw(t, "evicted"); !slices.Contains(names, e) {
			evicted = append(evicted, eviction{e, rapid.Bool().Draw(t, "silent")})
		}
		d.stages = append(d.stages, newStage(normal(c), evicted))
		number += rapid.Uint64Range(1, 3).Draw(t, "step")
	}
	for _, n := range []string{"a", "c"} {
		if rapid.Bool().Draw(t, "incarnation") {
			d.incarnations = append(d.incarnations, listed{n, rapid.Uint64().Draw(t, "incarnation")})
		}
	}
	k := rapid.Uint64Range(0, min(maxLog, d.number())).Draw(t, "log")
	for ; k > 0; k-- {
		d.log = append(d.log, Record{
			Number: d.number() - k + 1, ID: rapid.Uint64().Draw(t, "id"), At: rapid.Int64Min(0).Draw(t, "at"),
			Who: shorten(rapid.String().Draw(t, "who"), maxWho), What: shorten(rapid.String().Draw(t, "what"), maxWhat),
		})
	}
	d.encode()
	return d
}

func TestDocumentRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := drawDocument(t)
		back, err := readDocument(bytes.Clone(d.bytes))
		if err != nil || !reflect.DeepEqual(back, d) {
			t.Fatalf("%v\nwrote %+v\nread  %+v", err, d, back)
		}
		for n := range d.bytes {
			if _, err := readDocument(d.bytes[:n]); !errors.Is(err, ErrMalformed) {
				t.Fatalf("%d of %d bytes are read: %v", n, len(d.bytes), err)
			}
		}
		if _, err := readDocument(append(bytes.Clone(d.bytes), 0)); !errors.Is(err, ErrMalformed) {
			t.Fatalf("a byte more is read: %v", err)
		}
	})
}

// A chain of small changes of a large fleet fits in a register.
func TestDocumentSize(t *testing.T) {
	c := escrow.Configuration{Number: 1, Limit: escrow.Limit{Rate: 1000, Burst: 1_000_000}}
	for i := range 1000 {
		c.Roster.Members = append(c.Roster.Members, escrow.Member{Name: fmt.Sprintf("payments-7f9c5d-%05d", i)})
	}
	d := &document{fleet: "payments", stages: []stage{newStage(normal(c), nil)}}
	for range 10 {
		c := d.newest().Configuration
		c.Number++
		c.Limit.Rate++
		d.stages = append(d.stages, newStage(normal(c), nil))
		d.log = append(d.log, Record{Number: c.Number, Who: strings.Repeat("w", maxWho), What: strings.Repeat("w", maxWhat)})
	}
	if d.encode(); len(d.bytes) > roomDocument {
		t.Errorf("%d bytes are more than %d", len(d.bytes), roomDocument)
	}
	t.Logf("1,000 members, 10 changes: %d bytes", len(d.bytes))
	if _, err := readDocument(d.bytes); err != nil {
		t.Error(err)
	}
	if _, err := readDocument(make([]byte, maxDocument+1)); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
}

func TestDocumentShorten(t *testing.T) {
	for in, want := range map[string]string{"": "", "short": "short", "1234567890": "1234567890", "12345678901": "1234567…", "123456ä7890": "123456…", "a\xff": "a?"} {
		if got := shorten(in, 10); got != want {
			t.Errorf("shorten(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzDocument(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := readDocument(bytes.Clone(b))
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		if d.encode(); !bytes.Equal(d.bytes, b) {
			t.Fatalf("%x is written as %x", b, d.bytes)
		}
		for i := range d.stages {
			if err := checkConfiguration(d.stages[i].Configuration); err != nil {
				t.Fatal(err)
			}
		}
	})
}
