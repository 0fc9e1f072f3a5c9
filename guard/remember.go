// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"hash/fnv"
	"slices"
	"time"
)

// A failed message that goes back to the broker at the end of its epoch comes again in the next
// epoch. Its attempts must not begin anew: poison that hangs until its timeout would never be
// dead-lettered if partitions move every few minutes. So a Guard remembers the failures of
// unsettled messages under their source's name.

// maxSuspects bounds how many messages of one source are remembered.
const maxSuspects = 1024

// suspect is what is remembered of a failed message. The fields up to failures are those of item.
type suspect struct {
	tries, attempts, after int
	lastWord               bool
	wordAt, afterAt        time.Duration
	lifeAtFailure          uint64
	firstFailed            time.Duration
	failures               []attempt
	at                     time.Duration // when the message went back to the broker, or was parked
	parked                 bool          // the message comes back with new attempts: only lifeAtFailure counts
}

// identity names a message over epochs: by its place at the broker, by its id, or else by its
// content. certain is false for a name by content if the broker calls this the first delivery.
func identity(m Meta) (name string, certain bool) {
	switch o := m.Origin; {
	case m.Content != nil:
		return o.Source + "#" + m.Content(), m.Redelivered
	case o.HasOffset && !m.Timestamp.IsZero(): // offsets of a topic or stream that is made anew begin again
		return fmt.Sprintf("%s/%d/%d@%d", o.Source, o.Partition, o.Offset, m.Timestamp.UnixNano()), true
	case o.HasOffset:
		return fmt.Sprintf("%s/%d/%d", o.Source, o.Partition, o.Offset), true
	case o.Sequence > 0 && !m.Timestamp.IsZero():
		return fmt.Sprintf("%s/%d@%d", o.Source, o.Sequence, m.Timestamp.UnixNano()), true
	case o.Sequence > 0:
		return fmt.Sprintf("%s/%d", o.Source, o.Sequence), true
	case o.MessageID != "":
		return o.Source + "/" + o.MessageID, true
	}
	h := fnv.New128a()
	for _, part := range [][]byte{m.Key, m.Body} {
		fmt.Fprintf(h, "%d:", len(part))
		_, _ = h.Write(part)
	}
	for _, header := range m.Headers {
		fmt.Fprintf(h, "%q=%q", header.Name, header.Value)
	}
	return fmt.Sprintf("#%x", h.Sum(nil)), m.Deliveries != 1
}

// describe asks the port for the message's name, and whether this is the last delivery. A
// message's first failure in this epoch needs both.
func (s *Source[M]) describe(m M, r *result) {
	if meta, err := s.meta(m); err == nil {
		r.name, r.known = identity(meta)
		r.last = s.limits.MaxDeliver > 0 && meta.Deliveries >= s.limits.MaxDeliver
	}
}

// recall gives a failed item what is remembered of its message.
func (c *machine[M]) recall(it *item[M], r result) {
	if it.name != "" || r.name == "" {
		return
	}
	it.name, it.lastDelivery = r.name, r.last
	before, ok := c.suspects[r.name]
	if !ok || !r.known {
		return
	}
	delete(c.suspects, r.name)
	if before.parked {
		it.cameBack, it.lifeAtFailure = true, before.lifeAtFailure
		return
	}
	c.counted(it, before.tries)
	it.attempts += before.attempts
	it.after += before.after
	it.lastWord, it.wordAt, it.afterAt = before.lastWord, before.wordAt, before.afterAt
	it.lifeAtFailure, it.life = before.lifeAtFailure, c.born
	it.firstFailed, it.failures = before.firstFailed, before.failures
}

// suspect returns what is to be remembered of an item, false if it has no name or has not failed.
func (it *item[M]) suspect(now time.Duration) (suspect, bool) {
	return suspect{it.tries, it.attempts, it.after, it.lastWord, it.wordAt, it.afterAt, it.lifeAtFailure, it.firstFailed, it.failures, now, false}, it.name != "" && it.tries > 0
}

// remember keeps the failures of an item that goes back to the broker.
func (c *machine[M]) remember(now time.Duration, it *item[M]) {
	if s, ok := it.suspect(now); ok {
		s.failures = slices.Clone(s.failures) // a late handler may still change the original
		c.suspect(it.name, s)
	}
}

// rememberParked keeps lifeAtFailure of an item that was parked, in a source that handles parked
// messages (with beside). The message comes back to that source. A success until then is a proof
// of life before the first call there.
func (c *machine[M]) rememberParked(now time.Duration, it *item[M]) {
	if c.beside != nil && it.name != "" {
		c.suspect(it.name, suspect{lifeAtFailure: it.lifeAtFailure, at: now, parked: true})
	}
}

// suspect remembers a message. If there are too many, it replaces a parked one, or else the
// oldest: that message may have succeeded since, which is not looked up.
func (c *machine[M]) suspect(name string, s suspect) {
	if c.suspects == nil {
		c.suspects = make(map[string]suspect)
	}
	if _, known := c.suspects[name]; !known && len(c.suspects) >= maxSuspects {
		oldest, at := "", never
		for other, o := range c.suspects {
			if o.parked {
				oldest = other
				break
			}
			if o.at < at || o.at == at && other < oldest {
				oldest, at = other, o.at
			}
		}
		delete(c.suspects, oldest)
	}
	c.suspects[name] = s
}

// freshSuspects drops the messages that have been remembered for keepFor or longer.
func freshSuspects(now time.Duration, all map[string]suspect) map[string]suspect {
	for name, s := range all {
		if now-s.at >= keepFor {
			delete(all, name)
		}
	}
	return all
}
