// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/registers"
)

// RegisterConfig says where a [Register] is. Bucket must be set.
type RegisterConfig struct {
	// Bucket is a bucket of JetStream's key-value store: 1 to 128 letters, digits, '_'
	// and '-'.
	Bucket string

	// Key is the key in the bucket; unset means "fleet".
	Key string

	// Replicas of a bucket that is created, 1 to 5; unset means 1. With 1 the register
	// is away while its server is.
	Replicas int

	// NoCreate refuses a bucket that does not exist, instead of creating it.
	NoCreate bool
}

// Validate reports everything wrong at once.
func (c RegisterConfig) Validate() error {
	var errs []error
	if len(c.Bucket) < 1 || len(c.Bucket) > 128 || !plain(c.Bucket) {
		errs = append(errs, fmt.Errorf("nats: RegisterConfig.Bucket: %q is not 1 to 128 letters, digits, '_' and '-'", c.Bucket))
	}
	if len(c.Key) > 128 || !plain(c.Key) {
		errs = append(errs, fmt.Errorf("nats: RegisterConfig.Key: %q is not 1 to 128 letters, digits, '_' and '-'", c.Key))
	}
	if c.Replicas < 0 || c.Replicas > 5 {
		errs = append(errs, fmt.Errorf("nats: RegisterConfig.Replicas: %d is not within 1 and 5", c.Replicas))
	}
	return errors.Join(errs...)
}

func plain(s string) bool {
	for _, r := range s {
		if r != '_' && r != '-' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') {
			return false
		}
	}
	return true
}

// Register is a [register.Register] in one key of a JetStream bucket. A write names
// the revision that it replaces.
//
// With more than one replica a leader that is cut off from the others may answer Read
// with an older document, until it notices. It cannot write one.
//
// Register has no goroutine of its own, and does not close the connection. That should
// reconnect for ever: nats.MaxReconnects(-1).
type Register struct {
	js     jetstream.JetStream
	cfg    RegisterConfig
	bucket atomic.Pointer[jetstream.KeyValue] // nil until it was found good
	seen   atomic.Bool                        // it was there once, and is not created again
}

var _ register.Register = (*Register)(nil)

// NewRegister is the register in a bucket. It asks the server nothing: the bucket is
// created or checked at the first use. A bucket that may forget a document, or read
// from a replica that is behind, is an [ErrUnsuitable] of each method.
func NewRegister(js jetstream.JetStream, cfg RegisterConfig) (*Register, error) {
	if js == nil {
		return nil, errors.New("nats: register: a JetStream is needed")
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Key == "" {
		cfg.Key = "fleet"
	}
	cfg.Replicas = max(1, cfg.Replicas)
	return &Register{js: js, cfg: cfg}, nil
}

// stream is the name that the key-value store gives to a bucket's stream.
func (c RegisterConfig) stream() string { return "KV_" + c.Bucket }

// newBucket is the stream of a new bucket. Reads go to its leader.
func (c RegisterConfig) newBucket() jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: c.stream(), Description: "a stormguard fleet's configuration",
		Subjects: []string{"$KV." + c.Bucket + ".>"}, MaxMsgsPerSubject: 1, Discard: jetstream.DiscardNew,
		Storage: jetstream.FileStorage, Replicas: c.Replicas, AllowRollup: true, DenyDelete: true,
	}
}

// open finds the bucket, or makes it, at the first use.
func (r *Register) open(ctx context.Context) (jetstream.KeyValue, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	// While it reconnects the client would keep a write, and send it later.
	if conn := r.js.Conn(); !conn.IsConnected() {
		return nil, fmt.Errorf("nats: register: the connection is %s: %w", conn.Status(), errors.Join(nats.ErrDisconnected, conn.LastError()))
	}
	if kv := r.bucket.Load(); kv != nil {
		return *kv, nil
	}
	find := func(ctx context.Context) (jetstream.Stream, error) { return r.js.Stream(ctx, r.cfg.stream()) }
	stream, err := ask(ctx, find)
	if errors.Is(err, jetstream.ErrStreamNotFound) && !r.cfg.NoCreate && !r.seen.Load() {
		stream, err = r.js.CreateStream(ctx, r.cfg.newBucket())
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // another process was faster, with another configuration
			stream, err = ask(ctx, find)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("nats: register: bucket %s: %w", r.cfg.Bucket, err)
	}
	r.seen.Store(true)
	if err := r.cfg.check(stream.CachedInfo().Config); err != nil {
		return nil, err
	}
	kv, err := ask(ctx, func(ctx context.Context) (jetstream.KeyValue, error) {
		kv, err := r.js.KeyValue(ctx, r.cfg.Bucket)
		if errors.Is(err, jetstream.ErrBucketNotFound) { // by a server that has not heard of it yet
			<-ctx.Done()
			err = ctx.Err()
		}
		return kv, err
	})
	if err != nil {
		return nil, fmt.Errorf("nats: register: bucket %s: %w", r.cfg.Bucket, err)
	}
	r.bucket.Store(&kv)
	return kv, nil
}

// check refuses a bucket that would forget, or that reads what is behind.
func (c RegisterConfig) check(s jetstream.StreamConfig) error {
	var errs []error
	edit := func(flags string) string { return "nats stream edit " + c.stream() + " " + flags }
	if s.Storage != jetstream.FileStorage {
		errs = append(errs, unsuitable("bucket %s: its storage is %s, and a register must outlive its server: create it anew with file storage", c.Bucket, s.Storage))
	}
	if s.MaxAge != 0 {
		errs = append(errs, unsuitable("bucket %s: a document is forgotten after %s: %s", c.Bucket, s.MaxAge, edit("--max-age=-1")))
	}
	if s.AllowDirect && s.Replicas > 1 {
		errs = append(errs, unsuitable("bucket %s: a replica that is behind may answer: %s", c.Bucket, edit("--no-allow-direct")))
	}
	if s.Mirror != nil || len(s.Sources) > 0 {
		errs = append(errs, unsuitable("bucket %s: it is a copy of another: name that one", c.Bucket))
	}
	return errors.Join(errs...)
}

