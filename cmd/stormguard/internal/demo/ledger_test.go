// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// nats-server and sarama's metrics keep one goroutine each for the
		// process, and have no way to end it.
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.init.0.func1"),
		goleak.IgnoreAnyFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"))
}

const ms = time.Millisecond

// books makes a ledger: messages sent every 100 ms from 0, all confirmed, and an
// outage from 1 s to 3 s.
func books(messages int) *Ledger {
	l := &Ledger{}
	for i := range messages {
		l.Confirm(l.Send(time.Duration(i) * 100 * ms))
	}
	l.Down(time.Second)
	l.Up(3 * time.Second)
	return l
}

func TestFigures(t *testing.T) {
	const end = 10 * time.Second
	for _, c := range []struct {
		name   string
		write  func(l *Ledger)
		buried []dead
		want   Figures
	}{
		{
			name:  "nothing was handled",
			write: func(*Ledger) {},
			want:  Figures{Published: 5, Lost: 5, IdleAfterRecovery: 7, Drain: 7},
		},
		{
			name: "all handled before the outage",
			write: func(l *Ledger) {
				for i := range 5 {
					l.Call(i, 500*ms, 501*ms, true)
				}
			},
			want: Figures{Published: 5, Handled: 5, IdleAfterRecovery: 7},
		},
		{
			name: "a message that the server never confirmed is neither published nor lost",
			write: func(l *Ledger) {
				l.Call(l.Send(400*ms), 499*ms, 500*ms, true) // it came, all the same
				l.Send(400 * ms)
				for i := range 5 {
					l.Call(i, 500*ms, 501*ms, true)
				}
			},
			want: Figures{Published: 5, Handled: 5, OutOfOrder: 5, IdleAfterRecovery: 7},
		},
		{
			name: "the dead are not lost, and each record counts",
			write: func(l *Ledger) {
				for i := range 3 {
					l.Call(i, 500*ms, 501*ms, true)
				}
			},
			buried: []dead{{3, 2 * time.Second}, {4, 2 * time.Second}, {4, 2 * time.Second}},
			want:   Figures{Published: 5, Handled: 3, DeadLetters: 3, IdleAfterRecovery: 7},
		},
		{
			name: "handled twice, and handled and buried, are duplicates",
			write: func(l *Ledger) {
				for _, id := range []int{0, 0, 1, 1, 1, 2, 3, 4} {
					l.Call(id, 500*ms, 501*ms, true)
				}
			},
			buried: []dead{{2, 2 * time.Second}},
			want:   Figures{Published: 5, Handled: 5, DeadLetters: 1, Duplicates: 3, IdleAfterRecovery: 7},
		},
		{
			name: "out of order: each message that a later one overtook",
			write: func(l *Ledger) {
				for i, id := range []int{0, 3, 1, 2, 4} {
					at := 500*ms + time.Duration(i)*ms
					l.Call(id, at, at, true)
				}
			},
			want: Figures{Published: 5, Handled: 5, OutOfOrder: 2, IdleAfterRecovery: 7},
		},
		{
			name: "a duplicate that comes late is not out of order as well",
			write: func(l *Ledger) {
				for i, id := range []int{0, 1, 2, 3, 4, 0} {
					at := 500*ms + time.Duration(i)*ms
					l.Call(id, at, at, true)
				}
			},
			want: Figures{Published: 5, Handled: 5, Duplicates: 1, IdleAfterRecovery: 7},
		},
		{
			name: "of two calls at a time the one that ends first is first",
			write: func(l *Ledger) {
				l.Call(1, 500*ms, 510*ms, true)
				l.Call(0, 505*ms, 506*ms, true)
				for i := 2; i < 5; i++ {
					l.Call(i, 520*ms, 520*ms, true)
				}
			},
			want: Figures{Published: 5, Handled: 5, IdleAfterRecovery: 7},
		},
		{
			name: "order is that of the successes, not of failed calls",
			write: func(l *Ledger) {
				l.Call(4, 100*ms, 101*ms, false)
				for i := range 5 {
					at := 500*ms + time.Duration(i)*ms
					l.Call(i, at, at, true)
				}
			},
			want: Figures{Published: 5, Handled: 5, IdleAfterRecovery: 7},
		},
		{
			name: "calls count by when they began, successes by when they ended",
			write: func(l *Ledger) {
				l.Call(0, 999*ms, 1001*ms, false)  // before
				l.Call(0, 1000*ms, 1001*ms, false) // during
				l.Call(0, 2999*ms, 3250*ms, true)  // during, and a success after
				l.Call(1, 3300*ms, 3301*ms, true)  // after
			},
			buried: []dead{{2, 4 * time.Second}, {3, 4 * time.Second}, {4, 5 * time.Second}},
			want: Figures{
				Published: 5, Handled: 2, DeadLetters: 3, CallsDuringOutage: 2, Contain: 0, IdleAfterRecovery: 0.25,
				Drain: 1,
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := books(5)
			c.write(l)
			if got := l.Figures(c.buried, 1, end); got != c.want {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
}

func TestContain(t *testing.T) {
	every := func(from, to, step time.Duration) (at []time.Duration) {
		for ; from < to; from += step {
			at = append(at, from)
		}
		return at
	}
	for _, c := range []struct {
		name  string
		calls []time.Duration
		want  float64
	}{
		{"no call at all", nil, 0},
		{"never left alone", every(1000*ms, 3000*ms, 10*ms), 2},
		{"a hiccup is no rest", append(every(1000*ms, 1500*ms, 10*ms), every(1600*ms, 3000*ms, 10*ms)...), 2},
		{"left alone", every(1000*ms, 1400*ms, 10*ms), 0.39},
		{"left alone but for probes", append(every(1000*ms, 1400*ms, 10*ms), 1500*ms, 1700*ms, 2100*ms, 2101*ms, 2900*ms), 0.39},
		{"left alone but for calls 60 ms apart", append(every(1000*ms, 1400*ms, 10*ms), every(1450*ms, 3000*ms, 60*ms)...), 0.39},
		{"a pause of 49 ms is none", append(every(1000*ms, 1400*ms, 10*ms), 1439*ms), 0.439},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := books(1)
			for _, at := range c.calls {
				l.Call(0, at, at+ms, false)
			}
			if got := l.Figures(nil, 0, 4*time.Second); got.Contain != c.want || got.CallsDuringOutage != len(c.calls) {
				t.Errorf("contain %v, want %v (%+v)", got.Contain, c.want, got)
			}
		})
	}
}

func TestDrain(t *testing.T) {
	for _, c := range []struct {
		name     string
		settleAt func(id int) time.Duration // 0: never
		caughtUp int
		want     float64
	}{
		{"caught up during the outage", func(id int) time.Duration { return time.Duration(id)*100*ms + ms }, 1, 0},
		// 0 to 30 are sent by the end of the outage, 31 to 49 later.
		{"one by one after it", func(id int) time.Duration { return 3*time.Second + time.Duration(id+1)*100*ms }, 0, 5},
		{"a backlog of two is none", func(id int) time.Duration { return 3*time.Second + time.Duration(id+1)*100*ms }, 2, 4.8},
		{"at once", func(int) time.Duration { return 6 * time.Second }, 5, 3},
		{"never", func(int) time.Duration { return 0 }, 5, 7},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := books(50)
			for id := range 50 {
				if at := c.settleAt(id); at > 0 {
					l.Call(id, at, at, true)
				}
			}
			if got := l.Figures(nil, c.caughtUp, 10*time.Second); got.Drain != c.want {
				t.Errorf("drain %v, want %v", got.Drain, c.want)
			}
		})
	}
}

