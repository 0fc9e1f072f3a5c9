// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

// WrapConsumer is the passive shape: the consumer that an existing program
// already calls, with the guard between it and the server. What the program does
// to a message is the outcome: Ack and DoubleAck are success, [Fail] is failure with its
// error, Nak and NakWithDelay are failure without one, and Term and TermWithReason are
// [guard.Permanent]. Use Fail: without the error an outage is noticed late, and one line
// at WARN says so. Nothing is nak'ed or terminated at the server: the guard decides
// about the retry, the hold or the dead letter. A message is settled once;
// again is [jetstream.ErrMsgAlreadyAckd]. One that is not settled within the
// consumer's AckWait has failed with [ErrNotSettled]; InProgress begins that
// time anew.
//
// One message is out at a time, in the order of the stream, unless the policy has
// more [guard.Policy.Workers]. With those a retry comes after messages that were
// behind it. A program that settles a whole batch at its end needs as many Workers
// as the batch has messages: otherwise a fetch ends 400ms after the first message,
// and one line at WARN says so. With an order, fetches pull one after the other, also those
// of several goroutines.
//
// What it cannot do: it sees only these outcomes. There is no handler timeout,
// and a panic is the program's.
// What waits in nats.go's own buffer is not extended, so keep MaxAckPending
// within the window, as the defaults do; a larger one is logged. While the
// source holds, calls return as they do when there are no messages, and what
// they pulled comes with a later call. [Consume] has none of these limits.
//
// The source ends with the Guard: call [guard.Guard.Close] after the program has stopped
// consuming, and what is held is given back. Without that it comes again after its AckWait. A pull that is still open is stopped,
// and what it brings by then comes again after its AckWait. Ordered consumers and those
// without explicit acks are an [ErrUnsuitable]. Each call of Consume or
// Messages starts one or two goroutines, which end when it is stopped.
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
	p := &passivePort{
		msgPort: newMsgPort(s.info.Name, conn, &o), maxDeliver: s.limits.MaxDeliver,
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
	if most := s.info.Config.MaxAckPending; most < 1 || most > window {
		o.log.Warn("MaxAckPending is above the window: what waits in the client's buffer is not kept alive",
			"source", s.config.Name, "max_ack_pending", most, "window", window)
	}
	pulls := 1
	if src.State().Settings.Order == guard.OrderNone { // an update cannot change it
		pulls = window
	}
	return &wrapped{
		Consumer: consumer, src: src, port: p, lease: s.limits.AckWait, window: window,
		turn: make(chan struct{}, pulls), name: s.config.Name, log: o.log,
	}, nil
}

// override changes the window of a source that was just opened.
func override[M any](src *guard.Source[M], window int) error {
	if window == 0 {
		return nil
	}
	policy := src.State().Settings
	policy.Window = window
	return src.Update(policy)
}

var (
	// ErrNak is the failure of a wrapped message that was nak'ed.
	ErrNak = errors.New("nats: nak")

	// ErrTerm is the permanent failure of a wrapped message that was terminated.
	ErrTerm = errors.New("nats: terminated")

	// ErrNotSettled is the failure of a wrapped message that was neither
	// settled nor extended within the consumer's AckWait.
	ErrNotSettled = errors.New("nats: not settled within the AckWait")

	// ErrNotWrapped means that [Fail] was given a message that does not come
	// from [WrapConsumer].
	ErrNotWrapped = errors.New("nats: not a message of a wrapped consumer")
)

// Fail reports the failure of a message of a wrapped consumer, as a handler
// would return it: guard.Permanent, guard.Backoff and guard.Ignore mean what
// they mean there. A nil err acks.
func Fail(m jetstream.Msg, err error) error {
	w, ok := m.(*wrappedMsg)
	if !ok {
		return ErrNotWrapped
	}
	return w.settle(nil, err) //nolint:staticcheck // nil: no confirmation is waited for
}

// taken is a message that the source has.
type taken struct {
	jetstream.Msg
	confirm context.Context //nolint:containedctx // of DoubleAck; nil for a plain ack
	acked   error           // what the ack said; written and read by the goroutine that settles
}

// wrappedMsg is one attempt of a message, as the program sees it.
type wrappedMsg struct {
	jetstream.Msg
	w     *wrapped
	of    *taken
	token guard.Token
	lease *time.Timer
	done  atomic.Bool
}

