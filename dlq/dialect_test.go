// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

func b(s string) []byte { return []byte(s) }

// own are headers of the message itself, among which a dialect's must be
// found.
var own = []Header{{"traceparent", b("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")}, {"tenant", b("a")}, {"tenant", b("b")}}

const ownTrace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

const javaStack = "com.acme.PaymentException: card 4711 declined\n\tat com.acme.Payments.charge(Payments.java:42)\n"

type wildSet struct {
	name    string
	dialect Dialect
	headers []Header
	want    Record
}

// Header sets as they are found in the wild, each with what it tells.
var wild = []wildSet{
	{"share group", shareGroup, []Header{
		{"__dlq.errors.topic", b("orders")}, {"__dlq.errors.partition", b("3")}, {"__dlq.errors.offset", b("1042")},
		{"__dlq.errors.group", b("billing")}, {"__dlq.errors.delivery.count", b("5")},
		{"__dlq.errors.message", b("maximum delivery attempts reached")},
	}, Record{
		Origin: kafkaOrigin(3, 1042), Deliveries: 5, Error: ErrorInfo{Message: "maximum delivery attempts reached"},
	}},

	{"spring", Spring, []Header{
		{"kafka_dlt-exception-fqcn", b("org.springframework.kafka.listener.ListenerExecutionFailedException")},
		{"kafka_dlt-exception-cause-fqcn", b("com.acme.PaymentException")},
		{"kafka_dlt-exception-message", b("Listener failed; card 4711 declined")},
		{"kafka_dlt-exception-stacktrace", b(javaStack)},
		{"kafka_dlt-original-topic", b("orders")},
		{"kafka_dlt-original-partition", b("\x00\x00\x00\x03")},
		{"kafka_dlt-original-offset", b("\x00\x00\x00\x00\x00\x00\x04\x12")},
		{"kafka_dlt-original-timestamp", b("\x00\x00\x01\x8b\xcf\xe5\x68\x7b")},
		{"kafka_dlt-original-timestamp-type", b("CreateTime")},
		{"kafka_dlt-original-consumer-group", b("billing")},
		{"retry_topic-attempts", b("\x00\x00\x00\x04")},
		{"retry_topic-original-timestamp", b("\x00\x00\x00\x00\x00\x00\x00\x01")},
		{"retry_topic-backoff-timestamp", b("\x00\x00\x00\x00\x00\x00\x00\x02")},
	}, Record{
		Origin: kafkaOrigin(3, 1042), Timestamp: time.UnixMilli(1_700_000_000_123).UTC(), Attempts: 4,
		Error: ErrorInfo{
			Type: "com.acme.PaymentException", Wrapper: "org.springframework.kafka.listener.ListenerExecutionFailedException",
			Message: "Listener failed; card 4711 declined", Stack: javaStack,
		},
		Other: []Header{
			{"kafka_dlt-original-timestamp-type", b("CreateTime")},
			{"retry_topic-backoff-timestamp", b("\x00\x00\x00\x00\x00\x00\x00\x02")},
		},
	}},

	{"spring, dead twice", Spring, []Header{
		{"kafka_dlt-exception-message", b("first")}, {"kafka_dlt-original-topic", b("orders")},
		{"kafka_dlt-exception-message", b("second")}, {"kafka_dlt-original-topic", b("orders-retry")},
	}, Record{
		Origin: Origin{System: "kafka", Source: "orders-retry"}, Error: ErrorInfo{Message: "second"},
		Other: []Header{{"kafka_dlt-exception-message", b("first")}, {"kafka_dlt-original-topic", b("orders")}},
	}},

	{"spring, key not readable", Spring, []Header{
		{"kafka_dlt-key-exception-fqcn", b("org.apache.kafka.common.errors.SerializationException")},
		{"kafka_dlt-key-exception-message", b("Size of data received by IntegerDeserializer is not 4")},
		{"kafka_dlt-key-exception-stacktrace", b("s")},
		{"kafka_dlt-original-topic", b("orders")},
	}, Record{
		Origin: Origin{System: "kafka", Source: "orders"},
		Error: ErrorInfo{
			Type: "org.apache.kafka.common.errors.SerializationException", Message: "Size of data received by IntegerDeserializer is not 4", Stack: "s",
		},
	}},

	{"connect", Connect, []Header{
		{"__connect.errors.topic", b("orders")}, {"__connect.errors.partition", b("3")}, {"__connect.errors.offset", b("1042")},
		{"__connect.errors.connector.name", b("billing")}, {"__connect.errors.task.id", b("0")},
		{"__connect.errors.stage", b("VALUE_CONVERTER")}, {"__connect.errors.class.name", b("org.apache.kafka.connect.json.JsonConverter")},
		{"__connect.errors.exception.class.name", b("org.apache.kafka.connect.errors.DataException")},
		{"__connect.errors.exception.message", b("Converting byte[] to Kafka Connect data failed")},
		{"__connect.errors.exception.stacktrace", b(javaStack)},
	}, Record{
		Origin: kafkaOrigin(3, 1042),
		Error: ErrorInfo{
			Type: "org.apache.kafka.connect.errors.DataException", Message: "Converting byte[] to Kafka Connect data failed", Stack: javaStack,
		},
		Other: []Header{
			{"__connect.errors.task.id", b("0")}, {"__connect.errors.stage", b("VALUE_CONVERTER")},
			{"__connect.errors.class.name", b("org.apache.kafka.connect.json.JsonConverter")},
		},
	}},

	{"connect, source unknown", Connect, []Header{
		{"__connect.errors.topic", b("")}, {"__connect.errors.partition", b("-1")}, {"__connect.errors.offset", b("-1")},
		{"__connect.errors.exception.message", nil},
	}, Record{Origin: Origin{System: "kafka"}}},

	{"streams", streams, []Header{
		{"__streams.errors.exception", b("com.acme.PaymentException")}, {"__streams.errors.message", b("declined")},
		{"__streams.errors.stacktrace", b(javaStack)}, {"__streams.errors.topic", b("orders")},
		{"__streams.errors.partition", b("3")}, {"__streams.errors.offset", b("1042")},
	}, Record{
		Origin: Origin{System: "kafka", Source: "orders", Partition: 3, HasPartition: true, Offset: 1042, HasOffset: true},
		Error:  ErrorInfo{Type: "com.acme.PaymentException", Message: "declined", Stack: javaStack},
	}},

	{"smallrye", smallRye, []Header{
		{"dead-letter-reason", b("declined")}, {"dead-letter-cause", b("timeout")}, {"dead-letter-topic", b("orders")},
		{"dead-letter-partition", b("3")}, {"dead-letter-offset", b("1042")},
		{"dead-letter-exception-class-name", b("com.acme.PaymentException")}, {"dead-letter-cause-class-name", b("java.net.SocketTimeoutException")},
	}, Record{
		Origin: Origin{System: "kafka", Source: "orders", Partition: 3, HasPartition: true, Offset: 1042, HasOffset: true},
		Error:  ErrorInfo{Type: "java.net.SocketTimeoutException", Wrapper: "com.acme.PaymentException", Message: "declined"},
		Other:  []Header{{"dead-letter-cause", b("timeout")}},
	}},

	{"karafka", karafka, []Header{
		{"source_topic", b("orders")}, {"source_partition", b("3")}, {"source_offset", b("1042")},
		{"source_consumer_group", b("billing")}, {"source_attempts", b("4")}, {"source_trace_id", b("9c8b7a")},
	}, Record{Origin: kafkaOrigin(3, 1042), Attempts: 4, Other: []Header{{"source_trace_id", b("9c8b7a")}}}},

	{"watermill over nats", watermill, []Header{
		{"Reason_poisoned", "declined"}, {"topic_poisoned", "orders"}, {"handler_poisoned", "billing"},
		{"subscriber_poisoned", "nats.Subscriber"}, {"_watermill_requeuer_retries", "2"}, {"_watermill_delayed_for", "1s"},
	}, Record{
		Origin: Origin{Source: "orders", Group: "billing"}, Redrives: 2, Error: ErrorInfo{Message: "declined"},
		Other: []Header{{"subscriber_poisoned", "nats.Subscriber"}, {"_watermill_delayed_for", "1s"}},
	}},

	{"masstransit", massTransit, []Header{
		{"MT-Reason", "fault"}, {"MT-Fault-ExceptionType", "Acme.PaymentException"}, {"MT-Fault-Message", "declined"},
		{"MT-Fault-StackTrace", "   at Acme.Payments.Charge() in /src/Payments.cs:line 42"}, {"MT-Fault-Timestamp", "2026-09-26T18:02:03.5080760Z"},
		{"MT-Fault-InputAddress", "rabbitmq://broker/vhost/orders%20eu?durable=true"}, {"MT-Fault-ConsumerType", "Acme.OrderConsumer"},
		{"MT-Fault-MessageType", "Acme.Order"}, {"MT-Fault-RetryCount", int32(3)}, {"MT-Fault-RedeliveryCount", "2"},
		{"MT-Host-MachineName", "web-1"},
	}, Record{
		Origin: Origin{System: "rabbitmq", Source: "orders eu", Group: "Acme.OrderConsumer"}, Attempts: 6, Reason: "fault",
		LastFailed: time.Date(2026, 9, 26, 18, 2, 3, 508076000, time.UTC),
		Error: ErrorInfo{
			Type: "Acme.PaymentException", Message: "declined", Stack: "   at Acme.Payments.Charge() in /src/Payments.cs:line 42",
		},
		Other: []Header{{"MT-Fault-MessageType", "Acme.Order"}, {"MT-Host-MachineName", "web-1"}},
	}},

	{"nservicebus", nServiceBus, []Header{
		{"NServiceBus.FailedQ", "orders"}, {"NServiceBus.TimeOfFailure", "2026-09-26 18:02:03:508076 Z"},
		{"NServiceBus.ExceptionInfo.ExceptionType", "System.AggregateException"},
		{"NServiceBus.ExceptionInfo.InnerExceptionType", "System.TimeoutException"},
		{"NServiceBus.ExceptionInfo.Message", "declined"}, {"NServiceBus.ExceptionInfo.StackTrace", "s"},
		{"NServiceBus.ExceptionInfo.Source", "Acme"}, {"NServiceBus.ExceptionInfo.HelpLink", "h"},
		{"NServiceBus.FLRetries", "4"}, {"NServiceBus.Retries", "3"},
	}, Record{
		Origin: Origin{Source: "orders"}, Attempts: 8, LastFailed: time.Date(2026, 9, 26, 18, 2, 3, 508076000, time.UTC),
		Error: ErrorInfo{Type: "System.TimeoutException", Wrapper: "System.AggregateException", Message: "declined", Stack: "s"},
		Other: []Header{{"NServiceBus.ExceptionInfo.Source", "Acme"}, {"NServiceBus.ExceptionInfo.HelpLink", "h"}},
	}},

	{"wolverine", wolverine, []Header{
		{"exception-type", "Acme.PaymentException"}, {"exception-message", "declined"}, {"exception-stack", "s"},
		{"failed-at", "1700000000123"}, {"original-destination", "kafka://topic/orders"}, {"original-partition", "3"}, {"original-offset", "1042"},
	}, Record{
		Origin:     Origin{System: "kafka", Source: "orders", Partition: 3, HasPartition: true, Offset: 1042, HasOffset: true},
		LastFailed: time.UnixMilli(1_700_000_000_123).UTC(),
		Error:      ErrorInfo{Type: "Acme.PaymentException", Message: "declined", Stack: "s"},
	}},

	{"knative on kafka", knative, []Header{
		{"ce_knativeerrordest", b("http://orders.default.svc.cluster.local")}, {"ce_knativeerrorcode", b("503")},
		{"ce_knativeerrordata", b("dXBzdHJlYW0gY29ubmVjdCBlcnJvcg==")},
	}, Record{
		Origin: Origin{Group: "http://orders.default.svc.cluster.local"}, Error: ErrorInfo{Type: "HTTP 503", Message: "upstream connect error"},
	}},

	{"knative over http, data cut off", knative, []Header{
		{"Ce-Knativeerrorcode", int32(500)}, {"Ce-Knativeerrordata", "dXBzdHJlYW0gY29ubmVjdC"},
	}, Record{Error: ErrorInfo{Type: "HTTP 500", Message: "upstream connect"}}},

	{"knative, data plain", knative, []Header{{"knativeerrorcode", "500"}, {"knativeerrordata", "out of stock!"}},
		Record{Error: ErrorInfo{Type: "HTTP 500", Message: "out of stock!"}}},

	{"cronsumer", cronsumer, []Header{
		{"x-retry-count", b("3")}, {"x-retry-attempt-count", b("0")}, {"x-produce-time", b("1700000000123456789")}, {"x-error-message", b("declined")},
	}, Record{
		Origin: Origin{System: "kafka"}, Attempts: 4, Error: ErrorInfo{Message: "declined"},
		Other: []Header{{"x-retry-attempt-count", b("0")}, {"x-produce-time", b("1700000000123456789")}},
	}},

	{"spring cloud stream", originalTopic, []Header{
		{"x-original-topic", b("orders")}, {"x-original-partition", b("\x00\x00\x00\x03")}, {"x-original-offset", b("\x00\x00\x00\x00\x00\x00\x04\x12")},
		{"x-original-timestamp", b("\x00\x00\x01\x8b\xcf\xe5\x68\x7b")}, {"x-original-timestamp-type", b("CreateTime")},
		{"x-exception-fqcn", b("com.acme.PaymentException")}, {"x-exception-message", b("declined")}, {"x-exception-stacktrace", b(javaStack)},
	}, Record{
		Origin:    Origin{System: "kafka", Source: "orders", Partition: 3, HasPartition: true, Offset: 1042, HasOffset: true},
		Timestamp: time.UnixMilli(1_700_000_000_123).UTC(),
		Error:     ErrorInfo{Type: "com.acme.PaymentException", Message: "declined", Stack: javaStack},
		Other:     []Header{{"x-original-timestamp-type", b("CreateTime")}},
	}},

	{"x-original-topic by hand", originalTopic, []Header{
		{"x-original-topic", b("orders")}, {"x-original-partition", b("1234")}, {"x-original-offset", b("12345678")}, {"x-original-timestamp", b("-1")},
	}, Record{Origin: Origin{System: "kafka", Source: "orders", Partition: 1234, HasPartition: true, Offset: 12345678, HasOffset: true}}},

	{"spring amqp after a retry queue", springAMQP, []Header{
		{"x-exception-message", "declined"}, {"x-exception-stacktrace", javaStack}, {"x-original-exchange", "shop"}, {"x-original-routingKey", "order.new"},
		{"x-delivery-count", int64(2)},
		{"x-death", []any{
			map[string]any{"queue": "orders.retry", "reason": "expired", "time": time.Unix(1_700_000_060, 0), "exchange": "", "routing-keys": []any{"orders.retry"}, "count": int64(2)},
			map[string]any{"queue": "orders", "reason": "rejected", "time": time.Unix(1_700_000_000, 0), "exchange": "shop", "routing-keys": []any{"order.new"}, "count": int64(2)},
		}},
	}, Record{
		Origin: Origin{System: "rabbitmq", Source: "orders", Exchange: "shop", Subject: "order.new"}, Attempts: 2,
		FirstFailed: time.Unix(1_700_000_000, 0).UTC(), Error: ErrorInfo{Message: "declined", Stack: javaStack},
	}},

	{"spring amqp, its own queue expired", springAMQP, []Header{
		{"x-exception-message", "declined"}, {"x-original-routingKey", "order.new"},
		{"x-death", []any{map[string]any{"queue": "errors", "reason": "expired", "time": time.Unix(1_700_000_060, 0), "exchange": "dlx", "routing-keys": []any{"errors"}, "count": int64(1)}}},
	}, Record{
		Origin: Origin{System: "rabbitmq", Subject: "order.new"}, FirstFailed: time.Unix(1_700_000_060, 0).UTC(), Error: ErrorInfo{Message: "declined"},
	}},

	{"nservicebus on rabbitmq", nServiceBus, []Header{
		{"NServiceBus.ExceptionInfo.Message", "declined"}, {"x-first-death-queue", "orders"}, {"x-first-death-reason", "rejected"}, {"x-first-death-exchange", "shop"},
	}, Record{Origin: Origin{System: "rabbitmq", Source: "orders", Exchange: "shop"}, Error: ErrorInfo{Message: "declined"}}},

	{"rabbitmq", rabbitMQ, []Header{
		{"x-death", []any{
			map[string]any{"queue": "orders", "reason": "rejected", "time": time.Unix(1_700_000_000, 0), "exchange": "shop", "routing-keys": []any{"order.new", "cc"}, "count": int64(1), "original-expiration": "5000"},
		}},
		{"x-first-death-queue", "orders"}, {"x-first-death-reason", "rejected"}, {"x-first-death-exchange", "shop"},
		{"x-last-death-queue", "orders"}, {"x-last-death-reason", "rejected"}, {"x-last-death-exchange", "shop"},
		{"x-acquired-count", int64(2)}, {"CC", []any{"copies"}},
	}, Record{
		Origin: Origin{System: "rabbitmq", Source: "orders", Exchange: "shop", Subject: "order.new"}, Attempts: 1, Reason: reasonRejected,
		FirstFailed: time.Unix(1_700_000_000, 0).UTC(), LastFailed: time.Unix(1_700_000_000, 0).UTC(),
	}},

	{"rabbitmq, delivery limit, no x-death", rabbitMQ, []Header{
		{"x-first-death-queue", "orders"}, {"x-first-death-reason", "rejected"}, {"x-first-death-exchange", ""},
		{"x-last-death-queue", "orders.slow"}, {"x-last-death-reason", "delivery_limit"}, {"x-last-death-exchange", "shop"},
	}, Record{Origin: Origin{System: "rabbitmq", Source: "orders.slow", Exchange: "shop"}, Reason: "delivery_limit"}},

	{"stormguard over nats", Stormguard, []Header{
		{"Stormguard-Version", "1"}, {"Stormguard-Dialect", "stormguard"}, {"Stormguard-Reason", "permanent"}, {"Stormguard-Permanent", "true"},
		{"Stormguard-Error-Message", `two\nlines`}, {"Stormguard-Origin-System", "nats"}, {"Stormguard-Origin-Source", "ORDERS"},
		{"Stormguard-Origin-Sequence", "18446744073709551615"}, {"Stormguard-First-Failed", "2026-01-02T03:04:05.000000006Z"},
		{"Nats-Msg-Id", "nats/ORDERS/-/-/s1"}, {"stormguard-from-the-future", "x"},
	}, Record{
		Origin: Origin{System: "nats", Source: "ORDERS", Sequence: 18446744073709551615}, Reason: ReasonPermanent, Permanent: true,
		FirstFailed: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), Error: ErrorInfo{Message: "two\nlines"},
		Other: []Header{{"stormguard-from-the-future", "x"}},
	}},

	{"no dialect", "", []Header{
		{"reason", "x"}, {"source_topic", "orders"}, {"x-retry-count", "3"}, {"exception-type", "T"}, {"x-death", nil}, {"Nats-Msg-Id", "1"},
		{"kafka_dlt", "x"}, {"stormguard-attempts", "3"}, {"Kafka_DLT-original-topic", "x"}, {"X-Original-Topic", "x"},
	}, Record{Headers: []Header{
		{"reason", "x"}, {"source_topic", "orders"}, {"x-retry-count", "3"}, {"exception-type", "T"}, {"kafka_dlt", "x"}, {"stormguard-attempts", "3"}, {"Kafka_DLT-original-topic", "x"}, {"X-Original-Topic", "x"},
	}}},
}

