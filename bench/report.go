// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// A Report is what a group found.
type Report struct {
	Group   string
	Results []Result // in the order of the group's cases
	Ratios  []RatioResult
	Rounds  *Rounds // nil where all rounds count
}

// Rounds is how many rounds were asked for, were taken, and counted; and the
// ratio that decides it, over all that were taken.
type Rounds struct {
	Asked     int     `json:"asked"`
	Counted   int     `json:"counted"`
	Taken     int     `json:"taken"`
	Yardstick string  `json:"yardstick"`
	Within    float64 `json:"-"` // infinity is no JSON
	Median    float64 `json:"median"`
	Min       float64 `json:"min"`
	Max       float64 `json:"max"`
}

// A Result is one case: medians over the rounds.
type Result struct {
	Name        string  `json:"name"`
	NsPerOp     float64 `json:"ns_per_op"`
	AllocsPerOp float64 `json:"allocs_per_op"`
	CPUNsPerOp  float64 `json:"cpu_ns_per_op"`
}

// A RatioResult is a ratio's median over the rounds, and how far they differ.
type RatioResult struct {
	Ratio

	Median, Min, Max float64
}

type ratioRange struct {
	Min float64 `json:"min"`
	Max float64 `json:"max"`
}

// WriteJSON writes one object on one line. Names of cases and ratios are keys
// that scripts read: changing one breaks them.
func (r Report) WriteJSON(w io.Writer) error {
	object := struct {
		Group   string                `json:"group"`
		Results []Result              `json:"results"`
		Ratios  map[string]float64    `json:"ratios"`
		Ranges  map[string]ratioRange `json:"ratio_ranges"`
		Rounds  *Rounds               `json:"rounds,omitempty"`
	}{
		Group:   r.Group,
		Results: append([]Result{}, r.Results...), // an empty list is [], not null
		Ratios:  map[string]float64{},
		Ranges:  map[string]ratioRange{},
		Rounds:  r.Rounds,
	}
	for _, x := range r.Ratios {
		object.Ratios[x.Name] = x.Median
		object.Ranges[x.Name] = ratioRange{x.Min, x.Max}
	}
	return json.NewEncoder(w).Encode(object)
}

// WriteTable writes the report for people.
func (r Report) WriteTable(w io.Writer) error {
	var s strings.Builder
	tw := tabwriter.NewWriter(&s, 0, 0, 3, ' ', 0)
	fmt.Fprintf(tw, "%s\tns/op\tcpu ns/op\tallocs/op\n", r.Group)
	for _, c := range r.Results {
		fmt.Fprintf(tw, "%s\t%.1f\t%.1f\t%.2f\n", c.Name, c.NsPerOp, c.CPUNsPerOp, c.AllocsPerOp)
	}
	if len(r.Ratios) > 0 {
		// A line without cells ends the first table's columns.
		fmt.Fprint(tw, "\nratio\tmedian [min..max]\n")
	}
	for _, x := range r.Ratios {
		fmt.Fprintf(tw, "%s\t%.3f [%.3f..%.3f]\t%s is better\n", x.Name, x.Median, x.Min, x.Max, x.says())
	}
	if r.Rounds != nil {
		fmt.Fprintf(tw, "\n%d of %d rounds count: %s within %g of 1. Over all rounds it is %.3f [%.3f..%.3f]\n",
			r.Rounds.Counted, r.Rounds.Taken, r.Rounds.Yardstick, r.Rounds.Within, r.Rounds.Median, r.Rounds.Min, r.Rounds.Max)
		if r.Rounds.Counted < r.Rounds.Asked {
			fmt.Fprintf(tw, "NOT ENOUGH: %d were asked for; the machine is too busy\n", r.Rounds.Asked)
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, s.String())
	return err
}

// says what a ratio is of, and which way is better.
func (r Ratio) says() string {
	switch r.Kind {
	case Throughput:
		return fmt.Sprintf("throughput of %s over %s, higher", r.Ours, r.Theirs)
	case CPU:
		return fmt.Sprintf("processor time of %s over %s, lower", r.Ours, r.Theirs)
	case Millis:
		return fmt.Sprintf("ms of %s, lower", r.Ours)
	case PerSecond:
		return fmt.Sprintf("operations a second of %s, higher", r.Ours)
	default:
		return fmt.Sprintf("time of %s over %s, lower", r.Ours, r.Theirs)
	}
}
