// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// class is the kind of errors of a dependency that is down or flaky.
type class string

const (
	unknown class = "unknown" // the error does not show whose fault it is
	refused class = "refused" // the connection is refused
	message class = "message" // the message's body cannot be read
	hang    class = "timeout" // no answer until the handler's timeout
)

var (
	errUnknown = errors.New("it did not work")
	errPoison  = errors.New("cannot handle this message")
	errRefused = &net.OpError{
		Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 5432},
		Err: os.NewSyscallError("connect", syscall.ECONNREFUSED),
	}
	errMessage = json.Unmarshal([]byte(`{"id":`), new(struct {
		ID int `json:"id"`
	}))
)

// load describes the messages of a world's sources, and its dependency between faults.
type load struct {
	order  guard.Order
	rate   float64       // messages per second and source
	call   time.Duration // the dependency's time to answer
	keys   uint64        // number of keys; unset means 16
	poison float64       // share of the messages that never succeed
	says   class         // errors of poison: unknown or message
	flaky  float64       // share of the calls that fail at random
	fails  class         // errors of the calls that fail at random
	parts  int           // sources that share the dependency; unset means 1

	// policy is for tests that switch a part of the guard off. Unset means the defaults.
	policy guard.Policy
}

// world is one guard with its sources, an in-memory broker and a dependency, all in one
// bubble. The bubble's first goroutine calls all its methods. Other goroutines call only now,
// draw and mistakef.
type world struct {
	load

	ctx   context.Context //nolint:containedctx // the command's: a signal ends the world early
	start time.Time
	g     *guard.Guard
	all   []*source

	mu    sync.Mutex // guards the fields below
	wrong []string   // broken invariants
	rng   *rand.Rand // for all draws during the run
	down  class      // how the dependency fails now; empty while it is up
	calls int        // calls of the dependency since the latest fail

	// since is the end of the latest outage, first the first success after that end.
	since, first time.Duration
	// began is the begin of the latest outage. Outages without a success between them
	// count as one.
	began time.Duration
	hung  time.Duration // end of the latest outage whose calls hang
}

// The states of a message.
const (
	waiting uint8 = iota
	handled
	dead
)

// entry is a message in the ledger.
type entry struct {
	state  uint8
	poison bool
}

// source is one partition of the broker, and its open epoch. Messages are numbers, in the
// order of sending. A source keeps unsettled messages and delivers them again to the next
// epoch.
type source struct {
	w    *world
	name string

	src  *guard.Source[int]
	stop context.CancelFunc
	over sync.WaitGroup

	mu      sync.Mutex    // guards the fields below
	log     []entry       // messages delivered at least once, and messages of send
	next    int           // the first message that was not delivered yet
	ends    int           // messages sent so far, if the load is over; -1 while it lasts
	from    time.Duration // when the message at is sent
	at      int           // a message; later messages follow at the load's rate
	poisons int           // poison messages in log
	healthy int           // handled messages
	letters int           // healthy messages that were dead-lettered
	buried  int           // poison messages that were dead-lettered
	last    time.Duration // when the latest message was settled
	changed chan struct{} // the load was changed

	// goal is the message that aim waits for: open counts the unsettled messages before it.
	goal, open int
	reached    time.Duration // when open became 0; never until then

	watched   int           // the message of watch; -1 is none
	watchedAt time.Duration // when watched was handled; never until then

	overtaken bool        // a message was handled before an earlier message of its lane
	front     map[int]int // the last handled message of each lane

	// burst is the first of bursts messages that are poison regardless of the load. -1 is
	// none.
	burst, bursts int
}

const never = time.Duration(-1)

// defaultKeys is the number of keys of a load that sets none.
const defaultKeys = 16

func newWorld(ctx context.Context, seed uint64, l load) (*world, error) {
	if l.keys == 0 {
		l.keys = defaultKeys
	}
	w := &world{load: l, ctx: ctx, start: time.Now(), rng: rand.New(rand.NewPCG(seed, 1)), since: never, first: never}
	l.policy.Order = l.order
	var err error
	if w.g, err = guard.New(guard.Config{Policy: l.policy}, guard.WithLogger(slog.New(slog.DiscardHandler)), guard.WithSeed(seed)); err != nil {
		return nil, err
	}
	for i := range max(1, l.parts) {
		s := &source{
			w: w, name: fmt.Sprintf("orders/%d", i), ends: -1, changed: make(chan struct{}, 1),
			reached: never, watched: -1, watchedAt: never, front: map[int]int{}, burst: -1,
		}
		w.all = append(w.all, s)
		if err := s.begin(); err != nil {
			return nil, errors.Join(err, w.close())
		}
	}
	return w, nil
}

