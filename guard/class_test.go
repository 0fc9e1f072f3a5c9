// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"database/sql"
	"database/sql/driver"
	"encoding/base64"
	"encoding/csv"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"pgregory.net/rapid"
)

// classes checks what each error's class is, also behind a wrapper.
func classes(t *testing.T, want Class, errs map[string]error) {
	t.Helper()
	for name, err := range errs {
		if err == nil {
			t.Errorf("%s: no error", name)
			continue
		}
		if got := Classify(err); got != want {
			t.Errorf("%s: %v, want %v: %T: %v", name, got, want, err, err)
		}
		if got := Classify(fmt.Errorf("order 7: %w", err)); got != want {
			t.Errorf("%s, wrapped: %v, want %v: %T: %v", name, got, want, err, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// closedPort is an address where nobody listens. It is an end of a connection, so that no
// other test is given its port meanwhile.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = near.Close() })
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = far.Close() })
	return near.LocalAddr().String()
}

func TestClassOfTheNetwork(t *testing.T) {
	addr := closedPort(t)
	hangUp := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		c, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_ = c.Close()
		}
	}))
	defer hangUp.Close()
	hang := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer hang.Close()
	secure := httptest.NewUnstartedServer(http.NotFoundHandler())
	secure.Config.ErrorLog = log.New(io.Discard, "", 0) // of the handshake that is meant to fail
	secure.StartTLS()
	defer secure.Close()
	get := func(ctx context.Context, client *http.Client, url string) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
		if err != nil {
			return err
		}
		r, err := client.Do(req)
		if err == nil {
			_ = r.Body.Close()
		}
		return err
	}
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	<-short.Done()
	gone, leave := context.WithCancel(t.Context())
	leave()
	here, there := net.Pipe()
	_ = here.Close()
	_ = there.Close()
	plain, err := net.Dial("tcp", hang.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_ = plain.SetReadDeadline(time.Unix(1, 0))
	late := second(plain.Read(make([]byte, 1)))
	_ = plain.Close()
	closed := second(plain.Write([]byte("x")))
	dial := second(net.Dial("tcp", addr))

	classes(t, ClassDependency, map[string]error{
		"refused":           dial,
		"dns":               &net.OpError{Op: "dial", Net: "tcp", Err: &net.DNSError{Err: "server misbehaving", Name: "db", IsTemporary: true}},
		"no such host":      &net.DNSError{Err: "no such host", Name: "db", IsNotFound: true},
		"read deadline":     late,
		"closed connection": closed,
		"net.ErrClosed":     net.ErrClosed,
		"closed pipe":       second(here.Write([]byte("x"))),
		"op error alone":    &net.OpError{Op: "read", Net: "tcp"},
		"op error, unknown": &net.OpError{Op: "read", Net: "tcp", Err: errors.New("x")},
		"op error, EOF":     &net.OpError{Op: "read", Net: "tcp", Err: io.EOF},
		"http refused":      get(t.Context(), hang.Client(), "http://"+addr),
		"http hung up":      get(t.Context(), hangUp.Client(), hangUp.URL),
		"http timeout":      get(t.Context(), &http.Client{Timeout: time.Millisecond}, hang.URL),
		"http deadline":     get(short, hang.Client(), hang.URL),
		"certificate":       get(t.Context(), http.DefaultClient, secure.URL),
		"no TLS":            second(tls.Dial("tcp", hang.Listener.Addr().String(), &tls.Config{MinVersion: tls.VersionTLS13})),
		"x509":              x509.UnknownAuthorityError{},
		"deadline":          context.DeadlineExceeded,
		"os deadline":       os.ErrDeadlineExceeded,
		"reset":             os.NewSyscallError("read", syscall.ECONNRESET),
		"no descriptors":    &fs.PathError{Op: "open", Path: "x", Err: syscall.EMFILE},
		"disk full":         &fs.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC},
		"bad conn":          driver.ErrBadConn,
		"conn done":         sql.ErrConnDone,
		"guard's refusal":   &HeldError{Source: "s", Reason: ReasonBreaker},
	})
	classes(t, ClassUnknown, map[string]error{
		"canceled":          context.Canceled,
		"http canceled":     get(gone, hang.Client(), hang.URL),
		"dial canceled":     second((&net.Dialer{}).DialContext(gone, "tcp", addr)),
		"no port":           second(net.Dial("tcp", "localhost")),
		"bad url":           second(url.Parse("http://[" + addr)),
		"scheme":            get(t.Context(), hang.Client(), "foo://x"),
		"not found":         second(os.Open("/nonexistent")),
		"EOF":               io.EOF,
		"unexpected EOF":    io.ErrUnexpectedEOF,
		"no rows":           sql.ErrNoRows,
		"revoked":           errRevoked,
		"plain":             errors.New("connection refused"),
		"url without cause": &url.Error{Op: "Get", URL: "x"},
	})
}

