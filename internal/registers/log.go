// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package registers

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
)

// Log folds a log of records, which all readers read in the same order, into the newest document.
// The first record for a number wins, if the number is one above the newest when the record is
// read. All other records change nothing.
//
// So a record that arrives late or twice loses if its number is taken by then. An id tells records
// apart, since two writers may write the same document.
//
// It is safe for concurrent use. Readers may overlap: each offset counts once.
type Log struct {
	mu       sync.Mutex
	next     int64 // the first offset that is not folded yet
	newest   uint64
	document []byte
	own      map[string]outcome // this process's unfinished writes, by id
}

type outcome struct {
	read, won bool
	newest    uint64 // the newest number after the record
}

// Next is the offset to read next.
func (l *Log) Next() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

// Newest returns the newest number so far, and a copy of its document.
func (l *Log) Newest() (uint64, []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.newest, bytes.Clone(l.document)
}

// Skip says that no offset below next has a record.
func (l *Log) Skip(next int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next = max(l.next, next)
}

// Fold reads one record. Gaps between offsets are the broker's own markers. All readers pass over a
// record that is not a register's. A record of another version is an error, and its offset does not
// count: a reader that passed over it would get another document than a reader of that version.
func (l *Log) Fold(offset int64, record []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if offset < l.next {
		return nil
	}
	number, id, document, err := Decode(record)
	if errors.Is(err, ErrVersion) {
		return fmt.Errorf("offset %d: %w", offset, err)
	}
	l.next = offset + 1
	if err != nil {
		return nil // not a record of a register
	}
	won := number != 0 && number == l.newest+1
	if won {
		l.newest, l.document = number, document
	}
	if o, ok := l.own[id]; ok && !o.read {
		l.own[id] = outcome{read: true, won: won, newest: l.newest}
	}
	return nil
}

// Expect announces a write of this process before it is sent. Forget ends it.
func (l *Log) Expect(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.own == nil {
		l.own = make(map[string]outcome)
	}
	l.own[id] = outcome{}
}

// Forget ends an Expect.
func (l *Log) Forget(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.own, id)
}

// Outcome is the outcome of an expected write: whether it was read, whether it won, and the newest
// number once it was read.
func (l *Log) Outcome(id string) (read, won bool, newest uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := l.own[id]
	return o.read, o.won, o.newest
}
