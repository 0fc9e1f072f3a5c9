// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func settingsFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "stormguard.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// The command line counts before the environment, and that before the file; each sets what
// the others do not.
func TestSettings(t *testing.T) {
	p := newGuarded(t)
	file := settingsFile(t, "url: "+p.url+"\ntoken-file: "+p.token+"\noutput: json # for all\nsince: 2h\n")
	ask := func(args ...string) (string, string, int) {
		var out, errs strings.Builder
		code := run(args, &out, &errs)
		return out.String(), errs.String(), code
	}
	if out, errs, code := ask("status", "--config", file); code != exitOK || !strings.HasPrefix(out, "{") {
		t.Errorf("by the file: %d %s%s", code, out, errs)
	}
	t.Setenv("STORMGUARD_CONFIG", file)
	t.Setenv("STORMGUARD_OUTPUT", "jsonl")
	if out, errs, code := ask("source", "list"); code != exitOK || strings.HasPrefix(out, "[") || !strings.HasPrefix(out, "{") {
		t.Errorf("the environment counts before the file: %d %s%s", code, out, errs)
	}
	if out, errs, code := ask("source", "list", "--output", "table"); code != exitOK || !strings.HasPrefix(out, "SOURCE") {
		t.Errorf("the command line counts first: %d %s%s", code, out, errs)
	}
	if out, errs, code := ask("report", "-o", "table"); code != exitOK || !strings.Contains(out, "the 2h0m0s before") {
		t.Errorf("since is not that of the file: %d %s%s", code, out, errs)
	}
	// What is changed is said on the command line only, and a token goes where it belongs.
	t.Setenv("STORMGUARD_COUNT", "9")
	t.Setenv("STORMGUARD_DRY_RUN", "true")
	if out, errs, code := ask("credits", "orders", "-o", "table", "--yes"); code != exitOK || !strings.Contains(out, "done") {
		t.Errorf("%d %s%s", code, out, errs)
	}
	if out, _, _ := ask("audit", "-o", "table"); !strings.Contains(out, "credits orders count 1 ") {
		t.Errorf("the environment has changed an order:\n%s", out)
	}
	if _, errs, code := ask("status", "--url", "http://127.0.0.1:1"); code != exitUsage || !strings.Contains(errs, "--token-file: that of "+file+" is not for this --url") {
		t.Errorf("%d %s", code, errs)
	}
	if _, errs, code := ask("doctor", "kafka", "--topic", "t"); strings.Contains(errs, p.url) {
		t.Errorf("another command has heard of the process: %d %s", code, errs)
	}
}

// What is wrong is said with its place, and nothing is done.
func TestWrongSettings(t *testing.T) {
	for _, c := range []struct{ file, env, args, says string }{
		{file: "ulr: x\n", says: `"ulr" cannot be set here`},
		{file: "topic: x\n", says: `"topic" cannot be set here`}, // the doctor's
		{file: "url: [a, b]\n", says: `url: want one value`},
		{file: "output: xml\n", says: `output "xml": must be table, json or jsonl`},
		{file: "lang: fr\n", env: "STORMGUARD_LANG=", says: `--lang "fr": must be en or zh`},
		{file: "url:\n\t- x", says: "yaml: "},
		{file: "yes: true\n", says: `"yes" cannot be set here`},
		{file: "ann 0123456789abcdef\n", says: "want lines such as"},
		{env: "STORMGUARD_SINCE=1s", args: "report", says: `STORMGUARD_SINCE "1s": must be a duration from 1m0s to 168h0m0s`},
		{env: "STORMGUARD_JSON=perhaps", args: "fleet", says: `STORMGUARD_JSON "perhaps": want a bool`},
		{env: "STORMGUARD_CONFIG=/nowhere/x.yaml", says: "/nowhere/x.yaml: no such file"},
	} {
		t.Run(c.says, func(t *testing.T) {
			if name, value, ok := strings.Cut(c.env, "="); ok {
				t.Setenv(name, value)
			}
			args := strings.Fields(c.args)
			if c.args == "" {
				args = []string{"status"}
			}
			if c.file != "" {
				args = append(args, "--config", settingsFile(t, c.file))
			}
			var out, errs strings.Builder
			if code := run(args, &out, &errs); code != exitUsage || !strings.Contains(errs.String(), c.says) || out.Len() > 0 {
				t.Errorf("%d %s%s", code, out.String(), errs.String())
			}
		})
	}
}
