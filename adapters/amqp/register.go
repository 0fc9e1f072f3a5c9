// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/registers"
)

// RegisterConfig says where a [Register] is. Stream must be set.
type RegisterConfig struct {
	// Stream is the register's own stream.
	Stream string

	// NoCreate refuses a stream that does not exist, instead of creating it.
	NoCreate bool
}

// Validate reports everything wrong at once.
func (c RegisterConfig) Validate() error {
	var errs []error
	if c.Stream == "" || len(c.Stream) > maxShort {
		errs = append(errs, fmt.Errorf("amqp: RegisterConfig.Stream: a name of %d bytes is not within 1 and %d", len(c.Stream), maxShort))
	}
	if strings.HasPrefix(c.Stream, "amq.") {
		errs = append(errs, fmt.Errorf("amqp: RegisterConfig.Stream: %q: names that begin with amq. are the broker's", c.Stream))
	}
	return errors.Join(errs...)
}

// registerPrefetch is how many records the broker sends ahead to a reader.
const registerPrefetch = 64

// Register is a [register.Register] in a RabbitMQ stream, 3.9 or later. Each attempt to write a
// document appends a record. All processes read the same log, and the first record for a number
// wins. A writer knows that it has won, or lost, when it has read its own record.
//
// AMQP does not tell where a stream ends. So Read, and the beginning of a Watch, append a record of
// some 60 bytes that changes nothing, and read up to it.
//
// The stream must keep every record. Once a policy with a max-age or a max-length-bytes has deleted
// the first records, each method fails. A start reads the stream from its beginning.
//
// Register makes connections of its own: a shared one, and one for each Watch. Close ends them.
type Register struct {
	dialer Dialer
	cfg    RegisterConfig
	log    registers.Log

	dialing chan struct{} // holds a token while a call connects

	mu     sync.Mutex
	link   *link // the shared connection; nil while there is none
	closed bool
	calls  sync.WaitGroup // running calls to the broker, also those whose caller has given up
}

var _ register.Register = (*Register)(nil)

// NewRegister returns the register in the stream of cfg. It does not ask the broker: each
// connection creates or checks the stream at its first use. Each method returns an [ErrUnsuitable]
// if the queue is no stream, or if its arguments let the stream delete records.
func NewRegister(dialer Dialer, cfg RegisterConfig) (*Register, error) {
	if err := errors.Join(dialer.Validate(), cfg.Validate()); err != nil {
		return nil, err
	}
	return &Register{dialer: dialer, cfg: cfg, dialing: make(chan struct{}, 1)}, nil
}

var errRegisterClosed = errors.New("amqp: the register is closed")

// Close ends the connections. It waits for running calls to the broker, some seconds at most. End
// each Watch before.
func (r *Register) Close() error {
	r.mu.Lock()
	l := r.link
	r.link, r.closed = nil, true
	r.mu.Unlock()
	if l != nil {
		l.close()
	}
	r.calls.Wait()
	return nil
}

// aside runs call, which waits for the broker, on a goroutine of its own. When ctx ends first,
// aside returns, and call goes on for answerTimeout and the end of its connection. Close waits for
// call.
func (r *Register) aside(ctx context.Context, call func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return errRegisterClosed
	}
	r.calls.Add(1)
	r.mu.Unlock()
	answer := make(chan error, 1)
	go func() {
		defer r.calls.Done()
		answer <- call()
	}()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// connect makes a connection, and creates the stream if it does not exist.
