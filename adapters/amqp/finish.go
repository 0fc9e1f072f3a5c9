// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// finish ends the source and the channel, in this order.
func (e *epoch) finish(ctx context.Context, how outcome, cause error) (outcome, error) {
	c := e.c
	stopped := ctx.Err() != nil
	lost := how == epochReplaced && e.life.ended()
	why := guard.ReasonShutdown
	switch {
	case stopped: // whatever ended the epoch
	case lost:
		why = guard.ReasonLost
	case how != epochStopped:
		why = guard.ReasonBackpressure
	}
	report := e.end(ctx, why, lost)
	if len(report.Left) == 0 {
		<-e.ran
	}
	before := 0
	if how != epochStopped && !e.life.ended() {
		before, _ = c.consumers(ctx)
	}
	left, dropped := len(report.Left), 0
	if !e.life.ended() {
		var told int
		told, dropped = e.rescue(ctx, slices.ContainsFunc(report.Left, func(l guard.Left) bool { return l.State == "processing" }))
		left -= told
	}
	orderly := how != epochStopped && !e.life.ended()
	closeErr := e.hangUp()
	if orderly {
		c.awaitReturn(ctx, before)
	}
	if how != epochStopped {
		if n := len(report.Left); n > 0 {
			c.o.log.Warn("messages left behind", "source", c.o.name, "messages", n, "state", report.Left[0].State, "why", report.Left[0].Why)
		}
		return how, nil
	}
	if cause != nil {
		return how, cause
	}
	var errs []error
	if report.Err != nil && !errors.Is(report.Err, errChannelGone) {
		errs = append(errs, fmt.Errorf("amqp: stop %s: %w", c.o.name, report.Err))
	}
	if open, frames := e.port.tags.open(), e.port.tags.unsure(); c.cut.Load() && open+frames > 0 {
		errs = append(errs, fmt.Errorf("amqp: stop %s: the broker did not answer in time: %d messages are unsettled, the last %d acks in doubt; they are delivered again", c.o.name, open, frames))
	}
	if closeErr != nil {
		errs = append(errs, fmt.Errorf("amqp: stop %s: close: %w", c.o.name, closeErr))
	}
	if left > 0 {
		errs = append(errs, fmt.Errorf("amqp: stop %s: %d messages left after %s (WithStopTimeout), the oldest %s: %s; they are delivered again",
			c.o.name, left, c.o.stopTimeout, report.Left[0].State, report.Left[0].Why))
	}
	if dropped > 0 {
		errs = append(errs, fmt.Errorf("amqp: stop %s: %d messages are not delivered again: they were at their last delivery, and could not be dead-lettered", c.o.name, dropped))
	}
	if !stopped {
		errs = append(errs, guard.ErrClosed)
	}
	return how, errors.Join(errs...)
}

// rescue dead-letters messages that the broker would drop. For the broker the close of the channel
// ends a delivery, and it delivers no message beyond its limit. A message that came back more often
// than the known limit shows that the queue has another limit; it is left alone. Messages whose
// letters the source could not write are rescued, too. But if a handler has not returned, only
// messages that the source gave back are rescued: the others may be the handler's, and succeed.
// told is how many of the source's Left it has rescued or counts as lost. lost is how many messages
// in all the broker may drop.
func (e *epoch) rescue(ctx context.Context, handled bool) (told, lost int) {
	c := e.c
	near := c.tired || e.worn.Load() // a message at its last delivery may be on its way
	if c.o.letters == nil || c.rejects != nil || e.limits.MaxDeliver == 0 || e.last(false) == nil && !near {
		return 0, 0
	}
	limit := c.o.timeout / 8 // the broker waits for half of the timeout, and the end of the source took a quarter
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	unhook := context.AfterFunc(ctx, func() { time.AfterFunc(answerTimeout, cancel) }) // in a stop it ends within stopGrace
	defer unhook()
	// Without the cancel each ack brings another message, which may be at its last delivery, too.
	asked, enough := context.WithTimeout(grace, min(limit, answerTimeout)/2)
	err := c.link.within(asked, 0, func() error { return e.ch.Cancel(e.tag, false) })
	enough()
	if err == nil {
		<-e.read
	}
	saved, mine := 0, e.last(true)
	told = len(e.last(false)) - len(mine)
	if handled {
		if lost = told; lost > 0 {
			err = errHandled
		}
	} else {
		mine = e.last(false)
	}
	for _, d := range mine {
		m := e.port.describe(&d)
		wrong := writeSafely(grace, c.o.letters, &dlq.Record{
			Body: m.Body, Headers: m.Headers, Properties: m.Properties, Timestamp: m.Timestamp, Origin: m.Origin,
			Attempts: m.Attempts, Deliveries: m.Deliveries, Reason: dlq.ReasonLastDelivery,
		})
		if wrong == nil {
			wrong = e.port.Ack(d)
		}
		if wrong != nil {
			lost, err = lost+1, wrong
			continue
		}
		saved++
	}
	if wrong := e.port.flush(); wrong != nil {
		lost, err = lost+saved, wrong
	}
	switch {
	case lost > 0:
		c.o.log.Error("the broker may drop messages: they are at their last delivery, and could not be dead-lettered and acked", "source", c.o.name, "messages", lost, "error", err)
	case saved > 0:
		c.o.log.Warn("messages at their last delivery were dead-lettered: the broker would drop them", "source", c.o.name, "messages", saved, "deliveries", e.limits.MaxDeliver)
	}
	return told, lost
}

