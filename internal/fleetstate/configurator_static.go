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

// Without a register an operator orders the configurations: each process is given numbered ones,
// from a file or its settings. No process writes or decides. A process that hears of a newer
// configuration uses at once the smaller of its shares. But it reports only its own loaded
// configuration as applied, because a restart would forget the rest. So a configuration is
// complete, and members that gain by it grow, when all members that lose have loaded it.
//
// An incarnation that begins takes in what its peers know, so that it keeps within the
// configurations in force. It mints when it has heard all other members, or after a second. So a
// process that starts cut off from all others mints its share of its loaded configuration.
//
// If a newer configuration leaves out a name, the operator vouches that this process does not mint.
// No process waits for it.
//
// Two different configurations of one number are the operator's mistake. Each process refuses the
// other one, and reports that. If both processes know a configuration before it, they keep within
// that one. If there is none, the configuration of the processes that already mint stays in force,
// or else the one with the lower rate. A process with the other one only borrows.

func errStatic() error {
	return fmt.Errorf("%w: the configuration is static: raise its number by one, and load it into each process", ErrMember)
}

// Load takes in the operator's configuration of a number, if the configuration is static. Raise the
// number by one with each change: if a number was skipped, a limiter uses nothing until the
// configuration is complete. Loading the same again changes nothing. The errors are [ErrConfig],
// and [ErrDiffers] if another configuration is known by that number; then nothing was taken in.
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

// stagesLocked returns the known stages.
func (c *Configurator) stagesLocked() []stage {
	if c.doc == nil {
		return nil
	}
	return c.doc.stages
}

// extendLocked adds stages that are newer than the known ones.
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
		c.appendStageLocked(now, c.outOf(c.chain[len(c.chain)-1].stage, s), name)
	}
	c.publishLocked()
	c.votersLocked(now, from)
}

// outOf returns a stage with the names that it leaves out, as evictions.
func (c *Configurator) outOf(before, s stage) stage {
	var out []eviction
	for _, m := range before.Roster.Members {
		if memberIndex(s.Roster.Members, m.Name) < 0 {
			out = append(out, eviction{name: m.Name})
		}
	}
	return newStage(s.Configuration, out)
}

// publishLocked makes the chain the document that peers can fetch.
func (c *Configurator) publishLocked() {
	stages := make([]stage, len(c.chain))
	for i, l := range c.chain {
		stages[i] = l.stage
	}
	c.publishStagesLocked(stages)
}

func (c *Configurator) publishStagesLocked(stages []stage) {
	d := &document{fleet: c.cfg.Fleet, stages: slices.Clone(stages)}
	// The digest of the newest stage alone shows whether two processes have loaded the same.
	if d.encode(); len(d.bytes) > maxDocument {
		d = c.documentOf(*d.newest())
	}
	c.renewLocked(d, loadedDigest(d.newest().Configuration))
}

// documentOf returns a document of one stage, without the names that it leaves out: a reader finds
// them from its own stages.
func (c *Configurator) documentOf(s stage) *document {
	d := &document{fleet: c.cfg.Fleet, stages: []stage{newStage(s.Configuration, nil)}}
	d.encode()
	return d
}

// loadedDigest tells two configurations of one number apart. Its upper half orders them by rate;
// its lower half is a hash of everything.
func loadedDigest(c escrow.Configuration) uint64 {
	return math.Float64bits(c.Limit.Rate)>>32<<32 | newStage(c, nil).digest>>32
}

// redraftLocked publishes the draft of an incarnation that begins.
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

// olderLocked tells whether f, which has an older configuration than ours, keeps within one that an
// incarnation that begins must know.
func (c *Configurator) olderLocked(f *confPeer) bool {
	return c.cfg.Static && !c.settled && len(c.draft) > 0 && f.row.flags&confSettled != 0 && f.row.complete < c.draft[0].Number && f.row.complete > 0
}

// mergeStaticLocked takes in the document of f.
func (c *Configurator) mergeStaticLocked(now time.Duration, d *document, f *confPeer) {
	if !c.settled {
		for _, s := range d.stages {
			if !slices.ContainsFunc(c.draft, func(o stage) bool { return o.Number == s.Number }) {
				c.draft = append(c.draft, newStage(s.Configuration, nil))
			}
		}
		if f.row.flags&confSettled != 0 { // configurations before the complete one of f are no longer in force
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

// settleStaticLocked adopts the draft once all members were heard.
func (c *Configurator) settleStaticLocked(now time.Duration) {
	if c.loaded == 0 || len(c.draft) == 0 || c.pull.from != nil {
		return
	}
	if c.conflict != nil && now-c.conflict.heard < nearby && c.conflict.rosterIndex >= 0 && len(c.draft) == 1 {
		return // two configurations of one number, and none before them: the other one is in force
	}
	if now-c.start < nearby {
		for i := range c.voters {
			if f := c.voters[i].confPeer; i != c.selfIndex && (f == nil || !f.met) {
				return
			}
		}
	}
	if slices.ContainsFunc(c.list, func(f *confPeer) bool {
		return now-f.heard < nearby && (f.row.known > c.known() || c.olderLocked(f))
	}) {
		return // a fetch is still to come
	}
	draft := c.draft
	c.draft, c.settled = nil, true
	for i, s := range draft {
		if i > 0 {
			s = c.outOf(draft[i-1], s)
		}
		c.appendStageLocked(now, s, "")
	}
	c.publishLocked()
	c.votersLocked(now, nil)
	c.leaseLocked(now)
}