// At the guard's own timeout a time-out says nothing: what hangs may be the message.
// A refused connection still does.
func TestClassAfterTheTimeout(t *testing.T) {
	late := func(err error) error { return fmt.Errorf("%w: %w", ErrTimeout, err) }
	classes(t, ClassUnknown, map[string]error{
		"alone":   ErrTimeout,
		"context": late(context.DeadlineExceeded),
		"http":    late(&url.Error{Op: "Get", URL: "x", Err: context.DeadlineExceeded}),
		"read":    late(&net.OpError{Op: "read", Net: "tcp", Err: os.ErrDeadlineExceeded}),
		"message": late(&strconv.NumError{Err: strconv.ErrSyntax}),
	})
	classes(t, ClassDependency, map[string]error{
		"refused": late(&net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}),
		"marked":  late(Unavailable(errDown)),
	})
}

type shape struct {
	XMLName xml.Name `json:"-"`
	N       int
}

func decodeJSON(text string) error { return json.Unmarshal([]byte(text), new(shape)) }
func decodeXML(text string) error  { return xml.Unmarshal([]byte(text), new(shape)) }

func TestClassOfDecoders(t *testing.T) {
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	_, _ = w.Write([]byte("text"))
	_ = w.Close()
	broken := slices.Clone(zipped.Bytes())
	broken[len(broken)-8] ^= 1
	r, err := gzip.NewReader(bytes.NewReader(broken))
	if err != nil {
		t.Fatal(err)
	}
	classes(t, ClassMessage, map[string]error{
		"json garbage":    decodeJSON(`{garbage`),
		"json value":      decodeJSON(`{"N": x}`),
		"json cut":        decodeJSON(`{"N": 1`),
		"json cut string": decodeJSON(`{"N`),
		"json quote":      decodeJSON("{\"N\": \"a\nb\"}"),
		"json array":      decodeJSON(`[1 2]`),
		"json literal":    decodeJSON(`{"N": nope}`),
		"json type":       decodeJSON(`{"N": "7"}`),
		"json decoder":    json.NewDecoder(strings.NewReader(`{"N": x}`)).Decode(new(shape)),
		"xml":             decodeXML(`<shape><N>1</shape>`),
		"xml cut":         decodeXML(`<shape><N>1`),
		"xml number":      decodeXML(`<shape><N>x</N></shape>`),
		"csv":             second(csv.NewReader(strings.NewReader("a,b\nc")).ReadAll()),
		"base64":          second(base64.StdEncoding.DecodeString("!")),
		"hex":             second(hex.DecodeString("xy")),
		"odd hex":         second(hex.DecodeString("a")),
		"gzip":            second(io.ReadAll(r)),
		"no gzip":         second(gzip.NewReader(strings.NewReader("0123456789012345"))),
		"number":          second(strconv.Atoi("x")),
		"range":           second(strconv.ParseUint("-1", 10, 64)),
		"bool":            second(strconv.ParseBool("x")),
		"time":            second(time.Parse(time.RFC3339, "x")),
	})
	// What a gateway says in an outage must not condemn messages, and a cut-off
	// stream looks like a broken connection.
	classes(t, ClassUnknown, map[string]error{
		"json empty":     decodeJSON(""),
		"json html":      decodeJSON("\n <html>"),
		"json text":      decodeJSON("Service Unavailable"),
		"json text u":    decodeJSON("upstream connect error"),
		"json literal n": decodeJSON("no healthy upstream"),
		"json literal f": decodeJSON("fault filter abort"),
		"json status":    decodeJSON("502 Bad Gateway"),
		"json error":     json.Unmarshal([]byte(`{"error": "overloaded"}`), new([]int)),
		"json stream":    json.NewDecoder(strings.NewReader(`{"N": 1`)).Decode(new(shape)),
		"json no stream": json.NewDecoder(strings.NewReader("")).Decode(new(shape)),
		"xml html":       xml.Unmarshal([]byte("<html><body><hr></body></html>"), new(struct{ N int })),
		"xml other": xml.Unmarshal([]byte("<html></html>"), new(struct {
			XMLName xml.Name `xml:"shape"`
		})),
		"xml text": decodeXML("Service Unavailable"),
	})
}

