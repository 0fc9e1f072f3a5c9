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

	// pageSize is larger than bbolt's default. Larger pages need fewer system calls for a
	// large batch and for drains, and more bytes for a small batch.
	pageSize = 16 << 10

	// growMin and growMax limit how much the file grows at once. New space is filled with
	// zeros: the sync of a page that already has its place takes half as long, and later
	// there are no surprises about space.
	growMin = 256 << 10
	growMax = 16 << 20

	// reservePages is the number of pages kept free for transactions without chunks.
	reservePages = 64

	// lanePages is the most pages that bbolt writes for a lane's position and the end of
	// its drained chunks: two paths from the root to a leaf, and the neighbours that they
	// merge with.
	lanePages = 12
)

// lanesAtOnce is the number of lanes in a transaction that must use the reserve only.
// lanesMost is the maximum for any transaction.
const (
	lanesAtOnce = (reservePages - 8) / lanePages
	lanesMost   = 1024
)

// errNoRoom means that the disk, or the store's limit, has no space.
var errNoRoom = errors.New("no room")

// fillPercent is how full bbolt makes a page: new chunks mostly go to the end of a lane.
const fillPercent = 95

// chunkRoom is the number of bytes at which a chunk of lane name is full, with the messages'
// entries in its table. Four chunks fill a page, and bbolt divides only nodes of more than
// four. So only larger messages need consecutive pages, also when it merges what drains leave.
func chunkRoom(name string) int {
	return (pageSize*fillPercent/100-boltHeader)/4 - boltElement - keySize(name) - chunkOverhead(name)
}

type bolt struct {
	db    *bbolt.DB
	file  *os.File
	page  int64
	limit int64 // maximum length of the file

	// gate keeps reads away while a write begins, so that bbolt can reuse all pages that
	// were freed before.
	gate sync.RWMutex

	// The fields below belong to the writer.
	ready    int64 // allocated bytes from the beginning of the file; at least used
	used     int64 // bytes from the beginning of the file that bbolt has used
	free     int64 // number of pages that bbolt can reuse
	panicked bool  // bbolt panicked in a transaction
	unsure   error // why used is not known, or nil
}

func boltOptions(page int, readOnly bool, file **os.File) *bbolt.Options {
	return &bbolt.Options{
		Timeout:        time.Nanosecond, // no wait is needed: the directory is locked
		NoFreelistSync: true,            // a stored freelist would grow with freed pages when there is no space
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

// openBolt opens an inspected file.
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

// measure reads how much of the file bbolt has used. In a Commit bbolt may use pages beyond
// ready, and a hole in the used part is no free space.
func (b *bolt) measure() error {
	return guarded(func() error {
		return b.db.View(func(tx *bbolt.Tx) error {
			b.used = tx.Size()
			b.ready = max(b.ready, b.used)
			return nil
		})
	})
}

// guarded turns faults and panics into errors: a fault of mapped memory, for example if the
// disk cannot read a page, and a panic of bbolt.
func guarded(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("bbolt panicked: %v", p)
		}
	}()
	return f()
}

func (b *bolt) lanes() int {
	pages := b.free + (b.ready-b.used)/b.page
	return int(min(max(pages-8, reservePages-8)/lanePages, lanesMost))
}

// close closes the file. After a panic the transaction never ends, and bbolt's Close would
// wait for it. Ending it would make bbolt read all pages, and one of them may have caused
// the panic.
func (b *bolt) close() error {
	if b.panicked {
		return b.file.Close()
	}
	return b.db.Close()
}

// sharedBytes is how many bytes of chunks share a buffer, which lives as long as any of them.
const sharedBytes = 8 << 10

func (b *bolt) read(dst []stored, lane string, seq uint64, limit int) ([]stored, error) {
	b.gate.RLock()
	defer b.gate.RUnlock()
	var room []byte // the rest of a buffer that several chunks share
	err := guarded(func() error {
		return b.db.View(func(tx *bbolt.Tx) error {
			c := tx.Bucket([]byte(chunkBucket)).Cursor()
			for k, v := c.Seek(newKey(lane, seq)); k != nil; k, v = c.Next() {
				name, first, ok := parseKey(k)
				if !ok || string(name) != lane || limit <= 0 && len(dst) > 0 {
					return nil
				}
				if len(v) > len(room) {
					size := len(v) // the first may be the only one
					if len(dst) > 0 {
						size = max(size, sharedBytes)
					}
					room = make([]byte, size)
				}
				n := copy(room, v)
				dst, room = append(dst, stored{first, room[:n:n]}), room[n:]
				limit -= n
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
	b.panicked = true // until transact has returned
	err := guarded(func() error {
		err := b.transact(t)
		b.panicked = false
		return err
	})
	if err == nil {
		b.unsure = b.measure() // the next write returns this error: this write is on the disk
	}
	s := b.db.Stats()
	b.free = int64(s.FreePageN + s.PendingPageN)
	if err == nil {
		return nil
	}
	// If a write found no space, no sync followed, and bbolt has undone it. After a failed
	// sync nobody knows what is on the disk.
	var at *fs.PathError
	if errors.As(err, &at) && at.Op == "write" && (errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)) {
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
	chunks.FillPercent = fillPercent / 100.0
	var key []byte // Put copies it
	for _, c := range t.chunks {
		key = appendKey(key[:0], c.name, c.seq)
		if err := chunks.Put(key, c.data); err != nil {
			return err
		}
	}
	t.freed = make([]int64, len(t.positions))
	for i, p := range t.positions {
		if p.moved {
			freed, err := drop(chunks, p)
			if err != nil {
				return err
			}
			t.freed[i] = freed
		}
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

// drop deletes the chunks of a lane before its head: chunks whose next chunk begins at or
// before the head, and all chunks of an empty lane.
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

// makeRoom extends the file, if needed, so that a transaction finds allocated pages and the
// reserve stays free.
func (b *bolt) makeRoom(t *transaction) error {
	need := int64(reservePages + 8 + lanePages*len(t.positions))
	small, row := int64(0), false
	for _, c := range t.chunks {
		if size := int64(len(c.data) + keySize(c.name) + boltElement); size <= (b.page-boltHeader)/4 {
			small += size
		} else {
			need += 5*size/b.page + 2 // bbolt copies up to four neighbours of one leaf
			row = true                // the copied pages must lie in a row
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

// extend makes the file longer by at least need bytes. It writes from ready on, and so never
// to the part that bbolt has used, which ends at ready or before.
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
				break // less than planned, but enough
			}
			return fmt.Errorf("%w: %w", errNoRoom, err)
		}
		if err != nil {
			return err
		}
	}
	return b.file.Sync()
}

// buildBolt makes a new file with the given positions and chunks, and syncs it. next
// returns nil at the end.
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
			b.FillPercent = fillPercent / 100.0
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
