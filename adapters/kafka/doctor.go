// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/IBM/sarama"
)

// Finding is something about a client, a topic or a broker that works against
// what the guard promises, and that nothing refuses.
type Finding struct {
	Where string // "client", "topic orders", "topic orders.dlq", "broker"
	What  string // what is set, and what it does
	Fix   string // the setting or command that mends it
}

func (f Finding) String() string { return f.Where + ": " + f.What + ": " + f.Fix }

// doctor collects findings.
type doctor struct {
	in       *inspector
	client   sarama.Client
	findings []Finding
}

func (d *doctor) add(where, fix, what string, args ...any) {
	d.findings = append(d.findings, Finding{where, fmt.Sprintf(what, args...), fix})
}

// Doctor looks at a consumer's client, at the topics that it reads and at their
// dead-letter topics, and says what would lose or hide messages. It changes
// nothing. cfg.Sources are the topics. client is that of the consumer group, or
// one of the same configuration. The error is about what could not be asked; the
// findings there are come with it. What [Check] refuses is not repeated.
func Doctor(client sarama.Client, cfg DLQConfig) ([]Finding, error) {
	err := cfg.Validate()
	if client == nil {
		err = errors.Join(err, errors.New("kafka: Doctor: the client must not be nil"))
	}
	if err != nil {
		return nil, err
	}
	in, err := newInspector(client)
	if err != nil {
		return nil, err
	}
	d := &doctor{in: in, client: client}
	d.settings()
	errs := []error{d.broker()}
	for _, source := range cfg.Sources {
		errs = append(errs, d.topics(source, cfg))
	}
	return d.findings, errors.Join(errs...)
}

// settings looks at the client's.
func (d *doctor) settings() {
	c := d.client.Config()
	if c.Consumer.Offsets.Initial == sarama.OffsetNewest {
		d.add("client", "Consumer.Offsets.Initial = OffsetOldest",
			"Consumer.Offsets.Initial is OffsetNewest: of a partition that is added, what was published before the group finds it (up to %s) is skipped", c.Metadata.RefreshFrequency)
	}
	if a := c.Consumer.Offsets.AutoCommit; a.Enable && a.Interval > 10*time.Second {
		d.add("client", "Consumer.Offsets.AutoCommit.Interval = time.Second",
			"Consumer.Offsets.AutoCommit.Interval is %s: a process that is killed handles as much again", a.Interval)
	}
	if c.Consumer.Offsets.Retry.Max == 0 {
		d.add("client", "Consumer.Offsets.Retry.Max = 3", "Consumer.Offsets.Retry.Max is 0: the last commit of a session is tried once")
	}
	if !c.Consumer.Return.Errors {
		d.add("client", "Consumer.Return.Errors = true, and go kafka.WatchErrors(ctx, group, log)",
			"Consumer.Return.Errors is off: a commit that fails is told to sarama.Logger alone")
	}
	if s, h := c.Consumer.Group.Session.Timeout, c.Consumer.Group.Heartbeat.Interval; h > s/3 {
		d.add("client", "Consumer.Group.Heartbeat.Interval = a third of Session.Timeout or less",
			"Consumer.Group.Heartbeat.Interval is %s of a session of %s: two lost heartbeats cost the session", h, s)
	}
}

// broker looks at what the group depends on.
func (d *doctor) broker() error {
	controller, err := d.client.Controller()
	if err != nil {
		return fmt.Errorf("kafka: controller: %w", err)
	}
	s, err := d.in.settings(sarama.BrokerResource, fmt.Sprint(controller.ID()))
	if err != nil {
		return fmt.Errorf("kafka: settings of broker %d: %w", controller.ID(), err)
	}
	if s["unclean.leader.election.enable"] == "true" {
		d.add("broker", "unclean.leader.election.enable=false",
			"unclean.leader.election.enable is on: a replica that lags may become leader, and confirmed messages are gone")
	}
	if s["auto.create.topics.enable"] == "true" {
		d.add("broker", "auto.create.topics.enable=false",
			"auto.create.topics.enable is on: a topic that is deleted, or misspelt, comes back empty instead of being an error")
	}
	return nil
}

