// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package registers

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
)

// Log folds a log of records, which everybody reads in one order, into the newest
// document. The first record for a number wins, if the number is one above the newest
// when the record is read. Every other record changes nothing.
//
// A record that arrives late, or twice, so loses once its number is taken. Records are
// told apart by an id, since two writers may write the same document.
//
// It is safe for concurrent use. Readers may overlap: an offset counts once.
type Log struct {
	mu       sync.Mutex
	next     int64 // the first offset that was not folded
	newest   uint64
	document []byte
	own      map[string]outcome // writes under way, by id
}

type outcome struct {
	read, won bool
	newest    uint64 // after the record
}

// Next is the offset from which to read on.
func (l *Log) Next() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

// Newest is the newest document so far, and a copy.
func (l *Log) Newest() (uint64, []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.newest, bytes.Clone(l.document)
}

// Skip says that nothing below next is a record.
func (l *Log) Skip(next int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next = max(l.next, next)
}

// Fold reads one record. Gaps between offsets are markers of the broker's own. A record
// that is not ours is passed over, by everybody. One of another version is an error, and
// the offset does not count: to pass it over would lead to another document than the
// other version's.
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
		return nil // not ours
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

// Expect announces a write of one's own, before it is sent. Forget ends it.
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

// Outcome tells what became of an expected write: whether it was read, whether it
// won, and the newest number once it was read.
func (l *Log) Outcome(id string) (read, won bool, newest uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := l.own[id]
	return o.read, o.won, o.newest
}
