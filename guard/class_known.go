// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
)

// byMethod is what err tells through methods that several libraries share.
func byMethod(err error) (said says) {
	switch t := err.(type) { //nolint:errorlint // err alone, not what it wraps
	case interface{ SQLState() string }: // pgx, pq
		said = sqlState(t.SQLState())
	case interface{ RedisError() }: // go-redis
		said = redisError(err.Error())
	case interface {
		ErrorCode() string
		ErrorMessage() string
	}: // AWS
		said = awsError(err, t.ErrorCode())
	case interface{ HasErrorLabel(label string) bool }: // MongoDB
		said = mongoError(err, t.HasErrorLabel)
	case interface{ StatusCode() int }:
		said = httpStatus(t.StatusCode())
	case interface{ HTTPStatusCode() int }:
		said = httpStatus(t.HTTPStatusCode())
	default:
		said = grpcError(err)
	}
	if t, ok := err.(interface{ Timeout() bool }); ok && t.Timeout() {
		return said | timeoutSaid
	}
	if t, ok := err.(interface{ Temporary() bool }); ok && t.Temporary() {
		said |= dependencySaid
	}
	return said
}

// Most errors in a tree are of these types, which tell nothing.
var (
	wrapError  = reflect.TypeOf(fmt.Errorf("%w", io.EOF))
	wrapErrors = reflect.TypeOf(fmt.Errorf("%w%w", io.EOF, io.EOF))
	joinError  = reflect.TypeOf(errors.Join(io.EOF))
)

// typeName is a type's name and its package's path without the major version.
type typeName struct{ pkg, name string }

func nameOf(t reflect.Type) typeName {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return typeName{unversioned(t.PkgPath()), t.Name()}
}

// unversioned cuts the first element such as "v5" out of an import path.
func unversioned(path string) string {
	for at := 0; ; {
		i := strings.Index(path[at:], "/v")
		if i < 0 {
			return path
		}
		at += i
		end := at + len("/v")
		for end < len(path) && '0' <= path[end] && path[end] <= '9' {
			end++
		}
		if end > at+len("/v") && (end == len(path) || path[end] == '/') {
			return path[:at] + path[end:]
		}
		at = end
	}
}

// numberOf is an integer field of err, a struct or a pointer to one; if err is itself an
// integer, it is err. It is -1 if there is none.
func numberOf(err error, field string) int {
	v := reflect.Indirect(reflect.ValueOf(err))
	if v.Kind() == reflect.Struct {
		v = v.FieldByName(field)
	}
	return integer(v)
}

func integer(v reflect.Value) int {
	switch {
	case v.IsValid() && v.CanInt():
		return int(v.Int())
	case v.IsValid() && v.CanUint():
		return int(min(v.Uint(), 1<<30))
	default:
		return -1
	}
}

// grpcError reads the status of an error with a GRPCStatus method. The method returns a
// type of grpc, so it is called by reflection.
func grpcError(err error) says {
	m := reflect.ValueOf(err).MethodByName("GRPCStatus")
	if !m.IsValid() || m.Type().NumIn() != 0 || m.Type().NumOut() != 1 {
		return 0
	}
	return grpcCode(err, m.Call(nil)[0])
}

// grpcCode reads v's Code method.
func grpcCode(err error, v reflect.Value) says {
	m := v.MethodByName("Code")
	if !m.IsValid() || m.Type().NumIn() != 0 || m.Type().NumOut() != 1 {
		return 0
	}
	switch integer(m.Call(nil)[0]) {
	case 0, -1:
		return 0 // OK, or no code
	case 8: // ResourceExhausted; grpc-go also uses it for a message above its size limit
		if strings.Contains(err.Error(), "message larger than max") {
			return doubtSaid
		}
		return dependencySaid
	case 10, 14: // Aborted, Unavailable
		return dependencySaid
	case 4: // DeadlineExceeded
		return timeoutSaid
	case 3, 6, 11: // InvalidArgument, AlreadyExists, OutOfRange
		return messageSaid
	default: // Canceled, Unknown, NotFound, Internal and the rest
		return doubtSaid
	}
}

func codeError(err error) says { return grpcCode(err, reflect.ValueOf(err)) }

func httpStatus(code int) says {
	switch {
	case code < 100 || code > 599: // no HTTP status
		return 0
	case code == 408, code == 429, code >= 502 && code <= 504, code >= 520 && code <= 530:
		return dependencySaid
	case code == 400, code == 413, code == 415, code == 422:
		return messageSaid
	default: // a 500 is a server's bug as often as its outage
		return doubtSaid
	}
}

