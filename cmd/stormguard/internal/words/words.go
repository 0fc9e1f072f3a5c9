// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package words says the command's texts in the person's language. The English text is the
// key of its translation. What a process answers, such as the detail of a hold, is English, and
// so are errors: people search for them.
package words

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/text/width"
)

// A Language has a text for each English one.
type Language string

// The languages.
const (
	English Language = "en"
	Chinese Language = "zh"
)

// All are the languages.
func All() []Language { return []Language{English, Chinese} }

// Flag is the flag that asks for a language.
const Flag = "lang"

// Asked is the language that a command line asks for, or else the environment: STORMGUARD_LANG,
// or that of messages as POSIX says; English if it is none of All. It is needed before the
// command line is parsed, since help is in it, too.
func Asked(args []string, getenv func(string) string) (Language, error) {
	if len(args) > 0 && strings.HasPrefix(args[0], "__complete") { // of an unfinished command line
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

// Say is a text in the language; one that has no translation is as it is.
func (l Language) Say(text string) string {
	if l == Chinese {
		if said, ok := zh[text]; ok {
			return said
		}
	}
	return text
}

// Sayf is [Language.Say] with values.
func (l Language) Sayf(format string, values ...any) string {
	return fmt.Sprintf(l.Say(format), values...)
}

// Count is so many of a thing, by its English name in the singular.
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

// With is ctx with a language.
func With(ctx context.Context, l Language) context.Context { return context.WithValue(ctx, key{}, l) }

// From is the language of ctx, English if it has none.
func From(ctx context.Context) Language {
	if l, ok := ctx.Value(key{}).(Language); ok {
		return l
	}
	return English
}

// Width is how many columns of a terminal a text takes.
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
