// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
)

// registerFor is the time limit of a register call.
const registerFor = 5 * time.Second

// poke wakes the driver.
func (p *Process) poke() {
	select {
	case p.poked <- struct{}{}:
	default:
	}
}

// errSilent is the error of a register whose Watch says nothing.
var errSilent = fmt.Errorf("its Watch has said nothing for %v", registerFor)

// watch is the goroutine that watches the register.
func (p *Process) watch() {
	var first sync.Once
	silent := time.AfterFunc(registerFor, func() {
		first.Do(func() {
			p.away(errSilent)
			p.poke()
		})
	})
	defer silent.Stop()
	_ = p.register.Watch(p.ctx, func(e register.Event) {
		first.Do(func() { silent.Stop() })
		if e.Err != nil {
			p.away(e.Err)
		} else {
			p.readIn(e.Number, e.Document)
		}
		p.poke()
	}) // the error is that of the context
}

// away notes and logs that the register is away. Watch reports each absence once.
func (p *Process) away(err error) {
	p.config.Away(p.clock(), err)
	p.noteWrite(0, nil) // the register being away explains why writes fail
	p.log.Warn("fleet: the register cannot be reached; the newest configuration stays in force, and nothing can be changed", "error", err)
}

// readIn takes in a document of the register. A refused document is a problem in the Status, which
// reportStatus logs.
func (p *Process) readIn(number uint64, document []byte) {
	was := p.config.Status(p.clock()).Away
	if err := p.config.Read(p.clock(), number, document); err == nil && was != nil && p.config.Status(p.clock()).Away == nil {
		p.log.Info("fleet: the register can be reached again", "number", number)
	}
}

// writeNext begins the next write, if there is one. The driver calls it.
func (p *Process) writeNext(now time.Duration) {
	if p.register == nil || p.drive.writing.Load() {
		return
	}
	number, document, ok := p.config.Write(now, time.Now())
	if !ok {
		return
	}
	p.drive.writing.Store(true)
	p.wg.Go(func() {
		defer p.poke()
		defer p.drive.writing.Store(false)
		p.put(number, document)
	})
}

// unwritten says why writes fail, while they are tried.
type unwritten struct {
	err       error
	since, at time.Duration // times of the first and of the latest failure
}

const (
	// unwrittenAfter is how far apart the first and the latest failure must be, to count as a
	// problem. It is longer than a register that goes away or comes back takes to say so.
	unwrittenAfter = 3 * time.Second
	// unwrittenFor is how long the latest failure counts. It is longer than the pause before the
	// next try.
	unwrittenFor = 15 * time.Second
)

// noteWrite notes the outcome of a write. A faster write of another process is no failure.
func (p *Process) noteWrite(number uint64, err error) {
	var conflict *register.ConflictError
	switch {
	case errors.As(err, &conflict) && conflict.Newest+1 < number:
		err = fmt.Errorf("it has number %d, and %d is known: it was wiped, or is an older copy", conflict.Newest, number-1)
	case errors.Is(err, register.ErrConflict) || p.ctx.Err() != nil:
		err = nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.unwritten = unwritten{}
		return
	}
	now := p.clock()
	if p.unwritten.err == nil {
		p.unwritten.since = now
	}
	p.unwritten.err, p.unwritten.at = err, now
}

// configuration returns the status of the configuration. Its Problem also covers a register that
// answers but has taken no write of this process for a while.
func (p *Process) configuration(now time.Duration, s fleetstate.ConfiguratorStatus) Configuration {
	c := configurationOf(s)
	p.mu.Lock()
	defer p.mu.Unlock()
	if u := p.unwritten; c.Problem == "" && c.Away == "" && u.at-u.since >= unwrittenAfter && now-u.at < unwrittenFor {
		c.Problem = "the register takes no write of this process: " + u.err.Error()
	}
	return c
}

// put writes one document and reports the outcome.
func (p *Process) put(number uint64, document []byte) {
	ctx, cancel := context.WithTimeout(p.ctx, registerFor)
	defer cancel()
	result := fleetstate.NotWritten
	err := p.register.CompareAndSet(ctx, number, document)
	switch {
	case err == nil:
		result = fleetstate.Written
	case errors.Is(err, register.ErrUnknown):
		result = fleetstate.Unknown
	}
	p.noteWrite(number, err)
	if result != fleetstate.Written {
		if newest, document, err := p.register.Read(ctx); err == nil {
			p.readIn(newest, document)
		}
	}
	p.config.Wrote(p.clock(), number, result)
}
