// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

const (
	// settleDown is the time between two looks at the source's counts: time for the source to
	// hand out a message that it has just got. Only the counts say that nothing more will
	// come; there is no event. A call whose pull is over looks at them, and ends with its
	// wait or after stuck looks. A call that drains ends as soon as no message waits.
	settleDown = 20 * time.Millisecond
	// stuck is the number of looks after which a fetch assumes that the waiting messages are
	// behind a retry of their lane.
	stuck = 20
	// copyWait is how long a fetch waits for the copy of a lapsed message: a round trip. It
	// is at most half of Breaker.Slow, or the wait would be a slow call.
	copyWait = time.Second
)

// Fetch returns up to batch messages that may be handled now.
func (w *wrapped) Fetch(batch int, opts ...jetstream.FetchOpt) (jetstream.MessageBatch, error) {
	return w.fetch(fetchRequest{most: batch, opts: opts, pull: func(n, _ int, opts ...jetstream.FetchOpt) (jetstream.MessageBatch, error) {
		return w.Consumer.Fetch(n, opts...)
	}})
}

// FetchNoWait returns up to batch messages that are there already.
func (w *wrapped) FetchNoWait(batch int) (jetstream.MessageBatch, error) {
	return w.fetch(fetchRequest{most: batch, noWait: true, pull: func(n, _ int, _ ...jetstream.FetchOpt) (jetstream.MessageBatch, error) {
		return w.Consumer.FetchNoWait(n)
	}})
}

// FetchBytes returns messages until they have maxBytes, if the source has room. Held messages
// come first.
func (w *wrapped) FetchBytes(maxBytes int, opts ...jetstream.FetchOpt) (jetstream.MessageBatch, error) {
	return w.fetch(fetchRequest{most: w.window, bytes: maxBytes, opts: opts, pull: func(_, n int, opts ...jetstream.FetchOpt) (jetstream.MessageBatch, error) {
		return w.Consumer.FetchBytes(n, opts...)
	}})
}

// Next returns one message that may be handled now, or [nats.ErrTimeout].
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

// fetchRequest has the parameters of a fetch.
type fetchRequest struct {
	most, bytes int // bytes: 0 for no limit
	noWait      bool
	opts        []jetstream.FetchOpt
	// pull opens a pull for a number of messages or of bytes.
	pull func(messages, bytes int, opts ...jetstream.FetchOpt) (jetstream.MessageBatch, error)
}

// limits returns the wait and the context of the options; the context may be nil. Options are
// functions on a type that nats.go does not export, so limits makes a value of it and reads
// that.
func (a *fetchRequest) limits() (wait time.Duration, ctx context.Context, err error) {
	if a.noWait {
		return 0, nil, nil
	}
	req := reflect.New(reflect.TypeFor[jetstream.FetchOpt]().In(0).Elem())
	if f := req.Elem().FieldByName("allowMaxBytes"); f.IsValid() && f.Kind() == reflect.Bool {
		*(*bool)(f.Addr().UnsafePointer()) = true // if it is not allowed, the client returns the error
	}
	for _, opt := range a.opts {
		if err, _ := reflect.TypeAssert[error](reflect.ValueOf(opt).Call([]reflect.Value{req})[0]); err != nil {
			return 0, nil, err
		}
	}
	if f := req.Elem().FieldByName("ctx"); f.IsValid() && f.Type() == reflect.TypeFor[context.Context]() && !f.IsNil() {
		ctx = *(*context.Context)(f.Addr().UnsafePointer())
	}
	if f := req.Elem().FieldByName("Expires"); f.IsValid() && f.CanInt() && f.Int() > 0 {
		return time.Duration(f.Int()), ctx, nil
	}
	return jetstream.DefaultExpires, ctx, nil
}

// within is an option that ends a pull after left at the latest.
func within(left time.Duration) jetstream.FetchOpt {
	kind := reflect.TypeFor[jetstream.FetchOpt]()
	opt, _ := reflect.TypeAssert[jetstream.FetchOpt](reflect.MakeFunc(kind, func(args []reflect.Value) []reflect.Value {
		req := args[0].Elem()
		lower := func(field string, most, to time.Duration) {
			if f := req.FieldByName(field); f.IsValid() && f.CanInt() && f.CanSet() && f.Int() > int64(most) {
				f.SetInt(int64(to))
			}
		}
		lower("Expires", left, left)
		lower("Heartbeat", left/2, 0) // an unset heartbeat is below 0
		return []reflect.Value{reflect.Zero(kind.Out(0))}
	}))
	return opt
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

func (b *batch) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
}

// pullTurns are the open pulls of a wrapped consumer's fetches.
type pullTurns struct {
	// turn has a place for each pull that may be open at once. With an order it has one
	// place: the server deals messages out to all open pulls, and each has a goroutine.
	turn chan struct{}

	mu    sync.Mutex
	asked int // how many messages all open pulls may still bring
	left  int // how many messages the pulls of returned calls may still bring, a part of asked
}

func (p *pullTurns) ordered() bool { return cap(p.turn) == 1 }

