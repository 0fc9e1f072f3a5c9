// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.etcd.io/bbolt"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/once"
	"github.com/stormguard-mq/stormguard/once/bolt"
	"github.com/stormguard-mq/stormguard/once/postgres"
)

// onceCallers is how many goroutines call Do in the cases of 32.
const onceCallers = 32

// onceGroup is what a mark costs, beside the least that the same store could do for it. An
// operation is one effect, with a new key each time.
//
// bbolt: one key is put and synced, by an Update for each; with 32 callers by bbolt's own
// Batch. PostgreSQL: a transaction with the effect, which is one row. JetStream: one Put.
var onceGroup = Group{
	Name:   "once",
	About:  "the mark of an effect in each store of package once, beside a bare put or transaction",
	Rounds: 9,
	Cases: []Case{
		{Name: "bbolt", Open: openBareBolt(1)},
		{Name: "once_bolt", Open: openOnceBolt(1, once.RunAgain)},
		{Name: "once_bolt_refuse", Open: openOnceBolt(1, once.Refuse)},
		{Name: "bbolt_32", Open: openBareBolt(onceCallers)},
		{Name: "once_bolt_32", Open: openOnceBolt(onceCallers, once.RunAgain)},
		{Name: "pgx", Optional: true, Open: openPostgres(1, false)},
		{Name: "once_postgres", Optional: true, Open: openPostgres(1, true)},
		{Name: "pgx_32", Optional: true, Open: openPostgres(onceCallers, false)},
		{Name: "once_postgres_32", Optional: true, Open: openPostgres(onceCallers, true)},
		{Name: "kv_put", Open: openBucket(1, false)},
		{Name: "once_nats", Open: openBucket(1, true)},
		{Name: "kv_put_32", Open: openBucket(onceCallers, false)},
		{Name: "once_nats_32", Open: openBucket(onceCallers, true)},
	},
	Ratios: []Ratio{
		{Name: "bolt", Kind: Time, Ours: "once_bolt", Theirs: "bbolt"},
		{Name: "bolt_refuse", Kind: Time, Ours: "once_bolt_refuse", Theirs: "bbolt"},
		{Name: "bolt_32", Kind: Time, Ours: "once_bolt_32", Theirs: "bbolt_32"},
		{Name: "postgres", Kind: Time, Ours: "once_postgres", Theirs: "pgx"},
		{Name: "postgres_32", Kind: Time, Ours: "once_postgres_32", Theirs: "pgx_32"},
		{Name: "nats", Kind: Time, Ours: "once_nats", Theirs: "kv_put"},
		{Name: "nats_32", Kind: Time, Ours: "once_nats_32", Theirs: "kv_put_32"},
		{Name: "bolt_ms", Kind: Millis, Ours: "once_bolt"},
		{Name: "postgres_ms", Kind: Millis, Ours: "once_postgres"},
		{Name: "nats_ms", Kind: Millis, Ours: "once_nats"},
	},
}

// spread calls f for n new keys, from so many goroutines.
func spread(callers int, f func(ctx context.Context, key string) error) func(ctx context.Context, n int) error {
	var next atomic.Int64
	return func(ctx context.Context, n int) error {
		end := next.Load() + int64(n)
		var wg sync.WaitGroup
		errs := make([]error, callers)
		for i := range callers {
			wg.Go(func() {
				for errs[i] == nil {
					k := next.Add(1)
					if k > end {
						return
					}
					errs[i] = f(ctx, "charge/"+strconv.FormatInt(k, 10))
				}
			})
		}
		wg.Wait()
		next.Store(end)
		return errors.Join(errs...)
	}
}

func nothing(context.Context) error { return nil }

func openBareBolt(callers int) func(context.Context) (Runner, error) {
	return func(context.Context) (Runner, error) {
		dir, err := os.MkdirTemp("", "stormguard-bench-")
		if err != nil {
			return Runner{}, err
		}
		db, err := bbolt.Open(filepath.Join(dir, "bare.db"), 0o600, &bbolt.Options{FreelistType: bbolt.FreelistMapType})
		if err != nil {
			return Runner{}, errors.Join(err, os.RemoveAll(dir))
		}
		marks := []byte("marks")
		if err := db.Update(func(tx *bbolt.Tx) error { _, err := tx.CreateBucket(marks); return err }); err != nil {
			return Runner{}, errors.Join(err, db.Close(), os.RemoveAll(dir))
		}
		write := db.Update
		if callers > 1 {
			db.MaxBatchSize = callers // which all wait for: full at once, or else it waits 10 ms
			write = db.Batch
		}
		value := make([]byte, 24)
		return Runner{
			Do: spread(callers, func(_ context.Context, key string) error {
				return write(func(tx *bbolt.Tx) error { return tx.Bucket(marks).Put([]byte(key), value) })
			}),
			Close: func() error { return errors.Join(db.Close(), os.RemoveAll(dir)) },
		}, nil
	}
}

