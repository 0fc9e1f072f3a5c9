// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/internal/mark"
	"github.com/stormguard-mq/stormguard/once"
)

// OnceConfig says where a [Once] keeps its marks. Bucket must be set.
type OnceConfig struct {
	// Bucket is a bucket of JetStream's key-value store: 1 to 128 letters, digits, '_'
	// and '-'. The bucket must contain marks only.
	Bucket string

	// Age is how long a new bucket keeps a mark, within 1 min and 10 years; unset means
	// 7 days. It must be longer than the broker may take to redeliver a message, and longer
	// than the time between two steps of an entity. An existing bucket keeps its own age.
	Age time.Duration

	// MaxBytes bounds a new bucket; unset means no bound but Age. A mark takes about 200
	// bytes. A full bucket accepts no marks, so no effect begins.
	MaxBytes int64

	// Lease is how long a process may be silent before another process takes its claims,
	// within 100 ms and 1 h; unset means 10 s. An effect's context ends when its claim could
	// not be renewed for two thirds of Lease.
	Lease time.Duration

	// Replicas is the number of replicas of a new bucket, 1 to 5; unset means 1.
	Replicas int

	// NoCreate refuses a bucket that does not exist, instead of creating it.
	NoCreate bool
}

const (
	defaultOnceAge = 7 * 24 * time.Hour
	minOnceAge     = time.Minute
	maxOnceAge     = 10 * 365 * 24 * time.Hour
	defaultLease   = 10 * time.Second
	minLease       = 100 * time.Millisecond
	maxLease       = time.Hour

	// minOnceValue is enough for a mark with the longest result, its record and its headers.
	minOnceValue = once.MaxResult + 1<<10
)

// Validate reports all wrong fields in one error.
func (c OnceConfig) Validate() error {
	var errs []error
	if len(c.Bucket) < 1 || len(c.Bucket) > 128 || !plain(c.Bucket) {
		errs = append(errs, fmt.Errorf("nats: OnceConfig.Bucket: %q is not 1 to 128 letters, digits, '_' and '-'", c.Bucket))
	}
	if c.Age != 0 && (c.Age < minOnceAge || c.Age > maxOnceAge) {
		errs = append(errs, fmt.Errorf("nats: OnceConfig.Age: %s is not within %s and %s", c.Age, minOnceAge, maxOnceAge))
	}
	if c.MaxBytes < 0 {
		errs = append(errs, fmt.Errorf("nats: OnceConfig.MaxBytes: %d is not 0 or more", c.MaxBytes))
	}
	if c.Lease != 0 && (c.Lease < minLease || c.Lease > maxLease) {
		errs = append(errs, fmt.Errorf("nats: OnceConfig.Lease: %s is not within %s and %s", c.Lease, minLease, maxLease))
	}
	if c.Replicas < 0 || c.Replicas > 5 {
		errs = append(errs, fmt.Errorf("nats: OnceConfig.Replicas: %d is not within 1 and 5", c.Replicas))
	}
	return errors.Join(errs...)
}

// Once is a [once.Store] in a JetStream bucket, for processes that share it. A claim is a key
// that is created only if it does not exist. A mark replaces the claim by its revision. While
// an effect runs, a goroutine renews its claim every Lease/3. A claim is in doubt if it was
// not renewed for Lease, by the clock of the process that waits for it.
//
// A mark is as durable as the bucket's servers make it. By default a single server syncs its
// disk every two minutes, so a power cut may lose the newest marks.
//
// Once does not close the connection. Let the connection reconnect without limit:
// nats.MaxReconnects(-1).
type Once struct {
	js  jetstream.JetStream
	cfg OnceConfig

	mu     sync.Mutex
	bucket jetstream.KeyValue // guarded by mu; nil until the bucket is checked
}

var _ once.Store = (*Once)(nil)

