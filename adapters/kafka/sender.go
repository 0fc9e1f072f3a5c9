// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/dlq"
)

// sender writes single records, each confirmed, by an idempotent producer. It is
// safe for concurrent use.
type sender struct {
	client   sarama.Client
	producer sarama.SyncProducer
	slots    chan struct{} // writes under way, given up ones among them
	largest  map[string]int
	squeezes bool // it compresses

	mu     sync.Mutex
	closed bool
	writes sync.WaitGroup
}

// maxWrites bounds writes under way, those among them that nobody waits for any
// more: sarama's SendMessage heeds no context.
const maxWrites = 16

var errSenderClosed = errors.New("kafka: the writer is closed")

// mostUncompressed is how large a record may be that is compressed on its way: about as
// large as a request of sarama's.
var mostUncompressed = int(sarama.MaxRequestSize) - 64<<10

// newSender makes a producer that takes the largest record of each of the topics,
// of a client whose configuration is the sender's own. It owns the client.
//
// A broker's max.message.bytes is the size of a batch as it comes, compressed, and
// sarama's MaxMessageBytes that of a record before. So where the configuration
// compresses, the broker decides, and each record is a batch by itself: one that is too
// large is refused alone.
func newSender(client sarama.Client, largest map[string]int) (*sender, error) {
	p := &client.Config().Producer
	squeezes := p.Compression != sarama.CompressionNone
	for _, most := range largest {
		p.MaxMessageBytes = max(p.MaxMessageBytes, most)
	}
	if squeezes {
		p.MaxMessageBytes = max(p.MaxMessageBytes, mostUncompressed)
		p.Flush.Bytes, p.Flush.Messages, p.Flush.Frequency, p.Flush.MaxMessages = 0, 0, 0, 1
	}
	producer, err := sarama.NewSyncProducerFromClient(client)
	if err != nil {
		return nil, err
	}
	return &sender{client: client, producer: producer, slots: make(chan struct{}, maxWrites), largest: largest, squeezes: squeezes}, nil
}

var errNotCompressed = errors.New("kafka: it is not compressed, and its topic's limit is of what is: set Producer.Compression, or raise max.message.bytes")

// fits refuses a message that its topic cannot take.
func (s *sender) fits(m *sarama.ProducerMessage) error {
	n := m.ByteSize(2) + batchOverhead
	limit := s.client.Config().Producer.MaxMessageBytes
	if s.squeezes {
		if n > limit {
			return &dlq.TooLargeError{Size: n, Max: limit}
		}
		return nil
	}
	if most := s.largest[m.Topic]; most > 0 {
		limit = most
	}
	if n > limit {
		return &dlq.TooLargeError{Size: n, Max: limit, Err: errNotCompressed}
	}
	return nil
}

// refused tells in the words of dlq that the broker found a message too large; nil if
// err is something else.
func (s *sender) refused(m *sarama.ProducerMessage, err error) error {
	if !errors.Is(err, sarama.ErrMessageSizeTooLarge) && !errors.Is(err, sarama.ErrMessageTooLarge) && !errors.Is(err, sarama.ErrMessageSetSizeTooLarge) {
		return nil
	}
	n := m.ByteSize(2) + batchOverhead
	if s.squeezes { // how much less would do nobody knows
		return &dlq.TooLargeError{Err: fmt.Errorf("kafka: %d bytes, compressed: %w", n, err)}
	}
	return &dlq.TooLargeError{Size: n, Max: s.largest[m.Topic], Err: err}
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
	return s.closeWithin(s.finish)
}
