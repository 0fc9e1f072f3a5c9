// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// logged is a log that a test reads.
type logged struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logged) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.buf.String(), text)
}

func (l *logged) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.buf.String(), text)
}

// A coordinator that refuses every commit is noticed by what is committed and by
// the group's errors; when it takes them again, the marks are there.
func TestCommitsThatFailAreNoticed(t *testing.T) {
	t.Parallel()
	fake, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "t"))
	if err != nil {
		t.Fatal(err)
	}
	defer fake.Close()
	r := &rig{t: t, addrs: fake.ListenAddrs(), topic: "t", group: "g", partitions: 1}
	cfg := testConfig()
	cfg.Producer.Return.Successes = true
	if r.client, err = sarama.NewClient(r.addrs, cfg); err != nil {
		t.Fatal(err)
	}
	defer r.client.Close()
	if r.admin, err = sarama.NewClusterAdminFromClient(r.client); err != nil {
		t.Fatal(err)
	}
	if r.producer, err = sarama.NewSyncProducerFromClient(r.client); err != nil {
		t.Fatal(err)
	}
	defer r.producer.Close()
	fault := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: kerr.InvalidCommitOffsetSize, Count: -1})

	var own, groups logged
	g := adaptertest.Guard(t, guard.Config{})
	h := Wrap(g, nothing, WithLogger(slog.New(slog.NewTextHandler(&own, nil))), func(o *options) { o.lookEvery = 200 * time.Millisecond })
	c := *testConfig()
	c.Consumer.Return.Errors = true
	group, err := sarama.NewConsumerGroup(r.addrs, r.group, &c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { WatchErrors(context.Background(), group, slog.New(slog.NewTextHandler(&groups, nil))) })
	running.Go(func() {
		for ctx.Err() == nil {
			_ = group.Consume(ctx, []string{"t"}, h)
		}
	})
	r.publish(0, 10, nil, nil)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(own.buf.String(), groups.buf.String())
		}
	})
	adaptertest.Eventually(t, "the guard notices", func() bool { return own.has("commits are behind") && own.has("messages=") })
	adaptertest.Eventually(t, "the group says it", func() bool { return groups.has("partition=0") && groups.has("times=1") })
	if n := r.committed(0); n > 0 {
		t.Errorf("committed %d", n)
	}
	failures := func() uint64 { return g.Source(sourceName("", "t", 0)).State().Tally.AckFailures }
	before := 10
	adaptertest.Eventually(t, "the metrics count it", func() bool {
		r.publish(before, before+1, nil, nil)
		before++
		return failures() > 1
	})
	fault.Remove()
	n := int64(before + 10)
	r.publish(before, before+10, nil, nil)
	adaptertest.Eventually(t, "the commits catch up", func() bool { return own.has("commits have caught up") && r.committed(0) == n })
	cancel()
	if err := group.Close(); err != nil {
		t.Logf("close: %v", err)
	}
	running.Wait()
}

// A partition that cannot be read ends the session of all partitions, and sarama says so to
// the group's errors alone. The log names it, whoever runs the group, and when it can be read
// everything goes on.
func TestPartitionThatCannotBeReadIsNamed(t *testing.T) {
	t.Parallel()
	for name, run := range map[string]func(ctx context.Context, group sarama.ConsumerGroup, h sarama.ConsumerGroupHandler){
		"Consume": func(ctx context.Context, group sarama.ConsumerGroup, h sarama.ConsumerGroupHandler) {
			if err := Consume(ctx, group, []string{"t"}, h); err != nil {
				t.Error(err)
			}
		},
		"a loop of its own": func(ctx context.Context, group sarama.ConsumerGroup, h sarama.ConsumerGroupHandler) {
			for ctx.Err() == nil {
				_ = group.Consume(ctx, []string{"t"}, h)
			}
			_ = group.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fake, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(2, "t"))
			if err != nil {
				t.Fatal(err)
			}
			defer fake.Close()
			cfg := testConfig()
			cfg.Producer.Return.Successes = true
			cfg.Producer.Partitioner = sarama.NewManualPartitioner
			producer, err := sarama.NewSyncProducer(fake.ListenAddrs(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer producer.Close()
			for p := range int32(2) {
				if _, _, err := producer.SendMessage(&sarama.ProducerMessage{Topic: "t", Partition: p, Value: sarama.StringEncoder("x")}); err != nil {
					t.Fatal(err)
				}
			}
			fault := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.ListOffsets}, Partitions: []int32{1}, Err: kerr.TopicAuthorizationFailed, Count: -1})
			group, err := sarama.NewConsumerGroup(fake.ListenAddrs(), "g", testConfig())
			if err != nil {
				t.Fatal(err)
			}
			var own logged
			var calls atomic.Int64
			h := Wrap(adaptertest.Guard(t, guard.Config{}), func(context.Context, *sarama.ConsumerMessage) error { calls.Add(1); return nil },
				WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
			ctx, cancel := context.WithCancel(context.Background())
			var running sync.WaitGroup
			running.Go(func() { run(ctx, group, h) })
			t.Cleanup(func() {
				if t.Failed() {
					t.Log(own.buf.String())
				}
			})
			adaptertest.Eventually(t, "the log names it", func() bool { return own.has("a partition cannot be read") && own.has("t/1") })
			fault.Remove()
			adaptertest.Eventually(t, "all is handled", func() bool { return calls.Load() >= 2 })
			cancel()
			running.Wait()
		})
	}
}

