// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package adaptertest

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Suite says how the tests of a package run.
type Suite struct {
	// Parallel is the number of tests that run at once. They mostly wait for a broker, so
	// it may be larger than the number of processors.
	Parallel int
	// Child is the consumer in the process that [Kills] starts and kills.
	Child func(*Child) error
	// End closes the resources that the tests share; it may be nil.
	End func() error
	// Ignore excludes goroutines that a client library never ends.
	Ignore []goleak.Option
}

// Main is called by a TestMain. It runs the tests and checks that no goroutine is left. It
// waits for goroutines of a client library that end some time after their connection. Main
// does not return.
func Main(m *testing.M, s Suite) {
	if orders := os.Getenv(childEnv); orders != "" {
		fmt.Fprintln(os.Stderr, "child:", s.consume(orders))
		os.Exit(3)
	}
	flag.Parse()
	if err := flag.Set("test.parallel", fmt.Sprint(s.Parallel)); err != nil {
		panic(err)
	}
	code := m.Run()
	var err error
	if s.End != nil {
		err = s.End()
	}
	if code == 0 {
		err = errors.Join(err, leaks(s.Ignore))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

func leaks(ignore []goleak.Option) (err error) {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); { // only a leak takes so long
		if err = goleak.Find(ignore...); err == nil {
			return nil
		}
	}
	return fmt.Errorf("goleak: %w", err)
}

// Full reports whether the long forms of the tests run: STORMGUARD_FULL=1.
func Full() bool { return os.Getenv("STORMGUARD_FULL") == "1" }

// NotShort skips the test with -short; what describes the part that takes long.
func NotShort(t testing.TB, what string) {
	t.Helper()
	if testing.Short() {
		t.Skip(what + "; run without -short")
	}
}
