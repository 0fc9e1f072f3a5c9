// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

// The test binary runs itself as a consumer process, which the parent kills.
const (
	childAddrs  = "STORMGUARD_TEST_CHILD_ADDRS"
	childTopic  = "STORMGUARD_TEST_CHILD_TOPIC"
	childGroup  = "STORMGUARD_TEST_CHILD_GROUP"
	childLedger = "STORMGUARD_TEST_CHILD_LEDGER"
	childOutage = "STORMGUARD_TEST_CHILD_OUTAGE" // a file: while it is there the dependency is down
	childMutant = "STORMGUARD_TEST_CHILD_MARK_FIRST"
)

// runChild is the consumer process; false in the parent.
func runChild() bool {
	addrs := os.Getenv(childAddrs)
	if addrs == "" {
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
	cfg := testConfig()
	cfg.Consumer.Group.InstanceId = "child" // the next one takes over at once
	group, err := sarama.NewConsumerGroup(strings.Split(addrs, ","), os.Getenv(childGroup), cfg)
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
	h := Wrap(g, func(_ context.Context, m *sarama.ConsumerMessage) error {
		if _, err := os.Stat(os.Getenv(childOutage)); err == nil {
			return errDown
		}
		_, err := fmt.Fprintf(ledger, "%d %d %s\n", m.Partition, m.Offset, m.Value)
		time.Sleep(time.Millisecond) // a kill here makes a duplicate
		return err
	})
	if os.Getenv(childMutant) != "" {
		h = markFirst{h}
	}
	for {
		if err := group.Consume(context.Background(), []string{os.Getenv(childTopic)}, h); err != nil {
			fmt.Fprintln(os.Stderr, "child: consume:", err)
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// markFirst marks a claim up to the log's end before it is handled.
type markFirst struct{ sarama.ConsumerGroupHandler }

func (h markFirst) ConsumeClaim(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
	s.MarkOffset(c.Topic(), c.Partition(), c.HighWaterMarkOffset(), "")
	s.Commit()
	return h.ConsumerGroupHandler.ConsumeClaim(s, c)
}

// books is what a ledger says of messages that were handled.
type books struct {
	lost, twice, disorder int
}

// audit reads the ledger of a topic of n messages, which all partitions share
// evenly. Order means that a message was first handled when all those before it
// in its partition had been.
func audit(t *testing.T, path string, n int) (b books) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	seen := map[string]int{}
	next := map[int]int64{}
	for s := bufio.NewScanner(f); s.Scan(); {
		var part int
		var offset int64
		var body string
		if _, err := fmt.Sscan(s.Text(), &part, &offset, &body); err != nil {
			t.Fatalf("%q: %v", s.Text(), err)
		}
		if seen[body]++; seen[body] > 1 {
			b.twice++
			continue
		}
		if offset != next[part] {
			b.disorder++
		}
		next[part] = max(next[part], offset+1)
	}
	b.lost = n - len(seen)
	return b
}

// perProcess is how many messages one process handles in a test of kills.
const perProcess = 400

// killing runs and kills consumer processes, and returns what the ledger says.
func killing(t *testing.T, kills int, mutant bool) books {
	t.Helper()
	if testing.Short() {
		t.Skip("starts and kills processes; run without -short")
	}
	r := newRig(t, 2)
	n := kills * perProcess
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
		cmd.Env = append(os.Environ(), childAddrs+"="+strings.Join(r.addrs, ","), childTopic+"="+r.topic, childGroup+"="+r.group,
			childLedger+"="+ledger, childOutage+"="+outage)
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
	written := func() int64 {
		st, err := os.Stat(ledger)
		if err != nil {
			t.Fatal(err)
		}
		return st.Size()
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	even := func(i int) int32 { return int32(i % 2) }
	published := 0
	for i := range kills {
		next := n * (i + 1) / kills
		r.publish(published, next, even, nil)
		published = next
		before := written()
		kill := start()
		if i%3 == 2 { // in the middle of an outage
			time.Sleep(time.Duration(300+rng.IntN(500)) * time.Millisecond)
		} else {
			_ = os.Remove(outage)
			eventually(t, "the process handles messages", func() bool { return written() > before })
			time.Sleep(time.Duration(20+rng.IntN(250)) * time.Millisecond)
		}
		kill()
		if err := os.WriteFile(outage, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_ = os.Remove(outage)
	kill := start()
	eventually(t, "all settled", func() bool { return r.pending() == 0 })
	kill()
	return audit(t, ledger, n)
}

// perKill is what may be handled twice after a kill: what was handled since the
// last commit of the two partitions, a millisecond each at least, for a commit's
// interval and as much again for the commit itself, and the marks not flushed.
const perKill = 2 * (2*100 + 64)

func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	kills := 10
	if full() {
		kills = 100
	}
	b := killing(t, kills, false)
	t.Logf("%d kills, %d messages: %d lost, %d handled twice, %d out of order", kills, kills*perProcess, b.lost, b.twice, b.disorder)
	if b.lost != 0 || b.disorder != 0 || b.twice > kills*perKill {
		t.Errorf("want 0 lost, 0 out of order and at most %d twice", kills*perKill)
	}
}

// The oracle above notices a consumer that marks before it handles.
func TestKilledProcessThatMarksFirstIsCaught(t *testing.T) {
	t.Parallel()
	b := killing(t, 3, true)
	t.Logf("the mutant lost %d, handled %d twice", b.lost, b.twice)
	if b.lost == 0 {
		t.Error("a consumer that marks first lost nothing: the test above proves nothing")
	}
}
