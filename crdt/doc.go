// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package crdt holds what replicas can change on their own and merge in any
// order, any number of times, to the same state.
package crdt
