// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/retry"
	"github.com/stormguard-mq/stormguard/guard"
)

// Target says what [Inspect] looks at.
type Target struct {
	// DLQ names the topics in its Sources, and says where their dead letters go.
	DLQ DLQConfig

	// Retry describes the group's retry topics; nil if it has none.
	Retry *RetryConfig

	// Hold is the longest outage, of the dependency or of all consumers, that must not lose
	// messages. Unset means 1h; not below 0.
	Hold time.Duration
}

// Inspect looks for settings of a consumer's client, its topics and their dead-letter topics that
// would lose, repeat or hide messages. It changes nothing. client is the client of the consumer
// group, or has the same configuration. Inspect does not repeat what [Check] refuses.
//
// An error says what is wrong with the arguments, or what could not be asked. In the second case
// the other findings come with it.
func Inspect(client sarama.Client, t Target) ([]guard.Finding, error) {
	err := t.DLQ.Validate()
	if t.Retry != nil {
		err = errors.Join(err, t.Retry.Validate())
	}
	if client == nil {
		err = errors.Join(err, errors.New("kafka: Inspect: the client must not be nil"))
	}
	if t.Hold < 0 {
		err = errors.Join(err, fmt.Errorf("kafka: Target.Hold: %s is below 0", t.Hold))
	}
	if err != nil {
		return nil, err
	}
	if t.Hold == 0 {
		t.Hold = time.Hour
	}
	in, err := cluster.NewAdmin(client)
	if err != nil {
		return nil, err
	}
	i := &inspection{in: in, client: client, hold: t.Hold}
	i.settings()
	errs := []error{i.broker()}
	errs = append(errs, i.topics(t.DLQ))
	if t.Retry != nil {
		found, err := retry.Inspect(client, in, retry.Config(*t.Retry), t.Hold)
		i.findings = append(i.findings, found...)
		errs = append(errs, err)
	}
	return i.findings, errors.Join(errs...)
}

// inspection collects findings.
type inspection struct {
	in       *cluster.Admin
	client   sarama.Client
	hold     time.Duration
	findings cluster.Findings
}

// settings looks at the client's settings.
func (i *inspection) settings() {
	c := i.client.Config()
	if c.Consumer.Offsets.Initial == sarama.OffsetNewest {
		i.findings.Add(guard.Danger, "client", "Consumer.Offsets.Initial = OffsetOldest",
			"Consumer.Offsets.Initial is OffsetNewest: of a partition that is added, what was published before the group finds it (up to %s) is skipped", c.Metadata.RefreshFrequency)
	}
	if a := c.Consumer.Offsets.AutoCommit; a.Enable && a.Interval > 10*time.Second {
		i.findings.Add(guard.Warning, "client", "Consumer.Offsets.AutoCommit.Interval = time.Second",
			"Consumer.Offsets.AutoCommit.Interval is %s: a process that is killed handles the messages of that time again; of a busy partition, the last 512 or those of the last second", a.Interval)
	}
	if c.Consumer.Offsets.Retry.Max == 0 {
		i.findings.Add(guard.Warning, "client", "Consumer.Offsets.Retry.Max = 3", "Consumer.Offsets.Retry.Max is 0: the last commit of a session is tried once")
	}
	if !c.Consumer.Return.Errors {
		i.findings.Add(guard.Warning, "client", "Consumer.Return.Errors = true, and go guardkafka.WatchErrors(ctx, group, log)",
			"Consumer.Return.Errors is off: a commit that fails is told to sarama.Logger alone")
	}
	if m := c.Consumer.MaxProcessingTime; cooperative(c) && 2*m+yieldSlack > maxYield {
		i.findings.Add(guard.Notice, "client", "Consumer.MaxProcessingTime = 100 * time.Millisecond",
			"Consumer.MaxProcessingTime is %s: a cooperative revoke of one partition waits until the others of its broker have taken all that was fetched for them", m)
	}
	if s, h := c.Consumer.Group.Session.Timeout, c.Consumer.Group.Heartbeat.Interval; h > s/3 {
		i.findings.Add(guard.Warning, "client", "Consumer.Group.Heartbeat.Interval = a third of Session.Timeout or less",
			"Consumer.Group.Heartbeat.Interval is %s of a session of %s: two lost heartbeats cost the session", h, s)
	}
	// The answer to a join comes when the slowest member has joined.
	if read, rebalance := c.Net.ReadTimeout, c.Consumer.Group.Rebalance.Timeout; read < rebalance {
		i.findings.Add(guard.Notice, "client", fmt.Sprintf("Net.ReadTimeout = %s, or a lower Rebalance.Timeout; a broker that is silent delays a stop by the former", rebalance),
			"Net.ReadTimeout is %s: a rebalance in which another member takes longer, up to %s, is an error of this one's Consume", read, rebalance)
	}
}

