// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package postgres keeps a fleet's register in one row of a PostgreSQL table.
//
// An UPDATE changes the row only if it has the previous number. An INSERT makes the first row only
// if there is none. So the database lets one writer through. [Register.Create] makes the table, or
// you make it with [Schema].
package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/registers"
)

// Schema makes the table, which has all registers of a database. A process needs SELECT, INSERT and
// UPDATE on it.
const Schema = `CREATE TABLE IF NOT EXISTS stormguard_register (
	name     text   PRIMARY KEY,
	number   bigint NOT NULL CHECK (number > 0),
	document bytea  NOT NULL
)`

// A write is one statement, and so one transaction. It waits for the disk, and for a synchronous
// standby if there is one, even if the session's settings say otherwise.
const (
	durable = `SELECT set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on' ELSE current_setting('synchronous_commit') END, true) AS mode`

	first = `WITH durable AS (` + durable + `), written AS (
	INSERT INTO stormguard_register (name, number, document)
	SELECT $1, $2, $3 FROM durable WHERE mode <> ''
	ON CONFLICT DO NOTHING RETURNING name)
SELECT pg_notify('stormguard_register', name) FROM written`

	next = `WITH durable AS (` + durable + `), written AS (
	UPDATE stormguard_register SET number = $2, document = $3
	FROM durable WHERE mode <> '' AND name = $1 AND number = $2 - 1 RETURNING name)
SELECT pg_notify('stormguard_register', name) FROM written`

	read = `SELECT number, document FROM stormguard_register WHERE name = $1`
)

// maxName is the longest name of a register, in bytes.
const maxName = 255

// Register is a [register.Register] in one row. It has no goroutine of its own, and does not close
// the pool. Each Watch takes a connection out of the pool, to listen, until it ends.
//
// The pool must lead to the primary server. After a failover to an asynchronous standby, the newest
// documents may be lost.
type Register struct {
	pool *pgxpool.Pool
	name string
}

var _ register.Register = (*Register)(nil)

// New returns the register of a name, 1 to 255 bytes. It does not call the database.
func New(pool *pgxpool.Pool, name string) (*Register, error) {
	if pool == nil {
		return nil, errors.New("postgres: register: a pool is needed")
	}
	if len(name) < 1 || len(name) > maxName || strings.ContainsRune(name, 0) {
		return nil, fmt.Errorf("postgres: register: name of %d bytes: it must be 1 to %d, without a zero byte", len(name), maxName)
	}
	return &Register{pool: pool, name: name}, nil
}

// Create makes the table, if it is not there.
func (r *Register) Create(ctx context.Context) error {
	_, err := r.pool.Exec(ctx, Schema)
	var refused *pgconn.PgError
	if errors.As(err, &refused) && (refused.Code == uniqueViolation || refused.Code == duplicateTable) {
		return nil // another process was faster
	}
	if err != nil {
		return fmt.Errorf("postgres: register: %w", err)
	}
	return nil
}

// Codes of PostgreSQL's errors.
const (
	uniqueViolation = "23505"
	duplicateTable  = "42P07"
)

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func (r *Register) read(ctx context.Context, q querier) (number uint64, document []byte, err error) {
	if err := ctx.Err(); err != nil {
		return 0, nil, err
	}
	var n int64
	err = q.QueryRow(ctx, read, r.name).Scan(&n, &document)
	for conflicts(err) && ctx.Err() == nil { // strict isolation may refuse a read, too
		err = q.QueryRow(ctx, read, r.name).Scan(&n, &document)
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, nil, nil
	case err != nil:
		return 0, nil, fmt.Errorf("postgres: register: %w", err)
	}
	number = uint64(n)
	if err := register.Check(number, document); err != nil {
		return 0, nil, fmt.Errorf("%w: postgres: row %q of stormguard_register: %w", register.ErrMalformed, r.name, err)
	}
	return number, document, nil
}

// Read returns the newest document, in one round trip.
func (r *Register) Read(ctx context.Context) (number uint64, document []byte, err error) {
	return r.read(ctx, r.pool)
}

