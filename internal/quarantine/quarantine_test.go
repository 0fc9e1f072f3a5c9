// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/dlq"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The list of one process: entries end, are replaced and removed, and watchers hear.
func TestQuarantine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(time.Now)
		heard := 0
		stop := q.Watch(func() { heard++ })
		rule := func(n int) dlq.Rule { return dlq.Rule{Kind: dlq.RuleKey, Value: fmt.Sprint(n)} }
		add := func(e dlq.QuarantineEntry) {
			t.Helper()
			if err := q.Add(e); err != nil {
				t.Fatal(err)
			}
		}
		add(dlq.QuarantineEntry{Rule: rule(1), Until: time.Now().Add(time.Hour)})
		time.Sleep(time.Minute)
		add(dlq.QuarantineEntry{Rule: rule(2), By: "ann", Why: "why"})
		add(dlq.QuarantineEntry{Rule: rule(3)})
		if err := q.Remove(rule(3), ""); err != nil {
			t.Fatal(err)
		}
		if err := q.Remove(dlq.Rule{}, ""); !errors.Is(err, dlq.ErrQuarantine) {
			t.Error(err)
		}
		in := q.Entries()
		if len(in) != 2 || in[0].Rule != rule(1) || in[1].Why != "why" || in[1].Until.Sub(in[1].At) != 24*time.Hour || heard != 4 {
			t.Errorf("%+v, heard of %d", in, heard)
		}
		stop()
		time.Sleep(59 * time.Minute)
		if in := q.Entries(); len(in) != 1 || in[0].Rule != rule(2) || heard != 4 {
			t.Errorf("%+v", in)
		}
		for n := range Max - 1 { // rule 1, which has ended, makes room
			add(dlq.QuarantineEntry{Rule: rule(10 + n)})
		}
		err := q.Add(dlq.QuarantineEntry{Rule: rule(3)})
		if !errors.Is(err, dlq.ErrQuarantine) || !strings.Contains(err.Error(), "10000 entries") || len(q.Entries()) != Max {
			t.Error(err)
		}
		add(dlq.QuarantineEntry{Rule: rule(2)})
		if err := q.Add(dlq.QuarantineEntry{Rule: rule(2), By: strings.Repeat("x", 65), Until: time.Now()}); err == nil || strings.Count(err.Error(), dlq.ErrQuarantine.Error()) != 2 {
			t.Errorf("not both: %v", err)
		}
	})
}

// An entry ends by the wall clock, also where that goes on and the monotonic one does not, as
// in a suspend.
func TestEntriesEndByTheWallClock(t *testing.T) {
	q := New(time.Now)
	now := time.Now()
	if err := q.Add(dlq.QuarantineEntry{Rule: dlq.Rule{Kind: dlq.RuleKey, Value: "k"}, At: now, Until: now.Add(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	for _, e := range q.Entries() {
		if e.At != e.At.Round(0) || e.Until != e.Until.Round(0) {
			t.Errorf("%v to %v have a monotonic reading", e.At, e.Until)
		}
	}
}
