// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// The log lines. docs/operating.md lists the same, and a test compares the two.
const (
	lineOpened     = "breaker opened"
	lineStillOpen  = "breaker is still open"
	lineClosed     = "breaker closed"
	lineState      = "breaker state"
	lineStorm      = "storm began"
	lineStormOver  = "storm is over"
	lineFleetStorm = "storm of the fleet began"
	lineFleetOver  = "storm of the fleet is over"
	lineLetter     = "dead letter"
	lineLetters    = "dead letters beyond those logged"
	lineByHand     = "messages dead-lettered by an operator"
	lineWriter     = "dead-letter writer fails"
	lineWriterWell = "dead-letter writer works again"
	lineCredit     = "a message waits for a dead-letter credit"
	lineNoWriter   = "a message waits for a dead-letter writer, and there is none"
	lineQuarantine = "quarantine changed"
	lineBlocked    = "a message blocks its order: its dependency fails"
	lineUnproven   = "messages fail, nothing succeeds, and their errors do not say why"
	lineStands     = "a handler or the program's loop stands still"
	lineGoesOn     = "what waited goes on"
	linePaused     = "source paused"
	lineResumed    = "source resumed"
	lineEnds       = "source ends and waits"
	lineEnded      = "source ended"
	lineLeft       = "source ended and left messages"
	lineHook       = "a hook did not return"
	lineCheck      = "health check fails"
	lineCheckWell  = "health check passes"
	lineSpill      = "the state of the spill has changed"
)

const (
	// letterLines is how many dead letters of a topic or queue are logged one by one in
	// each letterSpan. The others are one line at its end.
	letterLines = 10
	letterSpan  = time.Minute

	// joinBase and joinMax bound the time in which lines of one text and one topic are
	// joined. It doubles with each line, and starts anew after joinMax without one.
	joinBase = time.Second
	joinMax  = time.Minute

	// stillEvery is how often an open breaker is logged again.
	stillEvery = time.Minute

	// needEvery is how often sources are asked whether they need a person, and
	// needAgain how often one that still does is logged again.
	needEvery = 10 * time.Second
	needAgain = time.Hour
	// needCredit is for how long a message waits for a credit before that is logged:
	// successes earn credits, and mostly soon. needHead is the same for messages that
	// fail, and nothing brings them on. needReturn is how long after Policy.Timeout a
	// message is still with its handler: one that heeds its context needs a moment.
	needCredit = time.Minute
	needHead   = 5 * time.Minute
	needReturn = 10 * time.Second
)

// A DeadLetter is one that is written and confirmed.
type DeadLetter struct {
	Source                 string // SourceConfig.Name
	Destination, Partition string // SourceConfig's
	Class                  Class  // of the last error

	// Record is what was written: reason, attempts, cause, history, and the message
	// itself. It must not be changed, the writer may have kept it.
	Record *dlq.Record
}

// OnDeadLetter calls f for each dead letter, after the writer has confirmed it and before
// the message is acked. A message that was parked ([Parker]) is none. If the
// process crashes in between, its dead letter is written again, and f called again.
//
// f is called by the goroutine that hands out the dead letters, under no lock: those of
// one writer after each other, those of different writers at the same time. No other
// write of that writer begins before f returns, so f must return quickly, and must
// not call [Guard.Close] or [Source.End]. A panic or a [runtime.Goexit] in f is logged and
// has no other effect. Of several OnDeadLetter the last counts; nil means none.
func OnDeadLetter(f func(DeadLetter)) Option { return func(g *Guard) { g.onLetter = f } }

// A Watcher is told what the functions of OnStateChange and OnDeadLetter are told, under
// the same rules. Either may be nil.
type Watcher struct {
	StateChange func(StateChange)
	DeadLetter  func(DeadLetter)
}

// Watch tells w what happens from now on, until stop is called. A call that is under way
// then may end later.
func (g *Guard) Watch(w Watcher) (stop func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.watchers = append(slices.Clone(g.watchers), &w)
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.watchers = slices.DeleteFunc(slices.Clone(g.watchers), func(o *Watcher) bool { return o == &w })
	}
}

