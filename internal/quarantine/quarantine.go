// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package quarantine has the list of rules of a single process, and the parts that all lists of
// rules share. Rules and entries are types of package dlq.
package quarantine

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// Max is the largest number of entries of a list.
const Max = 10_000

// New returns an empty list of this process alone, in memory. Entries end by the wall time that
// wall returns: [time.Now] in a program.
func New(wall func() time.Time) dlq.Quarantine {
	return &list{wall: wall, entries: make(map[dlq.Rule]dlq.QuarantineEntry), watchers: make(map[*func()]struct{})}
}

type list struct {
	wall func() time.Time

	mu       sync.Mutex
	entries  map[dlq.Rule]dlq.QuarantineEntry
	watchers map[*func()]struct{}
}

func (q *list) Add(e dlq.QuarantineEntry) error {
	now := q.wall()
	e = e.WithDefaults(now)
	e.At, e.Until = e.At.Round(0), e.Until.Round(0) // wall time: it goes on while the host is suspended
	if err := e.Validate(now); err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if _, ok := q.entries[e.Rule]; !ok && len(q.entries) >= Max {
		maps.DeleteFunc(q.entries, func(_ dlq.Rule, e dlq.QuarantineEntry) bool { return !e.Until.After(now) })
		if len(q.entries) >= Max {
			return fmt.Errorf("%w: the list has %d entries, the most there may be: remove some", dlq.ErrQuarantine, len(q.entries))
		}
	}
	q.entries[e.Rule] = e
	q.tellLocked()
	return nil
}

func (q *list) Remove(r dlq.Rule, _ string) error {
	if err := r.Validate(); err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.entries, r)
	q.tellLocked()
	return nil
}

func (q *list) Entries() []dlq.QuarantineEntry {
	q.mu.Lock()
	defer q.mu.Unlock()
	return InForce(q.wall(), maps.Values(q.entries))
}

// InForce returns the entries whose time is not over, the oldest first. It is for implementations
// of [dlq.Quarantine].
func InForce(now time.Time, all func(yield func(dlq.QuarantineEntry) bool)) []dlq.QuarantineEntry {
	var in []dlq.QuarantineEntry
	for e := range all {
		if e.Until.After(now) {
			in = append(in, e)
		}
	}
	slices.SortFunc(in, func(a, b dlq.QuarantineEntry) int {
		return cmp.Or(a.At.Compare(b.At), strings.Compare(a.Rule.String(), b.Rule.String()))
	})
	return in
}

func (q *list) Watch(f func()) (stop func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.watchers[&f] = struct{}{}
	return func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		delete(q.watchers, &f)
	}
}

func (q *list) tellLocked() {
	for f := range q.watchers {
		(*f)()
	}
}