// topics looks at a topic and at where its dead letters go.
func (d *doctor) topics(source string, cfg DLQConfig) error {
	from, err := d.in.topic(source)
	if err != nil {
		return err
	}
	name := cfg.name(source)
	to, err := d.in.topic(name)
	if err != nil {
		return err
	}
	if from == nil {
		d.add("topic "+source, "create it", "it does not exist")
		return nil
	}
	d.durable(from)
	if to == nil {
		letters := &DLQ{cfg: cfg}
		want := demands{from.partitions, from.number("max.message.bytes", 0)}
		d.add("topic "+name, letters.createCommand(d.in, name, want), "it does not exist: dead letters of %s wait", source)
		return nil
	}
	d.durable(to)
	d.deadLetters(from, to)
	return nil
}

func (d *doctor) durable(t *topicInfo) {
	where := "topic " + t.name
	if t.replicas == 1 {
		d.add(where, "more replicas: kafka-reassign-partitions.sh", "it has one replica: the disk of one broker is all there is")
	}
	if t.replicas > 2 && t.number("min.insync.replicas", 1) == 1 {
		d.add(where, d.alter(t.name, "min.insync.replicas=2"), "min.insync.replicas is 1: a write is confirmed although one broker alone has it")
	}
	if t.settings["unclean.leader.election.enable"] == "true" {
		d.add(where, d.alter(t.name, "unclean.leader.election.enable=false"), "unclean.leader.election.enable is on: confirmed messages may be gone after a change of leader")
	}
}

func (d *doctor) deadLetters(from, to *topicInfo) {
	where := "topic " + to.name
	if to.compacts() {
		d.add(where, d.alter(to.name, "cleanup.policy=delete"), "cleanup.policy is %s: of each key only the last dead letter stays", to.settings["cleanup.policy"])
	}
	keeps, longer := to.retention(), from.retention()
	if keeps > 0 && (longer == 0 || keeps < longer) {
		d.add(where, d.alter(to.name, "retention.ms=-1"), "it keeps dead letters for %s, %s keeps messages %s: they are gone before those they came from",
			keeps, from.name, retentionText(longer))
	}
	if n := to.number("retention.bytes", -1); n > 0 {
		d.add(where, d.alter(to.name, "retention.bytes=-1"), "it keeps %d bytes of a partition: a storm deletes the dead letters from before it", n)
	}
	if keeps > 0 && strings.EqualFold(to.settings["message.timestamp.type"], "CreateTime") {
		d.add(where, d.alter(to.name, "message.timestamp.type=LogAppendTime"),
			"its retention of %s counts from the message's own time, so the dead letter of an old message may be deleted at once", keeps)
	}
	if to.partitions < from.partitions {
		d.add(where, fmt.Sprintf("kafka-topics.sh --bootstrap-server %s --alter --topic %s --partitions %d", d.in.addrs, to.name, from.partitions),
			"it has %d partitions, %s has %d: dead letters do not keep their partition", to.partitions, from.name, from.partitions)
	}
	if have, want := to.number("max.message.bytes", 0), from.number("max.message.bytes", 0); have > 0 && have < want+headerRoom {
		d.add(where, d.alter(to.name, fmt.Sprintf("max.message.bytes=%d", want+headerRoom)),
			"max.message.bytes is %d, of %s %d: the dead letter of a large message can never be written, and waits", have, from.name, want)
	}
}

// alter is the command that changes a setting of a topic.
func (d *doctor) alter(topic, setting string) string {
	return fmt.Sprintf("%s --alter --entity-type topics --entity-name %s --add-config %s", d.in.configs(), topic, setting)
}

func retentionText(d time.Duration) string {
	if d == 0 {
		return "for ever"
	}
	return "for " + d.String()
}
