// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package bolt_test

import (
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/internal/oncetest"
	"github.com/stormguard-mq/stormguard/once"
	"github.com/stormguard-mq/stormguard/once/bolt"
)

func TestMain(m *testing.M) {
	oncetest.Main(child)
	goleak.VerifyTestMain(m)
}

// child is the process that is killed.
func child(c oncetest.Child) (oncetest.ChildEffects, error) {
	s, err := bolt.Open(c.Args[0], bolt.Config{})
	if err != nil {
		return oncetest.ChildEffects{}, err
	}
	var opts []once.Option
	if c.Mode == "lookup" {
		opts = append(opts, once.WithLookup(c.Happened))
	}
	r, err := once.New(s, once.Config{}, opts...)
	return oncetest.ChildEffects{Effects: r}, err
}

func open(t testing.TB, path string, cfg bolt.Config) *bolt.Store {
	t.Helper()
	s, err := bolt.Open(path, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// place is a file, which one process at a time has.
func place(t *testing.T) oncetest.Place {
	path := filepath.Join(t.TempDir(), "once.db")
	var mu sync.Mutex
	var now *bolt.Store
	return oncetest.Place{
		Open: func(t *testing.T) once.Store {
			mu.Lock()
			defer mu.Unlock()
			if now == nil {
				now = open(t, path, bolt.Config{})
			}
			return now
		},
		Crash: func(t *testing.T, s once.Store) {
			mu.Lock()
			defer mu.Unlock()
			now = nil
			if err := s.(*bolt.Store).Close(); err != nil {
				t.Error(err)
			}
		},
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	oncetest.RunStore(t, place)
}

// Each effect at least once, and again only after a kill between the effect and its mark;
// with a dependency that can be asked, exactly once.
func TestKilled(t *testing.T) {
	t.Parallel()
	for mode, exact := range map[string]bool{"again": false, "lookup": true} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			oncetest.Kills{Mode: mode, Args: []string{filepath.Join(t.TempDir(), "once.db")}, Exact: exact}.Holds(t)
		})
	}
	t.Run("mutant", func(t *testing.T) {
		t.Parallel()
		oncetest.Kills{}.CatchesMutant(t)
	})
}
