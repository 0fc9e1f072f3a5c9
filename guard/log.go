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

// The log lines. docs/operating.md lists them, and a test compares the two lists.
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
	// each letterSpan. The other dead letters share one line at the end of the span.
	letterLines = 10
	letterSpan  = time.Minute

	// joinBase and joinMax bound the time in which lines with the same text and topic are
	// joined into one. The time doubles with each line. After joinMax without such a line
	// it is joinBase again.
	joinBase = time.Second
	joinMax  = time.Minute

	// stillEvery is how often an open breaker is logged again.
	stillEvery = time.Minute

	// needEvery is how often the sweeper asks sources whether they need a person.
	needEvery = 10 * time.Second
	// needAgain is how often a lasting need is logged again.
	needAgain = time.Hour
	// needCredit is how long a message must wait for a credit before that is logged:
	// successes earn credits, mostly soon.
	needCredit = time.Minute
	// needHead is how long messages must fail without progress before that is logged.
	needHead = 5 * time.Minute
	// needReturn is how long after Policy.Timeout a handler must still run before that is
	// logged: a handler needs a moment to react to the end of its context.
	needReturn = 10 * time.Second
)

// A DeadLetter is a dead letter that the writer has confirmed.
type DeadLetter struct {
	Source                 string // SourceConfig.Name
	Destination, Partition string // SourceConfig.Destination and .Partition
	Class                  Class  // class of the last error

	// Record is the written dead letter: reason, attempts, cause, history, and the message
	// itself. Do not change it: the writer may have kept it.
	Record *dlq.Record
}

// OnDeadLetter calls f for each dead letter, after the writer has confirmed it and before
// the message is acked. If the process crashes in between, the dead letter is written
// again, and f is called again. A parked message ([Parker]) is no dead letter.
//
// f is called under no lock, on the goroutine that hands the dead letters to the writer:
// one call after the other for one writer, concurrent calls for different writers. No
// other write of that writer begins before f returns. So f must return quickly, and must
// not call [Guard.Close] or [Source.End]. A panic or a [runtime.Goexit] in f is logged and
// has no other effect. Of several OnDeadLetter the last counts; nil means none.
func OnDeadLetter(f func(DeadLetter)) Option { return func(g *Guard) { g.onLetter = f } }

// A Watcher gets the same calls as the functions of [OnStateChange] and [OnDeadLetter],
// under the same rules. Either function may be nil.
type Watcher struct {
	StateChange func(StateChange)
	DeadLetter  func(DeadLetter)
}

// Watch calls the functions of w from now on, until stop is called. A call that is under
// way may end after stop.
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

// watching returns the present watchers. The slice never changes.
func (g *Guard) watching() []*Watcher {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.watchers
}

// A StateChange is a breaker that opened or closed, or a storm that began or ended.
type StateChange struct {
	// Scope is the breaker's scope, such as "group/topic/partition". For a storm it is
	// the key by which processes compare storms, such as "group/topic".
	Scope string

	// Source is the source in storm. It is empty for a breaker, which may have many
	// sources.
	Source string

	Reason Reason // ReasonBreaker or ReasonStorm
	Fleet  bool   // the storm is a storm of the fleet
	Active bool   // the breaker has opened, or the storm has begun

	// Detail is the breaker's cause, or the storm's readings.
	Detail string

	// Error and Class describe the last failed call in the scope of a breaker that
	// opened. Error is empty if no call has failed lately, as with slow calls, and if a
	// person forced the breaker open.
	Error string
	Class Class

	// For is how long the breaker was open, or the storm lasted. It is 0 if Active.
	For time.Duration
	// Calls is how many probes the sources of the scope made while the breaker was open.
	Calls uint64
}

// OnStateChange calls f when a breaker opens or closes and when a storm begins or ends.
// The calls of each scope are in order. The changes from open to half-open and back, as
// with each failed probe, do not count.
//
// f is called under no lock, on the goroutine that also ends handlers at their timeout,
// one call at a time. So f must return quickly, and must not call [Guard.Close]. A panic or
// a [runtime.Goexit] in f is logged and has no other effect. Of several OnStateChange the
// last counts; nil means none.
func OnStateChange(f func(StateChange)) Option { return func(g *Guard) { g.onState = f } }

