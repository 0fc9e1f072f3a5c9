// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"sync"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/dlq"
)

// session is one connection of a [DLQ], with a channel in confirm mode. One
// write at a time uses it.
type session struct {
	link    *link
	ch      *amqp091.Channel
	returns chan amqp091.Return // read by write alone; see maxPending
	closed  chan struct{}       // the channel or the connection has ended
	why     *amqp091.Error      // of the end; to be read after closed

	mu      sync.Mutex
	blocked string        // why the broker takes nothing; "" if it does
	change  chan struct{} // closed and replaced when blocked changes

	// pending are publishings whose confirmation nobody waits for, so that a
	// letter that is written again is not published again; unread is how many were
	// not judged, and may have a return that nobody has read. The turn guards both.
	pending map[letterKey]published
	unread  int
}

// published is a publishing that the broker has not confirmed, and when it was sent.
type published struct {
	confirm *amqp091.DeferredConfirmation
	at      time.Time
}

// letterKey recognises a letter that is written again. The ID alone would not
// do: where it comes from a publisher's message id, two messages may share it,
// and the second would be taken for written.
type letterKey struct {
	id                      string
	firstFailed, lastFailed int64 // Unix nanoseconds
}

// letterKeyOf is the zero key, which is never pending, for a letter that cannot be told
// from another.
func letterKeyOf(id string, r *dlq.Record) letterKey {
	if id == "" || r.FirstFailed.IsZero() || r.LastFailed.IsZero() {
		return letterKey{}
	}
	return letterKey{id, r.FirstFailed.UnixNano(), r.LastFailed.UnixNano()}
}

// maxPending is after how many writes that were given up a session ends. Their returns
// have room: the client stops at a full channel, drops the return after 5 s, and goes on
// with the confirmation that follows it, which alone would pass for success.
const maxPending = 256

func (d *DLQ) connect(ctx context.Context) (*session, error) {
	l, err := d.dialer.once(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, l.sock.close) // the client's calls know no context
	defer stop()
	s := &session{
		link: l, returns: make(chan amqp091.Return, maxPending+1), closed: make(chan struct{}),
		change: make(chan struct{}), pending: make(map[letterKey]published),
	}
	if s.ch, err = l.Channel(); err == nil {
		err = s.ch.Confirm(false)
	}
	if err != nil {
		l.close()
		return nil, errors.Join(err, ctx.Err())
	}
	s.ch.NotifyReturn(s.returns)
	closed := s.ch.NotifyClose(make(chan *amqp091.Error, 1))
	go func() { // ends with the channel
		s.why = <-closed
		close(s.closed)
	}()
	blocked := l.NotifyBlocked(make(chan amqp091.Blocking, 8))
	go func() { // ends with the connection
		for b := range blocked {
			d.logger().Warn("connection blocked by the broker", "queue", d.cfg.Queue, "endpoint", l.endpoint, "blocked", b.Active, "reason", b.Reason)
			s.block(b)
		}
	}()
	d.failed = sparse{}
	d.logger().Info("connected", "queue", d.cfg.Queue, "endpoint", l.endpoint)
	return s, nil
}

func (s *session) block(b amqp091.Blocking) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blocked = ""
	if b.Active {
		if s.blocked = b.Reason; s.blocked == "" {
			s.blocked = "no reason given"
		}
	}
	close(s.change)
	s.change = make(chan struct{})
}

func (s *session) blockage() (why string, change <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.blocked, s.change
}

func (s *session) over() bool {
	select {
	case <-s.closed:
		return true
	default:
		return s.ch.IsClosed() || s.link.IsClosed()
	}
}

// end closes the connection. A broker that blocks it does not answer, so it is
// cut then, and when ctx ends.
func (s *session) end(ctx context.Context) {
	if why, _ := s.blockage(); why != "" {
		s.link.sock.close()
	}
	stop := context.AfterFunc(ctx, s.link.sock.close)
	defer stop()
	s.link.close()
}

// forget drops what is pending under the ID of a returned letter: its
// confirmation alone would be taken for success. Of several with that ID it may
// be another's, which is then published again.
func (s *session) forget(id string) {
	for k := range s.pending {
		if k.id == id {
			delete(s.pending, k)
		}
	}
}

