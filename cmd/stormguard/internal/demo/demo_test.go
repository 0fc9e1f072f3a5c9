// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestDependencyIsRefusedWhileDownAndComesBack(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	d, err := newDependency(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer d.down()
	c := &client{addr: d.addr}
	defer c.close()
	for range 3 {
		if err := c.call(ctx, 1); err != nil {
			t.Fatal(err)
		}
	}
	d.down()
	if err := c.call(ctx, 1); err == nil { // the connection it had
		t.Fatal("called while down")
	}
	for range 100 {
		if err := c.call(ctx, 1); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatal("while down:", err)
		}
	}
	if err := d.restart(ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.call(ctx, 1); err != nil {
		t.Fatal(err)
	}
}

// While it is down, the handler's error is the connection's, or says nothing.
func TestHandlersErrors(t *testing.T) {
	d, err := newDependency(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	d.down()
	c := &client{addr: d.addr}
	if err := Refused.of(c.call(t.Context(), 1)); !errors.Is(err, syscall.ECONNREFUSED) || !errors.As(err, new(net.Error)) {
		t.Errorf("refused: %v", err)
	}
	if err := Unknown.of(c.call(t.Context(), 1)); err == nil || errors.As(err, new(net.Error)) || errors.As(err, new(syscall.Errno)) || errors.Unwrap(err) != nil {
		t.Errorf("unknown: %v", err)
	}
	if err := errors.Join(Refused.of(nil), Unknown.of(nil)); err != nil {
		t.Error(err)
	}
}

// With errors that tell nothing, only the bounds for those hold.
func TestDemoUnknownErrors(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("needs seconds; run without -short")
	}
	cfg := Config{Rate: 1000, WarmUp: time.Second, Outage: 8 * time.Second, After: time.Second, Seed: 7, JSON: true, Errors: Unknown}
	var stdout, stderr bytes.Buffer
	if err := Run(t.Context(), cfg, &stdout, &stderr); err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	var r Result
	if err := json.Unmarshal(stdout.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	if g := r.Guarded; r.Errors != Unknown || len(r.Bounds) != 3 || g.Lost != 0 || g.Duplicates != 0 || g.Handled+g.DeadLetters != g.Published {
		t.Errorf("%s", stdout.String())
	}
	for _, b := range r.Bounds {
		// 1 % is for the demo's own outage and rate: of a short one, and where the
		// unguarded consumer is slow, each call weighs more.
		if !b.Kept && (b.Name != "calls_percent" || r.Guarded.CallsDuringOutage > 100) {
			t.Errorf("%+v", b)
		}
	}
}

// The promises, end to end, on a small outage. That the unguarded side suffers
// is what the demo is about, so it is checked too.
func TestDemo(t *testing.T) {
	on(t, func(t *testing.T, at Config) {
		dir := t.TempDir()
		t.Setenv("TMPDIR", dir)
		cfg := Config{
			Broker: at.Broker, URL: at.URL,
			Rate: 500, WarmUp: time.Second, Outage: 8 * time.Second, After: time.Second, Seed: 7, JSON: true,
		}
		var stdout, stderr bytes.Buffer
		if err := Run(t.Context(), cfg, &stdout, &stderr); err != nil {
			t.Fatalf("%v\n%s", err, stderr.String())
		}
		t.Logf("%s%s", stderr.String(), stdout.String())
		var r Result
		d := json.NewDecoder(&stdout)
		d.DisallowUnknownFields()
		if err := d.Decode(&r); err != nil {
			t.Fatal(err)
		}
		if rest, _ := os.ReadDir(dir); d.More() || len(rest) > 0 {
			t.Errorf("more than one object on stdout, or left behind: %v", rest)
		}
		judge(t, cfg, r)
		on := cfg.platform()
		for _, want := range []string{"unguarded: " + on.unguarded, "guarded: " + on.guarded, "outage", "recovery", "breaker open"} {
			if !strings.Contains(stderr.String(), want) {
				t.Errorf("stderr has no %q", want)
			}
		}
	})
}

func judge(t *testing.T, cfg Config, r Result) {
	t.Helper()
	u, g := r.Unguarded, r.Guarded
	if r.Errors != Refused || len(r.Bounds) != 6 {
		t.Errorf("errors %q, bounds %+v", r.Errors, r.Bounds)
	}
	if u.Published != cfg.messages() || g.Published != cfg.messages() {
		t.Errorf("published %d and %d, want %d", u.Published, g.Published, cfg.messages())
	}
	// The figures' own bounds hold on a machine that has room; a busy one is slower.
	if g.Lost != 0 || g.Duplicates != 0 || g.OutOfOrder != 0 || g.DeadLetters > 5 || g.Contain > 5 {
		t.Errorf("guarded: %+v", g)
	}
	if g.Handled+g.DeadLetters != g.Published {
		t.Errorf("guarded: %d handled and %d dead-lettered of %d", g.Handled, g.DeadLetters, g.Published)
	}
	// Five failed calls are a dead letter, but for what is still in flight when
	// the dependency is back.
	if u.DeadLetters < u.CallsDuringOutage/maxDeliver-inFlight || u.Lost != 0 || u.CallsDuringOutage < maxDeliver*u.DeadLetters/2 {
		t.Errorf("unguarded: %+v", u)
	}
	// What probes come to is the breaker's doing. What an unguarded consumer makes of an
	// outage is the machine's.
	if g.CallsDuringOutage > max(100, u.CallsDuringOutage/20) {
		t.Errorf("calls during the outage: guarded %d, unguarded %d", g.CallsDuringOutage, u.CallsDuringOutage)
	}
}

func TestDemoIsInterrupted(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	var stdout, stderr bytes.Buffer
	err := Run(ctx, Defaults(), &stdout, &stderr)
	if !errors.Is(err, context.DeadlineExceeded) || stdout.Len() > 0 {
		t.Errorf("%v, stdout %q", err, stdout.String())
	}
	if rest, _ := os.ReadDir(dir); len(rest) > 0 {
		t.Errorf("left behind: %v", rest)
	}
}
