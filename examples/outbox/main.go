// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command outbox charges each order exactly once, although orders are delivered more than
// once and the charge is outside the database. The handler writes the order, the mark of
// its message and a row of the outbox in one transaction of PostgreSQL. A relay sends the
// rows to the stream CHARGES, with a key by which JetStream recognises duplicates. The
// program runs until it is interrupted.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/once/postgres"
)

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("STORMGUARD_NATS"), "nats://127.0.0.1:4222"), "the server, with JetStream")
	db := flag.String("db", os.Getenv("STORMGUARD_POSTGRES"), "the PostgreSQL, as postgres://…")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *url, *db, send)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// A row stays in the outbox until it was sent. Rows are only nearly in the order of their
// commits, so a receiver that needs the order needs a number in the body.
const schema = `
CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY);
CREATE TABLE IF NOT EXISTS outbox (id bigserial PRIMARY KEY, key text NOT NULL UNIQUE, body bytea NOT NULL)`

// window is how long the stream CHARGES recognises a key: longer than the time from the
// first sending of a row to its deletion. After a longer stop, check before you start.
const window = 24 * time.Hour

// sender sends a row of the outbox. It may be called again for a row that was sent.
type sender func(ctx context.Context, js jetstream.JetStream, key string, body []byte) error

func send(ctx context.Context, js jetstream.JetStream, key string, body []byte) error {
	_, err := js.Publish(ctx, "charges", body, jetstream.WithMsgID(key))
	return err
}

func run(ctx context.Context, url, db string, send sender) (err error) {
	pool, err := pgxpool.New(ctx, db)
	if err != nil {
		return err
	}
	defer pool.Close()
	marks, err := postgres.New(pool, postgres.Config{})
	if err != nil {
		return err
	}
	if err := marks.Create(ctx); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.PingInterval(10*time.Second), nats.FlusherTimeout(5*time.Second)) // by default nats.go gives up after two minutes
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "CHARGES", Subjects: []string{"charges"}, Duplicates: window}); err != nil {
		return err
	}
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders"}})
	if err != nil {
		return err
	}
	consumer, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "billing", AckWait: 30 * time.Second})
	if err != nil {
		return err
	}
	letters, err := guardnats.NewDLQ(ctx, js, guardnats.DLQConfig{Stream: "ORDERS_DLQ"})
	if err != nil {
		return err
	}
	g, err := guard.New(guard.Config{Group: "billing"}, guard.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, closeErr := g.Close(ctx)
		err = errors.Join(err, closeErr)
	}()

	ctx, cancel := context.WithCancel(ctx)
	var relaying sync.WaitGroup
	defer relaying.Wait()
	defer cancel()
	relaying.Go(func() { relay(ctx, pool, js, send) })

	// The order, its mark and the row to send are one commit. The message is acked after
	// it.
	handle := func(ctx context.Context, m jetstream.Msg) error {
		order, err := strconv.ParseInt(string(m.Data()), 10, 64)
		if err != nil {
			return guard.Permanent(err)
		}
		key := "charge/" + string(m.Data())
		return marks.Do(ctx, key, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", order); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "INSERT INTO outbox (key, body) VALUES ($1, $2)", key, m.Data())
			return err
		})
	}
	return guardnats.Consume(ctx, g, consumer, handle, guardnats.WithDeadLetters(letters), guardnats.WithLogger(slog.Default()))
}

// relay sends the outbox, row by row. Several processes may run it.
func relay(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, send sender) {
	for wait := time.Duration(0); ; {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		sent, err := relayOne(ctx, pool, js, send)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			log.Print("relay: ", err)
			wait = time.Second
		case sent:
			wait = 0
		default:
			wait = 100 * time.Millisecond // the outbox is empty; LISTEN would save the wait
		}
	}
}

// relayOne sends the oldest row that no other process is sending, and then deletes it.
// After a crash between the two, the row is sent again, with the same key.
func relayOne(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, send sender) (sent bool, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var id int64
		var key string
		var body []byte
		err := tx.QueryRow(ctx, "SELECT id, key, body FROM outbox ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED").Scan(&id, &key, &body)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := send(ctx, js, key, body); err != nil {
			return err
		}
		sent = true
		_, err = tx.Exec(ctx, "DELETE FROM outbox WHERE id = $1", id)
		return err
	})
	return sent, err
}
