// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

func TestZeroConfigIsValid(t *testing.T) {
	if err := (breaker.Config{}).Validate(); err != nil {
		t.Fatal(err)
	}
	want := breaker.Config{
		Window: time.Minute, Ratio: 0.05, Z: 3, MinSample: 20, Run: 5, Base: 100 * ms, Cap: 30 * sec,
		Memory: time.Minute, Successes: 10, Probes: 1, Lease: time.Minute, Slow: 10 * sec,
	}
	if got := must(t, breaker.Config{}).Config(); got != want {
		t.Fatalf("defaults %+v", got)
	}
	if got := must(t, breaker.Config{}).Name(); got != "scope" {
		t.Fatal(got)
	}
}

func TestValidateReportsEverything(t *testing.T) {
	nan := math.NaN()
	for _, c := range []struct {
		cfg    breaker.Config
		fields string
	}{
		{breaker.Config{Window: -1, Ratio: nan, Z: nan, MinSample: -1, Run: 1, Base: -1, Cap: -1, Jitter: nan, Memory: -1,
			Successes: -1, Probes: -1, Lease: -1, Slow: -1},
			"Window Ratio Z MinSample Run Base Cap Jitter Memory Successes Probes Lease Slow"},
		{breaker.Config{Plain: true, Z: 1, NoRun: true, Run: 5}, "Z Run"},
		{breaker.Config{Window: 2 * time.Hour, Ratio: 1, Z: 11, MinSample: 2e6, Run: 2e6, Base: 2 * time.Hour, Cap: 25 * time.Hour,
			Jitter: 0.6, Memory: 25 * time.Hour, Successes: 1001, Probes: 65, Lease: 25 * time.Hour, Slow: 2 * time.Hour},
			"Window Ratio Z MinSample Run Base Cap Jitter Memory Successes Probes Lease Slow"},
		{breaker.Config{Base: sec, Cap: ms}, "Cap"},
		{breaker.Config{Slow: 59 * sec}, "Slow"},
		{breaker.Config{Slow: 59*sec - 1}, ""},
		{breaker.Config{Window: 2 * sec}, ""},
		{breaker.Config{Base: time.Minute}, ""},
	} {
		_, err := New("x", c.cfg)
		if c.fields == "" {
			if err != nil {
				t.Errorf("%+v: %v", c.cfg, err)
			}
			continue
		}
		if err == nil {
			t.Errorf("%+v: not refused", c.cfg)
			continue
		}
		lines := strings.Split(err.Error(), "\n")
		fields := strings.Fields(c.fields)
		if len(lines) != len(fields) {
			t.Errorf("%+v: %d complaints, want %d:\n%v", c.cfg, len(lines), len(fields), err)
			continue
		}
		for i, f := range fields {
			if !strings.HasPrefix(lines[i], "breaker: config: "+f+": ") || !strings.Contains(lines[i], " is not in ") {
				t.Errorf("complaint %d is %q, want one on %s", i, lines[i], f)
			}
		}
	}
	if _, err := NewScopes(ScopesConfig{Quorum: nan, MinOpen: 1, Limit: -1, Breaker: breaker.Config{Run: 1}}); err == nil ||
		strings.Count(err.Error(), "breaker: config: ") != 4 {
		t.Errorf("scopes: %v", err)
	}
}

func TestStateString(t *testing.T) {
	for s, want := range map[breaker.State]string{breaker.Closed: "closed", breaker.Open: "open", breaker.HalfOpen: "half-open", 9: "state(9)"} {
		if got := s.String(); got != want {
			t.Errorf("%d: %q", s, got)
		}
	}
}
