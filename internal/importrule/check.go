// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package importrule

import (
	"fmt"
	"slices"
	"strings"
)

// A Package is one node of an import graph, with the field names of `go list -json`.
type Package struct {
	ImportPath   string
	Imports      []string
	TestImports  []string // imports of _test.go files in the package
	XTestImports []string // imports of _test.go files in the external test package
}

// A Violation is one import that the rules refuse.
type Violation struct {
	Package string
	Import  string
	Chain   []string // from Package to Import, when it is not direct
	Test    bool     // only test files import it
	Reason  string
	Remedy  string
}

// String returns three lines: the import, why it is refused, and what to do.
func (v Violation) String() string {
	what := "imports"
	if v.Test {
		what = "imports in its tests"
	}
	if len(v.Chain) > 2 {
		what = "links"
	}
	s := fmt.Sprintf("%s %s %s", v.Package, what, v.Import)
	if len(v.Chain) > 2 {
		s += "\n\tthrough " + strings.Join(v.Chain, " -> ")
	}
	return s + "\n\t" + v.Reason + "\n\t" + v.Remedy
}

// What to do about a violation. The file to edit is rules.go.
const (
	remedyRoom   = "a new package: add a line to Rooms in internal/importrule/rules.go that says what it may import and why"
	remedyArrow  = "if the arrow is wanted: add it to Rooms in internal/importrule/rules.go and to docs/design.md, and say why"
	remedyBan    = "import it elsewhere, or change Bans in internal/importrule/rules.go and say why"
	remedyHome   = "use it through the room it lives in, or change Homes in internal/importrule/rules.go and say why"
	remedyNoHome = "a new library: add a line to Homes in internal/importrule/rules.go with its one home and the reason for needing it"
)

// Check returns every import in pkgs that r refuses, sorted. Packages outside [Module] are
// not checked; deep bans follow imports through them.
func (r Rules) Check(pkgs []Package) []Violation {
	graph := make(map[string][]string, len(pkgs))
	for _, p := range pkgs {
		graph[p.ImportPath] = p.Imports
	}

	var found []Violation
	for _, p := range pkgs {
		if !under(p.ImportPath, Module) {
			continue
		}
		room, ok := r.room(p.ImportPath)
		if !ok {
			found = append(found, Violation{
				Package: p.ImportPath, Import: "(anything)", Reason: "it belongs to no room", Remedy: remedyRoom,
			})
			continue
		}
		for _, imp := range p.Imports {
			found = append(found, r.checkImport(room, p.ImportPath, imp, false)...)
		}
		for _, imp := range testOnly(p) {
			found = append(found, r.checkImport(room, p.ImportPath, imp, true)...)
		}
		found = append(found, r.checkDeep(room, p.ImportPath, graph)...)
	}
	slices.SortFunc(found, func(a, b Violation) int {
		if c := strings.Compare(a.Package, b.Package); c != 0 {
			return c
		}
		return strings.Compare(a.Import, b.Import)
	})
	return found
}

func (r Rules) checkImport(room Room, pkg, imp string, test bool) []Violation {
	v := Violation{Package: pkg, Import: imp, Test: test}
	var found []Violation

	switch {
	case under(imp, Module):
		to, ok := r.room(imp)
		if !ok || to.Path != room.Path && !matchesAny(room.May, to.Path) && !(test && matchesAny(room.MayTest, to.Path)) {
			v.Reason, v.Remedy = room.Path+": "+room.Why, remedyArrow
			found = append(found, v)
		}
	case !standard(imp):
		home, ok := r.home(imp)
		switch {
		case !ok:
			v.Reason, v.Remedy = "no rule knows this library", remedyNoHome
			found = append(found, v)
		case !matchesAny(home.Rooms, room.Path) && !(test && home.Tests):
			v.Reason = fmt.Sprintf("%s (%s) lives in %s", home.Imports, home.Why, strings.Join(home.Rooms, ", "))
			if home.Tests {
				v.Reason += " and in tests"
			}
			v.Remedy = remedyHome
			found = append(found, v)
		}
	}

	for _, b := range r.Bans {
		if b.concerns(room) && (!test || b.Tests) && matchesAny(b.Imports, imp) {
			v.Reason, v.Remedy = b.Why, remedyBan
			found = append(found, v)
		}
	}
	return found
}

// checkDeep reports banned packages that the package links through others. Direct imports
// are left to checkImport.
func (r Rules) checkDeep(room Room, pkg string, graph map[string][]string) []Violation {
	var deep []Ban
	for _, b := range r.Bans {
		if b.Deep && b.concerns(room) {
			deep = append(deep, b)
		}
	}
	if len(deep) == 0 {
		return nil
	}

	// Breadth first, so that the chain in the message is a shortest one.
	from := map[string]string{pkg: ""}
	var found []Violation
	for queue := []string{pkg}; len(queue) > 0; queue = queue[1:] {
		for _, imp := range graph[queue[0]] {
			if _, seen := from[imp]; seen {
				continue
			}
			from[imp] = queue[0]
			queue = append(queue, imp)
			if queue[0] == pkg {
				continue
			}
			for _, b := range deep {
				// A refused package imports more of itself: one report is enough.
				if matchesAny(b.Imports, imp) && !matchesAny(b.Imports, queue[0]) {
					found = append(found, Violation{
						Package: pkg, Import: imp, Chain: chain(from, imp), Reason: b.Why, Remedy: remedyBan,
					})
				}
			}
		}
	}
	return found
}

func chain(from map[string]string, to string) []string {
	var path []string
	for p := to; p != ""; p = from[p] {
		path = append(path, p)
	}
	slices.Reverse(path)
	return path
}

// room returns the room of an import path: the one with the longest matching path.
func (r Rules) room(imp string) (Room, bool) {
	var best Room
	ok := false
	for _, room := range r.Rooms {
		if under(imp, Module+"/"+room.Path) && len(room.Path) > len(best.Path) {
			best, ok = room, true
		}
	}
	return best, ok
}

// home returns the home of an import path: the one with the longest matching path.
func (r Rules) home(imp string) (Home, bool) {
	var best Home
	ok := false
	for _, h := range r.Homes {
		if under(imp, h.Imports) && len(h.Imports) > len(best.Imports) {
			best, ok = h, true
		}
	}
	return best, ok
}

func (b Ban) concerns(room Room) bool {
	return matchesAny(b.Rooms, room.Path) && !matchesAny(b.Except, room.Path)
}

// testOnly returns the imports of test files only, once each.
func testOnly(p Package) []string {
	all := slices.Concat(p.TestImports, p.XTestImports)
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(imp string) bool {
		return slices.Contains(p.Imports, imp)
	})
}

func matchesAny(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		if root, ok := strings.CutSuffix(pattern, "/..."); ok {
			return under(path, root)
		}
		return path == pattern
	})
}

// under reports whether path is root or below it.
func under(path, root string) bool {
	rest, ok := strings.CutPrefix(path, root)
	return ok && (rest == "" || rest[0] == '/')
}

// standard reports whether an import is of the standard library, whose paths
// have no dot in their first element, or the pseudo-package C.
func standard(imp string) bool {
	first, _, _ := strings.Cut(imp, "/")
	return !strings.Contains(first, ".")
}
