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
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

var scopes = scopesBench{rate: 50, warmUp: 2 * time.Second, outage: 10 * time.Second, patience: 20 * time.Second}

// A scopesBench breaks the same parts of the same group under breakers that
// count over different scopes. The group has scopeTopics of scopePartitions; each
// partition gets rate messages a second, whatever becomes of them, and its
// handler succeeds or fails at once. All combinations run at the same time, each
// with a Guard of its own: they wait most of the time.
type scopesBench struct {
	rate           int // messages a second and partition
	warmUp, outage time.Duration
	patience       time.Duration // for what comes after the outage
}

const (
	scopeTopics     = 4
	scopePartitions = 4
	scopeKeys       = 64
)

// A scopeFault is what breaks.
type scopeFault struct {
	name   string
	breaks func(topic, partition int) bool
}

var scopeFaults = []scopeFault{
	{"one_partition", func(topic, partition int) bool { return topic == 0 && partition == 0 }},
	{"one_topic", func(topic, _ int) bool { return topic == 0 }},
	{"everything", func(int, int) bool { return true }},
}

// A scopeChoice is what is configured.
type scopeChoice struct {
	name    string
	scope   guard.Scope
	quorum  float64
	noGuard bool
}

var scopeChoices = []scopeChoice{
	{name: "no_guard", noGuard: true},
	{name: "partition", scope: guard.ScopePartition},
	{name: "partition_quorum1", scope: guard.ScopePartition, quorum: 1},
	{name: "topic", scope: guard.ScopeTopic},
	{name: "group", scope: guard.ScopeGroup},
}

// scopeOrders are the two ways to handle a partition: one message after the
// other, or by key with four workers.
var scopeOrders = []guard.Policy{{Order: guard.OrderSource}, {Order: guard.OrderKey, Workers: 4}}

// A ScopeRow is one combination: medians over the rounds, -1 for never.
type ScopeRow struct {
	Fault string `json:"fault"`
	Order string `json:"order"`
	Scope string `json:"scope"`
	// HealthyKept is the share of what healthy partitions got during the outage
	// that was handled during the outage; -1 where none is healthy.
	HealthyKept float64 `json:"healthy_kept"`
	// CallsPerSecond is how often a handler of the broken part was called, for
	// each second of the outage.
	CallsPerSecond float64 `json:"calls_per_s"`
	// ContainedMs is how long it took until a breaker held every broken partition.
	ContainedMs float64 `json:"contained_ms"`
	// BackMs is how long after the outage nothing was held any more; -1 also where
	// nothing can be.
	BackMs float64 `json:"back_ms"`
	// Dead is how many messages became dead letters; not one of them is poison.
	Dead float64 `json:"dead_letters"`
}

func (scopesBench) title() (name, about string) {
	return "scopes", "what a breaker per partition, topic or group makes of one bad partition, one bad topic, a whole outage"
}

func (b scopesBench) measure(ctx context.Context, set Settings) (printer, error) {
	rounds := cmp.Or(set.Rounds, 3)
	var taken [][]ScopeRow
	for i := range rounds {
		logf(set.Log, "round %d of %d\n", i+1, rounds)
		rows, err := b.round(ctx)
		if err != nil {
			return nil, err
		}
		taken = append(taken, rows)
	}
	rows := taken[0]
	for i := range rows {
		for _, field := range []func(*ScopeRow) *float64{
			func(r *ScopeRow) *float64 { return &r.HealthyKept },
			func(r *ScopeRow) *float64 { return &r.CallsPerSecond },
			func(r *ScopeRow) *float64 { return &r.ContainedMs },
			func(r *ScopeRow) *float64 { return &r.BackMs },
			func(r *ScopeRow) *float64 { return &r.Dead },
		} {
			values := make([]float64, rounds)
			for k := range taken {
				values[k] = *field(&taken[k][i])
			}
			*field(&rows[i]) = median(values)
		}
	}
	return scopeReport{rows}, nil
}

