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
	Source    string // its name in the guard
	Initial   int64  // offset that was committed at its start, below 0 for none
	Session   sarama.ConsumerGroupSession
	Config    *sarama.Config // of the group
	Timeout   time.Duration  // of a handler
	Log       *slog.Logger

	ByKey   bool                                 // the messages of a key keep their order
	Key     func(*sarama.ConsumerMessage) []byte // nil: the message's own
	Settled func() int64                         // offset of its oldest message that is not settled, -1 if it has had none
}

// A Partition is the part of one epoch of one partition that parks: it reads the same
// partition of the retry topics, and has the ports' part in it.
//
// Before the claim's first message it reads the retry topics from what is committed
// to their end, and so knows what is parked (table). Then a goroutine for each level
// reads on, one hands over what is due, one commits; all end with Stop. Lock order:
// Partition.mu, then that of a table or tracker; none is held during a call of the guard
// or of sarama.
type Partition struct {
	t      *Topics
	c      Claim
	table  *table
	epoch  string // in what this claim parks: other records after the start are of an earlier owner
	levels []*levelTopic
	replay int64 // the claim hands over again what it had handled up to here; -1 nothing
	write  time.Duration

	wake   chan struct{}
	kick   chan struct{} // a commit is wanted
	broken func()        // a retry topic is another: the claim has to begin anew
	given  atomic.Bool   // the claim was left: nothing more is committed

	reading, committing sync.WaitGroup
	settled             chan struct{} // closed when nothing is settled any more

	mu      sync.Mutex
	pending dueMessages

	said       logOnce
	foreigners atomic.Bool // said that another group parks here, too
}

// levelTopic is one level of a Partition.
type levelTopic struct {
	level int
	name  string
	start int64    // of the reading
	end   int64    // of the topic at the start
	began position // what was committed, or stands for it
	marks *offsets.Tracker
	room  chan struct{}

	sent   position // that was committed last; the committer's
	sentAt time.Time

	// Under Partition.mu:
	settled      map[int64]bool // after start, by what is committed, and not read yet
	read         int64          // the end of what was read
	count, bytes int
	last         map[uint64]*keyDue
}

// keyDue is when the last message of a key that waits is due.
type keyDue struct {
	due int64
	n   int
}

// askAgain is how soon what cannot be read, written or committed is tried again.
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

// claimed is a message of the claim.
func (pt *Partition) claimed(m *sarama.ConsumerMessage) *Message {
	return pt.identified(&Message{msg: m, origin: origin{offset: m.Offset, stamp: stampOf(m.Timestamp)}, at: -1})
}

// parked is a message of a retry topic.
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

// keyOf is the key that the user's function chooses. If that panics the message has none,
// and no order: the guard has said so.
func (pt *Partition) keyOf(m *sarama.ConsumerMessage) (key []byte) {
	defer func() {
		if recover() != nil {
			key = nil
		}
	}()
	return pt.c.Key(m)
}

// seed is one for the process, so that a key is in the same lane in each epoch.
var seed = maphash.MakeSeed()

// notify leaves a value in a channel of capacity 1.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// pause waits, or until ctx ends.
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

// logOnce logs a trouble when it begins, changes or is over, and not each time.
type logOnce struct {
	log *slog.Logger

	mu   sync.Mutex
	last map[[2]string]string
}

// say tells of err, or with nil that what is over.
func (s *logOnce) say(what, where string, err error) {
	switch {
	case !s.changed(what, where, err):
	case err != nil:
		s.log.Warn("retry topics", "what", what, "at", where, "error", err)
	default:
		s.log.Info("retry topics: over", "what", what, "at", where)
	}
}

// changed tells whether that is news. Nothing is logged under the lock.
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
