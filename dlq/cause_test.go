// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"runtime/debug"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestNormalise(t *testing.T) {
	for in, want := range map[string]string{
		"":                             "",
		"connection refused":           "connection refused",
		"order 4711 not found":         "order <n> not found",
		"exit status -1":               "exit status -1",
		"took 1.5s, limit 300ms":       "took <dur>, limit <dur>",
		"12µs too late":                "<dur> too late",
		"1h2m3.5s":                     "<dur>",
		"3.14 vs 1e9 vs -2.5e-3":       "<n> vs <n> vs <n>",
		"at 2026-11-21T14:12:49.123Z":  "at <time>",
		"at 2026-11-21T14:12:49+08:00": "at <time>",
		"at 2026-11-21 14:12:49.5":     "at <time>",
		"user 3f2504e0-4f89-11d3-9a0c-0305e82c3301 locked":        "user <uuid> locked",
		"trace 4bf92f3577b34da6a3ce929d0e0e4736":                  "trace <n>",
		"at 0xc000012345 and 0x1f":                                "at <n> and <n>",
		"commit 9fceb02":                                          "commit <n>",
		"id 01HZX3ABCDEFGHJKMNPQRSTVWX gone":                      "id <n> gone",
		`unknown field "amount_eur" in 'order'`:                   `unknown field "amount_eur" in 'order'`,
		`bad "quoted \"inner\" text" 17 here`:                     `bad "quoted \"inner\" text" <n> here`,
		`bad value "quoted \"inner\" text" here`:                  "bad value <s> here",
		"can't read the user's file":                              "can't read the user's file",
		`half "open`:                                              `half "open`,
		"dial tcp 10.0.0.1:5432: connect: connection refused":     "dial tcp <ip>:5432: connect: connection refused",
		"dial tcp [2001:db8::1]:443: i/o timeout":                 "dial tcp <ip>:443: i/o timeout",
		"lookup on ::1 and fe80::1%eth0":                          "lookup on <ip> and <ip>",
		"read tcp 192.168.0.7:51234->10.0.0.2:80: read: reset":    "read tcp <ip>:<n>-><ip>:80: read: reset",
		"partition orders-3 at offset 17":                         "partition orders-<n> at offset <n>",
		"user123@example.com":                                     "<email>",
		"offsets [1, 2, 3] and [4 5]":                             "offsets [<n>] and [<n>]",
		"a\n\tb \u00a0 c\x00d":                                    "a b c d",
		"订单 123 失败，id=42":                                         "订单 <n> 失败，id=<n>",
		"订单123失败":                                                 "订单<n>失败",
		"index out of range [5] with length 3":                    "index out of range [<n>] with length <n>",
		"go1.26.8 v2":                                             "go<n>.<n> v<n>",
		"pq: value too long (SQLSTATE 22001)":                     "pq: value too long (SQLSTATE 22001)",
		"10-20":                                                   "<n>-<n>",
		"host-a.example.com:9092":                                 "host-a.example.com:9092",
		`half value "open`:                                        `half value "open`,
		"value '":                                                 "value '",
		"GET /o?key=a&b=c (x)":                                    "GET /o?<s> (x)",
		"Key (email)=(a b) already exists":                        "Key (email)=(<s>) already exists",
		"amqp://u:p@mq:5672/v":                                    "amqp://<s>@mq:5672/v",
		"main.go:443 and a.example.com:443, a.example.com:4430":   "main.go:<n> and a.example.com:443, a.example.com:<n>",
		"read 404 bytes, got 404 bytes, got 404, status: got 404": "read <n> bytes, got <n> bytes, got <n>, status: got 404",
		"status 4040 and code 123456":                             "status <n> and code <n>",
		"12.5MiB of 3 GB at 50%":                                  "<size> of <size> at <size>",
		"on Sat, 21 Nov 2026 14:12:49 GMT: late":                  "on <time>: late",
		"at 2026-11-21 14:12:49.5 +0000 UTC m=+1.5.":              "at <time>.",
		"Mon is no time, May be":                                  "Mon is no time, May be",
		"01:23:45:67:89:ab down":                                  "<n> down",
		"1.2.3.4.5 and 300.1.2.3":                                 "<n> and <n>",
		"fluentd-xk2zp, api-https":                                "fluentd-<n>, api-https",
		"utf8mb4 uint64 sha256sum S3Key a1b2c3 4xx":               "utf8mb4 uint64 sha256sum S3Key <n> 4xx",
		"returned 412 rows, returned 412":                         "returned <n> rows, returned 412",
		"status bad: got -404":                                    "status bad: got <n>",
		"no customer cus_fBRlSgPOditPuD":                          "no customer cus_<n>",
		"lookup bjaqwaton and trflvioswd":                         "lookup <n> and <n>",
		"queue orders-AbC1dEf2GhI3jK gone":                        "queue orders-<n> gone",
		"RequestID: 212403703173734B":                             "RequestID: <n>",
		"the 3rd at 0xf":                                          "the <n>rd at <n>",
		"pod web-tpb7699855-dpr2v":                                "pod web-<n>",
		`parse failed; "amount" is missing`:                       `parse failed; "amount" is missing`,
		"error: 1062, error 1062":                                 "error: <n>, error 1062",
		"/v1/orders/dutrryueov":                                   "/v<n>/orders/<n>",
		"2026-11-31-extra":                                        "<time>-extra",
	} {
		if got := normalise(in); got != want {
			t.Errorf("%q\n got %q\nwant %q", in, got, want)
		}
	}
}

