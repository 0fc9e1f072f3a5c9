// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package examples

import (
	"context"
	"fmt"
	"log"
	"net"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// counted counts the calls of a gRPC client that the handlers make: an interceptor of the
// client does it for all of them.
func counted(dependency string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		done := guard.Calls(ctx, dependency)
		err := call(ctx, method, req, reply, conn, opts...)
		done(err)
		return err
	}
}

func Example_callsOfGRPC() {
	addr, stop := healthServer()
	defer stop()
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUnaryInterceptor(counted("stock")))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()

	g := guard.Must(guard.New(guard.Config{Group: "orders"}))
	defer g.Close(context.Background())
	check, err := guard.Protect(g, guard.SourceConfig{Name: "check"}, func(ctx context.Context, service string) error {
		_, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(check.Call(context.Background(), ""))
	fmt.Println(check.Call(context.Background(), "unknown") != nil)
	for _, flow := range g.Flows() {
		fmt.Printf("%s calls %s: %d, failed %d\n", flow.From.Name, flow.To.Name, flow.Count, flow.Failed)
	}
	// Output:
	// <nil>
	// true
	// orders calls stock: 2, failed 1
}

// healthServer is a gRPC server that knows no service by name.
func healthServer() (addr string, stop func()) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	go server.Serve(l) //nolint:errcheck // Stop ends it
	return l.Addr().String(), server.Stop
}

// A tracer of pgx counts the queries that the handlers make, also those through
// database/sql and pgx's stdlib.
type tracer struct{ dependency string }

type queryKey struct{}

func (t tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, queryKey{}, guard.Calls(ctx, t.dependency))
}

func (t tracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryEndData) {
	ctx.Value(queryKey{}).(func(error))(query.Err)
}

// Calls counts a handler's queries, and tells those that fail.
func TestCallsOfPostgres(t *testing.T) {
	cfg, err := pgxpool.ParseConfig(brokers.ForTest(t, brokers.Postgres))
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.Tracer = tracer{"payments-db"}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()

	g := guard.Must(guard.New(guard.Config{Group: "orders"}))
	defer g.Close(context.Background())
	charge, err := guard.Protect(g, guard.SourceConfig{Name: "charge"}, func(ctx context.Context, query string) error {
		_, err := pool.Exec(ctx, query)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := charge.Call(t.Context(), "SELECT 1"); err != nil {
		t.Error(err)
	}
	if err := charge.Call(t.Context(), "SELECT 1 FROM nowhere"); err == nil {
		t.Error("a table that does not exist was read")
	}
	flows := g.Flows()
	if !slices.ContainsFunc(flows, func(f guard.Flow) bool {
		return f.From.Name == "orders" && f.To.Name == "payments-db" && f.Count == 2 && f.Failed == 1
	}) {
		t.Errorf("%+v", flows)
	}
}
