// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/chaos"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// kills is how often a test's consumer is killed: n, or 200 in the long form.
func kills(n int) int {
	if os.Getenv("STORMGUARD_FULL") != "" {
		return 200
	}
	return n
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "chaosrun")
	if err != nil {
		panic(err)
	}
	exeDir = dir
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// exeDir has the program that all runs share, see build.
var exeDir string

var buildOnce = sync.OnceValues(func() (string, error) {
	exe := filepath.Join(exeDir, "stormguard")
	if out, err := exec.Command("go", "build", "-ldflags=-w", "-o", exe, "../..").CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return exe, nil
})

// build is the command's program.
func build(t *testing.T) string {
	t.Helper()
	exe, err := buildOnce()
	if err != nil {
		t.Fatal(err)
	}
	return exe
}

func crash(t *testing.T, cfg Config) chaos.Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	h, err := Run(ctx, cfg, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	return chaos.Judge(h)
}

// A guarded consumer that is killed loses nothing, on each broker.
func TestCrash(t *testing.T) {
	t.Parallel()
	exe := build(t)
	for i, name := range append(Brokers(), Brokers()...) {
		spill := i >= len(Brokers())
		t.Run(fmt.Sprintf("%s/spill=%v", name, spill), func(t *testing.T) {
			t.Parallel()
			if spill && name == "kafka" && os.Getenv("STORMGUARD_FULL") == "" {
				t.Skip("the disk under one more broker: STORMGUARD_FULL=1, or scripts/test --full")
			}
			cfg := Config{Broker: name, Schedule: chaos.Crash(1, 1, kills(10), 60), Messages: 500, Drain: 5 * time.Minute, Spill: spill, Exe: exe}
			if found := kinds[name].found; found != "" {
				cfg.URL = brokers.ForTest(t, found)
			}
			r := crash(t, cfg)
			t.Logf("%d published, %d kills, %d duplicate deliveries, drained after %.1f s", r.Published, r.Kills, r.DuplicateDeliveries, r.DrainSeconds)
			if !r.OK() {
				t.Error(r.Text())
			}
		})
	}
}

// broken loses what its broker answers to each third batch, as a machine that stood still does.
type broken struct {
	broker
	batches int
}

func (b *broken) publish(ctx context.Context, ms []message) error {
	err := b.broker.publish(ctx, ms)
	if b.batches++; b.batches%3 == 0 {
		err = errors.Join(err, errors.New("no answer"))
	}
	return err
}

// A batch that a broker may not have is published again.
func TestPublishesAgain(t *testing.T) {
	t.Parallel()
	cfg := Config{Broker: "nats", Schedule: chaos.Crash(1, 1, 1, 60), Messages: 500, Drain: time.Minute, Exe: build(t)}
	r, err := newRun(t.Context(), cfg, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	b := &broken{broker: r.broker}
	r.broker = b
	over := make(chan struct{})
	close(over)
	if err := r.publish(t.Context(), over); err != nil {
		t.Fatal(err)
	}
	if err := r.drain(t.Context()); err != nil || r.drained == nil {
		t.Errorf("drained at %v: %v", r.drained, err)
	}
	if len(r.messages) != cfg.Messages || b.batches <= cfg.Messages/batch {
		t.Errorf("%d messages are known after %d batches", len(r.messages), b.batches)
	}
}

// A rolling restart of three consumers loses nothing, and no effect happens twice, on each
// broker.
func TestRolling(t *testing.T) {
	t.Parallel()
	exe := build(t)
	rounds := 1
	if os.Getenv("STORMGUARD_FULL") != "" {
		rounds = 3
	}
	for _, name := range Brokers() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := Config{Broker: name, Schedule: chaos.Rolling(1, 3, rounds, 60), Messages: 500, Drain: 5 * time.Minute, Exe: exe}
			if found := kinds[name].found; found != "" {
				cfg.URL = brokers.ForTest(t, found)
			}
			r := crash(t, cfg)
			t.Logf("%d published, %d restarts, %d duplicate deliveries, drained after %.1f s", r.Published, r.Restarts, r.DuplicateDeliveries, r.DrainSeconds)
			if !r.OK() || r.Restarts != 3*rounds {
				t.Error(r.Text())
			}
		})
	}
}

// Faults of the network, with kills between, lose nothing, on each broker.
func TestNetwork(t *testing.T) {
	t.Parallel()
	needNamespaces(t)
	exe := build(t)
	faults := 8
	if os.Getenv("STORMGUARD_FULL") != "" {
		faults = 100
	}
	for _, name := range Brokers() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := Config{Broker: name, Schedule: chaos.Network(1, 2, faults, 60), Messages: 500, Drain: 5 * time.Minute, Exe: exe}
			if found := kinds[name].found; found != "" {
				cfg.URL = brokers.ForTest(t, found)
			}
			r := crash(t, cfg)
			t.Logf("%d published, %d kills, %d duplicate deliveries, drained after %.1f s", r.Published, r.Kills, r.DuplicateDeliveries, r.DrainSeconds)
			if !r.OK() {
				t.Error(r.Text())
			}
		})
	}
}

