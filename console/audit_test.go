// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"fmt"
	"testing"
)

// An entry is the audit's own: what its order goes on to do with the results changes nothing
// of it, and it keeps no more of a long list than it has.
func TestAuditKeepsItsOwn(t *testing.T) {
	results := make([]Result, 0, 5*mostResults)
	for i := range cap(results) {
		results = append(results, Result{Source: fmt.Sprint(i)})
	}
	var a audit
	a.order(Entry{Results: results})
	results[0].Source = "another"
	got := a.entries()[0].Results
	if len(got) != mostResults || cap(got) >= 2*mostResults || got[0].Source != "0" {
		t.Errorf("%d results with room for %d, the first of %q", len(got), cap(got), got[0].Source)
	}
}
