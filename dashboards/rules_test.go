// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

const promtoolRemedy = "install Prometheus (Debian: prometheus)"

// minutes is how long something is wrong in an alert's test, and then well again.
const minutes = 40

// unit is a test of promtool.
type unit struct {
	Interval    string         `yaml:"interval"`
	InputSeries []inputSeries  `yaml:"input_series"`
	Tests       []exprExpected `yaml:"promql_expr_test"`
}

type inputSeries struct {
	Series string `yaml:"series"`
	Values string `yaml:"values"`
}

type exprExpected struct {
	Expr     string           `yaml:"expr"`
	EvalTime string           `yaml:"eval_time"`
	Samples  []expectedSample `yaml:"exp_samples"`
}

type expectedSample struct {
	Labels string  `yaml:"labels"`
	Value  float64 `yaml:"value"`
}

// units are the tests of an alert: it fires while something is wrong, not before it has
// been so for its time, and no longer when all is well; and it never fires when all is.
func (a alert) units(t *testing.T) []unit {
	t.Helper()
	firing := func(at time.Duration, yes bool) exprExpected {
		e := exprExpected{Expr: fmt.Sprintf(`count(ALERTS{alertname=%q, alertstate="firing"})`, a.name), EvalTime: at.String()}
		if yes {
			e.Samples = []expectedSample{{"{}", 1}}
		}
		return e
	}
	wrong := unit{Interval: "1m", Tests: []exprExpected{firing(minutes*time.Minute, true), firing(2*minutes*time.Minute, false)}}
	if a.lasts != "" {
		lasts, err := time.ParseDuration(a.lasts)
		if err != nil {
			t.Fatal(err)
		}
		wrong.Tests = append(wrong.Tests, firing(lasts/2, false))
	}
	well := unit{Interval: "1m", Tests: []exprExpected{firing(minutes*time.Minute, false)}}
	for _, s := range a.tests {
		good := s.good
		if good == "" {
			good = last(t, s.bad)
		}
		wrong.InputSeries = append(wrong.InputSeries, inputSeries{s.series, times(s.bad) + " " + times(good)})
		well.InputSeries = append(well.InputSeries, inputSeries{s.series, times(good)})
	}
	return []unit{wrong, well}
}

// times repeats a sample for minutes.
func times(sample string) string { return sample + "x" + strconv.Itoa(minutes) }

// last is the value that a rising sample ends with.
func last(t *testing.T, sample string) string {
	t.Helper()
	from, by, _ := strings.Cut(sample, "+")
	a, err := strconv.Atoi(from)
	if err != nil {
		t.Fatal(err)
	}
	b, err := strconv.Atoi(by)
	if err != nil {
		t.Fatal(err)
	}
	return strconv.Itoa(a + b*minutes)
}

// The heat map of the storm has a line for each partition of each group, also where two groups
// read one topic or a partition has moved to another process.
func TestHeatMap(t *testing.T) {
	need(t, "promtool", promtoolRemedy)
	check := unit{Interval: "1m", Tests: []exprExpected{{Expr: stat1(t, overview, "Age of the oldest message"), EvalTime: "10m"}}}
	for i, group := range []string{"audit", "billing"} {
		for partition := range 2 {
			labels := fmt.Sprintf(`{messaging_consumer_group_name=%q, stormguard_source="orders/%d"}`, group, partition)
			age := 100*i + 10*partition + 1
			check.Tests[0].Samples = append(check.Tests[0].Samples, expectedSample{labels, float64(age)})
			for _, at := range []string{"a", "b"} {
				series := fmt.Sprintf(`stormguard_hold_age_seconds{instance=%q, messaging_destination_name="orders", %s`, at, labels[1:])
				check.InputSeries = append(check.InputSeries, inputSeries{series, times(strconv.Itoa(age))})
				age--
			}
		}
	}
	promtool(t, check)
}

// promtool runs unit tests.
func promtool(t *testing.T, units ...unit) {
	t.Helper()
	rules, err := filepath.Abs(filepath.Join("prometheus", "stormguard.rules.yml"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := yaml.Marshal(map[string]any{"rule_files": []string{rules}, "evaluation_interval": "1m", "tests": units})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "test.yml")
	write(t, file, string(text))
	run(t, ".", "promtool", "test", "rules", file)
}

func TestAlerts(t *testing.T) {
	need(t, "promtool", promtoolRemedy)
	rules, err := filepath.Abs(filepath.Join("prometheus", "stormguard.rules.yml"))
	if err != nil {
		t.Fatal(err)
	}
	run(t, ".", "promtool", "check", "rules", rules)
	page, err := os.ReadFile(filepath.Join("..", "docs", "alerts.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range alerts {
		t.Run(a.name, func(t *testing.T) {
			if a.means == "" || a.do == "" || a.summary == "" || !strings.Contains(string(page), "\n## "+a.name+"\n") {
				t.Errorf("%+v is not explained", a)
			}
			promtool(t, a.units(t)...)
		})
	}
}