// A broker that is killed and frozen loses nothing, on each broker.
func TestBroker(t *testing.T) {
	t.Parallel()
	exe := build(t)
	faults := 2
	if os.Getenv("STORMGUARD_FULL") != "" {
		faults = 10
	}
	for _, name := range Brokers() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name != "nats" && os.Getenv("STORMGUARD_FULL") == "" {
				t.Skip("a broker of one's own to kill: STORMGUARD_FULL=1, or scripts/test --full")
			}
			r := crash(t, Config{Broker: name, Schedule: chaos.Broker(1, 2, faults, 60), Messages: 500, Rate: 100, Drain: 5 * time.Minute, Exe: exe})
			t.Logf("%d published, %d kills of consumers, %d duplicate deliveries, drained after %.1f s", r.Published, r.Kills, r.DuplicateDeliveries, r.DrainSeconds)
			if !r.OK() {
				t.Error(r.Text())
			}
		})
	}
	t.Run("a broker of somebody's", func(t *testing.T) {
		_, err := Run(t.Context(), Config{Broker: "nats", URL: "nats://127.0.0.1:1", Schedule: chaos.Broker(1, 1, 1, 1), Exe: exe}, t.Output())
		if err == nil || !strings.Contains(err.Error(), "url: a broker that is to be killed is the run's own") {
			t.Errorf("%v", err)
		}
	})
}

// A disk that is full, in outages and while a process begins, loses nothing, on each broker.
func TestDisk(t *testing.T) {
	t.Parallel()
	needDisk(t)
	exe := build(t)
	faults := 5
	if os.Getenv("STORMGUARD_FULL") != "" {
		faults = 30
	}
	for _, name := range Brokers() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := Config{Broker: name, Schedule: chaos.Disk(1, 1, faults, 60), Messages: 500, Drain: 5 * time.Minute, Spill: true, Exe: exe}
			if found := kinds[name].found; found != "" {
				cfg.URL = brokers.ForTest(t, found)
			}
			r := crash(t, cfg)
			t.Logf("%d published, %d kills, %d duplicate deliveries, drained after %.1f s", r.Published, r.Kills, r.DuplicateDeliveries, r.DrainSeconds)
			if !r.OK() {
				t.Error(r.Text())
			}
		})
	}
}

// needDisk skips where this machine cannot mount a disk to fill; CI's must. One that is full
// takes nothing, and takes something when it is free again.
func needDisk(t *testing.T) {
	t.Helper()
	d, err := newDisk(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		text := fmt.Sprintf("LEFT OUT: no full disk: %v", err)
		if os.Getenv("CI") == "true" {
			t.Fatal(text)
		}
		t.Skip(text)
	}
	defer func() {
		if err := d.close(); err != nil {
			t.Error(err)
		}
	}()
	write := func() error { return os.WriteFile(filepath.Join(d.at, "more"), []byte("more"), 0o600) }
	for range 2 {
		if kib, err := d.fill(); err != nil || kib < 60<<10 {
			t.Errorf("%d KiB were taken: %v", kib, err)
		}
		if err := write(); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("a write to a full disk: %v", err)
		}
		if err := d.free(); err != nil {
			t.Error(err)
		}
		if err := write(); err != nil {
			t.Error(err)
		}
		if err := os.Remove(filepath.Join(d.at, "more")); err != nil {
			t.Error(err)
		}
	}
}

// Three stages pass their gates, or nearly: how long a message waits is judged where the
// machine has nothing else to do, by scripts/test. A build that is worse misses its gate
// on any machine.
func TestStages(t *testing.T) {
	t.Parallel()
	needNamespaces(t)
	exe := build(t)
	for mutant, misses := range map[Mutant][]string{
		"":    nil,
		Slow:  {"p99_ms of the loss", "p99_ms of the burn"},
		Flaky: {"error_percent of the loss", "error_percent of the down", "error_percent of the burn"},
		Idle:  {"longest_ms of the down"},
	} {
		t.Run("mutant="+string(mutant), func(t *testing.T) {
			t.Parallel()
			// The gates decide for the mutants; a machine that is busy waits as it must.
			s := chaos.Stages(1, 2, 20, 4*time.Second, 26*time.Second, 2*time.Second)
			if mutant == "" {
				s.Gates.P99, s.Gates.Longest = 60_000, 60_000
			}
			r := crash(t, Config{Broker: "nats", Schedule: s, Messages: 1, Rate: 30, Drain: 5 * time.Minute, Exe: exe, Mutant: mutant})
			if len(r.Windows) != 3 || !r.Fired || r.Lost > 0 || r.DuplicateEffects > 0 {
				t.Error(r.Text())
			}
			for _, m := range misses {
				if !slices.ContainsFunc(r.Missed, func(is string) bool { return strings.HasPrefix(is, m) }) {
					t.Errorf("%s is not missed:\n%s", m, r.Text())
				}
			}
			if r.OK() != (mutant == "") {
				t.Error(r.Text())
			}
		})
	}
}