func sqlState(state string) says {
	if len(state) != 5 {
		return 0
	}
	switch state {
	case "25006": // read-only, as after a failover
		return dependencySaid
	case "57014": // cancelled by the client, or by statement_timeout
		return doubtSaid
	}
	switch state[:2] {
	case "08", "40", "53", "57", "58":
		return dependencySaid
	case "22", "23":
		return messageSaid
	default:
		return doubtSaid
	}
}

func mysqlError(err error) says {
	switch numberOf(err, "Number") {
	case 1021, 1037, 1038, 1040, 1041, 1053, 1129, 1158, 1159, 1160, 1161, 1203, 1205, 1213, 1290, 1792, 1836, 1927, 2002, 2003, 2006, 2013:
		return dependencySaid
	case 1048, 1062, 1216, 1217, 1264, 1265, 1292, 1366, 1406, 1451, 1452, 1557, 1586, 1690, 3140, 3819, 4025:
		return messageSaid
	default:
		return doubtSaid
	}
}

func redisError(text string) says {
	switch word, rest, _ := strings.Cut(text, " "); word {
	case "LOADING", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "MOVED", "ASK", "TRYAGAIN", "NOREPLICAS", "OOM", "BUSY", "MISCONF":
		return dependencySaid
	case "ERR":
		if strings.HasPrefix(rest, "max number of clients") {
			return dependencySaid
		}
	}
	return 0
}

// awsError reads an error of AWS's SDK. DynamoDB and others send throttling and expired
// credentials with status 400, so an unknown code is a doubt, which outweighs that status.
func awsError(err error, code string) says {
	switch code {
	case "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "RequestThrottledException",
		"TooManyRequestsException", "ProvisionedThroughputExceededException", "RequestLimitExceeded", "BandwidthLimitExceeded",
		"LimitExceededException", "SlowDown", "PriorRequestNotComplete", "TransactionInProgressException", "EC2ThrottledException",
		"RequestTimeout", "RequestTimeoutException":
		return dependencySaid
	case "ValidationException", "ValidationError", "InvalidParameterValue", "InvalidParameterValueException":
		return messageSaid
	}
	// ErrorFault returns a type of AWS, so it is called by reflection.
	if m := reflect.ValueOf(err).MethodByName("ErrorFault"); m.IsValid() && m.Type().NumIn() == 0 && m.Type().NumOut() == 1 {
		if fault, ok := reflect.TypeAssert[fmt.Stringer](m.Call(nil)[0]); ok && fault.String() == "server" {
			return dependencySaid
		}
	}
	return doubtSaid
}

func mongoError(err error, has func(label string) bool) says {
	if has("NetworkError") || has("TransientTransactionError") || has("RetryableWriteError") {
		return dependencySaid
	}
	if t, ok := err.(interface{ HasErrorCode(code int) bool }); ok && (t.HasErrorCode(11000) || t.HasErrorCode(121)) {
		return messageSaid // a duplicate key, a document that fails its schema
	}
	return 0
}

// kafkaError reads Kafka's error code: the error is a number (sarama, kafka-go), or has
// the number in a field (franz-go).
func kafkaError(err error) says {
	switch numberOf(err, "Code") {
	case 5, 6, 7, 8, 9, 13, 14, 15, 16, 19, 20, 41, 56, 72, 80, 83, 89:
		return dependencySaid
	case 10, 18, 87: // too large, invalid record
		return messageSaid
	default:
		return doubtSaid
	}
}

func amqpError(err error) says {
	switch numberOf(err, "Code") {
	case 320, 504, 506, 541: // connection forced, not open, resource error, internal error
		return dependencySaid
	case 311: // content too large
		return messageSaid
	default:
		return doubtSaid
	}
}

// natsError reads the HTTP-like status of a JetStream error.
func natsError(err error) says {
	if code := numberOf(err, "Code"); code == 503 || code == 504 {
		return dependencySaid
	}
	return doubtSaid
}

func statusField(field string) rule {
	return rule{look: func(err error) says { return httpStatus(numberOf(err, field)) }}
}

// jsonSyntax tells a message with invalid JSON from a reply that is no JSON at all.
// Handlers decode replies, too, and a gateway's error page or an empty reply is an outage.
// The texts are those of encoding/json. If they change, the result is messageSaid, and a
// test fails.
func jsonSyntax(err error) says {
	text := err.Error()
	switch offset := numberOf(err, "Offset"); {
	case strings.Contains(text, "after top-level value"), // "502 Bad Gateway"
		strings.Contains(text, " in literal ") && offset <= 5, // "no healthy upstream"
		strings.Contains(text, "beginning of value") && (offset <= 1 || strings.Contains(text, "'<'")),
		strings.Contains(text, "unexpected end") && offset <= 0:
		return doubtSaid
	}
	return messageSaid
}

