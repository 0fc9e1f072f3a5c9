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

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// rawHandler is a consumer group's handler without a guard.
type rawHandler struct {
	consume func(sarama.ConsumerGroupSession, sarama.ConsumerGroupClaim) error
}

func (rawHandler) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (rawHandler) Cleanup(sarama.ConsumerGroupSession) error { return nil }
func (h rawHandler) ConsumeClaim(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
	return h.consume(s, c)
}

// revoking has a member of a cooperative group with a full buffer on each of two
// partitions, lets another join, and returns how long the other had to wait for
// the partition that moves to it. A handler takes 20ms.
func revoking(t *testing.T, first func(handle func(context.Context, *sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler) time.Duration {
	t.Helper()
	r := newRig(t, 2)
	const n = 1200
	r.publish(0, n, func(i int) int32 { return int32(i % 2) }, nil)
	var calls atomic.Int64
	handle := func(ctx context.Context, _ *sarama.ConsumerMessage) error {
		calls.Add(1)
		work := time.NewTimer(20 * time.Millisecond)
		defer work.Stop()
		select {
		case <-work.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	a := r.join(cooperativeConfig(), first(handle))
	adaptertest.Eventually(t, "the first is at work", func() bool { return calls.Load() > 10 })
	time.Sleep(300 * time.Millisecond) // its buffers fill
	var got atomic.Bool
	begun := time.Now()
	b := r.join(cooperativeConfig(), rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		for range c.Messages() {
			got.Store(true)
		}
		return nil
	}})
	adaptertest.Eventually(t, "the second has a partition", got.Load)
	took := time.Since(begun)
	a.stop()
	b.stop()
	return took
}

// A cooperative revoke leaves the session's context alive, and the claim's
// Messages closed behind everything that sarama has buffered, for this partition
// and for others of the same broker: 600 messages of 20ms are 12s of a rebalance.
// The guard leaves the claim when it is revoked, and lets sarama do so too.
func TestCooperativeRevokeIsSeenAtOnce(t *testing.T) {
	t.Parallel()
	raw := revoking(t, func(handle func(context.Context, *sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler {
		return rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
			for m := range c.Messages() {
				_ = handle(context.Background(), m)
				s.MarkMessage(m, "")
			}
			return nil
		}}
	})
	if raw < 4*time.Second {
		t.Skipf("sarama itself leaves a revoked claim after %s: the trap is gone", raw)
	}
	window := WithPolicy(guard.Policy{Window: 20}) // less than sarama's buffer
	for name, first := range map[string]func(func(context.Context, *sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler{
		"function": func(handle func(context.Context, *sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler {
			return Wrap(adaptertest.Guard(t, guard.Config{}), handle)
		},
		"passive": func(handle func(context.Context, *sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler {
			return WrapHandler(adaptertest.Guard(t, guard.Config{}), marking{handle, false}, window)
		},
	} {
		// A coordinator that is busy with other groups can take seconds for a rebalance;
		// three times in a row it is not.
		var waits []time.Duration
		for len(waits) < 3 && (len(waits) == 0 || slices.Min(waits) > raw/2) {
			waits = append(waits, revoking(t, first))
		}
		t.Logf("%s: the next member waited %v, beside a raw loop %v", name, waits, raw)
		if slices.Min(waits) > raw/2 {
			t.Errorf("%s: %v, a raw loop %v", name, waits, raw)
		}
	}
}

// What a window holds while it is full is dropped in time too, although nobody
// reads the claim then.
func TestRevokeOfAFullWindow(t *testing.T) {
	t.Parallel()
	for _, cfg := range []*sarama.Config{testConfig(), cooperativeConfig()} {
		r := newRig(t, 2)
		r.publish(0, 2000, func(i int) int32 { return int32(i % 2) }, nil)
		g := adaptertest.Guard(t, guard.Config{})
		a := r.join(cfg, Wrap(g, nothing, WithPolicy(guard.Policy{Window: 50, Ramp: guard.Ramp{Off: true}})))
		for p := range 2 {
			src := adaptertest.Source(t, g, sourceName("", r.topic, int32(p)))
			if err := src.ForceOpen(0); err != nil {
				t.Fatal(err)
			}
		}
		r.publish(2000, 4000, func(i int) int32 { return int32(i % 2) }, nil)
		var seen sync.Map
		done := atomic.Int64{}
		begun := time.Now()
		b := r.join(cfg, Wrap(adaptertest.Guard(t, guard.Config{}), func(_ context.Context, m *sarama.ConsumerMessage) error {
			if _, twice := seen.LoadOrStore(string(m.Value), true); !twice {
				done.Add(1)
			}
			return nil
		}))
		adaptertest.Eventually(t, "the second has a partition", func() bool { return done.Load() > 0 })
		if took := time.Since(begun); took > 30*time.Second { // the rebalance timeout is 40s
			t.Errorf("the second had its partition after %s", took)
		}
		a.stop()
		adaptertest.Eventually(t, "the second finishes what the first held", func() bool { return r.pending() == 0 })
		b.stop()
	}
}

// A full window pauses the claim. A pause of the group outlives its session, until the
// program resumes it.
func TestPauses(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Window: 20, Ramp: guard.Ramp{Off: true}}})
	var calls atomic.Int64
	var mu sync.Mutex
	var claim sarama.ConsumerGroupClaim
	var claims atomic.Int64
	h := Wrap(g, func(context.Context, *sarama.ConsumerMessage) error { calls.Add(1); return nil })
	spy := spyHandler{h, func(c sarama.ConsumerGroupClaim) {
		mu.Lock()
		defer mu.Unlock()
		claims.Add(1)
		claim = c
	}}
	m := r.join(testConfig(), spy)
	r.publish(0, 10, nil, nil)
	adaptertest.Eventually(t, "handled", func() bool { return calls.Load() == 10 })
	name := sourceName("", r.topic, 0)
	src := adaptertest.Source(t, g, name)
	if err := src.ForceOpen(0); err != nil {
		t.Fatal(err)
	}
	paused := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return claim.(interface{ IsPaused() bool }).IsPaused()
	}
	r.publish(10, 1000, nil, nil)
	adaptertest.Eventually(t, "the window is full and the claim paused", func() bool { return src.State().Room == 0 && paused() })
	if n := src.State().Account.Held; n != 20 {
		t.Errorf("%d held in a window of 20", n)
	}
	if err := src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "all handled", func() bool { return calls.Load() == 1000 && !paused() })

	m.group.PauseAll()
	if !paused() {
		t.Error("PauseAll does not pause")
	}
	var guests atomic.Int64
	guest := r.join(testConfig(), rawHandler{func(s sarama.ConsumerGroupSession, _ sarama.ConsumerGroupClaim) error {
		guests.Add(1)
		<-s.Context().Done()
		return nil
	}})
	adaptertest.Eventually(t, "the group has rebalanced", func() bool { return guests.Load() > 0 || claims.Load() > 1 })
	guest.stop()
	adaptertest.Eventually(t, "the partition is back", func() bool { return claims.Load() > 1 && g.Source(name) != nil })
	r.publish(1000, 1100, nil, nil)
	time.Sleep(500 * time.Millisecond)
	if n := calls.Load(); n != 1000 {
		t.Errorf("%d messages came through the group's pause", n-1000)
	}
	m.group.ResumeAll()
	adaptertest.Eventually(t, "the resumed group goes on", func() bool { return r.pending() == 0 })
	m.stop()
}

// spyHandler shows the claims of a handler.
type spyHandler struct {
	sarama.ConsumerGroupHandler
	claim func(sarama.ConsumerGroupClaim)
}

func (h spyHandler) ConsumeClaim(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
	h.claim(c)
	return h.ConsumerGroupHandler.ConsumeClaim(s, c)
}

// copying is a handler that copies each message to another topic within a
// transaction of its own, which it aborts the first time it sees message 3.
func copying(t *testing.T, r *rig, to string) (handle func(*sarama.ConsumerMessage) error, stop func()) {
	t.Helper()
	cfg := testConfig()
	cfg.Producer.Idempotent, cfg.Producer.RequiredAcks, cfg.Net.MaxOpenRequests = true, sarama.WaitForAll, 1
	cfg.Producer.Return.Successes = true
	cfg.Producer.Transaction.ID = "tx-" + to
	p, err := sarama.NewSyncProducer(r.addrs, cfg)
	if err != nil {
		t.Fatal(err)
	}
	aborted := false
	return func(m *sarama.ConsumerMessage) error {
		if err := p.BeginTxn(); err != nil {
			return err
		}
		if _, _, err := p.SendMessage(&sarama.ProducerMessage{Topic: to, Value: sarama.ByteEncoder(m.Value)}); err != nil {
			return errors.Join(err, p.AbortTxn())
		}
		if string(m.Value) == "3" && !aborted {
			aborted = true
			return errors.Join(errDown, p.AbortTxn())
		}
		return p.CommitTxn()
	}, func() { _ = p.Close() }
}

// After an aborted transaction sarama's claim simply goes on, and the next mark
// passes what was aborted. A handler of Wrap returns the error, and the message
// is handled again in its place.
func TestAbortedTransactionIsNotSkipped(t *testing.T) {
	t.Parallel()
	for name, wrap := range map[string]func(handle func(*sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler{
		"raw": func(handle func(*sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler {
			return rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
				for m := range c.Messages() {
					if handle(m) == nil {
						s.MarkMessage(m, "") // not for what was aborted, and yet
					}
				}
				return nil
			}}
		},
		"wrap": func(handle func(*sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler {
			return Wrap(adaptertest.Guard(t, guard.Config{}), func(_ context.Context, m *sarama.ConsumerMessage) error { return handle(m) })
		},
		"wrap handler": func(handle func(*sarama.ConsumerMessage) error) sarama.ConsumerGroupHandler {
			return WrapHandler(adaptertest.Guard(t, guard.Config{}), rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
				for m := range c.Messages() {
					if err := handle(m); err != nil {
						_ = Fail(s, m, err)
						continue
					}
					s.MarkMessage(m, "")
				}
				return nil
			}}, WithPolicy(guard.Policy{Workers: 1}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, to := newRig(t, 1), newRig(t, 1)
			r.publish(0, 10, nil, nil)
			handle, stop := copying(t, r, to.topic)
			m := r.join(testConfig(), wrap(handle))
			adaptertest.Eventually(t, "all committed", func() bool { return r.committed(0) == 10 })
			m.stop()
			stop()
			cfg := testConfig()
			cfg.Consumer.IsolationLevel = sarama.ReadCommitted
			client, err := sarama.NewClient(r.addrs, cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			reader := *to
			reader.client = client
			end := to.end(to.topic, 0)
			// The last record is a commit marker, which is not delivered.
			ms, err := reader.read(adaptertest.Context(t), to.topic, 0, 0, end-1)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, m := range ms {
				got = append(got, string(m.Value))
			}
			want := []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}
			if name == "raw" {
				want = slices.Delete(want, 3, 4) // the trap
			}
			if !slices.Equal(got, want) {
				t.Errorf("copied %v, want %v", got, want)
			}
		})
	}
}

// The lag is that of the log, also while nothing is fetched.
func TestLagDuringAHold(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Window: 10}})
	h := Wrap(g, nothing, func(o *options) { o.lookEvery = 50 * time.Millisecond }).(*handler)
	m := r.join(testConfig(), h)
	name := sourceName("", r.topic, 0)
	src := adaptertest.Source(t, g, name)
	r.publish(0, 5, nil, nil)
	adaptertest.Eventually(t, "handled", func() bool { return src.Account().Acked == 5 })
	open := func() *claim {
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, s := range h.sessions {
			for _, c := range s.open() {
				return c
			}
		}
		t.Fatal("no claim")
		return nil
	}()
	adaptertest.Eventually(t, "no lag", func() bool { return open.Lag() == 0 })
	if err := src.ForceOpen(0); err != nil {
		t.Fatal(err)
	}
	r.publish(5, 500, nil, nil)
	adaptertest.Eventually(t, "paused", func() bool { return src.State().Room == 0 })
	time.Sleep(200 * time.Millisecond) // what was under way arrives
	r.publish(500, 1000, nil, nil)
	adaptertest.Eventually(t, "the lag counts to the log's end", func() bool { return open.Lag() == 995 })
	if n := open.native.HighWaterMarkOffset(); n == 1000 {
		t.Logf("sarama's high water mark is not stale: %d", n)
	}
	m.stop()
}

// A topic that is deleted under its consumer: nothing hangs, and the group goes
// on when the topic is there again.
func TestDeletedTopic(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	g := adaptertest.Guard(t, guard.Config{})
	var calls atomic.Int64
	cfg := testConfig()
	cfg.Metadata.RefreshFrequency = 500 * time.Millisecond // how soon a group's leader hears of it
	m := r.join(cfg, Wrap(g, func(context.Context, *sarama.ConsumerMessage) error { calls.Add(1); return nil }))
	r.publish(0, 10, nil, nil)
	adaptertest.Eventually(t, "handled", func() bool { return calls.Load() == 10 })
	if err := r.admin.DeleteTopic(r.topic); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "the claim ends", func() bool { return g.Source(sourceName("", r.topic, 0)) == nil })
	adaptertest.Eventually(t, "the topic can be made again", func() bool {
		return r.admin.CreateTopic(r.topic, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: 1}, false) == nil
	})
	r.awaitTopic(r.topic, 1)
	adaptertest.Eventually(t, "a message of the new one is handled", func() bool {
		_, _, err := r.producer.SendMessage(&sarama.ProducerMessage{Topic: r.topic, Value: sarama.StringEncoder("again")})
		return err == nil && calls.Load() > 10
	})
	m.stop()
}

// A handler that heeds nothing is named when its claim is left without it.
func TestDeafHandlerIsNamed(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	release := make(chan struct{})
	var once sync.Once
	defer once.Do(func() { close(release) })
	var begun atomic.Bool
	m := r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), func(context.Context, *sarama.ConsumerMessage) error {
		begun.Store(true)
		<-release
		return nil
	}, WithStopTimeout(100*time.Millisecond)))
	r.publish(0, 3, nil, nil)
	adaptertest.Eventually(t, "the handler runs", begun.Load)
	start := time.Now()
	m.stop()
	if took := time.Since(start); took > 30*time.Second {
		t.Errorf("stopped after %s", took)
	}
	if text := m.errors(); !strings.Contains(text, "1 messages left") {
		t.Errorf("%s", text)
	}
	once.Do(func() { close(release) })
	if n := r.committed(0); n > 0 {
		t.Errorf("committed %d", n)
	}
}

