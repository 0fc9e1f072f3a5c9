// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// run is one run of one rule against one subject.
type run struct {
	t       testing.TB
	f       Features
	rule    rule
	setup   Setup
	subject Subject
	h       *Handler
	ctx     context.Context //nolint:containedctx // of all calls to the subject
	cancel  context.CancelFunc

	guard    *guard.Guard
	running  bool // the subject's consumer
	policy   guard.Policy
	twice    bool
	writer   *faultyWriter
	numbers  uint64          // published messages with a number
	unnamed  int             // published messages without a number
	dead     map[uint64]bool // messages that must be among the dead letters
	ignored  map[uint64]bool // messages that are acked without a success
	again    bool            // duplicates are expected
	disorder bool            // disorder is expected
	// recoveries is how many outages with errors of unknown class have ended. At the end
	// of each outage one message may succeed before the messages in front of it.
	recoveries int
	returned   bool // a source ended with unsettled messages, which were delivered again

	live     atomic.Pointer[guard.Guard] // guard, for the sampler
	mu       sync.Mutex
	controls []guard.Control // all sources that the sampler has seen
	broken   error           // error of the first account that does not add up
	samples  int
	quit     chan struct{}
	sampler  sync.WaitGroup
}

func newRun(t testing.TB, f Features) *run {
	x := &run{
		t: t, f: f, h: new(Handler),
		writer: new(faultyWriter), dead: make(map[uint64]bool), ignored: make(map[uint64]bool),
		quit: make(chan struct{}),
	}
	x.ctx, x.cancel = context.WithCancel(context.Background())
	x.policy = guard.Policy{
		Order: f.Order, Workers: f.Workers,
		Timeout: x.span(5*time.Second, 5*time.Second),
		Retry:   guard.Retry{Attempts: 3, Base: 2 * time.Millisecond, Max: 20 * time.Millisecond, Patience: 200 * time.Millisecond},
		Ramp:    guard.Ramp{Start: 1000, Double: 100 * time.Millisecond, For: time.Second},
		Breaker: breaker.Config{Base: 50 * time.Millisecond, Cap: time.Second, Successes: 3},
	}
	x.sampler.Go(x.sample)
	return x
}

// span is virtual, or actual on a real broker.
func (x *run) span(virtual, actual time.Duration) time.Duration {
	if x.f.RealTime {
		return actual
	}
	return virtual
}

// patient raises Retry.Patience, for rules with an outage. In an outage nothing succeeds, and
// after the patience the guard takes a message for poison if it can compare it with nothing.
func (x *run) patient() { x.policy.Retry.Patience = 30 * time.Second }

func (x *run) deadline() time.Duration {
	if x.f.Deadline > 0 {
		return x.f.Deadline
	}
	return x.span(10*time.Minute, 2*time.Minute)
}

// pass lets time pass.
func (x *run) pass(virtual, actual time.Duration) {
	time.Sleep(x.span(virtual, actual))
	x.rest()
}

// rest waits until all goroutines are blocked. On a real broker it does nothing.
func (x *run) rest() {
	if !x.f.RealTime {
		synctest.Wait()
	}
}

func (x *run) fatalf(format string, args ...any) {
	x.t.Helper()
	x.t.Fatalf("%s: "+format, append([]any{x.rule.says}, args...)...)
}

func (x *run) errorf(format string, args ...any) {
	x.t.Helper()
	x.t.Errorf("%s: "+format, append([]any{x.rule.says}, args...)...)
}

func (x *run) must(what string, err error) {
	x.t.Helper()
	if err != nil {
		x.fatalf("%s: %v", what, err)
	}
}

// eventually polls until cond holds.
func (x *run) eventually(what string, cond func() bool) {
	x.t.Helper()
	start := time.Now()
	for wait := time.Millisecond; ; wait = min(2*wait, x.span(time.Second, 20*time.Millisecond)) {
		x.rest()
		x.look()
		if cond() {
			return
		}
		if time.Since(start) > x.deadline() {
			x.fatalf("not so after %s: %s; %s", x.deadline(), what, x.describe())
		}
		time.Sleep(wait)
	}
}

// describe returns the state of the run, for the text of a failure.
func (x *run) describe() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d calls, %d of %d messages handled", x.h.Len(), x.h.Done(), x.numbers)
	if x.guard != nil {
		for _, s := range x.guard.Sources() {
			st := s.State()
			fmt.Fprintf(&b, "; source %s: %+v, holds %+v", s.Name(), st.Account, st.Holds)
		}
	}
	if back, err := x.subject.Backlog(x.ctx); err == nil {
		fmt.Fprintf(&b, "; broker: %+v", back)
	}
	if dead, err := x.subject.DeadLetters(x.ctx); err == nil {
		fmt.Fprintf(&b, "; %d dead letters", len(dead))
	}
	return b.String()
}

