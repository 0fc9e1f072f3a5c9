// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// What is handled is marked soon, also while a slow handler has a backlog; and
// nothing else is.
func TestMarksOfASlowHandler(t *testing.T) {
	for name, policy := range map[string]guard.Policy{"one": {}, "workers": {Order: guard.OrderNone, Workers: 2}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const took = 200 * time.Millisecond
				g := adaptertest.Guard(t, guard.Config{})
				var handled atomic.Int64
				h := Wrap(g, func(context.Context, *sarama.ConsumerMessage) error {
					time.Sleep(took)
					handled.Add(1)
					return nil
				}, WithConfig(testConfig()), WithPolicy(policy))
				s, end := setup(t, h)
				c := newFakeClaim()
				c.publish(0, 50)
				var running sync.WaitGroup
				running.Go(func() { _ = h.ConsumeClaim(s, c) })
				workers := max(1, policy.Workers)
				for range 4 {
					time.Sleep(time.Second)
					synctest.Wait()
					n, marked := handled.Load(), s.marked.Load()
					if marked > n || marked < n-int64(2*workers) {
						t.Errorf("%d handled, marked %d", n, marked)
					}
				}
				end(errors.New("rebalance"))
				running.Wait()
			})
		})
	}
}

// What a killed process would handle again is little, however many messages it handles between two
// commits of sarama's own.
func TestCommitsAfterMessages(t *testing.T) {
	t.Parallel()
	const n = 4 * mostMarked
	r := newRig(t, 1)
	rare := testConfig()
	rare.Consumer.Offsets.AutoCommit.Interval = time.Hour
	var handled atomic.Int64
	m := r.join(rare, Wrap(adaptertest.Guard(t, guard.Config{}), func(context.Context, *sarama.ConsumerMessage) error {
		handled.Add(1)
		return nil
	}))
	r.publish(0, n, func(int) int32 { return 0 }, strconv.Itoa)
	adaptertest.Eventually(t, "all handled", func() bool { return handled.Load() == n })
	// 64 acks are marked at a time.
	adaptertest.Eventually(t, "most is committed", func() bool { return r.pending() <= mostMarked+64 })
	m.stop()
	if p := r.pending(); p != 0 {
		t.Errorf("%d messages are not committed", p)
	}
}

// A reset by the user is not undone by a mark that was on its way: it waits for it.
func TestResetBesideMarks(t *testing.T) {
	t.Parallel()
	s := &resettable{begun: make(chan struct{}), reset: make(chan struct{})}
	c := &claim{topic: "orders", session: s, marks: offsets.New(), commitSoon: func() {}}
	c.marks.Settle(7, "")
	var marking sync.WaitGroup
	marking.Go(func() { _ = c.Flush() })
	<-s.begun
	c.rewind(0, "")
	marking.Wait()
	if s.undone.Load() {
		t.Error("marked after a reset")
	}
	c.marks.Settle(8, "")
	if _ = c.Flush(); s.marks.Load() != 1 {
		t.Errorf("%d marks", s.marks.Load())
	}
}

// resettable notices a reset while it is told of a mark.
type resettable struct {
	fakeSession
	begun, reset chan struct{}
	undone       atomic.Bool
	marks        atomic.Int64
}

func (s *resettable) MarkOffset(string, int32, int64, string) {
	s.marks.Add(1)
	close(s.begun)
	select {
	case <-s.reset:
		s.undone.Store(true)
	case <-time.After(50 * time.Millisecond):
	}
}

func (s *resettable) ResetOffset(string, int32, int64, string) { close(s.reset) }

// What is committed beyond the log's end, as when the topic was made anew, does not stay: when
// the log has grown past it, nothing is skipped.
func TestOffsetBeyondTheLogIsLowered(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	const before, beyond = 10, 50
	r.publish(0, before, nil, nil)
	offsets, err := sarama.NewOffsetManagerFromClient(r.group, r.client)
	if err != nil {
		t.Fatal(err)
	}
	pom, err := offsets.ManagePartition(r.topic, 0)
	if err != nil {
		t.Fatal(err)
	}
	pom.MarkOffset(beyond, "")
	if err := errors.Join(pom.Close(), offsets.Close()); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "it is committed", func() bool { return r.committed(0) == beyond })
	seen := make(map[int64]bool)
	var mu sync.Mutex
	handle := func(_ context.Context, m *sarama.ConsumerMessage) error {
		mu.Lock()
		defer mu.Unlock()
		seen[m.Offset] = true
		return nil
	}
	all := func(n int) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(seen) == n
		}
	}
	m := r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), handle))
	adaptertest.Eventually(t, "all are handled", all(before))
	adaptertest.Eventually(t, "that is committed", func() bool { return r.committed(0) == before })
	m.stop()
	r.publish(before, beyond+before, nil, nil)
	m = r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), handle))
	adaptertest.Eventually(t, "none is skipped", all(beyond+before))
	m.stop()
}