// close ends the world. Then wrong holds all broken invariants.
func (w *world) close() error {
	// A handler needs its timeout at most. The guard needs the other minute.
	ctx, cancel := context.WithTimeout(context.Background(), callLimit+time.Minute)
	defer cancel()
	_, err := w.g.Close(ctx)
	for _, s := range w.all {
		if s.stop != nil {
			s.stop()
		}
		s.over.Wait()
	}
	w.check()
	return err
}

// now is the time since the world began.
func (w *world) now() time.Duration { return time.Since(w.start) }

// pass waits for the duration d, or until the command is interrupted.
func (w *world) pass(d time.Duration) {
	for end := w.now() + d; w.ctx.Err() == nil && w.now() < end; w.check() {
		time.Sleep(min(end-w.now(), time.Second))
	}
}

// until waits until f is true, for d at most. It asks f every 50 ms.
func (w *world) until(d time.Duration, f func() bool) {
	for end := w.now() + d; w.ctx.Err() == nil && w.now() < end && !f(); w.check() {
		time.Sleep(50 * time.Millisecond)
	}
}

// check adds broken invariants of the sources' accounts to wrong, while that has few.
func (w *world) check() {
	w.mu.Lock()
	many := len(w.wrong) > 3
	w.mu.Unlock()
	if many {
		return
	}
	for _, s := range w.all {
		if err := s.src.Account().Check(); err != nil {
			w.mistakef("%s: %v", s.name, err)
		}
	}
}

func (w *world) mistakef(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wrong = append(w.wrong, fmt.Sprintf(format, args...))
}

// fail makes the dependency fail from now on.
func (w *world) fail(c class) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.down, w.calls = c, 0
	if w.since < 0 || w.first >= 0 { // else the breaker has not seen the end of the previous outage
		w.began = w.now()
	}
}

// mend brings the dependency back. It returns the number of calls during the outage.
func (w *world) mend() (calls int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.down == hang {
		w.hung = w.now()
	}
	w.down, w.since, w.first = "", w.now(), never
	return w.calls
}

// recovery is how long a source may be idle after the latest outage. Outages without a
// success between them count as one. A call that hangs at the end of the outage goes on
// hanging.
func (w *world) recovery() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.since < 0:
		return recoveryLimit(0, unknown)
	case w.hung > 0 && w.now() < w.hung+callLimit:
		return recoveryLimit(w.since-w.began, hang)
	default:
		return recoveryLimit(w.since-w.began, unknown)
	}
}

// idle is the time from the end of the outage to the first success, or never.
func (w *world) idle() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.first < 0 {
		return never
	}
	return w.first - w.since
}

// begin opens the source's next epoch.
func (s *source) begin() error {
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	var err error
	s.src, err = guard.Open(s.w.g, guard.SourceConfig{
		Name: s.name, System: "memory", Destination: "orders", Partition: s.name[len("orders/"):],
		DeadLetters: dlq.WriterFunc(s.bury),
	}, guard.Limits{}, guard.Port[int](port{s}), s.handle)
	if err != nil {
		return err
	}
	in := make(chan int)
	s.over.Go(func() { _ = s.src.Run(ctx, in) })
	s.over.Go(func() { s.deliver(ctx, in) })
	return nil
}

// end ends the epoch, as a rebalance does.
func (s *source) end() {
	report := s.src.End(context.Background(), guard.ReasonRebalance)
	s.stop()
	s.over.Wait()
	if err := report.Account.Check(); err != nil || !report.Clean() {
		s.w.mistakef("%s: it did not end clean: %v, %+v", s.name, err, report)
	}
}

// deliver delivers unsettled messages, and then each message when it is sent.
func (s *source) deliver(ctx context.Context, in chan<- int) {
	s.mu.Lock()
	var again []int
	for m := range s.next {
		if s.log[m].state == waiting {
			again = append(again, m)
		}
	}
	s.mu.Unlock()
	for _, m := range again {
		select {
		case in <- m:
		case <-ctx.Done():
			return
		}
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		m, wait := s.sent()
		if wait != 0 {
			if wait > 0 {
				timer.Reset(wait)
			}
			select {
			case <-timer.C:
			case <-s.changed:
			case <-ctx.Done():
				return
			}
			continue
		}
		s.mu.Lock()
		s.next++
		s.mu.Unlock()
		select {
		case in <- m:
		case <-ctx.Done():
			s.mu.Lock()
			s.next--
			s.mu.Unlock()
			return
		}
	}
}

