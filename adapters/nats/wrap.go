// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

// WrapConsumer is the passive shape: it returns the consumer for an existing program to
// call, with the guard between the program and the server.
//
// The program's call on a message is its outcome. Ack and DoubleAck mean success, [Fail]
// means failure with an error, Nak and NakWithDelay mean failure without an error, and Term
// and TermWithReason mean [guard.Permanent]. Use Fail: without the error the guard notices
// an outage late, and one line at WARN says so. The server gets no nak and no term: the
// guard decides about retry, hold or dead letter.
//
// A message is settled once; a second call returns [jetstream.ErrMsgAlreadyAckd]. A message
// that is not settled within the consumer's AckWait has failed; InProgress restarts that
// time.
//
// The program gets one message at a time, in the order of the stream, unless the policy has
// more [guard.Policy.Workers]. With more, a retry comes after messages that were behind it.
// A program that settles whole batches at their end needs as many Workers as a batch has
// messages. Otherwise a fetch ends 400ms after the first message, and one line at WARN says
// so.
//
// With an order, fetches pull one after the other, also in several goroutines. Have only one
// Consume or one Messages at a time, and no fetch at the same time: the server deals messages
// out to all open pulls. A line at WARN says so.
//
// The limits of this shape, which [Consume] does not have:
//
//   - The guard sees only these outcomes. There is no handler timeout, and the program has to
//     handle its panics.
//   - The guard does not extend messages in nats.go's own buffer. Keep MaxAckPending within
//     the window, as the defaults do; a larger one is logged.
//   - While the source holds, calls return as if there were no messages. Messages that they
//     pulled come with a later call.
//
// The source ends with the Guard. Call [guard.Guard.Close] after the program has stopped
// consuming: it gives held messages back. It stops an open pull, whose last messages come
// again after their AckWait.
//
// If the program reads nothing for a minute (or for an AckWait if that is longer), held
// messages come again, here or in another process. A line at WARN says so. Messages reads only
// during a call of its Next, and while the program has an unsettled message.
//
// An ordered consumer, or a consumer without explicit acks, is an [ErrUnsuitable]. Each call
// of Consume or Messages starts one or two goroutines, which end when it is stopped.
func WrapConsumer(g *guard.Guard, consumer jetstream.Consumer, opts ...Option) (jetstream.Consumer, error) {
	o, err := sourceOptions(g, opts)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), infoTimeout)
	defer cancel()
	s, err := describe(ctx, consumer, &o)
	if err != nil {
		return nil, err
	}
	conn := connOf(consumer)
	warnOfConn(conn, &o, s.config.Name)
	warnOfMaxDeliver(s.limits.MaxDeliver, &o, s.info.Stream, s.info.Name, s.config.Name)
	p := &passivePort{
		msgPort: newMsgPort(s.info.Name, conn, &o), maxDeliver: s.limits.MaxDeliver,
		name: s.config.Name, log: o.log, unreadFor: max(time.Minute, s.limits.AckWait), born: time.Now(),
		parked: make(map[*taken]struct{}),
	}
	src, err := guard.Open(g, s.config, s.limits, p, nil)
	if err != nil {
		return nil, fmt.Errorf("nats: wrap %s: %w", s.config.Name, err)
	}
	if err := override(src, o.window); err != nil {
		src.End(ctx, guard.ReasonShutdown)
		return nil, fmt.Errorf("nats: wrap %s: WithWindow: %w", s.config.Name, err)
	}
	window := src.State().Window
	p.copies = newCopies(window)
	if src.State().Settings.Order == guard.OrderNone {
		p.copies.slack = uint64(window)
	}
	if most := s.info.Config.MaxAckPending; most < 1 || most > window {
		o.log.Warn("MaxAckPending is above the window: what waits in the client's buffer is not kept alive",
			"source", s.config.Name, "max_ack_pending", most, "window", window)
	}
	return &wrapped{
		Consumer: consumer, src: src, port: p, lease: s.limits.AckWait, window: window,
		pulls: newPulls(src.State().Settings.Order, window), drainFor: o.stopTimeout * 3 / 4, copyWait: min(copyWait, src.State().Settings.Breaker.Slow/2), name: s.config.Name, log: o.log,
	}, nil
}

