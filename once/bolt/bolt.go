// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package bolt keeps the marks of package once in a file on this host.
//
// Use it if deliveries come back to the same host: a consumer that has its own disk and
// restarts. If a rebalance can move a message to another host, use a store that the hosts
// share: once/postgres, or NewOnce of adapters/nats.
package bolt

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"

	"github.com/stormguard-mq/stormguard/internal/diskfile"
	"github.com/stormguard-mq/stormguard/internal/mark"
	"github.com/stormguard-mq/stormguard/once"
)

// Config limits a [Store]. The zero value is valid.
type Config struct {
	// Age is the minimum time for which a mark is kept; default 7 days. Within 1 s and 10
	// years. It must be longer than the broker may take to deliver a message again, and
	// longer than an entity takes from one step to the next.
	Age time.Duration

	// Count is the maximum number of kept marks; default 1,000,000, which take about 150
	// MB. Within 1 and 1,000,000,000. Above it the oldest marks are forgotten, even if they
	// are younger than Age. A mark whose effect is in doubt is not counted, and never
	// forgotten.
	Count int
}

// Defaults and bounds of Config.
const (
	defaultAge   = 7 * 24 * time.Hour
	minAge       = time.Second
	maxAge       = 10 * 365 * 24 * time.Hour
	defaultCount = 1_000_000
	maxCount     = 1_000_000_000
)

// Validate reports every field out of its range, all at once.
func (c Config) Validate() error {
	var errs []error
	if c.Age != 0 && (c.Age < minAge || c.Age > maxAge) {
		errs = append(errs, fmt.Errorf("bolt: Config.Age: %s is not within %s and %s", c.Age, minAge, maxAge))
	}
	if c.Count < 0 || c.Count > maxCount {
		errs = append(errs, fmt.Errorf("bolt: Config.Count: %d is not within 1 and %d", c.Count, maxCount))
	}
	return errors.Join(errs...)
}

// Errors to branch on.
var (
	// ErrLocked means that another process has the file open.
	ErrLocked = errors.New("bolt: another process has the file")

	// ErrBroken means that the file is damaged, or that a write failed and nobody knows
	// which part is on the disk. No effect runs any more. Restart the process: it reads
	// what is on the disk. A full disk is no ErrBroken: the store continues when there is
	// room again.
	ErrBroken = errors.New("bolt: the file is broken")

	// ErrClosed means that the store was closed.
	ErrClosed = errors.New("bolt: closed")
)

// The buckets. marks maps a key to its record. order has the time and key of each mark that
// ages, without a value.
var (
	marks = []byte("marks")
	order = []byte("order")
)

// Store is a [once.Store] in a file. Only one process can have the file open. Marks that
// are written at the same time share one sync of the disk (group commit). The store has no
// goroutine of its own.
type Store struct {
	db     *bbolt.DB
	age    time.Duration
	max    int
	opened time.Time

	// Lock order: turn, then mu. Neither is held while an effect runs. mu is not held
	// during I/O.
	turn  chan struct{} // held during a commit
	count int           // number of marks in the bucket order; guarded by turn
	last  int64         // the newest time in the bucket order; guarded by turn

	undoing sync.WaitGroup // goroutines of the method later

	mu     sync.Mutex
	closed bool
	held   map[string]chan struct{} // claimed keys; a channel is closed when its claim ends
	queue  []*write                 // the writes of the next commit
	broken error
}

var _ once.Store = (*Store)(nil)

// Open opens the file, or creates it. It reads all marks once, which takes about 0.2 s per
// million.
func Open(path string, cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Store{age: cfg.Age, max: cfg.Count, opened: time.Now(), turn: make(chan struct{}, 1), held: make(map[string]chan struct{})}
	if s.age == 0 {
		s.age = defaultAge
	}
	if s.max == 0 {
		s.max = defaultCount
	}
	var db *bbolt.DB
	before, err := os.Stat(path)
	made := errors.Is(err, fs.ErrNotExist) || err == nil && before.Size() == 0
	err = guarded(func() (err error) {
		db, err = bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockWait, FreelistType: bbolt.FreelistMapType})
		return err
	})
	if errors.Is(err, bbolterrors.ErrTimeout) {
		return nil, fmt.Errorf("%w: %s", ErrLocked, path)
	}
	if made && full(err) { // no later Open could read a half-made file
		err = errors.Join(err, os.Remove(path))
	}
	if err != nil {
		return nil, fmt.Errorf("bolt: %s: %w", path, err)
	}
	s.db = db
	if err := errors.Join(s.prepare(), diskfile.SyncDir(filepath.Dir(path))); err != nil {
		return nil, errors.Join(fmt.Errorf("bolt: %s: %w", path, err), db.Close())
	}
	return s, nil
}