func openOnceBolt(callers int, doubt once.InDoubt) func(context.Context) (Runner, error) {
	return func(context.Context) (Runner, error) {
		dir, err := os.MkdirTemp("", "stormguard-bench-")
		if err != nil {
			return Runner{}, err
		}
		marks, err := bolt.Open(filepath.Join(dir, "once.db"), bolt.Config{})
		if err != nil {
			return Runner{}, errors.Join(err, os.RemoveAll(dir))
		}
		r, err := once.New(marks, once.Config{InDoubt: doubt})
		return Runner{
			Do:    spread(callers, func(ctx context.Context, key string) error { return r.Do(ctx, key, nothing) }),
			Close: func() error { return errors.Join(marks.Close(), os.RemoveAll(dir)) },
		}, err
	}
}

func openPostgres(callers int, marked bool) func(context.Context) (Runner, error) {
	return func(ctx context.Context) (Runner, error) {
		addr, err := brokers.Find(ctx, brokers.Postgres)
		if err != nil {
			return Runner{}, err
		}
		cfg, err := pgxpool.ParseConfig(addr)
		if err != nil {
			return Runner{}, err
		}
		cfg.MaxConns = int32(callers)
		name := fmt.Sprintf("bench_%d_%d_%t", time.Now().UnixNano(), callers, marked)
		cfg.ConnConfig.RuntimeParams["search_path"] = name
		pool, err := pgxpool.NewWithConfig(ctx, cfg)
		if err != nil {
			return Runner{}, err
		}
		drop := func() error {
			_, err := pool.Exec(context.WithoutCancel(ctx), "DROP SCHEMA IF EXISTS "+name+" CASCADE")
			pool.Close()
			return err
		}
		marks, err := postgres.New(pool, postgres.Config{})
		if err == nil {
			_, err = pool.Exec(ctx, "CREATE SCHEMA "+name+"; CREATE TABLE effects (key text NOT NULL)")
		}
		if err == nil {
			err = marks.Create(ctx)
		}
		if err != nil {
			return Runner{}, errors.Join(err, drop())
		}
		effect := func(ctx context.Context, tx pgx.Tx, key string) error {
			_, err := tx.Exec(ctx, "INSERT INTO effects (key) VALUES ($1)", key)
			return err
		}
		do := func(ctx context.Context, key string) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return effect(ctx, tx, key) })
		}
		if marked {
			do = func(ctx context.Context, key string) error {
				return marks.Do(ctx, key, func(ctx context.Context, tx pgx.Tx) error { return effect(ctx, tx, key) })
			}
		}
		return Runner{Do: spread(callers, do), Close: drop}, nil
	}
}

func openBucket(callers int, marked bool) func(context.Context) (Runner, error) {
	return func(ctx context.Context) (_ Runner, err error) {
		dir, err := os.MkdirTemp("", "stormguard-bench-")
		if err != nil {
			return Runner{}, err
		}
		end := func() error { return os.RemoveAll(dir) }
		defer func() {
			if err != nil {
				err = errors.Join(err, end())
			}
		}()
		srv, err := server.NewServer(&server.Options{
			Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true,
		})
		if err != nil {
			return Runner{}, err
		}
		srv.Start()
		end = func() error {
			srv.Shutdown()
			srv.WaitForShutdown()
			return os.RemoveAll(dir)
		}
		if !srv.ReadyForConnections(20 * time.Second) {
			return Runner{}, errors.New("nats-server is not ready after 20s")
		}
		nc, err := nats.Connect(srv.ClientURL())
		if err != nil {
			return Runner{}, err
		}
		stop := end
		end = func() error { nc.Close(); return stop() }
		js, err := jetstream.New(nc)
		if err != nil {
			return Runner{}, err
		}
		if !marked {
			kv, err := js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "bare"})
			value := make([]byte, 24)
			return Runner{Do: spread(callers, func(ctx context.Context, key string) error {
				_, err := kv.Put(ctx, key, value)
				return err
			}), Close: end}, err
		}
		marks, err := guardnats.NewOnce(js, guardnats.OnceConfig{Bucket: "once"})
		if err != nil {
			return Runner{}, err
		}
		r, err := once.New(marks, once.Config{})
		return Runner{Do: spread(callers, func(ctx context.Context, key string) error { return r.Do(ctx, key, nothing) }), Close: end}, err
	}
}