// override sets the window of a new source.
func override[M any](src *guard.Source[M], window int) error {
	if window == 0 {
		return nil
	}
	policy := src.State().Settings
	policy.Window = window
	return src.Update(policy)
}

var (
	// errNak is the failure of a wrapped message that was nak'ed.
	errNak = errors.New("nats: nak")

	// errTerm is the permanent failure of a wrapped message that was terminated.
	errTerm = errors.New("nats: terminated")

	// errNotSettled is the failure of a wrapped message that was neither
	// settled nor extended within the consumer's AckWait.
	errNotSettled = errors.New("nats: not settled within the AckWait: take a longer one, or call InProgress meanwhile")

	// errNotWrapped means that [Fail] was given a message that does not come
	// from [WrapConsumer].
	errNotWrapped = errors.New("nats: not a message of a wrapped consumer")
)

// Fail settles a message of a wrapped consumer with an error, as a handler would return it:
// guard.Permanent, guard.Backoff and guard.Ignore have the same meaning. A nil err acks.
//
// Do not call Fail with an error that only comes from the program's own stop: it counts as a
// failure, too. Settle nothing then: the source gives the message back when it ends.
func Fail(m jetstream.Msg, err error) error {
	w, ok := m.(*wrappedMsg)
	if !ok {
		return errNotWrapped
	}
	return w.settle(nil, err) //nolint:staticcheck // nil: no confirmation is waited for
}

// taken is a message that the source has.
type taken struct {
	jetstream.Msg
	confirm context.Context //nolint:containedctx // of DoubleAck; nil for a plain ack
	acked   error           // result of the ack; only the goroutine that settles writes and reads it
	// lapsed is set when nobody reads and the message is no longer kept alive: the latest
	// copy of the message at that time.
	lapsed atomic.Pointer[jetstream.Msg]
	back   bool // the message belongs to the server again; same goroutine as acked
}

// wrappedMsg is one attempt of a message, as the program sees it.
type wrappedMsg struct {
	jetstream.Msg
	w     *wrapped
	of    *taken
	token guard.Token
	lease *time.Timer
	end   func() // ends passivePort.begin
	done  atomic.Bool
}

// settle takes the program's outcome, if the message has none yet.
func (m *wrappedMsg) settle(confirm context.Context, err error) error {
	if !m.done.CompareAndSwap(false, true) {
		return jetstream.ErrMsgAlreadyAckd
	}
	m.lease.Stop()
	m.end()
	return m.tell(confirm, err)
}

// expire settles the message at the end of its lease. It does not touch the timer, since it
// may run before hand has stored the timer.
func (m *wrappedMsg) expire() {
	if m.done.CompareAndSwap(false, true) {
		m.end()
		_ = m.tell(nil, errNotSettled) //nolint:staticcheck // nil: no confirmation is waited for
	}
}

// tell hands the outcome to the source. Only the caller that has set done calls it.
func (m *wrappedMsg) tell(confirm context.Context, err error) error {
	m.of.confirm, m.of.acked = confirm, errNoAck
	m.w.src.Done(m.token, err) // the ack is sent in this call
	if err == nil {
		return m.of.acked
	}
	return nil
}

// errNoAck is the result of an ack that was not sent, since the source has ended.
var errNoAck = fmt.Errorf("nats: ack: %w", guard.ErrClosed)

func (m *wrappedMsg) Ack() error { return m.settle(nil, nil) } //nolint:staticcheck // nil: no confirmation

func (m *wrappedMsg) DoubleAck(ctx context.Context) error { return m.settle(ctx, nil) }

func (m *wrappedMsg) Nak() error {
	m.w.hidden()
	return m.settle(nil, errNak) //nolint:staticcheck // nil: no confirmation
}

// NakWithDelay is Nak: the guard's own delays apply.
func (m *wrappedMsg) NakWithDelay(time.Duration) error { return m.Nak() }

