// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"slices"

	"github.com/stormguard-mq/stormguard/internal/scope"
)

const hashInit = scope.HashInit

func hashString(h uint64, s string) uint64 { return scope.HashString(h, s) }
func hashNumber(h, n uint64) uint64        { return scope.HashNumber(h, n) }
func hashEnd(h uint64) uint64              { return scope.HashEnd(h) }

// rosterDigest tells two rosters of one number apart.
func rosterDigest(r Roster) uint64 {
	h := hashInit
	for _, n := range slices.Sorted(slices.Values(r.Names)) {
		h = hashString(h, n)
	}
	return hashEnd(h)
}