// What is settled twice was settled the first time, and what was never confirmed
// is no backlog.
func TestDrainCountsAMessageOnce(t *testing.T) {
	l := books(1)
	l.Send(500 * ms)
	l.Call(0, 5*time.Second, 5*time.Second, true)
	if got := l.Figures([]dead{{0, 8 * time.Second}}, 0, 10*time.Second); got.Drain != 2 {
		t.Errorf("drain %v, want 2", got.Drain)
	}
}

func TestCurves(t *testing.T) {
	l := books(1)
	l.Call(0, 0, ms, false)
	l.Call(0, 500*ms, 501*ms, false)
	l.Call(0, 3*time.Second, 3100*ms, true)
	calls, successes, dead := l.curves([]dead{{0, 1500 * ms}}, 4, 4*time.Second)
	for name, got := range map[string][2][]float64{
		"calls":        {calls, {2, 0, 0, 1}},
		"successes":    {successes, {0, 0, 0, 1}},
		"dead letters": {dead, {0, 1, 0, 0}},
	} {
		for i := range got[0] {
			if got[0][i] != got[1][i] {
				t.Errorf("%s: %v, want %v", name, got[0], got[1])
			}
		}
	}
}

func TestUnhandled(t *testing.T) {
	l := books(3)
	want := func(what string, n int) {
		t.Helper()
		if got := l.unhandled(); got != n {
			t.Errorf("%s: %d unhandled, want %d", what, got, n)
		}
	}
	want("at first", 3)
	l.Call(1, ms, 2*ms, false)
	want("after a failure", 3)
	l.Call(1, ms, 2*ms, true)
	l.Call(1, ms, 2*ms, true)
	want("after a success and its duplicate", 2)
	id := l.Send(3 * ms)
	want("with one that is not confirmed", 2)
	l.Call(id, 3*ms, 4*ms, true)
	want("when that is handled", 2)
	l.Confirm(id)
	want("when it is confirmed", 2)
	l.Confirm(l.Send(5 * ms))
	want("with one that is published", 3)
	l.Call(-1, ms, 2*ms, true)
	l.Call(99, ms, 2*ms, true)
	want("after messages of somebody else", 3)
}
