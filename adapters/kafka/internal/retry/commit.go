// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
)

// The positions of retry topics are committed for the consumer group, under the member's
// generation: a member that has lost the partition cannot commit any more. Messages are handled
// when they are due, not in the order of the log. So the committed metadata also says which
// messages after the offset are done. After a restart these are not handled again, even if their
// keys have gone on long ago.

// position is the committed offset of a retry topic's partition, and its metadata.
type position struct {
	offset int64 // below 0: nothing is committed
	meta   string
}

// committed asks the coordinator for the positions of retry topics.
func (t *Topics) committed(partition int32, topics []string) ([]position, error) {
	client := t.out.Client
	coordinator, err := client.Coordinator(t.cfg.Group)
	if err != nil {
		return nil, err
	}
	parts := make(map[string][]int32, len(topics))
	for _, topic := range topics {
		parts[topic] = []int32{partition}
	}
	resp, err := coordinator.FetchOffset(sarama.NewOffsetFetchRequest(client.Config().Version, t.cfg.Group, parts))
	if err == nil && resp.Err != sarama.ErrNoError {
		err = resp.Err
	}
	if err != nil {
		return nil, errors.Join(err, client.RefreshCoordinator(t.cfg.Group))
	}
	out := make([]position, len(topics))
	for i, topic := range topics {
		b := resp.GetBlock(topic, partition)
		switch {
		case b == nil:
			return nil, fmt.Errorf("kafka: no answer about %s", topic)
		case b.Err == sarama.ErrNotCoordinatorForConsumer:
			return nil, errors.Join(b.Err, client.RefreshCoordinator(t.cfg.Group))
		case b.Err != sarama.ErrNoError:
			return nil, b.Err
		}
		out[i] = position{b.Offset, b.Metadata}
	}
	return out, nil
}

// commit commits positions of the retry topics of a claim, as the member of its session.
func (t *Topics) commit(c Claim, given *atomic.Bool, at map[string]position) error {
	client := t.out.Client
	coordinator, err := client.Coordinator(t.cfg.Group)
	if err != nil {
		return err
	}
	req := sarama.NewOffsetCommitRequest(client.Config(), t.cfg.Group)
	req.ConsumerID, req.ConsumerGroupGeneration = c.Session.MemberID(), c.Session.GenerationID()
	if given.Load() { // read after the generation, in which the claim may be another member's
		return errGivenUp
	}
	if id := c.Config.Consumer.Group.InstanceId; id != "" && req.Version >= 7 {
		req.GroupInstanceId = &id
	}
	for topic, p := range at {
		req.AddBlockWithLeaderEpoch(topic, c.Partition, p.offset, -1, 0, p.meta)
	}
	resp, err := coordinator.CommitOffset(req)
	if err != nil {
		return errors.Join(err, client.RefreshCoordinator(t.cfg.Group))
	}
	for topic := range at {
		code, answered := resp.Errors[topic][c.Partition]
		switch {
		case !answered:
			return fmt.Errorf("kafka: no answer about %s", topic)
		case code == sarama.ErrNotCoordinatorForConsumer:
			return errors.Join(code, client.RefreshCoordinator(t.cfg.Group))
		case code != sarama.ErrNoError:
			return code
		}
	}
	return nil
}

var errGivenUp = errors.New("kafka: the claim was left")

// recommit is how often an unchanged position is committed again. A broker forgets a position
// that was not committed for offsets.retention.minutes (7 days). For a topic that the group does
// not subscribe to, it does so even while the group lives.
const recommit = time.Hour

// commitAlways commits the positions until stop is closed, and then once more.
func (pt *Partition) commitAlways(stop <-chan struct{}) {
	every := time.NewTicker(max(10*time.Millisecond, pt.c.Config.Consumer.Offsets.AutoCommit.Interval))
	defer every.Stop()
	for last := false; !last; {
		select {
		case <-every.C:
		case <-pt.kick:
		case <-stop:
			last = true
		}
		err := pt.commit()
		pt.said.say("what is done of the retry topics cannot be committed: it would be handled again", pt.c.Source, err)
	}
}

func (pt *Partition) commit() error {
	keys := pt.table.ended() // before the positions, which then cover the ends of these keys
	at := make(map[string]position)
	now := pt.t.Now()
	for _, l := range pt.levels {
		p := pt.position(l)
		if p != l.sent || now.Sub(l.sentAt) >= recommit {
			at[l.name] = p
		}
	}
	if len(at) > 0 {
		if err := pt.t.commit(pt.c, &pt.abandoned, at); err != nil {
			return err
		}
		for _, l := range pt.levels {
			if p, ok := at[l.name]; ok {
				l.sent, l.sentAt = p, now
			}
		}
	}
	pt.table.free(keys)
	return nil
}

// position is the position of a level that can be committed.
func (pt *Partition) position(l *levelTopic) position {
	pt.mu.Lock()
	ahead := slices.Collect(maps.Keys(l.settled)) // settled, and not read again yet
	pt.mu.Unlock()
	at, more := l.marks.Settled()
	if at < 0 {
		at = l.began.offset
	}
	ahead = slices.DeleteFunc(append(ahead, more...), func(n int64) bool { return n < at || n >= at+offsets.MaxAhead })
	slices.Sort(ahead)
	return position{at, offsets.Encode(at, ahead)}
}
