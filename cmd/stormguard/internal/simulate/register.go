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

// A store is the register that the whole fleet reaches, whatever its own network does. One
// way there takes as long as a packet does. A real one decides and answers while the
// simulated time stands still.
type store struct {
	ctx      context.Context //nolint:containedctx // of the run, in the middle of which it is asked
	register register.Register
	lost     map[int]bool // nodes that do not reach it

	// notices is how late a node notices that it has lost the register. 0 is at once.
	notices time.Duration

	// rng draws which writes of a node that has lost the register arrive late, until late at
	// the latest. nil is none.
	rng  *rand.Rand
	late time.Duration

	unknown int // writes whose outcome was not told

	made   map[uint64][]byte // documents by number
	newest uint64
	wrong  []string // violations of what a register promises
	err    error    // it did not answer
}

var errLost = errors.New("the register is not reached")

// way is how long a message to the register takes.
const way = linkBase + linkJitter

// lateBy is how late a write may arrive: as late as a process waits for its answer.
const lateBy = 5 * time.Second

// answers is how long a real register may take for an answer.
const answers = 30 * time.Second

// read asks the register.
func (s *store) read() (number uint64, document []byte, ok bool) {
	ctx, cancel := context.WithTimeout(s.ctx, answers)
	defer cancel()
	number, document, err := s.register.Read(ctx)
	if err != nil {
		s.err = errors.Join(s.err, err)
		return 0, nil, false
	}
	if number < s.newest {
		s.blame(fmt.Sprintf("the newest number of the register fell from %d to %d", s.newest, number))
	}
	if number > 0 {
		s.saw(number, document)
	}
	return number, document, true
}

// write has the register decide.
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
	default:
		s.err = errors.Join(s.err, err)
		return fleetstate.NotWritten
	}
}

// blame notes a violation once: a whole fleet may see it.
func (s *store) blame(what string) {
	if !slices.Contains(s.wrong, what) {
		s.wrong = append(s.wrong, what)
	}
}

// saw notes the document of a number, which has one for ever.
func (s *store) saw(number uint64, document []byte) {
	if had, ok := s.made[number]; ok && !bytes.Equal(had, document) {
		s.blame(fmt.Sprintf("number %d of the register has two documents", number))
	}
	s.made[number], s.newest = document, max(s.newest, number)
}

// unplug has nodes lose the register for a while, as they do in a split.
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

// away has a node notice that it has lost the register, if it still has.
func (w *world) away(id int) {
	if m := w.members[id]; m != nil && w.store.lost[id] {
		m.citizen.later(func(now time.Duration) { m.citizen.config.Away(now, errLost) })
	}
}

// read has a citizen read the register.
func (c *citizen) read() {
	w := c.m.w
	w.net.At(w.net.Now()+2*way, c.hear)
}

// hear gives a citizen that lives, and reaches the register, what it has.
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

// later does something as the citizen, if it lives, and has its driver see it.
func (c *citizen) later(do func(now time.Duration)) {
	if !c.lives() {
		return
	}
	own, _ := c.m.w.net.Clock(c.m.id)
	do(own)
	c.m.kicked = true
	c.m.w.net.Poke(c.m.id)
}

// write does the next write, if there is one. It is decided on the way, and all that
// watch the register hear of it. Who loses the register meanwhile does not learn what
// became of it.
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

// put has the register decide upon a write, and tells all but who waits for its answer.
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
