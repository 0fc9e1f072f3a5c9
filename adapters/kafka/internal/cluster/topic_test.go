// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/IBM/sarama"
)

// describer is a broker that answers each question by the time since the first.
type describer struct {
	sarama.ClusterAdmin
	begun            time.Time
	topics, settings func(since time.Duration) sarama.KError
}

func (d *describer) DescribeTopics(names []string) ([]*sarama.TopicMetadata, error) {
	m := &sarama.TopicMetadata{Name: names[0], Err: d.topics(time.Since(d.begun)), Partitions: make([]*sarama.PartitionMetadata, 3)}
	for i := range m.Partitions {
		m.Partitions[i] = &sarama.PartitionMetadata{ID: int32(i), Replicas: []int32{1}}
	}
	if m.Err != sarama.ErrNoError {
		m.Partitions = nil
	}
	return []*sarama.TopicMetadata{m}, nil
}

func (d *describer) DescribeConfigs([]*sarama.ConfigResource, sarama.DescribeConfigsOptions) ([]*sarama.ConfigResourceResult, error) {
	return []*sarama.ConfigResourceResult{{ErrorCode: d.settings(time.Since(d.begun))}}, nil
}

// A source that the broker learns of late is waited for, and its settings, too. Another
// error than that it is unknown is told at once.
func TestSourceThatWasJustCreated(t *testing.T) {
	at := func(code sarama.KError, until time.Duration) func(time.Duration) sarama.KError {
		return func(since time.Duration) sarama.KError {
			if since < until {
				return code
			}
			return sarama.ErrNoError
		}
	}
	const ok, unknown, other, late, never = sarama.ErrNoError, sarama.ErrUnknownTopicOrPartition, sarama.ErrInvalidTopic, sourceWait - 100*time.Millisecond, time.Hour
	for name, c := range map[string]struct {
		topics, settings func(time.Duration) sarama.KError
		partitions       int32
		err              error
		takes            time.Duration
	}{
		"at once":                    {at(ok, 0), at(ok, 0), 3, nil, 0},
		"late":                       {at(unknown, late), at(ok, 0), 3, nil, late},
		"its settings late":          {at(ok, 0), at(unknown, late), 3, nil, late},
		"both, one after the other":  {at(unknown, late/2), at(unknown, late), 3, nil, late},
		"never":                      {at(unknown, never), at(ok, 0), 0, nil, sourceWait},
		"its settings never":         {at(ok, 0), at(unknown, never), 0, unknown, sourceWait},
		"another error":              {at(other, never), at(ok, 0), 0, other, 0},
		"another error, of settings": {at(ok, 0), at(other, never), 0, other, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				in := &Admin{ClusterAdmin: &describer{begun: begun, topics: c.topics, settings: c.settings}}
				info, err := in.Source("orders")
				if !errors.Is(err, c.err) || err != nil && c.err == nil || (info != nil) != (c.partitions > 0) || info != nil && info.Partitions != c.partitions {
					t.Errorf("%+v, %v; want %d partitions, %v", info, err, c.partitions, c.err)
				}
				if took := time.Since(begun); took < c.takes || took > c.takes+100*time.Millisecond {
					t.Errorf("it took %v, want %v", took, c.takes)
				}
			})
		})
	}
}