func newPulls(order guard.Order, window int) pullTurns {
	n := 1
	if order == guard.OrderNone { // an update of the policy cannot change the order
		n = max(2, window)
	}
	return pullTurns{turn: make(chan struct{}, n)}
}

// openPull is a pull that a fetch has opened.
type openPull struct {
	ended chan struct{} // closed when the pull has ended; short and err are set before
	short bool          // the pull brought fewer messages than asked for
	err   error

	// Guarded by pullTurns.mu.
	rest int  // how many messages the pull may still bring
	gone bool // the call that opened the pull has returned
}

// end returns a channel that is closed when the pull has ended; nil if there is no pull.
func (o *openPull) end() <-chan struct{} {
	if o == nil {
		return nil
	}
	return o.ended
}

// count notes how many messages a pull may still bring.
func (p *pullTurns) count(o *openPull, rest int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked += rest - o.rest
	if o.gone {
		p.left += rest - o.rest
	}
	o.rest = rest
}

// leave notes that the call of a pull has returned.
func (p *pullTurns) leave(o *openPull) {
	if o == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	o.gone = true
	p.left += o.rest
}

// want is how many messages a call that wants most may pull. The open pulls of returned calls
// also bring messages for this call.
func (p *pullTurns) want(most, room int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return min(most-p.left, room-p.asked)
}

// open pulls up to most messages, if the source has room for them. Without room it returns
// nil and a nil error. The caller has a place in turn; open or the pull's goroutine gives
// the place back.
func (w *wrapped) open(a *fetchRequest, most, bytes int, opts ...jetstream.FetchOpt) (o *openPull, err error) {
	defer func() {
		if o == nil { // also if an option panics
			<-w.pulls.turn
		}
	}()
	st := w.src.State()
	if st.Ended {
		return nil, guard.ErrClosed // a pull would cost deliveries
	}
	want := w.pulls.want(most, st.Room)
	if want < 1 || w.port.full() {
		return nil, nil //nolint:nilnil // no pull is no error
	}
	if w.readers.Load() > 0 {
		w.saySeveral()
	}
	inner, err := a.pull(want, bytes, append(slices.Clip(a.opts), opts...)...)
	if err != nil {
		return nil, err
	}
	o = &openPull{ended: make(chan struct{})}
	w.pulls.count(o, want)
	go func() { // ends with the pull
		defer close(o.ended)
		defer func() { <-w.pulls.turn }()
		o.err = w.take(inner, o)
	}()
	return o, nil
}

// take gives the messages of a pull to the source. It ends with the pull, or with the source
// ([guard.ErrClosed]). While a message waits for room, the source still hands out the
// messages that it has, since only their acks make room. The source may run out of bytes
// before it runs out of messages.
func (w *wrapped) take(pull jetstream.MessageBatch, o *openPull) error {
	rest := o.rest
	defer w.pulls.count(o, 0)
	for in := pull.Messages(); ; {
		select {
		case m, ok := <-in:
			if !ok {
				o.short = rest > 0
				return pull.Error()
			}
			rest = max(0, rest-1) // FetchBytes may bring more
			if err := w.offer(context.Background(), m); err != nil {
				return err
			}
			w.pulls.count(o, rest)
		case <-w.src.Ended():
			return guard.ErrClosed
		}
	}
}

// fetching is a running fetch. Only its goroutine uses it.
type fetching struct {
	w     *wrapped
	a     *fetchRequest
	batch *batch
	until time.Time // end of the fetch's wait

	own     *openPull       // the fetch's latest pull, or nil
	pulling <-chan struct{} // closed when own ends; nil if own is not open
	turn    chan struct{}   // where the fetch waits for a place to pull; nil if it does not wait
	ended   bool            // the fetch hands out no more
	over    bool            // the fetch pulls no more
	given   int             // messages that were handed out
	last    time.Time       // when the latest message was handed out
	size    int             // bytes of the messages that were handed out
	idle    int             // looks since the latest message that promised no more; stuck/2 each if none waits

	late   *guard.Item[*taken] // a lapsed item whose copy the open pull may bring; nil for none
	lateAt time.Time           // when late was taken
	came   uint64              // wrapped.came when late was taken
	gaveUp bool                // the copy did not come: other lapsed items go back at once, so that all come again in order
}

// fetch pulls as many messages as the source has room for, and hands out those that the source
// lets through. It starts two goroutines:
//
//   - One hands out. It ends when the messages of the pull are handed out, at the latest
//     after the wait or shortly after.
//   - The other is [wrapped.take]. When held messages have filled the batch, the pull goes on
//     until it ends. A later call gets its messages, and pulls fewer itself.
//
// A call that has no turn hands out the messages of the open pull, and pulls when its turn
// comes. A call without messages pulls again after its pull, for as long as it waits: another
// call got the messages, or the source had no room.
func (w *wrapped) fetch(a fetchRequest) (jetstream.MessageBatch, error) {
	if w.src.State().Ended {
		return nil, guard.ErrClosed
	}
	if a.most < 1 {
		return a.pull(0, 0) // the client returns the error; for a negative number it panics
	}
	wait, ctx, err := a.limits()
	if err != nil {
		return nil, err
	}
	f := &fetching{
		w: w, a: &a, batch: &batch{out: make(chan jetstream.Msg, min(a.most, w.window))},
		until: time.Now().Add(wait), turn: w.pulls.turn,
	}
	select {
	case f.turn <- struct{}{}:
		if f.own, err = w.open(&a, a.most, a.bytes); err != nil {
			return nil, err
		}
		f.turn, f.pulling = nil, f.own.end()
	default:
	}
	go f.handOut(ctx)
	return f.batch, nil
}

