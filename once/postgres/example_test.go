// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stormguard-mq/stormguard/once/postgres"
)

// The effect and its mark are one commit.
func Example() { //nolint:testableexamples // it needs a PostgreSQL
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	pool, err := pgxpool.New(ctx, "postgres://billing@db-1/billing")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	marks, err := postgres.New(pool, postgres.Config{})
	if err != nil {
		log.Print(err)
		return
	}
	if err := marks.Create(ctx); err != nil {
		log.Print(err)
		return
	}
	err = marks.Do(ctx, "charge/17", func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance - 10 WHERE id = 17")
		return err
	})
	log.Print(err)
}
