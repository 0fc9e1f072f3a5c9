// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
)

// A dead letter of the broker's own making, which says less than one of ours.
func ExampleReadDeadLetter() {
	d := amqp091.Delivery{
		Body: []byte("order 13"),
		Headers: amqp091.Table{"x-death": []any{amqp091.Table{
			"queue": "orders", "reason": "delivery_limit", "count": int64(1), "exchange": "", "routing-keys": []any{"orders"},
		}}},
	}
	letter, err := guardamqp.ReadDeadLetter(d)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%s: %q died of %s\n", letter.Origin.Source, letter.Body, letter.Reason)
	// Output: orders: "order 13" died of delivery_limit
}

// What is wrong is said all at once, and without the password.
func ExampleDialer_Validate() {
	d := guardamqp.Dialer{URLs: []string{"rabbit1:5672"}, Config: amqp091.Config{Recovery: &amqp091.Recovery{}}}
	fmt.Println(d.Validate())
	// Output:
	// amqp: Dialer.URLs[0]: not of the form amqp://user:password@host:port/vhost
	// amqp: unsuitable configuration: Dialer.Config.Recovery: must be nil: after the client's own recovery an ack of an old delivery acks another message; connections are made anew here
}

// The configuration of a fleet in a stream.
func ExampleNewRegister() { //nolint:testableexamples // it needs a RabbitMQ
	r, err := guardamqp.NewRegister(
		guardamqp.Dial("amqp://payments@rabbit-1/", "amqp://payments@rabbit-2/", "amqp://payments@rabbit-3/"),
		guardamqp.RegisterConfig{Stream: "payments.configuration"},
	)
	if err != nil {
		log.Fatal(err)
	}
	defer r.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	fmt.Println(r.CompareAndSet(ctx, 1, []byte("rate: 1000")))
}
