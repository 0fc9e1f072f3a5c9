// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
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
