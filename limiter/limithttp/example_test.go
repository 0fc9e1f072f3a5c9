// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limithttp_test

import (
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/limiter"
	"github.com/stormguard-mq/stormguard/limiter/limithttp"
)

// Each tenant has a limit, and all together have one.
func ExampleNew() {
	tenants, err := fleet.Start(fleet.Config{Fleet: "api", Name: "api-0", Limits: fleet.Limits{ // a roster would share them
		Limit:  limiter.Limit{Rate: .01, Burst: 2},
		Limits: map[string]limiter.Limit{"acme": {Rate: 50, Burst: 100}},
	}})
	if err != nil {
		log.Fatal(err)
	}
	defer tenants.Close()
	everybody, err := limiter.Local(limiter.Limit{Rate: 1000, Burst: 500})
	if err != nil {
		log.Fatal(err)
	}

	middleware, err := limithttp.New(func(r *http.Request) limithttp.Tier {
		tenant := r.Header.Get("X-Tenant") // empty is denied
		return limithttp.Tier{Name: "tenant", Gate: limiter.All(tenants.Key(tenant), everybody)}
	}, limithttp.Config{})
	if err != nil {
		log.Fatal(err)
	}
	handler := middleware.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "hello") }))

	for range 3 {
		r, w := httptest.NewRequest(http.MethodGet, "/", nil), httptest.NewRecorder()
		r.Header.Set("X-Tenant", "globex")
		handler.ServeHTTP(w, r)
		fmt.Printf("%d %s %q\n", w.Code, w.Header().Get("Ratelimit"), w.Header().Get("Retry-After"))
	}
	// Output:
	// 200 "tenant";r=1;t=100 ""
	// 200 "tenant";r=0;t=100 ""
	// 429 "tenant";r=0;t=100 "100"
}

// A client that keeps to somebody else's limit.
func ExampleTransport() {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	theirs, err := limiter.Local(limiter.Limit{Rate: 100, Burst: 10})
	if err != nil {
		log.Fatal(err)
	}
	client := http.Client{Transport: limithttp.Transport(nil, func(*http.Request) limiter.Gate { return theirs })}
	response, err := client.Get(server.URL)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(response.StatusCode, response.Body.Close())
	client.CloseIdleConnections()
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	// Output: 404 <nil>
}
