// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// placePort is a port of keyed messages.
type placePort struct {
	mu    sync.Mutex
	acked []string
}

func (*placePort) Lane(m string) uint64                { return uint64(m[0]) }
func (*placePort) Size(string) int                     { return 1 }
func (*placePort) Meta(m string) guard.Meta            { return guard.Meta{Body: []byte(m), Lag: -1} }
func (*placePort) Extend([]string)                     {}
func (*placePort) Return([]string, guard.Reason) error { return nil }
func (*placePort) Demand(int)                          {}
func (*placePort) Flush() error                        { return nil }
func (p *placePort) Ack(m string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.acked = append(p.acked, m)
	return nil
}

// takingPort takes the first of its messages back, once.
type takingPort struct {
	placePort
	taken bool
}

func (p *takingPort) Ack(m string) error {
	if m == "a1" && !p.taken {
		p.taken = true
		return guard.ErrTakenBack
	}
	return p.placePort.Ack(m)
}

// parkingPort parks.
type parkingPort struct {
	placePort
	park func(ctx context.Context, m string, r *dlq.Record) error
}

func (*parkingPort) Parks(string) bool     { return true }
func (*parkingPort) Parked() (int, uint64) { return 7, 8 }
func (p *parkingPort) Park(ctx context.Context, m string, r *dlq.Record) error {
	return p.park(ctx, m, r)
}

// noLetters is for messages that none may be dead-lettered of.
func noLetters(t *testing.T) dlq.Writer {
	t.Helper()
	return dlq.WriterFunc(func(_ context.Context, r *dlq.Record) error {
		t.Errorf("a dead letter: %s", r.Body)
		return nil
	})
}

// A message that its adapter takes back is no ack, no failure and not ignored: it was
// returned, and is received again.
func TestTakenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{})
		if err != nil {
			t.Fatal(err)
		}
		src, err := guard.Open(g, guard.SourceConfig{Name: "s"}, guard.Limits{EndsWithInput: true}, guard.Port[string](&takingPort{}),
			func(context.Context, string) error { return guard.Ignore(errors.New("later")) })
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan string, 3)
		in <- "a1"
		in <- "a2"
		in <- "a1"
		close(in)
		if err := src.Run(t.Context(), in); err != nil {
			t.Error(err)
		}
		tally, account := src.State().Tally, src.Account()
		if err := account.Check(); err != nil {
			t.Error(err)
		}
		if account.Received != 3 || account.Acked != 2 || account.Returned != 1 || tally.Ignored != 2 || tally.AckFailures != 0 {
			t.Errorf("%+v, %+v", account, tally)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// What stands behind a message waits until that is parked, and is no witness; what
// stands elsewhere does not wait. A parked message is no dead one.
func TestParkedInItsPlace(t *testing.T) {
	for _, alone := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			g, err := guard.New(guard.Config{Policy: guard.Policy{
				Order: guard.OrderKey, Workers: 4, NoBreaker: true, Retry: guard.Retry{Attempts: 2, Base: time.Millisecond, Max: time.Millisecond},
			}})
			if err != nil {
				t.Fatal(err)
			}
			var mu sync.Mutex
			var calls []string
			saw := func(m string) bool {
				mu.Lock()
				defer mu.Unlock()
				return slices.Contains(calls, m)
			}
			release := make(chan struct{})
			writing := false
			port := &parkingPort{park: func(_ context.Context, m string, r *dlq.Record) error {
				if string(r.Body) != m || r.Attempts < 2 || r.Error.Message != "bad" {
					t.Errorf("%s: %+v", m, r)
				}
				mu.Lock()
				writing = true
				mu.Unlock()
				<-release
				return nil
			}}
			src, err := guard.Open(g, guard.SourceConfig{Name: "s", DeadLetters: noLetters(t)}, guard.Limits{}, guard.Port[string](port), func(_ context.Context, m string) error {
				mu.Lock()
				defer mu.Unlock()
				calls = append(calls, m)
				if m == "a1" {
					return errors.New("bad")
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan string)
			done := make(chan struct{})
			go func() { defer close(done); _ = src.Run(t.Context(), in) }()
			in <- "a1"
			in <- "a2"
			if !alone {
				in <- "b1"
			}
			time.Sleep(time.Minute) // longer than Retry.Patience
			mu.Lock()
			if !writing {
				t.Error("nothing is parked")
			}
			mu.Unlock()
			if saw("a2") || saw("b1") == alone {
				t.Errorf("calls %v", calls)
			}
			if a := src.Account(); a.Settling != 1 || a.Waiting != 1 {
				t.Errorf("%+v", a)
			}
			close(release)
			synctest.Wait()
			if !saw("a2") {
				t.Errorf("what stood behind is not handled: %v", calls)
			}
			close(in)
			<-done
			report := src.End(context.Background(), guard.ReasonShutdown)
			want := 3
			if alone {
				want = 2
			}
			if a, tally := report.Account, src.State().Tally; int(a.Acked) != want || a.DeadLettered != 0 || tally.Parked != 1 || len(port.acked) != want {
				t.Errorf("%+v, %+v, acked %v", a, tally, port.acked)
			}
			if _, err := g.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A source that ends while it parks a message leaves that to its port, and gives the rest
// back once.
func TestEndWhileAMessageIsParked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{Policy: guard.Policy{
			Order: guard.OrderKey, NoBreaker: true, Retry: guard.Retry{Attempts: 1, Base: time.Millisecond, Max: time.Millisecond},
		}})
		if err != nil {
			t.Fatal(err)
		}
		port := &parkingPort{park: func(ctx context.Context, _ string, _ *dlq.Record) error { <-ctx.Done(); return ctx.Err() }}
		src, err := guard.Open(g, guard.SourceConfig{Name: "s", DeadLetters: noLetters(t)}, guard.Limits{}, guard.Port[string](port),
			func(context.Context, string) error { return errors.New("bad") })
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan string)
		done := make(chan struct{})
		go func() { defer close(done); _ = src.Run(t.Context(), in) }()
		in <- "a1"
		in <- "a2"
		in <- "a3"
		time.Sleep(11 * time.Second) // a guess
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		report := src.End(ctx, guard.ReasonRebalance)
		<-done
		if a := report.Account; report.Returned != 2 || len(report.Left) != 1 || a.Received != 3 || a.Returned != 2 || a.Settling != 1 {
			t.Errorf("%+v", report)
		}
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}
