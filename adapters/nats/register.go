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

	// Replicas is the number of replicas of a new bucket, 1 to 5; unset means 1. With 1
	// the register is unavailable while its server is down.
	Replicas int

	// NoCreate refuses a bucket that does not exist, instead of creating it.
	NoCreate bool
}

// Validate reports all wrong fields in one error.
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

// Register is a [register.Register] in one key of a JetStream bucket. A write names the
// revision that it replaces.
//
// With several replicas, a leader that is cut off from the others may answer Read with an
// older document, until it notices. Such a leader cannot write.
//
// Register has no goroutine of its own and does not close the connection. Let the connection
// reconnect without limit: nats.MaxReconnects(-1).
type Register struct {
	js     jetstream.JetStream
	cfg    RegisterConfig
	bucket atomic.Pointer[jetstream.KeyValue] // nil until the bucket is checked
	seen   atomic.Bool                        // the bucket existed once, so it is not created again
}

var _ register.Register = (*Register)(nil)

// NewRegister returns the register in a bucket. It sends no request: the first use of a
// method creates or checks the bucket. If the bucket may forget a document, or may read
// from a replica that is behind, each method returns an [ErrUnsuitable].
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

// stream is the key-value store's name of the bucket's stream.
func (c RegisterConfig) stream() string { return "KV_" + c.Bucket }

// newBucket is the configuration of a new bucket's stream. Reads go to its leader.
func (c RegisterConfig) newBucket() jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: c.stream(), Description: "a stormguard fleet's configuration",
		Subjects: []string{"$KV." + c.Bucket + ".>"}, MaxMsgsPerSubject: 1, Discard: jetstream.DiscardNew,
		Storage: jetstream.FileStorage, Replicas: c.Replicas, AllowRollup: true, DenyDelete: true,
	}
}

// open finds the bucket, or creates it, at the first use.
func (r *Register) open(ctx context.Context) (jetstream.KeyValue, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	// During a reconnect the client would keep a write and send it later.
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
		if errors.Is(err, jetstream.ErrBucketNotFound) { // this server does not know the new bucket yet
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

// check refuses a bucket that may forget a document, or may read an old one.
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

// entry decodes the document of the key; zero values if the key has none.
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

// ask repeats a request until it gets an answer: a stream without a leader gives none, and a
// broken connection loses requests. A second run of do must have the same effect as one.
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

// conflictWait is the pause between two reads that wait for a faster write to be readable.
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
		return fmt.Errorf("nats: register: %w", err) // no server got the write
	case !errors.Is(err, jetstream.ErrKeyExists) && !errors.Is(err, jetstream.ErrKeyRevisionMismatch):
		return fmt.Errorf("%w: nats: %w", register.ErrUnknown, err)
	}
	// With replicas, the faster write may be agreed but not readable yet.
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

// Watch reports a change when JetStream does. It also reads every 2 s, as a sign of life.
func (r *Register) Watch(ctx context.Context, on func(register.Event)) error {
	return registers.Watch(ctx, func(number uint64, document []byte, err error) {
		on(register.Event{Number: number, Document: document, Err: err})
	}, r.session)
}

var errWatchOver = errors.New("nats: register: the watch has ended")

func (r *Register) session(ctx context.Context, emit func(uint64, []byte) error) error {
	ctx, cancel := context.WithCancel(ctx) // its end ends the watch of the bucket
	defer cancel()
	var kv jetstream.KeyValue
	var seen uint64 // the revision of the latest read
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
	late := time.AfterFunc(registers.Pulse, cancel) // the client waits for an answer until ctx ends
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
			if e == nil || e.Revision() <= seen { // the end of the initial entries, or a look was faster
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
