// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package words translates the command's texts into the user's language. The English text is
// the key of its translation. Answers of a process, such as the detail of a hold, stay English.
// Errors stay English, too: people search for them.
package words

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/text/width"
)

// A Language is a language of the command's texts.
type Language string

// The languages.
const (
	English Language = "en"
	Chinese Language = "zh"
)

// All returns all languages.
func All() []Language { return []Language{English, Chinese} }

// Flag is the name of the flag that sets the language, without dashes.
const Flag = "lang"

// Asked returns the language that a command line asks for. Without [Flag] it is the language of
// the environment: of STORMGUARD_LANG, or of messages as POSIX says. A language of the
// environment that is not in All means English; one of the flag is an error. Asked scans args
// itself: help needs the language before the command line is parsed.
func Asked(args []string, getenv func(string) string) (Language, error) {
	if len(args) > 0 && strings.HasPrefix(args[0], "__complete") { // completes an unfinished command line
		return environment(getenv), nil
	}
	for i, arg := range args {
		text, ok := strings.CutPrefix(arg, "--"+Flag+"=")
		switch {
		case arg == "--":
			return environment(getenv), nil
		case arg == "--"+Flag && i+1 < len(args):
			text = args[i+1]
		case !ok:
			continue
		}
		if !slices.Contains(All(), Language(text)) {
			return "", fmt.Errorf("--%s %q: must be en or zh", Flag, text)
		}
		return Language(text), nil
	}
	return environment(getenv), nil
}

func environment(getenv func(string) string) Language {
	for _, name := range []string{"STORMGUARD_LANG", "LC_ALL", "LC_MESSAGES", "LANG"} {
		if text := getenv(name); text != "" {
			if strings.HasPrefix(text, string(Chinese)) {
				return Chinese
			}
			return English
		}
	}
	return English
}

// Say returns a text in the language, or the text itself if it has no translation.
func (l Language) Say(text string) string {
	if l == Chinese {
		if said, ok := zh[text]; ok {
			return said
		}
	}
	return text
}

// Sayf translates a format by [Language.Say], and formats the values.
func (l Language) Sayf(format string, values ...any) string {
	return fmt.Sprintf(l.Say(format), values...)
}

// Count returns a number of things, such as "2 messages". what is the English singular.
func (l Language) Count(n int, what string) string {
	switch {
	case l == Chinese:
		return fmt.Sprintf("%d %s", n, l.Say(what))
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "s"):
		what += "e"
	}
	return fmt.Sprintf("%d %ss", n, what)
}

type key struct{}

// With returns ctx with a language.
func With(ctx context.Context, l Language) context.Context { return context.WithValue(ctx, key{}, l) }

// From returns the language of ctx, or English.
func From(ctx context.Context) Language {
	if l, ok := ctx.Value(key{}).(Language); ok {
		return l
	}
	return English
}

// Width returns the number of terminal columns that a text takes.
func Width(text string) (columns int) {
	for _, r := range text {
		switch width.LookupRune(r).Kind() {
		case width.EastAsianWide, width.EastAsianFullwidth:
			columns += 2
		default:
			columns++
		}
	}
	return columns
}