// A partition that fails while its claim is open ends no session, and sarama tries again for ever.
// The log names it once, and says when it is over.
func TestOpenPartitionThatDoesNotAnswerIsNamed(t *testing.T) {
	t.Parallel()
	r, fake := newFakeRig(t)
	var own logged
	var calls atomic.Int64
	m := r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), func(context.Context, *sarama.ConsumerMessage) error { calls.Add(1); return nil },
		WithLogger(slog.New(slog.NewTextHandler(&own, nil))), func(o *options) { o.lookEvery = 100 * time.Millisecond }))
	r.publish(0, 1, nil, nil)
	adaptertest.Eventually(t, "it is handled", func() bool { return calls.Load() == 1 })
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(own.buf.String())
		}
	})
	const said, over = "partitions do not answer", "partitions answer again"
	fault := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.ListOffsets}, Err: kerr.TopicAuthorizationFailed, Count: -1})
	adaptertest.Eventually(t, "the log names it", func() bool {
		return own.has(said) && own.has("topic=orders partitions=[0]") && own.has(sarama.ErrTopicAuthorizationFailed.Error())
	})
	before := fault.Hits()
	adaptertest.Eventually(t, "it is looked at again", func() bool { return fault.Hits() >= before+4 }) // two for a look
	fault.Remove()
	adaptertest.Eventually(t, "it is over", func() bool { return own.has(over) })
	m.stop()
	if own.count(said) != 1 || own.count(over) != 1 {
		t.Error("it is said more than once")
	}
}

