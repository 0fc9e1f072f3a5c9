// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package chaosrun runs a schedule of faults against guarded consumers on real brokers.
//
// The run is one process: it publishes messages, serves the dependency and keeps the record.
// It starts consumers as processes of their own, kills or stops them, and starts them again.
// Its judgement needs no data of a killed process.
package chaosrun

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stormguard-mq/stormguard/chaos"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// Config describes a run.
type Config struct {
	Broker   string // one of Brokers
	URL      string // the broker's address; empty: an embedded NATS, or a broker that is found or started
	Schedule chaos.Schedule
	Messages int           // least number of messages; publishing also goes on until the last fault is over
	Rate     int           // messages published per second, however slow the consumers are; 0: as fast as the consumers
	Drain    time.Duration // time limit for all messages, after the last fault
	Mutant   Mutant        // empty: consumers without a bug
	Spill    bool          // each consumer spills to disk, and keeps its state there
	Exe      string        // the program with the command "chaos worker"; empty: this program
}

const (
	inFlight    = 400 // with more healthy messages without an effect, bounded publishes none
	batch       = 50  // most messages published at once
	keys        = 3   // keys for each consumer
	poisonEvery = 97  // every 97th message is poison; 97 is no multiple of a number of keys
	pad         = 200 // bytes of padding in each message
	// stuckAfter limits four waits. The run gives up without an effect, or without a
	// consumer's spill. A fault of the network ends without a hit. A batch without a
	// confirmation is published again.
	stuckAfter = time.Minute
	idleAfter  = 2 * time.Second // without an effect for so long, one batch more is published

	// settled is the time between making a queue and killing its broker. RabbitMQ may not
	// find the leader of a younger queue again.
	settled = 6 * time.Second
)

// Run runs a schedule, and returns its history. The error is about the run itself, not about
// bugs that it found.
func Run(ctx context.Context, cfg Config, stderr io.Writer) (h chaos.History, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r, err := newRun(ctx, cfg, stderr)
	if err != nil {
		return h, err
	}
	r.cancel = cancel
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	var publishing sync.WaitGroup
	defer publishing.Wait()
	faultsOver := make(chan struct{})
	publishCtx, stopPublishing := context.WithCancel(ctx)
	defer stopPublishing()
	publishing.Go(func() {
		if err := r.publish(publishCtx, faultsOver); err != nil {
			cancel(fmt.Errorf("publish: %w", err))
		}
	})
	if err = r.faults(ctx); err != nil {
		stopPublishing() // a broker that takes no messages must not delay the report
	}
	close(faultsOver)
	publishing.Wait()
	healed := r.now()
	if err == nil && ctx.Err() == nil {
		fmt.Fprintf(stderr, "chaos: %d faults happened in %v; draining\n", len(r.fired), healed.Round(time.Second))
		err = r.drain(ctx)
	}
	if cause := context.Cause(ctx); cause != nil {
		return h, cause
	}
	if err != nil && !errors.Is(err, errStuck) {
		return h, err
	}
	if cfg.Spill {
		fmt.Fprintf(stderr, "chaos: the processes found %d messages in the spill of the one before\n", r.found)
	}
	letters, err := r.deadLetters(ctx)
	if err != nil {
		return h, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return chaos.History{
		Schedule: r.schedule, Published: r.messages, Starts: r.starts, Effects: r.effects, Handled: r.handled, Failed: r.failed,
		Letters: letters, Fired: r.fired, Healed: healed, Drained: r.drained, Ordered: r.order(),
	}, nil
}

// run is the state of a run. Only the goroutine of Run writes its fields. record, network and
// losses have locks of their own.
type run struct {
	*record

	cfg        Config
	stderr     io.Writer
	schedule   chaos.Schedule
	broker     broker
	job        Job // of the next process; start sets the fields of its consumer
	dependency *listener
	recorder   *listener
	own        *brokers.Broker // nil without faults of the broker
	network    *network        // nil without faults of the network
	losses     losses
	dir        string                  // temporary directory of the run
	full       *disk                   // nil without faults of the disk
	keep       string                  // directory for files that outlive a process: dir, or the disk
	cancel     context.CancelCauseFunc // cancels the run
	stop       func()                  // stops the brokers that the run started

	consumers []*process // by consumer; nil while it does not run
	starts    []chaos.Start
	fired     []chaos.Fired
	drained   *chaos.Instant
}

// process is a running consumer.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
}

