// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/stormguard-mq/stormguard/internal/diskfile"
)

// Names in the directory.
const (
	fileName   = "spill.db"     // the current file
	freshName  = "spill.db.new" // a file that will replace the current one; Open removes an unfinished one
	damagedDir = "damaged"      // folder of set-aside copies
	damagedLog = "damaged.jsonl"
)

// Recovery is what [Open] found in the file.
type Recovery struct {
	Lanes    int    // lanes that hold messages
	Messages int    // messages that can be read
	Bytes    int64  // bytes of the file's chunks that count for Config.MaxBytes
	Lost     uint64 // unreadable messages, as far as known: those in Damaged

	// Damaged lists all damage, in the order of lanes. The directory's folder "damaged" has
	// copies of the damaged parts, and a log with the same list.
	Damaged []Damage

	// Rebuilt is the copy of a file whose structure was damaged. The spill then uses a new
	// file, made of the messages that could be found. Otherwise it is "".
	Rebuilt string

	// SetAside is why a copy could not be made, or nil. The damaged part is still in the
	// file until the lane has been drained past it.
	SetAside error
}

// recoverDir prepares a directory, inspects its file and opens the store. readOnly is the
// error if nothing can be written there, or nil.
func recoverDir(cfg Config) (s *bolt, img *image, rec Recovery, readOnly, err error) {
	path := filepath.Join(cfg.Dir, fileName)
	fresh := filepath.Join(cfg.Dir, freshName)
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		if !cannotWrite(err) {
			return nil, nil, rec, nil, err
		}
		readOnly = err
	}
	file, err := os.OpenFile(path, os.O_RDWR, 0) //nolint:gosec // the operator's path
	if err != nil && cannotWrite(err) {
		readOnly = err
		file, err = os.Open(path) //nolint:gosec // the operator's path
	}
	if errors.Is(err, fs.ErrNotExist) {
		if readOnly != nil {
			return nil, nil, rec, nil, readOnly
		}
		if err := build(cfg.Dir, nil, noChunks); err != nil {
			return nil, nil, rec, nil, err
		}
		file, err = os.OpenFile(path, os.O_RDWR, 0) //nolint:gosec // the operator's path
	}
	if err != nil {
		return nil, nil, rec, nil, err
	}
	defer func() {
		if file != nil {
			err = errors.Join(err, file.Close())
		}
	}()
	info, err := file.Stat()
	if err != nil {
		return nil, nil, rec, nil, err
	}
	img, err = inspect(file, info.Size(), nil)
	if bad, ok := errors.AsType[*broken](err); ok {
		if readOnly != nil {
			return nil, nil, rec, nil, fmt.Errorf("the file is damaged (%w) and the directory cannot be written to: %w", bad, readOnly)
		}
		rec.Rebuilt, err = rebuild(cfg.Dir, file, info.Size())
		if err != nil {
			return nil, nil, rec, nil, fmt.Errorf("the file is damaged (%w), and no new one could be made of it: %w", bad, err)
		}
		rec.Damaged = append(rec.Damaged, Damage{Offset: bad.offset, Page: bad.page, Reason: bad.reason, File: rec.Rebuilt})
		if err := file.Close(); err != nil {
			return nil, nil, rec, nil, err
		}
		file, err = os.OpenFile(path, os.O_RDWR, 0) //nolint:gosec // the operator's path
		if err != nil {
			return nil, nil, rec, nil, err
		}
		if info, err = file.Stat(); err != nil {
			return nil, nil, rec, nil, err
		}
		img, err = inspect(file, info.Size(), nil)
	}
	if err != nil {
		return nil, nil, rec, nil, err
	}
	if readOnly == nil {
		rec.SetAside = setAside(cfg.Dir, file, img)
	}
	rec.add(img)
	if readOnly == nil && len(rec.Damaged) > 0 {
		rec.SetAside = errors.Join(rec.SetAside, logDamage(cfg.Dir, rec.Damaged))
	}
	if readOnly == nil && len(img.damages) == 0 && rec.Messages == 0 && info.Size() > growMin {
		// The file of an empty spill is made new, since bbolt never makes a file shorter.
		if err := build(cfg.Dir, positionsOf(img), noChunks); err == nil {
			for _, l := range img.lanes {
				l.bytes, l.chunk, l.head = 0, l.tail, l.tail
			}
		}
	}
	if readOnly == nil {
		// An earlier process may have made the file and ended before its name was on the
		// disk.
		if err := diskfile.SyncDir(cfg.Dir); err != nil {
			return nil, nil, rec, nil, err
		}
	}
	s, err = openBolt(path, readOnly != nil, fileLimit(cfg.MaxBytes))
	return s, img, rec, readOnly, err
}

