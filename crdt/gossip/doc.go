// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package gossip moves named sections of replicated state between processes.
package gossip