// loudHandler is a handler that discards lines below WARN.
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

// failedCall describes a failed handler call.
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
	scope() string // the scope of its breaker; empty without one
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
	failure  dlq.ErrorInfo // the latest failure; empty if there is none
}

// needWords is the log line of a kind of need.
type needWords struct {
	line  string
	after time.Duration // a need is logged when it has lasted for so long
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

// journal logs the events of a Guard and calls the hooks. It joins lines, so that a
// person can read them. Some methods are only for the sweeper; their comments say so.
//
// Lock order: journal.mu is the last. No line is logged and no hook is called under it.
type journal struct {
	g *Guard

	mu      sync.Mutex
	outages map[string]*outage        // by scope
	storms  map[stormOf]time.Duration // when each storm began
	wants   map[reporter]*[needCount]want
	joins   map[joinKey]*join
	letters map[string]*letterCount // by topic or queue
	flushed time.Duration           // when joins and letters are flushed next; owned by the sweeper
	asked   time.Duration           // when sources are next asked for needs; owned by the sweeper
}

// outage is a breaker that is not closed.
type outage struct {
	since, said time.Duration       // when the breaker opened, and when the outage was last logged
	warned      bool                // the opening was logged at WARN
	probed      map[reporter]uint64 // each source's count of probes when the outage began
	gone        uint64              // probes during the outage, of sources that have ended
}

type stormOf struct {
	source string
	fleet  bool
}

// want is a need that a source had at the last look.
type want struct {
	what  *needWords // nil for none
	since time.Duration
	said  time.Duration // when it was last logged; 0 for not yet
}

type joinKey struct{ text, topic string }

// join joins the lines of one text and topic that soon follow a logged line.
type join struct {
	at    time.Duration // when the last line was logged
	lines int           // how many lines were logged lately
	more  int           // how many lines are not logged yet
	last  line          // the last line that is not logged yet
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
	topic string // only lines of the same text and topic are joined
	end   bool   // the line ends a warning
	args  []any
}

func newJournal(g *Guard) *journal {
	return &journal{
		g: g, outages: make(map[string]*outage), storms: make(map[stormOf]time.Duration),
		wants: make(map[reporter]*[needCount]want), joins: make(map[joinKey]*join), letters: make(map[string]*letterCount),
	}
}

// write logs a line. A line that ends a warning goes to the logger that got the warning.
func (j *journal) write(l line, args ...any) {
	log := j.g.log
	if l.end {
		log = j.g.ends
	}
	log.Log(context.Background(), l.level, l.text, append(args, l.args...)...) //nolint:sloglint // say is called with constants
}

// say logs a line. If a line of the same text and topic was logged shortly before, tick
// logs it later, joined with others.
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

// paused logs that an operator pauses a source for d, or without an end if d is not above 0.
func (j *journal) paused(now time.Duration, topic, source string, d time.Duration) {
	args := []any{"source", source, "reason", causeOperator}
	if d > 0 {
		args = append(args, "for", d)
	}
	j.say(now, line{slog.LevelInfo, linePaused, topic, false, args})
}

// resumed logs that the pause of a source is over.
func (j *journal) resumed(now time.Duration, topic, source, reason string) {
	j.say(now, line{slog.LevelInfo, lineResumed, topic, false, []any{"source", source, "reason", reason}})
}

// tick logs the lines that time makes due: joined lines, breakers that are still open,
// sources that need a person. The sweeper calls it. pending tells whether lines wait.
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
	if len(j.wants) > 0 { // the sweeper must see the end of a want
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

// flush logs the joined lines that are due, or all.
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

// call calls a hook on a goroutine of its own, so that a panic or a Goexit ends only that.
func (j *journal) call(name string, f func()) {
	err := apart(name, func() error { f(); return nil })
	if lost, ok := errors.AsType[*lostCallError](err); ok {
		j.say(j.g.now(), line{slog.LevelWarn, lineHook, name, false, []any{"error", err, "stack", string(lost.stack)}})
	}
}

// changed calls the hooks with a change.
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

// under returns the open sources of a breaker's scope.
func (j *journal) under(scope string) (all []reporter) {
	for _, s := range j.g.all() {
		if at := s.scope(); at != "" && within(at, scope) {
			all = append(all, s)
		}
	}
	return all
}

// lastFailure is the latest failed call of the given sources, nil if there was none within
// the breaker's window.
func (j *journal) lastFailure(now time.Duration, of []reporter) (last *failedCall) {
	for _, s := range of {
		if f := s.lastFailure(); f != nil && (last == nil || f.at > last.at) && now-f.at <= j.g.scopes.Config().Breaker.Window {
			last = f
		}
	}
	return last
}

// topicOf is the topic of a breaker's log lines: for a partition the scope of its topic,
// otherwise the scope itself.
func topicOf(scope string) string {
	if last := strings.LastIndexByte(scope, '/'); strings.IndexByte(scope, '/') < last {
		return scope[:last] + "/"
	}
	return scope
}

// breaker takes a change of a breaker. The sweeper calls it. Each change is a line at
// DEBUG; the first opening and the closing are logged at a higher level.
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

// calls is how many probes the sources have made since an outage began.
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

// left forgets a source that has ended, and keeps its probes for the outages.
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

// remind logs each breaker that is still open every stillEvery. It forgets breakers without
// an open source.
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

// storm takes the beginning or the end of a storm. The sweeper calls it.
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
		l.args = append(l.args, "means", "dead letters need a proof, or an error that blames the message; guesses wait longer; the breaker is open")
	} else {
		l.level, l.end = slog.LevelInfo, true
		l.args = append(l.args, "for", change.For)
	}
	j.say(now, l)
	j.changed(change)
}

