// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A Sender writes single records, each confirmed, by an idempotent producer. It is
// safe for concurrent use.
type Sender struct {
	Client     sarama.Client
	producer   sarama.SyncProducer
	slots      chan struct{} // a token for each write that a caller waits for
	Compresses bool          // the producer compresses
	limit      int           // largest record of a topic whose limit is not known, in bytes

	sizes   sync.Mutex
	largest map[string]int       // largest record of each topic, in bytes
	looked  map[string]time.Time // when a topic was last asked for its limit again

	mu        sync.Mutex
	closed    bool
	abandoned map[place]int // writes under way that no caller waits for any more
	writes    sync.WaitGroup
}

// place is a partition that is written to.
type place struct {
	topic     string
	partition int32
}

// maxWrites bounds the writes that callers wait for.
const maxWrites = 16

// closeWait is how long Close waits for writes under way.
const closeWait = time.Second

// ErrClosed is the error of a write after Close.
var ErrClosed = errors.New("kafka: the writer is closed")

// mostUncompressed is the largest size of a record before compression: about as large as a
// request of sarama.
var mostUncompressed = int(sarama.MaxRequestSize) - 64<<10

// NewSender makes a Sender that takes the largest record of each of the topics. It owns the
// client, and changes the client's configuration.
//
// A broker's max.message.bytes limits a batch after compression, and sarama's MaxMessageBytes a
// record before it. So if the configuration compresses, the broker decides. Each record is a
// batch by itself: a record that is too large is refused alone.
func NewSender(client sarama.Client, largest map[string]int) (*Sender, error) {
	p := &client.Config().Producer
	squeezes := p.Compression != sarama.CompressionNone
	limit := p.MaxMessageBytes
	for _, most := range largest {
		limit = max(limit, most)
	}
	p.MaxMessageBytes = max(limit, mostUncompressed) // Fits decides, for a topic's limit may be raised
	// A record does not wait for others: there may be fewer than the program's configuration
	// asks for.
	p.Flush.Bytes, p.Flush.Messages, p.Flush.Frequency, p.Flush.MaxMessages = 0, 0, 0, 1
	producer, err := sarama.NewSyncProducerFromClient(client)
	if err != nil {
		return nil, err
	}
	return &Sender{Client: client, producer: producer, slots: make(chan struct{}, maxWrites), abandoned: make(map[place]int), limit: limit, largest: maps.Clone(largest), looked: make(map[string]time.Time), Compresses: squeezes}, nil
}

// lookAgain is how often a topic's limit is asked for, while a record is above it.
const lookAgain = 5 * time.Second

// most is the largest size of a record of a topic; 0 if unknown.
func (s *Sender) most(topic string) int {
	s.sizes.Lock()
	defer s.sizes.Unlock()
	return s.largest[topic]
}

// askAgain asks the broker for a topic's limit, which may have been raised, unless it has asked
// lately. It returns when the broker has answered, or ctx ends. Close waits for the goroutine
// that asks.
func (s *Sender) askAgain(ctx context.Context, topic string) {
	s.sizes.Lock()
	due := s.largest[topic] > 0 && time.Since(s.looked[topic]) >= lookAgain
	if due {
		s.looked[topic] = time.Now()
	}
	s.sizes.Unlock()
	if !due || !s.begin() {
		return
	}
	answered := make(chan struct{})
	go func() {
		defer s.writes.Done()
		defer close(answered)
		in, err := NewAdmin(s.Client)
		if err != nil {
			return
		}
		info, err := in.Topic(topic)
		if err != nil || info == nil {
			return
		}
		s.sizes.Lock()
		defer s.sizes.Unlock()
		s.largest[topic] = int(info.Number("max.message.bytes", int64(s.largest[topic])))
	}()
	select {
	case <-answered:
	case <-ctx.Done():
	}
}

var errNotCompressed = errors.New("kafka: it is not compressed, and its topic's limit is of what is: set Producer.Compression, or raise max.message.bytes")

// Fits refuses a message that its topic cannot take.
func (s *Sender) Fits(ctx context.Context, m *sarama.ProducerMessage) error {
	n := m.ByteSize(2) + batchOverhead
	if s.Compresses {
		if limit := s.Client.Config().Producer.MaxMessageBytes; n > limit {
			return &dlq.TooLargeError{Size: n, Max: limit}
		}
		return nil
	}
	if most := s.most(m.Topic); most > 0 && n > most {
		s.askAgain(ctx, m.Topic)
	}
	limit := cmp.Or(s.most(m.Topic), s.limit)
	if n > limit {
		return &dlq.TooLargeError{Size: n, Max: limit, Err: errNotCompressed}
	}
	return nil
}

// Refused is a [dlq.TooLargeError] if the broker found a message too large; nil if err is
// something else.
func (s *Sender) Refused(m *sarama.ProducerMessage, err error) error {
	if !errors.Is(err, sarama.ErrMessageSizeTooLarge) && !errors.Is(err, sarama.ErrMessageTooLarge) && !errors.Is(err, sarama.ErrMessageSetSizeTooLarge) {
		return nil
	}
	n := m.ByteSize(2) + batchOverhead
	if s.Compresses { // the size that would fit is not known
		return &dlq.TooLargeError{Err: fmt.Errorf("kafka: %d bytes, compressed: %w", n, err)}
	}
	return &dlq.TooLargeError{Size: n, Max: s.most(m.Topic), Err: err}
}

