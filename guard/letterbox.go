// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

const (
	// writeTimeout bounds one call of a dead-letter writer.
	writeTimeout = 30 * time.Second
	// writeLate is when a call that has not heeded its context is said.
	writeLate = writeTimeout + 5*time.Second
	// writeBase and writeMax bound the pause after failed writes: full jitter.
	writeBase = 100 * time.Millisecond
	writeMax  = 10 * time.Second
	// writeTries bounds the failed writes without a pause, each of another source.
	writeTries = 8
	// writeSlow is for how long a write keeps the letters of other sources waiting.
	writeSlow = time.Second
	// writesAtOnce bounds the writes under way, each of another source. All but one of them
	// are slow, and half of them at most are of sources that are ill. A write that is late
	// does not count: it may never return.
	writesAtOnce = 8
	// putOffMax bounds the pause before what was put off is offered again.
	putOffMax = time.Second
)

// letterbox writes the dead letters of all sources that share a writer, one after the
// other, on a goroutine that lives as long as there are any. A write that takes longer than
// writeSlow goes on beside those of other sources. The letterbox is the writer's own
// breaker. A letter that is not taken waits for a pause: alone if the writer
// refuses it or puts it off ([dlq.ErrPutOff]) or [Port.Meta] fails, and with all letters of its
// source if the write failed, since sources may have DLQs of their own. The others are written
// meanwhile, but after 8 failed writes in a row all wait. A letter of a source that fails, which
// may take writeTimeout, and one of another source take turns.
type letterbox struct {
	g      *Guard
	writer dlq.Writer
	own    bool // of one source, which parks
	users  int  // open sources that have it; Guard.mu

	mu      sync.Mutex
	running bool
	well    fifo[postable]      // letters that may be written, of sources that are not ill
	sick    fifo[postable]      // letters that may be written, of those that are
	failed  bench               // letters whose write failed, and all of sources that are down
	refused bench               // letters that the writer refuses, and whose message cannot be described
	putOffs bench               // letters that it does not take yet
	back    fifo[postable]      // letters that go back to their sources
	unsort  bool                // some of the others may go back
	slow    map[string]bool     // sources whose letter is at the writer for longer than writeSlow, or writeLate …
	behind  []postable          // … and their next letters
	done    fifo[*writing]      // slow writes that are over
	more    chan struct{}       // has room for one: there is more to do
	down    map[string]struct{} // sources whose letters wait for the pause of failed
	ill     map[string]struct{} // sources whose last letter failed or was refused
	wasIll  bool                // the last letter was of such a source
	broken  bool                // no write has succeeded since one failed or became slow
	row     int                 // failed writes in a row
	ails    map[string]ailment  // sources of which a letter fails
	waits   map[string]error    // why the last letter of a source was put off
}

// ailment is why letters of a source fail.
type ailment struct {
	err   error // of the last that did; nil for none
	since time.Duration
	late  bool // a write of the source was late, which was said
}

// bench is where letters wait before they are tried again, for one reason. Its pauses
// double from writeBase while any is left for which that is the last answer.
type bench struct {
	top    time.Duration         // bounds a pause
	last   map[postable]struct{} // letters whose last answer this is, wherever they are …
	of     map[string]int        // … and how many a source has of them
	tried  []postable            // letters that had the answer, and wait for the pause to end
	others []postable            // letters that wait with them, and come first then
	until  time.Duration         // when the pause ends; 0 for none
	pauses int
}

func newBench(top time.Duration) bench {
	return bench{top: top, last: make(map[postable]struct{}), of: make(map[string]int)}
}

// add lets a letter wait for the end of the pause, which begins if there is none.
func (w *bench) add(now time.Duration, g *Guard, l postable) {
	if _, was := w.last[l]; !was {
		w.last[l] = struct{}{}
		w.of[l.source()]++
	}
	w.tried = append(w.tried, l)
	if w.until == 0 {
		top := min(w.top, writeBase<<min(w.pauses, 10))
		w.until = now + 1 + time.Duration(g.dice.Int64N(int64(top)))
		w.pauses++
	}
}