// watching are the watchers of this moment. The slice is never changed.
func (g *Guard) watching() []*Watcher {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.watchers
}

// A StateChange is a breaker that opened or closed, or a storm that began or ended.
type StateChange struct {
	// Scope is the breaker's scope, such as "group/topic/partition". Of a storm it is
	// what processes compare it over, such as "group/topic".
	Scope string

	// Source is the source in storm; empty for a breaker, which may have many.
	Source string

	Reason Reason // ReasonBreaker or ReasonStorm
	Fleet  bool   // the storm is one of the fleet
	Active bool   // the breaker is open, the storm has begun

	// Detail is the breaker's cause, or the storm's readings.
	Detail string

	// Error and Class are of the last failed call in the scope of a breaker that opened.
	// Empty if none has failed lately: the breaker opened because calls are slow, or by
	// force.
	Error string
	Class Class

	// For is how long the breaker was open, or the storm lasted; 0 while it does. Calls
	// is how many probes the sources of the scope have made meanwhile.
	For   time.Duration
	Calls uint64
}

// OnStateChange calls f when a breaker opens or closes and when a storm begins or ends, in
// the order of each scope. A breaker that goes from open to half-open and back, as with
// each failed probe, has not changed.
//
// f is called by the goroutine that also ends handlers at their timeout, under no lock,
// one call at a time. So f must return quickly, and must not call [Guard.Close]. A panic or
// a [runtime.Goexit] in f is logged and has no other effect. Of several OnStateChange the
// last counts; nil means none.
func OnStateChange(f func(StateChange)) Option { return func(g *Guard) { g.onState = f } }

// loudHandler is [slog.Default] without what is below WARN.
type loudHandler struct{ slog.Handler }

func (h loudHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelWarn && h.Handler.Enabled(ctx, l)
}

func (h loudHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return loudHandler{h.Handler.WithAttrs(attrs)}
}

func (h loudHandler) WithGroup(name string) slog.Handler {
	return loudHandler{h.Handler.WithGroup(name)}
}

// failedCall is what is kept of a failed handler call.
type failedCall struct {
	at    time.Duration
	text  string
	class Class
}

func failedAt(now time.Duration, r result) *failedCall {
	return &failedCall{now, r.words.Message, r.class}
}

// A reporter is a source as the journal sees it. Its methods take the source's lock.
type reporter interface {
	topic() string
	scope() string // of its breaker; empty without one
	lastFailure() *failedCall
	probed() uint64
	needs(now time.Duration) [needCount]need
}

// need is why a source needs a person.
type need struct {
	what     *needWords // nil for none
	since    time.Duration
	messages int
	class    Class
	attempts int
	failure  dlq.ErrorInfo // what failed last; empty if nothing did
}

// needWords is what the log says of a need.
type needWords struct {
	line  string
	after time.Duration // it is logged when it has lasted for so long
	help  string
}

// A source has at most one need of each kind.
type needKind uint8

const (
	needsLetter needKind = iota
	needsHead
	needsReturn
	needCount
)

var (
	wantsCredit = &needWords{lineCredit, needCredit,
		"successes and time bring credits; Control.GrantCredits gives some, DeadLetterWaiting needs none"}
	wantsWriter     = &needWords{lineNoWriter, 0, noWriterHelp}
	wantsDependency = &needWords{lineBlocked, needHead, "bring the dependency back, or Control.DeadLetterWaiting for this one"}
	wantsVerdict    = &needWords{lineUnproven, needHead,
		"look at the error: if the dependency fails, bring it back; if the messages are at fault, Control.DeadLetterWaiting, or put the cause on the quarantine"}
	wantsReturn = &needWords{lineStands, 0,
		"look at what it waits for; a loop that collects several messages before it settles needs as many Policy.Workers"}
)

