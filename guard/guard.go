// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/quarantine"
	"github.com/stormguard-mq/stormguard/internal/statefile"
)

// Guard is the shared part of a process's sources: the scopes of the breakers, the
// dead-letter writers, the sweeper and the metrics. Make one for a process, or one
// for each group of sources whose scopes differ.
//
// Lock order: saver.mu; Source.mu; one of Feed.mu, dispatcher.mu and the locks of a breaker,
// a ring and the spill; Guard.mu; journal.mu. Under a lock the Guard calls a [Limiter] and a
// [Taker], but no other port, and no handler, writer or logger.
type Guard struct {
	cfg        Config
	log        *slog.Logger
	ends       *slog.Logger // gets the lines that end a warning
	journal    *journal
	onLetter   func(DeadLetter)
	onState    func(StateChange)
	watchers   []*Watcher // copied before a change
	meters     metric.MeterProvider
	traces     trace.TracerProvider
	propagator propagation.TextMapPropagator
	parents    bool                 // spans are children of the message's span, not linked to it
	now        func() time.Duration // monotonic
	origin     time.Time            // wall time when now was 0, for metadata
	seed       uint64
	dice       *dice // random numbers, except those of the sources: see newRand
	scopes     *circuit.Scopes
	metrics    *metrics
	epochs     atomic.Uint64
	letterPace Limiter // paces dead letters; nil for no limit
	health     *health // nil without a health check
	quarantine dlq.Quarantine
	ownRules   dlq.Quarantine           // quarantine, if the Guard made it; nil if it may be shared
	unwatch    func()                   // ends the watch of quarantine
	rules      atomic.Pointer[ruleBook] // the rules of quarantine at the last read
	listed     atomic.Bool              // quarantine has changed since that read
	books      uint64                   // how many rule books were made
	classify   func(error) Class        // nil means Classify

	spill      *spillDir // nil without Config.SpillDir
	spillState atomic.Pointer[spillState]
	spillNews  atomic.Bool // spillState has changed since it was logged
	spillSaid  string      // the name of the spillState logged last; owned by the sweeper

	saver *saver // nil without Config.StateDir
	host  func() statefile.Now

	fleet       Fleet // nil without one
	detachFleet func()
	waiting     map[*circuit.Breaker]bool // breakers at which a message waits; owned by the sweeper
	storms      map[string]*stormSum      // by key; owned by the sweeper
	totals      map[string]*totalSum      // by key; owned by the sweeper

	// ctx ends the Guard's goroutines: the sweeper, the saver, the health check, and one
	// for each dispatcher that has something to write.
	ctx     context.Context //nolint:containedctx // the lifetime of the Guard
	cancel  context.CancelFunc
	sweeper sweeper

	mu          sync.Mutex
	sources     map[string]controls
	kept        map[string]carryOver          // what ended sources leave to the next ones, by name
	restored    map[string]circuit.SavedScope // breakers of the previous process, by scopeKey, until a source claims them
	parted      []controls                    // sources that ended since the fleet got the totals
	dispatchers []*dispatcher
	unwritten   map[string]bool // topics or queues whose missing dead-letter writer was logged
	closed      bool
	spillFound  map[string]bool // sources with messages in the spill since the start, and not opened yet
	running     sync.WaitGroup
	sorted      atomic.Pointer[[]controls] // the open sources, by name
	changes     []circuit.Change           // a buffer; owned by the sweeper
	look        time.Duration              // when the breakers are ticked next; owned by the sweeper
	evict       time.Duration              // when scopes are evicted next; owned by the sweeper
}

// controls is a source or protected function of any message type, as the Guard uses it.
type controls interface { //nolint:interfacebloat // all that the Guard does with a source
	Control
	reporter
	sweep(now time.Duration) (moving bool)
	waits(now time.Duration) *circuit.Breaker
	detected() (key string, storm dlq.Storm, ok bool)
	setFleetStorm(now time.Duration, f dlq.FleetStorm)
	counted() (key string, since totals, failing bool)
	heedRules(now time.Duration)
	heardTotals(sums map[string]*totalSum, failing int)
	nudge()
	hasten(now time.Duration)
	measured() *sourceMetrics
	lag() int64
	parked() (now int, followed uint64, ok bool)
	saved(now time.Duration, failures int) (savedSource, bool)
}

