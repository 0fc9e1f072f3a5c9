// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

// handler is a consumer group's handler in either shape.
type handler struct {
	g        *guard.Guard
	handle   func(context.Context, *sarama.ConsumerMessage) error // function shape
	existing sarama.ConsumerGroupHandler                          // passive shape
	opts     options
	err      error // what is wrong with the options

	mu       sync.Mutex
	sessions map[sarama.ConsumerGroupSession]*session
	refused  error               // what the guard has refused a claim for, until somebody takes it
	claimErr error               // what a claim has ended with; Consume takes it
	failing  map[string]*failing // by topic; passive shape
	topics   []string            // seen so far

	saidUnopened time.Time // that a claim did not open, where no Consume says it
}

func newHandler(g *guard.Guard, opts []Option) *handler {
	h := &handler{g: g, sessions: make(map[sarama.ConsumerGroupSession]*session), failing: make(map[string]*failing)}
	h.opts, h.err = newOptions(g, opts)
	if g == nil {
		h.err = errors.Join(h.err, errors.New("kafka: the guard must not be nil"))
	}
	return h
}

// joinKey is the key of a func(*handler) in the context of a session: by it a handler that
// others decorate joins the [Consume] that runs it.
type joinKey struct{}

// refusal is an error of Setup that will be the same the next time.
type refusal struct{ error }

func (r refusal) Unwrap() error { return r.error }

// refuse keeps what the guard refuses: sarama would begin session after session and tell
// it to the group's Errors alone. [Consume] returns it, or the next Setup does.
func (h *handler) refuse(err error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refused = refusal{err}
	return h.refused
}

func (h *handler) takeRefused() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := h.refused
	h.refused = nil
	return err
}

func (h *handler) passive() bool { return h.handle == nil }
