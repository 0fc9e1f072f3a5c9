// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// A loop that returns an error on failure keeps its claim: its message is retried
// and dead-lettered, the group does not rebalance, and order is kept.
func TestWrappedLoopThatReturnsItsErrors(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	d := r.dlq(DLQConfig{Sources: []string{r.topic}})
	var mu sync.Mutex
	var handled []string
	var generations []int32
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
		Workers: 1, Retry: guard.Retry{Attempts: 3, Base: time.Millisecond, Max: 5 * time.Millisecond},
	}})
	failed := false
	m := r.join(testConfig(), WrapHandler(g, rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		for m := range c.Messages() {
			mu.Lock()
			if g := s.GenerationID(); len(generations) == 0 || generations[len(generations)-1] != g {
				generations = append(generations, g)
			}
			switch {
			case string(m.Value) == "13":
				mu.Unlock()
				return errors.New("cannot parse 13")
			case string(m.Value) == "20" && !failed:
				failed = true
				mu.Unlock()
				return errDown
			}
			handled = append(handled, string(m.Value))
			mu.Unlock()
			s.MarkMessage(m, "")
		}
		return nil
	}}, WithDeadLetters(d), WithLogger(adaptertest.Log())))
	const n = 60
	r.publish(0, n, nil, nil)
	adaptertest.Eventually(t, "all committed", func() bool { return r.committed(0) == n })
	m.stop()
	var want []string
	for i := range n {
		if i != 13 {
			want = append(want, fmt.Sprint(i))
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(handled, want) || len(generations) != 1 {
		t.Errorf("handled %v in generations %v", handled, generations)
	}
	ms, err := r.read(adaptertest.Context(t), r.topic+".dlq", 0, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	rec, err := ReadDeadLetter(ms[0])
	if err != nil || rec.Error.Message != "cannot parse 13" || rec.Origin.Offset != 13 || rec.Attempts < 3 {
		t.Errorf("%+v, %v", rec, err)
	}
}

// A goroutine that reads for a loop and outlives its error takes nothing from the next call.
func TestReaderThatOutlivesItsLoop(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Retry: guard.Retry{Base: time.Millisecond, Max: time.Millisecond}}})
	var readers sync.WaitGroup
	calls := 0
	m := r.join(testConfig(), WrapHandler(g, rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		calls++
		read := make(chan *sarama.ConsumerMessage)
		readers.Go(func() {
			defer close(read)
			for {
				m, ok := <-c.Messages()
				if !ok {
					return
				}
				read <- m
			}
		})
		for m := range read {
			if string(m.Value) == "3" && calls < 5 {
				return errDown
			}
			s.MarkMessage(m, "")
		}
		return nil
	}}, WithLogger(adaptertest.Log())))
	const n = 10
	r.publish(0, n, nil, nil)
	adaptertest.Eventually(t, "all committed", func() bool { return r.committed(0) == n })
	if n := adaptertest.Source(t, g, r.topic+"/0").State().Tally.Failures; n != 4 { // one that nobody had would have failed with errNotMarked
		t.Errorf("%d failures of 4", n)
	}
	m.stop()
	readers.Wait()
}

// manyOut lets many messages be out at a time.
var manyOut = WithPolicy(guard.Policy{Order: guard.OrderNone, Workers: 100})

// Marks that come out of order, from workers of the program's own, never commit
// past a message that is not done.
func TestMarksOutOfOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	var mu sync.Mutex
	var hands []*sarama.ConsumerMessage
	var session sarama.ConsumerGroupSession
	m := r.join(testConfig(), WrapHandler(adaptertest.Guard(t, guard.Config{}), rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		for m := range c.Messages() {
			mu.Lock()
			session = s
			hands = append(hands, m)
			mu.Unlock()
		}
		return nil
	}}, manyOut))
	r.publish(0, 10, nil, nil)
	adaptertest.Eventually(t, "all handed out", func() bool { mu.Lock(); defer mu.Unlock(); return len(hands) == 10 })
	for _, i := range []int{9, 8, 1, 7, 6, 5, 3, 2} {
		session.MarkMessage(hands[i], "")
	}
	session.Commit()
	if n := r.committed(0); n > 0 {
		t.Errorf("committed %d while message 0 is in hand", n)
	}
	copied := *hands[0] // a program may have made its own
	session.MarkMessage(&copied, "meta")
	session.Commit()
	if n := r.committed(0); n != 4 {
		t.Errorf("committed %d while message 4 is in hand", n)
	}
	session.MarkOffset(r.topic, 0, 5, "done")
	session.Commit()
	if n := r.committed(0); n != 10 {
		t.Errorf("committed %d", n)
	}
	session.ResetOffset(r.topic, 0, 6, "")
	session.Commit()
	if n := r.committed(0); n != 6 {
		t.Errorf("committed %d after a reset", n)
	}
	m.stop()
}

