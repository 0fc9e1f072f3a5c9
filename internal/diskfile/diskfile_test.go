// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package diskfile

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestLockDirIsOneHolders(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d")
	for range 2 {
		if err := MakeDir(path); err != nil {
			t.Fatal(err)
		}
	}
	held, err := LockDir(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := LockDir(path); !errors.Is(err, ErrLocked) {
		t.Errorf("a second lock: %v, want ErrLocked", err)
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	held, err = LockDir(path)
	if err != nil {
		t.Errorf("after the first was closed: %v", err)
	}
	_ = held.Close()
	if err := MakeDir(filepath.Join(path, "a", "b")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("in a folder that is not there: %v", err)
	}
}

func TestReplace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for _, text := range []string{"a long first document", "short", ""} {
		if placed, err := Replace(path, []byte(text)); err != nil || !placed {
			t.Fatalf("placed %v, %v", placed, err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("the file has %q, %v; want %q", got, err, text)
		}
	}
	// A disk that refuses the new one leaves the old one.
	if _, err := Replace(path, []byte("kept")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path+".next", 0o700); err != nil {
		t.Fatal(err)
	}
	if placed, err := Replace(path, []byte("lost")); err == nil || placed {
		t.Errorf("placed %v, %v", placed, err)
	}
	if got, _ := os.ReadFile(path); string(got) != "kept" {
		t.Errorf("the file has %q after a failed write", got)
	}
}