// CompareAndSet writes a document, in one round trip, or two if another writer was faster.
func (r *Register) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if err := register.Check(number, document); err != nil {
		return err
	}
	if number > 1<<63-1 {
		return fmt.Errorf("%w: number %d: it must be at most %d here", register.ErrDocument, number, int64(1<<63-1))
	}
	conn, err := r.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("postgres: register: %w", err)
	}
	defer conn.Release()
	statement := next
	if number == 1 {
		statement = first
	}
	for {
		tag, err := conn.Exec(ctx, statement, r.name, int64(number), document)
		if err != nil && !refused(err) {
			return fmt.Errorf("%w: postgres: %w", register.ErrUnknown, err)
		}
		if err == nil && tag.RowsAffected() == 1 {
			return nil
		}
		if err != nil && !conflicts(err) {
			return fmt.Errorf("postgres: register: %w", err)
		}
		newest, _, readErr := r.read(ctx, conn)
		if readErr != nil {
			return readErr
		}
		if err == nil || newest != number-1 {
			return &register.ConflictError{Newest: newest}
		}
		// Strict isolation may refuse a write because of one that is not committed yet.
	}
}

// refused tells whether a write was not done, and never will be: it was not sent, or the server
// says why not. A server that is shutting down may report an error after it has committed.
func refused(err error) bool {
	if pgconn.SafeToRetry(err) {
		return true
	}
	var said *pgconn.PgError
	if !errors.As(err, &said) {
		return false
	}
	switch said.Code[:min(2, len(said.Code))] {
	case "08", "57", "58", "XX": // connection, shutdown and cancellation, system, internal
		return false
	default:
		return said.Code != "40003" // completion unknown
	}
}

// conflicts tells whether a write was refused because of another write, as strict isolation does.
func conflicts(err error) bool {
	var said *pgconn.PgError
	return errors.As(err, &said) && said.Code == "40001"
}

// Watch listens for the notifications of writers. It also reads every 2 s: notifications get lost
// if a pooler gives each transaction another connection.
func (r *Register) Watch(ctx context.Context, on func(register.Event)) error {
	return registers.Watch(ctx, func(number uint64, document []byte, err error) {
		on(register.Event{Number: number, Document: document, Err: err})
	}, r.session)
}

func (r *Register) session(ctx context.Context, emit func(uint64, []byte) error) error {
	brief := func() (context.Context, context.CancelFunc) { return context.WithTimeout(ctx, registers.Pulse) }
	starting, cancel := brief()
	defer cancel()
	pooled, err := r.pool.Acquire(starting)
	if err != nil {
		return fmt.Errorf("postgres: register: %w", err)
	}
	conn := pooled.Hijack() // it listens, so it cannot go back to the pool
	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewell)
		defer cancel()
		_ = conn.Close(ending) // an error would change nothing
	}()
	if _, err := conn.Exec(starting, "LISTEN stormguard_register"); err != nil {
		return fmt.Errorf("postgres: register: listen: %w", err)
	}
	for {
		reading, cancel := brief()
		number, document, err := r.read(reading, conn)
		cancel()
		if err != nil {
			return err
		}
		if err := emit(number, document); err != nil {
			return err
		}
		if err := r.wait(ctx, conn); err != nil {
			return err
		}
	}
}

// farewell is how long the end of a watch waits for the server.
const farewell = 100 * time.Millisecond

// wait returns when a notification of this register comes, or when it is time to read.
func (r *Register) wait(ctx context.Context, conn *pgx.Conn) error {
	waiting, cancel := context.WithTimeout(ctx, registers.Pulse)
	defer cancel()
	for {
		n, err := conn.WaitForNotification(waiting)
		switch {
		case err == nil && n.Payload != r.name:
		case err == nil:
			return nil
		case ctx.Err() == nil && waiting.Err() != nil && !conn.IsClosed():
			return nil
		default:
			return fmt.Errorf("postgres: register: %w", err)
		}
	}
}
