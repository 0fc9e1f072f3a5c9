// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Cause is the group a failure belongs to: failures that look alike once what
// varies from message to message is taken out.
type Cause struct {
	// ID is "v1:" and 16 hexadecimal digits. The prefix changes when the rules
	// below do, so that groups made by different rules never mix.
	ID string

	// Title names the group for people. It is made of the same normalised
	// text, so every member of a group made here has the same one.
	Title string
}

const (
	causeVersion = "v1:"

	// causeInput bounds the work: no more of a message is looked at. It is the
	// default of Limits.Message, so that a record read back gives the same
	// cause as the error did. causeText is below it, since what was variable
	// at the end of a cut message shows at the end of the normalised one.
	causeInput = 1024
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
// message with numbers, UUIDs, hexadecimal and other generated ids, quoted
// strings, IP addresses, durations and times replaced by placeholders. Line
// numbers are left out, since they change with each release.
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

// DescribeError puts err into words, capped by the default [Limits]. Type is
// that of the first error in the chain that is more than a wrapper: fmt.Errorf
// with %w, errors.Join, github.com/pkg/errors and this module's own markers
// are looked through. Of several joined errors the first with a type of its
// own counts. The text is err.Error(); an Error method that panics costs its
// text and nothing else. A nil err leaves Type and Message empty.
func DescribeError(err error, stack []byte) ErrorInfo {
	return Limits{}.DescribeError(err, stack)
}

// DescribeError is the function [DescribeError] with these limits.
func (l Limits) DescribeError(err error, stack []byte) ErrorInfo {
	l = l.withDefaults()
	e := describe(err)
	e.Stack = string(stack[:min(len(stack), l.Stack+utf8.UTFMax)])
	return l.capError(e)
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

// normalise replaces what varies between two failures of one kind. It reads s
// from left to right once.
func normalise(s string) string {
	n := normaliser{quoteless: map[byte]bool{}}
	for i := 0; i < len(s) && n.b.Len() < causeText+64; {
		c := s[i]
		switch {
		case c >= utf8.RuneSelf:
			r, size := utf8.DecodeRuneInString(s[i:])
			if unicode.IsSpace(r) {
				n.space()
			} else {
				n.text(s[i : i+size])
			}
			i += size
		case c <= ' ' || c == 0x7f:
			n.space()
			i++
		case c == '"' || c == '\'' || c == '`':
			if end := n.quoted(s, i); end > 0 {
				n.placeholder("<s>")
				i = end
				continue
			}
			n.text(s[i : i+1])
			i++
		case c == '[' && strings.IndexByte(s[i:min(i+48, len(s))], ']') > 0:
			end := i + strings.IndexByte(s[i:min(i+48, len(s))], ']')
			if strings.Count(s[i:end], ":") >= 2 && isIP(s[i+1:end]) {
				n.placeholder("<ip>")
				i = end + 1
				for i < len(s) && (s[i] == ':' || isDigit(s[i])) && (s[i] != ':' || i+1 < len(s) && isDigit(s[i+1])) {
					i++
				}
				continue
			}
			n.text("[")
			i++
		case isWord(c) || c == ':' && strings.HasPrefix(s[i:], "::") && i+2 < len(s) && isWord(s[i+2]):
			end := runEnd(s, i)
			n.run(s[i:end])
			i = end
		case (c == '-' || c == '+') && i+1 < len(s) && isDigit(s[i+1]) && (i == 0 || strings.IndexByte(" \t\n=(,[:", s[i-1]) >= 0):
			i++ // the sign of a number
		default:
			n.text(s[i : i+1])
			i++
		}
	}
	return cut(strings.TrimSuffix(n.b.String(), " "), causeText)
}

type normaliser struct {
	b strings.Builder

	// last is the placeholder last written, and gap what came after it, as
	// long as that is only a separator: a list of any length becomes one
	// placeholder.
	last, gap string

	// quoteless has the quotes known to have no closing one further on.
	quoteless map[byte]bool
}

func (n *normaliser) text(s string) {
	if n.last != "" && n.gap == "" && s == "," {
		n.gap = s
		return
	}
	n.flush()
	n.b.WriteString(s)
}

func (n *normaliser) space() {
	switch {
	case n.last != "":
		if !strings.HasSuffix(n.gap, " ") {
			n.gap += " "
		}
	case n.b.Len() > 0 && !strings.HasSuffix(n.b.String(), " "):
		n.b.WriteByte(' ')
	}
}

func (n *normaliser) flush() {
	n.b.WriteString(n.gap)
	n.last, n.gap = "", ""
}

func (n *normaliser) placeholder(p string) {
	if n.last == p && n.gap != "" {
		n.gap = ""
		return
	}
	n.flush()
	n.b.WriteString(p)
	n.last = p
}

// quoted returns the index after the string that starts at s[i], or 0. An
// apostrophe within a word is no quote.
func (n *normaliser) quoted(s string, i int) int {
	q := s[i]
	if n.quoteless[q] || q == '\'' && i > 0 && isWord(s[i-1]) {
		return 0
	}
	for j := i + 1; j < len(s); j++ {
		switch {
		case s[j] == '\\' && q != '`':
			j++
		case s[j] == q && (q != '\'' || j+1 == len(s) || !isWord(s[j+1])):
			return j + 1
		}
	}
	n.quoteless[q] = true
	if q != '\'' && strings.HasSuffix(s, ellipsis) {
		return len(s) // the end was cut off with the text
	}
	return 0
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func isLetter(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }

func isWord(c byte) bool { return isDigit(c) || isLetter(c) || c == '_' }

// runEnd finds the end of a run of word characters and of what joins them in
// numbers, addresses, times and names.
func runEnd(s string, i int) int {
	for i < len(s) {
		switch c := s[i]; {
		case isWord(c):
			i++
		case strings.IndexByte("-.:+", c) >= 0 && i+1 < len(s) && isWord(s[i+1]):
			i += 2
		case c == ':' && i+2 < len(s) && s[i+1] == ':' && isWord(s[i+2]):
			i += 3
		case strings.HasPrefix(s[i:], "µs") || strings.HasPrefix(s[i:], "μs"):
			i += len("µs")
		default:
			return i
		}
	}
	return i
}

func (n *normaliser) run(s string) {
	if strings.IndexFunc(s, func(r rune) bool { return '0' <= r && r <= '9' }) < 0 {
		n.text(s)
		return
	}
	if p := classify(s); p != "" {
		n.placeholder(p)
		return
	}
	for len(s) > 0 {
		end := strings.IndexAny(s, "-.:+")
		switch {
		case end == 0:
			n.text(s[:1])
			s = s[1:]
			continue
		case end < 0:
			end = len(s)
		}
		if p := classify(s[:end]); p != "" {
			n.placeholder(p)
		} else {
			n.mixed(s[:end])
		}
		s = s[end:]
	}
}

// mixed writes letters as they are and each group of digits as a number.
func (n *normaliser) mixed(s string) {
	for i := 0; i < len(s); {
		j := i
		for j < len(s) && isDigit(s[j]) == isDigit(s[i]) {
			j++
		}
		if isDigit(s[i]) {
			n.placeholder("<n>")
		} else {
			n.text(s[i:j])
		}
		i = j
	}
}

// classify names the placeholder for a whole run, or "".
func classify(s string) string {
	var digits, hexLetters, letters, others int
	for i := range len(s) {
		switch c := s[i]; {
		case isDigit(c):
			digits++
		case isLetter(c) && c|0x20 <= 'f':
			hexLetters++
			letters++
		case isLetter(c):
			letters++
		default:
			others++
		}
	}
	switch {
	case digits == 0:
		return ""
	case digits == len(s):
		return "<n>"
	case len(s) == 36 && isUUID(s):
		return "<uuid>"
	case len(s) > 2 && s[0] == '0' && s[1]|0x20 == 'x' && allHex(s[2:]):
		return "<n>"
	case others == 0 && letters == hexLetters && len(s) >= 7:
		return "<n>" // as a number: some hexadecimal ids happen to have no letter
	case others == 0 && len(s) >= 16 && digits >= 3:
		return "<id>"
	case isTime(s):
		return "<time>"
	case isIP(s):
		return "<ip>"
	case isDuration(s):
		return "<dur>"
	case isNumber(s):
		return "<n>"
	}
	return ""
}

func allHex(s string) bool {
	for i := range len(s) {
		if c := s[i]; !isDigit(c) && (!isLetter(c) || c|0x20 > 'f') {
			return false
		}
	}
	return true
}

func isUUID(s string) bool {
	for i := range len(s) {
		if i == 8 || i == 13 || i == 18 || i == 23 {
			if s[i] != '-' {
				return false
			}
		} else if !allHex(s[i : i+1]) {
			return false
		}
	}
	return true
}

// isNumber accepts a decimal number with a fraction and an exponent.
func isNumber(s string) bool {
	mantissa, exponent, ok := strings.Cut(strings.ToLower(s), "e")
	if ok && !allDigits(strings.TrimLeft(exponent, "+-")) {
		return false
	}
	whole, fraction, ok := strings.Cut(mantissa, ".")
	return allDigits(whole) && (!ok || allDigits(fraction))
}

func allDigits(s string) bool {
	for i := range len(s) {
		if !isDigit(s[i]) {
			return false
		}
	}
	return s != ""
}

func isDuration(s string) bool {
	if !isDigit(s[0]) || len(s) > 40 {
		return false
	}
	_, err := time.ParseDuration(s)
	return err == nil
}

func isIP(s string) bool {
	if len(s) > 64 || strings.Count(s, ".") < 3 && strings.Count(s, ":") < 2 {
		return false
	}
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
	_, err := netip.ParseAddrPort(s)
	return err == nil
}

// shapes of dates and clock times, by prefix; what follows may be digits,
// fractions and zones only.
var timeShapes = []string{"dddd-dd-ddTdd:dd:dd", "dddd-dd-ddTdd:dd", "dddd-dd-dd", "dd:dd:dd", "dddd.dd.dd"}

func isTime(s string) bool {
	for _, shape := range timeShapes {
		if !hasShape(s, shape) {
			continue
		}
		rest := strings.TrimLeft(s[len(shape):], "0123456789.:+-")
		return rest == "" || rest == "Z" || rest == "z"
	}
	return false
}

func hasShape(s, shape string) bool {
	if len(s) < len(shape) {
		return false
	}
	for i := range len(shape) {
		if shape[i] == 'd' && !isDigit(s[i]) || shape[i] == 'T' && s[i]|0x20 != 't' || shape[i] < 'A' && s[i] != shape[i] {
			return false
		}
	}
	return true
}