// What libraries agree on by method names.
type (
	withStatus     int
	withHTTPStatus int
	withState      string
	withRedis      string
	withLabel      string
	withAWS        string
	withTimeout    bool
	withTemporary  bool
)

func (e withStatus) Error() string     { return "status" }
func (e withStatus) StatusCode() int   { return int(e) }
func (e withHTTPStatus) Error() string { return "status" }
func (e withHTTPStatus) HTTPStatusCode() int {
	return int(e)
}
func (e withState) Error() string                   { return "state" }
func (e withState) SQLState() string                { return string(e) }
func (e withRedis) Error() string                   { return string(e) }
func (withRedis) RedisError()                       {}
func (e withLabel) Error() string                   { return "label" }
func (e withLabel) HasErrorLabel(label string) bool { return label == string(e) }
func (e withLabel) HasErrorCode(code int) bool      { return strconv.Itoa(code) == string(e) }
func (e withAWS) Error() string                     { return "aws" }
func (e withAWS) ErrorCode() string                 { return string(e) }
func (withAWS) ErrorMessage() string                { return "" }
func (e withTimeout) Error() string                 { return "timeout" }
func (e withTimeout) Timeout() bool                 { return bool(e) }
func (e withTemporary) Error() string               { return "temporary" }
func (e withTemporary) Temporary() bool             { return bool(e) }

// status has the shape of a gRPC error, without grpc.
type (
	statusCode  uint32
	status      struct{ code statusCode }
	statusError struct{ s *status }
)

func (s *status) Code() statusCode         { return s.code }
func (e *statusError) Error() string       { return "rpc error" }
func (e *statusError) GRPCStatus() *status { return e.s }
func grpc(code statusCode) error           { return &statusError{&status{code}} }
func aws(status int, code string) error    { return &awsResponse{withHTTPStatus(status), withAWS(code)} }
func (e *awsResponse) Unwrap() error       { return e.err }

type awsResponse struct {
	withHTTPStatus
	err error
}

func TestClassByMethod(t *testing.T) {
	classes(t, ClassDependency, map[string]error{
		"408": withStatus(408), "429": withStatus(429), "502": withStatus(502), "503": withHTTPStatus(503), "529": withStatus(529),
		"08006": withState("08006"), "40001": withState("40001"), "53300": withState("53300"), "57P01": withState("57P01"),
		"58030": withState("58030"), "25006": withState("25006"),
		"loading": withRedis("LOADING Redis is loading"), "readonly": withRedis("READONLY x"), "moved": withRedis("MOVED 1 a:1"),
		"clients": withRedis("ERR max number of clients reached"),
		"label":   withLabel("NetworkError"), "timeout": withTimeout(true), "temporary": withTemporary(true),
		"unavailable": grpc(14), "exhausted": grpc(8), "aborted": grpc(10), "deadline": grpc(4),
		"throttled": aws(400, "ProvisionedThroughputExceededException"), "slow down": aws(503, "SlowDown"),
	})
	classes(t, ClassMessage, map[string]error{
		"400": withStatus(400), "413": withHTTPStatus(413), "415": withStatus(415), "422": withStatus(422),
		"22P02": withState("22P02"), "23505": withState("23505"), "duplicate": withLabel("11000"),
		"argument": grpc(3), "exists": grpc(6), "range": grpc(11),
		"validation": aws(400, "ValidationException"),
	})
	classes(t, ClassUnknown, map[string]error{
		"0": withStatus(0), "200": withStatus(200), "401": withStatus(401), "404": withStatus(404), "409": withHTTPStatus(409),
		"500": withStatus(500), "501": withStatus(501), "550 of SMTP": withStatus(550), "1006 of WebSocket": withStatus(1006),
		"42P01": withState("42P01"), "57014": withState("57014"), "state": withState("x"),
		"nil": withRedis("redis: nil"), "wrong type": withRedis("WRONGTYPE x"), "label": withLabel("x"),
		"timeout": withTimeout(false), "temporary": withTemporary(false),
		"ok": grpc(0), "canceled": grpc(1), "unknown": grpc(2), "not found": grpc(5), "internal": grpc(13), "no status": &statusError{},
		"expired": aws(400, "ExpiredTokenException"),
	})
}

