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

// errConfig is what every refusal of a configuration begins with.
var errConfig = errors.New("limitgrpc: config")

// Config is what an operator may set from a file, a flag or the environment. The
// zero value is valid.
type Config struct {
	// MaxWait is how long a call or message may wait to be admitted, in [0, 1h]; unset
	// means that it is answered at once.
	MaxWait time.Duration

	// PerMessage has each message that a client sends in a stream cost one admission.
	// While one waits the stream's flow control slows the client down; one that is
	// denied ends the stream. Unary calls have their one message and pay once.
	PerMessage bool
}

// Validate returns one error with all that is wrong, or nil.
func (c Config) Validate() error {
	if c.MaxWait < 0 || c.MaxWait > time.Hour {
		return fmt.Errorf("%w: MaxWait: %v is not in [0s, 1h0m0s]", errConfig, c.MaxWait)
	}
	return nil
}

// An Interceptor lets calls in. It is safe for concurrent use and has nothing to close.
type Interceptor struct{ rules atomic.Pointer[rules] }

// rules are never changed, only exchanged.
type rules struct {
	choose func(ctx context.Context, method string) limiter.Gate
	cfg    Config
}

// New is an interceptor. choose returns the gate of a call; nil admits everything. method is the
// full one, /package.Service/Method. choose is called for each call, and for each message
// with Config.PerMessage, by many goroutines: it must be quick. A gate with waiters in line
// is kept and not made anew each time, see [limiter.All].
func New(choose func(ctx context.Context, method string) limiter.Gate, cfg Config) (*Interceptor, error) {
	d := &Interceptor{}
	return d, d.Swap(choose, cfg)
}

// Swap exchanges function and configuration. What waits already goes on at the gate
// that was chosen for it; the next call, and the next message of a stream that is
// open, have the new ones. After an error the old ones stay.
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

// Unary is the interceptor for unary calls.
func (d *Interceptor) Unary() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		err := d.rules.Load().enter(ctx, info.FullMethod, func(md metadata.MD) { _ = grpc.SetTrailer(ctx, md) })
		if err != nil {
			return nil, err
		}
		return next(ctx, request)
	}
}

// Stream is the interceptor for streams.
func (d *Interceptor) Stream() grpc.StreamServerInterceptor {
	return func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if err := d.rules.Load().enter(stream.Context(), info.FullMethod, stream.SetTrailer); err != nil {
			return err
		}
		return next(server, &limited{ServerStream: stream, interceptor: d, method: info.FullMethod})
	}
}

// limited is a stream whose messages cost.
type limited struct {
	grpc.ServerStream

	interceptor *Interceptor
	method      string
}

// RecvMsg admits a message after it has come, so that a client that says nothing
// takes nothing.
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

// millis is a time in milliseconds, rounded up, as far as an int32 goes, which is
// what the trailer has.
func millis(d time.Duration) string {
	up := d / time.Millisecond
	if d%time.Millisecond > 0 {
		up++
	}
	return strconv.FormatInt(int64(min(up, math.MaxInt32)), 10)
}

// PeerIP is a key: the address that the connection comes from, as [limiter.AddrKey]
// has it.
func PeerIP(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return ""
	}
	return limiter.AddrKey(p.Addr.String())
}

// Metadata is a key: the first value of a name in what the client has sent, which is
// the client's word. It is empty if there is none.
func Metadata(ctx context.Context, name string) string {
	if values := metadata.ValueFromIncomingContext(ctx, name); len(values) > 0 {
		return values[0]
	}
	return ""
}
