// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package importrule says which package of this module may import what, and a
// test holds the module to it.
//
// A wrong import is cheap to catch on the day it is written and dear to undo a
// year later: it brings a broker's client into every program that only wanted
// a ring buffer, or ties a leaf to the package that composes it.
//
// The tables are in rules.go, each line with its reason. Whoever needs a new
// arrow or a new library adds the line there, in the same commit, and says why;
// docs/design.md shows the same picture and changes with it.
//
// The rule reads imports as `go list` reports them for the system it runs on:
// a file that only another system builds is not seen.
package importrule
