// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limitgrpc_test

import (
	"context"
	"errors"
	"io"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const ping, chat = "/test.Echo/Ping", "/test.Echo/Chat"

// echo is a service that says what it hears, once or again and again.
var echo = grpc.ServiceDesc{
	ServiceName: "test.Echo",
	HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{
		MethodName: "Ping",
		Handler: func(server any, ctx context.Context, decode func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) {
			in := new(wrapperspb.StringValue)
			if err := decode(in); err != nil {
				return nil, err
			}
			answer := func(_ context.Context, request any) (any, error) { return request, nil }
			if intercept == nil {
				return answer(ctx, in)
			}
			return intercept(ctx, in, &grpc.UnaryServerInfo{Server: server, FullMethod: ping}, answer)
		},
	}},
	Streams: []grpc.StreamDesc{{
		StreamName: "Chat", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error {
			for {
				in := new(wrapperspb.StringValue)
				if err := stream.RecvMsg(in); errors.Is(err, io.EOF) {
					return nil
				} else if err != nil {
					return err
				}
				if err := stream.SendMsg(in); err != nil {
					return err
				}
			}
		},
	}},
}

// serve serves echo on loopback until stop is called, which waits.
func serve(opts ...grpc.ServerOption) (addr string, stop func(), err error) {
	socket, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	s := grpc.NewServer(opts...)
	s.RegisterService(&echo, struct{}{})
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(socket) }()
	return socket.Addr().String(), func() { s.Stop(); <-done }, nil
}
