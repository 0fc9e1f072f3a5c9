// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"fmt"
	"maps"
	"strings"

	"github.com/rabbitmq/amqp091-go"
)

// A stream is no work queue. An ack removes nothing. A consumer begins at the next message that is
// published, so a broken connection skips messages. AMQP does not tell the type of a queue. But
// each type refuses the arguments of basic.consume that it does not know, and names itself in the
// refusal.

var errStream = fmt.Errorf("%w: it is a stream: acks remove nothing, and a new consumer skips what was published before; consume from a quorum queue", ErrUnsuitable)

// streamType is RabbitMQ's name of the type.
const streamType = "rabbit_stream_queue"

// noStream adds an argument that streams refuse. For all other queues its value is the default.
func noStream(args amqp091.Table) amqp091.Table {
	if _, ok := args["x-priority"]; ok {
		return args
	}
	all := amqp091.Table{"x-priority": int32(0)}
	maps.Copy(all, args)
	return all
}

// streamRefusal returns an [errStream] if err says that the queue is a stream, else err.
func streamRefusal(queue string, err error) error {
	if isCode(err, amqp091.PreconditionFailed) && strings.Contains(err.Error(), streamType) {
		return fmt.Errorf("amqp: consume %s: %w", queue, errStream)
	}
	return err
}

// checkNoStream returns an [errStream] if the queue of a consuming channel is a stream. It asks on
// another channel of the connection. It returns nil if the client hides the connection, or if the
// broker does not answer as RabbitMQ does.
//
// A stream says that it has no consumers. So may a queue whose only consumer was cancelled
// meanwhile. A second question decides: a consumer with an argument of streams. It reads a stream
// without a trace, and all other queues refuse it.
func checkNoStream(ctx context.Context, ch *amqp091.Channel, queue string) error {
	conn := connectionOf(ch)
	if v := versionOf(ch); conn == nil || v[0] < 3 || v[0] == 3 && v[1] < 9 { // before streams
		return nil
	}
	found := make(chan bool, 1)
	go func() { found <- isStream(conn, queue) }() // ends with the connection, if the broker does not answer
	select {
	case is := <-found:
		if is {
			return fmt.Errorf("amqp: deliveries of %s: %w", queue, errStream)
		}
		return nil
	case <-ctx.Done():
		return nil // the deliveries end at once
	}
}

func isStream(conn *amqp091.Connection, queue string) bool {
	other, err := conn.Channel()
	if err != nil {
		return false
	}
	defer other.Close() //nolint:errcheck // a refusal has closed it
	if q, err := other.QueueDeclarePassive(queue, true, false, false, false, nil); err != nil || q.Consumers > 0 {
		return false
	}
	if other.Qos(1, 0, false) != nil {
		return false
	}
	_, err = other.Consume(queue, consumerTag(), false, false, false, false, amqp091.Table{"x-stream-offset": "next"})
	return err == nil
}