// start makes a Guard with the rule's policy and starts the consumer.
func (x *run) start() {
	x.t.Helper()
	cfg := guard.Config{Group: "guardtest", Policy: x.policy}
	var err error
	var opts []guard.Option
	if x.f.Options != nil {
		opts = x.f.Options()
	}
	if !x.f.RealTime && os.Getenv("STORMGUARD_FULL") == "" {
		opts = append([]guard.Option{guard.WithSeed(1)}, opts...) // a failure must not depend on chance
	}
	x.guard, err = guard.New(cfg, opts...)
	x.must("guard.New", err)
	x.live.Store(x.guard)
	x.running = true
	x.must("Start", x.subject.Start(Consumer{
		Guard: x.guard, Policy: x.policy, Handler: x.h.Handle, Writer: x.writer.wrap, Twice: x.twice,
	}))
}

// stop stops the consumer and its Guard.
func (x *run) stop() {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(x.ctx, x.deadline())
	defer cancel()
	if x.running {
		x.running = false
		if err := x.subject.Stop(ctx); err != nil {
			x.errorf("Stop: %v", err)
		}
	}
	x.close(x.deadline())
}

// close closes the Guard and checks that Close returns in time.
func (x *run) close(limit time.Duration) []guard.Report {
	x.t.Helper()
	if x.guard == nil {
		return nil
	}
	x.look()
	g := x.guard
	x.guard = nil
	ctx, cancel := context.WithTimeout(x.ctx, limit)
	defer cancel()
	start := time.Now()
	reports, _ := g.Close(ctx)
	if took, most := time.Since(start), limit+x.span(time.Second, x.deadline()); took > most {
		x.errorf("Close took %s, although its context ended after %s", took, limit)
	}
	for _, r := range reports {
		if err := r.Account.Check(); err != nil {
			x.errorf("the account of a source's report: %v", err)
		}
	}
	return reports
}

// publish publishes n numbered messages.
func (x *run) publish(n int) {
	x.t.Helper()
	ms := make([]Publication, n)
	for i := range ms {
		ms[i] = x.message(0)
	}
	x.must("Publish", x.subject.Publish(x.ctx, ms...))
}

// message makes the next numbered message, of at least size bytes.
func (x *run) message(size int, headers ...dlq.Header) Publication {
	x.numbers++
	p := Publication{Body: Body(x.numbers, size), Headers: headers}
	if x.f.Keys {
		p.Key = fmt.Sprintf("key-%d", x.numbers%keys)
	}
	return p
}

const keys = 7

// source waits for the subject's source and returns it.
func (x *run) source() guard.Control {
	x.t.Helper()
	var s guard.Control
	x.eventually("a source is open", func() bool {
		all := x.guard.Sources()
		if len(all) > 1 {
			x.fatalf("%d sources are open, a subject has one", len(all))
		}
		if len(all) == 1 {
			s = all[0]
		}
		return s != nil
	})
	return s
}

// handled waits until n messages have succeeded.
func (x *run) handled(n int) {
	x.t.Helper()
	x.eventually(fmt.Sprintf("%d messages are handled", n), func() bool { return x.h.Done() >= n })
}

func (x *run) letters() []dlq.Record {
	x.t.Helper()
	dead, err := x.subject.DeadLetters(x.ctx)
	x.must("DeadLetters", err)
	return dead
}

// buried waits for the dead letter of a message and returns it.
func (x *run) buried(number uint64) dlq.Record {
	x.t.Helper()
	x.dead[number] = true
	var rec dlq.Record
	x.eventually(fmt.Sprintf("message %d is dead-lettered", number), func() bool {
		for _, r := range x.letters() {
			if Number(r.Body) == number {
				rec = r
				return true
			}
		}
		return false
	})
	return rec
}

// expect marks messages that will be dead-lettered.
func (x *run) expect(numbers ...uint64) {
	for _, n := range numbers {
		x.dead[n] = true
	}
}

func (x *run) backlog() Backlog {
	x.t.Helper()
	back, err := x.subject.Backlog(x.ctx)
	x.must("Backlog", err)
	return back
}

// finish makes the checks that every rule ends with.
func (x *run) finish() {
	x.t.Helper()
	x.eventually("every message is handled or dead-lettered", func() bool {
		done := x.h.Successes()
		for n := uint64(1); n <= x.numbers; n++ {
			if done[n] == 0 && !x.dead[n] && !x.ignored[n] {
				return false
			}
		}
		return true
	})
	for _, n := range slices.Sorted(maps.Keys(x.dead)) {
		x.buried(n)
	}
	x.eventually("the broker has nothing pending", func() bool { return x.backlog().Pending <= 0 })
	x.look()
	if a, ok := x.subject.(Auditor); ok && !x.again && x.guard != nil {
		x.eventually("the guard received what the broker handed over", func() bool { return x.received() == uint64(a.Handed()) })
	}
	x.stop()
	x.checkEnd()
}

