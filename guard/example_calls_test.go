// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/stormguard-mq/stormguard/guard"
)

// A named transport names a service, and counts the calls that a handler makes of it by a
// client.
type named struct {
	http.RoundTripper

	dependency string
}

func (n named) RoundTrip(req *http.Request) (*http.Response, error) {
	done := guard.Calls(req.Context(), n.dependency)
	res, err := n.RoundTripper.RoundTrip(req)
	failed := err
	if err == nil && res.StatusCode >= 500 {
		failed = errors.New(res.Status)
	}
	done(failed)
	return res, err
}

// A client whose transport names its service counts each call of a handler, also of one that
// does not know the guard: the context of the request is enough.
func ExampleCalls_transport() {
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/down" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer service.Close()
	client := &http.Client{Transport: named{service.Client().Transport, "payments-api"}}

	g := guard.Must(guard.New(guard.Config{Group: "orders"}))
	defer g.Close(context.Background())
	charge, err := guard.Protect(g, guard.SourceConfig{Name: "charge"}, func(ctx context.Context, path string) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, service.URL+path, nil)
		if err != nil {
			return err
		}
		res, err := client.Do(req)
		if err != nil {
			return err
		}
		return res.Body.Close()
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, path := range []string{"/up", "/up", "/down"} {
		if err := charge.Call(context.Background(), path); err != nil {
			log.Fatal(err)
		}
	}
	for _, flow := range g.Flows() {
		fmt.Printf("%s calls %s: %d, failed %d\n", flow.From.Name, flow.To.Name, flow.Count, flow.Failed)
	}
	// Output: orders calls payments-api: 3, failed 1
}
