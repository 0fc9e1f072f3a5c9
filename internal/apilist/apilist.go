// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package apilist lists the exported names of this module's public packages. The list is
// committed as api/*.txt, one file for each package. So a review sees every change of the
// API as changed lines.
//
// Write the list again from the root of the project:
//
//	go test ./internal/apilist -update
package apilist

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/printer"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A Package is one public package.
type Package struct {
	Dir   string   // relative to the root, with slashes
	Name  string   // the package's name in code
	Names int      // exported constants, variables, functions and types
	Lines []string // one line for each name, method and field, sorted
}

// File returns the name of the package's file in api.
func (p Package) File() string { return strings.ReplaceAll(p.Dir, "/", "-") + ".txt" }

// Text returns the content of the file.
func (p Package) Text() string {
	return fmt.Sprintf("package %s // %s, %d names\n\n%s\n", p.Name, p.Dir, p.Names, strings.Join(p.Lines, "\n"))
}

// Public returns the packages below root that a user can import, in the order of their
// folders. It leaves out programs and other modules.
func Public(root string) ([]Package, error) {
	var found []Package
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		name := d.Name()
		if path != root {
			if name == "internal" || name == "testdata" || strings.HasPrefix(name, ".") {
				return filepath.SkipDir
			}
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil {
				return filepath.SkipDir
			}
		}
		b, err := build.Default.ImportDir(path, 0)
		if err != nil || b.Name == "main" {
			return nil //nolint:nilerr // a folder without a Go package
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		p, err := list(path, b.GoFiles)
		if err != nil {
			return err
		}
		p.Dir, p.Name = filepath.ToSlash(rel), b.Name
		found = append(found, p)
		return nil
	})
	return found, err
}

// list reads the exported names of a package from its files.
func list(dir string, files []string) (Package, error) {
	l := lister{fset: token.NewFileSet()}
	for _, f := range files {
		parsed, err := parser.ParseFile(l.fset, filepath.Join(dir, f), nil, parser.SkipObjectResolution)
		if err != nil {
			return Package{}, err
		}
		for _, d := range parsed.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				l.function(d)
			case *ast.GenDecl:
				l.declaration(d)
			}
		}
	}
	slices.Sort(l.lines)
	return Package{Names: l.names, Lines: l.lines}, nil
}

type lister struct {
	fset  *token.FileSet
	names int
	lines []string
}

func (l *lister) add(line string) { l.lines = append(l.lines, line) }

// name adds a line that counts as a name.
func (l *lister) name(line string) {
	l.names++
	l.add(line)
}

// source returns the source text of a node, on one line.
func (l *lister) source(n ast.Node) string {
	var b bytes.Buffer
	if err := printer.Fprint(&b, l.fset, n); err != nil {
		return err.Error()
	}
	return strings.Join(strings.Fields(b.String()), " ")
}

func (l *lister) function(d *ast.FuncDecl) {
	if !d.Name.IsExported() {
		return
	}
	signature := strings.TrimPrefix(l.source(d.Type), "func")
	if d.Recv == nil {
		l.name("func " + d.Name.Name + signature)
		return
	}
	receiver := l.source(d.Recv.List[0].Type)
	if ast.IsExported(strings.TrimLeft(receiver, "*")) {
		l.add(fmt.Sprintf("method (%s) %s%s", receiver, d.Name.Name, signature))
	}
}

func (l *lister) declaration(d *ast.GenDecl) {
	for _, s := range d.Specs {
		switch s := s.(type) {
		case *ast.ValueSpec:
			for _, n := range s.Names {
				if n.IsExported() {
					l.name(d.Tok.String() + " " + n.Name)
				}
			}
		case *ast.TypeSpec:
			if s.Name.IsExported() {
				l.typed(s)
			}
		}
	}
}

// typed adds a type, and its exported fields or methods.
func (l *lister) typed(s *ast.TypeSpec) {
	name := s.Name.Name
	if s.TypeParams != nil {
		name += l.typeParams(s.TypeParams)
	}
	switch t := s.Type.(type) {
	case *ast.StructType:
		l.name("type " + name + " struct")
		l.fields("field "+s.Name.Name+".", t.Fields)
	case *ast.InterfaceType:
		l.name("type " + name + " interface")
		l.fields("interface "+s.Name.Name+".", t.Methods)
	default:
		equals := " "
		if s.Assign.IsValid() {
			equals = " = "
		}
		l.name("type " + name + equals + l.source(t))
	}
}

func (l *lister) typeParams(list *ast.FieldList) string {
	var params []string
	for _, f := range list.List {
		for _, n := range f.Names {
			params = append(params, n.Name+" "+l.source(f.Type))
		}
	}
	return "[" + strings.Join(params, ", ") + "]"
}

func (l *lister) fields(prefix string, list *ast.FieldList) {
	for _, f := range list.List {
		text := l.source(f.Type)
		if _, ok := f.Type.(*ast.FuncType); ok && strings.HasPrefix(prefix, "interface") {
			text = strings.TrimPrefix(text, "func")
		} else {
			text = " " + text
		}
		for _, n := range f.Names {
			if n.IsExported() {
				l.add(prefix + n.Name + text)
			}
		}
		if len(f.Names) == 0 { // embedded
			l.add(strings.TrimSuffix(prefix, ".") + text)
		}
	}
}
