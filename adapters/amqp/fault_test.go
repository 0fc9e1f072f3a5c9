// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// A broker that is killed and comes back loses nothing that it had confirmed,
// neither of the queue nor of the dead letters.
func TestKilledBroker(t *testing.T) {
	t.Parallel()
	adaptertest.NotShort(t, "kills brokers of its own")
	kills, kinds := 1, []brokers.Kind{brokers.RabbitMQ4}
	if adaptertest.Full() {
		kills, kinds = 10, []brokers.Kind{brokers.RabbitMQ, brokers.RabbitMQ4}
	}
	for _, k := range kinds {
		t.Run(string(k), func(t *testing.T) {
			t.Parallel()
			s := own(t, k, nil)
			r := newRig(t, s, Quorum, amqp091.Table{"x-delivery-limit": int64(1000)})
			letters := r.deadLetters(Quorum)
			// A quorum queue that has just been declared does not survive a kill.
			adaptertest.Eventually(t, "the broker knows its queues after a kill", func() bool { return s.knows(t, r.queue, letters.cfg.Queue) })
			var l lines
			var rec record
			g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: guard.OrderNone, Retry: guard.Retry{Attempts: 2}}})
			c := r.consumeBy(l.dialer(r.url()), g, func(ctx context.Context, d amqp091.Delivery) error {
				if bytes.HasSuffix(d.Body, []byte("99")) {
					return guard.Permanent(errDown)
				}
				time.Sleep(time.Millisecond)
				return rec.handle(ctx, d)
			}, WithDeadLetters(letters))
			published := 0
			confirmed := func(n int) {
				for deadline := time.Now().Add(90 * time.Second); ; {
					err := r.tryPublish(published, published+n)
					if err == nil {
						break
					}
					if time.Now().After(deadline) {
						t.Fatal(err)
					}
					time.Sleep(50 * time.Millisecond)
				}
				published += n
			}
			const each = 500
			for range kills {
				confirmed(each)
				adaptertest.Eventually(t, "traffic", func() bool { return rec.distinct() > published-each })
				if err := s.broker.Kill(adaptertest.Context(t), 0); err != nil {
					t.Fatal(err)
				}
				if err := s.broker.Restart(adaptertest.Context(t)); err != nil {
					t.Fatal(err)
				}
			}
			confirmed(each)
			poison := published / 100
			adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == published-poison })
			dead := map[string]bool{}
			adaptertest.Eventually(t, "all poison is dead-lettered", func() bool {
				all, err := r.get(r.queue + ".dlq")
				if err != nil {
					return false
				}
				for _, d := range all {
					dead[string(d.Body)] = true
				}
				return len(dead) == poison
			})
			adaptertest.Eventually(t, "all settled", func() bool { n, err := r.ready(); return err == nil && n+l.unacked() == 0 })
			if err := errors.Join(c.Stop(t), l.check()); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d kills, %d messages, %d dead letters: 0 lost, %d handled twice", kills, published, poison, rec.twice())
			if most := kills * (perKill + each); rec.twice() > most { // what was published without a confirmation is there twice
				t.Errorf("%d handled twice, at most %d", rec.twice(), most)
			}
		})
	}
}