// settle takes the program's outcome, if there is none yet.
func (m *wrappedMsg) settle(confirm context.Context, err error) error {
	if !m.done.CompareAndSwap(false, true) {
		return jetstream.ErrMsgAlreadyAckd
	}
	m.lease.Stop()
	return m.tell(confirm, err)
}

// expire is the outcome at the end of the lease. It may run before hand has
// kept the timer, and so leaves that alone.
func (m *wrappedMsg) expire() {
	if m.done.CompareAndSwap(false, true) {
		_ = m.tell(nil, ErrNotSettled) //nolint:staticcheck // nil: no confirmation is waited for
	}
}

// tell hands the outcome to the source. Who has set done calls it.
func (m *wrappedMsg) tell(confirm context.Context, err error) error {
	m.of.confirm, m.of.acked = confirm, errNoAck
	m.w.src.Done(m.token, err) // acks right here
	if err == nil {
		return m.of.acked
	}
	return nil
}

// errNoAck stays when the source has ended, so that no ack went out.
var errNoAck = fmt.Errorf("nats: ack: %w", guard.ErrClosed)

func (m *wrappedMsg) Ack() error { return m.settle(nil, nil) } //nolint:staticcheck // nil: no confirmation

func (m *wrappedMsg) DoubleAck(ctx context.Context) error { return m.settle(ctx, nil) }

func (m *wrappedMsg) Nak() error {
	m.w.hidden()
	return m.settle(nil, ErrNak) //nolint:staticcheck // nil: no confirmation
}

// NakWithDelay is Nak: the guard's own delays apply.
func (m *wrappedMsg) NakWithDelay(time.Duration) error { return m.Nak() }

// hidden says once that the program does not tell its errors.
func (w *wrapped) hidden() {
	w.said.Do(func() {
		w.log.Warn("the program naks without an error: an outage is noticed late, and may dead-letter healthy messages of a quiet source",
			"source", w.name, "help", "call guardnats.Fail(msg, err) in place of Nak")
	})
}

func (m *wrappedMsg) Term() error { return m.settle(nil, guard.Permanent(ErrTerm)) } //nolint:staticcheck // nil: no confirmation

func (m *wrappedMsg) TermWithReason(reason string) error {
	return m.settle(nil, guard.Permanent(fmt.Errorf("%w: %s", ErrTerm, reason))) //nolint:staticcheck // nil: no confirmation
}

// InProgress begins the message's AckWait anew, here and at the server.
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

	mu     sync.Mutex
	parked map[*taken]struct{} // taken from the server, not in the source yet
}

func (p *passivePort) Lane(m *taken) uint64     { return p.msgPort.Lane(m.Msg) }
func (p *passivePort) Size(m *taken) int        { return p.msgPort.Size(m.Msg) }
func (p *passivePort) Meta(m *taken) guard.Meta { return p.msgPort.Meta(m.Msg) }

func (p *passivePort) Ack(m *taken) error {
	switch {
	case p.copies.stale(m.Msg):
		m.acked = errEarlierStream
	case m.confirm != nil:
		m.acked = p.msgPort.acked(m.Msg, p.msgPort.copies.of(m.Msg).DoubleAck(m.confirm))
	default:
		m.acked = p.msgPort.Ack(m.Msg)
	}
	return m.acked
}

// Extend also keeps alive what is parked.
func (p *passivePort) Extend(ms []*taken) {
	all := make([]jetstream.Msg, 0, len(ms))
	for _, m := range ms {
		all = append(all, m.Msg)
	}
	p.mu.Lock()
	for m := range p.parked {
		all = append(all, m.Msg)
	}
	p.mu.Unlock()
	p.msgPort.Extend(all)
}

func (p *passivePort) Return(ms []*taken, _ guard.Reason) error {
	back := make([]jetstream.Msg, len(ms))
	for i, m := range ms {
		back[i] = m.Msg
	}
	return p.nakAll(back, p.maxDeliver)
}

// Demand has nothing to do: no pull opens before the one before it has found room.
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

// full tells whether a message that was pulled waits for room: another would wait
// behind it.
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
	name   string // the source's
	log    *slog.Logger
	said   sync.Once // that the program's failures have no error

	// turn has a place for each pull of a fetch that may be open at once. With an order it
	// is one: the server deals messages out to all that are open, and each has a goroutine.
	turn chan struct{}
	// asked is how many messages pulls may still bring whose call has returned.
	asked atomic.Int64
	short sync.Once // it was said that a batch ended early
}