// hidden logs once that the program does not report its errors.
func (w *wrapped) hidden() {
	w.said.Do(func() {
		w.log.Warn("the program naks without an error: an outage is noticed late, and may dead-letter healthy messages of a quiet source",
			"source", w.name, "help", "call guardnats.Fail(msg, err) in place of Nak")
	})
}

func (m *wrappedMsg) Term() error { return m.settle(nil, guard.Permanent(errTerm)) } //nolint:staticcheck // nil: no confirmation

func (m *wrappedMsg) TermWithReason(reason string) error {
	return m.settle(nil, guard.Permanent(fmt.Errorf("%w: %s", errTerm, reason))) //nolint:staticcheck // nil: no confirmation
}

// InProgress restarts the message's AckWait, here and at the server.
func (m *wrappedMsg) InProgress() error {
	if m.done.Load() {
		return jetstream.ErrMsgAlreadyAckd
	}
	m.lease.Reset(m.w.lease)
	return m.Msg.InProgress()
}

// passivePort is the port of the passive shape.
type passivePort struct {
	msgPort
	maxDeliver int
	name       string // name of the source
	log        *slog.Logger

	unreadFor time.Duration // time without a reader until held messages are left to the server
	born      time.Time
	reading   atomic.Int32 // calls that hand out messages (of an iterator: Next), and unsettled messages of the program
	read      atomic.Int64 // when reading last went down, since born
	lapse     atomic.Bool  // the warning was logged, and nobody has read since

	mu     sync.Mutex
	parked map[*taken]struct{} // messages from the server that are not in the source yet
}

// begin notes that the program reads, or works on a message, until end is called.
func (p *passivePort) begin() (end func()) {
	p.reading.Add(1)
	p.lapse.Store(false)
	return sync.OnceFunc(func() {
		p.read.Store(int64(time.Since(p.born)))
		p.reading.Add(-1)
	})
}

// unread reports whether the program no longer reads: it would keep held messages from all
// other processes.
func (p *passivePort) unread() bool {
	return p.reading.Load() == 0 && time.Since(p.born)-time.Duration(p.read.Load()) >= p.unreadFor
}

func (p *passivePort) Lane(m *taken) uint64     { return p.msgPort.Lane(m.Msg) }
func (p *passivePort) Size(m *taken) int        { return p.msgPort.Size(m.Msg) }
func (p *passivePort) Meta(m *taken) guard.Meta { return p.msgPort.Meta(m.Msg) }

func (p *passivePort) Ack(m *taken) error {
	switch {
	case m.back:
		p.copies.settled(m.Msg, false)
		m.acked = guard.ErrTakenBack
	case p.copies.stale(m.Msg):
		m.acked = errEarlierStream
	case m.confirm != nil:
		m.acked = p.msgPort.acked(m.Msg, p.msgPort.copies.of(m.Msg).DoubleAck(m.confirm))
	default:
		m.acked = p.msgPort.Ack(m.Msg)
	}
	return m.acked
}

// gone reports whether a message has lapsed and has not come to this process again.
func (p *passivePort) gone(m *taken) bool {
	then := m.lapsed.Load()
	return then != nil && p.copies.of(m.Msg) == *then
}

// Extend also keeps parked messages alive. While nobody reads, it leaves all to the server.
func (p *passivePort) Extend(ms []*taken) {
	p.mu.Lock()
	ms = slices.AppendSeq(slices.Clip(ms), maps.Keys(p.parked))
	p.mu.Unlock()
	if p.unread() {
		for _, m := range ms { // the program works on none of them
			latest := p.copies.of(m.Msg)
			m.lapsed.Store(&latest)
		}
		if len(ms) > 0 && !p.lapse.Swap(true) {
			p.log.Warn("nobody reads a wrapped consumer: what it holds comes again after its AckWait, here or elsewhere",
				"source", p.name, "messages", len(ms), "help", "end the source when you stop consuming: Guard.Source(name).End, or Guard.Close")
		}
		return
	}
	all := make([]jetstream.Msg, 0, len(ms))
	for _, m := range ms {
		if !p.gone(m) {
			all = append(all, m.Msg)
		}
	}
	p.msgPort.Extend(all)
}

