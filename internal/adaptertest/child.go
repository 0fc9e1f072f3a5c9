// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package adaptertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// childEnv makes a test binary a consumer process; it holds the orders.
const childEnv = "STORMGUARD_TEST_CHILD"

// orders is what a consumer process is told.
type orders struct {
	Ledger string   `json:"ledger"` // a file of what was handled
	Outage string   `json:"outage"` // a file: while it is there the dependency is down
	Mutant bool     `json:"mutant"`
	Args   []string `json:"args"`
}

// Child is what a consumer process has to work with.
type Child struct {
	Guard  *guard.Guard
	Args   []string // of Kills
	Mutant bool     // settle before handling
	outage string
	ledger *os.File
}

// consume is the consumer process; it returns why it ended.
func (s Suite) consume(text string) error {
	var o orders
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return fmt.Errorf("%s: %w", childEnv, err)
	}
	if s.Child == nil {
		return errors.New("Suite.Child is nil")
	}
	go func() { // the parent is gone
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(4)
	}()
	c := &Child{Args: o.Args, Mutant: o.Mutant, outage: o.Outage}
	var err error
	if c.ledger, err = os.OpenFile(o.Ledger, os.O_APPEND|os.O_WRONLY, 0); err != nil {
		return err
	}
	if c.Guard, err = guard.New(guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}}); err != nil {
		return err
	}
	defer func() { _, _ = c.Guard.Close(context.Background()) }()
	if err = s.Child(c); err == nil {
		err = errors.New("the consumption ended")
	}
	return err
}

var errDown = errors.New("connection refused")

// Handle is what the process does with a message: it fails in an outage, and
// else writes the body into the ledger. A kill right after makes a duplicate.
func (c *Child) Handle(body []byte) error {
	if _, err := os.Stat(c.outage); err == nil {
		if err := c.enter("failed", body); err != nil {
			return err
		}
		return errDown
	}
	err := c.enter(done, body)
	time.Sleep(time.Millisecond)
	return err
}

// enter makes a line of one write, which a kill does not tear.
func (c *Child) enter(what string, body []byte) error {
	_, err := fmt.Fprintf(c.ledger, "%s %s\n", what, body)
	return err
}

// start starts a process with orders, and returns how to kill it.
func (o orders) start(t *testing.T) (kill func()) {
	t.Helper()
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe) //nolint:gosec // this very program
	cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe() // its end tells of ours
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end := func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = in.Close()
	}
	t.Cleanup(end) // of a test that failed
	return func() {
		end()
		if code := cmd.ProcessState.ExitCode(); code >= 0 {
			t.Fatalf("the process ended by itself: exit status %d", code)
		}
	}
}
