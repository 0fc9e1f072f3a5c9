// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"strconv"
	"syscall"

	"github.com/stormguard-mq/stormguard/guard"
)

// A classifier of your own knows your errors, and leaves the rest to Classify.
func ExampleWithClassify() {
	errMaintenance := errors.New("warehouse: closed for maintenance")
	errNoSuchItem := errors.New("warehouse: no such item")
	classify := func(err error) guard.Class {
		switch {
		case errors.Is(err, errMaintenance):
			return guard.ClassDependency
		case errors.Is(err, errNoSuchItem):
			return guard.ClassMessage
		}
		return guard.Classify(err)
	}
	g, err := guard.New(guard.Config{Group: "orders"}, guard.WithClassify(classify))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := g.Close(context.Background()); err != nil {
		log.Fatal(err)
	}

	fmt.Println(classify(fmt.Errorf("order 7: %w", errMaintenance)))
	fmt.Println(classify(fmt.Errorf("order 7: %w", errNoSuchItem)))
	fmt.Println(classify(fmt.Errorf("order 7: %w", syscall.ECONNREFUSED)))
	fmt.Println(classify(errors.New("order 7: it did not work")))
	// Output:
	// dependency
	// message
	// dependency
	// unknown
}

func ExampleClassify() {
	var order struct{ Pieces int }
	_, number := strconv.Atoi("seven")
	for _, err := range []error{
		&net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED},
		json.Unmarshal([]byte(`{"pieces": "seven"}`), &order),
		number,
		errors.Join(number, context.DeadlineExceeded),
		context.Canceled,
	} {
		fmt.Println(guard.Classify(fmt.Errorf("order 7: %w", err)))
	}
	// Output:
	// dependency
	// message
	// message
	// dependency
	// unknown
}

// A handler that cannot tell the guard by an error's type says it outright.
func ExampleUnavailable() {
	handle := func(context.Context, string) error {
		// A reply that is no JSON says that the service is ill, not that the order is.
		reply := "<html>Bad gateway</html>"
		var stock struct{ Pieces int }
		if err := json.Unmarshal([]byte(reply), &stock); err != nil {
			return guard.Unavailable(fmt.Errorf("stock service: %w", err))
		}
		return nil
	}
	fmt.Println(guard.Classify(handle(context.Background(), "order 7")))
	// Output: dependency
}
