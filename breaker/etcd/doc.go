// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package etcd lets the processes of a fleet decide over their breakers through etcd. It is for
// those who run etcd anyway and want an authority instead of gossip.
//
// Start with [New], and hand the [Authority] to guard.WithFleet. Decisions, probes and take-overs
// follow docs/fleet.md, with the same [breaker.FleetConfig]: one machine decides for both. This
// page says what differs.
//
// # What etcd gives, and what it costs
//
//	                  gossip (package fleet)              etcd (this package)
//	a decision is     made by a process that hears a      one transaction, which compares the state,
//	                  quorum; of two the later holds      the roster and each vote that it counts
//	two sides         both can decide with Quorum at      never: only the side with etcd's own majority
//	                  or below 0.5                        can, with any Quorum
//	one probe         while news takes less than Settle   a key with a lease; a prober ends its probe
//	                                                      a second before its lease can be over
//	a dead process    is silent: Silent                   loses its lease: Silent, and up to 0.5 s
//	one name twice    the later incarnation holds         the later waits for the earlier's lease
//	another roster    is refused by each that hears it    is refused; the later number takes over
//	a new process     is told within a round of gossip,   knows all after one read: what it does not
//	                  otherwise half-open                 find is closed
//	reach of news     a round of gossip                   one write and the watch: some 10 ms
//	without the rest  a side without quorum goes by       a process without etcd goes by itself, and
//	                  itself                              all do when etcd is down
//	writes            none                                one a vote, one a decision, two a probe
//	when idle         packets between pairs               a read and a renewal each Silent/4, a process
//	storms            compared                            not compared: each process's own
//	roster            up to 4096 names                    up to 120, for a transaction to compare
//	to run            nothing                             etcd: 3.4 or later, three or five nodes
//
// # What etcd guarantees, and how it is used
//
// Transactions are serializable and in one order over all members, that of revisions. A committed
// transaction is on the disks of a majority.
//
// A decision compares the revision of the scope's state with the one that it was made from. So of
// two decisions from one state the second is void. It also compares the revision of each vote that
// it counts. So no vote counts that was taken back, or whose process has lost its lease meanwhile.
// Every write compares that the writer still has the member key that it believes to have: a process
// that stood still past its lease writes nothing.
//
// By etcd's clock, a lease ends at the earliest one time to live after its last renewal arrived,
// and later when etcd changes its leader. A process counts by its own monotonic clock, from before
// it asked. So it knows that it is cut off before the others can know. Both clocks have to run
// evenly, to within a second in Lease. No instant is written. An open period is counted from when a
// process hears of it; a process that has just started waits it out in full.
//
// # When etcd is away
//
// A process believes what the watch has told while two things hold: its lease cannot be over, and
// the watch, asked each Silent/4, has shown life within Silent. After that, at the latest Silent
// after the last message, a process goes by its own breakers. A held breaker goes on after the rest
// of its period and up to a fifth more. So does a scope that the process adopts then, if the fleet's
// last known decision holds it open. Any other scope that it adopts then is half-open, whatever its
// last owner left; within Start of the process's own start the scope is held first.
//
// Meanwhile the process votes nothing and decides nothing. When etcd is back, its breaker is held
// again where the fleet is open, and counts as passed where it has closed by itself. Within Silent
// of a cut a process acts on the last news.
//
// # Who may not probe
//
// A process with an earlier roster is held with the others and never probes. The same holds for a
// process that the roster does not name.
//
// # Keys
//
// All keys are under Config.Prefix. Names are escaped as in a URL's path (net/url.PathEscape).
// Values have the compact form that wire.go describes, which begins with a version:
//
//	/v1/roster                       the roster's number and hash, Quorum, Successes
//	/v1/member/NAME                  a process that is here; lease Silent
//	/v1/scope/SCOPE/state            the fleet's decision; stays
//	/v1/scope/SCOPE/vote/NAME        one process's vote; lease Silent
//	/v1/scope/SCOPE/probe            the process that probes; lease Lease and a second
//	/v1/scope/SCOPE/last             the last owner's trouble; lease Keep
//
// There is a state for each scope that was ever open, some 100 bytes with its key. It is not
// deleted by itself, since a generation must not begin again. Config.Fleet.Scopes bounds how many
// scopes a process remembers; a further scope that it adopts goes by its breaker. To clear a
// prefix, stop its processes first. A value of a later version is left alone, and its scope goes by
// its breakers.
//
// # Inside
//
// The core is steps at an instant, without I/O. It answers Adopt and Step from what the watch has
// told. It compares what should be in etcd with what is there. A difference is a transaction to
// try, so no answer needs to arrive.
//
// One goroutine keeps a session: leases, a list, and the watch from the list's revision on. One
// more renews, and four write. If a revision was compacted away, the session ends, and the next
// lists anew. The session also ends when the watch shows no sign of life for longer than Silent
// while the lease is renewed: its node may have died without closing the connection.
//
// Everybody who can write below the prefix can decide. So give the client's user a role for the
// prefix and nothing else.
//
// # Sources
//
// The guarantees: etcd, KV API guarantees, and Jepsen's report on etcd 3.4.3. The report also says
// why a lease is no lock for things that etcd does not see. Here that is a probe, so a probe ends
// by its own process's clock first. Fencing by revision: M. Burrows, The Chubby lock service, OSDI
// 2006, sequencers.
package etcd