func TestDecodeWild(t *testing.T) {
	for _, c := range wild {
		t.Run(c.name, func(t *testing.T) {
			want := c.want
			want.Headers = slices.Concat(own, want.Headers)
			want.TraceParent = ownTrace
			got, d, err := Decode(slices.Concat(own, c.headers))
			if err != nil {
				t.Fatal(err)
			}
			if d != c.dialect {
				t.Fatalf("dialect %q, want %q", d, c.dialect)
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("got\n%+v, want\n%+v", got, want)
			}
		})
	}
}

// allDialects are those that Decode knows, in the order in which it tries them.
func allDialects() []Dialect {
	list := make([]Dialect, len(grammars))
	for i, g := range grammars {
		list[i] = g.dialect
	}
	return list
}

func TestEveryDialectHasAWildSet(t *testing.T) {
	for _, d := range allDialects() {
		if !slices.ContainsFunc(wild, func(c wildSet) bool { return c.dialect == d }) {
			t.Errorf("%s: no set", d)
		}
	}
}

// The same set with text for bytes, as other clients hand it over, and the
// other way round, tells the same.
func TestDecodeTextOrBytes(t *testing.T) {
	for _, c := range wild {
		for name, swap := range map[string]func(any) any{
			"text": func(v any) any {
				if b, ok := v.([]byte); ok {
					return string(b)
				}
				return v
			},
			"bytes": func(v any) any {
				if s, ok := v.(string); ok {
					return []byte(s)
				}
				return v
			},
		} {
			swapped := slices.Clone(c.headers)
			for i := range swapped {
				swapped[i].Value = swap(swapped[i].Value)
			}
			got, d, err := Decode(swapped)
			want := c.want
			got.Headers, got.Other, want.Headers, want.Other = nil, nil, nil, nil
			if err != nil || d != c.dialect || !reflect.DeepEqual(got, want) {
				t.Errorf("%s as %s: %v, %q\n%+v, want\n%+v", c.name, name, err, d, got, want)
			}
		}
	}
}

