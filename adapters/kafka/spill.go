// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/guard"
)

var (
	_ guard.Spiller[*sarama.ConsumerMessage] = (*claim)(nil)
	_ guard.Spiller[*sarama.ConsumerMessage] = leftPort{}
)

// spillHead is a message in the spill without its value.
type spillHead struct {
	Topic     string                 `json:"topic"`
	Partition int32                  `json:"partition"`
	Offset    int64                  `json:"offset"`
	Timestamp *int64                 `json:"timestamp,omitempty"` // Unix milliseconds: JSON has no time beyond the year 9999
	BlockTime *int64                 `json:"block_timestamp,omitempty"`
	Key       []byte                 `json:"key"`
	Headers   []*sarama.RecordHeader `json:"headers,omitempty"`
	Tombstone bool                   `json:"tombstone,omitempty"` // Value is nil, and not empty
}

// Spill implements [guard.Spiller].
func (c *claim) Spill(m *sarama.ConsumerMessage) (head, body []byte, err error) {
	c.spilledAt.Store(time.Now().UnixNano())
	head, err = json.Marshal(spillHead{
		m.Topic, m.Partition, m.Offset, toMillis(m.Timestamp), toMillis(m.BlockTimestamp), m.Key, m.Headers, m.Value == nil,
	})
	return head, m.Value, err
}

func toMillis(t time.Time) *int64 {
	if t.IsZero() {
		return nil
	}
	ms := t.UnixMilli()
	return &ms
}

func fromMillis(ms *int64) time.Time {
	if ms == nil {
		return time.Time{}
	}
	return time.UnixMilli(*ms)
}

// Unspill implements [guard.Spiller].
func (c *claim) Unspill(head, body []byte) (*sarama.ConsumerMessage, error) {
	var h spillHead
	if err := json.Unmarshal(head, &h); err != nil {
		return nil, fmt.Errorf("kafka: a message in the spill: %w", err)
	}
	c.unspilled.Store(max(c.unspilled.Load(), h.Offset+1)) // the guard reads the spill in one goroutine at a time
	if h.Tombstone {
		body = nil
	}
	return &sarama.ConsumerMessage{
		Topic: h.Topic, Partition: h.Partition, Offset: h.Offset, Timestamp: fromMillis(h.Timestamp), BlockTimestamp: fromMillis(h.BlockTime),
		Key: h.Key, Headers: h.Headers, Value: body,
	}, nil
}

// spillCommits is how long after the latest spilled message marks are committed soon.
const spillCommits = 5 * time.Second

// commitSoon commits all marks on its own goroutine: one request at a time, and one more for marks
// that came meanwhile, a tenth of AutoCommit.Interval later, 1s at most: without a pause a fast
// consumer loses 4% of its throughput. With AutoCommit off the program commits, and when the
// session has ended sarama does: then commitSoon does nothing.
func (ss *session) commitSoon() {
	auto := ss.set.config.Consumer.Offsets.AutoCommit
	if !auto.Enable || ss.native.Context().Err() != nil || ss.commits.Add(1) > 1 {
		return
	}
	go func() { // ends a pause after its last request, or with the session
		for {
			asked := ss.commits.Load()
			ss.native.Commit()
			select {
			case <-time.After(min(auto.Interval/10, time.Second)):
			case <-ss.native.Context().Done():
				return
			}
			if ss.commits.CompareAndSwap(asked, 0) {
				return
			}
		}
	}()
}

// left is a source for a partition that this process has lost, or does not have yet. It handles
// the partition's messages in the spill.
type left struct {
	end  context.CancelFunc
	done chan struct{} // closed when the source has ended
}

// lefts has the sources of all sessions' lefts as keys, of type guard.Control: a claim of another
// member in this process can end them, too.
var lefts sync.Map

// leftPort is the port of a left. Its messages are all in the spill, and acked.
type leftPort struct{ *claim }

func (leftPort) Size(*sarama.ConsumerMessage) int                     { return 0 }
func (leftPort) Ack(*sarama.ConsumerMessage) error                    { return nil }
func (leftPort) Return([]*sarama.ConsumerMessage, guard.Reason) error { return nil }
func (leftPort) Demand(int)                                           {}
func (leftPort) Flush() error                                         { return nil }
func (leftPort) Lag() int64                                           { return 0 }
func (leftPort) Ahead() int                                           { return 0 }
func (p leftPort) Meta(m *sarama.ConsumerMessage) guard.Meta          { return p.describe(m) }

// seen adds topics to those that the handler knows, and returns all of them: the topics of its
// claims, of [Consume], and those that the group has named.
func (h *handler) seen(topics []string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, topic := range topics {
		if !slices.Contains(h.topics, topic) {
			h.topics = append(h.topics, topic)
		}
	}
	return slices.Clone(h.topics)
}

// spilled finds partitions without a claim that have messages in the spill. These messages are
// committed, so nobody else would handle them. more tells that the spill also has messages of
// topics that the handler does not know.
func (ss *session) spilled() (found map[string]place, more bool) {
	claims := ss.native.Claims()
	known := ss.h.seen(slices.Collect(maps.Keys(claims)))
	found = make(map[string]place)
	prefix := strings.TrimSuffix(sourceName(ss.h.opts.name, "", 0), "/0")
	for name := range ss.h.g.Spilled() {
		rest, ours := strings.CutPrefix(name, prefix)
		topic, number, _ := strings.Cut(rest, "/")
		partition, err := strconv.ParseInt(number, 10, 32)
		switch {
		case !ours || err != nil || slices.Contains(claims[topic], int32(partition)):
		case slices.Contains(known, topic):
			found[name] = place{topic, int32(partition)}
		default:
			more = true
		}
	}
	return found, more
}

