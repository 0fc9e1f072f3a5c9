// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package apilist_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stormguard-mq/stormguard/internal/apilist"
)

var update = flag.Bool("update", false, "write api/*.txt anew")

const root = "../.."

// The front of the library is what api/*.txt says.
func TestListing(t *testing.T) {
	packages, err := apilist.Public(root)
	if err != nil {
		t.Fatal(err)
	}
	api := filepath.Join(root, "api")
	old, err := filepath.Glob(filepath.Join(api, "*.txt"))
	if err != nil {
		t.Fatal(err)
	}
	stale := make(map[string]bool)
	for _, f := range old {
		stale[filepath.Base(f)] = true
	}
	total := 0
	for _, p := range packages {
		total += p.Names
		delete(stale, p.File())
		path := filepath.Join(api, p.File())
		if *update {
			if err := os.WriteFile(path, []byte(p.Text()), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		was, err := os.ReadFile(path)
		if err != nil {
			t.Errorf("%s is not listed: %v", p.Dir, err)
			continue
		}
		for _, line := range difference(string(was), p.Text()) {
			t.Errorf("%s: %s", p.Dir, line)
		}
	}
	for f := range stale {
		if *update {
			if err := os.Remove(filepath.Join(api, f)); err != nil {
				t.Fatal(err)
			}
			continue
		}
		t.Errorf("api/%s lists a package that is not there", f)
	}
	if t.Failed() {
		t.Log("if the change of the front is meant: go test ./internal/apilist -update")
	}
	t.Logf("%d packages, %d names", len(packages), total)
}

// difference tells which lines are only in one of two texts.
func difference(was, is string) (lines []string) {
	only := func(mark, a, b string) {
		in := make(map[string]bool)
		for line := range strings.Lines(b) {
			in[line] = true
		}
		for line := range strings.Lines(a) {
			if !in[line] {
				lines = append(lines, mark+strings.TrimSpace(line))
			}
		}
	}
	only("- ", was, is)
	only("+ ", is, was)
	return lines
}

// A change of each kind of name is a change of the listing.
func TestListsEveryKind(t *testing.T) {
	dir := t.TempDir()
	src := `package p

const C, c = 1, 2

var V int

func F(a int, b ...string) (n int, err error) { return 0, nil }

type T[K comparable] struct {
	A, b int
	*E
}

func (t *T[K]) M() {}
func (t T[K]) m()  {}

type E struct{}

type I interface {
	E2
	Do(x int) error
}

type E2 interface{ hidden() }

type hidden struct{}

func (hidden) Exported() {}

type N = int
`
	if err := os.WriteFile(filepath.Join(dir, "p.go"), []byte(src), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "internal", "q"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "internal", "q", "q.go"), []byte("package q\n\nvar X int\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := apilist.Public(dir)
	if err != nil || len(got) != 1 {
		t.Fatalf("%d packages, %v", len(got), err)
	}
	want := strings.Join([]string{
		"const C",
		"field T *E",
		"field T.A int",
		"func F(a int, b ...string) (n int, err error)",
		"interface I E2",
		"interface I.Do(x int) error",
		"method (*T[K]) M()",
		"type E struct",
		"type E2 interface",
		"type I interface",
		"type N = int",
		"type T[K comparable] struct",
		"var V",
	}, "\n")
	if have := strings.Join(got[0].Lines, "\n"); have != want {
		t.Errorf("listed:\n%s\nwant:\n%s", have, want)
	}
	if got[0].Names != 8 {
		t.Errorf("%d names, want 8", got[0].Names)
	}
}
