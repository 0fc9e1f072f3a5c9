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
	// writeLate is how long a write, or Port.Meta for it, takes before the guard logs that it has
	// not returned.
	writeLate = writeTimeout + 5*time.Second
	// writeBase and writeMax bound the pause after failed writes: full jitter.
	writeBase = 100 * time.Millisecond
	writeMax  = 10 * time.Second
	// writeTries bounds the failed writes in a row without a pause, each of another source.
	writeTries = 8
	// writeSlow is how long a write keeps the letters of other sources waiting.
	writeSlow = time.Second
	// writesAtOnce bounds the writes under way, each of another source. All but one of them
	// are slow, and at most half of them are of ill sources. A write that is late (writeLate)
	// does not count: it may never return.
	writesAtOnce = 8
	// putOffMax bounds the pause before a letter that was put off is offered again.
	putOffMax = time.Second
)

// dispatcher writes the dead letters of all sources that share a writer, one
// after the other. It is also the breaker of that writer. Its goroutine ends when no letter is
// left. A write that takes longer than writeSlow goes on beside the writes of other sources.
//
// A letter that the writer does not take waits for a pause. It waits alone if the writer refuses
// it or puts it off ([dlq.ErrPutOff]), or if [Port.Meta] fails. If the write failed, all letters
// of its source wait, because each source may have its own DLQ. Letters of other sources are
// written meanwhile, but after writeTries failed writes in a row all wait.
//
// Ill sources, whose writes may take writeTimeout, and the other sources take turns.
type dispatcher struct {
	g      *Guard
	writer dlq.Writer
	own    bool // the dispatcher has one source only, which parks
	users  int  // open sources that use it; guarded by Guard.mu

	// Guarded by mu.
	mu      sync.Mutex
	running bool
	well    fifo[postable]  // letters that may be written, of sources that are not ill
	sick    fifo[postable]  // letters that may be written, of ill sources
	failed  bench           // letters whose write failed, and all letters of sources that are down
	refused bench           // letters that the writer refuses, or whose message cannot be described
	putOffs bench           // letters that the writer does not take yet
	back    fifo[postable]  // letters that go back to their sources
	unsort  bool            // some letters in the other lists may have to go into back
	slow    map[string]bool // sources whose write takes longer than writeSlow; true if longer than writeLate
	behind  []postable      // the next letters of the sources in slow
	done    fifo[*writing]  // slow writes that are over
	more    chan struct{}   // holds a token while there may be more to do; capacity 1

	// What writes have shown; also guarded by mu. A source is ill if its last letter failed or was
	// refused.
	down   map[string]struct{} // sources whose letters wait for the pause of failed
	ill    map[string]struct{} // ill sources
	wasIll bool                // the last turn was of the ill sources
	broken bool                // no write has succeeded since one failed or became slow
	row    int                 // failed writes in a row
	ails   map[string]ailment  // sources that have a failing letter
	waits  map[string]error    // why the last letter of a source was put off
}

// ailment is why letters of a source fail.
type ailment struct {
	err   error         // the error of the latest failed letter; nil for none
	since time.Duration // when letters of the source began to fail
	late  error         // which call was late, and that was logged; nil for none
}

// bench is where letters wait before they are tried again, all for the same kind of answer. Its
// pauses double from writeBase while it has letters in last.
type bench struct {
	top    time.Duration         // bounds a pause
	last   map[postable]struct{} // letters whose latest answer was of this kind, wherever they are
	of     map[string]int        // how many letters in last each source has
	tried  []postable            // letters that had the answer, and wait for the pause to end
	others []postable            // letters that wait with tried, and come before them
	until  time.Duration         // when the pause ends; 0 for none
	pauses int                   // pauses since last was empty
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

// drop forgets a letter that had an answer of another kind, or goes back to its source.
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

// end ends the pause if its time is over, and puts the waiting letters into the queue.
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
	// park parks the message for another try. parked is false if it is to be dead-lettered.
	park(ctx context.Context, r *dlq.Record) (parked bool, err error)
	// confirmed tells the source that the letter is written, or the message parked.
	confirmed(ctx context.Context, parked bool)
	// source is the name of the letter's source.
	source() string
	// from describes the letter's source.
	from() letterFrom
	// wrote is called after each call of the writer.
	wrote(ctx context.Context, took time.Duration, err error)
	// ends tells whether the source ends, and whether another process handles its messages now.
	ends() (ended, revoked bool)
	// undone tells the source that the letter is not written. It returns true if the source ends
	// and takes the letter back.
	undone(err error) bool
}

