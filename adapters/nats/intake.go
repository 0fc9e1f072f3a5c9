// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

const (
	// pullExpiry and pullHeartbeat bound a stall. nats.go may wait for messages although
	// the server has no pull request: the request was lost, or nats.go left it out while
	// it wrote another. After two missing heartbeats nats.go pulls again: after 2s, not
	// after its default of 30s. It also reports jetstream.ErrNoHeartbeat, and then examine
	// asks for the consumer.
	pullExpiry    = 10 * time.Second
	pullHeartbeat = time.Second
	// maxPull is nats.go's own default.
	maxPull = 500
	// pullBytes is the most bytes of a pull request. nats.go buffers 64 MiB of a pull and
	// drops messages above that, in the middle of the others. Two requests may be open at
	// once, and a third after a reconnect.
	pullBytes = 16 << 20
	// frameBytes is the size that the server counts in addition to a message's payload: two
	// subjects.
	frameBytes = 8 << 10
	// infoTimeout bounds one request for the consumer's info.
	infoTimeout = 5 * time.Second
	// lagTimeout bounds the request for the lag. New room is not used during the request.
	lagTimeout = time.Second
	// settleTime is how long a server may take to answer the last request.
	settleTime = 100 * time.Millisecond
	// drainTimeout bounds the wait for the messages in the client's buffer.
	drainTimeout = 15 * time.Second
)

// intake takes messages from the server and hands them to the source's feed.
// While a pull is open it runs on two goroutines: nats.go's own, which calls
// take, and Consume's, which calls run.
//
// nats.go cannot extend messages in its buffer. So the intake drains the pull if the source
// has no room, or if the feed was full for AckWait/6 in all while the buffer turned over
// once. After the drain no request is open, and the messages of the buffer are in the stash,
// which Port.Extend keeps alive. The next pull opens when the stash is empty and the source
// has room.
//
// Lock order: mu, then the feed's. The feed never waits under mu.
type intake struct {
	consumer jetstream.Consumer
	feed     *guard.Feed[jetstream.Msg]
	log      *slog.Logger
	name     string
	batch    int           // most messages that a pull may have outstanding
	expiry   time.Duration // expiry of a pull request
	patience time.Duration // how long the feed may be full, in all, before the pull is drained
	port     *msgPort      // knows which messages are new
	conn     *nats.Conn    // connection of the consumer; nil if unknown
	most     int           // the consumer's MaxRequestMaxBytes; 0 for none
	lagEvery time.Duration // time between two requests for the lag, while there is no room
	away     bool          // the connection was away at run's last look

	mu       sync.Mutex
	stash    []jetstream.Msg // messages from the server that are not yet in the feed; oldest first
	draining bool            // the pull ends: take does not wait for room
	blocked  time.Duration   // how long the feed was full since nats.go's buffer last turned over
	flow     int             // messages in a row that found room at once
	room     bool            // the source wants messages
	stop     context.CancelFunc
	pull     context.Context //nolint:containedctx // ends the wait in take
	gate     chan struct{}   // closed when take may return from a pull that ends
	drain    chan struct{}   // holds a token when the pull must be drained; capacity 1
	more     chan struct{}   // holds a token when the source may have room again; capacity 1
	trouble  chan error      // the latest error of the pull; capacity 1
}

// ended is a context that has ended: with it Feed.Put does not wait.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// take is nats.go's callback. Until it returns, nats.go requests no more messages, so that a
// pull comes to its end before it is drained.
func (in *intake) take(m jetstream.Msg) {
	if gate := in.place(m); gate != nil {
		<-gate
	}
}

