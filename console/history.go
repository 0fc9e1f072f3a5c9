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

// A History says why each source was held lately: one cell a minute, for a heat map.
type History struct {
	Every float64 `json:"every_seconds"` // length of a cell, in seconds
	// Now is the time of the last cell, at which each row ends.
	Now  time.Time    `json:"now"`
	Rows []HistoryRow `json:"rows"` // sorted by name
}

// A HistoryRow is the history of one source, or of all sources of one name. A cell is the
// strongest reason to hold them in that minute: r running, p backpressure, l limiter, o
// operator, b breaker, s storm, d dlq; or a space if the source was not open.
type HistoryRow struct {
	Source string `json:"source"`
	Cells  string `json:"cells"`
}

const (
	historyEvery = time.Minute
	historySpan  = 6 * time.Hour
	sampleEvery  = 5 * time.Second // a shorter storm may leave no mark
	mostRows     = 5000            // limits memory: rows of ended sources stay for historySpan
	columns      = int(historySpan / historyEvery)
)

// cells lists the cells by strength, the weakest first; a space is an empty cell.
const cells = " rplobsd"

// history samples the sources, on a goroutine of [Console].
type history struct {
	mu   sync.Mutex
	last int64             // the number of the newest column
	rows map[string][]byte // each row is a ring of columns cells: column n is at n % columns
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

// moveTo makes column n the newest. It clears the columns between the old newest and n,
// which reuse the places of old columns. It deletes rows that are then empty.
func (h *history) moveTo(n int64) {
	if h.rows == nil {
		h.rows = make(map[string][]byte)
		h.last = n
	}
	for ; h.last < n; h.last++ {
		if n-h.last > int64(columns) { // no old column remains
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
		default: // the source ends
		}
		if strings.IndexByte(cells, c) > strings.IndexByte(cells, strongest) {
			strongest = c
		}
	}
	return strongest
}

// view returns the history up to now.
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