// letter takes a confirmed dead letter. The goroutine of its writer calls it.
func (j *journal) letter(from letterFrom, r *dlq.Record) {
	now := j.g.now()
	l := line{slog.LevelWarn, lineLetter, from.topic, false, []any{
		"source", from.cfg.Name, "reason", string(r.Reason), "class", from.class.String(), "cause", r.Cause.ID, "error", r.Cause.Title, "attempts", r.Attempts,
	}}
	switch o := r.Origin; {
	case o.HasOffset:
		l.args = append(l.args, "offset", o.Offset)
	case o.Sequence > 0:
		l.args = append(l.args, "sequence", o.Sequence)
	case o.MessageID != "":
		l.args = append(l.args, "message_id", cutText(o.MessageID))
	}
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

// askNeeds logs the needs that have lasted long enough, and their ends.
func (j *journal) askNeeds(now time.Duration) {
	for _, s := range j.g.all() {
		have := s.needs(now)
		j.mu.Lock()
		had := j.wants[s]
		if had == nil {
			if have == [needCount]need{} || !slices.Contains(j.g.all(), s) { // the source has ended meanwhile
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

// step updates a want with the source's present need, and appends the lines to log.
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

// needs returns the source's needs. A source on the closed path needs a person only if its
// handler hangs.
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
		if it.offered { // a probe is put on Ready again and again: offeredAt has the first time
			began = min(began, s.offeredAt)
		}
		all[needsReturn] = s.longOut(now, began, all[needsReturn])
	}
	if n := s.c.retryWaits[ReasonDLQ]; n > 0 {
		what := wantsCredit
		if !s.c.letters {
			what = wantsWriter
		}
		all[needsLetter] = need{what: what, messages: n}
	}
	all[needsHead] = s.c.blocked(now)
	return all
}

// longOut adds a message to the need n if it has been with its handler for longer than
// needReturn after the timeout. In the passive shape it is with the program, or on Ready.
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

// blocked is the need of messages that have failed for so long that a person may have to
// look. It describes the oldest such message: its dependency fails and it blocks its lane;
// or nothing succeeds, its attempts are used up and its error does not say why. blocked
// visits the heads of all lanes, if any message has used up its attempts.
func (c *machine[M]) blocked(now time.Duration) (n need) {
	if c.exhausted == 0 {
		return n
	}
	lifeless := max(c.provedAt, c.grewAt, c.failingAt)
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