// round runs every combination, all at the same time.
func (b scopesBench) round(ctx context.Context) ([]ScopeRow, error) {
	var cells []*scopeCell
	for _, policy := range scopeOrders {
		for _, fault := range scopeFaults {
			for _, choice := range scopeChoices {
				cells = append(cells, &scopeCell{b: b, fault: fault, choice: choice, policy: policy})
			}
		}
	}
	rows, errs := make([]ScopeRow, len(cells)), make([]error, len(cells))
	var running sync.WaitGroup
	for i, c := range cells {
		running.Go(func() { rows[i], errs[i] = c.run(ctx) })
	}
	running.Wait()
	return rows, errors.Join(errs...)
}

// A scopeCell is one group of consumers.
type scopeCell struct {
	b      scopesBench
	fault  scopeFault
	choice scopeChoice
	policy guard.Policy

	down    atomic.Bool // the outage
	calls   atomic.Int64
	kept    atomic.Int64 // handled by healthy partitions during the outage
	dead    atomic.Int64
	broken  []guard.Control
	sources []guard.Control
	inputs  []chan scopeMessage
	running sync.WaitGroup
}

type scopeMessage struct {
	key    uint64
	during bool // it came during the outage
}

// scopePort is a broker that loses nothing and costs nothing.
type scopePort struct{ noPort[scopeMessage] }

func (scopePort) Lane(m scopeMessage) uint64 { return m.key }

func (c *scopeCell) run(ctx context.Context) (row ScopeRow, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, err := guard.New(guard.Config{Group: "bench", Scope: c.choice.scope, Quorum: c.choice.quorum, Policy: c.policy})
	if err != nil {
		return row, err
	}
	healthy := 0
	for topic := range scopeTopics {
		for partition := range scopePartitions {
			bad := c.fault.breaks(topic, partition)
			if !bad {
				healthy++
			}
			if err := c.start(ctx, g, topic, partition, bad); err != nil {
				_, closed := g.Close(ctx)
				return row, errors.Join(err, closed)
			}
		}
	}
	row = ScopeRow{
		Fault: c.fault.name, Order: c.policy.Order.String(), Scope: c.choice.name,
		HealthyKept: -1, ContainedMs: -1, BackMs: -1,
	}
	published := c.story(ctx, &row)
	if healthy > 0 {
		row.HealthyKept = float64(c.kept.Load()) / float64(published*healthy)
	}
	row.Dead = float64(c.dead.Load())
	err = ctx.Err()
	cancel()
	_, closed := g.Close(context.WithoutCancel(ctx))
	c.running.Wait()
	return row, errors.Join(err, closed)
}

// start opens a partition.
func (c *scopeCell) start(ctx context.Context, g *guard.Guard, topic, partition int, bad bool) error {
	in := make(chan scopeMessage, int((c.b.warmUp+c.b.outage+c.b.patience).Seconds()+60)*c.b.rate)
	c.inputs = append(c.inputs, in)
	handle := func(_ context.Context, m scopeMessage) error {
		down := c.down.Load()
		switch {
		case down && bad:
			c.calls.Add(1)
			return errScopeDown
		case down && m.during:
			c.kept.Add(1)
		}
		return nil
	}
	if c.choice.noGuard {
		c.running.Go(func() { c.plain(ctx, in, handle) })
		return nil
	}
	name := fmt.Sprintf("topic%d", topic)
	s, err := guard.Open(g, guard.SourceConfig{
		Name: fmt.Sprintf("%s/%d", name, partition), Destination: name, Partition: strconv.Itoa(partition),
		DeadLetters: (*scopeLetters)(c),
	}, guard.Limits{}, guard.Port[scopeMessage](scopePort{}), handle)
	if err != nil {
		return err
	}
	c.sources = append(c.sources, s)
	if bad {
		c.broken = append(c.broken, s)
	}
	c.running.Go(func() { _ = s.Run(ctx, in) }) // it ends with ctx
	return nil
}

var errScopeDown = guard.Unavailable(errors.New("the dependency is down"))

