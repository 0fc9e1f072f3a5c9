// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// plain is a broker of numbers that forgets them.
type plain struct{}

func (plain) Lane(int) uint64                  { return 0 }
func (plain) Size(int) int                     { return 1 }
func (plain) Meta(int) guard.Meta              { return guard.Meta{} }
func (plain) Ack(int) error                    { return nil }
func (plain) Extend([]int)                     {}
func (plain) Return([]int, guard.Reason) error { return nil }
func (plain) Demand(int)                       {}
func (plain) Flush() error                     { return nil }

// What the guard of one process has handled, the others know within a second, and that
// it was just now.
func TestTotals(t *testing.T) {
	all, _ := three(t)
	g, err := guard.New(guard.Config{Group: "g"}, guard.WithFleet(all[0].Member()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = g.Close(context.Background()) }()
	tried := 0
	s, err := guard.Open(g, guard.SourceConfig{Name: "orders"}, guard.Limits{}, plain{}, func(_ context.Context, n int) error {
		if tried++; tried == 50 {
			return errors.New("once")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	in := make(chan int)
	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context(), in) }()
	var last time.Time
	for n := range 100 {
		last = time.Now()
		in <- n
		time.Sleep(5 * time.Millisecond)
	}
	close(in)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	want := Total{Key: "g/orders", Handled: 100, Failed: 1, Processes: 1}
	for _, p := range all[1:] {
		eventually(t, "the totals are known", func() bool {
			s := p.Status()
			return len(s.Totals) == 1 && s.Totals[0] == want
		})
		if ago, ok := p.Member().OthersSucceeded("g/orders"); !ok || ago > time.Since(last)+3*time.Second {
			t.Errorf("%v, %v; the last one began %v ago", ago, ok, time.Since(last))
		}
	}
	if _, ok := all[0].Member().OthersSucceeded("g/orders"); ok {
		t.Error("its own successes are others'")
	}
}