func (p *passivePort) Return(ms []*taken, _ guard.Reason) error {
	back := make([]jetstream.Msg, 0, len(ms))
	for _, m := range ms {
		if !p.gone(m) { // another process may have a lapsed message, and would lose it by a nak
			back = append(back, m.Msg)
		}
	}
	return p.nakAll(back, p.maxDeliver)
}

// Demand does nothing: no pull opens before the messages of the previous pull have room.
func (p *passivePort) Demand(int) {}

// park begins or ends the time in which a message waits for room.
func (p *passivePort) park(t *taken, waits bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if waits {
		p.parked[t] = struct{}{}
	} else {
		delete(p.parked, t)
	}
}

// full reports whether a pulled message waits for room: another would wait behind it.
func (p *passivePort) full() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.parked) > 0
}

// wrapped is the consumer that the program calls.
type wrapped struct {
	jetstream.Consumer
	src    *guard.Source[*taken]
	port   *passivePort
	lease  time.Duration
	window int
	// drainFor is how long a drain waits for messages that wait behind a head, in order.
	drainFor time.Duration
	copyWait time.Duration
	name     string // name of the source
	log      *slog.Logger
	said     sync.Once // logs that the program's failures have no error

	pulls   pullTurns    // pullTurns of fetches
	short   sync.Once    // logs that a batch ended early
	readers atomic.Int32 // open calls of Consume and Messages
	several sync.Once    // logs that there are several readers
}

// offer gives a pulled message to the source, unless it is a copy of a message that the
// source has or had. It waits for room, and keeps the message alive meanwhile.
//
// If ctx ends first, offer gives the message back and returns nil. If the source has ended,
// offer returns [guard.ErrClosed] and leaves the message to its AckWait: while a pull is
// open, a nak would bring it back at once, and each time costs a delivery.
func (w *wrapped) offer(ctx context.Context, m jetstream.Msg) error {
	p := w.port
	if !p.took(m) {
		return nil
	}
	t := &taken{Msg: m}
	err := w.src.Offer(t)
	if errors.Is(err, guard.ErrFull) {
		p.park(t, true)
		err = w.src.OfferWait(ctx, t)
		p.park(t, false)
	}
	if err == nil || errors.Is(err, guard.ErrClosed) {
		return err
	}
	latest := p.copies.of(m)
	p.copies.settled(m, false) // before the nak: the redelivery may come at once, and is no copy
	_ = p.nakAll([]jetstream.Msg{latest}, p.maxDeliver)
	return nil
}

// hand makes the program's message of an item. It returns nil if the message has lapsed and
// the server has not given it to this process again: then it takes the item back.
func (w *wrapped) hand(it guard.Item[*taken]) jetstream.Msg {
	if w.port.gone(it.Msg) {
		w.takeBack(it)
		return nil
	}
	it.Msg.lapsed.Store(nil)
	m := &wrappedMsg{Msg: it.Msg.Msg, w: w, of: it.Msg, token: it.Token, end: w.port.begin()}
	m.lease = time.AfterFunc(w.lease, m.expire)
	return m
}

// takeBack forgets a lapsed item: if the message comes again, it is new here.
func (w *wrapped) takeBack(it guard.Item[*taken]) {
	it.Msg.back = true
	w.src.Done(it.Token, guard.Ignore(errLapsed))
}

var errLapsed = fmt.Errorf("nats: it was not kept alive: %w", guard.ErrTakenBack)

// drained reports whether no message is about to be handed out.
func (w *wrapped) drained() bool { return w.src.Account().Waiting == 0 }

// overdue reports whether a drain must end although messages wait, and logs it. moved is when
// the drain's pull ended, or when it last handed a message out after that.
func (w *wrapped) overdue(moved time.Time) bool {
	if time.Since(moved) < w.drainFor {
		return false
	}
	a := w.src.Account()
	w.log.Warn("a drain ends with messages that wait behind others", "source", w.name, "waiting", a.Waiting, "unsettled", a.Unsettled(),
		"help", "read on, or give them back: Guard.Close, or Guard.Source(name).End")
	return true
}

