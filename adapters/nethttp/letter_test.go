// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"context"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// FuzzRecord: what is held can be made of its dead letter again, and a dead
// letter from anywhere is a request or an error.
func FuzzRecord(f *testing.F) {
	f.Add("POST", "/orders/1?x=1", "shop.example", "Content-Type", "text/plain", []byte("body"))
	f.Add("PUT", "//evil.example/x", "a", "Idempotency-Key", "k", []byte(nil))
	f.Add("DELETE", "/%2f%20?#", "[::1]:80", "X-A", "\x80\xff", []byte{0})
	f.Add("G T", "*", "", "X Y", "a\r\nX: b", []byte{1})
	f.Add("OPTIONS", "*", "h", "Host", "other", []byte{1})
	f.Fuzz(func(t *testing.T, method, target, host, name, value string, body []byte) {
		rec := &dlq.Record{Body: body, Headers: []dlq.Header{
			{Name: name, Value: value}, {Name: letterMethod, Value: method}, {Name: letterTarget, Value: []byte(target)}, {Name: letterHost, Value: host},
		}}
		req, err := FromRecord(context.Background(), rec)
		if err != nil {
			if !strings.Contains(err.Error(), "nethttp: dead letter") {
				t.Errorf("an error without a place: %v", err)
			}
			return
		}
		if req.URL.Host != "" || req.URL.Scheme != "" {
			t.Fatalf("%q leads to another host: %+v", target, req.URL)
		}
		in := &Intake{cfg: Config{}.WithDefaults()}
		h := &held{id: "x", since: time.Now(), req: req, body: body}
		meta := port{in}.Meta(h)
		again, err := FromRecord(context.Background(), &dlq.Record{Body: meta.Body, Headers: meta.Headers})
		if err != nil {
			t.Fatalf("%q %q: %v", method, target, err)
		}
		if again.Method != req.Method || !sameURL(again.URL, req.URL) || again.Host != req.Host || !maps.EqualFunc(again.Header, req.Header, slices.Equal) {
			t.Errorf("%+v\nbecame\n%+v", req, again)
		}
	})
}

func sameURL(a, b *url.URL) bool { return a.RequestURI() == b.RequestURI() && a.Path == b.Path }

// What cannot be a request says why.
func TestFromRecordRefuses(t *testing.T) {
	for want, headers := range map[string][]dlq.Header{
		`header Http-Method: "" is not a method`:               nil,
		`header Http-Method: "A B" is not a method`:            {{Name: letterMethod, Value: "A B"}},
		`header Http-Target: "http://x/y" is not a path`:       {{Name: letterMethod, Value: "PUT"}, {Name: letterTarget, Value: "http://x/y"}},
		`header Http-Target: parse "/%zz": invalid URL escape`: {{Name: letterMethod, Value: "PUT"}, {Name: letterTarget, Value: "/%zz"}},
	} {
		if _, err := FromRecord(t.Context(), &dlq.Record{Headers: headers}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	req, err := FromRecord(t.Context(), &dlq.Record{Headers: []dlq.Header{
		{Name: letterMethod, Value: "PUT"}, {Name: letterTarget, Value: "/"}, {Name: "Content-Length", Value: "5"}, {Name: "connection", Value: "x"},
		{Name: "X-Bad", Value: "a\r\nb"}, {Name: "X-Number", Value: 5}, {Name: "x-good", Value: "a"}, {Name: "X-Good", Value: "b"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if want := (http.Header{"X-Good": {"a", "b"}}); !maps.EqualFunc(req.Header, want, slices.Equal) {
		t.Error(req.Header)
	}
}

// A dead letter says what the client asked for, not what the handler saw of it.
func TestTargetOfAStrippedPrefix(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		r.breakIt()
		r.want(send(http.StripPrefix("/api", r.defers), "POST", "/api/orders?x=1", "a"), http.StatusAccepted)
		r.close()
		req, err := FromRecord(t.Context(), r.letters.list()[0])
		if err != nil || req.URL.String() != "/api/orders?x=1" {
			t.Errorf("%v, %v", req, err)
		}
	})
}
