// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/operator"
)

// modelProcess is a process with a console, a clock that is wrong, and two functions. It hears
// others when the model says so.
type modelProcess struct {
	*fleetstate.Orders

	m           *ordersModel
	i           int
	incarnation uint64
	off         time.Duration
	guard       *guard.Guard
	console     *console.Console
}

func (p *modelProcess) Place() (name, zone string) { return fmt.Sprint("n", p.i), "z" }
func (*modelProcess) Routes() http.Handler         { return http.NotFoundHandler() }
func (p *modelProcess) Members() []operator.Member {
	name, zone := p.Place()
	return []operator.Member{{Name: name, Zone: zone, Heard: true}}
}

func (p *modelProcess) Give(o operator.Carried, _, _, _ string) error {
	p.m.given = append(p.m.given, o.ID)
	p.m.holds[p.i][o.ID] = true
	return p.Orders.Give(o.ID, o.Order, o.Until.Add(p.off))
}

func (p *modelProcess) InForce() (all []operator.Carried) {
	for _, o := range p.Orders.InForce() {
		all = append(all, operator.Carried{ID: o.ID, Order: o.Text, Until: o.Until.Add(-p.off)})
	}
	return all
}

func (p *modelProcess) replica() crdt.Replica {
	name, _ := p.Place()
	return crdt.Replica{Name: name, Incarnation: p.incarnation}
}

func (p *modelProcess) start() (err error) {
	p.incarnation++
	p.m.holds[p.i] = make(map[string]bool)
	if p.Orders, err = fleetstate.NewOrders(p.replica(), func() time.Time { return time.Now().Add(p.off) }); err != nil {
		return err
	}
	if p.guard, err = guard.New(guard.Config{Group: "g"}); err != nil {
		return err
	}
	for _, name := range []string{"a", "b"} {
		if _, err = guard.Protect(p.guard, guard.SourceConfig{Name: name}, func(context.Context, int) error { return nil }); err != nil {
			return err
		}
	}
	name, _ := p.Place()
	p.console, err = console.New(console.Config{Process: name, Fleet: p}, p.guard)
	return err
}

func (p *modelProcess) end() error {
	p.console.Close()
	_, err := p.guard.Close(context.Background())
	return err
}

func (p *modelProcess) hear(from *modelProcess) error {
	b, _ := from.Delta(0, nil, p.replica(), 0, math.MaxInt)
	if err := p.Merge(crdt.Contact{From: from.replica()}, b); err != nil {
		return err
	}
	p.Offset(-p.off)
	for id := range p.m.holds[from.i] {
		p.m.holds[p.i][id] = true
	}
	return nil
}

var loopback = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80}

// modelStep is what happens next.
type modelStep struct {
	do    string // order, split, heal, restart
	at    int
	order console.Order
	sides []int
	then  time.Duration // what passes afterwards
}

func drawStep(t *rapid.T) modelStep {
	s := modelStep{
		do:   rapid.SampledFrom([]string{"order", "order", "order", "split", "heal", "restart"}).Draw(t, "do"),
		at:   rapid.IntRange(0, 2).Draw(t, "at"),
		then: rapid.SampledFrom([]time.Duration{time.Second, 20 * time.Second, 65 * time.Second}).Draw(t, "then"),
	}
	switch s.do {
	case "order":
		s.order = console.Order{Action: console.Resume, Sources: []string{rapid.SampledFrom([]string{"*", "a", "b"}).Draw(t, "sources")}, In: "fleet"}
		if rapid.Bool().Draw(t, "pause") {
			s.order.Action = console.Pause
			s.order.For = console.Duration(rapid.SampledFrom([]time.Duration{time.Minute, 24 * time.Hour}).Draw(t, "for"))
		}
	case "split":
		s.sides = []int{rapid.IntRange(0, 1).Draw(t, "side"), rapid.IntRange(0, 1).Draw(t, "side"), rapid.IntRange(0, 1).Draw(t, "side")}
	}
	return s
}

type ordersModel struct {
	all   []*modelProcess
	sides []int
	given []string          // ids, in their sequence
	about []console.Order   // the same orders
	when  []time.Time       // likewise
	holds []map[string]bool // ids, by process
}

