// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/credit"
	"github.com/stormguard-mq/stormguard/internal/ringbuf"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// Source is one epoch of one guarded source. An adapter opens it, feeds it by
// [Source.Run], [Source.RunFeed] or [Source.Offer], and ends it.
//
// Goroutines: Run starts the loop and, with more than one worker, the workers. Only
// these call the handler. If the broker has an AckWait, a keep-alive goroutine runs,
// too. All end before Run returns, unless a handler hangs. In the passive shape Offer
// starts a pump instead; End ends it.
//
// Lock order: see [Guard]. A source calls a [Taker] under Source.mu, but no other port
// and no handler, writer or logger.
type Source[M any] struct {
	g       *Guard
	cfg     SourceConfig
	limits  Limits
	port    Port[M]
	marker  Marker                         // the port, if it is a Marker; else nil
	handler func(context.Context, M) error // nil in the passive shape
	writer  *dispatcher                    // nil without a dead-letter writer

	// outcome is the closed path: the number of messages started there, shifted by
	// phaseBits, and the phase of the latest. The loop writes it, anyone reads it. On a
	// failure the number is decremented, and the machine takes the message over. So the
	// number, without the message in hand, is the number of the closed path's successes.
	word        atomic.Uint64
	takenOver   atomic.Uint64 // messages taken out of word again; see unstartLocked
	chunk       atomic.Pointer[callChunk]
	slowAt      atomic.Uint64 // number of the last call reported as slow, plus 1
	fenced      atomic.Bool   // no port call may begin
	revoked     atomic.Bool   // End's reason is ReasonRebalance or ReasonLost; set before ended is closed
	slow        atomic.Bool   // the closed path is off, as the machine has something to do
	timeout     atomic.Int64  // Policy.Timeout
	batchMax    atomic.Int64  // how many messages Run takes from its input at once
	started     uint64        // the loop's copy of word's number
	lookedAt    atomic.Uint64 // number of the message whose producer was looked up last
	acks        int           // acks since the last Flush; the loop's, but guarded by mu if shared
	kicked      bool          // the loop kicked the sweeper since it last rested: the sweeper is not parked
	looks       atomic.Uint64 // how often Marker.Ahead was called
	seen        seen          // owned by the sweeper
	metaLost    atomic.Bool   // a Port.Meta that panicked or exited was logged
	laneLost    atomic.Bool   // a Port.Lane that panicked was logged
	failed      atomic.Pointer[failedCall]
	slowAfter   atomic.Int64    // Breaker.Slow
	slowFixed   bool            // Policy.Breaker sets Slow; otherwise Slow follows Timeout
	earlierSlow []time.Duration // earlier values of a Slow that follows Timeout; guarded by mu

	mu       sync.Mutex
	c        machine[M] // the loop may read its policy and gate without mu, see Update
	feed     *Feed[M]
	batch    []M           // messages that the loop took at once; replaced under mu, read by the loop
	batchAt  uint64        // started+takenOver when batch was taken
	diverted int           // messages of batch that went to the machine
	lookAt   time.Duration // when the loop must wake the workers; 0 is never
	demanded int           // the latest number for Port.Demand, told or about to be told
	refused  bool          // Offer returned ErrFull: Port.Demand must be called again
	offering int           // calls of OfferWait that wait for room
	loops    int           // goroutines that may call the handler and the port
	ran      bool          // Run was called
	retire   bool          // the workers must end
	hung     bool          // End has stopped waiting
	calls    int           // announced port calls under way; see begin
	giveUp   bool          // End's context is over: End waits for no writer, and for no passive program
	ending   *ending
	cond     *sync.Cond // on mu; workers wait for work, End waits for loops and calls

	pos   int // the loop's place in batch
	epoch uint64
	wake  chan struct{}
	space chan struct{} // holds a token while there may be room for an OfferWait; capacity 1
	ended chan struct{} // closed by End

	stormKey string // see Guard.stormKey

	left   bool         // the Guard has this source's state for the next epoch
	over   *overflow[M] // nil without Policy.Spill
	parker Parker[M]    // the port, if it is a Parker; else nil
	from   parent       // the source that parked these messages; nil for none

	ctx    context.Context //nolint:containedctx // parent of every handler call
	cancel context.CancelCauseFunc
	detach func()

	ready     chan Item[M]        // passive shape
	passive   map[uint64]*item[M] // items on Ready or with the program, by id
	onOffer   *item[M]            // the message on Ready, until it is noted as taken; nil for none
	offeredAt time.Duration       // since when messages are on Ready and none was taken; 0 for none
	pump      *pump[M]
	metrics   sourceMetrics
}

