// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"context"
	"hash/maphash"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
)

// A Claim is one epoch of one partition of a source, as the adapter has it.
type Claim struct {
	Topic     string
	Partition int32
	Source    string // the source's name in the guard
	Initial   int64  // committed offset at the claim's start; below 0 for none
	Session   sarama.ConsumerGroupSession
	Config    *sarama.Config // the group's configuration
	Timeout   time.Duration  // the handler's timeout
	Log       *slog.Logger

	ByKey   bool                                 // the messages of a key keep their order
	Key     func(*sarama.ConsumerMessage) []byte // chooses a message's key; nil: the message's own
	Settled func() int64                         // settled below this offset; -1: no message yet
}

// A Partition parks the messages of one epoch of one partition. It reads the same partition of
// the retry topics, and does their part of the guard's ports.
//
// Before the claim's first message it reads the retry topics from the committed offset to their
// end, and so knows the parked messages (table). After that it has these goroutines: one for each
// level reads on, one hands over due messages, one commits. All end with Stop. Lock order:
// Partition.mu, then the lock of a table or tracker. None is held during a call of the guard or
// of sarama.
type Partition struct {
	t     *Topics
	c     Claim
	table *table
	// epoch is in the records that this claim parks. Other records after the start are from an
	// earlier owner.
	epoch  string
	levels []*levelTopic
	replay int64 // the highest offset of a parked message that the claim delivers again; -1 for none
	write  time.Duration

	wake      chan struct{}
	kick      chan struct{} // asks for a commit at once
	broken    func()        // called if a retry topic is another one: the claim must begin again
	abandoned atomic.Bool   // the claim was left: nothing more is committed

	reading, committing sync.WaitGroup
	settled             chan struct{} // closed when no more messages will be settled

	mu      sync.Mutex
	pending dueMessages

	said       logOnce
	foreigners atomic.Bool // logged that another group parks here, too
}

// levelTopic is one level of a Partition.
type levelTopic struct {
	level int
	name  string
	start int64    // offset at which reading starts
	end   int64    // the topic's end at the start
	began position // the committed position at the start, or a replacement
	marks *offsets.Tracker
	room  chan struct{}

	sent   position // the position that was committed last; for the committer only
	sentAt time.Time

	// Under Partition.mu:
	settled      map[int64]bool // offsets after start that are settled, and not read yet
	read         int64          // the offset after the last message that take let wait (push)
	count, bytes int
	last         map[uint64]*keyDue
}

// keyDue says when the last waiting message of a key is due.
type keyDue struct {
	due int64
	n   int
}

// askAgain is the wait before a failed read, write or commit is tried again.
const askAgain = 500 * time.Millisecond

func newPartition(t *Topics, c Claim) *Partition {
	pt := &Partition{
		t: t, c: c, table: newTable(t.maxParked()), epoch: strconv.FormatUint(rand.Uint64(), 16), replay: -1,
		write: min(parkTimeout, c.Timeout/2), said: logOnce{log: c.Log}, settled: make(chan struct{}),
		wake: make(chan struct{}, 1), kick: make(chan struct{}, 1),
	}
	for i := range t.cfg.Delays {
		pt.levels = append(pt.levels, &levelTopic{
			level: i + 1, name: t.cfg.Name(c.Topic, i+1), marks: offsets.New(), room: make(chan struct{}, 1), last: make(map[uint64]*keyDue),
		})
	}
	return pt
}

// claimed makes a Message from a message of the claim.
func (pt *Partition) claimed(m *sarama.ConsumerMessage) *Message {
	return pt.identified(&Message{msg: m, origin: origin{offset: m.Offset, stamp: stampOf(m.Timestamp)}, at: -1})
}

// parked makes a Message from a message of a retry topic.
func (pt *Partition) parked(m *sarama.ConsumerMessage, level int) *Message {
	return pt.identified(readParked(m, level))
}

// identified gives a message its key.
func (pt *Partition) identified(p *Message) *Message {
	if !pt.c.ByKey {
		return p
	}
	key := p.msg.Key
	if pt.c.Key != nil {
		key = pt.keyOf(p.msg)
	}
	if p.keyed = key != nil; p.keyed {
		p.origin.key = maphash.Bytes(seed, key)
	}
	return p
}

// keyOf is the key that the user's function chooses. If the function panics, the message has no
// key and no order; the guard has logged that.
func (pt *Partition) keyOf(m *sarama.ConsumerMessage) (key []byte) {
	defer func() {
		if recover() != nil {
			key = nil
		}
	}()
	return pt.c.Key(m)
}

// seed is the same in the whole process, so that a key is in the same lane in each epoch.
var seed = maphash.MakeSeed()

// notify leaves a value in a channel of capacity 1.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) { await(ctx, nil, d) }

// await waits for a channel to be closed; false if ctx ended or d passed before.
func await(ctx context.Context, c <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-c:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// logOnce logs a problem when it begins, changes or is over, but not each time.
type logOnce struct {
	log *slog.Logger

	mu   sync.Mutex
	last map[[2]string]string
}

// say logs err. With a nil err it logs that the problem called what is over.
func (s *logOnce) say(what, where string, err error) {
	switch {
	case !s.changed(what, where, err):
	case err != nil:
		s.log.Warn("retry topics", "what", what, "at", where, "error", err)
	default:
		s.log.Info("retry topics: over", "what", what, "at", where)
	}
}

// changed tells whether err is new for what and where. say logs outside the lock.
func (s *logOnce) changed(what, where string, err error) bool {
	text := ""
	if err != nil {
		text = err.Error()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	k := [2]string{what, where}
	if s.last[k] == text {
		return false
	}
	if s.last == nil {
		s.last = make(map[[2]string]string)
	}
	s.last[k] = text
	return true
}
