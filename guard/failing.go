// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"slices"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A Failing is an error of unsettled messages.
type Failing struct {
	Cause    dlq.Cause
	Class    Class // of one of them
	Messages int   // unsettled messages that failed with it last
	Attempts int   // the most calls of one of them so far
}

// mostFailing bounds the errors that Failing looks at.
const mostFailing = 1000

// Failing groups the unsettled messages that have failed by their latest error, those of most
// messages first. It looks at any 1,000 of them. In an outage most messages wait without a call,
// so those that have failed are few.
//
// The cost is one look at each unsettled message under the source's lock, and a fingerprint of
// each error without it.
func (s *Source[M]) Failing() []Failing {
	type failed struct {
		words dlq.ErrorInfo
		stack []byte
		class Class
		tries int
	}
	var all []failed
	look := func(it *item[M]) {
		if n := len(it.failures); n > 0 && len(all) < mostFailing {
			latest := it.failures[n-1]
			all = append(all, failed{latest.words, latest.stack, it.class, it.tries})
		}
	}
	s.mu.Lock()
	s.c.items(look)
	for it := range s.c.writing {
		look(it)
	}
	s.mu.Unlock()

	groups := make(map[string]*Failing)
	for _, f := range all {
		f.words.Stack = string(f.stack)
		cause := f.words.Fingerprint()
		g := groups[cause.ID]
		if g == nil {
			g = &Failing{Cause: cause, Class: f.class}
			groups[cause.ID] = g
		}
		g.Messages++
		g.Attempts = max(g.Attempts, f.tries)
	}
	out := make([]Failing, 0, len(groups))
	for _, g := range groups {
		out = append(out, *g)
	}
	slices.SortFunc(out, func(a, b Failing) int {
		return cmp.Or(cmp.Compare(b.Messages, a.Messages), cmp.Compare(a.Cause.ID, b.Cause.ID))
	})
	return out
}

// Failing returns nil: a function keeps no message.
func (f *Func[M]) Failing() []Failing { return nil }