// drainSpilled opens a source for each partition that spilled finds.
func (ss *session) drainSpilled() {
	found, _ := ss.spilled()
	for name, at := range found {
		ss.drainLeft(name, at.topic, at.partition)
	}
}

// learn asks the group for the topics of this member if the spill has messages of a topic that
// the handler does not know. It asks until the group has answered once in the session. In a
// program's own loop, without [Consume], the handler knows only the topics of its claims.
func (w *watcher) learn() {
	ss := w.ss
	if w.learned || ss.joined || ss.h.passive() {
		return
	}
	if _, more := ss.spilled(); !more {
		return
	}
	topics, err := ss.topics()
	if err != nil {
		if w.unlearned++; w.unlearned == silentLooks {
			ss.h.opts.log.Warn("what is in the spill of topics without a claim waits: the group does not tell this member's topics", "group", ss.set.group, "error", err)
		}
		return
	}
	w.learned = true
	ss.h.seen(topics)
	ss.drainSpilled()
}

// topics asks the group for the topics of this member.
func (ss *session) topics() ([]string, error) {
	admin, err := cluster.NewAdmin(ss.set.client)
	if err != nil {
		return nil, err
	}
	groups, err := admin.DescribeConsumerGroups([]string{ss.set.group})
	if err == nil && len(groups) == 1 && groups[0].ErrorCode != 0 {
		err = sarama.KError(groups[0].ErrorCode)
	}
	if err != nil { // as in committed
		return nil, errors.Join(err, ss.set.client.RefreshCoordinator(ss.set.group))
	}
	for _, group := range groups {
		if m := group.Members[ss.native.MemberID()]; m != nil && len(m.MemberMetadata) > 0 {
			meta, err := m.GetMemberMetadata()
			if err != nil {
				return nil, err
			}
			return meta.Topics, nil
		}
	}
	return nil, errors.New("it rebalances, or does not have the member")
}

// drainLeft opens a source for the messages of a partition in the spill. The source ends when it
// has handled all, when a claim of the partition comes, or with the session. It owns two
// goroutines until then.
func (ss *session) drainLeft(name, topic string, partition int32) {
	if ss.h.passive() {
		return
	}
	ctx, cancel := context.WithCancel(ss.native.Context())
	l := &left{cancel, make(chan struct{})}
	ss.mu.Lock()
	if ss.over || ss.left[name] != nil {
		ss.mu.Unlock()
		cancel()
		return
	}
	ss.left[name] = l
	ss.mu.Unlock()
	go func() {
		defer close(l.done)
		defer ss.forget(name, l)
		defer cancel()
		c := &claim{topic: topic, partition: partition, group: ss.set.group, name: name, key: ss.h.opts.key, seed: seed}
		src, err := guard.Open(ss.h.g, ss.sourceConfig(c), guard.Limits{RevokeGrace: limits(ss.set.config).RevokeGrace}, guard.Port[*sarama.ConsumerMessage](leftPort{c}), ss.guarded(nil))
		if err != nil {
			ss.h.opts.log.Warn("what is in the spill of a partition waits there", "source", name, "error", err)
			return
		}
		ss.h.opts.log.Info("handling what is in the spill of a partition that this process does not have", "source", name, "messages", src.Account().Held)
		lefts.Store(guard.Control(src), nil)
		defer lefts.Delete(guard.Control(src))
		ran := make(chan struct{})
		go func() {
			defer close(ran)
			_ = src.Run(context.WithoutCancel(ctx), nil)
		}()
		look := time.NewTicker(markEvery)
		defer look.Stop()
		for ctx.Err() == nil && src.Account().Unsettled() > 0 {
			select {
			case <-look.C:
			case <-src.Ended():
				cancel()
			case <-ctx.Done():
			}
		}
		if report := ss.endSource(topic, src.End); len(report.Left) == 0 {
			<-ran
		}
	}()
}

func (ss *session) forget(name string, l *left) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.left[name] == l {
		delete(ss.left, name)
	}
}

// leave ends the source of a partition's spill, because a claim of the partition comes.
func (ss *session) leave(name string) {
	ss.mu.Lock()
	l := ss.left[name]
	delete(ss.left, name)
	ss.mu.Unlock()
	if l != nil {
		l.end()
		<-l.done
	}
	ss.leaveOther(name)
}

// leaveOther ends such a source of another member in this process.
func (ss *session) leaveOther(name string) {
	src := ss.h.g.Source(name)
	if _, ok := lefts.Load(src); ok {
		ctx, cancel := context.WithTimeout(ss.native.Context(), grace(ss.set.config))
		defer cancel()
		src.End(ctx, guard.ReasonRebalance)
	}
}

// leaveAll ends all such sources: the session is over.
func (ss *session) leaveAll() {
	ss.mu.Lock()
	all := ss.left
	ss.over, ss.left = true, nil
	ss.mu.Unlock()
	for _, l := range all {
		l.end()
	}
	for _, l := range all {
		<-l.done
	}
}
