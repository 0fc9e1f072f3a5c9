// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limitgrpc

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stormguard-mq/stormguard/limiter"
)

// errConfig is the beginning of every error about a configuration.
var errConfig = errors.New("limitgrpc: config")

// Config holds the settings that an operator may set from a file, a flag or the environment.
// The zero value is valid.
type Config struct {
	// MaxWait is how long a call or message may wait to be admitted, in [0, 1h]; unset means
	// that it is answered at once.
	MaxWait time.Duration

	// PerMessage makes each message that a client sends in a stream cost one admission. While
	// a message waits, the stream's flow control slows the client down. A denied message ends
	// the stream. A unary call costs one admission in total.
	PerMessage bool
}

// Validate returns one error with all faults of c, or nil.
func (c Config) Validate() error {
	if c.MaxWait < 0 || c.MaxWait > time.Hour {
		return fmt.Errorf("%w: MaxWait: %v is not in [0s, 1h0m0s]", errConfig, c.MaxWait)
	}
	return nil
}

// An Interceptor limits the calls of a server. It is safe for concurrent use. Nothing needs
// to be closed.
type Interceptor struct{ rules atomic.Pointer[rules] }

// rules are never changed, only replaced by others.
type rules struct {
	choose func(ctx context.Context, method string) limiter.Gate
	cfg    Config
}

// New makes an interceptor. choose returns the gate of a call; nil admits everything. method
// is the full name, /package.Service/Method. choose is called by many goroutines for each
// call, and with Config.PerMessage for each message: it must be quick. It must not make a new
// gate each time if waiters are to be served in order, see [limiter.All].
func New(choose func(ctx context.Context, method string) limiter.Gate, cfg Config) (*Interceptor, error) {
	d := &Interceptor{}
	return d, d.Swap(choose, cfg)
}

// Swap replaces function and configuration. Calls and messages that already wait stay at the
// gate that was chosen for them. Later calls, and later messages of open streams, use the new
// ones. After an error the old ones stay.
func (d *Interceptor) Swap(choose func(ctx context.Context, method string) limiter.Gate, cfg Config) error {
	err := cfg.Validate()
	if choose == nil {
		err = errors.Join(err, fmt.Errorf("%w: choose: nil is not a function", errConfig))
	}
	if err == nil {
		d.rules.Store(&rules{choose, cfg})
	}
	return err
}

// Unary returns the interceptor for unary calls.
func (d *Interceptor) Unary() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		err := d.rules.Load().enter(ctx, info.FullMethod, func(md metadata.MD) { _ = grpc.SetTrailer(ctx, md) })
		if err != nil {
			return nil, err
		}
		return next(ctx, request)
	}
}

// Stream returns the interceptor for streams.
func (d *Interceptor) Stream() grpc.StreamServerInterceptor {
	return func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if err := d.rules.Load().enter(stream.Context(), info.FullMethod, stream.SetTrailer); err != nil {
			return err
		}
		return next(server, &limited{ServerStream: stream, interceptor: d, method: info.FullMethod})
	}
}

// limited is a stream whose messages cost admissions.
type limited struct {
	grpc.ServerStream

	interceptor *Interceptor
	method      string
}

// RecvMsg admits a message after it was received, so that a silent client takes no tokens.
func (l *limited) RecvMsg(m any) error {
	if err := l.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	now := l.interceptor.rules.Load()
	if !now.cfg.PerMessage {
		return nil
	}
	return now.enter(l.Context(), l.method, l.SetTrailer)
}

func (r *rules) enter(ctx context.Context, method string, trail func(metadata.MD)) error {
	g := r.choose(ctx, method)
	if g == nil {
		return nil
	}
	err := limiter.Enter(ctx, g, r.cfg.MaxWait)
	if err == nil {
		return nil
	}
	denied, ok := errors.AsType[*limiter.DeniedError](err)
	switch {
	case ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	case !ok:
		return status.Error(codes.Unavailable, "the limit of "+method+" cannot admit anything")
	}
	trail(metadata.Pairs("grpc-retry-pushback-ms", millis(denied.After)))
	s := status.New(codes.ResourceExhausted, "the limit of "+method+" is exceeded")
	if detailed, err := s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(denied.After)}); err == nil {
		s = detailed
	}
	return s.Err()
}

// millis returns a time in milliseconds, rounded up. It is at most the largest int32, the
// type of the trailer.
func millis(d time.Duration) string {
	up := d / time.Millisecond
	if d%time.Millisecond > 0 {
		up++
	}
	return strconv.FormatInt(int64(min(up, math.MaxInt32)), 10)
}

// PeerIP returns a key for the connection's remote address, see [limiter.AddrKey]. It is
// empty if the address is not known.
func PeerIP(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return ""
	}
	return limiter.AddrKey(p.Addr.String())
}

// Metadata returns a key: the first value of a name in the client's metadata, or an empty key
// if there is none. The client chooses the value, so it proves nothing.
func Metadata(ctx context.Context, name string) string {
	if values := metadata.ValueFromIncomingContext(ctx, name); len(values) > 0 {
		return values[0]
	}
	return ""
}
