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

// childEnv is the environment variable that makes a test binary a consumer process. Its
// value is the orders.
const childEnv = "STORMGUARD_TEST_CHILD"

// orders are the settings of a consumer process.
type orders struct {
	Ledger string   `json:"ledger"` // the file with the handled messages
	Outage string   `json:"outage"` // a file; while it exists the dependency is down
	Mutant bool     `json:"mutant"`
	Args   []string `json:"args"`
}

// Child holds the tools of a consumer process.
type Child struct {
	Guard  *guard.Guard
	Args   []string // Kills.Args
	Mutant bool     // settle before handling
	outage string
	ledger *os.File
}

// consume is the consumer process. It returns why the process ended.
func (s Suite) consume(text string) error {
	var o orders
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return fmt.Errorf("%s: %w", childEnv, err)
	}
	if s.Child == nil {
		return errors.New("Suite.Child is nil")
	}
	go func() { // ends the process when the parent is gone
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

// Handle handles a message: in an outage it fails, otherwise it writes the body to the
// ledger. A kill directly after that makes a duplicate.
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

// enter writes a line in one write, so that a kill does not tear it.
func (c *Child) enter(what string, body []byte) error {
	_, err := fmt.Fprintf(c.ledger, "%s %s\n", what, body)
	return err
}

// start starts a process with orders, and returns a function that kills it.
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
	in, err := cmd.StdinPipe() // the child ends when this pipe ends
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
	t.Cleanup(end) // for a failed test
	return func() {
		end()
		if code := cmd.ProcessState.ExitCode(); code >= 0 {
			t.Fatalf("the process ended by itself: exit status %d", code)
		}
	}
}
