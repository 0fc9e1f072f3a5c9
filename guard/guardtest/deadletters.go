// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// DeadLetters is a [dlq.Writer] that keeps its records in memory, like a dead-letter queue
// of a broker. It encodes each record to the headers of [dlq.Stormguard] and decodes it
// again. It recognises twins by [dlq.Record.ID].
//
// All methods may be called from any goroutine.
type DeadLetters struct {
	queue string

	mu      sync.Mutex
	records []*dlq.Record
	ids     map[string]int // index in records, by ID
	fault   fault
	writes  int
	twins   int
}

type fault struct {
	err   error
	times int // how many more writes fail; 0: until the next call of Fail
	slow  time.Duration
	max   int
	lose  int
}

// DeadLetters returns the dead-letter queue of a queue: the same one each time.
func (b *Broker) DeadLetters(queue string) *DeadLetters {
	q := b.queue(queue)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.letters == nil {
		q.letters = NewDeadLetters(queue)
	}
	return q.letters
}

// NewDeadLetters returns a dead-letter queue without a broker. queue is a name for errors
// only.
func NewDeadLetters(queue string) *DeadLetters {
	return &DeadLetters{queue: queue, ids: make(map[string]int)}
}

// Records returns copies of all records, oldest first, without twins.
func (d *DeadLetters) Records() []dlq.Record {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]dlq.Record, len(d.records))
	for i, r := range d.records {
		out[i] = *r
	}
	return out
}

// Len returns the number of records, twins not counted.
func (d *DeadLetters) Len() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.records)
}

// Writes returns how often Write was called, and how many of the written records were twins
// of earlier ones.
func (d *DeadLetters) Writes() (writes, twins int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.writes, d.twins
}

// Fail makes Write fail with err and keep nothing, until Fail(nil).
func (d *DeadLetters) Fail(err error) { d.FailNext(0, err) }

// FailNext makes the next n writes fail with err; 0 means all writes until Fail(nil).
func (d *DeadLetters) FailNext(n int, err error) {
	d.set(func(f *fault) { f.err, f.times = err, n })
}

// Refuse makes Write return a [dlq.ErrRefused] until Fail(nil).
func (d *DeadLetters) Refuse() {
	d.Fail(fmt.Errorf("guardtest: dead letters of %s: %w", d.queue, dlq.ErrRefused))
}

// Slow makes each write take t, or until its context ends.
func (d *DeadLetters) Slow(t time.Duration) { d.set(func(f *fault) { f.slow = t }) }

// Limit makes Write return a [*dlq.TooLargeError] for a record of more than size bytes; 0
// means no limit.
func (d *DeadLetters) Limit(size int) { d.set(func(f *fault) { f.max = size }) }

// LoseConfirms makes the next n writes keep their record but return an error.
func (d *DeadLetters) LoseConfirms(n int) { d.set(func(f *fault) { f.lose = n }) }

func (d *DeadLetters) set(change func(*fault)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change(&d.fault)
}

// Write implements [dlq.Writer].
func (d *DeadLetters) Write(ctx context.Context, r *dlq.Record) error {
	d.mu.Lock()
	d.writes++
	slow := d.fault.slow
	d.mu.Unlock()
	if slow > 0 {
		late := time.NewTimer(slow)
		select {
		case <-late.C:
		case <-ctx.Done():
			late.Stop()
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	stored, err := roundTrip(r)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	f := &d.fault
	switch {
	case f.err != nil:
		err := f.err
		if f.times--; f.times == 0 {
			f.err = nil
		}
		f.times = max(f.times, 0)
		return err
	case f.max > 0 && r.Size() > f.max:
		return &dlq.TooLargeError{Size: r.Size(), Max: f.max}
	}
	id := r.ID()
	if _, twin := d.ids[id]; twin && id != "" {
		d.twins++
	} else {
		d.ids[id] = len(d.records)
		d.records = append(d.records, stored)
	}
	if f.lose > 0 {
		f.lose--
		return fmt.Errorf("guardtest: dead letters of %s: confirmation lost", d.queue)
	}
	return nil
}

// roundTrip returns the record as a reader of the dead letter sees it.
func roundTrip(r *dlq.Record) (*dlq.Record, error) {
	headers := dlq.Encode(r, dlq.Stormguard)
	for _, h := range headers {
		if err := h.Validate(); err != nil {
			return nil, fmt.Errorf("guardtest: dead letters: %w", err)
		}
	}
	back, _, err := dlq.Decode(headers)
	if err != nil {
		return nil, fmt.Errorf("guardtest: dead letters: a record that cannot be read back: %w", err)
	}
	back.Key, back.Body, back.Properties = slices.Clone(r.Key), slices.Clone(r.Body), slices.Clone(r.Properties)
	back.Timestamp = r.Timestamp
	return &back, nil
}