// One error tells more than another.
func TestClassOfSeveral(t *testing.T) {
	down, bad := error(syscall.ECONNREFUSED), second(strconv.Atoi("x"))
	classes(t, ClassDependency, map[string]error{
		"joined":          errors.Join(bad, down),
		"joined, first":   errors.Join(down, bad),
		"inside":          fmt.Errorf("%w: %w", bad, fmt.Errorf("x: %w", down)),
		"with a doubt":    errors.Join(context.Canceled, down),
		"reply not read":  fmt.Errorf("%w: %w", withStatus(503), decodeJSON("{x")),
		"unavailable":     Unavailable(bad),
		"outermost":       Unavailable(Permanent(bad)),
		"backoff":         Backoff(bad, time.Time{}),
		"mark behind":     errors.Join(bad, Unavailable(errDown)),
		"found by As":     asOnly{Unavailable(bad)},
		"a nil among":     &joined{nil, down},
		"in an odd shape": asOnly{down}.error,
	})
	classes(t, ClassMessage, map[string]error{
		"permanent":   Permanent(down),
		"outermost":   Permanent(Unavailable(down)),
		"mark behind": errors.Join(down, Permanent(errDown)),
		"two":         errors.Join(bad, bad),
		"with a word": fmt.Errorf("%w: %w", errDown, bad),
	})
	classes(t, ClassUnknown, map[string]error{
		"ignored":       Ignore(down),
		"doubt":         errors.Join(bad, context.Canceled),
		"reply":         fmt.Errorf("%w: %w", withStatus(403), decodeJSON("{x")),
		"panic":         &PanicError{Value: Unavailable(down)},
		"panic beside":  errors.Join(&PanicError{Value: "x"}, bad),
		"goexit":        &GoexitError{},
		"none":          &joined{},
		"plain":         errDown,
		"As finds none": asOnly{errDown},
	})
	if Classify(nil) != ClassUnknown || Unavailable(nil) != nil {
		t.Error("nil is something")
	}
}

type joined []error

func (e *joined) Error() string   { return "joined" }
func (e *joined) Unwrap() []error { return *e }

// cyclic wraps itself, and says something each time.
type cyclic struct{ withStatus }

func (e *cyclic) Unwrap() error { return e }

// hostile panics in one of its methods.
type hostile struct{ in string }

func (e *hostile) at(method string) {
	if e.in == method {
		panic("hostile " + method)
	}
}

func (e *hostile) Error() string       { e.at("Error"); return "x" }
func (e *hostile) Unwrap() error       { e.at("Unwrap"); return withRedis("") }
func (e *hostile) Is(error) bool       { e.at("Is"); return false }
func (e *hostile) As(any) bool         { e.at("As"); return false }
func (e *hostile) StatusCode() int     { e.at("StatusCode"); return 200 }
func (e *hostile) Timeout() bool       { e.at("Timeout"); return false }
func (e *hostile) Temporary() bool     { e.at("Temporary"); return false }
func (e *hostile) GRPCStatus() *status { e.at("GRPCStatus"); return nil }

// leaving calls Goexit.
type leaving struct{}

func (leaving) Error() string { return "leaving" }
func (leaving) Unwrap() error { runtime.Goexit(); return nil }

