// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// op is one event of a simulated life: what happens, and how much of it.
type op struct {
	what string
	n    int
}

var happenings = []string{
	"publish", "publish", "publish", "poison", "wait", "wait", "wait", "long wait", "down", "up",
	"revoke", "revoke eagerly", "kill", "restart", "duplicate", "reorder", "redeliver", "refuse acks", "take acks",
	"pause", "resume", "force open", "force closed", "letters down", "letters up", "letters unsure", "letters slow",
	"grant", "slow handler", "quick handler", "delay", "panic", "permanent", "backoff", "quarantine", "release",
}

// life is a guarded queue to which things happen.
type life struct {
	b       *Broker
	g       *guard.Guard
	h       *Handler
	order   guard.Order
	numbers uint64
	poison  map[uint64]bool
	allowed map[uint64]bool // may be dead-lettered
	kept    map[string]bool // keys that were in quarantine once

	mu     sync.Mutex
	served []served
}

const (
	lifeAttempts = 12
	lifePatience = 10 * time.Second
)

// live runs ops against a fresh source and returns what is wrong. It runs in a
// bubble, so it must not fail a rapid.T.
func live(order guard.Order, workers int, cfg ConsumerConfig, feed bool, ops []op) error {
	l := &life{b: NewBroker(), h: new(Handler), order: order, poison: make(map[uint64]bool), allowed: make(map[uint64]bool), kept: make(map[string]bool)}
	policy := guard.Policy{
		Order: order, Workers: workers, Timeout: 20 * time.Second,
		Retry: guard.Retry{Attempts: lifeAttempts, Base: 10 * time.Millisecond, Max: time.Second, Patience: lifePatience},
	}
	var err error
	if l.g, err = guard.New(guard.Config{Policy: policy}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() {
		ran <- l.b.Run(ctx, l.g, queueName, Guarded{Consumer: cfg, Feed: feed, Opened: l.opened}, l.h.HandleMessage)
	}()
	err = l.happen(ops)
	if err == nil {
		err = l.heal()
	}
	l.h.Up()
	cancel()
	end, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	err = errors.Join(err, <-ran)
	_, closeErr := l.g.Close(end)
	return errors.Join(err, closeErr, l.check())
}

func (l *life) opened(s *guard.Source[*Message], e *Epoch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.served = append(l.served, served{s: s, e: e})
}

func (l *life) happen(ops []op) error {
	for i, o := range ops {
		l.do(o)
		synctest.Wait()
		if err := l.account(); err != nil {
			return fmt.Errorf("after step %d, %s %d: %w", i, o.what, o.n, err)
		}
	}
	return nil
}

func (l *life) publish(n int) {
	for range n {
		l.numbers++
		l.b.Publish(queueName, Message{Key: fmt.Sprintf("key-%d", l.numbers%5), Body: Body(l.numbers, 0)})
	}
}

func (l *life) do(o op) {
	letters := l.b.DeadLetters(queueName)
	some := func() uint64 { return 1 + uint64(o.n)*7919%max(l.numbers, 1) }
	each := func(f func(guard.Control)) {
		for _, s := range l.g.Sources() {
			f(s)
		}
	}
	switch o.what {
	case "publish":
		l.publish(o.n)
	case "poison":
		l.poison[l.numbers+1], l.allowed[l.numbers+1] = true, true
		l.h.Poison(l.numbers + 1)
		l.publish(1 + o.n/10)
	case "permanent":
		l.allowed[l.numbers+1] = true
		l.h.On(l.numbers+1, Fail(errBroken), Fail(guard.Permanent(errBroken)))
		l.publish(1)
	case "panic":
		l.h.On(l.numbers+1, Panic("boom"), Goexit)
		l.publish(1)
	case "backoff":
		l.h.On(l.numbers+1, func(context.Context) error {
			return guard.Backoff(errBroken, time.Now().Add(time.Duration(o.n)*time.Second))
		})
		l.publish(1)
	case "wait":
		time.Sleep(time.Duration(o.n*o.n) * 10 * time.Millisecond)
	case "long wait":
		time.Sleep(time.Duration(o.n) * 10 * time.Second)
	case "down":
		l.h.Down(nil)
	case "up":
		l.h.Up()
	case "revoke":
		l.b.Revoke(queueName, false)
	case "revoke eagerly":
		l.b.Revoke(queueName, true)
	case "kill":
		l.b.Kill(queueName)
	case "restart":
		l.b.Stop()
		time.Sleep(time.Duration(o.n) * 100 * time.Millisecond)
		l.b.Start()
	case "duplicate":
		l.b.Duplicate(queueName, some())
	case "reorder":
		l.b.Reorder(queueName, rand.New(rand.NewPCG(uint64(o.n), 1)).Shuffle)
	case "redeliver":
		l.b.Redeliver(queueName, some())
	case "refuse acks":
		l.b.RefuseAcks(queueName, errBroken)
	case "take acks":
		l.b.RefuseAcks(queueName, nil)
	case "pause":
		each(func(c guard.Control) { c.Pause(0) })
	case "resume":
		each(guard.Control.Resume)
	case "force open":
		each(func(s guard.Control) { _ = s.ForceOpen(time.Duration(o.n) * time.Second) })
	case "force closed":
		each(func(s guard.Control) { _ = s.ForceClosed() })
	case "letters down":
		letters.Fail(errWriterDown)
	case "letters up":
		letters.Fail(nil)
		letters.Slow(0)
	case "letters unsure":
		letters.LoseConfirms(o.n % 3)
	case "letters slow":
		letters.Slow(time.Duration(o.n) * time.Second)
	case "grant":
		each(func(s guard.Control) { s.GrantCredits(float64(o.n)) })
	case "slow handler":
		l.h.Delay(time.Duration(o.n) * 20 * time.Millisecond)
	case "quick handler":
		l.h.Delay(0)
	case "quarantine", "release":
		rule := dlq.Rule{Kind: dlq.RuleKey, Value: fmt.Sprintf("key-%d", o.n%5)}
		if o.what == "release" {
			_ = l.g.Quarantine().Remove(rule, "")
			return
		}
		l.kept[rule.Value] = true
		_ = l.g.Quarantine().Add(dlq.QuarantineEntry{Rule: rule})
	case "delay":
		l.b.Delay(queueName, time.Duration(o.n)*5*time.Millisecond)
	default:
		panic(o.what)
	}
}

// account checks every source so far, by the guard's books and the broker's.
func (l *life) account() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.served {
		a := s.s.Account()
		if err := a.Check(); err != nil {
			return err
		}
		if n := s.e.Handed(); a.Received != uint64(n) {
			return fmt.Errorf("epoch %d handed over %d messages, its source received %d: %+v", s.e.Number(), n, a.Received, a)
		}
	}
	if st := l.b.Stats(queueName); st.DoubleAcks > 0 || st.AfterEnd > 0 {
		return fmt.Errorf("a port was misused: %+v", st.Counts)
	}
	return nil
}