// place puts a message into the feed or the stash. It returns a channel that take must wait
// for, or nil.
func (in *intake) place(m jetstream.Msg) (gate <-chan struct{}) {
	isNew := in.port.took(m)
	in.mu.Lock()
	if !isNew {
		if in.draining {
			gate = in.gate
		}
		in.mu.Unlock()
		return gate
	}
	if len(in.stash) == 0 {
		if n, _ := in.feed.Put(ended, m); n == 1 {
			if in.flow++; in.flow >= in.batch {
				in.blocked = 0
			}
			if in.draining {
				gate = in.gate
			}
			in.mu.Unlock()
			return gate
		}
	}
	in.flow = 0
	in.stash = append(in.stash, m)
	wait := !in.draining && len(in.stash) == 1
	pull, left := in.pull, in.patience-in.blocked
	gate = in.gate
	in.mu.Unlock()
	if !wait {
		return gate
	}
	start := time.Now()
	ctx, cancel := context.WithTimeout(pull, left)
	n, _ := in.feed.Put(ctx, m)
	cancel()
	in.mu.Lock()
	defer in.mu.Unlock()
	in.blocked += time.Since(start)
	if n == 1 {
		in.dropLocked(1)
		if !in.draining {
			return nil
		}
	}
	in.drainLocked()
	return gate
}

// dropLocked removes the oldest n messages from the stash.
func (in *intake) dropLocked(n int) {
	left := copy(in.stash, in.stash[n:])
	clear(in.stash[left:])
	in.stash = in.stash[:left]
}

// drainLocked ends the pull.
func (in *intake) drainLocked() {
	if in.draining {
		return
	}
	in.draining = true
	if in.stop != nil {
		in.stop()
	}
	signal(in.drain)
}

// demand notes whether the source has room.
func (in *intake) demand(n int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.room = n > 0
	if in.room {
		signal(in.more)
	} else {
		in.drainLocked()
	}
}

// waiting appends the messages of the stash to dst.
func (in *intake) waiting(dst []jetstream.Msg) []jetstream.Msg {
	in.mu.Lock()
	defer in.mu.Unlock()
	return append(dst, in.stash...)
}

// run pulls until ctx or the source ends (then it returns nil), or the pull fails for good, for
// example because the consumer is gone. Messages that it has not handed over stay in the stash.
func (in *intake) run(ctx context.Context) error {
	for {
		if room, err := in.awaitRoom(ctx); !room {
			return err
		}
		if err := in.once(ctx); err != nil {
			return err
		}
	}
}

// awaitRoom moves the stash to the feed and waits until the source has room. It returns false
// if ctx ends first, or if the feed is closed. Nothing is delivered meanwhile, so it asks the
// server for the lag. It returns an error if the consumer or the connection is gone for good:
// the hold may last forever, and the server gives the held messages to others.
func (in *intake) awaitRoom(ctx context.Context) (bool, error) {
	look := time.Now().Add(in.lagEvery)
	for ctx.Err() == nil {
		if !time.Now().Before(look) {
			if err := in.askLag(ctx); err != nil {
				return false, err
			}
			look = time.Now().Add(in.lagEvery)
		}
		in.mu.Lock()
		n, _ := in.feed.Put(ended, in.stash...)
		in.dropLocked(n)
		var head jetstream.Msg
		if len(in.stash) > 0 {
			head = in.stash[0]
		}
		room := in.room
		in.mu.Unlock()
		switch {
		case head != nil:
			wait, cancel := context.WithDeadline(ctx, look)
			n, err := in.feed.Put(wait, head)
			cancel()
			if n == 1 {
				in.mu.Lock()
				in.dropLocked(1)
				in.mu.Unlock()
			} else if errors.Is(err, guard.ErrClosed) {
				return false, nil
			}
		case room:
			return true, nil
		default:
			wait, cancel := context.WithDeadline(ctx, look)
			select {
			case <-in.more:
			case <-wait.Done():
			}
			cancel()
		}
	}
	return false, nil
}

// askLag asks the server how many messages are behind. Without an answer the previous one
// stays. It returns an error if the consumer or the connection is gone for good.
func (in *intake) askLag(ctx context.Context) error {
	if err := in.connEnded(); err != nil {
		return err
	}
	if in.sayAway() {
		return nil
	}
	ask, cancel := context.WithTimeout(ctx, lagTimeout)
	info, err := in.consumer.Info(ask)
	cancel()
	switch {
	case err == nil:
		in.port.isBehind(info.NumPending)
	case connectionEnded(err), errors.Is(err, jetstream.ErrConsumerNotFound), errors.Is(err, jetstream.ErrStreamNotFound):
		return in.examine(ctx, err)
	}
	return nil
}

