// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/credit"
	"github.com/stormguard-mq/stormguard/limiter"
)

// A DLQ consumer keeps to its rate, and does not call a dependency that is down
// at that rate either: the breaker opens.
func TestWithLimiter(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	const n = 60
	r.publish(t, subject, 0, n)
	rate, err := limiter.Local(limiter.Limit{Rate: 100, Burst: 5})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var calls, ok atomic.Int64
	var down atomic.Bool
	done := make(chan error, 1)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
	start := time.Now()
	go func() {
		done <- Consume(ctx, g, r.consumer, func(_ context.Context, m jetstream.Msg) error {
			calls.Add(1)
			if down.Load() {
				return errDown
			}
			if _, err := ReadDeadLetter(m); err != nil {
				return err
			}
			ok.Add(1)
			return nil
		}, WithLimiter(rate))
	}()
	adaptertest.Eventually(t, "all handled", func() bool { return ok.Load() == n })
	if took := time.Since(start); took < (n-5)*10*time.Millisecond {
		t.Errorf("%d in %s", n, took)
	}
	down.Store(true)
	calls.Store(0)
	r.publish(t, subject, n, 2*n)
	time.Sleep(1500 * time.Millisecond)
	if c := calls.Load(); c > 40 {
		t.Errorf("%d calls of a dependency that is down", c)
	}
	down.Store(false)
	adaptertest.Eventually(t, "the rest handled", func() bool { return ok.Load() == 2*n })
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// moverRig is a consumer whose messages die, a DLQ and a mover.
type moverRig struct {
	*rig
	dlq   *DLQ
	mover *Mover
}

func newMoverRig(t *testing.T, stream jetstream.StreamConfig, budget dlq.BudgetConfig) *moverRig {
	t.Helper()
	r := &moverRig{rig: &rig{broker: newBroker(t)}}
	r.nc = r.connect()
	ctx := adaptertest.Context(t)
	var err error
	if r.js, err = jetstream.New(r.nc); err != nil {
		t.Fatal(err)
	}
	stream.Name, stream.Subjects = "S", []string{"s.>"}
	if r.stream, err = r.js.CreateStream(ctx, stream); err != nil {
		t.Fatal(err)
	}
	r.consumer = r.durable(t, jetstream.ConsumerConfig{AckWait: 300 * time.Millisecond, MaxDeliver: 2, AckPolicy: jetstream.AckExplicitPolicy})
	if r.dlq, err = NewDLQ(ctx, r.js, DLQConfig{Stream: "D"}); err != nil {
		t.Fatal(err)
	}
	r.mover = r.newMover(t, budget)
	return r
}

func (r *moverRig) newMover(t *testing.T, budget dlq.BudgetConfig) *Mover {
	t.Helper()
	m, err := NewMover(adaptertest.Context(t), r.js, MoverConfig{Stream: "S", Consumer: "C", DLQ: r.dlq, Budget: budget})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// run runs a mover until the returned stop, which returns its error.
func (r *moverRig) run(t *testing.T, m *Mover) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	var once sync.Once
	var err error
	stop = func() error {
		once.Do(func() {
			cancel()
			err = <-done
		})
		return err
	}
	t.Cleanup(func() { _ = stop() })
	return stop
}

// die lets messages be delivered until the server gives up on them.
func (r *moverRig) die(t *testing.T, n int) {
	t.Helper()
	for range 2 * n {
		if _, err := r.consumer.Next(jetstream.FetchMaxWait(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	r.expire(t)
}

// expire pulls until the last AckWait is over, and the server has given up on all:
// without a pull it may not look.
func (r *moverRig) expire(t *testing.T) {
	t.Helper()
	adaptertest.Eventually(t, "the server gives up", func() bool {
		if m, err := r.consumer.Next(jetstream.FetchMaxWait(1500 * time.Millisecond)); !errors.Is(err, nats.ErrTimeout) {
			t.Fatalf("%v %v", m, err)
		}
		return r.info(t).NumAckPending == 0
	})
}

func TestMoverMovesWhatTheServerGaveUpOn(t *testing.T) {
	t.Parallel()
	r := newMoverRig(t, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy}, dlq.BudgetConfig{})
	r.publish(t, subject, 0, 3)
	for range 5 { // 0 and 1 twice, 2 once
		m, err := r.consumer.Next(jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		if string(m.Data()) == "2" {
			if err := m.TermWithReason("a bad day"); err != nil {
				t.Fatal(err)
			}
		}
	}
	r.expire(t)
	// The advisories came while no mover ran.
	stop := r.run(t, r.mover)
	adaptertest.Eventually(t, "all moved", func() bool { return r.mover.Counts().Released == 3 })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	byBody := map[string]dlq.Record{}
	for _, m := range r.letters(t, "D") {
		rec, err := ReadDeadLetter(m)
		if err != nil {
			t.Fatal(err)
		}
		byBody[string(rec.Body)] = rec
	}
	for _, body := range []string{"0", "1"} {
		if rec := byBody[body]; rec.Reason != reasonMaxDeliver || rec.Deliveries != 2 || rec.Permanent || rec.Origin.Subject != "s.x" || rec.Timestamp.IsZero() {
			t.Errorf("%+v", rec)
		}
	}
	// A work queue forgets what is terminated at once.
	gone := byBody[""]
	if gone.Reason != reasonTerminated || !gone.Permanent || !strings.Contains(gone.Error.Message, "a bad day; the body is gone") || gone.Origin.Sequence != 3 {
		t.Errorf("%+v", gone)
	}
	i, err := r.stream.Info(adaptertest.Context(t))
	if err != nil || i.State.Msgs != 0 {
		t.Errorf("%d messages left in the work queue: %v", i.State.Msgs, err)
	}
	if c := r.mover.Counts(); c.Parked != 3 || c.Gone != 1 {
		t.Errorf("%+v", c)
	}
}

// What the budget does not cover waits in the parking stream, through a restart
// of the mover; successes of the source release it.
func TestMoverKeepsToItsBudget(t *testing.T) {
	t.Parallel()
	budget := dlq.BudgetConfig{Balance: 2, Earn: 1}
	r := newMoverRig(t, jetstream.StreamConfig{}, budget)
	stop := r.run(t, r.mover)
	r.publish(t, subject, 0, 6)
	r.die(t, 6)
	adaptertest.Eventually(t, "all parked", func() bool { return r.mover.Counts().Parked == 6 })
	adaptertest.Eventually(t, "two released", func() bool { return r.mover.Counts().Released == 2 })
	adaptertest.Eventually(t, "the third is refused", func() bool { return r.mover.Counts().Refused > 2 })
	if n := len(r.letters(t, "D")); n != 2 {
		t.Errorf("%d letters for two credits: what died must not earn", n)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	again := r.newMover(t, budget)
	stop = r.run(t, again)
	adaptertest.Eventually(t, "two more", func() bool { return again.Counts().Released == 2 })
	adaptertest.Eventually(t, "and no more", func() bool { return again.Counts().Refused > 2 })
	r.publish(t, subject, 6, 16)
	for range 10 {
		m, err := r.consumer.Next(jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		if err := m.DoubleAck(adaptertest.Context(t)); err != nil {
			t.Fatal(err)
		}
	}
	adaptertest.Eventually(t, "successes release the rest", func() bool { return again.Counts().Released == 4 })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, m := range r.letters(t, "D") {
		rec, err := ReadDeadLetter(m)
		if err != nil {
			t.Fatal(err)
		}
		seen[string(rec.Body)]++
	}
	if len(seen) != 6 {
		t.Errorf("%v", seen)
	}
}

// A letter costs one credit, also after a reconnect while another one waits.
func TestMoverAfterAReconnect(t *testing.T) {
	t.Parallel()
	const n = 6
	r := newMoverRig(t, jetstream.StreamConfig{}, dlq.BudgetConfig{Balance: 1, FreeEvery: time.Hour})
	parked := r.mover.parked[credit.Exhausted].CachedInfo().Config
	parked.AckWait = time.Second
	if _, err := r.js.UpdateConsumer(adaptertest.Context(t), r.mover.cfg.Parking, parked); err != nil {
		t.Fatal(err)
	}
	r.publish(t, subject, 0, n)
	r.die(t, n)
	r.run(t, r.mover)
	adaptertest.Eventually(t, "the second waits for a credit", func() bool {
		c := r.mover.Counts()
		return c.Parked == n && c.Released == 1 && c.Refused > 0
	})
	if err := r.nc.ForceReconnect(); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "the client is back", func() bool { return r.nc.IsConnected() && r.nc.Stats().Reconnects == 1 })
	for i := uint64(2); i <= n; i++ {
		before := r.mover.Counts().Refused
		adaptertest.Eventually(t, "an AckWait is over", func() bool { return r.mover.Counts().Refused >= before+3 }) // one each moverPoll
		r.mover.Grant(1)
		adaptertest.Eventually(t, "one more is released", func() bool { return r.mover.Counts().Released == i })
	}
	if got := len(r.letters(t, "D")); got != n {
		t.Errorf("%d letters for %d credits", got, n)
	}
}

// A consumer that is made anew counts its acks from 0 again, and they earn credits from the
// first one on.
func TestMoverOfAConsumerMadeAnew(t *testing.T) {
	t.Parallel()
	r := newMoverRig(t, jetstream.StreamConfig{}, dlq.BudgetConfig{Balance: 2, Earn: 1})
	r.run(t, r.mover)
	ack := func(n int) {
		t.Helper()
		for range n {
			m, err := r.consumer.Next(jetstream.FetchMaxWait(time.Minute))
			if err != nil {
				t.Fatal(err)
			}
			if err := m.DoubleAck(adaptertest.Context(t)); err != nil {
				t.Fatal(err)
			}
		}
	}
	floor := func(n uint64) {
		t.Helper()
		adaptertest.Eventually(t, "the mover sees the floor", func() bool {
			r.mover.mu.Lock()
			defer r.mover.mu.Unlock()
			return r.mover.floor-r.mover.base == n
		})
	}
	r.publish(t, subject, 0, 20)
	ack(20)
	floor(20)
	if err := r.stream.DeleteConsumer(adaptertest.Context(t), "C"); err != nil {
		t.Fatal(err)
	}
	r.consumer = r.durable(t, jetstream.ConsumerConfig{
		AckWait: 300 * time.Millisecond, MaxDeliver: 2, AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverNewPolicy,
	})
	floor(0)
	r.publish(t, subject, 20, 26)
	r.die(t, 6)
	adaptertest.Eventually(t, "the third is refused", func() bool { return r.mover.Counts().Released == 2 && r.mover.Counts().Refused > 0 })
	for round := range 2 { // each fills the balance, or twice if the mover looks in its middle
		r.publish(t, subject, 26+4*round, 30+4*round)
		ack(4)
		adaptertest.Eventually(t, "successes release two", func() bool { return r.mover.Counts().Released >= uint64(4+2*round) })
	}
}

// What the guard has dead-lettered already makes no second letter.
func TestMoverAndGuardMakeOneLetter(t *testing.T) {
	t.Parallel()
	r := newMoverRig(t, jetstream.StreamConfig{}, dlq.BudgetConfig{})
	r.publish(t, subject, 0, 1)
	reader, err := r.stream.OrderedConsumer(adaptertest.Context(t), jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := reader.Next()
	if err != nil {
		t.Fatal(err)
	}
	p := newMsgPort("C", r.nc, &options{})
	p.copies = newCopies(1)
	meta := p.Meta(m) // of the guard
	meta.Origin.Group = "C"
	r.die(t, 1)
	if err := r.dlq.Write(adaptertest.Context(t), &dlq.Record{
		Body: meta.Body, Origin: meta.Origin, Timestamp: meta.Timestamp, Reason: dlq.ReasonLastDelivery,
	}); err != nil {
		t.Fatal(err)
	}
	r.run(t, r.mover)
	adaptertest.Eventually(t, "moved", func() bool { return r.mover.Counts().Released == 1 })
	got := r.letters(t, "D")
	rec, err := ReadDeadLetter(got[0])
	if len(got) != 1 || err != nil || rec.Reason != dlq.ReasonLastDelivery {
		t.Errorf("%d letters, %+v, %v", len(got), rec, err)
	}
}

// Who lags and still answers direct gets does not make a work queue's message gone:
// here a mirror that has lost all.
func TestMoverAsksTheLeader(t *testing.T) {
	t.Parallel()
	r := newMoverRig(t, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy, AllowDirect: true}, dlq.BudgetConfig{})
	ctx := adaptertest.Context(t)
	mirror, err := r.js.CreateStream(ctx, jetstream.StreamConfig{Name: "M", Mirror: &jetstream.StreamSource{Name: "S"}, MirrorDirect: true})
	if err != nil {
		t.Fatal(err)
	}
	const n = 12
	r.publish(t, subject, 0, n)
	adaptertest.Eventually(t, "the mirror has all", func() bool {
		i, err := mirror.Info(ctx)
		return err == nil && i.State.Msgs == n
	})
	if err := mirror.Purge(ctx); err != nil {
		t.Fatal(err)
	}
	missed := false // by a direct get; who answers it is drawn
	for seq := uint64(1); seq <= n; seq++ {
		_, err := r.stream.GetMsg(ctx, seq)
		missed = missed || errors.Is(err, jetstream.ErrMsgNotFound)
	}
	if !missed {
		t.Fatal("the mirror answers no direct get")
	}
	r.die(t, n)
	r.run(t, r.mover)
	adaptertest.Eventually(t, "all moved", func() bool { return r.mover.Counts().Released == n })
	bodies := map[string]bool{}
	for _, m := range r.letters(t, "D") {
		bodies[string(m.Data())] = true
	}
	if c := r.mover.Counts(); len(bodies) != n || bodies[""] || c.Gone != 0 {
		t.Errorf("letters of %v, %+v", bodies, c)
	}
	if i, err := r.stream.Info(ctx); err != nil || i.State.Msgs != 0 {
		t.Errorf("%d messages left in the work queue: %v", i.State.Msgs, err)
	}
}

// A body that was not found for the parking is looked for again at the release.
func TestMoverLooksAgain(t *testing.T) {
	t.Parallel()
	r := newMoverRig(t, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy}, dlq.BudgetConfig{})
	ctx := adaptertest.Context(t)
	r.publish(t, subject, 0, 2)
	if err := r.stream.DeleteMsg(ctx, 2); err != nil {
		t.Fatal(err)
	}
	park := *r.mover.park
	park.cfg.Subject = "stormguard.parked.S.C." + credit.Exhausted.String()
	for seq := range uint64(2) {
		if err := park.Write(ctx, &dlq.Record{
			Origin: dlq.Origin{System: system, Source: "S", Group: "C", Sequence: seq + 1},
			Reason: reasonMaxDeliver, Error: dlq.ErrorInfo{Message: "not acked"},
		}); err != nil {
			t.Fatal(err)
		}
	}
	r.run(t, r.mover)
	adaptertest.Eventually(t, "both released", func() bool { return r.mover.Counts().Released == 2 })
	for _, m := range r.letters(t, "D") {
		rec, err := ReadDeadLetter(m)
		if err != nil {
			t.Fatal(err)
		}
		gone := strings.HasSuffix(rec.Error.Message, "; the body is gone: message 2 is no longer in stream S")
		switch rec.Origin.Sequence {
		case 1:
			if gone || string(rec.Body) != "0" || rec.Origin.Subject != "s.x" {
				t.Errorf("%+v", rec)
			}
		default:
			if !gone || len(rec.Body) != 0 {
				t.Errorf("%+v", rec)
			}
		}
	}
	if i, err := r.stream.Info(ctx); err != nil || i.State.Msgs != 0 {
		t.Errorf("%d messages left in the work queue: %v", i.State.Msgs, err)
	}
}

func TestMoverIsRefusedAndEnds(t *testing.T) {
	t.Parallel()
	r := newMoverRig(t, jetstream.StreamConfig{}, dlq.BudgetConfig{})
	_, err := NewMover(adaptertest.Context(t), r.js, MoverConfig{Stream: "a.b", Replicas: 7, Budget: dlq.BudgetConfig{Earn: 5}})
	for _, want := range []string{"Stream", "Consumer", "DLQ", "Replicas", "Earn"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not reported: %v", want, err)
		}
	}
	for _, c := range []MoverConfig{{Stream: "S", Consumer: "X", DLQ: r.dlq}, {Stream: "T", Consumer: "C", DLQ: r.dlq}} { // mistyped
		if _, err := NewMover(adaptertest.Context(t), r.js, c); !errors.Is(err, ErrConsumerGone) || !strings.Contains(err.Error(), c.Stream+"/"+c.Consumer) {
			t.Errorf("%v", err)
		}
		if _, err := r.js.Stream(adaptertest.Context(t), c.withDefaults().Parking); !errors.Is(err, jetstream.ErrStreamNotFound) {
			t.Errorf("streams for nobody: %v", err)
		}
	}
	r.durable(t, jetstream.ConsumerConfig{Durable: "X"})
	_, err = NewMover(adaptertest.Context(t), r.js, MoverConfig{Stream: "S", Consumer: "X", DLQ: r.dlq, NoCreate: true})
	if !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "nats stream add stormguard-advisories-S-X --subjects '$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.S.X") || !strings.Contains(err.Error(), "--discard old") {
		t.Error(err)
	}
	done := make(chan error, 1)
	go func() { done <- r.mover.Run(context.Background()) }()
	adaptertest.Eventually(t, "it pulls", func() bool {
		i, err := r.mover.advisories.Info(adaptertest.Context(t))
		return err == nil && i.NumWaiting > 0
	})
	if err := r.js.DeleteStream(adaptertest.Context(t), "stormguard-advisories-S-C"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, ErrConsumerGone) {
		t.Error(err)
	}
	r.nc.Close()
	if err := r.mover.Run(context.Background()); !errors.Is(err, ErrConnectionClosed) {
		t.Error(err)
	}
}

// A body that the Mover cuts is lost with the message of a work queue, so it says so.
func TestMoverTellsOfACutBody(t *testing.T) {
	t.Parallel()
	r := newMoverRig(t, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy}, dlq.BudgetConfig{})
	r.stop()
	r.payload = 64 << 10
	r.start()
	adaptertest.Eventually(t, "the client knows of it", func() bool { return r.nc.IsConnected() && r.nc.MaxPayload() == int64(r.payload) })
	l := new(logged)
	m, err := NewMover(adaptertest.Context(t), r.js, MoverConfig{Stream: "S", Consumer: "C", DLQ: r.dlq}, WithLogger(slog.New(slog.NewTextHandler(l, nil))))
	if err != nil {
		t.Fatal(err)
	}
	if m.park.cuts != r.dlq.cuts {
		t.Error("a letter that is cut at both is told of twice")
	}
	const n = 2
	for range n {
		if _, err := r.js.Publish(adaptertest.Context(t), "s.x", make([]byte, r.payload)); err != nil {
			t.Fatal(err)
		}
	}
	r.die(t, n)
	stop := r.run(t, m)
	adaptertest.Eventually(t, "released", func() bool { return m.Counts().Released == n })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	for _, letter := range r.letters(t, "D") {
		if got, want := letter.Headers().Get(headerTrimmed), fmt.Sprintf(trimmedText, len(letter.Data()), r.payload, int(r.payload)-len(letter.Data())); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if l.lines("WARN", "body was cut", "source=S/C", fmt.Sprintf("bytes=%d", r.payload)) != 1 {
		t.Errorf("%s", l)
	}
}

// A stream that was made anew counts from 1 again: what was parked before has nothing to do
// with the message that has its number now.
func TestMoverSparesANewStream(t *testing.T) {
	t.Parallel()
	for name, known := range map[string]bool{"parked with its body": true, "an advisory": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newMoverRig(t, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy}, dlq.BudgetConfig{})
			ctx := adaptertest.Context(t)
			rec := record()
			rec.Origin.Sequence, rec.LastFailed = 1, time.Now().Add(-time.Hour).UTC()
			rec.Timestamp = rec.LastFailed.Add(-time.Minute)
			if !known {
				rec.Body, rec.Origin.Subject, rec.Timestamp = nil, "", time.Time{}
			}
			if _, err := r.js.Publish(ctx, "s.x", []byte("new")); err != nil {
				t.Fatal(err)
			}
			park := *r.mover.park
			park.cfg.Subject = "stormguard.parked.S.C.exhausted"
			if err := park.Write(ctx, rec); err != nil {
				t.Fatal(err)
			}
			r.run(t, r.mover)
			adaptertest.Eventually(t, "it is released", func() bool { return r.mover.Counts().Released == 1 })
			m, err := r.stream.GetMsg(ctx, 1)
			if err != nil || string(m.Data) != "new" {
				t.Errorf("the new message: %+v, %v", m, err)
			}
			letter, err := ReadDeadLetter(r.letters(t, "D")[0])
			if err != nil || string(letter.Body) == "new" {
				t.Errorf("%+v, %v", letter, err)
			}
		})
	}
}

