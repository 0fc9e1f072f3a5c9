// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// A loop that returns its errors is a few lines in an outage, and the first again a
// minute after it.
func TestALoopThatFailsInAnOutageIsAFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var log bytes.Buffer
		logger := slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return log.Write(p)
		}), nil))
		lines := func() (n int) {
			mu.Lock()
			defer mu.Unlock()
			return strings.Count(log.String(), "ConsumeClaim failed")
		}
		g := adaptertest.Guard(t, guard.Config{})
		calls, down := 0, true
		h := WrapHandler(g, rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
			for m := range c.Messages() {
				mu.Lock()
				calls++
				failed := down
				mu.Unlock()
				if failed {
					return errDown
				}
				s.MarkMessage(m, "")
			}
			return nil
		}}, WithConfig(testConfig()), WithLogger(logger))
		ctx, cancel := context.WithCancelCause(context.Background())
		s := &fakeSession{ctx: ctx}
		if err := h.Setup(s); err != nil {
			t.Fatal(err)
		}
		c := newFakeClaim()
		c.publish(0, 50)
		var consuming sync.WaitGroup
		consuming.Go(func() { _ = h.ConsumeClaim(s, c) })
		outage := func(dur time.Duration) (failures int) {
			mu.Lock()
			before := calls
			down = true
			mu.Unlock()
			time.Sleep(dur)
			mu.Lock()
			defer mu.Unlock()
			down = false
			return calls - before
		}
		failures := outage(20 * time.Second)
		if n := lines(); n < 2 || n > 5 || failures < 20 { // at 0, 1, 3, 7 and 15 s
			t.Errorf("%d lines for %d failures: %s", n, failures, log.String())
		}
		time.Sleep(10 * time.Minute)
		before := lines()
		c.publish(50, 60)
		outage(2 * time.Second)
		if n := lines() - before; n != 2 {
			t.Errorf("%d lines of another outage: %s", n, log.String())
		}
		time.Sleep(time.Minute)
		cancel(nil)
		close(c.partition().messages)
		consuming.Wait()
		if err := h.Cleanup(s); err != nil {
			t.Error(err)
		}
	})
}

// A loop that is busy elsewhere has not failed: a message that it has not taken is no call.
func TestALoopThatIsBusyElsewhereOpensNoBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Breaker: breaker.Config{MinSample: 1, Plain: true}}})
		free := make(chan struct{})
		h := WrapHandler(g, rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
			<-free
			for m := range c.Messages() {
				s.MarkMessage(m, "")
			}
			return nil
		}}, WithConfig(testConfig()))
		s, end := setup(t, h)
		c := newFakeClaim()
		c.publish(0, 3)
		var consuming sync.WaitGroup
		consuming.Go(func() { _ = h.ConsumeClaim(s, c) })
		time.Sleep(10 * time.Minute)
		src := g.Source("orders/0")
		if b := src.State().Breaker; b.State != breaker.Closed {
			t.Errorf("%+v", b)
		}
		close(free)
		time.Sleep(time.Second)
		if a := src.Account(); a.Acked != 3 {
			t.Errorf("%+v", a)
		}
		end(nil)
		consuming.Wait()
		if err := h.Cleanup(s); err != nil {
			t.Error(err)
		}
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
