// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// A process whose wall clock is an hour behind that of its run before, or ahead, is a
// member again: it mints, decides and is read of. A clock never locks a name out.
func TestClockSteps(t *testing.T) {
	all, seeds := three(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	settled := func(p *Process) bool {
		s := p.Status()
		return s.Configuration.Settled && s.Configuration.Member && !p.limits.Stats().Fenced
	}
	eventually(t, "they have met", func() bool { return settled(all[0]) && settled(all[1]) && settled(all[2]) })
	c, last := all[2], all[2].node.Self().Incarnation
	// The journal as the parts have it: of which incarnation an entry is.
	started := func(by crdt.Replica) bool {
		for _, e := range all[0].journal.Entries(nil) {
			if e.By == by && e.Kind == fleetstate.EntryStarted {
				return true
			}
		}
		return false
	}
	for i, step := range []time.Duration{-time.Hour, time.Hour, 0, -time.Hour} {
		c.Close()
		cfg := configOf("c", seeds, "a", "b", "c").settings()
		cfg.gossip.Self.Incarnation = gossip.NewIncarnation(time.Now().Add(step), uint64(i))
		begun := time.Now()
		c = startSettings(t, cfg)
		eventually(t, "it is a member again, above its last incarnation", func() bool { return settled(c) && c.node.Self().Incarnation > last })
		if now := c.node.Self().Incarnation; now <= last || c.Err() != nil {
			t.Fatalf("step %v: incarnation %d after %d, %v", step, now, last, c.Err())
		}
		t.Logf("step %v: back after %v", step, time.Since(begun).Round(time.Millisecond))
		last = c.node.Self().Incarnation
		if err := c.Key("k").WaitN(ctx, 50); err != nil { // more than its share: the others lend
			t.Fatalf("step %v: %v", step, err)
		}
		eventually(t, "the others read that it started", func() bool { return started(c.node.Self()) })
	}
	for _, e := range []int{0, 1} {
		if err := all[e].Err(); err != nil {
			t.Error(err)
		}
	}

	// One that starts while another of its name runs puts that out, whichever clock is
	// behind; and stays itself.
	cfg := configOf("c", seeds, "a", "b", "c").settings()
	cfg.gossip.Self.Incarnation = gossip.NewIncarnation(time.Now().Add(-2*time.Hour), 1)
	time.Sleep(1100 * time.Millisecond) // c is known for more than a second: the rule counts real time
	d := startSettings(t, cfg)
	eventually(t, "the first one is out", func() bool { return errors.Is(c.Err(), ErrDisplaced) && c.limits.Stats().Fenced })
	eventually(t, "the second one is a member", func() bool { return settled(d) })
	if d.Err() != nil {
		t.Error(d.Err())
	}
}
