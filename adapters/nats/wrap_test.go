// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

func wrap(t testing.TB, g *guard.Guard, c jetstream.Consumer, opts ...Option) *wrapped {
	t.Helper()
	w, err := WrapConsumer(g, c, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return w.(*wrapped)
}

// Each way of getting messages gives all of them, and a nak brings one again
// without a second delivery by the server.
func TestWrappedWays(t *testing.T) {
	const n = 50
	ways := map[string]func(t *testing.T, c jetstream.Consumer, take func(jetstream.Msg) bool){
		"consume": func(t *testing.T, c jetstream.Consumer, take func(jetstream.Msg) bool) {
			done := make(chan struct{})
			var once sync.Once
			cc, err := c.Consume(func(m jetstream.Msg) {
				if take(m) {
					once.Do(func() { close(done) })
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			<-done
			cc.Drain()
			<-cc.Closed()
		},
		"messages": func(t *testing.T, c jetstream.Consumer, take func(jetstream.Msg) bool) {
			it, err := c.Messages()
			if err != nil {
				t.Fatal(err)
			}
			for {
				m, err := it.Next()
				if err != nil {
					t.Fatal(err)
				}
				if take(m) {
					break
				}
			}
			if _, err := it.Next(jetstream.NextMaxWait(50 * time.Millisecond)); !errors.Is(err, nats.ErrTimeout) {
				t.Errorf("%v", err)
			}
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			if _, err := it.Next(jetstream.NextContext(ctx)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v", err)
			}
			it.Drain()
			if _, err := it.Next(); !errors.Is(err, jetstream.ErrMsgIteratorClosed) {
				t.Errorf("%v", err)
			}
			it.Stop()
		},
		"fetch": func(t *testing.T, c jetstream.Consumer, take func(jetstream.Msg) bool) {
			for {
				b, err := c.Fetch(20, jetstream.FetchMaxWait(500*time.Millisecond))
				if err != nil {
					t.Fatal(err)
				}
				for m := range b.Messages() {
					if take(m) {
						return
					}
				}
				if err := b.Error(); err != nil {
					t.Fatal(err)
				}
			}
		},
		"fetch bytes": func(t *testing.T, c jetstream.Consumer, take func(jetstream.Msg) bool) {
			for {
				b, err := c.FetchBytes(2000, jetstream.FetchMaxWait(500*time.Millisecond))
				if err != nil {
					t.Fatal(err)
				}
				over := false
				for m := range b.Messages() {
					over = take(m) || over
				}
				if over {
					return
				}
			}
		},
		"fetch no wait": func(t *testing.T, c jetstream.Consumer, take func(jetstream.Msg) bool) {
			for over := false; !over; {
				b, err := c.FetchNoWait(20)
				if err != nil {
					t.Fatal(err)
				}
				for m := range b.Messages() {
					over = take(m) || over
				}
			}
		},
		"next": func(t *testing.T, c jetstream.Consumer, take func(jetstream.Msg) bool) {
			for {
				m, err := c.Next(jetstream.FetchMaxWait(5 * time.Second))
				if err != nil {
					t.Fatal(err)
				}
				if take(m) {
					break
				}
			}
			if _, err := c.Next(jetstream.FetchMaxWait(100 * time.Millisecond)); !errors.Is(err, nats.ErrTimeout) {
				t.Errorf("%v", err)
			}
		},
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, jetstream.ConsumerConfig{})
			r.publish(t, subject, 0, n)
			g, log := logging(t, guard.Config{})
			w := wrap(t, g, r.consumer)
			var mu sync.Mutex
			seen := map[string]int{}
			done := 0
			way(t, w, func(m jetstream.Msg) bool {
				mu.Lock()
				defer mu.Unlock()
				seen[string(m.Data())]++
				i, _ := strconv.Atoi(string(m.Data()))
				if i%10 == 3 && seen[string(m.Data())] == 1 {
					if err := m.Nak(); err != nil {
						t.Error(err)
					}
					return false
				}
				settle := m.Ack
				if i%10 == 4 {
					settle = func() error { return m.DoubleAck(context.Background()) }
				}
				if err := settle(); err != nil {
					t.Error(err)
				}
				if err := m.Ack(); !errors.Is(err, jetstream.ErrMsgAlreadyAckd) {
					t.Errorf("settled twice: %v", err)
				}
				done++
				return done == n
			})
			adaptertest.Eventually(t, "all acked", func() bool { return r.info(t).AckFloor.Stream == n })
			if i := r.info(t); i.Delivered.Consumer != n {
				t.Errorf("%d deliveries", i.Delivered.Consumer)
			}
			if told := log.lines("level=WARN", "the program naks without an error", "guardnats.Fail"); told != 1 { // once, whatever fails
				t.Errorf("told %d times", told)
			}
			if a := w.src.Account(); a.Acked != n || a.Check() != nil {
				t.Errorf("%+v", a)
			}
			if _, err := g.Close(adaptertest.Context(t)); err != nil {
				t.Error(err)
			}
			if _, err := w.Fetch(1); !errors.Is(err, guard.ErrClosed) {
				t.Errorf("%v", err)
			}
		})
	}
}

// By default messages are settled in the order of the stream, whatever fails, and one
// is out at a time. More are out when that is asked for.
func TestWrappedOrder(t *testing.T) {
	t.Parallel()
	retry := guard.Retry{Base: 20 * time.Millisecond, Max: 20 * time.Millisecond}
	for name, c := range map[string]struct {
		policy  guard.Policy
		opts    []Option
		workers int
		ordered bool
	}{
		"default":       {policy: guard.Policy{Retry: retry}, workers: 1, ordered: true},
		"order key":     {policy: guard.Policy{Order: guard.OrderKey, Retry: retry}, workers: 1, ordered: true},
		"own policy":    {opts: []Option{WithPolicy(guard.Policy{Retry: retry})}, workers: 1, ordered: true},
		"more":          {policy: guard.Policy{Order: guard.OrderNone, Workers: 5, Retry: retry}, workers: 5},
		"more, its own": {opts: []Option{WithPolicy(guard.Policy{Order: guard.OrderNone, Workers: 5, Retry: retry})}, workers: 5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const n = 60
			r := newRig(t, jetstream.ConsumerConfig{})
			g, log := logging(t, guard.Config{Policy: c.policy})
			w := wrap(t, g, r.consumer, c.opts...)
			r.publish(t, func(i int) string { return "s." + strconv.Itoa(i%3) }, 0, n)
			tried := map[string]int{}
			last := map[string]uint64{}
			late, acked := 0, 0
			for acked < n {
				b, err := w.Fetch(10, jetstream.FetchMaxWait(2*time.Second))
				if err != nil {
					t.Fatal(err)
				}
				for m := range b.Messages() {
					md, err := m.Metadata()
					if err != nil {
						t.Fatal(err)
					}
					if tried[string(m.Data())]++; md.Sequence.Stream%9 == 4 && tried[string(m.Data())] < 3 {
						err = m.Nak()
					} else {
						if md.Sequence.Stream < last[m.Subject()] {
							late++
						}
						last[m.Subject()] = md.Sequence.Stream
						acked++
						err = m.Ack()
					}
					if err != nil {
						t.Fatal(err)
					}
				}
			}
			if c.ordered && late > 0 {
				t.Errorf("%d out of order for their key", late)
			}
			if n := log.lines("ended early"); n != 0 {
				t.Errorf("%s", log)
			}

			r.publish(t, subject, n, n+10)
			b, err := w.Fetch(10, jetstream.FetchMaxWait(20*time.Second)) // it ends early
			if err != nil {
				t.Fatal(err)
			}
			out := 0
			for range b.Messages() { // and settles none
				out++
			}
			if out != c.workers {
				t.Errorf("%d are out at once, want %d", out, c.workers)
			}
			if n := log.lines("level=WARN", "ended early", "workers="+strconv.Itoa(c.workers)); n != 1 {
				t.Errorf("%d lines:\n%s", n, log)
			}
		})
	}
}