// broker looks at broker settings that the group depends on.
func (i *inspection) broker() error {
	controller, err := i.client.Controller()
	if err != nil {
		return fmt.Errorf("kafka: controller: %w", err)
	}
	s, err := i.in.Settings(sarama.BrokerResource, fmt.Sprint(controller.ID()))
	if err != nil {
		return fmt.Errorf("kafka: settings of broker %d: %w", controller.ID(), err)
	}
	if s["unclean.leader.election.enable"] == "true" {
		i.findings.Add(guard.Danger, "broker", "unclean.leader.election.enable=false",
			"unclean.leader.election.enable is on: a replica that lags may become leader, and confirmed messages are gone")
	}
	if s["auto.create.topics.enable"] == "true" {
		i.findings.Add(guard.Warning, "broker", "auto.create.topics.enable=false",
			"auto.create.topics.enable is on: a topic that is deleted, or misspelt, comes back empty instead of being an error")
	}
	return nil
}

// topics looks at the topics of a DLQ's sources and at their dead-letter topics.
func (i *inspection) topics(cfg DLQConfig) error {
	var errs []error
	need := map[string]demands{}
	sources := map[string]*cluster.Topic{}
	for _, source := range cfg.Sources {
		from, err := i.in.Topic(source)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if sources[source] = from; from != nil {
			name := cfg.name(source)
			need[name] = need[name].and(from)
		}
	}
	for _, source := range cfg.Sources {
		if from, asked := sources[source]; asked {
			errs = append(errs, i.topic(source, from, cfg, need))
		}
	}
	return errors.Join(errs...)
}

// topic looks at a source, nil if it does not exist, and at its dead-letter topic.
func (i *inspection) topic(source string, from *cluster.Topic, cfg DLQConfig, need map[string]demands) error {
	name := cfg.name(source)
	to, err := i.in.Topic(name)
	if err != nil {
		return err
	}
	if from == nil {
		i.findings.Add(guard.Danger, "topic "+source, "check the name and the right to describe it, or create it", "it does not exist, or may not be seen")
		return nil
	}
	i.findings = append(i.findings, i.in.Durable(from)...)
	if keeps := from.Retention(); keeps > 0 && keeps < i.hold {
		i.findings.Add(guard.Danger, "topic "+source, i.in.Alter(source, fmt.Sprintf("retention.ms=%d", i.hold.Milliseconds())),
			"it keeps messages for %s: in an outage of %s they are deleted while they wait", keeps, i.hold)
	}
	if n := from.Number("retention.bytes", -1); n > 0 {
		i.findings.Add(guard.Danger, "topic "+source, i.in.Alter(source, "retention.bytes=-1"),
			"it keeps %d bytes of a partition: in an outage what waits is deleted beyond them", n)
	}
	if to == nil {
		i.findings.Add(guard.Warning, "topic "+name, i.in.CreateCommand(cfg.newTopic(name, need[name])), "it does not exist: dead letters of %s wait", source)
		return from.Refused
	}
	i.findings = append(i.findings, i.in.Durable(to)...)
	i.deadLetters(from, to, cfg.newTopic(name, need[name]))
	return errors.Join(from.Refused, to.Refused)
}

// deadLetters holds the dead-letter topic of a source against the topic that [NewDLQ] would create.
func (i *inspection) deadLetters(from, to *cluster.Topic, want cluster.NewTopic) {
	where := "topic " + to.Name
	if to.Compacts() {
		i.findings.Add(guard.Danger, where, i.in.Alter(to.Name, "cleanup.policy=delete"), "cleanup.policy is %s: of each key only the last dead letter stays", to.Settings["cleanup.policy"])
	}
	keeps, longer := to.Retention(), from.Retention()
	if from.Refused == nil && keeps > 0 && (longer == 0 || keeps < longer) {
		i.findings.Add(guard.Warning, where, i.in.Alter(to.Name, "retention.ms=-1"), "it keeps dead letters for %s, %s keeps messages %s: they are gone before those they came from",
			keeps, from.Name, retentionText(longer))
	}
	if n := to.Number("retention.bytes", -1); n > 0 {
		i.findings.Add(guard.Danger, where, i.in.Alter(to.Name, "retention.bytes=-1"), "it keeps %d bytes of a partition: a storm deletes the dead letters from before it", n)
	}
	if keeps > 0 && strings.EqualFold(to.Settings["message.timestamp.type"], "CreateTime") {
		i.findings.Add(guard.Danger, where, i.in.Alter(to.Name, "message.timestamp.type=LogAppendTime"),
			"its retention of %s counts from the message's own time, so the dead letter of an old message may be deleted at once", keeps)
	}
	// DLQConfig.Partitions may be below a source's on purpose: that is no finding.
	if to.Partitions < min(from.Partitions, want.Partitions) {
		i.findings.Add(guard.Notice, where, i.in.AddPartitions(to.Name, want.Partitions),
			"it has %d partitions, %s has %d: dead letters do not keep their partition", to.Partitions, from.Name, from.Partitions)
	}
	if have, its := to.Number("max.message.bytes", 0), from.Number("max.message.bytes", 0); from.Refused == nil && have > 0 && its > 0 && have < its+cluster.HeaderRoom {
		i.findings.Add(guard.Warning, where, i.in.Alter(to.Name, "max.message.bytes="+want.Settings["max.message.bytes"]),
			"max.message.bytes is %d, of %s %d: the dead letter of a large message can never be written, and waits", have, from.Name, its)
	}
}

func retentionText(d time.Duration) string {
	if d == 0 {
		return "for ever"
	}
	return "for " + d.String()
}
