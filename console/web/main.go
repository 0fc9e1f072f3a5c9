// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command web builds the console's page from src into console/dist. The result is
// committed, so a program that imports console needs neither Node.js nor a bundler. The
// command needs npm.
//
//	go run .
package main

import (
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/evanw/esbuild/pkg/api"
)

const dist = "../dist"

func main() {
	files, err := build()
	if err != nil {
		log.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dist, name), text, 0o644); err != nil { //nolint:gosec // it is to be read by everybody
			log.Fatal(err)
		}
	}
}

// build installs the packages of package-lock.json, checks the types, and returns the files
// of dist.
func build() (map[string][]byte, error) {
	for _, c := range [][]string{
		{"npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"},
		{filepath.Join("node_modules", ".bin", "tsc"), "-p", "."},
	} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil { //nolint:gosec,noctx // a command of two
			return nil, fmt.Errorf("%v: %w\n%s", c, err, out)
		}
	}
	page, err := os.ReadFile(filepath.Join("src", "index.html"))
	if err != nil {
		return nil, err
	}
	licence, err := os.ReadFile(filepath.Join("node_modules", "preact", "LICENSE"))
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{"index.html": page, "preact.LICENSE": licence}
	result := api.Build(api.BuildOptions{
		EntryPoints: []string{"src/app.tsx", "src/app.css"}, Outdir: dist, Bundle: true, LogLevel: api.LogLevelSilent,
		MinifyWhitespace: true, MinifyIdentifiers: true, MinifySyntax: true, Charset: api.CharsetUTF8,
		Format: api.FormatESModule, Target: api.ES2022, JSX: api.JSXAutomatic, JSXImportSource: "preact", LegalComments: api.LegalCommentsNone,
	})
	for _, m := range result.Errors {
		err = fmt.Errorf("%s: %v", m.Text, m.Location)
	}
	for _, f := range result.OutputFiles {
		files[filepath.Base(f.Path)] = f.Contents
	}
	return files, err
}