// offer gives a message that was pulled to the source, unless it is a copy of one that
// the source has, or had. It waits for room, and keeps the message alive meanwhile.
//
// It returns nil if ctx ends first, and the message has gone back. If the source has
// ended, [guard.ErrClosed], the message is left to its AckWait: a nak would bring it right
// back as long as a pull is open, and each time costs a delivery.
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
	p.copies.settled(m, false) // first: what the nak brings back may be here at once, and is no copy
	_ = p.nakAll([]jetstream.Msg{latest}, p.maxDeliver)
	return nil
}

const (
	// settleDown is how long a call waits for the source to hand out what it
	// has just been offered. No event says that nothing more will come, only counts do,
	// so a call whose pull is over looks at those, and ends with its wait or after stuck
	// looks; one that drains, as soon as nothing waits.
	settleDown = 20 * time.Millisecond
	// stuck is after how many of those a fetch takes what waits to be behind a retry
	// of its lane.
	stuck = 20
)

// hand makes an item the program's.
func (w *wrapped) hand(it guard.Item[*taken]) jetstream.Msg {
	m := &wrappedMsg{Msg: it.Msg.Msg, w: w, of: it.Msg, token: it.Token}
	m.lease = time.AfterFunc(w.lease, m.expire)
	return m
}

// drained tells whether nothing is about to be handed out.
func (w *wrapped) drained() bool { return w.src.Account().Waiting == 0 }

// Fetch is up to batch messages that may be handled now.
func (w *wrapped) Fetch(batch int, opts ...jetstream.FetchOpt) (jetstream.MessageBatch, error) {
	return w.fetch(batch, waitOf(opts), func(n int) (jetstream.MessageBatch, error) { return w.Consumer.Fetch(n, opts...) })
}

// FetchNoWait is up to batch messages that are there.
func (w *wrapped) FetchNoWait(batch int) (jetstream.MessageBatch, error) {
	return w.fetch(batch, 0, w.Consumer.FetchNoWait)
}

// FetchBytes is messages up to maxBytes, if the source has room; messages that
// were held come first and do not count.
func (w *wrapped) FetchBytes(maxBytes int, opts ...jetstream.FetchOpt) (jetstream.MessageBatch, error) {
	return w.fetch(w.window, waitOf(opts), func(int) (jetstream.MessageBatch, error) { return w.Consumer.FetchBytes(maxBytes, opts...) })
}

// Next is one message that may be handled now, or [nats.ErrTimeout].
func (w *wrapped) Next(opts ...jetstream.FetchOpt) (jetstream.Msg, error) {
	b, err := w.Fetch(1, opts...)
	if err != nil {
		return nil, err
	}
	if m, ok := <-b.Messages(); ok {
		return m, nil
	}
	if err := b.Error(); err != nil {
		return nil, err
	}
	return nil, nats.ErrTimeout
}

// waitOf is how long a fetch may wait. The options are functions over a type
// that nats.go does not export, so one of it is made and asked.
func waitOf(opts []jetstream.FetchOpt) time.Duration {
	req := reflect.New(reflect.TypeFor[jetstream.FetchOpt]().In(0).Elem())
	for _, opt := range opts {
		reflect.ValueOf(opt).Call([]reflect.Value{req}) // an error comes again from the client
	}
	if f := req.Elem().FieldByName("Expires"); f.IsValid() && f.CanInt() && f.Int() > 0 {
		return time.Duration(f.Int())
	}
	return jetstream.DefaultExpires
}

// batch is the result of a fetch.
type batch struct {
	out chan jetstream.Msg
	mu  sync.Mutex
	err error
}

func (b *batch) Messages() <-chan jetstream.Msg { return b.out }

func (b *batch) Error() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// take gives the source what a fetch's pull brings, of which want counts in asked. It
// ends with the pull, or with the source ([guard.ErrClosed]). A message that waits for room
// does not keep those that the source has from being handed out, since only their acks
// make room: the source's bytes may be used up before its messages are. short says that
// the pull has brought less than want.
func (w *wrapped) take(pull jetstream.MessageBatch, want int64) (short bool, err error) {
	for in := pull.Messages(); ; {
		select {
		case m, ok := <-in:
			if !ok {
				w.asked.Add(-want)
				return want > 0, pull.Error()
			}
			if want > 0 { // FetchBytes may bring more
				want--
				w.asked.Add(-1)
			}
			if err := w.offer(context.Background(), m); err != nil {
				return false, err
			}
		case <-w.src.Ended():
			return false, guard.ErrClosed
		}
	}
}

