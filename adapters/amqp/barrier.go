// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import "time"

// A quorum queue takes settlements in through a client in the broker's channel (rabbit_fifo_client,
// 3.10 and 4.0). 33 of its commands may be in flight. The client puts later ones aside until some
// were applied, and then sends them on as one. If the channel ends before, it drops them: the
// messages are delivered again. Two things show that nothing was put aside:
//
//   - The broker's answer to the cancel of a live consumer. RabbitMQ 4.0 first sends on the commands
//     that were put aside. 3.10 first has the cancel applied, and with it all commands in flight, and
//     reads no other method before. No other call without effects goes through the queue's log.
//   - As many unsettled deliveries as the prefetch allows: the broker counts deliveries that are
//     acked and not applied among them.
//
// A consumer can be cancelled when none of its deliveries is out. Otherwise deliveries on their way
// to the consumer would go back before its older ones. And with a single active consumer, the next
// consumer would begin before they have gone back.
const (
	pipeline   = 16                    // commands that are certainly in flight or applied
	settleTime = 50 * time.Millisecond // time for the prefetch to fill, and for a quiet broker to apply
	settleMost = time.Second           // time for a busy broker to apply
)

// awaitAcks waits until the broker has taken in all acks, and tells whether that is known. After few
// frames it returns at once. It waits 50 ms at most if the consumer can be cancelled, and otherwise
// up to a second, by how busy the broker is. For the broker's answer itself it waits without limit.
// consumer returns the tag of the consumer to cancel, or "". Deliveries must be read meanwhile.
func (a *acker) awaitAcks(consumer func() string) bool {
	l := a.life.Load()
	began, last := time.Now(), time.Unix(0, a.last.Load())
	await := func(limit time.Duration) bool {
		for a.tags.unsure() > pipeline {
			if l.ended() || time.Since(began) >= limit {
				return false
			}
			time.Sleep(settleTime / 50)
		}
		return true
	}
	fresh := began.Sub(last) < settleMost
	if await(0) || fresh && await(settleTime) {
		return true
	}
	if tag := consumer(); tag != "" && a.tags.open() == 0 {
		return l.ch.Cancel(tag, false) == nil
	}
	if !fresh {
		return true // as far as is known, brokers have taken in acks by then
	}
	asked := time.Now()
	if l.ch.Cancel(consumerTag(), false) != nil { // there is no such consumer: the channel only answers
		return false
	}
	return await(min(max(2*settleTime, 10*time.Since(asked)), settleMost))
}