// full reports whether err means that the disk is full.
func full(err error) bool { return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) }

// lockWait is how long Open waits for another process to close the file.
const lockWait = 2 * time.Second

func (s *Store) prepare() error {
	return s.update(func(tx *bbolt.Tx) error {
		if _, err := tx.CreateBucketIfNotExists(marks); err != nil {
			return err
		}
		b, err := tx.CreateBucketIfNotExists(order)
		if err != nil {
			return err
		}
		s.count = b.Stats().KeyN
		if newest, _ := b.Cursor().Last(); newest != nil {
			s.last = orderTime(newest)
		}
		return nil
	})
}

// update runs f in one read-write transaction and commits it.
func (s *Store) update(f func(*bbolt.Tx) error) error {
	return guarded(func() error { return s.db.Update(f) })
}

func (s *Store) view(f func(*bbolt.Tx) error) error {
	err := guarded(func() error { return s.db.View(f) })
	if errors.Is(err, bbolterrors.ErrDatabaseNotOpen) {
		return ErrClosed
	}
	return err
}

// guarded turns a panic into an error: bbolt panics if a page of the file makes no sense,
// and the processor faults if the file became shorter.
func guarded(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %v", ErrBroken, p)
		}
	}()
	return f()
}

// Close closes the file. Open claims that were recorded are then in doubt.
func (s *Store) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.undoing.Wait()
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	return s.db.Close()
}

// A write is one caller's part of a commit.
type write struct {
	puts []put
	done chan struct{}
	err  error
}

type put struct {
	key    string
	record mark.Record // the commit sets At
	remove bool
}

// write returns when puts are on the disk. If ctx ends first, the write may still happen.
func (s *Store) write(ctx context.Context, puts ...put) error {
	return s.await(ctx, s.enqueue(puts...))
}

func (s *Store) enqueue(puts ...put) *write {
	w := &write{puts: puts, done: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = append(s.queue, w)
	return w
}

// withdraw removes a write from the queue, and returns false if a commit already has it.
func (s *Store) withdraw(w *write) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.queue, w)
	if i >= 0 {
		s.queue = slices.Delete(s.queue, i, i+1)
	}
	return i >= 0
}

func (s *Store) await(ctx context.Context, w *write) error {
	select {
	case s.turn <- struct{}{}:
	case <-w.done: // another caller has committed it
		return w.err
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.turn }()
	s.commit()
	return w.err
}

// commit writes the queue in one transaction. The caller holds turn.
func (s *Store) commit() {
	s.mu.Lock()
	batch, err := s.queue, s.broken
	s.queue = nil
	s.mu.Unlock()
	if len(batch) == 0 { // an earlier commit had this caller's write
		return
	}
	if err == nil {
		err = s.store(batch)
	}
	for _, w := range batch {
		w.err = err
		close(w.done)
	}
}

// store writes a batch in one transaction. The caller holds turn.
func (s *Store) store(batch []*write) error {
	count, last := s.count, s.last
	err := s.update(func(tx *bbolt.Tx) error {
		b := &books{marks: tx.Bucket(marks), order: tx.Bucket(order), count: count}
		now := s.now()
		for _, w := range batch {
			last = max(now, last+1) // so new marks stay the newest if the clock was set back
			for _, p := range w.puts {
				if err := b.apply(p, last); err != nil {
					return err
				}
			}
		}
		if err := b.forget(now-int64(s.age), s.max, 2*len(batch)+spare); err != nil {
			return err
		}
		count = b.count
		return nil
	})
	switch {
	case err == nil:
		s.count, s.last = count, last
		return nil
	case errors.Is(err, bbolterrors.ErrDatabaseNotOpen):
		return ErrClosed
	case full(err), errors.Is(err, bbolterrors.ErrMaxSizeReached):
		return fmt.Errorf("bolt: %w", err) // the failed page is not referenced: nothing has changed
	}
	// A failed sync may have lost pages that a later sync does not write again.
	err = fmt.Errorf("%w: %w", ErrBroken, err)
	s.mu.Lock()
	s.broken = err
	s.mu.Unlock()
	return err
}