// heal makes everything well, and waits until nothing is left. New messages
// trickle in, as they do: an ordered source needs them to tell poison.
func (l *life) heal() error {
	for _, what := range []string{"up", "take acks", "resume", "force closed", "letters up", "quick handler", "delay"} {
		l.do(op{what: what})
	}
	for i := range 600 {
		if i < 300 {
			l.publish(1)
		}
		time.Sleep(time.Duration(1+i/10) * time.Second)
		synctest.Wait()
		if err := l.account(); err != nil {
			return fmt.Errorf("while healing: %w", err)
		}
		l.do(op{what: "grant", n: 10})
		if i >= 20 && len(l.b.Pending(queueName)) == 0 {
			return nil
		}
	}
	st := guard.State{}
	for _, s := range l.g.Sources() {
		st = s.State()
	}
	pending := l.b.Pending(queueName)
	e := l.served[len(l.served)-1].e
	return fmt.Errorf("not drained: %d pending, first %v; account %+v, room %d of %d, holds %+v; broker %+v, epoch %d paused %t, %d unacked",
		len(pending), pending[:min(len(pending), 10)], st.Account, st.Room, st.Window, st.Holds, l.b.Stats(queueName), e.num, e.paused, e.unacked)
}

func (l *life) check() error {
	var dead []uint64
	var unproven []Call // last calls of healthy messages that were dead-lettered by a guess
	for _, r := range l.b.DeadLetters(queueName).Records() {
		n := Number(r.Body)
		dead = append(dead, n)
		if l.allowed[n] {
			continue
		}
		if r.Reason == dlq.ReasonQuarantine && l.kept[string(r.Key)] {
			continue
		}
		last, proven, err := l.deserved(n, r.LastFailed)
		if err != nil {
			return fmt.Errorf("message %d is healthy and was dead-lettered (%s, %d attempts): %w", n, r.Reason, r.Attempts, err)
		}
		if !proven {
			unproven = append(unproven, last)
		}
	}
	return errors.Join(
		l.account(), l.guesses(unproven),
		l.h.CheckNothingLost(l.numbers, dead...), l.inOrder(), l.h.CheckOverlap(l.order),
	)
}

