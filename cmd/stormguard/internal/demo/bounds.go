// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import "math"

// A Bound is a promise about the guarded run, and says whether the run kept it. The
// limits fit the demo's default rate and outage. In an outage of a second or two the
// few calls that detect it are more than 1 %.
type Bound struct {
	Name  string  `json:"name"` // a JSON name of Figures, or "calls_percent"
	Limit float64 `json:"limit"`
	Value float64 `json:"value"`
	Kept  bool    `json:"kept"`
}

// bounds judges the guarded run. The guard tells an error of the connection from a
// poison message at once. An error of unknown class takes evidence, and so time. Then
// the limit of contain_seconds is higher, and three bounds do not apply.
func bounds(errors Failure, unguarded, guarded Figures) []Bound {
	percent := 0.0
	if unguarded.CallsDuringOutage > 0 {
		percent = math.Round(100_000*float64(guarded.CallsDuringOutage)/float64(unguarded.CallsDuringOutage)) / 1000
	} else if guarded.CallsDuringOutage > 0 {
		percent = 100
	}
	out := []Bound{
		{Name: "dead_letters", Limit: 5, Value: float64(guarded.DeadLetters)},
		{Name: "calls_percent", Limit: 1, Value: percent},
		{Name: "contain_seconds", Limit: 1, Value: guarded.Contain},
	}
	if errors == Unknown {
		out[2].Limit = 15
	} else {
		out = append(out,
			Bound{Name: "lost", Value: float64(guarded.Lost)},
			Bound{Name: "duplicates", Value: float64(guarded.Duplicates)},
			Bound{Name: "out_of_order", Value: float64(guarded.OutOfOrder)})
	}
	for i := range out {
		out[i].Kept = out[i].Value <= out[i].Limit
	}
	return out
}