// An error that is broken has no class, and takes nobody with it.
func TestClassOfTheBroken(t *testing.T) {
	deep := error(syscall.ECONNREFUSED)
	for range maxErrors - 1 {
		deep = fmt.Errorf("x: %w", deep)
	}
	if got := Classify(deep); got != ClassDependency {
		t.Errorf("%d deep: %v", maxErrors, got)
	}
	errs := map[string]error{
		"too deep":       fmt.Errorf("x: %w", deep),
		"too wide":       errors.Join(slices.Repeat([]error{syscall.ECONNREFUSED}, maxErrors)...),
		"cyclic":         &cyclic{503},
		"nil op error":   (*net.OpError)(nil),
		"nil DNS error":  fmt.Errorf("x: %w", (*net.DNSError)(nil)),
		"nil url error":  (*url.Error)(nil),
		"nil json error": (*json.SyntaxError)(nil),
		"nil type error": (*json.UnmarshalTypeError)(nil),
		"nil status":     (*statusError)(nil),
		"nil of ours":    (*brokenError)(nil),
		"nil held":       fmt.Errorf("x: %w", (*awsResponse)(nil)),
	}
	for _, in := range []string{"Error", "Unwrap", "Is", "As", "StatusCode", "Timeout", "Temporary", "GRPCStatus"} {
		errs[in] = &hostile{in}
	}
	g := &Guard{}
	for name, err := range errs {
		if got := Classify(err); got != ClassUnknown {
			t.Errorf("%s: %v", name, got)
		}
		if got := g.classOf(err); got != ClassUnknown {
			t.Errorf("%s, by the guard: %v", name, got)
		}
	}
	if got := g.classOf(leaving{}); got != ClassUnknown {
		t.Errorf("goexit: %v", got)
	}
}

func TestWithClassify(t *testing.T) {
	asked := 0
	with := func(f func(error) Class) *Guard {
		g, err := New(Config{}, WithClassify(f))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = g.Close(context.Background()) })
		return g
	}
	mine := with(func(error) Class { asked++; return ClassMessage })
	for _, c := range []struct {
		name string
		g    *Guard
		err  error
		want Class
	}{
		{"mine", mine, errDown, ClassMessage},
		{"mine, over the default", mine, syscall.ECONNREFUSED, ClassMessage},
		{"a mark, over mine", mine, Unavailable(errDown), ClassDependency},
		{"success", mine, nil, ClassUnknown},
		{"unset", with(nil), syscall.ECONNREFUSED, ClassDependency},
		{"panics", with(func(error) Class { panic("x") }), syscall.ECONNREFUSED, ClassUnknown},
		{"leaves", with(func(error) Class { runtime.Goexit(); return ClassMessage }), errDown, ClassUnknown},
		{"no class", with(func(error) Class { return 9 }), errDown, ClassUnknown},
	} {
		if got := c.g.resultOf(c.err, nil).class; got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	if asked != 2 {
		t.Errorf("asked %d times", asked)
	}
	if w, _ := classify(Unavailable(Permanent(errDown))); w != failure {
		t.Errorf("Unavailable is outcome %d", w)
	}
	if got := fmt.Sprint(ClassUnknown, ClassDependency, ClassMessage, Class(9)); got != "unknown dependency message Class(9)" {
		t.Error(got)
	}
}