// drop forgets a letter that had another answer, or none.
func (w *bench) drop(l postable) {
	if _, was := w.last[l]; was {
		delete(w.last, l)
		if w.of[l.source()]--; w.of[l.source()] == 0 {
			delete(w.of, l.source())
		}
	}
	if len(w.last) == 0 {
		w.pauses = 0
	}
}

// end ends the pause if it is over, and puts what has waited in the queue.
func (w *bench) end(now time.Duration, queue *fifo[postable]) (over bool) {
	if w.until == 0 || now < w.until {
		return false
	}
	for _, some := range [][]postable{w.others, w.tried} {
		for _, l := range some {
			queue.push(l)
		}
	}
	w.others, w.tried, w.until = nil, nil, 0
	return true
}

// postable is a dead letter in the making, whatever its message's type.
type postable interface {
	// record makes the dead letter. The error is [ErrClosed] if the source has ended.
	record() (*dlq.Record, error)
	// park writes it away for another try; parked is false if it is to be dead-lettered.
	park(ctx context.Context, r *dlq.Record) (parked bool, err error)
	// confirmed tells the source that it is written, as a dead letter or parked.
	confirmed(ctx context.Context, parked bool)
	// source is the name of its source.
	source() string
	// from says whose it is.
	from() letterFrom
	// wrote is told of each call of the writer.
	wrote(ctx context.Context, took time.Duration, err error)
	// ends tells whether its source ends, and whether its messages are another's to handle.
	ends() (ended, revoked bool)
	// undone hears that it is not written. It tells whether its source ends and has it back.
	undone(err error) bool
}

// letterFrom is whose dead letter it is.
type letterFrom struct {
	cfg   SourceConfig
	topic string
	class Class // of its last error
}

func newLetterbox(g *Guard, w dlq.Writer, own bool) *letterbox {
	b := &letterbox{g: g, writer: w, own: own, users: 1, more: make(chan struct{}, 1)}
	b.begin()
	return b
}

// begin makes it as new.
func (b *letterbox) begin() {
	b.down, b.ill, b.slow = make(map[string]struct{}), make(map[string]struct{}), make(map[string]bool)
	b.ails, b.waits = make(map[string]ailment), make(map[string]error)
	b.failed, b.refused, b.putOffs = newBench(writeMax), newBench(writeMax), newBench(putOffMax)
	b.well, b.sick, b.back = fifo[postable]{}, fifo[postable]{}, fifo[postable]{}
	b.running, b.unsort, b.wasIll, b.broken, b.row = false, false, false, false, 0
}

func (b *letterbox) benches() [3]*bench { return [...]*bench{&b.failed, &b.refused, &b.putOffs} }

func (b *letterbox) post(l postable) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ended, _ := l.ends()
	b.unsort = b.unsort || ended
	if _, down := b.down[l.source()]; down {
		b.failed.others = append(b.failed.others, l)
		if !ended {
			return
		}
	} else {
		b.well.push(l)
	}
	if !b.running && b.g.spawn(b.run) {
		b.running = true
	}
	token(b.more)
}

// sourceEnds gives the letters of a source that ends back to it, as backLocked says. It does
// not wait for the writer.
func (b *letterbox) sourceEnds() {
	b.mu.Lock()
	b.sortLocked()
	back := b.back
	b.back = fifo[postable]{}
	b.mu.Unlock()
	for back.len() > 0 {
		l := back.pop()
		b.forget(l, notYet)
		l.undone(dlq.ErrPutOff)
	}
	token(b.more)
}

// countLocked is how many letters there are, but for those at the writer.
func (b *letterbox) countLocked() int {
	n := b.well.len() + b.sick.len() + b.back.len() + len(b.behind)
	for _, w := range b.benches() {
		n += len(w.others) + len(w.tried)
	}
	return n
}

