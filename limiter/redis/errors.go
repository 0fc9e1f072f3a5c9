// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"errors"
	"strings"

	goredis "github.com/redis/go-redis/v9"
)

var (
	// errConfig means that a configuration was refused. The text names every wrong field, its
	// value and the allowed range.
	errConfig = errors.New("limiter/redis: config")

	// ErrSilent means that Redis did not decide. It was not reached, did not answer in time,
	// or failed so recently that it was not asked again.
	ErrSilent = errors.New("limiter/redis: no decision")

	// errRefused means that Redis answered with an error that waiting does not fix: the key
	// is not a bucket, or the user may not run scripts. It wraps [ErrSilent] too.
	errRefused = errors.New("limiter/redis: refused by the server")
)

// passing has the beginnings of error answers that go away with time.
var passing = []string{
	"LOADING", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "BUSY", "UNKILLABLE",
	"NOREPLICAS", "MISCONF", "OOM", "MOVED", "ASK",
}

// refused tells whether an error is an answer of Redis that does not go away with time.
func refused(err error) bool {
	if _, ok := errors.AsType[goredis.Error](err); !ok {
		return false
	}
	for _, p := range passing {
		if goredis.HasErrorPrefix(err, p) || inScript(err.Error(), p) {
			return false
		}
	}
	return true
}

// inScript tells whether a Redis before version 7 reports that a command of the script got
// the answer: "Error running script (call to f_…): @user_script:37: @user_script: 37: -READONLY …".
func inScript(text, answer string) bool {
	return strings.Contains(text, "Error running script") && strings.Contains(text, ": -"+answer+" ")
}