// A Control is a [Source] or [Func] of any message type, for operators.
type Control interface { //nolint:interfacebloat // it is all that an operator can do
	Name() string
	Account() Account
	State() State
	Failing() []Failing
	Pause(d time.Duration)
	Resume()
	ForceOpen(d time.Duration) error
	ForceClosed() error
	Release() error
	GrantCredits(n float64)
	DeadLetterWaiting(n int) int
	Update(p Policy) error
	End(ctx context.Context, why Reason) Report
}

// New makes a Guard. It starts goroutines: the sweeper, and one each with Config.StateDir,
// Config.SpillDir and [WithHealthCheck]. [Guard.Close] ends them. The error joins all
// problems of cfg.
func New(cfg Config, opts ...Option) (*Guard, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	def(&cfg.Group, "default")
	g := &Guard{
		cfg:       cfg,
		log:       slog.New(loudHandler{slog.Default().Handler()}),
		ends:      slog.Default(),
		sources:   make(map[string]controls),
		kept:      make(map[string]carryOver),
		restored:  make(map[string]circuit.SavedScope),
		unwritten: make(map[string]bool),
		sweeper:   sweeper{wake: make(chan struct{}, 1)},
		waiting:   make(map[*circuit.Breaker]bool),
		storms:    make(map[string]*stormSum),
		totals:    make(map[string]*totalSum),
		seed:      drawSeed(),
	}
	g.journal = newJournal(g)
	start := time.Now()
	g.now = func() time.Duration { return time.Since(start) }
	for _, o := range opts {
		o(g)
	}
	if g.log == nil {
		return nil, errors.New("guard: WithLogger: the logger must not be nil; slog.New(slog.DiscardHandler) is silent")
	}
	if g.health != nil {
		if err := g.health.validate(); err != nil {
			return nil, err
		}
	}
	if g.quarantine == nil {
		g.ownRules = quarantine.New(time.Now)
		g.quarantine = g.ownRules
	}
	if err := g.openState(); err != nil {
		return nil, err
	}
	g.dice = newDice(g.seed)
	g.origin = time.Now().Add(-g.now())
	g.sorted.Store(new([]controls))
	var err error
	if g.scopes, err = circuit.NewScopes(circuit.ScopesConfig{Quorum: cfg.Quorum, Breaker: cfg.Policy.Breaker}, circuit.WithRand(g.dice.Float64)); err != nil {
		return nil, errors.Join(fmt.Errorf("guard: %w", err), g.dropState())
	}
	if g.metrics, err = newMetrics(g); err != nil {
		return nil, errors.Join(fmt.Errorf("guard: metrics: %w", err), g.dropState())
	}
	if cfg.SpillDir != "" {
		if err = g.openSpill(); err != nil {
			g.metrics.close()
			return nil, errors.Join(err, g.dropState())
		}
	}
	if g.fleet != nil {
		if g.detachFleet, err = g.fleet.Attach(g.sweeper.stir); err != nil {
			g.metrics.close()
			return nil, errors.Join(fmt.Errorf("guard: WithFleet: %w", err), g.dropState(), g.closeSpill())
		}
	}
	g.unwatch = g.quarantine.Watch(func() {
		g.listed.Store(true)
		g.saver.hurry()
		g.sweeper.stir()
	})
	g.rules.Store(g.newRuleBook(g.quarantine.Entries()))
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.running.Go(func() {
		g.sweep(g.ctx)
		g.leaveFleet()
	})
	if g.saver != nil {
		go g.saver.run(g.ctx) // closeState waits for it
	}
	if g.health != nil {
		g.running.Go(func() { g.health.run(g.ctx, g) })
	}
	if len(g.spillFound) > 0 {
		g.running.Go(func() { g.sayUnopened(g.ctx) })
	}
	return g, nil
}

// closeWithin runs f, which may wait for a disk. It waits for f until ctx ends, and then
// for lastCall. If ctx does not end, it waits for 1h at most.
func closeWithin(ctx context.Context, field string, f func() error) error {
	closed := make(chan error, 1)
	go func() { closed <- f() }()
	late := time.NewTimer(time.Hour)
	defer late.Stop()
	done := ctx.Done()
	for {
		select {
		case err := <-closed:
			return err
		case <-done:
			done = nil
			late.Reset(lastCall)
		case <-late.C:
			return fmt.Errorf("guard: %s: the disk does not answer: %w", field, cmp.Or(context.Cause(ctx), context.DeadlineExceeded))
		}
	}
}

