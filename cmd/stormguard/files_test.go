// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A file that the command line names and that cannot be used is a mistake on the command line.
func TestWrongFileIsUsage(t *testing.T) {
	nowhere := filepath.Join(t.TempDir(), "nowhere")
	wrong := filepath.Join(t.TempDir(), "wrong")
	if err := os.WriteFile(wrong, []byte("what nobody reads\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	fleetRun := []string{"fleet", "run", "--name", "a", "--roster", "a", "--quiet"}
	seat := append(slices.Clone(fleetRun), "--http", "127.0.0.1:0")
	for flag, args := range map[string][]string{
		"--token-file":  {"status"},
		"--ca":          {"fleet", "--url", "https://127.0.0.1:1"},
		"--keys":        fleetRun,
		"--http-tokens": seat,
		"--http-cert":   seat,
		"--http-key":    seat,
	} {
		for _, file := range []string{nowhere, wrong} {
			var stdout, stderr bytes.Buffer
			if code := run(append(slices.Clone(args), flag, file), &stdout, &stderr); code != exitUsage || !strings.Contains(stderr.String(), flag) {
				t.Errorf("%s %s: %d, want %d: %s", flag, filepath.Base(file), code, exitUsage, &stderr)
			}
		}
	}
}