func newRun(ctx context.Context, cfg Config, stderr io.Writer) (r *run, err error) {
	if err := cfg.Schedule.Validate(); err != nil {
		return nil, err
	}
	n := max(cfg.Schedule.Consumers, 1)
	r = &run{record: newRecord(), cfg: cfg, stderr: stderr, schedule: cfg.Schedule, stop: func() {}, consumers: make([]*process, n), losses: losses{timers: make(map[int]int)}}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close(ctx))
		}
	}()
	if r.cfg.Exe == "" {
		if r.cfg.Exe, err = os.Executable(); err != nil {
			return r, err
		}
	}
	if r.dir, err = os.MkdirTemp("", "stormguard-chaos-"); err != nil {
		return r, err
	}
	r.keep = r.dir
	if r.has(chaos.DiskFull) {
		if r.full, err = newDisk(filepath.Join(r.dir, "disk")); err != nil {
			return r, err
		}
		r.keep = r.full.at
	}
	url, stop, err := r.address(ctx)
	if err != nil {
		return r, err
	}
	r.stop = stop
	if r.dependency, err = serve(r.answer); err != nil {
		return r, err
	}
	if r.recorder, err = serve(r.answer); err != nil {
		return r, err
	}
	if r.has(chaos.Loss, chaos.Delay, chaos.Blackhole, chaos.Reset) {
		if err := tryNamespaces(); err != nil {
			return r, err
		}
		if r.network, err = newNetwork(r.dir, cfg.Broker, url); err != nil {
			return r, err
		}
	}
	id := strings.ToUpper(rand.Text()[:8])
	r.job = Job{
		Broker: cfg.Broker, URL: url, ID: id, Dependency: r.dependency.addr, Recorder: r.recorder.addr,
		Marks: filepath.Join(r.keep, "once.db"), Own: filepath.Join(r.keep, "once.db-"), Mutant: cfg.Mutant,
		Consumers: n, Static: cfg.Schedule.Count(chaos.Restart) == 0, OneByOne: r.own != nil,
	}
	if r.network != nil {
		r.job.Network.Path, r.job.As = r.network.path, r.network.broker
	}
	r.broker = kinds[cfg.Broker].open(r.job)
	if err := r.broker.lay(ctx); err != nil {
		return r, err
	}
	if r.own != nil {
		wait(ctx, settled)
	}
	if n > 1 {
		marks, stopMarks, err := startNATS(ctx)
		if err != nil {
			return r, err
		}
		r.job.Marks = marks
		r.stop = func() { stopMarks(); stop() }
	}
	r.began = time.Now()
	for c := range n {
		if err := r.start(c); err != nil {
			return r, err
		}
	}
	return r, nil
}

// has tells whether the schedule has a fault of one of the kinds.
func (r *run) has(kinds ...chaos.Kind) bool {
	return slices.ContainsFunc(r.schedule.Faults, func(f chaos.Fault) bool { return slices.Contains(kinds, f.Kind) })
}

// order says how the broker keeps the order in this run. A broker that redelivers also
// redelivers after a broken connection, while the process goes on.
func (r *run) order() chaos.Redelivery {
	ordered := kinds[r.cfg.Broker].ordered
	if ordered != chaos.KeepsOrder && (r.job.Consumers > 1 || r.network != nil || r.own != nil) {
		return chaos.Competes
	}
	return ordered
}

