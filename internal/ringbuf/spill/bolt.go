// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
)

const (
	positionBucket = "positions"
	chunkBucket    = "chunks"

	// pageSize is larger than what bbolt takes by itself: a sync of 16 KiB takes as long
	// as one of 4, and a quarter of the pages are a quarter of the system calls.
	pageSize = 16 << 10

	// chunkTarget is when a chunk is full. Four fit into a page with room to spare, so that
	// only messages that are larger by themselves make bbolt copy pages in a row.
	chunkTarget = 3 << 10

	// growMin and growMax bound by how much the file grows. What is grown is written with
	// zeros: the sync of a page whose place exists already takes half as long, and there
	// can be no surprise about room later.
	growMin = 256 << 10
	growMax = 16 << 20

	// reservePages are kept free for transactions without chunks.
	reservePages = 64

	// lanePages is the most that the position of a lane, and the end of its drained chunks,
	// make bbolt write: two ways from the root to a leaf, and the neighbours they merge with.
	lanePages = 12
)

// lanesAtOnce is how many lanes go into a transaction that must do with the reserve, and
// lanesMost into any.
const (
	lanesAtOnce = (reservePages - 8) / lanePages
	lanesMost   = 1024
)

// errNoRoom is that of a store whose disk, or whose limit, has no room.
var errNoRoom = errors.New("no room")

type bolt struct {
	db    *bbolt.DB
	file  *os.File
	page  int64
	limit int64 // that the file may grow to

	// gate makes sure that no read is open when a write begins, so that bbolt takes back
	// all pages that were freed before.
	gate sync.RWMutex

	// The rest is the writer's.
	ready    int64 // bytes of the file that are allocated, from its beginning: used or more
	used     int64 // bytes that bbolt has used, likewise
	free     int64 // pages that it can use again
	panicked bool  // bbolt has, in a transaction
	unsure   error // why used is not known
}

func boltOptions(page int, readOnly bool, file **os.File) *bbolt.Options {
	return &bbolt.Options{
		Timeout:        time.Nanosecond, // do not wait: the directory is locked
		NoFreelistSync: true,            // it would grow with what is freed, when there is no room
		FreelistType:   bbolt.FreelistMapType,
		PageSize:       page,
		ReadOnly:       readOnly,
		OpenFile: func(name string, flag int, perm fs.FileMode) (*os.File, error) {
			f, err := os.OpenFile(name, flag, perm) //nolint:gosec // the operator's path
			if file != nil {
				*file = f
			}
			return f, err
		},
	}
}

// openBolt opens a file that was inspected.
func openBolt(path string, readOnly bool, limit int64) (_ *bolt, err error) {
	b := &bolt{limit: limit}
	err = guarded(func() error {
		var err error
		b.db, err = bbolt.Open(path, 0o600, boltOptions(pageSize, readOnly, &b.file))
		return err
	})
	if err != nil {
		return nil, err
	}
	b.page = int64(b.db.Info().PageSize)
	ready, err := allocated(b.file)
	if err == nil {
		b.ready = ready / b.page * b.page
		err = b.measure()
	}
	if err != nil {
		return nil, errors.Join(err, b.close())
	}
	b.free = int64(b.db.Stats().FreePageN)
	return b, nil
}

// measure learns how much bbolt has used. It takes pages within its Commit, also beyond what
// is ready; and a hole in what it has used is no free place.
func (b *bolt) measure() error {
	return guarded(func() error {
		return b.db.View(func(tx *bbolt.Tx) error {
			b.used = tx.Size()
			b.ready = max(b.ready, b.used)
			return nil
		})
	})
}

// guarded turns a fault of memory that is mapped to the file, as when the disk cannot
// read a page, and a panic of bbolt's, into an error.
func guarded(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("bbolt panicked: %v", p)
		}
	}()
	return f()
}

func (b *bolt) size() int64 {
	info, err := b.file.Stat()
	if err != nil {
		return 0
	}
	return info.Size()
}

func (b *bolt) lanes() int {
	pages := b.free + (b.ready-b.used)/b.page
	return int(min(max(pages-8, reservePages-8)/lanePages, lanesMost))
}

// close frees the file. A transaction that panicked is never over, and bbolt's Close would
// wait for it; to end it, bbolt would read all pages, and a page may be what it fell over.
func (b *bolt) close() error {
	if b.panicked {
		return b.file.Close()
	}
	return b.db.Close()
}

func (b *bolt) read(dst []stored, lane string, seq uint64, limit int) ([]stored, error) {
	b.gate.RLock()
	defer b.gate.RUnlock()
	err := guarded(func() error {
		return b.db.View(func(tx *bbolt.Tx) error {
			c := tx.Bucket([]byte(chunkBucket)).Cursor()
			for k, v := c.Seek(newKey(lane, seq)); k != nil; k, v = c.Next() {
				name, first, ok := parseKey(k)
				if !ok || string(name) != lane || limit <= 0 && len(dst) > 0 {
					return nil
				}
				dst = append(dst, stored{first, bytes.Clone(v)})
				limit -= len(v)
			}
			return nil
		})
	})
	return dst, err
}

