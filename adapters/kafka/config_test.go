// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

func nothing(context.Context, *sarama.ConsumerMessage) error { return nil }

func TestCheckRefusesWhatCannotBeKept(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(*sarama.Config)
		policy  guard.Policy
		opts    []Option
		passive bool
		want    []string // none: it is taken
	}{
		{"safe", func(*sarama.Config) {}, guard.Policy{}, nil, false, nil},
		{"sarama's own defaults", func(c *sarama.Config) { *c = *sarama.NewConfig() }, guard.Policy{}, nil, false, []string{"Consumer.Offsets.Initial: OffsetNewest", "WithSkipToNewest"}},
		{"accepted", func(c *sarama.Config) { *c = *sarama.NewConfig() }, guard.Policy{}, []Option{WithSkipToNewest()}, false, nil},
		{"newest without reset", func(c *sarama.Config) {
			c.Consumer.Offsets.Initial, c.Consumer.Group.ResetInvalidOffsets = sarama.OffsetNewest, false
		}, guard.Policy{}, nil, false, nil},
		{"the default timeout in a short rebalance", func(c *sarama.Config) { c.Consumer.Group.Rebalance.Timeout = 30 * time.Second }, guard.Policy{}, nil, false,
			[]string{"Policy.Timeout: 30s is more than the 27.8s", "set the rebalance timeout to 32.2s"}},
		{"a short timeout in it", func(c *sarama.Config) { c.Consumer.Group.Rebalance.Timeout = 30 * time.Second }, guard.Policy{Timeout: 27 * time.Second}, nil, false, nil},
		{"no time at all", func(c *sarama.Config) { c.Consumer.Group.Rebalance.Timeout = 2 * time.Second }, guard.Policy{Timeout: time.Second}, nil, false,
			[]string{"Consumer.Group.Rebalance.Timeout: 2s leaves nothing"}},
		{"no timeout", func(*sarama.Config) {}, guard.Policy{NoTimeout: true}, nil, false, []string{"Policy.NoTimeout"}},
		{"nobody commits", func(c *sarama.Config) { c.Consumer.Offsets.AutoCommit.Enable = false }, guard.Policy{}, nil, false, []string{"Consumer.Offsets.AutoCommit.Enable"}},
		{"the handler commits", func(c *sarama.Config) { c.Consumer.Offsets.AutoCommit.Enable = false }, guard.Policy{}, nil, true, nil},
		{"no headers", func(c *sarama.Config) { c.Version = sarama.V0_10_2_0 }, guard.Policy{}, nil, false, []string{"Version: 0.10.2.0"}},
		{"ordered workers", func(*sarama.Config) {}, guard.Policy{Workers: 4}, nil, false, []string{"Policy.Workers: 4 workers cannot keep the order"}},
		{"a spill without a disk", func(*sarama.Config) {}, guard.Policy{Spill: true}, nil, false, []string{"Policy.Spill: needs guard.Config.SpillDir"}},
		{"a spill of a wrapped handler", func(*sarama.Config) {}, guard.Policy{Spill: true}, nil, true, []string{"Policy.Spill: not with WrapHandler"}},
		{"all at once", func(c *sarama.Config) {
			*c = *sarama.NewConfig()
			c.Consumer.Offsets.AutoCommit.Enable = false
		}, guard.Policy{Workers: 4, NoTimeout: true}, []Option{WithStopTimeout(-1), WithLogger(nil)}, false,
			[]string{"OffsetNewest", "AutoCommit", "Workers", "NoTimeout", "WithStopTimeout: -1ns", "WithLogger"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := testConfig()
			c.change(cfg)
			g := adaptertest.Guard(t, guard.Config{})
			check := Check
			if c.passive {
				check = CheckHandler
			}
			err := check(g, cfg, append(c.opts, WithPolicy(c.policy))...)
			if (err == nil) != (c.want == nil) {
				t.Fatalf("%v", err)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in: %v", want, err)
				}
			}
			if err != nil && !strings.Contains(c.name, "workers") && !errors.Is(err, ErrUnsuitable) {
				t.Errorf("no ErrUnsuitable: %v", err)
			}
		})
	}
	if err := Check(nil, nil, WithStopTimeout(-1)); err == nil || !strings.Contains(err.Error(), "guard") || !strings.Contains(err.Error(), "configuration") || !strings.Contains(err.Error(), "WithStopTimeout") {
		t.Errorf("%v", err)
	}
}

// foreignSession is a session that is not sarama's.
type foreignSession struct{ sarama.ConsumerGroupSession }

func (foreignSession) Context() context.Context   { return context.Background() }
func (foreignSession) Claims() map[string][]int32 { return nil }