// journal makes log lines and calls of hooks of what happens in a Guard, few enough to
// be read. Only the sweeper calls what says so.
//
// Lock order: journal.mu is the last of all. Nothing is logged and no hook called under it.
type journal struct {
	g *Guard

	mu      sync.Mutex
	outages map[string]*outage // by scope
	storms  map[stormOf]time.Duration
	wants   map[reporter]*[needCount]want
	joins   map[joinKey]*join
	letters map[string]*letterCount // by topic or queue
	flushed time.Duration           // the sweeper's: joins and letters are looked at again then
	asked   time.Duration           // the sweeper's: sources are asked for needs again then
}

// outage is a breaker that is not closed.
type outage struct {
	since, said time.Duration
	warned      bool
	probed      map[reporter]uint64 // what each source had probed when it began
	gone        uint64              // probes of sources that have ended since
}

type stormOf struct {
	source string
	fleet  bool
}

// want is a need that a source had at the last look.
type want struct {
	what  *needWords // nil for none
	since time.Duration
	said  time.Duration // 0 = not yet
}

type joinKey struct{ text, topic string }

// join is a text that was logged for a topic: what follows soon is joined into one line.
type join struct {
	at    time.Duration // of the last line
	lines int           // so many, lately
	more  int           // not logged yet …
	last  line          // … and the last of them
}

func (j *join) next() time.Duration { return j.at + min(joinBase<<min(j.lines-1, 6), joinMax) }

// letterCount counts the dead letters of a topic or queue in one span.
type letterCount struct {
	since time.Duration
	n     int
	more  int
	last  line
}

// line is one log line.
type line struct {
	level slog.Level
	text  string
	topic string // what lines are joined over
	end   bool   // of something that was a WARN
	args  []any
}

func newJournal(g *Guard) *journal {
	return &journal{
		g: g, outages: make(map[string]*outage), storms: make(map[stormOf]time.Duration),
		wants: make(map[reporter]*[needCount]want), joins: make(map[joinKey]*join), letters: make(map[string]*letterCount),
	}
}

// write logs a line. The end of what was a warning goes where the warning went.
func (j *journal) write(l line, args ...any) {
	log := j.g.log
	if l.end {
		log = j.g.ends
	}
	log.Log(context.Background(), l.level, l.text, append(args, l.args...)...) //nolint:sloglint // say is called with constants
}

// say logs a line, or joins it with others of its text and topic that come soon after
// one. What is joined is logged by tick.
func (j *journal) say(now time.Duration, l line) {
	key := joinKey{l.text, l.topic}
	j.mu.Lock()
	b := j.joins[key]
	if b == nil {
		b = new(join)
		j.joins[key] = b
	}
	joined := b.more > 0 || b.lines > 0 && now < b.next()
	if joined {
		b.more++
		b.last = l
	} else {
		b.at = now
		b.lines++
	}
	j.mu.Unlock()
	if joined {
		j.g.sweeper.kick()
	} else {
		j.write(l)
	}
}

// paused is a source that an operator pauses for d, or until somebody resumes it.
func (j *journal) paused(now time.Duration, topic, source string, d time.Duration) {
	args := []any{"source", source, "reason", causeOperator}
	if d > 0 {
		args = append(args, "for", d)
	}
	j.say(now, line{slog.LevelInfo, linePaused, topic, false, args})
}

// resumed is a source whose pause is over.
func (j *journal) resumed(now time.Duration, topic, source, reason string) {
	j.say(now, line{slog.LevelInfo, lineResumed, topic, false, []any{"source", source, "reason", reason}})
}

// tick logs what time brings, for the sweeper: joined lines, breakers that are still
// open, sources that need a person. It tells whether lines wait for their time.
func (j *journal) tick(now time.Duration) (pending bool) {
	if now >= j.asked {
		j.asked = now + needEvery
		j.askNeeds(now)
	}
	if now < j.flushed {
		return j.pending()
	}
	j.flushed = now + joinBase/4
	j.remind(now)
	j.flush(now, false)
	return j.pending()
}

func (j *journal) pending() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.wants) > 0 { // its end is to be seen
		return true
	}
	for _, b := range j.joins {
		if b.more > 0 {
			return true
		}
	}
	for _, c := range j.letters {
		if c.more > 0 {
			return true
		}
	}
	return false
}

