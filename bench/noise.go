// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"hash/crc32"
	"runtime"
)

// noise measures one function against itself. Its ratios are 1 but for the
// machine: their range is what any other ratio, taken on the same machine in
// the same hour, can be off by.
var noise = Group{
	Name:  "noise",
	About: "self-check: one function against itself, so every ratio should be 1",
	Cases: []Case{
		{Name: "this", Open: openChecksum},
		{Name: "that", Open: openChecksum},
	},
	Ratios: []Ratio{
		{Name: "chain", Kind: Time, Ours: "this", Theirs: "that"},
		{Name: "throughput", Kind: Throughput, Ours: "this", Theirs: "that"},
	},
}

func openChecksum(context.Context) (Runner, error) {
	message := make([]byte, 256)
	return Runner{Do: func(_ context.Context, n int) error {
		sum := uint32(0)
		for range n {
			sum = crc32.Update(sum, crc32.IEEETable, message)
		}
		runtime.KeepAlive(sum) // or the compiler drops a loop whose result nobody reads
		return nil
	}}, nil
}
