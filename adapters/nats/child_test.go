// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package nats

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

// The test binary runs itself as a consumer process, which the parent kills.
const (
	childURL    = "STORMGUARD_TEST_CHILD_URL"
	childLedger = "STORMGUARD_TEST_CHILD_LEDGER"
	childOutage = "STORMGUARD_TEST_CHILD_OUTAGE" // a file: while it is there the dependency is down
	childMutant = "STORMGUARD_TEST_CHILD_ACK_FIRST"
)

// runChild is the consumer process; false in the parent.
func runChild() bool {
	url := os.Getenv(childURL)
	if url == "" {
		return false
	}
	die := func(err error) {
		fmt.Fprintln(os.Stderr, "child:", err)
		os.Exit(3)
	}
	go func() { // the parent is gone
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(4)
	}()
	nc, err := nats.Connect(url, nats.MaxReconnects(-1))
	if err != nil {
		die(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		die(err)
	}
	c, err := js.Consumer(context.Background(), "S", "C")
	if err != nil {
		die(err)
	}
	ledger, err := os.OpenFile(os.Getenv(childLedger), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		die(err)
	}
	g, err := guard.New(guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
	if err != nil {
		die(err)
	}
	err = Consume(context.Background(), g, c, func(_ context.Context, m jetstream.Msg) error {
		if os.Getenv(childMutant) != "" {
			_ = m.Ack()
		}
		if _, err := os.Stat(os.Getenv(childOutage)); err == nil {
			return errDown
		}
		_, err := fmt.Fprintf(ledger, "%s\n", m.Data())
		time.Sleep(time.Millisecond) // a kill here makes a duplicate
		return err
	})
	die(err)
	return true
}

// killing runs and kills consumer processes, and returns what the ledger says
// of n messages.
func killing(t *testing.T, kills, n int, mutant bool) (lost, twice int) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts and kills processes; run without -short")
	}
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 600 * time.Millisecond})
	dir := t.TempDir()
	ledger, outage := filepath.Join(dir, "ledger"), filepath.Join(dir, "outage")
	for _, f := range []string{ledger, outage} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	start := func() (kill func()) {
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), childURL+"="+r.url(), childLedger+"="+ledger, childOutage+"="+outage)
		if mutant {
			cmd.Env = append(cmd.Env, childMutant+"=1")
		}
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			_ = in.Close()
		}
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	published := 0
	for i := range kills {
		next := n * (i + 1) / kills
		r.publish(t, subject, published, next)
		published = next
		before := r.info(t).Delivered.Consumer
		kill := start()
		eventually(t, "the process took messages", func() bool { return r.info(t).Delivered.Consumer > before })
		if i%3 == 2 { // in the middle of the recovery
			_ = os.Remove(outage)
		}
		time.Sleep(time.Duration(20+rng.IntN(250)) * time.Millisecond)
		kill()
		if err := os.WriteFile(outage, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_ = os.Remove(outage)
	kill := start()
	eventually(t, "all settled", func() bool { return r.info(t).AckFloor.Stream == uint64(n) })
	kill()
	f, err := os.Open(ledger)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	seen := map[string]int{}
	for s := bufio.NewScanner(f); s.Scan(); {
		seen[s.Text()]++
	}
	for _, k := range seen {
		twice += k - 1
	}
	return n - len(seen), twice
}

// A message in flight comes twice, and one whose ack was in the client's write
// buffer of 32 KiB.
const perKill = 1 + 32<<10/60

func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	kills := 10
	if full() {
		kills = 100
	}
	lost, twice := killing(t, kills, 100*kills, false)
	t.Logf("%d kills, %d messages: %d lost, %d handled twice", kills, 100*kills, lost, twice)
	if lost != 0 || twice > kills*perKill {
		t.Errorf("want 0 lost and at most %d twice", kills*perKill)
	}
}

// The oracle above notices a consumer that acks before it handles.
func TestKilledProcessThatAcksFirstIsCaught(t *testing.T) {
	t.Parallel()
	lost, twice := killing(t, 3, 300, true)
	t.Logf("the mutant lost %d, handled %d twice", lost, twice)
	if lost == 0 {
		t.Error("a consumer that acks first lost nothing: the test above proves nothing")
	}
}
