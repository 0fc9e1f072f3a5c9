// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package crdt holds what replicas can change on their own and merge in any
// order, any number of times, to the same state.
//
//	to share                                       type         merged by
//	a count that only grows                        GCounter     the greater, per replica
//	a set where the last write wins                LWWSet       the higher stamp, per element
//	operations that must be seen one by one, once  OpLog        origin and number
//	an order of writes, close to time              Clock        see its 50 ms rule
//
// Each count, row and record is written by one [Replica] alone. That is the only
// rule a process must keep, and it is why a process that starts again takes
// a new Incarnation.
//
// # Marks and deltas
//
// The first three share one shape, that of a section of internal/gossip:
//
//	local changes ─▶ state ─▶ Delta(b, since, room) ─▶ packet ─▶ Merge(b) ─▶ state
//	                 Mark                   ▲                         │
//	                                        └──── acknowledged: upto ─┘
//
// A state numbers its changes, those that it merged included; the number of the
// latest is its Mark. Delta appends what changed after a mark, each row once with
// what it is now, oldest change first, and says up to which mark the peer is
// complete with it. A sender remembers that mark per peer when it is
// acknowledged and asks from there next time; what is lost is sent again.
// Marks are local: they number changes of one state in one process, say nothing
// about a peer's, begin again with a new state and are never stored or compared
// across processes. Delta from 0 is the whole state, so a full sync is no other
// thing than a delta (Almeida, Shoker, Baquero, "Delta state replicated data
// types", 2018). A change that was merged is sent on, also back to where it came
// from, which costs one row and ends there: it changes nothing.
//
// A Delta of no news is no bytes, and no bytes merge to nothing. Room of
// [MinRoom] is enough for progress; with less, a Delta may append nothing and
// return since.
//
// # Encoding
//
// The first byte names type and version. Numbers are varints in their shortest
// form, names and elements have a length that is checked before anything is
// allocated, and what is malformed is refused whole, with ErrMalformed. What
// a message makes a state allocate is at most some 100 bytes for each byte of it,
// when each row is new and has a name of one letter. There is one encoding of a
// state in the order of its changes: a message that is merged into an empty state
// comes out the same, unless it repeats a row or, in an OpLog, has records with gaps.
//
// Counts and sums that would overflow are errors and never wrap.
//
// The package does not know sockets, sessions, peers' health or what is counted.
// It starts no goroutine and reads no clock but the one given to [NewClock]. Only
// [Clock] is safe for concurrent use: the others have one owner with one lock.
package crdt
