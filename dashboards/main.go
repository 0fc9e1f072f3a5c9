// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command dashboards writes the Grafana dashboards, the Prometheus rules and their page of
// docs. The files are committed, and a test compares them.
//
//	go run .
//
// The names of metrics and labels are those of an OpenTelemetry exporter for Prometheus:
// dots become underscores, counters end with _total, seconds with _seconds.
package main

import (
	"log"
	"os"
	"path/filepath"
)

//go:generate go run .

func main() {
	files, err := generated()
	if err != nil {
		log.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(name, text, 0o644); err != nil { //nolint:gosec // it is to be read by everybody
			log.Fatal(err)
		}
	}
}

// generated returns the content of the files, by name.
func generated() (map[string][]byte, error) {
	files := map[string][]byte{filepath.Join("..", "docs", "alerts.md"): alertsPage()}
	for _, d := range all() {
		text, err := d.json()
		if err != nil {
			return nil, err
		}
		files[filepath.Join("grafana", d.uid+".json")] = text
	}
	rules, err := rulesFile()
	files[filepath.Join("prometheus", "stormguard.rules.yml")] = rules
	return files, err
}

// all returns the dashboards, in the order in which to look at them.
func all() []dashboard {
	return []dashboard{overview, group, deadLetters, fleetAndLimits, topology}
}
