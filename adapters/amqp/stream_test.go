// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// A stream is refused by both shapes, and nothing of it is handled. Queues of the
// other types are not.
func TestStreamsAreRefused(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		wants := func(t *testing.T, err error) {
			t.Helper()
			if !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "stream") || !strings.Contains(err.Error(), "quorum") {
				t.Errorf("%v", err)
			}
		}
		for name, args := range map[string]amqp091.Table{"as it is": nil, "with a priority of 0": {"x-priority": 0}} {
			t.Run("Consume, "+name, func(t *testing.T) {
				r := newRig(t, s, Stream, nil)
				c := r.consume(adaptertest.Guard(t, guard.Config{}), func(context.Context, amqp091.Delivery) error {
					t.Error("a handler was called")
					return nil
				}, WithConsumeArgs(args))
				wants(t, c.Wait(t))
			})
		}
		t.Run("Deliveries", func(t *testing.T) {
			r := newRig(t, s, Stream, nil)
			_, ch, in := r.opened(amqp091.Config{}, 10)
			_, err := Deliveries(t.Context(), adaptertest.Guard(t, guard.Config{}), ch, in)
			wants(t, err)
			if ch.IsClosed() {
				t.Error("the program's channel is closed")
			}
		})
		for _, kind := range []Kind{Quorum, Classic} {
			for name, args := range map[string]amqp091.Table{"": nil, ", one active": {"x-single-active-consumer": true}} {
				t.Run("not "+kind+name, func(t *testing.T) {
					r := newRig(t, s, kind, args)
					_, ch, in := r.openedAs("c", amqp091.Config{}, 10)
					r.publish(0, 1)
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					out, err := Deliveries(ctx, adaptertest.Guard(t, guard.Config{}), ch, in)
					if err != nil {
						t.Fatal(err)
					}
					d := take(t, out)
					if err := d.Ack(false); err != nil || d.Redelivered {
						t.Errorf("%v, delivered before: %t", err, d.Redelivered)
					}
					cancel()
					drained(t, out)
					if err := ch.Cancel("c", false); err != nil {
						t.Fatal(err)
					}
					// Its consumer is gone, so that the broker says what it says of a stream.
					r.publish(1, 2)
					if err := checkNoStream(t.Context(), ch, r.queue); err != nil {
						t.Error(err)
					}
					if _, _, in := r.opened(amqp091.Config{}, 10); take(t, in).Redelivered {
						t.Error("it was delivered to the one who asked")
					}
				})
			}
		}
	})
}

// Arguments that only streams take are refused before anything is asked.
func TestStreamArgumentsAreRefused(t *testing.T) {
	t.Parallel()
	g := adaptertest.Guard(t, guard.Config{})
	err := Consume(t.Context(), g, Dial("amqp://127.0.0.1:1/"), "q", func(context.Context, amqp091.Delivery) error { return nil },
		WithConsumeArgs(amqp091.Table{"x-stream-offset": "first"}))
	if err == nil || !strings.Contains(err.Error(), "x-stream-offset") {
		t.Errorf("%v", err)
	}
}
