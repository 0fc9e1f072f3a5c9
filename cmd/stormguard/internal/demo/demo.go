// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package demo runs one outage twice, against an unguarded and a guarded
// consumer, shows it, and measures both.
//
// [Ledger] is the oracle: it knows each message by id, and takes nothing from
// the guard. A broker is a file for what a run has there, and one for its two
// ways to consume (nats.go and nats_consume.go); platform.go says what it has to
// do. The rest knows no broker.
package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
)

// Config is what the command line sets.
type Config struct {
	Broker Kind
	URL    string // empty: an embedded server, or one that is found or started
	Creds  string // NATS credentials file
	Access access.Config

	Rate                  int           // messages per second
	WarmUp, Outage, After time.Duration // publishing goes on through all three
	Seed                  uint64
	Literal               bool // the guard's own storm thresholds
	Errors                Failure

	Console string // address that serves the guarded run's console; empty: none

	JSON    bool
	NoColor bool
}

// Defaults is the demo of the README.
func Defaults() Config {
	return Config{Broker: NATS, Rate: 2500, WarmUp: 3 * time.Second, Outage: 20 * time.Second, After: 5 * time.Second, Seed: 1, Errors: Refused}
}

// messages is how many are published in a run.
func (c Config) messages() int {
	return int(float64(c.Rate) * (c.WarmUp + c.Outage + c.After).Seconds())
}

// A Failure is what the handler returns while its dependency is down; empty means
// [Refused].
type Failure string

// The failures.
const (
	// Refused is the error of the TCP connection, as a handler that hands errors
	// on returns it.
	Refused Failure = "refused"
	// Unknown is an error of the handler's own that says nothing of a connection.
	Unknown Failure = "unknown"
)

// Failures are all of them.
func Failures() []Failure { return []Failure{Refused, Unknown} }

func (c Config) failure() Failure {
	if c.Errors == "" {
		return Refused
	}
	return c.Errors
}

// Result is what --json prints.
type Result struct {
	Errors    Failure `json:"errors"`
	Unguarded Figures `json:"unguarded"`
	Guarded   Figures `json:"guarded"`
	Bounds    []Bound `json:"bounds"`
}

// Run runs both sides. The result goes to stdout, progress to stderr.
func Run(ctx context.Context, cfg Config, stdout, stderr io.Writer) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	b, err := open(ctx, cfg, stderr)
	if err != nil {
		return err
	}
	defer b.close()
	out, err := play(ctx, cfg, b, newView(stderr, cfg))
	if err != nil {
		return err
	}
	if cfg.JSON {
		return json.NewEncoder(stdout).Encode(out.result(cfg))
	}
	_, err = io.WriteString(stdout, report(cfg, out, outputStyle(stdout, cfg)))
	return err
}

// outcome is both runs' figures and the curves of the report.
type outcome struct {
	unguarded, guarded trial
}

func (o outcome) result(cfg Config) Result {
	u, g := o.unguarded.figures, o.guarded.figures
	return Result{Errors: cfg.failure(), Unguarded: u, Guarded: g, Bounds: bounds(cfg.failure(), u, g)}
}

// play runs both sides one after the other on one broker.
func play(ctx context.Context, cfg Config, b broker, v view) (o outcome, err error) {
	on := cfg.platform()
	if o.unguarded, err = stage(ctx, cfg, b, unguarded{on}, v); err != nil {
		return o, fmt.Errorf("unguarded run: %w", err)
	}
	if o.guarded, err = stage(ctx, cfg, b, newGuarded(on, cfg.Literal, cfg.Console), v); err != nil {
		return o, fmt.Errorf("guarded run: %w", err)
	}
	return o, nil
}
