// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"math"
	"strings"
	"testing"
	"time"
)

func TestStormConfigValidate(t *testing.T) {
	bad := StormConfig{
		ErrorRate: 1, Attempts: -1, Age: -time.Second, Window: time.Millisecond,
		MinSample: -20, ClearRate: -1, ClearFor: 2 * time.Hour,
	}
	tests := []struct {
		name string
		c    StormConfig
		want []string
	}{
		{"zero", StormConfig{}, nil},
		{"defaults spelled out", StormConfig{ErrorRate: 0.05, Attempts: 3, Age: time.Minute, Window: time.Minute, MinSample: 20, ClearRate: 0.025, ClearFor: 10 * time.Second}, nil},
		{"no hysteresis in the rate", StormConfig{ErrorRate: 0.3, ClearRate: 0.3}, nil},
		{"off is still checked", StormConfig{Off: true, Attempts: -1}, []string{"Attempts is -1: must be in [1, 1000000]"}},
		{"clear rate above", StormConfig{ClearRate: 0.06}, []string{"ClearRate is 0.06: must be in (0, 0.05], the upper end being ErrorRate"}},
		{"clear rate NaN", StormConfig{ClearRate: math.NaN()}, []string{"ClearRate is NaN"}},
		{"error rate NaN", StormConfig{ErrorRate: math.NaN()}, []string{"ErrorRate is NaN: must be in (0, 1)"}},
		{"error rate negative", StormConfig{ErrorRate: -0.1}, []string{"ErrorRate is -0.1: must be in (0, 1)"}},
		{"all at once", bad, []string{
			"ErrorRate is 1", "Attempts is -1", "Age is -1s: must be in [1ms, 24h]", "Window is 1ms: must be in [60ms, 1h]",
			"MinSample is -20", "ClearFor is 2h0m0s: must be in [1ms, 1h]",
		}},
	}
	for _, tt := range tests {
		checkProblems(t, tt.name, tt.c.Validate(), tt.want)
	}
}

func TestBudgetConfigValidate(t *testing.T) {
	tests := []struct {
		name  string
		c     BudgetConfig
		storm float64
		want  []string
	}{
		{"zero", BudgetConfig{}, 0, nil},
		{"zero at the default storm rate", BudgetConfig{}, defaultErrorRate, nil},
		{"highest storm rate of the defaults", BudgetConfig{}, 0.0909, nil},
		{"off is still checked", BudgetConfig{Off: true, FreeEvery: -1}, 0, []string{"FreeEvery is -1ns: must be in [1s, 8760h]"}},
		{"defaults under a storm rate too high", BudgetConfig{}, 0.1, []string{
			"Earn is 0.1: with 0.1 of the deliveries failing, the storm threshold, successes earn 0.09 credits a delivery and dead letters cost 0.1: must be above 0.111111",
		}},
		{"both classes", BudgetConfig{}, 0.4, []string{"Earn is 0.1", "PermanentEarn is 0.5: with 0.4 of the deliveries failing, the storm threshold, successes earn 0.3 credits"}},
		{"earning exactly the cost", BudgetConfig{Earn: 1, PermanentEarn: 1}, 0.5, []string{"Earn is 1", "PermanentEarn is 1"}},
		{"earning more", BudgetConfig{Earn: 1, PermanentEarn: 1}, 0.49, nil},
		{"a storm rate that is none", BudgetConfig{}, 1, []string{"storm rate is 1: must be in (0, 1)"}},
		{"a storm rate that is no number", BudgetConfig{}, math.NaN(), []string{"storm rate is NaN"}},
		{"all at once", BudgetConfig{Earn: 1.5, Balance: 0.5, FreeEvery: time.Millisecond, PermanentEarn: -1, PermanentBalance: math.Inf(1)}, 0, []string{
			"Earn is 1.5: must be in [0.000001, 1]", "Balance is 0.5: must be in [1, 1000000]", "FreeEvery is 1ms",
			"PermanentEarn is -1", "PermanentBalance is +Inf",
		}},
		{"no number", BudgetConfig{Earn: math.NaN(), Balance: math.NaN()}, 0, []string{"Earn is NaN", "Balance is NaN"}},
	}
	for _, tt := range tests {
		checkProblems(t, tt.name, tt.c.Validate(tt.storm), tt.want)
	}
}

// checkProblems wants one line for each of want, in order, and no other.
func checkProblems(t *testing.T, name string, err error, want []string) {
	t.Helper()
	var lines []string
	if err != nil {
		lines = strings.Split(err.Error(), "\n")
	}
	if len(lines) != len(want) {
		t.Errorf("%s: got %d problems, want %d: %v", name, len(lines), len(want), err)
		return
	}
	for i, l := range lines {
		if !strings.HasPrefix(l, "dlq: ") || !strings.Contains(l, want[i]) {
			t.Errorf("%s: got %q, want %q", name, l, want[i])
		}
	}
}

func TestStormString(t *testing.T) {
	defaults := StormConfig{}.WithDefaults()
	tests := []struct {
		s    Storm
		want string
	}{
		{
			Storm{Active: true, Since: 61 * time.Second, Failed: 20, Outcomes: 20, Basis: "trip", Attempts: 9, Age: 61 * time.Second, Diverted: 5980, Config: defaults},
			"storm: error rate 100% (20 of 20, trip) > 5%, attempts 9 > 3, age 1m1s > 1m0s, 5980 diverted in 1m0s",
		},
		{
			Storm{Config: StormConfig{ErrorRate: 0.07, MinSample: 7}.WithDefaults()},
			"no storm: error rate unknown (under 7 outcomes), attempts 0 <= 3, age 0s <= 1m0s",
		},
		{
			Storm{Failed: 1, Outcomes: 3, Basis: "kept", Config: defaults},
			"no storm: error rate 33.333% (1 of 3, kept) > 5%, attempts 0 <= 3, age 0s <= 1m0s",
		},
	}
	for _, tt := range tests {
		if got := tt.s.String(); got != tt.want {
			t.Errorf("got  %s\nwant %s", got, tt.want)
		}
	}
}