// ready is nil unless letters fail. It names the source whose have for longest.
func (b *letterbox) ready() error {
	b.mu.Lock()
	source, err := b.worstLocked()
	others := len(b.ails) - 1
	b.mu.Unlock()
	switch {
	case err == nil:
		return nil
	case others == 0:
		return fmt.Errorf("guard: dead letters of source %s: %w", source, err)
	}
	return fmt.Errorf("guard: dead letters of source %s and %d more: %w", source, others, err)
}

// trouble is why the letters of a source are not written, nil for no reason.
func (b *letterbox) trouble(source string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := b.ails[source].err
	if err == nil && (b.row >= writeTries || b.slowLocked(false) == writesAtOnce) { // all wait
		_, err = b.worstLocked()
	}
	return err
}

// worstLocked is the source whose letters have failed for longest, and why.
func (b *letterbox) worstLocked() (source string, err error) {
	var since time.Duration
	for name, a := range b.ails {
		if err == nil || a.since < since || a.since == since && name < source {
			source, err, since = name, a.err, a.since
		}
	}
	return source, err
}

// putOff is why letters of a source wait that the writer does not take yet, nil for none.
func (b *letterbox) putOff(source string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waits[source]
}

// answer is what a write came to.
type answer uint8

const (
	written answer = iota
	notYet         // put off
	refused
	broken
	unread // none: its message cannot be described, which says nothing about the writer
)

// answerOf calls methods of the error, so no lock may be held.
func answerOf(err error) answer {
	switch {
	case err == nil:
		return written
	case errors.Is(err, dlq.ErrPutOff):
		return notYet
	case errors.Is(err, dlq.ErrRefused), errors.Is(err, dlq.ErrTooLarge):
		return refused
	}
	return broken
}

// noted keeps what a write came to. It returns why letters of the source failed before, and
// why they do now.
func (b *letterbox) noted(l postable, what answer, err error) (was, is ailment) {
	now := b.g.now()
	b.mu.Lock()
	defer b.mu.Unlock()
	was = b.ails[l.source()]
	b.endLocked(now)
	b.answeredLocked(l, what)
	var to *bench
	switch what {
	case written:
		b.row = 0
	case notYet:
		to, b.waits[l.source()] = &b.putOffs, err
	case refused, unread:
		to = &b.refused
		b.ailsLocked(now, l.source(), err)
	case broken:
		to = &b.failed
		b.ailsLocked(now, l.source(), err)
		b.down[l.source()] = struct{}{}
		b.row++
	}
	if to != nil {
		to.add(now, b.g, l)
		ended, _ := l.ends()
		b.unsort = b.unsort || ended
	}
	b.dropLocked(l, to)
	return was, b.ails[l.source()]
}

// ailsLocked keeps why letters of a source fail.
func (b *letterbox) ailsLocked(now time.Duration, source string, err error) {
	a := b.ails[source]
	if a.err == nil {
		a.since = now
	}
	a.err, a.late = err, a.late || err == errWriteLate //nolint:errorlint // watch's own
	b.ails[source] = a
}

// forget drops a letter whose source has ended or has it back. What it was answered says
// something about the others all the same. With the last one that fails ends what tell has
// said of the source: it is no longer this process that waits for the DLQ.
func (b *letterbox) forget(l postable, what answer) {
	b.mu.Lock()
	was := b.ails[l.source()]
	b.dropLocked(l, nil)
	b.answeredLocked(l, what)
	is := b.ails[l.source()]
	b.mu.Unlock()
	if was.err == nil || is.err != nil {
		return
	}
	now, from := b.g.now(), l.from()
	b.g.journal.say(now, line{slog.LevelInfo, lineGoesOn, from.topic, true, []any{
		"source", from.cfg.Name, "was", lineWriter, "for", now - was.since,
	}})
}

// answeredLocked keeps what an answer says about a source and the writer.
func (b *letterbox) answeredLocked(l postable, what answer) {
	switch what {
	case written:
		b.broken = false
		delete(b.ill, l.source())
	case notYet, unread:
	case broken:
		b.breakLocked()
		fallthrough
	case refused:
		if _, ill := b.ill[l.source()]; !ill {
			b.ill[l.source()] = struct{}{}
			b.unsort = true
		}
	}
}

