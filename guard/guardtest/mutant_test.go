// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// recorder is a testing.TB that notes failures instead of failing.
type recorder struct {
	testing.TB

	mu       sync.Mutex
	failures []string
}

func (r *recorder) Helper() {}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

func (r *recorder) Skip(...any) { runtime.Goexit() }

// verdict runs the suite's rules against a subject and returns the names of
// those that fail, with what they say.
// Without only it runs all.
func verdict(t *testing.T, f Features, factory func(testing.TB, Setup) Subject, only ...string) map[string][]string {
	f.Deadline = time.Minute // virtual; long enough for the honest
	failed := make(map[string][]string)
	for _, r := range rules {
		if r.lacks(f) != "" || len(only) > 0 && !slices.Contains(only, r.name) {
			continue
		}
		synctest.Test(t, func(t *testing.T) {
			rec := &recorder{TB: t}
			done := make(chan struct{})
			go func() { // what Fatalf ends
				defer close(done)
				r.exercise(rec, f, factory)
			}()
			<-done
			if len(rec.failures) > 0 {
				failed[r.name] = rec.failures
			}
		})
	}
	return failed
}

// mutant is an adapter's port with a fault.
type mutant struct {
	guard.Port[*Message]

	mu    sync.Mutex
	count int
	held  *Message
	fault string
}

func (m *mutant) tick() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.count++
	return m.count
}

func (m *mutant) Ack(msg *Message) error {
	switch n := m.tick(); m.fault {
	case "acks twice":
		_ = m.Port.Ack(msg)
	case "forgets an ack":
		if n%10 == 0 {
			return nil
		}
	case "acks the one before": // as with a stale delivery tag
		m.mu.Lock()
		msg, m.held = m.held, msg
		m.mu.Unlock()
		if msg == nil {
			return nil
		}
	case "hides a failed ack":
		_ = m.Port.Ack(msg)
		return nil
	case "repeats a failed ack":
		if err := m.Port.Ack(msg); err != nil {
			return m.Port.Ack(msg)
		}
		return nil
	}
	return m.Port.Ack(msg)
}

func (m *mutant) Flush() error {
	switch m.fault {
	case "never flushes":
		return nil
	case "forgets its acks when revoked":
		if p, ok := m.Port.(port); ok && p.e.Context().Err() != nil {
			return nil //nolint:nilerr // that is the fault
		}
	}
	return m.Port.Flush()
}

func (m *mutant) Demand(n int) {
	if n > 0 || m.fault != "drops what does not fit" {
		m.Port.Demand(n)
	}
}

func (m *mutant) Extend(ms []*Message) {
	if m.fault != "does not extend" {
		m.Port.Extend(ms)
	}
}

func (m *mutant) Return(ms []*Message, why guard.Reason) error {
	switch m.fault {
	case "acks what is returned", "acks what is returned when revoked":
		for _, msg := range ms {
			_ = m.Port.Ack(msg)
		}
		return nil
	case "returns twice":
		_ = m.Port.Return(ms, why)
	}
	return m.Port.Return(ms, why)
}

func (m *mutant) Meta(msg *Message) guard.Meta {
	meta := m.Port.Meta(msg)
	switch m.fault {
	case "drops headers":
		meta.Headers = nil
	case "drops the key":
		meta.Key = nil
	case "has no origin":
		meta.Origin.Sequence = 0
	case "cuts the body":
		meta.Body = meta.Body[:min(len(meta.Body), 1<<10)]
	}
	return meta
}

func (m *mutant) Lane(msg *Message) uint64 {
	if m.fault == "mixes lanes" {
		return msg.Seq
	}
	return m.Port.Lane(msg)
}

func bent(bend func(*Consumer)) func(*memory) { return func(m *memory) { m.bend = bend } }

func neverLooks(c *Consumer) { c.Policy.StrictOrder = true }

// hideClass makes every error one of unknown class.
func hideClass(c *Consumer) {
	handle := c.Handler
	c.Handler = func(ctx context.Context, key string, body []byte) error {
		if err := handle(ctx, key, body); err != nil {
			return errors.New(err.Error())
		}
		return nil
	}
}