// address returns the broker's address. stop stops a broker of the run's own. A broker that
// brokers.Find found or started keeps running.
func (r *run) address(ctx context.Context) (url string, stop func(), err error) {
	k, none := kinds[r.cfg.Broker], func() {}
	switch {
	case r.has(chaos.BrokerKill, chaos.BrokerFreeze):
		if r.cfg.URL != "" {
			return "", none, errors.New("chaos: url: a broker that is to be killed is the run's own")
		}
		fmt.Fprintf(r.stderr, "chaos: starting a %s; the very first start installs it and takes minutes\n", r.cfg.Broker)
		if r.own, err = brokers.Start(ctx, k.own, brokers.Options{}); err != nil {
			return "", none, fmt.Errorf("chaos: a broker to kill, which scripts/brokers of the source tree starts: %w", err)
		}
		return r.own.Addr(), func() { _ = r.own.Stop(context.WithoutCancel(ctx)) }, nil
	case r.cfg.URL != "":
		return r.cfg.URL, none, nil
	case k.found != "":
		fmt.Fprintf(r.stderr, "looking for %s, or starting it; the very first start installs it and takes minutes\n", r.cfg.Broker)
		url, err := brokers.Find(ctx, k.found)
		return url, none, err
	}
	return startNATS(ctx)
}

func (r *run) close(ctx context.Context) error {
	for c, p := range r.consumers {
		if p != nil {
			_ = r.kill(c) // the process may have ended
		}
	}
	if r.network != nil {
		r.network.close()
	}
	for _, s := range []*listener{r.dependency, r.recorder} {
		if s != nil {
			s.down()
		}
	}
	if r.broker != nil {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		r.broker.remove(clean)
	}
	r.stop()
	var err error
	if r.full != nil {
		err = r.full.close()
	}
	return errors.Join(err, os.RemoveAll(r.dir))
}

// disk is the path of a consumer's file or directory that outlives its process.
func (r *run) disk(consumer int, what string) string {
	return filepath.Join(r.keep, fmt.Sprint(what, "-", consumer))
}

// start starts the next process of a consumer.
func (r *run) start(consumer int) error {
	r.job.Process++
	r.job.Consumer = consumer
	if r.cfg.Spill {
		r.job.Spill, r.job.State = r.disk(consumer, "spill"), r.disk(consumer, "state")
	}
	job, err := json.Marshal(r.job)
	if err != nil {
		return err
	}
	cmd := exec.Command(r.cfg.Exe, "chaos", "worker", string(job)) //nolint:noctx,gosec // it is killed by the schedule; the program is the caller's
	cmd.Stderr = r.stderr
	if r.network != nil {
		cmd.SysProcAttr = ownNetwork()
	}
	stdin, err := cmd.StdinPipe() // closes with this process, and so ends the worker
	if err != nil {
		return err
	}
	r.starts = append(r.starts, chaos.Start{Process: r.job.Process, At: r.now()})
	if err := cmd.Start(); err != nil {
		return err
	}
	r.consumers[consumer] = &process{cmd, stdin}
	return r.losses.started(cmd.Process.Pid)
}

// kill kills a consumer. It returns an error if the consumer had already ended by itself:
// then the fault did not happen.
func (r *run) kill(consumer int) error {
	cmd := r.consumers[consumer].cmd
	r.consumers[consumer] = nil
	lossErr := r.losses.ends(cmd.Process.Pid)
	_ = cmd.Process.Kill()
	err := errors.Join(cmd.Wait(), lossErr)
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		return fmt.Errorf("the consumer ended by itself: %w", errors.Join(err, errors.New(cmd.ProcessState.String())))
	}
	return nil
}