// flush logs joined lines whose time has come, or all.
func (j *journal) flush(now time.Duration, all bool) {
	type joined struct {
		l line
		n int
	}
	var due []joined
	j.mu.Lock()
	for key, b := range j.joins {
		switch {
		case b.more > 0 && (all || now >= b.next()):
			due = append(due, joined{b.last, b.more})
			b.at, b.more, b.last = now, 0, line{}
			b.lines++
		case b.more == 0 && now >= b.next()+joinMax:
			delete(j.joins, key)
		}
	}
	for topic, c := range j.letters {
		if all || now >= c.since+letterSpan {
			if c.more > 0 {
				due = append(due, joined{c.last, c.more})
			}
			delete(j.letters, topic)
		}
	}
	j.mu.Unlock()
	for _, d := range due {
		j.write(d.l, "lines", d.n)
	}
}

// call calls a hook, on a goroutine of its own that a panic or a Goexit costs.
func (j *journal) call(name string, f func()) {
	err := apart(name, func() error { f(); return nil })
	if lost, ok := errors.AsType[*lostCallError](err); ok {
		j.say(j.g.now(), line{slog.LevelWarn, lineHook, name, false, []any{"error", err, "stack", string(lost.stack)}})
	}
}

// changed tells the hook of a change.
func (j *journal) changed(c StateChange) {
	if f := j.g.onState; f != nil {
		j.call("OnStateChange", func() { f(c) })
	}
	for _, w := range j.g.watching() {
		if f := w.StateChange; f != nil {
			j.call("Watcher.StateChange", func() { f(c) })
		}
	}
}

// within tells whether a breaker's scope is, or is under, another.
func within(scope, outer string) bool {
	rest, ok := strings.CutPrefix(scope, outer)
	return ok && (rest == "" || rest[0] == '/')
}

// under is the open sources of a breaker's scope.
func (j *journal) under(scope string) (all []reporter) {
	for _, s := range j.g.all() {
		if at := s.scope(); at != "" && within(at, scope) {
			all = append(all, s)
		}
	}
	return all
}

// lastFailure is the latest failed call of sources, nil if there was none for a window
// of the breaker.
func (j *journal) lastFailure(now time.Duration, of []reporter) (last *failedCall) {
	for _, s := range of {
		if f := s.lastFailure(); f != nil && (last == nil || f.at > last.at) && now-f.at <= j.g.scopes.Config().Breaker.Window {
			last = f
		}
	}
	return last
}

// topicOf is what the lines of a breaker are joined over: those of partitions over their
// topic, any other's over the scope itself.
func topicOf(scope string) string {
	if last := strings.LastIndexByte(scope, '/'); strings.IndexByte(scope, '/') < last {
		return scope[:last] + "/"
	}
	return scope
}

// breaker takes a change of a breaker, from the sweeper. What opens it and what closes
// it is logged; that it flips with each failed probe is a line at DEBUG.
func (j *journal) breaker(now time.Duration, c circuit.Change) {
	j.write(line{level: slog.LevelDebug, text: lineState, args: []any{
		"scope", c.Scope, "from", c.From.String(), "to", c.To.String(), "reason", string(c.Cause), "for", c.OpenFor,
	}})
	j.mu.Lock()
	out := j.outages[c.Scope]
	j.mu.Unlock()
	switch {
	case c.To == breaker.Closed:
		j.closed(now, c, out)
	case out == nil:
		j.opened(now, c)
	}
}

func (j *journal) opened(now time.Duration, c circuit.Change) {
	all := j.under(c.Scope)
	out := &outage{since: c.At, said: now, warned: string(c.Cause) != causeOperator, probed: make(map[reporter]uint64, len(all))}
	for _, s := range all {
		out.probed[s] = s.probed()
	}
	j.mu.Lock()
	j.outages[c.Scope] = out
	j.mu.Unlock()

	change := StateChange{Scope: c.Scope, Reason: ReasonBreaker, Active: true, Detail: string(c.Cause)}
	args := []any{"scope", c.Scope, "reason", string(c.Cause), "sources", len(all)}
	last := j.lastFailure(now, all)
	if last != nil && out.warned {
		change.Error, change.Class = last.text, last.class
		args = append(args, "error", last.text, "class", last.class.String())
	}
	level := slog.LevelWarn
	if !out.warned {
		level = slog.LevelInfo
	}
	j.say(now, line{level, lineOpened, topicOf(c.Scope), false, append(args, "means", meaning(c.Cause, last))})
	j.changed(change)
}

