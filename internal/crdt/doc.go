// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package crdt has data types that replicas change independently. Replicas may merge the
// changes in any order and any number of times, and reach the same state.
//
//	to share                                       type         merged by
//	a count that only grows                        GCounter     the greater, per replica
//	a set where the last write wins                LWWSet       the higher stamp, per element
//	operations that must be seen one by one, once  OpLog        origin and number
//	an order of writes, close to time              Clock        see its 50 ms rule
//
// Each count, row and record is written by a single [Replica]. That is the only rule that a
// process must keep. Therefore a process that starts again takes a new Incarnation.
//
// # Marks and deltas
//
// The first three share one shape, that of a section of internal/gossip:
//
//	local changes ─▶ state ─▶ Delta(b, since, room) ─▶ packet ─▶ Merge(b) ─▶ state
//	                 Mark                   ▲                         │
//	                                        └──── acknowledged: upto ─┘
//
// A state numbers its changes, merged ones too. The number of the latest change is its Mark.
// Delta appends the rows that changed after a mark, oldest change first, each row once with
// its present value. It returns the mark up to which the peer is complete with that. When the
// peer acknowledges the mark, the sender remembers it, and starts from it next time. So lost
// rows are sent again.
//
// Marks are local: they number the changes of one state in one process. They say nothing
// about a peer's marks, begin again with a new state, and are never stored or compared across
// processes. Delta from 0 is the whole state, so a full sync is a delta, too (Almeida, Shoker,
// Baquero, "Delta state replicated data types", 2018). A merged change is sent on, also back
// to its sender. That costs one row and ends there, since it changes nothing.
//
// A Delta without changes is empty, and merging an empty message changes nothing. A room of
// [MinRoom] is enough for progress. With less, Delta may append nothing and return since.
//
// # Encoding
//
// The first byte names type and version. Numbers are varints in their shortest form. The
// length of names and elements is checked before anything is allocated. A malformed message
// is refused as a whole, with ErrMalformed. A message makes a state allocate at most some 100
// bytes for each of its bytes; that happens if each row is new and has a name of one letter.
// A state has a single encoding, in the order of its changes. If a message is merged into an
// empty state, Delta writes the same message, unless the message repeats a row or, in an
// OpLog, has records with gaps.
//
// A count or sum that would overflow is an error; it never wraps.
//
// The package does not know sockets, sessions, the health of peers or the meaning of counts.
// It starts no goroutine, and reads no clock except the one given to [NewClock]. Only
// [Clock] is safe for concurrent use. Each other state has one owner with one lock.
package crdt
