// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/limiter"
	"github.com/stormguard-mq/stormguard/limiter/redis"
)

// openRedis is a decision at a real Redis on loopback: limiter/redis, one script in one
// round trip.
func openRedis(ctx context.Context) (Runner, error) {
	addr, err := brokers.Find(ctx, brokers.Redis)
	if err != nil {
		return Runner{}, err
	}
	o, err := goredis.ParseURL(addr)
	if err != nil {
		return Runner{}, err
	}
	o.ContextTimeoutEnabled = true
	client := goredis.NewClient(o)
	store, err := redis.New(client, redis.Config{Limit: open, Prefix: fmt.Sprintf("bench:%d:", os.Getpid()), Timeout: 10 * time.Second})
	if err != nil {
		return Runner{}, errors.Join(err, client.Close())
	}
	h := store.Key("k")
	if !h.Allow() {
		return Runner{}, errors.Join(store.Err(), client.Close())
	}
	return Runner{
		Do:    func(_ context.Context, n int) error { return decide(n, 1, true, h.Allow) },
		Close: func() error { store.Close(); return client.Close() },
	}, nil
}

const askMethod = "/bench.Limit/Ask"

// openRemote is a decision at a limiter in another process's place: a gRPC server on
// loopback, which does nothing but ask a limit of its own.
func openRemote(ctx context.Context) (Runner, error) {
	l, err := limiter.Local(open)
	if err != nil {
		return Runner{}, err
	}
	socket, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return Runner{}, err
	}
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "bench.Limit", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Ask", Handler: func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			key := new(wrapperspb.StringValue)
			if err := decode(key); err != nil {
				return nil, err
			}
			return wrapperspb.Bool(l.Allow()), nil
		}}},
	}, struct{}{})
	done := make(chan error, 1)
	go func() { done <- server.Serve(socket) }()
	end := func() error { server.Stop(); return <-done }
	client, err := grpc.NewClient(socket.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return Runner{}, errors.Join(err, end())
	}
	return Runner{
		Do: func(ctx context.Context, n int) error {
			key, yes := wrapperspb.String("k"), new(wrapperspb.BoolValue)
			for range n {
				if err := client.Invoke(ctx, askMethod, key, yes); err != nil {
					return err
				}
				if !yes.GetValue() {
					return errLimit
				}
			}
			return nil
		},
		Close: func() error { return errors.Join(client.Close(), end()) },
	}, nil
}