// write publishes, unless this letter already is, and waits for the broker. A letter that is
// not confirmed within patience of its publishing costs the session.
func (s *session) write(ctx context.Context, queue string, key letterKey, m *amqp091.Publishing, patience time.Duration) error {
	sent, before := s.pending[key]
	if !before {
		if why, _ := s.blockage(); why != "" {
			return fmt.Errorf("%w: %s", errBlocked, why)
		}
		confirm, err := s.publish(ctx, queue, m)
		if err != nil {
			return err
		}
		sent = published{confirm, time.Now()}
		s.unread++
	}
	confirm := sent.confirm
	delete(s.pending, key)
	keep := func() {
		if key != (letterKey{}) {
			s.pending[key] = sent
		}
		if s.unread >= maxPending {
			s.link.sock.close()
		}
	}
	blocked := time.NewTimer(blockedPatience)
	defer blocked.Stop()
	lost := time.NewTimer(time.Until(sent.at.Add(patience)))
	defer lost.Stop()
	late, returns := false, s.returns
	var back *amqp091.Return
	for {
		why, change := s.blockage()
		if why != "" && late {
			keep()
			return fmt.Errorf("%w: %s", errBlocked, why)
		}
		select {
		case <-confirm.Done():
			s.unread--
			return s.judge(confirm, m, back)
		case r, ok := <-returns:
			if !ok {
				returns = nil // s.closed is about to be
				continue
			}
			if r.MessageId == m.MessageId {
				back = &r
			}
			s.forget(r.MessageId)
		case <-s.closed:
			return s.ended()
		case <-ctx.Done():
			keep()
			return fmt.Errorf("not confirmed: %w", ctx.Err())
		case <-lost.C:
			select {
			case <-confirm.Done(): // this process stood still meanwhile
				continue
			default:
			}
			if why == "" {
				s.link.sock.close()
				return fmt.Errorf("%w within %s", errUnconfirmed, patience)
			}
		case <-blocked.C:
			late = true
		case <-change:
		}
	}
}

var errUnconfirmed = errors.New("not confirmed")

// publish hands the message to the client, which may wait for the socket
// without limit: when ctx ends first the connection is cut.
func (s *session) publish(ctx context.Context, queue string, m *amqp091.Publishing) (*amqp091.DeferredConfirmation, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, s.link.sock.close)
	defer stop()
	confirm, err := s.ch.PublishWithDeferredConfirm("", queue, true, false, *m)
	if err == nil {
		return confirm, nil
	}
	s.link.close() // whatever it is, the next write begins anew
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return nil, err
}

// judge says what a confirmation means. The return of an unroutable message
// comes before it, and is then in the channel already, if it is not back.
func (s *session) judge(confirm *amqp091.DeferredConfirmation, m *amqp091.Publishing, back *amqp091.Return) error {
	for more := true; more; {
		select {
		case r, ok := <-s.returns:
			more = ok
			if ok && r.MessageId == m.MessageId {
				back = &r
			}
			s.forget(r.MessageId)
		default:
			more = false
		}
	}
	switch {
	case back != nil:
		return fmt.Errorf("%w: %w: it was returned: %d %s", errNoQueue, dlq.ErrRefused, back.ReplyCode, back.ReplyText)
	case confirm.Acked():
		return nil
	case s.over():
		return s.ended()
	default:
		return errors.New("the broker did not take it: the queue is full and rejects, or has no leader")
	}
}

// tooLarge is how the broker says it.
var tooLarge = regexp.MustCompile(`message size (\d+) is larger than (?:configured )?max size (\d+)`)

// ended says why the channel ended under a write.
func (s *session) ended() error {
	<-s.closed
	if s.why == nil {
		return amqp091.ErrClosed
	}
	if at := tooLarge.FindStringSubmatch(s.why.Reason); at != nil {
		size, _ := strconv.Atoi(at[1])
		most, _ := strconv.Atoi(at[2])
		return &dlq.TooLargeError{Size: size, Max: most, Err: s.why}
	}
	return s.why
}
