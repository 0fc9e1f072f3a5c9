// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

type op struct {
	kind int // 0 TryPut, 1 TryLease, 2 Commit, 3 Next
	id   uint32
	n    int
}

type answer struct {
	n   int
	ids [2]uint32
	err error
}

type queueState struct {
	held   [4]uint32
	n      int
	leased int
}

// fifo is a lane of at most 3 messages as one atomic object. A commit is always
// that of the open lease: the test gives it to the goroutine that leased.
var fifo = porcupine.Model{
	Init: func() any { return queueState{} },
	Step: func(state, in, out any) (bool, any) {
		s, o, a := state.(queueState), in.(op), out.(answer)
		switch o.kind {
		case 0:
			if s.n == 3 {
				return a.n == 0 && a.err == ringbuf.ErrFull, s
			}
			s.held[s.n] = o.id
			s.n++
			return a.n == 1 && a.err == nil, s
		case 1:
			return s.lease(a)
		default:
			if s.leased == 0 {
				return false, s
			}
			s.leased = 0
			copy(s.held[:], s.held[o.n:])
			s.n -= o.n
			clear(s.held[s.n:])
			if o.kind == 3 {
				return s.lease(a)
			}
			return a.err == nil, s
		}
	},
}

// lease says whether a is what a lease must give in state s, and the next state.
func (s queueState) lease(a answer) (bool, any) {
	if s.leased > 0 {
		return a.err == ringbuf.ErrLeased, s
	}
	if s.n == 0 {
		return a.err == ringbuf.ErrEmpty, s
	}
	s.leased = min(2, s.n)
	var want [2]uint32
	copy(want[:], s.held[:s.leased])
	return a.err == nil && a.n == s.leased && a.ids == want, s
}

// Each call must take effect at one instant between its start and its end.
func TestLinearizable(t *testing.T) {
	for name, open := range kinds {
		t.Run(name, func(t *testing.T) {
			for round := range 400 {
				r, err := open(ringbuf.Config{MaxCount: 3})
				if err != nil {
					t.Fatal(err)
				}
				history := record4(r.Lane(0), 2+round%3, uint64(round))
				if res := porcupine.CheckOperationsTimeout(fifo, history, 2*time.Minute); res != porcupine.Ok {
					t.Fatalf("round %d: %v: %v", round, res, history)
				}
			}
		})
	}
}

func record4(l *ringbuf.Lane[msg], workers int, seed uint64) []porcupine.Operation {
	logs := make([][]porcupine.Operation, workers)
	start := time.Now()
	var wg sync.WaitGroup
	for g := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(g)))
			dst := make([]msg, 2)
			do := func(o op, f func() answer) answer {
				call := time.Since(start)
				a := f()
				logs[g] = append(logs[g], porcupine.Operation{
					ClientId: g, Input: o, Call: int64(call), Output: a, Return: int64(time.Since(start)),
				})
				if rng.IntN(4) == 0 {
					runtime.Gosched()
				}
				return a
			}
			for i := range 30 {
				if rng.IntN(2) == 0 {
					id := uint32(g*1000 + i + 1)
					do(op{kind: 0, id: id}, func() answer {
						n, err := l.TryPut(msg{seq: id})
						return answer{n: n, err: err}
					})
					continue
				}
				var s ringbuf.Lease[msg]
				leased := func(err error) answer {
					a := answer{n: s.Len(), err: err}
					for k, m := range dst[:a.n] {
						a.ids[k] = m.seq
					}
					return a
				}
				got := do(op{kind: 1}, func() (a answer) {
					s, a.err = l.TryLease(dst)
					return leased(a.err)
				})
				// One message stays, so that Next need not wait.
				for got.err == nil && got.n == 2 && rng.IntN(2) == 0 {
					n := rng.IntN(2)
					got = do(op{kind: 3, n: n}, func() (a answer) {
						s, a.err = s.Next(context.Background(), n, dst)
						return leased(a.err)
					})
				}
				if got.err == nil {
					n := rng.IntN(got.n + 1)
					do(op{kind: 2, n: n}, func() answer { return answer{err: s.Commit(n)} })
				}
			}
		})
	}
	wg.Wait()
	return slices.Concat(logs...)
}

// room is the budget of a ring of 256 as one atomic object: how many messages all
// lanes hold.
var room = porcupine.Model{
	Init: func() any { return 250 },
	Step: func(state, in, out any) (bool, any) {
		held, a := state.(int), out.(answer)
		switch in.(op).kind {
		case 0:
			if held == 256 {
				return a.n == 0 && a.err == ringbuf.ErrFull, held
			}
			return a.n == 1 && a.err == nil, held + 1
		case 2:
			return a.err == nil, held - 1
		default:
			return a.n == held, held
		}
	},
}

// What one lane has in reserve is not missing to another, at any instant: each
// lane may have up to 8, which is more than the ring has room for.
func TestReserveIsLinearizable(t *testing.T) {
	for name, open := range kinds {
		t.Run(name, func(t *testing.T) {
			for round := range 400 {
				r, err := open(ringbuf.Config{MaxCount: 256})
				if err != nil {
					t.Fatal(err)
				}
				history := recordRoom(t, r, 2+round%3, uint64(round))
				if res := porcupine.CheckOperationsTimeout(room, history, 2*time.Minute); res != porcupine.Ok {
					t.Fatalf("round %d: %v: %v", round, res, history)
				}
				if _, _, err := r.Audit(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// recordRoom gives each worker a lane of r, which holds 250 messages.
func recordRoom(t *testing.T, r *ringbuf.Ring[msg], workers int, seed uint64) []porcupine.Operation {
	for i := range 250 {
		mustPut(t, r.Lane(uint64(i%workers)), msg{})
	}
	logs := make([][]porcupine.Operation, workers)
	start := time.Now()
	var wg sync.WaitGroup
	for g := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(g)))
			l, dst := r.Lane(uint64(g)), make([]msg, 1)
			for range 25 {
				o, a := op{kind: []int{0, 0, 0, 2, 2, 4}[rng.IntN(6)]}, answer{}
				call := time.Since(start)
				switch o.kind {
				case 0:
					a.n, a.err = l.TryPut(msg{})
				case 2:
					var s ringbuf.Lease[msg]
					if s, a.err = l.TryLease(dst); a.err == nil {
						a.err = s.Commit(1)
					}
				case 4:
					a.n = r.Stats().Count
				}
				logs[g] = append(logs[g], porcupine.Operation{
					ClientId: g, Input: o, Call: int64(call), Output: a, Return: int64(time.Since(start)),
				})
				if rng.IntN(4) == 0 {
					runtime.Gosched()
				}
			}
		})
	}
	wg.Wait()
	return slices.Concat(logs...)
}
