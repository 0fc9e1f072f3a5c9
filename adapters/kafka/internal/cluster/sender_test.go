// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/IBM/sarama"
)

// hangingProducer answers writes to the topic "hangs" only when it is closed.
type hangingProducer struct {
	sarama.SyncProducer

	answers chan struct{}
}

func (p *hangingProducer) SendMessage(m *sarama.ProducerMessage) (int32, int64, error) {
	if m.Topic == "hangs" {
		<-p.answers
	}
	return m.Partition, 7, nil
}

func (*hangingProducer) Close() error { return nil }

type noClient struct{ sarama.Client }

func (noClient) Close() error { return nil }

// Writes that were given up, and that the broker has not answered, take no place of writes to
// other partitions. Another write to a partition with such a write fails at once.
func TestWritesThatWereGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &hangingProducer{answers: make(chan struct{})}
		s := &Sender{Client: noClient{}, producer: p, slots: make(chan struct{}, maxWrites), abandoned: make(map[place]int)}
		send := func(topic string, partition int32) (time.Duration, error) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			start := time.Now()
			_, err := s.Send(ctx, &sarama.ProducerMessage{Topic: topic, Partition: partition})
			return time.Since(start), err
		}
		for partition := range int32(maxWrites) {
			if _, err := send("hangs", partition); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("partition %d: %v", partition, err)
			}
		}
		if took, err := send("hangs", 0); took > 0 || err == nil || !strings.Contains(err.Error(), "an earlier write to partition 0 of hangs") {
			t.Errorf("a second write to a partition, after %s: %v", took, err)
		}
		if took, err := send("well", 0); err != nil {
			t.Errorf("a write to another topic, after %s: %v", took, err)
		}
		if err := s.Close(); err == nil || !strings.Contains(err.Error(), "16 writes under way") {
			t.Errorf("Close: %v", err)
		}
		close(p.answers)
		synctest.Wait()
		if n := s.underWay(); n > 0 {
			t.Errorf("%d writes are under way", n)
		}
	})
}

// A partition takes writes again once the broker has answered the one that was given up.
func TestWriteAfterAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &hangingProducer{answers: make(chan struct{})}
		s := &Sender{Client: noClient{}, producer: p, slots: make(chan struct{}, maxWrites), abandoned: make(map[place]int)}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.Send(ctx, &sarama.ProducerMessage{Topic: "hangs"}); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		close(p.answers)
		synctest.Wait()
		if at, err := s.Send(t.Context(), &sarama.ProducerMessage{Topic: "hangs"}); at != 7 || err != nil {
			t.Errorf("%d, %v", at, err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}
