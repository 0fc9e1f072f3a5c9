// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// A Rule says which messages are in quarantine. It is a plain value.
type Rule struct {
	Kind RuleKind

	// Header is the header's name. It is set for RuleHeader only.
	Header string

	// Value is the key, the header's value, or the ID of the [Cause]. It is compared byte
	// by byte.
	Value string
}

// RuleKind says which part of a message a [Rule] compares.
type RuleKind string

// The kinds of rules.
const (
	RuleKey    RuleKind = "key"    // the message's key
	RuleHeader RuleKind = "header" // one of the message's headers, such as a tenant's name
	RuleCause  RuleKind = "cause"  // the cause of the message's latest failure, unless that was an error of the dependency
)

const (
	// maxRule is the largest length of Header and Value of a [Rule] together, in bytes.
	maxRule = 256
	// MaxQuarantineFor is the longest duration of an entry. An entry can be set again.
	MaxQuarantineFor = 7 * 24 * time.Hour

	maxQuarantineBy  = 64
	maxQuarantineWhy = 128
	quarantineFor    = 24 * time.Hour
)

// String returns the rule in the format of [ParseRule]: key=K, header:NAME=VALUE or
// cause=ID.
func (r Rule) String() string {
	if r.Kind == RuleHeader {
		return string(r.Kind) + ":" + r.Header + "=" + r.Value
	}
	return string(r.Kind) + "=" + r.Value
}

// ParseRule parses the format of [Rule.String]. Its errors are [ErrQuarantine].
func ParseRule(text string) (Rule, error) {
	what, value, ok := strings.Cut(text, "=")
	kind, header, named := strings.Cut(what, ":")
	r := Rule{Kind: RuleKind(kind), Header: header, Value: value}
	if !ok || named != (r.Kind == RuleHeader) || !r.Kind.known() {
		return Rule{}, fmt.Errorf("%w: rule %.64q is not key=K, header:NAME=VALUE or cause=ID", ErrQuarantine, text)
	}
	return r, r.Validate()
}

func (k RuleKind) known() bool { return k == RuleKey || k == RuleHeader || k == RuleCause }

// Validate returns an [ErrQuarantine] that says what is wrong with the rule, or nil.
func (r Rule) Validate() error {
	n := len(r.Header) + len(r.Value)
	switch {
	case !r.Kind.known():
		return fmt.Errorf("%w: Rule.Kind: %.20q is not in {key, header, cause}", ErrQuarantine, r.Kind)
	case (r.Kind == RuleHeader) != (r.Header != ""):
		return fmt.Errorf("%w: Rule.Header: %.64q: a name goes with the kind header, and with no other", ErrQuarantine, r.Header)
	case strings.Contains(r.Header, "="):
		return fmt.Errorf("%w: Rule.Header: %.64q has a =", ErrQuarantine, r.Header)
	case n > maxRule:
		return fmt.Errorf("%w: Rule: header and value of %d bytes are not in [1, %d]", ErrQuarantine, n, maxRule)
	case r.Value == "" && r.Kind != RuleHeader:
		return fmt.Errorf("%w: Rule.Value: must not be empty", ErrQuarantine)
	}
	return nil
}

// ErrQuarantine means that an entry or a rule was refused. The text names the field, its
// value and what is allowed.
var ErrQuarantine = errors.New("dlq: quarantine")

// A QuarantineEntry is a rule in force, with its author, its reason and its end.
type QuarantineEntry struct {
	Rule Rule

	// By is who set the rule, up to 64 bytes. Why is the reason, for people, up to 128
	// bytes.
	By, Why string

	// At is when the rule was set; default now.
	At time.Time

	// Until is when the rule ends by itself, at most 7 days from now; default 24 h after
	// At.
	Until time.Time
}

// WithDefaults returns e with every unset field replaced by its default.
func (e QuarantineEntry) WithDefaults(now time.Time) QuarantineEntry {
	if e.At.IsZero() {
		e.At = now
	}
	if e.Until.IsZero() {
		e.Until = e.At.Add(quarantineFor)
	}
	return e
}

// Validate reports everything that is wrong with e, all at once, as an [ErrQuarantine], or
// nil. Unset fields are checked as their defaults.
func (e QuarantineEntry) Validate(now time.Time) error {
	e = e.WithDefaults(now)
	errs := []error{e.Rule.Validate()}
	if len(e.By) > maxQuarantineBy {
		errs = append(errs, fmt.Errorf("%w: By: %d bytes are not in [0, %d]", ErrQuarantine, len(e.By), maxQuarantineBy))
	}
	if len(e.Why) > maxQuarantineWhy {
		errs = append(errs, fmt.Errorf("%w: Why: %d bytes are not in [0, %d]", ErrQuarantine, len(e.Why), maxQuarantineWhy))
	}
	if d := e.Until.Sub(now); d <= 0 || d > MaxQuarantineFor {
		errs = append(errs, fmt.Errorf("%w: Until: %v from now is not in (0, %v]", ErrQuarantine, d.Round(time.Second), MaxQuarantineFor))
	}
	return errors.Join(errs...)
}

// A Quarantine is a list of rules. A guard dead-letters messages that match a rule, without
// handling them. All methods are safe for concurrent use and do no I/O. A guard has its own
// list; a fleet has one that all its processes share. A list has at most 10,000 entries.
type Quarantine interface {
	// Add sets a rule, or replaces its entry. An error is [ErrQuarantine]: the entry is
	// wrong, or the list is full.
	Add(e QuarantineEntry) error

	// Remove removes a rule; by is the person who removes it. It returns no error for a
	// rule that this list does not have: another process may have set it, and this process
	// may not know it yet.
	Remove(r Rule, by string) error

	// Entries returns the entries in force, the oldest first.
	Entries() []QuarantineEntry

	// Watch calls f after each change until stop is called. f must not block or call the
	// list. The expiry of an entry is no change.
	Watch(f func()) (stop func())
}