// breakLocked notes that the writer may not work.
func (b *letterbox) breakLocked() {
	b.unsort = b.unsort || !b.broken
	b.broken = true
}

// endLocked ends the pauses that are over, and tells whether that after failed writes is.
func (b *letterbox) endLocked(now time.Duration) (failed bool) {
	if failed = b.failed.end(now, &b.well); failed {
		clear(b.down)
	}
	b.refused.end(now, &b.well)
	b.putOffs.end(now, &b.well)
	return failed
}

// dropLocked takes a letter from all benches but one. Its source is well once no letter of it
// fails.
func (b *letterbox) dropLocked(l postable, but *bench) {
	for _, w := range b.benches() {
		if w != but {
			w.drop(l)
		}
	}
	if b.putOffs.of[l.source()] == 0 {
		delete(b.waits, l.source())
	}
	_, slow := b.slow[l.source()]
	if !slow && b.failed.of[l.source()]+b.refused.of[l.source()] == 0 {
		delete(b.ails, l.source())
	}
}

// backLocked tells whether a letter goes back to its source, which ends: what was put off
// may not be taken before, and what fails, or is behind a slow write, would keep a whole
// consumer group waiting. While the writer is broken none is tried for that.
func (b *letterbox) backLocked(l postable) bool {
	ended, revoked := l.ends()
	if !ended {
		return false
	}
	_, putOff := b.putOffs.last[l]
	_, alone := b.refused.last[l]
	_, ill := b.ill[l.source()]
	_, slow := b.slow[l.source()]
	return putOff || revoked && (alone || ill || slow || b.broken)
}

// sortLocked finds the letters that go back.
func (b *letterbox) sortLocked() {
	b.unsort = false
	goes := func(l postable) bool {
		if !b.backLocked(l) {
			return false
		}
		b.back.push(l)
		return true
	}
	for _, q := range []*fifo[postable]{&b.well, &b.sick} {
		for range q.len() {
			if l := q.pop(); !goes(l) {
				q.push(l)
			}
		}
	}
	b.behind = slices.DeleteFunc(b.behind, goes)
	for _, w := range b.benches() {
		w.others = slices.DeleteFunc(w.others, goes)
		w.tried = slices.DeleteFunc(w.tried, goes)
	}
}

// turn is what the dispatcher does next. With no letter it waits until then, if that is not
// 0, and with over there is none left.
type turn struct {
	l     postable
	back  bool     // it goes back to its source
	done  *writing // a slow write that is over
	until time.Duration
	over  bool
}

// next takes a letter that need not wait.
func (b *letterbox) next(ctx context.Context) (t turn) {
	now := b.g.now()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.done.len() > 0 {
		w := b.done.pop()
		b.hurryLocked(w.l.source())
		return turn{done: w}
	}
	if b.countLocked() == 0 || ctx.Err() != nil {
		if len(b.slow) > 0 {
			return turn{}
		}
		b.begin()
		b.retireLocked()
		return turn{over: true}
	}
	if b.endLocked(now) || b.failed.until == 0 {
		b.row = 0
	}
	if b.unsort {
		b.sortLocked()
	}
	if b.back.len() > 0 {
		return turn{l: b.back.pop(), back: true}
	}
	if b.slowLocked(false) == writesAtOnce {
		return turn{}
	}
	if b.row >= writeTries {
		return turn{until: b.failed.until}
	}
	for range 3 { // the second may find letters for the first
		b.wasIll = !b.wasIll
		if t.l = b.takeLocked(b.wasIll); t.l != nil {
			return t
		}
	}
	for _, w := range b.benches() {
		if w.until > 0 && (t.until == 0 || w.until < t.until) {
			t.until = w.until
		}
	}
	return t
}

