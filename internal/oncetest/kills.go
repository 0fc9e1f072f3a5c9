// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package oncetest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Kills is a loop that kills a process in the middle of an effect. The process handles
// messages 0, 1, 2 and so on, one after the other. At each point of a message it waits for
// the parent. The parent lets it continue, or kills it there or shortly after. The next
// process begins two messages before the first unacked one.
type Kills struct {
	// Kills is the number of kills between the begin of an effect and its mark; 0 means 30,
	// or 1,000 with STORMGUARD_FULL=1.
	Kills int
	// Mode and Args are passed to the child.
	Mode string
	Args []string
	// Effects returns how often each effect happened; nil reads the ledger file.
	Effects func(t *testing.T) map[string]int
	// Exact means that no effect may happen twice. Otherwise an effect may happen once more
	// for each kill between the effect and its mark.
	Exact bool
}

// ModeBare is the mode of the mutant: the child runs effects without a store.
const ModeBare = "bare"

// A Child is the process that Kills starts.
type Child struct {
	Mode   string   `json:"mode"`
	Args   []string `json:"args"`
	Ledger string   `json:"ledger"` // the file of effects
	From   int      `json:"from"`   // the first message
	To     int      `json:"to"`     // the message after the last; 0 for no end
}

// ChildEffects is the store with which a child handles messages.
type ChildEffects struct {
	Effects
	// Record makes an effect happen; nil writes a line to the ledger.
	Record func(ctx context.Context, key string) error
}

// childEnv is the environment variable with a child's orders.
const childEnv = "STORMGUARD_ONCE_CHILD"