// inOrder checks that only messages that proved life succeeded before one in front of
// them. The guard counts these.
func (l *life) inOrder() error {
	proofs := 0
	for _, s := range l.served {
		proofs += int(s.s.State().Tally.Overtaken)
	}
	if n := l.h.overtakers(l.order); n > proofs {
		return fmt.Errorf("%d messages overtook others, the guard counts %d: %w", n, proofs, l.h.CheckOrder(l.order))
	}
	return nil
}

// deserved checks that a healthy message was dead-lettered by the rules: it had all its
// attempts, over epochs, and after one of them others succeeded, and it failed twice more.
// Where that is not so it was taken for poison without proof. last is its last call.
func (l *life) deserved(n uint64, lastFailed time.Time) (last Call, proven bool, err error) {
	var failed []Call
	for _, c := range l.h.CallsOf(n) {
		if c.End.After(lastFailed) {
			break // a later epoch's, if the ack was lost with its own
		}
		if c.Outcome != Succeeded {
			failed = append(failed, c)
		}
	}
	if len(failed) < lifeAttempts {
		return last, false, fmt.Errorf("%d failed calls, allowed are %d", len(failed), lifeAttempts)
	}
	last = failed[len(failed)-1]
	from, to := failed[0].End, failed[len(failed)-2].End
	for _, c := range l.h.Calls() {
		if c.Outcome == Succeeded && !c.End.Before(from) && !c.End.After(to) {
			return last, true, nil
		}
	}
	return last, false, nil
}

func (l *life) successes(epoch uint64) (all []Call) {
	for _, c := range l.h.Calls() {
		if c.Epoch == epoch && c.Outcome == Succeeded {
			all = append(all, c)
		}
	}
	return all
}

// guesses checks that an outage costs a handful of healthy messages at most: of
// those taken for poison without proof, with nothing that succeeded in between,
// each came twice as long after the last.
func (l *life) guesses(unproven []Call) error {
	slices.SortFunc(unproven, func(a, b Call) int { return a.End.Compare(b.End) })
	least := 2 * lifePatience
	wait := least
	for i, c := range unproven {
		if i == 0 || unproven[i-1].Epoch != c.Epoch {
			continue
		}
		before := unproven[i-1]
		between := func(ok Call) bool { return !ok.End.Before(before.End) && !ok.End.After(c.End) }
		if slices.ContainsFunc(l.successes(c.Epoch), between) {
			wait = least
			continue
		}
		if gap := c.End.Sub(before.End); gap < wait {
			return fmt.Errorf("healthy messages %d and %d were taken for poison within %s, and nothing succeeded in between", before.Seq, c.Seq, gap)
		}
		wait *= 2
	}
	return nil
}

// Whatever happens to a source, its books add up at every step; and once all is
// well again nothing is lost, out of order, or dead-lettered without need.
func TestLife(t *testing.T) {
	steps := rapid.Custom(func(t *rapid.T) op {
		return op{rapid.SampledFrom(happenings).Draw(t, "what"), rapid.IntRange(1, 20).Draw(t, "n")}
	})
	rapid.Check(t, func(rt *rapid.T) {
		order := rapid.SampledFrom([]guard.Order{guard.OrderSource, guard.OrderKey, guard.OrderNone}).Draw(rt, "order")
		workers := 1
		if order != guard.OrderSource {
			workers = rapid.SampledFrom([]int{1, 3}).Draw(rt, "workers")
		}
		cfg := ConsumerConfig{
			Prefetch: rapid.SampledFrom([]int{0, 10, 100}).Draw(rt, "prefetch"),
			Buffer:   rapid.SampledFrom([]int{0, 8}).Draw(rt, "buffer"),
		}
		feed := rapid.Bool().Draw(rt, "feed")
		ops := rapid.SliceOfN(steps, 20, 60).Draw(rt, "ops")
		var err error
		synctest.Test(t, func(*testing.T) {
			time.Sleep(time.Millisecond)
			err = live(order, workers, cfg, feed, ops)
		})
		if err != nil {
			rt.Fatal(err)
		}
	})
}
