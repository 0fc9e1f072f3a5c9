// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"bytes"
	"errors"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestConfiguratorRowBound(t *testing.T) {
	s := confRow{
		fleet: most, incarnation: most, known: most - 1, digest: most, complete: most - 1, applied: most - 1, loaded: most - 1,
		flags: confFlags &^ confPiece, weight: 1e6, want: want{most, most, maxDocument}, grant: 1<<63 - 1,
	}
	for i := range maxFrozen {
		s.frozen = append(s.frozen, maxMembers-maxFrozen+i)
	}
	if n := len(appendConfRow(nil, &s)); n > maxConfRow {
		t.Errorf("a row takes %d bytes, the bound is %d", n, maxConfRow)
	}
	if maxConfRow+pieceFront+leastPiece > 512 {
		t.Errorf("the documented room is too small: %d", maxConfRow+pieceFront+leastPiece)
	}
}

func TestConfiguratorWireRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		u := func(name string) uint64 { return rapid.Uint64().Draw(t, name) }
		known := rapid.Uint64Range(0, most-1).Draw(t, "known")
		upTo := func(name string) uint64 { return rapid.Uint64Range(0, known).Draw(t, name) }
		in := confRow{
			fleet: u("fleet"), incarnation: u("incarnation"), known: known, digest: u("digest"),
			complete: upTo("complete"), applied: upTo("applied"), loaded: upTo("loaded"), flags: rapid.Uint64Range(0, confFlags).Draw(t, "flags"),
		}
		if in.flags&confJoining != 0 {
			in.weight = rapid.IntRange(1, 1e6).Draw(t, "weight")
		}
		if in.flags&confFrozen != 0 {
			for voter := range rapid.IntRange(1, maxFrozen).Draw(t, "frozen") {
				in.frozen = append(in.frozen, 3*voter)
			}
		}
		if in.flags&confWant != 0 {
			in.want = want{u("want"), u("want"), rapid.IntRange(0, maxDocument).Draw(t, "offset")}
		}
		if in.flags&confGrant != 0 {
			in.grant = time.Duration(rapid.Int64Min(0).Draw(t, "grant"))
		}
		b := appendConfRow(nil, &in)
		if in.flags&confPiece != 0 {
			in.piece = piece{number: u("number"), digest: u("digest"), total: 100, offset: rapid.IntRange(0, 60).Draw(t, "offset"), data: rapid.SliceOfN(rapid.Byte(), 1, 40).Draw(t, "data")}
			b = appendPiece(b, &in.piece)
		}
		var out confRow
		if err := readConfRow(b, &out); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(in, out) {
			t.Fatalf("wrote %+v\nread  %+v", in, out)
		}
		for n := range b {
			if err := readConfRow(b[:n], &out); !errors.Is(err, ErrMalformed) {
				t.Fatalf("%d of %d bytes are read: %v", n, len(b), err)
			}
		}
	})
}

func FuzzConfigurator(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		var s confRow
		if err := readConfRow(bytes.Clone(b), &s); err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		again := appendConfRow(nil, &s)
		if s.flags&confPiece != 0 {
			again = appendPiece(again, &s.piece)
		}
		if !bytes.Equal(again, b) {
			t.Fatalf("%x is written as %x", b, again)
		}
	})
}
