// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// Quarantine: messages that match a rule of a list are dead-lettered without a handler
// call; all others are handled. When the list changes, it is read into a new ruleBook,
// which never changes. Each message is compared once with each book, when its turn comes
// and before it is admitted. This calls Port.Meta, outside the lock:
//
//	next ──▶ stepLook ──▶ look ──▶ looked ──▶ up again, or impounded
//
// Rules about keys and headers need the Meta of each message, so the closed path is off
// while the list has such rules. Otherwise the quarantine costs the closed path nothing. A
// rule about a cause is compared when a message fails.

// WithQuarantine makes the Guard use a list that it shares with others, such as the list
// of a fleet or of another Guard of this process. The default is a list of its own.
func WithQuarantine(q dlq.Quarantine) Option { return func(g *Guard) { g.quarantine = q } }

// Quarantine returns the Guard's list of rules. An operator adds rules to it and removes
// them. A message that matches a rule is dead-lettered in its order, with the reason
// "quarantine". That is no attempt and no failure, and costs no credit, but the limit of
// dead letters paces it. In a source without a dead-letter writer the message waits until
// the rule ends. A rule about a cause matches a message that has failed with that cause
// once.
func (g *Guard) Quarantine() dlq.Quarantine { return g.quarantine }

// ruleBook is the content of a list at one time. It never changes. nil is an empty list.
type ruleBook struct {
	version uint64                 // from 1
	rules   map[dlq.Rule]time.Time // when each rule ends
	meta    bool                   // there are rules about keys or headers
	headers bool                   // there are rules about headers
	causes  bool                   // there are rules about causes
	until   time.Time              // when the first rule ends
}

// readQuarantine reads the list if it has changed or a rule has ended. Then the sources
// compare their waiting messages again. The sweeper calls it.
func (g *Guard) readQuarantine() {
	book := g.rules.Load()
	if !g.listed.Swap(false) && (book == nil || time.Now().Before(book.until)) {
		return
	}
	had := book.len()
	book = g.newRuleBook(g.quarantine.Entries())
	g.rules.Store(book)
	for _, s := range g.all() {
		s.heedRules(g.now())
	}
	if had != book.len() {
		g.journal.say(g.now(), line{slog.LevelInfo, lineQuarantine, "", false, []any{"rules", book.len(), "before", had}})
	}
}

func (g *Guard) newRuleBook(entries []dlq.QuarantineEntry) *ruleBook {
	g.books++
	if len(entries) == 0 {
		return nil
	}
	b := &ruleBook{version: g.books, rules: make(map[dlq.Rule]time.Time, len(entries))}
	for _, e := range entries {
		e.Rule.Header = strings.ToLower(e.Rule.Header)
		if e.Until.After(b.rules[e.Rule]) {
			b.rules[e.Rule] = e.Until
		}
		if b.until.IsZero() || e.Until.Before(b.until) {
			b.until = e.Until
		}
		b.meta = b.meta || e.Rule.Kind != dlq.RuleCause
		b.headers = b.headers || e.Rule.Kind == dlq.RuleHeader
		b.causes = b.causes || e.Rule.Kind == dlq.RuleCause
	}
	return b
}

func (b *ruleBook) len() int {
	if b == nil {
		return 0
	}
	return len(b.rules)
}

// has tells whether a rule is in force.
func (b *ruleBook) has(r dlq.Rule) bool {
	if b == nil {
		return false
	}
	until, ok := b.rules[r]
	return ok && time.Now().Before(until)
}

// ofMeta is the rule about a key or a header that a message matches, nil if there is
// none. Of headers with one name the last counts; the case of names is ignored, as in
// [dlq.Lookup].
func (b *ruleBook) ofMeta(m Meta) *dlq.Rule {
	if r := (dlq.Rule{Kind: dlq.RuleKey, Value: string(m.Key)}); len(m.Key) > 0 && b.has(r) {
		return &r
	}
	if !b.headers {
		return nil
	}
	for i, h := range slices.Backward(m.Headers) {
		text, ok := headerText(h.Value)
		r := dlq.Rule{Kind: dlq.RuleHeader, Header: strings.ToLower(h.Name), Value: text}
		if ok && b.has(r) && !slices.ContainsFunc(m.Headers[i+1:], func(o dlq.Header) bool { return strings.EqualFold(o.Name, h.Name) }) {
			return &r
		}
	}
	return nil
}

// headerText is the text by which a rule names a header's value; false for times, lists
// and tables.
func headerText(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case []byte:
		return string(v), true
	case bool, int, int8, int16, int32, int64, uint8, uint16, uint32, uint64:
		return fmt.Sprint(v), true
	}
	return "", false
}

// ofCause is the rule about the cause of a failure, nil if there is none. An error of the
// dependency matches none: in an outage such a rule would dead-letter everything.
func (b *ruleBook) ofCause(class Class, err error, stack []byte) *dlq.Rule {
	if b == nil || !b.causes || err == nil || class == ClassDependency {
		return nil
	}
	if r := (dlq.Rule{Kind: dlq.RuleCause, Value: dlq.Fingerprint(err, stack).ID}); b.has(r) {
		return &r
	}
	return nil
}

// heedRules gives the source the book in force. Messages that wait for a retry are compared
// again at once, the others when their turn comes.
func (s *Source[M]) heedRules(now time.Duration) {
	s.mu.Lock()
	s.c.heedRules(now, s.g.rules.Load())
	s.unlock(now)
	s.nudge()
}

func (*Func[M]) heedRules(time.Duration) {} // a function has no messages for a quarantine

