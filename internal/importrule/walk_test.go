// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package importrule

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// mostFiles are how many files a message may pass on each walk of docs/design.md, those of
// the walks before it included. A change that needs one more says here why.
var mostFiles = []int{9, 15, 24}

// TestWalk holds the tables of docs/design.md against the code: each function is where the
// table says, something above it mentions it, through no file that is not listed, and no
// walk is longer than it may be.
func TestWalk(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/design.md")
	if err != nil {
		t.Fatal(err)
	}
	walks := walksOf(string(text))
	if len(walks) != len(mostFiles) {
		t.Fatalf("docs/design.md has %d walks, want %d", len(walks), len(mostFiles))
	}
	g := newCalls("../..")
	for i, w := range walks {
		for _, problem := range g.follow(w) {
			t.Errorf("%s: %s", w.title, problem)
		}
		if n := len(g.files); n > mostFiles[i] {
			t.Errorf("%s: a message passes %d files, at most %d are wanted: %v", w.title, n, mostFiles[i], g.files)
		}
	}
}

// Each table has a fault that the test must see.
func TestWalkSees(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, body := range map[string]string{
		"a.go": "package p\n\nfunc (s *S[M]) run() { s.step() }\nfunc (s *S[M]) step() { b() }\n",
		"b.go": "package p\n\nfunc b() { defer hidden() }\nfunc other() {}\n",
		"c.go": "package p\n\nfunc hidden() { far() }\n",
		"d.go": "package p\n\nfunc far() {}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	row := func(file, function string) string { return fmt.Sprintf("| it | `%s` | `%s` |\n", file, function) }
	for _, tt := range []struct{ name, table, want string }{
		{"right", "**Way: 2 files**\n\n" + row("a.go", "S.run") + row("b.go", "b"), ""},
		{"a file that is not there", "**Way: 1 files**\n\n" + row("x.go", "run"), "x.go: no such file"},
		{"a function elsewhere", "**Way: 1 files**\n\n" + row("a.go", "b"), "a.go has no b"},
		{"nobody calls it", "**Way: 2 files**\n\n" + row("a.go", "S.run") + row("b.go", "other"), "nothing above calls other"},
		{"through another file", "**Way: 3 files**\n\n" + row("a.go", "S.run") + row("b.go", "b") + row("d.go", "far"), "nothing above calls far"},
		{"a wrong number", "**Way: 3 files**\n\n" + row("a.go", "S.run") + row("b.go", "b"), "says 3 files, and lists 2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			walks := walksOf(tt.table)
			if len(walks) != 1 {
				t.Fatalf("%d walks, want 1", len(walks))
			}
			if got := strings.Join(newCalls(dir).follow(walks[0]), "; "); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// walk is one table.
type walk struct {
	title string
	files int // new ones, as it says
	rows  []struct{ file, function string }
}

var (
	walkTitle = regexp.MustCompile(`^\*\*(.*): (\d+) (?:more )?files\*\*$`)
	walkRow   = regexp.MustCompile("^\\| .* \\| `([^`]*[.]go)` \\| `([^`]*)` \\|$")
)

func walksOf(text string) (all []walk) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if m := walkTitle.FindStringSubmatch(line); m != nil {
			n, _ := strconv.Atoi(m[2])
			all = append(all, walk{title: m[1], files: n})
		} else if m := walkRow.FindStringSubmatch(line); m != nil && len(all) > 0 {
			w := &all[len(all)-1]
			w.rows = append(w.rows, struct{ file, function string }{m[1], m[2]})
		}
	}
	return all
}

// calls are the functions of the files that were listed so far, and what they mention.
type calls struct {
	root     string
	files    []string
	decls    map[string]map[string]bool // "file function": the names in its body
	simple   map[string][]string        // the last part of a name: its decls
	followed []string                   // decls of the rows so far
}

func newCalls(root string) *calls {
	return &calls{root: root, decls: make(map[string]map[string]bool), simple: make(map[string][]string)}
}

// follow goes through a walk, after those before it, and says what is wrong with it.
func (c *calls) follow(w walk) (problems []string) {
	before := len(c.files)
	for _, r := range w.rows {
		if err := c.read(r.file); err != nil {
			return append(problems, err.Error())
		}
	}
	for _, r := range w.rows {
		name := r.file + " " + r.function
		switch {
		case c.decls[name] == nil:
			problems = append(problems, r.file+" has no "+r.function)
			continue
		case len(c.followed) > 0 && !c.reached()[name]:
			problems = append(problems, "nothing above calls "+r.function)
		}
		c.followed = append(c.followed, name)
	}
	if n := len(c.files) - before; n != w.files {
		problems = append(problems, fmt.Sprintf("says %d files, and lists %d", w.files, n))
	}
	return problems
}

// reached are the functions that those followed so far call or hand on, directly or by
// others of the same files.
func (c *calls) reached() map[string]bool {
	found := make(map[string]bool)
	left := slices.Clone(c.followed)
	for len(left) > 0 {
		name := left[len(left)-1]
		left = left[:len(left)-1]
		for mentioned := range c.decls[name] {
			for _, d := range c.simple[mentioned] {
				if !found[d] {
					found[d] = true
					left = append(left, d)
				}
			}
		}
	}
	return found
}

// read takes in the functions of a file, once.
func (c *calls) read(file string) error {
	if slices.Contains(c.files, file) {
		return nil
	}
	parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(c.root, file), nil, parser.SkipObjectResolution)
	if os.IsNotExist(err) {
		return fmt.Errorf("%s: no such file", file)
	} else if err != nil {
		return err
	}
	c.files = append(c.files, file)
	for _, d := range parsed.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		name := file + " " + nameOf(f)
		mentions := make(map[string]bool)
		ast.Inspect(f.Body, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok {
				mentions[id.Name] = true
			}
			return true
		})
		c.decls[name] = mentions
		c.simple[f.Name.Name] = append(c.simple[f.Name.Name], name)
	}
	return nil
}

// nameOf is "Type.method", without pointer and type parameters, or "function".
func nameOf(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	for t := f.Recv.List[0].Type; ; {
		switch of := t.(type) {
		case *ast.StarExpr:
			t = of.X
		case *ast.IndexExpr:
			t = of.X
		case *ast.IndexListExpr:
			t = of.X
		case *ast.Ident:
			return of.Name + "." + f.Name.Name
		default:
			return f.Name.Name
		}
	}
}
