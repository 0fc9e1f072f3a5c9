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
	err      error // faults of the options

	mu       sync.Mutex
	sessions map[sarama.ConsumerGroupSession]*session
	refused  error               // why the guard refused a claim, until takeRefused takes it
	claimErr error               // the error that a claim ended with, until Consume takes it
	failing  map[string]*failing // by topic; passive shape
	topics   []string            // the topics that the handler knows; see seen

	saidUnopened time.Time // when Cleanup last logged that a claim did not open; unused under Consume
}

func newHandler(g *guard.Guard, opts []Option) *handler {
	h := &handler{g: g, sessions: make(map[sarama.ConsumerGroupSession]*session), failing: make(map[string]*failing)}
	h.opts, h.err = newOptions(g, opts)
	if g == nil {
		h.err = errors.Join(h.err, errors.New("kafka: the guard must not be nil"))
	}
	return h
}

// joinKey is the context key of a func(*handler). [Consume] puts that function into the context
// of its sessions, and Setup calls it: so a handler inside a decorator joins the Consume that
// runs it.
type joinKey struct{}

// refusal is an error of Setup that the next Setup would return again.
type refusal struct{ error }

func (r refusal) Unwrap() error { return r.error }

// refuse keeps the guard's refusal of a claim. [Consume] returns it, or the next Setup does.
// sarama alone would begin session after session, and send it only to the group's Errors.
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
