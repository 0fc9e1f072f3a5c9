// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/operator"
)

// follower carries out the fleet's orders in this process. Its goroutine looks when the
// carrier has news, and each followEvery. So it also finds sources that begin while an
// order is in force: a partition that comes here in a rebalance is paused as the order
// says.
type follower struct {
	c       *Console
	carrier operator.Carrier
	wake    chan struct{}
	began   time.Time // the process's start: one-time orders from before it are not carried out
	cancel  context.CancelFunc
	done    sync.WaitGroup

	given sync.Map // ids of the orders that were given here; order writes their audit entry

	mu     sync.Mutex // held while an order of the fleet or of this process is carried out
	locals []local    // orders of this process alone, the latest last

	// applied and known are used by the goroutine only.
	applied map[guard.Control]*[kinds]string // ids of the latest applied orders, by kind
	known   map[string]*known                // the fleet's orders by id
}

// known is one of the fleet's orders, as this process heard it. Once it is over it stays
// over, even if the wall clock is set.
type known struct {
	carriedOrder

	err      error // why the order cannot be read
	heard    time.Time
	seen     time.Time // when the order was last in the carrier's list
	ends     time.Time // end by the monotonic clock
	answered bool
}

const (
	followEvery = 250 * time.Millisecond
	answerFor   = 5 * time.Second // how long give waits for the answers of reachable processes

	// mostAnswer is the largest length in bytes of an error in an answer. A fleet carries
	// about 250 bytes of a whole answer.
	mostAnswer = 96

	// onceFor is how long a one-time order counts.
	onceFor = time.Minute

	// knownFor is how long an order about a pause or a force is known. It is an hour longer
	// than any earlier order may last, so that an overruled order never comes back.
	knownFor = mostFor + time.Hour

	// forgetAfter is how long an order is remembered after the carrier last listed it.
	forgetAfter = 2 * time.Hour

	// ruleFor is how long a process waits for a change of the quarantine, which travels
	// with the fleet's list.
	ruleFor = 3 * time.Second
)

// The kinds of orders. Of all orders about pauses, or about forces, the latest decides.
// Other orders are each carried out once.
const (
	kindPause = iota
	kindForce
	kindOnce
)

// kinds is the number of kinds of which the latest order decides.
const kinds = kindOnce

// undoes holds the action that ends an order, by kind.
var undoes = [kinds]string{kindPause: Resume, kindForce: Release}

func kindOf(action string) int {
	switch action {
	case Pause, Resume:
		return kindPause
	case Open, Close, Release:
		return kindForce
	}
	return kindOnce
}

func follow(c *Console, carrier operator.Carrier) *follower {
	ctx, cancel := context.WithCancel(context.Background())
	f := &follower{
		c: c, carrier: carrier, wake: make(chan struct{}, 1), began: time.Now(), cancel: cancel,
		applied: make(map[guard.Control]*[kinds]string), known: make(map[string]*known),
	}
	f.done.Go(func() { f.run(ctx) })
	return f
}

func (f *follower) close() {
	f.cancel()
	f.done.Wait()
}

