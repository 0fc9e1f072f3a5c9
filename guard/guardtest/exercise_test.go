// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// full asks for the long form of tests.
var full = os.Getenv("STORMGUARD_FULL") != ""

func TestMain(m *testing.M) {
	flags := map[string]string{"rapid.checks": "50", "rapid.shrinktime": "5s"} // TestLife: some 2,000 steps
	if full {
		flags["rapid.checks"] = "2500"
	}
	for name, value := range flags { // one on the command line still wins
		if err := flag.Set(name, value); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

const queueName = "orders"

// memory is a Broker as a Subject.
type memory struct {
	b       *Broker
	consume ConsumerConfig
	passive bool
	feed    bool
	port    func(guard.Port[*Message]) guard.Port[*Message] // a mutant
	twist   string                                          // a mutant's fault between reader and guard
	bend    func(*Consumer)                                 // a mutant's fault in how the guard is used

	cancel context.CancelFunc
	done   chan error

	mu     sync.Mutex
	epochs []served
}

// served is an epoch and what its source was handed.
type served struct {
	e       *Epoch
	s       *guard.Source[*Message]
	offered *atomic.Int64 // passive shape
}

func (s served) handed() int {
	if s.offered != nil {
		return int(s.offered.Load())
	}
	return s.e.Handed()
}

func newMemory(s Setup) *memory {
	return &memory{b: NewBroker(), consume: ConsumerConfig{AckWait: s.AckWait, MaxDeliver: s.MaxDeliver}}
}

func (m *memory) Publish(_ context.Context, ps ...Publication) error {
	for _, p := range ps {
		m.b.Publish(queueName, Message{Key: p.Key, Body: p.Body, Headers: p.Headers})
	}
	return nil
}

func (m *memory) Start(c Consumer) error {
	if m.bend != nil {
		m.bend(&c)
	}
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel, m.done = cancel, make(chan error, 1)
	cfg := Guarded{
		Consumer: m.consume, Policy: &c.Policy, DeadLetters: c.Writer(m.b.DeadLetters(queueName)), Port: m.port,
		Feed: m.feed,
		Opened: func(s *guard.Source[*Message], e *Epoch) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.epochs = append(m.epochs, served{e: e, s: s})
			if m.passive {
				m.epochs[len(m.epochs)-1].offered = new(atomic.Int64)
			}
		},
	}
	go func() {
		if m.twist != "" && !m.passive {
			m.done <- m.runTwisted(ctx, c, cfg)
			return
		}
		if m.passive {
			m.done <- m.runPassive(ctx, c, cfg)
			return
		}
		m.done <- m.b.Run(ctx, c.Guard, queueName, cfg, func(ctx context.Context, msg *Message) error {
			return c.Handler(ctx, msg.Key, msg.Body)
		})
	}()
	return nil
}

// runTwisted is Broker.Run with a fault.
func (m *memory) runTwisted(ctx context.Context, c Consumer, cfg Guarded) error {
	for {
		e, err := m.b.Consume(ctx, queueName, cfg.Consumer)
		if err != nil {
			return nil //nolint:nilerr // ctx ended
		}
		s, err := m.b.open(c.Guard, e, cfg, func(ctx context.Context, msg *Message) error {
			err := c.Handler(ctx, msg.Key, msg.Body)
			if err != nil && m.twist == "bury" {
				_ = m.b.DeadLetters(queueName).Write(ctx, &dlq.Record{Body: msg.Body, Origin: e.Port().Meta(msg).Origin})
				return nil
			}
			return err
		})
		if err != nil {
			e.Close()
			return nil //nolint:nilerr // the Guard is closed
		}
		ran := make(chan error, 1)
		go func() { ran <- s.Run(e.Context(), twisted(m.twist, e)) }()
		select {
		case err = <-ran:
		case <-ctx.Done():
		}
		end, cancel := context.WithTimeout(context.Background(), time.Second)
		s.End(end, guard.ReasonShutdown)
		cancel()
		e.Close()
		if m.twist == "after" {
			_ = e.Port().Flush()
		}
		if m.twist == "reads on" && errors.Is(err, guard.ErrClosed) {
			m.readOn(ctx)
		}
		if errors.Is(err, guard.ErrClosed) || ctx.Err() != nil {
			return nil //nolint:nilerr // it was told to end
		}
	}
}

// readOn fetches for a source that has ended.
func (m *memory) readOn(ctx context.Context) {
	e, err := m.b.Consume(ctx, queueName, m.consume)
	if err != nil {
		return
	}
	defer e.Close()
	for {
		select {
		case <-e.Messages():
		case <-ctx.Done():
			return
		}
	}
}

// twisted passes deliveries on, with a fault.
func twisted(fault string, e *Epoch) <-chan *Message {
	out := make(chan *Message)
	send := func(m *Message) bool {
		select {
		case out <- m:
			return true
		case <-e.stop:
			return false
		}
	}
	go func() {
		defer close(out)
		n, over := 0, false
		for m := range e.Messages() {
			n++
			switch {
			case over:
			case fault == "early":
				_ = e.Port().Ack(m)
				_ = e.Port().Flush()
				over = !send(m)
			case fault == "lose" && n%50 == 0:
			case fault == "overflow":
				select {
				case out <- m:
				case <-time.After(time.Second):
				case <-e.stop:
				}
			case fault == "twice" && n%50 == 0:
				over = !send(m)
				over = over || !send(m)
			case fault == "swap" && n%20 == 0:
				next, ok := <-e.Messages()
				over = ok && !send(next) || !send(m)
			default:
				over = !send(m)
			}
		}
	}()
	return out
}

// runPassive is what an adapter and a user's loop do in the passive shape.
func (m *memory) runPassive(ctx context.Context, c Consumer, cfg Guarded) error {
	for {
		e, err := m.b.Consume(ctx, queueName, cfg.Consumer)
		if err != nil {
			return nil //nolint:nilerr // ctx ended
		}
		s, err := m.b.open(c.Guard, e, cfg, nil)
		if err != nil {
			e.Close()
			return err
		}
		var users sync.WaitGroup
		ended := make(chan struct{})
		users.Go(func() {
			for {
				var it guard.Item[*Message]
				var ok bool
				select {
				case it, ok = <-s.Ready():
				case <-ended:
				}
				if !ok {
					return
				}
				err := c.Handler(context.Background(), it.Msg.Key, it.Msg.Body)
				s.Done(it.Token, err)
				if c.Twice {
					s.Done(it.Token, err)
					s.Done(it.Token, errors.New("settled twice"))
				}
			}
		})
		hand := offer
		if m.twist == "poll" {
			hand = offerNowAndThen
		}
		err = hand(ctx, s, e, m.last().offered)
		end, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		why := guard.ReasonRebalance
		if ctx.Err() != nil {
			why = guard.ReasonShutdown
		}
		s.End(end, why)
		cancel()
		close(ended)
		users.Wait()
		e.Close()
		select {
		case <-s.Ready():
		default:
			return errors.New("Ready is not closed although the source has ended")
		}
		if errors.Is(err, guard.ErrClosed) || ctx.Err() != nil {
			return nil //nolint:nilerr // it was told to end
		}
	}
}

// offer hands deliveries over as there is room, until either side ends.
func offer(ctx context.Context, s *guard.Source[*Message], e *Epoch, offered *atomic.Int64) error {
	for {
		select {
		case msg, ok := <-e.Messages():
			if !ok {
				return nil
			}
			switch err := s.OfferWait(ctx, msg); {
			case err == nil:
				offered.Add(1)
			case ctx.Err() != nil:
				return nil //nolint:nilerr // it was told to end
			default:
				return err
			}
		case <-s.Ended():
			return guard.ErrClosed
		case <-ctx.Done():
			return nil
		}
	}
}

// offerNowAndThen is offer that looks for room and for the end.
func offerNowAndThen(ctx context.Context, s *guard.Source[*Message], e *Epoch, offered *atomic.Int64) error {
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	in, held := e.Messages(), (*Message)(nil)
	for {
		select {
		case msg, ok := <-in:
			if !ok {
				return nil
			}
			held = msg
		case <-look.C:
			if s.State().Ended {
				return guard.ErrClosed
			}
		case <-ctx.Done():
			return nil
		}
		if held == nil {
			continue
		}
		switch err := s.Offer(held); {
		case err == nil:
			offered.Add(1)
			in, held = e.Messages(), nil
		case errors.Is(err, guard.ErrFull):
			in = nil
		default:
			return err
		}
	}
}

func (m *memory) last() served {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.epochs[len(m.epochs)-1]
}

func (m *memory) Stop(ctx context.Context) error {
	m.cancel()
	select {
	case err := <-m.done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (m *memory) DeadLetters(context.Context) ([]dlq.Record, error) {
	return m.b.DeadLetters(queueName).Records(), nil
}

func (m *memory) Backlog(context.Context) (Backlog, error) {
	st := m.b.Stats(queueName)
	return Backlog{Pending: int(st.Published - st.Acked), Delivered: int(st.Delivered)}, nil
}

func (m *memory) Kill(context.Context) error {
	m.b.Kill(queueName)
	return nil
}

func (m *memory) Revoke(context.Context) error {
	m.b.Revoke(queueName, true)
	return nil
}

func (m *memory) RefuseAcks(err error) { m.b.RefuseAcks(queueName, err) }

func (m *memory) Restart(context.Context) error {
	m.b.Stop()
	time.Sleep(time.Second)
	m.b.Start()
	return nil
}

func (m *memory) Handed() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, s := range m.epochs {
		n += s.handed()
	}
	return n
}

func (m *memory) Check() error {
	if st := m.b.Stats(queueName); st.DoubleAcks > 0 || st.AfterEnd > 0 {
		return fmt.Errorf("%d double acks, %d port calls after the end", st.DoubleAcks, st.AfterEnd)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.epochs {
		if a := s.s.Account(); a.Received != uint64(s.handed()) {
			return fmt.Errorf("epoch %d handed over %d messages, its source received %d", s.e.Number(), s.handed(), a.Received)
		}
	}
	return nil
}

// memoryFeatures are those of a Broker in one shape.
func memoryFeatures(order guard.Order, workers int, passive bool) Features {
	return Features{
		Passive: passive, Order: order, Workers: workers, Keys: true, Headers: HeaderNative,
		EmptyBody: true, AckWait: true, MaxDeliver: true, OneDelivery: true, Dedup: true,
	}
}

// shape is one way to run a source of a Broker.
type shape struct {
	name    string
	order   guard.Order
	workers int
	passive bool
	buffer  int
	feed    bool
}

func exercise(t *testing.T, shapes []shape) {
	for _, c := range shapes {
		t.Run(c.name, func(t *testing.T) {
			f := memoryFeatures(c.order, c.workers, c.passive)
			f.long = c.name == "source"
			Exercise(t, f, func(_ testing.TB, s Setup) Subject {
				m := newMemory(s)
				m.passive, m.feed, m.consume.Buffer = c.passive, c.feed, c.buffer
				return m
			})
		})
	}
}

func TestExercise(t *testing.T) {
	exercise(t, []shape{
		{"source", guard.OrderSource, 1, false, 0, false},
		{"source-feed", guard.OrderSource, 1, false, 0, true},
		{"key-4", guard.OrderKey, 4, false, 16, false},
		{"key-4-feed", guard.OrderKey, 4, false, 0, true},
		{"none-8", guard.OrderNone, 8, false, 16, false},
		{"passive", guard.OrderNone, 8, true, 0, false},
		{"passive-key", guard.OrderKey, 4, true, 0, false},
	})
}

// Shapes between those of TestExercise, whose goroutines meet in the same ways.
func TestExerciseMore(t *testing.T) {
	if raceEnabled && !full {
		t.Skip("goroutines meet as in TestExercise: run without -race")
	}
	exercise(t, []shape{
		{"source-buffered", guard.OrderSource, 1, false, 64, false},
		{"key-1", guard.OrderKey, 1, false, 0, false},
		{"none-1", guard.OrderNone, 1, false, 0, false},
		{"passive-source", guard.OrderSource, 1, true, 0, false},
	})
}