// Config returns the Config that [New] got; an empty Group is filled in. An adapter checks
// the broker's settings against it before it opens a source.
func (g *Guard) Config() Config { return g.cfg }

// Logger returns the logger of [WithLogger]. Without that option it is the [slog.Default]
// at the time of [New], and discards lines below WARN.
func (g *Guard) Logger() *slog.Logger { return g.log }

// policy is the policy of a source: its own, or else the Guard's.
func (g *Guard) policy(cfg SourceConfig, p *problems) Policy {
	if cfg.Policy == nil {
		return g.cfg.Policy
	}
	policy := *cfg.Policy
	def(&policy.Breaker, g.cfg.Policy.Breaker)
	if policy.Breaker != g.cfg.Policy.Breaker {
		p.addf("SourceConfig.Policy.Breaker: differs from the Guard's; scopes are shared, so their breakers have one configuration")
	}
	return policy
}

// dispatcher returns the dispatcher of a writer. Sources with the same writer share it. A
// source that parks has its own, and so has a source whose writer cannot be compared,
// such as a function. The caller must call discard when the source has ended.
func (g *Guard) dispatcher(w dlq.Writer, own bool) *dispatcher {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !own && reflect.ValueOf(w).Comparable() {
		for _, b := range g.dispatchers {
			if !b.own && reflect.ValueOf(b.writer).Comparable() && b.writer == w {
				b.users++
				return b
			}
		}
	}
	b := newDispatcher(g, w, own)
	g.dispatchers = append(g.dispatchers, b)
	return b
}

// discard ends the use of a dispatcher by one source.
func (g *Guard) discard(b *dispatcher) {
	b.mu.Lock()
	defer b.mu.Unlock()
	g.mu.Lock()
	b.users--
	g.mu.Unlock()
	b.retireLocked()
}

// spawn starts a goroutine that ends with the Guard; false if the Guard has ended.
func (g *Guard) spawn(f func(context.Context)) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ctx.Err() != nil {
		return false
	}
	g.running.Go(func() { f(g.ctx) })
	return true
}

func (g *Guard) register(name string, s controls) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return ErrClosed
	}
	if g.sources[name] != nil {
		return fmt.Errorf("guard: open %q: a source of this name is open already", name)
	}
	g.sources[name] = s
	delete(g.spillFound, name)
	g.sortLocked()
	return nil
}

func (g *Guard) unregister(name string, s controls) {
	g.mu.Lock()
	if g.sources[name] == s {
		delete(g.sources, name)
		g.sortLocked()
		if g.fleet != nil {
			g.parted = append(g.parted, s)
		}
	}
	g.mu.Unlock()
	g.journal.left(s)
	g.journal.ended(name)
}

func (g *Guard) sortLocked() {
	all := slices.SortedFunc(maps.Values(g.sources), func(a, b controls) int { return strings.Compare(a.Name(), b.Name()) })
	g.sorted.Store(&all)
}

// all returns the open sources, sorted by name. The slice never changes.
func (g *Guard) all() []controls { return *g.sorted.Load() }

// wakeOthers wakes all sources except one: they may wait for a probe of their scope.
func (g *Guard) wakeOthers(but controls) {
	for _, s := range g.all() {
		if s != but {
			s.nudge()
		}
	}
}

// Sources returns the open sources and protected functions, sorted by name.
func (g *Guard) Sources() []Control {
	all := g.all()
	out := make([]Control, len(all))
	for i, s := range all {
		out[i] = s
	}
	return out
}

// Source returns the open source or protected function of that name, nil if there is none.
func (g *Guard) Source(name string) Control {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := g.sources[name]; s != nil {
		return s
	}
	return nil
}