// ending is the state of End, made by its first call.
type ending struct {
	reason Reason
	done   chan struct{} // closed when End has finished
	over   chan struct{} // closed when End stops waiting
	report Report
}

// Open makes a source of a Guard. The source inherits the operator's pause of an earlier
// source of the same name and, for 2h, the rest of its DLQ budget. Open refuses settings
// that the broker's limits make impossible, and reports all problems at once. A nil
// handler makes the source passive: then use Offer, Ready and Done instead of Run.
func Open[M any](g *Guard, cfg SourceConfig, limits Limits, port Port[M], handler func(context.Context, M) error) (*Source[M], error) {
	return openSource(g, cfg, limits, port, handler, nil)
}

func openSource[M any](g *Guard, cfg SourceConfig, limits Limits, port Port[M], handler func(context.Context, M) error, from parent) (*Source[M], error) {
	var p problems
	policy := g.policy(cfg, &p)
	if cfg.Name == "" {
		p.addf("SourceConfig.Name: must not be empty")
	}
	if port == nil {
		p.addf("Open: the port must not be nil")
	}
	parker, parks := any(port).(Parker[M])
	if parks && cfg.DeadLetters == nil {
		p.addf("SourceConfig.DeadLetters: must be set with a port that parks: what it does not park is dead-lettered")
	}
	errs := append(p, policy.Validate())
	full := policy.withDefaults(limits)
	if err := errors.Join(append(errs, full.fits(limits))...); err != nil {
		return nil, fmt.Errorf("guard: open %q: %w", cfg.Name, err)
	}
	slowIs := full.Breaker.Slow > 0
	full.Breaker = full.slow()

	s := &Source[M]{
		g: g, cfg: cfg, limits: limits, port: port, handler: handler,
		wake:      make(chan struct{}, 1),
		space:     make(chan struct{}, 1),
		ended:     make(chan struct{}),
		demanded:  -1,
		epoch:     g.epochs.Add(1),
		slowFixed: slowIs,
		stormKey:  g.stormKey(cfg),
		parker:    parker, from: from,
	}
	s.slowAfter.Store(int64(full.Breaker.Slow))
	s.marker, _ = any(port).(Marker)
	s.cond = sync.NewCond(&s.mu)
	s.ctx, s.cancel = context.Background(), func(error) {}
	ring, err := ringbuf.NewRing[entry[M]](ringbuf.Config{MaxCount: maxWindow}, nil)
	if err != nil {
		return nil, fmt.Errorf("guard: open %q: %w", cfg.Name, err)
	}
	detector, err := storm.NewDetector(full.Storm)
	if err != nil {
		return nil, fmt.Errorf("guard: open %q: %w", cfg.Name, err)
	}
	budget, err := credit.New(full.Budget, full.stormRate())
	if err != nil {
		return nil, fmt.Errorf("guard: open %q: %w", cfg.Name, err)
	}
	s.c = machine[M]{
		policy: full, limits: limits, storm: detector, budget: budget, limiter: cfg.Limiter,
		health: g.health, blocksLane: parks || from != nil, offers: handler == nil, beside: besides(from),
		letters: cfg.DeadLetters != nil, letterPace: g.letterPace, origin: g.origin, slowAfter: full.Breaker.Slow,
		rand: g.newRand(cfg.Name, s.epoch),
		ring: ring, lanes: make(map[uint64]*lane[M]), writing: make(map[*item[M]]struct{}), fast: s.fastSuccesses, wasClosed: true,
		lastID: s.epoch << idBits,
	}
	if full.Order == OrderNone {
		s.c.bulk = ring.Lane(0)
	}
	s.timeout.Store(int64(full.Timeout))
	s.slow.Store(s.alwaysSlow())
	if handler == nil {
		s.ready = make(chan Item[M])
		s.passive = make(map[uint64]*item[M])
		if t, ok := any(port).(Taker[M]); ok {
			s.c.takenAt = t.TakenAt
		}
	}
	if !full.NoBreaker {
		leaf, err := g.leaf(cfg, full.Breaker.Slow, (*circuit.Scopes).Leaf)
		if err != nil {
			return nil, fmt.Errorf("guard: open %q: %w", cfg.Name, err)
		}
		s.c.gate = leaf
		s.detach = leaf.Attach(s.successes)
	}
	if full.Spill {
		if s.over, err = s.newOverflow(); err != nil {
			s.release()
			return nil, fmt.Errorf("guard: open %q: %w", cfg.Name, err)
		}
	} else if n := g.spilledOf(cfg.Name); n > 0 {
		g.log.Warn("the spill has messages of a source that does not spill any more: they wait there",
			"source", cfg.Name, "messages", n, "help", "open it with Policy.Spill")
	}
	if cfg.DeadLetters != nil {
		s.writer = g.dispatcher(cfg.DeadLetters, parks)
	}
	s.metrics = g.metrics.source(cfg)
	s.metrics.atRest()
	s.c.born = s.c.life()
	var before carryOver
	s.mu.Lock() // an operator may see the source once it is registered
	if err = g.register(cfg.Name, s); err == nil {
		before = g.recall(cfg.Name)
		s.resumeLocked(g.now(), before)
		s.over.foundLocked(&s.c)
		s.c.heedRules(g.now(), g.rules.Load())
	}
	s.unlock(g.now())
	if err != nil {
		s.release()
		return nil, err
	}
	if cfg.DeadLetters == nil {
		g.warnNoWriter(cfg)
	}
	g.sayPaused(cfg.Name, before)
	return s, nil
}