// What a program says of a message is its outcome.
func TestWrappedOutcomes(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second}) // a busy machine extends late, and still in time
	d, err := NewDLQ(adaptertest.Context(t), r.js, DLQConfig{Stream: "D"})
	if err != nil {
		t.Fatal(err)
	}
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Retry: guard.Retry{Base: time.Millisecond, Max: time.Millisecond}}})
	w := wrap(t, g, r.consumer, WithDeadLetters(d))
	r.publish(t, subject, 0, 7)
	tries := map[string]int{}
	start := time.Now()
	for acked := 0; acked < 4; {
		m, err := w.Next(jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatalf("%v: tried %v, %+v", err, tries, w.src.State())
		}
		body := string(m.Data())
		tries[body]++
		switch {
		case body == "0":
			err = m.Term()
		case body == "1":
			err = m.TermWithReason("no such order")
		case body == "2" && tries[body] == 1:
			err = m.NakWithDelay(time.Hour) // the guard decides
		case body == "3" && tries[body] == 1: // neither settled nor extended
		case body == "4":
			err = Fail(m, guard.Permanent(errDown))
		case body == "5" && tries[body] == 1:
			for range 4 {
				time.Sleep(2 * time.Second)
				if err := m.InProgress(); err != nil {
					t.Error(err)
				}
			}
			acked++
			err = m.Ack()
		default:
			acked++
			err = m.Ack()
		}
		if err != nil {
			t.Errorf("%s: %v", body, err)
		}
	}
	adaptertest.Eventually(t, "all settled", func() bool { return r.info(t).AckFloor.Stream == 7 })
	if i := r.info(t); i.Delivered.Consumer != 7 {
		t.Errorf("%d deliveries", i.Delivered.Consumer)
	}
	if tries["2"] != 2 || tries["3"] != 2 || tries["5"] != 1 {
		t.Errorf("%v in %s", tries, time.Since(start))
	}
	reasons := map[string]string{}
	for _, m := range r.letters(t, "D") {
		rec, err := ReadDeadLetter(m)
		if err != nil || rec.Reason != dlq.ReasonPermanent {
			t.Errorf("%+v %v", rec, err)
		}
		reasons[string(rec.Body)] = rec.Error.Message
	}
	if len(reasons) != 3 || reasons["1"] != "nats: terminated: no such order" || reasons["4"] != errDown.Error() {
		t.Errorf("%v", reasons)
	}
	if err := Fail(r.letters(t, "D")[0], errDown); !errors.Is(err, errNotWrapped) {
		t.Errorf("%v", err)
	}
}

