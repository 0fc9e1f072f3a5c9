// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import "time"

// A quorum queue takes settlements in through a client in the broker's channel
// (rabbit_fifo_client, 3.10 and 4.0). 33 commands of it may be in flight. What
// comes after is put by until some were applied, then sent on as one, and
// dropped when the channel ends before: the messages are delivered again. Two
// things say that nothing was put by:
//
//   - The broker's answer to the cancel of a consumer that lives. 4.0 sends on
//     what was put by first; 3.10 has the cancel applied, and with it all that was
//     in flight, and sees to that before it reads another method. No other call
//     that is free of effects goes through the queue's log.
//   - As many deliveries that are not settled as the prefetch allows: the broker
//     counts those that are acked and not applied among them.
//
// A consumer can be cancelled when nothing of it is out. Otherwise what is on its
// way to it would go back before what is here, and with a single active consumer
// the next would begin before that has gone back.
const (
	pipeline   = 16                    // commands that are certainly in flight, or through
	settleTime = 50 * time.Millisecond // for the prefetch to fill, and for a quiet broker to apply
	settleMost = time.Second           // for a busy one
)

// takenIn waits until the broker has taken in what was acked, and tells whether
// that is known. It takes 50 ms at most where the consumer can be cancelled, and
// else up to a second by how busy the broker is; nothing after few frames.
// consumer names the one to be cancelled, or nothing. Deliveries must be read
// meanwhile. It waits for the broker without limit.
func (a *acker) takenIn(consumer func() string) bool {
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
		return true // for all that is known of brokers
	}
	asked := time.Now()
	if l.ch.Cancel(consumerTag(), false) != nil { // no such consumer: the channel just answers
		return false
	}
	return await(min(max(2*settleTime, 10*time.Since(asked)), settleMost))
}
