// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// relay is a network that falls silent: connections through it stay open, new ones are
// taken, and nothing comes or goes.
type relay struct {
	silent, gone atomic.Bool

	mu    sync.Mutex
	conns []net.Conn
	done  sync.WaitGroup
}

// through is a configuration whose connections go through it.
func (r *relay) through(cfg *sarama.Config) *sarama.Config {
	c := *cfg
	c.Net.Proxy.Enable, c.Net.Proxy.Dialer = true, r
	return &c
}

func (r *relay) Dial(network, addr string) (net.Conn, error) {
	if r.gone.Load() {
		return nil, net.ErrClosed
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	inner, err := l.Accept()
	if err != nil {
		return nil, errors.Join(err, near.Close())
	}
	r.keep(inner)
	if r.silent.Load() {
		return near, nil
	}
	far, err := net.Dial(network, addr)
	if err != nil {
		return nil, errors.Join(err, near.Close(), inner.Close())
	}
	r.keep(far)
	r.done.Go(func() { r.pass(inner, far) })
	r.done.Go(func() { r.pass(far, inner) })
	return near, nil
}

func (r *relay) keep(c net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns = append(r.conns, c)
}

func (r *relay) pass(from, to net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if r.silent.Load() {
			return // neither data nor the end of it
		}
		if err == nil {
			_, err = to.Write(buf[:n])
		}
		if err != nil {
			_, _ = from.Close(), to.Close()
			return
		}
	}
}

func (r *relay) close() {
	r.gone.Store(true)
	r.mu.Lock()
	for _, c := range r.conns {
		_ = c.Close()
	}
	r.mu.Unlock()
	r.done.Wait()
}

// A stop ends within its timeout and 5s when the network is silent, with the client's
// default timeouts of 30s for each request, and says so; with retry topics, too.
func TestStopWhileTheNetworkIsSilent(t *testing.T) {
	t.Parallel()
	const timeout = 2 * time.Second
	for name, parks := range map[string]bool{"plain": false, "retry-topics": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, 3)
			var net relay
			t.Cleanup(net.close)
			cfg := net.through(testConfig())
			cfg.Consumer.Offsets.AutoCommit.Interval = 10 * time.Second // the last commit has something to do
			cfg.Consumer.Return.Errors = true
			cfg.Metadata.Retry.Max, cfg.Metadata.Retry.Backoff = 3, 250*time.Millisecond // the defaults
			letters, err := NewDLQ(r.addrs, cfg, DLQConfig{Sources: []string{r.topic}})
			if err != nil {
				t.Fatal(err)
			}
			var own logged
			g, err := guard.New(guard.Config{}, guard.WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
			if err != nil {
				t.Fatal(err)
			}
			opts := []Option{WithDeadLetters(letters), WithStopTimeout(timeout)}
			var retries *RetryTopics
			if parks {
				if retries, err = NewRetryTopics(r.addrs, cfg, RetryConfig{Sources: []string{r.topic}, Group: r.group, Delays: []time.Duration{time.Hour}}); err != nil {
					t.Fatal(err)
				}
				opts = append(opts, WithRetryTopics(retries), WithPolicy(guard.Policy{Order: guard.OrderKey}))
			}
			var calls atomic.Int64
			h := Wrap(g, func(_ context.Context, m *sarama.ConsumerMessage) error {
				calls.Add(1)
				if net.silent.Load() && string(m.Key) == "bad" {
					return guard.Permanent(errors.New("hopeless")) // its letter is being written when the stop comes
				}
				time.Sleep(time.Millisecond)
				return nil
			}, opts...)
			group, err := sarama.NewConsumerGroup(r.addrs, r.group, cfg)
			if err != nil {
				t.Fatal(err)
			}
			var errs sync.WaitGroup
			errs.Go(func() {
				for range group.Errors() {
				}
			})
			ctx, cancel := context.WithCancel(context.Background())
			consumed := make(chan error, 1)
			go func() { consumed <- Consume(ctx, group, []string{r.topic}, h) }()
			r.publish(0, 600, func(i int) int32 { return int32(i % 3) }, func(i int) string {
				if i > 300 {
					return "bad"
				}
				return "good"
			})
			adaptertest.Eventually(t, "handled", func() bool { return calls.Load() > 150 })
			net.silent.Store(true)
			time.Sleep(time.Second)
			begun := time.Now()
			cancel()
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				err := <-consumed
				t.Logf("Consume: %v, %s", err, time.Since(begun))
				if err == nil || !strings.Contains(err.Error(), "delivered again") {
					t.Errorf("it is not said what is left: %v", err)
				}
				closing, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				_, err = g.Close(closing)
				t.Logf("Guard.Close: %v, %s", err, time.Since(begun))
				if retries != nil {
					t.Logf("RetryTopics.Close: %v, %s", retries.Close(), time.Since(begun))
				}
				t.Logf("DLQ.Close: %v, %s", letters.Close(), time.Since(begun))
			}()
			within(t, timeout+18*time.Second, "the stop", ended) // 5s, and what a busy machine needs
			if !own.has("the stop is not complete") {
				t.Errorf("it is not said: %s", own.buf.String())
			}
			net.close() // what is left behind ends
			errs.Wait()
		})
	}
}