// NewOnce returns the store in a bucket. It sends no request: the first use creates or checks
// the bucket. A bucket that would not keep marks is an [ErrUnsuitable].
func NewOnce(js jetstream.JetStream, cfg OnceConfig) (*Once, error) {
	if js == nil {
		return nil, errors.New("nats: once: a JetStream is needed")
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Age == 0 {
		cfg.Age = defaultOnceAge
	}
	if cfg.Lease == 0 {
		cfg.Lease = defaultLease
	}
	cfg.Replicas = max(1, cfg.Replicas)
	return &Once{js: js, cfg: cfg}, nil
}

// open finds the bucket, or creates it, at the first use.
func (o *Once) open(ctx context.Context) (jetstream.KeyValue, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	// During a reconnect the client would keep a claim and send it later, when nobody needs it.
	if conn := o.js.Conn(); !conn.IsConnected() {
		return nil, fmt.Errorf("nats: once: the connection is %s: %w", conn.Status(), errors.Join(nats.ErrDisconnected, conn.LastError()))
	}
	o.mu.Lock()
	kv := o.bucket
	o.mu.Unlock()
	if kv != nil {
		return kv, nil
	}
	find := func(ctx context.Context) (jetstream.KeyValue, error) { return o.js.KeyValue(ctx, o.cfg.Bucket) }
	kv, err := ask(ctx, find)
	if errors.Is(err, jetstream.ErrBucketNotFound) && !o.cfg.NoCreate {
		kv, err = o.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket: o.cfg.Bucket, Description: "marks of effects that happened", TTL: o.cfg.Age,
			MaxBytes: o.cfg.MaxBytes, Storage: jetstream.FileStorage, Replicas: o.cfg.Replicas,
		})
		if errors.Is(err, jetstream.ErrBucketExists) { // another process was faster, with another configuration
			kv, err = ask(ctx, find)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("nats: once: bucket %s: %w", o.cfg.Bucket, err)
	}
	status, err := ask(ctx, kv.Status)
	if err != nil {
		return nil, fmt.Errorf("nats: once: bucket %s: %w", o.cfg.Bucket, err)
	}
	if err := o.check(status); err != nil {
		return nil, err
	}
	o.mu.Lock()
	o.bucket = kv
	o.mu.Unlock()
	return kv, nil
}

func (o *Once) check(s jetstream.KeyValueStatus) error {
	var errs []error
	if s.BackingStore() != "JetStream" {
		return nil
	}
	cfg := s.(*jetstream.KeyValueBucketStatus).StreamInfo().Config //nolint:forcetypeassert // what JetStream returns
	if cfg.Storage != jetstream.FileStorage {
		errs = append(errs, unsuitable("bucket %s: its storage is %s, and a mark must outlive its server: create it anew with file storage", o.cfg.Bucket, cfg.Storage))
	}
	if cfg.MaxAge > 0 && cfg.MaxAge < minOnceAge {
		errs = append(errs, unsuitable("bucket %s: marks are forgotten after %s: nats stream edit %s --max-age=7d", o.cfg.Bucket, cfg.MaxAge, cfg.Name))
	}
	if cfg.Discard == jetstream.DiscardOld && cfg.MaxBytes > 0 {
		errs = append(errs, unsuitable("bucket %s: when it is full, marks are forgotten: nats stream edit %s --discard=new", o.cfg.Bucket, cfg.Name))
	}
	if cfg.MaxMsgSize > 0 && cfg.MaxMsgSize < minOnceValue {
		errs = append(errs, unsuitable("bucket %s: its max message size is %d, and for a mark it must be %d or more: nats stream edit %s --max-msg-size=%d", o.cfg.Bucket, cfg.MaxMsgSize, minOnceValue, cfg.Name, minOnceValue))
	}
	if cfg.Mirror != nil || len(cfg.Sources) > 0 {
		errs = append(errs, unsuitable("bucket %s: it is a copy of another: name that one", o.cfg.Bucket))
	}
	return errors.Join(errs...)
}

// onceName is the name of a key in the bucket: the first byte of the key, and its rest in
// letters that every subject may have.
func onceName(key string) string {
	return key[:1] + "." + base64.RawURLEncoding.EncodeToString([]byte(key[1:]))
}

func onceKey(name string) (string, error) {
	rest, err := base64.RawURLEncoding.DecodeString(name[2:])
	return name[:1] + string(rest), err
}

// read returns the newest entry of a key; the revision is 0 if there is no entry.
func (o *Once) read(ctx context.Context, kv jetstream.KeyValue, key string) (r mark.Record, rev uint64, damaged, err error) {
	e, err := ask(ctx, func(ctx context.Context) (jetstream.KeyValueEntry, error) { return kv.Get(ctx, onceName(key)) })
	if errors.Is(err, jetstream.ErrKeyNotFound) { // or deleted
		return r, 0, nil, nil
	}
	if err != nil {
		return r, 0, nil, fmt.Errorf("nats: once: %w", err)
	}
	r, damaged = mark.Decode(key, e.Value())
	return r, e.Revision(), damaged, nil
}

