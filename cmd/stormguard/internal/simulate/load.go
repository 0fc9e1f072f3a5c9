// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"slices"
	"time"
)

// A load returns the demand at a node at true time t, in tokens per second, and until when
// this rate stays. A message asks for one token, or for more, see world.batch.
type load func(w *world, node int, t time.Duration) (rate float64, until time.Duration)

// demand is the default demand of all nodes together, as a multiple of the limit.
const demand = 1.2

func balanced(times float64) load {
	return func(w *world, _ int, _ time.Duration) (float64, time.Duration) {
		return times * w.sc.all() / float64(w.sc.nodes), w.sc.length
	}
}

// skewed is 90 % at one node, 9 % at another, and 1 % at the rest.
func skewed(w *world, node int, _ time.Duration) (float64, time.Duration) {
	part := 0.01 / float64(w.sc.nodes-2)
	switch node {
	case 0:
		part = 0.9
	case 1:
		part = 0.09
	}
	return demand * part * w.sc.all(), w.sc.length
}

// only is all load at these nodes, in equal parts.
func only(nodes ...int) load {
	return func(w *world, node int, _ time.Duration) (float64, time.Duration) {
		if !slices.Contains(nodes, node) {
			return 0, w.sc.length
		}
		return demand * w.sc.all() / float64(len(nodes)), w.sc.length
	}
}

// rotating is all load at one node. After each duration every it moves to the next node.
func rotating(every time.Duration) load {
	return func(w *world, node int, t time.Duration) (float64, time.Duration) {
		turn := int(t / every)
		until := time.Duration(turn+1) * every
		if w.rotation[turn%w.sc.nodes] != node {
			return 0, until
		}
		return demand * w.sc.all(), until
	}
}

// rotatingWithin gives each side a part of the load, in proportion to its nodes. The part
// is at one node of the side at a time.
func rotatingWithin(every time.Duration, sides ...[]int) load {
	return func(w *world, node int, t time.Duration) (float64, time.Duration) {
		turn := int(t / every)
		until := time.Duration(turn+1) * every
		for _, side := range sides {
			if side[turn%len(side)] == node {
				return demand * w.sc.all() * float64(len(side)) / float64(w.sc.nodes), until
			}
		}
		return 0, until
	}
}

// moving is balanced over the first nodes: over as many as before says, and from the storm
// on over as many as then says.
func moving(before, then int) load {
	return func(w *world, node int, t time.Duration) (float64, time.Duration) {
		n, until := before, storm
		if t >= storm {
			n, until = then, w.sc.length
		}
		if node >= n {
			return 0, until
		}
		return demand * w.sc.all() / float64(n), until
	}
}

// rising is balanced over all nodes, and changes from before to then times the limit at an
// instant.
func rising(before, then float64, at time.Duration) load {
	return func(w *world, node int, t time.Duration) (float64, time.Duration) {
		if t < at {
			return before * w.sc.all() / float64(w.sc.nodes), at
		}
		return balanced(then)(w, node, t)
	}
}

// rush is a load that starts at begin, with a burst of messages at each node in a short
// time. Then l follows.
func rush(begin, within time.Duration, messages int, l load) load {
	return func(w *world, node int, t time.Duration) (float64, time.Duration) {
		switch {
		case t < begin:
			return 0, begin
		case t < begin+within:
			return float64(messages) / within.Seconds(), begin + within
		}
		return l(w, node, t)
	}
}

// after is the load l, and none before begin.
func after(begin time.Duration, l load) load {
	return func(w *world, node int, t time.Duration) (float64, time.Duration) {
		if t < begin {
			return 0, begin
		}
		return l(w, node, t)
	}
}

// first is the load l until end, and then another.
func first(end time.Duration, l, then load) load {
	return func(w *world, node int, t time.Duration) (float64, time.Duration) {
		if t >= end {
			return then(w, node, t)
		}
		rate, until := l(w, node, t)
		return rate, min(until, end)
	}
}