// Ready is for a readiness probe. It returns nil while the Guard takes messages, also
// while sources are on hold: a process out of service would not help the dependency, and
// the messages are safe. After Close it returns [ErrClosed]. While dead letters cannot be
// written, the error names a source and says how many others there are. A writer that puts
// letters off ([dlq.ErrPutOff]) is no error.
func (g *Guard) Ready() error {
	g.mu.Lock()
	closed, boxes := g.closed, slices.Clone(g.dispatchers)
	g.mu.Unlock()
	if closed {
		return ErrClosed
	}
	var errs []error
	for _, b := range boxes {
		if err := b.ready(); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Close ends all sources at the same time, as [Source.End] with [ReasonShutdown]. Then it
// ends the Guard's goroutines. Do not call it from a handler or a dead-letter writer: it
// would wait for its own caller until ctx ends. The reports are sorted by name. The error
// names the sources that left something behind, and joins the errors of Config.StateDir
// and Config.SpillDir.
func (g *Guard) Close(ctx context.Context) ([]Report, error) {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	all := g.all()
	reports := make([]Report, len(all))
	var ends sync.WaitGroup
	for i, s := range all {
		ends.Go(func() { reports[i] = s.End(ctx, ReasonShutdown) })
	}
	ends.Wait()
	g.mu.Lock()
	g.cancel()
	g.mu.Unlock()
	errs := []error{g.awaitGoroutines(ctx)}
	g.unwatch()
	g.metrics.close()
	errs = append(errs, closeWithin(ctx, "Config.StateDir", g.closeState), closeWithin(ctx, "Config.SpillDir", g.closeSpill))
	g.journal.flush(g.now(), true)
	for _, r := range reports {
		if !r.Clean() {
			err := fmt.Errorf("guard: source %s: %d messages left", r.Source, len(r.Left))
			if why := errors.Join(r.Err, context.Cause(ctx)); why != nil {
				err = fmt.Errorf("%w: %w", err, why)
			}
			errs = append(errs, err)
		}
	}
	return reports, errors.Join(errs...)
}

// awaitGoroutines waits for the Guard's goroutines, until ctx ends and lastCall is over.
// They end at once, unless a dead-letter writer or a health check ignores its context.
func (g *Guard) awaitGoroutines(ctx context.Context) error {
	gone := make(chan struct{})
	go func() { // ends with the last of the goroutines
		g.running.Wait()
		close(gone)
	}()
	select {
	case <-gone:
		return nil
	case <-ctx.Done():
	}
	late := time.NewTimer(lastCall)
	defer late.Stop()
	select {
	case <-gone:
		return nil
	case <-late.C:
		return fmt.Errorf("guard: a dead-letter writer, a health check or Port.Meta has not returned: %w", context.Cause(ctx))
	}
}

// warnNoWriter logs once for each topic or queue that its sources have no dead-letter
// writer: a message that fails for good is then never settled.
func (g *Guard) warnNoWriter(cfg SourceConfig) {
	at := cmp.Or(cfg.Destination, cfg.Name)
	g.mu.Lock()
	known := g.unwritten[at] || len(g.unwritten) == maxUnwritten
	if !known {
		g.unwritten[at] = true
	}
	g.mu.Unlock()
	if !known {
		g.log.Warn("a source has no dead-letter writer: a message that fails for good is never settled, and what its order puts behind it waits",
			"source", cfg.Name, "destination", cfg.Destination, "help", noWriterHelp)
	}
}

// maxUnwritten bounds how many topics or queues warnNoWriter remembers.
const maxUnwritten = 1000

// noteChanges does the sweeper's work for the whole Guard: the quarantine, the spill's
// state, the scopes, the fleet's storms and totals. It logs the breakers' changes since the
// last call. pending tells whether log lines wait for their time.
func (g *Guard) noteChanges(now time.Duration) (pending bool) {
	g.readQuarantine()
	g.saySpill()
	if now >= g.look {
		g.look = now + stormEvery
		g.scopes.Tick(now)
		g.compareStorms(now)
		g.shareTotals(now)
	}
	if now >= g.evict {
		g.evict = now + time.Minute
		g.scopes.Evict(now, g.scopes.Config().Breaker.Window)
		g.forget(now)
	}
	g.changes = g.scopes.Changes(g.changes[:0])
	if len(g.changes) > 0 {
		g.saver.hurry()
		for _, s := range g.all() {
			s.nudge() // it may share the scope
		}
	}
	for _, c := range g.changes {
		g.metrics.transition(c)
		g.journal.breaker(now, c)
	}
	return g.journal.tick(now)
}
