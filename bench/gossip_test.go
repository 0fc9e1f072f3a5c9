// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// A small run over real processes: its figures mean little, but all must arrive,
// and the figures must be there.
func TestGossip(t *testing.T) {
	b := gossipBench{perSecond: 1000, time: 300 * time.Millisecond}
	got, err := b.measure(t.Context(), Settings{Rounds: 1})
	if err != nil {
		t.Fatal(err)
	}
	var out, table bytes.Buffer
	if err := got.WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	if err := got.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	var report struct {
		Group string
		Rows  []map[string]any
	}
	if err := json.Unmarshal(out.Bytes(), &report); err != nil || report.Group != "gossip" || len(report.Rows) != len(gossipCases) {
		t.Fatalf("%v in %s", err, out.String())
	}
	for i, row := range report.Rows {
		name := gossipCases[i].name
		if row["case"] != name || !strings.Contains(table.String(), name) {
			t.Errorf("%s is not in its place: %v", name, row)
		}
		figure := func(name string) float64 { f, _ := row[name].(float64); return f }
		if p50, p99 := figure("p50_ms"), figure("p99_ms"); p50 <= 0 || p99 < p50 || figure("max_ms") < p99 {
			t.Errorf("%s: %v", name, row)
		}
		if figure("missing") != 0 || figure("decisions_per_s") <= 0 {
			t.Errorf("%s: %v", name, row)
		}
		if ours := !strings.HasPrefix(name, "memberlist"); ours && (figure("acked_p99_ms_at_most") <= 0 || figure("packets_per_s") <= 0 || figure("denied") != 0) {
			t.Errorf("%s: %v", name, row)
		}
	}
}

// The delay of a version is from its birth to the first arrival of it or of a later
// one, and what never arrives is missed.
func TestGossipRow(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	b := gossipBench{perSecond: 4, time: time.Second}
	row, err := b.row(map[string]gossipResult{
		"a": {Born: []time.Duration{0, 10 * ms, 20 * ms, 90 * ms}},
		"b": {Arrived: map[string][]arrival{"a": {{1, 5 * ms}, {3, 21 * ms}}}, CPU: time.Second},
	})
	if err != nil {
		t.Fatal(err)
	}
	if row.P50 != 5 || row.Max != 11 || row.Missing != 1 || row.CPU != .5 || row.PerSecond != 2 {
		t.Errorf("%+v; want delays of 5, 11 and 1 ms, and one version missed", row)
	}
	if _, err := b.row(map[string]gossipResult{"a": {}, "b": {Arrived: map[string][]arrival{"a": {{1, 0}}}}}); err == nil {
		t.Error("a version that never was came")
	}
	if _, err := b.row(map[string]gossipResult{"a": {}, "b": {}}); err == nil {
		t.Error("nothing came")
	}
	h := gossip.Histogram{Count: 100}
	h.Bucket[0], h.Bucket[2], h.Bucket[len(h.Bucket)-1] = 50, 48, 2
	if p50, p98, p99 := atMost(h, .5), atMost(h, .98), atMost(h, .99); p50 != 1 || p98 != 3 || p99 != -1 {
		t.Errorf("%v %v %v", p50, p98, p99)
	}
}

// What the limiter's cases measure is a fleet's: the others are told what was
// spent, and metrics are read.
func TestLiveLimit(t *testing.T) {
	var f liveFleet
	one, err := f.handle(1)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	two, err := f.keyed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []Runner{one, two} {
		if err := r.Do(context.WithoutCancel(t.Context()), 10_000); err != nil {
			t.Fatal(err)
		}
	}
	self := func() fleet.Member {
		for _, m := range f.p.Status().Members {
			if m.State == "self" {
				return m
			}
		}
		return fleet.Member{}
	}
	keys := self().Keys
	i := slices.IndexFunc(keys, func(k fleet.Key) bool { return k.Key == "handle" })
	if i < 0 || keys[i].Admitted == 0 || keys[i].Cap > float64(open.Burst)/3 {
		t.Errorf("not a third of a fleet's: %+v", keys)
	}
	if s := self().Share; s < .33 || s > .34 || f.p.Status().Stranded != 0 {
		t.Errorf("share %v, stranded %v", s, f.p.Status().Stranded)
	}
	err = meet(func() bool {
		others := 0
		for _, m := range f.p.Status().Members {
			if m.State == "fresh" {
				others++
			}
		}
		return others == len(memberNames)-1 && self().Unacked == 0
	})
	if err != nil {
		t.Error("the others have not acknowledged what was spent")
	}
	var names []string
	for _, s := range f.found.ScopeMetrics {
		for _, m := range s.Metrics {
			names = append(names, m.Name)
		}
	}
	if !slices.Contains(names, "stormguard.limiter.tokens") || !slices.Contains(names, "stormguard.fleet.packets") {
		t.Errorf("metrics read: %v", names)
	}
	if err := one.Close(); err != nil || f.p == nil {
		t.Fatal("it ended with the first of its cases:", err)
	}
	if err := two.Close(); err != nil || f.p != nil {
		t.Error("it has not ended:", err)
	}
}
