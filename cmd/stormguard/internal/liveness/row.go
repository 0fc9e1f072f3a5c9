// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"fmt"
	"hash/fnv"
	"math"
	"time"
)

// Row is the result of one load. A figure that does not apply is nil.
type Row struct {
	Name   string `json:"name"`
	Order  string `json:"order"`
	Class  string `json:"class"`  // class of the errors
	Poison int    `json:"poison"` // number of poison messages

	Handled        *float64 `json:"handled_percent"` // of the healthy messages; in rows flaky-*-1000-* of the messages that a loop without a guard handles
	HandledLimit   *float64 `json:"handled_limit_percent"`
	Letters        int      `json:"healthy_dead_letters"`
	LettersLimit   int      `json:"healthy_dead_letters_limit"`
	Passed         *float64 `json:"passed_seconds"` // until the message behind the poison, or the first message after an outage, was handled
	PassedLimit    *float64 `json:"passed_limit_seconds"`
	Drained        *float64 `json:"drained_seconds"` // until all held messages, or all poison, were settled
	DrainedLimit   *float64 `json:"drained_limit_seconds"`
	Calls          *float64 `json:"calls_percent"` // in the outage, compared with the calls of a loop without a guard
	CallsLimit     *float64 `json:"calls_limit_percent"`
	Overtaken      *float64 `json:"overtaken_percent"` // outages in which a message was handled before an earlier message of its lane
	OvertakenLimit *float64 `json:"overtaken_limit_percent"`

	Seed   uint64   `json:"seed"`
	Took   float64  `json:"took_seconds"`
	Hours  float64  `json:"virtual_hours"`
	Missed []string `json:"missed,omitempty"`
}

// spec describes a row to run.
type spec struct {
	name  string
	order string
	class class
	long  bool // runs only with All, or if Only selects it
	parts int  // number of runs of do, each in a bubble of its own
	do    func(t *trial) error
}

// trial is one run of a row, in a bubble of its own.
type trial struct {
	ctx   context.Context //nolint:containedctx // the command's
	seed  uint64          // for the random draws
	index int             // index of this run in its row

	Row
	outages, overtaken int
}

// seedOf makes a seed for one run of a row: runs do not share their draws.
func seedOf(seed uint64, name string, part int) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%d/%s/%d", seed, name, part)
	return h.Sum64()
}

func number(v float64) *float64 {
	v = math.Round(v*1000) / 1000
	return &v
}

func seconds(d time.Duration) *float64 {
	if d < 0 {
		return nil
	}
	return number(d.Seconds())
}

func (t *trial) missf(format string, args ...any) {
	t.Missed = append(t.Missed, fmt.Sprintf(format, args...))
}

// passed and drained keep the run's worst time: the one that uses most of its limit. A time
// below 0 means that the event never came.
func (t *trial) passed(took, limit time.Duration) {
	worst(&t.Passed, &t.PassedLimit, took, limit)
	t.within("passed", took, limit)
}

func (t *trial) drained(took, limit time.Duration) {
	worst(&t.Drained, &t.DrainedLimit, took, limit)
	t.within("drained", took, limit)
}

func (t *trial) within(what string, took, limit time.Duration) {
	switch {
	case took < 0:
		t.missf("%s: not in the time of the run, the limit is %.1f s", what, limit.Seconds())
	case took > limit:
		t.missf("%s: %.1f s, the limit is %.1f s", what, took.Seconds(), limit.Seconds())
	}
}

func worst(v, limit **float64, took, most time.Duration) {
	switch {
	case *limit == nil, *v != nil && (took < 0 || took.Seconds()/most.Seconds() > **v / **limit):
		*v, *limit = seconds(took), seconds(most)
	}
}

// letters adds n healthy messages that were dead-lettered, and sets their limit.
func (t *trial) letters(n, limit int) {
	t.Letters += n
	t.LettersLimit = limit
	if n > limit {
		t.missf("%d healthy messages were dead-lettered, the limit is %d", n, limit)
	}
}

func (t *trial) handled(percent, least float64) {
	t.Handled, t.HandledLimit = number(percent), number(least)
	if percent < least {
		t.missf("handled %.1f %%, the limit is %.1f %%", percent, least)
	}
}

func (t *trial) called(percent, most float64) {
	t.Calls, t.CallsLimit = number(percent), number(most)
	if percent > most {
		t.missf("calls %.2f %% of unguarded, the limit is %.2f %%", percent, most)
	}
}

// take adds a run to its row.
func (r *Row) take(t *trial) {
	r.Poison += t.Poison
	r.Letters += t.Letters
	r.LettersLimit += t.LettersLimit
	r.Hours += t.Hours
	if r.Handled == nil || t.Handled != nil && *t.Handled < *r.Handled {
		r.Handled, r.HandledLimit = t.Handled, t.HandledLimit
	}
	if r.Calls == nil || t.Calls != nil && *t.Calls > *r.Calls {
		r.Calls, r.CallsLimit = t.Calls, t.CallsLimit
	}
	later := func(v, limit **float64, ov, olimit *float64) {
		if olimit != nil && (*limit == nil || *v != nil && (ov == nil || *ov / *olimit > **v / **limit)) {
			*v, *limit = ov, olimit
		}
	}
	later(&r.Passed, &r.PassedLimit, t.Passed, t.PassedLimit)
	later(&r.Drained, &r.DrainedLimit, t.Drained, t.DrainedLimit)
	const most = 5
	for _, why := range t.Missed {
		if len(r.Missed) < most {
			if t.index > 0 || r.Hours > t.Hours {
				why = fmt.Sprintf("run %d: %s", t.index, why)
			}
			r.Missed = append(r.Missed, why)
		}
	}
}