// A program's producer may wait for batches; its dead letters do not.
func TestLettersWaitForNoBatch(t *testing.T) {
	t.Parallel()
	fake, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "t"))
	if err != nil {
		t.Fatal(err)
	}
	defer fake.Close()
	cfg := testConfig()
	cfg.Producer.Flush.Messages, cfg.Producer.Flush.Bytes = 100, 64<<10
	d, err := NewDLQ(fake.ListenAddrs(), cfg, DLQConfig{Sources: []string{"t"}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // which would pass
	defer cancel()
	if err := d.Write(ctx, letterOf("t", 1)); err != nil {
		t.Error(err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// A mark that is not committed yet, since its time has not come or the program has
// not asked for it, is no commit that fails.
func TestCommitsThatAreNotDueAreNoNews(t *testing.T) {
	t.Parallel()
	for _, auto := range []bool{true, false} {
		r := newRig(t, 1)
		cfg := testConfig()
		cfg.Consumer.Offsets.AutoCommit.Enable, cfg.Consumer.Offsets.AutoCommit.Interval = auto, 2*time.Second // looked at each 4s
		var own logged
		var calls atomic.Int64
		h := marking{func(context.Context, *sarama.ConsumerMessage) error { calls.Add(1); return nil }, false}
		m := r.join(cfg, WrapHandler(adaptertest.Guard(t, guard.Config{}), h,
			WithLogger(slog.New(slog.NewTextHandler(&own, nil))), func(o *options) { o.lookEvery = 100 * time.Millisecond }))
		for i := range 70 {
			r.publish(i, i+1, nil, nil)
			time.Sleep(100 * time.Millisecond)
		}
		adaptertest.Eventually(t, "all are handled", func() bool { return calls.Load() == 70 })
		if own.has("commits are behind") {
			t.Errorf("AutoCommit %t: %s", auto, own.buf.String())
		}
		m.stop()
	}
}

// After a reset by the program, what was marked before need not be committed.
func TestResetIsNoCommitThatFails(t *testing.T) {
	t.Parallel()
	r, fake := newFakeRig(t)
	asked := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetFetch}, Observe: true, Count: -1})
	sessions := make(chan sarama.ConsumerGroupSession, 1)
	g := adaptertest.Guard(t, guard.Config{})
	var own logged
	cfg := testConfig()
	cfg.Consumer.Offsets.AutoCommit.Interval = 500 * time.Millisecond
	m := r.join(cfg, WrapHandler(g, rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		sessions <- s
		for m := range c.Messages() {
			s.MarkMessage(m, "")
		}
		return nil
	}}, WithLogger(slog.New(slog.NewTextHandler(&own, nil))), func(o *options) { o.lookEvery = 3 * time.Second }))
	looks := func(n int) { // a look asks once; of n looks, the last may be under way
		t.Helper()
		before := asked.Hits()
		adaptertest.Eventually(t, "the watch looks", func() bool { return asked.Hits() >= before+n })
	}
	s := <-sessions
	r.publish(0, 10, nil, nil)
	adaptertest.Eventually(t, "all is committed", func() bool { return r.committed(0) == 10 })
	looks(2)
	s.ResetOffset(r.topic, 0, 3, "")
	adaptertest.Eventually(t, "the reset is committed", func() bool { return r.committed(0) == 3 })
	looks(2)
	r.publish(10, 11, nil, nil) // the loop marks again
	adaptertest.Eventually(t, "that is committed", func() bool { return r.committed(0) == 11 })
	looks(2)
	n := adaptertest.Source(t, g, r.topic+"/0").State().Tally.AckFailures
	m.stop()
	if n > 0 || own.has("commits are behind") {
		t.Errorf("%d acks failed: %s", n, own.buf.String())
	}
}

// A reset and a new mark may come between two looks. The next look does not expect the mark of
// before the reset to be committed; the one after it expects the new mark.
func TestResetBetweenTwoLooks(t *testing.T) {
	t.Parallel()
	r, _ := newFakeRig(t)
	var own logged
	h := Wrap(adaptertest.Guard(t, guard.Config{}), nothing, WithLogger(slog.New(slog.NewTextHandler(&own, nil)))).(*handler)
	ss := newSession(h, foreignSession{}, settings{client: r.client, config: testConfig(), group: r.group})
	c := newClaim(ss, newFakeClaim())
	c.session = &markSession{}
	ss.add(c)
	w := newWatcher(ss)
	mark := func(offset int64) {
		c.marks.Settle(offset, "")
		c.mark()
	}
	look := func(behind bool, what string) {
		t.Helper()
		c.refused.Store(false)
		if w.look(); c.refused.Load() != behind || own.has("commits are behind") != behind {
			t.Errorf("%s: commits are behind: %t; %s", what, c.refused.Load(), own.buf.String())
		}
	}
	mark(9)
	r.commit(r.topic, 0, 10, "")
	look(false, "the first")
	look(false, "all is committed")
	c.rewind(3, "")
	r.commit(r.topic, 0, 3, "")
	look(false, "after the reset")
	look(false, "after the reset, again")
	c.marks.Resumed()
	mark(10)
	r.commit(r.topic, 0, 11, "")
	look(false, "marked again")
	look(false, "that is committed")
	c.rewind(3, "")
	r.commit(r.topic, 0, 3, "")
	c.marks.Resumed()
	mark(11)
	look(false, "a reset and a mark since the last")
	look(true, "the new mark is not committed")
}

