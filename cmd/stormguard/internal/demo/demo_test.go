// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
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

// The promises, end to end, on a small outage. That the unguarded side suffers
// is what the demo is about, so it is checked too.
func TestDemo(t *testing.T) {
	on(t, func(t *testing.T, at Config) {
		dir := t.TempDir()
		t.Setenv("TMPDIR", dir)
		cfg := Config{
			Broker: at.Broker, URL: at.URL,
			Rate: 1000, WarmUp: time.Second, Outage: 8 * time.Second, After: time.Second, Seed: 7, JSON: true,
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
	if u.Published != cfg.messages() || g.Published != cfg.messages() {
		t.Errorf("published %d and %d, want %d", u.Published, g.Published, cfg.messages())
	}
	if g.Lost != 0 || g.Duplicates != 0 || g.OutOfOrder != 0 || g.DeadLetters > 5 || g.Contain > 1 {
		t.Errorf("guarded: %+v", g)
	}
	if g.Handled+g.DeadLetters != g.Published {
		t.Errorf("guarded: %d handled and %d dead-lettered of %d", g.Handled, g.DeadLetters, g.Published)
	}
	// Five failed calls are a dead letter, but for what is still in flight when
	// the dependency is back.
	if u.DeadLetters < 100 || u.DeadLetters < u.CallsDuringOutage/maxDeliver-inFlight || u.Lost != 0 || u.CallsDuringOutage < maxDeliver*u.DeadLetters/2 {
		t.Errorf("unguarded: %+v", u)
	}
	if 20*g.CallsDuringOutage > u.CallsDuringOutage {
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