// noWriterHelp is what an operator can do about a source without a dead-letter writer.
const noWriterHelp = "open it with SourceConfig.DeadLetters set (an adapter's WithDeadLetters)"

// shared tells whether several goroutines ack.
func (s *Source[M]) shared() bool { return s.handler == nil || s.works() }

// works tells whether workers, and not the loop, call the handler. With a [Keeper] they
// do: the loop must write messages to the disk meanwhile.
func (s *Source[M]) works() bool {
	return s.c.policy.Workers > 1 || s.over != nil && s.over.keep != nil
}

// alwaysSlow tells whether the machine sees every message.
func (s *Source[M]) alwaysSlow() bool {
	return s.shared() || s.c.limiter != nil
}

// slow is Policy.Breaker with its defaults. An unset Slow follows Timeout.
func (c Policy) slow() breaker.Config {
	b := c.Breaker.WithDefaults()
	if c.Breaker.Slow == 0 && c.Timeout > 0 {
		b.Slow = min(c.Timeout, b.Window/3*2)
	}
	return b
}

// release gives the breaker's scope and the dispatcher back.
func (s *Source[M]) release() {
	if s.writer != nil {
		s.g.discard(s.writer)
	}
	if s.detach != nil {
		s.detach()
		s.g.unclaim(s.c.gate)
	}
	s.cancel(ErrClosed)
}

// fastSuccesses is how many messages succeeded on the closed path.
func (s *Source[M]) fastSuccesses() uint64 {
	w := s.word.Load()
	if w&phaseMask != uint64(idle) {
		return w>>phaseBits - 1
	}
	return w >> phaseBits
}

// idBits is how many low bits of an id count the items or calls of a source. The other
// bits are its epoch: sources may share a breaker, which tells deliveries apart by id.
const idBits = 40

const (
	phaseBits = 2
	phaseMask = 1<<phaseBits - 1
)

// successes is how many handler calls have succeeded.
func (s *Source[M]) successes() uint64 { return s.c.successes.Load() + s.fastSuccesses() }

// Name is the source's name.
func (s *Source[M]) Name() string { return s.cfg.Name }

// Ended is closed when [Source.End] begins: the source takes no further message. An
// adapter then stops its reader.
func (s *Source[M]) Ended() <-chan struct{} { return s.ended }

// Feed takes the messages of an adapter that reads on a goroutine of its own; use it with
// [Source.RunFeed]. It uses half of the window, or less if the workers need more; see
// [Policy.Window]. All calls return the same Feed.
func (s *Source[M]) Feed() *Feed[M] {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.feed == nil {
		s.feed = newFeed[M]()
		s.divideLocked()
	}
	return s.feed
}