// While the source holds, calls return empty in their time, nothing is
// delivered twice, and it all comes later.
func TestWrappedHold(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 4 * time.Second, MaxAckPending: 40})
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
	w := wrap(t, g, r.consumer)
	if err := w.src.ForceOpen(0); err != nil {
		t.Fatal(err)
	}
	r.publish(t, subject, 0, 60)
	for range 5 {
		b, err := w.Fetch(20, jetstream.FetchMaxWait(time.Second))
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		for range b.Messages() {
			t.Fatal("a message came through")
		}
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("a fetch of 1s took %s", took)
		}
	}
	if i := r.info(t); i.NumRedelivered != 0 || i.NumAckPending != w.src.Account().Held {
		t.Errorf("%+v", i)
	}
	if err := w.src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	var n atomic.Int64
	cc, err := w.Consume(func(m jetstream.Msg) {
		if err := m.Ack(); err == nil {
			n.Add(1)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "all handled", func() bool { return n.Load() >= 60 })
	cc.Stop()
	<-cc.Closed()
	if i := r.info(t); i.Delivered.Consumer != 60 {
		t.Errorf("%d deliveries", i.Delivered.Consumer)
	}
}

// A message's time may be over before the program has it, in a process that
// stood still.
func TestWrappedLeaseMayEndAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	w := wrap(t, adaptertest.Guard(t, guard.Config{}), r.consumer)
	w.lease = 1
	const n = 200
	for range n {
		m := w.hand(guard.Item[*taken]{Msg: new(taken)})
		adaptertest.Eventually(t, "over", m.(*wrappedMsg).done.Load)
		if err := m.Ack(); !errors.Is(err, jetstream.ErrMsgAlreadyAckd) {
			t.Fatal(err)
		}
	}
	// The source does not know these messages.
	adaptertest.Eventually(t, "told of each once", func() bool { return w.src.State().Tally.Stale == n })
}