// jsonType is about a value of the wrong type. If the value is the whole document, the
// document may be a reply that reports an error.
func jsonType(err error) says {
	if v := reflect.Indirect(reflect.ValueOf(err)).FieldByName("Field"); v.Kind() == reflect.String && v.Len() > 0 {
		return messageSaid
	}
	return doubtSaid
}

// xmlError blames the message, unless the document is an HTML page.
func xmlError(err error) says {
	text := err.Error()
	for _, tag := range [...]string{"<html", "</html", "</head", "</body"} {
		if strings.Contains(text, tag) {
			return doubtSaid
		}
	}
	return messageSaid
}

func sentinel(err error) says { return sentinels[err.Error()] }

// sentinels are documented errors without a type of their own, by their whole text. Only
// errors of the type of [errors.New], and of the types in byType with look: sentinel, are
// looked up.
var sentinels = map[string]says{
	"circuit breaker is open":                      dependencySaid, // gobreaker
	"circuit breaker open":                         dependencySaid, // failsafe-go
	"driver: bad connection":                       dependencySaid,
	"invalid connection":                           dependencySaid, // go-sql-driver/mysql
	"sql: connection is already closed":            dependencySaid,
	"sql: database is closed":                      dependencySaid,
	"conn closed":                                  dependencySaid, // pgx
	"client is disconnected":                       dependencySaid, // MongoDB
	"redis: client is closed":                      dependencySaid,
	"redis: connection pool exhausted":             dependencySaid,
	"redis: connection pool timeout":               dependencySaid,
	"http: server closed idle connection":          dependencySaid,
	"kafka: broker not connected":                  dependencySaid, // sarama
	"kafka: controller is not available":           dependencySaid,
	"kafka: tried to use a client that was closed": dependencySaid,
	outOfBrokers:                                   dependencySaid,
	"nats: connection closed":                      dependencySaid,
	"nats: connection draining":                    dependencySaid,
	"nats: connection reconnecting":                dependencySaid,
	"nats: no responders available for request":    dependencySaid,
	"nats: no response from stream":                dependencySaid,
	"nats: no servers available for connection":    dependencySaid,
	"nats: outbound buffer limit exceeded":         dependencySaid,
	"nats: server is disconnected":                 dependencySaid,
	"nats: server shutdown":                        dependencySaid,
	"nats: stale connection":                       dependencySaid,
	"nats: timeout":                                timeoutSaid,
	"nats: timeout waiting for ack":                timeoutSaid,
	"nats: maximum payload exceeded":               messageSaid,
	"encoding/hex: odd length hex string":          messageSaid,
	"gzip: invalid header":                         messageSaid,
	"gzip: invalid checksum":                       messageSaid,
	"zlib: invalid header":                         messageSaid,
	"zlib: invalid checksum":                       messageSaid,
}

const outOfBrokers = "kafka: client has run out of available brokers to talk to"

// saramaSentinel knows the text that sarama puts in front of other errors.
func saramaSentinel(err error) says {
	if strings.HasPrefix(err.Error(), outOfBrokers) {
		return dependencySaid
	}
	return 0
}

// rule is what errors of one type tell.
type rule struct {
	said   says
	around surroundings
	look   func(error) says // reads more from the error; nil for none
}