// opened is a pull that a fetch has opened.
type opened struct {
	ended chan struct{} // closed when the pull has ended; then the two below are set
	short bool          // it has brought less than it was asked for
	err   error
}

// open pulls up to most messages, if the source has room for what is pulled. It is nil with
// a nil error if it has not. The caller has a place in turn; open or the pull's goroutine
// gives it back.
func (w *wrapped) open(most int, pull func(int) (jetstream.MessageBatch, error)) (*opened, error) {
	want := int64(min(most, w.src.State().Room)) - w.asked.Load()
	if want < 1 || w.port.full() {
		<-w.turn
		return nil, nil //nolint:nilnil // no pull is no error
	}
	inner, err := pull(int(want))
	if err != nil {
		<-w.turn
		return nil, err
	}
	w.asked.Add(want)
	o := &opened{ended: make(chan struct{})}
	go func() {
		defer close(o.ended)
		defer func() { <-w.turn }()
		o.short, o.err = w.take(inner, want)
	}()
	return o, nil
}

// fetch pulls what the source has room for and hands out what it lets through.
// It starts two goroutines. One hands out, and ends when what the pull brought is handed
// out, and after wait, or shortly after it, at the latest. The other is [wrapped.take]: when
// messages that were held have filled the batch, or the source has no room for what is
// pulled, the pull goes on until it ends, and what it brings is a later call's: that pulls
// less. If messages are in order, a later call pulls once the pull has ended, and hands out
// what it brings meanwhile.
func (w *wrapped) fetch(most int, wait time.Duration, pull func(int) (jetstream.MessageBatch, error)) (jetstream.MessageBatch, error) {
	if w.src.State().Ended {
		return nil, guard.ErrClosed
	}
	if most < 1 {
		return pull(0) // the client says what is wrong; of fewer it panics
	}
	var own *opened
	turn := w.turn // nil if no turn is waited for
	select {
	case turn <- struct{}{}:
		var err error
		if own, err = w.open(most, pull); err != nil {
			return nil, err
		}
		turn = nil
	default:
	}
	b := &batch{out: make(chan jetstream.Msg, min(most, w.window))}
	fail := func(err error) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.err = err
	}
	go func() {
		defer close(b.out)
		deadline := time.NewTimer(wait)
		defer deadline.Stop()
		look := time.NewTicker(settleDown)
		defer look.Stop()
		pulling := own.end()
		late := turn != nil // the pull was opened late, and may end after wait
		ended, over, given := false, false, 0
		for idle := 0; given < cap(b.out) && idle < stuck && !ended; {
			select {
			case turn <- struct{}{}:
				turn = nil
				var err error
				own, err = w.open(cap(b.out)-given, pull)
				pulling = own.end()
				if err != nil {
					fail(err)
					over = true
				}
			case <-pulling:
				pulling = nil
				fail(own.err)
				// A pull that brought all leaves the rest of the wait to the source, if
				// it holds, which may be for less than that.
				over = over || own.short || own.err != nil
			case <-w.src.Ended():
				ended = true
				fail(guard.ErrClosed)
			case it, ok := <-w.src.Ready():
				if !ok {
					continue // it has ended
				}
				idle = 0
				given++
				b.out <- w.hand(it)
			case <-deadline.C:
				over, turn = true, nil
				if late {
					pulling = nil
				}
			case <-look.C:
				a := w.src.Account()
				switch {
				case (pulling != nil || turn != nil) && !w.port.full() || !over && (given == 0 || a.Held > 0):
				case a.Waiting == 0:
					idle += stuck / 2
				default:
					idle++
				}
			}
		}
		w.sayShort(given, cap(b.out))
	}()
	return b, nil
}

// end is closed when the pull has ended; nil if there is none.
func (o *opened) end() <-chan struct{} {
	if o == nil {
		return nil
	}
	return o.ended
}