// letterFrom describes the source of a dead letter.
type letterFrom struct {
	cfg   SourceConfig
	topic string
	class Class // of the message's last error
}

func newDispatcher(g *Guard, w dlq.Writer, own bool) *dispatcher {
	b := &dispatcher{g: g, writer: w, own: own, users: 1, more: make(chan struct{}, 1)}
	b.begin()
	return b
}

// begin resets the dispatcher to its state without letters.
func (b *dispatcher) begin() {
	b.down, b.ill, b.slow = make(map[string]struct{}), make(map[string]struct{}), make(map[string]bool)
	b.ails, b.waits = make(map[string]ailment), make(map[string]error)
	b.failed, b.refused, b.putOffs = newBench(writeMax), newBench(writeMax), newBench(putOffMax)
	b.well, b.sick, b.back = fifo[postable]{}, fifo[postable]{}, fifo[postable]{}
	b.running, b.unsort, b.wasIll, b.broken, b.row = false, false, false, false, 0
}

func (b *dispatcher) benches() [3]*bench { return [...]*bench{&b.failed, &b.refused, &b.putOffs} }

func (b *dispatcher) post(l postable) {
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

// sourceEnds gives letters back to a source that ends; backLocked decides which. It does not wait
// for the writer.
func (b *dispatcher) sourceEnds() {
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

// countLocked is how many letters there are, without those at the writer.
func (b *dispatcher) countLocked() int {
	n := b.well.len() + b.sick.len() + b.back.len() + len(b.behind)
	for _, w := range b.benches() {
		n += len(w.others) + len(w.tried)
	}
	return n
}

// ready is nil unless letters fail. The error names the source whose letters have failed longest.
func (b *dispatcher) ready() error {
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

// trouble is the error because of which letters of a source are not written, nil for none. A letter
// that was put off is no trouble; see putOff.
func (b *dispatcher) trouble(source string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := b.ails[source].err
	if err == nil && (b.row >= writeTries || b.slowLocked(false) == writesAtOnce) { // all wait
		_, err = b.worstLocked()
	}
	return err
}

// worstLocked is the source whose letters have failed longest, and why.
func (b *dispatcher) worstLocked() (source string, err error) {
	var since time.Duration
	for name, a := range b.ails {
		if err == nil || a.since < since || a.since == since && name < source {
			source, err, since = name, a.err, a.since
		}
	}
	return source, err
}

// putOff is why the writer has put off letters of a source, nil if it has not.
func (b *dispatcher) putOff(source string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waits[source]
}

// answer is the result of a write.
type answer uint8

const (
	written answer = iota
	notYet         // put off
	refused
	broken
	unread // no write: the message cannot be described, which says nothing about the writer
)

// answerOf is the answer that an error means. It calls methods of the error, so the caller must
// hold no lock.
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

// recordAnswer records the answer to a write. It returns why letters of the source failed before
// (was), and why they fail now (is).
func (b *dispatcher) recordAnswer(l postable, what answer, err error) (was, is ailment) {
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

// ailsLocked records why letters of a source fail.
func (b *dispatcher) ailsLocked(now time.Duration, source string, err error) {
	a := b.ails[source]
	if a.err == nil {
		a.since = now
	}
	if a.err = err; err == errWriteLate || err == errMetaLate { //nolint:errorlint // watch's own
		a.late = err
	}
	b.ails[source] = a
}

// forget drops a letter whose source has ended or has taken it back. The answer to the letter
// still counts for the others. If it was the source's last failing letter, forget logs the end of
// what tell has logged: this process no longer waits for the DLQ.
func (b *dispatcher) forget(l postable, what answer) {
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

// answeredLocked records what an answer says about a source and the writer.
func (b *dispatcher) answeredLocked(l postable, what answer) {
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

// breakLocked records that the writer may be broken.
func (b *dispatcher) breakLocked() {
	b.unsort = b.unsort || !b.broken
	b.broken = true
}

// endLocked ends the pauses whose time is over, and tells whether it ended that of failed.
func (b *dispatcher) endLocked(now time.Duration) (failed bool) {
	if failed = b.failed.end(now, &b.well); failed {
		clear(b.down)
	}
	b.refused.end(now, &b.well)
	b.putOffs.end(now, &b.well)
	return failed
}

// dropLocked takes a letter from all benches but one. A source has no ailment any more once none
// of its letters fails and none of its writes is slow.
func (b *dispatcher) dropLocked(l postable, but *bench) {
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

// backLocked tells whether a letter goes back to its source, because the source ends. A letter
// that was put off goes back: the writer may not take it in time. If the source was revoked, its
// failing letters go back, too, and all its letters if it is ill or has a slow write: they would
// keep a whole consumer group waiting. While the writer is broken, all letters of a revoked source
// go back untried.
func (b *dispatcher) backLocked(l postable) bool {
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

// sortLocked moves the letters that go back to their sources into back.
func (b *dispatcher) sortLocked() {
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

// turn is what the dispatcher does next. Without l, done and over it waits.
type turn struct {
	l     postable      // the letter to write or give back; nil for none
	back  bool          // l goes back to its source
	done  *writing      // a slow write that is over; nil for none
	until time.Duration // when to stop waiting; 0: only when woken
	over  bool          // the dispatcher ends: no letter is left, or its context has ended
}

// next returns the next turn: if possible, with a letter that need not wait.
func (b *dispatcher) next(ctx context.Context) (t turn) {
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
	for range 3 { // a turn of one kind may find letters for the other kind
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

// takeLocked takes the first letter of an ill source, or of one that is not ill, nil if there is
// none.
func (b *dispatcher) takeLocked(ill bool) postable {
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

// slowLocked is how many slow writes are not late: with ill those of ill sources, else all.
func (b *dispatcher) slowLocked(ill bool) (n int) {
	for source, late := range b.slow {
		if _, is := b.ill[source]; !late && (is || !ill) {
			n++
		}
	}
	return n
}

// hurryLocked lets the next letters of a source be written, because its slow write is over.
func (b *dispatcher) hurryLocked(source string) {
	delete(b.slow, source)
	for b.well.len() > 0 {
		b.behind = append(b.behind, b.well.pop())
	}
	for _, l := range b.behind {
		b.well.push(l)
	}
	b.behind = nil
}

// retireLocked makes the Guard forget a dispatcher that no source uses and that writes nothing. A
// dispatcher that still writes stays, so that the writer's next source uses the same one.
func (b *dispatcher) retireLocked() {
	if b.running {
		return
	}
	b.g.mu.Lock()
	defer b.g.mu.Unlock()
	if b.users == 0 {
		b.g.dispatchers = slices.DeleteFunc(b.g.dispatchers, func(other *dispatcher) bool { return other == b })
	}
}

func (b *dispatcher) run(ctx context.Context) {
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

// wait waits until there is more to do, or until the time then, if it is not 0.
func (b *dispatcher) wait(ctx context.Context, then time.Duration) {
	var pause <-chan time.Time
	if then > 0 {
		pause = time.After(then - b.g.now())
	}
	ended := ctx.Done()
	if ctx.Err() != nil { // the slow writes still have to return
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
	r      *dlq.Record     // nil if the message cannot be described
	span   context.Context //nolint:containedctx // of the write
	parked bool
	err    error
}

// deliver writes a letter. A write that takes longer than writeSlow goes on by itself; when it is
// over, next returns it as done.
func (b *dispatcher) deliver(ctx context.Context, l postable) {
	w, over := &writing{l: l}, make(chan struct{})
	go func() { // run does not end before this goroutine
		defer close(over)
		returned := false
		defer func() {
			if !returned { // a Goexit, such as one of a tracer: the letter may not be written
				w.err = &lostCallError{"dead-letter write", "called runtime.Goexit", debug.Stack()}
			}
		}()
		if w.r, w.err = b.describe(l); w.err == nil {
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
	go func() { // run does not end before this goroutine
		slow.Reset(writeLate - writeSlow)
		select {
		case <-over:
			slow.Stop()
		case <-slow.C:
			b.mu.Lock()
			b.slow[l.source()] = true // late: other sources no longer wait for this write
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

// describe makes the record of a letter. The port may take long to describe its message.
func (b *dispatcher) describe(l postable) (*dlq.Record, error) {
	returned := b.watch(l.from(), errMetaLate)
	defer returned()
	return l.record()
}

// finish takes the result of a write.
func (b *dispatcher) finish(w *writing) {
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
	was, is := b.recordAnswer(l, what, err)
	other := was.err == errMetaLate && is.err != nil && what != unread //nolint:errorlint // now it is the writer
	if (was.err == nil) != (is.err == nil) || other {
		b.tell(l.from(), was, is)
	}
}

// tell logs that the writer fails for a source, or works again. While it fails, the source holds
// its dead letters, and its order holds the messages behind them.
func (b *dispatcher) tell(from letterFrom, was, is ailment) {
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
	case lost && e.who == metaCall, err == errMetaLate: //nolint:errorlint // watch's own
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

// errWriteLate is the ailment of a source whose write goes on after its context has ended.
// errMetaLate is that of a source whose port has not described a message within writeLate.
var (
	errWriteLate = errors.New("the call has not returned 5s after its context ended")
	errMetaLate  = fmt.Errorf("%s has not returned for %s", metaCall, writeLate)
)

// watch logs late if a call has not returned after writeLate. The caller calls done when it has.
func (b *dispatcher) watch(from letterFrom, late error) (done func()) {
	returned := false
	timer := time.AfterFunc(writeLate, func() {
		now := b.g.now()
		b.mu.Lock()
		say := !returned && b.ails[from.cfg.Name].late != late //nolint:errorlint // watch's own
		if !returned {
			b.ailsLocked(now, from.cfg.Name, late)
		}
		b.mu.Unlock()
		if say {
			b.tell(from, ailment{}, ailment{err: late, since: now})
		}
	})
	return func() {
		timer.Stop()
		b.mu.Lock()
		defer b.mu.Unlock()
		returned = true
	}
}

// write writes one letter. A letter that is too large is trimmed and tried once more. span is the
// write's context, for later measurements.
func (b *dispatcher) write(ctx context.Context, l postable, r *dlq.Record) (span context.Context, parked bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	returned := b.watch(l.from(), errWriteLate)
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

// attempt calls the writer once.
func (b *dispatcher) attempt(ctx context.Context, l postable, r *dlq.Record) error {
	start := b.g.now()
	err := apart("dead-letter writer", func() error { return b.writer.Write(ctx, r) })
	l.wrote(ctx, b.g.now()-start, err)
	return err
}

// apart calls f on a goroutine of its own. A panic or a Goexit ends only that goroutine, and is
// always a failure, whatever the value of the panic.
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

// metaCall names the call of a port that may fail a letter.
const metaCall = "Port.Meta"

// lostCallError says that a call of user code by apart or deliver, such as one of a dead-letter
// writer or a port, panicked or called Goexit.
type lostCallError struct {
	who, what string
	stack     []byte
}

func (e *lostCallError) Error() string { return "guard: " + e.who + " " + e.what }

// letter is an item of machine.toWrite on its way to the writer.
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
	it.begun = !fenced && (err == nil || it.begun) // if not begun, its credit is given back
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

// undone gives a letter back to its source if the source ends, and the letter was put off or the
// source was revoked; see backLocked.
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
