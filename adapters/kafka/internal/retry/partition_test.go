// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
)

// A trouble is logged when it begins, changes or is over, and not under the lock: what
// a logger does may come back here.
func TestTroubleIsLoggedOnce(t *testing.T) {
	t.Parallel()
	var s logOnce
	var lines []string
	s.log = slog.New(sayingHandler(func(line string) {
		lines = append(lines, line)
		s.say("written", "b", nil) // no news
	}))
	a, b := errors.New("a"), errors.New("b")
	for _, err := range []error{nil, a, a, b, b, nil, nil, a} {
		s.say("read", "b", err)
	}
	if want := []string{"WARN", "WARN", "INFO", "WARN"}; !slices.Equal(lines, want) {
		t.Errorf("logged %v, want %v", lines, want)
	}
}

type sayingHandler func(line string)

func (sayingHandler) Enabled(context.Context, slog.Level) bool { return true }
func (h sayingHandler) WithAttrs([]slog.Attr) slog.Handler     { return h }
func (h sayingHandler) WithGroup(string) slog.Handler          { return h }
func (h sayingHandler) Handle(_ context.Context, r slog.Record) error {
	h(r.Level.String())
	return nil
}
