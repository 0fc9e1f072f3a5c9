// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limitgrpc_test

import (
	"context"
	"fmt"
	"log"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/limiter"
	"github.com/stormguard-mq/stormguard/limiter/limitgrpc"
)

// Each tenant has a limit of its own.
func ExampleNew() {
	tenants, err := fleet.Start(fleet.Config{Fleet: "api", Name: "api-0", Limits: fleet.Limits{ // a roster would share them
		Limit: limiter.Limit{Rate: .01, Burst: 2},
	}})
	if err != nil {
		log.Fatal(err)
	}
	defer tenants.Close()
	interceptor, err := limitgrpc.New(func(ctx context.Context, _ string) limiter.Gate {
		return tenants.Key(limitgrpc.Metadata(ctx, "tenant")) // without a tenant: denied
	}, limitgrpc.Config{})
	if err != nil {
		log.Fatal(err)
	}
	addr, stop, err := serve(grpc.ChainUnaryInterceptor(interceptor.Unary()), grpc.ChainStreamInterceptor(interceptor.Stream()))
	if err != nil {
		log.Fatal(err)
	}
	defer stop()

	client, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx := metadata.AppendToOutgoingContext(context.Background(), "tenant", "acme")
	for range 3 {
		err := client.Invoke(ctx, ping, wrapperspb.String("hello"), new(wrapperspb.StringValue))
		fmt.Println(status.Code(err))
	}
	// Output:
	// OK
	// OK
	// ResourceExhausted
}