var errHandled = errors.New("amqp: a handler has not returned")

// writeSafely returns a writer's panic as an error. It does not wait for a writer that ignores its
// context: that writer keeps its goroutine.
func writeSafely(ctx context.Context, w dlq.Writer, r *dlq.Record) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	done := make(chan error, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- fmt.Errorf("amqp: the dead-letter writer panicked: %v", p)
			}
		}()
		done <- w.Write(ctx, r)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// lastOf tells whether a delivery is the last that the limit allows its message.
func (e *epoch) lastOf(d *amqp091.Delivery) bool {
	n, _ := integer(d.Headers[deliveryCount])
	return n+1 == e.limits.MaxDeliver
}

// last returns the unsettled deliveries that are the last of their messages. If given is set, it
// returns only deliveries that the source gave back.
func (e *epoch) last(given bool) (ds []amqp091.Delivery) {
	e.port.back.Lock() // a call of Return that was given up may still run
	defer e.port.back.Unlock()
	for waits := true; waits; { // deliveries that the source had not taken yet
		select {
		case d := <-e.in:
			e.port.given = append(e.port.given, d)
		default:
			waits = false
		}
	}
	from := e.port.lasts
	if given {
		from = e.port.given
	}
	for _, d := range from {
		if e.lastOf(&d) && e.port.tags.isOpen(d.DeliveryTag) {
			ds = append(ds, d)
		}
	}
	return ds
}

// end ends the source. If the channel is gone, end waits for handlers only, because they must not
// overlap with those of the next epoch. It does not wait for dead letters that are being written:
// they could not be acked any more.
func (e *epoch) end(ctx context.Context, why guard.Reason, lost bool) guard.Report {
	limit := e.c.o.stopTimeout
	if at := e.c.stopAt.Load(); at != nil {
		limit = max(0, time.Until(*at))
	}
	if why == guard.ReasonBackpressure {
		limit = min(limit, e.c.o.timeout/4) // the broker does not wait longer
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	if lost {
		go func() {
			look := time.NewTicker(lookEvery / 10)
			defer look.Stop()
			for e.src.Account().Processing > 0 {
				select {
				case <-look.C:
				case <-grace.Done():
					return
				}
			}
			cancel()
		}()
	}
	return e.src.End(grace, why)
}

// hangUp closes the channel and waits for the reader. If the broker does not answer in time, hangUp
// cuts the connection.
func (e *epoch) hangUp() error {
	e.port.end()
	if e.ch == nil {
		return nil
	}
	// The client waits without limit for the broker's answers.
	cut := time.AfterFunc(closeTimeout, e.c.cutOff)
	if !e.life.ended() {
		if !e.port.awaitAcks(e.consumer) {
			e.c.o.log.Info(notTakenIn, "source", e.c.o.name)
		}
	}
	err := e.ch.Close()
	cut.Stop()
	e.life.over.Store(true)
	close(e.quit)
	if e.read != nil {
		<-e.read
	}
	if errors.Is(err, amqp091.ErrClosed) || errors.Is(err, net.ErrClosed) { // the connection has ended, and the channel with it
		err = nil
	}
	return err
}

// consumer returns the tag of the consumer, or "" once it has ended.
func (e *epoch) consumer() string {
	select {
	case <-e.read: // the broker cancelled the consumer
		return ""
	default:
		return e.tag
	}
}

// consumers is how many consumers the leader of the queue counts. A quorum queue's leader leaves
// out consumers that wait for the end of a single active one. It counts a cancelled consumer until
// none of its deliveries are out. 0 may also mean that the leader did not answer the broker in
// time.
func (c *consumer) consumers(ctx context.Context) (n int, err error) {
	err = c.link.within(ctx, answerTimeout, func() error {
		ch, err := c.link.Channel()
		if err != nil {
			return err
		}
		q, err := ch.QueueDeclarePassive(c.o.queue, true, false, false, false, nil)
		if err != nil {
			return err
		}
		n = q.Consumers
		return ch.Close()
	})
	return n, err
}

// awaitReturn waits until the queue knows that a channel is closed. A quorum queue learns that by
// itself, later than the client. A consumer that comes before that would get messages from behind
// those that went back. awaitReturn looks at the number of consumers. If other consumers come and
// go, it may wait for returnPatience.
func (c *consumer) awaitReturn(ctx context.Context, before int) {
	for deadline := time.Now().Add(returnPatience); time.Now().Before(deadline) && ctx.Err() == nil; {
		if n, err := c.consumers(ctx); err != nil || n < before {
			return
		}
		time.Sleep(settleTime / 10)
	}
}
