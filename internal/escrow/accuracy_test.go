// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"math"
	"os"
	"testing"
	"time"
)

// full says that the long forms are asked for.
var full = os.Getenv("STORMGUARD_FULL") != ""

// A scenario is what a fleet goes through: 10,000/s with a burst of 500 unless it
// says otherwise, Poisson demand of 1.2 times that. Its error is that of the worst
// 10 s window from 1 s after from to the end, against one ideal bucket that is
// asked the same.
type scenario struct {
	name   string
	nodes  []int
	demand float64 // of the rate; unset means 1.2
	where  func(f *fleet) func(now time.Duration) int
	fault  func(f *fleet)
	from   time.Duration // when the fault begins
	length time.Duration // unset means 31 s, or what lets each node be hot, and 6 s more
	limit  Limit
	most   float64 // of |error|, unset means 0.3 %
	core   bool    // runs in the short form too, with the fewest nodes and the most
}

func balanced(f *fleet) func(time.Duration) int {
	return func(time.Duration) int { return f.rand.IntN(len(f.nodes)) }
}

func skewed(f *fleet) func(time.Duration) int {
	return func(time.Duration) int {
		switch x := f.rand.Float64(); {
		case x < .9:
			return 0
		case x < .99:
			return 1
		default:
			return 2
		}
	}
}

func oneHot(*fleet) func(time.Duration) int { return func(time.Duration) int { return 0 } }

func rotating(f *fleet) func(time.Duration) int {
	return func(now time.Duration) int { return int(now/time.Second) % len(f.nodes) }
}

// rotatingPairs keeps each side's part of the demand at its share: node 0 alone,
// the hot one of the others rotates.
func rotatingPairs(f *fleet) func(time.Duration) int {
	return func(now time.Duration) int {
		n := len(f.nodes)
		if f.rand.IntN(n) == 0 {
			return 0
		}
		return 1 + int(now/time.Second)%(n-1)
	}
}

// sides cuts the fleet into sides from when on.
func sides(from time.Duration, side func(node int) int) func(*fleet) {
	return func(f *fleet) {
		f.down = func(now time.Duration, a, b int) bool { return now >= from && side(a) != side(b) }
	}
}

func first(node int) int { return min(node, 1) }
func each(node int) int  { return node }

func loss(p float64) func(*fleet) { return func(f *fleet) { f.loss = p } }

// flaps isolates the first node for 2 s, and has it back for 2 s.
func flaps(f *fleet) {
	f.down = func(now time.Duration, a, b int) bool {
		return (a == 0 || b == 0) && now >= 2*time.Second && now/(2*time.Second)%2 == 1
	}
}

func oneWay(f *fleet) {
	f.down = func(now time.Duration, a, b int) bool { return now >= 2*time.Second && a == 0 && b != 0 }
}

func drifting(f *fleet) {
	for i, s := range f.nodes {
		s.ppm = []float64{200, -200, 0}[i%3]
	}
}

var scenarios = []scenario{
	{name: "balanced 2x", nodes: []int{3, 9, 25}, demand: 2, where: balanced, core: true},
	{name: "skew 90/9/1", nodes: []int{3, 9, 25}, where: skewed, core: true},
	{name: "one hot", nodes: []int{3, 9, 25}, where: oneHot, core: true},
	{name: "rotating", nodes: []int{3, 9, 25}, where: rotating, core: true},
	{name: "rotating, clocks ±200 ppm", nodes: []int{3, 9}, where: rotating, fault: drifting},
	{name: "35 % loss, balanced", nodes: []int{3, 9, 25}, where: balanced, fault: loss(.35)},
	{name: "35 % loss, rotating", nodes: []int{3, 9, 25}, where: rotating, fault: loss(.35), core: true},
	{name: "split 1+2, balanced", nodes: []int{3, 9}, where: balanced, fault: sides(2*time.Second, first), from: 2 * time.Second, core: true},
	{name: "split 1+2, rotating within", nodes: []int{3, 9}, where: rotatingPairs, fault: sides(2*time.Second, first), from: 2 * time.Second},
	{name: "split 1+1+1, balanced", nodes: []int{3, 9}, where: balanced, fault: sides(2*time.Second, each), from: 2 * time.Second},
	{name: "one-way cut, balanced", nodes: []int{3, 9}, where: balanced, fault: oneWay, from: 2 * time.Second, core: true},
	{name: "one-way cut, rotating within", nodes: []int{3, 9}, where: rotatingPairs, fault: oneWay, from: 2 * time.Second},
	{name: "2 s flaps, balanced", nodes: []int{3, 9}, where: balanced, fault: flaps, from: 2 * time.Second, core: true},
	{name: "2 s flaps, rotating within", nodes: []int{3, 9}, where: rotatingPairs, fault: flaps, from: 2 * time.Second, core: true},
}

// play runs the scenario and returns its error, and by how many tokens the most
// was exceeded.
func (sc scenario) play(t testing.TB, n int, seed uint64) (*fleet, float64) {
	l := sc.limit
	if l == (Limit{}) {
		l = Limit{Rate: 10_000, Burst: 500}
	}
	demand := sc.demand
	if demand == 0 {
		demand = 1.2
	}
	f := newFleet(t, n, l, seed)
	if sc.fault != nil {
		sc.fault(f)
	}
	end := max(31*time.Second, time.Duration(n+6)*time.Second, sc.length)
	if !full && sc.length == 0 {
		end = min(end, 16*time.Second)
	}
	f.run(end, demand*l.Rate, sc.where(f))
	return f, f.worst(sc.from+time.Second, end)
}

func TestAccuracy(t *testing.T) {
	seeds := 1
	if full {
		seeds = 3
	} else {
		t.Log("STORMGUARD_FULL=1 runs all scenarios, with three seeds each")
	}
	for _, sc := range scenarios {
		for i, n := range sc.nodes {
			if !full && (!sc.core || i > 0 && (raceEnabled || i < len(sc.nodes)-1)) {
				continue
			}
			worst, over := 0., 0.
			for seed := range seeds {
				f, err := sc.play(t, n, uint64(seed+1))
				if math.Abs(err) > math.Abs(worst) {
					worst = err
				}
				over = max(over, f.over)
			}
			t.Logf("%-30s %2d nodes  %+.3f %%  over %.1f", sc.name, n, 100*worst, over)
			if most := max(sc.most, .003); math.Abs(worst) > most {
				t.Errorf("%s, %d nodes: error %+.3f %%, want within ±%.1f %%", sc.name, n, 100*worst, 100*most)
			}
			if over > 1e-6 {
				t.Errorf("%s, %d nodes: %.3f tokens too many", sc.name, n, over)
			}
		}
	}
}

// The table must tell a fleet that shares from one that divides: cut into single
// nodes, the rotating load gets a ninth.
func TestAccuracySeesAStaticSplit(t *testing.T) {
	sc := scenario{where: rotating, fault: sides(2*time.Second, each), from: 2 * time.Second}
	if f, err := sc.play(t, 3, 1); err > -.5 || f.over > 1e-6 {
		t.Errorf("a static split has an error of %+.3f %% and %v over; the scenarios prove nothing", 100*err, f.over)
	}
}
