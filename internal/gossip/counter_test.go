// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// A session whose sections say whether they have changed does what one does that
// asks for every mark, packet for packet: with loss, splits, silence beyond what is
// lost, crashes, floors and bursts of any size, and zones.
func TestCounterChangesNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		nodes := rapid.IntRange(2, 5).Draw(t, "nodes")
		link := lossy(lan, rapid.SampledFrom([]float64{0, 0, 0.35}).Draw(t, "loss"))
		keep := time.Duration(rapid.IntRange(3, 12).Draw(t, "keep-alive")) * ms
		burst := rapid.SampledFrom([]int{1, 2, 128}).Draw(t, "burst")
		mean := time.Duration(rapid.IntRange(5, 300).Draw(t, "mean")) * ms
		forward := rapid.Bool().Draw(t, "forward")
		type mischief struct {
			at         time.Duration
			what, node int
		}
		var all []mischief
		for i := range rapid.IntRange(0, 5).Draw(t, "faults") {
			all = append(all, mischief{
				time.Duration(i)*300*ms + time.Duration(rapid.IntRange(0, 299).Draw(t, "at"))*ms,
				rapid.IntRange(0, 5).Draw(t, "what"), rapid.IntRange(0, nodes-1).Draw(t, "node"),
			})
		}
		run := func(plain bool) (hash uint64, marks int) {
			f := newFleet(t, seed, link)
			f.plain, f.forward = plain, forward
			f.zone = func(node int) string { return fmt.Sprint(node % 2) }
			f.tune = func(_ int, c *gossip.Config) { c.KeepAlive, c.Burst = keep, burst }
			f.start(nodes)
			f.churn(rand.New(rand.NewPCG(seed, 1)), mean, 0, 2*time.Second)
			for _, m := range all {
				f.At(m.at, func() {
					switch m.what {
					case 0:
						f.Isolate(m.node)
					case 1:
						f.Heal()
					case 2:
						f.Crash(m.node)
					case 3:
						f.Restart(m.node)
					case 4:
						f.Suspend(m.node, 700*ms)
					case 5:
						f.Cut(m.node, (m.node+1)%nodes)
					}
				})
			}
			f.Run(2500 * ms)
			for node := range nodes {
				if m := f.member(node); m != nil {
					marks += m.board.marks
				}
			}
			return f.Hash(), marks
		}
		asked, many := run(true)
		counted, few := run(false)
		if asked != counted {
			t.Fatalf("counted, a run is %x, and else %x", counted, asked)
		}
		if few > many {
			t.Fatalf("%d marks were asked for, and without counting %d", few, many)
		}
	})
}

// A large fleet that is quiet costs what it sends, and not each of its peers each
// time.
func TestCounterSavesMarks(t *testing.T) {
	if gossip.RaceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	t.Parallel()
	const n = 60
	f := newFleet(t, 1, lan).start(n)
	f.Run(2 * time.Second)
	before := 0
	for node := range n {
		before += f.member(node).board.marks
	}
	packets := f.Stats().Sent
	f.Run(4 * time.Second)
	marks := -before
	for node := range n {
		marks += f.member(node).board.marks
	}
	if sent := int(f.Stats().Sent - packets); marks > 6*sent {
		t.Errorf("%d marks for %d packets", marks, sent)
	}
}
