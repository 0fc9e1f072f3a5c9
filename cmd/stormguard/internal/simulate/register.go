// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"time"

	"github.com/stormguard-mq/stormguard/internal/fleetstate"
)

// A store is a register that the whole fleet reaches, whatever its own network does. One
// way there takes as long as a packet does.
type store struct {
	number   uint64
	document []byte
	lost     map[int]bool // nodes that do not reach it
}

var errLost = errors.New("the register is not reached")

// unplug has nodes lose the register for a while, as they do in a split.
func (w *world) unplug(from, until time.Duration, ids ...int) {
	w.net.At(from, func() {
		w.store.lost = map[int]bool{}
		for _, id := range ids {
			w.store.lost[id] = true
			if m := w.members[id]; m != nil {
				m.citizen.later(func(now time.Duration) { m.citizen.config.Away(now, errLost) })
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

// way is how long a message to the register takes.
const way = linkBase + linkJitter

// read has a citizen read the register.
func (c *citizen) read() {
	w := c.m.w
	w.net.At(w.net.Now()+2*way, func() { c.hand(w.store.number, w.store.document) })
}

// hand gives a document to a citizen that lives.
func (c *citizen) hand(number uint64, document []byte) {
	if c.m.w.store.lost[c.m.id] {
		return
	}
	c.later(func(now time.Duration) {
		if err := c.config.Read(now, number, document); err != nil {
			panic(err) // there is one writer of documents
		}
	})
}

// later does something as the citizen, if it lives, and has its driver see it.
func (c *citizen) later(do func(now time.Duration)) {
	w, id := c.m.w, c.m.id
	if w.members[id] != c.m || w.net.Process(id) == nil {
		return
	}
	own, _ := w.net.Clock(id)
	do(own)
	c.m.kicked = true
	w.net.Poke(id)
}

// write does the next write, if there is one: it is decided on the way, and all that
// watch the register hear of it.
func (c *citizen) write(now time.Duration) {
	w := c.m.w
	number, document, ok := c.config.Write(now, time.Unix(0, int64(w.net.Now())))
	if !ok {
		return
	}
	w.net.At(w.net.Now()+way, func() {
		result := fleetstate.NotWritten
		if w.store.number == number-1 && !w.store.lost[c.m.id] {
			result = fleetstate.Written
			w.store.number, w.store.document = number, document
			for _, m := range w.members {
				if m != nil && m.citizen != nil && m.citizen != c {
					w.net.At(w.net.Now()+way, func() { m.citizen.hand(number, document) })
				}
			}
		}
		w.net.At(w.net.Now()+way, func() {
			c.later(func(now time.Duration) { c.config.Wrote(now, number, result) })
			if result != fleetstate.Written {
				c.read()
			}
		})
	})
}
