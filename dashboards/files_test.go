// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The committed files are what the program writes, and there is no other.
func TestFilesAreWritten(t *testing.T) {
	files, err := generated()
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, text) {
			t.Errorf("%s is not what `go run .` writes (%v)", name, err)
		}
	}
	there, err := filepath.Glob("*/*.[jy]*ml")
	if err != nil {
		t.Fatal(err)
	}
	dashboards, err := filepath.Glob("grafana/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(there, dashboards...) {
		if _, ok := files[name]; !ok {
			t.Errorf("%s is written by nothing", name)
		}
	}
}

// Each dashboard is one that Grafana's schema knows.
func TestSchema(t *testing.T) {
	need(t, "npm", "install Node.js and npm")
	dir := t.TempDir()
	for _, name := range []string{"package.json", "package-lock.json", "tsconfig.json", "grafana.ts"} {
		text, err := os.ReadFile(filepath.Join("testdata", "schema", name))
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name), string(text))
	}
	run(t, dir, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	typed := func(name, text string) string {
		file := name + ".ts"
		write(t, filepath.Join(dir, file), "import type { Checked } from \"./grafana\";\nexport const d: Checked = "+text+";\n")
		return file
	}
	tsc := filepath.Join(dir, "node_modules", ".bin", "tsc")
	var good string
	for _, d := range all() {
		text, err := d.json()
		if err != nil {
			t.Fatal(err)
		}
		typed(d.uid, string(text))
		good = string(text)
	}
	if out, err := output(t, dir, tsc, "-p", "."); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	// What the check is worth: it refuses a word, a type and a field that Grafana does
	// not know.
	for from, to := range map[string]string{
		`"layoutAlgorithm": "layered"`: `"layoutAlgorithm": "round"`,
		`"schemaVersion": 41`:          `"schemaVersion": "41"`,
		`"gridPos"`:                    `"gridPosition"`,
		`"type": "nodeGraph"`:          `"type": "nodegraph"`,
	} {
		bad := strings.Replace(good, from, to, 1)
		if bad == good {
			t.Fatalf("%s is not in %s", from, good)
		}
		file := typed("wrong", bad)
		if _, err := output(t, dir, tsc, "-p", "."); err == nil {
			t.Errorf("%s passes", to)
		}
		if err := os.Remove(filepath.Join(dir, file)); err != nil {
			t.Fatal(err)
		}
	}
}

// Panels have ids of their own and do not overlap, and each has a query.
func TestPanels(t *testing.T) {
	for _, d := range all() {
		text, err := d.json()
		if err != nil {
			t.Fatal(err)
		}
		var got struct {
			Panels []struct {
				ID      int
				Type    string
				Title   string
				GridPos struct{ X, Y, W, H int }

				MaxDataPoints int
				Targets       []struct{ Expr, RefID string }
			}
		}
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		taken := map[[2]int]string{}
		for i, p := range got.Panels {
			if p.ID != i+1 || p.Title == "" || (p.Type == "row") != (len(p.Targets) == 0) {
				t.Errorf("%s: panel %d: %+v", d.uid, i, p)
			}
			// Grafana paints no history of more points than half of the panel's pixels.
			if p.Type == string(heat) && (p.MaxDataPoints == 0 || p.MaxDataPoints > 150) {
				t.Errorf("%s: %s: up to %d points", d.uid, p.Title, p.MaxDataPoints)
			}
			for x := range p.GridPos.W {
				for y := range p.GridPos.H {
					at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
					if other := taken[at]; other != "" || at[0] >= 24 {
						t.Fatalf("%s: %q and %q are both at %v", d.uid, p.Title, other, at)
					}
					taken[at] = p.Title
				}
			}
		}
	}
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
