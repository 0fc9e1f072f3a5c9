// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import (
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// The tick of a source with little unsettled.
func BenchmarkDetectorStepQuiet(b *testing.B) {
	d := newDetector(b, dlq.StormConfig{})
	b.ReportAllocs()
	for i := range b.N {
		d.Step(time.Duration(i), Reading{Attempts: 1, Age: time.Millisecond})
	}
}

// The same with its success counter, a tick of 10 ms and a window that slides.
func BenchmarkDetectorTick(b *testing.B) {
	d := newDetector(b, dlq.StormConfig{})
	b.ReportAllocs()
	for i := range b.N {
		now := time.Duration(i) * 10 * time.Millisecond
		d.Successes(now, uint64(i)*100)
		d.Step(now, Reading{Attempts: 1, Age: time.Millisecond})
	}
}

// Attempts and age are over, so the rate has to be looked at.
func BenchmarkDetectorStepRate(b *testing.B) {
	d := newDetector(b, dlq.StormConfig{})
	d.Successes(0, 1e6)
	b.ReportAllocs()
	for i := range b.N {
		d.Step(time.Duration(i%1000), over)
	}
}

func BenchmarkDetectorDiverted(b *testing.B) {
	d := newDetector(b, dlq.StormConfig{})
	b.ReportAllocs()
	for i := range b.N {
		d.Diverted(time.Duration(i)*time.Microsecond, 1)
	}
}
