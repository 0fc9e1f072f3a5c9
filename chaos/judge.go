// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// A History is the record of a run. Instants count from its start.
type History struct {
	Schedule  Schedule   `json:"schedule"`
	Published []Message  `json:"published"` // messages that the broker confirmed, in the broker's order
	Starts    []Start    `json:"starts"`    // starts of the consumers' processes
	Effects   []Effect   `json:"effects"`   // effects, in the order in which they reached the dependency
	Handled   []Effect   `json:"handled"`   // calls of handlers that returned nil, in order
	Failed    []Effect   `json:"failed"`    // calls for healthy messages that returned an error, in order
	Letters   []int      `json:"letters"`   // ids of the messages in the DLQ
	Fired     []Fired    `json:"fired"`     // faults that happened, in order
	Healed    Instant    `json:"healed"`    // when the last fault and the publishing had both ended
	Drained   *Instant   `json:"drained"`   // when nothing was left at the broker; nil if never
	Ordered   Redelivery `json:"ordered"`   // how the broker orders redelivered messages
}

// An Instant is a time since the start of the run.
type Instant = time.Duration

// Redelivery says how a broker orders the messages of a killed process when it delivers
// them again.
type Redelivery string

const (
	// KeepsOrder is for a broker that redelivers messages in their order: Kafka.
	KeepsOrder Redelivery = "keeps"
	// Redelivers is for a broker that redelivers messages after a timeout, behind newer
	// ones: RabbitMQ, JetStream. Then the order is checked within each process, for
	// messages that were published after the process started.
	Redelivers Redelivery = "redelivers"
	// Competes is for a broker that gives messages of one key to several consumers at once,
	// as RabbitMQ and JetStream do. Then the order is not checked.
	Competes Redelivery = "competes"
)

// A Message is one that was published. IDs rise in the order of publishing. No handler can
// handle a Poison message.
type Message struct {
	ID     int     `json:"id"`
	Key    int     `json:"key"`
	Poison bool    `json:"poison,omitempty"`
	At     Instant `json:"at"`
}

// A Start is the start of a process. Process is its number.
type Start struct {
	Process int     `json:"process"`
	At      Instant `json:"at"`
}

// An Effect is the effect of a message, made by a process.
type Effect struct {
	ID      int     `json:"id"`
	Process int     `json:"process"`
	At      Instant `json:"at"`
}

// A Fired is a fault that happened. Fault is its index in the schedule.
type Fired struct {
	Fault int     `json:"fault"`
	At    Instant `json:"at"`

	// Count shows that the fault happened: lost packets, delayed reads, broken connections,
	// milliseconds of used processor time, or KiB of used disk. 0 for the other kinds.
	Count int `json:"count,omitempty"`

	// Timers is how often a consumer's kernel sent a packet again during a Loss because no
	// answer came in time: its timeouts and loss probes.
	Timers int `json:"timers,omitempty"`
}

// A Window describes the healthy messages that were sent during a fault.
type Window struct {
	Kind     Kind    `json:"kind"`
	Seconds  float64 `json:"seconds"`
	Messages int     `json:"messages"`
	P99      float64 `json:"p99_ms"`           // 99th percentile of the time from sending to the effect
	Longest  float64 `json:"longest_ms"`       // the longest time from sending to the effect, of messages with an effect
	Count    int     `json:"count"`            // Fired.Count of the fault
	Timers   int     `json:"timers,omitempty"` // Fired.Timers of the fault

	// ErrorPercent is the percentage of calls for healthy messages that returned an error.
	ErrorPercent float64 `json:"error_percent"`

	// TimerDecides says that the kernel's retransmission timer causes the p99, not the
	// consumer. Here the p99 is at least the timer's 200 ms, outside all faults it is
	// below, and the timer fired at least once per 100 messages.
	TimerDecides bool `json:"timer_decides,omitempty"`
}

// A Report is the verdict on a history.
type Report struct {
	Seed      uint64 `json:"seed"`
	Published int    `json:"published"`
	Kills     int    `json:"kills"`
	Restarts  int    `json:"restarts"` // planned restarts of consumers
	Fired     bool   `json:"fired"`    // every planned fault happened, in order

	// Lost counts healthy messages with neither an effect nor a dead letter, and poison
	// without a dead letter.
	Lost                int     `json:"lost"`
	DuplicateDeliveries int     `json:"duplicate_deliveries"` // calls that returned nil for a message that already had such a call
	DuplicateEffects    int     `json:"duplicate_effects"`
	OutOfOrder          int     `json:"out_of_order"`         // effects that came after the effect of a later message of the same key
	HealthyDeadLetters  int     `json:"healthy_dead_letters"` // dead letters of healthy messages
	PoisonEffects       int     `json:"poison_effects"`
	Unknown             int     `json:"unknown"` // effects and dead letters of unpublished messages
	Drained             bool    `json:"drained"`
	DrainSeconds        float64 `json:"drain_seconds"` // from History.Healed to History.Drained
	P99                 float64 `json:"p99_ms"`        // 99th percentile of the time from sending to the effect
	ErrorPercent        float64 `json:"error_percent"` // percentage of calls that returned an error, without errors of poison

	Windows []Window `json:"windows,omitempty"` // one for each fault with a duration, if the schedule has gates
	Missed  []string `json:"missed,omitempty"`  // missed gates, each with its figure

	// First names the first message of each kind of finding.
	First []string `json:"first,omitempty"`
}

