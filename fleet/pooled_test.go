// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

// A fleet whose strategy is pooled: any process has the whole burst at once, what it
// takes is gone for the others, and a limit changes while it runs.
func TestPooled(t *testing.T) {
	var all []*Process
	var seeds []string
	for _, name := range []string{"a", "b", "c"} {
		cfg := configOf(name, seeds, "a", "b", "c")
		cfg.Limits.Strategy = Pooled
		cfg.Limits.Limit = limiter.Limit{Rate: 0.001, Burst: 100} // nothing is minted meanwhile
		p := startProcess(t, cfg)
		if all = append(all, p); seeds == nil {
			seeds = []string{p.Addr().String()}
		}
	}
	eventually(t, "one has the whole burst", func() bool { return all[0].Key("k").AllowN(100) })
	for _, p := range all[1:] {
		eventually(t, "what one has taken is gone for all", func() bool { return p.Key("k").Level().Left == 0 })
	}
	if all[1].Key("k").Allow() {
		t.Error("admitted beyond the burst")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	more := limiter.Limit{Rate: 1e6, Burst: 1000}
	if _, err := all[2].Set(ctx, Change{Limit: &more}); err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		eventually(t, "the new burst is there for each", func() bool { return p.Key("k").AllowN(500) })
	}
	if _, err := Start(func() Config {
		c := configOf("d", seeds, "a", "b", "c")
		c.Limits.Strategy = "both"
		return c
	}()); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), `Strategy: "both" is not in {escrow, pooled}`) {
		t.Error(err)
	}
}
