// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// connOf is the connection of a consumer, nil if that is not one of nats.go's own.
// Those have no method for it, so the fields are read.
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
	// maxSilence is how long a connection may be dead before the client notices.
	maxSilence = time.Minute
	// maxWrite is how long one write may block: the client's Close waits for it.
	maxWrite = 10 * time.Second
)

// warnOfConn says in one line what a connection's options lack.
func warnOfConn(conn *nats.Conn, o *options, name string) {
	if conn == nil {
		return
	}
	if lacks := lackingOptions(&conn.Opts); len(lacks) > 0 {
		o.log.Warn("the connection is not set up for outages", "source", name, "add", "nats.Connect(…, "+strings.Join(lacks, ", ")+")",
			"gives_up_after", conn.Opts.MaxReconnect, "dead_unnoticed_for", silence(&conn.Opts), "write_blocks_for", conn.Opts.FlusherTimeout)
	}
}

// lackingOptions are those that a connection should have been made with.
func lackingOptions(o *nats.Options) []string {
	var lacks []string
	if !o.AllowReconnect || o.MaxReconnect >= 0 {
		lacks = append(lacks, "nats.MaxReconnects(-1)")
	}
	if !o.IgnoreAuthErrorAbort { // a server that starts may not know its users yet, and two refusals close the connection
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

// silence is after how long the client takes a connection for dead that is silent;
// not above 0 for never.
func silence(o *nats.Options) time.Duration { return o.PingInterval * time.Duration(o.MaxPingsOut+1) }

// probeTimeout is how long a server may take to answer a ping.
const probeTimeout = 5 * time.Second

// revive makes a connection reconnect that says it is connected, and over which a
// ping is not answered. By default the client itself notices after 6 minutes.
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
