// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console_test

import (
	"context"
	"log/slog"
	"net/http"
	"reflect"
	"sync"
	"testing"

	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// Two guards of one group that read one topic are one way.
func TestTopology(t *testing.T) {
	r := &rig{t: t}
	var guards []*guard.Guard
	var loops sync.WaitGroup
	for _, name := range []string{"orders/0", "orders/1"} {
		g := guard.Must(guard.New(guard.Config{Group: "billing"}, guard.WithLogger(slog.New(slog.DiscardHandler))))
		letters := dlq.WriterFunc(func(context.Context, *dlq.Record) error { return nil })
		handled := make(chan bool)
		s := guard.Must(guard.Open(g, guard.SourceConfig{Name: name, Destination: "orders", DeadLetters: letters}, guard.Limits{EndsWithInput: true}, numbers{},
			func(ctx context.Context, _ int) error {
				guard.Calls(ctx, "gateway")(nil)
				handled <- true
				return nil
			}))
		in := make(chan int, 1)
		in <- 1
		loops.Go(func() { _ = s.Run(context.Background(), in) })
		<-handled
		guards = append(guards, g)
	}
	var err error
	if r.c, err = console.New(console.Config{}, guards...); err != nil {
		t.Fatal(err)
	}
	var got []console.Flow
	r.ask(http.MethodGet, "/topology", "", &got)
	group := console.Node{Kind: "group", Name: "billing"}
	want := []console.Flow{
		{From: group, To: console.Node{Kind: "dependency", Name: "gateway"}, Count: 2},
		{From: console.Node{Kind: "topic", Name: "orders"}, To: group, Count: 2, Sources: 2},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	r.c.Close()
	for _, g := range guards {
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
	loops.Wait()
}
