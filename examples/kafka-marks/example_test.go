// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// The client's metrics keep one goroutine for the process.
var clients = goleak.IgnoreAnyFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, clients) }

// A mistake ends main with 1; run says what it was.
func TestRun(t *testing.T) {
	t.Setenv(brokers.Kafka.Env(), brokers.ForTest(t, brokers.Kafka))
	if err := run(os.Stdout, os.Stderr); err != nil {
		t.Fatal(err)
	}
}
