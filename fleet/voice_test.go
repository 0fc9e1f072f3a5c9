// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
)

// Of three processes the third has no guard. When the second goes for good, the third makes
// up the quorum: what the first has probed closes.
func TestVoiceOfAProcessWithoutAGuard(t *testing.T) {
	all, _ := three(t)
	var down atomic.Bool
	down.Store(true)
	var charges []*guard.Func[int]
	for _, p := range all[:2] {
		g, err := guard.New(guard.Config{Group: "g"}, guard.WithFleet(p.Member()))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _, _ = g.Close(context.Background()) }()
		charge, err := guard.Protect(g, guard.SourceConfig{Name: "charge"}, func(context.Context, int) error {
			if down.Load() {
				return guard.Unavailable(errors.New("down"))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		charges = append(charges, charge)
	}
	open := func(i int) bool {
		_ = charges[i].Call(t.Context(), 1)
		scopes := all[i].Member().Scopes()
		return len(scopes) == 1 && scopes[0].State == breaker.Open
	}
	eventually(t, "the fleet opens", func() bool { a, b := open(0), open(1); return a && b })
	all[1].Close()
	down.Store(false)
	eventually(t, "the fleet closes", func() bool { return !open(0) && charges[0].State().Breaker.State == breaker.Closed })
}
