// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
)

// maxLevels is the largest number of delays.
const maxLevels = 8

// Config is the adapter's RetryConfig, which says what each field means.
type Config struct {
	Sources   []string
	Group     string
	Delays    []time.Duration
	Topic     string
	MaxParked int
	NoCreate  bool
	Replicas  int16
	Retention time.Duration
}

const (
	defaultRetryTopic = "{topic}.{group}.retry.{level}"
	defaultMaxParked  = 100_000
	defaultRetention  = 7 * 24 * time.Hour
	// retryMargin is how much longer than its delay a retry topic must keep messages.
	retryMargin  = time.Hour
	maxDelay     = 720 * time.Hour
	maxFetchWait = 250 * time.Millisecond
)

// Validate reports everything wrong at once.
func (c Config) Validate() error {
	var errs []error
	add := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("kafka: RetryConfig."+format, args...))
	}
	topic := cmp.Or(c.Topic, defaultRetryTopic)
	if bare := strings.NewReplacer("{topic}", "t", "{group}", "g", "{level}", "1").Replace(topic); !cluster.ValidTopic(bare) {
		add("Topic: %q is not a topic's name of letters, digits, '.', '_' and '-' with {topic}, {group} and {level}", c.Topic)
	} else if len(c.Delays) > 1 && !strings.Contains(topic, "{level}") {
		add("Topic: %q has no {level}: each needs a topic of its own", c.Topic)
	}
	if len(c.Sources) > 1 && !strings.Contains(topic, "{topic}") {
		add("Topic: %q has no {topic}: each source needs topics of its own", c.Topic)
	}
	if c.Group == "" {
		add("Group: must not be empty")
	}
	if len(c.Sources) == 0 {
		add("Sources: at least one is needed")
	}
	if len(c.Delays) == 0 || len(c.Delays) > maxLevels {
		add("Delays: %d of them: from 1 to %d are needed", len(c.Delays), maxLevels)
	}
	for i, d := range c.Delays {
		if d < time.Millisecond || d > maxDelay {
			add("Delays[%d]: %s is not within 1ms and %s", i, d, maxDelay)
		} else if i > 0 && d <= c.Delays[i-1] {
			add("Delays[%d]: %s does not ascend after %s", i, d, c.Delays[i-1])
		}
	}
	names := map[string]string{}
	for _, s := range c.Sources {
		if !cluster.ValidTopic(s) {
			add("Sources: %q is not a topic's name", s)
			continue
		}
		if _, twice := names[s]; twice {
			add("Sources: %q is named twice, or a retry topic of another", s)
		}
		names[s] = s
		for level := range c.Delays {
			name := c.Name(s, level+1)
			if of, taken := names[name]; taken {
				add("Topic: %q, level %d of %q, is taken by %q", name, level+1, s, of)
			} else if !cluster.ValidTopic(name) {
				add("Topic: %q is not a topic's name", name)
			}
			names[name] = s
		}
	}
	if c.MaxParked < 0 || c.MaxParked > 10_000_000 {
		add("MaxParked: %d is not within 1 and 10000000", c.MaxParked)
	}
	if c.Replicas < 0 {
		add("Replicas: %d is not within 1 and 32767", c.Replicas)
	}
	if c.Retention != 0 && c.Retention < retryMargin {
		add("Retention: %s is not at least %s", c.Retention, retryMargin)
	}
	return errors.Join(errs...)
}

// Name is the retry topic of a level, from 1.
func (c Config) Name(source string, level int) string {
	return strings.NewReplacer("{topic}", source, "{group}", cluster.InTopic(c.Group), "{level}", strconv.Itoa(level)).
		Replace(cmp.Or(c.Topic, defaultRetryTopic))
}