// returned is a message that the server delivers again as soon as it is nak'ed.
type returned struct {
	message
	nak func()
}

func (m *returned) Nak() error           { m.nak(); return nil }
func (m *returned) InProgress() error    { return nil }
func (m *returned) Data() []byte         { return nil }
func (m *returned) Subject() string      { return "s.x" }
func (m *returned) Headers() nats.Header { return nil }

func (m *returned) Metadata() (*jetstream.MsgMetadata, error) {
	var deliveries, seq uint64
	_, err := fmt.Sscanf(m.reply, "$JS.ACK.S.C.%d.%d.", &deliveries, &seq)
	return &jetstream.MsgMetadata{NumDelivered: deliveries, Sequence: jetstream.SequencePair{Stream: seq}}, err
}

// What a nak brings back is no copy, however soon it comes.
func TestWrappedNakIsForgottenFirst(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	w := wrap(t, adaptertest.Guard(t, guard.Config{}), r.consumer, WithWindow(1))
	at := func(deliveries, seq int) *returned {
		return &returned{message: message{reply: fmt.Sprintf("$JS.ACK.S.C.%d.%d.9.100.0", deliveries, seq)}, nak: func() {}}
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	seq := 1
	for ; w.src.State().Room > 0; seq++ {
		if err := w.offer(ctx, at(1, seq)); err != nil {
			t.Fatal(err)
		}
	}
	waits, copied := at(1, seq), at(2, seq)
	naks, again := 0, false
	waits.nak = func() { t.Error("a nak of the earlier delivery") }
	copied.nak = func() {
		naks++
		again = w.port.took(at(3, seq))
	}
	offered := make(chan error, 1)
	go func() { offered <- w.offer(ctx, waits) }()
	adaptertest.Eventually(t, "it waits for room", w.port.full)
	if w.port.took(copied) {
		t.Error("a copy is new")
	}
	stop()
	if err := <-offered; err != nil || naks != 1 || !again {
		t.Errorf("%d naks; what came again was taken for a copy: %v; %v", naks, !again, err)
	}
}

// What a wrapped consumer holds goes back with Close, also with a context that is over, as
// a program's is after its signal; it does not wait for its AckWait.
func TestCloseGivesBackWhatIsHeld(t *testing.T) {
	const n = 20
	r := newRig(t, jetstream.ConsumerConfig{AckWait: time.Hour})
	r.publish(t, subject, 0, n)
	g := adaptertest.Guard(t, guard.Config{})
	w := wrap(t, g, r.consumer)
	src := adaptertest.Source(t, g, "S/C")
	if err := src.ForceOpen(time.Hour); err != nil {
		t.Fatal(err)
	}
	consuming, err := w.Consume(func(m jetstream.Msg) { t.Errorf("%s was handed out", m.Data()) })
	if err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "all are held", func() bool { return src.Account().Unsettled() == n })
	consuming.Stop()
	<-consuming.Closed()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := g.Close(ctx); err != nil {
		t.Error(err)
	}
	again, err := r.consumer.Fetch(n, jetstream.FetchMaxWait(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	came := 0
	for range again.Messages() {
		came++
	}
	if came != n {
		t.Errorf("%d of %d come again", came, n)
	}
}

// What a process holds that reads no more goes to others, and does not come out again when it
// reads on.
func TestWhatNobodyReadsGoesToOthers(t *testing.T) {
	t.Parallel()
	const n, window = 60, 20
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second, MaxAckPending: window})
	r.publish(t, subject, 0, n)
	g := adaptertest.Guard(t, guard.Config{})
	w := wrap(t, g, r.consumer)
	w.port.unreadFor = time.Second
	src := adaptertest.Source(t, g, "S/C")
	out := make(chan jetstream.Msg, n)
	consuming, err := w.Consume(func(m jetstream.Msg) { out <- m })
	if err != nil {
		t.Fatal(err)
	}
	<-out // and is never settled
	adaptertest.Eventually(t, "the window is full", func() bool { return src.Account().Unsettled() == window })
	consuming.Stop()
	<-consuming.Closed()
	handled := make(map[string]int)
	for len(handled) < window {
		batch, err := r.consumer.Fetch(window-len(handled), jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		for m := range batch.Messages() {
			handled[string(m.Data())]++
			if err := m.DoubleAck(adaptertest.Context(t)); err != nil {
				t.Fatal(err)
			}
		}
		if len(handled) == 0 {
			t.Fatalf("another process gets nothing: %+v", src.Account())
		}
	}
	for len(out) > 0 {
		<-out // the next one was on its way to the handler, maybe
	}
	consuming, err = w.Consume(func(m jetstream.Msg) {
		out <- m
		if err := m.Ack(); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for len(handled) < n {
		handled[string((<-out).Data())]++
	}
	consuming.Stop()
	<-consuming.Closed()
	for m, times := range handled {
		if times != 1 {
			t.Errorf("%s was handled %d times", m, times)
		}
	}
}

// iterate opens an iterator over a forced source that has a full window.
func iterate(t *testing.T, r *rig, window int) (*wrapped, jetstream.MessagesContext) {
	t.Helper()
	r.publish(t, subject, 0, window)
	w := wrap(t, adaptertest.Guard(t, guard.Config{}), r.consumer)
	w.port.unreadFor = time.Second
	if err := w.src.ForceOpen(0); err != nil {
		t.Fatal(err)
	}
	it, err := w.Messages(jetstream.PullExpiry(5 * time.Second)) // an open pull takes its part of what comes again
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(it.Stop)
	for w.src.Account().Unsettled() < window {
		if _, err := it.Next(jetstream.NextMaxWait(50 * time.Millisecond)); !errors.Is(err, nats.ErrTimeout) && !errors.Is(err, jetstream.ErrNoHeartbeat) {
			t.Fatal(err)
		}
	}
	return w, it
}

// An iterator that is open, and whose Next nobody calls, keeps nothing from others.
func TestOpenIteratorIsNoReader(t *testing.T) {
	t.Parallel()
	const window = 20
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second, MaxAckPending: window})
	w, _ := iterate(t, r, window)
	for handled := make(map[string]bool); len(handled) < window; {
		batch, err := r.consumer.Fetch(window-len(handled), jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		for m := range batch.Messages() {
			handled[string(m.Data())] = true
			if err := m.DoubleAck(adaptertest.Context(t)); err != nil {
				t.Fatal(err)
			}
		}
		if len(handled) == 0 {
			t.Fatalf("another process gets nothing: %+v", w.src.Account())
		}
	}
}

// A program that waits in Next reads, however long it waits.
func TestWaitingInNextIsReading(t *testing.T) {
	t.Parallel()
	const window = 20
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second, MaxAckPending: window})
	w, it := iterate(t, r, window)
	ended := make(chan error, 1)
	go func() {
		err := error(jetstream.ErrNoHeartbeat)
		for errors.Is(err, jetstream.ErrNoHeartbeat) { // of a busy machine
			_, err = it.Next()
		}
		ended <- err
	}()
	clock := r.durable(t, jetstream.ConsumerConfig{Durable: "clock", AckWait: 5 * time.Second, MaxAckPending: 1})
	for range 3 { // a message that is not kept alive: the third delivery is two AckWaits after the first
		if _, err := clock.Next(jetstream.FetchMaxWait(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	if i := r.info(t); i.NumRedelivered != 0 || w.port.lapse.Load() {
		t.Errorf("%d came again", i.NumRedelivered)
	}
	it.Stop()
	if err := <-ended; !errors.Is(err, jetstream.ErrMsgIteratorClosed) {
		t.Error(err)
	}
}

// A program that works on a message for long, and says so, reads: the message keeps its attempts.
func TestLongWorkIsReading(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second})
	r.publish(t, subject, 0, 1)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Retry: guard.Retry{Attempts: 2, Base: time.Millisecond, Max: 2 * time.Millisecond}}})
	type letter struct{ attempts, deliveries int }
	letters := make(chan letter, 1)
	w := wrap(t, g, r.consumer, WithDeadLetters(dlq.WriterFunc(func(_ context.Context, rec *dlq.Record) error {
		letters <- letter{rec.Attempts, rec.Deliveries}
		return nil
	})))
	w.port.unreadFor = time.Second
	for range 2 {
		m, err := w.Next(jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		for range 8 { // longer than unreadFor and the time between two extensions
			time.Sleep(400 * time.Millisecond)
			if err := m.InProgress(); err != nil {
				t.Fatal(err)
			}
		}
		if err := Fail(m, &json.SyntaxError{}); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case l := <-letters:
		if l != (letter{2, 1}) {
			t.Errorf("%+v", l)
		}
	case <-time.After(time.Minute):
		t.Error("it was not dead-lettered after two attempts")
	}
}