// publish publishes until the faults are over and there are enough messages.
func (r *run) publish(ctx context.Context, faultsOver <-chan struct{}) error {
	padding := strings.Repeat("x", pad)
	next := r.bounded
	if r.cfg.Rate > 0 {
		next = r.paced()
	}
	for id := 1; ; {
		select {
		case <-ctx.Done():
			return nil // the run returns the cause
		case <-faultsOver:
			if id > r.cfg.Messages {
				return nil
			}
		default:
		}
		sent := next(ctx)
		var ms []body
		var texts []message
		for range sent {
			m := body{ID: id, Key: id % (keys * r.job.Consumers), Poison: id%poisonEvery == 0, Pad: padding}
			text, err := json.Marshal(m)
			if err != nil {
				return err
			}
			ms, texts = append(ms, m), append(texts, message{strconv.Itoa(id), strconv.Itoa(m.Key), text})
			id++
		}
		again := false
		_, err := patiently(ctx, func() (none struct{}, err error) {
			if err = r.broker.publish(ctx, texts); err != nil && ctx.Err() == nil && !again {
				again = true
				fmt.Fprintln(r.stderr, "chaos: messages are published again:", err)
			}
			return none, err
		})
		switch {
		case err == nil:
			r.published(ms, sent)
		case ctx.Err() != nil:
			return nil //nolint:nilerr // the run says why
		default:
			return err
		}
	}
}

// bounded waits until a batch may be published, and returns when each of its messages is sent.
// It bounds the messages without an effect: a fault always meets some, and never too many.
func (r *run) bounded(ctx context.Context) []chaos.Instant {
	last, since := r.made(), time.Now() // number of effects, and when it changed
	// A lost message always counts as in flight: idleAfter keeps it from blocking the run.
	for r.backlog() > inFlight && time.Since(since) < idleAfter && ctx.Err() == nil {
		if made := r.made(); made != last {
			last, since = made, time.Now()
		}
		wait(ctx, 2*time.Millisecond)
	}
	return slices.Repeat([]chaos.Instant{r.now()}, batch)
}

// paced returns a function like bounded that publishes at a fixed rate. A late message has the
// time at which it was due, so that a wait for the publisher counts, too.
func (r *run) paced() func(ctx context.Context) []chaos.Instant {
	each := time.Second / time.Duration(r.cfg.Rate)
	due := r.now()
	return func(ctx context.Context) (sent []chaos.Instant) {
		wait(ctx, due-r.now())
		for ; due <= r.now() && len(sent) < batch; due += each {
			sent = append(sent, due)
		}
		return sent
	}
}

// errStuck means that messages have no effect any more. The report says so.
var errStuck = errors.New("chaos: no effect for a minute")

// faults runs the schedule. Some faults last. A kill or a restart right after a lasting fault
// comes in its middle, and so does an outage right after a full disk. Any other fault but a kill
// or a restart waits for the end of lasting faults.
func (r *run) faults(ctx context.Context) error {
	var lasts sync.WaitGroup
	shown := make([]chaos.Fired, len(r.schedule.Faults)) // by fault; the goroutine of a lasting fault writes its own
	defer func() {
		lasts.Wait()
		for i := range r.fired {
			r.fired[i].Count, r.fired[i].Timers = shown[i].Count, shown[i].Timers
		}
	}()
	var middle <-chan time.Time // of the lasting fault; nil without one
	for i, f := range r.schedule.Faults {
		within := f.Kind == chaos.Outage && i > 0 && r.schedule.Faults[i-1].Kind == chaos.DiskFull
		if f.Kind != chaos.Kill && f.Kind != chaos.Restart && !within {
			lasts.Wait()
			middle = nil
		}
		if err := r.awaitEffects(ctx, f.After, middle); err != nil {
			return err
		}
		middle = nil
		r.fired = append(r.fired, chaos.Fired{Fault: i, At: r.now()})
		end, err := r.begin(ctx, f, &shown[i])
		if err != nil {
			return fmt.Errorf("fault %d, a %s: %w", i, f.Kind, err)
		}
		if end != nil {
			middle = time.After(f.Lasts() / 2)
			lasts.Go(func() {
				wait(ctx, f.Lasts())
				err := r.awaitHit(ctx, i)
				if err = errors.Join(err, end()); err != nil {
					r.cancel(fmt.Errorf("the end of fault %d, a %s: %w", i, f.Kind, err))
				}
			})
		}
	}
	return nil
}