// One bad value: an error that names header, value and what was expected, and
// everything else as if it had been right.
func TestDecodeMalformed(t *testing.T) {
	for _, c := range []struct {
		base, header string
		value        any
		text         string // of the error
	}{
		{"spring", "kafka_dlt-original-partition", b("\x00\x03"), `dlq: header kafka_dlt-original-partition: 0x0003 (2 bytes): want 4 bytes, a big-endian integer from 0 to 2147483647, or -1 for unknown`},
		{"spring", "kafka_dlt-original-partition", b("\xff\xff\xff\xfe"), ``},
		{"spring", "kafka_dlt-original-offset", b("1042"), `dlq: header kafka_dlt-original-offset: 0x31303432 (4 bytes): want 8 bytes, a big-endian integer from 0 to 9223372036854775807, or -1 for unknown`},
		{"spring", "kafka_dlt-original-timestamp", b("\x7f\xff\xff\xff\xff\xff\xff\xff"), ``},
		{"spring", "kafka_dlt-original-topic", 3.5, `dlq: header kafka_dlt-original-topic: float64 3.5: want text`},
		{"connect", "__connect.errors.offset", b("12x"), `dlq: header __connect.errors.offset: 0x313278 (3 bytes): want a decimal integer from 0 to 9223372036854775807, or -1 for unknown`},
		{"connect", "__connect.errors.offset", "-7", `dlq: header __connect.errors.offset: "-7": want a decimal integer from 0 to 9223372036854775807, or -1 for unknown`},
		{"connect", "__connect.errors.partition", "2147483648", ``},
		{"connect", "__connect.errors.partition", "", ``},
		{"share group", "__dlq.errors.delivery.count", true, `dlq: header __dlq.errors.delivery.count: bool true: want a decimal integer from 0 to 2147483647, or -1 for unknown`},
		{"masstransit", "MT-Fault-Timestamp", "yesterday", `dlq: header MT-Fault-Timestamp: "yesterday": want a time as in RFC 3339`},
		{"nservicebus", "NServiceBus.TimeOfFailure", "2026-09-26T18:02:03Z", `dlq: header NServiceBus.TimeOfFailure: "2026-09-26T18:02:03Z": want a time as yyyy-MM-dd HH:mm:ss:ffffff Z`},
		{"wolverine", "failed-at", "soon", `dlq: header failed-at: "soon": want decimal milliseconds since 1970`},
		{"stormguard over nats", "Stormguard-Permanent", "yes", `dlq: header Stormguard-Permanent: "yes": want true or false`},
		{"stormguard over nats", "Stormguard-Origin-Sequence", "0", ``},
		{"stormguard over nats", "Stormguard-Version", "2", `dlq: header Stormguard-Version: "2": want "1"`},
		{"stormguard over nats", "Stormguard-Dialect", "karafka", `dlq: header Stormguard-Dialect: "karafka": want one of ["stormguard" "spring" "connect"]`},
		{"rabbitmq", "x-death", "gone", `dlq: header x-death: "gone": want a list of tables with queue, reason, time, exchange, routing-keys and count`},
		{"rabbitmq", "x-death", []any{1, nil}, ``},
		{"rabbitmq", "x-death", []any{map[string]any{"count": "many", "queue": 7, "time": "x", "routing-keys": []any{nil}}}, ``},
	} {
		t.Run(c.header+"="+strings.ToValidUTF8(show(c.value), "?"), func(t *testing.T) {
			i := slices.IndexFunc(wild, func(w wildSet) bool { return w.name == c.base })
			headers := slices.Clone(wild[i].headers)
			at := slices.IndexFunc(headers, func(h Header) bool { return h.Name == c.header })
			without := slices.Delete(slices.Clone(headers), at, at+1)
			headers[at].Value = c.value

			got, d, err := Decode(headers)
			var bad *headerError
			if !errors.As(err, &bad) || bad.name != c.header || !reflect.DeepEqual(bad.value, c.value) || bad.want == "" {
				t.Fatalf("got %v", err)
			}
			if c.text != "" && err.Error() != c.text {
				t.Errorf("got  %s\nwant %s", err, c.text)
			}
			if !slices.ContainsFunc(got.Other, func(h Header) bool { return h.Name == c.header }) {
				t.Error("the bad header is not in Other")
			}
			if d != wild[i].dialect {
				t.Errorf("dialect %q", d)
			}
			if c.header == "x-death" || c.header == "Stormguard-Version" {
				return
			}
			want, _, err := Decode(without)
			got.Other, want.Other = nil, nil
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%v: got\n%+v, want\n%+v", err, got, want)
			}
		})
	}
}

