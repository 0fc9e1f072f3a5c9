// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// A small run: its figures mean little, but who is hit must be right.
func TestScopes(t *testing.T) {
	t.Parallel()
	b := scopesBench{rate: 50, warmUp: 500 * time.Millisecond, outage: 3 * time.Second, patience: 10 * time.Second}
	got, err := b.measure(t.Context(), Settings{Rounds: 1})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := got.WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	var report struct {
		Group string     `json:"group"`
		Rows  []ScopeRow `json:"rows"`
	}
	if err := json.Unmarshal(out.Bytes(), &report); err != nil || report.Group != "scopes" {
		t.Fatalf("%v in %s", err, out.String())
	}
	rows := make(map[string]ScopeRow)
	for _, r := range report.Rows {
		rows[r.Order+" "+r.Fault+" "+r.Scope] = r
		if r.HealthyKept > 1 || (r.HealthyKept < 0) != (r.Fault == "everything") {
			t.Errorf("healthy kept: %+v", r)
		}
		if r.CallsPerSecond <= 0 {
			t.Errorf("nothing called the broken part: %+v", r)
		}
		if r.Scope == "no_guard" && r.ContainedMs >= 0 {
			t.Errorf("contained by nobody: %+v", r)
		}
	}
	if want := len(scopeOrders) * len(scopeFaults) * len(scopeChoices); len(rows) != want || len(report.Rows) != want {
		t.Fatalf("%d rows, %d of them different, want %d", len(report.Rows), len(rows), want)
	}
	for _, order := range []string{"source", "key"} {
		at := func(fault, scope string) ScopeRow { return rows[order+" "+fault+" "+scope] }
		for _, r := range []ScopeRow{
			at("one_partition", "partition"), at("one_topic", "partition"), at("one_topic", "topic"), at("everything", "partition"),
			at("everything", "topic"), at("everything", "group"),
		} {
			if r.ContainedMs < 0 || r.Fault == "everything" && (r.CallsPerSecond > at(r.Fault, "no_guard").CallsPerSecond || r.Dead > 0) {
				t.Errorf("not contained: %+v", r)
			}
		}
		// A breaker for the group throttles what is broken and carries the healthy topics.
		if kept := at("one_topic", "group").HealthyKept; kept < 0.5 {
			t.Errorf("a breaker for the group kept %v of the healthy topics", kept)
		}
		if all, each := at("everything", "group").CallsPerSecond, at("everything", "partition_quorum1").CallsPerSecond; all >= each {
			t.Errorf("order %s: one breaker let %v calls a second through, sixteen did %v", order, all, each)
		}
		if at("everything", "no_guard").Dead == 0 {
			t.Error("nothing became a dead letter without a guard")
		}
	}
	var table strings.Builder
	if err := got.WriteTable(&table); err != nil || strings.Count(table.String(), "partition_quorum1") != len(scopeOrders)*len(scopeFaults) {
		t.Errorf("%v in\n%s", err, table.String())
	}
}