// A function's failed call is classified once, too.
func TestClassifierIsAskedByAFunction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		g, err := New(Config{Policy: Policy{Retry: Retry{Attempts: 3}}}, WithClassify(func(error) Class { asked++; return ClassMessage }),
			WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()))))
		if err != nil {
			t.Fatal(err)
		}
		f, err := Protect(g, SourceConfig{Name: "db"}, func(context.Context, int) error { return errDown })
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Do(t.Context(), 0); !errors.Is(err, errDown) || asked != 3 {
			t.Errorf("asked %d times for 3 calls, %v", asked, err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Each failed call is classified once, a success never; a classifier that panics or
// leaves costs no message.
func TestClassifierIsAsked(t *testing.T) {
	for name, then := range map[string]func(){"answers": func() {}, "panics": func() { panic("x") }, "leaves": runtime.Goexit} {
		for _, order := range []Order{OrderSource, OrderNone} {
			bubble(t, name+" "+order.String(), func(t *testing.T) {
				var asked []error
				g, err := New(Config{Policy: Policy{Order: order}}, WithClassify(func(err error) Class {
					asked = append(asked, err)
					then()
					return ClassMessage
				}))
				if err != nil {
					t.Fatal(err)
				}
				calls := 0
				s, err := Open(g, SourceConfig{Name: "s"}, Limits{EndsWithInput: true}, &testPort{keys: 8}, func(_ context.Context, m int) error {
					if calls++; m == 1 && calls <= 4 {
						return fmt.Errorf("call %d: %w", calls, errDown)
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				in := make(chan int, 3)
				in <- 0
				in <- 1
				in <- 2
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					_ = s.Run(ctx, in)
				}()
				time.Sleep(time.Minute)
				if a := s.Account(); a.Acked != 3 || len(asked) == 0 || len(asked) != calls-3 {
					t.Errorf("%+v, asked %d times in %d calls", a, len(asked), calls)
				}
				for _, err := range asked {
					if !errors.Is(err, errDown) {
						t.Error(err)
					}
				}
				if _, err := g.Close(t.Context()); err != nil {
					t.Error(err)
				}
				cancel()
				<-ended
			})
		}
	}
}

// Wrapping changes nothing, and nothing panics.
func TestClassOfAnyTree(t *testing.T) {
	leaves := []error{
		errDown, io.EOF, context.Canceled, context.DeadlineExceeded, syscall.ECONNREFUSED, ErrTimeout, errHeld, strconv.ErrSyntax,
		&strconv.NumError{Err: strconv.ErrSyntax}, withStatus(500), withStatus(503), withState("23505"), withRedis("LOADING x"), grpc(14),
		(*net.OpError)(nil), (*brokenError)(nil), &hostile{"Unwrap"}, &PanicError{Value: errDown}, driver.ErrBadConn, &json.SyntaxError{},
	}
	var tree func(*rapid.T, int) error
	tree = func(t *rapid.T, depth int) error {
		kind := rapid.IntRange(0, 8).Draw(t, "kind")
		if depth == 0 || kind < 2 {
			return rapid.SampledFrom(leaves).Draw(t, "leaf")
		}
		inner := tree(t, depth-1)
		switch kind {
		case 2:
			return &url.Error{Op: "Get", URL: "x", Err: inner}
		case 3:
			return &net.OpError{Op: "read", Net: "tcp", Err: inner}
		case 4:
			return errors.Join(inner, tree(t, depth-1))
		case 5:
			return mark(inner, rapid.SampledFrom([]outcome{failure, permanent, backoff, ignore}).Draw(t, "word"), time.Time{})
		case 6:
			return asOnly{inner}
		default:
			return &joined{inner, nil, tree(t, depth-1)}
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		err := tree(t, 5)
		want := Classify(err)
		if int(want) >= len(classNames) {
			t.Fatalf("%v", want)
		}
		for range rapid.IntRange(1, 5).Draw(t, "wraps") {
			err = fmt.Errorf("step: %w", err)
		}
		if got := Classify(err); got != want {
			t.Fatalf("wrapped %v, bare %v", got, want)
		}
		if got := Classify(fmt.Errorf("%w: %w", errDown, err)); got != want {
			t.Fatalf("wrapped beside another %v, bare %v", got, want)
		}
		if m := mustMark(err); m != nil && want != m.class() {
			t.Fatalf("%v, but it is marked %v", want, m.class())
		}
	})
}

// mustMark finds the outermost mark, nil for an error that cannot be looked at.
func mustMark(err error) (m *markedError) {
	defer func() { _ = recover() }()
	m, _ = find[*markedError](err)
	return m
}

func BenchmarkClassify(b *testing.B) {
	for _, c := range []struct {
		name string
		err  error
	}{
		{"dial", &url.Error{Op: "Get", URL: "x", Err: &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}}},
		{"plain", errDown},
		{"json", decodeJSON("{x")},
		{"grpc", grpc(14)},
		{"sql", withState("23505")},
		{"unknown type", &net.ParseError{}},
	} {
		err := c.err
		for range 5 {
			err = fmt.Errorf("step: %w", err)
		}
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Classify(err)
			}
		})
	}
	b.Run("by the guard", func(b *testing.B) {
		g := &Guard{}
		b.ReportAllocs()
		for b.Loop() {
			g.classOf(errDown)
		}
	})
}
