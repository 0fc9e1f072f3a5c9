// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// The processes that hold messages are this program, as they are the command.
func TestMain(m *testing.M) {
	if spec := os.Getenv(gcEnv); spec != "" {
		if err := runHolder(spec, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if spec := os.Getenv(memberEnv); spec != "" {
		if err := runMember(spec, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// Each group once and tiny: it says that all cases run to their end and that
// the names which scripts read are there. Not parallel: the cases are greedy.
func TestGroups(t *testing.T) {
	for _, tt := range []struct {
		group  Group
		ratios []string
	}{
		{noise, []string{"chain", "throughput"}},
		{hotpath, []string{"chain", "failsafe", "loop", "func8_watermill", "func8_failsafe", "router", "router_throttled"}},
		{newRing(1 << 10), []string{"spsc_batch64", "lanes8_batch64", "spsc_single", "gc_ms_1m_held", "gc_ms_1m_held_pointers", "gc_ms_nothing_held"}},
		{newDurable(1 << 9), []string{"bbolt_256b_1", "bbolt_256b_256", "bbolt_1k_32", "bbolt_1k_256", "raftwal_1k_256", "pebble_256b_256", "drain_256b", "drain_1k", "drain_bbolt_256b"}},
		{limit, []string{"xrate_seq", "xrate_par", "xrate_keyed", "xrate_alone", "xrate_deny", "grpc_times"}},
		{newJetStream(1500, math.Inf(1)), []string{"guarded_raw", "raw_raw", "guarded_raw_10us"}},
	} {
		t.Run(tt.group.Name, func(t *testing.T) {
			temp := t.TempDir()
			t.Setenv("TMPDIR", temp)
			rep, err := tt.group.Run(t.Context(), Settings{Rounds: 1, Time: time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			wantRatios(t, rep, tt.ratios)
			if left, _ := filepath.Glob(filepath.Join(temp, "*")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// The same with real brokers, each started if it does not run; a machine that
// cannot run one skips it and says so.
func TestBrokerGroups(t *testing.T) {
	for _, tt := range []struct {
		kind   brokers.Kind
		group  Group
		ratios []string
	}{
		{brokers.Kafka, newKafka(2000, 400, math.Inf(1)), []string{"guarded_raw", "guarded_rawcoalesced", "raw_raw", "guarded_raw_10us", "cpu_guarded_raw"}},
		{brokers.Postgres, onceGroup, []string{"bolt", "bolt_refuse", "bolt_32", "postgres", "postgres_32", "nats", "nats_32", "bolt_ms", "postgres_ms", "nats_ms"}},
		{brokers.RabbitMQ, newRabbitMQ(1500, math.Inf(1)), []string{"guarded_raw", "raw_raw", "guarded_raw_10us"}},
	} {
		t.Run(tt.group.Name, func(t *testing.T) {
			brokers.ForTest(t, tt.kind)
			tt.group.Passes = 1
			rep, err := tt.group.Run(t.Context(), Settings{Rounds: 1, Time: time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			wantRatios(t, rep, tt.ratios)
		})
	}
}

func wantRatios(t *testing.T, rep Report, names []string) {
	t.Helper()
	for _, name := range names {
		if !slices.ContainsFunc(rep.Ratios, func(r RatioResult) bool { return r.Name == name && r.Median > 0 }) {
			t.Errorf("no %s in %+v", name, rep.Ratios)
		}
	}
}

// A course must not be done before each lane had its messages, and must say when
// one had too few or too many.
func TestCourse(t *testing.T) {
	t.Parallel()
	for handled, wrong := range map[int]bool{9: true, 10: false, 11: true} {
		c := newCourse(2, 10, 0)
		var lanes sync.WaitGroup
		for lane := range 2 {
			lanes.Go(func() {
				for range []int{10, handled}[lane] {
					c.handle(lane)
				}
			})
		}
		if err := c.ready(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		select {
		case <-c.done:
			t.Error("a lane was done before the course began")
		default:
		}
		within := time.Minute
		if handled < 10 { // it does not end by itself
			within = 100 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(t.Context(), within)
		if err := c.run(ctx, nil); (err != nil) != (handled < 10) {
			t.Errorf("%d of 10 handled: %v", handled, err)
		}
		cancel()
		lanes.Wait()
		if err := c.check(); (err != nil) != wrong {
			t.Errorf("%d of 10 handled: %v", handled, err)
		}
	}
	ended := make(chan error, 1)
	ended <- io.ErrUnexpectedEOF
	if err := newCourse(1, 1, 0).ready(t.Context(), ended); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a consumer that ended: %v", err)
	}
}

// The table must name every group, under the name that it has itself.
func TestGroupsAreListed(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, g := range groups {
		if err := g.validate(); err != nil {
			t.Errorf("%s: %v", g.Name, err)
		}
		seen[g.Name] = true
	}
	for _, name := range []string{"hotpath", "ring", "spill", "limiter", "jetstream", "kafka", "rabbitmq"} {
		if !seen[name] {
			t.Errorf("no group %q", name)
		}
	}
}

func TestCodecReadsWhatItWrote(t *testing.T) {
	t.Parallel()
	want := newRecord(1 << 20)
	got, err := recordCodec{}.Decode(recordCodec{}.Append(nil, want))
	if err != nil || got.seq != want.seq || string(got.key) != string(want.key) || string(got.value) != string(want.value) || got.headers != want.headers {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}

// A holder must hold what it was told to, and say how long a collection takes.
func TestHolder(t *testing.T) {
	t.Parallel()
	for kind, held := range map[string]int{"slabs": 300, "pointers": 300, "nothing": 0} {
		var out strings.Builder
		if err := runHolder(kind+" 300", strings.NewReader("1\n3\n"), &out); err != nil {
			t.Fatal(err)
		}
		var n, one, three int
		if _, err := fmt.Sscan(out.String(), &n, &one, &three); err != nil || n != held || one <= 0 || three <= 0 {
			t.Errorf("%s: %q, %v; want %d held and two times", kind, out.String(), err, held)
		}
	}
	for spec, want := range map[string]string{"slabs": "want a kind and a number", "air 1": `"air"`} {
		if err := runHolder(spec, strings.NewReader(""), new(strings.Builder)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", spec, err, want)
		}
	}
}

// A flow must neither let more through than its window nor wait for ever.
func TestFlow(t *testing.T) {
	t.Parallel()
	f, todo := newFlow(), make(chan struct{}, 2*routerWindow)
	defer close(todo)
	for range 4 {
		go func() {
			for range todo {
				f.handle()
			}
		}()
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, n := range []int{1, 0, routerWindow, 5000} {
		published := int64(0)
		err := f.run(ctx, n, func() error {
			if on := published - f.handled.Load(); on >= routerWindow {
				t.Errorf("%d on their way", on)
			}
			published++
			todo <- struct{}{}
			return nil
		})
		if err != nil || f.handled.Load() != int64(n) {
			t.Fatalf("%d of %d handled: %v", f.handled.Load(), n, err)
		}
	}
}
