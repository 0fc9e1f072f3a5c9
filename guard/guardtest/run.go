// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// Guarded is the configuration of [Broker.Run]. The zero value is valid.
type Guarded struct {
	Consumer ConsumerConfig

	// Name is the source's name; unset means the queue's name.
	Name string

	// Policy overrides the Guard's policy; nil means the Guard's policy.
	Policy *guard.Policy

	// DeadLetters is the writer of dead letters; unset means [Broker.DeadLetters] of the
	// queue.
	DeadLetters dlq.Writer

	// Feed reads ahead on a second goroutine through [guard.Source.Feed], so that the
	// guard can extend messages behind a slow handler. An AckWait implies Feed.
	Feed bool

	// Port wraps the port of each epoch, so that a test can add faults; nil means no
	// wrapper.
	Port func(guard.Port[*Message]) guard.Port[*Message]

	// Opened is called with each epoch's source before the source runs; may be nil.
	Opened func(*guard.Source[*Message], *Epoch)

	// CloseWait is how long Run waits for handlers after ctx has ended; unset means 10s.
	CloseWait time.Duration
}

// Run consumes a queue through a Guard: it is the adapter of this broker. It opens a source
// for each epoch, and consumes again when an epoch is revoked or lost. It returns nil when
// ctx or the Guard has ended, or the error of [guard.Open].
func (b *Broker) Run(ctx context.Context, g *guard.Guard, queue string, cfg Guarded, handler func(context.Context, *Message) error) error {
	for {
		e, err := b.Consume(ctx, queue, cfg.Consumer)
		if err != nil {
			return nil //nolint:nilerr // ctx ended
		}
		s, err := b.open(g, e, cfg, handler)
		if err != nil {
			e.Close()
			if errors.Is(err, guard.ErrClosed) {
				return nil
			}
			return err
		}
		over, err := b.serve(ctx, s, e, cfg)
		if over || errors.Is(err, guard.ErrClosed) {
			return nil
		}
	}
}

// serve runs one epoch. Source.Run has its own goroutine: a handler that ignores its context
// blocks that goroutine, but must not block the end of the epoch.
func (b *Broker) serve(ctx context.Context, s *guard.Source[*Message], e *Epoch, cfg Guarded) (over bool, err error) {
	ran := make(chan error, 1)
	go func() {
		if cfg.Feed || cfg.Consumer.AckWait > 0 {
			ran <- e.feed(s)
			return
		}
		ran <- s.Run(e.Context(), e.Messages())
	}()
	why, returned := guard.ReasonRebalance, true
	select {
	case err = <-ran:
	case <-ctx.Done():
		why, over, returned = guard.ReasonShutdown, true, false
	case <-e.stop:
		// The source sees the end too. Run returns when the handler returns.
		patience := time.NewTimer(cfg.closeWait())
		select {
		case err = <-ran:
		case <-patience.C:
			returned = false
		}
		patience.Stop()
	}
	end, cancel := context.WithTimeout(context.Background(), cfg.closeWait())
	defer cancel()
	report := s.End(end, why)
	e.Close()
	if !returned && report.Clean() {
		<-ran //nolint:errcheck // why Run ended is known
	}
	return over, err
}

// feed runs a source and a goroutine that reads for it. That goroutine ends with the epoch
// or the source.
func (e *Epoch) feed(s *guard.Source[*Message]) error {
	f := s.Feed()
	var reader sync.WaitGroup
	reader.Go(func() {
		defer f.Close()
		for m := range e.Messages() {
			e.handed.Add(-1) // not yet with the guard
			if _, err := f.Put(e.Context(), m); err != nil {
				return // the message stays unacked: the end of the epoch gives it back
			}
			e.handed.Add(1)
		}
	})
	err := s.RunFeed(e.Context())
	f.Close()
	if errors.Is(err, guard.ErrClosed) {
		e.halt()
	}
	reader.Wait()
	return err
}

func (c Guarded) closeWait() time.Duration {
	if c.CloseWait > 0 {
		return c.CloseWait
	}
	return 10 * time.Second
}

func (b *Broker) open(g *guard.Guard, e *Epoch, cfg Guarded, handler func(context.Context, *Message) error) (*guard.Source[*Message], error) {
	source := guard.SourceConfig{
		Name: cfg.Name, System: "guardtest", Destination: e.q.name,
		DeadLetters: cfg.DeadLetters, Policy: cfg.Policy,
	}
	if source.Name == "" {
		source.Name = e.q.name
	}
	if source.DeadLetters == nil {
		source.DeadLetters = b.DeadLetters(e.q.name)
	}
	port := e.Port()
	if cfg.Port != nil {
		port = cfg.Port(port)
	}
	s, err := guard.Open(g, source, e.Limits(), port, handler)
	if err == nil && cfg.Opened != nil {
		cfg.Opened(s, e)
	}
	return s, err
}
