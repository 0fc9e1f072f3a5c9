// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limitgrpc_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/limiter"
	"github.com/stormguard-mq/stormguard/limiter/limitgrpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ms = time.Millisecond

func local(t testing.TB, rate float64, burst int) *limiter.Limiter {
	t.Helper()
	s, err := escrow.New(crdt.Replica{Name: "a"}, escrow.Config{Limit: escrow.Limit{Rate: rate, Burst: burst}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return (*limiter.Limiter)(s.Key("k"))
}

func always(g limiter.Gate) func(context.Context, string) limiter.Gate {
	return func(context.Context, string) limiter.Gate { return g }
}

func open(t testing.TB, choose func(context.Context, string) limiter.Gate, cfg limitgrpc.Config, opts ...grpc.DialOption) (*limitgrpc.Interceptor, *grpc.ClientConn) {
	t.Helper()
	d, err := limitgrpc.New(choose, cfg)
	if err != nil {
		t.Fatal(err)
	}
	addr, stop, err := serve(grpc.ChainUnaryInterceptor(d.Unary()), grpc.ChainStreamInterceptor(d.Stream()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	c, err := grpc.NewClient(addr, append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return d, c
}

func call(ctx context.Context, c *grpc.ClientConn, opts ...grpc.CallOption) error {
	out := new(wrapperspb.StringValue)
	err := c.Invoke(ctx, ping, wrapperspb.String("hello"), out, opts...)
	if err == nil && out.GetValue() != "hello" {
		return errors.New("another answer")
	}
	return err
}

// delay is what a denial says.
func delay(t testing.TB, err error) time.Duration {
	t.Helper()
	s := status.Convert(err)
	if s.Code() != codes.ResourceExhausted || len(s.Details()) != 1 {
		t.Fatalf("%v, %v", err, s.Details())
	}
	info, ok := s.Details()[0].(*errdetails.RetryInfo)
	if !ok {
		t.Fatalf("%v", s.Details())
	}
	return info.GetRetryDelay().AsDuration()
}

func TestConfig(t *testing.T) {
	_, err := limitgrpc.New(nil, limitgrpc.Config{MaxWait: 2 * time.Hour})
	if err == nil || !strings.Contains(err.Error(), "MaxWait: 2h") || !strings.Contains(err.Error(), "choose") {
		t.Error(err)
	}
}

func TestUnary(t *testing.T) {
	_, c := open(t, always(local(t, .001, 2)), limitgrpc.Config{})
	var trailer metadata.MD
	for range 2 {
		if err := call(t.Context(), c, grpc.Trailer(&trailer)); err != nil || len(trailer["grpc-retry-pushback-ms"]) != 0 {
			t.Fatal(err, trailer)
		}
	}
	err := call(t.Context(), c, grpc.Trailer(&trailer))
	if d := delay(t, err); d < 900*time.Second || d > 1000*time.Second {
		t.Errorf("again in %v", d)
	}
	got := trailer["grpc-retry-pushback-ms"]
	if len(got) != 1 {
		t.Fatalf("trailer %v", trailer)
	}
	if ms, err := strconv.Atoi(got[0]); err != nil || ms < 900_000 || ms > 1_000_000 {
		t.Errorf("trailer %v", trailer)
	}
}

// A client with a retry policy is told when, and then it is admitted.
func TestPushback(t *testing.T) {
	g := local(t, 4, 1)
	_, c := open(t, always(g), limitgrpc.Config{}, grpc.WithDefaultServiceConfig(`{"methodConfig":[{"name":[{}],"retryPolicy":{
		"maxAttempts":5,"initialBackoff":"0.001s","maxBackoff":"0.001s","backoffMultiplier":1,"retryableStatusCodes":["RESOURCE_EXHAUSTED"]}}]}`))
	start := time.Now()
	for range 3 {
		if err := call(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	if d := time.Since(start); d < 490*ms {
		t.Errorf("3 of 4/s in %v", d)
	}
}

func TestDeadlines(t *testing.T) {
	// A minute away: known, so answered at once, whatever the deadline.
	_, c := open(t, always(local(t, 1./60, 1)), limitgrpc.Config{MaxWait: time.Hour})
	if err := call(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	start := time.Now()
	if d := delay(t, call(ctx, c)); d < 30*time.Second || d > time.Minute {
		t.Errorf("again in %v", d)
	}
	if d := time.Since(start); d > 20*time.Second {
		t.Errorf("took %v", d)
	}
	// One that is there in time.
	_, c = open(t, always(local(t, 5, 1)), limitgrpc.Config{MaxWait: 20 * time.Second})
	start = time.Now()
	for range 3 {
		if err := call(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	if d := time.Since(start); d < 390*ms {
		t.Errorf("3 of 5/s in %v", d)
	}
	// A caller that goes away while it waits does not take a token.
	g := local(t, .2, 1)
	_, c = open(t, always(g), limitgrpc.Config{MaxWait: 20 * time.Second})
	ctx, cancel = context.WithCancel(t.Context())
	if err := call(ctx, c); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(100*ms, cancel)
	if err := call(ctx, c); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	if err := g.Wait(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestClosedGate(t *testing.T) {
	s, err := escrow.New(crdt.Replica{Name: "a"}, escrow.Config{Limit: escrow.Limit{Rate: 1, Burst: 1}})
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	_, c := open(t, always((*limiter.Limiter)(s.Key("k"))), limitgrpc.Config{})
	if err := call(t.Context(), c); status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
}

// talk says n things in one stream and hears as many, or why not.
func talk(ctx context.Context, c *grpc.ClientConn, n int) (heard int, trailer metadata.MD, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, chat)
	if err != nil {
		return 0, nil, err
	}
	for range n {
		if err := stream.SendMsg(wrapperspb.String("x")); err != nil && !errors.Is(err, io.EOF) {
			return heard, nil, err
		}
		if err := stream.RecvMsg(new(wrapperspb.StringValue)); err != nil {
			return heard, stream.Trailer(), err
		}
		heard++
	}
	if err := stream.CloseSend(); err != nil {
		return heard, nil, err
	}
	err = stream.RecvMsg(new(wrapperspb.StringValue))
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return heard, stream.Trailer(), err
}

func TestStreams(t *testing.T) {
	_, c := open(t, always(local(t, .001, 2)), limitgrpc.Config{})
	for range 2 {
		if heard, _, err := talk(t.Context(), c, 20); heard != 20 || err != nil {
			t.Fatal(heard, err)
		}
	}
	heard, trailer, err := talk(t.Context(), c, 20)
	if d := delay(t, err); heard != 0 || d < 900*time.Second || len(trailer["grpc-retry-pushback-ms"]) != 1 {
		t.Error(heard, d, trailer)
	}
}

func TestMessages(t *testing.T) {
	_, c := open(t, always(local(t, .001, 8)), limitgrpc.Config{PerMessage: true})
	if heard, _, err := talk(t.Context(), c, 2); heard != 2 || err != nil { // 3
		t.Fatal(heard, err)
	}
	heard, trailer, err := talk(t.Context(), c, 20) // 1, and the 4 that are left
	if delay(t, err); heard != 4 || len(trailer["grpc-retry-pushback-ms"]) != 1 {
		t.Error(heard, trailer)
	}
	// With a wait they come at the rate.
	_, c = open(t, always(local(t, 20, 1)), limitgrpc.Config{PerMessage: true, MaxWait: 20 * time.Second})
	start := time.Now()
	if heard, _, err := talk(t.Context(), c, 6); heard != 6 || err != nil {
		t.Fatal(heard, err)
	}
	if d := time.Since(start); d < 295*ms {
		t.Errorf("7 of 20/s in %v", d)
	}
}

// Keys by method, metadata and peer; and no gate.
func TestChoice(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]bool{}
	_, c := open(t, func(ctx context.Context, method string) limiter.Gate {
		mu.Lock()
		defer mu.Unlock()
		seen[method+" "+limitgrpc.PeerIP(ctx)+" "+limitgrpc.Metadata(ctx, "Tenant")] = true
		return nil
	}, limitgrpc.Config{PerMessage: true})
	ctx := metadata.AppendToOutgoingContext(t.Context(), "tenant", "a", "tenant", "b")
	if err := call(ctx, c); err != nil {
		t.Error(err)
	}
	if heard, _, err := talk(t.Context(), c, 3); heard != 3 || err != nil {
		t.Error(heard, err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !seen[ping+" 127.0.0.1 a"] || !seen[chat+" 127.0.0.1 "] || len(seen) != 2 {
		t.Errorf("%v", seen)
	}
	for addr, want := range map[net.Addr]string{
		&net.TCPAddr{IP: net.ParseIP("2001:db8:1:2:3::4"), Port: 1}: "2001:db8:1:2::/64",
		&net.UnixAddr{Name: "@x"}:                                   "",
		nil:                                                         "",
	} {
		if got := limitgrpc.PeerIP(peer.NewContext(t.Context(), &peer.Peer{Addr: addr})); got != want {
			t.Errorf("%v: %q, want %q", addr, got, want)
		}
	}
	if got := limitgrpc.PeerIP(t.Context()); got != "" {
		t.Error(got)
	}
}

// Gates are exchanged while calls are served, and a stream that is open has the new
// one with its next message.
func TestSwapUnderLoad(t *testing.T) {
	d, c := open(t, always(nil), limitgrpc.Config{PerMessage: true})
	var all sync.WaitGroup
	var served, denied atomic.Int64
	stop := make(chan struct{})
	for range 4 {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				switch err := call(t.Context(), c); status.Code(err) {
				case codes.OK:
					served.Add(1)
				case codes.ResourceExhausted:
					denied.Add(1)
				default:
					t.Error(err)
				}
			}
		})
	}
	stream, err := c.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, chat)
	if err != nil {
		t.Fatal(err)
	}
	say := func() error {
		if err := stream.SendMsg(wrapperspb.String("x")); err != nil {
			return err
		}
		return stream.RecvMsg(new(wrapperspb.StringValue))
	}
	for i := range 6 {
		before := served.Load() + denied.Load()
		for served.Load()+denied.Load() < before+20 {
			time.Sleep(ms)
		}
		g := limiter.Gate(nil)
		if i%2 == 1 {
			g = local(t, 1e6, 100)
		}
		if err := d.Swap(always(g), limitgrpc.Config{PerMessage: true}); err != nil {
			t.Error(err)
		}
		if err := say(); err != nil {
			t.Fatal(err)
		}
	}
	none := local(t, .001, 1)
	none.Allow()
	if err := errors.Join(d.Swap(nil, limitgrpc.Config{}), d.Swap(always(none), limitgrpc.Config{PerMessage: true})); err == nil || !strings.Contains(err.Error(), "choose: nil") {
		t.Error(err)
	}
	if err := say(); status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
	for before := denied.Load(); denied.Load() < before+20; {
		time.Sleep(ms)
	}
	close(stop)
	all.Wait()
	if served.Load() == 0 {
		t.Error("nothing was served")
	}
}
