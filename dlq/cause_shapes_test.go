// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"
)

// ids draws what varies from message to message.
type ids struct{ *rand.Rand }

func (r ids) from(alphabet string, n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = alphabet[r.IntN(len(alphabet))]
	}
	return string(b)
}

const (
	lowerHex  = "0123456789abcdef"
	base36    = "0123456789abcdefghijklmnopqrstuvwxyz"
	base62    = base36 + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	crockford = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
	podSafe   = "bcdfghjklmnpqrstvwxz2456789"
)

// draw renders one field of a template.
func (r ids) draw(field string) string {
	switch field {
	case "n":
		return strconv.Itoa(r.IntN(1e6))
	case "big":
		return strconv.FormatUint(r.Uint64(), 10)
	case "small":
		return strconv.Itoa(r.IntN(100))
	case "signed":
		return strconv.Itoa(r.IntN(2000) - 1000)
	case "float":
		return strconv.FormatFloat(r.Float64()*1000, 'f', 2, 64)
	case "hex7":
		return "0" + r.from(lowerHex, 6)
	case "hex8":
		return r.from(lowerHex, 8)
	case "hex16":
		return r.from(lowerHex, 16)
	case "hex24":
		return r.from(lowerHex, 24)
	case "hex32":
		return r.from(lowerHex, 32)
	case "hex64":
		return r.from(lowerHex, 64)
	case "HEX16":
		return strings.ToUpper(r.from(lowerHex, 16))
	case "ptr":
		return fmt.Sprintf("%#x", 0xc000000000+r.Uint64N(1<<30))
	case "uuid", "UUID":
		h := r.from(lowerHex, 32)
		u := h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
		if field == "UUID" {
			u = strings.ToUpper(u)
		}
		return u
	case "base36":
		return r.from(base36, 12)
	case "base36_10":
		return r.from(base36, 10)
	case "base62_14":
		return r.from(base62, 14)
	case "base62_24":
		return r.from(base62, 24)
	case "ASIN":
		return "B0" + r.from("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", 8)
	case "ulid":
		return "01" + r.from(crockford, 24)
	case "ksuid":
		return "2" + r.from(base62, 26)
	case "xid":
		return "d" + r.from("0123456789abcdefghijklmnopqrstuv", 19)
	case "nanoid":
		return r.from(base62+"_-", 21)
	case "base32":
		return r.from("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 26)
	case "base64":
		return base64.StdEncoding.EncodeToString([]byte(r.from(base62, 16)))
	case "b64uuid":
		return r.from(base62+"_-", 22)
	case "hostid":
		b := make([]byte, 56)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return base64.StdEncoding.EncodeToString(b)
	case "jwt":
		part := func(n int) string { return base64.RawURLEncoding.EncodeToString([]byte(r.from(base62, n))) }
		return "eyJhbGciOiJIUzI1NiJ9." + part(40) + "." + part(32)
	case "rs": // a ReplicaSet's hash and a pod's suffix
		return r.from(podSafe, 8+r.IntN(3)) + "-" + r.from(podSafe, 5)
	case "pod5":
		return r.from(podSafe, 5)
	case "ip":
		return fmt.Sprintf("10.%d.%d.%d", r.IntN(256), r.IntN(256), 1+r.IntN(254))
	case "ip6":
		return fmt.Sprintf("2001:db8:%x:%x::%x", r.IntN(65536), r.IntN(65536), 1+r.IntN(65535))
	case "dashed":
		return strings.ReplaceAll(r.draw("ip"), ".", "-")
	case "port":
		return strconv.Itoa(32768 + r.IntN(28000))
	case "mac":
		h := r.from(lowerHex, 12)
		return h[:2] + ":" + h[2:4] + ":" + h[4:6] + ":" + h[6:8] + ":" + h[8:10] + ":" + h[10:]
	case "time":
		return r.time().Format(time.RFC3339Nano)
	case "gotime":
		return r.time().String()
	case "http":
		return r.time().UTC().Format("Mon, 02 Jan 2006 15:04:05 GMT")
	case "logtime":
		return r.time().Format("2006/01/02 15:04:05")
	case "clf":
		return r.time().Format("02/Jan/2006:15:04:05 -0700")
	case "ansic":
		return r.time().Format(time.ANSIC)
	case "date":
		return r.time().Format(time.DateOnly)
	case "amz":
		return r.time().UTC().Format("20060102T150405Z")
	case "unix":
		return strconv.FormatInt(r.time().Unix(), 10)
	case "dur":
		return time.Duration(r.Int64N(int64(100 * time.Minute))).String()
	case "ms":
		return strconv.Itoa(r.IntN(1e5)) + "ms"
	case "size":
		return r.draw("float") + []string{"B", "kB", "KiB", "MiB", "GB"}[r.IntN(5)]
	case "email":
		return r.from("abcdefghijklmnopqrstuvwxyz", 3+r.IntN(8)) + "." + r.from(base36, 5) + "@" + r.from("abcdefghijklmnopqrstuvwxyz", 6) + ".com"
	case "text": // what a person types
		return []string{"Ann", "12 Main St.", "n/a", "O'Brien", "Zoë", "1,5", "twelve", "yes/no", r.draw("base36")}[r.IntN(9)]
	case "letter":
		return r.from("abcdefghijklmnopqrstuvwxyz<>}]", 1)
	}
	panic("no such field: " + field)
}

func (r ids) time() time.Time {
	return time.Unix(1_700_000_000+r.Int64N(1e8), r.Int64N(1e9)).UTC()
}

// text fills a template in which {field} stands for what varies.
func (r ids) text(template string) string {
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(template, "{")
		b.WriteString(before)
		if !found {
			return b.String()
		}
		field, after, closed := strings.Cut(rest, "}")
		if !closed || strings.ContainsAny(field, " :\"'{,.") || field == "" {
			b.WriteByte('{')
			template = rest
			continue
		}
		b.WriteString(r.draw(field))
		template = after
	}
}