func TestDecodeJoinsErrors(t *testing.T) {
	_, _, err := Decode([]Header{{"__connect.errors.offset", "x"}, {"__connect.errors.partition", "y"}, {"__connect.errors.topic", "orders"}})
	if n := strings.Count(err.Error(), "dlq: header"); n != 2 {
		t.Fatalf("%d errors: %v", n, err)
	}
}

func TestDecodeLongRejections(t *testing.T) {
	many := make([]any, 1000)
	for i := range many {
		many[i] = map[string]any{"queue": "q", "reason": "rejected", "count": int64(1) << 62}
	}
	r, _, err := Decode([]Header{{"x-death", many}})
	if err != nil || r.Attempts != 1<<31-1 {
		t.Fatalf("%v, attempts %d", err, r.Attempts)
	}
}

// A record of ours that names a dialect leaves other dialects' headers to the
// message, whose they were before.
func TestStormguardLeavesForeignHeaders(t *testing.T) {
	r := Record{
		Headers: []Header{{"source_topic", "a"}, {"source_partition", "1"}, {"source_offset", "2"}, {"kafka_dlt-original-topic", "old"}},
		Origin:  kafkaOrigin(3, 1042),
	}
	got, d, err := Decode(Encode(&r, Stormguard))
	if err != nil || d != Stormguard || !reflect.DeepEqual(got, r) {
		t.Fatalf("%v, %s: %+v", err, d, got)
	}
}