// A loop that marks the last of several says so; a mark then settles those before
// it, but not one that failed and waits for its retry.
func TestBatchMarks(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.publish(0, 100, nil, nil)
	var failed, again atomic.Bool
	var batches atomic.Int64
	cfg := testConfig()
	cfg.Consumer.Offsets.AutoCommit.Enable = false // the loop commits by itself
	m := r.join(cfg, WrapHandler(adaptertest.Guard(t, guard.Config{}), rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		var batch []*sarama.ConsumerMessage
		flush := func() {
			if len(batch) > 0 {
				s.MarkMessage(batch[len(batch)-1], "")
				s.Commit()
				batches.Add(1)
				batch = nil
			}
		}
		idle := time.NewTicker(50 * time.Millisecond)
		defer idle.Stop()
		for {
			select {
			case m, ok := <-c.Messages():
				if !ok {
					flush()
					return nil
				}
				if string(m.Value) == "42" {
					if !failed.Swap(true) {
						if err := Fail(s, m, guard.Backoff(errDown, time.Now().Add(time.Second))); err != nil {
							return err
						}
						continue
					}
					again.Store(true)
				}
				if batch = append(batch, m); len(batch) == 10 {
					flush()
				}
			case <-idle.C:
				flush()
			}
		}
	}}, WithBatchMarks()))
	adaptertest.Eventually(t, "batches are marked", func() bool { return r.committed(0) >= 40 })
	for !again.Load() {
		if n := r.committed(0); n > 42 && !again.Load() {
			t.Fatalf("committed %d, 42 has failed", n)
		}
		time.Sleep(10 * time.Millisecond)
	}
	adaptertest.Eventually(t, "all committed", func() bool { return r.committed(0) == 100 })
	if n := batches.Load(); n < 10 || n > 60 {
		t.Errorf("%d batches", n)
	}
	m.stop()
}

// A retry comes in between: the mark of a batch settles what was handed out before
// the message that is marked, whatever its offset, and nothing that came after it.
func TestBatchMarksAmongRetries(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	hands := make(chan *sarama.ConsumerMessage, 100)
	sessions := make(chan sarama.ConsumerGroupSession, 1)
	m := r.join(testConfig(), WrapHandler(adaptertest.Guard(t, guard.Config{}), rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		sessions <- s
		for m := range c.Messages() {
			hands <- m
		}
		return nil
	}}, WithBatchMarks(), WithPolicy(guard.Policy{Retry: guard.Retry{Base: time.Millisecond, Max: time.Millisecond}})))
	s := <-sessions
	take := func(n int) (batch []*sarama.ConsumerMessage) {
		for range n {
			select {
			case m := <-hands:
				batch = append(batch, m)
			case <-time.After(time.Minute):
				t.Fatalf("%d of %d messages come", len(batch), n)
			}
		}
		return batch
	}
	fail := func(m *sarama.ConsumerMessage) {
		if err := Fail(s, m, errDown); err != nil {
			t.Fatal(err)
		}
	}
	r.publish(0, 10, nil, nil)
	batch := take(10)
	fail(batch[3])
	again := take(1) // the first of the next batch: not handled yet
	s.MarkMessage(batch[9], "")
	s.Commit()
	if n := r.committed(0); again[0].Offset != 3 || n != 3 {
		t.Errorf("committed %d, offset %d is only handed out", n, again[0].Offset)
	}
	fail(again[0])
	again = take(1)
	r.publish(10, 15, nil, nil)
	batch = append(again, take(5)...)
	fail(batch[2])
	batch = append(batch, take(1)...)
	s.MarkMessage(batch[len(batch)-1], "") // offset 11, the last of its batch
	s.Commit()
	if n := r.committed(0); n != 15 {
		t.Errorf("committed %d after the whole batch", n)
	}
	m.stop()
}