// reads counts a Consume or an iterator as an open pull, until the caller calls done. With an
// order it logs once if there is another pull. An open iterator does not read: its Next does.
func (w *wrapped) reads() (done func()) {
	if w.readers.Add(1) > 1 || len(w.pulls.turn) > 0 {
		w.saySeveral()
	}
	return sync.OnceFunc(func() { w.readers.Add(-1) })
}

func (w *wrapped) saySeveral() {
	if !w.pulls.ordered() {
		return
	}
	w.several.Do(func() {
		w.log.Warn("several pulls of a wrapped consumer are open at once: messages may come out of order", "source", w.name,
			"help", "have one Consume or Messages at a time and no fetch beside it, or use guard.OrderNone")
	})
}

// Consume calls handler for each message that may be handled, one at a time.
func (w *wrapped) Consume(handler jetstream.MessageHandler, opts ...jetstream.PullConsumeOpt) (jetstream.ConsumeContext, error) {
	if handler == nil {
		return nil, jetstream.ErrHandlerRequired
	}
	ctx, stop := context.WithCancel(context.Background())
	offering, unoffer := context.WithCancel(ctx)
	c := &wrappedConsume{stop: stop, unoffer: unoffer, closed: make(chan struct{})}
	done, end := w.reads(), w.port.begin()
	var inner jetstream.ConsumeContext
	opened := make(chan struct{})
	inner, err := w.Consumer.Consume(func(m jetstream.Msg) {
		if w.offer(offering, m) != nil {
			<-opened
			inner.Stop() // here, since the program's handler may take long to return
		}
	}, opts...)
	if err != nil {
		stop()
		end()
		done()
		return nil, err
	}
	c.ConsumeContext = inner
	close(opened)
	go func() { // ends with Stop, Drain, the source or the pull
		defer close(c.closed)
		defer done()
		defer end()
		w.pump(ctx.Done(), inner.Closed(), func(m jetstream.Msg) { handler(m) })
		inner.Stop()
	}()
	return c, nil
}

// pump hands messages to f until stop or the end of the source. After the pull is closed, it
// ends when no message may be handled, or the drain is overdue.
func (w *wrapped) pump(stop, closed <-chan struct{}, f func(jetstream.Msg)) {
	var over time.Time // when the pull was closed, or when f last returned after that
	for idle := 0; idle < 2; {
		select {
		case <-stop:
			return
		default:
		}
		var look <-chan time.Time
		if !over.IsZero() {
			look = time.After(settleDown)
		}
		select {
		case <-w.src.Ended():
			return
		case it, ok := <-w.src.Ready():
			if !ok {
				return
			}
			idle = 0
			if m := w.hand(it); m != nil {
				f(m)
				if !over.IsZero() {
					over = time.Now()
				}
			}
		case <-closed:
			closed, over = nil, time.Now()
		case <-look:
			switch {
			case w.drained():
				idle++
			case w.overdue(over):
				return
			}
		case <-stop:
			return
		}
	}
}

// wrappedConsume is the context of a wrapped Consume.
type wrappedConsume struct {
	jetstream.ConsumeContext
	stop    context.CancelFunc
	unoffer context.CancelFunc // ends every wait for room
	closed  chan struct{}
}

// Drain gives back messages that wait for room: the window may be full until an outage ends.
func (c *wrappedConsume) Drain() {
	c.unoffer()
	c.ConsumeContext.Drain()
}

func (c *wrappedConsume) Stop() {
	c.stop()
	c.ConsumeContext.Stop()
}

func (c *wrappedConsume) Closed() <-chan struct{} { return c.closed }

// Messages iterates over the messages that may be handled.
func (w *wrapped) Messages(opts ...jetstream.PullMessagesOpt) (jetstream.MessagesContext, error) {
	inner, err := w.Consumer.Messages(opts...)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	offering, unoffer := context.WithCancel(ctx)
	return &iterator{w: w, inner: inner, ctx: ctx, stop: stop, offering: offering, unoffer: unoffer, done: w.reads()}, nil
}

