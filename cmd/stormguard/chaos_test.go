// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stormguard-mq/stormguard/chaos"
)

// A history that cannot be written costs the run no verdict.
func TestVerdictWithoutItsHistory(t *testing.T) {
	lossy := chaos.History{Published: []chaos.Message{{ID: 1}}}
	for _, asJSON := range []bool{false, true} {
		r := newChaosRun(nil)
		r.asJSON, r.history = asJSON, filepath.Join(t.TempDir(), "no", "such", "h.json")
		var out bytes.Buffer
		err := r.judge(&out, lossy)
		if !errors.Is(err, errJudged) || !strings.Contains(err.Error(), "--history") {
			t.Errorf("%v", err)
		}
		if !strings.Contains(out.String(), "lost") || asJSON != json.Valid(out.Bytes()) {
			t.Errorf("printed %q", &out)
		}
	}
}

// A file that cannot be written is said before the run, which would take minutes.
func TestHistoryIsTriedFirst(t *testing.T) {
	cmd := newChaosCrash()
	cmd.SetArgs([]string{"--history", filepath.Join(t.TempDir(), "no", "such", "h.json")})
	cmd.SetOut(io.Discard)
	cmd.SetErr(io.Discard)
	if err := cmd.ExecuteContext(t.Context()); !errors.As(err, new(usageError)) || !strings.Contains(err.Error(), "--history") {
		t.Errorf("%v", err)
	}
}
