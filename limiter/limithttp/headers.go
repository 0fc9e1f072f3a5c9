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

// seconds is a time in whole seconds, rounded up, at least one: what is worth asking
// again now would not have been denied.
func seconds(d time.Duration) string {
	return strconv.FormatInt(max(1, ceil(d.Seconds())), 10)
}

// ceil rounds up what is not a whole number but for the last bits of a float, and
// keeps to what a header's Integer can be.
func ceil(x float64) int64 { return int64(min(math.Ceil(x-1e-9), 999_999_999_999_999)) }

// window is a bucket as quota and window: the whole seconds in which it fills, and
// what those admit at its rate, which is at least the burst.
func window(l limiter.Limit) (quota, secs int64) {
	secs = max(1, ceil(float64(l.Burst)/l.Rate))
	return max(int64(l.Burst), int64(math.Floor(l.Rate*float64(secs)+1e-9))), secs
}

// reset is in how many seconds there is more: the next token if none is left,
// all of them otherwise; 0 if all are there.
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
		l.Left = 0 // what has come meanwhile was not for this one
	}
	// Names as net/http writes them; they have no case.
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

// printable is a name as a header can have it.
func printable(name string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, cmp.Or(name, "default"))
}
