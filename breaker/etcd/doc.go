// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package etcd lets the processes of a fleet decide over their breakers through
// etcd, for those who run one anyway and want an authority instead of gossip.
//
// Start with [New], and hand the [Authority] to guard.WithFleet. What it decides,
// who probes and how a scope is taken over is as docs/fleet.md says, with
// the same [breaker.FleetConfig]: one machine decides for both. This page says what
// differs.
//
// # What etcd gives, and what it costs
//
//	                  gossip (package fleet)              etcd (this package)
//	a decision is     made by whoever hears a quorum;     one transaction, which compares the state,
//	                  of two at once the later holds      the roster and each vote that it counts
//	two sides         both can decide with Quorum at      never: only the side with etcd's own majority
//	                  or below 0.5                        can, whatever Quorum is
//	one probe         while news takes less than Settle   a key with a lease; whoever ends a probe does
//	                                                      so a second before its lease can be over
//	a dead process    is silent: Silent                   loses its lease: Silent, and up to 0.5 s
//	one name twice    the later incarnation holds                the later waits for the earlier's lease
//	another roster    is refused by each who hears it     is refused; the later number takes over
//	a new process     is told within a round of gossip,   knows all after one read: what it does not
//	                  half-open if nobody does            find is closed
//	reach of a word   a round of gossip                   one write and the watch: some 10 ms
//	without the rest  a side without quorum goes by       a process without etcd goes by itself, and
//	                  itself                              all do when etcd is down
//	writes            none                                one a vote, one a decision, two a probe
//	when idle         packets between pairs               a read and a renewal each Silent/4, a process
//	storms            compared                            not compared: each process's own
//	roster            up to 4096 names                    up to 120, for a transaction to compare
//	to run            nothing                             etcd: 3.4 or later, three or five nodes
//
// # What etcd guarantees, and what of that is used
//
// Transactions are serializable and in one order, that of revisions, over all
// members; a committed one is on the disks of a majority. A decision compares the
// revision of the scope's state with the one that it was made from, so of two that
// were made from one state the second is void, and it compares the revision of each
// vote that it counts, so none counts that was taken back or whose process has lost
// its lease meanwhile. Every write compares that the writer's own place is the one it
// believes to have: a process that stood still past its lease writes nothing.
//
// A lease ends at the earliest its time to live after its last renewal arrived, by
// etcd's clock, and later when etcd changes its leader. A process counts from before
// it asked, by its own monotonic clock, and so knows that it is cut off before the
// others can. Both clocks have to run evenly, to within a second in Lease. No
// instant is written; an open period is counted from when a process hears of it, and
// one that has just started waits it out in full.
//
// # When etcd is away
//
// What the watch has told is believed while the lease cannot be over and the watch,
// asked each Silent/4, has shown life within Silent. After that, at the latest Silent
// after the last word, a process goes by its own breakers: one that is held, for the
// rest of its period and up to a fifth more. What it adopts then is half-open,
// whatever it had heard. It still votes nothing and decides nothing; when it is back
// it is held again where the fleet is open, and counts as passed where its breaker
// has closed by itself. Within Silent of a cut a process acts on what it last heard.
//
// # Who may not probe
//
// A process with an earlier roster is held with the others and never probes, like one
// that the roster does not name.
//
// # Keys
//
// Under Config.Prefix, with names escaped as in a URL's path (net/url.PathEscape), and
// values in the compact form that wire.go describes, a version first:
//
//	/v1/roster                       the roster's number and hash, Quorum, Successes
//	/v1/member/NAME                  who is here; lease Silent
//	/v1/scope/SCOPE/state            what the fleet decided; stays
//	/v1/scope/SCOPE/vote/NAME        one process's vote; lease Silent
//	/v1/scope/SCOPE/probe            who probes; lease Lease and a second
//	/v1/scope/SCOPE/last             what troubled the last owner; lease Keep
//
// There is a state for each scope that was ever open, some 100 bytes with its key,
// and it is not deleted by itself: a generation must not begin again. Config.Fleet.Scopes
// bounds what a process remembers of them; beyond, a scope that it adopts goes by its
// breaker. To clear a prefix, stop its processes first. A value of a later version is
// left alone, and its scope goes by its breakers.
//
// # Inside
//
// The core is steps at an instant, without I/O, and answers Adopt and Step from what
// the watch has told. It compares what should be in etcd with what is, and a
// difference is a transaction to try, so that no answer need arrive. One goroutine
// keeps a session: leases, a list, the watch from its revision on; one more renews
// and four write. A revision that was compacted away ends the session, and the next
// lists anew. So does a watch without a sign of life for longer than Silent, while the
// lease is renewed: its node may have died without a word. Everybody who can write below the prefix can decide: give the client's
// user a role for it and nothing else.
//
// # Sources
//
// The guarantees: etcd, KV API guarantees, and Jepsen's report on etcd 3.4.3, which
// also says why a lease is no lock for what etcd does not see: here a probe, which
// therefore ends by its own process's clock first. Fencing by revision: M. Burrows,
// The Chubby lock service, OSDI 2006, sequencers.
package etcd
