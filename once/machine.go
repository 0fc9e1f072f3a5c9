// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package once

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxName is the longest name of a machine or state, and maxEntity that of an entity, in
// bytes.
const (
	maxName   = 64
	maxEntity = 512
)

// A Machine declares the states of an entity and the steps between them. No steps lead back
// to an earlier state: that is how a repeated step is distinguished from a new one. A
// Machine is immutable and safe for concurrent use.
type Machine struct {
	name, first string
	next        map[string][]string
}

// NewMachine makes a machine. first is the state in which every entity begins; steps lists
// for each state the states that may follow. A state without followers is an end. Names
// have 1 to 64 bytes. All problems are reported at once: a name that is not allowed, a
// state that cannot be reached, a cycle.
func NewMachine(name, first string, steps map[string][]string) (*Machine, error) {
	m := &Machine{name: name, first: first, next: make(map[string][]string, len(steps))}
	var errs []error
	check := func(what, name string) {
		if err := checkName(what, name, maxName); err != nil {
			errs = append(errs, fmt.Errorf("once: machine %.80q: %w", m.name, err))
		}
	}
	check("name", name)
	check("first state", first)
	for _, from := range slices.Sorted(maps.Keys(steps)) {
		check("state", from)
		for _, to := range steps[from] {
			check("state", to)
		}
		m.next[from] = slices.Clone(steps[from])
	}
	reached := make(map[string]bool)
	if cycle := m.walk(first, nil, reached); cycle != nil {
		errs = append(errs, fmt.Errorf("once: machine %.80q: a cycle: %s: it must have none", name, strings.Join(cycle, " → ")))
	}
	for _, from := range slices.Sorted(maps.Keys(steps)) {
		if !reached[from] {
			errs = append(errs, fmt.Errorf("once: machine %.80q: state %.80q: it must be reachable from %.80q", name, from, first))
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return m, nil
}

// walk marks the states that can be reached from at, and returns a cycle if there is one.
func (m *Machine) walk(at string, path []string, reached map[string]bool) (cycle []string) {
	if i := slices.Index(path, at); i >= 0 {
		return append(slices.Clone(path[i:]), at)
	}
	if reached[at] {
		return nil
	}
	path = append(path, at)
	for _, to := range m.next[at] {
		if cycle = m.walk(to, path, reached); cycle != nil {
			break
		}
	}
	reached[at] = true
	return cycle
}

func checkName(what, name string, longest int) error {
	if len(name) < 1 || len(name) > longest || strings.ContainsRune(name, 0) {
		return fmt.Errorf("%w: %s %.80q: it must be 1 to %d bytes, without a zero byte", ErrKey, what, name, longest)
	}
	return nil
}

// Name returns the machine's name.
func (m *Machine) Name() string { return m.name }

// Check says what a step to a state means for an entity. path lists the states that the
// entity has been in, in order; an empty path means a new entity in the machine's first
// state. done means that the entity has already been in the state: the step is a
// repetition. A step that the machine does not have is a [*StepError].
func (m *Machine) Check(entity string, path []string, to string) (done bool, err error) {
	at := m.state(path)
	if to == m.first || slices.Contains(path, to) {
		return true, nil
	}
	if !slices.Contains(m.next[at], to) {
		return false, &StepError{Machine: m.name, Entity: entity, From: at, To: to}
	}
	return false, nil
}

func (m *Machine) state(path []string) string {
	if len(path) == 0 {
		return m.first
	}
	return path[len(path)-1]
}

// A Difference is a mismatch between the two records of an entity: its states, and the
// marks of its steps' effects.
type Difference struct {
	Entity string
	State  string // the entity's state by its recorded states
	Step   string // the state that the step leads to
	Detail string
}

func (d Difference) String() string {
	return fmt.Sprintf("%.80q in state %q, step to %q: %s", d.Entity, d.State, d.Step, d.Detail)
}

// Details of differences.
const (
	// MarkOnly means that the effect has happened, but the state was not written, for
	// example because of a crash between the two. The next delivery of the step writes the
	// state and skips the effect.
	MarkOnly = "the effect is marked, the state is not reached"
	// StateOnly means that the state was written, but the mark is missing, for example in a
	// store that was restored in part. The state counts: the effect does not run again.
	StateOnly = "the state is reached, the effect is not marked"
	// NoStep means that the machine has no such step, for example after a change of the
	// program.
	NoStep = "the machine has no such step"
	// StepInDoubt means that the step's effect began, and nobody knows whether it happened,
	// or that it is under way.
	StepInDoubt = "the step is in doubt or under way"
)

// Compare returns the differences between paths, the states that entities have been in, in
// order, and marks, their steps with a marked effect. Only the latest state of an entity
// must have its mark, since marks of older steps are forgotten first. It is for programs
// that keep states in tables of their own; [NewEntities] calls it with the data of a store.
func (m *Machine) Compare(paths map[string][]string, marks map[string][]string) []Difference {
	var found []Difference
	add := func(entity, step, detail string) {
		found = append(found, Difference{Entity: entity, State: m.state(paths[entity]), Step: step, Detail: detail})
	}
	for _, entity := range slices.Sorted(maps.Keys(paths)) {
		path := paths[entity]
		for i, to := range path {
			if done, err := m.Check(entity, path[:i], to); done || err != nil {
				add(entity, to, NoStep)
			}
		}
		if at := m.state(path); at != m.first && !slices.Contains(marks[entity], at) {
			add(entity, at, StateOnly)
		}
	}
	for _, entity := range slices.Sorted(maps.Keys(marks)) {
		for _, step := range slices.Sorted(slices.Values(marks[entity])) {
			if !slices.Contains(paths[entity], step) {
				add(entity, step, MarkOnly)
			}
		}
	}
	return found
}