// What came again to the process that had it is handled there, at that delivery, also the last.
func TestWhatLapsedComesAgainHere(t *testing.T) {
	t.Parallel()
	const n = 20
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second, MaxDeliver: 2})
	r.publish(t, subject, 0, n)
	g := adaptertest.Guard(t, guard.Config{})
	w := wrap(t, g, r.consumer)
	w.port.unreadFor = time.Second
	src := adaptertest.Source(t, g, "S/C")
	if err := src.ForceOpen(time.Hour); err != nil {
		t.Fatal(err)
	}
	handled := make(chan string, 2*n)
	handle := func(m jetstream.Msg) {
		handled <- string(m.Data())
		if err := m.Ack(); err != nil {
			t.Error(err)
		}
	}
	consuming, err := w.Consume(handle)
	if err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "all are held", func() bool { return src.Account().Unsettled() == n })
	consuming.Stop()
	<-consuming.Closed()
	adaptertest.Eventually(t, "nothing is kept alive", func() bool { return w.port.lapse.Load() })
	if consuming, err = w.Consume(handle); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "they came again", func() bool { return r.info(t).NumRedelivered == n })
	if err := src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]bool)
	for len(seen) < n {
		seen[<-handled] = true
	}
	consuming.Stop()
	<-consuming.Closed()
}

