// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"encoding/base64"
	"strings"
	"testing"
)

// What Knative put into its error data is read as text: base64 of text wherever that
// was cut off, anything else as it stands.
func TestKnativeErrorData(t *testing.T) {
	read := func(s string) string {
		r, _, err := Decode([]Header{{"knativeerrorcode", "401"}, {"knativeerrordata", s}})
		if err != nil {
			t.Errorf("%q: %v", s, err)
		}
		return r.Error.Message
	}
	for _, plain := range []string{
		"Unauthorized", "Forbidden", "NotFound", "InternalServerError", "timeout", "error", "dead", "EOF", "null", "no such order", "",
		base64.StdEncoding.EncodeToString([]byte("a\x00b")), base64.StdEncoding.EncodeToString([]byte{0x1f, 0x8b, 8, 0}),
	} {
		if got := read(plain); got != plain {
			t.Errorf("%q: %q", plain, got)
		}
	}
	long := strings.Repeat("ungültige Bestellung 注文が無効です 🚫\r\n\t", 20)
	for _, text := range []string{"declined", "déjà vu", long} {
		if got := read(base64.StdEncoding.EncodeToString([]byte(text))); got != text {
			t.Errorf("%q: %q", text, got)
		}
	}
	for n := 100; n < len(long); n++ { // cut off before it was encoded
		got := read(base64.StdEncoding.EncodeToString([]byte(long[:n])))
		if !strings.HasPrefix(long, got) || len(got) < n-3 {
			t.Fatalf("text cut off at %d: %q", n, got)
		}
	}
	encoded := base64.StdEncoding.EncodeToString([]byte(long))
	for n := 100; n < len(encoded); n++ { // … and after that
		got := read(encoded[:n])
		if !strings.HasPrefix(long, got) || len(got) < n/4*3-3 {
			t.Fatalf("base64 cut off at %d: %q", n, got)
		}
	}
}