// OK reports whether no oracle found anything. A duplicate delivery is no finding: a broker
// delivers at least once.
func (r Report) OK() bool {
	return r.Fired && r.Drained && r.Lost == 0 && r.DuplicateEffects == 0 && r.OutOfOrder == 0 && r.HealthyDeadLetters == 0 &&
		r.PoisonEffects == 0 && r.Unknown == 0 && len(r.Missed) == 0
}

// Judge judges a history. Time and memory are proportional to its size.
func Judge(h History) Report {
	r := Report{Seed: h.Schedule.Seed, Published: len(h.Published), Kills: h.Schedule.Count(Kill) + h.Schedule.Count(Down), Restarts: h.Schedule.Count(Restart)}
	r.Fired = len(h.Fired) == len(h.Schedule.Faults)
	for i, f := range h.Fired {
		r.Fired = r.Fired && f.Fault == i && (f.Count > 0 || !kinds[h.Schedule.Faults[i].Kind].counted)
	}
	if h.Drained != nil {
		r.Drained, r.DrainSeconds = true, max(0, *h.Drained-h.Healed).Seconds()
	}
	messages := make(map[int]Message, len(h.Published))
	for _, m := range h.Published {
		messages[m.ID] = m
	}
	j := judgement{report: &r, messages: messages}
	effects := make(map[int]int, len(h.Effects))
	var waits []wait
	for _, e := range h.Effects {
		m, known := messages[e.ID]
		effects[e.ID]++
		switch {
		case !known:
			j.found(&r.Unknown, "an effect of a message that nobody published", e.ID)
		case m.Poison:
			j.found(&r.PoisonEffects, "an effect of poison", e.ID)
		case effects[e.ID] > 1:
			j.found(&r.DuplicateEffects, "a second effect", e.ID)
		default:
			waits = append(waits, wait{m.At, e.At - m.At})
		}
	}
	handled := make(map[int]int, len(h.Handled))
	for _, e := range h.Handled {
		if handled[e.ID]++; handled[e.ID] > 1 {
			r.DuplicateDeliveries++
		}
	}
	letters := make(map[int]bool, len(h.Letters))
	for _, id := range h.Letters {
		m, known := messages[id]
		switch {
		case !known:
			j.found(&r.Unknown, "a dead letter of a message that nobody published", id)
		case !m.Poison && !letters[id]:
			j.found(&r.HealthyDeadLetters, "a healthy dead letter", id)
		}
		letters[id] = true
	}
	for _, m := range h.Published {
		if m.Poison && !letters[m.ID] || !m.Poison && effects[m.ID] == 0 && !letters[m.ID] {
			j.found(&r.Lost, "lost", m.ID)
		}
	}
	j.order(h)
	r.P99, _ = percentiles(waits)
	r.ErrorPercent = percent(len(h.Failed), len(h.Failed)+len(h.Handled))
	if h.Schedule.Gates != nil {
		j.windows(h, waits)
	}
	return r
}

// A wait is the time at which a message was sent, and the time from there to its effect.
type wait struct{ from, long time.Duration }

// percentiles returns the 99th percentile and the longest wait, in milliseconds. It sorts
// the waits.
func percentiles(waits []wait) (p99, longest float64) {
	if len(waits) == 0 {
		return 0, 0
	}
	slices.SortFunc(waits, func(a, b wait) int { return cmp.Compare(a.long, b.long) })
	ms := func(w wait) float64 { return float64(w.long.Microseconds()) / 1000 }
	return ms(waits[len(waits)*99/100]), ms(waits[len(waits)-1])
}

func percent(part, all int) float64 { return 100 * float64(part) / float64(max(all, 1)) }

type judgement struct {
	report   *Report
	messages map[int]Message
}

// found counts a finding. It adds the first of each kind to Report.First.
func (j judgement) found(n *int, what string, id int) {
	if *n++; *n == 1 {
		j.report.First = append(j.report.First, fmt.Sprintf("%s: %d", what, id))
	}
}