// fileLimit is the maximum length of the file. The largest message and its neighbours are
// copied into consecutive pages.
func fileLimit(maxBytes int64) int64 { return 5*maxBytes/2 + growMax + 6*min(maxBytes, MaxMessage) }

func cannotWrite(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS)
}

func noChunks() (*newChunk, error) { return nil, nil } //nolint:nilnil // nil is the end

func positionsOf(m *image) []position {
	ps := make([]position, 0, len(m.lanes))
	for _, l := range m.lanes {
		ps = append(ps, l.position)
	}
	return ps
}

func (r *Recovery) add(m *image) {
	for _, l := range m.lanes {
		if l.count > 0 {
			r.Lanes++
		}
		r.Messages += l.count
		r.Bytes += l.bytes
		for _, s := range l.lost {
			r.Lost += s.last - s.first + 1
		}
	}
	r.Damaged = append(r.Damaged, m.damages...)
}

// build makes a new file and replaces the old one, if there is one. A crash leaves one of
// the two. bbolt does not sync directories.
func build(dir string, positions []position, next func() (*newChunk, error)) error {
	fresh := filepath.Join(dir, freshName)
	if err := guarded(func() error { return buildBolt(fresh, positions, next) }); err != nil {
		return errors.Join(err, ignoreMissing(os.Remove(fresh)))
	}
	if err := os.Rename(fresh, filepath.Join(dir, fileName)); err != nil {
		return err
	}
	return diskfile.SyncDir(dir)
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// rebuild makes a new file of the messages that it finds in a file with a damaged
// structure. It keeps the old file under the returned name.
func rebuild(dir string, r io.ReaderAt, size int64) (kept string, err error) {
	positions, chunks, err := salvage(r, size)
	if err != nil {
		return "", err
	}
	if err := diskfile.MakeDir(filepath.Join(dir, damagedDir)); err != nil {
		return "", err
	}
	for n := 1; ; n++ {
		kept = filepath.Join(damagedDir, fmt.Sprintf("spill-%d.db", n))
		err := os.Link(filepath.Join(dir, fileName), filepath.Join(dir, kept))
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrExist) {
			return "", err
		}
	}
	if err := diskfile.SyncDir(filepath.Join(dir, damagedDir)); err != nil {
		return "", err
	}
	i := 0
	err = build(dir, positions, func() (*newChunk, error) {
		if i == len(chunks) {
			return noChunks()
		}
		c := chunks[i]
		i++
		data := make([]byte, c.size)
		if _, err := r.ReadAt(data, c.off); err != nil {
			return nil, err
		}
		return &newChunk{name: c.name, seq: c.first, data: data}, nil
	})
	if err != nil {
		// The next try keeps the file under the next name, so this copy is not needed.
		return "", errors.Join(err, os.Remove(filepath.Join(dir, kept)))
	}
	return kept, nil
}

// setAside copies damaged parts to files of their own, once, and stores the names in the
// image.
func setAside(dir string, r io.ReaderAt, m *image) (err error) {
	for i := range m.damages {
		d, p := &m.damages[i], m.copies[i]
		if p.size == 0 {
			continue
		}
		name := filepath.Join(damagedDir, fmt.Sprintf("%s-%d-%d.chunk", plain(d.Lane), d.First, p.off))
		if err2 := copyOut(filepath.Join(dir, name), r, p); err2 != nil {
			err = errors.Join(err, err2)
			continue
		}
		d.File = name
	}
	return err
}

func copyOut(path string, r io.ReaderAt, p piece) error {
	data := make([]byte, p.size)
	if _, err := r.ReadAt(data, p.off); err != nil {
		return err
	}
	return keep(path, data)
}

// keep writes a file in the folder of set-aside copies, once.
func keep(path string, data []byte) error {
	if err := diskfile.MakeDir(filepath.Dir(path)); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the operator's path
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return diskfile.SyncDir(filepath.Dir(path))
}

// plain turns a lane's name into a file name.
func plain(lane string) string {
	s := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' {
			return r
		}
		return '_'
	}, lane)
	return strings.TrimLeft(s[:min(len(s), 64)], ".")
}

// logDamage appends to the log of damage.
func logDamage(dir string, ds []Damage) error {
	if err := diskfile.MakeDir(filepath.Join(dir, damagedDir)); err != nil {
		return err
	}
	path := filepath.Join(dir, damagedDir, damagedLog)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600) //nolint:gosec // the operator's path
	if err != nil {
		return err
	}
	for _, d := range ds {
		line, err := json.Marshal(d)
		if err == nil {
			_, err = f.Write(append(line, '\n'))
		}
		if err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return errors.Join(f.Sync(), f.Close())
}
