// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package guard

import (
	"errors"
	"iter"
)

// There is no spill without the file locks of Unix: a directory could have two owners.
type (
	spillDir    struct{}
	spillLane   struct{}
	spillReader struct{}
)

const maxLaneName = 255

func (*spillDir) Lane(string) *spillLane { return nil }
func (*spillDir) Close() error           { return nil }
func (*spillDir) Lanes() iter.Seq[*spillLane] {
	return func(func(*spillLane) bool) {}
}

func (*spillLane) Name() string                        { return "" }
func (*spillLane) Len() int                            { return 0 }
func (*spillLane) Append(func(error), ...[]byte) error { return errNoSpill }
func (*spillLane) Reader() (*spillReader, error)       { return nil, errNoSpill }

func (*spillReader) Read([][]byte, int64) (int, error) { return 0, errNoSpill }
func (*spillReader) Commit(int) error                  { return errNoSpill }
func (*spillReader) Close()                            {}

var errNoSpill = errors.New("guard: Config.SpillDir: a spill needs Unix")

func laneHolds(*spillLane) (count, pending int) { return 0, 0 }

func (*Guard) openSpill() error { return errNoSpill }