// byType has the errors that are known by their type. Package paths have no major version.
var byType = map[typeName]rule{
	// These tell nothing by themselves.
	{"os", "SyscallError"}: {},

	{"errors", "errorString"}: {look: sentinel},
	{"syscall", "Errno"}:      {look: errno},

	// The network.
	{"net", "OpError"}:                             {around: conn, look: timeout},
	{"net", "DNSError"}:                            {said: dependencySaid},
	{"net", "canceledError"}:                       {said: doubtSaid},
	{"net", "AddrError"}:                           {said: doubtSaid},
	{"net", "ParseError"}:                          {said: doubtSaid},
	{"net", "InvalidAddrError"}:                    {said: doubtSaid},
	{"net", "UnknownNetworkError"}:                 {said: doubtSaid},
	{"internal/poll", "errNetClosing"}:             {said: dependencySaid},
	{"net/url", "Error"}:                           {around: wire, look: timeout},
	{"net/http", "transportReadFromServerError"}:   {around: wire},
	{"net/http", "http2ConnectionError"}:           {said: dependencySaid},
	{"net/http", "http2GoAwayError"}:               {said: dependencySaid},
	{"net/http", "http2StreamError"}:               {said: dependencySaid},
	{"golang.org/x/net/http2", "ConnectionError"}:  {said: dependencySaid},
	{"golang.org/x/net/http2", "GoAwayError"}:      {said: dependencySaid},
	{"golang.org/x/net/http2", "StreamError"}:      {said: dependencySaid},
	{"crypto/tls", "AlertError"}:                   {said: dependencySaid},
	{"crypto/tls", "CertificateVerificationError"}: {said: dependencySaid},
	{"crypto/tls", "RecordHeaderError"}:            {said: dependencySaid},
	{"crypto/x509", "CertificateInvalidError"}:     {said: dependencySaid},
	{"crypto/x509", "HostnameError"}:               {said: dependencySaid},
	{"crypto/x509", "SystemRootsError"}:            {said: dependencySaid},
	{"crypto/x509", "UnknownAuthorityError"}:       {said: dependencySaid},

	// Decoders.
	{"encoding/json", "SyntaxError"}:                              {look: jsonSyntax},
	{"encoding/json", "UnmarshalTypeError"}:                       {look: jsonType},
	{"encoding/json", "UnsupportedValueError"}:                    {said: messageSaid},
	{"encoding/xml", "SyntaxError"}:                               {look: xmlError},
	{"encoding/xml", "UnmarshalError"}:                            {look: xmlError},
	{"encoding/csv", "ParseError"}:                                {said: messageSaid},
	{"encoding/base32", "CorruptInputError"}:                      {said: messageSaid},
	{"encoding/base64", "CorruptInputError"}:                      {said: messageSaid},
	{"encoding/hex", "InvalidByteError"}:                          {said: messageSaid},
	{"compress/flate", "CorruptInputError"}:                       {said: messageSaid},
	{"strconv", "NumError"}:                                       {said: messageSaid},
	{"time", "ParseError"}:                                        {said: messageSaid},
	{"gopkg.in/yaml.v3", "TypeError"}:                             {said: messageSaid},
	{"github.com/go-playground/validator", "ValidationErrors"}:    {said: messageSaid},
	{"google.golang.org/protobuf/internal/errors", "prefixError"}: {said: messageSaid},
	{"google.golang.org/protobuf/internal/errors", "wrapError"}:   {said: messageSaid},

	// Databases.
	{"github.com/go-sql-driver/mysql", "MySQLError"}:                                 {look: mysqlError},
	{"github.com/jackc/pgx/pgconn", "ConnectError"}:                                  {around: conn},
	{"github.com/jackc/pgx/pgconn", "connLockError"}:                                 {around: conn},
	{"github.com/jackc/pgx/pgconn", "pgconnError"}:                                   {around: wire},
	{"go.mongodb.org/mongo-driver/x/mongo/driver/topology", "ConnectionError"}:       {around: conn},
	{"go.mongodb.org/mongo-driver/x/mongo/driver/topology", "ServerSelectionError"}:  {around: conn},
	{"go.mongodb.org/mongo-driver/x/mongo/driver/topology", "WaitQueueTimeoutError"}: {around: conn},
	{"go.mongodb.org/mongo-driver/x/mongo/driver/topology", "poolClearedError"}:      {said: dependencySaid},

	// Brokers.
	{"github.com/IBM/sarama", "KError"}:                  {look: kafkaError},
	{"github.com/IBM/sarama", "sentinelError"}:           {look: saramaSentinel},
	{"github.com/Shopify/sarama", "KError"}:              {look: kafkaError},
	{"github.com/segmentio/kafka-go", "Error"}:           {look: kafkaError},
	{"github.com/twmb/franz-go/pkg/kerr", "Error"}:       {look: kafkaError},
	{"github.com/rabbitmq/amqp091-go", "Error"}:          {look: amqpError},
	{"github.com/streadway/amqp", "Error"}:               {look: amqpError},
	{"github.com/nats-io/nats.go", "APIError"}:           {look: natsError},
	{"github.com/nats-io/nats.go", "jsError"}:            {look: sentinel},
	{"github.com/nats-io/nats.go/jetstream", "APIError"}: {look: natsError},
	{"github.com/nats-io/nats.go/jetstream", "jsError"}:  {look: sentinel},

	// Clients of services.
	{"connectrpc.com/connect", "Error"}:                                                 {look: codeError},
	{"go.etcd.io/etcd/api/v3rpc/rpctypes", "EtcdError"}:                                 {look: codeError},
	{"google.golang.org/api/googleapi", "Error"}:                                        statusField("Code"),
	{"github.com/Azure/azure-sdk-for-go/sdk/azcore/internal/exported", "ResponseError"}: statusField("StatusCode"),
	{"github.com/aws/smithy-go", "CanceledError"}:                                       {said: doubtSaid},
	{"github.com/aws/smithy-go", "DeserializationError"}:                                {said: doubtSaid}, // of a reply
	{"github.com/aws/smithy-go/transport/http", "RequestSendError"}:                     {around: conn},
}

// timeout is for types that tell something by themselves only if they are a time-out.
func timeout(err error) says {
	if t, ok := err.(interface{ Timeout() bool }); ok && t.Timeout() {
		return timeoutSaid
	}
	return 0
}