// needNamespaces skips where this machine has no namespaces; CI's must.
func needNamespaces(t *testing.T) {
	t.Helper()
	if err := tryNamespaces(); err != nil {
		text := fmt.Sprintf("LEFT OUT: no faults of the network: %v", err)
		if os.Getenv("CI") == "true" {
			t.Fatal(text)
		}
		t.Skip(text)
	}
}

// What is not on the loopback has no faults of the network, and an address that is none is an
// error.
func TestLoopback(t *testing.T) {
	for _, tt := range []struct{ broker, address, want string }{
		{"kafka", "127.0.0.1:9092,localhost:9093", "127.0.0.1:9092,localhost:9093"},
		{"nats", "nats://127.0.0.1:4222", "127.0.0.1:4222"},
		{"rabbitmq", "amqp://guest:guest@[::1]:5672/", "[::1]:5672"},
		{"kafka", "10.1.1.1:9092", `host "10.1.1.1" is not on the loopback`},
		{"nats", "nats://example.org:4222", `host "example.org" is not on the loopback`},
		{"kafka", "localhost", "localhost:9092"},
		{"nats", "127.0.0.1:4222", "127.0.0.1:4222"},
		{"rabbitmq", "amqp://guest:secret@127.0.0.1:x", "chaos: url: of rabbitmq: not an address"},
	} {
		got, err := loopback(tt.broker, tt.address)
		if text := strings.Join(got, ","); text != tt.want && (err == nil || !strings.Contains(err.Error(), tt.want)) || err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %q, %v, want %q", tt.address, text, err, tt.want)
		}
	}
}

// Each mutant is found, by the oracle that is for it.
func TestMutants(t *testing.T) {
	t.Parallel()
	exe := build(t)
	for mutant, found := range map[Mutant]func(chaos.Report) bool{
		AckFirst:     func(r chaos.Report) bool { return r.Lost > 0 },
		Swallow:      func(r chaos.Report) bool { return r.Lost > 0 },
		EarlyLetter:  func(r chaos.Report) bool { return r.Lost > 0 },
		DropPoison:   func(r chaos.Report) bool { return r.Lost > 0 },
		LoseSpill:    func(r chaos.Report) bool { return r.Lost > 0 },
		NoOnce:       func(r chaos.Report) bool { return r.DuplicateEffects > 0 },
		LostSync:     func(r chaos.Report) bool { return r.DuplicateEffects > 0 },
		OwnMarks:     func(r chaos.Report) bool { return r.DuplicateEffects > 0 },
		BuryAll:      func(r chaos.Report) bool { return r.HealthyDeadLetters > 0 },
		ChargePoison: func(r chaos.Report) bool { return r.PoisonEffects > 0 },
		Unordered:    func(r chaos.Report) bool { return r.OutOfOrder > 0 },
		StopsShort:   func(r chaos.Report) bool { return !r.Drained && r.Lost > 0 },
	} {
		t.Run(string(mutant), func(t *testing.T) {
			t.Parallel()
			cfg := Config{Broker: "nats", Schedule: chaos.Crash(1, 1, 8, 60), Messages: 500, Drain: 5 * time.Second, Mutant: mutant, Exe: exe}
			switch mutant {
			case OwnMarks:
				cfg.Schedule = chaos.Crash(1, 3, 20, 60)
			case LoseSpill: // what is in flight is on the disk when the kill comes
				cfg.Spill, cfg.Schedule = true, chaos.Schedule{}
				for range 3 {
					cfg.Schedule.Faults = append(cfg.Schedule.Faults, chaos.Fault{Kind: chaos.Outage, After: 30, For: 3000}, chaos.Fault{Kind: chaos.Kill})
				}
			default:
			}
			if mutant == Unordered { // what a killed process had is judged, too
				cfg.Broker, cfg.URL = "kafka", brokers.ForTest(t, brokers.Kafka)
			}
			r := crash(t, cfg)
			if !found(r) || r.OK() {
				t.Errorf("not found:\n%s", r.Text())
			}
		})
	}
}

// A broker that nobody knows, and a job that is none, are errors that say so.
func TestBadJob(t *testing.T) {
	for _, job := range []string{"{", `{"broker":"typo"}`} {
		if err := Work(t.Context(), job, os.Stdin, t.Output()); err == nil {
			t.Errorf("%s: no error", job)
		}
	}
}
