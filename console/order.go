// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// What an operator can do.
const (
	Pause      = "pause"      // hold the source for Order.For
	Resume     = "resume"     // end a pause
	Open       = "open"       // force the breaker open for Order.For
	Close      = "close"      // close the breaker; it judges anew from now on
	Release    = "release"    // end a force: the breaker probes
	Credits    = "credits"    // grant Order.Count DLQ credits
	DeadLetter = "deadletter" // dead-letter up to Order.Count messages that failed and wait
)

var actions = []string{Pause, Resume, Open, Close, Release, Credits, DeadLetter}

// An Order is what an operator wants done.
type Order struct {
	// Action is one of the constants above.
	Action string `json:"action"`

	// Sources are names of sources, or Breakers names of breakers, which stand for the
	// sources that share them. A name that ends with * stands for all that begin so.
	Sources  []string `json:"sources,omitempty"`
	Breakers []string `json:"breakers,omitempty"`

	// In is where: "process", which unset means, "fleet", or "zone:NAME". It needs
	// Config.Fleet.
	In string `json:"in,omitempty"`

	// For is how long a pause or a forced breaker lasts: 1s to 24h, 30m if unset. A
	// string as time.ParseDuration reads it.
	For Duration `json:"for,omitempty"`

	// Count is how many credits or dead letters, for each source: 1 to 100000.
	Count int `json:"count,omitempty"`

	// Why is for the audit, at most 256 bytes.
	Why string `json:"why,omitempty"`

	// DryRun changes nothing and answers which sources it would be.
	DryRun bool `json:"dry_run,omitempty"`
}

// An Outcome says what an order did.
type Outcome struct {
	Process string   `json:"process"` // which was asked
	Results []Result `json:"results"` // in that process

	// Processes are those of the fleet that did it, and Silent those that have not
	// answered within five seconds. A silent one follows when it is heard again, unless the
	// order's time is over by then.
	Processes []Answer `json:"processes,omitempty"`
	Silent    []string `json:"silent,omitempty"`
}

// fleet is in a few words what other processes made of an order; empty if it was for this one.
func (o *Outcome) fleet() string {
	if len(o.Processes)+len(o.Silent) == 0 {
		return ""
	}
	sources, wrong := 0, ""
	for _, a := range o.Processes {
		sources += a.Sources
		if a.Error != "" {
			wrong += "; " + a.Process + ": " + a.Error
		}
	}
	text := fmt.Sprintf("%d sources in %d processes", sources, len(o.Processes))
	if len(o.Silent) > 0 {
		text += "; no answer from " + strings.Join(o.Silent, ", ")
	}
	return text + wrong
}

// An Answer is what one process of a fleet made of an order.
type Answer struct {
	Process string `json:"process,omitempty"`
	Sources int    `json:"sources"` // that it was about
	Count   int    `json:"count,omitempty"`
	Error   string `json:"error,omitempty"`
}

// A Result is what an order did to one source.
type Result struct {
	Source string `json:"source"`
	Before string `json:"before"`          // its state, as in [Source]
	After  string `json:"after"`           // and afterwards
	Count  int    `json:"count,omitempty"` // dead letters
	Error  string `json:"error,omitempty"`
}

// Duration is a time.Duration that is a string in JSON, such as "30m".
type Duration time.Duration

// MarshalText is that of time.Duration.String.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText reads what time.ParseDuration reads.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return fmt.Errorf("%.32q is not a duration, such as 30m", b)
	}
	*d = Duration(v)
	return nil
}

const (
	inProcess = "process"
	inFleet   = "fleet"
	inZone    = "zone:"

	defaultFor = 30 * time.Minute
	leastFor   = time.Second
	mostFor    = 24 * time.Hour
	mostCount  = 100_000
	mostWhy    = 256
	mostNames  = 1000
)

// errOrder is what all orders that cannot be carried out are.
var errOrder = errors.New("console: order")

// errNoSource is an order about a source or breaker that this process does not have.
var errNoSource = fmt.Errorf("%w: there is none of that name", errOrder)

// WithDefaults is the order with what is unset filled in.
func (o Order) WithDefaults() Order {
	if o.For == 0 && (o.Action == Pause || o.Action == Open) {
		o.For = Duration(defaultFor)
	}
	return o
}

// Validate reports everything that is wrong with an order at once.
func (o Order) Validate() error {
	var all []error
	bad := func(format string, args ...any) {
		all = append(all, fmt.Errorf("%w: "+format, append([]any{errOrder}, args...)...))
	}
	if !slices.Contains(actions, o.Action) {
		bad("action: %.32q is not one of %s", o.Action, strings.Join(actions, ", "))
	}
	switch n := len(o.Sources) + len(o.Breakers); {
	case n == 0 || n > mostNames:
		bad("sources and breakers: %d names are not in [1, %d]", n, mostNames)
	case slices.Contains(o.Sources, "") || slices.Contains(o.Breakers, ""):
		bad("sources and breakers: an empty name; \"*\" stands for all")
	}
	if zone, ok := strings.CutPrefix(o.In, inZone); o.In != "" && o.In != inProcess && o.In != inFleet && (!ok || zone == "") {
		bad("in: %.32q is not %s, %s or %sNAME", o.In, inProcess, inFleet, inZone)
	}
	lasts := o.Action == Pause || o.Action == Open
	switch d := time.Duration(o.For); {
	case lasts && (d < leastFor || d > mostFor):
		bad("for: %v is not in [%v, %v]", d, leastFor, mostFor)
	case !lasts && d != 0:
		bad("for: only %s and %s last for a time", Pause, Open)
	}
	counts := o.Action == Credits || o.Action == DeadLetter
	switch {
	case counts && (o.Count < 1 || o.Count > mostCount):
		bad("count: %d is not in [1, %d]", o.Count, mostCount)
	case !counts && o.Count != 0:
		bad("count: only %s and %s have one", Credits, DeadLetter)
	}
	if len(o.Why) > mostWhy {
		bad("why: %d bytes are more than %d", len(o.Why), mostWhy)
	}
	return errors.Join(all...)
}

