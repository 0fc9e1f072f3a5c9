// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stormguard-mq/stormguard/fleet/register/postgres"
)

// The configuration of a fleet in a row of PostgreSQL.
func Example() { //nolint:testableexamples // it needs a PostgreSQL
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	pool, err := pgxpool.New(ctx, "postgres://payments@db-1,db-2/payments?target_session_attrs=read-write")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	r, err := postgres.New(pool, "payments")
	if err != nil {
		log.Print(err)
		return
	}
	if err := r.Create(ctx); err != nil {
		log.Print(err)
		return
	}
	fmt.Println(r.CompareAndSet(ctx, 1, []byte("rate: 1000")))
}