// windows makes a Window for each fault with a duration, and compares it with the gates.
func (j judgement) windows(h History, waits []wait) {
	r, gates := j.report, h.Schedule.Gates
	fired := h.Fired[:min(len(h.Fired), len(h.Schedule.Faults))]
	quiet := slices.Clone(waits) // waits outside of all faults
	for i, f := range fired {
		over := f.At + h.Schedule.Faults[i].Lasts() + settling
		quiet = slices.DeleteFunc(quiet, func(w wait) bool { return w.from >= f.At && w.from < over })
	}
	quietP99, _ := percentiles(quiet)
	for i, f := range fired {
		fault := h.Schedule.Faults[i]
		if fault.For == 0 {
			continue
		}
		in := func(at Instant) bool { return at >= f.At && at < f.At+fault.Lasts() }
		count := func(all []Effect) (n int) {
			for _, e := range all {
				if in(e.At) {
					n++
				}
			}
			return n
		}
		var its []wait
		for _, w := range waits {
			if in(w.from) {
				its = append(its, w)
			}
		}
		failed := count(h.Failed)
		w := Window{Kind: fault.Kind, Seconds: fault.Lasts().Seconds(), Messages: len(its), ErrorPercent: percent(failed, failed+count(h.Handled)), Count: f.Count, Timers: f.Timers}
		w.P99, w.Longest = percentiles(its)
		w.TimerDecides = w.P99 >= minRTO && quietP99 < minRTO && w.Timers*100 >= w.Messages
		r.Windows = append(r.Windows, w)
		miss := func(name string, is, limit float64) {
			if is >= limit {
				r.Missed = append(r.Missed, fmt.Sprintf("%s of the %s: %.6g, must be below %g", name, w.Kind, is, limit))
			}
		}
		switch w.Kind {
		case Loss, Burn:
			miss("p99_ms", w.P99, gates.P99)
			miss("error_percent", w.ErrorPercent, gates.ErrorPercent)
		case Down:
			miss("longest_ms", w.Longest, gates.Longest)
			miss("error_percent", w.ErrorPercent, gates.ErrorPercent)
		default:
		}
		if w.Messages == 0 {
			r.Missed = append(r.Missed, fmt.Sprintf("the %s: no message was sent in it", w.Kind))
		}
	}
}

// order counts effects that came after the effect of a later message of the same key.
func (j judgement) order(h History) {
	if h.Ordered == Competes {
		return
	}
	began := make(map[int]Instant, len(h.Starts))
	for _, s := range h.Starts {
		began[s.Process] = s.At
	}
	type scope struct{ key, process int }
	last, seen := make(map[scope]int), make(map[int]bool)
	for _, e := range h.Effects {
		m, known := j.messages[e.ID]
		if !known || m.Poison || seen[e.ID] {
			continue
		}
		seen[e.ID] = true
		at := scope{key: m.Key}
		if h.Ordered != KeepsOrder {
			if at.process = e.Process; m.At <= began[e.Process] {
				continue
			}
		}
		if e.ID < last[at] {
			j.found(&j.report.OutOfOrder, "out of order", e.ID)
		}
		last[at] = max(last[at], e.ID)
	}
}

// settling is how long after a fault messages may still be slow because of it.
const settling = 5 * time.Second

// minRTO is the shortest time in milliseconds after which Linux sends a packet again.
const minRTO = 200

// Text returns the report for people, in Markdown.
func (r Report) Text() string {
	verdict := "nothing was lost"
	if !r.OK() {
		verdict = "an oracle found something"
	}
	var text strings.Builder
	fmt.Fprintf(&text, "# %d kills, %d restarts, seed %d: %s\n\n| figure | value | limit |\n|---|---|---|\n", r.Kills, r.Restarts, r.Seed, verdict)
	row := func(name string, value any, limit string) {
		fmt.Fprintf(&text, "| %s | %v | %s |\n", name, value, limit)
	}
	row("published", r.Published, "")
	row("every fault happened", r.Fired, "true")
	row("lost", r.Lost, "0")
	row("duplicate deliveries", r.DuplicateDeliveries, "")
	row("duplicate effects", r.DuplicateEffects, "0")
	row("out of order", r.OutOfOrder, "0")
	row("healthy dead letters", r.HealthyDeadLetters, "0")
	row("effects of poison", r.PoisonEffects, "0")
	row("unknown messages", r.Unknown, "0")
	row("drained", r.Drained, "true")
	row("drain, seconds", fmt.Sprintf("%.1f", r.DrainSeconds), "")
	row("p99, milliseconds", fmt.Sprintf("%.1f", r.P99), "")
	row("errors, percent of the calls", fmt.Sprintf("%.3f", r.ErrorPercent), "")
	if len(r.Windows) > 0 {
		text.WriteString("\n| while | seconds | messages | p99, ms | longest, ms | errors, % | shown by |\n|---|---|---|---|---|---|---|\n")
	}
	for _, w := range r.Windows {
		fmt.Fprintf(&text, "| %s | %g | %d | %.1f | %.1f | %.3f | %d |\n", w.Kind, w.Seconds, w.Messages, w.P99, w.Longest, w.ErrorPercent, w.Count)
	}
	for _, w := range r.Windows {
		if w.TimerDecides {
			fmt.Fprintf(&text, "\nThe %s: the kernel's retransmission timer, %d ms at least, fired %d times. It decides the p99, and not the consumer.\n", w.Kind, minRTO, w.Timers)
		}
	}
	for _, m := range r.Missed {
		text.WriteString("\nMissed: " + m + "\n")
	}
	for _, f := range r.First {
		text.WriteString("\nFirst: " + f + "\n")
	}
	return text.String()
}
