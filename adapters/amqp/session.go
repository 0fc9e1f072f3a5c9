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
	closed  chan struct{}       // closed when the channel or the connection has ended
	why     *amqp091.Error      // why the channel ended; read only after closed

	mu      sync.Mutex
	blocked string        // why the broker takes no messages; "" if it does
	change  chan struct{} // closed and replaced when blocked changes

	// pending has the publishings whose confirmation nobody waits for. It keeps a letter that is
	// written again from being published again. unread counts publishings that were not judged:
	// each may have a return that nobody has read. [DLQ.turn] guards both.
	pending map[letterKey]published
	unread  int
}

// published is a publishing that the broker has not confirmed.
type published struct {
	confirm *amqp091.DeferredConfirmation
	at      time.Time
}

// letterKey recognises a letter that is written again. The ID alone is not enough. If it comes from
// a publisher's message id, two messages may share it, and the second would count as written.
type letterKey struct {
	id                      string
	firstFailed, lastFailed int64 // Unix nanoseconds; 0 if body is set
	body                    *byte // the address of the body, of a letter without these times; never read
}

// letterKeyOf returns the zero key for a letter that cannot be told from another. That key is never
// pending. A message that never failed, such as a quarantined one, has no times. Its letter is
// recognised while its body stays at one address: the key keeps that memory from being freed.
func letterKeyOf(id string, r *dlq.Record) letterKey {
	switch {
	case id == "":
		return letterKey{}
	case !r.FirstFailed.IsZero() && !r.LastFailed.IsZero():
		return letterKey{id: id, firstFailed: r.FirstFailed.UnixNano(), lastFailed: r.LastFailed.UnixNano()}
	case len(r.Body) > 0:
		return letterKey{id: id, body: &r.Body[0]}
	}
	return letterKey{}
}

// maxPending is the number of unjudged writes at which a session ends. Their returns fit into the
// channel. At a full channel the client would wait, and drop the return after 5 s. Then it would go
// on with the confirmation behind the return, which alone would pass for success.
const maxPending = 256

func (d *DLQ) connect(ctx context.Context) (*session, error) {
	l, err := d.dialer.once(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, l.sock.close) // the client's calls take no context
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
	d.failed = logPacer{}
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

// end closes the connection. If the broker blocks it, or ctx ends, end cuts it: a broker that
// blocks does not answer.
func (s *session) end(ctx context.Context) {
	if why, _ := s.blockage(); why != "" {
		s.link.sock.close()
	}
	stop := context.AfterFunc(ctx, s.link.sock.close)
	defer stop()
	s.link.close()
}

// forget drops the pending publishings with the ID of a returned letter: their confirmation alone
// would pass for success. If several have that ID, letters that were not returned are published
// again, too.
func (s *session) forget(id string) {
	for k := range s.pending {
		if k.id == id {
			delete(s.pending, k)
		}
	}
}

// write publishes a letter, unless that is pending, and waits for the broker. If the letter is not
// confirmed within patience of its publishing, the session ends. While the broker blocks
// the connection, write fails after blockedPatience instead, and the letter stays pending.
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
				returns = nil // s.closed follows
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
			case <-confirm.Done(): // the process stood still, and the confirmation came meanwhile
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

// publish hands the message to the client, which may wait for the socket without limit. If ctx ends
// first, publish cuts the connection.
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
	s.link.close() // whatever the error is, the next write begins anew
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return nil, err
}

// judge returns what a confirmation means. The return of an unroutable message comes before its
// confirmation: it is back, or is in s.returns already.
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

// tooLarge matches the broker's text about a message that is too large.
var tooLarge = regexp.MustCompile(`message size (\d+) is larger than (?:configured )?max size (\d+)`)

// ended returns why the channel ended during a write.
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