// takeLocked takes the first letter of a source that is ill, or is not, nil if there is none.
func (b *letterbox) takeLocked(ill bool) postable {
	from, other := &b.well, &b.sick
	if ill {
		from, other = other, from
	}
	for from.len() > 0 {
		l := from.pop()
		_, slow := b.slow[l.source()]
		_, down := b.down[l.source()]
		_, is := b.ill[l.source()]
		switch {
		case slow:
			b.behind = append(b.behind, l)
		case down:
			b.failed.others = append(b.failed.others, l)
		case is != ill:
			other.push(l)
		case ill && b.slowLocked(true) >= writesAtOnce/2:
			from.pushFront(l)
			return nil
		default:
			return l
		}
	}
	return nil
}

// slowLocked is how many slow writes are not late, of all sources or of those that are ill.
func (b *letterbox) slowLocked(ill bool) (n int) {
	for source, late := range b.slow {
		if _, is := b.ill[source]; !late && (is || !ill) {
			n++
		}
	}
	return n
}

// hurryLocked lets the next letters of a source be written: its slow write is over.
func (b *letterbox) hurryLocked(source string) {
	delete(b.slow, source)
	for b.well.len() > 0 {
		b.behind = append(b.behind, b.well.pop())
	}
	for _, l := range b.behind {
		b.well.push(l)
	}
	b.behind = nil
}

// retireLocked makes the Guard forget a box that no source has and that writes nothing. One
// that still writes stays, so that the writer's next source has the same.
func (b *letterbox) retireLocked() {
	if b.running {
		return
	}
	b.g.mu.Lock()
	defer b.g.mu.Unlock()
	if b.users == 0 {
		b.g.boxes = slices.DeleteFunc(b.g.boxes, func(other *letterbox) bool { return other == b })
	}
}

func (b *letterbox) run(ctx context.Context) {
	for {
		switch t := b.next(ctx); {
		case t.over:
			return
		case t.done != nil:
			b.finish(t.done)
		case t.l == nil:
			b.wait(ctx, t.until)
		case t.back && t.l.undone(dlq.ErrPutOff):
			b.forget(t.l, notYet)
		default:
			b.deliver(ctx, t.l)
		}
	}
}

// wait waits until there is more to do, or then, if that is not 0.
func (b *letterbox) wait(ctx context.Context, then time.Duration) {
	var pause <-chan time.Time
	if then > 0 {
		pause = time.After(then - b.g.now())
	}
	ended := ctx.Done()
	if ctx.Err() != nil { // slow writes are to heed it, too
		ended = nil
	}
	select {
	case <-pause:
	case <-b.more:
	case <-ended:
	}
}

// writing is a letter at the writer.
type writing struct {
	l      postable
	r      *dlq.Record     // nil if its message cannot be described
	span   context.Context //nolint:containedctx // of the write
	parked bool
	err    error
}

// deliver writes a letter. If that takes longer than writeSlow it goes on by itself, and next
// has it when it is over.
func (b *letterbox) deliver(ctx context.Context, l postable) {
	w, over := &writing{l: l}, make(chan struct{})
	go func() { // run does not end before it
		defer close(over)
		returned := false
		defer func() {
			if !returned { // a Goexit, such as one of a tracer's: nothing is known to be written
				w.err = &lostCallError{"dead-letter write", "called runtime.Goexit", debug.Stack()}
			}
		}()
		if w.r, w.err = l.record(); w.err == nil {
			w.span, w.parked, w.err = b.write(ctx, l, w.r)
		}
		returned = true
	}()
	slow := time.NewTimer(writeSlow)
	select {
	case <-over:
		slow.Stop()
		b.finish(w)
		return
	case <-slow.C:
	}
	b.mu.Lock()
	b.slow[l.source()] = false
	b.breakLocked()
	b.mu.Unlock()
	go func() { // nor before this one
		slow.Reset(writeLate - writeSlow)
		select {
		case <-over:
			slow.Stop()
		case <-slow.C:
			b.mu.Lock()
			b.slow[l.source()] = true // no other source waits for it any more
			b.mu.Unlock()
			token(b.more)
			<-over
		}
		b.mu.Lock()
		b.done.push(w)
		b.mu.Unlock()
		token(b.more)
	}()
}

