// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/crdt"
)

var writeSeeds = flag.Bool("write-seeds", false, "write the seeds of the fuzz tests to testdata/fuzz")

// seed writes a corpus file, as go test reads it, or checks that it is there.
func seed(t *testing.T, target, name string, b []byte) {
	t.Helper()
	path := filepath.Join("testdata", "fuzz", target, name)
	text := fmt.Sprintf("go test fuzz v1\n[]byte(%q)\n", b)
	if *writeSeeds {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil || string(got) != text {
		t.Errorf("%s is not what the encoding gives now: run with -write-seeds and see that old packets are still understood (%v)", path, err)
	}
}

// fullest are records with every field in use, at its limits.
func fullest() []record {
	long := strings.Repeat("s", maxScope)
	v := Vote{
		Scope: long, Node: crdt.Replica{Name: strings.Repeat("n", maxName), Incarnation: 1<<64 - 1}, Version: 1<<64 - 1, Term: 1<<64 - 2,
		Phase: PhaseSeconded, At: Position{Gen: 1<<64 - 1, Round: 1<<32 - 1}, Wants: true, Gone: true,
		Passes: 1<<32 - 1, Failed: 1<<32 - 1, BackoffLevel: maxBackoffLevel, OpenFor: maxSpan, Cause: breaker.Cause(strings.Repeat("c", maxCause)),
	}
	return []record{
		{kind: recordState, name: long, state: State{Position: v.At, BackoffLevel: maxBackoffLevel, OpenFor: maxSpan, Cause: v.Cause}, age: maxSpan},
		{kind: recordOther, vote: v, age: maxSpan, silent: maxSpan},
		{kind: recordOwn, vote: v, age: maxSpan},
	}
}

func TestRecordBound(t *testing.T) {
	for _, r := range fullest() {
		if n := len(appendRecord(nil, &r)); n > maxRecord {
			t.Errorf("kind %d takes %d bytes, the bound is %d", r.kind, n, maxRecord)
		}
	}
	total := totalRecord{key: strings.Repeat("k", maxScope), age: maxSpan, counts: [totalKinds]uint64{1<<64 - 1, 1<<64 - 1, 1<<64 - 1}}
	if n := len(appendTotal([]byte{wireVersion}, &total)); n > 512 {
		t.Errorf("a total takes %d bytes, the documented room is 512", n)
	}
	if maxHeader+maxRecord > 2048 || 1+maxSnapshot > 1024 {
		t.Errorf("the documented rooms are too small: %d, %d", maxHeader+maxRecord, 1+maxSnapshot)
	}
}

func TestSeeds(t *testing.T) {
	small := Vote{Scope: "orders", Node: crdt.Replica{Name: "a", Incarnation: 1}, Version: 1, Phase: PhaseOpen, BackoffLevel: 3, OpenFor: 400 * ms, Cause: "run"}
	message := appendHeader(nil, 1, 42, true)
	seed(t, "FuzzMerge", "keepalive", message)
	own := record{kind: recordOwn, vote: small, age: sec}
	other := record{kind: recordOther, vote: small, age: sec, silent: 2 * sec}
	decided := record{kind: recordState, name: "orders", state: State{Position: Position{Gen: 3, Round: 2}, BackoffLevel: 2, OpenFor: 200 * ms, Cause: "probe"}, age: ms}
	all := slices.Clone(message)
	for _, r := range []record{decided, own, other} {
		all = appendRecord(all, &r)
	}
	all = appendComplete(all, 7, 1)
	seed(t, "FuzzMerge", "one-of-each", all)
	seed(t, "FuzzMerge", "cut", all[:len(all)-3])
	seed(t, "FuzzMerge", "after-the-end", append(slices.Clone(all), 1))
	full := slices.Clone(message)
	for _, r := range fullest() {
		full = appendRecord(full, &r)
	}
	seed(t, "FuzzMerge", "fullest", full)
	seed(t, "FuzzMerge", "version-2", append([]byte{2}, message[1:]...))

	calmly := appendSnapshot([]byte{wireVersion}, &snapshot{key: "orders", num: 1, Report: calm})
	seed(t, "FuzzStorm", "keepalive", []byte{wireVersion})
	seed(t, "FuzzStorm", "two", appendSnapshot(calmly, &snapshot{key: "k", num: 2, Report: inStorm}))
	seed(t, "FuzzStorm", "withdrawn", appendSnapshot([]byte{wireVersion}, &snapshot{key: "k", num: 1<<64 - 1, gone: true}))
	seed(t, "FuzzStorm", "cut", calmly[:len(calmly)-1])

	total := appendTotal([]byte{wireVersion}, &totalRecord{key: "orders", age: 250 * ms, counts: [totalKinds]uint64{7, 2, 1}})
	most := totalRecord{key: strings.Repeat("k", maxScope), age: maxSpan, counts: [totalKinds]uint64{1<<64 - 1, 1<<64 - 1, 1<<64 - 1}}
	seed(t, "FuzzTotals", "one", total)
	seed(t, "FuzzTotals", "two", appendTotal(slices.Clone(total), &most))
	seed(t, "FuzzTotals", "none", []byte{wireVersion})
	seed(t, "FuzzTotals", "cut", total[:len(total)-1])
}

// drawVotes draws votes about "orders" by some of the roster and by strangers,
// several versions each.
func drawVotes(t *rapid.T, names []string) []Vote {
	votes := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Vote {
		return Vote{
			Scope:        "orders",
			Node:         crdt.Replica{Name: rapid.SampledFrom(names).Draw(t, "node"), Incarnation: rapid.Uint64Range(1, 2).Draw(t, "incarnation")},
			Phase:        Phase(rapid.IntRange(0, int(phases)-1).Draw(t, "phase")),
			At:           Position{Gen: rapid.Uint64Range(0, 2).Draw(t, "gen"), Round: rapid.Uint32Range(0, 2).Draw(t, "round")},
			Gone:         rapid.IntRange(0, 5).Draw(t, "gone") == 0,
			Passes:       rapid.Uint32Range(0, 3).Draw(t, "passes"),
			BackoffLevel: rapid.IntRange(0, 4).Draw(t, "level"),
			Cause:        rapid.SampledFrom([]breaker.Cause{"", "rate", "run"}).Draw(t, "cause"),
		}
	}), 0, 12).Draw(t, "votes")
	for i := range votes {
		votes[i].Version = uint64(i + 1) // never twice
	}
	return votes
}

