// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package postgres keeps the marks of package once in PostgreSQL, in the transactions of
// their effects. Effect and mark are one commit, so the effect happens exactly once.
//
// This holds for changes inside the transaction only. A change outside of it can happen
// again after a crash: write an outbox row instead, see examples/outbox.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stormguard-mq/stormguard/once"
)

// Schema creates the tables. A process needs SELECT, INSERT, UPDATE and DELETE on them.
const Schema = `CREATE TABLE IF NOT EXISTS stormguard_once (
	key  bytea       PRIMARY KEY,
	at   timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX IF NOT EXISTS stormguard_once_at ON stormguard_once (at);
CREATE TABLE IF NOT EXISTS stormguard_once_entity (
	machine text        NOT NULL,
	entity  bytea       NOT NULL,
	path    text[]      NOT NULL,
	at      timestamptz NOT NULL DEFAULT clock_timestamp(),
	PRIMARY KEY (machine, entity)
);
CREATE INDEX IF NOT EXISTS stormguard_once_entity_at ON stormguard_once_entity (at)`

// A commit waits for the disk, and for a synchronous standby if there is one, whatever the
// session's settings are: the message is acked after it.
const (
	durable = `SELECT set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on' ELSE current_setting('synchronous_commit') END, true) AS mode`

	insert = `WITH durable AS (` + durable + `)
INSERT INTO stormguard_once (key) SELECT $1 FROM durable WHERE mode <> '' ON CONFLICT DO NOTHING`

	forget = `DELETE FROM stormguard_once WHERE key IN (
	SELECT key FROM stormguard_once WHERE at < clock_timestamp() - make_interval(secs => $1) ORDER BY at LIMIT $2 FOR UPDATE SKIP LOCKED)`
	forgetEntities = `DELETE FROM stormguard_once_entity WHERE (machine, entity) IN (
	SELECT machine, entity FROM stormguard_once_entity WHERE at < clock_timestamp() - make_interval(secs => $1) ORDER BY at LIMIT $2 FOR UPDATE SKIP LOCKED)`

	entityInsert = `INSERT INTO stormguard_once_entity (machine, entity, path) VALUES ($1, $2, '{}') ON CONFLICT DO NOTHING`
	entityRead   = `SELECT path FROM stormguard_once_entity WHERE machine = $1 AND entity = $2 FOR UPDATE`
	entityWrite  = `UPDATE stormguard_once_entity SET path = $3, at = clock_timestamp() WHERE machine = $1 AND entity = $2`
)

// Config limits what is kept. The zero value is valid.
type Config struct {
	// Age is the minimum time for which marks and the states of entities are kept; default
	// 7 days. Within 1 s and 10 years. It must be longer than the broker may take to
	// deliver a message again, and longer than an entity takes from one step to the next.
	Age time.Duration
}

const (
	defaultAge = 7 * 24 * time.Hour
	minAge     = time.Second
	maxAge     = 10 * 365 * 24 * time.Hour
)

// Validate reports an Age out of its range.
func (c Config) Validate() error {
	if c.Age != 0 && (c.Age < minAge || c.Age > maxAge) {
		return fmt.Errorf("postgres: Config.Age: %s is not within %s and %s", c.Age, minAge, maxAge)
	}
	return nil
}

// Store keeps marks in a database. It is safe for concurrent use, has no goroutine of its
// own and does not close the pool. The pool must connect to the primary server.
type Store struct {
	pool  *pgxpool.Pool
	age   time.Duration
	marks atomic.Uint64 // marks since the start; each forgetEvery-th Do calls Forget
}

// New makes a store in a pool's database. It does not call the database.
func New(pool *pgxpool.Pool, cfg Config) (*Store, error) {
	var errs []error
	if pool == nil {
		errs = append(errs, errors.New("postgres: once: a pool is needed"))
	}
	if err := errors.Join(append(errs, cfg.Validate())...); err != nil {
		return nil, err
	}
	s := &Store{pool: pool, age: cfg.Age}
	if s.age == 0 {
		s.age = defaultAge
	}
	return s, nil
}

// Create creates the tables if they do not exist.
func (s *Store) Create(ctx context.Context) error {
	for {
		_, err := s.pool.Exec(ctx, Schema)
		var refused *pgconn.PgError
		if errors.As(err, &refused) && (refused.Code == uniqueViolation || refused.Code == duplicateTable) && ctx.Err() == nil {
			continue // another process created a part at the same time
		}
		if err != nil {
			return fmt.Errorf("postgres: once: %w", err)
		}
		return nil
	}
}

// Codes of PostgreSQL's errors.
const (
	uniqueViolation = "23505"
	duplicateTable  = "42P07"
)

// Mark marks a key in the caller's transaction. first reports whether the key was unmarked:
// then the caller runs its effect in tx and commits. Otherwise the effect has already
// happened. If another open transaction has marked the key, Mark waits for its end. Mark
// costs one round trip.
//
// In a REPEATABLE READ or SERIALIZABLE transaction, Mark may fail with SQLSTATE 40001 if
// another transaction marked the key after this one began. The next delivery then finds the
// mark.
func Mark(ctx context.Context, tx pgx.Tx, key string) (first bool, err error) {
	if err := once.CheckKey(key); err != nil {
		return false, err
	}
	return insertMark(ctx, tx, "k"+key, key)
}