// Without AutoCommit a mark is not committed until the program says so: one that
// marks as it collects, and commits what it has written, loses nothing when its
// claim ends between the two.
func TestOnlyTheProgramCommits(t *testing.T) {
	t.Parallel()
	cfg := testConfig()
	cfg.Consumer.Offsets.AutoCommit.Enable = false
	for name, wrap := range map[string]func(sarama.ConsumerGroupHandler) sarama.ConsumerGroupHandler{
		"raw": func(h sarama.ConsumerGroupHandler) sarama.ConsumerGroupHandler { return h },
		"wrapped": func(h sarama.ConsumerGroupHandler) sarama.ConsumerGroupHandler {
			return WrapHandler(adaptertest.Guard(t, guard.Config{}), h)
		},
	} {
		r := newRig(t, 1)
		var collected atomic.Int64
		m := r.join(cfg, wrap(rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
			for m := range c.Messages() {
				s.MarkMessage(m, "")
				if collected.Add(1) == 10 {
					s.Commit() // the first ten are written
				}
			}
			return nil
		}}))
		r.publish(0, 15, nil, nil)
		adaptertest.Eventually(t, "all are collected", func() bool { return collected.Load() == 15 })
		m.stop()
		if n := r.committed(0); n != 10 {
			t.Errorf("%s: committed %d, written are 10", name, n)
		}
	}
}

// What a loop neither marks nor fails has failed after the policy's timeout.
func TestUnmarkedMessageFails(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	d := r.dlq(DLQConfig{Sources: []string{r.topic}})
	var calls atomic.Int64
	m := r.join(testConfig(), WrapHandler(adaptertest.Guard(t, guard.Config{}), rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		for m := range c.Messages() {
			if string(m.Value) == "3" {
				calls.Add(1)
				continue // forgotten
			}
			s.MarkMessage(m, "")
		}
		return nil
	}}, WithDeadLetters(d), WithPolicy(guard.Policy{
		Timeout: 200 * time.Millisecond, Retry: guard.Retry{Attempts: 2, Base: time.Millisecond, Max: time.Millisecond, Patience: 50 * time.Millisecond},
	})))
	r.publish(0, 10, nil, nil)
	adaptertest.Eventually(t, "all committed", func() bool { return r.committed(0) == 10 })
	m.stop()
	ms, err := r.read(adaptertest.Context(t), r.topic+".dlq", 0, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	rec, err := ReadDeadLetter(ms[0])
	if want := errNotMarked.Error() + " of 200ms"; err != nil || !strings.HasPrefix(rec.Error.Message, want) || string(rec.Body) != "3" || calls.Load() < 2 {
		t.Errorf("%d calls, %q, %v", calls.Load(), rec.Error.Message, err)
	}
}

// A handler that collects and marks in Cleanup loses nothing by the guard.
func TestMarksInCleanup(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	h := &lateMarks{}
	m := r.join(testConfig(), WrapHandler(adaptertest.Guard(t, guard.Config{}), h, manyOut))
	r.publish(0, 10, nil, nil)
	adaptertest.Eventually(t, "all handed out", func() bool { h.mu.Lock(); defer h.mu.Unlock(); return len(h.got) == 10 })
	begun := time.Now()
	m.stop()
	if took := time.Since(begun); took > 20*time.Second { // Policy.Timeout is 30s
		t.Errorf("unmarked messages delayed the stop by %s", took)
	}
	if n := r.committed(0); n != 10 {
		t.Errorf("committed %d", n)
	}
}

// A mark that crosses the return of the loop keeps nobody waiting.
func TestMarkCrossesTheReturn(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	crossed := make(chan struct{})
	m := r.join(testConfig(), WrapHandler(adaptertest.Guard(t, guard.Config{}), rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		msg, ok := <-c.Messages()
		if !ok {
			return nil
		}
		w := s.(*session).wrapped(msg.Topic, msg.Partition)
		o := w.take(msg)
		go func() { // a worker's MarkMessage, which goes on when the loop has returned
			defer close(crossed)
			for over := false; !over; time.Sleep(time.Millisecond) {
				w.mu.Lock()
				over = w.over
				w.mu.Unlock()
			}
			w.done([]*out{o}, "")
		}()
		return nil
	}}))
	r.publish(0, 1, nil, nil)
	<-crossed
	begun := time.Now()
	m.stop()
	if took := time.Since(begun); took > 20*time.Second { // Policy.Timeout is 30s
		t.Errorf("the stop took %s", took)
	}
	if n := r.committed(0); n != 1 {
		t.Errorf("committed %d", n)
	}
}