func (m *ordersModel) talk() error {
	for range 2 {
		for _, p := range m.all {
			for _, from := range m.all {
				if p != from && m.sides[p.i] == m.sides[from.i] {
					if err := p.hear(from); err != nil {
						return err
					}
				}
			}
		}
	}
	time.Sleep(300 * time.Millisecond)
	synctest.Wait()
	return nil
}

func (m *ordersModel) run(steps []modelStep, offs []time.Duration) (err error) {
	m.sides, m.holds = make([]int, 3), make([]map[string]bool, 3)
	for i, off := range offs {
		p := &modelProcess{m: m, i: i, off: off}
		if err := p.start(); err != nil {
			return err
		}
		m.all = append(m.all, p)
	}
	defer func() {
		for _, p := range m.all {
			if failed := p.end(); err == nil {
				err = failed
			}
		}
	}()
	steps = append(steps, modelStep{do: "heal"})
	for _, s := range steps {
		if err := m.talk(); err != nil {
			return err
		}
		switch s.do {
		case "order":
			if err := m.order(m.all[s.at], s.order); err != nil {
				return err
			}
		case "split":
			m.sides = s.sides
		case "heal":
			m.sides = make([]int, 3)
		case "restart":
			if err := m.all[s.at].end(); err != nil {
				return err
			}
			if err := m.all[s.at].start(); err != nil {
				return err
			}
		}
		if err := m.talk(); err != nil {
			return err
		}
		time.Sleep(s.then)
	}
	return m.judge()
}

func (m *ordersModel) order(p *modelProcess, o console.Order) error {
	text := fmt.Sprintf(`{"action":%q,"sources":[%q],"in":"fleet"}`, o.Action, o.Sources[0])
	if o.For > 0 {
		text = strings.Replace(text, "}", fmt.Sprintf(`,"for":%q}`, time.Duration(o.For)), 1)
	}
	q := httptest.NewRequest(http.MethodPost, "http://localhost/order", strings.NewReader(text))
	q = q.WithContext(context.WithValue(q.Context(), http.LocalAddrContextKey, loopback))
	q.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	m.about, m.when = append(m.about, o), append(m.when, time.Now())
	p.console.ServeHTTP(w, q)
	if w.Code != http.StatusOK || len(m.given) != len(m.about) {
		return fmt.Errorf("%s: %d %s", text, w.Code, w.Body)
	}
	return nil
}

// judge says what is wrong when all have heard all.
func (m *ordersModel) judge() error {
	want := slices.DeleteFunc(slices.Clone(m.given), func(id string) bool { return !m.holds[0][id] })
	for _, p := range m.all {
		var got []string
		for _, o := range p.Orders.InForce() {
			got = append(got, o.ID)
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("n%d has the orders %q in force, want %q of %q", p.i, got, want, m.given)
		}
		for _, s := range p.guard.Sources() {
			paused, end := false, time.Time{}
			for i, o := range m.about {
				if m.holds[0][m.given[i]] && (o.Sources[0] == "*" || o.Sources[0] == s.Name()) {
					end = m.when[i].Add(time.Duration(o.For))
					paused = o.Action == console.Pause && time.Now().Before(end)
				}
			}
			if got := len(s.State().Holds) > 0; got != paused && time.Since(end).Abs() > time.Second {
				return fmt.Errorf("n%d holds %s: %v, want %v", p.i, s.Name(), got, paused)
			}
		}
	}
	return nil
}

// Through splits, restarts and clocks that are wrong: when all have heard all, they have the same
// orders in force, the last order about a source decides, and none that it overruled does.
func TestOrdersModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		steps := make([]modelStep, rapid.IntRange(1, 10).Draw(rt, "steps"))
		for i := range steps {
			steps[i] = drawStep(rt)
		}
		var offs []time.Duration
		for range 3 {
			offs = append(offs, time.Duration(rapid.IntRange(-7200, 7200).Draw(rt, "clock"))*time.Second)
		}
		var err error
		synctest.Test(t, func(*testing.T) { err = new(ordersModel).run(steps, offs) })
		if err != nil {
			rt.Fatal(err)
		}
	})
}
