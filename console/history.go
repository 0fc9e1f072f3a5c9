// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// A History is what held each source lately, one cell a minute, for a heat map.
type History struct {
	Every float64 `json:"every_seconds"` // of a cell
	// Now is the time of the last cell. Each row ends there.
	Now  time.Time    `json:"now"`
	Rows []HistoryRow `json:"rows"` // by name
}

// A HistoryRow is one source, or those of one name. A cell is the strongest reason that held it in that minute:
// r running, p backpressure, l limiter, o operator, b breaker, s storm, d dlq; a space if the
// source was not open.
type HistoryRow struct {
	Source string `json:"source"`
	Cells  string `json:"cells"`
}

const (
	historyEvery = time.Minute
	historySpan  = 6 * time.Hour
	sampleEvery  = 5 * time.Second // a storm that is shorter may leave no mark
	mostRows     = 5000            // sources that end leave rows for historySpan
	columns      = int(historySpan / historyEvery)
)

// cells in the order of their strength; the weakest is no cell.
const cells = " rplobsd"

// history samples the sources, on the goroutine of [Console].
type history struct {
	mu   sync.Mutex
	last int64             // the number of the newest column
	rows map[string][]byte // columns cells each, as a ring: column n is at n % columns
}

// run samples until ctx ends.
func (h *history) run(ctx context.Context, look func() []guard.State) {
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for {
		h.sample(time.Now(), look())
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (h *history) sample(now time.Time, all []guard.State) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.moveTo(now.Unix() / int64(historyEvery/time.Second))
	at := int(h.last % int64(columns))
	for _, s := range all {
		row := h.rows[s.Source]
		if row == nil {
			if len(h.rows) >= mostRows {
				continue
			}
			row = []byte(strings.Repeat(" ", columns))
			h.rows[s.Source] = row
		}
		if c := cell(s); strings.IndexByte(cells, c) > strings.IndexByte(cells, row[at]) {
			row[at] = c
		}
	}
}

// moveTo makes the column n the newest: those in between are empty, and so are those that
// had their places before. A row that is empty goes.
func (h *history) moveTo(n int64) {
	if h.rows == nil {
		h.rows = make(map[string][]byte)
		h.last = n
	}
	for ; h.last < n; h.last++ {
		if n-h.last > int64(columns) { // all are empty
			clear(h.rows)
			h.last = n
			return
		}
		at := int((h.last + 1) % int64(columns))
		for name, row := range h.rows {
			row[at] = ' '
			if len(strings.TrimSpace(string(row))) == 0 {
				delete(h.rows, name)
			}
		}
	}
}

func cell(s guard.State) byte {
	if s.Ended {
		return ' '
	}
	strongest := byte('r')
	for _, h := range s.Holds {
		c := byte(' ')
		switch h.Reason {
		case guard.ReasonBackpressure:
			c = 'p'
		case guard.ReasonLimiter:
			c = 'l'
		case guard.ReasonOperator:
			c = 'o'
		case guard.ReasonBreaker:
			c = 'b'
		case guard.ReasonStorm:
			c = 's'
		case guard.ReasonDLQ:
			c = 'd'
		default: // it ends
		}
		if strings.IndexByte(cells, c) > strings.IndexByte(cells, strongest) {
			strongest = c
		}
	}
	return strongest
}

// view is the history until now.
func (h *history) view(now time.Time) History {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.moveTo(now.Unix() / int64(historyEvery/time.Second))
	v := History{Every: historyEvery.Seconds(), Now: time.Unix(h.last*int64(historyEvery/time.Second), 0).UTC(), Rows: []HistoryRow{}}
	from := int((h.last + 1) % int64(columns))
	for name, row := range h.rows {
		v.Rows = append(v.Rows, HistoryRow{name, string(row[from:]) + string(row[:from])})
	}
	slices.SortFunc(v.Rows, func(a, b HistoryRow) int { return cmp.Compare(a.Source, b.Source) })
	return v
}
