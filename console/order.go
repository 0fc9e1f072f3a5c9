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

// The actions of an operator.
const (
	Pause      = "pause"      // hold the source for Order.For
	Resume     = "resume"     // end a pause
	Open       = "open"       // force the breaker open for Order.For
	Close      = "close"      // close the breaker; it judges only later calls
	Release    = "release"    // end a force; the breaker then probes
	Credits    = "credits"    // grant Order.Count DLQ credits
	DeadLetter = "deadletter" // dead-letter up to Order.Count failed messages that wait
)

var actions = []string{Pause, Resume, Open, Close, Release, Credits, DeadLetter}

// An Order is an action that an operator wants.
type Order struct {
	// Action is one of the constants above.
	Action string `json:"action"`

	// Sources are names of sources. Breakers are names of breakers, which stand for the
	// sources that share them. A name that ends with * stands for all names with this
	// prefix.
	Sources  []string `json:"sources,omitempty"`
	Breakers []string `json:"breakers,omitempty"`

	// In is where the order applies: "process" (the default), "fleet", or "zone:NAME". The
	// latter two need Config.Fleet.
	In string `json:"in,omitempty"`

	// For is how long a pause or a forced breaker lasts: 1s to 24h; default 30m. In JSON it
	// is a string for time.ParseDuration.
	For Duration `json:"for,omitempty"`

	// Count is the number of credits or dead letters for each source: 1 to 100000.
	Count int `json:"count,omitempty"`

	// Why is the reason, for the audit, at most 256 bytes.
	Why string `json:"why,omitempty"`

	// DryRun changes nothing: the answer names the sources that the order would change.
	DryRun bool `json:"dry_run,omitempty"`
}

// An Outcome is the result of an order.
type Outcome struct {
	Process string   `json:"process"` // the process that answers
	Results []Result `json:"results"` // the results in that process

	// Processes are the processes of the fleet that carried out the order. Silent are those
	// that have not answered within five seconds. A silent process follows the order when
	// it is reachable again, unless the order's time is over by then.
	Processes []Answer `json:"processes,omitempty"`
	Silent    []string `json:"silent,omitempty"`
}

// fleet returns a short text about the outcome in other processes, or "" if the order was
// for this process only.
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

// An Answer is the result of an order in one process of a fleet.
type Answer struct {
	Process string `json:"process,omitempty"`
	Sources int    `json:"sources"` // number of sources of the order in this process
	Count   int    `json:"count,omitempty"`
	Error   string `json:"error,omitempty"`
}

// A Result is the result of an order at one source.
type Result struct {
	Source string `json:"source"`
	Before string `json:"before"`          // the source's state before the order, as in [Source]
	After  string `json:"after"`           // the source's state after the order
	Count  int    `json:"count,omitempty"` // number of dead letters
	Error  string `json:"error,omitempty"`
}

// Duration is a time.Duration that is a string in JSON, such as "30m".
type Duration time.Duration

// MarshalText returns the text of time.Duration.String.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText parses the format of time.ParseDuration.
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

// errOrder is wrapped by the errors of all orders that cannot be carried out.
var errOrder = errors.New("console: order")

// errNoSource is the error of an order about a source or breaker that this process does not
// have.
var errNoSource = fmt.Errorf("%w: there is none of that name", errOrder)

// WithDefaults returns the order with unset fields filled in.
func (o Order) WithDefaults() Order {
	if o.For == 0 && (o.Action == Pause || o.Action == Open) {
		o.For = Duration(defaultFor)
	}
	return o
}

// Validate reports everything that is wrong with an order, all at once.
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

// String returns the order as the audit shows it.
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

// about reports whether an order is about a source. An order about credits or dead letters
// is about a protected function only if it names the function.
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

// do carries out an order in this process. If no source or breaker has one of the names, it
// fails before it does anything.
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

// carryOut carries out an order at one source.
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

// errNoLetters is the error of a protected function, which has no window and no dead
// letters.
var errNoLetters = errors.New("a function has no dead letters")

// stateText returns a source's state as in [Source], and its breaker's state.
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

// names returns the first names of sources, or of their breakers, for an error.
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
