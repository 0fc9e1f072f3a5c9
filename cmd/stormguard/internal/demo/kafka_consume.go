// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/guard"
)

// consume runs a consumer group until ctx ends.
func (p *kafkaRun) consume(ctx context.Context, h sarama.ConsumerGroupHandler) (err error) {
	group, err := sarama.NewConsumerGroup(p.addrs, p.group, p.config())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, group.Close()) }()
	for ctx.Err() == nil {
		err := group.Consume(ctx, []string{p.topic}, h)
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, sarama.ErrUnknownTopicOrPartition): // the topic is new, and not every broker knows it
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
		case err != nil:
			return err
		}
	}
	return nil
}

func (p *kafkaRun) unguarded(ctx context.Context, handle handler) (err error) {
	letters, err := sarama.NewAsyncProducer(p.addrs, p.config())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, letters.Close()) }()
	return p.consume(ctx, &insistent{p.dlq, letters, handle})
}

// insistent tries a message up to maxDeliver times in place, and then writes it to
// the DLQ: a partition has no other way to repeat a single message. While dead
// letters are unconfirmed it tries further messages, until one succeeds. It marks a
// message only after the dead letters before it are confirmed.
type insistent struct {
	dlq     string
	letters sarama.AsyncProducer // used by the only claim
	handle  handler
}

func (*insistent) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (*insistent) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (h *insistent) ConsumeClaim(s sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	var handled *sarama.ConsumerMessage // handled, but unmarked until the dead letters before are confirmed
	for pending := 0; ; {
		if pending == 0 && handled != nil {
			s.MarkMessage(handled, "")
			handled = nil
		}
		in := claim.Messages()
		if pending == lettersInFlight || handled != nil {
			in = nil
		}
		select {
		case m, open := <-in:
			if !open {
				return nil
			}
			err := h.try(s.Context(), m)
			switch {
			case err == nil:
				handled = m
			case s.Context().Err() != nil:
				return nil //nolint:nilerr // it is delivered again
			default:
				pending++
				h.letters.Input() <- &sarama.ProducerMessage{
					Topic: h.dlq, Key: sarama.ByteEncoder(m.Key), Value: sarama.ByteEncoder(m.Value), Metadata: m,
					Headers: []sarama.RecordHeader{{Key: []byte("error"), Value: []byte(err.Error())}},
				}
			}
		case letter := <-h.letters.Successes():
			pending--
			s.MarkMessage(letter.Metadata.(*sarama.ConsumerMessage), "") //nolint:forcetypeassert // put there above
		case err := <-h.letters.Errors():
			return fmt.Errorf("publish to the DLQ: %w", err)
		case <-s.Context().Done():
			return nil
		}
	}
}

func (h *insistent) try(ctx context.Context, m *sarama.ConsumerMessage) (err error) {
	for range maxDeliver {
		if err = h.handle(ctx, m.Value); err == nil || ctx.Err() != nil {
			break
		}
	}
	return err
}

func (p *kafkaRun) guarded(ctx context.Context, g *guard.Guard, handle handler) (err error) {
	letters, err := guardkafka.NewDLQ(p.addrs, p.config(), guardkafka.DLQConfig{Topic: p.dlq, Sources: []string{p.topic}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, letters.Close()) }()
	wrapped := guardkafka.Wrap(g, func(ctx context.Context, m *sarama.ConsumerMessage) error { return handle(ctx, m.Value) },
		guardkafka.WithDeadLetters(letters), guardkafka.WithStopTimeout(stopTimeout))
	return p.consume(ctx, wrapped)
}