// The count of Spring's own retry topics is the message's, not ours to drop.
func TestSpringRetryHeadersStay(t *testing.T) {
	r := Record{Headers: []Header{{"retry_topic-attempts", b("\x00\x00\x00\x02")}, {"retry_topic-backoff-timestamp", b("x")}}, Attempts: 7}
	got, _, err := Decode(Encode(&r, Spring))
	if err != nil || !reflect.DeepEqual(got, r) {
		t.Fatalf("%v: %+v", err, got)
	}
}

// The exact names and bytes that Spring's and Connect's own tools read.
func TestEncodeForeign(t *testing.T) {
	r := Record{
		Headers: own, Origin: kafkaOrigin(3, 1042), Timestamp: time.UnixMilli(1_700_000_000_123),
		Error: ErrorInfo{Type: "*acme.PaymentError", Message: "card declined", Stack: "main.charge()"},
	}
	for d, want := range map[Dialect][]Header{
		Spring: {
			{"kafka_dlt-exception-fqcn", "*acme.PaymentError"}, {"kafka_dlt-exception-message", "card declined"}, {"kafka_dlt-exception-stacktrace", "main.charge()"},
			{"kafka_dlt-original-topic", "orders"}, {"kafka_dlt-original-partition", b("\x00\x00\x00\x03")},
			{"kafka_dlt-original-offset", b("\x00\x00\x00\x00\x00\x00\x04\x12")}, {"kafka_dlt-original-timestamp", b("\x00\x00\x01\x8b\xcf\xe5\x68\x7b")},
			{"kafka_dlt-original-consumer-group", "billing"},
			{"stormguard-version", "1"}, {"stormguard-dialect", "spring"}, {"stormguard-origin-system", "kafka"},
		},
		Connect: {
			{"__connect.errors.topic", "orders"}, {"__connect.errors.partition", "3"}, {"__connect.errors.offset", "1042"},
			{"__connect.errors.exception.class.name", "*acme.PaymentError"}, {"__connect.errors.exception.message", "card declined"},
			{"__connect.errors.exception.stacktrace", "main.charge()"},
			{"stormguard-version", "1"}, {"stormguard-dialect", "connect"}, {"stormguard-origin-system", "kafka"}, {"stormguard-origin-group", "billing"},
			{"stormguard-origin-timestamp", "2023-11-14T22:13:20.123Z"},
		},
	} {
		if got := Encode(&r, d); !reflect.DeepEqual(got, slices.Concat(own, want)) {
			t.Errorf("%s: got\n%q, want\n%q", d, got, slices.Concat(own, want))
		}
	}
}

