// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

// Target names the streams and consumer that [Inspect] checks, and the limits to check.
type Target struct {
	// Stream and Consumer name the guarded consumer and its stream.
	Stream, Consumer string

	// DLQ is the stream of dead letters; unset means that no such stream is checked.
	DLQ string

	// Policy is the guard's policy; the zero value means the defaults.
	Policy guard.Policy

	// Hold is the longest outage, of the dependency or of all consumers, that must not
	// lose a message. Unset means 1h; not below 0.
	Hold time.Duration

	// HandlerTime is the longest time to handle one message. Unset means Policy.Timeout,
	// with its default of 30s; not below 0.
	HandlerTime time.Duration
}

func (t Target) validate() error {
	var errs []error
	if t.Stream == "" {
		errs = append(errs, errors.New("nats: Target.Stream: must not be empty"))
	}
	if t.Consumer == "" {
		errs = append(errs, errors.New("nats: Target.Consumer: must not be empty"))
	}
	if t.Hold < 0 {
		errs = append(errs, fmt.Errorf("nats: Target.Hold: %s is below 0", t.Hold))
	}
	if t.HandlerTime < 0 {
		errs = append(errs, fmt.Errorf("nats: Target.HandlerTime: %s is below 0", t.HandlerTime))
	}
	return errors.Join(append(errs, t.Policy.Validate())...)
}

// Inspect looks for settings of a consumer and its streams that would lose, repeat or delay
// messages. It changes nothing, and costs at most four requests. An error means that it could
// not look, and says why.
func Inspect(ctx context.Context, js jetstream.JetStream, t Target) ([]guard.Finding, error) {
	if err := t.validate(); err != nil {
		return nil, err
	}
	if t.Hold == 0 {
		t.Hold = time.Hour
	}
	if t.HandlerTime == 0 && !t.Policy.NoTimeout {
		t.HandlerTime = cmp.Or(t.Policy.Timeout, 30*time.Second)
	}
	stream, err := js.Stream(ctx, t.Stream)
	if err != nil {
		return nil, fmt.Errorf("nats: inspect stream %s: %w", t.Stream, err)
	}
	consumer, err := stream.Consumer(ctx, t.Consumer)
	if err != nil {
		return nil, fmt.Errorf("nats: inspect consumer %s of stream %s: %w", t.Consumer, t.Stream, err)
	}
	i := inspection{Target: t}
	i.source(stream.CachedInfo())
	i.consumer(consumer.CachedInfo().Config, stream.CachedInfo().Config.Replicas)
	if d := consumer.CachedInfo().Config.MaxDeliver; d > 0 {
		advisory := fmt.Sprintf(maxDeliveriesSubject, t.Stream, t.Consumer)
		switch _, err := js.StreamNameBySubject(ctx, advisory); {
		case errors.Is(err, jetstream.ErrStreamNotFound):
			i.add(guard.Danger, i.consumerName(), "run guardnats.NewMover, or set MaxDeliver to -1: the guard counts attempts itself",
				"MaxDeliver is %d, and no stream keeps the advisories: a message that crashes its handler %d times stays in the stream, and nobody is told", d, d)
		case err != nil:
			return nil, fmt.Errorf("nats: inspect who keeps %s: %w", advisory, err)
		}
	}
	if t.DLQ != "" {
		switch dead, err := js.Stream(ctx, t.DLQ); {
		case errors.Is(err, jetstream.ErrStreamNotFound):
			missing := DLQConfig{Stream: t.DLQ, Replicas: stream.CachedInfo().Config.Replicas}.withDefaults().newStream()
			i.add(guard.Warning, "stream "+t.DLQ, addCommand(&missing), "it does not exist: dead letters wait")
		case err != nil:
			return nil, fmt.Errorf("nats: inspect stream %s: %w", t.DLQ, err)
		default:
			i.dlq(dead.CachedInfo().Config, stream.CachedInfo().Config)
		}
	}
	return i.findings, nil
}

// maxDeliveriesSubject is the subject on which the server reports a message that it will not
// deliver again.
const maxDeliveriesSubject = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.%s.%s"

type inspection struct {
	Target
	findings []guard.Finding
}

func (i *inspection) add(s guard.Severity, where, fix, what string, args ...any) {
	i.findings = append(i.findings, guard.Finding{Severity: s, Where: where, What: fmt.Sprintf(what, args...), Fix: fix})
}

func (i *inspection) consumerName() string { return "consumer " + i.Stream + "/" + i.Consumer }

// source checks the stream, which keeps the held messages.
func (i *inspection) source(info *jetstream.StreamInfo) {
	c, where := info.Config, "stream "+i.Stream
	if c.MaxAge > 0 && c.MaxAge < i.Hold {
		i.add(guard.Danger, where, fmt.Sprintf("nats stream edit %s --max-age=%s", i.Stream, i.Hold),
			"MaxAge is %s: in an outage of %s messages are dropped while they wait", c.MaxAge, i.Hold)
	}
	if limits, fix := drops(&c); limits != "" {
		i.add(guard.Danger, where, fix, "it discards old messages at %s: those that wait first", limits)
	}
	if c.Storage == jetstream.MemoryStorage {
		i.add(guard.Danger, where, "keep it in files", "it is in memory: a restart of the server loses what waits")
	}
}

