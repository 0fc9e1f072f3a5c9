// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"
)

// Cause is the group a failure belongs to: failures that look alike once what
// varies from message to message is taken out.
type Cause struct {
	// ID is "v2:" and 16 hexadecimal digits. The prefix changes when the rules
	// below do, so that groups made by different rules never mix.
	ID string

	// Title names the group for people. It is made of the same normalised
	// text, so every member of a group made here has the same one.
	Title string
}

const (
	causeVersion = "v2:"

	// causeInput bounds the work: no more of a message is looked at. It is the
	// cap of ErrorInfo.Message, so that a record read back gives the same
	// cause as the error did. causeText is below it, since what was variable
	// at the end of a cut message shows at the end of the normalised one.
	causeInput = maxMessage
	causeText  = 256
	causeStack = 64 << 10
	maxTitle   = 200
)

// Fingerprint returns the cause of err, and of the stack if there was a panic;
// stack is the text of [runtime/debug.Stack] or nil. No error and no stack
// give the zero Cause.
//
// The ID is made of the error's type (see [DescribeError]), the function of
// the top frame outside the standard library where there is a stack, and the
// message with placeholders for what varies: numbers, UUIDs and other
// generated ids, IP addresses, times, durations, sizes, email addresses, and
// quoted user values such as in `parsing "x"`. Codes stay: an HTTP status, an
// SQLSTATE, an error number, a service's well-known port. So do names: of
// columns, constraints, tables, hosts. Line numbers of a stack are left out,
// since they change with each release.
//
// It is deterministic, takes time linear in its input, and looks at the first
// 1 KiB of the message and 64 KiB of the stack. Safe for concurrent use.
func Fingerprint(err error, stack []byte) Cause {
	e := describe(err)
	e.Message = capText(e.Message, causeInput)
	e.Stack = string(stack[:min(len(stack), causeStack)])
	return e.Fingerprint()
}

// Fingerprint is the function [Fingerprint] for an error known as text only,
// such as one that [Decode] read. Stacks of Java and .NET are understood too.
func (e ErrorInfo) Fingerprint() Cause {
	if e.Type == "" && e.Message == "" && e.Stack == "" {
		return Cause{}
	}
	message := normalise(capText(e.Message, causeInput))
	frame := topFrame(e.Stack[:min(len(e.Stack), causeStack)])
	kind := capText(e.Type, maxType)

	h := sha256.New()
	fmt.Fprintf(h, "%s\x00%s\x00%s", kind, frame, message)
	return Cause{
		ID:    causeVersion + hex.EncodeToString(h.Sum(nil)[:8]),
		Title: title(kind, frame, message),
	}
}

func title(kind, frame, message string) string {
	kind = strings.TrimLeft(kind, "*")
	kind = kind[strings.LastIndexByte(kind, '/')+1:]
	if message != "" && plainType(kind) {
		kind = ""
	}
	frame = frame[strings.LastIndexByte(frame, '/')+1:]
	var parts []string
	for _, p := range []string{kind, message} {
		if p != "" {
			parts = append(parts, p)
		}
	}
	text := strings.Join(parts, ": ")
	if frame != "" {
		at := " at " + capText(frame, maxTitle/3)
		return capText(text, maxTitle-len(at)) + at
	}
	return capText(text, maxTitle)
}

// plainType tells the types that say nothing beyond "an error with a text".
func plainType(kind string) bool {
	switch strings.TrimLeft(kind, "*") {
	case "errors.errorString", "fmt.wrapError", "fmt.wrapErrors", "errors.joinError", "errors.fundamental":
		return true
	}
	return false
}

// DescribeError puts err into words: a type of 256 bytes at most, a text of 1 KiB and a
// stack of 8 KiB. What is cut ends in "…", and what is not valid UTF-8 is replaced by
// U+FFFD. Type is that of the first error in the chain that is more than a wrapper: fmt.Errorf
// with %w, errors.Join, github.com/pkg/errors and this module's own markers
// are looked through. Of several joined errors the first with a type of its
// own counts. The text is err.Error(); an Error method that panics costs its
// text and nothing else. A nil err leaves Type and Message empty.
func DescribeError(err error, stack []byte) ErrorInfo {
	e := describe(err)
	return ErrorInfo{
		Type:    capText(e.Type, maxType),
		Message: capText(e.Message, maxMessage),
		Stack:   capText(string(stack[:min(len(stack), maxStack+utf8.UTFMax)]), maxStack),
	}
}

func describe(err error) (e ErrorInfo) {
	if err == nil {
		return ErrorInfo{}
	}
	left := 64
	e.Type = typeName(mostSpecific(err, &left))
	defer func() {
		if v := recover(); v != nil {
			e.Message = "(the Error method panicked)"
		}
	}()
	e.Message = err.Error()
	return e
}