// sent returns the next message, or the time until it is sent. wait is below 0 if no more
// messages come.
func (s *source) sent() (m int, wait time.Duration) {
	now := s.w.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	m = s.next
	if m < len(s.log) {
		return m, 0
	}
	switch at := s.from + time.Duration(float64(m-s.at)/s.w.rate*float64(time.Second)); {
	case s.ends >= 0 && m >= s.ends:
		return 0, -1
	case at > now:
		return 0, at - now
	}
	s.append(s.w.draw(s.w.poison))
	return m, 0
}

func (s *source) append(poison bool) {
	m := len(s.log)
	if m >= s.burst && m < s.burst+s.bursts && s.burst >= 0 {
		poison = true
	}
	if poison {
		s.poisons++
	}
	s.log = append(s.log, entry{poison: poison})
}

// draw is true with the probability chance.
func (w *world) draw(chance float64) bool {
	if chance <= 0 {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rng.Float64() < chance
}

// quiet ends the load.
func (s *source) quiet() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends = s.dueLocked()
}

// dueLocked is the number of messages sent until now. The caller holds mu.
func (s *source) dueLocked() int {
	if s.ends >= 0 {
		return max(s.ends, len(s.log))
	}
	n := s.at + int(math.Floor(float64(s.w.now()-s.from)/float64(time.Second)*s.w.rate)) + 1
	return max(n, len(s.log))
}

func (s *source) poke() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// send sends n messages at once, behind the messages that the load has sent until now. It
// returns the first of them.
func (s *source) send(n int, poison bool) (first int) {
	s.mu.Lock()
	if s.ends < 0 {
		due := s.dueLocked()
		s.from += time.Duration(float64(due-s.at) / s.w.rate * float64(time.Second)) // when the load's next message is due
		for len(s.log) < due {
			s.append(s.w.draw(s.w.poison))
		}
	}
	first = len(s.log)
	for range n {
		s.append(poison)
	}
	if s.ends >= 0 {
		s.ends = len(s.log)
	} else {
		s.at = len(s.log)
	}
	s.mu.Unlock()
	s.poke()
	return first
}

// spoil sends up to n poison messages at once, but no more than pass without an operator.
// These are 64 at a time, and as many as there are credits for. docs/operating.md lists
// larger cases.
func (s *source) spoil(n int) {
	s.mu.Lock()
	poison := s.poisons - s.buried
	n = min(n, mostAdjacent-poison, provenCredits+s.healthy/2-s.poisons)
	s.mu.Unlock()
	if n > 0 {
		s.send(n, true)
	}
}

// headPoison makes the n oldest healthy unsettled messages poison.
func (s *source) headPoison(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for m := 0; m < len(s.log) && n > 0; m++ {
		if s.log[m].state == waiting && !s.log[m].poison {
			s.log[m].poison = true
			s.poisons++
			n--
		}
	}
}

// nextPoison makes the next n new messages poison.
func (s *source) nextPoison(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.burst, s.bursts = len(s.log), n
}

// aim sets goal, so that reachedAt tells when all messages of log and of the burst are
// settled. It returns the number of unsettled messages, and of poison among them.
func (s *source) aim() (open, poison int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.goal, s.open, s.reached = len(s.log), 0, never
	for _, e := range s.log {
		if e.state == waiting {
			s.open++
			if e.poison {
				poison++
			}
		}
	}
	if s.burst >= 0 && s.burst+s.bursts > s.goal {
		more := s.burst + s.bursts - s.goal
		s.goal, s.open, poison = s.goal+more, s.open+more, poison+more
	}
	if s.open == 0 {
		s.reached = s.w.now()
	}
	return s.open, poison
}

func (s *source) reachedAt() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reached
}

// watch makes watchedTime tell when the message m is handled.
func (s *source) watch(m int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watched, s.watchedAt = m, never
}

// sum counts the messages of all sources by their state.
type sum struct {
	sent, poison, handled, healthyLetters, letters int
	healthy                                        float64 // healthy messages among sent
	overtaken                                      bool
}

