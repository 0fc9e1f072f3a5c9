// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"
	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stormguard-mq/stormguard/guard"
)

// The default classifier knows clients by method and by type name. Here are the
// clients themselves.
func TestClassifyOfRealClients(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()

	config := sarama.NewConfig()
	config.Metadata.Retry.Max = 0
	_, kafkaDown := sarama.NewClient([]string{addr}, config)
	_, amqpDown := amqp091.Dial("amqp://" + addr)
	_, natsDown := nats.Connect("nats://" + addr)
	store := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
	redisDown := store.Ping(t.Context()).Err()
	_ = store.Close()
	_, pgDown := pgx.Connect(t.Context(), "postgres://u:p@"+addr+"/d")
	my, err := mysql.NewConnector(&mysql.Config{User: "u", Net: "tcp", Addr: addr, DBName: "d", Timeout: time.Second, AllowNativePasswords: true})
	if err != nil {
		t.Fatal(err)
	}
	_, mysqlDown := my.Connect(t.Context())
	grpcOf := func(c codes.Code) error { return status.Error(c, "x") }
	aws := func(code int, err error) error {
		return &smithy.OperationError{ServiceID: "S", OperationName: "O", Err: &smithyhttp.ResponseError{
			Response: &smithyhttp.Response{Response: &http.Response{StatusCode: code}}, Err: err,
		}}
	}
	redisText := func(text string) error { // as go-redis makes it from a reply
		client := redis.NewClient(&redis.Options{MaxRetries: -1, Protocol: 2, DisableIdentity: true, Dialer: func(context.Context, string, string) (net.Conn, error) {
			here, there := net.Pipe()
			go func() {
				buf := make([]byte, 4096)
				for {
					if _, err := there.Read(buf); err != nil {
						return
					}
					if _, err := io.WriteString(there, "-"+text+"\r\n"); err != nil {
						return
					}
				}
			}()
			return here, nil
		}})
		defer client.Close()
		return client.Get(t.Context(), "k").Err()
	}

	for want, errs := range map[guard.Class]map[string]error{
		guard.ClassDependency: {
			"kafka down": kafkaDown, "out of brokers": sarama.ErrOutOfBrokers,
			"out of brokers, wrapped": sarama.Wrap(sarama.ErrOutOfBrokers, errors.New("x")),
			"not leader":              sarama.ErrNotLeaderForPartition, "replicas": &sarama.ProducerError{Msg: &sarama.ProducerMessage{}, Err: sarama.ErrNotEnoughReplicas},
			"not connected": sarama.ErrNotConnected,
			"amqp down":     amqpDown, "amqp closed": amqp091.ErrClosed, "amqp forced": &amqp091.Error{Code: amqp091.ConnectionForced},
			"nats down": natsDown, "nats closed": nats.ErrConnectionClosed, "no responders": nats.ErrNoResponders, "nats timeout": nats.ErrTimeout,
			"no stream": jetstream.ErrNoStreamResponse, "js closed": jetstream.ErrConnectionClosed, "js 503": &jetstream.APIError{Code: 503},
			"ack timeout": jetstream.ErrAsyncPublishTimeout,
			"redis down":  redisDown, "redis loading": redisText("LOADING Redis is loading the dataset in memory"),
			"redis readonly": redisText("READONLY You can't write against a read only replica."), "redis closed": redis.ErrClosed,
			"redis pool": redis.ErrPoolTimeout, "redis pool full": redis.ErrPoolExhausted,
			"pg down": pgDown, "pg shutdown": &pgconn.PgError{Code: "57P01"}, "pg deadlock": &pgconn.PgError{Code: "40P01"},
			"pg closed":  pgconn.ErrConnClosed,
			"mysql down": mysqlDown, "mysql conn": mysql.ErrInvalidConn, "mysql read-only": &mysql.MySQLError{Number: 1290}, "mysql deadlock": &mysql.MySQLError{Number: 1213},
			"grpc unavailable": grpcOf(codes.Unavailable), "grpc deadline": grpcOf(codes.DeadlineExceeded), "grpc exhausted": grpcOf(codes.ResourceExhausted),
			"aws throttled": aws(400, &smithy.GenericAPIError{Code: "ProvisionedThroughputExceededException", Fault: smithy.FaultClient}),
			"aws fault":     aws(500, &smithy.GenericAPIError{Code: "InternalServerError", Fault: smithy.FaultServer}),
			"aws send":      &smithy.OperationError{Err: &smithyhttp.RequestSendError{Err: io.EOF}},
			"aws html":      aws(503, &smithy.DeserializationError{Err: errors.New("x")}),
			"breaker":       gobreaker.ErrOpenState,
		},
		guard.ClassMessage: {
			"kafka too large": sarama.ErrMessageSizeTooLarge, "amqp too large": &amqp091.Error{Code: amqp091.ContentTooLarge},
			"nats too large": nats.ErrMaxPayload,
			"pg duplicate":   &pgconn.PgError{Code: "23505"}, "pg number": &pgconn.PgError{Code: "22P02"},
			"mysql duplicate": &mysql.MySQLError{Number: 1062}, "mysql too long": &mysql.MySQLError{Number: 1406},
			"grpc argument": grpcOf(codes.InvalidArgument), "grpc exists": grpcOf(codes.AlreadyExists),
			"protobuf":       proto.Unmarshal([]byte{0xff}, new(durationpb.Duration)),
			"protobuf text":  proto.Unmarshal([]byte{8, 0xff}, new(durationpb.Duration)),
			"aws validation": aws(400, &smithy.GenericAPIError{Code: "ValidationException", Fault: smithy.FaultClient}),
		},
		guard.ClassUnknown: {
			"kafka authorization": sarama.ErrTopicAuthorizationFailed, "kafka settings": sarama.ConfigurationError("x"),
			"kafka topic": sarama.ErrUnknownTopicOrPartition, "amqp refused": amqp091.ErrCredentials, "amqp not found": &amqp091.Error{Code: amqp091.NotFound},
			"nats auth": nats.ErrAuthorization, "nats revision": jetstream.ErrKeyExists, "nats no key": jetstream.ErrKeyNotFound,
			"redis nil": redis.Nil, "redis type": redisText("WRONGTYPE Operation against a key"),
			"no rows": pgx.ErrNoRows, "pg table": &pgconn.PgError{Code: "42P01"}, "pg cancelled": &pgconn.PgError{Code: "57014"},
			"pg settings":   second(pgconn.ParseConfig("postgres://u:p@h:x/d")),
			"mysql table":   &mysql.MySQLError{Number: 1146},
			"grpc internal": grpcOf(codes.Internal), "grpc not found": grpcOf(codes.NotFound), "grpc cancelled": grpcOf(codes.Canceled),
			"grpc too large": status.Error(codes.ResourceExhausted, "grpc: received message larger than max (5 vs. 4)"),
			"aws expired":    aws(400, &smithy.GenericAPIError{Code: "ExpiredTokenException", Fault: smithy.FaultClient}),
			"aws cancelled":  &smithy.OperationError{Err: &smithy.CanceledError{Err: context.Canceled}},
			"aws reply":      aws(400, &smithy.DeserializationError{Err: errors.New("x")}),
		},
	} {
		for name, err := range errs {
			if err == nil {
				t.Errorf("%s: no error", name)
				continue
			}
			if got := guard.Classify(fmt.Errorf("order 7: %w", err)); got != want {
				t.Errorf("%s: %v, want %v: %T: %v", name, got, want, err, err)
			}
		}
	}
}

func second[T any](_ T, err error) error { return err }
