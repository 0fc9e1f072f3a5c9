// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import "errors"

var (
	// errName means that another process has this one's name. It is retried until
	// that one's lease is over.
	errName = errors.New("etcd: name is taken")

	// errRoster means that processes under this prefix have another roster, Quorum
	// or Successes under the same number, so that the two would count differently.
	errRoster = errors.New("etcd: roster differs")

	// ErrLate means that somebody has brought a later roster. This process follows
	// those who have it, may vote, and neither decides nor probes until it has it
	// too. Where they are gone it has to be brought again, or one that is later still.
	ErrLate = errors.New("etcd: a later roster is in force")

	// errConfig is what every refusal of a configuration begins with.
	errConfig = errors.New("etcd: config")

	// errMalformed means that a value in etcd cannot be read: of a later version, or
	// not ours.
	errMalformed = errors.New("etcd: malformed")

	// errSession ends what an Authority does under one lease; a next one begins.
	errSession = errors.New("etcd: session lost")

	// errOver ends it because the lease was over, and what hung on it gone.
	errOver = errors.New("etcd: the lease was over")
)
