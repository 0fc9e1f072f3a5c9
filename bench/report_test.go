// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"strings"
	"testing"
)

var madeUpReport = Report{
	Group:   "hotpath",
	Results: []Result{{"ours", 60.5, 0.03, 58}, {"theirs", 1099, 17, 2000}},
	Ratios: []RatioResult{
		{Ratio: Ratio{Name: "chain", Kind: Time, Ours: "ours", Theirs: "theirs"}, Median: 0.048, Min: 0.029, Max: 0.06},
		{Ratio: Ratio{Name: "router", Kind: Throughput, Ours: "ours", Theirs: "theirs"}, Median: 18, Min: 17, Max: 20},
	},
}

func TestJSON(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		report Report
		want   string
	}{
		{"full", madeUpReport, `{"group":"hotpath",` +
			`"results":[{"name":"ours","ns_per_op":60.5,"allocs_per_op":0.03,"cpu_ns_per_op":58},{"name":"theirs","ns_per_op":1099,"allocs_per_op":17,"cpu_ns_per_op":2000}],` +
			`"ratios":{"chain":0.048,"router":18},` +
			`"ratio_ranges":{"chain":{"min":0.029,"max":0.06},"router":{"min":17,"max":20}}}` + "\n"},
		{"empty", Report{Group: "none"}, `{"group":"none","results":[],"ratios":{},"ratio_ranges":{}}` + "\n"},
	} {
		var out bytes.Buffer
		if err := tt.report.WriteJSON(&out); err != nil {
			t.Fatal(err)
		}
		if out.String() != tt.want {
			t.Errorf("%s:\n%swant\n%s", tt.name, out.String(), tt.want)
		}
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	if err := madeUpReport.WriteTable(&out); err != nil {
		t.Fatal(err)
	}
	want := `hotpath   ns/op    cpu ns/op   allocs/op
ours      60.5     58.0        0.03
theirs    1099.0   2000.0      17.00

ratio    median [min..max]
chain    0.048 [0.029..0.060]      time of ours over theirs, lower is better
router   18.000 [17.000..20.000]   throughput of ours over theirs, higher is better
`
	if out.String() != want {
		t.Errorf("table:\n%s\nwant:\n%s", out.String(), want)
	}
}

// What a script that calls the program relies on: one object on stdout,
// wherever the flags stand.
func TestCommandLine(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"noise", "--json", "--rounds", "2", "--time", "1ms"},
		{"--json", "--rounds=2", "noise", "-time=1ms"},
	} {
		var out bytes.Buffer
		if err := run(t.Context(), args, &out, io.Discard); err != nil {
			t.Fatalf("%q: %v", args, err)
		}
		var got struct {
			Group   string             `json:"group"`
			Results []Result           `json:"results"`
			Ratios  map[string]float64 `json:"ratios"`
		}
		dec := json.NewDecoder(&out)
		if err := dec.Decode(&got); err != nil {
			t.Fatalf("%q: %v", args, err)
		}
		if dec.More() {
			t.Errorf("%q: more than one object", args)
		}
		if got.Group != "noise" || len(got.Results) != 2 || got.Ratios["chain"] <= 0 || got.Ratios["throughput"] <= 0 {
			t.Errorf("%q: %+v", args, got)
		}
	}
}

func TestCommandLineMistakes(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		nil, {"nope"}, {"noise", "noise"}, {"noise", "--rounds", "-1"}, {"noise", "--time", "0s"}, {"--nope", "noise"},
	} {
		err := run(t.Context(), args, io.Discard, io.Discard)
		if !errors.As(err, new(usageError)) {
			t.Errorf("%q: error %v, want a usage error", args, err)
		}
	}
	if err := run(t.Context(), []string{"--help"}, io.Discard, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("--help: error %v, want flag.ErrHelp", err)
	}
}
