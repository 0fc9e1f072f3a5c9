// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package once

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
)

// Entities keeps the state of entities, and runs the effect of each step once. Next to the
// state it keeps a mark for each step, so that the one survives if the other is lost. It is
// safe for concurrent use.
type Entities struct {
	r *Runner
	m *Machine
}

// NewEntities makes Entities over a runner's store. It reads all states and marks of the
// machine from the store, and returns and logs the differences between them. A difference
// stops no step.
func NewEntities(ctx context.Context, r *Runner, m *Machine) (*Entities, []Difference, error) {
	e := &Entities{r: r, m: m}
	paths, marks := make(map[string][]string), make(map[string][]string)
	var doubts []Difference
	for entry, err := range r.store.List(ctx, kindEntity) {
		if err != nil {
			return nil, nil, err
		}
		machine, entity, ok := strings.Cut(entry.Key[1:], "\x00")
		if !ok || machine != m.name {
			continue
		}
		paths[entity] = states(entry.Value)
		switch {
		case entry.Damaged != nil:
			doubts = append(doubts, Difference{Entity: entity, Detail: entry.Damaged.Error()})
		case e.doubted(paths[entity], Found{Doubt: entry.Doubt, Note: entry.Note}):
			doubts = append(doubts, Difference{Entity: entity, State: m.state(paths[entity]), Step: entry.Note, Detail: StepInDoubt})
		}
	}
	for entry, err := range r.store.List(ctx, kindStep) {
		if err != nil {
			return nil, nil, err
		}
		parts := strings.Split(entry.Key[1:], "\x00")
		if len(parts) != 3 || parts[0] != m.name {
			continue
		}
		if entry.Damaged != nil {
			doubts = append(doubts, Difference{Entity: parts[1], State: m.state(paths[parts[1]]), Step: parts[2], Detail: entry.Damaged.Error()})
		}
		marks[parts[1]] = append(marks[parts[1]], parts[2])
	}
	differences := append(doubts, m.Compare(paths, marks)...)
	for _, d := range differences {
		r.log.LogAttrs(ctx, slog.LevelWarn, "once: states and marks differ", slog.String("machine", m.name), slog.String("difference", d.String()))
	}
	return e, differences, nil
}

// Step runs effect and moves the entity to a state. If the entity has already been in the
// state, Step returns nil at once. If the machine has no such step, it returns a
// [*StepError] with both states. Steps of one entity run one after the other, in all
// processes that share the store. The rest is as in [Runner.Do]; an effect in doubt is
// looked up with the key of [StepKey].
func (e *Entities) Step(ctx context.Context, entity, to string, effect func(ctx context.Context) error) error {
	if err := checkName("entity", entity, maxEntity); err != nil {
		return err
	}
	for {
		again, err := e.step(ctx, entity, to, effect)
		if !again || err != nil {
			return err
		}
	}
}

// step is one try of Step. again means that it has ended the doubt about a step, and Step
// must call it again.
func (e *Entities) step(ctx context.Context, entity, to string, effect func(ctx context.Context) error) (again bool, err error) {
	key, name := StepKey(e.m.name, entity, to), e.name(entity)
	claim, found, err := e.r.begin(ctx, name, key, Ask{Over: true, Note: to})
	if err != nil {
		return false, err
	}
	if found.Damaged != nil {
		return false, also(fmt.Errorf("%w: %.80q: its state: %w", ErrInDoubt, key, found.Damaged), e.r.leave(ctx, claim))
	}
	path := states(found.Value)
	if found.Doubt && !e.doubted(path, found) {
		return true, e.r.release(ctx, claim) // the next call claims the key with the name of this step
	}
	doing := to // the step of the claim
	if found.Doubt {
		doing = found.Note
	}
	done, err := e.m.Check(entity, path, to)
	switch {
	case done:
		return false, e.undo(ctx, claim, found)
	case err != nil && doing == to:
		return false, also(err, e.undo(ctx, claim, found))
	}
	mark := e.mark(entity, doing)
	_, happened, err := e.r.store.Get(ctx, mark)
	if err != nil {
		return false, also(named(err, key), e.undo(ctx, claim, found))
	}
	if !happened && found.Doubt {
		if happened, err = e.r.decide(ctx, StepKey(e.m.name, entity, doing), claim); err != nil {
			return false, also(err, e.r.leave(ctx, claim))
		}
	}
	reached := reach(path, doing)
	switch {
	case happened:
		return doing != to, e.r.finish(ctx, &unmarked{name: name, key: key, claim: claim, value: reached, also: []Entry{{Key: mark}}})
	case doing != to:
		return true, e.r.release(ctx, claim)
	}
	return false, e.r.perform(ctx, &unmarked{name: name, key: key, claim: claim}, found.Doubt && e.r.records(), func(ctx context.Context) ([]byte, []Entry, error) {
		return reached, []Entry{{Key: mark}}, effect(ctx)
	})
}