// now returns the wall time of the start plus the monotonic time since. So no mark is
// forgotten because somebody sets the clock.
func (s *Store) now() int64 { return s.opened.Add(time.Since(s.opened)).UnixNano() }

// spare is how many marks a commit may forget, in addition to twice its writes, when many
// are too old.
const spare = 64

// books are the buckets of one transaction.
type books struct {
	marks, order *bbolt.Bucket
	count        int // number of marks in order
}

func (b *books) apply(p put, at int64) error {
	key := []byte(p.key)
	if old := b.marks.Get(key); old != nil {
		r, err := mark.Decode(p.key, old)
		if err == nil && r.State == mark.Done {
			if err := b.order.Delete(orderKey(r.At, p.key)); err != nil {
				return err
			}
			b.count--
		}
	}
	if p.remove {
		return b.marks.Delete(key)
	}
	p.record.At = at
	if p.record.State == mark.Done {
		if err := b.order.Put(orderKey(at, p.key), nil); err != nil {
			return err
		}
		b.count++
	}
	return b.marks.Put(key, mark.Encode(p.key, p.record))
}

// forget removes marks older than before, and the oldest marks above the number most. It stops
// after about some marks, but removes marks of the same time together.
func (b *books) forget(before int64, most, some int) error {
	c := b.order.Cursor()
	var at int64 = math.MinInt64
	for k, _ := c.First(); k != nil; k, _ = c.First() {
		t := orderTime(k)
		if t != at && (some <= 0 || t >= before && b.count <= most) {
			break
		}
		at = t
		r, err := mark.Decode(string(k[8:]), b.marks.Get(k[8:]))
		if err == nil && r.At == t { // a damaged mark stays for a person
			if err := b.marks.Delete(k[8:]); err != nil {
				return err
			}
		}
		if err := c.Delete(); err != nil {
			return err
		}
		b.count--
		some--
	}
	return nil
}

// orderKey returns a key that sorts by time. Times are after 1970.
func orderKey(at int64, key string) []byte {
	return append(binary.BigEndian.AppendUint64(make([]byte, 0, 8+len(key)), uint64(at)), key...)
}

func orderTime(k []byte) int64 { return int64(binary.BigEndian.Uint64(k)) }

// read returns the record of a key; found is false if there is none.
func (s *Store) read(key string) (r mark.Record, found bool, damaged, err error) {
	err = s.view(func(tx *bbolt.Tx) error {
		b := tx.Bucket(marks).Get([]byte(key))
		if found = b != nil; found {
			r, damaged = mark.Decode(key, b)
		}
		return nil
	})
	return r, found, damaged, err
}

// hold takes a key within this process, and waits while another claim has it.
func (s *Store) hold(ctx context.Context, key string) error {
	start := time.Now()
	for {
		s.mu.Lock()
		if s.broken != nil || s.closed {
			defer s.mu.Unlock()
			return cmp.Or(s.broken, ErrClosed)
		}
		ended, taken := s.held[key]
		if !taken {
			s.held[key] = make(chan struct{})
		}
		s.mu.Unlock()
		if !taken {
			return nil
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return &once.UnderwayError{Key: key, Wait: time.Since(start), Err: ctx.Err()}
		}
	}
}

func (s *Store) drop(key string) {
	s.mu.Lock()
	close(s.held[key])
	delete(s.held, key)
	s.mu.Unlock()
}

