// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// ice freezes the connections of a dialer: from then on nothing comes in, and what is
// written blocks, or is lost if it sinks.
type ice struct {
	sinks  bool
	frozen chan struct{}
	once   sync.Once

	mu  sync.Mutex
	all []*icy
}

func newIce(sinks bool) *ice { return &ice{sinks: sinks, frozen: make(chan struct{})} }

func (i *ice) freeze() { i.once.Do(func() { close(i.frozen) }) }

// melt cuts the connections, so that nobody waits for them any more.
func (i *ice) melt() {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, c := range i.all {
		_ = c.Close()
	}
}

func (i *ice) dialer(url string) Dialer {
	return Dialer{URLs: []string{url}, Config: amqp091.Config{Heartbeat: time.Minute, Dial: func(network, addr string) (net.Conn, error) {
		c, err := net.Dial(network, addr)
		if err != nil {
			return nil, err
		}
		n := &icy{Conn: c, i: i, gone: make(chan struct{})}
		i.mu.Lock()
		defer i.mu.Unlock()
		i.all = append(i.all, n)
		return n, nil
	}}}
}

type icy struct {
	net.Conn
	i    *ice
	once sync.Once
	gone chan struct{}
}

func (c *icy) is() bool {
	select {
	case <-c.i.frozen:
		return true
	default:
		return false
	}
}

func (c *icy) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if !c.is() {
		return n, err
	}
	<-c.gone
	return 0, net.ErrClosed
}

func (c *icy) Write(p []byte) (int, error) {
	if !c.is() {
		return c.Conn.Write(p)
	}
	if c.i.sinks {
		return len(p), nil
	}
	<-c.gone
	return 0, net.ErrClosed
}

func (c *icy) Close() error {
	c.once.Do(func() { close(c.gone) })
	return c.Conn.Close()
}

// A stop ends within its timeout and 5 s although the network says nothing any more,
// and says what was left.
func TestAStopEndsInAFrozenNetwork(t *testing.T) {
	t.Parallel()
	const stop, n, prefetch = time.Second, 500, 100
	for _, sinks := range []bool{true, false} {
		for _, busy := range []bool{false, true} {
			t.Run(fmt.Sprintf("writes are lost %t, handlers are busy %t", sinks, busy), func(t *testing.T) {
				t.Parallel()
				within := func(t *testing.T, start time.Time) {
					t.Helper()
					if took := time.Since(start); took > stop+15*time.Second { // 5 s, and what a busy machine needs
						t.Errorf("it took %s", took)
					}
				}
				t.Run("Consume", func(t *testing.T) {
					t.Parallel()
					r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
					r.publish(0, n)
					i := newIce(sinks)
					defer i.melt()
					reached := make(chan struct{}, n)
					c := r.consumeBy(i.dialer(r.url()), adaptertest.Guard(t, guard.Config{}), func(ctx context.Context, d amqp091.Delivery) error {
						reached <- struct{}{}
						if len(reached) > n/2 {
							i.freeze()
							if busy {
								<-ctx.Done()
								return ctx.Err()
							}
						}
						return nil
					}, WithPrefetch(prefetch), WithStopTimeout(stop))
					<-i.frozen
					time.Sleep(100 * time.Millisecond)
					start := time.Now()
					err := c.Stop(t)
					within(t, start)
					if err == nil || !strings.Contains(err.Error(), "unsettled") {
						t.Errorf("%v", err)
					}
					t.Log(err)
				})
				t.Run("Deliveries", func(t *testing.T) {
					t.Parallel()
					r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
					r.publish(0, n)
					i := newIce(sinks)
					_, ch, in := r.opened(i.dialer(r.url()).Config, prefetch)
					defer i.melt()
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					var log logbook
					out, err := Deliveries(ctx, adaptertest.Guard(t, guard.Config{}), ch, in, WithStopTimeout(stop), WithLogger(log.logger()))
					if err != nil {
						t.Fatal(err)
					}
					for range prefetch / 2 {
						if d := take(t, out); d.Ack(false) != nil {
							t.Fatal("not acked")
						}
					}
					i.freeze()
					if d := take(t, out); !busy {
						go d.Ack(false) //nolint:errcheck // it may wait for the network as an unguarded one does
						time.Sleep(10 * passiveDelay)
					}
					start := time.Now()
					cancel()
					drained(t, out)
					within(t, start)
					if busy && len(log.with("messages left behind", "messages=1")) != 1 || !busy && !sinks && len(log.with(notTakenIn)) != 1 {
						t.Error(log.buf.String())
					}
				})
			})
		}
	}
}