// doubted reports whether a step may have happened that the path does not have. A claim in
// doubt may also be for a repeated step, which is claimed before its path is read. The path
// has that step, and its effect did not begin.
func (e *Entities) doubted(path []string, found Found) bool {
	if !found.Doubt {
		return false
	}
	done, _ := e.m.Check("", path, found.Note)
	return !done
}

func (e *Entities) name(entity string) string {
	return string(kindEntity) + e.m.name + "\x00" + entity
}

func (e *Entities) mark(entity, to string) string {
	return string(kindStep) + e.m.name + "\x00" + entity + "\x00" + to
}

func reach(path []string, to string) []byte {
	return []byte(strings.Join(append(slices.Clone(path), to), "\x00"))
}

// undo ends a claim without a step. An effect in doubt stays in doubt.
func (e *Entities) undo(ctx context.Context, c Claim, found Found) error {
	if found.Doubt {
		return e.r.leave(ctx, c)
	}
	return e.r.release(ctx, c)
}

// State returns the entity's state. A new entity is in the machine's first state.
func (e *Entities) State(ctx context.Context, entity string) (string, error) {
	if err := checkName("entity", entity, maxEntity); err != nil {
		return "", err
	}
	value, _, err := e.r.store.Get(ctx, e.name(entity))
	if err != nil {
		return "", named(err, entity)
	}
	return e.m.state(states(value)), nil
}

// Settle ends the doubt about a step of an entity. happened is the answer of a person who
// has checked the step's effect. Settle refuses a step that is not in doubt.
func (e *Entities) Settle(ctx context.Context, entity, to string, happened bool) error {
	if err := checkName("entity", entity, maxEntity); err != nil {
		return err
	}
	name := e.name(entity)
	if err := e.r.writeUnmarked(ctx, name); err != nil {
		return err
	}
	claim, found, err := e.r.store.Claim(ctx, name, Ask{Over: true, Record: true, Note: to})
	switch {
	case err != nil:
		return named(err, entity)
	case !found.Doubt || found.Note != to:
		return also(fmt.Errorf("%w: %.80q: step %.80q is not in doubt: that is %.80q", ErrKey, entity, to, found.Note), e.undo(ctx, claim, found))
	case !happened, !e.doubted(states(found.Value), found):
		return e.r.release(ctx, claim)
	}
	return e.r.finish(ctx, &unmarked{
		name: name, key: StepKey(e.m.name, entity, to), claim: claim,
		value: reach(states(found.Value), to), also: []Entry{{Key: e.mark(entity, to)}},
	})
}

// StepKey returns the name of a step, for [WithLookup] and for logs.
func StepKey(machine, entity, to string) string { return machine + "/" + entity + "/" + to }

// states decodes a path.
func states(value []byte) []string {
	if len(value) == 0 {
		return nil
	}
	return strings.Split(string(value), "\x00")
}