// once opens a pull and waits for its end. It returns nil if another pull may follow.
func (in *intake) once(ctx context.Context) error {
	in.mu.Lock()
	in.draining, in.blocked, in.flow = false, 0, 0
	in.pull, in.stop = context.WithCancel(ctx)
	defer in.stop()
	in.gate = make(chan struct{})
	defer in.open()
	select {
	case <-in.drain:
	default:
	}
	if !in.room { // the room is gone since awaitRoom returned
		in.mu.Unlock()
		return nil
	}
	in.mu.Unlock()
	if err := in.connected(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	size := jetstream.PullConsumeOpt(jetstream.PullMaxMessages(in.batch))
	if n := in.bytes(); n > 0 {
		size = jetstream.PullMaxMessagesWithBytesLimit(in.batch, n)
	}
	cc, err := in.consumer.Consume(in.take, size, jetstream.PullExpiry(in.expiry),
		jetstream.PullHeartbeat(min(pullHeartbeat, in.expiry/2)),
		jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) { in.report(err) }))
	switch {
	case err == nil:
	case errors.Is(err, jetstream.ErrInvalidOption):
		return fmt.Errorf("nats: consume %s: %w", in.name, err)
	case connectionEnded(err):
		return fmt.Errorf("%w: consumer %s: %w", ErrConnectionClosed, in.name, err)
	default:
		return in.pause(ctx, err)
	}
	closed := cc.Closed()
	look := time.NewTicker(awayPoll)
	defer look.Stop()
	for {
		select {
		case <-look.C:
			in.sayAway()
		case <-in.drain:
			in.finish(cc, closed)
			return nil
		case <-ctx.Done():
			in.mu.Lock()
			in.drainLocked()
			in.mu.Unlock()
			in.finish(cc, closed)
			return nil
		case err := <-in.trouble:
			gone := in.examine(ctx, err)
			lost := in.conn != nil && !in.conn.IsConnected()
			if gone == nil && !lost {
				continue
			}
			in.mu.Lock()
			in.drainLocked()
			in.mu.Unlock()
			if lost {
				in.abandon(cc, closed)
			} else {
				in.finish(cc, closed)
			}
			return gone
		case <-closed:
			var why error
			select {
			case why = <-in.trouble:
			default:
			}
			if gone := in.examine(ctx, why); gone != nil {
				return gone
			}
			return in.pause(ctx, why)
		}
	}
}