// everyday are errors as programs print them, from the standard library,
// drivers, brokers and services.
var everyday = []string{
	// ids of all kinds, joined in all ways
	"order {n} not found",
	"order {uuid} not found",
	"order:{uuid} not found",
	"order-{uuid}: already shipped",
	"orders.{uuid}.lock: lease lost",
	"orders/{uuid}/items: empty",
	"order_{uuid} is gone",
	"session {{uuid}} expired",
	"urn:uuid:{uuid}: unknown entity",
	"order id={UUID} rejected",
	"stripe: no such charge: ch_{base62_24}",
	"No such customer: 'cus_{base62_14}'",
	"order ord_{ulid} not found",
	"user usr_{ksuid} is blocked",
	"payment pay_{nanoid} declined",
	"invoice {nanoid} not found",
	"job {base36} failed",
	"order ord_{base36_10} is on hold",
	"cannot ship parcel {base36}: address incomplete",
	"document {hex24} was not found in orders",
	"asset {xid} missing",
	"product {ASIN} is out of stock",
	"snowflake {big} from the future",
	"commit {hex7} not in history",
	"checksum mismatch: want {hex64}, got {hex64}",
	"trace_id={hex32} span_id={hex16}: handler failed",
	"correlation id {ulid}: no reply after {dur}",
	"event {ksuid} replayed twice",
	"INV-{n}: amount {float} does not match {float}",
	"message for tenant acme-{hex8} skipped",

	// the standard library: net, net/http, context, os, tls
	"dial tcp {ip}:5432: connect: connection refused",
	"dial tcp [{ip6}]:5432: connect: network is unreachable",
	"read tcp {ip}:{port}->{ip}:5432: read: connection reset by peer",
	"write tcp {ip}:{port}->{ip}:443: write: broken pipe",
	"read udp {ip}:{port}->{ip}:53: i/o timeout",
	"dial tcp: lookup db.internal on {ip}:53: no such host",
	"accept tcp {ip}:{port}: use of closed network connection",
	`Get "https://api.example.com/v1/orders/{uuid}": context deadline exceeded (Client.Timeout exceeded while awaiting headers)`,
	`Post "https://api.example.com/v1/charges?key={hex32}&amount={n}": EOF`,
	`Get "http://{ip}:8080/orders/{n}/items/{n}": dial tcp {ip}:8080: i/o timeout`,
	`Put "https://user{n}:{base62_14}@files.example.com/{date}/{uuid}.json": http: server closed idle connection`,
	"unexpected status 503 Service Unavailable for order {n}",
	"http2: server sent GOAWAY and closed the connection; LastStreamID={n}, ErrCode=NO_ERROR, debug=\"\"",
	"stream error: stream ID {n}; INTERNAL_ERROR; received from peer",
	"net/http: HTTP/1.x transport connection broken: malformed HTTP status code \"{base36}\"",
	"http: request body too large: {size} of {size}",
	"tls: failed to verify certificate: x509: certificate has expired or is not yet valid: current time {time} is after {time}",
	"open /var/spool/orders/{uuid}.json: no such file or directory",
	"open /tmp/upload-{n}/part-{small}: too many open files",
	"write /data/{date}/{hex8}.log: no space left on device",
	"fork/exec /usr/bin/convert: resource temporarily unavailable (pid {n})",
	"exit status 1: worker {n} gave up after {dur}",

	// decoding and validation
	"invalid character '{letter}' looking for beginning of value",
	"json: cannot unmarshal string into Go struct field Order.lines.{small}.amount of type int64",
	"json: unknown field \"amount\" in message {base62_24}",
	"unexpected end of JSON input at offset {n}",
	"yaml: line {n}: mapping values are not allowed in this context",
	"XML syntax error on line {n}: element <order> closed by </item>",
	"proto: cannot parse invalid wire-format data at byte {n} of {size}",
	"Key: 'Order.Items[{small}].Price' Error:Field validation for 'Price' failed on the 'gt' tag",
	"validation failed: field \"email\" has value \"{text}\"",
	"invalid email {email}: domain unknown",
	"amount {signed} must be positive (order {n}, line {small})",
	"avro: schema {n} not found for subject orders-value",
	"Error 400: parse error at position {n}: unexpected token",
	"price {float} outside [{float}, {float}]",
	"ids [{n}, {n}, {n}] not found",
	"message key {base64}: bad padding",

	// PostgreSQL, MySQL, MongoDB, others
	`ERROR: duplicate key value violates unique constraint "orders_pkey" (SQLSTATE 23505)`,
	`ERROR: duplicate key value violates unique constraint "orders_pkey" (SQLSTATE 23505): Key (order_id)=({text}) already exists.`,
	`ERROR: invalid input syntax for type uuid: "{text}" (SQLSTATE 22P02)`,
	`ERROR: value too long for type character varying(64) (SQLSTATE 22001), row {n}`,
	`pq: insert or update on table "lines" violates foreign key constraint "lines_order_id_fkey" (order {uuid})`,
	"failed to connect to `host=db.internal user=app database=shop`: dial error (dial tcp {ip}:5432: connect: connection refused)",
	"ERROR: deadlock detected (SQLSTATE 40P01): Process {n} waits for ShareLock on transaction {n}; blocked by process {n}.",
	"ERROR: canceling statement due to statement timeout after {ms} (SQLSTATE 57014)",
	"ERROR: relation \"orders_p{n}\" does not exist (SQLSTATE 42P01)",
	"Error 1062 (23000): Duplicate entry '{text}' for key 'orders.PRIMARY'",
	"Error 1213 (40001): Deadlock found when trying to get lock; try restarting transaction {n}",
	"Error 1366 (HY000): Incorrect integer value: '{text}' for column 'qty' at row {small}",
	"[mysql] {logtime} packets.go:{small}: unexpected EOF",
	`E11000 duplicate key error collection: shop.orders index: email_1 dup key: { email: "{email}" }`,
	"(WriteConflict) WriteConflict error: this operation conflicted with another operation, txn {n}:{n}",
	"ORA-00001: unique constraint (SHOP.ORDERS_PK) violated at row {n}",
	"elastic: Error 429 (Too Many Requests): rejected execution of TransportService#{n} on node-{small}",
	"gocql: no response received from cassandra within timeout period of {dur} (host {ip}:9042)",

	// Redis, Kafka, RabbitMQ, NATS
	"MOVED {n} {ip}:6379",
	"WRONGTYPE Operation against a key holding the wrong kind of value: cart:{uuid}",
	"redis: lock order:{n} not obtained after {dur}",
	"kafka: Failed to produce message to topic orders: kafka server: Message was too large, {size}",
	"kafka: error while consuming orders/{small}: kafka server: The requested offset {big} is outside the range of offsets",
	"kafka: client has run out of available brokers to talk to: dial tcp {ip}:9092: i/o timeout",
	"consumer consumer-{small}-{uuid} left the group: heartbeat {dur} late",
	"commit of orders[{small}]@{big} failed: rebalance in progress, generation {n}",
	`Exception (404) Reason: "NOT_FOUND - no queue 'reply.{uuid}' in vhost '/'"`,
	`Exception (406) Reason: "PRECONDITION_FAILED - unknown delivery tag {n}"`,
	`Exception (504) Reason: "channel/connection is not open", channel {small} of amq.ctag-{b64uuid}`,
	"nats: no responders available for request on _INBOX.{base62_24}",
	"nats: API error: code=503 err_code=10008 description=JetStream not available, request {n}",
	"nats: maximum payload exceeded: {size}",
	"stream ORDERS sequence {big}: message not found",

	// gRPC, AWS, Google, Stripe, Kubernetes
	"rpc error: code = Unavailable desc = connection error: desc = \"transport: Error while dialing: dial tcp {ip}:8443: connect: connection refused\"",
	"rpc error: code = ResourceExhausted desc = grpc: received message larger than max ({n} vs. 4194304)",
	"rpc error: code = NotFound desc = order {base36} not found",
	"operation error S3: GetObject, https response error StatusCode: 404, RequestID: {HEX16}, HostID: {hostid}, NoSuchKey: The specified key does not exist.",
	"operation error DynamoDB: PutItem, https response error StatusCode: 400, RequestID: {base32}, ConditionalCheckFailedException: The conditional request failed",
	"AccessDenied: User: arn:aws:sts::{n}:assumed-role/app/i-0{hex16} is not authorized to perform: sqs:SendMessage on resource: arn:aws:sqs:eu-west-1:{n}:orders",
	"ThrottlingException: Rate exceeded\n\tstatus code: 400, request id: {uuid}",
	"SignatureDoesNotMatch: Signature expired: {amz} is now earlier than {amz} ({amz} - 5 min.)",
	"googleapi: Error 404: No such object: orders/{date}/{hex32}.json, notFound",
	`{"code":"resource_missing","message":"No such payment_intent: 'pi_{base62_24}'","param":"intent","request_log_url":"https://dashboard.stripe.com/logs/req_{base62_14}?t={unix}","type":"invalid_request_error"}`,
	`{"error":{"status":429,"title":"Too Many Requests","instance":"/orders/{n}","retry_after":{small}}}`,
	"token {jwt} is expired by {dur}",
	"pod orders-{rs} is not ready",
	"dial tcp: lookup orders-{rs}.orders.svc.cluster.local: no such host",
	"daemonset pod fluentd-{pod5} evicted from node ip-{dashed}.eu-west-1.compute.internal",
	"rate limited: 429 Too Many Requests, retry after {small}s (request {base36})",
	"upstream returned 502 for /v2/users/{n}/orders",
	"payment gateway responded with 503 after {dur}: ref {base62_24}",

	// panics, times, devices
	"runtime error: index out of range [{n}] with length {small}",
	"runtime error: slice bounds out of range [:{n}] with capacity {n}",
	"panic: runtime error: invalid memory address or nil pointer dereference [signal SIGSEGV: segmentation violation code=0x1 addr={ptr} pc={ptr}]",
	"interface conversion: interface {} is string, not int64 (goroutine {n})",
	"lease acquired at {gotime} expired at {gotime}",
	"token not valid before {http}",
	"access log [{clf}]: truncated",
	"cron missed its run of {ansic} by {dur}",
	"device {mac} offline since {time}",
	"memory limit exceeded: {size} of {size} in use by worker-{small}",
	"retry {small} of {small} for {email} failed at {time}: mailbox busy",
	"订单 {n} 失败: 用户 {uuid}",
}

