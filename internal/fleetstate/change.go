// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// String describes the change in one line.
func (ch *Change) String() string {
	var b strings.Builder
	limit := func(key string, l *escrow.Limit) {
		if l == nil {
			fmt.Fprintf(&b, "%s as the others; ", key)
			return
		}
		fmt.Fprintf(&b, "%s%g/s burst %d; ", key, l.Rate, l.Burst)
	}
	if ch.Limit != nil {
		limit("", ch.Limit)
	}
	for _, key := range slices.Sorted(maps.Keys(ch.Limits)) {
		limit(key+" ", ch.Limits[key])
	}
	for _, name := range slices.Sorted(maps.Keys(ch.Weights)) {
		fmt.Fprintf(&b, "%s weighs %d; ", name, ch.Weights[name])
	}
	if ch.Reset {
		b.WriteString("all buckets filled; ")
	}
	return strings.TrimSuffix(b.String(), "; ")
}
