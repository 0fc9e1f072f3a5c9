// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"fmt"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// Adopt takes a scope over, before the first delivery of it is handled, and
// returns what to do with its breaker, a new one or one that lay idle. The zero
// Action is: nothing, it is closed.
//
// A scope that the fleet holds open is held. One whose last owner has gone and
// left it in trouble is held for the rest of its open period and then
// half-open; an owner that is still there may be sharing the scope, so what
// troubles it makes the new one half-open only. A process that has not been told
// waits, held, until Config.Start after its start, or until it is told; whoever then
// knows of nothing, and cannot know that there is nothing, begins half-open.
//
// Adopting a scope twice does nothing. The errors are [breaker.ErrPath]
// and [breaker.ErrTooManyScopes].
func (m *Machine) Adopt(now time.Duration, name string) (Action, error) {
	if len(name) < 1 || len(name) > MaxName {
		return Action{}, fmt.Errorf("%w: fleet: %d bytes are not in [1, %d]", circuit.ErrPath, len(name), MaxName)
	}
	m.mu.Lock()
	defer m.unlock(nil)
	var sc *Scope
	if m.scopes[name] != nil || !m.full {
		sc = m.Obtain(now, name)
	}
	if sc == nil {
		return Action{}, fmt.Errorf("%w: fleet: no room for %q, Scopes is %d", circuit.ErrTooManyScopes, name, m.cfg.Scopes)
	}
	if sc.Claimed {
		return Action{}, nil
	}
	before := len(m.actions)
	sc.Claimed = true
	sc.Book.Claim(now, true)
	m.stir(sc)
	if sc.Known.Open() {
		m.hold(now, sc)
	} else {
		m.takeOver(now, sc)
	}
	var a Action
	if len(m.actions) > before {
		a = m.actions[len(m.actions)-1]
		m.actions = m.actions[:before]
	}
	return a, nil
}

// Leave gives a scope up: after the last delivery of it, or to stop. What is
// known of it stays for whoever takes it over. The breaker is the caller's.
func (m *Machine) Leave(now time.Duration, name string) {
	m.mu.Lock()
	defer m.unlock(nil)
	sc := m.scopes[name]
	if sc == nil || !sc.Claimed {
		return
	}
	sc.Claimed, sc.asking, sc.wants, sc.Mine, sc.mode, sc.release = false, false, false, false, free, Never
	sc.seen, sc.cast, sc.back, sc.doubt = 0, 0, false, false
	// What was not applied yet is void, or it would be done to whoever takes the
	// scope over next.
	m.actions = slices.DeleteFunc(m.actions, func(a Action) bool { return a.Scope == name })
	m.stir(sc)
	sc.Book.Claim(now, false)
}

// Answer looks again at the scopes that are held because nobody has told of them. The
// lock must be held.
func (m *Machine) Answer(now time.Duration) {
	for _, sc := range m.active {
		m.answer(now, sc)
	}
}

func (m *Machine) answer(now time.Duration, sc *Scope) {
	if sc.asking {
		m.takeOver(now, sc)
	}
}

// takeOver decides how a scope begins that the fleet does not hold open.
func (m *Machine) takeOver(now time.Duration, sc *Scope) {
	heir, told := sc.Book.Heir(now)
	switch {
	case sc.Blind:
		m.letGo(sc)
	case heir.Vote != nil && heir.Troubled(sc.Known.Gen):
		m.inherit(now, sc, heir)
	case told == ToldAll:
		if sc.asking {
			sc.mode, sc.asking = free, false
			m.act(sc, Action{Kind: Close, Cause: CauseFleet})
		}
		if sc.Own.Troubled(sc.Known.Gen) {
			m.write(now, sc, Vote{At: Position{Gen: sc.Known.Gen}})
		}
	case told == NobodyTells, now-m.start >= m.cfg.Start:
		m.letGo(sc)
	case !sc.asking:
		sc.mode, sc.asking = held, true
		m.rehold(now, sc)
	}
}

// inherit goes on where the last owner was.
func (m *Machine) inherit(now time.Duration, sc *Scope, heir Heir) {
	sc.Own = Vote{
		Phase: PhaseInherited, At: Position{Gen: sc.Known.Gen},
		BackoffLevel: min(heir.BackoffLevel, top(m.cfg)), OpenFor: min(heir.OpenFor, m.cfg.Cap), Cause: heir.Cause,
	}
	m.stir(sc)
	sc.Book.Write(now, heir.Opened, true)
	sc.asking = false
	until := heir.Opened + sc.Own.OpenFor
	if until <= now || heir.StillThere {
		m.letGo(sc)
		return
	}
	sc.mode, sc.release = held, until
	m.rehold(now, sc)
}