// finish takes what a letter came to.
func (b *letterbox) finish(w *writing) {
	l, err := w.l, w.err
	switch {
	case err == nil:
		if !w.parked {
			b.g.journal.letter(l.from(), w.r)
		}
		l.confirmed(w.span, w.parked)
	case w.r == nil && errors.Is(err, ErrClosed):
		b.forget(l, notYet)
		return
	}
	given, what := err != nil && l.undone(err), unread
	if w.r != nil {
		what = answerOf(err)
	}
	if given {
		b.forget(l, what)
		return
	}
	if was, is := b.noted(l, what, err); (was.err == nil) != (is.err == nil) {
		b.tell(l.from(), was, is)
	}
}

// tell logs that the writer fails for a source, or works again. The source holds its dead
// letters meanwhile, and its order what stands behind these.
func (b *letterbox) tell(from letterFrom, was, is ailment) {
	now, err := b.g.now(), is.err
	if err == nil {
		b.g.journal.say(now, line{slog.LevelInfo, lineWriterWell, from.topic, true, []any{
			"source", from.cfg.Name, "reason", ReasonDLQ.String(), "for", now - was.since,
		}})
		return
	}
	b.mu.Lock()
	left := max(b.countLocked(), 1) // one may be at the writer
	b.mu.Unlock()
	help := "mend the source's DLQ: its letters are tried again, and nothing is lost"
	e, lost := errors.AsType[*lostCallError](err)
	switch {
	case lost && e.who == metaCall:
		help = "mend what describes the message, such as a function of your own: it is asked again, and nothing is lost"
	case err == errWriteLate: //nolint:errorlint // watch's own
		help = "make the writer heed its context: the source's dead letters wait until the call returns"
	}
	args := []any{"source", from.cfg.Name, "reason", ReasonDLQ.String(), "error", err, "messages", left, "help", help}
	if lost {
		args = append(args, "stack", string(e.stack))
	}
	b.g.journal.say(now, line{slog.LevelWarn, lineWriter, from.topic, false, args})
}

// errWriteLate is the trouble of a writer whose call goes on.
var errWriteLate = errors.New("the call has not returned 5s after its context ended")

// watch says that a write goes on after its context has ended. The caller calls done when
// the write has returned.
func (b *letterbox) watch(from letterFrom) (done func()) {
	returned := false
	late := time.AfterFunc(writeLate, func() {
		now := b.g.now()
		b.mu.Lock()
		say := !returned && !b.ails[from.cfg.Name].late
		if !returned {
			b.ailsLocked(now, from.cfg.Name, errWriteLate)
		}
		b.mu.Unlock()
		if say {
			b.tell(from, ailment{}, ailment{err: errWriteLate, since: now})
		}
	})
	return func() {
		late.Stop()
		b.mu.Lock()
		defer b.mu.Unlock()
		returned = true
	}
}

// write writes one letter; one that is too large is trimmed and tried once more. span is the
// write's context, for what is measured of it later.
func (b *letterbox) write(ctx context.Context, l postable, r *dlq.Record) (span context.Context, parked bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	returned := b.watch(l.from())
	defer returned()
	ctx, end := b.g.trace(ctx, r)
	parked, err = l.park(ctx, r)
	if !parked {
		err = b.attempt(ctx, l, r)
		if err != nil && dlq.TrimFor(r, err) {
			err = b.attempt(ctx, l, r)
		}
	}
	end(err)
	return context.WithoutCancel(ctx), parked, err
}

// attempt is one call of the writer.
func (b *letterbox) attempt(ctx context.Context, l postable, r *dlq.Record) error {
	start := b.g.now()
	err := apart("dead-letter writer", func() error { return b.writer.Write(ctx, r) })
	l.wrote(ctx, b.g.now()-start, err)
	return err
}

// apart calls f on a goroutine of its own, which a panic or a Goexit costs: it is a
// failure whatever it was called with.
func apart(who string, f func() error) (err error) {
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		returned := false
		defer func() {
			if returned {
				return
			}
			what := "called runtime.Goexit"
			if v := recover(); v != nil {
				what = fmt.Sprintf("panicked: %v", v)
			}
			err = &lostCallError{who, what, debug.Stack()}
		}()
		if err = f(); err != nil {
			err = sound(err)
		}
		returned = true
	}()
	<-gone
	return err
}

