// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package adaptertest is shared by the tests of adapters: how they start, wait and end, and
// the test that kills a consumer process again and again.
package adaptertest
