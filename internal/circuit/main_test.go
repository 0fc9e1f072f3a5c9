// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"flag"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/breaker"
)

func TestMain(m *testing.M) {
	// More and longer runs than rapid's 100 of 30: some bugs need two trips.
	// A flag on the command line still wins.
	for name, value := range map[string]string{"rapid.checks": "500", "rapid.steps": "80"} {
		if err := flag.Set(name, value); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

const (
	ms  = time.Millisecond
	sec = time.Second
)

func must(t testing.TB, cfg breaker.Config, opts ...Option) *Breaker {
	t.Helper()
	b, err := New("scope", cfg, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func enter(t testing.TB, b *Breaker) Token {
	t.Helper()
	tok, ok := b.Enter()
	if !ok {
		t.Fatalf("Enter refused, state %v", b.Snapshot(0).State)
	}
	return tok
}

func admit(t testing.TB, b *Breaker, now time.Duration) Token {
	t.Helper()
	tok, r := b.Admit(now, 0)
	if !r.OK() {
		t.Fatalf("Admit(%v) refused: %+v", now, r)
	}
	return tok
}

func refused(t testing.TB, b *Breaker, now time.Duration) Refusal {
	t.Helper()
	tok, r := b.Admit(now, 0)
	if r.OK() || tok != (Token{}) {
		t.Fatalf("Admit(%v) gave %+v, %+v; want a refusal", now, tok, r)
	}
	return r
}

func state(t testing.TB, b *Breaker, now time.Duration, want breaker.State) {
	t.Helper()
	if s := b.Snapshot(now); s.State != want {
		t.Fatalf("at %v: state %v, want %v (%+v)", now, s.State, want, s)
	}
}

// trip opens b by its own verdict.
func trip(t testing.TB, b *Breaker, now time.Duration) {
	t.Helper()
	for range b.Config().Run {
		b.Failure(now, enter(t, b), true)
	}
	state(t, b, now, breaker.Open)
}

// reclose lets every probe succeed, at now.
func reclose(t testing.TB, b *Breaker, now time.Duration) {
	t.Helper()
	for range b.Config().Successes {
		b.Success(now, admit(t, b, now))
	}
	state(t, b, now, breaker.Closed)
}