// Consume joins again after an error, which it logs, ends without one when its context
// does, and returns what will be refused the next time, too.
func TestConsume(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.publish(0, 10, nil, nil)
	var own logged
	g := adaptertest.Guard(t, guard.Config{}, guard.WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
	consume := func(ctx context.Context, h sarama.ConsumerGroupHandler) error {
		group, err := sarama.NewConsumerGroup(r.addrs, r.group, testConfig())
		if err != nil {
			t.Fatal(err)
		}
		err = Consume(ctx, group, []string{r.topic}, h)
		if err := group.Consume(t.Context(), []string{r.topic}, h); !errors.Is(err, sarama.ErrClosedConsumerGroup) {
			t.Errorf("the group is not closed: %v", err)
		}
		return err
	}
	ctx, cancel := context.WithCancel(t.Context())
	var calls, setups atomic.Int64
	err := consume(ctx, Wrap(g, func(context.Context, *sarama.ConsumerMessage) error {
		if calls.Add(1) == 10 {
			cancel()
		}
		return nil
	}, WithSetup(func(sarama.ConsumerGroupSession) error {
		if setups.Add(1) < 3 {
			return errDown
		}
		return nil
	})))
	if n := r.committed(0); err != nil || n != 10 || own.count("has failed and begins again") != 1 {
		t.Errorf("%v; committed %d; %s", err, n, own.buf.String())
	}
	var other guard.Policy
	other.Breaker.Base = time.Second // the Guard's scopes have 100ms
	for _, h := range []sarama.ConsumerGroupHandler{Wrap(nil, nothing), Wrap(g, nil), Wrap(g, nothing, WithStopTimeout(-1)), Wrap(g, nothing, WithPolicy(guard.Policy{Window: -1})), Wrap(g, nothing, WithPolicy(other))} {
		limited, cancel := context.WithTimeout(t.Context(), time.Minute)
		if err := consume(limited, h); err == nil {
			t.Error("what is refused is tried for ever")
		}
		cancel()
	}
}

// decorated is a handler of a program around Wrap's.
type decorated struct{ sarama.ConsumerGroupHandler }

// A handler that decorates Wrap's loses nothing: what is tried again is logged to the
// Guard's logger, a stop heeds the handler's timeout and names its claims, and what the
// guard refuses for a claim comes out of Consume.
func TestConsumeFindsADecoratedHandler(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	var own logged
	g := adaptertest.Guard(t, guard.Config{}, guard.WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
	consume := func(ctx context.Context, h sarama.ConsumerGroupHandler) (chan error, *relay) {
		net := &relay{}
		group, err := sarama.NewConsumerGroup(r.addrs, r.group, net.through(testConfig()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { // what is left behind ends
			net.close()
			for range group.Errors() {
			}
		})
		ended := make(chan error, 1)
		go func() { ended <- Consume(ctx, group, []string{r.topic}, decorated{h}) }()
		return ended, net
	}
	ctx, cancel := context.WithCancel(t.Context())
	var setups atomic.Int64
	handled := make(chan struct{})
	ended, net := consume(ctx, Wrap(g, func(context.Context, *sarama.ConsumerMessage) error { close(handled); return nil },
		WithStopTimeout(time.Second), WithSetup(func(sarama.ConsumerGroupSession) error {
			if setups.Add(1) < 3 {
				return errDown
			}
			return nil
		})))
	r.publish(0, 1, nil, nil)
	within(t, time.Minute, "it joins again", handled)
	if own.count("has failed and begins again") != 1 || !own.has(errDown.Error()) {
		t.Errorf("logged: %s", own.buf.String())
	}
	net.silent.Store(true)
	begun := time.Now()
	cancel()
	if err := <-ended; err == nil || time.Since(begun) > time.Second+sessionSlack+15*time.Second || !own.has("the stop is not complete") {
		t.Errorf("%v after %s; %s", err, time.Since(begun), own.buf.String())
	}
	net.close()

	closing := adaptertest.Guard(t, guard.Config{})
	ended, _ = consume(t.Context(), Wrap(closing, nothing, WithSetup(func(sarama.ConsumerGroupSession) error {
		_, err := closing.Close(context.Background())
		return err
	})))
	select {
	case err := <-ended:
		if !errors.Is(err, guard.ErrClosed) {
			t.Errorf("a closed Guard: %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("a closed Guard is tried for ever")
	}
}

// scriptedGroup is a consumer group whose sessions end as a test says.
type scriptedGroup struct {
	sarama.ConsumerGroup
	session func(n int) error // of the n-th session
	n       int
	closed  bool
}

func (s *scriptedGroup) Consume(context.Context, []string, sarama.ConsumerGroupHandler) error {
	s.n++
	return s.session(s.n)
}

func (s *scriptedGroup) Close() error { s.closed = true; return nil }

// What no further try can mend comes out at once, and without a session where it is known
// before; the group is closed.
func TestConsumeReturnsWhatNoTryMends(t *testing.T) {
	t.Parallel()
	g := adaptertest.Guard(t, guard.Config{})
	good := Wrap(g, nothing)
	refused := Wrap(g, nothing).(*handler)
	always := func(err error) func(int) error { return func(int) error { return err } }
	for _, c := range []struct {
		name     string
		topics   []string
		h        sarama.ConsumerGroupHandler
		session  func(int) error
		want     error
		sessions int
	}{
		{"wrong options", []string{"t"}, Wrap(g, nil, WithStopTimeout(-1)), always(errDown), nil, 0},
		{"no guard", []string{"t"}, WrapHandler(nil, decorated{}), always(errDown), nil, 0},
		{"no handler", []string{"t"}, nil, always(errDown), nil, 0},
		{"no topic", nil, good, always(errDown), nil, 0},
		{"unsuitable", []string{"t"}, good, always(cluster.Unsuitable("x")), ErrUnsuitable, 1},
		{"the Guard is closed", []string{"t"}, good, always(guard.ErrClosed), guard.ErrClosed, 1},
		{"the group is closed", []string{"t"}, good, always(sarama.ErrClosedConsumerGroup), sarama.ErrClosedConsumerGroup, 1},
		{"the client is closed", []string{"t"}, decorated{good}, always(sarama.ErrClosedClient), sarama.ErrClosedClient, 1},
		{"a claim is refused", []string{"t"}, refused, func(int) error { _ = refused.refuse(errNotTaken); return nil }, errNotTaken, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			group := &scriptedGroup{session: c.session}
			err := Consume(ctx, group, c.topics, c.h)
			if err == nil || c.want != nil && !errors.Is(err, c.want) || group.n != c.sessions || !group.closed {
				t.Errorf("%v; %d sessions, closed %t", err, group.n, group.closed)
			}
		})
	}
	// A program's own loop hears of a refused claim by its next session.
	_ = refused.refuse(errNotTaken)
	if err := refused.Setup(&fakeSession{ctx: t.Context()}); !errors.Is(err, errNotTaken) {
		t.Errorf("Setup: %v", err)
	}
}

var errNotTaken = errors.New("the guard does not take the source")

// What is tried again is logged, once for each error and again after 30s with its count;
// also what a claim ends with, which sarama does not return.
func TestConsumeLogsWhatItTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var own logged
		g, err := guard.New(guard.Config{}, guard.WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
		if err != nil {
			t.Fatal(err)
		}
		h := Wrap(g, nothing).(*handler)
		ctx, cancel := context.WithCancel(t.Context())
		errClaim := errors.New("claim left")
		begun := time.Now()
		group := &scriptedGroup{session: func(n int) error {
			switch since := time.Since(begun); {
			case since > 2*time.Minute:
				cancel()
				return ctx.Err()
			case since > time.Minute:
				h.mu.Lock()
				h.claimErr = errClaim
				h.mu.Unlock()
				return nil
			}
			return errDown
		}}
		if err := Consume(ctx, group, []string{"t"}, h); err != nil || group.n > 25 {
			t.Errorf("%v; %d sessions in 2m", err, group.n)
		}
		own.mu.Lock()
		text := own.buf.String()
		own.mu.Unlock()
		if down, claim := strings.Count(text, errDown.Error()), strings.Count(text, errClaim.Error()); down != 2 || claim != 2 || !strings.Contains(text, "times=1 ") {
			t.Errorf("%d and %d lines: %s", down, claim, text)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A loop that leaves a rebalance with the session's own error has not failed: the group joins
// again at once. Another error has it wait.
func TestRebalanceIsNoFailureOfTheGroup(t *testing.T) {
	for name, c := range map[string]struct {
		leaves func(context.Context) error
		wait   time.Duration // before the second session
		lines  int
	}{
		"the session's":          {leaves: context.Context.Err},
		"the session's, wrapped": {leaves: func(ctx context.Context) error { return fmt.Errorf("query: %w", ctx.Err()) }},
		"another":                {leaves: func(context.Context) error { return errDown }, wait: againFirst, lines: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var own logged
				g := adaptertest.Guard(t, guard.Config{})
				h := WrapHandler(g, rawHandler{func(s sarama.ConsumerGroupSession, _ sarama.ConsumerGroupClaim) error {
					<-s.Context().Done()
					return c.leaves(s.Context())
				}}, WithConfig(testConfig()), WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
				ctx, stop := context.WithCancel(t.Context())
				var ended time.Time
				group := &scriptedGroup{session: func(n int) error {
					if n == 2 {
						if waited := time.Since(ended); waited != c.wait {
							t.Errorf("the group waited for %s, want %s", waited, c.wait)
						}
						stop()
						return nil
					}
					session, end := context.WithCancelCause(ctx)
					defer end(nil)
					s := &fakeSession{ctx: session}
					if err := h.Setup(s); err != nil {
						return err
					}
					var claim sync.WaitGroup
					claim.Go(func() { _ = h.ConsumeClaim(s, newFakeClaim()) })
					synctest.Wait()
					end(sarama.ErrRebalanceInProgress)
					claim.Wait()
					ended = time.Now()
					return h.Cleanup(s)
				}}
				if err := Consume(ctx, group, []string{"orders"}, h); err != nil {
					t.Error(err)
				}
				if n := own.count("has failed and begins again"); n != c.lines {
					t.Errorf("%d lines, want %d: %s", n, c.lines, own.buf.String())
				}
			})
		})
	}
}

// Go's signal.NotifyContext names the signal as the cause of its end: that is a stop, and
// no rebalance, so the handler in flight may finish.
func TestStopBySignalIsNoRebalance(t *testing.T) {
	t.Parallel()
	r := newRig(t, 5)
	var own logged
	g := adaptertest.Guard(t, guard.Config{}, guard.WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
	running, finish := make(chan struct{}), make(chan struct{})
	var cut atomic.Bool
	h := Wrap(g, func(ctx context.Context, _ *sarama.ConsumerMessage) error {
		close(running)
		select {
		case <-finish:
		case <-ctx.Done():
			cut.Store(true)
		}
		return nil
	})
	group, err := sarama.NewConsumerGroup(r.addrs, r.group, testConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGUSR1)
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = group.Consume(ctx, []string{r.topic}, h)
	}()
	r.publish(0, 1, nil, nil)
	within(t, time.Minute, "the handler runs", running)
	adaptertest.Eventually(t, "all claims have begun", func() bool { return len(g.Sources()) == 5 })
	if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	adaptertest.Eventually(t, "other claims end", func() bool { return len(g.Sources()) == 1 })
	close(finish)
	within(t, time.Minute, "the stop", done)
	if cut.Load() || own.has("reason=rebalance") || !own.has("reason=shutdown") {
		t.Errorf("cut off: %t, %s", cut.Load(), own.buf.String())
	}
	// One line for the topic, also for the Guard's logger.
	own.mu.Lock()
	text := own.buf.String()
	own.mu.Unlock()
	if n := strings.Count(text, `msg="claims ended"`); n != 1 || !strings.Contains(text, "claims=5") {
		t.Errorf("%d lines: %s", n, text)
	}
	if n := r.committed(0); n != 1 {
		t.Errorf("committed %d", n)
	}
}

// The cause of a program's own counts as a stop only if its context is over.
// ConsumerGroup.Close may end a claim before the session: it is a stop all the same, and its
// handler may finish.
func TestClosedClaimBeforeItsSession(t *testing.T) {
	t.Parallel()
	synctest.Test(t, closedClaimBeforeItsSession)
}

func closedClaimBeforeItsSession(t *testing.T) {
	g := adaptertest.Guard(t, guard.Config{})
	running, finish := make(chan struct{}), make(chan struct{})
	var cut atomic.Bool
	h := Wrap(g, func(ctx context.Context, _ *sarama.ConsumerMessage) error {
		close(running)
		select {
		case <-ctx.Done():
			cut.Store(true)
		case <-finish:
		}
		return nil
	}, WithConfig(testConfig()))
	s, end := setup(t, h)
	c := newFakeClaim()
	var consuming sync.WaitGroup
	consuming.Go(func() { _ = h.ConsumeClaim(s, c) })
	c.publish(0, 1)
	<-running
	close(c.partition().dying)
	time.Sleep(5 * time.Millisecond)
	end(nil)
	time.Sleep(2 * endsTogether)
	close(finish)
	consuming.Wait()
	if cut.Load() {
		t.Error("the handler was cut off")
	}
}

// The session of a cooperative group outlives a revoked claim and, for a moment, those that
// ConsumerGroup.Close ends. Close is a stop: handlers have [WithStopTimeout]. Those of a
// revoked claim have a second.
func TestClosedClaimOfACooperativeGroup(t *testing.T) {
	t.Parallel()
	const work = 300 * time.Millisecond
	for name, c := range map[string]struct {
		close, deaf bool
		slow        bool          // the handler ends only when it is cancelled
		cut         time.Duration // when the handler is cancelled, after the claim's end; -1: never
		left        time.Duration // when the claim is left, at the latest
	}{
		"closed":           {close: true, cut: -1, left: work},
		"closed and deaf":  {close: true, deaf: true, cut: time.Second, left: 2 * time.Second},
		"revoked":          {cut: -1, left: work},
		"revoked and slow": {slow: true, cut: time.Second, left: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g := adaptertest.Guard(t, guard.Config{})
				running, release := make(chan struct{}), make(chan struct{})
				var begun time.Time
				cut := time.Duration(-1)
				h := Wrap(g, func(ctx context.Context, _ *sarama.ConsumerMessage) error {
					close(running)
					var done <-chan time.Time
					if !c.deaf && !c.slow {
						done = time.After(work)
					}
					select {
					case <-done:
					case <-ctx.Done():
						cut = time.Since(begun)
					}
					if c.deaf {
						<-release
					}
					return ctx.Err()
				}, WithConfig(cooperativeConfig()), WithStopTimeout(time.Second))
				s := &fakeSession{ctx: t.Context(), parent: &fakeGroup{make(chan struct{})}}
				if err := h.Setup(s); err != nil {
					t.Fatal(err)
				}
				native := newFakeClaim()
				left := make(chan time.Duration, 1)
				go func() {
					_ = h.ConsumeClaim(s, native)
					left <- time.Since(begun)
				}()
				native.publish(0, 1)
				<-running
				begun = time.Now()
				if c.close {
					close(s.parent.closed)
				}
				close(native.partition().dying)
				if took := <-left; took > c.left {
					t.Errorf("left after %s, want %s at most", took, c.left)
				}
				close(release)
				synctest.Wait()
				if cut != c.cut {
					t.Errorf("the handler was cancelled after %s, want %s", cut, c.cut)
				}
			})
		})
	}
}

// A handler has a second in a rebalance. It has none if the group has gone on without its member,
// which refuses all commits. A cooperative member that fails to join again is no stop, although its
// session ends without a cause, as by ConsumerGroup.Close.
func TestAMemberThatTheGroupHasLeftBehind(t *testing.T) {
	t.Parallel()
	for cause, want := range map[error]time.Duration{
		sarama.ErrRebalanceInProgress: time.Second,
		sarama.ErrUnknownMemberId:     0, sarama.ErrIllegalGeneration: 0, sarama.ErrFencedInstancedId: 0,
		context.Canceled: time.Second, // what a session without a cause has
	} {
		t.Run(cause.Error(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				running := make(chan struct{})
				var over time.Time
				cut := time.Duration(-1)
				h := Wrap(adaptertest.Guard(t, guard.Config{}), func(ctx context.Context, _ *sarama.ConsumerMessage) error {
					close(running)
					<-ctx.Done()
					cut = time.Since(over)
					return ctx.Err()
				}, WithConfig(testConfig()))
				ctx, end := context.WithCancelCause(t.Context())
				s := &fakeSession{ctx: ctx, parent: &fakeGroup{make(chan struct{})}}
				if err := h.Setup(s); err != nil {
					t.Fatal(err)
				}
				c := newFakeClaim()
				var consuming sync.WaitGroup
				consuming.Go(func() { _ = h.ConsumeClaim(s, c) })
				c.publish(0, 1)
				<-running
				over = time.Now()
				end(cause)
				consuming.Wait()
				if cut != want {
					t.Errorf("the handler was cancelled after %s, want %s", cut, want)
				}
			})
		})
	}
}

