// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package demo runs one outage twice, against an unguarded and a guarded
// consumer, shows it, and measures both.
//
// [Ledger] measures the run: it knows each message by id, and uses no data of the
// guard. Each broker has two files: nats.go makes the queues of a run, and
// nats_consume.go consumes in two ways. They implement the interfaces in
// platform.go. The other files know no broker.
package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
)

// Config holds the settings of a demo, as the command line sets them.
type Config struct {
	Broker Kind
	URL    string // the broker's address; empty: an embedded server, or one that is found or started
	Creds  string // NATS credentials file
	Access access.Config

	Rate                  int           // messages per second
	WarmUp, Outage, After time.Duration // publishing goes on through all three
	Seed                  uint64        // for the messages' contents
	Literal               bool          // keeps the guard's default storm thresholds, does not scale them down
	Errors                Failure       // the handler's error in the outage; empty: Refused

	Console string // listen address of the guarded run's console; empty: none

	JSON    bool // prints a Result, not a report
	NoColor bool // prints no colours
}

// Defaults returns the settings of the demo in the README.
func Defaults() Config {
	return Config{Broker: NATS, Rate: 2500, WarmUp: 3 * time.Second, Outage: 20 * time.Second, After: 5 * time.Second, Seed: 1, Errors: Refused}
}

// messages is the number of messages published in a run.
func (c Config) messages() int {
	return int(float64(c.Rate) * (c.WarmUp + c.Outage + c.After).Seconds())
}

// A Failure is the handler's error while its dependency is down; empty means
// [Refused].
type Failure string

// The failures.
const (
	// Refused is the error of the TCP connection: the handler returns it unchanged.
	Refused Failure = "refused"
	// Unknown is the handler's own error, without the connection's error.
	Unknown Failure = "unknown"
)

// Failures returns all failures.
func Failures() []Failure { return []Failure{Refused, Unknown} }

func (c Config) failure() Failure {
	if c.Errors == "" {
		return Refused
	}
	return c.Errors
}

// Result holds the figures of both runs and the judged bounds. --json prints it.
type Result struct {
	Errors    Failure `json:"errors"`
	Unguarded Figures `json:"unguarded"`
	Guarded   Figures `json:"guarded"`
	Bounds    []Bound `json:"bounds"`
}

// Run runs both sides, one after the other. It writes the result to stdout and
// progress to stderr.
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

// outcome holds the figures and curves of both runs.
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