// metaCall is a call of a port that may fail a letter.
const metaCall = "Port.Meta"

// lostCallError is a call, of a dead-letter writer or a port, that did not return.
type lostCallError struct {
	who, what string
	stack     []byte
}

func (e *lostCallError) Error() string { return "guard: " + e.who + " " + e.what }

// letter is a condemned item on its way to the writer.
type letter[M any] struct {
	s  *Source[M]
	it *item[M]
}

func (l letter[M]) record() (*dlq.Record, error) {
	s, it := l.s, l.it
	if !s.begin() {
		return nil, ErrClosed
	}
	meta, err := s.meta(it.m)
	s.mu.Lock()
	fenced := s.fenced.Load()
	it.begun = !fenced && (err == nil || it.begun) // else its credit is given back
	s.endLocked()
	s.mu.Unlock()
	switch {
	case fenced:
		return nil, ErrClosed
	case err != nil:
		return nil, err
	}
	r := &dlq.Record{
		Key: meta.Key, Body: meta.Body, Headers: meta.Headers, Timestamp: meta.Timestamp,
		Origin: meta.Origin, Deliveries: meta.Deliveries, Properties: meta.Properties,
		Attempts: meta.Attempts + it.tries, Permanent: it.permanent, Reason: it.verdict,
	}
	wall := func(at time.Duration) time.Time { return s.g.origin.Add(at) }
	for i, a := range it.failures {
		r.History = append(r.History, dlq.Attempt{N: a.n, At: wall(a.at), Type: a.words.Type, Message: a.words.Message})
		if i == len(it.failures)-1 {
			r.Error, r.LastFailed, r.Cause = dlq.DescribeError(a.err, a.stack), wall(a.at), dlq.Fingerprint(a.err, a.stack)
		}
	}
	if len(it.failures) > 0 {
		r.FirstFailed = wall(it.firstFailed)
		if at := meta.FirstFailed; !at.IsZero() && at.Before(r.FirstFailed) {
			r.FirstFailed = at
		}
	} else if it.rule != nil {
		r.Error = dlq.ErrorInfo{Type: "quarantine", Message: "matches " + it.rule.String()}
		r.Cause = r.Error.Fingerprint()
	}
	return r, nil
}

func (l letter[M]) source() string { return l.s.cfg.Name }

func (l letter[M]) from() letterFrom { return letterFrom{l.s.cfg, l.s.topic(), l.it.class} }

func (l letter[M]) wrote(ctx context.Context, took time.Duration, err error) {
	l.s.metrics.wrote(ctx, took, err)
}

func (l letter[M]) ends() (ended, revoked bool) {
	select {
	case <-l.s.ended:
		return true, l.s.revoked.Load()
	default:
		return false, false
	}
}

// undone gives a letter back to its source if that ends, as backLocked says.
func (l letter[M]) undone(err error) (given bool) {
	s := l.s
	putOff := errors.Is(err, dlq.ErrPutOff)
	s.mu.Lock()
	l.it.tried = l.it.tried || !putOff
	if given = (putOff || s.revoked.Load()) && s.c.ended && !s.fenced.Load(); given {
		delete(s.c.writing, l.it)
		s.c.undone = append(s.c.undone, l.it)
	}
	s.unlock(s.g.now())
	if given {
		s.nudge()
	}
	return given
}

func (l letter[M]) confirmed(ctx context.Context, parked bool) {
	s := l.s
	now := s.g.now()
	s.mu.Lock()
	if s.fenced.Load() {
		s.c.abandon(l.it)
		s.mu.Unlock()
		return
	}
	s.c.confirmed(now, l.it, parked)
	s.unlock(now)
	if !parked {
		s.metrics.deadLettered(ctx, l.it.verdict)
	}
	s.nudge()
}
