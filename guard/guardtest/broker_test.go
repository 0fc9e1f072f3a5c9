// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

func consume(t *testing.T, b *Broker, cfg ConsumerConfig) *Epoch {
	t.Helper()
	e, err := b.Consume(context.Background(), queueName, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// take reads what is there now.
func take(e *Epoch) (ms []*Message) {
	for {
		synctest.Wait()
		select {
		case m, ok := <-e.Messages():
			if !ok {
				return ms
			}
			ms = append(ms, m)
		default:
			return ms
		}
	}
}

func seqs(ms []*Message) (out []uint64) {
	for _, m := range ms {
		out = append(out, m.Seq)
	}
	return out
}

func wantSeqs(t *testing.T, what string, ms []*Message, want ...uint64) {
	t.Helper()
	if got := seqs(ms); !slices.Equal(got, want) {
		t.Errorf("%s: delivered %v, want %v", what, got, want)
	}
}

func publishN(b *Broker, n int) {
	for i := range n {
		b.Publish(queueName, Message{Key: fmt.Sprint("k", i%3), Body: Body(uint64(i+1), 0)})
	}
}

func TestBrokerFaults(t *testing.T) {
	ack := func(e *Epoch, ms ...*Message) {
		for _, m := range ms {
			_ = e.Port().Ack(m)
		}
		_ = e.Port().Flush()
	}
	for name, test := range map[string]func(*testing.T, *Broker){
		"kill": func(t *testing.T, b *Broker) {
			publishN(b, 6)
			e := consume(t, b, ConsumerConfig{})
			ms := take(e)
			ack(e, ms[0], ms[3])
			b.Kill(queueName)
			wantSeqs(t, "after the end", take(e))
			if context.Cause(e.Context()) != errLost {
				t.Error(context.Cause(e.Context()))
			}
			ack(e, ms[1])
			e2 := consume(t, b, ConsumerConfig{})
			again := take(e2)
			wantSeqs(t, "again", again, 2, 3, 5, 6)
			if again[0].Deliveries != 2 || again[0].Tag != 1 || again[0].Epoch == ms[0].Epoch {
				t.Errorf("%+v", again[0])
			}
			if st := b.Stats(queueName); st.LateAcks != 1 || st.Acked != 2 || st.Lost != 4 || st.Unacked != 4 {
				t.Errorf("%+v", st)
			}
			ack(e2, again...)
			ack(e2, again[0])
			if st := b.Stats(queueName); st.DoubleAcks != 1 || st.Acked != 6 || st.Unacked != 0 {
				t.Errorf("%+v", st)
			}
			e.Close()
			e2.Close()
			_ = e2.Port().Flush()
			if st := b.Stats(queueName); st.AfterEnd != 1 {
				t.Errorf("%+v", st)
			}
		},
		"revoke": func(t *testing.T, b *Broker) {
			for _, eager := range []bool{false, true} {
				publishN(b, 4)
				e := consume(t, b, ConsumerConfig{Buffer: 2})
				synctest.Wait()
				b.Revoke(queueName, eager)
				ms := take(e)
				if len(ms) != 2 || (e.Context().Err() != nil) != eager {
					t.Errorf("eager %t: %v, %v", eager, seqs(ms), e.Context().Err())
				}
				ack(e, ms[0])
				_ = e.Port().Return(ms[1:], guard.ReasonRebalance)
				e.Close()
				e = consume(t, b, ConsumerConfig{})
				ack(e, take(e)...)
				e.Close()
			}
			if st := b.Stats(queueName); st.Acked != 8 || st.Returned != 2 || st.LateAcks != 0 {
				t.Errorf("%+v", st)
			}
		},
		"grace": func(t *testing.T, b *Broker) {
			publishN(b, 1)
			e := consume(t, b, ConsumerConfig{RevokeGrace: time.Second})
			take(e)
			b.Revoke(queueName, false)
			time.Sleep(2 * time.Second)
			if context.Cause(e.Context()) != errRevoked || b.Stats(queueName).Ready != 1 {
				t.Errorf("%v, %+v", context.Cause(e.Context()), b.Stats(queueName))
			}
			e.Close()
		},
		"ack wait": func(t *testing.T, b *Broker) {
			publishN(b, 3)
			e := consume(t, b, ConsumerConfig{AckWait: time.Second})
			ms := take(e)
			for range 3 {
				time.Sleep(600 * time.Millisecond)
				e.Port().Extend(ms[:2])
			}
			wantSeqs(t, "not extended", take(e), 3)
			time.Sleep(600 * time.Millisecond)
			ack(e, ms[2]) // late, and good
			time.Sleep(3 * time.Second)
			st := b.Stats(queueName)
			if st.LateAcks != 1 || st.Acked != 1 || st.Extends != 6 {
				t.Errorf("%+v", st)
			}
			e.Close()
		},
		"hold max": func(t *testing.T, b *Broker) {
			publishN(b, 2)
			e := consume(t, b, ConsumerConfig{AckWait: time.Second, HoldMax: 10 * time.Second})
			ms := take(e)
			for range 40 {
				time.Sleep(300 * time.Millisecond)
				e.Port().Extend(ms)
			}
			if context.Cause(e.Context()) != errLost {
				t.Error("still there")
			}
			e.Close()
		},
		"prefetch": func(t *testing.T, b *Broker) {
			publishN(b, 5)
			e := consume(t, b, ConsumerConfig{Prefetch: 2})
			ms := take(e)
			wantSeqs(t, "first", ms, 1, 2)
			ack(e, ms[1])
			wantSeqs(t, "one more", take(e), 3)
			e.Port().Demand(0)
			ack(e, ms[0])
			wantSeqs(t, "no demand", take(e))
			e.Port().Demand(5)
			wantSeqs(t, "demand", take(e), 4)
			e.Close()
		},
		"max deliver": func(t *testing.T, b *Broker) {
			publishN(b, 2)
			for range 2 {
				e := consume(t, b, ConsumerConfig{MaxDeliver: 2})
				take(e)
				e.Close()
			}
			if st := b.Stats(queueName); st.Spent != 2 || st.Ready != 0 || len(b.Pending(queueName)) != 2 {
				t.Errorf("%+v", st)
			}
		},
		"duplicate, redeliver, reorder": func(t *testing.T, b *Broker) {
			publishN(b, 4)
			b.Reorder(queueName, func(n int, swap func(i, j int)) { swap(0, n-1) })
			e := consume(t, b, ConsumerConfig{})
			ms := take(e)
			wantSeqs(t, "reordered", ms, 4, 2, 3, 1)
			ack(e, ms[0])
			b.Duplicate(queueName, 4, 2)
			dup := take(e)
			wantSeqs(t, "duplicates", dup, 4, 2)
			ack(e, dup[0])
			b.Redeliver(queueName, 3)
			wantSeqs(t, "redelivered", take(e), 3)
			if c, _ := b.Message(queueName, 4); c.RepeatAcks != 1 || c.Delivered != 2 || c.Acked != 1 {
				t.Errorf("%+v", c)
			}
			e.Close()
		},
		"refused acks": func(t *testing.T, b *Broker) {
			publishN(b, 2)
			e := consume(t, b, ConsumerConfig{})
			ms := take(e)
			b.RefuseAcks(queueName, errBroken)
			if err := e.Port().Ack(ms[0]); !errors.Is(err, errBroken) {
				t.Error(err)
			}
			b.RefuseAcks(queueName, nil)
			wantSeqs(t, "again", take(e), 1)
			e.Close()
		},
		"stop and delay": func(t *testing.T, b *Broker) {
			b.Stop()
			go func() { time.Sleep(time.Second); b.Start() }()
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			if _, err := b.Consume(ctx, queueName, ConsumerConfig{}); !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			start := time.Now()
			e := consume(t, b, ConsumerConfig{})
			b.Delay(queueName, 2*time.Second)
			publishN(b, 1)
			<-e.Messages()
			if d := time.Since(start); d < 2900*time.Millisecond {
				t.Error(d)
			}
			e.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(t, NewBroker()) })
		})
	}
}

