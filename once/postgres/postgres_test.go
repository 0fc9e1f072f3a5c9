// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/internal/oncetest"
	"github.com/stormguard-mq/stormguard/once"
	"github.com/stormguard-mq/stormguard/once/postgres"
)

func TestMain(m *testing.M) {
	oncetest.Main(child)
	goleak.VerifyTestMain(m)
}

// effects is a store as the suite knows it. The transaction is where Record finds it.
type effects struct{ s *postgres.Store }

type txKey struct{}

func (e effects) Do(ctx context.Context, key string, effect func(context.Context) error) error {
	return e.s.Do(ctx, key, func(ctx context.Context, tx pgx.Tx) error {
		return effect(context.WithValue(ctx, txKey{}, tx))
	})
}

// child is the process that is killed: its effect is a row in the transaction.
func child(c oncetest.Child) (oncetest.ChildEffects, error) {
	pool, err := pgxpool.New(context.Background(), c.Args[0])
	if err != nil {
		return oncetest.ChildEffects{}, err
	}
	s, err := postgres.New(pool, postgres.Config{})
	return oncetest.ChildEffects{
		Effects: effects{s},
		Record: func(ctx context.Context, key string) error {
			_, err := ctx.Value(txKey{}).(pgx.Tx).Exec(ctx, "INSERT INTO ledger (key) VALUES ($1)", key)
			return err
		},
	}, err
}

