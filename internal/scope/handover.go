// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"fmt"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// Adopt takes a scope over, before its first delivery is handled. It returns the action for the
// scope's breaker, which is new or was idle. The zero Action means: do nothing, the scope is
// closed.
//
//   - A scope that the fleet holds open is held.
//   - If the last owner left the scope in trouble and has gone, the scope is held for the rest of
//     its open period, then half-open.
//   - If that owner is still there, it may share the scope. Then its trouble makes the new owner
//     half-open only.
//   - A process that has not been told about the scope waits, held, until it is told, or until
//     Config.Start after its start. If it then knows of nothing, and cannot know that there is
//     nothing, it begins half-open.
//
// Adopting a scope twice does nothing. The errors are [breaker.ErrPath] and
// [breaker.ErrTooManyScopes].
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

// Leave gives a scope up, after its last delivery, or to stop. Its book stays for the next owner.
// The breaker is the caller's.
func (m *Machine) Leave(now time.Duration, name string) {
	m.mu.Lock()
	defer m.unlock(nil)
	sc := m.scopes[name]
	if sc == nil || !sc.Claimed {
		return
	}
	sc.Claimed, sc.asking, sc.wants, sc.Mine, sc.mode, sc.release = false, false, false, false, free, Never
	sc.seen, sc.cast, sc.back, sc.doubt = 0, 0, false, false
	// Actions that were not applied yet are dropped. Otherwise they would be applied when the scope
	// is next adopted here.
	m.actions = slices.DeleteFunc(m.actions, func(a Action) bool { return a.Scope == name })
	m.stir(sc)
	sc.Book.Claim(now, false)
}

// Answer looks again at scopes that are held because nothing was told about them. The lock must be
// held.
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

// takeOver decides how a scope begins if the fleet does not hold it open.
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

// inherit goes on in the state of the last owner.
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
