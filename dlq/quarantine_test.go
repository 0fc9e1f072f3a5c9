// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"errors"
	"strings"
	"testing"
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