// schema is an empty schema of a database, with its tables.
func schema(t testing.TB, options string) (addr string) {
	t.Helper()
	name := fmt.Sprintf("once_%016x", rand.Uint64())
	direct := brokers.ForTest(t, brokers.Postgres)
	pool := connect(t, direct)
	if _, err := pool.Exec(t.Context(), "CREATE SCHEMA "+name); err != nil {
		t.Fatal(err)
	}
	addr = direct + "&options=-c%20search_path%3D" + name + options
	s, err := postgres.New(connect(t, addr), postgres.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	return addr
}

func connect(t testing.TB, addr string) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(addr)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 4
	cfg.ConnConfig.ConnectTimeout = 20 * time.Second
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func open(t testing.TB, addr string, cfg postgres.Config) (*postgres.Store, *pgxpool.Pool) {
	t.Helper()
	pool := connect(t, addr)
	s, err := postgres.New(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s, pool
}

func TestStore(t *testing.T) {
	t.Parallel()
	oncetest.Run(t, func(t *testing.T) oncetest.Opener {
		addr := schema(t, "")
		return func(t *testing.T) oncetest.Effects {
			s, _ := open(t, addr, postgres.Config{})
			return effects{s}
		}
	})
}

// Effect and mark are one commit: no kill repeats one or loses one.
func TestKilled(t *testing.T) {
	t.Parallel()
	addr := schema(t, "%20-c%20synchronous_commit%3Doff") // which the mark overrules
	pool := connect(t, addr)
	if _, err := pool.Exec(t.Context(), "CREATE TABLE ledger (key text NOT NULL)"); err != nil {
		t.Fatal(err)
	}
	kills := oncetest.Kills{Args: []string{addr}, Exact: true, Effects: func(t *testing.T) map[string]int {
		rows, err := pool.Query(t.Context(), "SELECT key, count(*) FROM ledger GROUP BY key")
		if err != nil {
			t.Fatal(err)
		}
		found := make(map[string]int)
		var key string
		var n int
		if _, err := pgx.ForEachRow(rows, []any{&key, &n}, func() error { found[key] = n; return nil }); err != nil {
			t.Fatal(err)
		}
		return found
	}}
	kills.Holds(t)
}

// The caller's own transaction.
func TestMark(t *testing.T) {
	t.Parallel()
	addr := schema(t, "%20-c%20synchronous_commit%3Doff")
	s, pool := open(t, addr, postgres.Config{})
	if err := s.Create(t.Context()); err != nil {
		t.Errorf("a second time: %v", err)
	}
	mark := func(end func(pgx.Tx, context.Context) error) (first bool) {
		t.Helper()
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(t.Context()) //nolint:errcheck // of nothing
		if first, err = postgres.Mark(t.Context(), tx, "a"); err != nil {
			t.Fatal(err)
		}
		var mode string
		if err := tx.QueryRow(t.Context(), "SHOW synchronous_commit").Scan(&mode); err != nil || mode != "on" {
			t.Errorf("synchronous_commit is %s, %v", mode, err)
		}
		if err := end(tx, t.Context()); err != nil {
			t.Fatal(err)
		}
		return first
	}
	if !mark(pgx.Tx.Rollback) || !mark(pgx.Tx.Commit) || mark(pgx.Tx.Commit) {
		t.Error("want the first two to be first: one is rolled back")
	}
	if _, err := postgres.Mark(t.Context(), nil, ""); !errors.Is(err, once.ErrKey) {
		t.Error(err)
	}
}

// Marks are forgotten after Age, by Do itself.
func TestForget(t *testing.T) {
	t.Parallel()
	addr := schema(t, "")
	s, pool := open(t, addr, postgres.Config{Age: time.Hour})
	fill := func(age string, n int) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), `INSERT INTO stormguard_once SELECT ('k' || $1 || i)::bytea, now() - $1::interval FROM generate_series(1, $2) i`, age, n); err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(t.Context(), `INSERT INTO stormguard_once_entity SELECT 'order', ($1 || i)::bytea, '{}', now() - $1::interval FROM generate_series(1, $2) i`, age, n); err != nil {
			t.Fatal(err)
		}
	}
	fill("30 minutes", 10) // a busy server needs more than one for what follows
	fill("61 minutes", 5000)
	if n, err := s.Forget(t.Context()); n != 8000 || err != nil {
		t.Errorf("%d forgotten, %v; want 4,000 marks and as many entities", n, err)
	}
	for i := range 1000 {
		if err := s.Do(t.Context(), fmt.Sprint(i), func(context.Context, pgx.Tx) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	var marks, entities int
	if err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM stormguard_once), (SELECT count(*) FROM stormguard_once_entity)`).Scan(&marks, &entities); err != nil {
		t.Fatal(err)
	}
	if marks != 1010 || entities != 10 {
		t.Errorf("%d marks and %d entities, want 1010 and 10", marks, entities)
	}
}

func TestStep(t *testing.T) {
	t.Parallel()
	addr := schema(t, "")
	s, pool := open(t, addr, postgres.Config{})
	m := oncetest.Order(t)
	step := func(to string) (first bool, err error) {
		return first, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			first, err = postgres.Step(t.Context(), tx, m, "17", to)
			return err
		})
	}
	for _, tt := range []struct {
		to    string
		first bool
		err   error
	}{
		{"packed", false, once.ErrImpossible},
		{"created", false, nil},
		{"allocated", true, nil},
		{"allocated", false, nil},
		{"packed", true, nil},
		{"cancelled", false, once.ErrImpossible},
		{"allocated", false, nil},
		{"shipped", true, nil},
	} {
		if first, err := step(tt.to); first != tt.first || !errors.Is(err, tt.err) {
			t.Fatalf("%s: %t, %v; want %t, %v", tt.to, first, err, tt.first, tt.err)
		}
	}
	if d, err := s.Compare(t.Context(), m); len(d) > 0 || err != nil {
		t.Errorf("%v, %v; want no differences", d, err)
	}
	// The states are restored from before the last step: the mark is what is left of it.
	if _, err := pool.Exec(t.Context(), "UPDATE stormguard_once_entity SET path = '{allocated,packed}'"); err != nil {
		t.Fatal(err)
	}
	d, err := s.Compare(t.Context(), m)
	if want := (once.Difference{Entity: "17", State: "packed", Step: "shipped", Detail: once.MarkOnly}); err != nil || len(d) != 1 || d[0] != want {
		t.Errorf("%v, %v; want %v", d, err, want)
	}
	if first, err := step("shipped"); first || err != nil {
		t.Errorf("%t, %v: the mark does not count", first, err)
	}
	if d, err := s.Compare(t.Context(), m); len(d) > 0 || err != nil {
		t.Errorf("%v, %v; want it to be mended", d, err)
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := postgres.New(nil, postgres.Config{Age: 1})
	if err == nil || !strings.Contains(err.Error(), "a pool") || !strings.Contains(err.Error(), "Config.Age") {
		t.Errorf("%v: want both problems", err)
	}
}
