// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/registers"
)

// Register is a [register.Register] in one key of etcd. A write is a transaction that
// compares the key's revision. Reads are linearizable: a minority of the etcd servers
// answers nothing.
//
// It has no goroutine of its own, and does not close the client.
type Register struct {
	client *clientv3.Client
	key    string
}

var _ register.Register = (*Register)(nil)

// NewRegister returns the register in a key, which nothing else may write. It does not call etcd.
// The client should have DialKeepAliveTime set.
func NewRegister(client *clientv3.Client, key string) (*Register, error) {
	if client == nil || key == "" {
		return nil, fmt.Errorf("%w: register: a client and a key are needed", errConfig)
	}
	return &Register{client: client, key: key}, nil
}

// value returns the content of the key: a number and a document, and the revision of the latest
// write. All are zero if there is no key.
func (r *Register) value(kvs []*mvccpb.KeyValue) (number uint64, document []byte, rev int64, err error) {
	if len(kvs) == 0 {
		return 0, nil, 0, nil
	}
	number, _, document, err = registers.Decode(kvs[0].GetValue())
	if err == nil {
		err = register.Check(number, document)
	}
	if err != nil {
		return 0, nil, 0, fmt.Errorf("%w: etcd: key %s: %w", register.ErrMalformed, r.key, err)
	}
	return number, document, kvs[0].GetModRevision(), nil
}

func (r *Register) get(ctx context.Context) (number uint64, document []byte, rev, at int64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, nil, 0, 0, err
	}
	resp, err := r.client.Get(ctx, r.key)
	if err != nil {
		return 0, nil, 0, 0, fmt.Errorf("etcd: register: %w", err)
	}
	number, document, rev, err = r.value(resp.Kvs)
	return number, document, rev, resp.Header.GetRevision(), err
}

// Read returns the newest document, in one round trip.
func (r *Register) Read(ctx context.Context) (number uint64, document []byte, err error) {
	number, document, _, _, err = r.get(ctx)
	return number, document, err
}

// CompareAndSet writes a document, in two round trips.
func (r *Register) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if err := register.Check(number, document); err != nil {
		return err
	}
	newest, _, rev, _, err := r.get(ctx)
	if err != nil {
		return err
	}
	if newest != number-1 {
		return &register.ConflictError{Newest: newest}
	}
	resp, err := r.client.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(r.key), "=", rev)).
		Then(clientv3.OpPut(r.key, string(registers.Encode(number, "", document)))).
		Else(clientv3.OpGet(r.key)).Commit()
	switch {
	case refused(err):
		return fmt.Errorf("etcd: register: %w", err)
	case err != nil:
		return fmt.Errorf("%w: etcd: %w", register.ErrUnknown, err)
	case resp.Succeeded:
		return nil
	}
	newest, _, _, err = r.value(resp.Responses[0].GetResponseRange().GetKvs())
	if err != nil {
		return err
	}
	return &register.ConflictError{Newest: newest}
}

// refused reports whether the server looked at a request and did nothing. A server without space
// may have applied it.
func refused(err error) bool {
	for _, is := range []error{rpctypes.ErrPermissionDenied, rpctypes.ErrRequestTooLarge, rpctypes.ErrTooManyRequests, rpctypes.ErrUserEmpty} {
		if errors.Is(err, is) {
			return true
		}
	}
	return false
}

// Watch reports a change when etcd does. Twice in 4 s it reads, for a sign of life.
func (r *Register) Watch(ctx context.Context, on func(register.Event)) error {
	return registers.Watch(ctx, func(number uint64, document []byte, err error) {
		on(register.Event{Number: number, Document: document, Err: err})
	}, r.session)
}

func (r *Register) session(ctx context.Context, emit func(uint64, []byte) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var seen int64 // the revision of etcd at the last look
	look := func() error {
		ctx, cancel := context.WithTimeout(ctx, registers.Pulse)
		defer cancel()
		number, document, _, at, err := r.get(ctx)
		if err != nil {
			return err
		}
		seen = at
		return emit(number, document)
	}
	if err := look(); err != nil {
		return err
	}
	watcher := clientv3.NewWatcher(r.client)
	defer watcher.Close() //nolint:errcheck // its context has ended
	changes := watcher.Watch(clientv3.WithRequireLeader(ctx), r.key, clientv3.WithRev(seen+1))
	pulse := time.NewTicker(registers.Pulse)
	defer pulse.Stop()
	for {
		select {
		case resp, ok := <-changes:
			if !ok {
				return errors.Join(ctx.Err(), errSession)
			}
			if err := resp.Err(); err != nil {
				return fmt.Errorf("etcd: register: %w", err)
			}
			if len(resp.Events) == 0 {
				continue
			}
			e := resp.Events[len(resp.Events)-1]
			if e.GetKv().GetModRevision() <= seen { // a look was faster
				continue
			}
			var kvs []*mvccpb.KeyValue
			if e.IsCreate() || e.IsModify() {
				kvs = append(kvs, e.GetKv())
			}
			number, document, _, err := r.value(kvs)
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
		}
	}
}