// Main must be the first call of a TestMain. In a child it does not return.
func Main(open func(c Child) (ChildEffects, error)) {
	orders := os.Getenv(childEnv)
	if orders == "" {
		return
	}
	var c Child
	err := json.Unmarshal([]byte(orders), &c)
	if err == nil {
		err = c.run(open, bufio.NewReader(os.Stdin), os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		os.Exit(3) //nolint:revive // the process is a child and has nothing else to do
	}
	os.Exit(0) //nolint:revive // as above
}

func (c Child) run(open func(Child) (ChildEffects, error), in *bufio.Reader, out io.Writer) error {
	e := ChildEffects{Effects: bare{}}
	if c.Mode != ModeBare {
		var err error
		if e, err = open(c); err != nil {
			return err
		}
	}
	if e.Record == nil {
		e.Record = func(_ context.Context, key string) error { return c.record(key) }
	}
	point := func(name string, i int) error {
		if _, err := fmt.Fprintln(out, name, i); err != nil {
			return err
		}
		_, err := in.ReadString('\n')
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for i := c.From; c.To == 0 || i < c.To; i++ {
		key := strconv.Itoa(i)
		err := e.Do(ctx, key, func(ctx context.Context) error {
			if err := point(pointBegun, i); err != nil {
				return err
			}
			if err := e.Record(ctx, key); err != nil {
				return err
			}
			return point(pointHappened, i)
		})
		if err != nil {
			return err
		}
		if err := point(pointMarked, i); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(out, pointAcked, i); err != nil {
			return err
		}
	}
	return nil
}

const (
	pointBegun    = "begun"
	pointHappened = "happened"
	pointMarked   = "marked"
	pointAcked    = "acked" // the child does not wait at this point
)

type bare struct{}

func (bare) Do(ctx context.Context, _ string, effect func(context.Context) error) error {
	return effect(ctx)
}

// record writes a line to the end of the ledger, in one write that a kill cannot undo.
func (c Child) record(key string) error {
	f, err := os.OpenFile(c.Ledger, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(key + "\n")
	return errors.Join(err, f.Close())
}

// Happened reads the ledger. It is the dependency that a lookup asks.
func (c Child) Happened(_ context.Context, key string) (bool, error) {
	effects, err := readLedger(c.Ledger)
	return effects[key] > 0, err
}

func readLedger(path string) (map[string]int, error) {
	b, err := os.ReadFile(path) //nolint:gosec // the parent's file
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	effects := make(map[string]int)
	for line := range bytes.Lines(b) {
		effects[strings.TrimSuffix(string(line), "\n")]++
	}
	return effects, nil
}

// Audit is the result of Run.
type Audit struct {
	Killed   map[string]int // number of killed processes, by the last point that they reached
	Messages int
	Lost     []string // effects that never happened
	Twice    []string // effects that happened more often than allowed
	Repeated int      // number of repeated effects, allowed or not
}

// Run kills processes, and then lets one process handle the remaining messages.
func (k Kills) Run(t *testing.T) Audit {
	t.Helper()
	kills := k.Kills
	if kills == 0 {
		kills = 30
		if os.Getenv("STORMGUARD_FULL") == "1" {
			kills = 1000
		} else {
			t.Log("STORMGUARD_FULL=1 kills 1,000 times")
		}
	}
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	l := &loop{
		t: t, rng: rng, ledger: filepath.Join(t.TempDir(), "ledger"), k: k,
		allowed: make(map[string]int), killed: make(map[string]int),
	}
	for l.middle() < kills {
		l.process(0)
	}
	end := l.next + 3
	l.process(end)
	return l.audit(end)
}

// loop is a run of Kills.
type loop struct {
	t       *testing.T
	rng     *rand.Rand
	k       Kills
	ledger  string
	next    int            // the first message that was not acked
	allowed map[string]int // how often each effect may be repeated
	killed  map[string]int
}

// middle returns the number of processes that were killed between the begin of an effect
// and its mark.
func (l *loop) middle() int {
	return l.killed[pointBegun] + l.killed[pointHappened] + l.killed[pointBegun+andOn] + l.killed[pointHappened+andOn]
}

// andOn marks a point that the process had left.
const andOn = " and on"

// process runs one child. If end is 0 it runs until a kill. Otherwise it handles the messages
// before end, and ends by itself.
func (l *loop) process(end int) {
	t := l.t
	t.Helper()
	orders, err := json.Marshal(Child{Mode: l.k.Mode, Args: l.k.Args, Ledger: l.ledger, From: max(0, l.next-2), To: end})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0]) //nolint:gosec // this test again
	cmd.Env = append(os.Environ(), childEnv+"="+string(orders))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	killed := l.talk(out, in, end == 0, cmd.Process.Kill)
	err = cmd.Wait()
	if (killed == "") != (end > 0) || end > 0 && err != nil {
		t.Fatalf("the process ended by itself, or not at all: %v\n%s", err, stderr.String())
	}
	if end == 0 {
		l.killed[killed]++
	}
}

// talk reads a child's output until it is killed, and returns the point at which that
// happened; "" if the child ended by itself.
func (l *loop) talk(out io.Reader, in io.Writer, mayKill bool, kill func() error) (where string) {
	lines := bufio.NewScanner(out)
	left := 1 + l.rng.IntN(12) // points that the child passes before the kill
	risk := ""                 // an effect that may have happened, without a known mark
	doomed := false
	for lines.Scan() {
		name, key, ok := strings.Cut(lines.Text(), " ")
		i, err := strconv.Atoi(key)
		if !ok || err != nil {
			continue // a line of the test binary
		}
		if name == pointAcked {
			l.next = max(l.next, i+1)
			continue
		}
		if where = name; name == pointMarked {
			risk = "" // the mark is on the disk: the effect must not be repeated
		}
		if left--; mayKill && left <= 0 && !doomed {
			doomed = true
			if l.rng.IntN(2) == 0 {
				_ = kill()
				continue
			}
			// The child continues, and is killed within 3 ms, at a random moment.
			time.AfterFunc(time.Duration(l.rng.IntN(3000))*time.Microsecond, func() { _ = kill() })
		}
		if _, err := io.WriteString(in, "\n"); err != nil {
			continue // the child is gone
		}
		if where += andOn; name == pointBegun {
			risk = key
		}
	}
	if risk != "" {
		l.allowed[risk]++
	}
	if !mayKill {
		return ""
	}
	return where
}

func (l *loop) audit(end int) Audit {
	a := Audit{Killed: l.killed, Messages: end}
	effects, err := readLedger(l.ledger)
	if err != nil {
		l.t.Fatal(err)
	}
	if l.k.Effects != nil {
		effects = l.k.Effects(l.t)
	}
	for i := range end {
		key := strconv.Itoa(i)
		n, most := effects[key], 1
		if !l.k.Exact {
			most += l.allowed[key]
		}
		if n == 0 {
			a.Lost = append(a.Lost, key)
		}
		if n > most {
			a.Twice = append(a.Twice, fmt.Sprintf("%s: %d times, %d allowed", key, n, most))
		}
		a.Repeated += max(0, n-1)
		delete(effects, key)
	}
	if len(effects) > 0 {
		l.t.Errorf("effects of messages that were not sent: %v", effects)
	}
	return a
}

// Holds fails the test unless the audit is clean.
func (k Kills) Holds(t *testing.T) {
	t.Helper()
	a := k.Run(t)
	t.Logf("%d messages, killed at %v, %d effects repeated", a.Messages, a.Killed, a.Repeated)
	if len(a.Lost) > 0 || len(a.Twice) > 0 {
		t.Errorf("lost: %v; too often: %v", a.Lost, a.Twice)
	}
	if k.Exact && a.Repeated > 0 {
		t.Errorf("%d effects happened again", a.Repeated)
	}
	if a.Killed[pointHappened]+a.Killed[pointHappened+andOn] == 0 || a.Killed[pointBegun]+a.Killed[pointBegun+andOn] == 0 {
		t.Errorf("killed at %v: want kills before and after the effect", a.Killed)
	}
}

// CatchesMutant fails the test unless the audit sees effects that run without a store.
func (k Kills) CatchesMutant(t *testing.T) {
	t.Helper()
	k.Mode, k.Kills = ModeBare, 10
	if a := k.Run(t); len(a.Twice) == 0 {
		t.Errorf("effects without a store pass: %+v", a)
	}
}
