// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd_test

import (
	"context"
	"log"
	"os"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/breaker/etcd"
	"github.com/stormguard-mq/stormguard/guard"
)

// Three consumers of one group. Their guards open, probe and close together, by
// what etcd has.
func Example() { //nolint:testableexamples // it needs an etcd
	client, err := clientv3.New(clientv3.Config{
		Endpoints:         []string{"https://etcd-1:2379", "https://etcd-2:2379", "https://etcd-3:2379"},
		DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 3 * time.Second, // or calls go on to a node that died without a word
	})
	if err != nil {
		log.Fatal(err)
	}
	authority, err := etcd.New(client, etcd.Config{
		Prefix: "/stormguard/orders",
		Name:   os.Getenv("POD_NAME"),
		Roster: breaker.Roster{Number: 1, Names: []string{"orders-0", "orders-1", "orders-2"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	g, err := guard.New(guard.Config{Group: "orders"}, guard.WithFleet(authority))
	if err != nil {
		log.Fatal(err)
	}

	// … consume, and at the end in this order:
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if _, err := g.Close(ctx); err != nil {
		log.Print(err)
	}
	authority.Close()
	if err := client.Close(); err != nil {
		log.Print(err)
	}
}
