// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package statefile keeps one document over the restarts of a process: written whole,
// synced, checked when it is read, and with its age. What is in it is the caller's.
//
// The file is a line and the document:
//
//	stormguard-state 1 crc32c=1c291ca3 bytes=4711 boot=<id> up=<ns> wall=<unix ns>\n
//
// The checksum (CRC-32C) is over the line behind it and the document, so a file that was
// cut or changed in any single bit is found. up is the time since the host booted, in
// suspend too: within one boot it tells the age whatever was done to the wall clock.
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

// MaxBytes is how long a document may be. A longer one is not written.
const MaxBytes = 64 << 20

const (
	fileName    = "stormguard.state"
	damagedName = "stormguard.state.damaged"
	magic       = "stormguard-state 1 crc32c="
)

// Now is what is known of the present.
type Now struct {
	Boot string        // which boot of the host this is; empty if that cannot be told
	Up   time.Duration // since the host booted
	Wall time.Time
}

// A Document is what was found at start.
type Document struct {
	Body []byte // nil if there is none
	// Age is how long ago it was written, if Sure: by this boot of the host. Otherwise
	// it is 0, for a wall clock may have been set meanwhile.
	Age  time.Duration
	Sure bool
	Wall time.Time // when it was written, by the wall clock then
	// Damage is what is wrong with a file that cannot be read; nil for none. Aside is
	// where it was put; empty if it could not be moved, and the next Write replaces it.
	Damage error
	Aside  string
}

// File is the file of one process. Its methods must not be called concurrently.
type File struct {
	dir  *os.File // holds the lock
	path string
	now  func() Now
}

// Open makes the folder if it is not there (the one that it is in must be), locks it, and
// reads what the process before left. The error is [diskfile.ErrLocked] if another process
// has the folder. A nil now is the host's.
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

// Write puts a document in the place of the one before. After a crash there is one of the
// two.
func (f *File) Write(body []byte) error {
	if len(body) > MaxBytes {
		return fmt.Errorf("the document has %d bytes; at most %d are kept", len(body), MaxBytes)
	}
	_, err := diskfile.Replace(f.path, encode(body, f.now()))
	return err
}

// Close gives the folder back.
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
