// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"time"
)

// loads are the rules about a steady load under the default policy. A part of the messages
// is poison or fails once. The other messages must keep up with the load.
var loads = []rule{
	loadRule("steady-9", 2*time.Minute, 10, 9, 0, 99),
	loadRule("steady-5-flaky-2", 5*time.Minute, 20, 5, 2, 99),
	loadRule("flaky-20", 2*time.Minute, 20, 0, 20, 90),
}

// loadRule publishes rate messages a second, for the time virtual; for at most a minute on
// a real broker, or unless the long form is on. Of the messages, poison percent always
// fail and flaky percent fail once. When the load ends, the share least, in percent, of the
// healthy messages must be handled, those of the last five seconds not counted. Only
// poison is dead-lettered.
func loadRule(name string, virtual time.Duration, rate, poison, flaky, least int) rule {
	return rule{
		name: name,
		says: fmt.Sprintf("with %d %% poison and %d %% flaky at %d/s, healthy messages keep up", poison, flaky, rate),
		needs: func(f Features) string {
			return lack(f.RealTime && os.Getenv("STORMGUARD_FULL") == "", "RealTime unset, or STORMGUARD_FULL")
		},
		run: func(x *run) {
			x.defaults()
			x.disorder = flaky > 0 // the guard may look behind a message that failed only by chance
			x.publish(behind)
			x.start()
			x.handled(behind)
			draw := rand.New(rand.NewPCG(uint64(rate), uint64(poison)))
			first := x.numbers + 1
			var healthy []uint64
			for range rate * int(x.spanOf(virtual)/time.Second) {
				switch d := draw.IntN(100); {
				case d < poison:
					x.bad(1, errPoison)
				case d < poison+flaky:
					x.h.On(x.numbers+1, Fail(errPoison))
					fallthrough
				default:
					healthy = append(healthy, x.numbers+1)
				}
				x.publish(1)
				time.Sleep(time.Second / time.Duration(rate))
			}
			x.rest()
			due := healthy[:len(healthy)-5*rate] // messages of the last five seconds may still wait
			done, successes := 0, x.h.Successes()
			for _, n := range due {
				if successes[n] > 0 {
					done++
				}
			}
			share := 100 * float64(done) / float64(len(due))
			x.t.Logf("%.1f %% of %d healthy messages are handled when the load ends", share, len(due))
			if share < float64(least) {
				x.errorf("%.1f %% of %d healthy messages are handled when the load ends, at least %d", share, len(due), least)
			}
			x.gone(x.poisoned(first))
			x.eventually("all is handled or dead-lettered", x.nothingMissing)
		},
	}
}

// spanOf is the duration of a rule that wants the time virtual.
func (x *run) spanOf(virtual time.Duration) time.Duration {
	if x.f.RealTime || !x.f.long && os.Getenv("STORMGUARD_FULL") == "" {
		return min(virtual, time.Minute)
	}
	return virtual
}

// poisoned counts the messages from first on that must be dead-lettered.
func (x *run) poisoned(first uint64) (n uint64) {
	for m := range x.dead {
		if m >= first {
			n++
		}
	}
	return n
}
