// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// What a rule is written as is read as the same rule; what is none is refused.
func TestRule(t *testing.T) {
	for text, want := range map[string]Rule{
		"key=order-17":              {Kind: RuleKey, Value: "order-17"},
		"key=a=b:c":                 {Kind: RuleKey, Value: "a=b:c"},
		"header:tenant=acme":        {Kind: RuleHeader, Header: "tenant", Value: "acme"},
		"header:tenant=":            {Kind: RuleHeader, Header: "tenant"},
		"header:x:y=z=":             {Kind: RuleHeader, Header: "x:y", Value: "z="},
		"cause=v2:32c3a1eebe9e4b6b": {Kind: RuleCause, Value: "v2:32c3a1eebe9e4b6b"},
	} {
		got, err := ParseRule(text)
		if err != nil || got != want || got.String() != text {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "key", "key=", "tenant=acme", "header=acme", "header:=acme", "key:x=y", "cause=", "key=" + strings.Repeat("k", 257)} {
		if r, err := ParseRule(text); !errors.Is(err, ErrQuarantine) {
			t.Errorf("%s: %+v, %v", text, r, err)
		}
	}
	for _, r := range []Rule{{}, {Kind: RuleKey, Header: "x", Value: "y"}, {Kind: RuleHeader, Header: "a=b", Value: "c"}} {
		if err := r.Validate(); !errors.Is(err, ErrQuarantine) {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

// The list of one process: entries end, are replaced and removed, and watchers hear.
func TestQuarantine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQuarantine(time.Now)
		heard := 0
		stop := q.Watch(func() { heard++ })
		rule := func(n int) Rule { return Rule{Kind: RuleKey, Value: fmt.Sprint(n)} }
		add := func(e QuarantineEntry) {
			t.Helper()
			if err := q.Add(e); err != nil {
				t.Fatal(err)
			}
		}
		add(QuarantineEntry{Rule: rule(1), Until: time.Now().Add(time.Hour)})
		time.Sleep(time.Minute)
		add(QuarantineEntry{Rule: rule(2), By: "ann", Why: "why"})
		add(QuarantineEntry{Rule: rule(3)})
		if err := q.Remove(rule(3), ""); err != nil {
			t.Fatal(err)
		}
		if err := q.Remove(Rule{}, ""); !errors.Is(err, ErrQuarantine) {
			t.Error(err)
		}
		in := q.Entries()
		if len(in) != 2 || in[0].Rule != rule(1) || in[1].Why != "why" || in[1].Until.Sub(in[1].At) != 24*time.Hour || heard != 4 {
			t.Errorf("%+v, heard of %d", in, heard)
		}
		stop()
		time.Sleep(59 * time.Minute)
		if in := q.Entries(); len(in) != 1 || in[0].Rule != rule(2) || heard != 4 {
			t.Errorf("%+v", in)
		}
		for n := range MaxQuarantine - 1 { // rule 1, which has ended, makes room
			add(QuarantineEntry{Rule: rule(10 + n)})
		}
		err := q.Add(QuarantineEntry{Rule: rule(3)})
		if !errors.Is(err, ErrQuarantine) || !strings.Contains(err.Error(), "10000 entries") || len(q.Entries()) != MaxQuarantine {
			t.Error(err)
		}
		add(QuarantineEntry{Rule: rule(2)})
		if err := q.Add(QuarantineEntry{Rule: rule(2), By: strings.Repeat("x", 65), Until: time.Now()}); err == nil || strings.Count(err.Error(), ErrQuarantine.Error()) != 2 {
			t.Errorf("not both: %v", err)
		}
	})
}