// sum counts the messages of all sources that were sent so far, including messages that
// wait at the broker.
func (w *world) sum() (n sum) {
	for _, s := range w.all {
		s.mu.Lock()
		due := s.dueLocked()
		n.sent += due
		n.poison += s.poisons
		n.healthy += float64(len(s.log)-s.poisons) + float64(due-len(s.log))*(1-w.poison)
		n.handled += s.healthy
		n.healthyLetters += s.letters
		n.letters += s.buried
		n.overtaken = n.overtaken || s.overtaken
		s.mu.Unlock()
	}
	return n
}

// handle is the handler: it calls the dependency.
func (s *source) handle(ctx context.Context, m int) error {
	w := s.w
	s.mu.Lock()
	poison := s.log[m].poison
	s.mu.Unlock()
	w.mu.Lock()
	w.calls++
	down := w.down
	w.mu.Unlock()
	if down == hang {
		<-ctx.Done()
		return ctx.Err()
	}
	time.Sleep(w.call)
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.down == hang:
		return context.DeadlineExceeded
	case w.down != "":
		return errorOf(w.down)
	case poison && w.says == message:
		return errMessage
	case poison:
		return errPoison
	case w.flaky > 0 && w.rng.Float64() < w.flaky:
		return errorOf(w.fails)
	}
	if w.first < 0 && w.since >= 0 {
		w.first = w.now()
	}
	return nil
}

func errorOf(c class) error {
	switch c {
	case refused:
		return errRefused
	case message:
		return errMessage
	default:
		return errUnknown
	}
}

// settle marks a waiting message as handled or dead. If the message was settled otherwise
// before, settle records a broken invariant.
func (s *source) settle(m int, state uint8) {
	now := s.w.now()
	s.mu.Lock()
	e := &s.log[m]
	was := e.state
	if was == waiting {
		e.state = state
		s.last = now
		if m < s.goal {
			if s.open--; s.open == 0 {
				s.reached = now
			}
		}
		switch {
		case state == handled:
			s.healthy++
			s.place(m)
			if m == s.watched {
				s.watchedAt = now
			}
		case e.poison:
			s.buried++
		default:
			s.letters++
		}
	}
	s.mu.Unlock()
	if was != waiting && was != state {
		s.w.mistakef("%s: message %d was handled and dead-lettered", s.name, m)
	}
}

// place sets overtaken if a later message of the lane was handled before m.
func (s *source) place(m int) {
	lane := 0
	switch s.w.order {
	case guard.OrderNone:
		return
	case guard.OrderKey:
		lane = m % int(s.w.keys)
	default:
	}
	if front, ok := s.front[lane]; ok && front > m {
		s.overtaken = true
		return
	}
	s.front[lane] = m
}

// bury is the dead-letter writer.
func (s *source) bury(_ context.Context, r *dlq.Record) error {
	if len(r.Body) != 8 {
		s.w.mistakef("%s: a dead letter with a body of %d bytes", s.name, len(r.Body))
		return nil
	}
	s.settle(int(binary.BigEndian.Uint64(r.Body)), dead)
	return nil
}

// port is the adapter of an epoch.
type port struct{ s *source }

func (p port) Lane(m int) uint64 { return uint64(m) % p.s.w.keys }
func (port) Size(int) int        { return 100 }
func (port) Meta(m int) guard.Meta {
	return guard.Meta{Body: binary.BigEndian.AppendUint64(nil, uint64(m)), Lag: -1}
}

func (p port) Ack(m int) error {
	p.s.mu.Lock()
	state := p.s.log[m].state
	p.s.mu.Unlock()
	switch state {
	case waiting:
		p.s.settle(m, handled)
	case handled:
		p.s.w.mistakef("%s: message %d was acked twice", p.s.name, m)
	}
	return nil
}

func (port) Extend([]int) {}

func (p port) Return(ms []int, _ guard.Reason) error {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	i := slices.IndexFunc(ms, func(m int) bool { return p.s.log[m].state == handled })
	if i >= 0 {
		go p.s.w.mistakef("%s: message %d was given back after it was acked", p.s.name, ms[i])
	}
	return nil
}

func (port) Demand(int)   {}
func (port) Flush() error { return nil }

// again ends the source's epoch and opens the next one.
func (s *source) again() error {
	s.end()
	return s.begin()
}

func (s *source) lastAt() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

func (s *source) watchedTime() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.watchedAt
}
