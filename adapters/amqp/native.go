// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"github.com/stormguard-mq/stormguard/dlq"
)

// rejects is the dead-letter writer of [WithDeadLetterExchange]. It writes nothing: it has the port
// reject the delivery instead of acking it. A reject is not confirmed, and neither is an ack: if
// the channel breaks before the broker has read it, the message is delivered again.
type rejects struct {
	mu   sync.Mutex
	live string              // the mark of the present epoch, whose deliveries may be named
	due  map[string]struct{} // names of deliveries that were written, and are not settled yet
}

// reject names a delivery, uniquely over all epochs.
type reject struct {
	mark string
	tag  uint64
}

func (r reject) String() string { return r.mark + strconv.FormatUint(r.tag, 10) }

// rejectProperty is the record's property with the name of the delivery.
const rejectProperty = "stormguard-reject"

// begin starts an epoch and forgets earlier ones.
func (r *rejects) begin(mark string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.live, r.due = mark, make(map[string]struct{})
}

func (r *rejects) Write(_ context.Context, rec *dlq.Record) error {
	name, ok := dlq.LookupText(rec.Properties, rejectProperty)
	if !ok {
		return fmt.Errorf("amqp: dead letter %s: %w: it is no delivery of this consumer", rec.ID(), dlq.ErrRefused)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(name) < len(r.live) || name[:len(r.live)] != r.live {
		return errChannelGone
	}
	r.due[name] = struct{}{}
	return nil
}

// take tells whether a delivery is to be rejected. It says so once.
func (r *rejects) take(d reject) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.due[d.String()]
	delete(r.due, d.String())
	return ok
}

// reject gives a delivery to the queue's dead-letter exchange, at once unless settlements are kept
// back.
func (p *port) reject(tag uint64) error {
	if ok, _, _ := p.tags.settle(tag, tagRejected); !ok {
		return errSettled
	}
	return p.flush()
}