// stuckPort is a port whose calls of a kind do not return before they are released.
type stuckPort struct {
	guard.Port[*Message]
	ack, flush, demand <-chan struct{}
}

func hang(c <-chan struct{}) {
	if c != nil {
		<-c
	}
}

func (p stuckPort) Ack(m *Message) error { hang(p.ack); return p.Port.Ack(m) }
func (p stuckPort) Flush() error         { hang(p.flush); return p.Port.Flush() }
func (p stuckPort) Demand(n int)         { hang(p.demand); p.Port.Demand(n) }

// The adapter gives up an epoch whose port does not return, whichever call it is.
func TestRunWithAStuckPort(t *testing.T) {
	for name, stick := range map[string]func(*stuckPort, <-chan struct{}){
		"ack":    func(p *stuckPort, c <-chan struct{}) { p.ack = c },
		"flush":  func(p *stuckPort, c <-chan struct{}) { p.flush = c },
		"demand": func(p *stuckPort, c <-chan struct{}) { p.demand = c },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := NewBroker()
				publishN(b, 1)
				g, err := guard.New(guard.Config{})
				if err != nil {
					t.Fatal(err)
				}
				release := make(chan struct{})
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				start := time.Now()
				err = b.Run(ctx, g, queueName, Guarded{CloseWait: 100 * time.Millisecond, Port: func(p guard.Port[*Message]) guard.Port[*Message] {
					stuck := &stuckPort{Port: p}
					stick(stuck, release)
					return stuck
				}}, func(context.Context, *Message) error { return nil })
				if took := time.Since(start); err != nil || took > 3500*time.Millisecond {
					t.Errorf("Run returned %v after %v", err, took)
				}
				close(release)
				synctest.Wait()
				if _, err := g.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestDeadLettersFaults(t *testing.T) {
	d := NewBroker().DeadLetters(queueName)
	write := func(seq uint64) error {
		return d.Write(context.Background(), &dlq.Record{Body: make([]byte, 100), Origin: dlq.Origin{System: "s", Source: "q", Sequence: seq}})
	}
	d.FailNext(1, errBroken)
	if err := write(1); !errors.Is(err, errBroken) {
		t.Error(err)
	}
	d.LoseConfirms(1)
	if write(1) == nil || write(1) != nil || d.Len() != 1 {
		t.Error("twins are not recognised")
	}
	d.Limit(10)
	if err := write(2); !errors.Is(err, dlq.ErrTooLarge) {
		t.Error(err)
	}
	d.Limit(0)
	d.Refuse()
	if err := write(2); !errors.Is(err, dlq.ErrRefused) {
		t.Error(err)
	}
	d.Fail(nil)
	if writes, twins := d.Writes(); errors.Join(write(0), write(0)) != nil || d.Len() != 3 || writes != 5 || twins != 1 {
		t.Error("a record without an ID must be kept each time", d.Len(), writes, twins)
	}
}

// The checks must see what they are for.
func TestHandlerChecks(t *testing.T) {
	h := new(Handler)
	ctx := context.Background()
	h.Poison(2)
	h.On(4, Fail(errBroken))
	for _, m := range []Message{
		{Seq: 1, Key: "a", Epoch: 1, Tag: 1},
		{Seq: 2, Key: "a", Epoch: 1, Tag: 2},
		{Seq: 4, Key: "b", Epoch: 1, Tag: 4},
		{Seq: 4, Key: "b", Epoch: 1, Tag: 4},
		{Seq: 3, Key: "a", Epoch: 1, Tag: 3},
		{Seq: 1, Key: "a", Epoch: 2, Tag: 1},
	} {
		_ = h.HandleMessage(ctx, &m)
	}
	if h.CheckOrder(guard.OrderSource) == nil || h.CheckOrder(guard.OrderKey) != nil || h.OutOfOrder(guard.OrderSource) != 1 {
		t.Error("order", h.CheckOrder(guard.OrderSource), h.CheckOrder(guard.OrderKey))
	}
	if h.CheckNothingLost(4) == nil || h.CheckNothingLost(4, 2) != nil {
		t.Error("lost", h.CheckNothingLost(4, 2))
	}
	if h.Duplicates() != 1 || len(h.CallsOf(4)) != 2 || h.Done() != 3 {
		t.Error(h.Duplicates(), h.Calls())
	}
	if n := Number(Body(70, 100)); n != 70 || len(Body(70, 100)) != 100 || Number(nil) != 0 {
		t.Error(n)
	}
}

// A whole way, publish to ack, through a Guard and bare.
func BenchmarkPublishToAck(b *testing.B) {
	body := []byte("x")
	run := func(b *testing.B, loop func(*Epoch)) {
		broker := NewBroker()
		broker.ForgetAcked(queueName)
		e, err := broker.Consume(context.Background(), queueName, ConsumerConfig{Buffer: 256, Prefetch: 4096})
		if err != nil {
			b.Fatal(err)
		}
		b.ReportAllocs()
		go func() {
			batch := make([]Message, 64)
			for i := range batch {
				batch[i].Body = body
			}
			for left := b.N; left > 0; left -= len(batch) {
				broker.Publish(queueName, batch[:min(left, len(batch))]...)
			}
		}()
		loop(e)
		e.Close()
	}
	b.Run("bare", func(b *testing.B) {
		run(b, func(e *Epoch) {
			for i := range b.N {
				_ = e.Port().Ack(<-e.Messages())
				if i%64 == 63 {
					_ = e.Port().Flush()
				}
			}
			_ = e.Port().Flush()
		})
	})
	b.Run("guarded", func(b *testing.B) {
		g, err := guard.New(guard.Config{})
		if err != nil {
			b.Fatal(err)
		}
		run(b, func(e *Epoch) {
			n, done := 0, make(chan struct{})
			s, err := guard.Open(g, guard.SourceConfig{Name: queueName}, guard.Limits{}, e.Port(), func(context.Context, *Message) error {
				if n++; n == b.N {
					close(done)
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
			ran := make(chan error, 1)
			go func() { ran <- s.Run(e.Context(), e.Messages()) }()
			<-done
			s.End(context.Background(), guard.ReasonShutdown)
			if err := <-ran; !errors.Is(err, guard.ErrClosed) {
				b.Error(err)
			}
		})
		_, _ = g.Close(context.Background())
	})
}
