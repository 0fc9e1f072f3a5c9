// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package examples tests that the programs beside it can be copied out.
package examples

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const module = "github.com/stormguard-mq/stormguard"

// Each program builds in a module of its own that has nothing but it: what it imports, a
// user can import. The programs' own tests run them.
func TestCopiedOut(t *testing.T) {
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	mains, err := filepath.Glob("*/main.go")
	if err != nil || len(mains) == 0 {
		t.Fatal("no programs", err)
	}
	for _, main := range mains {
		from := filepath.Dir(main)
		t.Run(from, func(t *testing.T) {
			dir := t.TempDir()
			sources, err := filepath.Glob(filepath.Join(from, "*.go"))
			if err != nil {
				t.Fatal(err)
			}
			for _, source := range sources {
				if !strings.HasSuffix(source, "_test.go") {
					write(t, filepath.Join(dir, filepath.Base(source)), read(t, source))
				}
			}
			write(t, filepath.Join(dir, "go.mod"), goMod(t, from, root))
			list := exec.CommandContext(t.Context(), "go", "list", "-export", ".") // it compiles, and does not link
			list.Dir = dir
			list.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOSUMDB=off", "GOWORK=off")
			out, err := list.CombinedOutput()
			if err != nil {
				t.Errorf("go list -export: %v\n%s", err, out)
			}
		})
	}
}

// own tells whether an example is a module of its own already, since it needs more than
// stormguard has.
func own(example string) bool {
	_, err := os.Stat(filepath.Join(example, "go.mod"))
	return err == nil
}

var goLine = regexp.MustCompile(`(?m)^go .*$`)

// goMod is what go mod init and go get make, with stormguard taken from the checkout.
func goMod(t *testing.T, example, root string) []byte {
	t.Helper()
	if own(example) {
		text := string(read(t, filepath.Join(example, "go.mod")))
		return []byte(strings.Replace(text, module+" => ../..", module+" => "+root, 1))
	}
	version := goLine.FindString(string(read(t, filepath.Join(root, "go.mod"))))
	return []byte("module example\n\n" + version + "\n\nrequire " + module + " v0.0.0\n\nreplace " + module + " => " + root + "\n")
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func write(t *testing.T, name string, data []byte) {
	t.Helper()
	if err := os.WriteFile(name, data, 0o600); err != nil {
		t.Fatal(err)
	}
}
