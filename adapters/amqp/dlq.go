// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync/atomic"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/dlq"
)

// DLQConfig describes a queue or stream of dead letters. Only Queue must be set.
type DLQConfig struct {
	// Queue is the name of the queue or stream.
	Queue string

	// Kind is the type of a queue that is created: [amqp091.QueueTypeQuorum], the default,
	// [amqp091.QueueTypeClassic] or [amqp091.QueueTypeStream]. A queue that exists may have any
	// type.
	Kind string

	// Args are further arguments of a queue that is created, such as
	// x-max-age of a stream.
	Args amqp091.Table

	// NoCreate refuses a queue that does not exist, instead of creating it. The error has the
	// command that creates it.
	NoCreate bool

	// Dialect is the form of the headers that tell why a message is dead. Unset means stormguard's
	// own.
	Dialect dlq.Dialect

	// Logger gets changes of state: connections, and when the broker blocks one. Unset means the
	// logger of the first [Consume] or [Deliveries] that has this DLQ as its [WithDeadLetters].
	// Until then nothing is logged.
	Logger *slog.Logger
}

func (c DLQConfig) withDefaults() DLQConfig {
	if c.Kind == "" {
		c.Kind = amqp091.QueueTypeQuorum
	}
	return c
}

// Validate reports everything wrong at once.
func (c DLQConfig) Validate() error {
	d := c.withDefaults()
	var errs []error
	add := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("amqp: DLQConfig."+format, args...))
	}
	if d.Queue == "" || len(d.Queue) > maxShort {
		add("Queue: a name of %d bytes is not within 1 and %d", len(d.Queue), maxShort)
	}
	if strings.HasPrefix(d.Queue, "amq.") {
		add("Queue: %q: names that begin with amq. are the broker's", d.Queue)
	}
	if d.Kind != amqp091.QueueTypeQuorum && d.Kind != amqp091.QueueTypeClassic && d.Kind != amqp091.QueueTypeStream {
		add("Kind: %q is none of quorum, classic, stream", c.Kind)
	}
	if err := d.Args.Validate(); err != nil {
		add("Args: %w", err)
	}
	if err := d.Dialect.Validate(); err != nil {
		add("Dialect: %w", err)
	}
	return errors.Join(errs...)
}

// arguments returns the arguments of the queue's declaration.
func (c DLQConfig) arguments() amqp091.Table {
	args := amqp091.Table{"x-queue-type": c.Kind}
	maps.Copy(args, c.Args)
	return args
}

// command returns a command that creates the queue by hand.
func (c DLQConfig) command() string {
	return fmt.Sprintf("rabbitmqadmin declare queue name=%s durable=true arguments='{\"x-queue-type\":\"%s\"}'", c.Queue, c.Kind)
}

// DLQ writes dead letters to a queue or stream, on a connection of its own. When that breaks, the
// next write makes another. DLQ is a [dlq.Writer], and safe for concurrent use. It writes letters
// one after the other; each takes a round trip to the broker.
//
// [DLQ.Write] returns nil once the broker has taken responsibility: the message is persistent, was
// confirmed, and was not returned as unroutable. A dead letter has the message's body, headers and
// properties, the headers of the dialect, and [dlq.Record.ID] as its message-id. It has no
// expiration, which would end it, and no user-id, which the broker would check. The headers CC and
// BCC of a message from another broker are renamed kept-CC and kept-BCC: RabbitMQ would route by
// them. RabbitMQ does not recognise copies: a letter whose confirmation was lost is there twice,
// with one ID. A stream keeps no lists and tables in headers: they are lost.
//
// While it is connected, DLQ owns two goroutines beside those of the client. [DLQ.Close] ends them.
type DLQ struct {
	cfg    DLQConfig
	dialer Dialer
	log    atomic.Pointer[slog.Logger] // nil for silence

	// turn has an element while nobody uses the fields below.
	turn   chan struct{}
	s      *session // nil while there is no connection
	failed logPacer // paces the line that says why there is no connection
	closed bool
	plain  bool // decimals become text: RabbitMQ's streams cannot take them in

	patience time.Duration // how long to wait for a confirmation; see leastPatience
}