func insertMark(ctx context.Context, tx pgx.Tx, name, key string) (first bool, err error) {
	tag, err := tx.Exec(ctx, insert, []byte(name))
	if err != nil {
		return false, fmt.Errorf("postgres: once: %.80q: %w", key, err)
	}
	return tag.RowsAffected() == 1, nil
}

// Do runs effect and writes the mark of the key in one transaction. If the key is already
// marked, it returns nil. If effect fails or panics, effect and mark are rolled back. An
// error of Do may hide a commit whose answer was lost; the next Do of the key finds the
// mark.
//
// A second Do of a key waits for the end of the first, in all processes.
func (s *Store) Do(ctx context.Context, key string, effect func(ctx context.Context, tx pgx.Tx) error) error {
	err := s.transact(ctx, func(tx pgx.Tx) error {
		first, err := Mark(ctx, tx, key)
		if err != nil || !first {
			return err
		}
		return effect(ctx, tx)
	})
	if err != nil {
		return err
	}
	if s.marks.Add(1)%forgetEvery == 0 {
		_, _ = s.Forget(ctx) // the effect has happened; a later Do tries Forget again
	}
	return nil
}

// endTime is how long a commit or rollback may take, even if the delivery's context has
// ended.
const endTime = 10 * time.Second

// transact commits unless f fails, panics or calls Goexit.
func (s *Store) transact(ctx context.Context, f func(pgx.Tx) error) error {
	tx, err := s.pool.Begin(ctx)
	if err != nil {
		return fmt.Errorf("postgres: once: %w", err)
	}
	ending := func(end func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
		defer cancel()
		return end(ctx)
	}
	defer func() { _ = ending(tx.Rollback) }() // does nothing after a commit
	if err := f(tx); err != nil {
		return err
	}
	if err := ending(tx.Commit); err != nil {
		return fmt.Errorf("postgres: once: commit: %w", err)
	}
	return nil
}

// forgetEvery is the number of Dos for each Forget. forgetMost is the number of marks that
// one Forget removes, which is more than those Dos make.
const (
	forgetEvery = 1000
	forgetMost  = 4000
)

// Forget removes marks and entities that are older than Config.Age by the database's clock,
// up to 4,000 of each, and returns their number. Each 1,000th Do calls it. A program that
// only calls [Mark] or [Step] must call it itself.
func (s *Store) Forget(ctx context.Context) (n int, err error) {
	for _, statement := range []string{forget, forgetEntities} {
		tag, err := s.pool.Exec(ctx, statement, s.age.Seconds(), forgetMost)
		if err != nil {
			return n, fmt.Errorf("postgres: once: forget: %w", err)
		}
		n += int(tag.RowsAffected())
	}
	return n, nil
}

// Step moves an entity to a state in the caller's transaction. first reports whether the
// step is new: then the caller runs the step's effect in tx and commits. Otherwise the
// entity has already been in the state, or the step's effect is marked. An impossible step
// is an [*once.StepError]. Steps of one entity wait for each other's transactions. Step
// costs four round trips.
func Step(ctx context.Context, tx pgx.Tx, m *once.Machine, entity, to string) (first bool, err error) {
	if len(entity) < 1 || len(entity) > once.MaxKey || strings.ContainsRune(entity, 0) {
		return false, fmt.Errorf("%w: entity %.80q: it must be 1 to %d bytes, without a zero byte", once.ErrKey, entity, once.MaxKey)
	}
	key := once.StepKey(m.Name(), entity, to)
	wrap := func(err error) error { return fmt.Errorf("postgres: once: %.80q: %w", key, err) }
	if _, err := tx.Exec(ctx, entityInsert, m.Name(), []byte(entity)); err != nil {
		return false, wrap(err)
	}
	var path []string
	if err := tx.QueryRow(ctx, entityRead, m.Name(), []byte(entity)).Scan(&path); err != nil {
		return false, wrap(err)
	}
	done, err := m.Check(entity, path, to)
	if done || err != nil {
		return false, err
	}
	if first, err = insertMark(ctx, tx, "s"+m.Name()+"\x00"+entity+"\x00"+to, key); err != nil {
		return false, err
	}
	if _, err := tx.Exec(ctx, entityWrite, m.Name(), []byte(entity), append(path, to)); err != nil {
		return false, wrap(err)
	}
	return first, nil
}

// Compare returns the differences between the states and the marks of a machine in the
// database. There are none, unless rows were changed or tables restored by hand. It reads
// all states and marks, so call it at a start, for example.
func (s *Store) Compare(ctx context.Context, m *once.Machine) ([]once.Difference, error) {
	paths, marks := make(map[string][]string), make(map[string][]string)
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT entity, path FROM stormguard_once_entity WHERE machine = $1`, m.Name())
		if err != nil {
			return err
		}
		var entity []byte
		var path []string
		if _, err := pgx.ForEachRow(rows, []any{&entity, &path}, func() error {
			paths[string(entity)] = append([]string(nil), path...)
			return nil
		}); err != nil {
			return err
		}
		prefix := "s" + m.Name() + "\x00"
		rows, err = tx.Query(ctx, `SELECT key FROM stormguard_once WHERE key >= $1 AND key < $2`, []byte(prefix), []byte("s"+m.Name()+"\x01"))
		if err != nil {
			return err
		}
		var key []byte
		_, err = pgx.ForEachRow(rows, []any{&key}, func() error {
			entity, step, _ := strings.Cut(strings.TrimPrefix(string(key), prefix), "\x00")
			marks[entity] = append(marks[entity], step)
			return nil
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("postgres: once: compare: %w", err)
	}
	return m.Compare(paths, marks), nil
}