// Whatever is read is written the same way, and read as the same.
func TestWireRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		from := crdt.Replica{Name: "a", Incarnation: 3}
		var in []record
		b := appendHeader(nil, rapid.Uint64().Draw(t, "number"), rapid.Uint64().Draw(t, "digest"), rapid.Bool().Draw(t, "informed"))
		for _, v := range drawVotes(t, []string{"a", "b"}) {
			r := record{kind: recordOwn, vote: v, age: time.Duration(rapid.Int64Range(0, 1<<40).Draw(t, "age")) * time.Microsecond}
			r.vote.Term, r.vote.Failed, r.vote.Wants = rapid.Uint64Range(0, 9).Draw(t, "term"), 7, rapid.Bool().Draw(t, "wants")
			if v.Node != from {
				r.kind, r.silent = recordOther, sec
			}
			in = append(in, r)
			b = appendRecord(b, &r)
		}
		m, err := readMessage(b, from)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(m.records, in) {
			t.Fatalf("wrote %+v\nread %+v", in, m.records)
		}
		for n := range b { // a prefix is refused, or it is fewer whole records
			if p, err := readMessage(b[:n], from); err == nil && (len(p.records) >= len(in) && len(in) > 0) {
				t.Fatalf("%d of %d bytes are read as all", n, len(b))
			}
		}
	})
}