type lateMarks struct {
	mu  sync.Mutex
	got []*sarama.ConsumerMessage
}

func (*lateMarks) Setup(sarama.ConsumerGroupSession) error { return nil }

func (h *lateMarks) Cleanup(s sarama.ConsumerGroupSession) error {
	for _, m := range h.got {
		s.MarkMessage(m, "")
	}
	return nil
}

func (h *lateMarks) ConsumeClaim(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
	for m := range c.Messages() {
		h.mu.Lock()
		h.got = append(h.got, m)
		h.mu.Unlock()
	}
	return nil
}

// An outage in front of a loop that returns its errors is an outage, not a storm
// of rebalances: nothing is dead-lettered and few calls are made.
func TestWrappedLoopInAnOutage(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	d := r.dlq(DLQConfig{Sources: []string{r.topic}})
	var mu sync.Mutex
	down, calls := false, 0
	var sessions atomic.Int64
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Workers: 1, Ramp: guard.Ramp{Off: true}}})
	m := r.join(testConfig(), WrapHandler(g, &counting{&sessions, func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		for m := range c.Messages() {
			mu.Lock()
			failed := down
			if failed {
				calls++
			}
			mu.Unlock()
			if failed {
				return errDown
			}
			s.MarkMessage(m, "")
		}
		return nil
	}}, WithDeadLetters(d)))
	r.publish(0, 100, nil, nil)
	adaptertest.Eventually(t, "handled", func() bool { return r.committed(0) == 100 })
	src := adaptertest.Source(t, g, r.topic+"/0")
	mu.Lock()
	down = true
	mu.Unlock()
	r.publish(100, 500, nil, nil)
	// An outage that ends within a round of probe and witness may cost the head. While the
	// breaker is open there is none, and who comes now waits for mu.
	adaptertest.Eventually(t, "the breaker is open", func() bool {
		mu.Lock()
		defer mu.Unlock()
		down = src.State().Breaker.State != breaker.Open
		return !down
	})
	adaptertest.Eventually(t, "all committed", func() bool { return r.committed(0) == 500 })
	m.stop()
	// The head has 5 attempts. Then the look tries 64 messages behind it, in groups of 1, 2,
	// 4 and 8, with the head before each of the other 10, and the breaker opens. Where this
	// test does not see that at once, it probes.
	const most = 5 + 64 + 10 + 30
	t.Logf("%d calls", calls)
	if n := r.end(r.topic+".dlq", 0); n > 0 || calls > most || sessions.Load() != 1 {
		t.Errorf("%d dead letters, %d calls, %d sessions", n, calls, sessions.Load())
	}
}

// counting counts sessions.
type counting struct {
	sessions *atomic.Int64
	consume  func(sarama.ConsumerGroupSession, sarama.ConsumerGroupClaim) error
}

func (h *counting) Setup(sarama.ConsumerGroupSession) error   { h.sessions.Add(1); return nil }
func (h *counting) Cleanup(sarama.ConsumerGroupSession) error { return nil }
func (h *counting) ConsumeClaim(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
	return h.consume(s, c)
}