func TestEncodeKeepsTypes(t *testing.T) {
	in := []Header{{"n", int32(7)}, {"t", time.Unix(1, 0)}, {"l", []any{int64(1), "x"}}, {"nil", nil}, {"b", b("x")}, {"b", "y"}, {"d", Decimal{2, 314}}}
	out := Encode(&Record{Headers: in}, "")
	if !reflect.DeepEqual(out[:len(in)], in) {
		t.Fatalf("got %v", out[:len(in)])
	}
	r, _, err := Decode(out)
	if err != nil || !reflect.DeepEqual(r.Headers, in) {
		t.Fatalf("%v: got %v", err, r.Headers)
	}
}

// Timestamps that a dialect has no word for travel in our own header.
func TestEncodeTimestampsSpringCannotSay(t *testing.T) {
	for _, at := range []time.Time{time.UnixMilli(-1).UTC(), time.UnixMilli(-5).UTC(), time.Unix(0, 1).UTC(), time.Date(1601, 1, 1, 0, 0, 0, 0, time.UTC)} {
		r := Record{Timestamp: at}
		got, _, err := Decode(Encode(&r, Spring))
		if err != nil || !got.Timestamp.Equal(at) {
			t.Errorf("%v: got %v, %v", at, got.Timestamp, err)
		}
	}
}