// Claim implements [once.Store].
func (s *Store) Claim(ctx context.Context, key string, ask once.Ask) (_ once.Claim, _ once.Found, err error) {
	if err := s.hold(ctx, key); err != nil {
		return nil, once.Found{}, err
	}
	c := &claim{s: s, ctx: ctx, key: key}
	later := false // the goroutine of later drops the key
	defer func() {
		if (err != nil || c == nil) && !later {
			s.drop(key)
		}
	}()
	r, found, damaged, err := s.read(key)
	switch {
	case err != nil:
		return nil, once.Found{}, err
	case damaged != nil && !ask.Over:
		return nil, once.Found{}, fmt.Errorf("%w: its mark is %w", once.ErrInDoubt, damaged)
	case damaged != nil:
		c.recorded = true
		return c, once.Found{Doubt: true, Damaged: damaged}, nil
	case found && r.State != mark.Done:
		c.recorded = true
		if r.State.Over() {
			c.before = &r
		}
		return c, once.Found{Doubt: true, Done: r.State.Over(), Value: r.Value, Note: r.Note}, nil
	case found && !ask.Over:
		c = nil
		return nil, once.Found{Done: true, Value: r.Value}, nil
	case found:
		c.before = &r
	}
	if ask.Record {
		begun := mark.Record{State: mark.Begun, Note: ask.Note}
		if c.before != nil {
			begun.State, begun.Value = mark.BegunOver, r.Value
		}
		w := s.enqueue(put{key: key, record: begun})
		if err := s.await(ctx, w); err != nil {
			if ctx.Err() != nil && !s.withdraw(w) {
				later = s.later(w, func() { // no effect begins, so the key must not stay in doubt
					c.recorded = w.err == nil
					_ = c.Release(context.Background()) // after a failure the key is in doubt
				})
			}
			return nil, once.Found{}, err
		}
		c.recorded = true
	}
	return c, once.Found{Done: found, Value: r.Value}, nil
}

// later calls f after the end of the commit that has w. The goroutine ends with f, and
// Close waits for it. later returns false after Close, when nobody may claim a key any
// more.
func (s *Store) later(w *write, f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.undoing.Go(func() {
		<-w.done
		f()
	})
	return true
}

// claim is a key that this process holds.
type claim struct {
	s        *Store
	ctx      context.Context //nolint:containedctx // a claim is asked for the context that it was made with
	key      string
	before   *mark.Record // the mark that the key already has; nil if none
	recorded bool         // the file says that the effect began
}

func (c *claim) Context() context.Context { return c.ctx }

func (c *claim) Finish(ctx context.Context, value []byte, also ...once.Entry) error {
	puts := make([]put, 0, 1+len(also))
	for _, e := range also {
		puts = append(puts, put{key: e.Key, record: mark.Record{State: mark.Done, Value: e.Value}})
	}
	if err := c.s.write(ctx, append(puts, put{key: c.key, record: mark.Record{State: mark.Done, Value: value}})...); err != nil {
		return err
	}
	c.s.drop(c.key)
	return nil
}

// Release removes the record of the beginning from the disk, if there is one. After a
// failure the key is in doubt. The key stays held while a commit may still remove the
// record.
func (c *claim) Release(ctx context.Context) error {
	if !c.recorded {
		c.s.drop(c.key)
		return nil
	}
	end := put{key: c.key, remove: true}
	if c.before != nil {
		end = put{key: c.key, record: mark.Record{State: mark.Done, Value: c.before.Value}}
	}
	w := c.s.enqueue(end)
	err := c.s.await(ctx, w)
	if err == nil || ctx.Err() == nil || c.s.withdraw(w) || !c.s.later(w, func() { c.s.drop(c.key) }) {
		c.s.drop(c.key)
	}
	return err
}

func (c *claim) Leave(context.Context) error {
	c.s.drop(c.key)
	return nil
}

// Get implements [once.Store].
func (s *Store) Get(_ context.Context, key string) (value []byte, done bool, err error) {
	r, found, damaged, err := s.read(key)
	switch {
	case err != nil:
		return nil, false, err
	case damaged != nil:
		return nil, false, fmt.Errorf("%w: its mark is %w", once.ErrInDoubt, damaged)
	default:
		return r.Value, found && (r.State == mark.Done || r.State.Over()), nil
	}
}

// List implements [once.Store]. It shows one consistent state. The store continues
// meanwhile, and its file grows while the list is open.
func (s *Store) List(ctx context.Context, kind byte) iter.Seq2[once.Entry, error] {
	return func(yield func(once.Entry, error) bool) {
		err := s.view(func(tx *bbolt.Tx) error {
			c := tx.Bucket(marks).Cursor()
			prefix := []byte{kind}
			for k, b := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, b = c.Next() {
				if err := ctx.Err(); err != nil {
					return err
				}
				r, damaged := mark.Decode(string(k), b)
				if !yield(once.Entry{Key: string(k), Value: r.Value, Note: r.Note, Doubt: damaged == nil && r.State != mark.Done, Damaged: damaged}, nil) {
					return nil
				}
			}
			return nil
		})
		if err != nil {
			yield(once.Entry{}, err)
		}
	}
}
