// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"errors"
	"strings"

	goredis "github.com/redis/go-redis/v9"
)

var (
	// errConfig means that a configuration was refused. The text names every field
	// that is wrong, its value and the allowed range.
	errConfig = errors.New("limiter/redis: config")

	// ErrSilent means that Redis did not decide: it was not reached, did not answer in
	// time, or not long ago did not.
	ErrSilent = errors.New("limiter/redis: no decision")

	// errRefused means that Redis answered with an error that waiting does not mend:
	// the key is something else, or the user may not run scripts. It is [ErrSilent]
	// too.
	errRefused = errors.New("limiter/redis: refused by the server")
)

// passing are the beginnings of answers that time mends.
var passing = []string{
	"LOADING", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "BUSY", "UNKILLABLE",
	"NOREPLICAS", "MISCONF", "OOM", "MOVED", "ASK",
}

// refused tells whether an error is an answer that time does not mend.
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

// inScript tells whether a Redis before 7 says that a command of the script was answered
// so: "Error running script (call to f_…): @user_script:37: @user_script: 37: -READONLY …".
func inScript(text, answer string) bool {
	return strings.Contains(text, "Error running script") && strings.Contains(text, ": -"+answer+" ")
}
