// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package statefile keeps one document over the restarts of a process. It is written as a whole,
// synced, and checked when it is read, and its age is known. The caller decides what the document
// contains.
//
// The file is a line and the document:
//
//	stormguard-state 1 crc32c=1c291ca3 bytes=4711 boot=<id> up=<ns> wall=<unix ns>\n
//
// The checksum (CRC-32C) covers the rest of the line and the document. It finds a cut file, and a
// change of any single bit. up is the time since the host booted, including suspend. Within one
// boot it gives the age, even if the wall clock was set.
package statefile

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/internal/diskfile"
)

// MaxBytes is the largest size of a document. A larger one is not written.
const MaxBytes = 64 << 20

const (
	fileName    = "stormguard.state"
	damagedName = "stormguard.state.damaged"
	magic       = "stormguard-state 1 crc32c="
)

// Now is a point in time, as far as the host can tell.
type Now struct {
	Boot string        // id of the host's boot; empty if unknown
	Up   time.Duration // time since the host booted
	Wall time.Time
}

// A Document is the result of Open: the document of the previous process.
type Document struct {
	Body []byte // nil if there is none
	// Age is how long ago the document was written, if Sure: by this boot of the host. Otherwise it
	// is 0, because the wall clock may have been set since.
	Age  time.Duration
	Sure bool
	Wall time.Time // when it was written, by the wall clock of that time
	// Damage is why the file cannot be read; nil if it can. Aside is the path that the damaged file
	// was moved to. If it could not be moved, Aside is empty, and the next Write replaces the file.
	Damage error
	Aside  string
}

// File is the file of one process. Its methods must not be called concurrently.
type File struct {
	dir  *os.File // holds the lock
	path string
	now  func() Now
}

// Open makes the folder if it does not exist, locks it, and reads the document of the previous
// process. The parent folder must exist. The error is [diskfile.ErrLocked] if another process has
// the folder. A nil now means the host's clocks.
func Open(dir string, now func() Now) (*File, Document, error) {
	if now == nil {
		now = hostNow
	}
	if err := diskfile.MakeDir(dir); err != nil {
		return nil, Document{}, err
	}
	lock, err := diskfile.LockDir(dir)
	if err != nil {
		return nil, Document{}, fmt.Errorf("%s: %w", dir, err)
	}
	f := &File{dir: lock, path: filepath.Join(dir, fileName), now: now}
	return f, f.read(), nil
}

func (f *File) read() (d Document) {
	b, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return Document{}
	}
	now := f.now()
	var body []byte
	var at Now
	if err == nil {
		body, at, err = decode(b)
	}
	if err != nil {
		d.Damage = err
		aside := filepath.Join(filepath.Dir(f.path), damagedName)
		if err := os.Rename(f.path, aside); err == nil {
			d.Aside = aside
		}
		return d
	}
	d = Document{Body: body, Wall: at.Wall}
	if now.Boot != "" && now.Boot == at.Boot && now.Up >= at.Up {
		d.Age, d.Sure = now.Up-at.Up, true
	}
	return d
}

// Write replaces the document. After a crash the file has the old one or the new one.
func (f *File) Write(body []byte) error {
	if len(body) > MaxBytes {
		return fmt.Errorf("the document has %d bytes; at most %d are kept", len(body), MaxBytes)
	}
	_, err := diskfile.Replace(f.path, encode(body, f.now()))
	return err
}

// Close unlocks the folder.
func (f *File) Close() error { return f.dir.Close() }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func encode(body []byte, at Now) []byte {
	rest := fmt.Appendf(nil, " bytes=%d boot=%s up=%d wall=%d\n", len(body), at.Boot, at.Up, at.Wall.UnixNano())
	rest = append(rest, body...)
	return append(fmt.Appendf(nil, "%s%08x", magic, crc32.Checksum(rest, castagnoli)), rest...)
}

func decode(b []byte) (body []byte, at Now, err error) {
	rest, ok := bytes.CutPrefix(b, []byte(magic))
	if !ok || len(rest) < 8 {
		return nil, Now{}, errors.New("it does not begin as a state of format 1 does")
	}
	sum, rest := string(rest[:8]), rest[8:]
	if want := fmt.Sprintf("%08x", crc32.Checksum(rest, castagnoli)); sum != want {
		return nil, Now{}, fmt.Errorf("its checksum is %s, that of its bytes %s", sum, want)
	}
	line, body, ok := bytes.Cut(rest, []byte("\n"))
	fields := strings.Split(string(line), " ")
	if !ok || len(fields) != 5 || fields[0] != "" {
		return nil, Now{}, fmt.Errorf("its first line ends %q", line)
	}
	var length, up, wall int64
	for i, to := range map[int]*int64{1: &length, 3: &up, 4: &wall} {
		_, text, _ := strings.Cut(fields[i], "=")
		if *to, err = strconv.ParseInt(text, 10, 64); err != nil {
			return nil, Now{}, fmt.Errorf("its first line has %q", fields[i])
		}
	}
	if length != int64(len(body)) {
		return nil, Now{}, fmt.Errorf("it has %d bytes, not %d", len(body), length)
	}
	_, boot, _ := strings.Cut(fields[2], "=")
	return body, Now{Boot: boot, Up: time.Duration(up), Wall: time.Unix(0, wall)}, nil
}
