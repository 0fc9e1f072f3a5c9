// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
)

// maxBody is the largest body of a record, in bytes.
const maxBody = 512

// checkLayout returns an error if a record with this body is not the same memory on every
// machine that an OpLog supports, or if a peer could send bytes that are not valid in it.
func checkLayout(t reflect.Type) error {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return fmt.Errorf("%w: records are little-endian memory, and this machine is big-endian", errRecordType)
	}
	size, _, problems := layout(t, t.String(), nil)
	if len(problems) == 0 && (size%8 != 0 || size > maxBody) {
		problems = append(problems, fmt.Errorf("%w: %v has %d bytes, want a multiple of 8 up to %d", errRecordType, t, size, maxBody))
	}
	return errors.Join(problems...)
}

// layout computes the layout of t on a machine that aligns each number to its own size. It
// reports every gap, also at the end of a struct, and every type that is not allowed. Without
// gaps, machines with a smaller alignment have the same layout.
func layout(t reflect.Type, path string, problems []error) (size, align uintptr, _ []error) {
	refuse := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("%w: %s "+format, append([]any{errRecordType, path}, args...)...))
	}
	switch t.Kind() {
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64,
		reflect.Float32, reflect.Float64:
		return t.Size(), t.Size(), problems

	case reflect.Array:
		if t.Len() == 0 {
			refuse("is an array of length 0, want at least 1")
			return 0, 1, problems
		}
		size, align, problems = layout(t.Elem(), path+"[0]", problems)
		return size * uintptr(t.Len()), align, problems

	case reflect.Struct:
		if t.NumField() == 0 {
			refuse("is an empty struct, want at least one field")
			return 0, 1, problems
		}
		align = 1
		before := len(problems)
		for f := range t.Fields() {
			if f.Name == "_" {
				problems = append(problems, fmt.Errorf("%w: %s._ is a blank field, want a name: its bytes are not set by Go", errRecordType, path))
			}
			var s, a uintptr
			s, a, problems = layout(f.Type, path+"."+f.Name, problems)
			if len(problems) == before && size%a != 0 {
				problems = append(problems, fmt.Errorf("%w: %s.%s would follow a hole at byte %d, want a multiple of %d", errRecordType, path, f.Name, size, a))
			}
			size, align = size+s, max(align, a)
		}
		if len(problems) == before && size%align != 0 {
			refuse("would end in a hole after byte %d, want a multiple of %d", size, align)
		}
		return size, align, problems

	case reflect.Int, reflect.Uint, reflect.Uintptr:
		refuse("is of type %v, whose size depends on the machine; want int64, uint32 and the like", t)
	case reflect.Bool:
		refuse("is a bool, which not every byte is; want uint8")
	default:
		refuse("is of type %v, want integers of fixed size, floats, and arrays and structs of them", t)
	}
	return 0, 1, problems
}