// Two groups that read one topic in one process have a name each; one that has
// none waits for the other's source instead of running unguarded.
func TestNamesOfSources(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	g := adaptertest.Guard(t, guard.Config{})
	var a, b atomic.Int64
	other := *r
	other.group = r.group + "-2"
	count := func(n *atomic.Int64) func(context.Context, *sarama.ConsumerMessage) error {
		return func(context.Context, *sarama.ConsumerMessage) error { n.Add(1); return nil }
	}
	first := r.join(testConfig(), Wrap(g, count(&a)))
	adaptertest.Source(t, g, sourceName("", r.topic, 0))
	second := other.join(testConfig(), Wrap(g, count(&b), WithName("second")))
	adaptertest.Source(t, g, sourceName("second", r.topic, 0))
	third := r2(r, "-3").join(testConfig(), Wrap(g, count(&b)))
	r.publish(0, 10, nil, nil)
	adaptertest.Eventually(t, "both read all", func() bool { return a.Load() == 10 && b.Load() == 10 })
	first.stop()
	adaptertest.Eventually(t, "the third begins", func() bool { return b.Load() == 20 })
	second.stop()
	third.stop()
}

func r2(r *rig, suffix string) *rig {
	other := *r
	other.group = fmt.Sprint(r.group, suffix)
	return &other
}
