// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package registers

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
)

// A stored document begins with ours and the version of the form.
const (
	ours  = "stormguard-register/"
	magic = ours + "1"
)

var (
	// ErrForm means bytes that no version of this package has written.
	ErrForm = errors.New("not a document of a register")

	// ErrVersion means bytes that another version of this package has written.
	ErrVersion = errors.New("written by another version")
)

// Encode puts a line before the document, readable with the store's own tools: the form, the
// number, and an id if the store is a log.
func Encode(number uint64, id string, document []byte) []byte {
	b := make([]byte, 0, len(magic)+32+len(id)+len(document))
	b = append(b, magic...)
	b = append(b, ' ')
	b = strconv.AppendUint(b, number, 10)
	if id != "" {
		b = append(append(b, ' '), id...)
	}
	return append(append(b, '\n'), document...)
}

// Decode reads what Encode wrote. The document is a copy.
func Decode(b []byte) (number uint64, id string, document []byte, err error) {
	if bytes.HasPrefix(b, []byte(ours)) && !bytes.HasPrefix(b, []byte(magic+" ")) {
		return 0, "", nil, fmt.Errorf("%w: it begins with %.40q, not with %q", ErrVersion, b, magic)
	}
	line, rest, ok := bytes.Cut(b, []byte{'\n'})
	fields := bytes.Split(line, []byte{' '})
	if !ok || len(fields) < 2 || len(fields) > 3 || string(fields[0]) != magic {
		return 0, "", nil, fmt.Errorf("%w: it begins with %.40q, not with %q", ErrForm, b, magic)
	}
	number, err = strconv.ParseUint(string(fields[1]), 10, 64)
	if err != nil {
		return 0, "", nil, fmt.Errorf("%w: number %.40q", ErrForm, fields[1])
	}
	if len(fields) == 3 {
		id = string(fields[2])
	}
	return number, id, bytes.Clone(rest), nil
}
