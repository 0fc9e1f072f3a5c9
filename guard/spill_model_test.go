// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// Whatever happens, nothing is lost, and without a crash nothing is handled twice or out
// of order; after the last outage all drains in a stated time.
func TestSpillModel(t *testing.T) {
	root := spillRoot(t)
	runs := 0
	rapid.Check(t, func(rt *rapid.T) {
		runs++
		dir := filepath.Join(root, strconv.Itoa(runs))
		synctest.Test(t, func(*testing.T) { checkSpillModel(rt, dir) })
	})
}

func checkSpillModel(t *rapid.T, dir string) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	p := Policy{
		Spill: true, Window: rapid.SampledFrom([]int{1, 5, 40, 1024}).Draw(t, "window"),
		Order: rapid.SampledFrom([]Order{OrderSource, OrderKey, OrderNone}).Draw(t, "order"),
	}
	if p.Order != OrderSource && p.Window > 4 {
		p.Workers = rapid.SampledFrom([]int{1, 3}).Draw(t, "workers")
	}
	bytes := rapid.SampledFrom([]int64{0, 64 << 10}).Draw(t, "bytes")
	q := newQueue(t, filepath.Join(dir, "0"), Config{SpillBytes: bytes, Policy: p})
	q.open()
	crashes := 0
	for range rapid.IntRange(1, 12).Draw(t, "steps") {
		switch rapid.SampledFrom([]string{"send", "send", "down", "up", "sleep", "end", "restart", "crash"}).Draw(t, "op") {
		case "send":
			q.send(rapid.SampledFrom([]int{1, 10, 300, 800}).Draw(t, "n"))
		case "down":
			q.setDown(true)
		case "up":
			q.setDown(false)
		case "sleep":
			time.Sleep(rapid.SampledFrom([]time.Duration{time.Millisecond, 100 * time.Millisecond, 3 * time.Second, time.Minute}).Draw(t, "d"))
		case "end":
			q.close(rapid.SampledFrom([]Reason{ReasonShutdown, ReasonRebalance}).Draw(t, "why"), false)
			q.open()
		case "restart":
			q.close(ReasonShutdown, true)
			q.open()
		case "crash": // what the disk and the broker have at one instant is all that is left
			synctest.Wait()
			crashes++
			q.settle(false)
			data, err := os.ReadFile(filepath.Join(q.dir, "spill.db"))
			if err != nil {
				t.Fatal(err)
			}
			acked := q.acked
			before := make(map[int]bool)
			for m := range q.out {
				before[m] = true
			}
			q.close(ReasonRebalance, true)
			for m := range before { // acked after the instant
				if !slices.Contains(q.ready, m) {
					q.ready = append(q.ready, m)
				}
			}
			slices.Sort(q.ready)
			q.acked = acked
			q.dir = filepath.Join(dir, strconv.Itoa(crashes))
			if err := errors.Join(os.Mkdir(q.dir, 0o700), os.WriteFile(filepath.Join(q.dir, "spill.db"), data, 0o600)); err != nil {
				t.Fatal(err)
			}
			q.open()
		}
		if err := q.s.Account().Check(); err != nil {
			t.Fatal(err)
		}
	}
	q.setDown(false)
	q.drain(2 * time.Minute)
	q.counts(1 + crashes)
	for key := range 8 {
		ofKey := func(a int) bool { return p.Order == OrderKey && a%8 != key }
		if got := slices.DeleteFunc(slices.Clone(q.handled), ofKey); p.Order != OrderNone && crashes == 0 && !slices.IsSorted(got) {
			t.Fatalf("not in order: %v", got)
		}
	}
	q.close(ReasonShutdown, true)
}

// Ten minutes of an outage at 5,000 messages a second: the memory stays flat, nothing is
// lost, and the drain is in order.
func TestSpillLongOutage(t *testing.T) {
	n, dir := 20_000, spillRoot(t)
	switch {
	case RaceEnabled:
		n = 5_000
	case os.Getenv("STORMGUARD_FULL") != "":
		n, dir = 3_000_000, t.TempDir()
	}
	bubble(t, "", func(t *testing.T) {
		q := newQueue(t, filepath.Join(dir, "d"), Config{SpillBytes: 2 << 30, Policy: Policy{Spill: true}})
		q.body = 256
		q.open()
		q.setDown(true)
		heap := func() uint64 {
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		var at [2]uint64 // after a tenth of the outage, and at its end
		for i := range 100 {
			q.send(n / 100)
			time.Sleep(6 * time.Second)
			q.settle(false)
			if i == 9 {
				at[0] = heap()
			}
		}
		at[1] = heap()
		if a := q.s.Account(); a.Unsettled() != n || q.acked < n-10 {
			t.Errorf("%d messages, %d acked at the broker: %+v", n, q.acked, a)
		}
		if most := at[0] + 32<<20; at[1] > most {
			t.Errorf("the heap grew from %d to %d bytes", at[0], at[1])
		}
		q.setDown(false)
		began := time.Now()
		q.drain(time.Hour)
		t.Logf("%d messages: heap %d KiB and %d KiB; drained within %v", n, at[0]>>10, at[1]>>10, time.Since(began))
		q.counts(1)
		if !slices.IsSorted(q.handled) {
			t.Error("not in order")
		}
		q.close(ReasonShutdown, true)
	})
}
