// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// Intake guards the handlers that use one dependency. It is a function guard for requests whose
// clients wait, and a source for held requests, with one breaker. All methods are safe for
// concurrent use.
//
// Goroutines: [Intake.Start] starts the source's loop, which replays requests. With Policy.Workers,
// and with a spill, workers of the source replay them. They end with [Intake.Close] or the Guard's.
// [New] calls Start, unless an earlier process has left requests.
//
// Lock order: Intake.mu, then the guard's own. No handler, writer or option of the user's runs
// under Intake.mu.
type Intake struct {
	cfg  Config
	o    options
	keep map[string]bool
	live *guard.Func[*call]
	src  *guard.Source[*held] // nil if nothing can be deferred

	order  guard.Order
	window int   // how many requests may be held, including those being read
	room   int64 // how many bytes may be held, including those of requests being read
	ids    string
	disk   bool          // held requests are on the disk
	ran    chan struct{} // closed when the loop has ended

	normal  normal                   // how long live requests take
	due     atomic.Pointer[dueProbe] // a due probe that was left to held requests; nil if there is none
	replays atomic.Uint64            // how many replays have begun
	vain    atomic.Bool              // the latest replay got a 4xx
	waiting atomic.Int64             // held requests

	refused, full, accepted atomic.Uint64

	holdAll bool // set by tests, to hold also while the breaker is closed

	mu      sync.Mutex
	seq     uint64
	reading int   // requests whose body is being read
	bytes   int64 // size of the requests that are held or being read
	lanes   map[uint64]int
	oldest  *held // list of held requests in memory, in order; with a spill, those that are not on the disk yet
	newest  *held
	listed  int // length of the list from oldest to newest
	unread  int // requests on the disk from an earlier process, whose lanes are not known yet
	drain   drain
	idle    chan struct{} // closed when no request is held any more; nil if nobody waits
	closing bool

	started sync.Once

	once   sync.Once
	closed chan struct{} // closed when Close is done
	report Report
}

// probeGrace is how long live requests leave a due probe to held requests, whose clients do not
// wait for a dependency that hangs. After that, live requests probe, too: the held ones may be
// paused, or their handler busy.
const probeGrace = time.Second

// dueProbe is a due probe that a live request saw and left to held requests. The first replay after
// that makes it void.
type dueProbe struct {
	since   time.Time
	replays uint64
}

// New makes an intake. The error joins everything that is wrong with cfg and the options. Call
// [Intake.Close] at the end, after the server's Shutdown.
func New(g *guard.Guard, cfg Config, opts ...Option) (*Intake, error) {
	o, optErr := newOptions(opts)
	err := errors.Join(cfg.Validate(), optErr)
	if g == nil {
		err = errors.Join(err, fmt.Errorf("%w: New: the Guard must not be nil", errConfig))
	}
	if err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	in := &Intake{
		cfg: cfg, o: o, keep: cfg.keep(), lanes: make(map[uint64]int), ids: rand.Text()[:10],
		ran: make(chan struct{}), closed: make(chan struct{}),
	}
	source := guard.SourceConfig{Name: cfg.Name, System: "http", Destination: cfg.Dependency, Policy: cfg.Policy, Limiter: o.limiter}
	if in.live, err = guard.Protect(g, source, in.handle); err != nil {
		return nil, fmt.Errorf("nethttp: %w", err)
	}
	if o.letters == nil {
		in.started.Do(func() { close(in.ran) })
		return in, nil
	}
	source.Name += "/held"
	source.DeadLetters = o.letters
	if in.src, err = guard.Open(g, source, guard.Limits{}, newPort(in), in.replay); err != nil {
		in.live.End(context.Background(), guard.ReasonShutdown)
		return nil, fmt.Errorf("nethttp: %w", err)
	}
	st := in.src.State()
	policy := st.Settings
	in.order, in.window, in.room, in.disk = policy.Order, policy.Window, policy.WindowBytes, policy.Spill
	if err := in.takeOver(st.Spilled); err != nil {
		in.src.End(context.Background(), guard.ReasonShutdown)
		in.live.End(context.Background(), guard.ReasonShutdown)
		return nil, err
	}
	if st.Spilled == 0 {
		in.Start()
	}
	return in, nil
}

// Start begins to replay the requests that an earlier process has left on the disk. Call it when
// the handler of [WithReplay] has all its routes: an earlier replay would not find its route. The
// first request starts an intake, too. An intake that found no requests has started by itself.
func (in *Intake) Start() {
	in.started.Do(func() {
		go func() {
			defer close(in.ran)
			_ = in.src.Run(context.Background(), nil) // until the source has ended
		}()
	})
}

// Wrap guards a handler. While the breaker is not closed it refuses requests, except those that may
// be held, see [WithDeferrable].
func (in *Intake) Wrap(next http.Handler) http.Handler {
	return &handler{in: in, next: next, defers: func(r *http.Request) bool {
		return in.o.deferrable != nil && in.o.deferrable(r)
	}}
}

