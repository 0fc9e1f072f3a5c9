// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// Changes are a list of names, each once, by their latest mark; what is listed
// without one stands first.
func TestChangesAreAList(t *testing.T) {
	type named struct {
		name int
		mark uint64
	}
	rapid.Check(t, func(t *rapid.T) {
		var l Changes[int]
		var model []named
		var mark uint64
		all := map[int]*Change[int]{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			name := rapid.IntRange(0, 6).Draw(t, "name")
			c := all[name]
			if c == nil {
				c = &Change[int]{Of: name}
				all[name] = c
			}
			at := slices.IndexFunc(model, func(n named) bool { return n.name == name })
			switch rapid.IntRange(0, 4).Draw(t, "what") {
			case 0, 1:
				mark++
				if at >= 0 {
					model = slices.Delete(model, at, at+1)
				}
				model = append(model, named{name, mark})
				l.Touch(c)
			case 2:
				if at >= 0 {
					model = slices.Delete(model, at, at+1)
				}
				l.Remove(c)
				delete(all, name)
			case 3:
				if at < 0 {
					c.Mark = 0
					model = slices.Insert(model, 0, named{name, 0})
					l.List(c)
				}
			case 4:
				mark++
				l.Skip()
			}
			if l.Mark() != mark {
				t.Fatalf("mark %d, want %d", l.Mark(), mark)
			}
			since := rapid.Uint64Range(0, mark+1).Draw(t, "since")
			var got, want, after, lacks []named
			for c := l.First(); c != nil; c = c.Next() {
				got = append(got, named{c.Of, c.Mark})
			}
			for c := l.After(since); c != nil; c = c.Next() {
				after = append(after, named{c.Of, c.Mark})
			}
			want = append(want, model...)
			for _, n := range model {
				if n.mark > since {
					lacks = append(lacks, n)
				}
			}
			if !slices.Equal(got, want) || !slices.Equal(after, lacks) {
				t.Fatalf("%v, want %v; after %d %v, want %v", got, want, since, after, lacks)
			}
		}
		l.Remove(nil)
	})
}
