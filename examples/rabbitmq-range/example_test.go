// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/internal/brokers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A mistake ends main with 1; run says what it was.
func TestRun(t *testing.T) {
	for _, k := range []brokers.Kind{brokers.RabbitMQ, brokers.RabbitMQ4} {
		t.Run(string(k), func(t *testing.T) {
			t.Setenv(brokers.RabbitMQ.Env(), brokers.ForTest(t, k))
			if err := run(os.Stdout); err != nil {
				t.Fatal(err)
			}
		})
	}
}
