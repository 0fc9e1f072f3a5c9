// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import "unsafe"

// This file is the only one with unsafe. Its functions return the memory of one value under
// another type, and no caller keeps a result longer than a call.

// alias returns b as a string without a copy, to look up a name. The string is valid as long
// as b is not changed.
func alias(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) } //nolint:gosec // b outlives what is looked up

// memory returns the bytes of records, in place. [checkLayout] has checked that they are the
// same on every machine and that none is padding.
func memory[T any](s []T) []byte {
	var one T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(one))) //nolint:gosec // all of s and no more
}

// overlay returns bytes as records, in place. It returns false if the bytes are not aligned
// for records on this machine; then the caller must copy them.
func overlay[T any](b []byte) ([]T, bool) {
	var one T
	p := unsafe.Pointer(unsafe.SliceData(b)) //nolint:gosec // only looked at
	if uintptr(p)%unsafe.Alignof(one) != 0 {
		return nil, false
	}
	return unsafe.Slice((*T)(p), len(b)/int(unsafe.Sizeof(one))), true //nolint:gosec // aligned, and whole records only
}