// onceTaken reports whether a write was refused because the key has another revision.
func onceTaken(err error) bool {
	return errors.Is(err, jetstream.ErrKeyExists) || errors.Is(err, jetstream.ErrKeyRevisionMismatch)
}

// onceFirst and onceLast are the first and the longest pause between two looks at a claim of
// another process.
const (
	onceFirst = 5 * time.Millisecond
	onceLast  = 250 * time.Millisecond
)

// Claim implements [once.Store].
func (o *Once) Claim(ctx context.Context, key string, ask once.Ask) (once.Claim, once.Found, error) {
	start := time.Now()
	c := &onceClaim{o: o, key: key, owner: rand.Uint64() | 1}
	var seen uint64 // the revision of the other process's claim
	var since time.Time
	for wait := onceFirst; ; wait = min(2*wait, onceLast) {
		kv, err := o.open(ctx)
		if err != nil {
			return nil, once.Found{}, underway(err, key, start, seen)
		}
		r, rev, damaged, err := o.read(ctx, kv, key)
		found := once.Found{Value: r.Value, Damaged: damaged}
		next := mark.Record{State: mark.Begun, Owner: c.owner, Note: ask.Note, Value: r.Value}
		switch {
		case err != nil:
			return nil, once.Found{}, underway(err, key, start, seen)
		case rev == 0:
		case damaged != nil && !ask.Over:
			return nil, once.Found{}, fmt.Errorf("%w: its mark is %w", once.ErrInDoubt, damaged)
		case damaged != nil:
			found.Doubt = true
		case r.State == mark.Done && !ask.Over:
			found.Done = true
			return nil, found, nil
		case r.State == mark.Done:
			found.Done, next.State = true, mark.BegunOver
		default:
			if (r.State == mark.Begun || r.State == mark.BegunOver) && r.Owner != c.owner {
				if rev != seen {
					seen, since = rev, time.Now()
				}
				if time.Since(since) < o.cfg.Lease { // the other process may be alive
					select {
					case <-time.After(wait):
						continue
					case <-ctx.Done():
						return nil, once.Found{}, underway(ctx.Err(), key, start, seen)
					}
				}
			}
			// If the owner is c.owner, this call wrote the claim, and the answer was lost.
			found.Doubt, found.Note, next.Note = r.Owner != c.owner, r.Note, r.Note
			if r.State.Over() {
				found.Done, next.State = true, mark.BegunOver
			}
		}
		c.began = time.Now()
		switch c.rev, err = o.put(ctx, kv, key, next, rev); {
		case err == nil:
			c.record, c.over = next, next.State.Over()
			c.keep(ctx)
			return c, found, nil
		case !onceTaken(err):
			if !errors.As(err, new(*jetstream.APIError)) { // an APIError says that nothing was written
				c.unbegin(ctx, kv, r, rev)
			}
			return nil, once.Found{}, underway(err, key, start, seen)
		}
	}
}

// unbegin restores the record before the claim, if the claim was written but its answer did
// not come, for example since ctx has ended. No effect begins, so the key must not be in
// doubt. unbegin takes at most onceUnbegin. If it fails, the key stays in doubt.
func (c *onceClaim) unbegin(ctx context.Context, kv jetstream.KeyValue, before mark.Record, rev uint64) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), onceUnbegin)
	defer cancel()
	for wait := onceFirst; wait < onceLast; wait *= 2 {
		switch r, at, damaged, err := c.o.read(ctx, kv, c.key); {
		case err == nil && at == rev: // a read may overtake the write
			time.Sleep(wait)
			continue
		case err != nil, damaged != nil, r.Owner != c.owner:
		case rev == 0:
			_ = kv.Delete(ctx, onceName(c.key), jetstream.LastRevision(at))
		default:
			_, _ = c.o.put(ctx, kv, c.key, before, at)
		}
		return
	}
}

const onceUnbegin = time.Second

// put writes a record over the revision rev; 0 means that the key must not exist.
func (o *Once) put(ctx context.Context, kv jetstream.KeyValue, key string, r mark.Record, rev uint64) (uint64, error) {
	r.At = time.Now().UnixNano()
	var err error
	if rev == 0 {
		rev, err = kv.Create(ctx, onceName(key), mark.Encode(key, r))
	} else {
		rev, err = kv.Update(ctx, onceName(key), mark.Encode(key, r), rev)
	}
	if err != nil {
		return 0, fmt.Errorf("nats: once: %w", err)
	}
	return rev, nil
}

