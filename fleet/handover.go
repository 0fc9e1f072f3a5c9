// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Adopt takes a scope over, before the first delivery of it is handled, and
// returns what to do with its breaker, a new one or one that lay idle. The zero
// Action is: nothing, it is closed.
//
// A scope that the fleet holds open is held. One whose last owner has gone and
// left it in trouble is held for the rest of its open period and then
// half-open; an owner that is still heard may be sharing the scope, so what
// troubles it makes the new one half-open only. A process that has just started
// and was told nothing waits, held, until Config.Start after its start, or until
// it is told; whoever then knows of nothing, and cannot know that there is
// nothing, begins half-open.
//
// Adopting a scope twice does nothing. The errors are [ErrScope] and
// [ErrTooManyScopes].
func (v *Verdicts) Adopt(now time.Duration, name string) (Action, error) {
	if len(name) < 1 || len(name) > maxScope {
		return Action{}, fmt.Errorf("%w: %d bytes are not in [1, %d]", ErrScope, len(name), maxScope)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	sc := v.scopeLocked(now, name)
	if sc == nil {
		return Action{}, fmt.Errorf("%w: %q would be number %d, Scopes is %d", ErrTooManyScopes, name, len(v.scopes)+1, v.cfg.Scopes)
	}
	if sc.claimed {
		return Action{}, nil
	}
	before := len(v.actions)
	sc.claimed = true
	heir := sc.heir()
	sc.term = 1
	for _, r := range sc.rows {
		sc.term = max(sc.term, r.Term+1)
	}
	if sc.own != nil {
		sc.term = max(sc.term, sc.own.Term+1)
	}
	if sc.known.Open() {
		v.holdLocked(now, sc)
	} else {
		v.takeOverLocked(now, sc, heir)
	}
	var a Action
	if len(v.actions) > before {
		a = v.actions[len(v.actions)-1]
		v.actions = v.actions[:before]
	}
	return a, nil
}

// Leave gives a scope up: after the last delivery of it, or to stop. What is
// known of it stays for whoever takes it over. The breaker is the caller's.
func (v *Verdicts) Leave(now time.Duration, name string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	sc := v.scopes[name]
	if sc == nil || !sc.claimed {
		return
	}
	sc.claimed, sc.asking, sc.wants, sc.mode, sc.release = false, false, false, free, never
	sc.seen, sc.cast = 0, 0
	// What was not applied yet is void, or it would be done to whoever takes the
	// scope over next.
	v.actions = slices.DeleteFunc(v.actions, func(a Action) bool { return a.Scope == name })
	if sc.own == nil || !sc.own.Troubled(sc.known.Gen) {
		return
	}
	w := sc.own.Vote
	w.Gone, w.Wants = true, false
	if w.Phase == PhaseProbing {
		w.Phase = PhaseWaiting
	}
	v.writeLocked(now, sc, w)
}

// answerLocked looks again at a scope that is held because nobody has told of
// it.
func (v *Verdicts) answerLocked(now time.Duration, sc *scope) {
	v.takeOverLocked(now, sc, sc.heir())
}

func (v *Verdicts) takeOverLocked(now time.Duration, sc *scope, heir *row) {
	switch {
	case heir != nil && heir.Troubled(sc.known.Gen):
		v.inheritLocked(now, sc, heir)
	case heir != nil, v.informed && v.connected:
		if sc.asking {
			sc.mode, sc.asking = free, false
			v.actions = append(v.actions, Action{Scope: sc.name, Kind: Close, Cause: CauseFleet, At: sc.known.Position})
		}
		if sc.own != nil && sc.own.Troubled(sc.known.Gen) {
			v.writeLocked(now, sc, Vote{At: Position{Gen: sc.known.Gen}})
		}
	case now-v.start >= v.cfg.Start || len(v.roster.Names) == 1:
		v.releaseLocked(sc)
	case !sc.asking:
		sc.mode, sc.asking = held, true
		v.stirLocked(sc)
		v.reholdLocked(now, sc)
	}
}

// inheritLocked goes on where the last owner was.
func (v *Verdicts) inheritLocked(now time.Duration, sc *scope, r *row) {
	w := Vote{
		Phase: PhaseInherited, At: Position{Gen: sc.known.Gen},
		Rung: min(r.Rung, v.cfg.top()), OpenFor: min(r.OpenFor, v.cfg.Cap), Cause: r.Cause,
	}
	opened := r.opened
	v.writeLocked(now, sc, w)
	sc.own.opened = opened
	sc.asking = false
	until := opened + w.OpenFor
	if until <= now || !r.Gone && r != sc.own && v.voteLocked(now, sc, r.Node.Name) != nil {
		v.releaseLocked(sc)
		return
	}
	sc.mode, sc.release = held, until
	v.stirLocked(sc)
	v.reholdLocked(now, sc)
}

// heir is the vote of the last owner, or nil if there is none: of the highest
// term, and of two of one term, as two sides of a split may have made, the one
// in deeper trouble.
func (sc *scope) heir() *row {
	var rows []*row
	for _, r := range sc.rows {
		rows = append(rows, r)
	}
	if sc.own != nil && sc.own.Gone {
		rows = append(rows, sc.own)
	}
	if len(rows) == 0 {
		return nil
	}
	depth := func(r *row) int {
		if r.Troubled(sc.known.Gen) {
			return 1 + r.Rung
		}
		return 0
	}
	return slices.MaxFunc(rows, func(r, s *row) int {
		return cmp.Or(cmp.Compare(r.Term, s.Term), cmp.Compare(depth(r), depth(s)), cmp.Compare(r.Node.Name, s.Node.Name))
	})
}

// scopeLocked is the scope of that name, made if there is room; nil if there is
// not. Room is made by forgetting one that is closed, that nobody here has and
// in which nobody says that anything is wrong, the oldest first. Should a
// process return that has not heard of its close, it would be opened again, and
// closed by the next round.
func (v *Verdicts) scopeLocked(now time.Duration, name string) *scope {
	if sc := v.scopes[name]; sc != nil {
		return sc
	}
	if len(v.scopes) >= v.cfg.Scopes {
		i := slices.IndexFunc(v.order, func(sc *scope) bool { return !sc.claimed && !sc.active && !sc.known.Open() && !sc.troubled() })
		if i < 0 {
			v.refused++
			return nil
		}
		v.dropLocked(v.order[i])
		v.order = slices.Delete(v.order, i, i+1)
	}
	sc := &scope{name: name, since: now, release: never, idleAt: never, rows: make(map[string]*row)}
	v.scopes[name] = sc
	v.order = append(v.order, sc)
	return sc
}

func (v *Verdicts) dropLocked(sc *scope) {
	for _, r := range sc.rows {
		v.log.Remove(r.change)
		v.votes--
	}
	if sc.own != nil {
		v.log.Remove(sc.own.change)
	}
	v.log.Remove(sc.change)
	delete(v.scopes, sc.name)
}

// forgetLocked drops the votes of others that are older than Keep, and scopes
// that hold nothing. Our own votes stay, or one who missed the last of them
// would believe the one before; decisions stay, or one who missed a close would
// reopen. Both are bounded by Scopes.
func (v *Verdicts) forgetLocked(now time.Duration) {
	v.order = slices.DeleteFunc(v.order, func(sc *scope) bool {
		for n, r := range sc.rows {
			if now-v.stoodLocked(sc, r) > v.cfg.Keep {
				v.log.Remove(r.change)
				delete(sc.rows, n)
				v.votes--
			}
		}
		if sc.claimed || sc.active || sc.own != nil || len(sc.rows) > 0 || sc.known != (State{}) {
			return false
		}
		v.dropLocked(sc)
		return true
	})
}

// stoodLocked is when the process of r last stood by it. A vote of nothing wrong,
// or on a scope given up, ages from when it came.
func (v *Verdicts) stoodLocked(sc *scope, r *row) time.Duration {
	if r.Gone || !r.Troubled(sc.known.Gen) {
		return r.seen
	}
	if p := v.peers.m[r.Node.Name]; p != nil && p.life == r.Node.Incarnation {
		return max(r.seen, p.heard)
	}
	return r.seen
}