// A trace goes from the producer through the broker to the handler and into the
// dead letter.
func TestTraceReachesTheDeadLetter(t *testing.T) {
	t.Parallel()
	for _, parent := range []bool{false, true} {
		r := newRig(t, 1)
		d := r.dlq(DLQConfig{Sources: []string{r.topic}})
		spans := tracetest.NewInMemoryExporter()
		provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
		w3c := propagation.TraceContext{}
		opts := []guard.Option{guard.WithTracerProvider(provider), guard.WithPropagator(w3c)}
		if parent {
			opts = append(opts, guard.WithParentSpans())
		}
		g, err := guard.New(guard.Config{Policy: guard.Policy{Retry: guard.Retry{Attempts: 2, Base: time.Millisecond, Max: time.Millisecond}}}, opts...)
		if err != nil {
			t.Fatal(err)
		}

		ctx, root := provider.Tracer("test").Start(context.Background(), "publish", trace.WithSpanKind(trace.SpanKindProducer))
		carrier := propagation.MapCarrier{}
		w3c.Inject(ctx, carrier)
		root.End()
		if _, _, err := r.producer.SendMessage(&sarama.ProducerMessage{
			Topic: r.topic, Value: sarama.StringEncoder("bad"),
			Headers: []sarama.RecordHeader{{Key: []byte("traceparent"), Value: []byte(carrier["traceparent"])}},
		}); err != nil {
			t.Fatal(err)
		}
		var seen trace.SpanContext
		m := r.join(testConfig(), Wrap(g, func(ctx context.Context, _ *sarama.ConsumerMessage) error {
			seen = trace.SpanContextFromContext(ctx)
			return guard.Permanent(errors.New("hopeless"))
		}, WithDeadLetters(d)))
		ms, err := r.read(adaptertest.Context(t), r.topic+".dlq", 0, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		adaptertest.Eventually(t, "committed", func() bool { return r.committed(0) == 1 })
		m.stop()
		if _, err := g.Close(adaptertest.Context(t)); err != nil {
			t.Fatal(err)
		}
		want := root.SpanContext().TraceID()
		rec, err := ReadDeadLetter(ms[0])
		if err != nil || !strings.Contains(rec.TraceParent, want.String()) {
			t.Errorf("the letter's trace is %q, want %s; %v", rec.TraceParent, want, err)
		}
		if parent != (seen.TraceID() == want) {
			t.Errorf("parent %t, the handler's trace is %s, want %s", parent, seen.TraceID(), want)
		}
		found := map[string]bool{}
		for _, s := range spans.GetSpans() {
			related := s.SpanContext.TraceID() == want
			for _, l := range s.Links {
				related = related || l.SpanContext.TraceID() == want
			}
			found[strings.Fields(s.Name)[0]] = related
		}
		if !found["process"] || !found["dead_letter"] {
			t.Errorf("spans related to the producer's: %v", found)
		}
	}
}

// A coordinator that has moved is looked for again, also for a client that the program gave.
func TestCommittedOfACoordinatorThatMoved(t *testing.T) {
	t.Parallel()
	fake, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "t"))
	if err != nil {
		t.Fatal(err)
	}
	defer fake.Close()
	cfg := testConfig()
	client, err := sarama.NewClient(fake.ListenAddrs(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	asked := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.FindCoordinator}, Observe: true, Count: -1})
	ss := newSession(Wrap(adaptertest.Guard(t, guard.Config{}), nothing).(*handler), foreignSession{}, settings{client: client, config: cfg, group: "g"})
	if _, err := client.Coordinator("g"); err != nil { // it is cached
		t.Fatal(err)
	}
	before := asked.Hits()
	fake.ControlKey(int16(kmsg.OffsetFetch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		resp := req.ResponseKind().(*kmsg.OffsetFetchResponse)
		group := kmsg.NewOffsetFetchResponseGroup() // as version 8 has it
		group.Group, group.ErrorCode = "g", kerr.NotCoordinator.Code
		resp.Groups = append(resp.Groups, group)
		resp.ErrorCode = kerr.NotCoordinator.Code
		return resp, nil, true
	})
	if _, err := ss.committed(map[string][]int32{"t": {0}}); !errors.Is(err, sarama.ErrNotCoordinatorForConsumer) || asked.Hits() == before {
		t.Errorf("%v, asked %d times where it is, and %d before", err, asked.Hits(), before)
	}
}