// iterator is a wrapped MessagesContext. At most one goroutine asks the client for the next
// message. It may outlive the Next that started it, and ends with the pull.
type iterator struct {
	w     *wrapped
	inner jetstream.MessagesContext
	ctx   context.Context //nolint:containedctx // until Stop
	stop  context.CancelFunc
	done  func() // ends wrapped.reads

	offering context.Context    //nolint:containedctx // until Stop or Drain
	unoffer  context.CancelFunc // ends every wait for room

	next   sync.Mutex // held during Next
	asking chan error // answer of the goroutine that asks the client; nil if there is none
	over   time.Time  // when the pull ended, or when a message was last handed out after that; zero before
}

func (it *iterator) Next(opts ...jetstream.NextOpt) (jetstream.Msg, error) {
	timeout, ctx := nextOptions(opts)
	if timeout > 0 && ctx != nil {
		return nil, fmt.Errorf("%w: cannot specify both NextMaxWait and NextContext", jetstream.ErrInvalidOption)
	}
	it.next.Lock()
	defer it.next.Unlock()
	end := it.w.port.begin()
	defer end()
	var limit <-chan time.Time
	if timeout > 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		limit = timer.C
	}
	var ended <-chan struct{}
	if ctx != nil {
		ended = ctx.Done()
	}
	for idle := 0; idle < 2; {
		select {
		case <-it.ctx.Done():
			return nil, jetstream.ErrMsgIteratorClosed
		default:
		}
		if it.asking == nil && it.over.IsZero() {
			answer := make(chan error, 1)
			it.asking = answer
			go func() {
				m, err := it.inner.Next()
				if err == nil {
					if err = it.w.offer(it.offering, m); err != nil {
						it.inner.Stop()
					}
				}
				answer <- err
			}()
		}
		var look <-chan time.Time
		if !it.over.IsZero() {
			look = time.After(settleDown)
		}
		select {
		case <-it.w.src.Ended():
			it.inner.Stop() // the program may call Stop late, and each message that comes waits for its AckWait
			return nil, guard.ErrClosed
		case item, ok := <-it.w.src.Ready():
			if !ok {
				it.inner.Stop()
				return nil, guard.ErrClosed
			}
			if m := it.w.hand(item); m != nil {
				if !it.over.IsZero() {
					it.over = time.Now()
				}
				return m, nil
			}
		case err := <-it.asking:
			it.asking = nil
			switch {
			case err == nil:
			case errors.Is(err, jetstream.ErrMsgIteratorClosed):
				it.over = time.Now()
				it.done()
			default:
				return nil, err
			}
		case <-look:
			switch {
			case it.w.drained():
				idle++
			case it.w.overdue(it.over):
				it.stop()
				return nil, jetstream.ErrMsgIteratorClosed
			}
		case <-limit:
			return nil, nats.ErrTimeout
		case <-ended:
			return nil, ctx.Err()
		case <-it.ctx.Done():
			return nil, jetstream.ErrMsgIteratorClosed
		}
	}
	return nil, jetstream.ErrMsgIteratorClosed
}

// nextOptions returns the values of NextMaxWait and NextContext. These options are functions
// on a type that nats.go does not export, so nextOptions makes a value of it and reads that.
func nextOptions(opts []jetstream.NextOpt) (timeout time.Duration, ctx context.Context) {
	for _, opt := range opts {
		f := reflect.ValueOf(opt)
		if f.Kind() != reflect.Func || f.Type().NumIn() != 1 || f.Type().In(0).Kind() != reflect.Pointer {
			continue
		}
		req := reflect.New(f.Type().In(0).Elem())
		f.Call([]reflect.Value{req})
		if v := req.Elem().FieldByName("timeout"); v.IsValid() && v.CanInt() {
			timeout = max(timeout, time.Duration(v.Int()))
		}
		if v := req.Elem().FieldByName("ctx"); v.IsValid() && v.Type() == reflect.TypeFor[context.Context]() && !v.IsNil() {
			ctx = *(*context.Context)(v.Addr().UnsafePointer()) //nolint:fatcontext // it replaces; the field is not exported
		}
	}
	return timeout, ctx
}

func (it *iterator) Stop() {
	it.stop()
	it.inner.Stop()
	it.done()
}

func (it *iterator) Drain() {
	it.unoffer()
	it.inner.Drain()
}