// made are errors made by the code that makes them.
var made = map[string]func(ids) error{
	"strconv.Atoi":       func(r ids) error { _, err := strconv.Atoi(r.draw("text")); return err },
	"strconv.ParseInt":   func(r ids) error { _, err := strconv.ParseInt("9"+r.draw("unix")+r.draw("unix"), 10, 64); return err },
	"strconv.ParseBool":  func(r ids) error { _, err := strconv.ParseBool(r.draw("base36")); return err },
	"time.Parse":         func(r ids) error { _, err := time.Parse(time.RFC3339, r.draw("logtime")); return err },
	"time.ParseDuration": func(r ids) error { _, err := time.ParseDuration("x" + r.draw("base36")); return err },
	"url.Parse":          func(r ids) error { _, err := url.Parse("http://h:" + r.draw("base36") + "/%zz"); return err },
	"json into int": func(r ids) error {
		var v struct{ N int }
		return json.Unmarshal([]byte(`{"n":"`+r.draw("base36")+`"}`), &v)
	},
	"json out of range": func(r ids) error {
		var v struct{ N int8 }
		return json.Unmarshal([]byte(`{"n":`+r.draw("big")+`}`), &v)
	},
	"hex.DecodeString": func(r ids) error {
		_, err := hex.DecodeString(r.draw("hex8")[:1+2*r.IntN(4)])
		return fmt.Errorf("key %s: %w", r.draw("hex8"), err)
	},
	"base64 corrupt": func(r ids) error {
		_, err := base64.StdEncoding.DecodeString(r.draw("base62_24")[:r.IntN(20)] + "*")
		return err
	},
	"netip.ParseAddrPort": func(r ids) error { _, err := netip.ParseAddrPort(r.draw("ip")); return fmt.Errorf("peer: %w", err) },
	"fs.PathError": func(r ids) error {
		return &fs.PathError{Op: "open", Path: "/spool/" + r.draw("ulid"), Err: fs.ErrPermission}
	},
	"net.OpError": func(r ids) error {
		return &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.ParseIP(r.draw("ip")), Port: 9092}, Err: errors.New("connection refused")}
	},
	"net.DNSError": func(r ids) error {
		return &net.DNSError{Err: "no such host", Name: "kafka-" + r.draw("small") + ".kafka", Server: r.draw("ip") + ":53", IsNotFound: true}
	},
	"panic": func(r ids) (err error) {
		defer func() { err = fmt.Errorf("panic: %v", recover()) }()
		_ = make([]int, 5)[5+r.IntN(1e6)]
		return nil
	},
	"joined": func(r ids) error {
		return errors.Join(fmt.Errorf("order %s", r.draw("n")), fmt.Errorf("shard %s: %w", r.draw("small"), fs.ErrClosed))
	},
}