// When the log does not have what the group has committed, a line says so and from where the claim
// begins instead. A group that has committed nothing, or what the log has, has no such line.
func TestOffsetThatTheLogDoesNotHaveIsSaid(t *testing.T) {
	t.Parallel()
	const published = 10
	for _, c := range []struct {
		committed, begins int64
		want              string
	}{
		{3, 7, "level=ERROR msg=\"messages are lost: the log begins behind the committed offset\" topic=orders partition=0 committed=3 begins=7 ends=10 from=7"},
		{50, 0, "level=WARN msg=\"the log ends before the committed offset: it was made anew, or has lost messages\" topic=orders partition=0 committed=50 begins=0 ends=10 from=0"},
		{-1, 7, ""},
		{8, 7, ""},
	} {
		r, _ := newFakeRig(t)
		r.publish(0, published, nil, nil)
		if c.committed >= 0 {
			r.commit(r.topic, 0, c.committed, "")
		}
		if c.begins > 0 {
			if err := r.admin.DeleteRecords(r.topic, map[int32]int64{0: c.begins}); err != nil {
				t.Fatal(err)
			}
		}
		var own logged
		var last atomic.Int64
		m := r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), func(_ context.Context, m *sarama.ConsumerMessage) error {
			last.Store(m.Offset)
			return nil
		}, WithLogger(slog.New(slog.NewTextHandler(&own, nil)))))
		adaptertest.Eventually(t, "all are handled", func() bool { return last.Load() == published-1 })
		if c.want != "" && own.count(c.want) != 1 || c.want == "" && own.has("committed offset") {
			t.Errorf("%d is committed, and the log begins at %d: %s", c.committed, c.begins, own.buf.String())
		}
		m.stop()
	}
}

// A claim of a log whose messages have all been deleted commits its beginning, before there is
// one to handle: at an offset that the log grows to again, the next owner would skip messages.
func TestBeginningOfALogThatWasEmptied(t *testing.T) {
	t.Parallel()
	r, _ := newFakeRig(t)
	r.publish(0, 10, nil, nil)
	if err := r.admin.DeleteRecords(r.topic, map[int32]int64{0: 10}); err != nil {
		t.Fatal(err)
	}
	r.commit(r.topic, 0, 50, "")
	m := r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), func(context.Context, *sarama.ConsumerMessage) error { return nil }))
	adaptertest.Eventually(t, "its beginning is committed", func() bool { return r.committed(0) == 10 })
	m.stop()
}

// A claim that begins at the log's end commits that beginning: what it held, or had in a
// handler, when it was stopped is handed over again. Before its first mark nothing was
// committed, and the next owner began at the log's end once more.
func TestNewestKeepsWhatIsHeld(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.publish(0, 5, nil, nil) // before the group
	cfg := testConfig()
	cfg.Consumer.Offsets.Initial, cfg.Consumer.Group.ResetInvalidOffsets = sarama.OffsetNewest, false
	called := make(chan struct{}, 100)
	m := r.join(cfg, Wrap(adaptertest.Guard(t, guard.Config{}), func(context.Context, *sarama.ConsumerMessage) error {
		called <- struct{}{}
		return guard.Unavailable(errors.New("down"))
	}))
	adaptertest.Eventually(t, "the beginning is committed", func() bool { return r.committed(0) == 5 })
	r.publish(5, 10, nil, nil)
	<-called
	m.stop()
	seen := make(chan int64, 100)
	m = r.join(cfg, Wrap(adaptertest.Guard(t, guard.Config{}), func(_ context.Context, m *sarama.ConsumerMessage) error {
		seen <- m.Offset
		return nil
	}))
	for want := int64(5); want < 10; want++ {
		if got := <-seen; got != want {
			t.Errorf("offset %d, want %d", got, want)
		}
	}
	adaptertest.Eventually(t, "all is committed", func() bool { return r.committed(0) == 10 })
	m.stop()
}

// Messages may come before the end of the log is looked at: the beginning is the first of
// them then.
func TestBeginningIsTheFirstMessage(t *testing.T) {
	t.Parallel()
	c := &claim{topic: "t", initial: sarama.OffsetNewest, start: 7, begun: -1, marks: offsets.New(), commitSoon: func() {}, session: &markSession{}}
	s := c.session.(*markSession)
	for _, step := range []struct {
		do   func()
		want int64
	}{
		{func() {}, 7},
		{func() { c.marks.Deliver(6); c.marks.Deliver(7) }, 6},
		{func() { c.marks.Settle(7, "") }, 6},
		{func() { c.marks.Settle(6, "") }, 8},
		{func() { c.marks.Deliver(8) }, 8},
		{func() { c.rewind(3, "") }, 3},
		{func() {}, 3},
	} {
		step.do()
		c.mark()
		if s.offset != step.want {
			t.Errorf("committed is %d, want %d", s.offset, step.want)
		}
	}
	c = &claim{topic: "t", initial: sarama.OffsetOldest, start: -1, begun: -1, marks: offsets.New(), commitSoon: func() {}, session: &markSession{offset: 50}}
	s = c.session.(*markSession)
	if c.mark(); s.calls != 0 {
		t.Error("a claim of the log's beginning is marked before that is known")
	}
	c.marks.Deliver(3)
	if c.mark(); s.offset != 3 {
		t.Errorf("committed is %d, beyond the log, and 3 is held", s.offset)
	}
	c = &claim{topic: "t", initial: 7, start: -1, begun: -1, marks: offsets.New(), commitSoon: func() {}, session: &markSession{offset: 7}}
	s = c.session.(*markSession)
	c.marks.Deliver(7)
	if c.mark(); s.calls != 0 {
		t.Error("a claim that goes on where its group was is marked before anything is settled")
	}
}