func (c *machine[M]) heedRules(now time.Duration, book *ruleBook) {
	c.book = book
	c.unlooked = c.unlooked[:0]
	for _, it := range slices.Clone(c.due) {
		switch {
		case it.rule == nil && book != nil:
			c.unlooked = append(c.unlooked, it)
		case it.rule != nil && !book.has(*it.rule):
			c.release(now, it)
		}
	}
}

// release lets an impounded item go on, if its dead letter is not with the writer yet.
func (c *machine[M]) release(now time.Duration, it *item[M]) {
	it.rule, it.paid = nil, false
	if it.tries > 0 && !it.permanent {
		it.doubtful = c.failureLives.add(int64(it.lifeAtFailure))
	}
	c.waitRetry(it, now, ReasonNone) // next wakes it, or dead-letters it if it is permanent
}

// unseen tells whether an item must be compared with the book before it is handled.
func (c *machine[M]) unseen(it *item[M]) bool {
	return c.book != nil && it.seen != c.book.version && it.rule == nil && (c.book.meta || c.book.causes && len(it.failures) > 0)
}

// nextToLook is the next item that waits for a retry and must be compared, nil for none.
func (c *machine[M]) nextToLook() *item[M] {
	for len(c.unlooked) > 0 && !c.paused {
		it := c.unlooked[0]
		c.unlooked = c.unlooked[1:]
		if it.phase == retryWait && c.unseen(it) {
			return it
		}
	}
	return nil
}

// examine takes an item out of the retry set, or from the front of the ready items, to
// compare it with the book. The item counts as processing meanwhile.
func (c *machine[M]) examine(now time.Duration, it *item[M]) step[M] {
	it.wasParked = it.phase == retryWait
	switch {
	case it.wasParked:
	case it.lane == nil:
		c.again.pop()
	default:
		c.ready.pop()
		it.lane.queued, it.lane.parked = false, true
	}
	c.move(it, processing)
	it.started, it.slow, it.ctx, it.probe = now, true, nil, false // no timeout, no report to the breaker
	return step[M]{kind: stepLook, it: it}
}

// looked impounds an item that examine took out, or puts it back. book is the book that
// the item was compared with, nil if that comparison does not count.
func (c *machine[M]) looked(now time.Duration, it *item[M], book *ruleBook, rule *dlq.Rule) {
	if book != nil {
		it.seen = book.version
	}
	switch {
	case rule != nil && !c.ended:
		c.impound(now, it, rule)
	case it.wasParked:
		switch {
		case it.due < never:
			c.waitRetry(it, it.due, it.reason)
		case it.paid:
			c.queueUp(it, &c.paced, now+creditPoll, it.reason)
		default:
			c.queueUp(it, &c.owed, now+creditPoll, it.reason)
		}
		if c.unseen(it) {
			c.unlooked = append(c.unlooked, it)
		}
	default:
		c.move(it, waiting)
		if it.lane == nil {
			c.again.pushFront(it)
			return
		}
		it.lane.parked, it.lane.queued = false, true
		c.ready.pushFront(it.lane)
	}
}

// impound dead-letters an item that matches a rule, without a credit. Without a writer the
// item waits. An item of a lane keeps its place: it is impounded when it is the head, or
// when a look behind the head has come to it; the look then goes on with the next item.
func (c *machine[M]) impound(now time.Duration, it *item[M], rule *dlq.Rule) {
	witness := it.witness()
	if witness && c.letterPace != nil && c.letterPace.Admit(now) > 0 {
		it.seen = 0 // compare it again in its turn
		c.endWitness(now, it.lane, it)
		return
	}
	it.rule = rule
	c.tally.Quarantined++
	c.refund(it)
	c.undoubted(it)
	switch {
	case witness:
		l := it.lane
		l.front = slices.Delete(l.front, l.turn, l.turn+1)
		it.lane, it.verdict = nil, dlq.ReasonQuarantine
		c.move(it, settling)
		c.writing[it] = struct{}{}
		c.toWrite = append(c.toWrite, it)
		if l.turn <= l.behind() {
			l.parked, l.queued = false, true
			c.ready.pushFront(l)
			return
		}
		c.endWitness(now, l, nil)
	case !c.letters:
		c.waitRetry(it, never, ReasonDLQ)
	default:
		c.paceLetter(now, it, dlq.ReasonQuarantine)
	}
}

// endWitness ends the look of a lane, which cannot go on, and lets the lane's head wait.
func (c *machine[M]) endWitness(now time.Duration, l *lane[M], it *item[M]) {
	if it != nil {
		c.move(it, waiting)
	}
	c.endLook(now, l)
	c.decide(now, l.front[0])
}

// next is machine.next, but does each stepLook itself. The caller holds s.mu; next unlocks
// it during a comparison.
func (s *Source[M]) next(now time.Duration) step[M] {
	for {
		st := s.c.next(now)
		if st.kind != stepLook {
			return st
		}
		book := s.c.book
		s.calls++ // as begin does: End waits for the comparison
		s.unlock(now)
		rule := s.compare(st.it, book)
		s.mu.Lock()
		s.endLocked()
		now = s.g.now()
		if s.c.emptied {
			s.c.abandon(st.it) // End has stopped waiting
			continue
		}
		if s.c.book != book { // the list has changed meanwhile: compare again
			rule, book = nil, nil
		}
		s.c.looked(now, st.it, book, rule)
	}
}

// compare is the rule that a message matches, nil if there is none. The caller holds no
// lock, and has announced a port call.
func (s *Source[M]) compare(it *item[M], book *ruleBook) *dlq.Rule {
	if n := len(it.failures); n > 0 {
		if r := book.ofCause(it.class, it.failures[n-1].err, it.failures[n-1].stack); r != nil {
			return r
		}
	}
	if !book.meta {
		return nil
	}
	meta, err := s.meta(it.m)
	if err != nil {
		return nil
	}
	return book.ofMeta(meta)
}
