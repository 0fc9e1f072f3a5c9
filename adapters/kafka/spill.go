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

// spillHead is what the spill keeps of a message beside its value.
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

// Spill is [guard.Spiller]'s.
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

// Unspill is [guard.Spiller]'s.
func (c *claim) Unspill(head, body []byte) (*sarama.ConsumerMessage, error) {
	var h spillHead
	if err := json.Unmarshal(head, &h); err != nil {
		return nil, fmt.Errorf("kafka: a message in the spill: %w", err)
	}
	if h.Tombstone {
		body = nil
	}
	return &sarama.ConsumerMessage{
		Topic: h.Topic, Partition: h.Partition, Offset: h.Offset, Timestamp: fromMillis(h.Timestamp), BlockTimestamp: fromMillis(h.BlockTime),
		Key: h.Key, Headers: h.Headers, Value: body,
	}, nil
}

// spillCommits is for how long after a message was spilled marks are committed at once.
const spillCommits = 5 * time.Second

// commitSoon commits what is marked, beside the caller: one request at a time, and one more
// for what is marked meanwhile. A program that commits by itself is left alone.
func (ss *session) commitSoon() {
	if !ss.set.config.Consumer.Offsets.AutoCommit.Enable || ss.commits.Add(1) > 1 {
		return
	}
	go func() { // ends with sarama's last request
		for {
			asked := ss.commits.Load()
			ss.native.Commit()
			if ss.commits.CompareAndSwap(asked, 0) {
				return
			}
		}
	}()
}

// left is a source of a partition that this process does not have any more, or not yet: it
// handles what is in the spill of it.
type left struct {
	end  context.CancelFunc
	done chan struct{} // closed when it has ended
}

// lefts are the sources of all sessions' lefts, as guard.Control: a claim of another member
// in this process ends one, too.
var lefts sync.Map

// leftPort is its port: all it is asked about is in the spill, and acked.
type leftPort struct{ *claim }

func (leftPort) Size(*sarama.ConsumerMessage) int                     { return 0 }
func (leftPort) Ack(*sarama.ConsumerMessage) error                    { return nil }
func (leftPort) Return([]*sarama.ConsumerMessage, guard.Reason) error { return nil }
func (leftPort) Demand(int)                                           {}
func (leftPort) Flush() error                                         { return nil }
func (leftPort) Lag() int64                                           { return 0 }
func (leftPort) Ahead() int                                           { return 0 }
func (p leftPort) Meta(m *sarama.ConsumerMessage) guard.Meta          { return p.describe(m) }

// seen adds topics to those that the handler knows, and returns them all: those of its claims,
// those that [Consume] runs it for, and those that the group has named.
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

// spilled finds the partitions that have messages in the spill and are not claimed: they are
// committed, so nobody else would handle them. more tells that there are others, of topics
// that the handler does not know.
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

// drainSpilled opens a source for each of them.
func (ss *session) drainSpilled() {
	found, _ := ss.spilled()
	for name, at := range found {
		ss.drainLeft(name, at.topic, at.partition)
	}
}

// learn asks the group, once in a session, for the topics of this member, when the spill has
// messages of a topic that the handler does not know: in a loop of the program's own, a topic
// is known by its claims alone.
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

// drainLeft opens such a source. It ends when it has handled all, when a claim of the
// partition comes, and with the session. It owns two goroutines until then.
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
		src, err := guard.Open(ss.h.g, ss.sourceConfig(c), guard.Limits{RevokeGrace: limits(ss.set.config).RevokeGrace}, guard.Port[*sarama.ConsumerMessage](leftPort{c}), ss.guarded)
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

// leave ends the source of what was left of a partition, since a claim of it comes.
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

// leaveOther ends that of another member.
func (ss *session) leaveOther(name string) {
	src := ss.h.g.Source(name)
	if _, ok := lefts.Load(src); ok {
		ctx, cancel := context.WithTimeout(ss.native.Context(), grace(ss.set.config))
		defer cancel()
		src.End(ctx, guard.ReasonRebalance)
	}
}

// leaveAll ends all of them: the session is over.
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
