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
}

// A Result is one case: medians over the rounds.
type Result struct {
	Name        string  `json:"name"`
	NsPerOp     float64 `json:"ns_per_op"`
	AllocsPerOp float64 `json:"allocs_per_op"`
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
	}{
		Group:   r.Group,
		Results: append([]Result{}, r.Results...), // an empty list is [], not null
		Ratios:  map[string]float64{},
		Ranges:  map[string]ratioRange{},
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
	fmt.Fprintf(tw, "%s\tns/op\tallocs/op\n", r.Group)
	for _, c := range r.Results {
		fmt.Fprintf(tw, "%s\t%.1f\t%.2f\n", c.Name, c.NsPerOp, c.AllocsPerOp)
	}
	if len(r.Ratios) > 0 {
		// A line without cells ends the first table's columns.
		fmt.Fprint(tw, "\nratio\tmedian [min..max]\n")
	}
	for _, x := range r.Ratios {
		of, better := "time", "lower"
		if x.Kind == Throughput {
			of, better = "throughput", "higher"
		}
		fmt.Fprintf(tw, "%s\t%.3f [%.3f..%.3f]\t%s of %s over %s, %s is better\n",
			x.Name, x.Median, x.Min, x.Max, of, x.Ours, x.Theirs, better)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, s.String())
	return err
}