// knows tells whether the broker has the names of quorum queues on the disk, which it writes
// after the queues themselves.
func (s *server) knows(t *testing.T, queues ...string) bool {
	t.Helper()
	info, err := s.broker.Info(adaptertest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	var names []byte
	err = filepath.WalkDir(info["directory"], func(path string, f fs.DirEntry, err error) error {
		if err == nil && f.Name() == "names.dets" {
			names, err = os.ReadFile(path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was there a moment ago
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return !slices.ContainsFunc(queues, func(q string) bool { return !bytes.Contains(names, []byte(q)) })
}

// Two consumers of a queue with a single active one lose their connections in
// turn: the other takes over, and each handles what it is given in order.
func TestRebalances(t *testing.T) {
	t.Parallel()
	adaptertest.NotShort(t, "takes seconds")
	kinds(t, func(t *testing.T, s *server) {
		every, whole := 2*time.Second, 6*time.Second
		if adaptertest.Full() {
			whole = 60 * time.Second
		}
		r := newRig(t, s, Quorum, amqp091.Table{"x-single-active-consumer": true, "x-delivery-limit": int64(1000)})
		var mu sync.Mutex
		seen := map[int]int{}
		var disorder []string
		var both [2]lines
		var cs []*adaptertest.Running
		for i := range both {
			var lastTag uint64
			var last int
			cs = append(cs, r.consumeBy(both[i].dialer(r.url()), adaptertest.Guard(t, guard.Config{}), func(_ context.Context, d amqp091.Delivery) error {
				n, err := strconv.Atoi(string(d.Body))
				if err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				if d.DeliveryTag > lastTag && n < last {
					disorder = append(disorder, fmt.Sprintf("consumer %d: %d after %d", i, n, last))
				}
				lastTag, last = d.DeliveryTag, n
				seen[n]++
				return nil
			}, WithPrefetch(50)))
		}
		count := func() int { mu.Lock(); defer mu.Unlock(); return len(seen) }
		published, turns := 0, 0
		next := time.Now().Add(every)
		for end := time.Now().Add(whole); time.Now().Before(end); {
			r.publish(published, published+100)
			published += 100
			adaptertest.Eventually(t, "traffic", func() bool { return count() > published-1000 })
			if time.Now().After(next) {
				both[turns%2].cut()
				turns++
				next = next.Add(every)
			}
			time.Sleep(5 * time.Millisecond)
		}
		adaptertest.Eventually(t, "all handled", func() bool { return count() == published })
		adaptertest.Eventually(t, "all settled", func() bool {
			n, err := r.ready()
			return err == nil && n+both[0].unacked()+both[1].unacked() == 0
		})
		for i, c := range cs {
			if err := errors.Join(c.Stop(t), both[i].check()); err != nil {
				t.Error(err)
			}
		}
		mu.Lock()
		defer mu.Unlock()
		twice := 0
		for _, n := range seen {
			twice += n - 1
		}
		t.Logf("%d takeovers, %d messages: 0 lost, %d handled twice", turns, published, twice)
		if len(disorder) > 0 || twice > turns*perKill {
			t.Errorf("%d handled twice, at most %d; out of order: %v", twice, turns*perKill, disorder)
		}
	})
}

// Attempts of a message without an id count on over channels: it is the same by what all its
// deliveries have. Its channel is lost after each call.
func TestAttemptsOfANamelessMessage(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		for _, kind := range []Kind{Classic, Quorum} {
			r := newRig(t, s, kind, nil)
			letters := r.deadLetters(Classic)
			g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Retry: guard.Retry{Attempts: 4, Base: 50 * time.Millisecond}}})
			var l lines
			var calls, cuts, last atomic.Int32
			var whole atomic.Bool // channels are, from then on
			c := r.consumeBy(l.dialer(r.url()), g, func(_ context.Context, d amqp091.Delivery) error {
				switch {
				case whole.Load() && string(d.Body) == "last":
					last.Add(1)
				case !whole.Load() && string(d.Body) == "poison":
					calls.Add(1)
					time.AfterFunc(20*time.Millisecond, func() {
						l.cut()
						cuts.Add(1)
					})
					return errors.New("no such order")
				}
				return nil
			}, WithDeadLetters(letters))
			if err := r.send(adaptertest.Context(t), amqp091.Publishing{Body: []byte("poison"), Headers: amqp091.Table{"tenant": "a"}}, amqp091.Publishing{Body: []byte("fine")}); err != nil {
				t.Fatal(err)
			}
			adaptertest.Eventually(t, "it is dead-lettered", func() bool {
				dead, err := r.get(letters.cfg.Queue)
				return err == nil && len(dead) == 1
			})
			n := calls.Load()
			whole.Store(true)
			adaptertest.Eventually(t, "no cut is left", func() bool { return cuts.Load() == calls.Load() })
			if err := r.send(adaptertest.Context(t), amqp091.Publishing{Body: []byte("last")}); err != nil {
				t.Fatal(err)
			}
			adaptertest.Eventually(t, "the queue is consumed again", func() bool { return last.Load() > 0 })
			if err := c.Stop(t); err != nil {
				t.Error(err)
			}
			if n < 4 { // more, where a cut took the ack of a letter
				t.Errorf("%s: %d calls of 4", kind, n)
			}
		}
	})
}

// What names a message without an id is the same for each delivery of it, and another for
// another message.
func TestContentNames(t *testing.T) {
	t.Parallel()
	d := amqp091.Delivery{RoutingKey: "k", Body: []byte("b"), Headers: amqp091.Table{"tenant": "a"}, CorrelationId: "c"}
	name := func(d amqp091.Delivery) string { return newPort("q", &options{}).Meta(d).Content() }
	again := d
	again.DeliveryTag, again.Redelivered, again.Headers = 9, true, amqp091.Table{"tenant": "a", deliveryCount: int64(3), acquiredCount: int64(4)}
	if name(d) == "" || name(again) != name(d) {
		t.Errorf("%q, and when it came again %q", name(d), name(again))
	}
	for i, change := range []func(*amqp091.Delivery){
		func(d *amqp091.Delivery) { d.Body = []byte("c") },
		func(d *amqp091.Delivery) { d.RoutingKey = "l" },
		func(d *amqp091.Delivery) { d.Exchange = "e" },
		func(d *amqp091.Delivery) { d.CorrelationId = "d" },
		func(d *amqp091.Delivery) { d.Headers = amqp091.Table{"tenant": "b"} },
		func(d *amqp091.Delivery) { d.Timestamp = time.Unix(1_700_000_000, 0) },
	} {
		other := d
		change(&other)
		if name(other) == name(d) {
			t.Errorf("change %d is not seen", i)
		}
	}
	if newPort("q", &options{}).Meta(amqp091.Delivery{MessageId: "m"}).Content != nil {
		t.Error("a message with an id is named by its content")
	}
}
