// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

// A Charter says who mints what. Charters are numbered, and each replaces the one
// before it.
type Charter struct {
	Number uint64           // 1 is the founding one; each change is one more
	Limit  Limit            // of each key that Limits does not name
	Limits map[string]Limit // of keys that have their own
	Roster Roster           // members with weights, Guests
	Resets uint64           // how often all buckets were filled up
}