func (r *Register) connect(ctx context.Context) (*link, error) {
	l, err := r.dialer.once(ctx)
	if err != nil {
		return nil, err
	}
	if err := l.within(ctx, answerTimeout, func() error { return r.ensure(l) }); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// ensure declares the stream. The broker refuses a queue that exists with other arguments.
func (r *Register) ensure(l *link) error {
	ch, err := l.Channel() // a refused declaration closes the channel
	if err != nil {
		return fmt.Errorf("amqp: register: %w", err)
	}
	if r.cfg.NoCreate {
		_, err = ch.QueueDeclarePassive(r.cfg.Stream, true, false, false, false, nil)
	} else {
		_, err = ch.QueueDeclare(r.cfg.Stream, true, false, false, false, amqp091.Table{"x-queue-type": amqp091.QueueTypeStream})
	}
	switch {
	case isCode(err, amqp091.NotFound):
		return unsuitable("there is no stream %s for a register: %s", r.cfg.Stream, DLQConfig{Queue: r.cfg.Stream, Kind: amqp091.QueueTypeStream}.command())
	case isCode(err, amqp091.PreconditionFailed):
		return unsuitable("queue %s is no stream that keeps everything; name another: %v", r.cfg.Stream, err)
	case err != nil:
		return fmt.Errorf("amqp: register: stream %s: %w", r.cfg.Stream, err)
	}
	return ch.Close()
}

// shared returns the connection of all calls except those of a Watch. It connects if there is none.
func (r *Register) shared(ctx context.Context) (*link, error) {
	select {
	case r.dialing <- struct{}{}:
		defer func() { <-r.dialing }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	r.mu.Lock()
	l := r.link
	r.mu.Unlock()
	if l != nil && !l.IsClosed() {
		return l, nil
	}
	l, err := r.connect(ctx)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	closed := r.closed
	if !closed {
		r.link = l
	}
	r.mu.Unlock()
	if closed {
		l.close()
		return nil, errRegisterClosed
	}
	return l, nil
}

// A reader is a channel that reads the log from the first unread offset on, and writes records.
type reader struct {
	r       *Register
	link    *link
	ch      *amqp091.Channel
	records <-chan amqp091.Delivery
	returns chan amqp091.Return
	from    int64 // offset at which the reader began
	begun   bool
}

// attach opens a reader. It tries again while there is no replica to read from: a stream that was
// created a moment ago has none yet. If a node has no replica for replicaWait, attach closes the
// connection: the next connection may reach another node.
func (r *Register) attach(ctx context.Context, l *link) (*reader, error) {
	for begun := time.Now(); ; {
		x, err := r.attachOnce(ctx, l)
		switch {
		case err == nil:
			return x, nil
		case !isCode(err, amqp091.PreconditionFailed):
			return nil, fmt.Errorf("amqp: register: %w", err)
		// The broker uses this word if the stream has no running replica, or none on this node.
		case !strings.Contains(err.Error(), "replica"):
			return nil, unsuitable("queue %s is no stream: %v", r.cfg.Stream, err)
		case time.Since(begun) > replicaWait:
			l.close()
			return nil, fmt.Errorf("amqp: register: %s: %w", l.endpoint, err)
		}
		if !registers.Sleep(ctx, replicaEvery) {
			return nil, ctx.Err()
		}
	}
}

const (
	replicaWait  = 2 * time.Second
	replicaEvery = 20 * time.Millisecond
)

func (r *Register) attachOnce(ctx context.Context, l *link) (*reader, error) {
	x := &reader{r: r, link: l, from: r.log.Next(), returns: make(chan amqp091.Return, 1)}
	err := l.within(ctx, answerTimeout, func() (err error) {
		if x.ch, err = l.Channel(); err != nil {
			return err
		}
		if err = x.ch.Confirm(false); err != nil {
			return err
		}
		if err = x.ch.Qos(registerPrefetch, 0, false); err != nil {
			return err
		}
		x.ch.NotifyReturn(x.returns)
		x.records, err = x.ch.Consume(r.cfg.Stream, consumerTag(), false, false, false, false, amqp091.Table{"x-stream-offset": x.from})
		return err
	})
	return x, err
}

// end closes the channel. ctx may have ended.
func (x *reader) end(ctx context.Context) {
	_ = x.link.within(ctx, answerTimeout, x.ch.Close) // if it fails, the channel is closed already
}

var errRegisterOver = errors.New("amqp: register: the connection, or the stream, has ended")

// fold adds a record to the log. ok is false when the deliveries have ended.
func (x *reader) fold(d amqp091.Delivery, ok bool) error {
	if !ok {
		return errRegisterOver
	}
	offset, is := d.Headers["x-stream-offset"].(int64)
	if !is {
		return unsuitable("queue %s is no stream: a record has no offset", x.r.cfg.Stream)
	}
	if !x.begun && offset > x.from {
		return unsuitable("stream %s begins at offset %d, and was read to %d: a policy deletes its records, or it was made anew", x.r.cfg.Stream, offset, x.from)
	}
	x.begun = true
	if err := x.r.log.Fold(offset, d.Body); err != nil {
		return fmt.Errorf("%w: amqp: stream %s: %w", register.ErrMalformed, x.r.cfg.Stream, err)
	}
	if err := d.Ack(false); err != nil {
		return fmt.Errorf("amqp: register: %w", err)
	}
	return nil
}

// write publishes a record once, and reads up to it. After the record was sent, an error is a
// [register.ErrUnknown], unless the record lost or was not routed. write calls begin before it
// sends the record. If begin returns false, nobody waits any more, and write sends nothing.
func (x *reader) write(ctx context.Context, number uint64, document []byte, begin func() bool) error {
	id := rand.Text()
	x.r.log.Expect(id)
	defer x.r.log.Forget(id)
	if !begin() {
		return ctx.Err()
	}
	unknown := func(err error) error { return fmt.Errorf("%w: amqp: %w", register.ErrUnknown, err) }
	confirm, err := x.ch.PublishWithDeferredConfirm("", x.r.cfg.Stream, true, false, amqp091.Publishing{
		DeliveryMode: amqp091.Persistent, Body: registers.Encode(number, id, document),
	})
	if err != nil {
		return unknown(err)
	}
	confirmed := confirm.Done()
	for {
		switch read, won, newest := x.r.log.Outcome(id); {
		case won || read && number == 0:
			return nil
		case read:
			return &register.ConflictError{Newest: newest}
		}
		select {
		case d, ok := <-x.records:
			if err := x.fold(d, ok); err != nil {
				return unknown(err)
			}
		case <-confirmed:
			confirmed = nil
			if !confirm.Acked() {
				return unknown(errors.New("the broker did not confirm the record"))
			}
		case back := <-x.returns:
			if back.ReplyCode != 0 { // the record was not routed
				return fmt.Errorf("amqp: register: no stream %s: %d %s", x.r.cfg.Stream, back.ReplyCode, back.ReplyText)
			}
			return unknown(errRegisterOver)
		case <-ctx.Done():
			return unknown(ctx.Err())
		}
	}
}

// barrier reads to the end of the log: up to a record that it writes.
func (x *reader) barrier(ctx context.Context) error {
	err := x.write(ctx, 0, nil, func() bool { return ctx.Err() == nil })
	if errors.Is(err, register.ErrUnknown) {
		err = fmt.Errorf("amqp: register: the end of stream %s was not read: %v", x.r.cfg.Stream, err) //nolint:errorlint // nothing is unknown to the caller
	}
	return err
}

// withReader calls call with a reader on a new channel of the shared connection.
func (r *Register) withReader(ctx context.Context, call func(*reader) error) error {
	return r.aside(ctx, func() error {
		x, err := r.reader(ctx)
		for tries := 1; err != nil && isCode(err, amqp091.InternalError) && tries < internalTries; tries++ {
			if !registers.Sleep(ctx, time.Duration(tries)*replicaEvery) {
				return ctx.Err()
			}
			x, err = r.reader(ctx)
		}
		if err != nil {
			return err
		}
		defer x.end(ctx)
		return call(x)
	})
}

// internalTries is how often withReader tries to open a reader. RabbitMQ 4.0 answers some clients
// with an internal error if they declare the same new stream at the same time.
const internalTries = 5

func (r *Register) reader(ctx context.Context) (*reader, error) {
	l, err := r.shared(ctx)
	if err != nil {
		return nil, err
	}
	return r.attach(ctx, l)
}

// Read returns the newest document. It appends a record that changes nothing, and reads up to it.
func (r *Register) Read(ctx context.Context) (number uint64, document []byte, err error) {
	if err := r.withReader(ctx, func(x *reader) error { return x.barrier(ctx) }); err != nil {
		return 0, nil, err
	}
	number, document = r.log.Newest()
	return number, document, nil
}

// The states of an attempt to send a record.
const (
	notSent = iota
	sent
	givenUp
)

// CompareAndSet appends a record, once, and reads up to it. If another writer was faster, the
// record stays in the stream, but has lost. Neither RabbitMQ nor the client repeats a record, so a
// record that has lost cannot win later.
func (r *Register) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if err := register.Check(number, document); err != nil {
		return err
	}
	if newest, _ := r.log.Newest(); newest >= number {
		return &register.ConflictError{Newest: newest}
	}
	var state atomic.Int32
	err := r.withReader(ctx, func(x *reader) error {
		return x.write(ctx, number, document, func() bool { return state.CompareAndSwap(notSent, sent) })
	})
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) && !errors.Is(err, register.ErrUnknown) && !state.CompareAndSwap(notSent, givenUp) {
		return fmt.Errorf("%w: amqp: %w", register.ErrUnknown, err)
	}
	return err
}