// begin starts a fault. For a lasting fault it returns end, which ends the fault. After the end
// of the fault shown has the counters that prove that the fault happened.
func (r *run) begin(ctx context.Context, f chaos.Fault, shown *chaos.Fired) (end func() error, err error) {
	switch f.Kind {
	case chaos.Kill: // a lasting fault goes on: the next process starts in it
		if err := r.kill(f.Consumer); err != nil {
			return nil, err
		}
		if n := r.schedule.Count(chaos.Kill); r.job.Process%50 == 0 {
			fmt.Fprintf(r.stderr, "chaos: %d of %d kills, %d effects\n", r.job.Process-1, n, r.made())
		}
		return nil, r.start(f.Consumer)
	case chaos.Restart:
		if err := r.end(f.Consumer); err != nil {
			return nil, err
		}
		return nil, r.start(f.Consumer)
	case chaos.Down: // no other fault happens meanwhile
		if err := r.kill(f.Consumer); err != nil {
			return nil, err
		}
		wait(ctx, f.Lasts())
		return nil, r.start(f.Consumer)
	case chaos.Outage:
		r.dependency.down()
		return func() error {
			for ctx.Err() == nil && r.dependency.up() != nil { // another process may have the port for a moment
				wait(ctx, 10*time.Millisecond)
			}
			return nil
		}, nil
	case chaos.Freeze:
		p := r.consumers[f.Consumer].cmd.Process
		return func() error {
			_ = p.Signal(thaw) // the process may be dead
			return nil
		}, p.Signal(freeze)
	case chaos.Burn:
		burnt, err := burn(r.cfg.Exe)
		return func() (err error) {
			shown.Count, err = burnt()
			return err
		}, err
	case chaos.DiskFull:
		if err := r.awaitSpills(ctx); err != nil {
			return nil, err
		}
		shown.Count, err = r.full.fill()
		return r.full.free, err
	case chaos.Loss:
		var ports []string
		for _, addr := range r.job.As {
			if _, port, err := net.SplitHostPort(addr); err == nil && f.Incoming {
				ports = append(ports, port)
			}
		}
		return func() (err error) {
			shown.Count, shown.Timers, err = r.losses.end()
			return err
		}, r.losses.begin(lossRules(f.Percent, ports))
	case chaos.BrokerKill:
		return func() error { return r.own.Restart(ctx) }, r.own.Kill(ctx, 0)
	case chaos.BrokerFreeze:
		info, err := r.own.Info(ctx)
		if err != nil {
			return nil, err
		}
		pid, err := strconv.Atoi(info["pid1"])
		if err != nil {
			return nil, err
		}
		p, err := os.FindProcess(pid)
		if err != nil {
			return nil, err
		}
		return func() error { return p.Signal(thaw) }, p.Signal(freeze)
	case chaos.Delay:
		r.network.set(true, false)
	case chaos.Blackhole:
		r.network.set(false, true)
	case chaos.Reset:
		return nil, r.untilHit(ctx, f.Kind, func() (int, error) { // consumers may be about to connect
			shown.Count = r.network.reset()
			return shown.Count, nil
		})
	}
	return func() error { // ends a delay or a blackhole
		shown.Count = r.network.set(false, false)
		return nil
	}, nil
}

// awaitHit waits until a lasting fault of the network has hit a packet or a read.
func (r *run) awaitHit(ctx context.Context, fault int) error {
	switch kind := r.schedule.Faults[fault].Kind; kind {
	case chaos.Loss:
		return r.untilHit(ctx, kind, r.losses.soFar)
	case chaos.Delay, chaos.Blackhole:
		return r.untilHit(ctx, kind, func() (int, error) { return r.network.soFar(), nil })
	default:
		return nil
	}
}

// untilHit waits until hits is above 0, but not longer than stuckAfter. After stuckAfter the
// report says that not every fault happened.
func (r *run) untilHit(ctx context.Context, kind chaos.Kind, hits func() (int, error)) error {
	for began := time.Now(); ctx.Err() == nil; wait(ctx, 20*time.Millisecond) {
		if n, err := hits(); n > 0 || err != nil {
			return err
		}
		if waited := time.Since(began); waited > stuckAfter {
			fmt.Fprintf(r.stderr, "chaos: a %s hit nothing, and was given up after %v more\n", kind, waited.Round(time.Second))
			return nil
		}
	}
	return nil
}