// The end of a source has the reason that it had: a program that stops, by ending the
// context or by closing its channel, is a shutdown, and a connection that breaks is not.
func TestTheReasonOfAnEnd(t *testing.T) {
	t.Parallel()
	s := shared(t, brokers.RabbitMQ4)
	for _, c := range []struct {
		name, want string
		end        func(l *lines, cancel func(), conn *amqp091.Connection, ch *amqp091.Channel) error
	}{
		{"the context ends", "shutdown", func(_ *lines, cancel func(), _ *amqp091.Connection, _ *amqp091.Channel) error {
			cancel()
			return nil
		}},
		{"the channel is closed", "shutdown", func(_ *lines, _ func(), _ *amqp091.Connection, ch *amqp091.Channel) error { return ch.Close() }},
		{"the connection is closed", "shutdown", func(_ *lines, _ func(), conn *amqp091.Connection, _ *amqp091.Channel) error {
			return conn.Close()
		}},
		{"both", "shutdown", func(_ *lines, cancel func(), conn *amqp091.Connection, _ *amqp091.Channel) error {
			cancel()
			return conn.Close()
		}},
		{"it breaks", "lost", func(l *lines, _ func(), _ *amqp091.Connection, _ *amqp091.Channel) error {
			l.cut()
			return nil
		}},
	} {
		t.Run("Deliveries: "+c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, s, Quorum, nil)
			r.publish(0, 5)
			var l lines
			var log logbook
			conn, ch, in := r.opened(l.dialer(r.url()).Config, 10)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out, err := Deliveries(ctx, adaptertest.Guard(t, guard.Config{}, guard.WithLogger(log.logger())), ch, in, WithStopTimeout(50*time.Millisecond))
			if err != nil {
				t.Fatal(err)
			}
			take(t, out)
			if err := c.end(&l, cancel, conn, ch); err != nil && !errors.Is(err, amqp091.ErrClosed) {
				t.Fatal(err)
			}
			drained(t, out)
			if n := len(log.with("source ended", "reason="+c.want)); n != 1 {
				t.Error(log.buf.String())
			}
			if lost := len(log.with("channel lost")); (lost > 0) != (c.want == "lost") {
				t.Error(log.buf.String())
			}
		})
	}
	t.Run("Consume, lost while it stops", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, s, Quorum, nil)
		r.publish(0, 1)
		var l lines
		var log logbook
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		g := adaptertest.Guard(t, guard.Config{}, guard.WithLogger(log.logger()))
		go func() {
			done <- Consume(ctx, g, l.dialer(r.url()), r.queue, func(context.Context, amqp091.Delivery) error {
				cancel()
				l.cut()
				return nil
			})
		}()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if n := len(log.with("source ended", "reason=shutdown")); n != 1 || len(log.with("source ended")) != 1 {
			t.Error(log.buf.String())
		}
	})
	t.Run("Consume, with an open breaker", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, s, Quorum, nil)
		r.publish(0, 20)
		var log logbook
		g := adaptertest.Guard(t, guard.Config{}, guard.WithLogger(log.logger()))
		c := r.consume(g, func(context.Context, amqp091.Delivery) error { return nil })
		if err := adaptertest.Source(t, g, r.queue).ForceOpen(0); err != nil {
			t.Fatal(err)
		}
		adaptertest.Eventually(t, "the breaker is open", func() bool { return len(log.with(`msg="breaker opened"`)) > 0 })
		if err := c.Stop(t); err != nil {
			t.Error(err)
		}
		time.Sleep(50 * time.Millisecond)
		if _, err := g.Close(adaptertest.Context(t)); err != nil {
			t.Error(err)
		}
		t.Log(log.buf.String())
		if lines := log.with("to=closed"); len(lines) > 0 {
			t.Error(lines)
		}
	})
}

