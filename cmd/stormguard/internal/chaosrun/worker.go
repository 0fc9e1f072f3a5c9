// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/once"
	"github.com/stormguard-mq/stormguard/once/bolt"
)

// A Job is the order to the process of a consumer.
type Job struct {
	Broker     string `json:"broker"`
	URL        string `json:"url"`
	ID         string `json:"id"`
	Process    int    `json:"process"`
	Dependency string `json:"dependency"` // address of the dependency
	Recorder   string `json:"recorder"`   // address of the recorder
	Consumers  int    `json:"consumers"`  // number of consumers in the run
	Consumer   int    `json:"consumer"`   // number of this consumer, from 0
	Static     bool   `json:"static"`     // a restarted consumer keeps its name, so its partitions wait for it
	Marks      string `json:"marks"`      // the file of package once; with several consumers, the URL of their NATS
	Own        string `json:"own"`        // first part of the file names for mutants' own marks
	Spill      string `json:"spill"`      // the guard's directory for messages; empty for none
	State      string `json:"state"`      // the guard's directory for its state; empty for none
	Mutant     Mutant `json:"mutant"`

	OneByOne bool `json:"-"` // the run waits for each message's confirmation before it sends the next

	Network dialer   `json:"network"` // set in a network namespace of its own; else its path is empty
	As      []string `json:"as"`      // the broker's addresses, reached through Network
}

// confirmsWithin is how long the run waits for the broker to confirm a batch: stuckAfter. If the
// run breaks the broker, an answer may be lost: then it is the argument broken. After it the run
// publishes again.
func (j Job) confirmsWithin(broken time.Duration) time.Duration {
	if j.OneByOne {
		return broken
	}
	return stuckAfter
}

// Work consumes messages until stdin ends. It is the process that a run starts and kills. job is
// a Job in JSON.
func Work(ctx context.Context, job string, stdin io.Reader, stderr io.Writer) (err error) {
	var j Job
	if err := json.Unmarshal([]byte(job), &j); err != nil {
		return fmt.Errorf("chaos: job: %w", err)
	}
	k, ok := kinds[j.Broker]
	if !ok {
		return fmt.Errorf("chaos: job: broker: %q is not one of %q", j.Broker, Brokers())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // ends with the process at the latest
		_, _ = io.Copy(io.Discard, stdin)
		cancel()
	}()
	if j.Network.Path != "" {
		if err := errors.Join(wake(), j.Network.listenAs(j.As)); err != nil {
			return err
		}
	}
	var cfg guard.Config
	cfg.Group, cfg.StateDir = "chaos", j.State
	if j.Spill != "" {
		cfg.SpillDir, cfg.Policy.Spill, cfg.Policy.Window = j.Spill, true, spillWindow
	}
	broker := k.open(j)
	if err := j.Mutant.prepare(&j, &cfg); err != nil {
		return err
	}
	g, err := guard.New(cfg, guard.WithLogger(slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelError}))))
	if err != nil {
		return err
	}
	w := &worker{job: j, recorder: client{addr: j.Recorder, dial: j.Network}, dependency: client{addr: j.Dependency, dial: j.Network}, seen: make(map[int]bool)}
	marks, closeMarks, err := openMarks(ctx, j)
	if err != nil {
		return err
	}
	if w.once, err = once.New(marks, once.Config{}, once.WithLookup(w.happened)); err != nil {
		return err
	}
	for _, n := range g.Spilled() {
		if _, err := w.recorder.ask(ctx, "spilled %d %d", j.Process, n); err != nil {
			return err
		}
	}
	if j.Mutant == Idle && j.Consumer > 0 {
		<-ctx.Done()
	} else {
		err = broker.consume(ctx, g, w.handle)
	}
	_, closeErr := g.Close(context.WithoutCancel(ctx))
	return errors.Join(err, closeErr, closeMarks())
}

// openMarks opens the store of package once. Several consumers share one store, in NATS. For a
// single consumer it opens a file, and retries, as the disk may be full.
func openMarks(ctx context.Context, j Job) (once.Store, func() error, error) {
	if j.Consumers == 1 {
		marks, err := patiently(ctx, func() (*bolt.Store, error) { return bolt.Open(j.Marks, bolt.Config{}) })
		if err != nil {
			return nil, nil, err
		}
		return marks, marks.Close, nil
	}
	return natsMarks(j.Marks, "CHAOS_"+j.ID, j.Network)
}

// spillWindow is small, so that even the shortest outage fills the window and spills to disk.
const spillWindow = 20

// worker handles one message after the other.
type worker struct {
	job  Job
	once *once.Runner

	mu         sync.Mutex // guards the fields below
	dependency client
	recorder   client
	seen       map[int]bool // messages that mutants have seen
}

var errPoison = errors.New("the amount has no currency")

func (w *worker) handle(ctx context.Context, b []byte) error {
	m, err := read(b)
	if err != nil {
		return guard.Permanent(err)
	}
	if m.Poison && w.job.Mutant != ChargePoison {
		if w.job.Mutant == DropPoison {
			return nil
		}
		return guard.Permanent(errPoison)
	}
	if err := w.work(ctx, m); err != nil {
		_ = w.tell(ctx, "failed", m.ID) // the report counts only errors that the run hears of
		return err
	}
	return w.tell(ctx, "handled", m.ID)
}

// tell sends the outcome of a message to the recorder.
func (w *worker) tell(ctx context.Context, what string, id int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.recorder.ask(ctx, "%s %d %d", what, w.job.Process, id)
	return err
}

// asked tells whether it was called with this message before.
func (w *worker) asked(id int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	was := w.seen[id]
	w.seen[id] = true
	return was
}

// work makes the effect of a message once. A mutant does it wrong.
func (w *worker) work(ctx context.Context, m body) error {
	effect := func(ctx context.Context) error { return w.charge(ctx, m.ID) }
	do := func() error { return w.once.Do(ctx, fmt.Sprint("charge/", m.ID), effect) }
	switch w.job.Mutant {
	case AckFirst:
		go func() { _ = effect(context.WithoutCancel(ctx)) }()
		return nil
	case NoOnce:
		return effect(ctx)
	case Swallow:
		_ = do()
		return nil
	case BuryAll:
		if err := do(); err != nil {
			return guard.Permanent(err)
		}
		return nil
	case Unordered:
		if m.ID%2 == 0 {
			time.Sleep(3 * time.Millisecond)
		}
	case Slow:
		if m.ID%20 == 0 {
			time.Sleep(400 * time.Millisecond)
		}
	case Flaky:
		if m.ID%50 == 0 && !w.asked(m.ID) {
			return errors.New("a bug that comes and goes")
		}
	case StopsShort:
		if _ = w.asked(m.ID); len(w.seen) > 100 { // one source, one worker
			<-ctx.Done()
			return ctx.Err()
		}
	default:
	}
	return do()
}

// charge asks the dependency to make the effect. Without an answer the effect is in doubt.
func (w *worker) charge(ctx context.Context, id int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.dependency.ask(ctx, "charge %d %d", w.job.Process, id)
	if errors.Is(err, errSent) {
		return fmt.Errorf("%w: %w", once.ErrInDoubt, err)
	}
	return err
}

// happened asks the dependency whether an effect happened.
func (w *worker) happened(ctx context.Context, key string) (bool, error) {
	var id int
	if _, err := fmt.Sscanf(key, "charge/%d", &id); err != nil {
		return false, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	said, err := w.dependency.ask(ctx, "did %d %d", w.job.Process, id)
	return said == "yes", err
}
