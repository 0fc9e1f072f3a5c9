// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// Without a register an operator is the sequencer: each process is given numbered
// configurations, from a file or its configuration. Nothing is written or decided. A process
// that hears of a newer configuration uses at once the smaller of its shares, but says only of
// what it has loaded itself that it has applied it: a restart would forget the rest. So a
// configuration is complete, and who gains by it grows, when all who lose have loaded it.
//
// An incarnation that begins takes in what its peers know, so that it keeps within what is in
// force, and mints when it has heard all other members, or a second later: who starts
// cut off from all others mints its share of what it has loaded.
//
// A name that a newer configuration leaves out is one of which the operator says that it does
// not mint: nobody waits for it.
//
// Two different configurations of one number are the operator's mistake. Each process refuses
// the other one, and says so. Where both know a configuration before it they keep within that
// one. Where there is none before it, the configuration of those who mint already stays in
// force, or else that with the lower rate; who holds the other one only borrows.

func errStatic() error {
	return fmt.Errorf("%w: the configuration is static: raise its number by one, and load it into each process", ErrMember)
}

// Load takes in the operator's configuration of a number, in a static configuration. Numbers
// rise with each change, by one: of a number that leaves others out a limiter uses nothing
// until it is complete. The same again changes nothing. The errors are [ErrConfig], and
// [ErrDiffers] if another configuration is known by that number; then nothing was taken in.
func (c *Configurator) Load(now time.Duration, number uint64, configuration escrow.Configuration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.cfg.Static {
		return fmt.Errorf("%w: Static: false is not in {true}: a register has the configuration", ErrConfig)
	}
	var w checks
	if number < max(1, c.loaded) || number == ^uint64(0) {
		w.bad("number", number, fmt.Sprintf("[%d, %d]", max(1, c.loaded), ^uint64(0)-1))
		return w[0]
	}
	configuration.Number, configuration.Roster.Number = number, number
	if err := checkConfiguration(configuration); err != nil {
		return fmt.Errorf("%w: configuration: %w", ErrConfig, err)
	}
	s := newStage(normal(configuration), nil)
	if w.count("configuration: Limits and Roster: bytes", len(c.documentOf(s).bytes), maxDocument); len(w) > 0 {
		return w[0] // no peer could fetch it
	}
	for _, known := range c.stagesLocked() {
		if known.Number == number && newStage(known.Configuration, nil).digest != s.digest {
			return fmt.Errorf("%w: number %d was loaded with another content: raise the number", ErrDiffers, number)
		}
	}
	c.loaded = number
	if number > c.known() {
		c.extendLocked(now, []stage{s}, nil)
	}
	c.tellAll()
	c.tickLocked(now)
	return nil
}

// stagesLocked are those that are known.
func (c *Configurator) stagesLocked() []stage {
	if c.doc == nil {
		return nil
	}
	return c.doc.stages
}

// extendLocked adds stages that are newer than what is known.
func (c *Configurator) extendLocked(now time.Duration, stages []stage, from *confPeer) {
	if !c.settled {
		c.draft = append(c.draft, stages...)
		c.redraftLocked()
		return
	}
	name := ""
	if from != nil {
		name = from.id.Name
	}
	for _, s := range stages {
		c.adoptLocked(now, c.outOf(c.chain[len(c.chain)-1].stage, s), name)
	}
	c.publishLocked()
	c.votersLocked(now, from)
}

// outOf is a stage with those whom it leaves out.
func (c *Configurator) outOf(before, s stage) stage {
	var out []eviction
	for _, m := range before.Roster.Members {
		if memberIndex(s.Roster.Members, m.Name) < 0 {
			out = append(out, eviction{name: m.Name})
		}
	}
	return newStage(s.Configuration, out)
}

// publishLocked makes the chain the document that peers may fetch.
func (c *Configurator) publishLocked() {
	stages := make([]stage, len(c.chain))
	for i, l := range c.chain {
		stages[i] = l.stage
	}
	c.publishStagesLocked(stages)
}

