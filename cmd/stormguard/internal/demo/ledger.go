// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// A Ledger measures one run. It keeps every message by id and every handler call.
// All times count from the start of the run. It is safe for concurrent use.
type Ledger struct {
	mu        sync.Mutex
	sent      []time.Duration // when each message was sent, by id
	confirmed []bool          // by id: the broker has the message
	done      []bool          // by id: handled at least once
	published int             // confirmed messages
	calls     []call
	handled   int           // successful calls
	finished  int           // published messages that are done
	down, up  time.Duration // begin and end of the outage
}

// call is one call of the handler.
type call struct {
	id         int
	begin, end time.Duration
	ok         bool
}

// dead is one message in the DLQ.
type dead struct {
	id int
	at time.Duration
}

// Send records that the next message is sent, and returns its id. Ids begin at 0.
func (l *Ledger) Send(at time.Duration) (id int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent = append(l.sent, at)
	l.confirmed = append(l.confirmed, false)
	l.done = append(l.done, false)
	return len(l.sent) - 1
}

// Confirm records that the broker has the message.
func (l *Ledger) Confirm(id int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.confirmed[id] {
		l.confirmed[id] = true
		l.published++
		if l.done[id] {
			l.finished++
		}
	}
}

// Call records a handler call that has returned. ok means success.
func (l *Ledger) Call(id int, begin, end time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, call{id, begin, end, ok})
	if !ok {
		return
	}
	l.handled++
	if id >= 0 && id < len(l.done) && !l.done[id] {
		if l.done[id] = true; l.confirmed[id] {
			l.finished++
		}
	}
}

// unhandled is the number of published messages without a successful call.
func (l *Ledger) unhandled() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.published - l.finished
}

// Down records the start of the outage.
func (l *Ledger) Down(at time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = at
}

// Up records the end of the outage.
func (l *Ledger) Up(at time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.up = at
}

// counts returns the numbers of the live view: published messages, successful
// calls, failed calls.
func (l *Ledger) counts() (published, handled, failed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.published, l.handled, len(l.calls) - l.handled
}

// Figures are the measurements of one run; "stormguard demo --help" defines
// each. Seconds are rounded to milliseconds.
type Figures struct {
	Published         int     `json:"published"`
	Handled           int     `json:"handled"`
	DeadLetters       int     `json:"dead_letters"`
	CallsDuringOutage int     `json:"calls_during_outage"`
	Contain           float64 `json:"contain_seconds"`
	IdleAfterRecovery float64 `json:"idle_after_recovery_seconds"`
	Drain             float64 `json:"drain_seconds"`
	Lost              int     `json:"lost"`
	Duplicates        int     `json:"duplicates"`
	OutOfOrder        int     `json:"out_of_order"`
}

// pause is the shortest gap between calls that shows that the handler is no longer
// called all the time.
const pause = 50 * time.Millisecond

// Figures measures the run, which ended at end. buried are the messages in the
// DLQ. A backlog counts as gone when caughtUp or fewer messages are unsettled.
func (l *Ledger) Figures(buried []dead, caughtUp int, end time.Duration) Figures {
	l.mu.Lock()
	defer l.mu.Unlock()
	successes := make([]int, len(l.sent))
	settled := make([]time.Duration, len(l.sent)) // 0: never
	settle := func(id int, at time.Duration) {
		if settled[id] == 0 || at < settled[id] {
			settled[id] = max(at, 1)
		}
	}
	slices.SortStableFunc(l.calls, func(a, b call) int { return cmp.Compare(a.end, b.end) })
	f := Figures{Published: l.published, DeadLetters: len(buried)}
	idle, latest := end-l.up, -1
	idleKnown := false
	for _, c := range l.calls {
		if c.begin >= l.down && c.begin < l.up {
			f.CallsDuringOutage++
		}
		if !c.ok || c.id < 0 || c.id >= len(l.sent) {
			continue
		}
		if c.end >= l.up && !idleKnown {
			idle, idleKnown = c.end-l.up, true
		}
		successes[c.id]++
		settle(c.id, c.end)
		if c.id < latest && successes[c.id] == 1 {
			f.OutOfOrder++
		}
		latest = max(latest, c.id)
	}
	twice := make([]bool, len(l.sent))
	for _, d := range buried {
		if d.id >= 0 && d.id < len(l.sent) {
			twice[d.id] = successes[d.id] > 0
			settle(d.id, d.at)
		}
	}
	for id, n := range successes {
		if n > 0 && l.confirmed[id] {
			f.Handled++
		}
		if n > 1 || twice[id] {
			f.Duplicates++
		}
		if l.confirmed[id] && settled[id] == 0 {
			f.Lost++
		}
	}
	f.Contain = seconds(l.containLocked())
	f.IdleAfterRecovery = seconds(idle)
	f.Drain = seconds(l.drainLocked(settled, caughtUp, end))
	return f
}

// containLocked is the time from the begin of the outage to the last call before
// the first gap of pause. Later calls must be rare: at most one for each pause of
// the rest of the outage. Without such a gap it is the whole outage. The caller
// holds mu.
func (l *Ledger) containLocked() time.Duration {
	marks := []time.Duration{l.down}
	for _, c := range l.calls {
		if c.begin >= l.down && c.begin < l.up {
			marks = append(marks, c.begin)
		}
	}
	slices.Sort(marks)
	for i, at := range marks {
		next := l.up
		if i+1 < len(marks) {
			next = marks[i+1]
		}
		later := len(marks) - 1 - i
		if next-at >= pause && later <= int((l.up-at)/pause) {
			return at - l.down
		}
	}
	return l.up - l.down
}

// drainLocked is the time from the end of the outage until the backlog is gone, or
// until end if it never is. The caller holds mu.
func (l *Ledger) drainLocked(settled []time.Duration, caughtUp int, end time.Duration) time.Duration {
	type change struct {
		at time.Duration
		by int
	}
	var changes []change
	for id, at := range l.sent {
		if !l.confirmed[id] {
			continue
		}
		changes = append(changes, change{at, 1})
		if settled[id] > 0 {
			changes = append(changes, change{settled[id], -1})
		}
	}
	slices.SortStableFunc(changes, func(a, b change) int { return cmp.Compare(a.at, b.at) })
	backlog, i := 0, 0
	for ; i < len(changes) && changes[i].at <= l.up; i++ {
		backlog += changes[i].by
	}
	if backlog <= caughtUp {
		return 0
	}
	for ; i < len(changes); i++ {
		if backlog += changes[i].by; backlog <= caughtUp {
			return changes[i].at - l.up
		}
	}
	return end - l.up
}

// curves returns events per second over the run, in n equal steps of end/n.
func (l *Ledger) curves(buried []dead, n int, end time.Duration) (calls, successes, deadLetters []float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	calls, successes, deadLetters = make([]float64, n), make([]float64, n), make([]float64, n)
	per := float64(n) / max(end.Seconds(), 1e-9)
	add := func(to []float64, at time.Duration) {
		if i := int(at.Seconds() * per); i >= 0 && i < n {
			to[i] += per
		}
	}
	for _, c := range l.calls {
		add(calls, c.begin)
		if c.ok {
			add(successes, c.end)
		}
	}
	for _, d := range buried {
		add(deadLetters, d.at)
	}
	return calls, successes, deadLetters
}

func seconds(d time.Duration) float64 {
	return float64(d.Round(time.Millisecond).Milliseconds()) / 1000
}
