// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import "errors"

var (
	// errName means that another process has this one's name. Joining is retried until the other's
	// lease is over.
	errName = errors.New("etcd: name is taken")

	// errRoster means that processes under this prefix have another roster, Quorum or Successes
	// under the same number, so that they would count votes differently.
	errRoster = errors.New("etcd: roster differs")

	// ErrLate means that another process has brought a later roster. This process follows the
	// processes that have it. It may vote, but neither decides nor probes until it has that roster
	// too. If those processes are gone, bring the same roster again, or a later one.
	ErrLate = errors.New("etcd: a later roster is in force")

	// errConfig is the error, for errors.Is, of every fault of a configuration.
	errConfig = errors.New("etcd: config")

	// errMalformed means that a value in etcd cannot be read: it is of a later version, or not
	// ours.
	errMalformed = errors.New("etcd: malformed")

	// errSession ends a session, which runs under one lease and with one watch. The next one
	// begins, under the same lease if that is not over.
	errSession = errors.New("etcd: session lost")

	// errOver ends a session because the lease was over, and its keys gone.
	errOver = errors.New("etcd: the lease was over")
)