func (c *Configurator) publishStagesLocked(stages []stage) {
	d := &document{fleet: c.cfg.Fleet, stages: slices.Clone(stages)}
	// The newest one by itself says whether two processes have loaded the same.
	if d.encode(); len(d.bytes) > maxDocument {
		d = c.documentOf(*d.newest())
	}
	c.renewLocked(d, loadedDigest(d.newest().Configuration))
}

// documentOf is the document of one stage, without those whom it leaves out: a reader finds
// them by what it knows.
func (c *Configurator) documentOf(s stage) *document {
	d := &document{fleet: c.cfg.Fleet, stages: []stage{newStage(s.Configuration, nil)}}
	d.encode()
	return d
}

// loadedDigest tells two configurations of one number apart, and which of them has the lower
// rate: that is its upper half, and a hash of everything its lower one.
func loadedDigest(c escrow.Configuration) uint64 {
	return math.Float64bits(c.Limit.Rate)>>32<<32 | newStage(c, nil).digest>>32
}

// redraftLocked publishes what an incarnation that begins has gathered.
func (c *Configurator) redraftLocked() {
	slices.SortFunc(c.draft, func(a, b stage) int {
		if a.Number < b.Number {
			return -1
		}
		return 1
	})
	c.publishStagesLocked(c.draft)
	c.voterLocked(c.ticked, c.doc.newest().Roster.Members)
	c.tellAll()
}

// olderLocked tells whether f, with an older configuration than ours, keeps to one of which a
// incarnation that begins must know.
func (c *Configurator) olderLocked(f *confPeer) bool {
	return c.cfg.Static && !c.settled && len(c.draft) > 0 && f.row.flags&confSettled != 0 && f.row.complete < c.draft[0].Number && f.row.complete > 0
}

// mergeStaticLocked takes in what f knows.
func (c *Configurator) mergeStaticLocked(now time.Duration, d *document, f *confPeer) {
	if !c.settled {
		for _, s := range d.stages {
			if !slices.ContainsFunc(c.draft, func(o stage) bool { return o.Number == s.Number }) {
				c.draft = append(c.draft, newStage(s.Configuration, nil))
			}
		}
		if f.row.flags&confSettled != 0 { // what is complete there is in force no more
			base := d.stages[0].Number
			newest := c.draft[0].Number
			for _, s := range c.draft {
				newest = max(newest, s.Number)
			}
			c.draft = slices.DeleteFunc(c.draft, func(s stage) bool { return s.Number < base && s.Number < newest })
		}
		c.redraftLocked()
		return
	}
	stages := slices.Clone(d.stages)
	stages = slices.DeleteFunc(stages, func(s stage) bool { return s.Number <= c.known() })
	if len(stages) == 0 {
		return
	}
	c.extendLocked(now, stages, f)
	if f.row.flags&confSettled != 0 {
		c.completeToLocked(now, min(f.row.complete, c.known()))
	}
}

// settleStaticLocked adopts what was gathered once everybody was heard.
func (c *Configurator) settleStaticLocked(now time.Duration) {
	if c.loaded == 0 || len(c.draft) == 0 || c.pull.from != nil {
		return
	}
	if c.conflict != nil && now-c.conflict.heard < nearby && c.conflict.voter >= 0 && len(c.draft) == 1 {
		return // two configurations of one number, and none before them: the other one is in force
	}
	if now-c.start < nearby {
		for i := range c.voters {
			if f := c.voters[i].confPeer; i != c.voter && (f == nil || !f.met) {
				return
			}
		}
	}
	if slices.ContainsFunc(c.list, func(f *confPeer) bool {
		return now-f.heard < nearby && (f.row.known > c.known() || c.olderLocked(f))
	}) {
		return // it is fetched
	}
	draft := c.draft
	c.draft, c.settled = nil, true
	for i, s := range draft {
		if i > 0 {
			s = c.outOf(draft[i-1], s)
		}
		c.adoptLocked(now, s, "")
	}
	c.publishLocked()
	c.votersLocked(now, nil)
	c.leaseLocked(now)
}