// underway adds to err that another process had the key, if a claim was seen.
func underway(err error, key string, start time.Time, seen uint64) error {
	if seen == 0 {
		return err
	}
	return &once.UnderwayError{Key: key, Wait: time.Since(start), Err: err}
}

// onceClaim is this process's claim of a key, until its lease ends.
type onceClaim struct {
	o      *Once
	key    string
	owner  uint64
	over   bool
	record mark.Record
	rev    uint64    // revision of the record in the bucket; only the keeper uses it until ended is closed
	began  time.Time // when the write of rev began

	ctx    context.Context //nolint:containedctx // a claim is asked for the context that its effect runs with
	end    context.CancelCauseFunc
	stop   chan struct{} // closed to end the keeper, which closes ended
	ended  chan struct{}
	kept   sync.Once
	closed bool // the final record is written
	undone bool // Release has asked to delete the key
}

func (c *onceClaim) Context() context.Context { return c.ctx }

// keep starts a goroutine, the keeper, that renews the claim. settle ends it.
func (c *onceClaim) keep(ctx context.Context) {
	c.ctx, c.end = context.WithCancelCause(ctx)
	c.stop, c.ended = make(chan struct{}), make(chan struct{})
	renewing, cancel := context.WithCancel(context.WithoutCancel(ctx)) // an effect may ignore that its delivery has ended
	go func() {
		defer close(c.ended)
		defer cancel()
		go func() { // ends a running renewal
			select {
			case <-c.stop:
				cancel()
			case <-renewing.Done():
			}
		}()
		tick := time.NewTicker(c.o.cfg.Lease / 3)
		defer tick.Stop()
		for {
			select {
			case <-c.stop:
				return
			case <-tick.C:
			}
			if err := c.renew(renewing); err != nil {
				if c.end(fmt.Errorf("%w: %w", once.ErrLost, err)); onceTaken(err) {
					return
				}
			}
		}
	}()
}

// renew writes the claim again. An error means that the claim is lost, or will be soon.
func (c *onceClaim) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.o.cfg.Lease/3)
	defer cancel()
	began := time.Now()
	kv, err := c.o.open(ctx)
	if err == nil {
		var rev uint64
		if rev, err = c.o.put(ctx, kv, c.key, c.record, c.rev); err == nil {
			c.rev, c.began = rev, began
			return nil
		}
	}
	if onceTaken(err) { // by another process, or by an own renewal whose answer was lost
		if again := c.reread(ctx, kv); again != nil {
			return errors.Join(err, again)
		}
		return nil
	}
	if time.Since(c.began) < c.o.cfg.Lease*2/3 {
		return nil
	}
	return err
}

// reread reads the claim's revision again. It returns ErrLost if the claim is lost.
func (c *onceClaim) reread(ctx context.Context, kv jetstream.KeyValue) error {
	r, rev, damaged, err := c.o.read(ctx, kv, c.key)
	switch {
	case err != nil:
		return err
	case rev == 0 && c.undone:
		c.closed = true
		return nil
	case damaged != nil || rev == 0 || r.Owner != c.owner:
		return once.ErrLost
	}
	c.rev = rev
	c.closed = r.State != mark.Begun && r.State != mark.BegunOver
	return nil
}

// settle ends the keeper and writes the final record of the claim. It may be called again
// after a failure. While the connection is lost it tries again until ctx ends, since another
// process takes a claim without a keeper when its lease ends. A try waits to its end for an
// answer that was lost with the connection. So its limit is Lease/3, and at most defaultLease/3
// with a long lease.
func (c *onceClaim) settle(ctx context.Context, write func(ctx context.Context, kv jetstream.KeyValue) error) error {
	c.kept.Do(func() {
		close(c.stop)
		<-c.ended
	})
	defer c.end(nil)
	for wait := onceFirst; ; wait = min(2*wait, onceLast) {
		try, cancel := context.WithTimeout(ctx, min(c.o.cfg.Lease, defaultLease)/3)
		err := c.write(try, write)
		cancel()
		passes := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrDisconnected) ||
			errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrNoStreamResponse) // while the stream has no leader
		if err == nil || !passes || c.o.js.Conn().IsClosed() {
			return err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return err
		}
	}
}

