// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/limiter"
)

var gossiping = gossipBench{perSecond: 10_000, time: 5 * time.Second}

// A gossipBench is how long a change takes from one process to another: three
// members, each a process, on the loopback, nothing lost; each decides perSecond
// times a second, and each decision is a version of its own.
type gossipBench struct {
	perSecond int
	time      time.Duration // of one case in one round
}

// gossipCases take turns.
var gossipCases = []struct{ name, kind, network string }{
	{"udp", "gossip", "udp"},
	{"tcp", "gossip", "tcp"},
	{"memberlist_queue_5ms", "queue", "udp"},
	{"memberlist_reliable_2ms", "reliable", "tcp"},
}

// A GossipRow is one case: medians over the rounds, of percentiles over all versions
// of all members at both others. -1 is what a case does not know.
type GossipRow struct {
	Case string
	// From a change to its arrival.
	P50, P99, P999, Max float64
	// AckedP50 and AckedP99 are bounds of the buckets that have them, from a change
	// to its acknowledgement.
	AckedP50, AckedP99 float64
	// Missing are versions that never arrived, Denied decisions that were no.
	Missing, Denied float64
	PerSecond       float64 // decisions of one member
	Packets         float64 // that one member sent in a second
	CPU             float64 // of one processor, of one member
}

// gossipFigures are a row's figures by their names in JSON.
var gossipFigures = []struct {
	name string
	of   func(*GossipRow) *float64
}{
	{"p50_ms", func(r *GossipRow) *float64 { return &r.P50 }},
	{"p99_ms", func(r *GossipRow) *float64 { return &r.P99 }},
	{"p999_ms", func(r *GossipRow) *float64 { return &r.P999 }},
	{"max_ms", func(r *GossipRow) *float64 { return &r.Max }},
	{"acked_p50_ms_at_most", func(r *GossipRow) *float64 { return &r.AckedP50 }},
	{"acked_p99_ms_at_most", func(r *GossipRow) *float64 { return &r.AckedP99 }},
	{"missing", func(r *GossipRow) *float64 { return &r.Missing }},
	{"denied", func(r *GossipRow) *float64 { return &r.Denied }},
	{"decisions_per_s", func(r *GossipRow) *float64 { return &r.PerSecond }},
	{"packets_per_s", func(r *GossipRow) *float64 { return &r.Packets }},
	{"cpu", func(r *GossipRow) *float64 { return &r.CPU }},
}

func (gossipBench) title() (name, about string) {
	return "gossip", "how long a change takes to another process, over UDP and TCP, beside memberlist's own ways"
}

func (b gossipBench) measure(ctx context.Context, set Settings) (printer, error) {
	rounds := cmp.Or(set.Rounds, 3)
	rep := gossipReport{load: []string{loadAverage()}}
	taken := make([][]GossipRow, len(gossipCases))
	for round := range rounds {
		for _, i := range turns(round, len(gossipCases)) {
			c := gossipCases[i]
			logf(set.Log, "round %d of %d: %s\n", round+1, rounds, c.name)
			row, err := b.run(ctx, c.kind, c.network)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
			row.Case = c.name
			taken[i] = append(taken[i], row)
		}
		rep.load = append(rep.load, loadAverage())
	}
	for _, mine := range taken {
		row := mine[0]
		for _, f := range gossipFigures {
			values := make([]float64, rounds)
			for k := range mine {
				values[k] = *f.of(&mine[k])
			}
			*f.of(&row) = median(values)
		}
		rep.rows = append(rep.rows, row)
	}
	return rep, nil
}

// loadAverage is the machine's over a minute; empty where there is none.
func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return ""
	}
	load, _, _ := strings.Cut(string(b), " ")
	return load
}

// run starts three members, and has them run a course.
func (b gossipBench) run(ctx context.Context, kind, network string) (row GossipRow, err error) {
	spec := memberSpec{Kind: kind, Network: network, Limit: limiter.Limit{
		Rate: float64(20 * len(memberNames) * b.perSecond), Burst: 20 * b.perSecond, // so that all is admitted
	}}
	var members []*member
	defer func() { err = errors.Join(err, closeAll(members)) }()
	for _, name := range memberNames {
		spec.Name = name
		m, err := startMember(ctx, spec)
		if err != nil {
			return row, err
		}
		if members = append(members, m); spec.Seeds == nil {
			spec.Seeds = []string{m.addr}
		}
	}
	for _, m := range members {
		if err := m.ready(); err != nil {
			return row, err
		}
	}
	for _, m := range members {
		if err := m.tell.Encode(gossipCourse{PerSecond: b.perSecond, Time: b.time}); err != nil {
			return row, err
		}
	}
	results := map[string]gossipResult{}
	for i, m := range members {
		var r gossipResult
		if err := m.said.Decode(&r); err != nil {
			return row, fmt.Errorf("member %s: %w", memberNames[i], err)
		}
		results[memberNames[i]] = r
	}
	return b.row(results)
}

