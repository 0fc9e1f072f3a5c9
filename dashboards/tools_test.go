// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"testing"
)

// need skips a test whose program is not here, but not where everything is to be tested.
func need(t *testing.T, program, remedy string) {
	t.Helper()
	if _, err := exec.LookPath(program); err == nil {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s is not here: %s", program, remedy)
	}
	t.Skipf("%s is not here: %s", program, remedy)
}

// run runs a program and fails the test with what it printed.
func run(t *testing.T, dir, program string, args ...string) {
	t.Helper()
	if out, err := output(t, dir, program, args...); err != nil {
		t.Fatalf("%s %v: %v\n%s", program, args, err, out)
	}
}

func output(t *testing.T, dir, program string, args ...string) ([]byte, error) {
	t.Helper()
	c := exec.CommandContext(t.Context(), program, args...)
	c.Dir = dir
	return c.CombinedOutput()
}