// What lapsed twice, and was handled by another process then, does not come out here.
func TestWhatLapsedTwiceGoesToOthers(t *testing.T) {
	t.Parallel()
	const n = 20
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second})
	r.publish(t, subject, 0, n)
	w := wrap(t, adaptertest.Guard(t, guard.Config{}), r.consumer)
	w.port.unreadFor = time.Second
	if err := w.src.ForceOpen(time.Hour); err != nil {
		t.Fatal(err)
	}
	var handled atomic.Int64
	read := func(until string, ok func() bool) {
		t.Helper()
		consuming, err := w.Consume(func(m jetstream.Msg) {
			handled.Add(1)
			_ = m.Ack()
		})
		if err != nil {
			t.Fatal(err)
		}
		adaptertest.Eventually(t, until, ok)
		consuming.Stop()
		<-consuming.Closed()
	}
	read("all are held", func() bool { return w.src.Account().Unsettled() == n })
	adaptertest.Eventually(t, "nothing is kept alive", w.port.lapse.Load)
	read("they came again", func() bool { return w.port.copies.latestCount.Load() == n })
	adaptertest.Eventually(t, "nothing is kept alive again", w.port.lapse.Load)
	for others := 0; others < n; {
		batch, err := r.consumer.Fetch(n-others, jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		for m := range batch.Messages() {
			others++
			if err := m.DoubleAck(adaptertest.Context(t)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	read("nothing is left", func() bool { return w.src.Account().Unsettled() == 0 })
	if n := handled.Load(); n > 0 {
		t.Errorf("%d were handled here, too", n)
	}
}

// A message keeps its attempts when it lapses, and comes again as a new one.
func TestLapsedMessageKeepsItsAttempts(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second})
	r.publish(t, subject, 0, 1)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Retry: guard.Retry{Attempts: 2, Base: time.Millisecond, Max: 2 * time.Millisecond}}})
	letters := make(chan int, 1)
	w := wrap(t, g, r.consumer, WithDeadLetters(dlq.WriterFunc(func(_ context.Context, rec *dlq.Record) error {
		letters <- rec.Attempts
		return nil
	})))
	w.port.unreadFor = time.Second
	fail := func(m jetstream.Msg) {
		if err := Fail(m, &json.SyntaxError{}); err != nil {
			t.Fatal(err)
		}
	}
	next := func() jetstream.Msg {
		t.Helper()
		m, err := w.Next(jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	fail(next())
	adaptertest.Eventually(t, "it is not kept alive", w.port.lapse.Load)
	batch, err := w.FetchNoWait(1) // before its AckWait is over
	if err != nil {
		t.Fatal(err)
	}
	m, ok := <-batch.Messages()
	if !ok {
		m = next()
	}
	fail(m)
	select {
	case n := <-letters:
		if n != 2 {
			t.Errorf("the letter tells of %d attempts", n)
		}
	case <-time.After(20 * time.Second):
		t.Errorf("it was not dead-lettered after two attempts: %+v", w.src.State().Tally)
	}
}

// A message that lapses stays the same one here if its copy comes with the next fetch: what
// its failures prove counts, also if nothing can be compared with them.
func TestRareNextEndsPoison(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second})
	r.publish(t, subject, 0, 1)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
		NoBreaker: true, Retry: guard.Retry{Attempts: 2, Base: time.Millisecond, Max: 2 * time.Millisecond, Patience: time.Second},
	}})
	w := wrap(t, g, r.consumer, WithDeadLetters(dlq.WriterFunc(func(context.Context, *dlq.Record) error { return nil })))
	w.port.unreadFor = time.Second
	w.copyWait = time.Minute // the next fetch comes before the AckWait is over
	for range 4 {
		m, err := w.Next(jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		if err := Fail(m, errDown); err != nil {
			t.Fatal(err)
		}
		adaptertest.Eventually(t, "it is not kept alive, or dead", func() bool { return w.port.lapse.Load() || w.src.Account().DeadLettered == 1 })
		if w.src.Account().DeadLettered == 1 {
			return
		}
	}
	t.Errorf("it is not dead-lettered: %+v", w.src.State().Tally)
}