// write is one try of settle. It recognises an earlier write whose answer was lost.
func (c *onceClaim) write(ctx context.Context, write func(ctx context.Context, kv jetstream.KeyValue) error) error {
	kv, err := c.o.open(ctx)
	if err != nil {
		return err
	}
	for !c.closed {
		if err = write(ctx, kv); err == nil {
			c.closed = true
			break
		}
		if !onceTaken(err) {
			return err
		}
		if again := c.reread(ctx, kv); again != nil {
			return errors.Join(again, err)
		}
	}
	return nil
}

// Finish writes the entries of also first: the next step finds a state or mark whose claim did
// not end.
func (c *onceClaim) Finish(ctx context.Context, value []byte, also ...once.Entry) error {
	return c.settle(ctx, func(ctx context.Context, kv jetstream.KeyValue) error {
		for _, e := range also {
			r := mark.Record{State: mark.Done, At: time.Now().UnixNano(), Value: e.Value}
			if _, err := kv.Put(ctx, onceName(e.Key), mark.Encode(e.Key, r)); err != nil {
				return fmt.Errorf("nats: once: %w", err)
			}
		}
		_, err := c.o.put(ctx, kv, c.key, mark.Record{State: mark.Done, Owner: c.owner, Value: value}, c.rev)
		return err
	})
}

func (c *onceClaim) Release(ctx context.Context) error {
	return c.settle(ctx, func(ctx context.Context, kv jetstream.KeyValue) error {
		if c.over {
			_, err := c.o.put(ctx, kv, c.key, mark.Record{State: mark.Done, Owner: c.owner, Value: c.record.Value}, c.rev)
			return err
		}
		c.undone = true
		if err := kv.Delete(ctx, onceName(c.key), jetstream.LastRevision(c.rev)); err != nil {
			return fmt.Errorf("nats: once: %w", err)
		}
		return nil
	})
}

func (c *onceClaim) Leave(ctx context.Context) error {
	return c.settle(ctx, func(ctx context.Context, kv jetstream.KeyValue) error {
		r := c.record
		if r.State = mark.Doubt; c.over {
			r.State = mark.DoubtOver
		}
		_, err := c.o.put(ctx, kv, c.key, r, c.rev)
		return err
	})
}

// Get implements [once.Store].
func (o *Once) Get(ctx context.Context, key string) (value []byte, done bool, err error) {
	kv, err := o.open(ctx)
	if err != nil {
		return nil, false, err
	}
	r, rev, damaged, err := o.read(ctx, kv, key)
	switch {
	case err != nil:
		return nil, false, err
	case damaged != nil:
		return nil, false, fmt.Errorf("%w: its mark is %w", once.ErrInDoubt, damaged)
	default:
		return r.Value, rev > 0 && (r.State == mark.Done || r.State.Over()), nil
	}
}

// List implements [once.Store]: it returns the entries that exist at the time of the call.
func (o *Once) List(ctx context.Context, kind byte) iter.Seq2[once.Entry, error] {
	return func(yield func(once.Entry, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		kv, err := o.open(ctx)
		if err != nil {
			yield(once.Entry{}, err)
			return
		}
		watch, err := kv.Watch(ctx, string(kind)+".>", jetstream.IgnoreDeletes())
		if err != nil {
			yield(once.Entry{}, fmt.Errorf("nats: once: %w", err))
			return
		}
		defer func() {
			_ = watch.Stop() // the context ends it as well
			// nats.go's callback may wait for room in the channel. nats.go closes the channel after
			// the callback has returned, and that ends this goroutine.
			go func() {
				for range watch.Updates() {
				}
			}()
		}()
		for {
			var e jetstream.KeyValueEntry
			var ok bool
			select {
			case e, ok = <-watch.Updates():
			case <-ctx.Done():
				yield(once.Entry{}, ctx.Err())
				return
			}
			if !ok {
				yield(once.Entry{}, fmt.Errorf("nats: once: the list broke off: %w", cmp.Or(ctx.Err(), nats.ErrBadSubscription)))
				return
			}
			if e == nil { // the end of the existing entries
				return
			}
			key, err := onceKey(e.Key())
			if err != nil {
				continue // not a key of a Once
			}
			r, damaged := mark.Decode(key, e.Value())
			if !yield(once.Entry{Key: key, Value: r.Value, Note: r.Note, Doubt: damaged == nil && r.State != mark.Done, Damaged: damaged}, nil) {
				return
			}
		}
	}
}