// What a wrapped handler's own Setup refuses comes out of Consume, and its
// Cleanup is called all the same, as sarama does.
func TestWrappedSetupMayRefuse(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	h := &refusing{}
	wrapped := WrapHandler(adaptertest.Guard(t, guard.Config{}), h)
	group, err := sarama.NewConsumerGroup(r.addrs, r.group, testConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := group.Consume(ctx, []string{r.topic}, wrapped); !errors.Is(err, errDown) || h.cleaned != 1 {
		t.Errorf("%v, %d times cleaned up", err, h.cleaned)
	}
}

type refusing struct{ cleaned int }

func (*refusing) Setup(sarama.ConsumerGroupSession) error     { return errDown }
func (h *refusing) Cleanup(sarama.ConsumerGroupSession) error { h.cleaned++; return nil }
func (*refusing) ConsumeClaim(sarama.ConsumerGroupSession, sarama.ConsumerGroupClaim) error {
	return nil
}

// What a loop says of an earlier attempt is not said of the one it has in hand,
// and what it was not handed yet it cannot have failed.
func TestOutcomesBelongToTheirAttempt(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Retry: guard.Retry{Base: time.Millisecond, Max: time.Millisecond}}})
	name := sourceName("", r.topic, 0)
	var failures []uint64
	step := 0
	m := r.join(testConfig(), WrapHandler(g, rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		var first *sarama.ConsumerMessage
		for m := range c.Messages() {
			if string(m.Value) != "0" {
				s.MarkMessage(m, "")
				continue
			}
			switch step++; step {
			case 1: // message 1 waits to be taken: it is not in hand
				time.Sleep(100 * time.Millisecond)
				return errDown
			case 2:
				failures = append(failures, g.Source(name).State().Tally.Failures)
				first = m
				_ = Fail(s, m, errDown)
			case 3:
				s.MarkMessage(first, "") // a worker that comes late
				s.MarkOffset(r.topic, 0, 0, "")
				s.Commit()
				if n := r.committed(0); n > 0 {
					t.Errorf("a mark of an earlier attempt committed %d", n)
				}
				_ = Fail(s, m, errDown)
			default:
				s.MarkMessage(m, "")
			}
		}
		return nil
	}}))
	adaptertest.Source(t, g, name)
	r.publish(0, 5, nil, nil)
	adaptertest.Eventually(t, "all committed", func() bool { return r.committed(0) == 5 })
	m.stop()
	if !slices.Equal(failures, []uint64{1}) || step != 4 {
		t.Errorf("%v failures when one message had failed; %d attempts of it", failures, step)
	}
}

// With the default policy each key is handled in its order, retries included; who asks
// for more at once gets it, and order key then keeps the order of a key.
func TestWrappedLoopKeepsTheOrderOfItsKeys(t *testing.T) {
	t.Parallel()
	for name, policy := range map[string]guard.Policy{"default": {}, "key": {Order: guard.OrderKey, Workers: 8}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const n, keys = 300, 6
			r := newRig(t, 1)
			r.publish(0, n, nil, func(i int) string { return fmt.Sprint("k", i%keys) })
			var mu sync.Mutex
			last, failed := map[string]int64{}, map[int64]bool{}
			handled, disorder, out, most := 0, 0, 0, 0
			policy.Retry, policy.NoBreaker = guard.Retry{Base: time.Millisecond, Max: 5 * time.Millisecond}, true
			m := r.join(testConfig(), WrapHandler(adaptertest.Guard(t, guard.Config{Policy: policy}), rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
				var workers sync.WaitGroup
				defer workers.Wait()
				for m := range c.Messages() {
					mu.Lock()
					out++
					most = max(most, out)
					mu.Unlock()
					workers.Go(func() {
						time.Sleep(time.Millisecond)
						mu.Lock()
						out--
						if m.Offset%10 == 3 && !failed[m.Offset] {
							failed[m.Offset] = true
							mu.Unlock()
							_ = Fail(s, m, errDown)
							return
						}
						if last[string(m.Key)] > m.Offset {
							disorder++
						}
						last[string(m.Key)] = m.Offset
						handled++
						mu.Unlock()
						s.MarkMessage(m, "")
					})
				}
				return nil
			}}))
			adaptertest.Eventually(t, "all are handled", func() bool { mu.Lock(); defer mu.Unlock(); return handled == n })
			m.stop()
			if disorder > 0 || (most > 1) != (policy.Workers > 1) {
				t.Errorf("%d out of their key's order; %d out at once", disorder, most)
			}
		})
	}
}

// A batch that was not asked for is told what to set.
func TestUnaskedBatchIsToldWhatToSet(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	d := r.dlq(DLQConfig{Sources: []string{r.topic}})
	m := r.join(testConfig(), WrapHandler(adaptertest.Guard(t, guard.Config{}), rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		var batch []*sarama.ConsumerMessage
		for m := range c.Messages() {
			if batch = append(batch, m); len(batch) == 10 {
				s.MarkMessage(m, "")
				batch = nil
			}
		}
		return nil
	}}, WithDeadLetters(d), WithPolicy(guard.Policy{
		Timeout: 100 * time.Millisecond, Retry: guard.Retry{Attempts: 2, Base: time.Millisecond, Max: time.Millisecond, Patience: 50 * time.Millisecond},
	})))
	r.publish(0, 3, nil, nil)
	ms, err := r.read(adaptertest.Context(t), r.topic+".dlq", 0, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	m.stop()
	if rec, err := ReadDeadLetter(ms[0]); err != nil || !strings.Contains(rec.Error.Message, "WithBatchMarks") {
		t.Errorf("%q, %v", rec.Error.Message, err)
	}
}
