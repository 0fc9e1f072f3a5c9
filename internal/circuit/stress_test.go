// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// Oracle: no admission that begins after a Force has returned succeeds before
// its deadline, and nothing that was admitted earlier shortens it.
func TestForceUnderLoad(t *testing.T) {
	d := 2 * time.Second
	if testing.Short() {
		d = 200 * time.Millisecond
	}
	b := must(t, breaker.Config{Base: ms, Cap: 2 * ms, Successes: 2, Probes: 2, Lease: 5 * ms})
	origin := time.Now()
	now := func() time.Duration { return time.Since(origin) }

	var (
		promised atomic.Int64 // latest deadline of a Force that has returned
		broken   atomic.Pointer[string]
		forces   atomic.Int64
		admitted atomic.Int64
		wg       sync.WaitGroup
	)
	for i := range 8 {
		wg.Go(func() {
			var kept []Token
			for n := i; now() < d; n++ {
				limit := time.Duration(promised.Load())
				at := now()
				tok, ok := b.Enter()
				if !ok {
					var r Refusal
					if tok, r = b.Admit(at, uint64(n)); !r.OK() {
						if r.Until <= at {
							s := "a refusal that is already over"
							broken.Store(&s)
						}
						continue
					}
				}
				// The clock after the fact: at may be old by now, and others,
				// whose clocks were past the deadline, have closed it since.
				if after := now(); after < limit {
					s := "admitted before " + after.String() + ", forced until " + limit.String()
					broken.Store(&s)
				}
				admitted.Add(1)
				switch n % 7 {
				case 0:
					b.Failure(now(), tok, true)
				case 1: // lost
				case 2:
					b.Renew(now(), tok)
					b.Exclude(now(), tok)
				case 3:
					kept = append(kept, tok)
				default:
					b.Success(now(), tok)
				}
				if len(kept) > 20 { // late, twice
					for _, k := range kept {
						b.Success(now(), k)
						b.Success(now(), k)
					}
					kept = kept[:0]
				}
			}
		})
	}
	for i := range 3 {
		wg.Go(func() {
			for n := 1 + i; now() < d; n++ {
				at, length := now(), time.Duration(n%3+1)*ms
				b.Force(at, length, "storm")
				forces.Add(1)
				for until := int64(at + length); ; {
					old := promised.Load()
					if old >= until || promised.CompareAndSwap(old, until) {
						break
					}
				}
				time.Sleep(time.Duration(n%5+1) * ms)
			}
		})
	}
	wg.Go(func() {
		var buf []Change
		last := uint64(0)
		for now() < d {
			b.Tick(now())
			b.Snapshot(now())
			b.Life()
			b.Passing()
			b.Hasten(now())
			buf = b.Changes(buf[:0])
			for _, c := range buf {
				if c.Seq <= last {
					s := "changes out of order"
					broken.Store(&s)
				}
				last = c.Seq
			}
			time.Sleep(ms)
		}
	})
	wg.Wait()
	if s := broken.Load(); s != nil {
		t.Error(*s)
	}
	if forces.Load() == 0 || admitted.Load() == 0 {
		t.Errorf("%d forces, %d admitted: the test tested nothing", forces.Load(), admitted.Load())
	}
	// Whatever happened, it is not wedged: probes get through and close it.
	at := now() + time.Hour
	b.Tick(at)
	for at += time.Hour; !b.Closed(); at += ms {
		if tok, r := b.Admit(at, 1); r.OK() {
			b.Success(at, tok)
		}
		if at > 10*time.Hour {
			t.Fatalf("wedged: %+v", b.Snapshot(at))
		}
	}
}

// Half-open gives out at most Probes at a time, or what its pace allows, whoever asks.
func TestProbeWidthUnderLoad(t *testing.T) {
	t.Run("Probes", func(t *testing.T) {
		b := must(t, breaker.Config{Probes: 3, Successes: 1000})
		b.Trip(0, "test")
		widthUnderLoad(t, b, 3)
	})
	t.Run("pace", func(t *testing.T) {
		b := must(t, breaker.Config{Successes: 1000})
		b.Trip(0, "test")
		for range 2 {
			b.Success(sec, admit(t, b, sec))
		}
		widthUnderLoad(t, b, 4)
	})
}

func widthUnderLoad(t *testing.T, b *Breaker, width int64) {
	var out, most, given atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 500 {
				tok, r := b.Admit(sec, 0)
				if !r.OK() || !tok.Probe() {
					continue
				}
				given.Add(1)
				n := out.Add(1)
				for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
				}
				out.Add(-1)
				b.Exclude(sec, tok)
			}
		})
	}
	wg.Wait()
	if most.Load() > width || given.Load() == 0 {
		t.Fatalf("%d at once of %d", most.Load(), given.Load())
	}
}

// The closed path counts exactly, with workers, failures and a sweeper at once.
func TestClosedPathCounts(t *testing.T) {
	b := must(t, breaker.Config{NoRun: true, Ratio: 0.9})
	var attached atomic.Uint64
	b.Attach(attached.Load)
	const workers, each = 8, 2000
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				tok, _ := b.Enter()
				switch {
				case i%4 == 0:
					b.Failure(time.Duration(i)*ms, tok, true)
				case w%2 == 0:
					attached.Add(1)
				default:
					b.Success(time.Duration(i)*ms, tok)
				}
				if i%100 == 0 {
					b.Tick(time.Duration(i) * ms)
				}
			}
		})
	}
	wg.Wait()
	s := b.Snapshot(3 * sec)
	if s.Failures != workers*each/4 || s.Successes != workers*each*3/4 {
		t.Fatalf("%+v", s)
	}
}