// divideLocked gives the feed, or with an AckWait the batch that Run takes, its part of
// the window. The machine has the rest: if possible, a message for each worker.
func (s *Source[M]) divideLocked() {
	p := s.c.policy
	part := max(1, min(p.Window/4, (p.Window-p.Workers)/2))
	batch := min(flushEvery, part)
	s.batchMax.Store(int64(batch))
	switch {
	case s.feed != nil:
		s.feed.resize(part)
		s.c.reserve = 2 * part // a feed has two buffers
	case s.ran && s.limits.AckWait > 0:
		s.c.reserve = batch
	}
}

// unlock ends a critical section of a step. It publishes whether the closed path may run.
// After the unlock it posts the step's dead letters and wakes sources that wait for a probe.
func (s *Source[M]) unlock(now time.Duration) {
	toWrite, freed := s.c.toWrite, s.c.freed
	s.c.toWrite, s.c.freed = nil, false
	quiet := s.c.quiet(now) // also ends an empty hold
	s.slow.Store(!quiet || s.alwaysSlow() || s.c.book != nil && s.c.book.meta || s.spillBusyLocked())
	if s.offering > 0 && s.inputRoomLocked() > 0 {
		token(s.space)
	}
	if freed {
		s.cond.Broadcast() // the other workers of this source
	}
	s.mu.Unlock()
	for _, it := range toWrite {
		s.writer.post(letter[M]{s, it})
	}
	if len(toWrite) > 0 {
		s.g.saver.hurry()
	}
	if freed {
		s.g.wakeOthers(s)
	}
}

// nudge wakes the loop, the pump or the workers, to look for work again.
func (s *Source[M]) nudge() {
	token(s.wake)
	s.cond.Broadcast()
}

// Account returns one consistent snapshot.
func (s *Source[M]) Account() Account {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accountLocked(s.g.now())
}

func (s *Source[M]) accountLocked(now time.Duration) Account {
	w := s.word.Load()
	started, at := w>>phaseBits, phase(w&phaseMask)
	c := &s.c
	a := Account{
		Received:     c.tally.Received + started,
		Processing:   c.count[processing],
		Settling:     c.count[settling],
		RetryWait:    c.count[retryWait],
		Acked:        c.tally.Acked + started,
		DeadLettered: c.tally.DeadLettered,
		Returned:     c.tally.Returned,
	}
	switch at {
	case processing:
		a.Processing++
		a.Acked--
	case settling:
		a.Settling++
		a.Acked--
	default:
	}
	front := c.queued + c.count[waiting]
	if it := s.onOffer; it != nil && it.phase == processing {
		a.Processing--
		front++
	}
	left := s.batchLeftLocked(started)
	if s.feed != nil {
		left += s.feed.Len()
	}
	a.Received += uint64(left + c.behind)
	a.Held = c.behind
	if c.admitting(now) {
		a.Waiting = front + left
	} else {
		a.Held += front + left
	}
	return a
}

// batchLeftLocked is how many messages of the batch the loop has not begun.
func (s *Source[M]) batchLeftLocked(started uint64) int {
	if s.batch == nil {
		return 0
	}
	return len(s.batch) - s.diverted - int(started+s.takenOver.Load()-s.batchAt)
}

// maxSlowWas bounds how many earlier values of Breaker.Slow Update still accepts.
const maxSlowWas = 100