// sarama's own sessions show that ConsumerGroup.Close was called.
func TestCloseIsSeen(t *testing.T) {
	t.Parallel()
	r, _ := newFakeRig(t)
	seen := make(chan (<-chan struct{}), 1)
	m := r.join(cooperativeConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), nothing, WithSetup(func(s sarama.ConsumerGroupSession) error {
		select {
		case seen <- closedOf(s):
		default:
		}
		return nil
	})))
	closed := <-seen
	if closed == nil {
		t.Fatal("sarama's sessions do not show what ConsumerGroup.Close closes")
	}
	select {
	case <-closed:
		t.Error("it is closed before Close")
	default:
	}
	m.stop()
	within(t, time.Minute, "Close", closed)
}

// claimless is a session whose claims sarama has not opened.
type claimless struct{ *fakeSession }

func (*claimless) Claims() map[string][]int32 { return map[string][]int32{"orders": {0}} }

// ConsumerGroup.Close during a join leaves claims unopened: that is no partition that cannot be
// read.
func TestCloseDuringAJoin(t *testing.T) {
	t.Parallel()
	for _, stops := range []bool{false, true} {
		var own logged
		h := Wrap(adaptertest.Guard(t, guard.Config{}), nothing, WithConfig(testConfig()), WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
		ctx, end := context.WithCancelCause(context.Background())
		s := &claimless{&fakeSession{ctx: ctx, parent: &fakeGroup{make(chan struct{})}}}
		if err := h.Setup(s); err != nil {
			t.Fatal(err)
		}
		if stops {
			close(s.parent.closed)
		}
		end(sarama.ErrSessionConsumeClaimExited) // as sarama's claim does that sees either
		if err := h.Cleanup(s); err != nil {
			t.Error(err)
		}
		if said := own.has("cannot be read"); said == stops {
			t.Errorf("stops %t: %s", stops, own.buf.String())
		}
	}
}

func TestStopping(t *testing.T) {
	t.Parallel()
	given, end := context.WithCancelCause(context.Background())
	session, cancel := context.WithCancelCause(given)
	cancel(sarama.ErrRebalanceInProgress)
	if stopping(session) {
		t.Error("a rebalance is no stop")
	}
	end(errors.New("terminated signal received"))
	if !stopping(session) {
		t.Error("the program stops during a rebalance")
	}
	closed, cancelClosed := context.WithCancelCause(context.Background())
	cancelClosed(nil)
	if !stopping(closed) {
		t.Error("ConsumerGroup.Close is a stop")
	}
	lost, cancelLost := context.WithCancelCause(context.Background())
	_, err := (&net.Dialer{Deadline: time.Now().Add(-time.Second)}).Dial("tcp", "127.0.0.1:1")
	cancelLost(fmt.Errorf("heartbeat: %w", err))
	if !errors.Is(err, context.DeadlineExceeded) || stopping(lost) {
		t.Errorf("a coordinator that cannot be dialled (%v) is no stop", err)
	}
}