// A message that lapsed while it was asked out of turn has not failed. It comes again, and its
// ack goes out.
func TestLapsedWitnessComesAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second})
	r.publish(t, subject, 0, 2)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
		Ramp: guard.Ramp{Off: true}, Retry: guard.Retry{Attempts: 2, Base: time.Millisecond, Max: 2 * time.Millisecond},
	}})
	w := wrap(t, g, r.consumer, WithDeadLetters(dlq.WriterFunc(func(context.Context, *dlq.Record) error { return errDown })))
	w.port.unreadFor = time.Second
	failed := 0
	for size := 2; failed < 2; size = 1 { // a batch may end before the retry
		batch, err := w.Fetch(size, jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		for m := range batch.Messages() {
			if failed++; string(m.Data()) != "0" {
				t.Fatalf("%s came out", m.Data())
			}
			if err := Fail(m, errDown); err != nil {
				t.Fatal(err)
			}
		}
	}
	adaptertest.Eventually(t, "nothing is kept alive", w.port.lapse.Load)
	if it := <-w.src.Ready(); string(it.Msg.Data()) != "1" || w.hand(it) != nil {
		t.Fatalf("%s came out", it.Msg.Data())
	}
	if err := w.src.ForceOpen(time.Hour); err != nil {
		t.Fatal(err)
	}
	type ack struct {
		of  string
		err error
	}
	acks := make(chan ack, 4)
	consuming, err := w.Consume(func(m jetstream.Msg) { acks <- ack{string(m.Data()), m.Ack()} })
	if err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "both came again", func() bool { return w.port.copies.latestCount.Load() > 0 && w.src.Account().Unsettled() == 2 })
	if err := w.src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []ack{{"0", nil}, {"1", nil}} {
		if got := <-acks; got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	consuming.Stop()
	<-consuming.Closed()
	if n := w.src.State().Tally.Failures; n != 2 {
		t.Errorf("%d failures", n)
	}
}

