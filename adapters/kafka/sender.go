// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"errors"
	"sync"

	"github.com/IBM/sarama"
)

// sender writes single records, each confirmed, by an idempotent producer. It is
// safe for concurrent use.
type sender struct {
	client   sarama.Client
	producer sarama.SyncProducer
	slots    chan struct{} // writes under way, given up ones among them

	mu     sync.Mutex
	closed bool
	writes sync.WaitGroup
}

// maxWrites bounds writes under way, those among them that nobody waits for any
// more: sarama's SendMessage heeds no context.
const maxWrites = 16

var errSenderClosed = errors.New("kafka: the writer is closed")

// newSender makes a producer that takes the largest record of each of the topics,
// of a client whose configuration is the sender's own. It owns the client.
func newSender(client sarama.Client, largest map[string]int) (*sender, error) {
	room := &client.Config().Producer.MaxMessageBytes
	for _, most := range largest {
		*room = max(*room, most)
	}
	producer, err := sarama.NewSyncProducerFromClient(client)
	if err != nil {
		return nil, err
	}
	return &sender{client: client, producer: producer, slots: make(chan struct{}, maxWrites)}, nil
}

// send gives a message to the producer, and returns its offset, -1 if the broker
// did not say it. When ctx ends first, the message may arrive all the same:
// SendMessage runs on a goroutine of its own, which close waits for.
func (s *sender) send(ctx context.Context, m *sarama.ProducerMessage) (int64, error) {
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return -1, context.Cause(ctx)
	}
	if !s.begin() {
		<-s.slots
		return -1, errSenderClosed
	}
	type answer struct {
		at  int64
		err error
	}
	sent := make(chan answer, 1)
	go func() {
		defer s.writes.Done()
		_, at, err := s.producer.SendMessage(m)
		sent <- answer{at, err}
		<-s.slots
	}()
	select {
	case a := <-sent:
		return a.at, a.err
	case <-ctx.Done():
		return -1, context.Cause(ctx)
	}
}

// begin announces a write; false once it is closed.
func (s *sender) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.writes.Add(1)
	}
	return !s.closed
}

// shut refuses further writes; false if that was done before.
func (s *sender) shut() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.closed
	s.closed = true
	return !was
}

// finish waits for writes under way and disconnects.
func (s *sender) finish() error {
	s.writes.Wait()
	return errors.Join(s.producer.Close(), s.client.Close())
}

func (s *sender) close() error {
	if !s.shut() {
		return nil
	}
	return s.finish()
}
