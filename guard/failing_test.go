// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// In an outage with poison both errors are seen. A message that succeeds is not among them any
// more.
func TestFailing(t *testing.T) {
	for name, p := range map[string]Policy{"none": {Order: OrderNone, Workers: 3}, "key": {Order: OrderKey, Workers: 3}} {
		bubble(t, name, func(t *testing.T) {
			down := true
			r := newRig(t, p, Limits{}, func(_ *rig, _ context.Context, m int) error {
				switch {
				case m < 2:
					return fmt.Errorf("order %d has no currency", 100+m)
				case down:
					return Unavailable(errDown)
				default:
					return nil
				}
			})
			if all := r.s.Failing(); len(all) != 0 {
				t.Error(all)
			}
			r.send(0, 3)
			r.check()
			causes := func() (got []string) {
				for _, f := range r.s.Failing() {
					if f.Cause.ID == "" || f.Attempts < 1 {
						t.Errorf("%+v", f)
					}
					got = append(got, fmt.Sprint(f.Messages, " ", f.Class, " ", f.Cause.Title))
				}
				return got
			}
			poison, outage := "2 unknown order <n> has no currency", "1 dependency "+dlq.Fingerprint(errDown, nil).Title
			if got := causes(); !slices.Equal(got, []string{poison, outage}) {
				t.Errorf("%q", got)
			}
			r.mu.Lock()
			down = false
			r.mu.Unlock()
			time.Sleep(time.Minute)
			r.check()
			if got := causes(); slices.Contains(got, outage) {
				t.Errorf("%q after the outage", got)
			}
			r.close()
		})
	}
}

// The cause of a panic has the id that its dead letter has: a rule may name it.
func TestFailingOfAPanic(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(*rig, context.Context, int) error { panic("no price") })
		r.send(0, 1)
		time.Sleep(10 * time.Second)
		r.check()
		all := r.s.Failing()
		if n := r.s.DeadLetterWaiting(1); n != 1 || len(all) != 1 {
			t.Fatalf("%d dead letters, %+v", n, all)
		}
		r.check()
		r.letters.mu.Lock()
		defer r.letters.mu.Unlock()
		if recs := r.letters.recs; len(recs) != 1 || recs[0].Cause != all[0].Cause {
			t.Errorf("%+v, the letter has %+v", all[0].Cause, recs)
		}
		r.close()
	})
}