// drainWays are the ways to read all messages and then drain. handle settles a message, or
// leaves it.
var drainWays = map[string]func(t *testing.T, w *wrapped, handle func(jetstream.Msg)) (drain func(), closed <-chan struct{}){
	"consume": func(t *testing.T, w *wrapped, handle func(jetstream.Msg)) (func(), <-chan struct{}) {
		t.Helper()
		cc, err := w.Consume(handle)
		if err != nil {
			t.Fatal(err)
		}
		return cc.Drain, cc.Closed()
	},
	"messages": func(t *testing.T, w *wrapped, handle func(jetstream.Msg)) (func(), <-chan struct{}) {
		t.Helper()
		it, err := w.Messages()
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			for {
				m, err := it.Next()
				if err != nil {
					return
				}
				handle(m)
			}
		}()
		t.Cleanup(func() { // of a test that failed
			it.Stop()
			<-closed
		})
		return it.Drain, closed
	},
}

// Drain ends in a hold whose window is full: what has no room goes back.
func TestWrappedDrainInAHold(t *testing.T) {
	t.Parallel()
	for name, way := range drainWays {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.ConsumerConfig{MaxAckPending: 100})
			w := wrap(t, adaptertest.Guard(t, guard.Config{}), r.consumer, WithWindow(4))
			if err := w.src.ForceOpen(0); err != nil {
				t.Fatal(err)
			}
			r.publish(t, subject, 0, 10)
			drain, closed := way(t, w, func(jetstream.Msg) {})
			adaptertest.Eventually(t, "the window is full, and one waits", w.port.full)
			drain()
			select {
			case <-closed:
			case <-time.After(20 * time.Second):
				t.Fatalf("it does not end: %+v", w.src.Account())
			}
		})
	}
}

// Drain ends within the stop timeout although the head waits, and all behind it, while the
// breaker is closed.
func TestWrappedDrainBehindAHeadThatWaits(t *testing.T) {
	t.Parallel()
	for name, way := range drainWays {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.ConsumerConfig{MaxAckPending: 100})
			g, log := logging(t, guard.Config{})
			w := wrap(t, g, r.consumer, WithWindow(4), WithStopTimeout(time.Second)) // and no dead letters
			r.publish(t, subject, 0, 10)
			drain, closed := way(t, w, func(m jetstream.Msg) {
				if err := m.Term(); err != nil {
					t.Error(err)
				}
			})
			adaptertest.Eventually(t, "the window is full, and one waits", w.port.full)
			drain()
			select {
			case <-closed:
			case <-time.After(20 * time.Second):
				t.Fatalf("it does not end: %+v", w.src.Account())
			}
			if a := w.src.Account(); a.RetryWait > 1 || a.RetryWait+a.Waiting != 4 { // the head may be due again
				t.Errorf("%+v", a)
			}
			if n := log.lines("level=WARN", "drain", "source=S/C", "waiting=3"); n != 1 {
				t.Errorf("%d lines:\n%s", n, log)
			}
		})
	}
}