// meaning is what an open breaker means for the user.
func meaning(cause breaker.Cause, last *failedCall) string {
	const held = "messages are held, not lost and not dead-lettered; "
	switch {
	case string(cause) == causeOperator:
		return held + "an operator forced it open: ForceClosed ends it"
	case cause == breaker.CauseQuorum:
		return held + "so many of its children are open that all are held; it closes with them"
	case cause == breaker.CauseSlow:
		return held + "calls take too long; probes find out when they are quick again"
	case last != nil && last.class == ClassDependency:
		return held + "the dependency fails; probes find out when it is back"
	case last != nil && last.class == ClassMessage:
		return held + "calls fail, and the error says that the messages are at fault: look at their producer"
	default:
		return held + "calls fail, and the error does not say why; probes find out when they succeed again"
	}
}

func (j *journal) closed(now time.Duration, c circuit.Change, out *outage) {
	change := StateChange{Scope: c.Scope, Reason: ReasonBreaker, Detail: string(c.Cause)}
	args := []any{"scope", c.Scope, "reason", string(c.Cause)}
	if out != nil {
		change.For, change.Calls = c.At-out.since, j.calls(out, j.under(c.Scope))
		args = append(args, "for", change.For, "calls", change.Calls)
		j.mu.Lock()
		delete(j.outages, c.Scope)
		j.mu.Unlock()
	}
	j.say(now, line{slog.LevelInfo, lineClosed, topicOf(c.Scope), out != nil && out.warned, args})
	j.changed(change)
}

// calls is how many probes were made since an outage began.
func (j *journal) calls(out *outage, all []reporter) (n uint64) {
	probed := make([]uint64, len(all))
	for i, s := range all {
		probed[i] = s.probed()
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	n = out.gone
	for i, s := range all {
		n += probed[i] - min(probed[i], out.probed[s])
	}
	return n
}

// left takes the leave of a source that has ended.
func (j *journal) left(s reporter) {
	scope, probed := s.scope(), s.probed()
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.wants, s)
	for name, out := range j.outages {
		if scope != "" && within(scope, name) {
			out.gone += probed - min(probed, out.probed[s])
			delete(out.probed, s)
		}
	}
}

// ended forgets the storms of a source.
func (j *journal) ended(source string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.storms, stormOf{source, false})
	delete(j.storms, stormOf{source, true})
}

// remind logs each breaker that is still open once in a while; one that no source has
// any more is forgotten.
func (j *journal) remind(now time.Duration) {
	due := make(map[string]*outage)
	j.mu.Lock()
	for scope, out := range j.outages {
		if now-out.said >= stillEvery {
			out.said = now
			due[scope] = out
		}
	}
	j.mu.Unlock()
	for scope, out := range due {
		all := j.under(scope)
		if len(all) == 0 {
			j.mu.Lock()
			delete(j.outages, scope)
			j.mu.Unlock()
			continue
		}
		args := []any{"scope", scope, "sources", len(all), "for", now - out.since, "calls", j.calls(out, all)}
		if last := j.lastFailure(now, all); last != nil {
			args = append(args, "error", last.text, "class", last.class.String())
		}
		j.say(now, line{slog.LevelInfo, lineStillOpen, topicOf(scope), false, args})
	}
}