func (b *bolt) write(t *transaction) error {
	if b.unsure != nil {
		return b.unsure
	}
	if len(t.chunks) > 0 {
		if err := b.makeRoom(t); err != nil {
			return err
		}
	}
	b.panicked = true // until it is seen to have returned
	err := guarded(func() error {
		err := b.transact(t)
		b.panicked = false
		return err
	})
	if err == nil {
		b.unsure = b.measure() // the next write has it: this one is on the disk
	}
	s := b.db.Stats()
	b.free = int64(s.FreePageN + s.PendingPageN)
	if err == nil {
		return nil
	}
	// A write that found no room was not followed by a sync, and bbolt has undone it. After
	// a sync that failed nobody knows what the disk has.
	var at *fs.PathError
	if errors.As(err, &at) && at.Op == "write" && errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%w: %w", errNoRoom, err)
	}
	return err
}

func (b *bolt) transact(t *transaction) error {
	tx, err := b.begin()
	if err != nil {
		return err
	}
	if err := b.apply(tx, t); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

func (b *bolt) begin() (*bbolt.Tx, error) {
	b.gate.Lock()
	defer b.gate.Unlock()
	return b.db.Begin(true)
}

func (b *bolt) apply(tx *bbolt.Tx, t *transaction) error {
	positions, chunks := tx.Bucket([]byte(positionBucket)), tx.Bucket([]byte(chunkBucket))
	chunks.FillPercent = 0.95 // what is added mostly goes to the end of a lane
	for _, c := range t.chunks {
		if err := chunks.Put(newKey(c.name, c.seq), c.data); err != nil {
			return err
		}
	}
	t.freed = make([]int64, len(t.positions))
	for i, p := range t.positions {
		freed, err := drop(chunks, p)
		if err != nil {
			return err
		}
		t.freed[i] = freed
		if err := positions.Put([]byte(p.name), newPosition(p)); err != nil {
			return err
		}
	}
	for _, name := range t.forget {
		if err := positions.Delete([]byte(name)); err != nil {
			return err
		}
	}
	return nil
}

// drop deletes the chunks of a lane that are before its head: those that are followed by
// one that begins at it or before, and all of an empty lane.
func drop(chunks *bbolt.Bucket, p position) (freed int64, err error) {
	var keys [][]byte
	var last []byte
	var cost int64
	c := chunks.Cursor()
	for k, v := c.Seek(newKey(p.name, 0)); ; k, v = c.Next() {
		name, seq, ok := parseKey(k)
		ours := ok && string(name) == p.name
		if last != nil && (ours && seq <= p.head || !ours && p.head == p.tail) {
			keys = append(keys, last)
			freed += cost
		}
		if !ours || seq > p.head {
			break
		}
		last, cost = bytes.Clone(k), chunkCost(p.name, len(v))
	}
	for _, k := range keys {
		if err := chunks.Delete(k); err != nil {
			return 0, err
		}
	}
	return freed, nil
}

// makeRoom sees to it that a transaction finds allocated pages, with the reserve left.
func (b *bolt) makeRoom(t *transaction) error {
	need := int64(reservePages + 8 + lanePages*len(t.positions))
	small, row := int64(0), false
	for _, c := range t.chunks {
		if size := int64(len(c.data) + keySize(c.name) + boltElement); size <= b.page/4 {
			small += size
		} else {
			need += 5*size/b.page + 2 // bbolt copies up to four neighbours of one leaf
			row = true                // into pages that must lie in a row
		}
	}
	need += 2*small/b.page + 2
	tail := (b.ready - b.used) / b.page
	if !row {
		tail += b.free
	}
	if tail < need {
		return b.extend((need - tail) * b.page)
	}
	return nil
}

// extend makes the file longer by at least so many bytes. What bbolt has used is never
// written: it ends before ready does.
func (b *bolt) extend(need int64) error {
	to := b.ready + max(need, min(max(b.ready/2, growMin), growMax))
	to = min(to, max(b.limit, b.ready)) / b.page * b.page
	if to < b.ready+need {
		return fmt.Errorf("%w: the file has %d bytes, and may have %d", errNoRoom, b.ready, b.limit)
	}
	least := b.ready + need
	zeros := make([]byte, 1<<20)
	for at := b.ready; at < to; {
		n, err := b.file.WriteAt(zeros[:min(int64(len(zeros)), to-at)], at)
		at += int64(n)
		b.ready = at / b.page * b.page
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
			if b.ready >= least {
				break // less than was asked for, and enough
			}
			return fmt.Errorf("%w: %w", errNoRoom, err)
		}
		if err != nil {
			return err
		}
	}
	return b.file.Sync()
}

// buildBolt makes a new file with what is given, and syncs it. next returns nil at the end.
func buildBolt(path string, positions []position, next func() (*newChunk, error)) (err error) {
	var file *os.File
	db, err := bbolt.Open(path, 0o600, boltOptions(pageSize, false, &file))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	err = db.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucket([]byte(positionBucket))
		if err != nil {
			return err
		}
		for _, p := range positions {
			if err := b.Put([]byte(p.name), newPosition(p)); err != nil {
				return err
			}
		}
		_, err = tx.CreateBucket([]byte(chunkBucket))
		return err
	})
	for more := true; err == nil && more; {
		err = db.Update(func(tx *bbolt.Tx) error {
			b := tx.Bucket([]byte(chunkBucket))
			b.FillPercent = 0.95
			for size := 0; size < growMax; {
				c, err := next()
				if more = c != nil && err == nil; !more {
					return err
				}
				if err := b.Put(newKey(c.name, c.seq), c.data); err != nil {
					return err
				}
				size += len(c.data)
			}
			return nil
		})
	}
	if err != nil {
		return err
	}
	return file.Sync()
}