// String is the order in the words of the audit.
func (o Order) String() string {
	text := o.Action + " " + strings.Join(o.Sources, ",")
	if len(o.Breakers) > 0 {
		text = o.Action + " breakers " + strings.Join(o.Breakers, ",")
	}
	if o.In != "" && o.In != inProcess {
		text += " in " + o.In
	}
	if o.For > 0 {
		text += " for " + time.Duration(o.For).String()
	}
	if o.Count > 0 {
		text += fmt.Sprintf(" count %d", o.Count)
	}
	return text
}

func matches(pattern, name string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(name, prefix)
	}
	return pattern == name
}

// about tells whether an order is about a source. One about dead letters is about a
// function only if it names it.
func (o Order) about(s control) bool {
	if slices.Contains(o.Sources, s.Name()) {
		return true
	}
	if (o.Action == Credits || o.Action == DeadLetter) && s.State().Window == 0 {
		return false
	}
	if slices.ContainsFunc(o.Sources, func(pattern string) bool { return matches(pattern, s.Name()) }) {
		return true
	}
	if len(o.Breakers) == 0 {
		return false
	}
	breaker := s.State().Breaker.Name
	return breaker != "" && slices.ContainsFunc(o.Breakers, func(pattern string) bool { return matches(pattern, breaker) })
}

// do carries an order out in this process. A name that nothing has makes it fail before
// anything is done.
func (c *Console) do(o Order) (Outcome, error) {
	out := Outcome{Process: c.process, Results: []Result{}}
	all := c.controls("*")
	chosen := slices.DeleteFunc(slices.Clone(all), func(s control) bool { return !o.about(s) })
	for _, name := range o.Sources {
		if one := (Order{Sources: []string{name}}); !slices.ContainsFunc(all, one.about) {
			return out, fmt.Errorf("%w: source %.64q; this process has %s", errNoSource, name, names(all, control.Name))
		}
	}
	for _, name := range o.Breakers {
		if one := (Order{Breakers: []string{name}}); !slices.ContainsFunc(all, one.about) {
			return out, fmt.Errorf("%w: breaker %.64q; this process has %s", errNoSource, name,
				names(all, func(s control) string { return s.State().Breaker.Name }))
		}
	}
	if len(chosen) == 0 {
		return out, fmt.Errorf("%w with dead letters: all that match are functions", errNoSource)
	}
	for _, s := range chosen {
		out.Results = append(out.Results, carryOut(s, o))
	}
	return out, nil
}

// carryOut does to one source what an order says.
func carryOut(s control, o Order) Result {
	r := Result{Source: s.Name(), Before: stateText(s)}
	if !o.DryRun {
		var err error
		if r.Count, err = act(s, o); err != nil {
			r.Error = err.Error()
		}
	}
	r.After = stateText(s)
	return r
}

func act(s guard.Control, o Order) (count int, err error) {
	switch o.Action {
	case Pause:
		s.Pause(time.Duration(o.For))
	case Resume:
		s.Resume()
	case Open:
		err = s.ForceOpen(time.Duration(o.For))
	case Close:
		err = s.ForceClosed()
	case Release:
		err = s.Release()
	case Credits:
		if s.State().Window == 0 {
			return 0, errNoLetters
		}
		s.GrantCredits(float64(o.Count))
	case DeadLetter:
		count = s.DeadLetterWaiting(o.Count)
	}
	return count, err
}

// errNoLetters is that of a protected function, which has no window either.
var errNoLetters = errors.New("a function has no dead letters")

// stateText is a source's state in a few words: that of [Source], and the breaker's.
func stateText(s control) string {
	v := view(s.group, s.State())
	text := v.State
	if v.Breaker.Name != "" {
		text += ", breaker " + v.Breaker.State
		if v.Breaker.Forced {
			text += " by force"
		}
	}
	return text
}

// names are the first of what sources have, for an error.
func names(all []control, of func(control) string) string {
	const most = 10
	var names []string
	for _, s := range all {
		if name := of(s); name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	switch {
	case len(names) == 0:
		return "none"
	case len(names) > most:
		return strings.Join(names[:most], ", ") + fmt.Sprintf(" and %d more", len(names)-most)
	}
	return strings.Join(names, ", ")
}

func readOrder(d *json.Decoder) (o Order, err error) {
	if err := readObject(d, &o); err != nil {
		return o, err
	}
	o = o.WithDefaults()
	return o, o.Validate()
}

func readCarried(text string) (o carriedOrder, err error) {
	if err := readObject(json.NewDecoder(strings.NewReader(text)), &o); err != nil {
		return o, err
	}
	if o.Action == addRule || o.Action == removeRule {
		if len(o.Sources) != 1 {
			return o, fmt.Errorf("%w: sources: %d rules, want 1", errOrder, len(o.Sources))
		}
		_, err := dlq.ParseRule(o.Sources[0])
		return o, err
	}
	o.Order = o.WithDefaults()
	return o, o.Validate()
}

func readObject(d *json.Decoder, o any) error {
	d.DisallowUnknownFields()
	if err := d.Decode(o); err != nil {
		return fmt.Errorf("%w: body: %w", errOrder, err)
	}
	if d.More() {
		return fmt.Errorf("%w: body: want one object", errOrder)
	}
	return nil
}
