// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package statefile

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/diskfile"
)

var wall = time.Unix(1_790_000_000, 0)

func at(boot string, up time.Duration) func() Now {
	return func() Now { return Now{Boot: boot, Up: up, Wall: wall} }
}

// leave writes a document as a process of that boot and time did.
func leave(t *testing.T, dir, body string, now func() Now) {
	t.Helper()
	f, _, err := Open(dir, now)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Write([]byte(body)); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func find(t *testing.T, dir string, now func() Now) Document {
	t.Helper()
	f, found, err := Open(dir, now)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return found
}

func TestAge(t *testing.T) {
	for _, c := range []struct {
		name, boot string
		up, age    time.Duration
		sure       bool
	}{
		{"the same boot", "a", 75 * time.Second, 15 * time.Second, true},
		{"another boot", "b", 75 * time.Second, 0, false},
		{"a host that does not tell", "", 75 * time.Second, 0, false},
		{"a clock that went back", "a", 59 * time.Second, 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			if d := find(t, dir, at("a", 0)); d.Body != nil || d.Damage != nil || d.Sure {
				t.Errorf("a new folder has %+v", d)
			}
			leave(t, dir, "first", at("a", 50*time.Second))
			leave(t, dir, "second", at("a", 60*time.Second))
			d := find(t, dir, at(c.boot, c.up))
			if string(d.Body) != "second" || d.Age != c.age || d.Sure != c.sure || !d.Wall.Equal(wall) || d.Damage != nil {
				t.Errorf("found %+v; want an age of %v, sure %v", d, c.age, c.sure)
			}
		})
	}
}

func TestHostTellsItsBoot(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("left out: only Linux tells its boot")
	}
	dir := t.TempDir()
	leave(t, dir, "x", nil)
	if d := find(t, dir, nil); !d.Sure || d.Age <= 0 || d.Age > time.Hour {
		t.Errorf("found %+v", d)
	}
}

func TestOneProcessHasTheFolder(t *testing.T) {
	dir := t.TempDir()
	f, _, err := Open(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, _, err := Open(dir, nil); !errors.Is(err, diskfile.ErrLocked) || !strings.Contains(err.Error(), dir) {
		t.Errorf("a second process: %v", err)
	}
}

// A file that was cut anywhere, or has any bit flipped, is set aside, named, and never
// taken for a document.
func TestEveryDamageIsFound(t *testing.T) {
	whole := encode([]byte(`{"a":1}`), at("boot-id", time.Second)())
	damaged := func(b []byte, what string, i int) {
		t.Helper()
		if body, _, err := decode(b); err == nil {
			t.Errorf("%s %d: read as %q", what, i, body)
		}
	}
	if body, now, err := decode(whole); err != nil || string(body) != `{"a":1}` || now.Boot != "boot-id" || now.Up != time.Second {
		t.Fatalf("whole: %q, %+v, %v", body, now, err)
	}
	for n := range whole {
		damaged(whole[:n], "cut at", n)
	}
	for bit := range len(whole) * 8 {
		b := bytes.Clone(whole)
		b[bit/8] ^= 1 << (bit % 8)
		damaged(b, "bit", bit)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, fileName)
	if err := os.WriteFile(path, whole[:len(whole)-1], 0o600); err != nil {
		t.Fatal(err)
	}
	d := find(t, dir, at("boot-id", time.Second))
	if d.Body != nil || d.Damage == nil {
		t.Fatalf("found %+v", d)
	}
	if kept, err := os.ReadFile(d.Aside); err != nil || !bytes.Equal(kept, whole[:len(whole)-1]) {
		t.Errorf("aside is %q, %v", kept, err)
	}
	if d := find(t, dir, at("boot-id", time.Second)); d.Body != nil || d.Damage != nil {
		t.Errorf("the next process finds %+v", d)
	}
}

// What cannot be read stops nobody.
func TestUnreadable(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, fileName), 0o700); err != nil {
		t.Fatal(err)
	}
	if d := find(t, dir, at("a", 0)); d.Body != nil || d.Damage == nil || d.Aside == "" {
		t.Errorf("found %+v", d)
	}
	leave(t, dir, "written", at("a", 0))
	if d := find(t, dir, at("a", 0)); string(d.Body) != "written" {
		t.Errorf("found %+v", d)
	}
}

func TestTooLongIsRefused(t *testing.T) {
	dir := t.TempDir()
	leave(t, dir, "kept", at("a", 0))
	f, _, err := Open(dir, at("a", 0))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Write(make([]byte, MaxBytes+1)); err == nil {
		t.Error("written")
	}
	if found := f.read(); string(found.Body) != "kept" {
		t.Errorf("found %+v", found)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(""))
	f.Add([]byte(magic))
	f.Add([]byte(magic + "00000000"))
	f.Add(encode(nil, Now{}))
	f.Add(encode([]byte("body\nof two lines"), at("id", 7)()))
	f.Fuzz(func(t *testing.T, b []byte) {
		body, now, err := decode(b)
		if err != nil {
			return
		}
		again, then, err := decode(encode(body, now))
		if err != nil || !bytes.Equal(again, body) || then.Boot != now.Boot || then.Up != now.Up || !then.Wall.Equal(now.Wall) {
			t.Errorf("%q, %+v came back as %q, %+v, %v", body, now, again, then, err)
		}
	})
}
