// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"slices"
	"strings"

	"github.com/stormguard-mq/stormguard/limiter"
)

func byName(a, b limiter.Member) int { return cmp.Compare(a.Name, b.Name) }

// seatOf is the index of a name in a roster in order, -1 if it is not there.
func seatOf(members []limiter.Member, name string) int {
	i, ok := slices.BinarySearchFunc(members, name, func(m limiter.Member, name string) int {
		return strings.Compare(m.Name, name)
	})
	if !ok {
		return -1
	}
	return i
}
