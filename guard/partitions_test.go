// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"
)

// Partitions that share a scope share its probes: 200 of them make hardly more calls in
// an outage of 30s than one does, besides those that were under way when it began. With
// a breaker each, they trip by 5 attempts each, and then take turns to probe.
func TestPartitionsOfAScopeShareItsProbes(t *testing.T) {
	if RaceEnabled {
		t.Skip("200 sources in one bubble: run without -race")
	}
	const partitions, outage = 200, 30 * time.Second
	for _, c := range []struct {
		name  string
		scope Scope
		err   error
		most  int64
	}{
		{"topic-unknown", ScopeTopic, errors.New("bad"), partitions + 100},
		{"topic-refused", ScopeTopic, errRefused, partitions + 100},
		{"partition-unknown", ScopePartition, errors.New("bad"), 8 * partitions},
		{"partition-refused", ScopePartition, errRefused, 8 * partitions},
	} {
		bubble(t, c.name, func(t *testing.T) {
			g, err := New(Config{Scope: c.scope})
			if err != nil {
				t.Fatal(err)
			}
			letters := &testWriter{}
			var down atomic.Bool
			var calls, handled atomic.Int64
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var ins []chan int
			for p := range partitions {
				s, err := Open(g, SourceConfig{Name: fmt.Sprintf("t/%d", p), Destination: "t", Partition: fmt.Sprint(p), DeadLetters: letters},
					Limits{}, &testPort{}, func(context.Context, int) error {
						time.Sleep(2 * time.Millisecond)
						if down.Load() {
							calls.Add(1)
							return c.err
						}
						handled.Add(1)
						return nil
					})
				if err != nil {
					t.Fatal(err)
				}
				in := make(chan int, 1000)
				ins = append(ins, in)
				go func() { _ = s.Run(ctx, in) }()
			}
			sent := 0
			send := func(d time.Duration) {
				for range d / (200 * time.Millisecond) {
					for _, in := range ins {
						in <- sent
					}
					sent++
					time.Sleep(200 * time.Millisecond)
				}
			}
			send(5 * time.Second)
			down.Store(true)
			send(5 * time.Second)
			first := calls.Load()
			send(outage - 5*time.Second)
			during := calls.Load()
			down.Store(false)
			back := time.Now()
			for handled.Load() < int64(sent*partitions) && time.Since(back) < time.Minute {
				time.Sleep(100 * time.Millisecond)
			}
			t.Logf("%d calls, %d of them in the first 5s; drained %s later", during, first, time.Since(back))
			if during > c.most || handled.Load() != int64(sent*partitions) || len(letters.recs) > 0 {
				t.Errorf("%d calls, at most %d; %d of %d handled, %d dead letters", during, c.most, handled.Load(), sent*partitions, len(letters.recs))
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