// storm takes the beginning or the end of a storm, from the sweeper.
func (j *journal) storm(now time.Duration, cfg SourceConfig, key string, fleet, active bool, readings string) {
	at := stormOf{cfg.Name, fleet}
	change := StateChange{Scope: key, Source: cfg.Name, Reason: ReasonStorm, Fleet: fleet, Active: active, Detail: readings}
	args := []any{"scope", key, "source", cfg.Name, "reason", ReasonStorm.String(), "readings", readings}
	j.mu.Lock()
	if active {
		j.storms[at] = now
	} else if since, ok := j.storms[at]; ok {
		change.For = now - since
		delete(j.storms, at)
	}
	j.mu.Unlock()
	l := line{slog.LevelWarn, lineStorm, key, false, args}
	switch {
	case active && fleet:
		l.text = lineFleetStorm
	case !active && fleet:
		l.text = lineFleetOver
	case !active:
		l.text = lineStormOver
	}
	if active {
		l.args = append(l.args, "means", "nothing is dead-lettered but what its own error condemns; the breaker is open")
	} else {
		l.level, l.end = slog.LevelInfo, true
		l.args = append(l.args, "for", change.For)
	}
	j.say(now, l)
	j.changed(change)
}

// letter takes a dead letter that is confirmed, from its writer's goroutine.
func (j *journal) letter(from letterFrom, r *dlq.Record) {
	now := j.g.now()
	l := line{slog.LevelWarn, lineLetter, from.topic, false, []any{
		"source", from.cfg.Name, "reason", string(r.Reason), "class", from.class.String(), "cause", r.Cause.ID, "error", r.Cause.Title, "attempts", r.Attempts,
	}}
	j.mu.Lock()
	c := j.letters[from.topic]
	if c == nil || now >= c.since+letterSpan && c.more == 0 {
		c = &letterCount{since: now}
		j.letters[from.topic] = c
	}
	c.n++
	more := c.n > letterLines
	if more {
		c.more++
		c.last = l
		c.last.text = lineLetters
	}
	j.mu.Unlock()
	if more {
		j.g.sweeper.kick()
	} else {
		j.write(l)
	}
	letter := DeadLetter{from.cfg.Name, from.cfg.Destination, from.cfg.Partition, from.class, r}
	if f := j.g.onLetter; f != nil {
		j.call("OnDeadLetter", func() { f(letter) })
	}
	for _, w := range j.g.watching() {
		if f := w.DeadLetter; f != nil {
			j.call("Watcher.DeadLetter", func() { f(letter) })
		}
	}
}

// askNeeds logs what needs a person, when it has lasted, and when it is over.
func (j *journal) askNeeds(now time.Duration) {
	for _, s := range j.g.all() {
		have := s.needs(now)
		j.mu.Lock()
		had := j.wants[s]
		if had == nil {
			if have == [needCount]need{} || !slices.Contains(j.g.all(), s) { // it has ended meanwhile
				j.mu.Unlock()
				continue
			}
			had = new([needCount]want)
			j.wants[s] = had
		}
		var lines []line
		for kind, n := range have {
			lines = had[kind].step(now, s, n, lines)
		}
		if *had == [needCount]want{} {
			delete(j.wants, s)
		}
		j.mu.Unlock()
		for _, l := range lines {
			j.say(now, l)
		}
	}
}

// step brings a want up to date with what the source says now.
func (w *want) step(now time.Duration, s reporter, n need, lines []line) []line {
	name, topic := s.(Control).Name(), s.topic() //nolint:forcetypeassert // every reporter is a Control
	switch {
	case n.what == nil && w.said > 0:
		lines = append(lines, line{slog.LevelInfo, lineGoesOn, topic, true, []any{"source", name, "was", w.what.line, "for", now - w.since}})
		*w = want{}
		return lines
	case n.what == nil:
		*w = want{}
		return lines
	case w.what == nil:
		w.since = now
	}
	w.what = n.what
	if n.since > 0 {
		w.since = n.since
	}
	if now-w.since < n.what.after || w.said > 0 && now-w.said < needAgain {
		return lines
	}
	w.said = max(now, 1)
	args := []any{"source", name, "messages", n.messages, "for", now - w.since}
	if n.failure != (dlq.ErrorInfo{}) {
		args = append(args, "error", n.failure.Message, "cause", n.failure.Fingerprint().ID, "class", n.class.String(), "attempts", n.attempts)
	}
	return append(lines, line{slog.LevelWarn, n.what.line, topic, false, append(args, "help", n.what.help)})
}

