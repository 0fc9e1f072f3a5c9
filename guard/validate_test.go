// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// What Validate passes New and Open take, and what they refuse it reports: also what is
// turned off.
func TestValidateIsWhatNewAndOpenCheck(t *testing.T) {
	for name, c := range map[string]struct {
		policy Policy
		valid  bool
	}{
		"breaker off, invalid": {Policy{NoBreaker: true, Breaker: breaker.Config{Window: -time.Second}}, false},
		"breaker off":          {Policy{NoBreaker: true, Breaker: breaker.Config{Window: time.Minute}}, true},
		"budget off, invalid":  {Policy{Budget: dlq.BudgetConfig{Off: true, Earn: 7, Balance: -3}}, true},
		"budget off, stormy":   {Policy{Budget: dlq.BudgetConfig{Off: true}, Storm: dlq.StormConfig{ErrorRate: 0.5}}, true},
		"budget, stormy":       {Policy{Storm: dlq.StormConfig{ErrorRate: 0.5}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Policy: c.policy}
			if err := cfg.Validate(); (err == nil) != c.valid {
				t.Errorf("Validate: %v", err)
			}
			g, err := New(cfg)
			if (err == nil) != c.valid {
				t.Fatalf("New: %v", err)
			}
			if err != nil {
				return
			}
			if _, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, func(context.Context, int) error { return nil }); err != nil {
				t.Errorf("Open: %v", err)
			}
			if _, err := Protect(g, SourceConfig{Name: "f"}, func(context.Context, int) error { return nil }); err != nil {
				t.Errorf("Protect: %v", err)
			}
			closeAll(t, g)
		})
	}
}

// The error of Close names what was left, and no cause where there is none.
func TestCloseWithoutACause(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, fn := newFunc(t, Policy{}, func(context.Context, int) error {
			time.Sleep(time.Hour) // it does not heed its context
			return nil
		})
		go func() { _ = fn.Do(t.Context(), 1) }()
		time.Sleep(time.Second)
		over, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		go fn.End(over, ReasonShutdown) // Close gets its report
		synctest.Wait()
		_, err := g.Close(t.Context())
		if err == nil || err.Error() != "guard: source f: 1 messages left" {
			t.Errorf("%v", err)
		}
		time.Sleep(time.Hour)
	})
}

// A Close without a limit waits an hour for a disk, and then says so.
func TestCloseOfADiskThatHangs(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		answers := make(chan struct{})
		err := closeWithin(t.Context(), "Config.StateDir", func() error {
			<-answers
			return nil
		})
		close(answers)
		if !errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "%!") || !strings.Contains(err.Error(), "Config.StateDir") {
			t.Errorf("%v", err)
		}
	})
}

// Logger is what adapters log to: the option's, or slog's default for warnings.
func TestLogger(t *testing.T) {
	var text strings.Builder
	g, err := New(Config{}, WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
	if err != nil {
		t.Fatal(err)
	}
	g.Logger().Warn("hello")
	if !strings.Contains(text.String(), "hello") {
		t.Errorf("%q", &text)
	}
	closeAll(t, g)
	if g, err = New(Config{}); err != nil {
		t.Fatal(err)
	}
	if g.Logger().Enabled(t.Context(), slog.LevelInfo) || !g.Logger().Enabled(t.Context(), slog.LevelWarn) {
		t.Error("not the default for warnings only")
	}
	closeAll(t, g)
}
