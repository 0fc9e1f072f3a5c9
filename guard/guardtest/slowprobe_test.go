// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// What was acked before a slow probe is not delivered again because its ack was
// kept back with others.
func TestAcksDoNotWaitForASlowProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{})
		if err != nil {
			t.Fatal(err)
		}
		b, h := NewBroker(), new(Handler)
		h.On(3, Slow(9*time.Second))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			done <- b.Run(ctx, g, "q", Guarded{
				Consumer: ConsumerConfig{AckWait: 3 * time.Second},
				Opened: func(s *guard.Source[*Message], _ *Epoch) {
					if err := s.ForceOpen(100 * time.Millisecond); err != nil {
						t.Error(err)
					}
				},
			}, h.HandleMessage)
		}()
		for n := range uint64(20) {
			b.Publish("q", Message{Body: Body(n+1, 0)})
		}
		time.Sleep(30 * time.Second)
		if n, st := h.Len(), b.Stats("q"); n != 20 || st.Delivered != 20 || st.Acked != 20 {
			t.Errorf("%d calls of 20 messages, %+v", n, st)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