func (x *run) checkEnd() {
	x.t.Helper()
	ids := make(map[string]bool)
	for _, r := range x.letters() {
		n := Number(r.Body)
		switch id := r.ID(); {
		case n > 0 && !x.dead[n]:
			x.errorf("message %d was dead-lettered: %s: %s", n, r.Reason, r.Error.Message)
		case id == "":
			x.errorf("the dead letter of message %d has no ID: %+v", n, r.Origin)
		case ids[id] && x.f.Dedup:
			x.errorf("two dead letters of ID %s", id)
		default:
			ids[id] = true
		}
	}
	if n := x.h.Duplicates(); n > x.unnamed && !x.again && !(x.f.Prefix && x.returned) {
		x.errorf("%d messages were handled twice", n)
	}
	if !x.disorder {
		x.checkOrder()
		if err := x.h.CheckOverlap(x.f.Order); err != nil {
			x.errorf("%v", err)
		}
	}
	if back := x.backlog(); back.Delivered >= 0 && x.f.OneDelivery && !x.again && !x.returned && back.Delivered != int(x.numbers)+x.unnamed {
		x.errorf("%d deliveries of %d messages", back.Delivered, int(x.numbers)+x.unnamed)
	}
	if a, ok := x.subject.(Auditor); ok {
		if err := a.Check(); err != nil {
			x.errorf("%v", err)
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.broken != nil {
		x.errorf("sampled %d times: %v", x.samples, x.broken)
	}
	for _, s := range x.controls {
		a := s.Account()
		if err := a.Check(); err != nil {
			x.errorf("after its end: %v", err)
		}
		if n := a.Unsettled(); n > 0 && !x.again && !x.returned {
			x.errorf("after its end a source still has %d messages: %+v", n, a)
		}
	}
}

// checkOrder checks that messages succeeded in order. Messages that proved life at the end
// of an outage are excepted; the guard counts them.
func (x *run) checkOrder() {
	x.t.Helper()
	n, proofs := x.h.overtakers(x.f.Order), 0
	x.mu.Lock()
	for _, s := range x.controls {
		proofs += int(s.State().Tally.Overtaken)
	}
	x.mu.Unlock()
	if n > min(x.recoveries, proofs) {
		x.errorf("%d messages overtook others in %d recoveries, the guard counts %d: %v",
			n, x.recoveries, proofs, x.h.CheckOrder(x.f.Order))
	}
}

// leave ends the run. It stops the consumer and the Guard if a failed rule has not.
func (x *run) leave() {
	if x.running || x.guard != nil {
		ctx, cancel := context.WithTimeout(x.ctx, 5*time.Second)
		if x.running {
			_ = x.subject.Stop(ctx)
		}
		if x.guard != nil {
			_, _ = x.guard.Close(ctx)
		}
		cancel()
	}
	close(x.quit)
	x.sampler.Wait()
	x.cancel()
}

// sample checks the accounts all the time. The run owns its goroutine; leave ends it.
func (x *run) sample() {
	tick := time.NewTicker(x.span(7*time.Millisecond, 3*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			x.look()
		case <-x.quit:
			return
		}
	}
}

func (x *run) look() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if g := x.live.Load(); g != nil {
		for _, s := range g.Sources() {
			if !slices.Contains(x.controls, s) {
				x.controls = append(x.controls, s)
			}
		}
	}
	for _, s := range x.controls {
		x.samples++
		if err := s.Account().Check(); err != nil && x.broken == nil {
			x.broken = err
		}
	}
}

// received is how many messages all sources of the run have received.
func (x *run) received() (n uint64) {
	x.look()
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, s := range x.controls {
		n += s.Account().Received
	}
	return n
}

// ackFailures is how many failed acks all sources of the run have counted.
func (x *run) ackFailures() (n uint64) {
	x.look()
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, s := range x.controls {
		n += s.State().Tally.AckFailures
	}
	return n
}

// faultyWriter stands between the guard and the adapter's dead-letter writer.
type faultyWriter struct {
	mu     sync.Mutex
	err    error
	lose   int // number of next confirmations to lose
	writes int
}

var errWriterDown = errors.New("guardtest: dead-letter queue unreachable")

func (w *faultyWriter) set(err error, lose int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err, w.lose = err, lose
}

func (w *faultyWriter) tried() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.writes
}

func (w *faultyWriter) wrap(inner dlq.Writer) dlq.Writer { return &wrappedWriter{w, inner} }

type wrappedWriter struct {
	*faultyWriter
	inner dlq.Writer
}

func (w *wrappedWriter) Write(ctx context.Context, r *dlq.Record) error {
	w.mu.Lock()
	w.writes++
	err := w.err
	w.mu.Unlock()
	if err != nil {
		return err
	}
	if err := w.inner.Write(ctx, r); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lose > 0 {
		w.lose--
		return errWriterDown
	}
	return nil
}