// Send gives a message to the producer, and returns its offset, -1 if the broker did not tell it.
// sarama's SendMessage ignores the context. So when ctx ends first, the write goes on, on its own
// goroutine that Close waits for, and the message may still arrive. Until that write returns,
// another write to the same partition fails at once. So unanswered writes do not pile up, and do
// not delay writes to other partitions.
func (s *Sender) Send(ctx context.Context, m *sarama.ProducerMessage) (int64, error) {
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return -1, context.Cause(ctx)
	}
	defer func() { <-s.slots }()
	to := place{m.Topic, m.Partition}
	s.mu.Lock()
	waits := s.abandoned[to] > 0 && !s.closed
	s.mu.Unlock()
	if waits {
		return -1, fmt.Errorf("kafka: the broker has not answered an earlier write to partition %d of %s", to.partition, to.topic)
	}
	if !s.begin() {
		return -1, ErrClosed
	}
	type answer struct {
		at  int64
		err error
	}
	sent := make(chan answer, 1)
	answered, givenUp := false, false // guarded by s.mu
	go func() {
		defer s.writes.Done()
		m.Offset = -1 // remains if the broker does not tell it
		_, at, err := s.producer.SendMessage(m)
		sent <- answer{at, err}
		s.mu.Lock()
		defer s.mu.Unlock()
		if answered = true; !givenUp {
			return
		}
		if s.abandoned[to]--; s.abandoned[to] == 0 {
			delete(s.abandoned, to)
		}
	}()
	select {
	case a := <-sent:
		return a.at, a.err
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if givenUp = !answered; givenUp {
		s.abandoned[to]++
	}
	return -1, context.Cause(ctx)
}

// underWay is how many writes are under way.
func (s *Sender) underWay() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.slots)
	for _, more := range s.abandoned {
		n += more
	}
	return n
}

// begin announces a write; false once the sender is closed.
func (s *Sender) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.writes.Add(1)
	}
	return !s.closed
}

// shut refuses further writes; false if an earlier call has done so.
func (s *Sender) shut() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.closed
	s.closed = true
	return !was
}

// finish waits for writes under way and disconnects.
func (s *Sender) finish() error {
	s.writes.Wait()
	return errors.Join(s.producer.Close(), s.Client.Close())
}

// Close closes others, waits for writes under way and disconnects. It waits for 1s at most, and
// then its error tells how many writes are left. A later call does nothing.
func (s *Sender) Close(others ...io.Closer) error {
	if !s.shut() {
		return nil
	}
	return s.closeWithin(func() error {
		var errs []error
		for _, c := range others {
			errs = append(errs, c.Close())
		}
		return errors.Join(append(errs, s.finish())...)
	})
}

// EndsWithin runs f, and waits for it no longer than d. After that f goes on by itself.
func EndsWithin(d time.Duration, f func() error) (ended bool, err error) {
	done := make(chan error, 1)
	go func() { done <- f() }()
	limit := time.NewTimer(d)
	defer limit.Stop()
	select {
	case err := <-done:
		return true, err
	case <-limit.C:
		return false, nil
	}
}

// closeWithin closes a writer. The error tells how many writes are still under way.
func (s *Sender) closeWithin(closing func() error) error {
	ended, err := EndsWithin(closeWait, closing)
	if ended {
		return err
	}
	return fmt.Errorf("kafka: the broker has not answered for %s: %d writes under way may arrive all the same", closeWait, s.underWay())
}

// ProducerConfig is a copy of a configuration with the settings that make a producer safe.
func ProducerConfig(config *sarama.Config) *sarama.Config {
	c := *config
	c.Producer.Idempotent = true
	c.Producer.RequiredAcks = sarama.WaitForAll
	c.Producer.Return.Successes, c.Producer.Return.Errors = true, true
	c.Producer.Retry.Max = max(1, c.Producer.Retry.Max)
	c.Producer.Partitioner = sarama.NewManualPartitioner
	c.Producer.Interceptors = nil
	c.Net.MaxOpenRequests = 1
	c.Metadata.AllowAutoTopicCreation = false
	return &c
}

// SafeProducer reports settings that would lose, double or reorder dead letters.
func SafeProducer(c *sarama.Config) error {
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, Unsuitable(format, args...)) }
	if c.Producer.Transaction.ID != "" {
		add("Producer.Transaction.ID: %q: a dead letter is written by itself: leave it empty", c.Producer.Transaction.ID)
	}
	if !c.Version.IsAtLeast(sarama.V0_11_0_0) {
		add("Version: %s has neither headers nor idempotence: set at least 0.11.0.0", c.Version)
	}
	if c.Producer.MaxMessageBytes <= batchOverhead {
		add("Producer.MaxMessageBytes: %d leaves no room for a record", c.Producer.MaxMessageBytes)
	}
	return errors.Join(errs...)
}

// batchOverhead is the size of a batch of one record without the record, in bytes.
const batchOverhead = 128
