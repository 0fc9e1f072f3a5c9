// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import "cmp"

// A Round is an open period of a scope, and the processes that may probe in it. Its methods are
// pure functions, the same for every substrate.
type Round struct {
	Scope   string
	At      Position
	Names   []string            // the roster
	Skipped map[string]struct{} // processes that let their turn pass
}

// candidate is a process that has something to probe with.
type candidate struct {
	passes, failed uint32
	rank           uint64
}

// before orders the candidates of a round. First come those that have not lately ended a round,
// then those with fewer passed probes in it, then rendezvous decides. A process whose own path is
// broken ends one round, and is last from then on: it must not end each round before enough probes
// of others have passed.
func (c candidate) before(d candidate) bool {
	return cmp.Or(cmp.Compare(c.failed, d.failed), cmp.Compare(c.passes, d.passes), cmp.Compare(c.rank, d.rank)) < 0
}

// Next returns the process whose turn it is to probe, or "" if there is none, and how many probes
// of the round have passed. Once these are as many as successes, no process probes a second time.
// vote returns the vote of a name that counts, or nil. Next costs a look at each vote.
func (r Round) Next(successes int, vote func(name string) *Vote) (next string, passed int) {
	var best, best0 candidate
	next0 := "" // the first of those that have not probed in the round
	for _, n := range r.Names {
		w := vote(n)
		if w == nil || w.Gone || w.At.Gen != r.At.Gen {
			continue
		}
		c := candidate{failed: w.Failed}
		if w.At == r.At {
			c.passes = w.Passes
			passed += int(w.Passes)
		}
		if _, skipped := r.Skipped[n]; skipped || !w.Wants {
			continue
		}
		c.rank = rank(r.Scope, r.At, n)
		if next == "" || c.before(best) {
			next, best = n, c
		}
		if c.passes == 0 && (next0 == "" || c.before(best0)) {
			next0, best0 = n, c
		}
	}
	if passed >= successes {
		next = next0
	}
	return next, passed
}

// Outvoted reports whether all processes that have yet to probe in the round have ended a round
// before, and are fewer than need. So few cannot open the scope. They may have a broken path of
// their own, and end each round.
func (r Round) Outvoted(need int, vote func(name string) *Vote) bool {
	left := 0
	for _, n := range r.Names {
		w := vote(n)
		if w == nil || w.Gone || w.At.Gen != r.At.Gen || !w.Wants || w.At == r.At && w.Passes > 0 {
			continue
		}
		if _, skipped := r.Skipped[n]; skipped {
			continue
		}
		if w.Failed == 0 {
			return false
		}
		left++
	}
	return left < need
}

// Share returns a number in [0, 1) that differs by process and round. It spreads what several
// processes may do at once.
func (r Round) Share(name string) float64 {
	return float64(rank(r.Scope, r.At, name)>>11) / (1 << 53)
}
