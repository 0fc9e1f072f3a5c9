// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/limiter"
)

// While the register is away nothing changes and everything admits; a change that was
// given up is not made later, and the journal has no line of it.
func TestProcessRegisterAway(t *testing.T) {
	all, _ := three(t)
	eventually(t, "they have begun", func() bool { return all[1].Status().Configuration.Settled })
	storeOf(t).SetAway(errors.New("unplugged"))
	eventually(t, "they know", func() bool { return strings.Contains(all[1].Status().Configuration.Away, "unplugged") })
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := all[1].Set(short, Change{Reset: true}); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, fleetstate.ErrEnded) {
		t.Errorf("a change without a register: %v", err)
	}
	if err := all[1].Key("k").WaitN(t.Context(), 50); err != nil {
		t.Error(err)
	}
	storeOf(t).SetAway(nil)
	rate := limiter.Limit{Rate: 300, Burst: 30}
	eventually(t, "a change is made again", func() bool {
		_, err := all[0].Set(t.Context(), Change{Number: 1, Limit: &rate})
		return err == nil
	})
	eventually(t, "all know", func() bool {
		return all[1].Status().Configuration.Number == 2 && len(all[1].Status().Configuration.Log) == 2
	})
	if c := all[1].Status().Configuration; c.Resets != 0 || c.Log[1].Who != "a" || !strings.Contains(c.Log[1].What, "300/s") {
		t.Errorf("%+v", c)
	}
	if strings.Contains(written(all[1]), "RESET") {
		t.Errorf("written down: %s", written(all[1]))
	}
	if _, err := all[2].Set(t.Context(), Change{Number: 1, Reset: true}); !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "the newest is 2") {
		t.Errorf("upon a number that is over: %v", err)
	}
}

// readOnly is a register that this user may only read.
type readOnly struct {
	*register.Memory
	may atomic.Bool
}

func (r *readOnly) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if !r.may.Load() {
		return errors.New("permission denied")
	}
	return r.Memory.CompareAndSet(ctx, number, document)
}

// A process that cannot write what is asked for says so, until it can.
func TestProcessMayNotWrite(t *testing.T) {
	r := &readOnly{Memory: new(register.Memory)}
	var out lockedBuffer
	p, err := Start(configOf("a", nil, "a"), WithRegister(r), WithLogger(slog.New(slog.NewTextHandler(&out, nil))))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	eventually(t, "it says why it does not begin", func() bool {
		return strings.HasSuffix(p.Status().Configuration.Problem, "takes no write of this process: permission denied") &&
			strings.Contains(out.take(), "permission denied")
	})
	r.may.Store(true)
	// The register's Watch may tell of the write before the write itself has returned.
	eventually(t, "it begins, and has no problem", func() bool {
		c := p.Status().Configuration
		return c.Number == 1 && c.Problem == ""
	})
}

// hanging is a register whose writes after the first do not end by themselves.
type hanging struct {
	*register.Memory
	writing chan struct{}
}

func (r *hanging) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if number == 1 {
		return r.Memory.CompareAndSet(ctx, number, document)
	}
	r.writing <- struct{}{}
	<-ctx.Done()
	return fmt.Errorf("%w: %w", register.ErrUnknown, ctx.Err())
}

// A process that ends in the middle of a change says whether it may still be made.
func TestProcessEndsInAChange(t *testing.T) {
	for name, under := range map[string]bool{"under way": true, "not begun": false} {
		t.Run(name, func(t *testing.T) {
			r := &hanging{new(register.Memory), make(chan struct{}, 9)}
			p, err := Start(configOf("a", nil, "a"), WithRegister(r))
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			eventually(t, "it begins", func() bool { return p.Status().Configuration.Number == 1 })
			if !under {
				r.SetAway(errors.New("unplugged"))
				eventually(t, "it knows", func() bool { return p.Status().Configuration.Away != "" })
			}
			answer := make(chan error)
			go func() {
				_, err := p.Set(t.Context(), Change{Number: 1, Reset: true})
				answer <- err
			}()
			if under {
				<-r.writing
			} else {
				eventually(t, "it is asked", func() bool {
					p.mu.Lock()
					defer p.mu.Unlock()
					return len(p.asked) == 1
				})
			}
			p.Close()
			if err := <-answer; !errors.Is(err, ErrClosed) || errors.Is(err, ErrUnknown) != under || errors.Is(err, fleetstate.ErrEnded) == under {
				t.Error(err)
			}
		})
	}
}