// Update changes the settings of a running source: Timeout, NoTimeout, Retry, Ramp,
// Window and WindowBytes. If another field changes, Update changes nothing and its error
// names the field: open a new source for it. After a smaller Window the messages that are
// here stay, and intake waits for room. p may be a changed [State.Settings].
func (s *Source[M]) Update(p Policy) error {
	s.mu.Lock()
	old := s.c.policy
	next := p.withDefaults(s.limits)
	err := errors.Join(p.Validate(), next.fits(s.limits))
	if p.Workers == 0 {
		next.Workers = old.Workers
	}
	next.Breaker = next.Breaker.WithDefaults()
	if by := next; p.Breaker.Slow != 0 && !s.slowFixed {
		by.Breaker.Slow = 0
		if by.slow().Slow == p.Breaker.Slow || slices.Contains(s.earlierSlow, p.Breaker.Slow) { // p is from before another Update
			next.Breaker.Slow = old.Breaker.Slow
		}
	}
	if p.Breaker.Slow == 0 {
		next.Breaker.Slow = old.Breaker.Slow
	}
	var fixed problems
	for name, same := range map[string]bool{
		"Order":       next.Order == old.Order,
		"StrictOrder": next.StrictOrder == old.StrictOrder,
		"Workers":     next.Workers == old.Workers,
		"Breaker":     next.Breaker == old.Breaker,
		"NoBreaker":   next.NoBreaker == old.NoBreaker,
		"Spill":       next.Spill == old.Spill,
		"Storm":       next.Storm == old.Storm,
		"Budget":      next.Budget == old.Budget,
	} {
		if !same {
			fixed.addf("Policy.%s: cannot change while the source %s runs", name, s.cfg.Name)
		}
	}
	if err = errors.Join(append(fixed, err)...); err == nil {
		p := &s.c.policy // field by field: the loop reads the others without mu
		p.Timeout, p.NoTimeout, p.Retry, p.Ramp = next.Timeout, next.NoTimeout, next.Retry, next.Ramp
		p.Window, p.WindowBytes = next.Window, next.WindowBytes
		s.timeout.Store(int64(next.Timeout))
		if !s.slowFixed && next.Timeout > 0 { // without a Timeout Slow does not change
			next.Breaker.Slow = 0
			p.Breaker.Slow = next.slow().Slow
			if !slices.Contains(s.earlierSlow, s.c.slowAfter) {
				s.earlierSlow = append(s.earlierSlow[max(0, len(s.earlierSlow)-maxSlowWas):], s.c.slowAfter)
			}
			s.c.slowAfter = p.Breaker.Slow
			s.slowAfter.Store(int64(p.Breaker.Slow))
		}
		s.divideLocked()
	}
	s.unlock(s.g.now())
	if err == nil {
		s.nudge()
	}
	return err
}

// Pause holds the source for d, or until Resume if d is not above 0. Nothing else ends
// this hold. Handlers that run finish their messages. A later Pause sets a new end. The
// end is noticed within 250 ms.
func (s *Source[M]) Pause(d time.Duration) {
	now := s.g.now()
	s.mu.Lock()
	s.c.paused, s.c.pauseEnds = true, pauseEnd(now, d)
	s.unlock(now)
	s.g.journal.paused(now, s.topic(), s.cfg.Name, d)
	s.g.saver.hurry()
	s.g.sweeper.kick()
	s.nudge()
}

// pauseEnd is when a pause of d ends by itself: never if d is not above 0.
func pauseEnd(now, d time.Duration) time.Duration {
	if d > 0 {
		return now + min(d, never-now)
	}
	return never
}

// Resume ends Pause. Held messages drain at the rate of [Policy.Ramp].
func (s *Source[M]) Resume() {
	now := s.g.now()
	s.mu.Lock()
	was := s.c.paused
	s.c.paused = false
	s.unlock(now)
	if was {
		s.resumed(now, causeOperator)
	}
}

// resumed tells the loop and the log that a pause is over.
func (s *Source[M]) resumed(now time.Duration, reason string) {
	s.g.journal.resumed(now, s.topic(), s.cfg.Name, reason)
	s.g.saver.hurry()
	s.nudge()
}

// causeOperator is the breaker's cause when a person forced it.
const causeOperator = "operator"

// ForceOpen opens the source's breaker for d, or until ForceClosed or Release if d is
// not above 0. A late success does not close it. After d the breaker is half-open and
// probes. A later ForceOpen sets a new end. Only a source with NoBreaker returns an
// error.
func (s *Source[M]) ForceOpen(d time.Duration) error {
	if s.c.gate == nil {
		return errNoBreaker
	}
	forceOpen(s.c.gate, s.g.now(), d)
	s.gateChanged()
	return nil
}

// forceOpen forces a breaker open. A breaker would keep an earlier force that ends later;
// that force is the operator's, too, so forceOpen releases it first.
func forceOpen(gate *circuit.Leaf, now, d time.Duration) {
	if b := gate.Snapshot(now); b.Forced && d > 0 && b.Until > now+d {
		gate.Release(now)
	}
	gate.Force(now, d, causeOperator)
}

// ForceClosed closes the source's breaker now, whatever its window says.
func (s *Source[M]) ForceClosed() error {
	if s.c.gate == nil {
		return errNoBreaker
	}
	s.c.gate.ForceClosed(s.g.now(), causeOperator)
	s.gateChanged()
	return nil
}

