// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
)

// A copy of the file may have holes where there are zeros (cp --sparse, rsync -S, ZFS): what
// comes behind them stays.
func TestFileWithHolesKeepsWhatItHas(t *testing.T) {
	const punch, keep = 2, 1 // FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE
	dir := fastTemp(t)
	s := open(t, Config{Dir: dir})
	want := numbered(0, 100, 900)
	put(t, s.Lane("a"), want...)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, fileName)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	// A meta page is 80 bytes, and zeros.
	if err := syscall.Fallocate(int(file.Fd()), punch|keep, 4096, pageSize-4096); err != nil {
		t.Skipf("needs a file system that makes holes: %v", err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(path); err != nil || !slices.Equal(before, after) {
		t.Fatalf("the file was changed: %v", err)
	}
	s = open(t, Config{Dir: dir})
	put(t, s.Lane("a"), "one more")
	if got := drain(t, s.Lane("a")); !slices.Equal(got, append(want, "one more")) {
		t.Errorf("%d messages", len(got))
	}
}