// Watch reads the log as it grows. Every 2 s it asks for the stream, to see that the broker
// answers.
func (r *Register) Watch(ctx context.Context, on func(register.Event)) error {
	return registers.Watch(ctx, func(number uint64, document []byte, err error) {
		on(register.Event{Number: number, Document: document, Err: err})
	}, r.session)
}

// session is one session of a Watch. It has a connection of its own, which it may cut.
func (r *Register) session(ctx context.Context, emit func(uint64, []byte) error) error {
	begin, cancel := context.WithTimeout(ctx, registers.Pulse)
	defer cancel()
	readers := make(chan *reader, 1)
	err := r.aside(begin, func() error {
		defer close(readers)
		l, err := r.connect(begin)
		if err != nil {
			return err
		}
		x, err := r.attach(begin, l)
		if err == nil {
			err = x.barrier(begin)
		}
		if err != nil || begin.Err() != nil {
			l.close()
			return errors.Join(err, begin.Err())
		}
		readers <- x
		return nil
	})
	if err != nil {
		go func() { // ends with the call above
			if x := <-readers; x != nil {
				x.link.close()
			}
		}()
		return err
	}
	x := <-readers
	defer r.closeAside(x.link)
	if err := emit(r.log.Newest()); err != nil {
		return err
	}
	pulse := time.NewTicker(registers.Pulse)
	defer pulse.Stop()
	var alive chan error // gets the answer of the latest sign of life; nil while none was asked for
	for {
		select {
		case d, ok := <-x.records:
			if err := x.fold(d, ok); err != nil {
				return err
			}
			if err := emit(r.log.Newest()); err != nil {
				return err
			}
		case <-pulse.C:
			if alive != nil {
				return fmt.Errorf("amqp: register: no answer for %s", registers.Pulse)
			}
			answer := make(chan error, 1)
			alive = answer
			go func() { answer <- r.ask(x.link) }() // ends with the connection
		case err := <-alive:
			alive = nil
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// closeAside closes a connection without waiting: the broker may not answer. Close waits for it.
func (r *Register) closeAside(l *link) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		go l.close() // a Watch that outlived Close
		return
	}
	r.calls.Go(l.close)
}

// ask asks whether the stream is there.
func (r *Register) ask(l *link) error {
	ch, err := l.Channel()
	if err == nil {
		_, err = ch.QueueDeclarePassive(r.cfg.Stream, true, false, false, false, nil)
	}
	if err == nil {
		err = ch.Close()
	}
	if err != nil {
		return fmt.Errorf("amqp: register: %w", err)
	}
	return nil
}
