// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package importrule says which package of this module may import which others. A test
// checks it.
//
// A wrong import is cheap to catch on the day it is written, and expensive to undo a year
// later. It links a broker's client into every program that only needed a ring buffer, or
// ties a leaf package to the package that uses it.
//
// The tables are in rules.go, each line with its reason. To allow a new import or library,
// add a line with its reason there, in the same commit. docs/design.md shows the same
// picture and changes with it.
//
// The rules read imports from `go list` for the system on which the test runs. Files for
// other systems only are not checked.
package importrule
