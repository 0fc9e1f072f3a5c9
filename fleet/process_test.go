// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/limiter"
)

// processConfig is that of a process on loopback whose founders are given.
func processConfig(name string, seeds []string, founders ...string) ProcessConfig {
	c := ProcessConfig{
		Fleet: "test", Name: name, Program: "v1",
		Limits: limiter.Config{Limit: limiter.Limit{Rate: 1000, Burst: 100}, Roster: limiter.Roster{Guests: true}},
		Gossip: gossip.NodeConfig{Config: gossip.Config{Zone: "z-" + name}, Bind: "127.0.0.1:0", Seeds: seeds},
	}
	for _, f := range founders {
		c.Limits.Roster.Members = append(c.Limits.Roster.Members, limiter.Member{Name: f})
	}
	return c
}

func startProcess(t *testing.T, c ProcessConfig) *Process {
	t.Helper()
	p, err := Start(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// three are the founders of a fleet, and where the first of them listens.
func three(t *testing.T) (all []*Process, seeds []string) {
	t.Helper()
	for _, name := range []string{"a", "b", "c"} {
		p := startProcess(t, processConfig(name, seeds, "a", "b", "c"))
		if all = append(all, p); seeds == nil {
			seeds = []string{p.Node().Addr().String()}
		}
	}
	return all, seeds
}

// eventually polls real processes, which no event of the test's can wake.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

func written(p *Process) string {
	var all []string
	for _, e := range p.Journal(nil) {
		all = append(all, fmt.Sprintf("%v %s", e.Kind, e.Subject))
	}
	return strings.Join(all, ", ")
}

// Three real processes share a limit: one that asks gets what the others have; a
// rate is changed while they run; one joins, one leaves, one is evicted; and all
// read the same of it.
func TestProcesses(t *testing.T) {
	all, seeds := three(t)
	a, b, c := all[0], all[1], all[2]
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := a.Key("k").WaitN(ctx, 90); err != nil { // more than its share of 33
		t.Fatal(err)
	}

	rate := limiter.Limit{Rate: 2000, Burst: 300}
	number, err := b.Propose(ctx, Change{Limit: &rate})
	if err != nil || number != 2 {
		t.Fatalf("charter %d, %v", number, err)
	}
	eventually(t, "all use the new burst", func() bool {
		return a.Limits().Stats().Completed == 2 && c.Limits().Stats().Completed == 2
	})
	if err := c.Key("k").WaitN(ctx, 290); err != nil {
		t.Fatal(err)
	}

	d := startProcess(t, processConfig("d", seeds, "a", "b", "c"))
	if err := d.Key("k").WaitN(ctx, 10); err != nil { // as a guest
		t.Fatal(err)
	}
	if err := d.Join(ctx, 1); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the joiner has its share", func() bool {
		s := d.Limits().Stats()
		return s.Share == 0.25 && s.Completed == s.Charter
	})
	if err := b.Leave(ctx); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if number, err = a.Evict(ctx, "c"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two have it all", func() bool {
		sa, sd := a.Limits().Stats(), d.Limits().Stats()
		return sa.Share == 0.5 && sd.Share == 0.5 && sa.Completed == number && sd.Completed == number && sa.Stranded == 0
	})
	if _, err := a.Evict(ctx, "c"); !errors.Is(err, ErrMember) {
		t.Errorf("evicted twice: %v", err)
	}
	eventually(t, "both read that it was evicted, and the same", func() bool {
		return strings.Contains(written(d), "evicted c") && written(a) == written(d)
	})
	for _, want := range []string{"started a", "started d", "charter b", "left b"} {
		if got := written(a); !strings.Contains(got, want) {
			t.Errorf("%q is not in the journal: %s", want, got)
		}
	}
	eventually(t, "each sees how the other stands", func() bool {
		s := a.standings.All(a.clock(), nil)
		return len(s) >= 2 && s[len(s)-1].Name == "d" && s[len(s)-1].Zone == "z-d" && s[len(s)-1].Share == 0.5
	})
}

// A restart under the same name mints again once a majority has told it that its
// charter is the newest, whatever its configuration says.
func TestProcessRestarts(t *testing.T) {
	all, seeds := three(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	less := limiter.Limit{Rate: 500, Burst: 50}
	if _, err := all[0].Propose(ctx, Change{Limit: &less}); err != nil {
		t.Fatal(err)
	}
	all[2].Close()
	again := startProcess(t, processConfig("c", seeds, "a", "b", "c"))
	eventually(t, "it is a member under the charter that was chosen meanwhile", func() bool {
		s := again.Limits().Stats()
		return s.Charter >= 2 && s.Completed == s.Charter && !s.Fenced && s.Cap+s.Level >= 0
	})
	if err := again.Key("k").WaitN(ctx, 10); err != nil {
		t.Fatal(err)
	}
	if err := again.Key("k").WaitN(ctx, 51); !errors.Is(err, limiter.ErrBurst) {
		t.Errorf("more than the burst that was agreed on: %v", err)
	}
}

// A process that is alone listens nowhere, and has its limits.
func TestProcessAlone(t *testing.T) {
	p := startProcess(t, ProcessConfig{Fleet: "f", Name: "a", Limits: limiter.Config{Limit: limiter.Limit{Rate: 1, Burst: 2}}})
	if !p.Key("k").AllowN(2) || p.Key("k").Allow() {
		t.Error("not two of two")
	}
	if _, err := p.Propose(t.Context(), Change{}); !errors.Is(err, ErrAlone) {
		t.Error(err)
	}
	if _, err := p.Evict(t.Context(), "b"); !errors.Is(err, ErrAlone) {
		t.Error(err)
	}
	if err := p.Join(t.Context(), 1); !errors.Is(err, ErrAlone) {
		t.Error(err)
	}
	if p.Member() != nil || p.Node() != nil || p.Journal(nil) != nil {
		t.Error("it has parts of a fleet")
	}
	if err := p.Leave(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestProcessRefuses(t *testing.T) {
	_, err := Start(ProcessConfig{
		Program: strings.Repeat("x", 65), Limits: limiter.Config{Roster: limiter.Roster{Members: []limiter.Member{{Name: "a"}}}},
		Gossip: gossip.NodeConfig{Bind: "nowhere"}, Breakers: Config{Quorum: 2}, Storms: StormConfig{Share: 2}, Journal: JournalConfig{Keep: -1},
	})
	for _, field := range []string{"Fleet:", "Program:", "Limit.Rate", "Self.Name", "Bind", "Quorum", "Share", "Keep"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not in: %v", field, err)
		}
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	c := processConfig("a", nil, "a", "b")
	c.Gossip.Bind = taken.Addr().String()
	if p, err := Start(c); err == nil {
		p.Close()
		t.Error("it listens where somebody does")
	}
}

// Close and Leave end whatever is going on, in whatever order.
func TestProcessEnds(t *testing.T) {
	all, _ := three(t)
	ended := make(chan error, 3)
	go func() { ended <- all[0].Key("k").WaitN(context.Background(), 100) }()
	go func() {
		_, err := all[1].Propose(context.Background(), Change{Reset: true})
		ended <- err
	}()
	soon, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	go func() { ended <- all[2].Leave(soon) }()
	for _, p := range all[:2] {
		p.Close()
		p.Close()
	}
	for range 3 {
		<-ended
	}
	if err := all[0].Key("k").Wait(t.Context()); !errors.Is(err, limiter.ErrClosed) {
		t.Error(err)
	}
}