// connected waits until there is a connection. A pull without a connection would send a
// request every few seconds, and the server would answer all of them when it is back.
func (in *intake) connected(ctx context.Context) error {
	if in.conn == nil {
		return nil
	}
	look := time.NewTicker(connectedPoll)
	defer look.Stop()
	for in.sayAway() {
		if err := in.connEnded(); err != nil {
			return err
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// connEnded returns an error if the connection has ended for good, or drains.
func (in *intake) connEnded() error {
	if in.conn != nil && (in.conn.IsClosed() || in.conn.IsDraining()) {
		return fmt.Errorf("%w: consumer %s", ErrConnectionClosed, in.name)
	}
	return nil
}

// sayAway reports whether the connection is away, and logs when that changes. nats.go tells the
// pull nothing: it stops the heartbeat while it reconnects.
func (in *intake) sayAway() bool {
	away := in.conn != nil && !in.conn.IsConnected()
	switch {
	case away && in.conn.IsClosed():
		return true // for good
	case away == in.away:
	case away:
		args := []any{"source", in.name}
		if err := in.conn.LastError(); err != nil { // none if it is only down
			args = append(args, "error", err)
		}
		in.log.Warn("the server is away: waiting for it", args...)
	default:
		in.log.Info("the server is there", "source", in.name)
	}
	in.away = away
	return away
}

// connectedPoll is how often the connection is looked at while it is away, and awayPoll while a
// pull is open.
const (
	connectedPoll = 50 * time.Millisecond
	awayPoll      = time.Second
)

// connectionEnded reports whether an error says that the connection has ended for good.
func connectionEnded(err error) bool {
	return errors.Is(err, jetstream.ErrConnectionClosed) || errors.Is(err, nats.ErrConnectionClosed) || errors.Is(err, nats.ErrConnectionDraining)
}

// bytes is the byte limit of a pull request, 0 for no limit. A message above the limit would
// never come: the server refuses it to each request, and nats.go asks again without end. So
// there is no limit if the largest message is unknown, or if the consumer does not allow a
// request as large.
func (in *intake) bytes() int {
	if in.conn == nil {
		return 0
	}
	largest := int(in.conn.MaxPayload()) + frameBytes
	n := max(pullBytes, largest)
	if in.most > 0 {
		n = min(n, in.most)
	}
	if n < largest {
		return 0
	}
	return n
}

// open lets take return.
func (in *intake) open() {
	select {
	case <-in.gate:
	default:
		close(in.gate)
	}
}

// finish drains the pull: take gets the messages of nats.go's buffer.
//
// First take does not return for a moment, so that nats.go sends no further request, and the
// server answers the open one. Messages that are on their way inside the server when the
// subscription ends do not arrive, and come again only after their AckWait.
func (in *intake) finish(cc jetstream.ConsumeContext, closed <-chan struct{}) {
	timer := time.NewTimer(min(settleTime, in.patience))
	defer timer.Stop()
	select {
	case <-closed:
	case <-timer.C:
	}
	cc.Drain() // from here on nats.go sends no request
	in.open()
	timer.Reset(drainTimeout)
	select {
	case <-closed:
	case <-timer.C:
		cc.Stop()
	}
}

// abandon ends a pull whose connection is lost: nats.go would write request after request into
// its buffer. take gets the messages that nats.go already has. abandon does not drain, since
// a draining subscription exists again after a reconnect, and nobody would get its messages.
func (in *intake) abandon(cc jetstream.ConsumeContext, closed <-chan struct{}) {
	in.open()
	timer := time.NewTimer(min(settleTime, in.patience))
	defer timer.Stop()
	select {
	case <-closed:
		return
	case <-timer.C:
	}
	cc.Stop()
	timer.Reset(drainTimeout)
	select {
	case <-closed:
	case <-timer.C:
	}
}

// pause waits 1s before the next try of a pull, so that failed tries do not spin.
func (in *intake) pause(ctx context.Context, why error) error {
	if why != nil {
		in.log.Warn("pull", "source", in.name, "error", why)
	}
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return nil
}

// report keeps the latest error of the pull for once.
func (in *intake) report(err error) {
	select {
	case <-in.trouble: //nolint:errcheck // a newer one takes its place
	default:
	}
	select {
	case in.trouble <- err:
	default:
	}
}

// examine returns an error if the consumer or the connection is gone for good, or if the server
// calls the pull a bad request. Otherwise it returns nil, and nats.go goes on by itself. A
// missing heartbeat or responder may mean a stalled pull, a restart or a deleted consumer, but
// nats.go treats each as temporary. So examine asks the server for the consumer: the server
// reports a deletion by itself only to an open pull.
func (in *intake) examine(ctx context.Context, err error) error {
	switch {
	case connectionEnded(err):
		return fmt.Errorf("%w: consumer %s: %w", ErrConnectionClosed, in.name, err)
	case errors.Is(err, jetstream.ErrBadRequest):
		return fmt.Errorf("nats: pull from %s: %w", in.name, err)
	}
	in.log.Warn("pull", "source", in.name, "error", err)
	for range 2 { // a server that is starting may not know its consumers yet
		info, cancel := context.WithTimeout(ctx, infoTimeout)
		_, infoErr := in.consumer.Info(info)
		cancel()
		switch {
		case connectionEnded(infoErr):
			return fmt.Errorf("%w: consumer %s", ErrConnectionClosed, in.name)
		case errors.Is(infoErr, context.DeadlineExceeded) && revive(ctx, in.conn):
			in.log.Warn("the connection was dead: no answer to a ping; it reconnects", "source", in.name, "after", probeTimeout)
			return nil
		case !errors.Is(infoErr, jetstream.ErrConsumerNotFound) && !errors.Is(infoErr, jetstream.ErrStreamNotFound):
			return nil
		}
		if errors.Is(err, jetstream.ErrConsumerDeleted) {
			break
		}
		_ = in.pause(ctx, nil)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // told to end
		}
	}
	return fmt.Errorf("%w: %s: create it again, for example with nats consumer add", ErrConsumerGone, in.name)
}

// signal puts a token into a channel of capacity 1, if it is empty.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