// plain is a consumer without a guard: five attempts with the guard's own
// delays, one message after the other, then the dead letter.
func (c *scopeCell) plain(ctx context.Context, in <-chan scopeMessage, handle func(context.Context, scopeMessage) error) {
	for {
		select {
		case m := <-in:
			for attempt := range 5 {
				if handle(ctx, m) == nil {
					break
				}
				if attempt == 4 {
					c.dead.Add(1)
					break
				}
				select {
				case <-time.After(rand.N(50 * time.Millisecond << attempt)):
				case <-ctx.Done():
					return
				}
			}
		case <-ctx.Done():
			return
		}
	}
}

// scopeLetters counts dead letters.
type scopeLetters scopeCell

func (l *scopeLetters) Write(context.Context, *dlq.Record) error {
	l.dead.Add(1)
	return nil
}

// story lets it work, break and heal, and returns how many messages each
// partition got during the outage.
func (c *scopeCell) story(ctx context.Context, row *ScopeRow) (published int) {
	const tick = 5 * time.Millisecond
	clock := time.NewTicker(tick)
	defer clock.Stop()
	start, sent := time.Now(), 0
	var failed, healed time.Time
	sentBefore := 0
	for {
		select {
		case <-clock.C:
		case <-ctx.Done():
			return published
		}
		now := time.Now()
		m := scopeMessage{during: c.down.Load()}
		for ; float64(sent) < now.Sub(start).Seconds()*float64(c.b.rate); sent++ {
			for _, in := range c.inputs {
				m.key = rand.Uint64N(scopeKeys)
				select {
				case in <- m:
				case <-ctx.Done():
					return published
				}
			}
		}
		switch {
		case failed.IsZero():
			if now.Sub(start) >= c.b.warmUp {
				failed, sentBefore = now, sent
				c.down.Store(true)
			}
		case healed.IsZero():
			if row.ContainedMs < 0 && len(c.broken) > 0 && count(c.broken) == len(c.broken) {
				row.ContainedMs = float64(now.Sub(failed).Microseconds()) / 1e3
			}
			if now.Sub(failed) >= c.b.outage {
				c.down.Store(false)
				healed, published = now, sent-sentBefore
				row.CallsPerSecond = float64(c.calls.Load()) / now.Sub(failed).Seconds()
			}
		case count(c.sources) == 0 || now.Sub(healed) > c.b.patience:
			if len(c.sources) > 0 && count(c.sources) == 0 {
				row.BackMs = float64(now.Sub(healed).Microseconds()) / 1e3
			}
			return published
		}
	}
}

// count is how many sources a breaker holds.
func count(sources []guard.Control) (n int) {
	for _, s := range sources {
		for _, h := range s.State().Holds {
			if h.Reason == guard.ReasonBreaker {
				n++
				break
			}
		}
	}
	return n
}

type scopeReport struct{ rows []ScopeRow }

func (r scopeReport) WriteJSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(struct {
		Group string     `json:"group"`
		Rows  []ScopeRow `json:"rows"`
	}{"scopes", r.rows})
}

func (r scopeReport) WriteTable(w io.Writer) error {
	var s strings.Builder
	tw := tabwriter.NewWriter(&s, 0, 0, 3, ' ', tabwriter.AlignRight)
	never := func(format string, v float64) string {
		if v < 0 {
			return "-"
		}
		return fmt.Sprintf(format, v)
	}
	last := ""
	for _, row := range r.rows {
		if at := row.Order + row.Fault; at != last {
			if last != "" {
				fmt.Fprintln(tw)
			}
			last = at
			fmt.Fprintf(tw, "order %s, %s\thealthy kept\tcalls/s to the broken part\tcontained ms\tback ms\tdead letters\t\n", row.Order, strings.ReplaceAll(row.Fault, "_", " "))
		}
		fmt.Fprintf(tw, "%s\t%s\t%.1f\t%s\t%s\t%.0f\t\n", row.Scope,
			never("%.3f", row.HealthyKept), row.CallsPerSecond, never("%.0f", row.ContainedMs), never("%.0f", row.BackMs), row.Dead)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, s.String())
	return err
}