// awaitSpills waits until each consumer has made its spill. On a full disk it cannot make one.
func (r *run) awaitSpills(ctx context.Context) error {
	if !r.cfg.Spill {
		return nil
	}
	begun := time.Now()
	for c := range r.consumers {
		for {
			_, err := os.Stat(filepath.Join(r.disk(c, "spill"), "spill.db"))
			if err == nil {
				break
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if time.Since(begun) > stuckAfter {
				return fmt.Errorf("consumer %d has made no spill: %w", c, err)
			}
			wait(ctx, 10*time.Millisecond)
		}
	}
	return nil
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// awaitEffects waits for n more effects, or, during a lasting fault, for the middle of that
// fault.
func (r *run) awaitEffects(ctx context.Context, n int, middle <-chan time.Time) error {
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	from := r.made()
	last, at := from, time.Now()
	for {
		made := r.made()
		if made != last {
			last, at = made, time.Now()
		}
		if made-from >= n && middle == nil {
			return nil
		}
		if time.Since(at) > stuckAfter {
			return errStuck
		}
		select {
		case <-middle:
			return nil
		case <-look.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// drain waits until all messages have their effects and the broker has none left. Then it
// stops the consumers and checks again: some brokers do not count a consumer's messages. If
// any are left, it starts the consumers again, and waits until cfg.Drain is over.
func (r *run) drain(ctx context.Context) error {
	over := time.Now().Add(r.cfg.Drain)
	var left int
	var err error
	for time.Now().Before(over) {
		left, err = r.broker.left(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil || left > 0 || r.backlog() > 0 { // after a restart of the broker, connections may still be broken
			wait(ctx, 50*time.Millisecond)
			continue
		}
		at := r.now()
		for c := range r.consumers {
			if err := r.end(c); err != nil {
				return err
			}
		}
		if left, err = r.broker.left(ctx); err != nil {
			return err
		}
		for c := range r.consumers {
			if left == 0 && r.cfg.Spill {
				if left, err = leftInSpill(r.disk(c, "spill")); err != nil {
					return err
				}
			}
		}
		if left == 0 {
			r.drained = &at
			return nil
		}
		for c := range r.consumers { // the consumers had messages that the broker did not count
			if err := r.start(c); err != nil {
				return err
			}
		}
	}
	return err
}

// leftInSpill returns the number of messages in the spill.
func leftInSpill(dir string) (left int, err error) {
	g, err := guard.New(guard.Config{SpillDir: dir})
	if err != nil {
		return 0, err
	}
	for _, n := range g.Spilled() {
		left += n
	}
	_, err = g.Close(context.Background())
	return left, err
}

// end closes a consumer's stdin, and waits until it has ended. After a minute it kills the
// consumer, and returns an error.
func (r *run) end(consumer int) error {
	p := r.consumers[consumer]
	r.consumers[consumer] = nil
	lossErr := r.losses.ends(p.cmd.Process.Pid)
	_ = p.stdin.Close()
	timer := time.AfterFunc(time.Minute, func() { _ = p.cmd.Process.Kill() })
	defer timer.Stop()
	if err := p.cmd.Wait(); err != nil {
		return fmt.Errorf("the consumer ended with: %w", errors.Join(err, lossErr))
	}
	return lossErr
}

func (r *run) deadLetters(ctx context.Context) (ids []int, err error) {
	all, err := patiently(ctx, func() ([][]byte, error) { return r.broker.letters(ctx) })
	if err != nil {
		return nil, fmt.Errorf("read the DLQ: %w", err)
	}
	for _, b := range all {
		m, err := read(b)
		if err != nil {
			return nil, err
		}
		ids = append(ids, m.ID)
	}
	return ids, nil
}
