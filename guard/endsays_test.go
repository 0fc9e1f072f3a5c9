// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// An End that lasts says after 2s what it waits for and until when, and at its end what it
// has left. One that does not last says nothing.
func TestAnEndThatLastsIsTold(t *testing.T) {
	const limit = 30 * time.Second
	for _, c := range []struct {
		name              string
		handler           time.Duration // how long its call takes
		err               error
		writer            dlq.Writer
		handlers, letters int64
		told              bool
		why               string
	}{
		{"a writer is down", 0, Permanent(errBad), &testWriter{err: errDown}, 0, 1, true, "its dead letter is not confirmed"},
		{"a handler hangs", time.Hour, nil, nil, 1, 0, true, "its handler has not returned"},
		{"a handler is slow", 10 * time.Second, nil, nil, 1, 0, true, ""},
		{"a handler returns", time.Second, nil, nil, 0, 0, false, ""},
	} {
		bubble(t, c.name, func(t *testing.T) {
			log := new(logged)
			g := Must(New(Config{}, WithLogger(slog.New(log))))
			s := Must(Open(g, SourceConfig{Name: "s", DeadLetters: c.writer}, Limits{}, &testPort{}, func(context.Context, int) error {
				time.Sleep(c.handler)
				return c.err
			}))
			in := make(chan int, 1)
			in <- 1
			ran := make(chan error, 1)
			go func() { ran <- s.Run(t.Context(), in) }()
			elapse(100 * time.Millisecond)
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			s.End(ctx, ReasonShutdown)
			if !c.told {
				if all := log.of(lineEnds); len(all) > 0 {
					t.Errorf("%+v", all)
				}
			} else {
				l := log.one(t, lineEnds, slog.LevelWarn)
				if l.at.Sub(began) != endSays || l.args["handlers"] != c.handlers || l.args["dead_letters"] != c.letters || l.args["at_most"] != limit-endSays {
					t.Errorf("after %s %+v", l.at.Sub(began), l)
				}
			}
			if c.why == "" {
				if all := log.of(lineLeft); len(all) > 0 {
					t.Errorf("%+v", all)
				}
			} else if l := log.one(t, lineLeft, slog.LevelWarn); l.args["why"] != c.why || l.args["left"] != int64(1) {
				t.Errorf("%+v", l)
			}
			if err := <-ran; !errors.Is(err, ErrClosed) { // a handler that hangs returns at last
				t.Error(err)
			}
			closeAll(t, g)
		})
	}
}