// Members of one group differ only in what varies from message to message.
func TestFingerprintGroups(t *testing.T) {
	groups := [][]string{
		{"order 1 not found", "order 4711 not found", "order 98765432101234 not found"},
		{`bad value "a"`, `bad value "a b \" c"`, `bad value ""`},
		{"dial tcp 10.0.0.1:5432: refused", "dial tcp [::1]:5432: refused", "dial tcp 10.0.0.200:5432: refused"},
		{"timeout after 1s", "timeout after 1.000123s", "timeout after 250ms"},
		{"session 0a1b2c3d4e5f dead", "session 123456789012 dead", "session ffffffffff00 dead"},
		{"offsets 1, 2", "offsets 1, 2, 3, 4"},
		{"order not found"},
		{"order <n> refused"},
	}
	seen := map[string]string{}
	for _, g := range groups {
		first := Fingerprint(errors.New(g[0]), nil)
		if other, dup := seen[first.ID]; dup {
			t.Errorf("%q and %q are one group", g[0], other)
		}
		seen[first.ID] = g[0]
		for _, m := range g[1:] {
			if c := Fingerprint(errors.New(m), nil); c != first {
				t.Errorf("%q: %+v, but %q: %+v", g[0], first, m, c)
			}
		}
	}
}

// What is recorded must not change its meaning: a change here needs a new
// causeVersion.
func TestFingerprintIsPinned(t *testing.T) {
	for _, c := range []struct {
		err   error
		stack string
		want  Cause
	}{
		{nil, "", Cause{}},
		{errors.New("order 17 not found"), "", Cause{"v2:9e344fcb7cc2629c", "order <n> not found"}},
		{fmt.Errorf("charge: %w", &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("refused")}), "", Cause{"v2:1c1a9d6d2410b08f", "net.OpError: charge: dial tcp: refused"}},
		{errors.New("nil map"), goPanic, Cause{"v2:b3c39e20738a7039", "nil map at orders.(*Handler).charge"}},
	} {
		got := Fingerprint(c.err, []byte(c.stack))
		if got != c.want {
			t.Errorf("%v: got %q, %q; want %q, %q", c.err, got.ID, got.Title, c.want.ID, c.want.Title)
		}
	}
}