// sayShort says once that a batch ended since as many messages are out as may be.
func (w *wrapped) sayShort(given, most int) {
	workers := w.src.State().Settings.Workers
	if a := w.src.Account(); given == 0 || given == most || a.Waiting == 0 || a.Processing < workers {
		return
	}
	w.short.Do(func() {
		w.log.Warn("a fetched batch ended early: the next message comes when one is settled; a program that settles whole batches needs Policy.Workers",
			"source", w.src.Name(), "messages", given, "asked", most, "workers", workers)
	})
}

// Consume calls handler for each message that may be handled, one at a time.
func (w *wrapped) Consume(handler jetstream.MessageHandler, opts ...jetstream.PullConsumeOpt) (jetstream.ConsumeContext, error) {
	if handler == nil {
		return nil, jetstream.ErrHandlerRequired
	}
	ctx, stop := context.WithCancel(context.Background())
	c := &wrappedConsume{stop: stop, closed: make(chan struct{})}
	var inner jetstream.ConsumeContext
	opened := make(chan struct{})
	inner, err := w.Consumer.Consume(func(m jetstream.Msg) {
		if w.offer(ctx, m) != nil {
			<-opened
			inner.Stop() // here, for the program's handler may not return for long
		}
	}, opts...)
	if err != nil {
		stop()
		return nil, err
	}
	c.ConsumeContext = inner
	close(opened)
	go func() { // ends with Stop, Drain, the source or the pull
		defer close(c.closed)
		w.pump(ctx.Done(), inner.Closed(), func(m jetstream.Msg) { handler(m) })
		inner.Stop()
	}()
	return c, nil
}

// pump hands messages to f until stop, until the source ends, or until the pull is closed
// and nothing is left that may be handled.
func (w *wrapped) pump(stop, closed <-chan struct{}, f func(jetstream.Msg)) {
	for idle, over := 0, false; idle < 2; {
		select {
		case <-stop:
			return
		default:
		}
		var look <-chan time.Time
		if over {
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
			f(w.hand(it))
		case <-closed:
			closed, over = nil, true
		case <-look:
			if w.drained() {
				idle++
			}
		case <-stop:
			return
		}
	}
}

// wrappedConsume is the context of a wrapped Consume.
type wrappedConsume struct {
	jetstream.ConsumeContext
	stop   context.CancelFunc
	closed chan struct{}
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
	return &iterator{w: w, inner: inner, ctx: ctx, stop: stop}, nil
}

// iterator is a wrapped MessagesContext. One goroutine at most asks the client
// for the next message; it may outlive the Next that started it, and ends with
// the pull.
type iterator struct {
	w     *wrapped
	inner jetstream.MessagesContext
	ctx   context.Context //nolint:containedctx // until Stop
	stop  context.CancelFunc

	next   sync.Mutex // held through Next
	asking chan error // its answer; nil if nobody asks
	over   bool       // the pull has ended
}

func (it *iterator) Next(opts ...jetstream.NextOpt) (jetstream.Msg, error) {
	timeout, ctx := nextOptions(opts)
	if timeout > 0 && ctx != nil {
		return nil, fmt.Errorf("%w: cannot specify both NextMaxWait and NextContext", jetstream.ErrInvalidOption)
	}
	it.next.Lock()
	defer it.next.Unlock()
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
		if it.asking == nil && !it.over {
			answer := make(chan error, 1)
			it.asking = answer
			go func() {
				m, err := it.inner.Next()
				if err == nil {
					if err = it.w.offer(it.ctx, m); err != nil {
						it.inner.Stop()
					}
				}
				answer <- err
			}()
		}
		var look <-chan time.Time
		if it.over {
			look = time.After(settleDown)
		}
		select {
		case <-it.w.src.Ended():
			return nil, guard.ErrClosed
		case item, ok := <-it.w.src.Ready():
			if !ok {
				return nil, guard.ErrClosed
			}
			return it.w.hand(item), nil
		case err := <-it.asking:
			it.asking = nil
			switch {
			case err == nil:
			case errors.Is(err, jetstream.ErrMsgIteratorClosed):
				it.over = true
			default:
				return nil, err
			}
		case <-look:
			if it.w.drained() {
				idle++
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

// nextOptions is what NextMaxWait and NextContext asked for. They are functions
// over a type that nats.go does not export, so one of it is made and read.
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
}

func (it *iterator) Drain() { it.inner.Drain() }