// Release ends a ForceOpen before its time: the breaker is half-open and probes. It
// does nothing to a breaker that is not forced open.
func (s *Source[M]) Release() error {
	if s.c.gate == nil {
		return errNoBreaker
	}
	s.c.gate.Release(s.g.now())
	s.gateChanged()
	return nil
}

func (s *Source[M]) gateChanged() {
	now := s.g.now()
	s.mu.Lock()
	s.c.notice(now)
	s.unlock(now)
	s.nudge()
	s.g.sweeper.kick() // the sweeper wakes the other sources of the scope
}

// errNoBreaker means that the source's policy has NoBreaker.
var errNoBreaker = errors.New("guard: the source has no breaker")

// GrantCredits gives the source n DLQ credits: the operator allows n more dead letters,
// such as those of messages that wait with the reason "dlq". The credits do not expire.
func (s *Source[M]) GrantCredits(n float64) {
	s.mu.Lock()
	s.c.budget.Grant(n)
	s.unlock(s.g.now())
	s.g.saver.hurry()
	s.nudge()
}

// DeadLetterWaiting dead-letters up to n messages that have failed and wait, oldest
// first, and returns how many. It is for an operator, about messages that nothing proves
// to be poison: it needs no credit and makes no further attempt.
//
// The messages behind them are tried at once, up to 65, unless the breaker is forced, or
// the fleet or a wider scope holds it. The first success proves that the messages in
// front of it are poison. If none succeeds, these messages wait for another call.
//
// The source goes on during the call. DeadLetterWaiting leaves out messages that come or
// fail during the call, and messages that are with their handler again when their turn
// comes.
func (s *Source[M]) DeadLetterWaiting(n int) int {
	s.mu.Lock()
	var chosen []*item[M]
	if s.c.letters && n > 0 {
		chosen = s.c.failedWaiting()
	}
	s.mu.Unlock()
	slices.SortFunc(chosen, func(a, b *item[M]) int { return cmp.Compare(a.id, b.id) })
	done := 0
	for done < n && len(chosen) > 0 {
		now := s.g.now()
		s.mu.Lock()
		var some int
		chosen, some = s.c.deadLetterWaiting(chosen, n-done)
		s.unlock(now)
		done += some
		s.nudge()
	}
	if done > 0 && s.c.gate != nil { // try the messages behind them now, not after the open period
		s.c.gate.Hasten(s.g.now())
	}
	s.g.log.Info(lineByHand, "source", s.cfg.Name, "reason", causeOperator, "messages", done)
	return done
}

// State describes the source at one instant.
func (s *Source[M]) State() State {
	st, whys := s.state(s.g.now(), s.g.fleetScope(s.c.gate))
	for _, w := range whys { // without the lock: the errors' methods are the user's code
		st.Holds[w.hold].Detail += ": " + dlq.DescribeError(w.err, nil).Message
	}
	return st
}

// why is an error that is shown with a Hold.
type why struct {
	hold int // index in State.Holds
	err  error
}