// mute is a register whose Watch says neither a document nor an error.
type mute struct {
	*register.Memory
	speaks chan struct{}
}

func (r *mute) Watch(ctx context.Context, changed func(register.Event)) error {
	select {
	case <-r.speaks:
		return r.Memory.Watch(ctx, changed)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A register that says nothing is away.
func TestProcessRegisterMute(t *testing.T) {
	r := &mute{new(register.Memory), make(chan struct{})}
	p, err := Start(configOf("a", nil, "a"), WithRegister(r))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	eventually(t, "it says that it is away", func() bool { return strings.Contains(p.Status().Configuration.Away, "said nothing for 5s") })
	close(r.speaks)
	eventually(t, "it begins", func() bool {
		c := p.Status().Configuration
		return c.Number == 1 && c.Away == ""
	})
}

// A process that begins after its register was wiped has the configuration from its peers,
// and says why nothing can be changed.
func TestProcessRegisterWiped(t *testing.T) {
	all, seeds := three(t)
	rate := limiter.Limit{Rate: 300, Burst: 30}
	for number := range uint64(3) {
		eventually(t, "the limit is changed", func() bool {
			n, err := all[0].Set(t.Context(), Change{Limit: &rate})
			return err == nil && n >= number+2
		})
	}
	d, err := Start(configOf("d", seeds, "a", "b", "c"), WithRegister(new(register.Memory)))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	eventually(t, "it knows the newest", func() bool { return d.Status().Configuration.Number >= 4 })
	asking, cancel := context.WithCancel(t.Context())
	var asked sync.WaitGroup
	asked.Go(func() { _, _ = d.Set(asking, Change{Reset: true}) })
	defer asked.Wait()
	defer cancel()
	eventually(t, "it says why", func() bool { return strings.Contains(d.Status().Configuration.Problem, "wiped, or is an older copy") })
}

// A process is displaced before it knows whether it may mint. It does not mint when the register is
// back: the process that has its name does.
func TestDisplacedProcessStaysFenced(t *testing.T) {
	members := []string{"a", "b", "c", "d"} // d never runs, so reports do not replace the register
	a := startProcess(t, configOf("a", nil, members...))
	seeds := []string{a.Addr().String()}
	b := startProcess(t, configOf("b", seeds, members...))
	eventually(t, "they have begun", func() bool {
		return a.Status().Configuration.Settled && b.Status().Configuration.Settled
	})
	storeOf(t).SetAway(errors.New("unplugged"))
	var log lockedBuffer
	c, err := Start(configOf("c", seeds, members...), WithRegister(storeOf(t)), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	eventually(t, "it knows the configuration, and not whether it is the newest", func() bool {
		s := c.Status().Configuration
		return s.Number == 1 && s.Away != "" && !s.Settled
	})

	later := configOf("c", seeds, members...).settings()
	later.gossip.Self.Incarnation = gossip.NewIncarnation(time.UnixMilli(1<<43), 1) // c cannot go on above the last one
	d := startSettings(t, later)
	eventually(t, "it is out", func() bool {
		return errors.Is(c.Err(), ErrDisplaced) && strings.Contains(log.take(), "mints nothing")
	})
	storeOf(t).SetAway(nil)
	eventually(t, "both have read the register, and one mints", func() bool {
		return c.Status().Configuration.Away == "" && d.Status().Configuration.Settled && !d.limits.Stats().Fenced
	})
	if !c.limits.Stats().Fenced {
		t.Error("the displaced process mints")
	}
}