// snapshotOf is all that a process knows, to compare.
func snapshotOf(v *Verdicts, now time.Duration) string {
	var b strings.Builder
	for _, s := range v.Scopes() {
		fmt.Fprintf(&b, "%s %+v\n", s, v.Status(now, s))
	}
	fmt.Fprintf(&b, "%d %d %d %v %v", len(v.peers.m), v.votes, v.log.Mark(), v.informed, v.m.Actions(nil))
	return b.String()
}

func FuzzMerge(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		const now = 100 * sec
		self, from := crdt.Replica{Name: "x", Incarnation: 1}, crdt.Replica{Name: "a", Incarnation: 1}
		v, err := NewVerdicts(0, Config{Scopes: 8, Votes: 8}, self, Roster{Number: 9, Names: []string{"a", "x"}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := v.Adopt(now, "orders"); err != nil {
			t.Fatal(err)
		}
		v.Actions(nil)
		before := snapshotOf(v, now)
		c := crdt.Contact{From: from, Now: now, Sent: now, Echo: now}
		if err := v.Merge(c, bytes.Clone(b)); err != nil {
			if !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrRoster) {
				t.Fatalf("refused with %v", err)
			}
			if after := snapshotOf(v, now); after != before {
				t.Fatalf("refused, and yet\n%s\nbecame\n%s", before, after)
			}
			return
		}
		if len(v.Scopes()) > 8 || v.votes > 8 {
			t.Fatalf("%d scopes, %d votes", len(v.Scopes()), v.votes)
		}
		v.Actions(nil)
		once := snapshotOf(v, now)
		if err := v.Merge(c, b); err != nil {
			t.Fatalf("taken once, refused twice: %v", err)
		}
		// A second time it says nothing new, unless there was no room for it.
		if twice := snapshotOf(v, now); twice != once && v.Refused() == 0 {
			t.Fatalf("not idempotent:\n%s\n%s", once, twice)
		}
		for range 200 {
			v.Tick(now)
			v.Tick(now + 30*sec)
		}
		// What it tells others of it, others understand.
		p, _ := v.Delta(now, nil, crdt.Replica{Name: "z"}, 0, 1<<20)
		if _, err := readMessage(p, self); err != nil {
			t.Fatal(err)
		}
		for since, room := uint64(0), 2048; ; {
			p, upto := v.Delta(now, nil, crdt.Replica{Name: "z"}, since, room)
			if len(p) > room {
				t.Fatalf("%d bytes in a room of %d", len(p), room)
			}
			if upto == since {
				break
			}
			since = upto
			if since > v.log.Mark() {
				t.Fatalf("complete up to %d of %d", since, v.log.Mark())
			}
			v.log.met[crdt.Replica{Name: "z"}] = v.log.Mark()
		}
	})
}

func FuzzStorm(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := NewStorms(StormConfig{Keys: 4}, crdt.Replica{Name: "x", Incarnation: 1})
		if err != nil {
			t.Fatal(err)
		}
		c := crdt.Contact{From: crdt.Replica{Name: "y", Incarnation: 1}, Now: sec, Sent: sec, Echo: sec}
		if err := s.Merge(c, b); err != nil {
			if !errors.Is(err, ErrMalformed) || len(s.peers.m)+len(s.others) != 0 {
				t.Fatalf("refused with %v, and %d peers", err, len(s.peers.m))
			}
			return
		}
		if len(s.others["y"]) > 4 {
			t.Fatalf("%d keys", len(s.others["y"]))
		}
		all, err := readSnapshots(b)
		if err != nil {
			t.Fatal(err)
		}
		again := []byte{wireVersion}
		for _, o := range all {
			again = appendSnapshot(again, o)
		}
		if other, err := readSnapshots(again); err != nil || len(other) != len(all) {
			t.Fatalf("%d snapshots written are %d read: %v", len(all), len(other), err)
		} else {
			for i := range other {
				if *other[i] != *all[i] {
					t.Fatalf("%+v became %+v", *all[i], *other[i])
				}
			}
		}
	})
}
