// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import "unsafe"

// This file is the only one with unsafe. Its functions hide the memory of one
// thing under the type of another, and none of them outlives a call.

// alias is b as a string, which is valid as long as b is not written to: to look
// something up without a copy of its name.
func alias(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) } //nolint:gosec // b outlives what is looked up

// memory is the bytes of records, in place. [checkLayout] made sure that they
// are the same on every machine and that none is padding.
func memory[T any](s []T) []byte {
	var one T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(one))) //nolint:gosec // all of s and no more
}

// overlay is bytes as records, in place; false if they do not lie where this
// machine wants such records to start, and must be copied there.
func overlay[T any](b []byte) ([]T, bool) {
	var one T
	p := unsafe.Pointer(unsafe.SliceData(b)) //nolint:gosec // only looked at
	if uintptr(p)%unsafe.Alignof(one) != 0 {
		return nil, false
	}
	return unsafe.Slice((*T)(p), len(b)/int(unsafe.Sizeof(one))), true //nolint:gosec // aligned, and whole records only
}