func (f *follower) run(ctx context.Context) {
	stop := f.carrier.Watch(func() { wake(f.wake) })
	defer stop()
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		f.look()
		select {
		case <-f.wake:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// standing is an order in force for this process. A pause or a forced breaker is over at
// until. The carrier may keep the order for longer, until ends.
type standing struct {
	*known

	id    string
	until time.Time
}

// age returns the time since the order was given.
func (o standing) age() time.Duration {
	lasts := onceFor
	if o.For > 0 {
		lasts = time.Duration(o.For)
	}
	return lasts - time.Until(o.until)
}

// carriedOrder is an order as the fleet carries it. It is carried for Over longer than it
// lasts, see knownFor.
type carriedOrder struct {
	Order

	Over Duration `json:"over,omitempty"`
}

// local is an order of this process alone. It overrules earlier orders of the fleet about
// its sources, even if such a source ends and begins again. Earlier orders are those that
// were known when it was given, and those that were given over a minute before it.
type local struct {
	kind      int
	at        time.Time
	overrules map[string]bool // ids of the overruled orders
	sources   map[string]bool // names of the order's sources
	breakers  map[string]bool // names of their breakers, for an order about breakers
}

// mostLocals limits the number of remembered local orders; the oldest are forgotten first.
const mostLocals = 256

// alone carries out an order in this process only.
func (f *follower) alone(o Order) (Outcome, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := local{kind: kindOf(o.Action), at: time.Now(), overrules: make(map[string]bool), sources: make(map[string]bool), breakers: make(map[string]bool)}
	for _, c := range f.carrier.InForce() {
		l.overrules[c.ID] = true
	}
	out, err := f.c.do(o)
	if err != nil || o.DryRun || l.kind == kindOnce {
		return out, err
	}
	for _, r := range out.Results {
		l.sources[r.Source] = true
	}
	if l.kind == kindForce {
		for _, s := range f.c.controls("*") {
			if l.sources[s.Name()] {
				l.breakers[s.State().Breaker.Name] = true
			}
		}
	}
	f.locals = append(f.locals[max(0, len(f.locals)+1-mostLocals):], l)
	return out, nil
}

// overruledLocked reports whether a local order about a source overrules an order of the
// fleet.
func (f *follower) overruledLocked(s control, kind int, o *standing) bool {
	given := time.Now().Add(-o.age())
	return slices.ContainsFunc(f.locals, func(l local) bool {
		return l.kind == kind && (l.overrules[o.id] || l.at.Sub(given) > onceFor) && (l.sources[s.Name()] || l.breakers[s.State().Breaker.Name])
	})
}

// forgetLocked drops orders that cannot come back, and local orders that overrule nothing
// any more.
func (f *follower) forgetLocked(now time.Time) {
	maps.DeleteFunc(f.known, func(id string, k *known) bool {
		forget := now.Sub(k.seen) > forgetAfter
		if forget {
			f.given.Delete(id)
		}
		return forget
	})
	f.locals = slices.DeleteFunc(f.locals, func(l local) bool { return now.Sub(l.at) > knownFor })
}

// look carries out the orders that are in force and not yet carried out.
func (f *follower) look() {
	heeded := f.heeded()
	f.mu.Lock()
	heard, answers := f.carryOutLocked(heeded)
	f.mu.Unlock()
	for _, h := range heard {
		f.c.log.Info("console: an order of the fleet was carried out", "order", h.Order, "sources", len(h.Results))
		f.c.audit.order(h)
	}
	for id, a := range answers {
		a.Error = clipTo(a.Error, mostAnswer)
		text, err := json.Marshal(a)
		if err == nil {
			err = f.carrier.Answer(id, string(text))
		}
		if err != nil {
			f.c.log.Warn("console: an order's answer does not reach the fleet", "order", id, "error", err)
		}
	}
}

// carryOutLocked returns entries for the audit, of orders that came from other processes, and the
// answers by order.
func (f *follower) carryOutLocked(heeded map[string]error) (heard []Entry, answers map[string]*Answer) {
	orders, unreadable := f.inForceLocked()
	answers = make(map[string]*Answer)
	for _, o := range unreadable {
		answers[o.id] = &Answer{Error: o.err.Error()}
	}
	var due []standing // one-time orders
	for _, o := range orders {
		if o.answered {
			continue
		}
		switch o.Action {
		case Credits, DeadLetter:
			if _, before := f.carrier.Answers(o.id)[f.name()]; before { // an earlier run of this process has answered
				o.answered = true
				continue
			}
			// An earlier run may have carried out the order, with its answer still on the
			// way. Ages are compared, since the wall clock may have been set.
			if o.age() > time.Since(f.began) {
				answers[o.id], o.answered = &Answer{Error: errBeganLater.Error()}, true
				continue
			}
			due = append(due, o)
		case addRule, removeRule:
			if a := f.ruleAnswer(o, heeded); a != nil {
				answers[o.id] = a
			}
			continue
		}
		answers[o.id] = new(Answer)
	}
	present := make(map[guard.Control]bool)
	results := make(map[string][]Result)
	if len(orders) > 0 {
		for _, s := range f.c.controls("*") {
			present[s.Control] = true
			f.settleLocked(s, orders, answers, results)
			for _, o := range due {
				if o.about(s) {
					r := carryOut(s, o.Order)
					answers[o.id].add(r)
					results[o.id] = append(results[o.id], r)
				}
			}
		}
	}
	for _, o := range orders {
		if _, here := f.given.Load(o.id); !here && !o.answered && answers[o.id] != nil {
			heard = append(heard, Entry{At: time.Now().UTC(), Who: byFleet, Order: clip(o.String()), Results: results[o.id]})
		}
	}
	maps.DeleteFunc(f.applied, func(s guard.Control, _ *[kinds]string) bool { return !present[s] })
	for id := range answers {
		f.known[id].answered = true
	}
	return heard, answers
}

// heeded returns, for each unanswered change of the quarantine, an error if it is not in
// force here. It runs before the lock is taken, because a list may be the program's own.
func (f *follower) heeded() map[string]error {
	all := make(map[string]error)
	for id, k := range f.known {
		if rule := k.Action == addRule || k.Action == removeRule; rule && k.err == nil && !k.answered && k.ends.After(time.Now()) {
			all[id] = f.c.heeds(k.Order)
		}
	}
	return all
}

// ruleAnswer returns the answer to a change of the quarantine, or nil if there is none yet.
func (f *follower) ruleAnswer(o standing, heeded map[string]error) *Answer {
	err, asked := heeded[o.id]
	switch {
	case !asked:
		wake(f.wake) // the order is new: look again
		return nil
	case err == nil:
		return new(Answer)
	case time.Since(o.heard) < ruleFor:
		return nil
	}
	o.answered = true
	return &Answer{Error: err.Error()}
}

// errBeganLater is the answer to a one-time order that was given before this process began.
var errBeganLater = errors.New("the process began after the order, and leaves it: give it again")

// byFleet is the person in the audit for an order from another process. The fleet's journal
// has the real name.
const byFleet = "the fleet"

func (f *follower) name() string {
	name, _ := f.carrier.Place()
	return name
}

// inForceLocked returns the orders for this process, in sequence. unreadable are unanswered
// orders that it cannot read, since they come from another version.
func (f *follower) inForceLocked() (orders, unreadable []standing) {
	now := time.Now()
	var earlier [kinds]bool // an earlier order of the kind is in force
	for _, c := range f.carrier.InForce() {
		k := f.known[c.ID]
		if k == nil {
			k = &known{heard: now, ends: now.Add(c.Until.Sub(now))}
			k.carriedOrder, k.err = readCarried(c.Order)
			f.known[c.ID] = k
		}
		k.seen = now
		over := time.Duration(k.Over)
		if ends := now.Add(c.Until.Sub(now)); k.ends.Add(-over).After(now) && ends.Add(-over).After(now) {
			k.ends = ends // the fleet's time may have been corrected
		}
		o := standing{k, c.ID, k.ends.Add(-over)}
		kind := kindOf(k.Action)
		switch {
		case !k.ends.After(now):
		case k.err != nil:
			if !k.answered {
				unreadable = append(unreadable, o)
			}
		case !f.here(k.In):
		case kind == kindOnce:
			if !k.answered {
				orders = append(orders, o)
			}
		case earlier[kind] || !k.answered || now.Before(o.until): // otherwise the order is over, and overrules nothing
			earlier[kind] = true
			orders = append(orders, o)
		}
	}
	f.forgetLocked(now)
	return orders, unreadable
}

func (f *follower) here(in string) bool {
	_, zone := f.carrier.Place()
	return within(in, zone)
}

func within(in, zone string) bool {
	name, ok := strings.CutPrefix(in, inZone)
	return !ok || name == zone
}

// settleLocked applies the latest orders about one source to it.
func (f *follower) settleLocked(s control, orders []standing, answers map[string]*Answer, results map[string][]Result) {
	now := time.Now()
	var last [kinds]*standing
	var lasting [kinds]int
	for i, o := range orders {
		if kind := kindOf(o.Action); kind < kinds && o.about(s) {
			last[kind] = &orders[i]
			if o.For > 0 && now.Before(o.until) {
				lasting[kind]++
			}
			if a := answers[o.id]; a != nil {
				a.Sources++
			}
		}
	}
	applied := f.applied[s.Control]
	if applied == nil {
		applied = new([kinds]string)
		f.applied[s.Control] = applied
	}
	for kind, o := range last {
		if o == nil || applied[kind] == o.id {
			continue
		}
		applied[kind] = o.id
		if f.overruledLocked(s, kind, o) {
			continue
		}
		rest := o.Order
		if o.For > 0 && !now.Before(o.until) { // the order is over, but an order that it overruled may be in force here
			rest.For, rest.Action = 0, undoes[kind]
		}
		if rest.For == 0 && f.nothingToUndo(s, kind, o, lasting[kind]) {
			continue
		}
		if rest.For > 0 {
			rest.For = Duration(max(time.Until(o.until), 1))
		}
		r := carryOut(s, rest)
		results[o.id] = append(results[o.id], r)
		if a := answers[o.id]; a != nil {
			a.fails(r)
		}
	}
}

// nothingToUndo reports whether an order that ends others has nothing to end at a source.
// It would then end a later pause or force. lasting is the number of the fleet's pauses or
// forces in force there.
func (f *follower) nothingToUndo(s control, kind int, o *standing, lasting int) bool {
	younger := o.answered || o.age() > time.Since(f.began) // the source or the process is younger than the order
	own := younger && lasting == 0                         // a pause or force in force is the process's own
	if kind == kindForce {                                 // an unforced open breaker has tripped since the order
		return own || (younger || o.age() > onceFor) && !s.State().Breaker.Forced
	}
	return own
}

func (a *Answer) add(r Result) {
	a.Sources++
	a.Count += r.Count
	a.fails(r)
}

func (a *Answer) fails(r Result) {
	if r.Error != "" {
		a.Error = r.Source + ": " + r.Error
	}
}

// until returns the time until which an order is carried, and by how much that exceeds its
// duration.
func until(o Order) (last time.Time, over time.Duration) {
	lasts := onceFor
	if o.For > 0 {
		lasts = time.Duration(o.For)
	}
	if kindOf(o.Action) != kindOnce {
		over = knownFor - lasts
	}
	return time.Now().Add(lasts + over), over
}

// give sends an order to the processes that it is for, and waits for their answers, five
// seconds at most.
func (f *follower) give(ctx context.Context, o Order, who string) (Outcome, error) {
	out := Outcome{Process: f.c.process, Results: []Result{}}
	waits := make(map[string]bool) // names of the processes, and whether they are reachable
	known := false
	for _, m := range f.carrier.Members() {
		in := within(o.In, m.Zone)
		if known = known || in; in || m.Zone == "" && !m.Heard { // a silent process of unknown zone may be in the zone
			waits[m.Name] = m.Heard
		}
	}
	if !known {
		return out, fmt.Errorf("%w: in: no process of the fleet is in %q", errNoSource, o.In)
	}
	if o.DryRun {
		for _, name := range slices.Sorted(maps.Keys(waits)) {
			out.Processes = append(out.Processes, Answer{Process: name})
		}
		return out, nil
	}
	last, over := until(o)
	carried := carriedOrder{o, Duration(over)}
	carried.Why = "" // the fleet's journal has the reason
	text, err := json.Marshal(carried)
	if err != nil {
		return out, err
	}
	id := rand.Text()[:16]
	news := make(chan struct{}, 1)
	stop := f.carrier.Watch(func() { wake(news) })
	defer stop()
	f.given.Store(id, true)
	if err := f.carrier.Give(operator.Carried{ID: id, Order: string(text), Until: last}, o.String(), who, o.Why); err != nil {
		f.given.Delete(id)
		return out, fmt.Errorf("%w: %w", errOrder, err)
	}
	patience := time.NewTimer(answerFor)
	defer patience.Stop()
	for waiting := true; waiting; {
		said := f.carrier.Answers(id)
		waiting = false
		for name, heard := range waits {
			if _, ok := said[name]; heard && !ok {
				waiting = true
			}
		}
		if !waiting {
			break
		}
		select {
		case <-news:
		case <-patience.C:
			waiting = false
		case <-ctx.Done():
			waiting = false
		}
	}
	said := f.carrier.Answers(id)
	for _, name := range slices.Sorted(maps.Keys(waits)) {
		text, ok := said[name]
		if !ok {
			out.Silent = append(out.Silent, name)
			continue
		}
		var a Answer
		if err := json.Unmarshal([]byte(text), &a); err != nil {
			a.Error = "an answer of another version"
		}
		a.Process = name
		out.Processes = append(out.Processes, a)
	}
	return out, nil
}
