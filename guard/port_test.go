// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// logPort is the port of a log: it knows what it was handed from Size and Ack
// alone, and moves a low watermark.
type logPort struct {
	nopPort
	mu    sync.Mutex
	out   []int // announced by Size, not acked
	sized map[int]int
	acked map[int]int
	wrong []string
}

func (p *logPort) Size(m int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := p.sized[m]; n > 0 || p.acked[m] > 0 || len(p.out) > 0 && p.out[len(p.out)-1] > m {
		p.wrong = append(p.wrong, fmt.Sprintf("Size(%d) asked %d times before, out of order or after its ack", m, n))
	}
	p.sized[m]++
	p.out = append(p.out, m)
	return 1
}

func (p *logPort) Ack(m int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.acked[m]++
	p.out = slices.DeleteFunc(p.out, func(o int) bool { return o == m })
	for before := range m { // whoever was handed over before is acked or announced
		if p.sized[before] == 0 && p.acked[before] == 0 {
			p.wrong = append(p.wrong, fmt.Sprintf("%d acked before %d was announced", m, before))
		}
	}
	return nil
}

// What a port learns from Size and Ack is enough to never mark past a message
// that is unsettled.
func TestSizeAnnouncesWhatIsNotAckedAtOnce(t *testing.T) {
	for _, p := range []Policy{{}, {Order: OrderKey, Workers: 4}, {Order: OrderNone, Workers: 4}} {
		t.Run(p.Order.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g, err := New(Config{})
				if err != nil {
					t.Fatal(err)
				}
				port := &logPort{sized: map[int]int{}, acked: map[int]int{}}
				p.Retry = Retry{Base: time.Millisecond, Max: 5 * time.Millisecond}
				var mu sync.Mutex
				failed := map[int]bool{}
				s, err := Open(g, SourceConfig{Name: "s", Policy: &p, DeadLetters: &testWriter{}}, Limits{}, port, func(_ context.Context, m int) error {
					mu.Lock()
					defer mu.Unlock()
					switch {
					case m%101 == 7:
						return Permanent(errors.New("hopeless"))
					case m%67 == 3 && !failed[m]:
						failed[m] = true
						return errors.New("once")
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				const n = 400
				in := make(chan int)
				go func() {
					defer close(in)
					for m := range n {
						in <- m
						if m%50 == 0 {
							time.Sleep(20 * time.Millisecond) // it comes to rest: the closed path again
						}
					}
				}()
				if err := s.Run(t.Context(), in); err != nil {
					t.Fatal(err)
				}
				s.End(t.Context(), ReasonShutdown)
				if _, err := g.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
				if len(port.wrong) > 0 || len(port.out) > 0 || len(port.acked) != n {
					t.Errorf("%d acked, %d still out, wrong: %v", len(port.acked), len(port.out), port.wrong)
				}
				if p.Workers == 0 && len(port.sized) > n*3/4 {
					t.Errorf("%d of %d were announced: the closed path was not seen", len(port.sized), n)
				}
			})
		})
	}
}
