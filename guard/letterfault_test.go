// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// brokenError is an error whose methods panic when it is nil.
type brokenError struct{ err error }

func (e *brokenError) Error() string { return e.err.Error() }
func (e *brokenError) Unwrap() error { return e.err }

// A dead-letter writer that panics, exits or returns what cannot be asked fails that
// write: nothing is settled by it, whatever it panicked with, and what waits, the
// letter in hand too, is written once it is well.
func TestWriterThatDoesNotReturn(t *testing.T) {
	for name, c := range map[string]struct {
		fail  func() error
		says  string
		stack bool
	}{
		"panic":          {func() error { panic(fmt.Errorf("no schema: %w", dlq.ErrPutOff)) }, "panicked: no schema", true},
		"panic in panic": {func() error { panic((*brokenError)(nil)) }, "panicked: <nil>", true},
		"goexit":         {func() error { runtime.Goexit(); return nil }, "called runtime.Goexit", true},
		"broken error":   {func() error { return (*brokenError)(nil) }, "brokenError, whose methods panic", false},
	} {
		bubble(t, name, func(t *testing.T) {
			var logged bytes.Buffer
			r := newRig(t, Policy{}, Limits{}, func(_ *rig, _ context.Context, m int) error {
				if m < 3 {
					return Permanent(errors.New("no such order"))
				}
				return nil
			})
			r.g.log = slog.New(slog.NewTextHandler(&logged, nil)) // before anything is logged
			broken := true
			r.letters.says = func(*dlq.Record) error {
				if broken {
					return c.fail()
				}
				return nil
			}
			r.send(0, 4)
			time.Sleep(time.Minute)
			if a := r.check(); a.Settling != 3 || a.Acked != 1 {
				t.Errorf("while it fails: %+v", a)
			}
			if err := r.g.Ready(); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("ready: %v", err)
			}
			r.letters.mu.Lock()
			broken = false
			r.letters.mu.Unlock()
			time.Sleep(writeMax)
			if a := r.check(); a.DeadLettered != 3 || a.Unsettled() != 0 {
				t.Errorf("once it is well: %+v", a)
			}
			if err := r.g.Ready(); err != nil {
				t.Error(err)
			}
			r.close()
			if got := strings.Contains(logged.String(), "letterfault_test.go"); got != c.stack {
				t.Errorf("stack logged: %v; %s", got, &logged)
			}
		})
	}
}

// A writer that does not heed its context is trouble that is said, and no letter is lost.
func TestWriterThatStands(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var logged bytes.Buffer
		r := newRig(t, Policy{}, Limits{}, func(*rig, context.Context, int) error { return Permanent(errBad) })
		r.g.log = slog.New(slog.NewTextHandler(&logged, nil)) // before anything is logged
		release := make(chan struct{})
		r.letters.says = func(*dlq.Record) error { <-release; return nil }
		r.send(0, 1)
		time.Sleep(writeLate - time.Second)
		if err := r.g.Ready(); err != nil {
			t.Error(err)
		}
		elapse(2 * time.Second) // its line is written
		if err := r.g.Ready(); !errors.Is(err, errWriteLate) {
			t.Errorf("ready: %v", err)
		}
		if !strings.Contains(logged.String(), "level=WARN msg=\""+lineWriter) || !strings.Contains(logged.String(), "heed its context") {
			t.Errorf("logged: %s", &logged)
		}
		close(release)
		synctest.Wait()
		if a := r.check(); a.DeadLettered != 1 || r.g.Ready() != nil {
			t.Errorf("once it has returned: %+v, %v", a, r.g.Ready())
		}
		r.close()
	})
}
