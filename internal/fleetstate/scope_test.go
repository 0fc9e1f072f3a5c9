// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/scope"
	"github.com/stormguard-mq/stormguard/internal/scopetest"
)

// wires carry what each process says to all others, all of it, every 50 ms.
type wires struct {
	t     testing.TB
	procs []*wired
	cut   []string
	ticks int
}

type wired struct {
	scopetest.Process
	v    *Verdicts
	sent map[string]time.Duration // the latest Sent of a peer, by its clock
}

func (w *wires) Start(p scopetest.Process) *scope.Machine {
	v, err := NewVerdicts(p.Clock(), p.Config, crdt.Replica{Name: p.Name, Incarnation: p.Incarnation}, Roster{Number: 1, Names: p.Roster})
	if err != nil {
		w.t.Fatal(err)
	}
	w.procs = append(w.procs, &wired{p, v, make(map[string]time.Duration)})
	return v.m
}

func (w *wires) Stop(name string) {
	w.procs = slices.DeleteFunc(w.procs, func(p *wired) bool { return p.Name == name })
}

func (w *wires) Cut(names ...string) { w.cut = names }

func (w *wires) Step() {
	if w.ticks++; w.ticks%5 != 0 {
		return
	}
	for _, from := range w.procs {
		for _, to := range w.procs {
			if from == to || slices.Contains(w.cut, from.Name) || slices.Contains(w.cut, to.Name) {
				continue
			}
			b, _ := from.v.Delta(from.Clock(), nil, to.v.self, 0, 1<<16)
			c := crdt.Contact{From: from.v.self, Now: to.Clock(), Sent: from.Clock(), Echo: from.sent[to.Name]}
			if err := to.v.Merge(c, b); err != nil && !errors.Is(err, ErrSelf) {
				w.t.Fatal(err)
			}
			to.sent[from.Name] = from.Clock()
		}
	}
}

func TestScopesByGossip(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	scopetest.Run(t, func() scopetest.Fabric { return &wires{t: t} })
}