// Defer guards a handler whose requests may be held and answered with 202: those with the methods
// POST, PUT, PATCH and DELETE. Other requests are guarded as by [Intake.Wrap]. next must live on
// when the request is over; if it does not, see [WithReplay]. Defer panics if the intake has no
// [WithDeadLetters]. That is a mistake in the program, like a wrong pattern of http.ServeMux.
func (in *Intake) Defer(next http.Handler) http.Handler {
	if in.src == nil {
		panic("nethttp: Intake.Defer needs WithDeadLetters: a request that was answered 202 and cannot be replayed must go somewhere")
	}
	return &handler{in: in, next: next, defers: func(r *http.Request) bool {
		switch r.Method {
		case http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
			return true
		default:
			return false
		}
	}}
}

// Stats counts the requests that an intake answered by itself since it was made.
type Stats struct {
	// Refused counts refusals by the breaker, a limiter or an operator, at the end, or because the
	// context had ended. Full is not included.
	Refused uint64
	// Full counts deferrable requests for which the hold had no room, or which were too large for
	// it, and which could not be handled live.
	Full     uint64
	Accepted uint64 // answered with 202
	Held     int    // requests that are held now; with a spill also those of an earlier process
}

// Stats returns the present counts. The states of the Guard's sources have the rest, under
// Config.Name and Config.Name + "/held".
func (in *Intake) Stats() Stats {
	return Stats{Refused: in.refused.Load(), Full: in.full.Load(), Accepted: in.accepted.Load(), Held: int(in.waiting.Load())}
}

// Drained waits until nothing is held, or ctx ends. New requests may be held
// meanwhile, as long as the server runs.
func (in *Intake) Drained(ctx context.Context) error {
	for {
		in.mu.Lock()
		if in.waiting.Load() <= 0 {
			in.mu.Unlock()
			return nil
		}
		if in.idle == nil {
			in.idle = make(chan struct{})
		}
		idle := in.idle
		in.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// A Report says how an intake ended.
type Report struct {
	Live, Held guard.Report // Held is zero if nothing could be deferred

	// Written is how many requests were answered 202, and not replayed, but written as dead letters
	// with [ReasonShutdown].
	Written int
	// Left are the requests that the writer did not take: nobody else has them.
	Left []Left
}

// A Left is a request that was answered 202, and is lost unless the caller keeps it. [FromRecord]
// makes a request of its Record.
type Left struct {
	Record *dlq.Record
	Err    error // the writer's error
}

// Close ends the intake. It waits for live requests and the running replay until ctx ends. Then it
// gives the requests that are still held to the dead-letter writer, which has at least a second,
// even if ctx has ended. With a spill they stay on the disk, for the next process. The error is not
// nil if anything is left.
//
// Call Close after the server's Shutdown. If the dependency is well and there is time, call
// [Intake.Drained] in between. Guard.Close does the same as Close, but cannot see a replay that
// does not return: call Close first.
//
// Later calls wait for the first and return its report.
func (in *Intake) Close(ctx context.Context) (Report, error) {
	in.once.Do(func() {
		defer close(in.closed)
		in.report = in.close(ctx)
	})
	<-in.closed
	rep := in.report
	var errs []error
	for _, r := range []guard.Report{rep.Live, rep.Held} {
		if n := len(r.Left); n > 0 {
			errs = append(errs, fmt.Errorf("nethttp: close %s: %d requests have not returned", r.Source, n))
		}
		errs = append(errs, r.Err)
	}
	if n := len(rep.Left); n > 0 {
		errs = append(errs, fmt.Errorf("nethttp: close %s: %d requests that were answered 202 are left: %w", in.cfg.Name, n, rep.Left[0].Err))
	}
	return rep, errors.Join(errs...)
}

func (in *Intake) close(ctx context.Context) (rep Report) {
	in.mu.Lock()
	in.closing = true
	in.mu.Unlock()
	var live sync.WaitGroup
	live.Go(func() { rep.Live = in.live.End(ctx, guard.ReasonShutdown) })
	defer live.Wait()
	if in.src == nil {
		return rep
	}
	in.started.Do(func() { close(in.ran) })
	rep.Held = in.src.End(ctx, guard.ReasonShutdown)
	if rep.Held.Clean() && !in.loopEnds(ctx) {
		rep.Held.Err = fmt.Errorf("nethttp: close %s: the loop has not returned: the disk of Config.SpillDir does not answer", in.cfg.Name)
	}
	if in.disk {
		in.refuseAll(in.heldNow()) // the others are on the disk, for the next process
		return rep
	}
	write, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(lastLetters, cancel) })
	defer stop()
	rep.Written, rep.Left = in.surrender(write, in.heldNow())
	return rep
}

// lastLetters is how long Close goes on once its context is over.
const lastLetters = time.Second

// loopEnds waits for the source's loop, and tells whether it has ended.
func (in *Intake) loopEnds(ctx context.Context) bool {
	select {
	case <-in.ran:
		return true
	case <-ctx.Done():
	}
	late := time.NewTimer(lastLetters)
	defer late.Stop()
	select {
	case <-in.ran:
		return true
	case <-late.C:
		return false
	}
}

// heldNow lists the requests that are held in memory, oldest first.
func (in *Intake) heldNow() (all []*held) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for h := in.oldest; h != nil; h = h.newer {
		all = append(all, h)
	}
	return slices.Clip(all)
}
