// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd_test

import (
	"context"
	"fmt"
	"log"
	"math/rand/v2"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stormguard-mq/stormguard/breaker/etcd"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/internal/registertest"
)

// registerAt is an empty register at an etcd, each handle with a client of its own.
func registerAt(endpoint string) registertest.Place {
	key := fmt.Sprintf("/register-%016x", rand.Uint64())
	return registertest.Place{Open: func(t *testing.T) register.Register {
		client, err := clientv3.New(clientv3.Config{
			Endpoints: []string{endpoint}, DialTimeout: 5 * time.Second,
			DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 2 * time.Second,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = client.Close() })
		r, err := etcd.NewRegister(client, key)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}}
}

func TestRegister(t *testing.T) {
	t.Parallel()
	addr := brokers.ForTest(t, brokers.Etcd)
	registertest.Run(t, func(*testing.T) registertest.Place { return registerAt(addr) })
}

func TestRegisterFaults(t *testing.T) {
	t.Parallel()
	t.Run("Killed", func(t *testing.T) {
		t.Parallel()
		b := brokers.StartForTest(t, brokers.Etcd, brokers.Options{})
		p := registerAt(b.Addr())
		p.Break, p.Mend = registertest.Killed(b)
		registertest.Fault(t, p)
	})
	t.Run("Stopped", func(t *testing.T) {
		t.Parallel()
		b := brokers.StartForTest(t, brokers.Etcd, brokers.Options{})
		p := registerAt(b.Addr())
		p.Break, p.Mend = registertest.Stopped(b)
		registertest.Fault(t, p)
	})
}

// The configuration of a fleet in etcd. Whoever is first writes number 1.
func ExampleNewRegister() { //nolint:testableexamples // it needs an etcd
	client, err := clientv3.New(clientv3.Config{
		Endpoints:         []string{"https://etcd-1:2379", "https://etcd-2:2379", "https://etcd-3:2379"},
		DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	r, err := etcd.NewRegister(client, "/stormguard/payments/configuration")
	if err != nil {
		log.Print(err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	fmt.Println(r.CompareAndSet(ctx, 1, []byte("rate: 1000")))
}
