// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq_test

import (
	"fmt"

	"github.com/stormguard-mq/stormguard/dlq"
)

func ExampleEncode() {
	r := &dlq.Record{
		Headers:  []dlq.Header{{Name: "tenant", Value: "a"}, {Name: "x-delivery-count", Value: int64(3)}},
		Origin:   dlq.Origin{System: "kafka", Source: "orders", Partition: 3, HasPartition: true, Offset: 1042, HasOffset: true},
		Attempts: 4,
		Reason:   dlq.ReasonAttempts,
		Error:    dlq.ErrorInfo{Message: "card declined"},
	}
	for _, h := range dlq.Encode(r, dlq.Connect) {
		fmt.Printf("%s: %v\n", h.Name, h.Value)
	}
	// Output:
	// tenant: a
	// __connect.errors.topic: orders
	// __connect.errors.partition: 3
	// __connect.errors.offset: 1042
	// __connect.errors.exception.message: card declined
	// stormguard-version: 1
	// stormguard-dialect: connect
	// stormguard-reason: attempts
	// stormguard-attempts: 4
	// stormguard-origin-system: kafka
}

// A dead letter that Spring Kafka wrote, as a Kafka client hands it over.
func ExampleDecode() {
	r, dialect, err := dlq.Decode([]dlq.Header{
		{Name: "tenant", Value: []byte("a")},
		{Name: "kafka_dlt-original-topic", Value: []byte("orders")},
		{Name: "kafka_dlt-original-partition", Value: []byte{0, 0, 0, 3}},
		{Name: "kafka_dlt-original-offset", Value: []byte{0, 0, 0, 0, 0, 0, 4, 18}},
		{Name: "kafka_dlt-exception-message", Value: []byte("card declined")},
	})
	fmt.Println(dialect, err)
	fmt.Println(r.Origin.Source, r.Origin.Partition, r.Origin.Offset, r.Error.Message)
	fmt.Println(len(r.Headers), "original header")
	// Output:
	// spring <nil>
	// orders 3 1042 card declined
	// 1 original header
}

// A value that cannot be read costs itself and nothing else.
func ExampleDecode_malformed() {
	r, dialect, err := dlq.Decode([]dlq.Header{
		{Name: "__connect.errors.topic", Value: "orders"},
		{Name: "__connect.errors.offset", Value: "many"},
	})
	fmt.Println(dialect, r.Origin.Source, r.Origin.HasOffset)
	fmt.Println(err)
	// Output:
	// connect orders false
	// dlq: header __connect.errors.offset: "many": want a decimal integer from 0 to 9223372036854775807, or -1 for unknown
}
