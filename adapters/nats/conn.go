// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// connOf returns the connection of a consumer, nil if the consumer is not from nats.go.
// nats.go's consumers have no method for it, so connOf reads their fields.
func connOf(c jetstream.Consumer) *nats.Conn {
	v := reflect.ValueOf(c)
	for _, field := range []string{"js", "conn"} {
		if v = reflect.Indirect(v); v.Kind() != reflect.Struct {
			return nil
		}
		v = v.FieldByName(field)
	}
	if !v.IsValid() || v.Type() != reflect.TypeFor[*nats.Conn]() {
		return nil
	}
	return (*nats.Conn)(v.UnsafePointer())
}

const (
	// maxSilence is the longest time in which the client should notice a dead connection.
	maxSilence = time.Minute
	// maxWrite is how long one write may block. The client's Close waits for the write.
	maxWrite = 10 * time.Second
)

// warnOfConn logs one line that names the missing options of a connection.
func warnOfConn(conn *nats.Conn, o *options, name string) {
	if conn == nil {
		return
	}
	if lacks := lackingOptions(&conn.Opts); len(lacks) > 0 {
		o.log.Warn("the connection is not set up for outages", "source", name, "add", "nats.Connect(…, "+strings.Join(lacks, ", ")+")",
			"gives_up_after", conn.Opts.MaxReconnect, "dead_unnoticed_for", silence(&conn.Opts), "write_blocks_for", conn.Opts.FlusherTimeout)
	}
}

// warnOfMaxDeliver logs a consumer's MaxDeliver: after so many deliveries the server keeps a
// message, but delivers it to nobody. A clean stop knows of such messages, a crash does not.
func warnOfMaxDeliver(most int, o *options, stream, consumer, name string) {
	if most > 0 {
		o.log.Warn("crashes and restarts use up deliveries, too: after the last one a message stays in the stream, and only a Mover brings it to the DLQ", "source", name, "max_deliver", most,
			"help", fmt.Sprintf("run guardnats.NewMover, or: nats consumer edit %s %s --max-deliver=-1; the guard counts attempts itself", stream, consumer))
	}
}

// lackingOptions returns the missing options of a connection, as code.
func lackingOptions(o *nats.Options) []string {
	var lacks []string
	if !o.AllowReconnect || o.MaxReconnect >= 0 {
		lacks = append(lacks, "nats.MaxReconnects(-1)")
	}
	if !o.IgnoreAuthErrorAbort { // a starting server may not know its users yet, and two refusals close the connection
		lacks = append(lacks, "nats.IgnoreAuthErrorAbort()")
	}
	if d := silence(o); d <= 0 || d > maxSilence {
		lacks = append(lacks, "nats.PingInterval(10*time.Second)")
	}
	if o.FlusherTimeout <= 0 || o.FlusherTimeout > maxWrite {
		lacks = append(lacks, "nats.FlusherTimeout(5*time.Second)")
	}
	return lacks
}

// silence is how long a connection may be silent before the client takes it for dead; 0 or
// less means forever.
func silence(o *nats.Options) time.Duration { return o.PingInterval * time.Duration(o.MaxPingsOut+1) }

// probeTimeout is how long a server may take to answer a ping.
const probeTimeout = 5 * time.Second

// revive forces a reconnect if the connection says that it is connected, but the server does
// not answer a ping. By default the client itself notices after 6 minutes.
func revive(ctx context.Context, conn *nats.Conn) (revived bool) {
	if conn == nil || !conn.Opts.AllowReconnect || !conn.IsConnected() {
		return false
	}
	ping, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	if err := conn.FlushWithContext(ping); !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil || !conn.IsConnected() {
		return false
	}
	return conn.ForceReconnect() == nil
}
