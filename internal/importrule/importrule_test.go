// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package importrule

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// root is the module's folder, seen from this package's.
const root = "../.."

func TestModuleKeepsTheImportRule(t *testing.T) {
	t.Parallel()
	dependOnSources(t)

	pkgs := list(t)
	ours := 0
	for _, p := range pkgs {
		if under(p.ImportPath, Module) {
			ours++
		}
	}
	if ours < 2 {
		t.Fatalf("go list names %d packages of %s; the test would prove nothing", ours, Module)
	}

	for _, v := range Ours.Check(pkgs) {
		t.Error(v)
	}
}

// list returns the packages of this module and all that they link.
func list(t *testing.T) []Package {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps",
		"-json=ImportPath,Imports,TestImports,XTestImports", "./...")
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, stderr.Bytes())
	}

	var pkgs []Package
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p Package
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatalf("output of %v: %v", cmd, err)
		}
		pkgs = append(pkgs, p)
	}
}

// dependOnSources looks at every Go file of the module, because `go test`
// remembers a result until a file changes that the test itself looked at, and
// files that `go list` reads are not among them.
func dependOnSources(t *testing.T) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != root:
			return filepath.SkipDir
		case d.IsDir(), filepath.Ext(path) == ".go", d.Name() == "go.mod":
			_, err = os.Stat(path)
			if errors.Is(err, fs.ErrNotExist) { // an editor's file, gone meanwhile
				err = nil
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