var _ dlq.Writer = (*DLQ)(nil)

// NewDLQ connects, and creates the queue of dead letters or checks that it exists. It fails if no
// endpoint answers. With NoCreate, a missing queue is an [ErrUnsuitable] that names the command
// that creates it. AMQP does not tell everything about a queue that exists, such as its durability;
// [Inspect] does.
func NewDLQ(ctx context.Context, dialer Dialer, cfg DLQConfig) (*DLQ, error) {
	if err := errors.Join(dialer.Validate(), cfg.Validate()); err != nil {
		return nil, err
	}
	d := &DLQ{cfg: cfg.withDefaults(), dialer: dialer, turn: make(chan struct{}, 1)}
	d.plain = d.cfg.Kind == amqp091.QueueTypeStream
	d.log.Store(d.cfg.Logger)
	s, err := d.connect(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.link.within(ctx, 0, func() error { return d.ensure(s.link) }); err != nil {
		s.end(ctx)
		return nil, errors.Join(err, ctx.Err())
	}
	d.s = s
	d.turn <- struct{}{}
	return d, nil
}

// inherit sets the logger, if there is none.
func (d *DLQ) inherit(log *slog.Logger) { d.log.CompareAndSwap(nil, log) }

var silent = slog.New(slog.DiscardHandler)

func (d *DLQ) logger() *slog.Logger {
	if log := d.log.Load(); log != nil {
		return log
	}
	return silent
}

// ensure looks for the queue, and creates it unless NoCreate is set.
func (d *DLQ) ensure(l *link) error {
	look := func(do func(*amqp091.Channel) error) error {
		ch, err := l.Channel() // a failed call closes the channel
		if err != nil {
			return err
		}
		if err := do(ch); err != nil {
			return err
		}
		return ch.Close()
	}
	err := look(func(ch *amqp091.Channel) error {
		_, err := ch.QueueDeclarePassive(d.cfg.Queue, true, false, false, false, nil)
		return err
	})
	if isCode(err, amqp091.NotFound) {
		if d.cfg.NoCreate {
			return unsuitable("there is no queue %s for dead letters: %s", d.cfg.Queue, d.cfg.command())
		}
		err = look(func(ch *amqp091.Channel) error {
			_, err := ch.QueueDeclare(d.cfg.Queue, true, false, false, false, d.cfg.arguments())
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("amqp: dead-letter queue %s: %w", d.cfg.Queue, err)
	}
	return nil
}

// Close ends the connection. It waits for a running write, but not longer than ctx.
func (d *DLQ) Close(ctx context.Context) error {
	select {
	case <-d.turn:
	case <-ctx.Done():
		return fmt.Errorf("amqp: close the dead-letter queue %s: a write is under way: %w", d.cfg.Queue, ctx.Err())
	}
	defer func() { d.turn <- struct{}{} }()
	d.closed = true
	if d.s != nil {
		d.s.end(ctx)
		d.s = nil
	}
	return nil
}

var errDLQClosed = errors.New("amqp: the dead-letter queue is closed")

// Write publishes the dead letter and waits until the broker has confirmed it. If the queue is a
// stream, a decimal among the headers becomes text.
//
// A record over the broker's max_message_size, or whose headers do not fit a frame, is a
// [*dlq.TooLargeError]. A queue that is gone is a [dlq.ErrRefused]. While the broker takes nothing
// in, a write fails. If ctx ends while other letters are written first, the error is a
// [dlq.ErrPutOff], and nothing was sent. If ctx ends later, the letter may be there. Written again
// within the same connection, it is not published a second time.
//
// Without a confirmation within 10 s, which double each time up to 5 min, the write fails and the
// next one makes a new connection. Then the letter may be there, too.
func (d *DLQ) Write(ctx context.Context, r *dlq.Record) error {
	m, err := d.message(r)
	if err != nil {
		return err
	}
	select {
	case <-d.turn:
	case <-ctx.Done():
		return fmt.Errorf("amqp: dead letter to %s: %w: other writes are before it: %w", d.cfg.Queue, dlq.ErrPutOff, ctx.Err())
	}
	defer func() { d.turn <- struct{}{} }()
	if d.closed {
		return errDLQClosed
	}
	if d.s == nil || d.s.over() {
		if d.s != nil {
			d.s.end(ctx)
			d.s = nil
		}
		if d.s, err = d.connect(ctx); err != nil {
			d.s = nil
			if d.failed.due(time.Now()) {
				d.logger().Warn("dead letters: not connected", "queue", d.cfg.Queue, "error", err)
			}
			return fmt.Errorf("amqp: dead letter to %s: %w", d.cfg.Queue, err)
		}
	}
	decimals := hasDecimal(m.Headers)
	if decimals && d.plain {
		m.Headers = tableWithoutDecimals(m.Headers)
	}
	if most := d.s.link.Config.FrameSize; most > 0 {
		if n := headerSize(m); n > most {
			return &dlq.TooLargeError{Size: n, Max: most}
		}
	}
	patience := max(d.patience, leastPatience)
	err = d.s.write(ctx, d.cfg.Queue, letterKeyOf(m.MessageId, r), m, patience)
	if err == nil {
		d.patience = leastPatience
		return nil
	}
	if errors.Is(err, errUnconfirmed) {
		d.patience = min(2*patience, mostPatience)
	}
	if isCode(err, amqp091.InternalError) && decimals {
		d.plain = true // the queue is an existing stream
	}
	return fmt.Errorf("amqp: dead letter to %s: %w", d.cfg.Queue, err)
}

// message is the dead letter as AMQP carries it.
func (d *DLQ) message(r *dlq.Record) (*amqp091.Publishing, error) {
	headers := dlq.Encode(r, d.cfg.Dialect)
	if r.Key != nil {
		headers = append(headers, dlq.Header{Name: keyHeader, Value: base64.StdEncoding.EncodeToString(r.Key)})
	}
	for _, h := range headers {
		if err := h.Validate(); err != nil {
			return nil, fmt.Errorf("amqp: dead letter %s: %w: %w", r.ID(), dlq.ErrRefused, err)
		}
	}
	m := &amqp091.Publishing{
		Headers: toTable(headers), Body: r.Body, DeliveryMode: amqp091.Persistent, MessageId: r.ID(), Timestamp: r.Timestamp,
	}
	toProperties(m, r.Properties)
	renameRouting(m.Headers)
	if name, ok := longName(m.Headers); ok {
		return nil, fmt.Errorf("amqp: dead letter %s: %w: a header's name has %d bytes, AMQP carries %d", r.ID(), dlq.ErrRefused, len(name), maxShort)
	}
	return m, nil
}

// headerSize is the size of the frame with the properties.
func headerSize(m *amqp091.Publishing) int {
	n := 8 + 14 + tableSize(m.Headers) + 1 + 1 + 8 // frame, class and flags, headers, mode, priority, timestamp
	for _, s := range []string{m.ContentType, m.ContentEncoding, m.CorrelationId, m.ReplyTo, m.MessageId, m.Type, m.AppId} {
		n += 1 + len(s)
	}
	return n
}

// blockedPatience is how long Write waits for a blocked broker before it says so.
const blockedPatience = time.Second

// A broker that is not blocked may take this long to confirm a dead letter. The time doubles with
// each letter that it does not confirm. A quorum queue that has come back a moment ago may lose a
// publishing, which the broker then never confirms. But a broker that is only slow must not get a
// copy each time.
const (
	leastPatience = 10 * time.Second
	mostPatience  = 5 * time.Minute
)