func TestIsTransport(t *testing.T) {
	for name, want := range map[string]bool{
		"x-death": true, "X-Death": true, "x-opt-deaths": true, "x-first-death-queue": true, "x-last-death-reason": true, "x-delivery-count": true,
		"x-acquired-count": true, "x-stream-offset": true, "Nats-Msg-Id": true, "Nats-Expected-Last-Sequence": true, "nats-ttl": true,
		"x-deaths": false, "x-first-death": false, "nats": false, "x-original-topic": false, "traceparent": false, "": false, "cc": false,
	} {
		if got := isTransport("kafka", name); got != want {
			t.Errorf("%q: %v", name, got)
		}
	}
	for _, name := range []string{"CC", "BCC"} {
		if !isTransport("rabbitmq", name) || isTransport("kafka", name) {
			t.Errorf("%s is for RabbitMQ alone", name)
		}
	}
	r := Record{Headers: []Header{{"a", "1"}, {"x-death", nil}, {"CC", "x"}, {"b", "2"}}, Origin: Origin{System: "rabbitmq"}}
	if got := Encode(&r, Stormguard); !reflect.DeepEqual(got[:3], []Header{{"a", "1"}, {"b", "2"}, {versionHeader, stormguardVersion}}) {
		t.Errorf("got %v", got)
	}
}

func TestDialectValidate(t *testing.T) {
	for _, d := range append(allDialects(), "", "nonsense") {
		want := d == "" || d == Stormguard || d == Spring || d == Connect
		if d.Writable() != want || (d.Validate() == nil) != want {
			t.Errorf("%q: writable %v, %v", d, d.Writable(), d.Validate())
		}
	}
	if got, want := karafka.Validate().Error(), `dlq: dialect "karafka": cannot be written: want one of ["stormguard" "spring" "connect"], or empty for stormguard`; got != want {
		t.Errorf("got %s", got)
	}
	r := fatRecord()
	if !reflect.DeepEqual(Encode(&r, karafka), Encode(&r, Stormguard)) {
		t.Error("a dialect that cannot be written is not written as the default")
	}
	if len(allDialects()) != 16 {
		t.Errorf("%d dialects", len(allDialects()))
	}
}