// drops returns the limits at which a stream drops its oldest messages, and the command that
// prevents it.
func drops(c *jetstream.StreamConfig) (limits, fix string) {
	fix = "nats stream edit " + c.Name
	if dropsOldest(c) {
		limits = fmt.Sprintf("MaxMsgs %d, MaxBytes %d", c.MaxMsgs, c.MaxBytes)
		fix += " --discard=new"
	}
	if dropsOfSubject(c) {
		if limits != "" {
			limits += ", "
		}
		limits += fmt.Sprintf("MaxMsgsPerSubject %d", c.MaxMsgsPerSubject)
		fix += " --max-msgs-per-subject=-1"
	}
	return limits, fix
}

// consumer checks the consumer's settings for deliveries. replicas is the stream's setting.
func (i *inspection) consumer(c jetstream.ConsumerConfig, replicas int) {
	where := i.consumerName()
	edit := fmt.Sprintf("nats consumer edit %s %s ", i.Stream, i.Consumer)
	if c.AckPolicy != jetstream.AckExplicitPolicy {
		i.add(guard.Danger, where, "make it anew with AckExplicit", "its ack policy is %s: a message is settled without its own ack", c.AckPolicy)
		return
	}
	wait := c.AckWait
	for _, d := range c.BackOff {
		wait = min(wait, d)
	}
	switch {
	case wait < time.Second:
		i.add(guard.Warning, where, edit+"--wait=30s",
			"AckWait (or the shortest BackOff) is %s: held messages are extended every %s, and one pause of the process repeats them", wait, wait/3)
	case wait < i.HandlerTime:
		i.add(guard.Warning, where, edit+fmt.Sprintf("--wait=%s", i.HandlerTime),
			"AckWait (or the shortest BackOff) is %s, and a message may be handled for %s: under WrapConsumer it has failed by then and is handed out beside its handler; under Consume it is kept alive by extensions alone", wait, i.HandlerTime)
	}
	if len(c.BackOff) > 0 {
		i.add(guard.Notice, where, "make it anew without BackOff", "BackOff spaces deliveries, not attempts: with the guard it only shortens AckWait")
	}
	if window := i.Policy.Window; c.MaxAckPending > 0 && c.MaxAckPending < window {
		i.add(guard.Warning, where, fmt.Sprintf("%s--max-pending=%d", edit, window),
			"MaxAckPending is %d, and Policy.Window %d: the source will not open", c.MaxAckPending, window)
	}
	severity, then := guard.Warning, "a new one begins at the start of the stream"
	if c.DeliverPolicy != jetstream.DeliverAllPolicy {
		severity, then = guard.Danger, "a new one passes what was not handled"
	}
	if c.MemoryStorage && cmp.Or(c.Replicas, replicas) <= 1 {
		i.add(severity, where, "make it anew without MemoryStorage, from behind its ack floor on (DeliverByStartSequence)",
			"it is in memory, and has one replica: a restart of the server deletes it with its position, and %s", then)
	}
	if c.InactiveThreshold > 0 && c.InactiveThreshold < i.Hold {
		i.add(severity, where, edit+"--inactive-threshold=0",
			"InactiveThreshold is %s: when no process is connected for longer the server deletes it with its position, and %s", c.InactiveThreshold, then)
	}
	if c.MaxDeliver > 0 && c.MaxDeliver < minMaxDeliver {
		i.add(guard.Warning, where, edit+"--max-deliver=-1",
			"MaxDeliver is %d: each restart of a process counts as a delivery of all it had buffered, so that a rolling restart comes close", c.MaxDeliver)
	}
}

// minMaxDeliver leaves room for a few restarts in addition to crashes of a handler.
const minMaxDeliver = 5

// dlq checks the stream of dead letters.
func (i *inspection) dlq(c, source jetstream.StreamConfig) {
	where := "stream " + i.DLQ
	if c.Storage == jetstream.MemoryStorage {
		i.add(guard.Danger, where, "keep it in files", "it is in memory: a restart of the server loses the dead letters")
	}
	if c.MaxAge > 0 && (source.MaxAge == 0 || c.MaxAge < source.MaxAge) {
		i.add(guard.Warning, where, fmt.Sprintf("nats stream edit %s --max-age=0", i.DLQ),
			"MaxAge is %s, less than the source keeps: a dead letter is gone before what was published with it", c.MaxAge)
	}
	if limits, fix := drops(&c); limits != "" {
		i.add(guard.Danger, where, fix, "it discards old dead letters at %s", limits)
	}
	if c.Replicas < source.Replicas {
		i.add(guard.Warning, where, fmt.Sprintf("nats stream edit %s --replicas=%d", i.DLQ, source.Replicas),
			"it has %d replicas, the source %d: a dead letter is worth as much as its message", c.Replicas, source.Replicas)
	}
}
