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

// Cause is a group of failures that look alike once the parts that vary from message to
// message are removed.
type Cause struct {
	// ID is "v2:" and 16 hexadecimal digits. The prefix changes with the rules of
	// [Fingerprint], so that groups of different rules never mix.
	ID string

	// Title names the group for people. It is made of the same normalised text, so all
	// failures that are grouped here have the same title.
	Title string
}

const (
	causeVersion = "v2:"

	// causeInput is the number of bytes of a message that are read. It equals the limit of
	// ErrorInfo.Message, so that a record that is read back gives the same cause as its
	// error. causeText is smaller: if a message was cut inside a variable part, the rest of
	// that part is at the end of the normalised text.
	causeInput = maxMessage
	causeText  = 256
	causeStack = 64 << 10
	maxTitle   = 200
)

// Fingerprint returns the cause of err, or of a panic. stack is the text of
// [runtime/debug.Stack] after a panic, or nil. Without error and stack it returns the zero
// Cause.
//
// The ID is made of the error's type (see [DescribeError]), of the top function on the
// stack outside the standard library, if there is a stack, and of the message. In the
// message, placeholders replace the parts that vary: numbers, UUIDs and other generated
// ids, IP addresses, times, durations, sizes, email addresses, and quoted user values as in
// `parsing "x"`. Codes stay: an HTTP status, an SQLSTATE, an error number, a service's
// well-known port. Names stay, too: of columns, constraints, tables, hosts. Line numbers of
// a stack are left out, since they change with each release.
//
// Fingerprint is deterministic, takes time linear in its input, and reads the first 1 KiB
// of the message and 64 KiB of the stack. It is safe for concurrent use.
func Fingerprint(err error, stack []byte) Cause {
	e := describe(err)
	e.Message = capText(e.Message, causeInput)
	e.Stack = string(stack[:min(len(stack), causeStack)])
	return e.Fingerprint()
}

// Fingerprint is like the function [Fingerprint], for an error that is known as text only,
// such as one from [Decode]. It also understands stacks of Java and .NET.
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

// plainType reports whether a type says no more than "an error with a text".
func plainType(kind string) bool {
	switch strings.TrimLeft(kind, "*") {
	case "errors.errorString", "fmt.wrapError", "fmt.wrapErrors", "errors.joinError", "errors.fundamental":
		return true
	}
	return false
}

// DescribeError returns err as text: a type of at most 256 bytes, a message of at most 1
// KiB and a stack of at most 8 KiB. A shortened text ends in an ellipsis (U+2026), and
// bytes that are not UTF-8 become U+FFFD.
//
// Type is the type of the first error in the chain that is more than a wrapper. Wrappers
// are fmt.Errorf with %w, errors.Join, github.com/pkg/errors and this module's own markers.
// Of several joined errors the first with a type of its own counts. Message is err.Error().
// If Error panics, a fixed text replaces the message. A nil err leaves Type and Message
// empty.
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

// mostSpecific returns the first error that is no wrapper. left limits the visited nodes,
// since chains can be endless and trees wide.
func mostSpecific(err error, left *int) (found error) {
	found = err
	defer func() { _ = recover() }() // an Unwrap method on a nil pointer may panic
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

// typeName returns the type with its full import path, so that two packages of one name
// stay apart.
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

// topFrame returns the function of the top frame outside the standard library and this
// module, below the panic if there was one. If there is no such frame, it returns the first
// frame, and "" for a text without frames.
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

// frame returns the function that a line of a stack names. skip says that the function
// belongs to a library or to this module, and says nothing about the program.
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

// libraryFrames are the runtimes and frameworks whose stacks foreign dialects carry.
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

// standard contains the first path elements of the standard library.
var standard = func() map[string]bool {
	m := map[string]bool{}
	for name := range strings.FieldsSeq("archive bufio builtin bytes cmp compress container context crypto database debug embed " +
		"encoding errors expvar flag fmt go hash html image index internal io iter log maps math mime net os panic path plugin " +
		"reflect regexp runtime slices sort strconv strings structs sync syscall testing text time unicode unique unsafe vendor weak") {
		m[name] = true
	}
	return m
}()