func (s *Source[M]) topic() string { return cmp.Or(s.cfg.Destination, s.cfg.Name) }

func (s *Source[M]) scope() string {
	if s.c.gate == nil {
		return ""
	}
	return s.c.gate.Name()
}

func (s *Source[M]) lastFailure() *failedCall { return s.failed.Load() }

func (s *Source[M]) probed() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.c.tally.Probes
}

// needs tells what of the source waits for a person. A source on the closed path does
// not, unless its handler hangs.
func (s *Source[M]) needs(now time.Duration) (all [needCount]need) {
	all[needsReturn] = s.longOut(now, s.callBegan(now), need{})
	if !s.slow.Load() {
		return all
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.c.ended {
		return all
	}
	for _, it := range s.c.busy {
		began := it.started
		if it.offered { // a probe is offered again and again
			began = min(began, s.offeredAt)
		}
		all[needsReturn] = s.longOut(now, began, all[needsReturn])
	}
	if n := s.c.parked[ReasonDLQ]; n > 0 {
		what := wantsCredit
		if !s.c.letters {
			what = wantsWriter
		}
		all[needsLetter] = need{what: what, messages: n}
	}
	all[needsHead] = s.c.blocked(now)
	return all
}

// longOut adds a message to the need of those that are out for longer than they may be:
// with a handler, or with the program or on offer to it.
func (s *Source[M]) longOut(now, began time.Duration, n need) need {
	if limit := time.Duration(s.timeout.Load()); limit > 0 && now-began >= limit+needReturn {
		if n.what == nil || began < n.since {
			n.since = max(began, 1)
		}
		n.what = wantsReturn
		n.messages++
	}
	return n
}

// blocked is what fails for so long that a person may have to look: the message that has
// blocked its lane for the longest time because a dependency fails; or the oldest whose
// attempts are used up and whose error says nothing, where nothing succeeds. It looks at
// all heads if any message has used its attempts up.
func (c *machine[M]) blocked(now time.Duration) (n need) {
	if c.exhausted == 0 {
		return n
	}
	lifeless := max(c.provedAt, c.movedAt, c.failingAt)
	oldest := time.Duration(math.MaxInt64)
	look := func(it *item[M], what *needWords, since time.Duration) {
		n.messages++
		if it.firstFailed >= oldest {
			return
		}
		oldest = it.firstFailed
		last := it.failures[len(it.failures)-1]
		n.what, n.since, n.class, n.attempts, n.failure = what, max(since, 1), it.class, it.tries, last.words
		n.failure.Stack = string(last.stack)
	}
	visit := func(it *item[M]) {
		switch {
		case len(it.failures) == 0, it.phase == settling, it.decided():
		case it.class == ClassDependency && it.lane != nil && now-it.firstFailed >= needHead:
			look(it, wantsDependency, it.firstFailed)
		case it.class == ClassUnknown && it.exhausted && now-lifeless >= needHead && c.letters:
			look(it, wantsVerdict, lifeless)
		}
	}
	if c.order() == OrderNone {
		c.items(visit)
	}
	for _, l := range c.lanes {
		if it := l.head(); it != nil {
			visit(it)
		}
	}
	if n.what == wantsVerdict {
		n.messages = len(c.failedWaiting())
	}
	return n
}

func (f *Func[M]) topic() string { return cmp.Or(f.cfg.Destination, f.cfg.Name) }

func (f *Func[M]) scope() string {
	if f.gate == nil {
		return ""
	}
	return f.gate.Name()
}

func (f *Func[M]) lastFailure() *failedCall { return f.lastFailed.Load() }

func (f *Func[M]) probed() (n uint64) {
	for i := range f.cells {
		n += f.cells[i].probes.Load()
	}
	return n
}

func (*Func[M]) needs(time.Duration) (none [needCount]need) { return none }
