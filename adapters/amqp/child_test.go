// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package amqp

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

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
)

// The test binary runs itself as a consumer process, which the parent kills.
const (
	childURL    = "STORMGUARD_TEST_CHILD_URL"
	childQueue  = "STORMGUARD_TEST_CHILD_QUEUE"
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
	ledger, err := os.OpenFile(os.Getenv(childLedger), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		die(err)
	}
	g, err := guard.New(guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
	if err != nil {
		die(err)
	}
	mutant := os.Getenv(childMutant) != ""
	handle := func(_ context.Context, d amqp091.Delivery) error {
		if _, err := os.Stat(os.Getenv(childOutage)); err == nil {
			return errDown
		}
		_, err := fmt.Fprintf(ledger, "%s\n", d.Body)
		time.Sleep(time.Millisecond) // a kill here makes a duplicate
		return err
	}
	if mutant {
		die(ackFirst(url, handle))
	}
	die(Consume(context.Background(), g, Dial(url), os.Getenv(childQueue), handle, WithPrefetch(50)))
	return true
}

// ackFirst is a consumer that does it wrong.
func ackFirst(url string, handle func(context.Context, amqp091.Delivery) error) error {
	conn, err := amqp091.Dial(url)
	if err != nil {
		return err
	}
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	in, err := ch.Consume(os.Getenv(childQueue), "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for d := range in {
		if err := d.Ack(false); err != nil {
			return err
		}
		_ = handle(context.Background(), d)
	}
	return io.EOF
}

// killing runs and kills consumer processes, and returns what the ledger says
// of n messages.
func killing(t *testing.T, s *server, kills, n int, mutant bool) (lost, twice int) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts and kills processes; run without -short")
	}
	r := newRig(t, s, Quorum, amqp091.Table{"x-delivery-limit": int64(10 * kills)})
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
		cmd.Env = append(os.Environ(), childURL+"="+r.url(), childQueue+"="+r.queue, childLedger+"="+ledger, childOutage+"="+outage)
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
		r.publish(published, next)
		published = next
		kill := start()
		eventually(t, "the process took messages", func() bool { k, err := r.ready(); return err == nil && k < published })
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
	eventually(t, "all settled", func() bool {
		if k, err := r.ready(); err != nil || k > 0 {
			return false
		}
		return handled(t, ledger) >= n || mutant
	})
	time.Sleep(100 * time.Millisecond) // the last acks
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

// handled counts the different lines of a file.
func handled(t *testing.T, name string) int {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	seen := map[string]bool{}
	for s := bufio.NewScanner(f); s.Scan(); {
		seen[s.Text()] = true
	}
	return len(seen)
}

// The message in flight comes twice, and those whose acks were coalesced (64 at
// most) or in the broker's pipeline.
const perKill = 1 + 64 + 32

func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		kills := 5
		if full() {
			kills = 50
		}
		lost, twice := killing(t, s, kills, 100*kills, false)
		t.Logf("%d kills, %d messages: %d lost, %d handled twice", kills, 100*kills, lost, twice)
		if lost != 0 || twice > kills*perKill {
			t.Errorf("want 0 lost and at most %d twice", kills*perKill)
		}
	})
}

// The oracle above notices a consumer that acks before it handles.
func TestKilledProcessThatAcksFirstIsCaught(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		lost, twice := killing(t, s, 3, 300, true)
		t.Logf("the mutant lost %d, handled %d twice", lost, twice)
		if lost == 0 {
			t.Error("a consumer that acks first lost nothing: the test above proves nothing")
		}
	})
}