// entry is what the key has; zero if there is nothing.
func (r *Register) entry(e jetstream.KeyValueEntry) (number uint64, document []byte, err error) {
	if e == nil || e.Operation() != jetstream.KeyValuePut {
		return 0, nil, nil
	}
	number, _, document, err = registers.Decode(e.Value())
	if err == nil {
		err = register.Check(number, document)
	}
	if err != nil {
		return 0, nil, fmt.Errorf("%w: nats: bucket %s, key %s: %w", register.ErrMalformed, r.cfg.Bucket, r.cfg.Key, err)
	}
	return number, document, nil
}

// ask asks again what gets no answer: a stream without a leader gives none, and a broken
// connection loses requests. What it asks must be the same when it is done twice.
func ask[T any](ctx context.Context, do func(context.Context) (T, error)) (T, error) {
	for wait := 250 * time.Millisecond; ; wait *= 2 {
		try, cancel := context.WithTimeout(ctx, wait)
		answer, err := do(try)
		cancel()
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return answer, err
		}
	}
}

func (r *Register) get(ctx context.Context, kv jetstream.KeyValue) (number uint64, document []byte, rev uint64, err error) {
	e, err := ask(ctx, func(ctx context.Context) (jetstream.KeyValueEntry, error) { return kv.Get(ctx, r.cfg.Key) })
	if errors.Is(err, jetstream.ErrKeyNotFound) { // or deleted
		return 0, nil, 0, nil
	}
	if err != nil {
		return 0, nil, 0, fmt.Errorf("nats: register: %w", err)
	}
	number, document, err = r.entry(e)
	return number, document, e.Revision(), err
}

// Read returns the newest document, in one round trip.
func (r *Register) Read(ctx context.Context) (number uint64, document []byte, err error) {
	kv, err := r.open(ctx)
	if err != nil {
		return 0, nil, err
	}
	number, document, _, err = r.get(ctx, kv)
	return number, document, err
}

// conflictWait is how long the write that was faster may take to be readable.
const conflictWait = 10 * time.Millisecond

// CompareAndSet writes a document, in two round trips.
func (r *Register) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if err := register.Check(number, document); err != nil {
		return err
	}
	kv, err := r.open(ctx)
	if err != nil {
		return err
	}
	newest, _, rev, err := r.get(ctx, kv)
	if err != nil {
		return err
	}
	if newest != number-1 {
		return &register.ConflictError{Newest: newest}
	}
	value := registers.Encode(number, "", document)
	if rev == 0 {
		_, err = kv.Create(ctx, r.cfg.Key, value)
	} else {
		_, err = kv.Update(ctx, r.cfg.Key, value, rev)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, jetstream.ErrNoStreamResponse):
		return fmt.Errorf("nats: register: %w", err) // nobody got it
	case !errors.Is(err, jetstream.ErrKeyExists) && !errors.Is(err, jetstream.ErrKeyRevisionMismatch):
		return fmt.Errorf("%w: nats: %w", register.ErrUnknown, err)
	}
	// With replicas, the write that was faster may be agreed and not yet be readable.
	for refused := err; ; {
		if newest, _, _, err = r.get(ctx, kv); err != nil {
			return errors.Join(err, refused)
		}
		if newest != number-1 {
			return &register.ConflictError{Newest: newest}
		}
		if !registers.Sleep(ctx, conflictWait) {
			return fmt.Errorf("nats: register: another write is under way: %w: %w", ctx.Err(), refused)
		}
	}
}

// Watch tells of a change when JetStream does. Once in 2 s it reads, for a sign of
// life.
func (r *Register) Watch(ctx context.Context, on func(register.Event)) error {
	return registers.Watch(ctx, func(number uint64, document []byte, err error) {
		on(register.Event{Number: number, Document: document, Err: err})
	}, r.session)
}

var errWatchOver = errors.New("nats: register: the watch has ended")

func (r *Register) session(ctx context.Context, emit func(uint64, []byte) error) error {
	ctx, cancel := context.WithCancel(ctx) // which ends the watch of the bucket
	defer cancel()
	var kv jetstream.KeyValue
	var seen uint64 // the revision that was read last
	look := func() error {
		ctx, cancel := context.WithTimeout(ctx, registers.Pulse)
		defer cancel()
		var err error
		if kv, err = r.open(ctx); err != nil {
			return err
		}
		number, document, rev, err := r.get(ctx, kv)
		if err != nil {
			return err
		}
		seen = rev
		return emit(number, document)
	}
	if err := look(); err != nil {
		return err
	}
	late := time.AfterFunc(registers.Pulse, cancel) // the client would wait for an answer as long as ctx lives
	watcher, err := kv.Watch(ctx, r.cfg.Key)
	late.Stop()
	if err != nil {
		return fmt.Errorf("nats: register: watch: %w", err)
	}
	pulse := time.NewTicker(registers.Pulse)
	defer pulse.Stop()
	for {
		select {
		case e, ok := <-watcher.Updates():
			if !ok {
				return errors.Join(ctx.Err(), errWatchOver)
			}
			if e == nil || e.Revision() <= seen { // the end of what was there at first; a look was faster
				continue
			}
			number, document, err := r.entry(e)
			if err != nil {
				return err
			}
			if err := emit(number, document); err != nil {
				return err
			}
		case <-pulse.C:
			if err := look(); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