// A program that cancels its consumer and ranges over what is left ends in an outage, and
// without one that goes on for too long. What it was not handed goes back in its order.
func TestACancelledConsumerEndsThoughMessagesAreHeld(t *testing.T) {
	t.Parallel()
	const n, prefetch = 60, 20
	s := shared(t, brokers.RabbitMQ4)
	for _, c := range []struct {
		name, why string
		window    int // less than the prefetch: some wait in front of the source
		stop      time.Duration
		held      bool
	}{
		{"in an outage", "on hold: breaker", 0, time.Hour, true},
		{"in an outage, with a full window", "on hold: breaker", 8, time.Hour, true},
		{"with a rate that lets nothing through", "WithStopTimeout", 0, time.Second, false},
		{"while all goes well", "", 8, time.Hour, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, s, Quorum, nil)
			r.publish(0, n)
			var log logbook
			g := adaptertest.Guard(t, guard.Config{}, guard.WithLogger(log.logger()))
			var l lines
			conn, ch, in := r.openedAs("c", l.dialer(r.url()).Config, prefetch)
			var pace throttle
			out, err := Deliveries(t.Context(), g, ch, in, WithStopTimeout(c.stop), WithPrefetch(prefetch), WithLimiter(&pace), WithPolicy(guard.Policy{
				Window: c.window, Retry: guard.Retry{Base: time.Millisecond, Max: 5 * time.Millisecond},
			}))
			if err != nil {
				t.Fatal(err)
			}
			var got []int
			handle := func(d amqp091.Delivery) {
				if c.held && len(got) == 5 {
					if err := Fail(d, guard.Unavailable(errDown)); err != nil {
						t.Error(err)
					}
					return
				}
				got = append(got, atoi(t, d))
				if err := d.Ack(false); err != nil {
					t.Error(err)
				}
			}
			for range 5 {
				handle(take(t, out))
			}
			if c.why != "" { // what is on its way while a consumer is cancelled goes back before the rest
				pace.shut.Store(!c.held)
				adaptertest.Eventually(t, "the broker has sent all that may be out", func() bool { return l.books().acked == 5 && l.unacked() == prefetch })
			}
			if c.held {
				ended := make(chan struct{})
				go func() { // the program's loop
					defer close(ended)
					for d := range out {
						handle(d)
					}
				}()
				adaptertest.Eventually(t, "the breaker opens", func() bool { return len(log.with("breaker opened")) == 1 })
				if err := ch.Cancel("c", false); err != nil {
					t.Fatal(err)
				}
				adaptertest.Eventually(t, "the deliveries end", func() bool {
					select {
					case <-ended:
						return true
					default:
						return false
					}
				})
			} else {
				if err := ch.Cancel("c", false); err != nil {
					t.Fatal(err)
				}
				for more := true; more; {
					var d amqp091.Delivery
					select {
					case d, more = <-out:
					case <-time.After(time.Minute):
						t.Fatal("the deliveries do not end")
					}
					if more {
						handle(d)
					}
				}
			}
			if err := conn.Close(); err != nil {
				t.Fatal(err)
			}
			if hidden := log.with("without an error"); len(hidden) > 0 { // Fail told it
				t.Error(hidden)
			}
			adaptertest.Eventually(t, "the queue has what went back", func() bool { left, err := r.ready(); return err == nil && left == n-len(got) })
			lines := log.with("level=WARN", "the consumer was cancelled and messages were held")
			if c.why == "" {
				if len(got) < prefetch || len(lines) > 0 {
					t.Errorf("%d of what was prefetched were handed out; %s", len(got), lines)
				}
			} else if len(lines) != 1 || !strings.Contains(lines[0], c.why) || !strings.Contains(lines[0], "messages=") || strings.Contains(lines[0], "messages=0") {
				t.Errorf("%s in %s", lines, log.buf.String())
			}
			// The next consumer has all that is left, in order.
			_, _, again := r.opened(amqp091.Config{}, prefetch)
			for len(got) < n {
				d := take(t, again)
				got = append(got, atoi(t, d))
				if err := d.Ack(false); err != nil {
					t.Fatal(err)
				}
			}
			for i, v := range got {
				if i != v {
					t.Fatalf("handled %d", got)
				}
			}
		})
	}
}

// throttle is a limiter that can be shut.
type throttle struct{ shut atomic.Bool }

func (l *throttle) Admit(time.Duration) time.Duration {
	if l.shut.Load() {
		return time.Hour
	}
	return 0
}

func atoi(t *testing.T, d amqp091.Delivery) int {
	t.Helper()
	i, err := strconv.Atoi(string(d.Body))
	if err != nil {
		t.Fatal(err)
	}
	return i
}