func (s *Source[M]) state(now time.Duration, fleet breaker.FleetScope) (st State, whys []why) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &s.c
	st = State{
		Source: s.cfg.Name, Now: now, Ended: c.ended, Account: s.accountLocked(now), Tally: c.tally,
		Storm: c.storm.Storm(), Budget: c.budget.Balance(credit.Exhausted),
		Window: c.limit(), Room: s.inputRoomLocked(), Spilled: s.spilledLocked(), Settings: c.policy, Fleet: fleet, FleetStorm: c.fleetStorm,
	}
	st.used = s.usedLocked(st.Room)
	st.Tally.Received, st.Tally.Acked = st.Account.Received, st.Account.Acked
	st.OldestAge = now - s.callBegan(now)
	if c.unsettled() > 0 {
		st.OldestAge = max(st.OldestAge, c.reading(now).Age)
	}
	hold := func(reason Reason, until time.Duration, detail, by string) {
		if until > 0 {
			until = max(0, until-now)
		}
		st.Holds = append(st.Holds, Hold{reason, detail, until, by})
	}
	because := func(err error) { whys = append(whys, why{len(st.Holds) - 1, err}) }
	if c.ended {
		hold(s.ending.reason, 0, "ended", "a new source")
	}
	if c.paused {
		st.Holds = append(st.Holds, pauseHold(now, c.pauseEnds))
	}
	if st.Storm.Active {
		hold(ReasonStorm, 0, st.Storm.String(), "the storm detector, when rate and age are back")
	}
	if c.fleetStorm.Active {
		hold(ReasonStorm, 0, c.fleetStorm.String(), "the storm detectors of the processes in storm")
	}
	if c.gate != nil {
		st.Breaker, st.Wider = c.gate.Breaker.Snapshot(now).Snapshot, c.gate.Wider()
		if st.Breaker.State != breaker.Closed || len(st.Wider) > 0 {
			st.Holds = append(st.Holds, breakerHold(&st, c.policy.Breaker.Base))
		}
	}
	if n := c.retryWaits[ReasonLimiter]; n > 0 {
		hold(ReasonDLQ, 0, fmt.Sprintf("%d messages wait for the limit of dead letters", n), "time")
	}
	switch n := c.retryWaits[ReasonDLQ]; {
	case n == 0:
	case !c.letters:
		hold(ReasonDLQ, 0, fmt.Sprintf("%d messages have failed for good or are in quarantine, and the source has no dead-letter writer", n), "operator: "+noWriterHelp)
	default:
		hold(ReasonDLQ, 0, fmt.Sprintf("%d messages wait for a credit", n), "successes, time, or operator: GrantCredits")
	}
	if n := len(c.writing); s.writer != nil && n > 0 {
		if err := s.writer.trouble(s.cfg.Name); err != nil {
			hold(ReasonDLQ, 0, fmt.Sprintf("%d dead letters cannot be written", n), "the dead-letter writer")
			because(err)
		} else if err := s.writer.putOff(s.cfg.Name); err != nil {
			hold(ReasonDLQ, 0, fmt.Sprintf("%d dead letters are put off", n), "the dead-letter writer, once it takes them")
			because(err)
		}
	}
	if c.asked > now {
		hold(ReasonBackpressure, c.asked, "asked for time", "time")
		because(c.askedFor)
	}
	if c.limited > now {
		hold(ReasonLimiter, c.limited, "rate limit", "time")
	}
	if c.draining {
		hold(ReasonBackpressure, c.drainFrom+c.policy.Ramp.For, "draining at the ramp", "time")
	}
	if detail, by := s.spillHoldLocked(); detail != "" {
		hold(ReasonBackpressure, 0, detail, by)
	}
	switch {
	case st.Room > 0 || s.over != nil && s.over.diverts:
	case c.settledAhead() > 0:
		hold(ReasonBackpressure, 0, fmt.Sprintf("window full: %d messages are settled behind one that waits", c.settledAhead()), "the oldest message in it")
	default:
		hold(ReasonBackpressure, 0, "window full", "the messages in it")
	}
	return st, whys
}

// usedLocked is the used share of the window, from 0 to 1. It is 0 while messages go to
// the spill and the disk takes them.
func (s *Source[M]) usedLocked(room int) float64 {
	if trouble, _ := s.spillHoldLocked(); s.over != nil && s.over.diverts && trouble == "" {
		return 0
	}
	return 1 - float64(room)/float64(s.c.limit())
}

func pauseHold(now, ends time.Duration) Hold {
	if ends == never {
		return Hold{ReasonOperator, "paused", 0, "operator: Resume"}
	}
	return Hold{ReasonOperator, "paused", max(1, ends-now), "operator: Resume; time"}
}

// breakerHold is the Hold of a source whose breaker, or a wider scope, is not closed.
func breakerHold(st *State, base time.Duration) Hold {
	b, f := st.Breaker, st.Fleet
	h := Hold{
		Reason: ReasonBreaker, Detail: b.State.String() + ": " + string(b.Cause),
		Until: heldFor(b, f, base, st.Now), ClearedBy: "its own probes",
	}
	switch {
	case b.Held && f.State == breaker.Closed:
		h.Detail, h.ClearedBy = fleetDetail(f, b.Cause), "the fleet, when it has told or the period is over; operator: ForceClosed"
	case b.Held:
		h.Detail, h.ClearedBy = fleetDetail(f, b.Cause), "the fleet's probes, one process at a time; operator: ForceClosed"
	}
	if b.Forced {
		h.ClearedBy = "operator: ForceClosed; its own probes after the period"
	}
	if b.State == breaker.Closed {
		wider := st.Wider[0]
		h.Detail = "a wider scope is open: " + wider.Name + ": " + string(wider.Cause)
		h.ClearedBy = "the probes of that scope's other children"
	}
	return h
}