const goPanic = `goroutine 34 [running]:
runtime/debug.Stack()
	/usr/lib/go/src/runtime/debug/stack.go:26 +0x5e
github.com/stormguard-mq/stormguard/guard.(*source).call.func1()
	/src/guard/call.go:31 +0x45
panic({0x6f1b20?, 0x7c2d40?})
	/usr/lib/go/src/runtime/panic.go:783 +0x132
github.com/acme/shop/orders.cleanup(...)
	/src/orders/cleanup.go:9
panic({0x6f1b20?, 0x7c2d40?})
	/usr/lib/go/src/runtime/panic.go:783 +0x132
internal/runtime/maps.(*Map).PutSlot(0x0?, 0x1?, 0x2?)
	/usr/lib/go/src/internal/runtime/maps/map.go:487 +0x3a
runtime.mapassign_faststr(0x1?, 0x0?, {0x7b, 0x2})
	/usr/lib/go/src/runtime/map_faststr.go:208 +0x1c5
github.com/acme/shop/orders.(*Handler).charge(0xc00001, {0x1?, 0x2?})
	/src/orders/charge.go:42 +0x1b
main.main.func1()
	/src/main.go:12 +0x1b
created by main.main in goroutine 1
	/src/main.go:11 +0x7e
`

func TestTopFrame(t *testing.T) {
	for name, c := range map[string]struct{ stack, want string }{
		"the first of two panics":  {goPanic, "github.com/acme/shop/orders.(*Handler).charge"},
		"no panic":                 {goPanic[:strings.Index(goPanic, "panic(")] + "main.run()\n\t/x.go:1\n", "main.run"},
		"standard library only":    {"goroutine 1 [running]:\npanic(1)\n\tx\nstrings.Repeat(0x1)\n\tx\nruntime.goexit({})\n\tx\n", "strings.Repeat"},
		"generic":                  {"main.Map[...](0x1, 0x2)\n\tx\n", "main.Map[...]"},
		"closure in a dotted path": {"\ngopkg.in/a%2ev1.run.func1.2()\n", "gopkg.in/a%2ev1.run.func1.2"},
		"java": {"java.lang.RuntimeException: outer (x)\n\tat com.acme.A.a(A.java:1)\nCaused by: java.lang.IllegalStateException: y\n" +
			"\tat java.base/java.util.Map.get(Map.java:1)\n\tat com.acme.B.b(B.java:2)\n\t... 3 more\n", "com.acme.B.b"},
		"java, older": {"x\n\tat java.util.Map.get(Map.java:1)\n\tat org.springframework.X.y(X.java:1)\n\tat com.acme.B.b(B.java:2)\r\n", "com.acme.B.b"},
		".net":        {"   at System.Convert.ToInt32(String s)\n   at Acme.Orders.Charge(Int32 id) in /src/Orders.cs:line 42\n", "Acme.Orders.Charge"},
		"no stack":    {"nothing to see (here)\n\n)\n(\n\t\n", ""},
		"cut off":     {goPanic[:strings.Index(goPanic, "internal/runtime/maps")], ""},
		"empty":       {"", ""},
	} {
		if got := topFrame(c.stack); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

func TestFingerprintOfARealPanic(t *testing.T) {
	at := func(f func()) (c Cause) {
		defer func() { c = Fingerprint(fmt.Errorf("panic: %v", recover()), debug.Stack()) }()
		f()
		return
	}
	var m map[string]int
	write := func() { m["x"] = 1 }
	a, again, other := at(write), at(write), at(func() { _ = []int{}[len(m)] })
	if a != again || a.ID == other.ID {
		t.Errorf("%v, %v, %v", a, again, other)
	}
}

// A line number in the stack must not make a new group.
func TestFingerprintIgnoresLineNumbers(t *testing.T) {
	err := errors.New("nil map")
	moved := strings.NewReplacer("charge.go:42 +0x1b", "charge.go:57 +0x2c", "0xc00001", "0xc09999").Replace(goPanic)
	if a, b := Fingerprint(err, []byte(goPanic)), Fingerprint(err, []byte(moved)); a != b {
		t.Errorf("%v, %v", a, b)
	}
	elsewhere := strings.ReplaceAll(goPanic, "charge(", "refund(")
	if a, b := Fingerprint(err, []byte(goPanic)), Fingerprint(err, []byte(elsewhere)); a.ID == b.ID {
		t.Error("two functions are one group")
	}
}

type (
	customError         struct{ msg string }
	valueError          struct{}
	panicError          struct{}
	genericError[T any] struct{}
	endless             struct{}
	foreignWrap         struct{ err error }
)

func (e *customError) Error() string  { return e.msg }
func (valueError) Error() string      { return "value" }
func (panicError) Error() string      { panic("no text") }
func (genericError[T]) Error() string { return "generic" }
func (e *foreignWrap) Error() string  { return "wrap: " + e.err.Error() }
func (e *foreignWrap) Unwrap() error  { return e.err }
func (endless) Error() string         { return "endless" }
func (e endless) Unwrap() error       { return e }

func TestDescribeErrorType(t *testing.T) {
	const here = "github.com/stormguard-mq/stormguard/dlq."
	custom := &customError{"c"}
	for _, c := range []struct {
		name string
		err  error
		want string
	}{
		{"plain", errors.New("x"), "*errors.errorString"},
		{"sentinel", fmt.Errorf("read: %w", io.EOF), "*errors.errorString"},
		{"wrapped twice", fmt.Errorf("a: %w", fmt.Errorf("b: %w", custom)), "*" + here + "customError"},
		{"value", valueError{}, here + "valueError"},
		{"standard, with facts", fmt.Errorf("open: %w", &fs.PathError{Op: "open", Path: "/x", Err: fs.ErrNotExist}), "*io/fs.PathError"},
		{"deadline", fmt.Errorf("call: %w", context.DeadlineExceeded), "context.deadlineExceededError"},
		{"joined, the telling one", errors.Join(errors.New("plain"), fmt.Errorf("x: %w", custom)), "*" + here + "customError"},
		{"two wrapped", fmt.Errorf("%w and %w", errors.New("plain"), custom), "*" + here + "customError"},
		{"joined, all plain", errors.Join(errors.New("a"), errors.New("b")), "*errors.errorString"},
		{"generic", genericError[int]{}, here + "genericError[int]"},
		{"this module's own markers", &foreignWrap{&net.OpError{Op: "dial", Err: io.EOF}}, "*net.OpError"},
		{"endless", endless{}, here + "endless"},
		{"nothing", nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := DescribeError(c.err, nil).Type; got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

func TestDescribeErrorBounds(t *testing.T) {
	e := DescribeError(errors.New(strings.Repeat("日本", 1000)), []byte(strings.Repeat("本", 9000)))
	if len(e.Message) > 1024 || len(e.Stack) > 8192 || !utf8.ValidString(e.Message) || !utf8.ValidString(e.Stack) {
		t.Errorf("%d, %d", len(e.Message), len(e.Stack))
	}
	if !strings.HasSuffix(e.Message, "本…") || !strings.HasSuffix(e.Stack, "本…") {
		t.Error("not marked as cut")
	}
	var nilPointer *customError
	for _, err := range []error{panicError{}, nilPointer, &foreignWrap{}, (*foreignWrap)(nil)} {
		if e := DescribeError(err, nil); e.Message != "(the Error method panicked)" || e.Type == "" {
			t.Errorf("%T: %+v", err, e)
		}
	}
	wide := errors.New("x")
	for range 12 {
		wide = errors.Join(wide, wide, wide)
	}
	left := 64
	if _ = mostSpecific(wide, &left); left != 0 {
		t.Errorf("a wide tree: %d nodes of 64 are left", left)
	}
}

// A record read back belongs to the group its error was put in.
func TestFingerprintSurvivesTheRecord(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := strings.Repeat(anyText(64).Draw(t, "text"), rapid.IntRange(1, 60).Draw(t, "times"))
		err := fmt.Errorf("wrap: %w", &customError{text})
		r := Record{Error: DescribeError(err, []byte(goPanic)), Cause: Fingerprint(err, []byte(goPanic))}
		got, _, derr := Decode(Encode(&r, Stormguard))
		if derr != nil || got.Error.Fingerprint() != r.Cause || got.Cause != r.Cause {
			t.Fatalf("%v: %+v, then %+v", derr, r.Cause, got.Error.Fingerprint())
		}
	})
}

func checkFingerprint(t interface{ Fatalf(string, ...any) }, kind, message, stack string) {
	c := ErrorInfo{Type: kind, Message: message, Stack: stack}.Fingerprint()
	if c != (ErrorInfo{Type: kind, Message: message, Stack: stack}).Fingerprint() {
		t.Fatalf("not deterministic")
	}
	if empty := kind == "" && message == "" && stack == ""; empty != (c == Cause{}) {
		t.Fatalf("%+v of %q, %q, %q", c, kind, message, stack)
	} else if !empty && (len(c.ID) != len("v2:")+16 || !strings.HasPrefix(c.ID, "v2:")) {
		t.Fatalf("ID %q", c.ID)
	}
	if len(c.Title) > maxTitle || !utf8.ValidString(c.Title) || strings.ContainsAny(c.Title, "\n\r") && !strings.ContainsAny(kind+stack, "\n\r") {
		t.Fatalf("title %q", c.Title)
	}
	n := normalise(capText(message, causeInput))
	if len(n) > causeText || !utf8.ValidString(n) {
		t.Fatalf("normalised to %q", n)
	}
	err := errors.New(message)
	if a, b := Fingerprint(err, []byte(stack)), Fingerprint(fmt.Errorf("%w", err), []byte(stack)); a != b {
		t.Fatalf("wrapping changed %v to %v", a, b)
	}
	DescribeError(err, []byte(stack))
}

func FuzzFingerprint(f *testing.F) {
	f.Add("*net.OpError", "dial tcp 10.0.0.1:5432: connect: connection refused", goPanic)
	f.Add("com.acme.X", "order \"17\" 3f2504e0-4f89-11d3-9a0c-0305e82c3301 at 2026-11-21T14:12:49Z took 1.5s", javaStack)
	f.Add("", "[::1]:80 [[[[[[ '''' \"\"\" ````", "at (\n\tat (\n()\n.)\npanic(\n\npanic(")
	f.Add("\xff", "\xff\xfe1\x80", "\xff.(\x80)")
	f.Fuzz(func(t *testing.T, kind, message, stack string) { checkFingerprint(t, kind, message, stack) })
}

// Whatever the input is, its cost does not grow with the square of it: 1 MiB
// would take hours then, and takes a moment.
func TestNormaliseIsBounded(t *testing.T) {
	for _, unit := range []string{`"`, `'`, "`", "[", "[1:2:", "::1", "1.", "a-", "0x", "1e", `\"`, "…", "1 ", "1,", "\xff", "-1",
		"a/", "eyJ", "?a=", ")=(", "-x2", "00:", "Mon, ", "a@", "://a", "1s", "error 1 ", "value \"", "é"} {
		s := strings.Repeat(unit, 1<<20/len(unit))
		start := time.Now()
		normalise(s)
		topFrame(s)
		if d := time.Since(start); d > time.Minute {
			t.Errorf("1 MiB of %q took %v", unit, d)
		}
	}
}

func BenchmarkFingerprint(b *testing.B) {
	err := fmt.Errorf("charge order 4711: %w", &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("10.0.0.1:5432: connection refused")})
	for name, stack := range map[string][]byte{"error": nil, "panic": []byte(goPanic)} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Fingerprint(err, stack)
			}
		})
	}
	b.Run("worst", func(b *testing.B) {
		long := errors.New(strings.Repeat(`1.2:3-4+"`, 200))
		b.ReportAllocs()
		for b.Loop() {
			Fingerprint(long, nil)
		}
	})
}