// Two movers may have one parking stream: each releases its own letters.
func TestTwoMoversOneParking(t *testing.T) {
	t.Parallel()
	r := newMoverRig(t, jetstream.StreamConfig{}, dlq.BudgetConfig{})
	ctx := adaptertest.Context(t)
	other, err := r.js.CreateStream(ctx, jetstream.StreamConfig{Name: "T", Subjects: []string{"t.>"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy}); err != nil {
		t.Fatal(err)
	}
	parking := r.mover.cfg.Parking
	both, err := r.js.Stream(ctx, parking)
	if err != nil {
		t.Fatal(err)
	}
	cfg := both.CachedInfo().Config
	cfg.Subjects = append(cfg.Subjects, "stormguard.parked.T.C.*")
	if _, err := r.js.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	second, err := NewMover(ctx, r.js, MoverConfig{Stream: "T", Consumer: "C", DLQ: r.dlq, Parking: parking, Advisories: "ADV2"})
	if err != nil {
		t.Fatal(err)
	}
	for stream, m := range map[string]*Mover{"S": r.mover, "T": second} {
		rec := record()
		rec.Origin.Source, rec.LastFailed = stream, time.Now().UTC()
		park := *m.park
		park.cfg.Subject = "stormguard.parked." + stream + ".C.exhausted"
		if err := park.Write(ctx, rec); err != nil {
			t.Fatal(err)
		}
	}
	r.run(t, r.mover)
	r.run(t, second)
	for _, m := range []*Mover{r.mover, second} {
		adaptertest.Eventually(t, "each releases one", func() bool { return m.Counts().Released == 1 })
	}
}
