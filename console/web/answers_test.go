// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// Each text of a hold, a storm, an event or a breaker's cause has its Chinese.
func TestAnswersAreTranslated(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("src", "answers.ts"))
	if err != nil {
		t.Fatal(err)
	}
	verb := regexp.MustCompile(`%[a-z]`)
	texts := 0
	for file, names := range map[string]string{
		"guard/source.go":            "noWriterHelp state pauseHold breakerHold",
		"guard/fleet.go":             "fleetDetail",
		"guard/spill.go":             "spillHoldLocked",
		"guard/evidence.go":          "causeOutage",
		"guard/sweep.go":             "causeStorm",
		"breaker/state.go":           "CauseRate CauseRun CauseSlow CauseProbe CauseLost CauseQuorum CauseReleased",
		"dlq/storm.go":               "String",
		"internal/storm/detector.go": "basisWindow basisKept basisTrip basisProbes",
		"dlq/record.go":              "ReasonAttempts ReasonPermanent ReasonPoisonHead ReasonGuess ReasonLastDelivery ReasonOperator ReasonQuarantine",
		"console/events.go":          "EventOpened EventClosed EventStormBegan EventStormEnded EventDead EventOrder EventRefused",
	} {
		tree, err := parser.ParseFile(token.NewFileSet(), filepath.Join("..", "..", file), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for name := range strings.FieldsSeq(names) {
			found := literals(tree, name)
			if len(found) == 0 {
				t.Errorf("%s has no %s with a text", file, name)
			}
			for _, text := range found {
				texts++
				if want := verb.ReplaceAllString(text, "*"); !strings.Contains(string(page), want) {
					t.Errorf("%s: %s: no Chinese for %q", file, name, want)
				}
			}
		}
	}
	t.Logf("%d texts", texts)
}

// literals are the texts of more than two letters in a function or a constant.
func literals(tree *ast.File, name string) (all []string) {
	collect := func(n ast.Node) bool {
		if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
			if text, err := strconv.Unquote(l.Value); err == nil && len(text) > 2 {
				all = append(all, text)
			}
		}
		return true
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		switch d := n.(type) {
		case *ast.FuncDecl:
			if d.Name.Name == name {
				ast.Inspect(d.Body, collect)
			}
		case *ast.ValueSpec:
			if d.Names[0].Name == name {
				ast.Inspect(d, collect)
			}
		default:
		}
		return true
	})
	return all
}