// handOut ends as the comment of fetch says, and when ctx ends, if it is not nil.
func (f *fetching) handOut(ctx context.Context) {
	defer close(f.batch.out)
	defer func() { f.w.pulls.leave(f.own) }()
	end := f.w.port.begin()
	defer end()
	deadline := time.NewTimer(time.Until(f.until))
	defer deadline.Stop()
	look := time.NewTicker(settleDown)
	defer look.Stop()
	var cancelled <-chan struct{}
	if ctx != nil {
		cancelled = ctx.Done()
	}
	for !f.full() && f.idle < stuck && !f.ended {
		ready := f.w.src.Ready()
		if f.late != nil {
			ready = nil
		}
		select {
		case f.turn <- struct{}{}:
			f.pull()
		case <-f.pulling:
			f.pulling = nil
			f.batch.fail(f.own.err)
			// After a pull that brought all messages, the fetch still waits: if the source
			// holds, the hold may end before the wait.
			f.over = f.over || f.own.short || f.own.err != nil
			f.giveLate()
		case <-f.w.src.Ended():
			f.end(guard.ErrClosed)
		case <-cancelled:
			f.end(ctx.Err())
		case it, ok := <-ready:
			if !ok {
				continue // the source has ended
			}
			f.idle = 0
			if f.pulling != nil && !f.gaveUp && f.w.port.gone(it.Msg) {
				f.late, f.lateAt, f.came = &it, time.Now(), f.w.came()
				continue
			}
			f.give(it)
		case <-deadline.C:
			f.over = true
			if !f.a.noWait {
				f.turn = nil
			}
		case <-look.C:
			f.look()
		}
	}
	if f.late != nil { // if its copy came, it comes again
		f.w.takeBack(*f.late)
	}
	if !f.ended {
		f.w.sayShort(f.given, cap(f.batch.out))
	}
}

// give hands out an item, unless it has lapsed.
func (f *fetching) give(it guard.Item[*taken]) {
	m := f.w.hand(it)
	if m == nil {
		return
	}
	f.given++
	f.last = time.Now()
	f.size += f.w.port.Size(it.Msg)
	f.batch.out <- m
}

// giveLate ends the wait for the copy of a lapsed message.
func (f *fetching) giveLate() {
	if it := f.late; it != nil {
		f.late, f.gaveUp = nil, f.w.port.gone(it.Msg)
		f.give(*it)
	}
}

// full reports whether the fetch has as many messages or bytes as it asked for.
func (f *fetching) full() bool {
	return f.given == cap(f.batch.out) || f.a.bytes > 0 && f.size >= f.a.bytes
}

func (f *fetching) end(err error) {
	f.ended = true
	f.batch.fail(err)
}

// pull opens a pull in the fetch's turn, for the rest of its wait.
func (f *fetching) pull() {
	f.turn, f.gaveUp = nil, false
	var late []jetstream.FetchOpt
	if !f.a.noWait {
		late = append(late, within(max(time.Until(f.until), time.Millisecond)))
	}
	var err error
	if f.own, err = f.w.open(f.a, cap(f.batch.out)-f.given, max(0, f.a.bytes-f.size), late...); err != nil {
		f.batch.fail(err)
		f.over = true
	}
	f.pulling = f.own.end()
}

// look decides from the counts whether more messages will come.
func (f *fetching) look() {
	// The server sends redeliveries before new messages, and in order.
	if f.late != nil && (!f.w.port.gone(f.late.Msg) || f.w.came() > f.came || f.w.port.full() || time.Since(f.lateAt) >= f.w.copyWait) {
		f.giveLate()
		return
	}
	acc := f.w.src.Account()
	inTurn := f.turn != nil && !f.over && (f.given == 0 || acc.Waiting == 0)
	switch {
	case (f.pulling != nil || inTurn) && !f.w.port.full():
	case !f.over && (f.given == 0 || acc.Held > 0 && time.Since(f.last) < f.w.lease/3): // a batch must be in time for its leases
		if f.given == 0 && acc.Held == 0 && acc.Waiting == 0 && f.pulling == nil {
			f.turn = f.w.pulls.turn
		}
	case acc.Waiting == 0:
		f.idle += stuck / 2
	default:
		f.idle++
	}
}

// came is an approximate count of deliveries, new and repeated. It grows with each.
func (w *wrapped) came() uint64 {
	return w.src.Account().Received + uint64(w.port.copies.latestCount.Load())
}

// sayShort logs once that a batch ended because as many messages are out as the policy allows.
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