func TestRedrives(t *testing.T) {
	r := Record{RedriveID: "plan 7\n", Redrives: 3}
	if got, _, err := Decode(Encode(&r, Spring)); err != nil || got.RedriveID != r.RedriveID || got.Redrives != 3 {
		t.Errorf("got %q, %d, %v", got.RedriveID, got.Redrives, err)
	}
	for _, v := range []any{"x", "-1", "99999999999", nil, 3.5} {
		if got, _, _ := Decode([]Header{{versionHeader, stormguardVersion}, {redrivesHeader, v}}); got.Redrives != 0 {
			t.Errorf("%v: %d", v, got.Redrives)
		}
	}
}

func TestOriginalTraceParentIsTheMessages(t *testing.T) {
	r := Record{Headers: []Header{{originalTraceHeader, "00-a"}, {redriveIDHeader, "p"}}}
	got, _, err := Decode(Encode(&r, ""))
	if err != nil || !reflect.DeepEqual(got.Headers, r.Headers[:1]) || got.RedriveID != "" {
		t.Fatalf("%v: %+v", err, got)
	}
}

// lines is how headers are written in the fuzz corpus: one a line, name, type
// and value between tabs, escaped as in our own headers.
func lines(headers []Header) string {
	var out strings.Builder
	for _, h := range headers {
		kind, text := "s", ""
		switch v := h.Value.(type) {
		case string:
			text = v
		case []byte:
			kind, text = "b", string(v)
		case int32:
			kind, text = "i", strconv.Itoa(int(v))
		case int64:
			kind, text = "i", strconv.FormatInt(v, 10)
		case nil:
			kind = "n"
		default:
			j, _ := json.Marshal(v)
			kind, text = "j", string(j)
		}
		out.WriteString(escape(h.Name) + "\t" + kind + "\t" + escape(text) + "\n")
	}
	return out.String()
}

func parseLines(s string) (headers []Header) {
	for line := range strings.Lines(s) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), "\t", 3)
		if len(parts) < 3 {
			continue
		}
		h, text := Header{Name: unescape(parts[0])}, unescape(parts[2])
		switch parts[1] {
		case "b":
			h.Value = []byte(text)
		case "i":
			n, _ := strconv.ParseInt(text, 10, 64)
			h.Value = n
		case "j":
			_ = json.Unmarshal([]byte(text), &h.Value)
		case "s":
			h.Value = text
		}
		headers = append(headers, h)
	}
	return headers
}

func FuzzDecode(f *testing.F) {
	for _, c := range wild {
		f.Add(lines(c.headers))
	}
	r := fatRecord()
	f.Add(lines(Encode(&r, Spring)))
	f.Add(lines(Encode(&r, Connect)))
	f.Fuzz(func(t *testing.T, s string) { checkDecode(t, parseLines(s)) })
}

func FuzzEncode(f *testing.F) {
	f.Add("orders", "billing", "boom", "main.f()\n\t/x.go:1", int32(3), int64(42), int64(1_700_000_000_123), "traceparent\ts\tx\n")
	f.Add("\xff", " ", "\\n\r\n", "\x00", int32(-1), int64(-1), int64(-1), "stormguard-version\ts\t2\nkafka_dlt-x\tb\t\\x00\n")
	f.Fuzz(func(t *testing.T, source, group, message, stack string, partition int32, offset, ms int64, headers string) {
		r := Record{
			Headers: parseLines(headers), Timestamp: time.UnixMilli(ms % (1 << 47)).UTC(),
			Origin: Origin{Source: source, Group: group, Partition: partition, HasPartition: partition >= 0, Offset: offset, HasOffset: offset >= 0},
			Error:  ErrorInfo{Message: message, Stack: stack},
		}
		if partition < 0 {
			r.Origin.Partition = 0
		}
		if offset < 0 {
			r.Origin.Offset = 0
		}
		for _, d := range writable {
			got, gotD, err := Decode(Encode(&r, d))
			if err != nil || gotD != d {
				t.Fatalf("%s: %q, %v", d, gotD, err)
			}
			if got.Origin != r.Origin || got.Error != r.Error || !got.Timestamp.Equal(r.Timestamp) {
				t.Fatalf("%s: got %+v, want %+v", d, got, r)
			}
			if want := originals(r, d); len(want) != len(got.Headers) || len(want) > 0 && !reflect.DeepEqual(got.Headers, want) {
				t.Fatalf("%s: headers %v, want %v", d, got.Headers, want)
			}
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	r := fatRecord()
	for _, d := range writable {
		b.Run(string(d), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Encode(&r, d)
			}
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	r := fatRecord()
	for _, d := range writable {
		headers := Encode(&r, d)
		b.Run(string(d), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, _, err := Decode(headers); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkRecordID(b *testing.B) {
	r := fatRecord()
	b.ReportAllocs()
	for b.Loop() {
		r.ID()
	}
}
