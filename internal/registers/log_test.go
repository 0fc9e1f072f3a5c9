// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package registers

import (
	"errors"
	"testing"
)

// The first record for the next number wins; what is late, early, double or not ours
// changes nothing.
func TestLog(t *testing.T) {
	t.Parallel()
	var l Log
	l.Expect("c")
	l.Expect("d")
	for offset, record := range []string{
		0: string(Encode(2, "x", []byte("early"))),
		1: string(Encode(1, "a", []byte("one"))),
		2: string(Encode(1, "b", []byte("late"))),
		3: "not ours",
		4: "stormguard-register/1 two c\nmalformed",
		5: string(Encode(2, "c", []byte("two"))),
		6: string(Encode(2, "d", []byte("two"))),
		7: string(Encode(2, "c", []byte("two"))), // again: it has won before
		8: string(Encode(0, "e", []byte("none"))),
	} {
		for range 2 { // an offset counts once
			if err := l.Fold(int64(offset), []byte(record)); err != nil {
				t.Fatalf("offset %d: %v", offset, err)
			}
		}
	}
	if n, doc := l.Newest(); n != 2 || string(doc) != "two" {
		t.Errorf("newest is %d, %q", n, doc)
	}
	if read, won, newest := l.Outcome("c"); !read || !won || newest != 2 {
		t.Errorf("c: read %v, won %v, newest %d", read, won, newest)
	}
	if read, won, newest := l.Outcome("d"); !read || won || newest != 2 {
		t.Errorf("d: read %v, won %v, newest %d", read, won, newest)
	}
	if err := l.Fold(9, []byte("stormguard-register/2 3 f\nthree")); !errors.Is(err, ErrVersion) {
		t.Errorf("a record of another version: %v, want ErrVersion", err)
	}
	if l.Next() != 9 {
		t.Errorf("next offset %d: a record that cannot be read was passed over", l.Next())
	}
}
