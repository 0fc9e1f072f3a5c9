// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/stormguard-mq/stormguard/dlq"
)

func ExampleRecord_ID() {
	r := dlq.Record{Origin: dlq.Origin{
		System: "kafka", Source: "orders", Group: "billing",
		Partition: 3, HasPartition: true,
		Offset: 1042, HasOffset: true,
	}}
	fmt.Println(r.ID())

	r.Origin = dlq.Origin{System: "nats", Source: "ORDERS", Group: "worker", Sequence: 17}
	fmt.Println(r.ID())
	// Output:
	// kafka/orders/billing/3/o1042
	// nats/ORDERS/worker/-/s17
}

func ExampleFingerprint() {
	for _, text := range []string{
		`order 4711: field "amount" missing`,
		`order 98: field "amount" missing`,
		"connect to 10.0.0.7:5432 failed after 1.5s",
	} {
		cause := dlq.Fingerprint(errors.New(text), nil)
		fmt.Println(cause.ID, cause.Title)
	}
	// Output:
	// v2:a175cd4a08a709b4 order <n>: field "amount" missing
	// v2:a175cd4a08a709b4 order <n>: field "amount" missing
	// v2:60aed542295e7dab connect to <ip>:5432 failed after <dur>
}

func ExampleDescribeError() {
	err := fmt.Errorf("charge: %w", &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("refused")})
	e := dlq.DescribeError(err, nil)
	fmt.Println(e.Type)
	fmt.Println(e.Message)
	// Output:
	// *net.OpError
	// charge: dial tcp: refused
}

// A broker with a maximum size: the writer says by how much the record is too
// large, the caller trims and tries once more.
func ExampleTrimFor() {
	const max = 4096
	writer := dlq.WriterFunc(func(_ context.Context, r *dlq.Record) error {
		if size := r.Size(); size > max {
			return &dlq.TooLargeError{Size: size, Max: max}
		}
		fmt.Println("written, stack of", len(r.Error.Stack), "bytes")
		return nil
	})

	r := &dlq.Record{Body: make([]byte, 1000), Error: dlq.ErrorInfo{Message: "nil map", Stack: strings.Repeat("main.f()\n", 900)}}
	err := writer.Write(context.Background(), r)
	if dlq.TrimFor(r, err) {
		err = writer.Write(context.Background(), r)
	}
	fmt.Println(err)
	// Output:
	// written, stack of 2048 bytes
	// <nil>
}