// row joins what was born at one member with its arrivals at the others.
func (b gossipBench) row(results map[string]gossipResult) (row GossipRow, err error) {
	var delays []time.Duration
	var acked gossip.Histogram
	n, seconds := float64(len(results)), b.time.Seconds()
	for name, r := range results {
		for from, all := range r.Arrived {
			born, was := results[from].Born, uint64(0)
			for _, a := range all {
				if a.Version > uint64(len(born)) {
					return row, fmt.Errorf("version %d of %s came to %s, of %d that there were", a.Version, from, name, len(born))
				}
				for v := was; v < a.Version; v++ {
					delays = append(delays, a.At-born[v])
				}
				was = a.Version
			}
		}
		row.Missing += (n - 1) * float64(len(r.Born))
		row.PerSecond += float64(len(r.Born)) / n / seconds
		row.CPU += r.CPU.Seconds() / n / seconds
		row.Packets += float64(r.Packets) / n / seconds
		row.Denied += float64(r.Denied)
		acked.Count += r.Acked.Count
		for i, k := range r.Acked.Bucket {
			acked.Bucket[i] += k
		}
	}
	if len(delays) == 0 {
		return row, errors.New("nothing arrived")
	}
	row.Missing -= float64(len(delays))
	slices.Sort(delays)
	at := func(q float64) float64 {
		return float64(delays[int(q*float64(len(delays)-1))].Microseconds()) / 1e3
	}
	row.P50, row.P99, row.P999, row.Max = at(.5), at(.99), at(.999), at(1)
	row.AckedP50, row.AckedP99 = atMost(acked, .5), atMost(acked, .99)
	if row.Packets == 0 {
		row.Packets, row.Denied = -1, -1
	}
	return row, nil
}

// atMost is the upper bound, in ms, of the bucket that has a quantile; -1 for none.
func atMost(h gossip.Histogram, q float64) float64 {
	sum := uint64(0)
	for i, n := range h.Bucket[:len(gossip.Bounds)] {
		if sum += n; h.Count > 0 && float64(sum) >= q*float64(h.Count) {
			return float64(gossip.Bounds[i].Microseconds()) / 1e3
		}
	}
	return -1
}

type gossipReport struct {
	rows []GossipRow
	load []string // before, and after each round
}

func (r gossipReport) WriteJSON(w io.Writer) error {
	rows := make([]map[string]any, len(r.rows))
	for i := range r.rows {
		rows[i] = map[string]any{"case": r.rows[i].Case}
		for _, f := range gossipFigures {
			rows[i][f.name] = *f.of(&r.rows[i])
		}
	}
	return json.NewEncoder(w).Encode(map[string]any{"group": "gossip", "rows": rows, "load": r.load})
}

func (r gossipReport) WriteTable(w io.Writer) error {
	var s strings.Builder
	tw := tabwriter.NewWriter(&s, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "change to arrival\tp50 ms\tp99 ms\tp99.9 ms\tmax ms\tacked p50, p99 ms\tmissing\tdenied\tdecisions/s\tpackets/s\tcpu\t")
	or := func(format string, values ...float64) string {
		all := make([]any, len(values))
		for i, v := range values {
			if all[i] = v; v < 0 {
				return "-"
			}
		}
		return fmt.Sprintf(format, all...)
	}
	for _, x := range r.rows {
		fmt.Fprintf(tw, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%s\t%.0f\t%s\t%.0f\t%s\t%.3f\t\n", x.Case, x.P50, x.P99, x.P999, x.Max,
			or("≤ %g, %g", x.AckedP50, x.AckedP99), x.Missing, or("%.0f", x.Denied), x.PerSecond, or("%.0f", x.Packets), x.CPU)
	}
	fmt.Fprintf(tw, "\nload before and after each round: %s\n", strings.Join(r.load, ", "))
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, s.String())
	return err
}
