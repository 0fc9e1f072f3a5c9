// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package adaptertest is what the tests of adapters share: how they start, wait
// and end, and the test of a consumer process that is killed again and again.
package adaptertest
