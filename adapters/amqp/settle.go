// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"sync/atomic"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
)

var (
	// errNack is the failure of a delivery from [Deliveries] that the program
	// nacked or rejected with requeue.
	errNack = errors.New("amqp: nack")

	// errReject is the failure of a delivery that the program nacked or rejected without requeue.
	errReject = errors.New("amqp: rejected")

	// errNotGuarded means that [Fail] was given a delivery that does not come
	// from [Deliveries].
	errNotGuarded = errors.New("amqp: not a guarded delivery")
)

// Fail reports the failure of a delivery from [Deliveries]. Give it the error that a handler would
// return: guard.Permanent, guard.Backoff and guard.Ignore have the same meaning. A nil err acks.
// Fail returns an error if d was settled before, or is not from Deliveries. With a nil err it also
// returns an error if no ack can go out, because the channel or the source has ended.
//
// An error of the program's own stop counts as a failure, too. So at a stop settle nothing: the
// delivery goes back when the source ends.
func Fail(d amqp091.Delivery, err error) error {
	a, ok := d.Acknowledger.(*attempt)
	if !ok {
		return errNotGuarded
	}
	return a.settle(err)
}

// attempt is one attempt of one delivery, and the Acknowledger of what the program was handed. A
// retry of the delivery has another attempt.
type attempt struct {
	session *passiveSession
	of      *taken
	token   guard.Token
	turn    uint64 // position in the order of handing out, from 1
	done    atomic.Bool
	given   bool // the program has taken it; guarded by passiveSession.mu
}

var _ amqp091.Acknowledger = (*attempt)(nil)

// settle gives the outcome to the source, once.
func (a *attempt) settle(err error) error {
	if !a.done.CompareAndSwap(false, true) {
		return errSettled
	}
	d := a.session
	d.mu.Lock()
	if d.handed[a.of.DeliveryTag] == a {
		delete(d.handed, a.of.DeliveryTag)
		d.port.hands.Store(int32(len(d.handed)))
	}
	d.mu.Unlock()
	a.of.acked = errChannelGone // stays if the source has ended: then no ack goes out
	d.src.Done(a.token, err)    // if err is nil, it acks before it returns
	if err == nil {
		return a.of.acked
	}
	return nil
}

// attemptsFor returns the attempts that a call settles: this one, or with multiple all that the program
// was handed until this one. The order of handing out counts, not the tags: a retry keeps its tag,
// but comes between others. By tags, a call would settle a retry that the program got later and has
// not handled.
func (a *attempt) attemptsFor(tag uint64, multiple bool) []*attempt {
	if !multiple && tag == a.of.DeliveryTag {
		return []*attempt{a}
	}
	d := a.session
	d.mu.Lock()
	defer d.mu.Unlock()
	last := a.turn
	switch other := d.handed[tag]; {
	case tag == 0: // in AMQP it means all
		last = math.MaxUint64
	case tag == a.of.DeliveryTag:
	case other != nil: // a program that names this tag has its delivery
		last = other.turn
	default:
		return nil
	}
	var all []*attempt
	for n, other := range d.handed {
		if (multiple && other.turn <= last || !multiple && n == tag) && (other == a || other.given || n == tag) {
			all = append(all, other)
		}
	}
	slices.SortFunc(all, func(x, y *attempt) int { return cmp.Compare(x.turn, y.turn) })
	return all
}

func (a *attempt) settleAll(tag uint64, multiple bool, outcome error) error {
	all := a.attemptsFor(tag, multiple)
	if len(all) == 0 {
		return errSettled
	}
	if len(all) > 1 { // one frame acks them, if there is no gap
		p := a.session.port
		p.hold()
		defer p.release()
	}
	var errs []error
	for _, x := range all {
		errs = append(errs, x.settle(outcome))
	}
	return errors.Join(errs...)
}

// Ack reports success.
func (a *attempt) Ack(tag uint64, multiple bool) error { return a.settleAll(tag, multiple, nil) }

// Nack reports failure.
func (a *attempt) Nack(tag uint64, multiple, requeue bool) error {
	a.session.hidden()
	return a.settleAll(tag, multiple, refused(requeue))
}

// Reject reports failure.
func (a *attempt) Reject(tag uint64, requeue bool) error {
	a.session.hidden()
	return a.settleAll(tag, false, refused(requeue))
}

// hidden logs once that the program does not tell its errors.
func (d *passiveSession) hidden() {
	d.said.Do(func() {
		d.o.log.Warn("the program nacks without an error: an outage is noticed late, and may dead-letter healthy messages of a quiet source",
			"source", d.o.name, "help", "call guardamqp.Fail(delivery, err) in place of Nack and Reject")
	})
}

func refused(requeue bool) error {
	if requeue {
		return errNack
	}
	return errReject
}
