// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/words"
)

// What a process is asked for is printed in Chinese, in columns that stand below each other.
func TestChinese(t *testing.T) {
	p := newGuarded(t)
	ask := func(args ...string) string {
		t.Helper()
		out, errs, code := p.stormguard(args...)
		if code != exitOK {
			t.Fatalf("%v: %d %s", args, code, errs)
		}
		return out
	}
	if out := ask("status", "--lang", "zh"); !strings.Contains(out, "2 个消息源，0 个被暂留") {
		t.Error(out)
	}
	t.Setenv("STORMGUARD_LANG", "")
	if out := ask("status", "--config", settingsFile(t, "lang: zh\n")); !strings.Contains(out, "2 个消息源") {
		t.Errorf("by the file: %s", out)
	}
	lines := strings.Split(ask("source", "list", "--lang=zh"), "\n")
	column := func(line, of string) int {
		before, _, ok := strings.Cut(line, of)
		if !ok {
			return -1
		}
		return words.Width(before)
	}
	if at := column(lines[0], "状态"); at < 0 || at != column(lines[1], "运行中") || at != column(lines[2], "运行中") {
		t.Errorf("columns do not stand below each other:\n%s", strings.Join(lines, "\n"))
	}
	if out := ask("source", "pause", "orders", "--yes", "--lang", "zh"); !strings.Contains(out, "完成") {
		t.Error(out)
	}
	if out := ask("source", "show", "orders", "--lang", "zh"); !strings.Contains(out, "orders，消费组 billing：已暂停") || !strings.Contains(out, "被人工暂留") {
		t.Error(out)
	}
	if out := ask("report", "--lang", "zh"); !strings.Contains(out, "之前的 1h0m0s") || !strings.Contains(out, "当前：2 个消息源中 1 个被暂留") {
		t.Error(out)
	}
	var help strings.Builder
	if code := run([]string{"source", "--help", "--lang", "zh"}, &help, &help); code != exitOK {
		t.Error(code)
	}
	if out := help.String(); !strings.Contains(out, "用法：") || !strings.Contains(out, "暂停消息源") || strings.Contains(out, "Flags") {
		t.Error(out)
	}
	if out := ask("source", "list", "--lang", "zh", "-o", "json"); !strings.Contains(out, `"state":"running"`) && !strings.Contains(out, `"state":"paused"`) {
		t.Errorf("JSON is for scripts: %s", out)
	}
}

// The command line counts before the environment, and STORMGUARD_LANG before what POSIX says.
func TestLanguageIsChosen(t *testing.T) {
	for _, c := range []struct {
		args, own, all, lang string
		want                 words.Language
	}{
		{want: words.English},
		{lang: "zh_CN.UTF-8", want: words.Chinese},
		{lang: "de_DE.UTF-8", want: words.English},
		{lang: "zh_CN.UTF-8", all: "C", want: words.English},
		{lang: "C", own: "zh", want: words.Chinese},
		{lang: "zh_CN", own: "en", want: words.English},
		{args: "--lang en status", own: "zh", want: words.English},
		{args: "status --lang=zh", own: "en", want: words.Chinese},
		{args: "status -- --lang=zh", want: words.English},
		{args: "__complete status --lang z", want: words.English},
	} {
		env := map[string]string{"STORMGUARD_LANG": c.own, "LC_ALL": c.all, "LANG": c.lang}
		if got, err := words.Asked(strings.Fields(c.args), func(name string) string { return env[name] }); err != nil || got != c.want {
			t.Errorf("%+v: %q %v", c, got, err)
		}
	}
	var out, errs strings.Builder
	if code := run([]string{"status", "--lang", "fr"}, &out, &errs); code != exitUsage || !strings.Contains(errs.String(), `--lang "fr": must be en or zh`) {
		t.Errorf("%d %s", code, errs.String())
	}
}

// Each text has a translation: the commands' short texts, the flags of those that ask a
// process, and all that the code says.
func TestChineseIsComplete(t *testing.T) {
	check := func(where, text string) {
		t.Helper()
		if text != "" && words.Chinese.Say(text) == text {
			t.Errorf("%s: no Chinese for %q", where, text)
		}
	}
	root := newRoot(new(bool))
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		check(cmd.CommandPath(), cmd.Short)
		if cmd.Flags().Lookup(settingsFlag) != nil {
			cmd.Flags().VisitAll(func(f *pflag.Flag) { check(cmd.CommandPath()+" --"+f.Name, f.Usage) })
		}
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(root)
	for _, heading := range headings {
		check("help", heading)
		if !strings.Contains(root.UsageTemplate(), heading) {
			t.Errorf("cobra's help has no %q", heading)
		}
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	said := 0
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			function, text := "", -1
			switch f := call.Fun.(type) {
			case *ast.Ident:
				function = f.Name
			case *ast.SelectorExpr:
				function = f.Sel.Name
			}
			switch function {
			case "Say", "Sayf", "say":
				text = 0
			case "Count", "section":
				text = 1
			case "table", "quarantine", "change":
				text = 2
			}
			if text < 0 || text >= len(call.Args) {
				return true
			}
			literal, ok := call.Args[text].(*ast.BasicLit)
			if !ok || literal.Kind != token.STRING {
				return true
			}
			value, err := strconv.Unquote(literal.Value)
			if err != nil {
				t.Fatal(err)
			}
			said++
			texts := []string{value}
			if function == "table" || function == "section" {
				texts = strings.Split(value, "\t")
			}
			for _, text := range texts {
				check(fset.Position(call.Pos()).String(), text)
			}
			return true
		})
	}
	if said < 60 {
		t.Errorf("only %d texts were found", said)
	}
}