func TestSetupOfAForeignSessionAsksForTheConfiguration(t *testing.T) {
	g := adaptertest.Guard(t, guard.Config{})
	err := Wrap(g, nothing).Setup(foreignSession{})
	if !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "WithConfig") {
		t.Errorf("%v", err)
	}
	h := Wrap(g, nothing, WithConfig(testConfig()))
	if err := h.Setup(&foreignSession{}); err != nil {
		t.Errorf("%v", err)
	}
	if err := Wrap(nil, nil).Setup(foreignSession{}); err == nil || !strings.Contains(err.Error(), "guard") || !strings.Contains(err.Error(), "handler") {
		t.Errorf("%v", err)
	}
	if err := WrapHandler(g, nil, WithConfig(testConfig())).Setup(foreignSession{}); err == nil || !strings.Contains(err.Error(), "handler") {
		t.Errorf("%v", err)
	}
	if err := Fail(foreignSession{}, &sarama.ConsumerMessage{}, errDown); !errors.Is(err, errNotWrapped) {
		t.Errorf("%v", err)
	}
}

// What is wrong with a configuration, and a closed Guard, come out of Consume.
func TestConsumeReturnsWhatSetupRefuses(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Timeout: 39 * time.Second}})
	cfg := testConfig()
	cfg.Consumer.Offsets.Initial = sarama.OffsetNewest
	m := r.join(cfg, Wrap(g, nothing))
	<-m.done
	if err := m.last; !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "OffsetNewest") || !strings.Contains(err.Error(), "Policy.Timeout: 39s is more than the 37.8s") {
		t.Errorf("%v", err)
	}
	if _, err := g.Close(adaptertest.Context(t)); err != nil {
		t.Fatal(err)
	}
	m = r.join(testConfig(), Wrap(g, nothing, WithPolicy(guard.Policy{})))
	<-m.done
	if !errors.Is(m.last, guard.ErrClosed) {
		t.Errorf("%v", m.last)
	}
}

func TestLanesOfKeys(t *testing.T) {
	c := &claim{seed: seed}
	m := func(offset int64, key []byte) *sarama.ConsumerMessage {
		return &sarama.ConsumerMessage{Offset: offset, Key: key}
	}
	if c.Lane(m(1, []byte("a"))) != c.Lane(m(2, []byte("a"))) {
		t.Error("one key, two lanes")
	}
	if c.Lane(m(1, []byte("a"))) == c.Lane(m(1, []byte("b"))) {
		t.Error("two keys, one lane")
	}
	if c.Lane(m(1, nil)) == c.Lane(m(2, nil)) {
		t.Error("messages without a key share a lane")
	}
	if c.Lane(m(1, []byte{})) != c.Lane(m(2, []byte{})) {
		t.Error("an empty key is a key")
	}
	c.key = func(m *sarama.ConsumerMessage) []byte { return []byte("all") }
	if c.Lane(m(1, nil)) != c.Lane(m(2, []byte("a"))) {
		t.Error("WithKey is not asked")
	}
}

// untouched is a context whose Done must not be asked for: the guard's own
// contexts cost nothing until somebody looks at them.
type untouched struct{ context.Context }

func (untouched) Done() <-chan struct{} { panic("the hot path looked at the context") }

func TestTheHotPathLeavesTheContextAlone(t *testing.T) {
	ss := &session{h: &handler{handle: nothing}}
	if err := ss.guarded(nil)(untouched{t.Context()}, nil); err != nil {
		t.Error(err)
	}
	ss.begun, ss.timeout = time.Now(), time.Minute
	ss.yieldUntil.Store(int64(200 * time.Millisecond))
	if err := ss.guarded(nil)(t.Context(), nil); err != nil || time.Since(ss.begun) < 200*time.Millisecond {
		t.Errorf("%v, no rest for a claim that is let go", err)
	}
	if ss.yieldUntil.Load() != 0 {
		t.Error("it rests for ever")
	}
}

// A message of a claim that is revoked while it rests is not handled any more.
func TestNoCallOfARevokedClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ss := &session{begun: time.Now(), timeout: time.Minute, h: &handler{handle: func(context.Context, *sarama.ConsumerMessage) error {
			t.Error("the handler is called")
			return nil
		}}}
		ss.yieldUntil.Store(int64(time.Second))
		revoked := make(chan struct{})
		time.AfterFunc(time.Millisecond, func() { close(revoked) })
		if err := ss.guarded(revoked)(t.Context(), nil); !errors.Is(err, errMakesWay) || time.Since(ss.begun) != time.Millisecond {
			t.Errorf("%v after %v", err, time.Since(ss.begun))
		}
	})
}
