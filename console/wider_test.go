// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console_test

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/guard"
)

// Two of three partitions open their topic. The breakers list it with its cause, the status
// counts it, and the hold of the third partition names it.
func TestWiderScopeIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, console.Config{})
		defer r.close()
		var ins []chan int
		for i := range 3 {
			src, err := guard.Open(r.g, guard.SourceConfig{
				Name: "orders/" + strconv.Itoa(i), System: "kafka", Destination: "orders", Partition: strconv.Itoa(i),
			}, guard.Limits{EndsWithInput: true}, numbers{}, func(context.Context, int) error {
				if i < 2 {
					return guard.Unavailable(errors.New("it does not answer"))
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 10)
			ins = append(ins, in)
			r.loops.Go(func() { _ = src.Run(context.Background(), in) })
		}
		status := func() (st console.Status) {
			r.ask(http.MethodGet, "/status", "", &st)
			return st
		}
		if st := status(); st.Breakers != 0 || st.Held != 0 {
			t.Errorf("before: %+v", st)
		}
		for m := range 10 {
			ins[0] <- m
			ins[1] <- m
		}
		time.Sleep(5 * time.Second)
		var all []console.Breaker
		r.ask(http.MethodGet, "/breakers", "", &all)
		if len(all) != 4 || all[0].Name != "billing/orders" {
			t.Fatalf("%+v", all)
		}
		if b := all[0]; b.State != "open" || b.Cause != "quorum" || b.Group != "billing" || len(b.Sources) != 3 || b.Since <= 0 || b.Since > 5 {
			t.Errorf("%+v", b)
		}
		if r.ask(http.MethodGet, "/breakers?name=billing/orders/2", "", &all); len(all) != 1 || all[0].State != "closed" {
			t.Errorf("%+v", all)
		}
		if st := status(); st.Breakers != 3 || st.Held != 3 {
			t.Errorf("%+v", st)
		}
		if s := r.source("orders/2"); len(s.Holds) != 1 || s.Holds[0].Detail != "a wider scope is open: billing/orders: quorum" {
			t.Errorf("%+v", s.Holds)
		}
	})
}
