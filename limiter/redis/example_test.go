// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"context"
	"fmt"
	"log"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/limiter"
	"github.com/stormguard-mq/stormguard/limiter/redis"
)

// One limit for all processes that name the same Redis and the same key.
func ExampleNew() { //nolint:testableexamples // needs a Redis
	client := goredis.NewClient(&goredis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	defer client.Close()
	store, err := redis.New(client, redis.Config{
		Limit:   limiter.Limit{Rate: 500, Burst: 100},
		Silence: redis.FailOpen, // rather too much than nothing
	})
	if err != nil {
		log.Print(err)
		return
	}
	defer store.Close()

	payments := store.Key("payments")
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	fmt.Println(payments.Allow(), payments.WaitN(ctx, 20))

	// A guard's source takes a handle of its own; Admit waits for nobody.
	_ = guard.SourceConfig{Name: "orders/0", Limiter: store.Key("payments")}
}
