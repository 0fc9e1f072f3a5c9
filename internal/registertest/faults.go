// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package registertest

import (
	"context"
	"strconv"
	"syscall"
	"testing"
)

// Server is the part of a test's own server that [Killed] and [Stopped] need; internal/brokers has
// one.
type Server interface {
	Kill(ctx context.Context, node int) error
	Restart(ctx context.Context) error
	Info(ctx context.Context) (map[string]string, error)
}

// Killed returns Break and Mend of a server: one kills it, the other starts it again.
func Killed(s Server) (kill, restart func(t *testing.T)) {
	return func(t *testing.T) {
			t.Helper()
			if err := s.Kill(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
		}, func(t *testing.T) {
			t.Helper()
			if err := s.Restart(t.Context()); err != nil {
				t.Error(err)
			}
		}
}

// Stopped returns Break and Mend of a server: one stops its process, the other resumes it.
func Stopped(s Server) (stop, resume func(t *testing.T)) {
	signal := func(t *testing.T, sig syscall.Signal) {
		t.Helper()
		info, err := s.Info(t.Context())
		if err != nil {
			t.Error(err)
			return
		}
		pid, err := strconv.Atoi(info["pid1"])
		if err == nil {
			err = syscall.Kill(pid, sig)
		}
		if err != nil {
			t.Error(err)
		}
	}
	return func(t *testing.T) { t.Helper(); signal(t, syscall.SIGSTOP) },
		func(t *testing.T) { t.Helper(); signal(t, syscall.SIGCONT) }
}