// Each everyday error is one cause, whatever its ids are.
func TestEverydayErrorsAreOneCauseEach(t *testing.T) {
	shapes := map[string]func(ids) error{}
	for _, template := range everyday {
		shapes[template] = func(r ids) error { return errors.New(r.text(template)) }
	}
	maps.Copy(shapes, made)
	if len(shapes) < 100 {
		t.Fatalf("%d shapes", len(shapes))
	}
	owner := map[string]string{}
	split := 0
	for name, fail := range shapes {
		r := ids{rand.New(rand.NewPCG(13, uint64(len(name))))}
		causes, titles := map[string]int{}, []string{}
		for range 1000 {
			c := Fingerprint(fail(r), nil)
			if causes[c.ID]++; causes[c.ID] == 1 {
				titles = append(titles, c.Title)
			}
			if other, taken := owner[c.ID]; taken && other != name {
				t.Errorf("%q and %q are one cause: %s", name, other, c.Title)
			}
			owner[c.ID] = name
		}
		if len(causes) != 1 {
			split++
			t.Logf("%q: %d causes, such as %q", name, len(causes), titles[:min(4, len(titles))])
		}
	}
	if split > 0 {
		t.Errorf("%d of %d shapes are more than one cause", split, len(shapes))
	}
}

// different are texts of which no two may be one cause.
var different = [][]string{
	// HTTP
	{"unexpected status 404", "unexpected status 503", "unexpected status 429"},
	{"unexpected status code: 404", "unexpected status code: 503"},
	{"GET /orders/17: 404 Not Found", "GET /orders/17: 503 Service Unavailable", "GET /orders/17: 500 Internal Server Error"},
	{"payment api returned 502", "payment api returned 504"},
	{"payment api returned HTTP 502", "payment api returned HTTP 429"},
	{"got 401 from auth", "got 403 from auth"},
	{"charge failed with 402", "charge failed with 409"},
	{"HTTP/1.1 503 from upstream", "HTTP/1.1 404 from upstream"},
	{`{"status":404,"id":17}`, `{"status":409,"id":17}`},
	{`{"statusCode":500}`, `{"statusCode":501}`},
	{"error: 503", "error: 404"},
	{"bad response: 500, want 200", "bad response: 502, want 200"},
	{"status=400 id=17", "status=422 id=17"},
	{"https response error StatusCode: 400, RequestID: 0AF1", "https response error StatusCode: 503, RequestID: 0AF1"},
	{"googleapi: Error 403: order 17", "googleapi: Error 404: order 17"},
	{"upstream answered 4xx", "upstream answered 5xx"},
	{`Get "https://a.example.com/v1/orders/17": EOF`, `Get "https://b.example.com/v1/orders/17": EOF`},
	{`Get "https://a.example.com/v1/orders/17": EOF`, `Get "https://a.example.com/v1/refunds/17": EOF`, `Post "https://a.example.com/v1/orders/17": EOF`},

	// databases
	{"ERROR: failed (SQLSTATE 23505)", "ERROR: failed (SQLSTATE 40001)", "ERROR: failed (SQLSTATE 40P01)", "ERROR: failed (SQLSTATE 22P02)", "ERROR: failed (SQLSTATE 57014)"},
	{"SQLSTATE[23000]: failed", "SQLSTATE[HY000]: failed", "SQLSTATE[42S02]: failed"},
	{"Error 1062 (23000): failed", "Error 1213 (40001): failed", "Error 1205 (HY000): failed"},
	{"Error 1062 (23000): failed", "Error 1062 (40001): failed"},
	{"E11000 failed", "E11001 failed"},
	{"ORA-00001: failed", "ORA-12541: failed"},
	{`null value in column "email" violates not-null constraint`, `null value in column "phone" violates not-null constraint`},
	{`column "address1" does not exist`, `column "address2" does not exist`},
	{`duplicate key value violates unique constraint "orders_pkey"`, `duplicate key value violates unique constraint "orders_email_key"`},
	{`violates foreign key constraint "fk_rails_1a2b3c4d5e"`, `violates foreign key constraint "fk_rails_9f8e7d6c5b"`},
	{`relation "orders" does not exist`, `relation "refunds" does not exist`},
	{"Unknown column 'qty' in 'field list'", "Unknown column 'price' in 'field list'", "Unknown column 'qty' in 'where clause'"},
	{"Duplicate entry 'x' for key 'orders.PRIMARY'", "Duplicate entry 'x' for key 'orders.email'"},
	{"Incorrect integer value: 'x' for column 'qty' at row 1", "Incorrect integer value: 'x' for column 'tax' at row 1"},
	{"Table 'shop.orders' doesn't exist", "Table 'shop.refunds' doesn't exist"},
	{`database "shop" does not exist`, `database "crm" does not exist`},
	{`permission denied for table orders`, `permission denied for table refunds`},

	// decoding and validation
	{`json: unknown field "amount"`, `json: unknown field "currency"`},
	{"json: cannot unmarshal string into Go struct field Order.amount of type int64", "json: cannot unmarshal string into Go struct field Order.qty of type int64"},
	{"json: cannot unmarshal string into Go struct field Order.line1 of type string", "json: cannot unmarshal string into Go struct field Order.line2 of type string"},
	{"json: cannot unmarshal number 300 into Go value of type int8", "json: cannot unmarshal number 300 into Go value of type uint8", "json: cannot unmarshal number 300 into Go value of type int64"},
	{"Field validation for 'Price' failed on the 'gt' tag", "Field validation for 'Price' failed on the 'required' tag", "Field validation for 'Name' failed on the 'gt' tag"},
	{`"amount" is required`, `"currency" is required`},
	{`parse config: missing "database.url"`, `parse config: missing "redis.url"`},
	{`strconv.Atoi: parsing "x": invalid syntax`, `strconv.Atoi: parsing "x": value out of range`, `strconv.ParseBool: parsing "x": invalid syntax`},
	{"unsupported event OrderV2Created", "unsupported event PaymentV2Created"},
	{`exec: "ffmpeg": executable file not found in $PATH`, `exec: "convert": executable file not found in $PATH`},
	{"unsupported hash sha256", "unsupported hash sha512", "unsupported hash md5"},
	{"element <order> is not closed", "element <item> is not closed"},

	// networks
	{"dial tcp 10.0.0.1:5432: connect: connection refused", "dial tcp 10.0.0.1:6379: connect: connection refused", "dial tcp 10.0.0.1:9092: connect: connection refused"},
	{"dial tcp postgres:5432: connect: connection refused", "dial tcp redis:6379: connect: connection refused", "dial tcp redis:6380: connect: connection refused"},
	{"dial tcp localhost:5432: i/o timeout", "dial tcp localhost:6379: i/o timeout"},
	{"cannot reach amqp://user:secret@mq.internal:5672/", "cannot reach amqp://user:secret@mq.internal:5671/", "cannot reach amqp://user:secret@mq2.internal/"},
	{"dial tcp 10.0.0.1:443: connect: connection refused", "dial tcp 10.0.0.1:443: i/o timeout", "dial tcp 10.0.0.1:443: connect: no route to host"},
	{"read tcp 10.0.0.1:51234->10.0.0.2:5432: read: connection reset by peer", "write tcp 10.0.0.1:51234->10.0.0.2:5432: write: broken pipe"},
	{"lookup db.internal: no such host", "lookup cache.internal: no such host"},
	{"errno 111", "errno 110"},
	{"errno=ECONNREFUSED", "errno=ETIMEDOUT", "errno=EHOSTUNREACH", "errno=ENOTFOUND"},
	{"exit status 1", "exit status 137"},
	{"killed by signal 9", "killed by signal 15"},

	// brokers and services
	{`Exception (404) Reason: "NOT_FOUND - no queue 'orders' in vhost '/'"`, `Exception (404) Reason: "NOT_FOUND - no exchange 'orders' in vhost '/'"`, `Exception (403) Reason: "NOT_FOUND - no queue 'orders' in vhost '/'"`},
	{"nats: API error: code=503 err_code=10008", "nats: API error: code=404 err_code=10059", "nats: API error: code=503 err_code=10059"},
	{"kafka server: Request was for a topic or partition that does not exist on this broker.", "kafka server: Message was too large, server rejected it to avoid allocation error."},
	{"kafka: error code 3", "kafka: error code 7"},
	{"NOSCRIPT No matching script", "WRONGTYPE Operation against a key", "CROSSSLOT Keys in request", "MISCONF Redis is configured", "READONLY You can't write", "CLUSTERDOWN Hash slot not served"},
	{"rpc error: code = Unavailable desc = x", "rpc error: code = DeadlineExceeded desc = x", "rpc error: code = ResourceExhausted desc = x", "rpc error: code = Internal desc = x"},
	{"rpc error: code = Code(17) desc = x", "rpc error: code = Code(18) desc = x"},
	{`{"code":"card_declined","decline_code":"insufficient_funds"}`, `{"code":"card_declined","decline_code":"do_not_honor"}`, `{"code":"expired_card","decline_code":"do_not_honor"}`},
	{"api error NoSuchKey: x", "api error NoSuchBucket: x", "api error AccessDenied: x", "api error SlowDown: x"},
	{"not authorized to perform: s3:GetObject", "not authorized to perform: s3:PutObject", "not authorized to perform: sqs:SendMessage"},
	{"ProvisionedThroughputExceededException: x", "ConditionalCheckFailedException: x", "ThrottlingException: x"},
	{"no such charge: ch_3MqLiJLkdIwHu7ix0Y8wPjqP", "no such customer: cus_NffrFeUfNV2HibJ8sKQpV1xZ"},
	{"job orders-7d9f8b6c5-x2x4z failed", "job refunds-7d9f8b6c5-x2x4z failed"},
	{"order 17 not found", "user 17 not found", "order 17 not paid", "order 17 already paid", "order 17 unknown"},
	{"AADSTS50011: mismatch", "AADSTS70008: mismatch"},

	// panics
	{"runtime error: index out of range [5] with length 3", "runtime error: slice bounds out of range [:5] with length 3", "runtime error: integer divide by zero", "runtime error: invalid memory address or nil pointer dereference"},
	{"interface conversion: interface {} is string, not int32", "interface conversion: interface {} is string, not int64", "interface conversion: interface {} is nil, not string"},
	{"assignment to entry in nil map", "send on closed channel", "close of closed channel", "all goroutines are asleep - deadlock!"},
	{"server shutdown", "server overloaded", "server unreachable"},
}

func TestDifferentErrorsStayApart(t *testing.T) {
	pairs := 0
	for _, texts := range different {
		for i, a := range texts {
			for _, b := range texts[:i] {
				pairs++
				if c := Fingerprint(errors.New(a), nil); c == Fingerprint(errors.New(b), nil) {
					t.Errorf("%q and %q are one cause: %s", a, b, c.Title)
				}
			}
		}
	}
	if pairs < 100 {
		t.Errorf("%d pairs", pairs)
	}
}