// mostSpecific looks through wrappers. left bounds the nodes visited, for
// chains that are endless or trees that are wide.
func mostSpecific(err error, left *int) (found error) {
	found = err
	defer func() { _ = recover() }() // an Unwrap method on a nil pointer
	for *left > 0 {
		*left--
		if !isWrapper(found) {
			return found
		}
		switch w := found.(type) { //nolint:errorlint // it walks the chain itself
		case interface{ Unwrap() error }:
			next := w.Unwrap()
			if next == nil {
				return found
			}
			found = next
		case interface{ Unwrap() []error }:
			var first error
			for _, e := range w.Unwrap() {
				if e == nil {
					continue
				}
				e = mostSpecific(e, left)
				if !plainType(typeName(e)) {
					return e
				}
				if first == nil {
					first = e
				}
			}
			if first != nil {
				return first
			}
			return found
		default:
			return found
		}
	}
	return found
}

const ownModule = "github.com/stormguard-mq/stormguard"

func isWrapper(err error) bool {
	t := reflect.TypeOf(err)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch path := t.PkgPath(); path {
	case "fmt", "errors":
		return true
	case "github.com/pkg/errors":
		return t.Name() != "fundamental"
	default:
		return path == ownModule || strings.HasPrefix(path, ownModule+"/")
	}
}

// typeName is the type with its full import path, so that two packages of one
// name stay apart.
func typeName(err error) string {
	t, star := reflect.TypeOf(err), ""
	if t == nil {
		return ""
	}
	if t.Kind() == reflect.Pointer && t.Name() == "" {
		t, star = t.Elem(), "*"
	}
	if t.Name() == "" || t.PkgPath() == "" {
		return star + t.String()
	}
	return star + t.PkgPath() + "." + t.Name()
}

// topFrame returns the function of the top frame outside the standard library
// and this module, below the panic if there was one; without one, the first
// frame at all, and "" for a text in which no frame is found.
func topFrame(stack string) string {
	// The deepest panic on the stack is the first that happened. Java puts the
	// cause last.
	if i := strings.LastIndex(stack, "\npanic("); i >= 0 {
		stack = stack[i+1:]
		stack = stack[strings.IndexByte(stack, '\n')+1:]
	} else if i := strings.LastIndex(stack, "\nCaused by: "); i >= 0 {
		stack = stack[i+1:]
	}
	first := ""
	for len(stack) > 0 {
		line := stack
		if i := strings.IndexByte(stack, '\n'); i >= 0 {
			line, stack = stack[:i], stack[i+1:]
		} else {
			stack = ""
		}
		name, skip := frame(strings.TrimSuffix(line, "\r"))
		if name == "" {
			continue
		}
		name = capText(name, maxType)
		if !skip {
			return name
		}
		if first == "" {
			first = name
		}
	}
	return first
}

// frame returns the function a line of a stack names, and whether it is one
// that tells nothing about the program.
func frame(line string) (name string, skip bool) {
	if at, ok := strings.CutPrefix(strings.TrimLeft(line, " \t"), "at "); ok && line[0] <= ' ' {
		name, _, ok = strings.Cut(at, "(")
		if !ok {
			return "", false
		}
		return name, hasAnyPrefix(name, libraryFrames)
	}
	if line == "" || line[0] == '\t' || line[0] == ' ' || line[len(line)-1] != ')' {
		return "", false // a file, or no frame at all
	}
	if strings.HasPrefix(line, "created by ") {
		return "", false
	}
	name = line[:max(strings.LastIndexByte(line, '('), 0)]
	if name != "panic" && (strings.IndexByte(name, '.') < 0 || strings.IndexByte(name, ' ') >= 0) {
		return "", false
	}
	path := name
	if i := strings.IndexByte(path, '['); i >= 0 {
		path = path[:i]
	}
	element := path
	if i := strings.IndexAny(path, "/."); i >= 0 {
		element = path[:i]
	}
	return name, standard[element] || strings.HasPrefix(name, ownModule+"/")
}

// libraryFrames are the runtimes and frameworks other dialects come from.
var libraryFrames = []string{
	"java.", "javax.", "jdk.", "sun.", "com.sun.", "org.springframework.", "org.apache.kafka.",
	"System.", "Microsoft.", "MassTransit.", "NServiceBus.", "Wolverine.",
}

func hasAnyPrefix(s string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}

// standard has the first path elements of the standard library.
var standard = func() map[string]bool {
	m := map[string]bool{}
	for name := range strings.FieldsSeq("archive bufio builtin bytes cmp compress container context crypto database debug embed " +
		"encoding errors expvar flag fmt go hash html image index internal io iter log maps math mime net os panic path plugin " +
		"reflect regexp runtime slices sort strconv strings structs sync syscall testing text time unicode unique unsafe vendor weak") {
		m[name] = true
	}
	return m
}()
