// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/IBM/sarama"
)

// What is done of a retry topic is committed by the consumer group itself, under
// the member's generation: a member that has lost the partition can commit no more.
// A message is handled in its time and not in the order of the log, so the
// committed metadata says which messages after the offset are done, too: none of
// them is handled again after a restart, when its key may have gone on long ago.

// maxAhead is how far after the committed offset messages may be done: as many bits
// of metadata, which a broker takes up to 4096 bytes of by default.
const maxAhead = 4096

// aheadPrefix begins all metadata: it tells the offsets of a retry topic from those
// of a topic that the group subscribes to.
const aheadPrefix = "stormguard/1:"

// maxMetadata is how long the metadata may be.
var maxMetadata = int64(len(aheadPrefix) + base64.RawStdEncoding.EncodedLen(maxAhead/8))

// encodeAhead is the metadata for what is settled after the offset at.
func encodeAhead(at int64, ahead []int64) string {
	if len(ahead) == 0 {
		return aheadPrefix
	}
	bits := make([]byte, (ahead[len(ahead)-1]-at)/8+1)
	for _, offset := range ahead {
		bits[(offset-at)/8] |= 1 << ((offset - at) % 8)
	}
	return aheadPrefix + base64.RawStdEncoding.EncodeToString(bits)
}

// decodeAhead is its inverse; nothing where it is not ours.
func decodeAhead(at int64, meta string) map[int64]bool {
	text, ours := strings.CutPrefix(meta, aheadPrefix)
	bits, err := base64.RawStdEncoding.DecodeString(text)
	if !ours || err != nil || len(bits) > maxAhead/8+1 {
		return nil
	}
	ahead := make(map[int64]bool)
	for i, b := range bits {
		for j := range 8 {
			if b&(1<<j) != 0 {
				ahead[at+int64(8*i+j)] = true
			}
		}
	}
	return ahead
}

// position is what is committed of a retry topic's partition.
type position struct {
	offset int64 // below 0: nothing
	meta   string
}

// committed asks the coordinator for the positions of retry topics.
func (t *RetryTopics) committed(partition int32, topics []string) ([]position, error) {
	client := t.out.client
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

// commit commits positions of a partition of retry topics, as the member of the
// session.
func (t *RetryTopics) commit(ss *session, given *atomic.Bool, partition int32, at map[string]position) error {
	client := t.out.client
	coordinator, err := client.Coordinator(t.cfg.Group)
	if err != nil {
		return err
	}
	req := sarama.NewOffsetCommitRequest(client.Config(), t.cfg.Group)
	req.ConsumerID, req.ConsumerGroupGeneration = ss.native.MemberID(), ss.native.GenerationID()
	if given.Load() { // in this order: the generation may be one in which the claim is another's
		return errGivenUp
	}
	if id := ss.set.config.Consumer.Group.InstanceId; id != "" && req.Version >= 7 {
		req.GroupInstanceId = &id
	}
	for topic, p := range at {
		req.AddBlockWithLeaderEpoch(topic, partition, p.offset, -1, 0, p.meta)
	}
	resp, err := coordinator.CommitOffset(req)
	if err != nil {
		return errors.Join(err, client.RefreshCoordinator(t.cfg.Group))
	}
	for topic := range at {
		code, answered := resp.Errors[topic][partition]
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

// recommit is how often a position is committed that has not changed: a broker
// forgets what it has not heard of for offsets.retention.minutes (7 days), also of
// a group that lives, if it is no topic that the group subscribes to.
const recommit = time.Hour

// commitAlways commits what is done, until stop is closed, and then once more.
func (rc *retryClaim) commitAlways(stop <-chan struct{}) {
	every := time.NewTicker(max(10*time.Millisecond, rc.ss.set.config.Consumer.Offsets.AutoCommit.Interval))
	defer every.Stop()
	for last := false; !last; {
		select {
		case <-every.C:
		case <-rc.kick:
		case <-stop:
			last = true
		}
		err := rc.commit()
		rc.said.say("what is done of the retry topics cannot be committed: it would be handled again", rc.c.name, err)
	}
}

func (rc *retryClaim) commit() error {
	keys := rc.table.ended() // before the positions: these then cover their ends
	at := make(map[string]position)
	now := rc.t.now()
	for _, l := range rc.levels {
		p := rc.position(l)
		if p != l.sent || now.Sub(l.sentAt) >= recommit {
			at[l.name] = p
		}
	}
	if len(at) > 0 {
		if err := rc.t.commit(rc.ss, &rc.given, rc.c.partition, at); err != nil {
			return err
		}
		for _, l := range rc.levels {
			if p, ok := at[l.name]; ok {
				l.sent, l.sentAt = p, now
			}
		}
	}
	rc.table.free(keys)
	return nil
}

// position is what is done of a level.
func (rc *retryClaim) position(l *retryTopic) position {
	rc.mu.Lock()
	ahead := slices.Collect(maps.Keys(l.settled)) // not read again yet
	rc.mu.Unlock()
	at, more := l.marks.settled()
	if at < 0 {
		at = l.began.offset
	}
	ahead = slices.DeleteFunc(append(ahead, more...), func(n int64) bool { return n < at || n >= at+maxAhead })
	slices.Sort(ahead)
	return position{at, encodeAhead(at, ahead)}
}
