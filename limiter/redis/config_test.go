// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/stormguard-mq/stormguard/limiter"
)

func TestValidateNamesEverything(t *testing.T) {
	t.Parallel()
	err := Config{
		Limit:   limiter.Limit{Rate: -1},
		Limits:  map[string]limiter.Limit{"": {Rate: 1, Burst: 1}, "big": {Rate: 1e10, Burst: 2e9}},
		Prefix:  "a{b",
		Silence: 7,
		Timeout: time.Microsecond,
		Batch:   -1,
	}.Validate()
	is(t, err, errConfig)
	for _, want := range []string{
		"Limit.Rate: -1", "Limit.Burst: 0", `Limits[""]: 0`, `Limits["big"].Rate: 1e+10`, `Limits["big"].Burst`,
		`Prefix: "a{b"`, "Silence: 7", "Timeout: 1µs", "Batch: -1",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %s", err, want)
		}
	}
	if err := (Config{Limit: limiter.Limit{Rate: 1, Burst: 1}}).Validate(); err != nil {
		t.Error(err)
	}
}

// A client whose answers no context bounds is refused, whatever its kind.
func TestNewWantsBoundedAnswers(t *testing.T) {
	t.Parallel()
	good := Config{Limit: limiter.Limit{Rate: 1, Burst: 1}}
	for name, c := range map[string]interface {
		goredis.Scripter
		Close() error
	}{
		"client":  goredis.NewClient(&goredis.Options{Addr: "127.0.0.1:1"}),
		"cluster": goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}}),
		"ring":    goredis.NewRing(&goredis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}, HeartbeatFrequency: time.Hour}),
	} {
		_, err := New(c, Config{})
		is(t, err, errConfig)
		if err == nil || !strings.Contains(err.Error(), "ContextTimeoutEnabled") || !strings.Contains(err.Error(), "Limit.Rate") {
			t.Errorf("%s: %v", name, err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	_, err := New(nil, good)
	is(t, err, errConfig)
	for name, c := range map[string]interface {
		goredis.Scripter
		Close() error
	}{
		"client":  goredis.NewClient(&goredis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true}),
		"cluster": goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}, ContextTimeoutEnabled: true}),
	} {
		s, err := New(c, good)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		s.Close()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}