// Each fault is one that adapters have had; the suite must see it, by the rule
// named here at the least.
func TestSuiteCatchesMutants(t *testing.T) {
	for _, c := range []struct {
		fault string
		rule  string
		order guard.Order
		shape func(*Features)
		twist func(*memory)
	}{
		{fault: "acks twice", rule: "acks"},
		{fault: "forgets an ack", rule: "acks"},
		{fault: "never flushes", rule: "acks"},
		{fault: "acks the one before", rule: "acks"},
		{fault: "does not extend", rule: "keep-alive"},
		{fault: "acks what is returned", rule: "close-held"},
		{fault: "returns twice", rule: "close-held"},
		{fault: "drops headers", rule: "dead-letter"},
		{fault: "drops the key", rule: "dead-letter"},
		{fault: "has no origin", rule: "dead-letter"},
		{fault: "cuts the body", rule: "shapes"},
		{fault: "mixes lanes", rule: "order", order: guard.OrderKey},
		{fault: "acks before the handler", rule: "close-held", twist: func(m *memory) { m.twist = "early" }},
		{fault: "loses a message", rule: "acks", twist: func(m *memory) { m.twist = "lose" }},
		{fault: "drops what does not fit", rule: "full", twist: func(m *memory) { m.twist = "overflow" }},
		{fault: "swaps deliveries", rule: "order", twist: func(m *memory) { m.twist = "swap" }},
		{fault: "delivers twice", rule: "acks", twist: func(m *memory) { m.twist = "twice" }},
		{fault: "calls the port after the end", rule: "acks", twist: func(m *memory) { m.twist = "after" }},
		{fault: "hides a failed ack", rule: "ack-fails"},
		{fault: "repeats a failed ack", rule: "ack-fails"},
		{fault: "acks what is returned when revoked", rule: "revoked"},
		{fault: "forgets its acks when revoked", rule: "revoked"},
		{fault: "reads on after the end", rule: "ended", twist: func(m *memory) { m.twist = "reads on" }},
		{fault: "looks for room now and then", rule: "room", shape: func(f *Features) { f.Passive = true }, twist: func(m *memory) { m.twist, m.passive = "poll", true }},
		{fault: "nacks to the dead letters of the broker", rule: "outage", twist: func(m *memory) { m.twist = "bury" }},
		{fault: "never looks behind", rule: "poison-burst-3", twist: bent(neverLooks)},
		{fault: "finds only one of two", rule: "outage-head", twist: bent(neverLooks)},
		{fault: "looks at one behind a steady load", rule: "steady-5-flaky-2", twist: bent(neverLooks)},
		{fault: "knows no storm", rule: "storm", twist: bent(func(c *Consumer) { c.Policy.Storm.Off = true })},
		{fault: "probes late", rule: "recovery", twist: bent(func(c *Consumer) { c.Policy.Breaker.Base = 20 * time.Second })},
		{fault: "guesses at once", rule: "outage", twist: bent(func(c *Consumer) { c.Policy.Retry.Patience = time.Millisecond })},
		{fault: "hides whose fault it is", rule: "refused", twist: bent(hideClass)},
		{fault: "retries what cannot succeed", rule: "poison-class-8", twist: bent(func(c *Consumer) {
			c.Policy.Retry.Base, c.Policy.Retry.Max = 5*time.Second, 5*time.Second
		})},
	} {
		t.Run(strings.ReplaceAll(c.fault, " ", "-"), func(t *testing.T) {
			f := memoryFeatures(c.order, 0, false)
			if c.order == guard.OrderKey {
				f.Workers = 4
			}
			if c.shape != nil {
				c.shape(&f)
			}
			only := []string{c.rule}
			if full {
				only = nil
			}
			failed := verdict(t, f, func(_ testing.TB, s Setup) Subject {
				m := newMemory(s)
				m.port = func(p guard.Port[*Message]) guard.Port[*Message] { return &mutant{Port: p, fault: c.fault} }
				if c.twist != nil {
					c.twist(m)
				}
				return m
			}, only...)
			var names []string
			for name := range failed {
				names = append(names, name)
			}
			slices.Sort(names)
			t.Logf("caught by %v", names)
			if failed[c.rule] == nil {
				t.Errorf("rule %s does not see it; those that do: %v", c.rule, names)
			}
		})
	}
}

// The recorder must not find fault by itself.
func TestSuitePassesHonest(t *testing.T) {
	failed := verdict(t, memoryFeatures(guard.OrderSource, 0, false), func(_ testing.TB, s Setup) Subject { return newMemory(s) })
	for name, texts := range failed {
		t.Errorf("%s: %v", name, texts)
	}
}
