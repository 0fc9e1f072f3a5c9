// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package amqp

import (
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// back is how many messages are in the queue once it has taken in all that the
// last consumer's channel sent, or has given up what that did not.
func (r *rig) back() (n int) {
	r.t.Helper()
	adaptertest.Eventually(r.t, "the queue has no consumer", func() bool {
		var q amqp091.Queue
		err := r.do(func(ch *amqp091.Channel) (err error) {
			q, err = ch.QueueDeclarePassive(r.queue, true, false, false, false, nil)
			return err
		})
		n = q.Messages
		return err == nil && q.Consumers == 0 // a cancelled one counts until nothing of it is out
	})
	return n
}

// What the broker does by itself. A quorum queue has 33 settlements in flight
// and keeps what comes after in the channel's process, where it is dropped when
// the channel closes. The answer to the consumer's cancel comes after all of it
// was sent on: 4.0 sends it before it cancels, 3.10 when it sees what it had in
// flight applied, which is before it sees another method.
func TestCancelIsABarrier(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		const rounds, n = 5, 400
		lost := map[bool]int{}
		for range rounds {
			for _, cancel := range []bool{false, true} {
				r := newRig(t, s, Quorum, nil)
				r.publish(0, n)
				_, ch, in := r.openedAs("c", amqp091.Config{}, n)
				var all []amqp091.Delivery
				for range n {
					all = append(all, take(t, in))
				}
				for _, d := range all {
					if err := d.Ack(false); err != nil {
						t.Fatal(err)
					}
				}
				if cancel {
					if err := ch.Cancel("c", false); err != nil {
						t.Fatal(err)
					}
				}
				if err := ch.Close(); err != nil {
					t.Fatal(err)
				}
				lost[cancel] += r.back()
			}
		}
		t.Logf("of %d acks %d were lost by a close alone, %d by a close after a cancel", rounds*n, lost[false], lost[true])
		if lost[true] > 0 {
			t.Error("a cancel is no barrier")
		}
	})
}
