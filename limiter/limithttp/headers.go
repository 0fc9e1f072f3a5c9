// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limithttp

import (
	"cmp"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

// seconds returns a time in whole seconds, rounded up and at least 1: a client that is
// denied must not ask again at once.
func seconds(d time.Duration) string {
	return strconv.FormatInt(max(1, ceil(d.Seconds())), 10)
}

// ceil rounds up, but ignores a float's error in the last bits. It returns at most the
// largest Integer of a header.
func ceil(x float64) int64 { return int64(min(math.Ceil(x-1e-9), 999_999_999_999_999)) }

// window describes a bucket as a quota and a window. The window is the number of whole
// seconds in which the bucket fills. The quota is how many requests the rate admits in that
// time, at least the burst.
func window(l limiter.Limit) (quota, secs int64) {
	secs = max(1, ceil(float64(l.Burst)/l.Rate))
	return max(int64(l.Burst), int64(math.Floor(l.Rate*float64(secs)+1e-9))), secs
}

// reset returns in how many seconds the next token comes if none is left, and otherwise in
// how many seconds the bucket is full; 0 if it is full.
func reset(l limiter.Level, denied *limiter.DeniedError) int64 {
	switch {
	case denied != nil:
		return max(1, ceil(denied.After.Seconds()))
	case l.Left == 0:
		return max(1, ceil(l.Next.Seconds()))
	}
	return max(0, ceil(float64(l.Limit.Burst-l.Left)/l.Limit.Rate))
}

func describe(h http.Header, name string, g limiter.Gate, denied *limiter.DeniedError, legacy bool) {
	l := g.Level()
	if l.Limit.Rate <= 0 || l.Limit.Burst <= 0 {
		return
	}
	if denied != nil {
		l.Left = 0 // tokens that came since the denial are not for this request
	}
	// Header names as net/http writes them; their case has no meaning.
	quota, secs := window(l.Limit)
	again := reset(l, denied)
	text := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(name) + `"`
	h.Set("Ratelimit-Policy", fmt.Sprintf("%s;q=%d;w=%d", text, quota, secs))
	value := fmt.Sprintf("%s;r=%d", text, l.Left)
	if again > 0 {
		value += fmt.Sprintf(";t=%d", again)
	}
	h.Set("Ratelimit", value)
	if legacy {
		h.Set("Ratelimit-Limit", strconv.FormatInt(quota, 10))
		h.Set("Ratelimit-Remaining", strconv.Itoa(l.Left))
		h.Set("Ratelimit-Reset", strconv.FormatInt(again, 10))
	}
}

// printable returns a name that a header can hold.
func printable(name string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, cmp.Or(name, "default"))
}