// A fetch may answer before the end of the log is read, with one message. It goes to the handler
// without a word to the port: the beginning is not set above it all the same.
func TestBeginningIsTheMessageWithTheHandler(t *testing.T) {
	for name, wrap := range map[string]func(*guard.Guard, func(context.Context, *sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler{
		"function": func(g *guard.Guard, handle func(context.Context, *sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler {
			return Wrap(g, handle, WithConfig(testConfig()))
		},
		"passive": func(g *guard.Guard, handle func(context.Context, *sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler {
			return WrapHandler(g, marking{handle, false}, WithConfig(testConfig()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun, finish := make(chan struct{}), make(chan struct{})
				h := wrap(adaptertest.Guard(t, guard.Config{}), func(context.Context, *sarama.ConsumerMessage) error {
					close(begun)
					<-finish
					return nil
				})
				s, end := setup(t, h)
				c := newestClaim{newFakeClaim(), 8}
				c.publish(7, 8)
				var running sync.WaitGroup
				running.Go(func() { _ = h.ConsumeClaim(s, c) })
				<-begun
				time.Sleep(3 * markEvery)
				synctest.Wait()
				if n := s.marked.Load(); n != 7 {
					t.Errorf("committed is %d, and 7 is with the handler", n)
				}
				close(finish)
				time.Sleep(2 * markEvery)
				synctest.Wait()
				if n := s.marked.Load(); n != 8 {
					t.Errorf("committed is %d, and 7 is handled", n)
				}
				end(errors.New("rebalance"))
				running.Wait()
			})
		})
	}
}

// newestClaim is a claim that sarama has begun at the log's end.
type newestClaim struct {
	*fakeClaim

	end int64 // the log's end after the first fetch
}

func (newestClaim) InitialOffset() int64         { return sarama.OffsetNewest }
func (c newestClaim) HighWaterMarkOffset() int64 { return c.end }

// What comes out of the spill first is acked already. It is not the claim's beginning, and nothing
// waits for its ack.
func TestBeginningIsNoSpilledMessage(t *testing.T) {
	t.Parallel()
	c := &claim{topic: "t", initial: sarama.OffsetNewest, start: 101, begun: -1, marks: offsets.New(), commitSoon: func() {}, session: &markSession{}}
	s := c.session.(*markSession)
	handle := c.noting(nothing)
	head, body, err := (&claim{}).Spill(&sarama.ConsumerMessage{Topic: "t", Offset: 50})
	if err != nil {
		t.Fatal(err)
	}
	spilled, err := c.Unspill(head, body)
	if err != nil {
		t.Fatal(err)
	}
	_ = handle(t.Context(), spilled)
	if c.mark(); s.offset != 101 {
		t.Errorf("committed is %d, want the log's end", s.offset)
	}
	m := &sarama.ConsumerMessage{Topic: "t", Offset: 100}
	_ = handle(t.Context(), m)
	if c.mark(); s.offset != 100 {
		t.Errorf("committed is %d, and 100 is with the handler", s.offset)
	}
	_ = c.Ack(m)
	if c.mark(); s.offset != 101 {
		t.Errorf("committed is %d, and 100 is handled", s.offset)
	}
}

// A claim that begins anew at an empty log, as after the topic was made anew, begins at 0: that is
// known without a message.
func TestBeginningOfAnEmptyLog(t *testing.T) {
	t.Parallel()
	s := &markSession{offset: 50}
	h := Wrap(adaptertest.Guard(t, guard.Config{}), nothing).(*handler)
	c := newClaim(newSession(h, s, settings{config: testConfig()}), emptyClaim{newFakeClaim()})
	if c.mark(); s.offset != 0 {
		t.Errorf("committed is %d", s.offset)
	}
}

// emptyClaim is a claim that sarama has begun anew at an empty log.
type emptyClaim struct{ *fakeClaim }

func (emptyClaim) InitialOffset() int64 { return sarama.OffsetOldest }

// markSession keeps what is committed, as sarama does.
type markSession struct {
	sarama.ConsumerGroupSession

	offset int64
	calls  int
}

func (s *markSession) MarkOffset(_ string, _ int32, offset int64, _ string) {
	s.calls++
	s.offset = max(s.offset, offset)
}

func (s *markSession) ResetOffset(_ string, _ int32, offset int64, _ string) {
	s.calls++
	s.offset = min(s.offset, offset)
}
