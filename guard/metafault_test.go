// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/internal/credit"
)

// faultyPort cannot describe message 0 while it is broken.
type faultyPort struct {
	testPort
	broken atomic.Bool
	fail   func()
}

func (p *faultyPort) Meta(m int) Meta {
	if m == 0 && p.broken.Load() {
		p.fail()
	}
	return p.testPort.Meta(m)
}

// A port that panics or exits when it is asked for a dead letter fails that write: the
// letter waits and Ready says so, the others are written, and nothing hangs at the end.
// What the writer never had keeps no credit.
func TestMetaThatDoesNotReturn(t *testing.T) {
	for name, c := range map[string]struct {
		fail func()
		says string
	}{
		"panic":  {func() { panic("no headers") }, "Port.Meta panicked: no headers"},
		"goexit": {runtime.Goexit, "Port.Meta called runtime.Goexit"},
	} {
		for _, mended := range []bool{true, false} {
			bubble(t, name, func(t *testing.T) {
				g, err := New(Config{})
				if err != nil {
					t.Fatal(err)
				}
				port, letters := &faultyPort{fail: c.fail}, &testWriter{}
				port.broken.Store(true)
				s, err := Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, port, func(context.Context, int) error {
					return Permanent(errors.New("no such order"))
				})
				if err != nil {
					t.Fatal(err)
				}
				in, ended := make(chan int), make(chan error, 1)
				go func() { ended <- s.Run(t.Context(), in) }()
				in <- 0
				time.Sleep(time.Second)
				if err := g.Ready(); err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("ready: %v", err)
				}
				in <- 1
				in <- 2
				time.Sleep(time.Minute)
				if a := s.Account(); a.Settling != 1 || a.DeadLettered != 2 || a.Check() != nil {
					t.Errorf("while it fails: %+v", a)
				}
				port.broken.Store(!mended)
				time.Sleep(2 * writeMax)
				synctest.Wait()
				want := uint64(2)
				if mended {
					want = 3
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if rep := s.End(ctx, ReasonShutdown); rep.Account.DeadLettered != want || rep.Clean() != mended {
					t.Errorf("mended %v: %+v", mended, rep)
				}
				s.mu.Lock()
				if left := s.c.budget.Balance(credit.Permanent); left != float64(500-want) {
					t.Errorf("%d letters written, credits left: %v", want, left)
				}
				s.mu.Unlock()
				if _, err := g.Close(t.Context()); err != nil {
					t.Error(err)
				}
				if err := <-ended; !errors.Is(err, ErrClosed) {
					t.Error(err)
				}
			})
		}
	}
}
