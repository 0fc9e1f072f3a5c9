// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// Refusals are said once they have gone on for ten seconds, and once until they have been over for a
// minute. Some that end sooner, and others than those of settings, are not.
func TestRefusals(t *testing.T) {
	t.Parallel()
	settings := fmt.Errorf("%w: of b", escrow.ErrSettings)
	for _, c := range []struct {
		name        string
		err         error
		from, to    int // seconds with refusals
		every       int
		begun, over int // seconds; -1 is never
	}{
		{"settings", settings, 3, 40, 1, 13, 99},
		{"fleet", fleetstate.ErrFleet, 0, 40, 1, 10, 99},
		{"roster", fleetstate.ErrRoster, 0, 40, 1, 10, 99},
		{"rare, in a large fleet", settings, 0, 101, 25, 25, 160},
		{"while a configuration spreads", settings, 0, 10, 1, -1, -1},
		{"two, with a minute between", settings, 0, 62, 61, -1, -1},
		{"of another kind", errors.New("stale"), 0, 40, 1, -1, -1},
	} {
		var r refusals
		begun, over, count := -1, -1, 0
		for second := range 300 {
			if second >= c.from && second < c.to && (second-c.from)%c.every == 0 {
				count += 20
			}
			b, o := r.look(time.Hour+time.Duration(second)*time.Second, gossip.SectionStats{Refused: uint64(count), LastError: c.err})
			if b && begun >= 0 || o && over >= 0 {
				t.Errorf("%s: said again in second %d", c.name, second)
			}
			if b {
				begun = second
			}
			if o {
				over = second
			}
		}
		if begun != c.begun || over != c.over {
			t.Errorf("%s: said in second %d, and over in %d; want %d and %d", c.name, begun, over, c.begun, c.over)
		}
		if b, _ := r.look(2*time.Hour, gossip.SectionStats{Refused: uint64(count + 1), LastError: c.err}); b {
			t.Errorf("%s: the first one of later ones is said", c.name)
		}
	}
}

// Two processes with another OnSilence refuse each other, and both say so. So do two with another
// Strategy. Those with equal settings say nothing, also when one starts again.
func TestUnequalSettingsAreSaid(t *testing.T) {
	t.Parallel()
	const line = "packets of other processes are refused; their settings must be equal"
	type pair struct {
		name    string
		change  func(*Config)
		section []string // that refuse
		logs    [2]lockedBuffer
		said    [2]string
		again   func()
	}
	pairs := []*pair{
		{name: "OnSilence", section: []string{sectionConfiguration, sectionLimits}, change: func(c *Config) { c.Limits.OnSilence.Policy = TakeOver }},
		{name: "Strategy", section: []string{sectionLimits}, change: func(c *Config) { c.Limits.Strategy = Pooled }},
		{name: "equal", change: func(*Config) {}},
	}
	for _, p := range pairs {
		store := new(register.Memory)
		begin := func(i int, c Config) *Process {
			t.Helper()
			q, err := Start(c, WithRegister(store), WithLogger(slog.New(slog.NewTextHandler(&p.logs[i], nil))))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(q.Close)
			return q
		}
		a := begin(0, configOf("a", nil, "a", "b"))
		other := configOf("b", []string{a.Addr().String()}, "a", "b")
		p.change(&other)
		b := begin(1, other)
		p.again = func() {
			b.Close()
			b = begin(1, other)
		}
	}
	look := func(p *pair) {
		for i := range p.logs {
			p.said[i] += p.logs[i].take()
		}
	}
	pairs[2].again()
	eventually(t, "both of each pair say so", func() bool {
		for _, p := range pairs {
			look(p)
			for _, section := range p.section {
				for _, said := range p.said {
					if !strings.Contains(said, line+`" section=`+section) {
						return false
					}
				}
			}
		}
		return true
	})
	for _, p := range pairs {
		for _, said := range p.said {
			if n := strings.Count(said, line); n != len(p.section) {
				t.Errorf("%s: said %d times, want %d:\n%s", p.name, n, len(p.section), said)
			}
		}
	}
}
