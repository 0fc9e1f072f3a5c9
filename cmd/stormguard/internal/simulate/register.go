// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
)

// A store connects the whole fleet to its register, also when the fleet's own network is
// faulty. A message to the register takes as long as a packet. A real register decides and
// answers while the simulated time stands still.
type store struct {
	ctx      context.Context //nolint:containedctx // of the run, in the middle of which it is asked
	register register.Register
	lost     map[int]bool // nodes that do not reach the register

	// notices is the time until a node notices that it has lost the register. 0 is at once.
	notices time.Duration

	// rng draws which writes of a node that has lost the register arrive late. nil draws
	// none.
	rng *rand.Rand
	// late is the latest instant at which a late write arrives.
	late time.Duration

	unknown int // writes whose writer was not told the outcome

	made   map[uint64][]byte // documents by number
	newest uint64            // the highest number
	wrong  []string          // violations of a register's promises
	err    error             // a call of the register failed

	answered bool // the register has answered a read
}

var errLost = errors.New("the register is not reached")

// way is the time of a message to the register, or back.
const way = linkBase + linkJitter

// lateBy is the longest delay of a late write: a process waits so long for the answer.
const lateBy = 5 * time.Second

// answers is the time limit for an answer of a real register.
const answers = 30 * time.Second

// read reads the newest document; ok is false if the register does not answer.
func (s *store) read() (number uint64, document []byte, ok bool) {
	ctx, cancel := context.WithTimeout(s.ctx, answers)
	defer cancel()
	number, document, err := s.register.Read(ctx)
	switch {
	case errors.Is(err, register.ErrMalformed):
		s.blame(err.Error())
		return 0, nil, false
	case err != nil:
		s.err = errors.Join(s.err, err)
		return 0, nil, false
	}
	s.answered = true
	if number < s.newest {
		s.blame(fmt.Sprintf("the newest number of the register fell from %d to %d", s.newest, number))
	}
	if number > 0 {
		s.saw(number, document)
	}
	return number, document, true
}

// write asks the register to write the document, and returns the outcome.
func (s *store) write(number uint64, document []byte) fleetstate.WriteResult {
	ctx, cancel := context.WithTimeout(s.ctx, answers)
	defer cancel()
	switch err := s.register.CompareAndSet(ctx, number, document); {
	case err == nil:
		s.saw(number, document)
		return fleetstate.Written
	case errors.Is(err, register.ErrConflict):
		return fleetstate.NotWritten
	case errors.Is(err, register.ErrUnknown):
		return fleetstate.Unknown
	case errors.Is(err, register.ErrMalformed):
		s.blame(err.Error())
		return fleetstate.NotWritten
	default:
		s.err = errors.Join(s.err, err)
		return fleetstate.NotWritten
	}
}

// blame records a violation, and drops repeats: the whole fleet may see the same one.
func (s *store) blame(what string) {
	if !slices.Contains(s.wrong, what) {
		s.wrong = append(s.wrong, what)
	}
}

// saw records the document of a number, and checks that it never changes.
func (s *store) saw(number uint64, document []byte) {
	if had, ok := s.made[number]; ok && !bytes.Equal(had, document) {
		s.blame(fmt.Sprintf("number %d of the register has two documents", number))
	}
	s.made[number], s.newest = document, max(s.newest, number)
}

// unplug cuts nodes off from the register for a while, as a split does.
func (w *world) unplug(from, until time.Duration, ids ...int) {
	w.net.At(from, func() {
		w.store.lost = map[int]bool{}
		for _, id := range ids {
			w.store.lost[id] = true
			if w.store.notices == 0 {
				w.away(id)
			} else {
				w.net.At(from+w.store.notices, func() { w.away(id) })
			}
		}
	})
	w.net.At(until, func() {
		w.store.lost = nil
		for _, id := range ids {
			if m := w.members[id]; m != nil {
				m.citizen.read()
			}
		}
	})
}

// away tells a node that it has lost the register, if that is still so.
func (w *world) away(id int) {
	if m := w.members[id]; m != nil && w.store.lost[id] {
		m.citizen.later(func(now time.Duration) { m.citizen.config.Away(now, errLost) })
	}
}

// read starts a read of the register. The answer arrives after two ways.
func (c *citizen) read() {
	w := c.m.w
	w.net.At(w.net.Now()+2*way, c.hear)
}

// hear gives the citizen the register's newest document, if the citizen runs and reaches
// the register.
func (c *citizen) hear() {
	s := &c.m.w.store
	if !c.lives() || s.lost[c.m.id] {
		return
	}
	number, document, ok := s.read()
	if !ok {
		return
	}
	c.later(func(now time.Duration) {
		if err := c.config.Read(now, number, document); err != nil {
			s.blame(err.Error())
		}
	})
}

func (c *citizen) lives() bool {
	w, id := c.m.w, c.m.id
	return w.members[id] == c.m && w.net.Process(id) != nil
}

// later calls do for the citizen, if it runs, and wakes its driver.
func (c *citizen) later(do func(now time.Duration)) {
	if !c.lives() {
		return
	}
	own, _ := c.m.w.net.Clock(c.m.id)
	do(own)
	c.m.kicked = true
	c.m.w.net.Poke(c.m.id)
}

// write sends the next write to the register, if there is one. The register decides after
// one way, and tells all watchers. A citizen that loses the register before the answer does
// not learn the outcome.
func (c *citizen) write(now time.Duration) {
	w, s, id := c.m.w, &c.m.w.store, c.m.id
	number, document, ok := c.config.Write(now, time.Unix(0, int64(w.net.Now())))
	if !ok {
		return
	}
	w.net.At(w.net.Now()+way, func() {
		result := fleetstate.NotWritten
		switch {
		case !s.lost[id]:
			result = w.put(number, document, c)
		case s.rng != nil && s.rng.IntN(2) == 0:
			result = fleetstate.Unknown
			arrives := min(w.net.Now()+time.Duration(s.rng.Int64N(int64(lateBy))), max(w.net.Now(), s.late))
			w.net.At(arrives, func() { w.put(number, document, nil) })
		}
		w.net.At(w.net.Now()+way, func() {
			if s.lost[id] && result == fleetstate.Written {
				result = fleetstate.Unknown
			}
			if result == fleetstate.Unknown {
				s.unknown++
			}
			c.later(func(now time.Duration) { c.config.Wrote(now, number, result) })
			if result != fleetstate.Written {
				c.read()
			}
		})
	})
}

// put writes to the register. After a write, or an unknown outcome, it tells all citizens
// except by, who gets the answer.
func (w *world) put(number uint64, document []byte, by *citizen) fleetstate.WriteResult {
	result := w.store.write(number, document)
	if result != fleetstate.NotWritten {
		for _, m := range w.members {
			if m != nil && m.citizen != nil && m.citizen != by {
				w.net.At(w.net.Now()+way, m.citizen.hear)
			}
		}
	}
	return result
}
